"""The JSON file of a study, with the settings and the finished trials of each method."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, TypedDict

from fairflower import paths
from fairflower.arguments import Range
from fairflower.errors import RunFolderError
from fairflower.files import replacing
from fairflower.report.tuning import Outcome, Trial
from fairflower.server.contents import Count, conform


class TrialEntry(TypedDict):
    """A finished trial, as stored in the file."""

    number: Count
    values: dict[str, float]
    outcome: Outcome
    accuracies: list[Annotated[float, Range(0, 1)] | None]  # None: the domain was not tested
    reason: str


class Facts(TypedDict, total=False):
    """Facts that all trials of a method share. Those not listed here are numbers and strings."""

    ranges: dict[str, str]
    settings: dict[str, Any]


class MethodEntry(TypedDict):
    """A method, as stored in the file."""

    facts: Facts
    trials: list[TrialEntry]


class Content(TypedDict):
    """The whole content of a study's file."""

    methods: dict[str, MethodEntry]


class StudyFile:
    """Settings and finished trials of a study's methods, stored in a file.

    The file is replaced atomically after each trial, so a killed study loses no finished trial.

    Raises
    ------
    RunFolderError
        If the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._methods = _read(path) if path.exists() else {}

    def facts(self, method: str) -> dict[str, Any] | None:
        """Return a method's facts, or None if the method is not in the study yet."""
        return dict(self._methods[method]["facts"]) if method in self._methods else None

    def check(self, method: str, keys: Collection[str], domains: int) -> None:
        """Raise ``RunFolderError`` if a trial has different keys, or lacks a domain's accuracy."""
        for number, trial in self.trials(method).items():
            finite = sum(map(math.isfinite, trial.accuracies))
            if trial.values.keys() != set(keys):
                problem = f"it has values for {', '.join(trial.values) or 'nothing'}"
            elif trial.completed and not finite == domains == len(trial.accuracies):
                problem = f"it is complete, but has accuracies for {finite} of {domains} domains"
            else:
                continue
            raise _damaged(self._path, f"{method}, trial {number}: {problem}")

    def trials(self, method: str) -> dict[int, Trial]:
        """Return the finished trials of a method, by number."""
        return {entry["number"]: _trial(entry) for entry in self._methods[method]["trials"]}

    def add_method(self, method: str, facts: dict[str, Any]) -> None:
        """Add a method that has no trials yet."""
        self._methods[method] = {"facts": facts, "trials": []}  # type: ignore[typeddict-item]
        self._write()

    def add_trial(self, method: str, trial: Trial) -> None:
        """Add a finished trial of a method."""
        accuracies = [value if math.isfinite(value) else None for value in trial.accuracies]
        self._methods[method]["trials"].append(
            {
                "number": trial.number,
                "values": dict(trial.values),
                "outcome": trial.outcome,
                "accuracies": accuracies,
                "reason": trial.reason,
            }
        )
        self._write()

    def _write(self) -> None:
        with replacing(self._path) as temporary:
            text = json.dumps({"methods": self._methods}, indent=1, allow_nan=False)
            temporary.write_text(text, encoding="utf-8")


def _trial(entry: TrialEntry) -> Trial:
    accuracies = tuple(math.nan if value is None else value for value in entry["accuracies"])
    return Trial(entry["number"], entry["values"], entry["outcome"], accuracies, entry["reason"])


def _read(path: Path) -> dict[str, MethodEntry]:
    try:
        content = json.loads(paths.read_text(path, "utf-8-sig"))
        conform(content, Content)
        return content["methods"]  # type: ignore[no-any-return]
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error).rstrip(".")) from error


def _damaged(path: Path, why: str) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged ({why}). Delete the file and repeat the command, which reads the "
        "trials again from their run folders."
    )
