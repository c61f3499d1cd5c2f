"""Tuning of methods on validation examples: trials, choice of values, and tests.

Every method gets the same number of trials. The first trial uses the paper's values. The values of
the other trials are drawn at random from the ranges declared with the arguments
(`fairflower.arguments.Search`); they do not depend on earlier trials or on the number of parallel
runs. Trials never use test examples. Only the chosen values are tested, in runs with other seeds.
All outcomes are read from the run folders, so a study continues from whatever runs it has.
"""

import shutil
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fairflower.arguments import ArgumentSpec, Search
from fairflower.config import RunConfig
from fairflower.config.run import changed_settings, tuned_keys
from fairflower.config.settings import SERVER_LR
from fairflower.config.text import argument_to_key, shown, unknown
from fairflower.data import prepare
from fairflower.errors import ConfigError, RunFolderError
from fairflower.numerics.scores import ACCURACY, Score
from fairflower.participation.availability import check_availabilities
from fairflower.paths import file_name
from fairflower.plans.plan import Plan, check_same_files, run_key, run_title
from fairflower.report import read_run
from fairflower.report.tuning import Outcome, Trial, Tuned
from fairflower.seeds import derive_seed
from fairflower.server import checkpoint
from fairflower.server.checkpoint import check_same_examples
from fairflower.server.contents import divergence, read_config, read_facts


def search_space(config: RunConfig, training: bool = False) -> dict[str, ArgumentSpec]:
    """Return the arguments to tune of a config's strategy and client, by run config key.

    These are all arguments that have a numeric default and a search range and that the config does
    not set, and, except for references, a server optimizer's momentum and learning rate, from a
    tenth to ten times the config's value. With ``training``, they include the clients' learning
    rate, from a fifth to five times the config's value, and the number of local epochs, from 1 to
    twice the config's value.
    """
    arguments = {
        f"{choice.TABLE}.{argument_to_key(name)}": spec
        for choice in (config.strategy, config.client)
        for name, spec in choice.factory.argument_specs().items()
        if spec.search and isinstance(spec.default, (int, float)) and name not in choice.args
    }
    if (server := config.server).optimizer != "none" and not config.reference:
        lr = server.lr or SERVER_LR[server.optimizer]
        arguments["server.lr"] = ArgumentSpec(lr, search=Search(lr / 10, 10 * lr, log=True))
        if server.optimizer not in ("sgd", "adagrad"):
            arguments["server.momentum"] = ArgumentSpec(server.momentum, search=Search(0, 0.99))
    lr, epochs = config.train.lr, config.train.local_epochs
    if training and lr > 0:
        arguments["train.lr"] = ArgumentSpec(lr, search=Search(lr / 5, 5 * lr, log=True))
    if training and epochs > 0:
        search = Search(1, 2 * epochs)
        arguments["train.local-epochs"] = ArgumentSpec(epochs, whole=True, search=search)
    return arguments


@dataclass(frozen=True)
class TuningProtocol:
    """Settings of a study, which are the same for all methods."""

    budget: int  # trials per method
    seeds: Sequence[int]  # of the tests
    select: str  # criterion for choosing a trial, a key of `fairflower.report.tuning.CRITERIA`
    metric: str = ""  # score of the criterion, one of the data's; "": the primary score
    training: bool = False  # whether the learning rate and the local epochs are also tuned
    defaults: bool = False  # whether the paper's values are also tested
    federations: bool = False  # whether each seed of the tests is also that of the federation


