"""The ledger: a CSV file next to the design, with a row for each finished run."""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from io import StringIO
from pathlib import Path
from typing import Any, Literal, Self, get_args

from fairflower.config import RunConfig, keys, method_key, shown
from fairflower.errors import RunFolderError
from fairflower.participation.availability import trace_digest
from fairflower.paths import read_text

#: A run is completed or lost. It is lost if it diverged, or if a domain was not tested in every
#: round.
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
    reason: str  # why the run is lost
    processor: str
    seconds: float
    data: str  # digest of what every client holds
    key: str  # digest of the config
    margins: str = ""  # of the design when the run was confirmed; empty in other stages

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
        values: dict[str, Any] = dict(cells)
        values["federation"] = int(values["federation"])
        values["seconds"] = float(values["seconds"])
        row = cls(**values)
        expected = len(row.domain_names) if row.outcome == "completed" else 0
        if row.outcome not in get_args(Outcome) or None in values.values():
            raise ValueError(f"invalid outcome {row.outcome!r}, or missing cells")
        if len(row.accuracies) != expected or not all(0 <= a <= 1 for a in row.accuracies):
            raise ValueError(f"expected {expected} accuracies from 0 to 1")
        if not 0 <= row.seconds < math.inf:
            raise ValueError(f"seconds = {row.seconds}")
        return row


COLUMNS = tuple(field.name for field in fields(Row))


def key_of(config: RunConfig) -> str:
    """Return a digest of the seed and the settings that affect a run's result.

    Settings that only affect execution are left out. Settings with default values are also left
    out, so that later versions with new settings give the same digest. A file named
    by `participation.availability` is represented by its content.
    """
    defaults = {key: shown(value) for key, value in keys().items()}
    found = method_key(config.to_flat()) | {("seed", str(config.seed))}
    if trace := trace_digest(config.participation.availability):
        found |= {("trace", trace)}
    told = sorted(pair for pair in found if defaults.get(pair[0]) != pair[1])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


class Ledger:
    """The rows of the file, by `key_of`. A row is saved to disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        """Read the file if it exists. An incomplete last line is dropped.

        Raises
        ------
        RunFolderError
            If the file is not a ledger, or if one of its rows cannot be read.
        """
        self.path = path
        self.rows: dict[str, Row] = {}
        if not path.exists():
            return
        try:
            text = read_text(path, "utf-8-sig")
            whole = text[: text.rfind("\n") + 1]
            reader = csv.DictReader(StringIO(whole), strict=True)
            lines, columns = list(reader), tuple(reader.fieldnames or ())
        except (csv.Error, UnicodeDecodeError) as error:
            raise RunFolderError(f"{path} cannot be read: {error}.") from error
        if columns != COLUMNS:
            raise RunFolderError(
                f"{path} is not a leaderboard's ledger: it has unexpected columns."
            )
        for number, cells in enumerate(lines, start=2):
            try:
                row = Row.read(cells)
            except (TypeError, ValueError) as error:
                raise RunFolderError(f"{path}, row {number} cannot be read: {error!r}.") from error
            self.rows[row.key] = row
        if whole != text:
            path.write_text(whole, encoding="utf-8")

    def add(self, row: Row) -> None:
        """Append a row.

        Raises
        ------
        RunFolderError
            If the clients' data differ from those in earlier runs of this federation.
        """
        for other in self.rows.values():
            place = (row.stage, row.benchmark, row.federation)
            same = (other.stage, other.benchmark, other.federation) == place
            if same and row.stage != "sweep" and other.data != row.data:
                raise RunFolderError(
                    f"{self.path}: clients of {row.benchmark}, federation {row.federation}, have "
                    f"different data than in earlier runs ({row.data} instead of {other.data}). "
                    "Restore the data, or delete the rows of this benchmark."
                )
        new = not self.path.exists()
        with self.path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(COLUMNS)
            writer.writerow(astuple(row))
            file.flush()
            os.fsync(file.fileno())
        self.rows[row.key] = row
