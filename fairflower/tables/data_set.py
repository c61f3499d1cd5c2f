"""The data set ``table``: a user's own tables, without code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fairflower.config import DataConfig
from fairflower.config.methods import TaskSpec
from fairflower.config.text import names_in, unknown
from fairflower.data import files
from fairflower.data.data_set import DataSetOfFiles, FeatureSet, strata_of
from fairflower.data.federation import Floats, Ints
from fairflower.data.files import logger
from fairflower.data.folders import OwnFiles, encodable
from fairflower.errors import ConfigError, DataError
from fairflower.registry import CLASSIFICATION
from fairflower.tables.encoding import (
    ColumnSums,
    Encoding,
    declared,
    differences,
    encoded,
    merged,
    summed,
    unknown_levels,
)
from fairflower.tables.reading import (
    SUFFIXES,
    Format,
    is_number,
    numbers_of,
    read_table,
    refused,
)
from fairflower.tables.schema import (
    FILE,
    Column,
    Raw,
    Schema,
    common_kind,
    kind_of,
    parse,
    read_schema,
)
from fairflower.tables.warnings import leaks, shared_rows, single_class
from fairflower.tasks import Targets, task_of

#: Most values of a numeric target that are classes, and of a numeric column with groups of people.
MOST_CLASSES = 10

#: Facts of files by their fingerprint and settings, because every message makes the data set anew.
_FACTS: dict[Any, Any] = {}


class Opened(NamedTuple):
    """A domain's rows that have a target, as text, and which of them are test examples, [N]."""

    frame: pd.DataFrame
    test: npt.NDArray[np.bool_]