@dataclass
class MethodStudy:
    """The study of a method: trials, their outcomes, and remaining runs."""

    config: RunConfig  # of the trials, without the drawn values
    protocol: TuningProtocol
    folder: Path
    submitted: set[str] = field(default_factory=set)  # names of the runs that were started
    finished: dict[int, Trial] = field(default_factory=dict)  # by number
    metric: Score = ACCURACY  # of the criterion

    def __post_init__(self) -> None:
        self.name = self.config.label
        self.search_space = search_space(self.config, self.protocol.training)
        self.budget = self.protocol.budget if self.search_space else 1
        self._check()

    def _check(self) -> None:
        """Raise ``ConfigError`` if a trial in the folder has other settings, values or data."""
        federation = None
        for number in range(self.budget):
            path = self.path(number)
            if not (path / "run.json").exists():
                continue
            with _advising_to_repeat(path):
                facts, before = read_facts(path), read_config(path)
            now = self._trial_config(number).to_flat()
            if run_key(before) != run_key(now):
                changed = {key for key, _ in run_key(before)[0] ^ run_key(now)[0]}
                if before["seed"] != now["seed"]:  # which changes all drawn values
                    changed = {"seed"}
                differences = changed_settings(before, now, {*before, *now} - changed)
                raise ConfigError(
                    f"{path} has other settings: {differences}. Repeat the study's settings, seed, "
                    "--tune-training, and ranges and defaults of arguments, or choose another "
                    "--output-dir."
                )
            federation = federation or prepare(self.config.data)
            check_same_examples(path, facts, federation)
            check_same_files(path, facts, self.config)

    # --- trials --------------------------------------------------------------------------

    def values(self, number: int) -> dict[str, float]:
        """Return a trial's values; a key that methods share has equal values for all of them."""
        if number == 0:
            return {key: argument.default for key, argument in self.search_space.items()}
        seeds = {key: derive_seed(self.config.seed, number, key) for key in self.search_space}
        return {
            key: argument.at(np.random.default_rng(seeds[key]).random())
            for key, argument in self.search_space.items()
        }

    def path(self, number: int) -> Path:
        """Return the run folder of a trial."""
        return self.folder / "trials" / f"{file_name(self.name)}-trial{number}"

    def tuned(self) -> Tuned:
        """Return all trials, in the format of the report."""
        trials = [
            self.finished.get(number) or Trial(number, self.values(number), "unfinished")
            for number in range(self.budget)
        ]
        ranges = {k: spec.search for k, spec in self.search_space.items() if spec.search}
        metric = self.metric.legible(float(np.mean(t.scores)) for t in trials if t.scores)
        return Tuned(self.name, ranges, tuple(trials), self.protocol.select, metric)

    def _record_outcomes(self) -> None:
        for number in self._unfinished():
            path = self.path(number)
            if not (path / "run.json").exists():
                continue
            with _advising_to_repeat(path):
                facts = read_facts(path)
                outcome, reason = _outcome(facts)
                run = read_run(path) if outcome == "completed" else None
            scores: list[float] = []
            if run:
                tests = run.tests_by(self.metric.name)
                if tests.fully_tested() and run.last_round == facts["rounds"]:
                    scores = tests.final().tolist()
                else:
                    outcome, reason = "lost", "some domains were not tested in every round"
            if outcome:
                values = self.values(number)
                self.finished[number] = Trial(number, values, outcome, tuple(scores), reason)

    def _unfinished(self) -> list[int]:
        return [number for number in range(self.budget) if number not in self.finished]

    # --- runs ----------------------------------------------------------------------------

    def next_runs(self) -> list[RunConfig]:
        """Record which trials have ended; return the runs that can start, trials and then tests."""
        self._record_outcomes()
        if left := self._unfinished():
            # `_prepare_trial` would delete the folder of a trial that is running.
            fresh = [n for n in left if self.path(n).name not in self.submitted]
            new = [self._prepare_trial(number) for number in fresh]
        else:
            new = [c for c in self._remaining_tests() if c.run_name not in self.submitted]
        self.submitted |= {config.run_name for config in new}
        return new

    def _prepare_trial(self, number: int) -> RunConfig:
        """Return a trial's run, resumed from its checkpoint; without one, delete its folder."""
        path, config = self.path(number), self._trial_config(number)
        # It may have no run.json or no readable checkpoint, or be a copy whose clients have state.
        with suppress(ConfigError, RunFolderError):
            checkpoint.check_own_states(path, read_facts(path))
            if checkpoint.load(path):
                return replace(config, resume=str(path))
        if path.exists():
            shutil.rmtree(path)
        return config

    def _trial_config(self, number: int) -> RunConfig:
        values: dict[str, Any] = {**self.values(number), "run-name": self.path(number).name}
        return RunConfig.from_flat(self.config.to_flat() | values)

    def _tested(self) -> dict[str, Trial]:
        """Return the trials whose values are tested, by the prefix of their tests' run names."""
        name, tuned = file_name(self.name), self.tuned()
        best, first = tuned.chosen, tuned.trials[0]
        tested = {name: best} if best else {}
        if self.protocol.defaults and first.completed and first != best:
            tested[f"{name}-default"] = first
        return tested

    def _remaining_tests(self) -> list[RunConfig]:
        made, lost = [], set()
        for path, key, facts in self.made_tests():
            if _outcome(facts)[0] == "lost":
                lost.add(key)
            else:
                with suppress(RunFolderError):  # it has no tested round
                    made.append(read_run(path))
        plan = Plan([c for c in self._planned_tests() if run_key(c.to_flat()) not in lost])
        left = plan.without(made)
        plan.update_tuned(made)  # an earlier choice may have had the same values by default
        return left.resuming(self.folder / "runs").runs

    def _planned_tests(self) -> Iterator[RunConfig]:
        flat: dict[str, Any] = self.config.to_flat()
        flat |= {"evaluate.test": True, "output-dir": str(self.folder / "runs")}
        tuned = ",".join(dict.fromkeys([*tuned_keys(flat), *self.search_space]))
        for run, trial in self._tested().items():
            own = {"tuned": tuned} if run == file_name(self.name) else {}
            for seed in self.protocol.seeds:
                unit = "federation" if self.protocol.federations else "seed"
                drawn: dict[str, Any] = {"seed": seed, "run-name": f"{run}-{unit}{seed}"}
                if self.protocol.federations:
                    drawn["data.seed"] = seed
                yield RunConfig.from_flat({**flat, **own, **trial.values, **drawn})

    def made_tests(self) -> Iterator[tuple[Path, Hashable, Mapping[str, Any]]]:
        """Yield folder, `run_key` and facts of planned tests; damaged ones will be repeated."""
        planned = {run_key(c.to_flat()) for c in self._planned_tests()}
        for info in (self.folder / "runs").glob(f"{file_name(self.name)}-*/run.json"):
            with suppress(RunFolderError):
                facts, key = read_facts(info.parent), run_key(read_config(info.parent))
                if key in planned:
                    yield info.parent, key, facts


