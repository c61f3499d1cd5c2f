"""TuningStudies methods on validation images: trials, the choice among them, and the test of it.

Every method has the same number of trials. The first has the paper's values, the others are drawn
at random in the ranges that are declared beside the arguments (`fairflower.arguments.Search`), in
advance and the same however many are run at a time. Trials are never tested on test images; the
chosen values are, once, in runs with other seeds. An Optuna study for each method, in one SQLite
file, keeps what became of the trials.
"""

from __future__ import annotations

import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import TrialState, create_trial

from fairflower.arguments import Search
from fairflower.config import RunConfig, argument_to_key, execution, keys
from fairflower.data import prepare
from fairflower.errors import ConfigError, Diverged, RunFolderError
from fairflower.paths import file_name
from fairflower.plans.plan import Plan, run_key
from fairflower.plans.protocol import (
    STUDY,
    BaselinePruner,
    TuningProtocol,
    check_disjoint_seeds,
    effective_sample_size,
    selection_score,
)
from fairflower.report import Run, read_run
from fairflower.report.reading import read_config
from fairflower.report.tuning import Outcome, Trial, Tuned
from fairflower.seeds import derive_seed
from fairflower.server.checkpoint import resumable_configs, resumed_config
from fairflower.server.folder import read_facts

_STATES: dict[Outcome, TrialState] = {
    "completed": TrialState.COMPLETE,
    "pruned": TrialState.PRUNED,
    "lost": TrialState.FAIL,
}


class TunableArgument(NamedTuple):
    """An argument to tune: where to look, the paper's value, and whether only whole ones do."""

    search: Search
    default: float
    whole: bool

    @property
    def distribution(self) -> BaseDistribution:
        """The same for Optuna."""
        low, high, log = self.search.low, self.search.high, self.search.log
        if self.whole:
            return IntDistribution(int(low), int(high))
        return FloatDistribution(low, high, log=log)


def search_space(config: RunConfig, training: bool = False) -> dict[str, TunableArgument]:
    """What there is to tune of a method, by run config key.

    Arguments whose default is a number and that have a range to search; those that the config
    gives stay as they are. Of ``training``, the learning rate from a fifth of the config's to five
    times that, and from one local epoch to twice the config's.
    """
    found = {
        f"{choice.TABLE}.{argument_to_key(name)}": TunableArgument(
            one.search, one.default, one.whole
        )
        for choice in (config.strategy, config.client)
        for name, one in choice.factory.argument_specs().items()
        if one.search and isinstance(one.default, (int, float)) and name not in choice.args
    }
    lr, epochs = config.train.lr, config.train.local_epochs
    if training and lr > 0:
        found["train.lr"] = TunableArgument(Search(lr / 5, 5 * lr, log=True), lr, False)
    if training and epochs > 0:
        found["train.local-epochs"] = TunableArgument(Search(1, 2 * epochs), epochs, True)
    return found


