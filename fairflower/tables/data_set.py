"""The data set ``table``: a user's own tables, without code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from fairflower.config import DataConfig
from fairflower.config.methods import TaskSpec
from fairflower.config.text import counted, names_in
from fairflower.data import files
from fairflower.data.data_set import DataSetOfFiles, FeatureSet, strata_of
from fairflower.data.federation import Floats, Ints
from fairflower.data.files import logger
from fairflower.data.folders import OwnFiles
from fairflower.errors import ConfigError, DataError
from fairflower.registry import CLASSIFICATION
from fairflower.tables.columns import Column, Raw, refused
from fairflower.tables.encoding import (
    ColumnSums,
    Encoding,
    check_coding,
    declared,
    differences,
    encoded,
    merged,
    scaled_task,
    summed,
    undeclared,
    unknown_levels,
)
from fairflower.tables.folder import CONTENT, TableFiles, check_has
from fairflower.tables.reading import is_number, mark_of, numbers_of, without_unit
from fairflower.tables.schema import kind_of, parse, whole_numbers
from fairflower.tables.sites import SiteTable
from fairflower.tables.warnings import compared, leaks, shared_rows, single_class
from fairflower.tasks import Targets, task_of

#: Most values of a numeric target that are classes, and of a numeric column with groups of people.
MOST_CLASSES = 10

#: Facts of files by their fingerprint and settings, because every message makes the data set anew.
_FACTS: dict[Any, Any] = {}


class Opened(NamedTuple):
    """A domain's rows that have a target, as text, and which of them are test examples, [N].

    Targets are names of classes, or numbers, [N] or [N, D].
    """

    frame: pd.DataFrame
    targets: npt.NDArray[Any]
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
    content = CONTENT

    def __init__(self, config: DataConfig) -> None:
        self.files = TableFiles(config)
        self.config = config  # for `all_domains`
        super().__init__(config)
        self._site: SiteTable | None = None
        self._encoding: Encoding | None = None
        self._raw: dict[str, Raw] = {}

    def all_domains(self) -> Sequence[str]:
        return list(self._remembered("domains", self.files.domains))

    def _remembered(self, what: str, make: Callable[[], Any]) -> Any:
        key = what, json.dumps(self.fingerprint()), self.config
        if key not in _FACTS:
            _FACTS[key] = make()
        return _FACTS[key]

    def fingerprint(self) -> Any:
        return self.files.fingerprint

    def source(self, domain: str) -> str:
        return self.files.source(domain)

    def _read(self, domain: str) -> Opened:
        frame, where = self.files.frame(domain), self.source(domain)
        check_has(where, frame, self._named)
        spec = TaskSpec.read(self.config.task or CLASSIFICATION)
        several = len(self.target_names) > 1 and not self.config.time
        needed = [] if several and spec.name != "regression" else self.target_names
        has = (frame[needed] != "").all(axis=1)
        if lacking := int((~has).sum()):
            text = "%s: %d of %d rows have no %s, and are no examples."
            logger.warning(text, where, lacking, len(frame), " or ".join(needed))
        frame = frame[has].reset_index(drop=True)
        if frame.empty:
            text = "no row has a target. Add rows, or remove the file."
            raise refused(where, text)
        targets = self._targets(where, frame)
        return Opened(frame, targets, self._tested(where, frame, targets))

    @property
    def _named(self) -> dict[str, list[str]]:
        """The columns that settings name, by setting."""
        config = self.config
        named = {"data.target": self.target_names, "data.features": names_in(config.features)}
        named |= {"data.split": [config.split]} if config.split else {}
        return named | {setting: [name] for setting, name in self._columns.items()}

    def _tested(self, where: str, frame: pd.DataFrame, targets: Any) -> npt.NDArray[np.bool_]:
        """Return which rows are test examples, bool [N]."""
        column, patient = self.config.split, self.config.patient
        if not column:
            people = frame[patient].to_numpy(str) if patient else None
            classes = task_of(self.task).classes
            numbers = np.unique(targets, return_inverse=True)[1] if classes else targets
            return files.every_fifth(strata_of(self, numbers), people)
        words = frame[column].str.lower()
        if wrong := int((~words.isin(["train", "test", "validation"])).sum()):
            text = f"{wrong} rows have another split than train, test or validation. Correct them."
            raise refused(f"{where}: {column}", text)
        if aside := int((words == "validation").sum()):
            text = "%s: %d validation rows are training rows: data.validation-fraction draws them."
            logger.warning(text, where, aside)
        return np.asarray(words == "test", np.bool_)

    @cached_property
    def target_names(self) -> list[str]:
        """Names of the columns that are predicted."""
        names = names_in(self.config.target) or self.files.schema.targets
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
        (name,), parts = self.target_names, []
        if self.files.schema.columns.get(name, Column(name)).levels:
            return CLASSIFICATION
        for domain in self.domains:
            frame = self.files.frame(domain)
            check_has(self.source(domain), frame, {"data.target": [name]})
            cells, _ = without_unit(frame[name])
            parts.append(cells[cells != ""])
        different = pd.concat(parts).nunique()  # each domain has its own decimal mark
        number = all(map(mark_of, parts))
        if number and different > MOST_CLASSES:
            logger.info("%s has %d numbers, so the task is a regression.", name, different)
            return "regression"
        if not number and kind_of(name, pd.concat(parts)) != "category":
            text = f"the target has {different} different texts; expected classes or numbers. "
            raise refused(name, f"{text}Set data.target to another column.")
        return CLASSIFICATION

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Names of the classes or targets; the first use reads the files of all domains."""
        task = task_of(self.task)
        if not task.classes:
            return () if self.config.time else tuple(self.target_names)
        column = self.files.schema.columns.get(self.target_names[0])
        if column and column.levels:
            return column.levels
        held = {d: set(self._open(d).targets) for d in self.domains}
        return files.all_names(f"{self.files.folder}: the classes", held, "Change the labels")

    @property
    def auc(self) -> bool:  # type: ignore[override]
        """Whether tests also report the AUC: of two classes."""
        return task_of(self.task).classes and len(self.classes) == 2

    def _targets(self, where: str, frame: pd.DataFrame) -> npt.NDArray[Any]:
        """Return the targets of rows: names of classes [N], or numbers [N] or [N, D]."""
        if task_of(self.task).classes:
            return np.asarray(whole_numbers(frame[self.target_names[0]]), object)
        columns = []
        for name in self.target_names:
            cells, _ = without_unit(frame[name])
            words = {"true": "1", "yes": "1", "false": "0", "no": "0"}
            cells = cells.where(~cells.str.lower().isin(words), cells.str.lower().map(words))
            known = cells[cells != ""]
            mark = mark_of(known) or ","
            if wrong := int((~is_number(known, mark)).sum()):
                text = f"{wrong} targets are no numbers, as the task {self.task} needs. "
                raise refused(f"{where}: {name}", f"{text}Correct them, or set data.task.")
            columns.append(numbers_of(cells, mark))
        wide = TaskSpec.read(self.task).name == "multilabel" or len(columns) > 1
        return np.stack(columns, axis=1) if wide else columns[0]

    def labels(self, domain: str, split: str) -> Targets:
        opened = self._open(domain)
        targets: Targets = opened.targets[opened.test == (split == "test")]
        if not len(targets):
            raise DataError(
                f"{self.source(domain)} has no {split} rows. Add some. Without data.split, the "
                "first row of a class and every fifth after it are test rows.",
                public=f"a table has no {split} rows",
            )
        if not task_of(self.task).classes:
            return targets
        if wrong := len({*targets} - {*self.classes}):
            text = (
                f"{wrong} classes are not among the levels of the target in the schema. Add them."
            )
            raise refused(self.source(domain), text)
        return files.places(targets, self.classes)

    @property
    def redrawable(self) -> bool:  # type: ignore[override]
        return not self.config.split

    def values_of(self, setting: str, domain: str, split: str) -> Sequence[str]:
        opened, name = self._open(domain), self._columns[setting]
        values = opened.frame[name][opened.test == (split == "test")]
        if lacking := int((values == "").sum()):
            what = setting.removeprefix("data.")
            text = f"{lacking} rows have no {what} ({setting}). Add it, or remove the rows."
            raise refused(self.source(domain), text)
        number = setting == "data.groups" and is_number(values, ".").all()
        if number and values.nunique() > MOST_CLASSES:
            text = f"data.groups = {name!r} has {values.nunique()} numbers. Store ranges instead."
            raise refused(self.source(domain), text)
        return [str(value) for value in whole_numbers(values)]

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding as text or, of a site without one of all sites, its sums."""
        return self._site.to_json() if self._site else self._learnt.to_json()

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

    def _trained(self, domain: str, rows: Ints) -> Ints:
        """Return the places in the domain's table of training rows, drawn anew or not."""
        test = self._open(domain).test
        own = np.flatnonzero(~test)
        in_order = np.concatenate([own, np.flatnonzero(test)]) if self.config.redraw else own
        places: Ints = in_order[self.places(domain, "train", rows)]
        return places

    def _parse(self, columns: Iterable[Column], needed: Sequence[str] = ()) -> None:
        """Read the cells of these columns of each domain, which must have those ``needed``."""
        for domain in self.domains:
            frame, decimal = self._open(domain).frame, self.files.schema.format.decimal
            check_has(self.source(domain), frame, {"as all sites": needed})
            own = [c for c in columns if c.name in frame]
            self._raw[domain] = parse(self.source(domain), frame, own, decimal)

    def learn_encoding(self, rows: Mapping[str, Ints], site: bool = False) -> None:
        if self.given:
            self._encoding = Encoding.from_json(self.given)
            self._parse(self._encoding.columns, [c.name for c in self._encoding.columns])
            return
        frames = {domain: self._open(domain).frame for domain in self.domains}
        places = {domain: self._trained(domain, own) for domain, own in rows.items()}
        trained = {domain: frames[domain].iloc[at] for domain, at in places.items()}
        listed = self.files.columns(trained, self.target_names, site)
        columns = [column for column in listed if column.is_used]
        self._parse(columns)
        raws = {domain: self._raw[domain].rows(at) for domain, at in places.items()}
        sums = {domain: summed(raw) for domain, raw in raws.items()}
        if self.files.schema.sums:
            self._encoding = merged(sums)
        else:
            self._encoding = declared(self.files.schema, [column.name for column in columns])
        used = [column.name for column in self._encoding.columns]
        if not used:
            raise refused(self.files.folder, "there is no column to predict the target by.")
        for domain, frame in frames.items():  # the held-out one, too
            check_has(self.source(domain), frame, {"as all domains of clients": used})
        every = {domain: self._open(domain).targets for domain in frames}
        predicted = {domain: every[domain][at] for domain, at in places.items()}
        targets = {d: self._target_sums(frame, predicted[d]) for d, frame in trained.items()}
        check_coding({d: [*own.counts] for d, of in targets.items() for own in of.values()})
        for domain, frame in frames.items():
            logger.info("%s", self._summary(domain, frame, used))
        found = undeclared(sums, refuse=not site)  # statistics show a site's levels
        found += differences({d: {**own, **targets[d]} for d, own in sums.items()})
        found += leaks(self._encoding, raws, predicted)
        if not site:
            both = {d: compared(self._raw[d], used, y) for d, y in every.items()}
            found += shared_rows(both, self.config.smallest_group)
        found += single_class(targets)
        for text in found:
            logger.warning(text)
        if site:
            ((domain, own),) = sums.items()
            text = "" if self.files.schema.sums else self._encoding.to_json()
            name, frame = self.config.patient, trained[domain]
            without = {
                c.name: ColumnSums(c, missing=len(frame) if c.kind == "" else 0)
                for c in listed
                if c.name not in own
            }
            patients = frame[name].nunique() if name else 0
            self._site = SiteTable({**own, **without}, targets[domain], text, patients)
        elif self.files.schema.sums:
            self.task = scaled_task(self.task, targets)

    def _target_sums(self, frame: pd.DataFrame, targets: npt.NDArray[Any]) -> dict[str, ColumnSums]:
        """Return the sums of the targets of rows, as of columns."""
        known = self.files.schema.columns
        columns = [known.get(name, Column(name)) for name in self.target_names]
        if task_of(self.task).classes:
            column = replace(columns[0], kind="category")
            return summed(Raw((column,), {column.name: targets}))
        units = {name: without_unit(frame[name])[1] for name in self.target_names}
        numeric = (replace(c, kind="number", unit=units[c.name] or c.unit) for c in columns)
        cells = zip(self.target_names, targets.reshape(len(frame), -1).T, strict=True)
        return summed(Raw(tuple(numeric), dict(cells)))

    def _summary(self, domain: str, frame: pd.DataFrame, used: Sequence[str]) -> str:
        """Describe how a domain's table was read, and what a guess without features is worth."""
        (_, targets, test), names = self._open(domain), self.target_names
        patient = self.config.patient
        other = {*used, *names, *(name for of in self._named.values() for name in of)}
        y, guess = targets[test], ""
        if test.any() and task_of(self.task).classes:
            guess = f", {pd.Series(y).value_counts(normalize=True).max():.1%} of one class"
        elif test.any() and len(names) == 1:
            guess = f", {names[0]} {np.nanmean(y):.4g} ± {np.nanstd(y):.3g}"
        about = [frame.attrs["read"], f"{test.sum()} of {len(frame)} rows are for tests{guess}"]
        about += [counted(frame[patient].nunique(), "patient")] if patient else []
        ignored = [str(name) for name in frame if name not in other]
        about += [f"ignored: {', '.join(ignored[:20])}"] if ignored else []
        return f"{self.source(domain)}: {'; '.join(about)}."

    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        encoding, where = self._learnt, self.source(domain)
        own = np.flatnonzero(self._open(domain).test == (split == "test"))
        raw = self._raw[domain].rows(own[rows])
        needed = 8 * len(rows) * len(encoding.features)
        files.check_memory(f"{where}: {len(rows)} encoded rows take", needed, "Drop columns.")
        for name, found in unknown_levels(encoding, raw).items() if split == "test" else ():
            text = "%s: %s: %s with a level that few or no training rows have."
            logger.info(text, where, name, counted(len(found), "test row"))
        return encoded(encoding, raw)