class TuningStudies:
    """Studies of several methods in a folder; implements `fairflower.plans.parallel.Study`.

    ``folder`` has ``trials/`` and ``runs/``, whose completed runs are kept. ``configs`` are those
    of the methods, with the seed for their trials. Raises ``ConfigError`` if a test would have the
    same seed or federation as the trials, or if the folder has trials with other settings, values
    or data, and ``RunFolderError`` if the folder of a trial is damaged.
    """

    def __init__(
        self, folder: Path, configs: Sequence[RunConfig], protocol: TuningProtocol
    ) -> None:
        _check_other_seeds(configs[0], protocol)
        check_availabilities(configs)  # before the data are prepared
        metric = _metric(configs[0], protocol)
        trials = {"evaluate.test": False, "output-dir": str(folder / "trials")}
        self.methods = [
            MethodStudy(
                RunConfig.from_flat(config.to_flat() | trials), protocol, folder, metric=metric
            )
            for config in configs
        ]
        self.folder = folder
        self.total = 0  # largest possible number of remaining runs
        self.plan = Plan([])  # the first runs
        for method in self.methods:
            self.plan.runs += method.next_runs()
            left = method.tuned().count("unfinished")
            tests = len(protocol.seeds) * (1 + (protocol.defaults and bool(method.search_space)))
            self.total += (left + tests) if left else len(method.submitted)

    def title(self, config: RunConfig) -> str:
        """Return a run's name in messages: its label, and the tuned values that labels lack."""
        flat, space = config.to_flat(), self._of(config).search_space
        tuned = [
            f"{key}={shown(flat[key])}" for key in space if key.startswith(("train.", "server."))
        ]
        return " ".join([run_title(config), *tuned])

    def ended(self, config: RunConfig, error: Exception | None) -> list[RunConfig]:
        """Record how a run ended; return new runs to start."""
        return self._of(config).next_runs()

    def died(self, config: RunConfig) -> list[RunConfig]:
        """Return the runs to start after a run's process died, including this run if needed."""
        method = self._of(config)
        method.submitted.discard(config.run_name)
        return method.next_runs()

    def test_folders(self) -> list[Path]:
        """Return the folders of planned tests, without tests of values that were chosen earlier."""
        return sorted({path for method in self.methods for path, _, _ in method.made_tests()})

    def tuned(self) -> list[Tuned]:
        """Return the trials of all methods."""
        return [method.tuned() for method in self.methods]

    def _of(self, config: RunConfig) -> MethodStudy:
        return next(method for method in self.methods if config.run_name in method.submitted)


def _metric(config: RunConfig, protocol: TuningProtocol) -> Score:
    """Return the score by which trials are chosen; raise ``ConfigError`` if the data have none."""
    task = prepare(config.data).learns
    scores = {score.name: score for score in task.scores}
    primary = next(iter(scores))
    name = protocol.metric or primary
    if name not in scores:
        raise ConfigError(f"--metric: {unknown('score', name, scores)}")
    if name != primary and config.evaluate.by == "clients" and task.keeps == "predictions":
        raise ConfigError(
            f"--metric {name}: clients do not report this score, and evaluate.by = clients. Set "
            f"evaluate.by=server, or choose --metric {primary}."
        )
    return scores[name]


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
    if facts["status"] == "completed":
        return "completed", ""
    if facts["status"] == "failed" and (reason := divergence(facts)) is not None:
        return "lost", reason
    return None, ""  # other failures, such as a full disk, are not caused by the trial's values


@contextmanager
def _advising_to_repeat(path: Path) -> Iterator[None]:
    """Add to errors about the folder of a trial how to repeat the trial."""
    try:
        yield
    except RunFolderError as error:
        raise RunFolderError(
            f"{error} To repeat this trial, delete {path} and repeat the command."
        ) from error