@dataclass
class MethodStudy:
    """One method's study: what is tried, how it ended, and which runs are still to be made."""

    config: RunConfig  # of a trial, without what is drawn
    protocol: TuningProtocol
    folder: Path
    storage: BaseStorage
    submitted: set[str] = field(default_factory=set)  # names of the runs that were given out

    def __post_init__(self) -> None:
        self.name = self.config.label
        self.search_space = search_space(self.config, self.protocol.training)
        self.budget = self.protocol.budget if self.search_space else 1
        self.study = optuna.create_study(
            storage=self.storage,
            study_name=self.name,
            direction="maximize",
            load_if_exists=True,
        )
        self._check()

    def _check(self) -> None:
        """Refuse to go on with a study of something else."""
        flat, left_out = self.config.to_flat(), {*execution(), *self.search_space}
        facts: dict[str, Any] = {
            "ranges": {key: str(one.search) for key, one in self.search_space.items()},
            "settings": {key: value for key, value in flat.items() if key not in left_out},
            "data": prepare(self.config.data).digest,
            "budget": self.budget,
            "select": self.protocol.select,
            "metric": self.protocol.metric,
            "prune": self.protocol.prune,
        }
        earlier = self.study.user_attrs.get("facts")
        if earlier is None:
            self.study.set_user_attr("facts", facts)
            return
        for name, now in facts.items():
            # A study made before a setting existed ran with what is now its default.
            before = {"metric": "accuracy", **earlier}[name]
            before = {**keys(), **before} if name == "settings" else before
            now = {**keys(), **now} if name == "settings" else now
            if now != before:
                raise ConfigError(
                    f"{self.folder} has a study of {self.name} with other {name}: "
                    f"{_difference(before, now)}. Give what it was begun with, or another "
                    "--output-dir."
                )

    # --- trials --------------------------------------------------------------------------

    def values(self, number: int) -> dict[str, float]:
        """What a trial tries: what methods share, as the learning rate, is the same for all."""
        if number == 0:
            return {key: one.default for key, one in self.search_space.items()}
        return {
            key: one.search.at(self._place(number, key), one.whole)
            for key, one in self.search_space.items()
        }

    def _place(self, number: int, key: str) -> float:
        return np.random.default_rng(derive_seed(self.config.seed, number, key)).random()

    def path(self, number: int) -> Path:
        """The run folder of a trial."""
        return self.folder / "trials" / f"{file_name(self.name)}-trial{number}"

    def tuned(self) -> Tuned:
        """The trials as the report shows them."""
        found = {
            trial.user_attrs["number"]: trial for trial in self.study.get_trials(deepcopy=False)
        }
        outcomes = {state: outcome for outcome, state in _STATES.items()}
        trials = [
            Trial(
                number,
                self.values(number),
                outcomes[found[number].state],
                tuple(found[number].user_attrs["accuracies"]),
                found[number].user_attrs["reason"],
            )
            if number in found
            else Trial(number, self.values(number), "unfinished")
            for number in range(self.budget)
        ]
        ranges = {key: one.search for key, one in self.search_space.items()}
        return Tuned(self.name, ranges, tuple(trials), self.protocol.select, self.protocol.metric)

    def record_outcomes(self) -> None:
        """Put into the study how trials ended whose runs did since."""
        for trial in self.tuned().trials:
            path = self.path(trial.number)
            if trial.outcome != "unfinished" or not (path / "run.json").exists():
                continue
            facts = read_facts(path)
            outcome, reason = _outcome(facts)
            if outcome is None:
                continue
            run = read_run(path) if outcome == "completed" else _read(path)
            accuracies: list[float] = []
            if run and outcome == "pruned":
                accuracies = self.selection_metric(run)[-1].tolist()
            elif run and outcome == "completed":
                accuracies = self.selection_metric(run)[run.last()].mean(axis=0).tolist()
                if not run.fully_tested():
                    outcome, reason = "lost", "not every domain was tested throughout"
            value = (
                selection_score(self.protocol.select, accuracies)
                if outcome == "completed"
                else None
            )
            self.study.add_trial(
                create_trial(
                    state=_STATES[outcome],
                    value=value,
                    params=dict(trial.values),
                    distributions={k: one.distribution for k, one in self.search_space.items()},
                    user_attrs={
                        "number": trial.number,
                        "accuracies": accuracies,
                        "reason": reason,
                    },
                    intermediate_values=self._curve(run),
                )
            )

    def _curve(self, run: Run | None) -> dict[int, float]:
        """What the criterion looks at, by round."""
        if run is None:
            return {}
        pairs = zip(run.rounds.tolist(), self.selection_metric(run), strict=True)
        return {r: selection_score(self.protocol.select, accuracies) for r, accuracies in pairs}

    def selection_metric(self, run: Run) -> NDArray[np.float64]:
        """What the criterion is of, [rounds, domains]."""
        metric = self.protocol.metric
        return run.accuracy if metric == "accuracy" else run.scores[metric]

    # --- runs ----------------------------------------------------------------------------

    def pending_runs(self) -> list[RunConfig]:
        """The runs that can be made now and were not given out before.

        First that of the paper's values, by which others are pruned; then these; then the tests.
        """
        left = [trial for trial in self.tuned().trials if trial.outcome == "unfinished"]
        first = [trial for trial in left if trial.number == 0]
        found = [self._trial(trial) for trial in first or left] if left else self._tests()
        new = [config for config in found if config.run_name not in self.submitted]
        self.submitted |= {config.run_name for config in new}
        return new

    def _trial(self, trial: Trial) -> RunConfig:
        """A trial's run, which goes on where it was if it had begun and can, else anew."""
        path = self.path(trial.number)
        if path.exists() and path.name not in self.submitted:
            try:
                return resumed_config(path, {})
            except ConfigError:  # it has no run.json yet, or no checkpoint
                shutil.rmtree(path)
        own: dict[str, Any] = {**trial.values, "run-name": path.name}
        return RunConfig.from_flat(self.config.to_flat() | own)

    def _tested(self) -> dict[str, Trial]:
        """What is tested, by how the runs' names begin."""
        name, tuned = file_name(self.name), self.tuned()
        best, first = tuned.chosen, tuned.trials[0]
        tested = {name: best} if best else {}
        if self.protocol.defaults and first.outcome == "completed" and first != best:
            tested[f"{name}-default"] = first
        return tested

    def tests(self) -> Iterator[tuple[Trial, Run]]:
        """The completed tests, each with the trial whose values it has."""
        made = {run_key(run.config): run for run in self._made() if run.status == "completed"}
        for trial, config in self._planned():
            if run := made.get(run_key(config.to_flat())):
                yield trial, run

    def lost_tests(self) -> Iterator[tuple[Trial, int, str]]:
        """Those that diverged: the trial whose values each has, its seed, and what happened."""
        lost = self._lost()
        for trial, config in self._planned():
            if (key := run_key(config.to_flat())) in lost:
                yield trial, config.seed, lost[key]

    def _tests(self) -> list[RunConfig]:
        """The tests that are still to be made."""
        lost = self._lost()
        planned = (config for _, config in self._planned())
        plan = Plan([config for config in planned if run_key(config.to_flat()) not in lost])
        return plan.without(self._made()).resuming(resumable_configs(self.folder / "runs")).runs

    def _planned(self) -> Iterator[tuple[Trial, RunConfig]]:
        """All tests, each with the trial whose values it has."""
        flat: dict[str, Any] = self.config.to_flat()
        flat |= {"evaluate.test": True, "output-dir": str(self.folder / "runs")}
        for run, trial in self._tested().items():
            for seed in self.protocol.seeds:
                own: dict[str, Any] = {"seed": seed, "run-name": f"{run}-seed{seed}"}
                yield trial, RunConfig.from_flat({**flat, **trial.values, **own})

    def _made(self) -> list[Run]:
        """The tests that can be read, however they ended."""
        return [run for path in self._folders() if (run := _read(path))]

    def _lost(self) -> dict[Hashable, str]:
        """What happened to tests that diverged, perhaps before there was anything to read."""
        found: dict[Hashable, str] = {}
        for path in self._folders():
            outcome, reason = _outcome(read_facts(path))
            if outcome == "lost":
                found[run_key(read_config(path))] = reason
        return found

    def _folders(self) -> Iterator[Path]:
        names = f"{file_name(self.name)}-*/run.json"
        return (info.parent for info in (self.folder / "runs").glob(names))

    def watch(self, config: RunConfig) -> BaselinePruner | None:
        """What prunes a trial: neither that of the paper's values, nor a test."""
        first, *others = self.tuned().trials
        names = {self.path(trial.number).name for trial in others}
        if not self.protocol.prune or first.outcome != "completed" or config.run_name not in names:
            return None
        federation = prepare(config.data)
        return BaselinePruner.of(
            self.protocol,
            federation.domains,
            self._curve(_read(self.path(0))),
            config.num_server_rounds,
            self._images,
        )

    @cached_property
    def _images(self) -> float:
        """What the validation images of the smallest domain are worth."""
        federation = prepare(self.config.data)
        labels = (federation.test(domain, "validation").y for domain in federation.domains)
        return min(effective_sample_size(own, self.protocol.metric) for own in labels)


