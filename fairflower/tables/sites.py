"""Tables of sites: the sums that leave a site, and the encoding that they make at the server.

A site describes its table (`SiteTable`, in `Federation.encoding`). The server merges the sums
(`merge_sites`), and sends the encoding to all sites, which encode their rows by it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from fairflower.arguments import Count, Name, conform
from fairflower.data import Federation
from fairflower.data import sites as data_sites
from fairflower.errors import ConfigError, DataError, logger
from fairflower.tables.columns import Column, column_of
from fairflower.tables.encoding import (
    ColumnSums,
    Encoding,
    Sums,
    check_coding,
    check_declared,
    differences,
    merged,
    scaled_task,
)

#: Returns the sums of columns over all sites, which each site masks.
MaskedSums = Callable[[Sequence[Column]], Sums]


@dataclass(frozen=True)
class SiteTable:
    """Sums over a site's training rows, of its columns and of its targets.

    A column of kind "" has no values here, and an "ignored" one identifies rows. ``declared`` is
    the encoding of a schema with ``sums = false``, as text, or of one whose sums are masked, which
    is then ``learnt``; it is empty if sums make the encoding. ``patients`` is the number of those
    with training rows, or 0 without `data.patient`.
    """

    sums: dict[Name, ColumnSums]
    targets: dict[Name, ColumnSums]
    declared: str = ""
    patients: Count = 0

    def to_json(self) -> str:
        """Return the table as text, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SiteTable:
        """Read what another machine sent; raise ``ValueError`` if it is invalid."""
        try:
            content: dict[str, Any] = json.loads(text)
            for key in ("sums", "targets"):
                content[key] = {
                    name: ColumnSums(**{**own, "column": column_of(own["column"])})
                    for name, own in content[key].items()
                }
            table = cls(**content)
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"the description of a table cannot be read ({error!r})") from error
        conform(table, SiteTable, "the table")
        for name, own in (*table.sums.items(), *table.targets.items()):
            if own.column.name != name or own.m2 < 0 or sum(own.counts.values()) > own.known:
                raise ValueError(f"the table: the numbers of {name!r} contradict each other")
        if table.declared:
            Encoding.from_json(table.declared)
        return table

    def to_send(self, least: int) -> SiteTable:
        """Return what leaves the site: no number of fewer than ``least`` rows, and no rare level.

        With a declared encoding no sum leaves.
        """
        patients = self.patients * (self.patients >= least)
        if self.declared:
            return replace(self, sums={}, targets={}, patients=patients)
        sums, targets = (
            {name: _without_few(own, least) for name, own in of.items()}
            for of in (self.sums, self.targets)
        )
        return replace(self, sums=sums, targets=targets, patients=patients)

    def masked(self) -> SiteTable:
        """Return what leaves a site whose sums are masked: columns of numbers and of levels.

        Raises ``DataError`` if the schema does not declare their ranges and levels.
        """
        if self.declared:
            return self
        targets = [replace(own.column, kind="target") for own in self.targets.values()]
        columns = [own.column for _, own in sorted(self.sums.items()) if own.column.is_used]
        columns += [column for column in targets if None not in (column.low, column.high)]
        declared = Encoding(tuple(check_declared(columns))).to_json()
        return replace(self, sums={}, targets={}, declared=declared)


def _without_few(own: ColumnSums, least: int) -> ColumnSums:
    if own.known < least:
        return ColumnSums(own.column, missing=own.known + own.missing)
    return replace(own, counts={name: n for name, n in own.counts.items() if n >= least})


def places_of(sites: Sequence[Federation]) -> list[str]:
    """Return the domain of each site, with the site's number where several share it."""
    domains = [site.domains[0] for site in sites]
    count = Counter(domains)
    return [f"{d} (site {k})" if count[d] > 1 else d for k, d in enumerate(domains)]


def tables_of(sites: Sequence[Federation]) -> dict[str, SiteTable]:
    """Return the sites' tables by place."""
    tables = [SiteTable.from_json(site.encoding) for site in sites]
    return dict(zip(places_of(sites), tables, strict=True))


def said_of(tables: Mapping[str, SiteTable]) -> list[str]:
    """Return sentences on columns and targets that sites lack, or seem to measure differently."""
    return differences({place: {**t.sums, **t.targets} for place, t in tables.items()})


def merge_sites(sites: Sequence[Federation], masked: MaskedSums | None = None) -> Federation:
    """Return `fairflower.data.sites.merge_sites`, for tables with the encoding of all sites.

    Columns that seem to differ in unit or coding are logged. ``masked`` sums up what sites do not
    describe. Raises ``DataError`` if the tables have no column in common, or columns of different
    kinds, or if the schemas of sites differ.
    """
    whole = data_sites.merge_sites(sites)
    if not whole.encoding:
        return whole
    whole = replace(whole, auc=whole.learns.classes and whole.num_classes == 2)
    tables = tables_of(sites)
    check_coding(dict(zip(tables, (site.classes for site in sites), strict=True)))
    for text in said_of(tables):
        logger.warning(text)
    encodings = {table.declared for table in tables.values()}
    if len(encodings) > 1 and "" in encodings:
        raise DataError(
            "Some sites describe their table by sums, and others not (sums = false in schema.toml, "
            "or secure-aggregation in their node config). Set the same at all sites."
        )
    if len(encodings) > 1:
        raise DataError(
            "The sites declare different columns, ranges or levels in schema.toml. Use the same "
            "schema at all sites."
        )
    (text,), task = encodings, whole.task
    given = Encoding.from_json(text) if text else None
    sums: Mapping[str, Sums] = {place: table.sums for place, table in tables.items()}
    targets: Mapping[str, Sums] = {place: table.targets for place, table in tables.items()}
    if given and given.learnt and masked:
        columns = check_declared(given.columns)
        if not any(column.kind == "target" for column in columns):
            task = scaled_task(task, {})
        totals = masked(columns)
        sums, targets = (
            {"all sites": {c.name: totals[c.name] for c in columns if (c.kind == "target") == of}}
            for of in (False, True)
        )
    encoding = merged(sums) if not given or given.learnt else given
    if not encoding.columns:
        raise DataError("The sites' tables have no column of features in common. Compare them.")
    if encoding.learnt:
        task = scaled_task(task, targets)
    return encoded_by(encoding, replace(whole, task=task))


def encoded_by(encoding: Encoding, whole: Federation) -> Federation:
    """Return the description of a federation of tables whose rows are encoded so."""
    size = len(encoding.features)
    mean, std = (0.0,) * size, (1.0,) * size
    return replace(whole, encoding=encoding.to_json(), shape=(size,), mean=mean, std=std)


def check_own(encoding: str, site: Federation) -> None:
    """Raise ``ConfigError`` if a server's encoding has other columns than the site described."""
    table, given = SiteTable.from_json(site.encoding), Encoding.from_json(encoding)
    own = {name: sums.column.kind for name, sums in table.sums.items()}
    names = {c.name for c in given.columns if own.get(c.name) == "ignored" and c.kind == "category"}
    names |= {c.name for c in given.columns} - own.keys()
    if names or (table.declared and table.declared != encoding):
        raise ConfigError(
            "the run encodes tables by columns that this site did not describe. Its files have "
            "changed since the run began, or the server asks for more."
        )
