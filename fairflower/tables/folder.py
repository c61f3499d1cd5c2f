"""The files of tables in a folder, as text by domain, with the schema beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fairflower.config import DataConfig
from fairflower.config.text import names_in, unknown
from fairflower.data import files
from fairflower.errors import ConfigError, DataError
from fairflower.tables.columns import Column, Schema, common_kind, refused, without_day
from fairflower.tables.reading import SUFFIXES, read_table
from fairflower.tables.schema import FILE, kind_of, read_schema, whole_numbers, without_marks

#: What a folder of tables has to contain.
CONTENT = f"a table per domain ({', '.join(SUFFIXES)})"


class TableFiles:
    """A file for each domain in ``data.dir``, or one with ``data.domain-column``.

    ``schema`` replaces the schema in the folder.
    """

    def __init__(self, config: DataConfig, schema: Schema | None = None) -> None:
        self.config = config
        self.folder = files.needed_folder(config, CONTENT)
        if schema is not None:
            self.schema = schema
        self._frames: dict[str, pd.DataFrame] = {}

    @cached_property
    def schema(self) -> Schema:
        """The schema in the folder; an empty one if there is none."""
        name = self.config.schema
        if name and Path(name).name != name:
            raise ConfigError(f"data.schema = {name!r}: expected the name of a file in data.dir.")
        path = self.folder / (name or FILE)
        return read_schema(path) if name or path.is_file() else Schema()

    @cached_property
    def paths(self) -> dict[str, Path]:
        """The files by name, without hidden files, which macOS writes."""
        found = sorted(p for p in self.folder.iterdir() if p.suffix.lower() in SUFFIXES)
        paths = [path for path in found if not path.name.startswith(".")]
        named = {path.stem: path for path in paths}
        expected = "one file for each domain"
        if self.config.domain_column:
            expected = "a single file, because data.domain-column is set"
        if not named or len(named) < len(paths) or (self.config.domain_column and len(named) > 1):
            listed = ", ".join(path.name for path in paths[:9]) or f"no {', '.join(SUFFIXES)}"
            raise DataError(
                f"{self.folder}: found {listed}; expected {expected}.",
                public=f"the folder of the data has {len(paths)} tables; expected {expected}",
            )
        return named

    @property
    def fingerprint(self) -> Any:
        """The paths, sizes and times of the tables and of the schema."""
        paths = [*self.paths.values(), self.folder / (self.config.schema or FILE)]
        return [files.stamp(path) for path in paths]

    def domains(self) -> list[str]:
        """Return the names of the files, or the values of the domain column, sorted."""
        column = self.config.domain_column
        return sorted(set(self._whole[column])) if column else [*self.paths]

    @cached_property
    def _whole(self) -> pd.DataFrame:
        """The only file, with all domains."""
        (path,) = self.paths.values()
        frame, column = read_table(path, self.schema.format), self.config.domain_column
        check_has(path, frame, {"data.domain-column": [column]})
        if lacking := int((frame[column] == "").sum()):
            text = f"{lacking} rows have no domain (data.domain-column). Add it, or remove them."
            raise refused(path, text)
        return frame.assign(**{column: whole_numbers(frame[column])})

    def source(self, domain: str) -> str:
        """Describe where a domain's rows come from."""
        if column := self.config.domain_column:
            return f"{next(iter(self.paths.values()))}, {column} {domain}"
        return str(self.paths[domain])

    def frame(self, domain: str) -> pd.DataFrame:
        """Return the rows of a domain as text; missing cells are empty."""
        if domain not in self._frames:
            column = self.config.domain_column
            if column:
                own = self._whole[self._whole[column] == domain].reset_index(drop=True)
            else:
                own = read_table(self.paths[domain], self.schema.format)
            kept = [c.name for c in self.schema.columns.values() if c.kind != "ignored"]
            dropped = names_in(self.config.drop)
            check_has(self.source(domain), own, {FILE: [n for n in kept if n not in dropped]})
            for name, known in self.schema.columns.items():
                if name in own:
                    own[name] = without_marks(own[name], known)
            self._frames[domain] = own
        return self._frames[domain]

    def columns(
        self, trained: Mapping[str, pd.DataFrame], targets: Sequence[str], site: bool = False
    ) -> list[Column]:
        """Return the columns of features that a domain has, with their kinds.

        ``trained`` are the training rows of each domain, which say the kind of a column that is not
        in the schema. A ``site`` has a single domain, and says also which columns it ignores, or
        has no values of (kind ""). Raises ``DataError`` for dates, and for kinds that differ.
        """
        config, by_name = self.config, self.schema.columns
        used = {*targets, config.domain_column, config.split, config.patient, config.redraw}
        reserved = used | {*names_in(config.drop)}
        named = names_in(config.features)
        if both := sorted(reserved & set(named)):
            raise ConfigError(f"data.features names {both[0]!r}, which has another use. Remove it.")
        found = list(dict.fromkeys(str(name) for frame in trained.values() for name in frame))
        wanted = [name for name in named or [*by_name] or found if name not in reserved]
        if extra := sorted(set(found) - {*wanted, *reserved}):
            text = "Columns that neither data.features nor the schema names are ignored: %s."
            files.logger.info(text, ", ".join(extra[:20]))
        columns = []
        for name in wanted:
            column = by_name.get(name, Column(name))
            if not column.kind:
                held = {d: f[name] for d, f in trained.items() if name in f}
                kinds = {d: kind_of(f"{self.source(d)}: {name}", own) for d, own in held.items()}
                kind = next(iter(kinds.values())) if site else common_kind(name, kinds)
                column = Column(name, kind)
                if kind in ("ignored", ""):
                    text = "The column %r is ignored: it has no values, or identifies rows."
                    files.logger.warning(text, name)
            if column.kind == "date" and not column.since and not site:
                raise without_day(name)
            unused = ("target",) if site else ("ignored", "target")
            columns += [column] if column.kind not in unused else []
        return columns


def check_has(where: object, frame: pd.DataFrame, named: Mapping[str, Sequence[str]]) -> None:
    """Raise ``DataError`` if a table lacks a column, given what names columns."""
    for setting, names in named.items():
        for name in (name for name in names if name not in frame):
            words = unknown("column", name, [str(column) for column in frame][:50])
            lacks = f"a table lacks the column {name!r} ({setting})"
            raise DataError(f"{where}: {setting}: {words}", public=lacks)