class TuningStudies:
    """The tuning of several methods in one folder: which runs it takes, and what came out.

    Parameters
    ----------
    folder
        ``study.db``, ``trials/`` and ``runs/`` go into it; what is there is not made again.
    configs
        The methods, with the seed of their trials.

    Raises
    ------
    ConfigError
        If a test is to have the trials' seed, or the folder has a study of other ranges, settings
        or data.
    """

    def __init__(
        self, folder: Path, configs: Sequence[RunConfig], protocol: TuningProtocol
    ) -> None:
        remedy = "Name others, or give the trials another with --seed N"
        check_disjoint_seeds("--seeds", protocol.seeds, configs[0].seed, remedy)
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        trials = {"evaluate.test": False, "output-dir": str(folder / "trials")}
        storage = RDBStorage(f"sqlite:///{folder / STUDY}")
        self.methods = [
            MethodStudy(RunConfig.from_flat(config.to_flat() | trials), protocol, folder, storage)
            for config in configs
        ]
        self.folder = folder
        self.total = 0  # runs that are still to be made, as far as can be known
        self.plan = Plan([])  # those with which to begin
        for method in self.methods:
            method.record_outcomes()
            self.plan.runs += method.pending_runs()
            left = method.tuned().count("unfinished")
            tests = len(protocol.seeds) * (1 + protocol.defaults)
            self.total += left + tests if left else len(method.submitted)

    def watch(self, config: RunConfig) -> BaselinePruner | None:
        """Make what prunes a trial that begins."""
        return self._of(config).watch(config)

    def ended(self, config: RunConfig, error: Exception | None) -> tuple[list[RunConfig], bool]:
        """Note how a run ended; give those that can be made now. One that diverged is lost."""
        method = self._of(config)
        method.record_outcomes()
        return method.pending_runs(), isinstance(error, Diverged)

    def died(self, config: RunConfig) -> list[RunConfig]:
        """Give what can be made when a run's process has died: the run once more, if need be."""
        method = self._of(config)
        method.submitted.discard(config.run_name)
        method.record_outcomes()
        return method.pending_runs()

    def tuned(self) -> list[Tuned]:
        """All methods' trials."""
        return [method.tuned() for method in self.methods]

    def _of(self, config: RunConfig) -> MethodStudy:
        return next(method for method in self.methods if config.run_name in method.submitted)


def _outcome(facts: Mapping[str, Any]) -> tuple[Outcome | None, str]:
    """How a run ended, and why; None if it is to go on."""
    reason = " ".join(str(facts["error"] or "").split())
    if facts["status"] == "failed":
        # Of what fails otherwise, as on a full disk, the values are not to blame.
        prefix = f"{Diverged.__name__}: "
        return ("lost" if reason.startswith(prefix) else None), reason.removeprefix(prefix)
    if facts["status"] == "pruned":
        return "pruned", reason
    return ("completed" if facts["status"] == "completed" else None), ""


def _read(path: Path) -> Run | None:
    """A run, if a round of it was tested."""
    try:
        return read_run(path)
    except RunFolderError:
        return None


def _difference(before: Any, now: Any) -> str:
    """What is other, in words; of settings the first."""
    if isinstance(now, dict):
        key = next(key for key in {**before, **now} if before.get(key) != now.get(key))
        return f"{key} was {before.get(key, 'not tuned')}, and is {now.get(key, 'not tuned')}"
    return f"it was {before}, and is {now}"
