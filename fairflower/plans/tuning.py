"""Tuning of methods on validation images: trials, choice of values, and tests.

Every method gets the same number of trials. The first trial uses the paper's values. The values of
the other trials are drawn at random from the ranges declared with the arguments
(`fairflower.arguments.Search`); they do not depend on earlier trials or on the number of parallel
runs. Trials never use test images. Only the chosen values are tested, in runs with other seeds. The
outcomes of the trials are stored in a JSON file (`fairflower.plans.study_file`).
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.config import RunConfig, execution, keys, shown
from fairflower.data import prepare
from fairflower.errors import ConfigError, Diverged, RunFolderError
from fairflower.participation.availability import check_availabilities, trace_digest
from fairflower.paths import file_name
from fairflower.plans.plan import Plan, run_key, run_title
from fairflower.plans.protocol import STUDY, TuningProtocol
from fairflower.plans.search_space import search_space
from fairflower.plans.study_file import StudyFile
from fairflower.report import Run, read_run
from fairflower.report.tuning import Outcome, Trial, Tuned
from fairflower.seeds import derive_seed
from fairflower.server import checkpoint
from fairflower.server.checkpoint import resumable_configs, resumed_config
from fairflower.server.contents import read_config, read_facts


@dataclass
class MethodStudy:
    """The study of a method: trials, their outcomes, and remaining runs."""

    config: RunConfig  # of the trials, without the drawn values
    protocol: TuningProtocol
    folder: Path
    file: StudyFile
    submitted: set[str] = field(default_factory=set)  # names of the runs that were started

    def __post_init__(self) -> None:
        self.name = self.config.label
        self.search_space = search_space(self.config, self.protocol.training)
        self.budget = self.protocol.budget if self.search_space else 1
        self._check()

    def _check(self) -> None:
        """Raise ``ConfigError`` if the folder's study has different settings, ranges or data."""
        flat, left_out = self.config.to_flat(), {*execution(), *self.search_space}
        facts: dict[str, Any] = {
            "ranges": {key: str(argument.search) for key, argument in self.search_space.items()},
            "settings": {key: value for key, value in flat.items() if key not in left_out},
            "data": prepare(self.config.data).digest,
            "budget": self.budget,
            "select": self.protocol.select,
            "metric": self.protocol.metric,
        }
        if trace := trace_digest(self.config.participation.availability):
            facts["availability"] = trace
        earlier = self.file.facts(self.name)
        if earlier is None:
            self.file.add_method(self.name, facts)
            return
        for name, now in facts.items():
            # Studies of earlier versions lack the content of the file of availabilities.
            before = earlier.get(name, {"availability": now, "ranges": {}}.get(name))
            if name == "settings":
                # A study that is older than a setting used the current default of the setting.
                before, now = {**keys(), **(before or {})}, {**keys(), **now}
            if now != before:
                raise ConfigError(
                    f"{self.folder} has a study of {self.name} with different {name}: "
                    f"{_difference(before, now)}. Use the {name} of the study, or choose another "
                    "--output-dir."
                )
        domains = prepare(self.config.data).domains
        self.file.check(self.name, self.search_space.keys(), len(domains))

    # --- trials --------------------------------------------------------------------------

    def values(self, number: int) -> dict[str, float]:
        """Return a trial's values; a key that methods share has equal values for all of them."""
        if number == 0:
            return {key: argument.default for key, argument in self.search_space.items()}
        return {
            key: argument.search.at(self._place(number, key), argument.whole)
            for key, argument in self.search_space.items()
        }

    def _place(self, number: int, key: str) -> float:
        return np.random.default_rng(derive_seed(self.config.seed, number, key)).random()

    def path(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / "trials" / f"{file_name(self.name)}-trial{number}"

    def tuned(self) -> Tuned:
        """Return all trials, in the format of the report."""
        finished = self.file.trials(self.name)
        trials = [
            finished.get(number) or Trial(number, self.values(number), "unfinished")
            for number in range(self.budget)
        ]
        ranges = {key: argument.search for key, argument in self.search_space.items()}
        return Tuned(self.name, ranges, tuple(trials), self.protocol.select, self.protocol.metric)

    def record_outcomes(self) -> None:
        """Record the outcomes of trials that have finished.

        Raises ``ConfigError`` if the run folder of a trial has different settings than the trial,
        which can happen if the study's file was deleted.
        """
        for trial in self.tuned().trials:
            path = self.path(trial.number)
            if trial.outcome != "unfinished" or not (path / "run.json").exists():
                continue
            if run_key(read_config(path)) != run_key(self._trial_config(trial).to_flat()):
                raise ConfigError(
                    f"{path} has different settings than the trial of {self.name}. Use the "
                    "settings of the study, or choose another --output-dir."
                )
            facts = read_facts(path)
            outcome, reason = _outcome(facts)
            if outcome is None:
                continue
            accuracies: list[float] = []
            if outcome == "completed":
                run = read_run(path)
                accuracies = self._selection_metric(run)[run.last()].mean(axis=0).tolist()
                if not run.fully_tested():
                    outcome, reason = "lost", "some domains were not tested in every round"
            ended = replace(trial, outcome=outcome, accuracies=tuple(accuracies), reason=reason)
            self.file.add_trial(self.name, ended)

    def _selection_metric(self, run: Run) -> NDArray[np.float64]:
        """Return the metric of the criterion, shape [rounds, domains]."""
        metric = self.protocol.metric
        return run.accuracy if metric == "accuracy" else run.scores[metric]

    # --- runs ----------------------------------------------------------------------------

    def pending_runs(self) -> list[RunConfig]:
        """Return the runs that can start now and have not been started: trials, and then tests."""
        left = [trial for trial in self.tuned().trials if trial.outcome == "unfinished"]
        ready = [self._trial(trial) for trial in left] if left else self._tests()
        new = [config for config in ready if config.run_name not in self.submitted]
        self.submitted |= {config.run_name for config in new}
        return new

    def _trial(self, trial: Trial) -> RunConfig:
        """Return the run of a trial, resumed if it has a checkpoint."""
        path = self.path(trial.number)
        if path.exists() and path.name not in self.submitted:
            try:
                read_facts(path)
                saved = checkpoint.load(path)
            except (ConfigError, RunFolderError):  # it has no run.json, or no readable checkpoint
                saved = None
            if saved:
                return resumed_config(path, {"data.dir": self.config.data.dir})
            shutil.rmtree(path)
        return self._trial_config(trial)

    def _trial_config(self, trial: Trial) -> RunConfig:
        """Return the run of a trial, starting with the first round."""
        values: dict[str, Any] = {**trial.values, "run-name": self.path(trial.number).name}
        return RunConfig.from_flat(self.config.to_flat() | values)

    def _tested(self) -> dict[str, Trial]:
        """Return the trials whose values are tested, by the prefix of their tests' run names."""
        name, tuned = file_name(self.name), self.tuned()
        best, first = tuned.chosen, tuned.trials[0]
        tested = {name: best} if best else {}
        if self.protocol.defaults and first.completed and first != best:
            tested[f"{name}-default"] = first
        return tested

    def _tests(self) -> list[RunConfig]:
        """Return the remaining tests."""
        lost = self._lost()
        plan = Plan([c for c in self._planned() if run_key(c.to_flat()) not in lost])
        return plan.without(self._made()).resuming(resumable_configs(self.folder / "runs")).runs

    def _planned(self) -> Iterator[RunConfig]:
        """Yield all planned tests."""
        flat: dict[str, Any] = self.config.to_flat()
        flat |= {"evaluate.test": True, "output-dir": str(self.folder / "runs")}
        trained = [key for key in self.search_space if key.startswith("train.")]
        for run, trial in self._tested().items():
            own = {"tuned": ",".join(trained)} if run == file_name(self.name) else {}
            for seed in self.protocol.seeds:
                unit = "federation" if self.protocol.federations else "seed"
                drawn: dict[str, Any] = {"seed": seed, "run-name": f"{run}-{unit}{seed}"}
                if self.protocol.federations:
                    drawn["data.seed"] = seed
                yield RunConfig.from_flat({**flat, **own, **trial.values, **drawn})

    def _made(self) -> list[Run]:
        """Return all tests that can be read, whatever their status."""
        return [run for path in self._folders() if (run := _read(path))]

    def _lost(self) -> set[Hashable]:
        """Return the tests that diverged, by `run_key`."""
        lost = [path for path in self._folders() if _outcome(read_facts(path))[0] == "lost"]
        return {run_key(read_config(path)) for path in lost}

    def _folders(self) -> Iterator[Path]:
        names = f"{file_name(self.name)}-*/run.json"
        return (info.parent for info in (self.folder / "runs").glob(names))


class TuningStudies:
    """Studies of several methods in a folder; implements `fairflower.plans.parallel.Study`.

    Parameters
    ----------
    folder : Path
        Folder with ``study.json``, ``trials/`` and ``runs/``. Completed runs are kept.
    configs : sequence of RunConfig
        Configs of the methods, with the seed for their trials.
    protocol : TuningProtocol
        Settings of the study.

    Raises
    ------
    ConfigError
        If a test would have the same seed or federation as the trials, or if the folder has a study
        with different ranges, settings or data.
    RunFolderError
        If the study's file is damaged.
    """

    def __init__(
        self, folder: Path, configs: Sequence[RunConfig], protocol: TuningProtocol
    ) -> None:
        if protocol.metric != "accuracy" and configs[0].evaluate.by == "clients":
            raise ConfigError(
                f"--metric {protocol.metric}: clients report only accuracies, and evaluate.by = "
                "clients. Set evaluate.by=server, or choose --metric accuracy."
            )
        _check_other_seeds(configs[0], protocol)
        check_availabilities(configs)  # before the data are prepared
        trials = {"evaluate.test": False, "output-dir": str(folder / "trials")}
        file = StudyFile(folder / STUDY)
        self.methods = [
            MethodStudy(RunConfig.from_flat(config.to_flat() | trials), protocol, folder, file)
            for config in configs
        ]
        self.folder = folder
        self.total = 0  # expected number of remaining runs
        self.plan = Plan([])  # the first runs
        for method in self.methods:
            method.record_outcomes()
            self.plan.runs += method.pending_runs()
            left = method.tuned().count("unfinished")
            tests = len(protocol.seeds) * (1 + protocol.defaults)
            self.total += left + tests if left else len(method.submitted)

    def title(self, config: RunConfig) -> str:
        """Return a run's name in messages: its label, and the tuned values that labels lack."""
        flat, space = config.to_flat(), self._of(config).search_space
        tuned = [f"{key}={shown(flat[key])}" for key in space if key.startswith("train.")]
        return " ".join([run_title(config), *tuned])

    def ended(self, config: RunConfig, error: Exception | None) -> tuple[list[RunConfig], bool]:
        """Record how a run ended; return new runs to start, and whether the run diverged."""
        method = self._of(config)
        method.record_outcomes()
        return method.pending_runs(), isinstance(error, Diverged)

    def died(self, config: RunConfig) -> list[RunConfig]:
        """Return the runs to start after a run's process died, including this run if needed."""
        method = self._of(config)
        method.submitted.discard(config.run_name)
        method.record_outcomes()
        return method.pending_runs()

    def tuned(self) -> list[Tuned]:
        """Return the trials of all methods."""
        return [method.tuned() for method in self.methods]

    def _of(self, config: RunConfig) -> MethodStudy:
        return next(method for method in self.methods if config.run_name in method.submitted)


def _check_other_seeds(config: RunConfig, protocol: TuningProtocol) -> None:
    """Raise ``ConfigError`` if a test has the seed or the federation of the trials."""
    of_trials = {config.seed, config.data.seed} if protocol.federations else {config.seed}
    if shared := sorted(of_trials.intersection(protocol.seeds)):
        what = "federations" if protocol.federations else "seeds"
        change = "--seed N --set data.seed=N" if protocol.federations else "--seed N"
        raise ConfigError(
            f"--{what}: the trials have {what[:-1]} {shared[0]}, but tests need different {what}. "
            f"Choose different {what}, or move the trials with {change}."
        )


def _outcome(facts: Mapping[str, Any]) -> tuple[Outcome | None, str]:
    """Return a run's outcome and its reason; the outcome is None if the run should be resumed."""
    reason = " ".join(str(facts["error"] or "").split())
    if facts["status"] == "failed":
        # Other failures, for example a full disk, are not caused by the trial's values.
        prefix = f"{Diverged.__name__}: "
        return ("lost" if reason.startswith(prefix) else None), reason.removeprefix(prefix)
    return ("completed" if facts["status"] == "completed" else None), ""


def _read(path: Path) -> Run | None:
    """Read a run; return None if it has no tested round."""
    try:
        return read_run(path)
    except RunFolderError:
        return None


def _difference(before: Any, now: Any) -> str:
    """Describe the difference between two facts; for settings, describe the first difference."""
    if isinstance(now, dict):
        key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
        return f"{key} was {before.get(key, 'not tuned')} and is now {now.get(key, 'not tuned')}"
    return f"it was {before} and is now {now}"
