"""Statistics of data before training, by domain or site: tables, a CSV file and a page."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group as RichGroup
from rich.console import RenderableType
from rich.text import Text

from fairflower.config import DataConfig
from fairflower.data import Federation
from fairflower.data.cache import make_data_set
from fairflower.data.sites import open_site
from fairflower.errors import RunFolderError
from fairflower.report.cells import DASH, Cell, Group, Row, Table
from fairflower.report.pages import TerminalTable, listed, markdown_of, page_of
from fairflower.server.contents import STATISTICS, read_text
from fairflower.tables.columns import OTHER
from fairflower.tables.digests import rows_of
from fairflower.tables.encoding import ColumnSums
from fairflower.tables.sites import SiteTable, said_of
from fairflower.tables.warnings import shared_rows

#: The cell of a column's sums at a place; None if the place lacks the column.
CellOf = Callable[[ColumnSums | None, int], Cell]


@dataclass(frozen=True)
class DataStatistics:
    """Descriptions of places, each a domain of a folder or a site, with sentences on them.

    Counts below ``least`` are not shown.
    """

    sites: Mapping[str, Federation]
    least: int
    notes: Sequence[str]

    @property
    def tables(self) -> dict[str, SiteTable]:
        """Sums of the places' tables; empty for other data, and for what schemas declare."""
        texts = {place: site.encoding for place, site in self.sites.items() if site.encoding}
        return {place: SiteTable.from_json(text) for place, text in texts.items()}

    @property
    def sums(self) -> dict[str, dict[str, ColumnSums]]:
        """Sums by column and place; classes are counted in `Federation.clients`."""
        found: dict[str, dict[str, ColumnSums]] = {}
        for place, table in self.tables.items():
            named = self.sites[place].learns.classes
            for name, own in (*table.sums.items(), *([] if named else table.targets.items())):
                found.setdefault(name, {})[place] = own
        return found

    @property
    def sentences(self) -> list[str]:
        """What is suspicious, the most important first."""
        return [*said_of(self.tables), *self.notes]


def folder_statistics(config: DataConfig) -> DataStatistics:
    """Describe each domain of a folder as a site with these data would, and compare their rows."""
    domains = make_data_set(replace(config, domains="")).all_domains()
    least, config = config.smallest_group, replace(config, smallest_group=1)
    sites = {domain: open_site(config, domain) for domain in domains}
    said = [text for s in sites.values() for level, text in s.remarks if level == "WARNING"]
    data = DataStatistics(sites, least, list(dict.fromkeys(said)))
    if len(data.tables) < 2:
        return data
    kinds, frames = zip(*(rows_of(config, domain) for domain in domains), strict=True)
    common = [name for name, _ in set.intersection(*(set(of.items()) for of in kinds))]
    rows = {d: frame[common] for d, frame in zip(domains, frames, strict=True)}
    return replace(data, notes=[*data.notes, *(shared_rows(rows, least) if common else ())])