class TableFolder(OwnFiles, DataSetOfFiles[Opened], FeatureSet):
    """Tables in ``data.dir``: ``<domain>.csv``, ``.tsv``, ``.txt`` or ``.parquet``, or one file.

    With ``data.domain-column``, one file has all domains. ``data.target`` names what is predicted,
    a class or a number, or several labels; ``data.time`` and ``data.event`` are for survival.
    Delimiter, encoding and decimal mark are detected, and the log names them. Missing cells are
    empty, NA, NaN, NULL, ?, . or -.

    What columns mean says a schema, ``schema.toml`` or ``data.schema``, that ``fairflower data
    schema`` proposes; without it, training rows do. Numbers are standardized, categories are
    one-hot, and missing cells are replaced by the mean or the mode, with a feature that says so
    (`fairflower.tables.encoding`).

    Test examples are those of ``data.split``, or in each class the first row and every fifth after
    it; with ``data.patient``, patients are counted instead of rows, and all rows of a patient are
    on one side. Each domain is divided equally among its clients by default.
    """

    title = "A folder of tables"
    content = f"a table per domain ({', '.join(SUFFIXES)})"

    def __init__(self, config: DataConfig) -> None:
        self.config = config  # `all_domains` needs it
        super().__init__(config)
        self._encoding: Encoding | None = None
        self._raw: dict[str, Raw] = {}

    # --- files ---------------------------------------------------------------------------------

    @cached_property
    def _paths(self) -> dict[str, Path]:
        """The tables in the folder by name, without hidden files, which macOS writes."""
        found = sorted(p for p in self.folder.iterdir() if p.suffix.lower() in SUFFIXES)
        paths = [path for path in found if not path.name.startswith(".")]
        named = dict(zip(encodable(path.stem for path in paths), paths, strict=True))
        if not named:
            raise DataError(
                f"{self.folder} has no table. Expected {self.content}.",
                public="the folder of the data has no table",
            )
        if len(named) < len(paths) or (self.config.domain_column and len(named) > 1):
            listed = ", ".join(path.name for path in paths[:9])
            remedy = "one file, as data.domain-column is set"
            expected = remedy if self.config.domain_column else "one file for each domain"
            raise DataError(
                f"{self.folder}: found {listed}; expected {expected}.",
                public=f"the folder of the data has several files; expected {expected}",
            )
        return named

    @classmethod
    def frames(cls, config: DataConfig) -> dict[str, pd.DataFrame]:
        """Return all rows of each domain as text, whatever a schema in the folder says."""
        made = cls.__new__(cls)
        made.config, made.schema = config, Schema()
        frames = {name: read_table(path, Format()) for name, path in made._paths.items()}
        if not config.domain_column:
            return frames
        return {str(d): f for d, f in made._whole.groupby(config.domain_column)}

    @cached_property
    def schema(self) -> Schema:
        """The schema in the folder; an empty one if there is none."""
        name = self.config.schema
        if name and Path(name).name != name:
            raise ConfigError(f"data.schema = {name!r}: expected the name of a file in data.dir.")
        path = self.folder / (name or FILE)
        return read_schema(path) if name or path.is_file() else Schema()

    def all_domains(self) -> Sequence[str]:
        """Return the names of the files or, of a single file, the domains in it, sorted."""
        column = self.config.domain_column
        if not column:
            return [*self._paths]
        domains = self._remembered("domains", lambda: encodable(sorted(set(self._whole[column]))))
        return list(domains)

    def _remembered(self, what: str, make: Callable[[], Any]) -> Any:
        key = what, json.dumps(self.fingerprint()), self.config
        if key not in _FACTS:
            _FACTS[key] = make()
        return _FACTS[key]

    @cached_property
    def _whole(self) -> pd.DataFrame:
        """The only file, with all domains."""
        (path,) = self._paths.values()
        frame, column = read_table(path, self.schema.format), self.config.domain_column
        self._check(path, frame, {"data.domain-column": [column]})
        if lacking := int((frame[column] == "").sum()):
            raise refused(f"{path}: {lacking} rows have no {column}. Add it, or remove the rows.")
        return frame

    def fingerprint(self) -> Any:
        paths = [*self._paths.values(), self.folder / (self.config.schema or FILE)]
        return [files.stamp(path) for path in paths]

    def source(self, domain: str) -> str:
        if self.config.domain_column:
            (path,) = self._paths.values()
            return f"{path}, {self.config.domain_column} {domain}"
        return str(self._paths[domain])

    def _read(self, domain: str) -> Opened:
        column = self.config.domain_column
        if column:
            frame = self._whole[self._whole[column] == domain]
        else:
            frame = read_table(self._paths[domain], self.schema.format)
        where, named = self.source(domain), self._named
        self._check(where, frame, named)
        needed = [*named.get("data.time", ()), *named.get("data.event", ())]
        if not needed and TaskSpec.read(self.config.task or CLASSIFICATION).name != "multilabel":
            needed = self.target_names if len(self.target_names) == 1 else []
        has = (frame[needed] != "").all(axis=1)
        if lacking := int((~has).sum()):
            text = "%s: %d of %d rows have no %s, and are no examples."
            logger.warning(text, where, lacking, len(frame), " or ".join(needed))
        frame = frame[has].reset_index(drop=True)
        if frame.empty:
            raise refused(f"{where} has no row with a target. Add rows, or remove the file.")
        patient = self.config.patient
        if patient and (lacking := int((frame[patient] == "").sum())):
            text = f"{lacking} rows have no patient (data.patient). Add it, or remove the rows."
            raise refused(f"{where}: {text}", text)
        return Opened(frame, self._tested(where, frame))

    @cached_property
    def _named(self) -> dict[str, list[str]]:
        """The columns that settings name, by setting."""
        config = self.config
        redraw = "" if config.redraw == "rows" else config.redraw
        named = {
            "data.target": self.target_names,
            "data.features": names_in(config.features),
            **{f"data.{key}": [getattr(config, key)] for key in ("time", "event", "split")},
            **{"data.groups": [config.groups], "data.patient": [config.patient]},
            "data.redraw": [redraw],
        }
        return {key: names for key, names in named.items() if any(names)}

    def _check(self, where: object, frame: pd.DataFrame, named: Mapping[str, list[str]]) -> None:
        """Raise ``DataError`` if a table lacks a column that a setting or the schema names."""
        kept = {
            "schema.toml": [c.name for c in self.schema.columns.values() if c.kind != "ignored"]
        }
        kept["schema.toml"] = [n for n in kept["schema.toml"] if n not in self._dropped]
        for setting, names in {**named, **kept}.items():
            for name in names:
                if name not in frame:
                    words = unknown("column", name, [str(column) for column in frame][:50])
                    lacks = f"a table lacks the column {name!r} ({setting})"
                    raise refused(f"{where}: {setting}: {words}", lacks)

    @property
    def _dropped(self) -> set[str]:
        return {*names_in(self.config.drop), self.config.domain_column}

    def _tested(self, where: str, frame: pd.DataFrame) -> npt.NDArray[np.bool_]:
        """Return which rows are test examples, bool [N]."""
        column, patient = self.config.split, self.config.patient
        people = frame[patient] if patient else pd.Series(range(len(frame)))
        if column:
            words = frame[column].str.lower()
            if wrong := int((~words.isin(["train", "test", "validation"])).sum()):
                text = f"{wrong} rows have another split than train, test or validation"
                raise refused(f"{where}: {column}: {text}. Correct them.", f"a table: {text}")
            if aside := int((words == "validation").sum()):
                text = (
                    "%s: %d validation rows are training examples: data.validation-fraction draws."
                )
                logger.warning(text, where, aside)
            test: npt.NDArray[np.bool_] = (words == "test").to_numpy()
            if both := len(set(people[test]) & set(people[~test])):
                text = f"{both} patients have training and test rows (data.split)"
                raise refused(f"{where}: {text}. Correct the column.", f"a table: {text}")
            return test
        first = ~people.duplicated()
        strata = strata_of(self, self._targets(frame))[first]
        place = pd.Series(strata).groupby(strata).cumcount()
        chosen = set(people[first][(place % 5 == 0).to_numpy()])
        test = people.isin(chosen).to_numpy(np.bool_)
        return test

    # --- targets, groups and patients ----------------------------------------------------------

    @cached_property
    def target_names(self) -> list[str]:
        """Names of the columns that are predicted."""
        names = names_in(self.config.target) or self.schema.targets
        times = [name for name in (self.config.time, self.config.event) if name]
        if len(times) == 1 or bool(names) == bool(times):
            raise ConfigError(
                "data.name = 'table' needs data.target, the column that is predicted, or data.time "
                "and data.event, but not both. Set one of them."
            )
        return names or times

    @cached_property
    def task(self) -> str:  # type: ignore[override]
        """What is learnt: classes, or a number of more than `MOST_CLASSES` values."""
        return str(self._remembered("task", self._infer_task))

    def _infer_task(self) -> str:
        if self.config.time:
            raise ConfigError(
                "data.time needs data.task = survival with cuts, as survival:cuts=90;180;360."
            )
        if len(self.target_names) > 1:
            return "multilabel"
        (name,) = self.target_names
        column = self.schema.columns.get(name, Column(name))
        if column.levels:
            return CLASSIFICATION
        values: set[str] = set()
        for domain in self.domains:
            frame = self._whole if self.config.domain_column else None
            frame = read_table(self._paths[domain], self.schema.format) if frame is None else frame
            self._check(self.source(domain), frame, {"data.target": [name]})
            values |= set(frame[name])
        cells = pd.Series(sorted(values - {""}), dtype=object)
        number = any(is_number(cells, mark).all() for mark in ".,")
        if not number or len(cells) <= MOST_CLASSES:
            return CLASSIFICATION
        logger.info("%s has %d numbers, so the task is a regression.", name, len(cells))
        return "regression"

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the classes or targets; the first use reads the files of all domains."""
        task = task_of(self.task)
        if not task.classes:
            return () if self.config.time else tuple(self.target_names)
        column = self.schema.columns.get(self.target_names[0])
        if column and column.levels:
            return column.levels
        held = {d: set(self._open(d).frame[self.target_names[0]]) for d in self.domains}
        files.check_twins(f"{self.folder}: the classes", held, "Change the labels")
        return tuple(sorted(set().union(*held.values())))

    def _targets(self, frame: pd.DataFrame) -> Targets:
        """Return the targets of rows; those of a class are numbers within these rows alone."""
        if task_of(self.task).classes:
            return np.unique(frame[self.target_names[0]], return_inverse=True)[1]
        columns = []
        for name in self.target_names:
            cells = frame[name]
            words = {"true": "1", "yes": "1", "false": "0", "no": "0"}
            cells = cells.where(~cells.str.lower().isin(words), cells.str.lower().map(words))
            known = cells[cells != ""]
            mark = "." if is_number(known, ".").all() else ","
            if wrong := int((~is_number(known, mark)).sum()):
                text = f"{wrong} targets are no numbers, as the task {self.task} needs"
                raise refused(f"{name}: {text}. Correct them, or set data.task.", text)
            columns.append(numbers_of(cells, mark))
        return columns[0] if len(columns) == 1 and not self._wide else np.stack(columns, axis=1)

    @property
    def _wide(self) -> bool:
        return TaskSpec.read(self.task).name == "multilabel"

    def labels(self, domain: str, split: str) -> Targets:
        opened = self._open(domain)
        chosen = opened.test == (split == "test")
        if not chosen.any():
            raise DataError(
                f"{self.source(domain)} has no {split} rows. Add some. Without data.split, the "
                "first row of a class and every fifth after it are test rows.",
                public=f"a table has no {split} rows",
            )
        if not task_of(self.task).classes:
            return self._targets(opened.frame[chosen])
        names = opened.frame[self.target_names[0]][chosen]
        known = {name: k for k, name in enumerate(self.classes)}
        if wrong := len(set(names) - known.keys()):
            text = f"{wrong} classes are not among the levels of the target in the schema"
            raise refused(f"{self.source(domain)}: {text}. Add them.", text)
        labels: Ints = names.map(known).to_numpy(np.int64)
        return labels

    @property
    def redrawable(self) -> bool:  # type: ignore[override]
        return not self.config.split

    def values_of(self, setting: str, domain: str, split: str) -> Sequence[str]:
        opened, name = self._open(domain), str(getattr(self.config, setting.removeprefix("data.")))
        values = opened.frame[name][opened.test == (split == "test")]
        if lacking := int((values == "").sum()):
            text = f"{lacking} rows have no {setting}. Add it, or remove the rows."
            raise refused(f"{self.source(domain)}: {text}", text)
        number = setting == "data.groups" and is_number(values, ".").all()
        if number and values.nunique() > MOST_CLASSES:
            text = f"data.groups = {name!r} has {values.nunique()} numbers"
            raise refused(f"{text}. Store ranges in a column instead.", text)
        return [str(value) for value in values]

    def units(self, domain: str, split: str) -> Sequence[str]:
        setting = "data.patient" if self.config.patient else "data.redraw"
        return self.values_of(setting, domain, split)

    # --- features ------------------------------------------------------------------------------

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding as text."""
        return self._learnt.to_json()

    @property
    def feature_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the features."""
        return tuple(self._learnt.features)

    @property
    def _learnt(self) -> Encoding:
        if self._encoding is None:
            sizes = {d: len(self.labels(d, "train")) for d in self.client_domains}
            self.learn_encoding({d: np.arange(size) for d, size in sizes.items()})
        assert self._encoding is not None
        return self._encoding

    def _places(self, domain: str, split: str, rows: Ints) -> Ints:
        """Return the places in the domain's table of rows of a split, drawn anew or not."""
        test = self._open(domain).test
        own = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
        drawn = self.places(domain, split, rows)
        in_order = np.concatenate([own["train"], own["test"]]) if self.config.redraw else own[split]
        places: Ints = in_order[drawn]
        return places

    def learn_encoding(self, rows: Mapping[str, Ints]) -> None:
        frames = {domain: self._open(domain).frame for domain in self.domains}
        trained = {domain: self._places(domain, "train", own) for domain, own in rows.items()}
        columns = self._columns_used({d: frames[d].iloc[at] for d, at in trained.items()})
        for domain, frame in frames.items():
            given = [c for c in columns if c.name in frame]
            decimal = self.schema.format.decimal
            self._raw[domain] = parse(self.source(domain), frame, given, decimal)
        raws = {domain: self._raw[domain].rows(at) for domain, at in trained.items()}
        sums = {d: summed([c for c in columns if c.name in r.names], r) for d, r in raws.items()}
        for text in differences(sums):
            logger.warning(text)
        if self.schema.sums:
            self._encoding = merged(sums)
        else:
            self._encoding = declared(self.schema, [c.name for c in columns])
        used = [column.name for column in self._encoding.columns]
        if not used:
            raise refused(f"{self.folder}: there is no column to predict {self.target_names} by.")
        targets = {d: self._targets(frames[d].iloc[at]) for d, at in trained.items()}
        by_name = {d: frames[d].iloc[at][self.target_names[0]] for d, at in trained.items()}
        task = task_of(self.task)
        found = leaks(self._encoding, raws, by_name if task.classes else targets)
        found += shared_rows({d: f[[*used, *self.target_names]] for d, f in frames.items()})
        found += single_class(by_name) if task.classes else []
        for text in found:
            logger.warning(text)
        self._scale(targets)

    def _columns_used(self, trained: Mapping[str, pd.DataFrame]) -> list[Column]:
        """Return the columns of features, with their kinds; those that a domain lacks, too."""
        config, by_name = self.config, self.schema.columns
        reserved = {*self._dropped, *self.target_names, config.split, config.patient, config.redraw}
        named = names_in(config.features)
        if both := sorted(reserved & set(named)):
            raise ConfigError(f"data.features names {both[0]!r}, which has another use. Remove it.")
        found = dict.fromkeys(str(name) for frame in trained.values() for name in frame)
        wanted = named or [name for name, c in by_name.items() if c.kind] or [*found]
        if extra := sorted(found.keys() - {*wanted, *reserved}):
            text = "Columns that neither data.features nor the schema names are ignored: %s."
            logger.info(text, ", ".join(extra[:20]))
        columns = []
        for name in (name for name in wanted if name not in reserved):
            column = by_name.get(name, Column(name))
            if not column.kind:
                held = {d: f[name] for d, f in trained.items() if name in f}
                kinds = {d: kind_of(f"{self.source(d)}: {name}", own) for d, own in held.items()}
                kind = common_kind(name, kinds)
                if kind == "ignored":
                    text = "The column %r is ignored: it has no values, or identifies rows."
                    logger.warning(text, name)
                if kind == "date":
                    raise refused(
                        f"The column {name!r} has dates. Drop it (data.drop), or say in a schema "
                        "since which day days are counted (fairflower data schema).",
                        "a column has dates",
                    )
                column = Column(name, kind)
            columns += [column] if column.kind not in ("ignored", "target") else []
        return columns

    def _scale(self, targets: Mapping[str, Targets]) -> None:
        """Add the center and the scale of training targets to a regression that has none."""
        spec = TaskSpec.read(self.task)
        if spec.name != "regression" or len(self.target_names) > 1 or not self.schema.sums:
            return
        name = self.target_names[0]
        sums = {}
        for domain, y in targets.items():
            raw = Raw((name,), y[:, None].astype(np.float64), {})
            sums[domain] = summed([self.schema.columns.get(name, Column(name))], raw)
        self.task = scaled_task(self.task, {d: s[name] for d, s in sums.items()})

    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        encoding, where = self._learnt, self.source(domain)
        raw = self._raw[domain]
        own = np.flatnonzero(self._open(domain).test == (split == "test"))
        raw = raw.rows(own[rows])
        needed = 8 * len(rows) * len(encoding.features)
        files.check_memory(f"{where}: {len(rows)} encoded rows take", needed, "Drop columns.")
        for name, count in unknown_levels(encoding, raw).items() if split == "test" else ():
            text = "%s: %s: %d %s rows have a level that few or no training rows have."
            logger.info(text, where, name, count, split)
        return encoded(encoding, raw)


def scaled_task(task: str, sums: Mapping[str, ColumnSums]) -> str:
    """Return a regression with the center, scale and unit of its target, unless it has them."""
    column = next(iter(sums.values())).column
    whole = merged({d: {column.name: _as_number(s)} for d, s in sums.items()}).columns[0]
    args = TaskSpec.read(task).args
    learnt = {"center": f"{whole.mean:.6g}", "scale": f"{whole.std:.6g}", "unit": column.unit}
    if args.get("loss") == "poisson":
        learnt = {"scale": f"{whole.mean:.6g}", "unit": column.unit}
    named = [f"{key}={value}" for key, value in learnt.items() if value and key not in args]
    return ":".join([task, *named])


def _as_number(sums: ColumnSums) -> ColumnSums:
    column = Column(sums.column.name, "number")
    return ColumnSums(column, sums.known, sums.missing, sums.mean, sums.m2)
