"""The ledger: a CSV file next to the design, with a row for each finished run."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Self, get_args

from fairflower.config import RunConfig
from fairflower.config.run import method_key
from fairflower.config.text import shown
from fairflower.errors import RunFolderError
from fairflower.files import cell_of, text_of
from fairflower.participation.availability import trace_digest
from fairflower.paths import check_regular
from fairflower.server.folder import lock_folder

#: A run is completed or lost. It is lost if its loss or model became NaN or infinite, or if some
#: domain was not tested in every round.
Outcome = Literal["completed", "lost"]


@dataclass(frozen=True)
class Row:
    """A finished run. Accuracies are fractions, averaged over the last five tested rounds."""

    stage: str
    benchmark: str
    method: str
    federation: int
    settings: str  # tried or varied settings, "train.lr=0.1 strategy.tau=0.3"
    domains: str  # names, quoted as for a shell
    validation: str  # accuracy by domain, in this order; empty if not measured
    test: str  # the same on test examples; empty for a trial
    outcome: Outcome
    reason: str  # why the run is lost; if it is completed, a warning that its loss was very large
    processor: str
    seconds: float
    data: str  # digest of what every client holds
    key: str  # digest of the config
    margins: str = ""  # of the design when the run was confirmed; empty before and in sweeps

    @property
    def completed(self) -> bool:
        """Whether the run was completed, so that it has accuracies."""
        return self.outcome == "completed"

    @property
    def accuracies(self) -> tuple[float, ...]:
        """Accuracies by domain on test examples if measured, else on validation; empty if lost."""
        return tuple(map(float, (self.test or self.validation).split()))

    @property
    def domain_names(self) -> list[str]:
        """Names of the domains, in the order of the accuracies."""
        return shlex.split(self.domains)

    @classmethod
    def read(cls, cells: Mapping[str, str]) -> Self:
        """Return the row with these cells of the file, given by column."""
        values: dict[str, Any] = {k: text_of(cell) for k, cell in cells.items()}
        values["federation"] = int(values["federation"])
        values["seconds"] = float(values["seconds"])
        row = cls(**values)
        expected = len(row.domain_names) if row.completed else 0
        if row.outcome not in get_args(Outcome) or None in values.values():
            raise ValueError(f"invalid outcome {row.outcome!r}, or missing cells")
        if len(row.accuracies) != expected or not all(0 <= a <= 1 for a in row.accuracies):
            raise ValueError(f"expected {expected} accuracies from 0 to 1")
        if not 0 <= row.seconds < math.inf:
            raise ValueError(f"seconds = {row.seconds}")
        return row


COLUMNS = tuple(field.name for field in fields(Row))


def key_of(config: RunConfig, settings: frozenset[tuple[str, str]] | None = None) -> str:
    """Return a digest of the seed and the settings that affect a run's result.

    Settings that only affect execution are left out. Settings with default values are also left
    out, so that later versions with new settings give the same digest. A file named
    by `participation.availability` is represented by its content. ``settings`` are those of
    `settings_of` if they are known.
    """
    seeds = _changed({("seed", str(config.seed)), ("data.seed", str(config.data.seed))})
    changed = sorted((settings_of(config) if settings is None else settings) | seeds)
    return hashlib.sha256(json.dumps(changed).encode()).hexdigest()[:16]


def settings_of(config: RunConfig) -> frozenset[tuple[str, str]]:
    """Return the settings in `key_of` with their values, except seeds."""
    chosen = {pair for pair in method_key(config.to_flat()) if pair[0] != "data.seed"}
    if trace := trace_digest(config.participation.availability):
        chosen |= {("trace", trace)}
    return _changed(chosen)


def _changed(settings: Iterable[tuple[str, str]]) -> frozenset[tuple[str, str]]:
    return frozenset(pair for pair in settings if _defaults().get(pair[0]) != pair[1])


@cache
def _defaults() -> dict[str, str]:
    return {key: shown(value) for key, value in RunConfig().to_flat().items()}


class Ledger:
    """The rows of the file, by `key_of`. A row is saved to disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        """Read the file if it exists; ignore a last line that a killed process left incomplete.

        Raises
        ------
        RunFolderError
            If the file is not a ledger, one of its rows cannot be read, or two rows of the same run
            differ in their results.
        """
        self.path = path
        self.rows: dict[str, Row] = {}
        self._end: int | None = None  # where an incomplete last line begins
        if not path.exists():
            return
        check_regular(path)
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            self._end = end
        try:
            whole = content[:end].decode("utf-8-sig")
            reader = csv.DictReader(StringIO(whole), strict=True)
            lines, columns = list(reader), tuple(reader.fieldnames or ())
        except (csv.Error, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path} cannot be read: {error}.") from error
        header = ",".join(COLUMNS)
        begun = content.decode("utf-8-sig", "ignore")
        if columns != COLUMNS and (whole or not header.startswith(begun)):
            raise RunFolderError(
                f"{path} is not a leaderboard's ledger: it has unexpected columns."
            )
        for number, cells in enumerate(lines, start=2):
            try:
                row = Row.read(cells)
            except (TypeError, ValueError) as error:
                raise RunFolderError(f"{path}, row {number} cannot be read: {error!r}.") from error
            twin = self.rows.setdefault(row.key, row)
            if (twin.outcome, twin.accuracies) != (row.outcome, row.accuracies):
                raise RunFolderError(
                    f"{path}, row {number}: another row of the same run has other results. Delete "
                    "one of the two."
                )

    @classmethod
    @contextmanager
    def locked(cls, path: Path) -> Iterator[Self]:
        """Yield the ledger; meanwhile no other process on this machine can lock it.

        Raises ``ConfigError`` if another process has locked it.
        """
        held = lock_folder(path.parent, f".{path.name}.lock")
        try:
            yield cls(path)
        finally:
            held.release()

    def add(self, row: Row, planned: Iterable[str] | None = None) -> None:
        """Append a row, and remove an incomplete line before it.

        Parameters
        ----------
        planned : iterable of str, optional
            Keys of the rows with which the clients' data are compared; by default all. It is
            iterated only if some row has other data.

        Raises
        ------
        RunFolderError
            If the clients' data differ from those in earlier runs of this federation.
        """
        place = (row.stage, row.benchmark, row.federation)
        others = {
            key: other.data
            for key, other in self.rows.items()
            if (other.stage, other.benchmark, other.federation) == place and other.data != row.data
        }
        if others and row.stage != "sweep":
            compared = others.keys() & (self.rows if planned is None else planned)
            if compared:
                raise RunFolderError(
                    f"{self.path}: clients of {row.benchmark}, federation {row.federation}, have "
                    f"different data than in earlier runs ({row.data} instead of "
                    f"{others[min(compared)]}). Restore the data, or delete the rows of this "
                    "benchmark."
                )
        if self._end is not None:
            os.truncate(self.path, self._end)
            self._end = None
        new = not self.path.exists() or not self.path.stat().st_size
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow(map(cell_of, astuple(row)))
            file.flush()
            os.fsync(file.fileno())
        self.rows[row.key] = row