def read_statistics(folder: Path) -> DataStatistics:
    """Read what a run with ``statistics = true`` wrote; raise `RunFolderError` if it is damaged."""
    path = folder / STATISTICS
    try:
        content: dict[str, Any] = json.loads(read_text(path))
        sites = {}
        for place, own in content["sites"].items():
            sites[place] = Federation.from_json(json.dumps(own), folder)
            sites[place].check(sites[place].task)
        return DataStatistics(sites, int(content["smallest_group"]), content["notes"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} cannot be read ({error!r}). Run it again.") from error


# --- tables --------------------------------------------------------------------------------------


def statistic_tables(data: DataStatistics) -> list[Table]:
    """Return tables of examples, numbers, levels and missing cells, with a column per place."""
    places, sums = [*data.sites], data.sums
    rare = f"Counts below {data.least} are not shown."

    def of(*kinds: str) -> dict[str, dict[str, ColumnSums]]:
        return {n: o for n, o in sums.items() if any(s.column.kind in kinds for s in o.values())}

    def rows(cell: CellOf, columns: Mapping[str, Mapping[str, ColumnSums]]) -> list[Group]:
        found = []
        for name, own in columns.items():
            units = dict.fromkeys(s.column.unit for s in own.values() if s.column.unit)
            title = f"{name} [{' or '.join(units)}]" if units else name
            found.append(Row(title, "", [cell(own.get(place), data.least) for place in places]))
        return [Group("", found)]

    numbers, missing = rows(_number, of("number", "date")), rows(_missing, sums)
    levels = [Group(name, _levels(data, own)) for name, own in of("category").items()]
    title = "Numbers: mean ± standard deviation (ddof 0) of training rows"
    tables = [
        Table("Examples", rare, places, [Group("", _examples(data))], heading=""),
        Table(title, "", places, numbers, heading="column"),
        Table(f"Levels: training rows, {OTHER} are rare", rare, places, levels, heading="level"),
        Table("Missing cells of training rows", rare, places, missing, heading="column"),
    ]
    return [table for table in tables if any(group.rows for group in table.groups)]


def _examples(data: DataStatistics) -> list[Row]:
    """Return rows with sizes of splits, patients, and training examples of each class."""
    sites, tables = data.sites.values(), data.tables
    rows = [Row("training", "", [Cell(str(s.clients[0].num_examples)) for s in sites])]
    for split in ("validation", "test"):
        if any(s.sizes(split) for s in sites):
            rows.append(Row(split, "", [Cell(str(sum(s.sizes(split)))) for s in sites]))
    if any(table.patients for table in tables.values()):
        numbers = [tables[p].patients if p in tables else 0 for p in data.sites]
        rows.append(Row("training patients", "", [Cell(str(n) if n else DASH) for n in numbers]))
    for name in sorted({name for s in sites if s.learns.classes for name in s.class_names}):
        cells = []
        for s in sites:
            counts = dict(zip(s.class_names, s.clients[0].class_counts, strict=False))
            cells.append(_count(counts.get(name, 0), s.clients[0].num_examples, data.least))
        rows.append(Row(f"class {name}", "", cells))
    if any(s.learns.classes for s in sites):
        shares = [max(k.class_counts, default=0) / k.num_examples for s in sites for k in s.clients]
        rows.append(Row("most frequent class", "", [Cell(f"{share:.1%}") for share in shares]))
    return rows


def _count(count: int, size: int, least: int) -> Cell:
    if 0 < count < least:
        return Cell(f"<{least}")
    return Cell(str(count), f"({count / size:.1%})" if size else "")


def _number(own: ColumnSums | None, least: int) -> Cell:
    undated = own and own.column.kind == "date" and not own.column.since
    if own is None or undated or own.column.kind not in ("number", "date"):
        return _other_kind(own)
    if own.known < max(1, least):
        return Cell(DASH)
    return Cell(f"{own.mean:.4g}", f"± {math.sqrt(own.m2 / own.known):.3g}")


def _missing(own: ColumnSums | None, least: int) -> Cell:
    if own is None or own.column.kind == "ignored" or not own.known + own.missing:
        return _other_kind(own)
    return _count(own.missing, own.known + own.missing, least)


def _levels(data: DataStatistics, own: Mapping[str, ColumnSums]) -> list[Row]:
    """Return a row for each level that is frequent at a place, and one for all others."""
    counted = {p: s for p, s in own.items() if s.column.kind == "category"}
    shown = {p: {k: n for k, n in s.counts.items() if n >= data.least} for p, s in counted.items()}
    rest = {p: s.known - sum(shown[p].values()) for p, s in counted.items()}

    def cell(place: str, level: str) -> Cell:
        if place not in counted:
            return _other_kind(own.get(place))
        count = shown[place].get(level, 0) if level else rest[place]
        if level and not count and rest[place]:  # a site does not say which levels are rare
            return Cell(f"<{data.least}")
        return _count(count, counted[place].known, data.least)

    levels = [*sorted({level for counts in shown.values() for level in counts})]
    levels += [""] * any(rest.values())
    return [Row(level or OTHER, "", [cell(p, level) for p in data.sites]) for level in levels]


def _other_kind(own: ColumnSums | None) -> Cell:
    """Return what a place has instead of a column of the kind that a table shows."""
    return Cell(DASH if own is None else own.column.kind or "no values")


# --- formats -------------------------------------------------------------------------------------


def statistics_text(data: DataStatistics) -> RenderableType:
    """Return tables and sentences for a terminal."""
    said = [Text(f"! {sentence}", style="yellow") for sentence in data.sentences]
    return RichGroup(*map(TerminalTable, statistic_tables(data)), *said)


def statistics_markdown(data: DataStatistics) -> str:
    """Return tables and sentences as Markdown."""
    parts = [*markdown_of(statistic_tables(data)), listed(data.sentences)]
    return "\n\n".join(filter(None, parts)) + "\n"


def statistics_csv(data: DataStatistics) -> str:
    """Return the cells of all tables as CSV; ``spread`` is a standard deviation or a share."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["table", "column", "row", "place", "value", "spread"])
    for table in statistic_tables(data):
        title = table.title.partition(":")[0].partition(" of ")[0].lower()
        for group in table.groups:
            for row in group.rows:
                for place, cell in zip(table.columns, row.cells, strict=True):
                    spread = cell.spread.strip("()± ")
                    writer.writerow([title, group.heading, row.name, place, cell.text, spread])
    return out.getvalue()


def write_statistics(data: DataStatistics, out: Path) -> Path:
    """Write ``index.html``, ``tables.md``, ``statistics.csv`` and ``figures``; return the page."""
    from fairflower.report.figures.data import draw_data  # matplotlib is slow to import

    out.mkdir(parents=True, exist_ok=True)
    figures = draw_data(data.sites, data.sums, data.least, out / "figures")
    page = out / "index.html"
    tables = statistic_tables(data)
    text = page_of("statistics", tables=tables, said=data.sentences, figures=figures)
    page.write_text(text, encoding="utf-8")
    (out / "tables.md").write_text(statistics_markdown(data), encoding="utf-8")
    (out / "statistics.csv").write_text(statistics_csv(data), encoding="utf-8")
    return page
