"""The leaderboard: every aggregation rule tuned alike on several benchmarks, from one file.

A study (`fairflower.plans.tuning`) for each benchmark tunes and tests all rules with plain local
training; then the best of them, by validation on all benchmarks, with other local training.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairflower.config import ClientConfig, StrategyConfig, execution, keys, read_toml, unknown
from fairflower.data import prepare
from fairflower.errors import ConfigError
from fairflower.plans.plan import Plan, parse_seeds
from fairflower.plans.protocol import SHARE, VALIDATION, Protocol, check_fresh
from fairflower.plans.tuning import Tuning
from fairflower.report.leaderboard import BOTH, CHOSEN, COLUMNS, PAPERS, PROTOCOL, TRIAL, Board
from fairflower.report.tables.notes import parts
from fairflower.report.text import listed
from fairflower.report.tuning import CRITERIA, METRICS, Trial

#: Keys of the file's protocol, with their defaults; and its tables.
_PROTOCOL: Mapping[str, Any] = {
    "strategies": "",
    "clients": "",
    "best": 0,
    "budget": 12,
    "select": "worst-then-average",
    "seeds": "1-5",
}
_TABLES = ("protocol", "settings", "benchmarks")

#: Of trials.
SEED = 0

#: Tables of settings that are a method's own, or its trial's or test's.
_OWN = ("seed", "strategy", "client")


@dataclass(frozen=True)
class Benchmark:
    """One data set with its settings, and what methods are chosen by there."""

    name: str
    settings: Mapping[str, Any]  # run config keys
    metric: str  # one of `fairflower.report.tuning.METRICS`


@dataclass(frozen=True)
class Leaderboard:
    """What a leaderboard is made of."""

    benchmarks: tuple[Benchmark, ...]  # in the order of the file
    rules: tuple[StrategyConfig, ...]  # each with plain local training
    clients: tuple[ClientConfig, ...]  # other local training, with the ``best`` of the rules
    best: int
    budget: int  # as `Protocol` has it, like those that follow
    select: str
    seeds: tuple[int, ...]

    @classmethod
    def read(cls, path: Path, given: Mapping[str, Any] | None = None) -> Leaderboard:
        """Read a TOML file with the tables ``protocol``, ``settings`` and ``benchmarks``.

        ``settings`` are run config keys of all benchmarks, over which go those of
        ``benchmarks.<name>``, and over these what is ``given``.

        Raises
        ------
        ConfigError
            On what is no such file, or has a key that is none.
        """
        flat = read_toml(path)
        _check(f"{path}: table", (key.partition(".")[0] for key in flat), _TABLES)
        protocol, common, tables = (_table(flat, name) for name in _TABLES)
        _check(f"{path}: [protocol]", protocol, _PROTOCOL)
        protocol = {**_PROTOCOL, **protocol}
        if "seed" in common or any(key.endswith(".seed") and key.count(".") == 1 for key in tables):
            raise ConfigError(f"{path}: trials have seed {SEED}, tests those of [protocol] seeds.")
        _check(f"{path}: select", [protocol["select"]], CRITERIA)
        benchmarks = []
        for name in dict.fromkeys(key.partition(".")[0] for key in tables):
            own = _table(tables, name)
            metric = own.pop("metric", "accuracy")
            _check(f"{path}: [benchmarks.{name}] metric", [metric], METRICS)
            settings = {VALIDATION: SHARE, **common, **own, **(given or {})}
            benchmarks.append(Benchmark(name, settings, metric))
        if not benchmarks or not protocol["strategies"]:
            raise ConfigError(
                f"{path} is no leaderboard: it takes [protocol] with strategies, and a table "
                "[benchmarks.<name>] for each benchmark, as experiments/leaderboard.toml."
            )
        clients = protocol["clients"]
        for name, least in (("best", 1 if clients else 0), ("budget", 1)):
            value = protocol[name]
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{path}: [protocol] {name} = {value!r}: expected a whole number, {least} or "
                    "more."
                )
        for name in ("strategies", "clients"):
            if not isinstance(protocol[name], str):
                raise ConfigError(f"{path}: [protocol] {name}: expected one text, as 'fedavg,afl'.")
        return cls(
            tuple(benchmarks),
            tuple(StrategyConfig.parse(protocol["strategies"])),
            tuple(ClientConfig.parse(clients)) if clients else (),
            protocol["best"],
            protocol["budget"],
            protocol["select"],
            _fresh(path, str(protocol["seeds"])),
        )

    def study(
        self,
        benchmark: Benchmark,
        folder: Path,
        only: Sequence[str] | None = None,
        best: Sequence[str] | None = None,
    ) -> Tuning:
        """The study of all rules with plain local training, or of the ``best`` with other.

        Of these or of those ``only`` some; both by the rules' labels.
        """
        rules = [rule for rule in self.rules if best is None or rule.label in best]
        clients = () if best is None else self.clients
        protocol = Protocol(
            self.budget, self.seeds, self.select, benchmark.metric, training=True, defaults=True
        )
        plan = Plan.grid(benchmark.settings, rules, [SEED], None, clients)
        runs = [run for run in plan.runs if only is None or run.strategy.label in only]
        own = folder / benchmark.name
        own.mkdir(parents=True, exist_ok=True)
        return Tuning(own, runs, protocol)

    def protocol(self, benchmark: Benchmark) -> dict[str, str]:
        """What all methods have in common on a benchmark.

        Settings are those that the file gives, and others that are no defaults; ``train.lr`` and
        ``train.local-epochs`` are as with the papers' values.
        """
        config, *_ = Plan.grid(benchmark.settings, self.rules[:1], [SEED], None, ()).runs
        own = {
            key: value
            for key, value in config.to_flat().items()
            if (key in benchmark.settings or value != keys()[key])
            and key.partition(".")[0] not in _OWN
            and key not in execution()
        }
        own |= {"metric": benchmark.metric, "budget": self.budget, "select": self.select}
        own |= {"seeds": ",".join(map(str, self.seeds)), "data": prepare(config.data).digest}
        return {key: str(value) for key, value in own.items()}

    def check(self, benchmark: Benchmark, board: Board, path: Path) -> None:
        """Refuse to put results beside those of another protocol in the file.

        Raises
        ------
        ConfigError
            With what is other.
        """
        if benchmark.name not in board.benchmarks:
            return
        told = shlex.split(board.protocol(benchmark.name))
        defaults = {key: str(value) for key, value in keys().items()}
        before = {**defaults, **dict(part.split("=", 1) for part in told)}
        now = {**defaults, **self.protocol(benchmark)}
        for key, value in now.items():
            if before.get(key) != value:
                raise ConfigError(
                    f"{path} has results of {benchmark.name} by another protocol: {key} was "
                    f"{before.get(key, 'not told')}, and is {value}. Delete that benchmark's rows "
                    "there, or give the changed file another name."
                )

    def rows(self, study: Tuning, benchmark: Benchmark) -> Iterator[dict[str, Any]]:
        """What the file keeps of a study, its `COLUMNS`: protocol, trials, then tests."""
        domains = shlex.join(prepare(study.methods[0].config.data).domains)
        whole = dict.fromkeys(COLUMNS, "") | {
            **{"benchmark": benchmark.name, "metric": benchmark.metric, "domains": domains},
            "number": 0,
        }

        def row(
            method: str, kind: str, number: int, trial: Trial, figures: Sequence[float], **more: str
        ) -> dict[str, Any]:
            return {
                **whole,
                **{"method": method, "kind": kind, "number": number},
                **{"settings": _told(trial.values), "figures": _told(figures)},
                **{"outcome": trial.outcome, "reason": trial.reason, **more},
            }

        told = shlex.join(f"{key}={value}" for key, value in self.protocol(benchmark).items())
        yield {**whole, "kind": PROTOCOL, "settings": told}
        for method in study.methods:
            tuned = method.tuned()
            for trial in tuned.trials:
                yield row(method.name, TRIAL, trial.number, trial, trial.accuracies)
            for trial, run in method.tests():
                figures = method.seen(run)[run.last()].mean(axis=0).tolist()
                made = (str(p.get("machine", {}).get("processor", "")) for p in parts(run))
                processors = listed(list(dict.fromkeys(made)))
                kind = _kind(trial, tuned.chosen)
                yield row(method.name, kind, run.seed, trial, figures, processor=processors)
            for trial, seed, reason in method.lost_tests():
                lost = {"outcome": "lost", "reason": reason}
                yield row(method.name, _kind(trial, tuned.chosen), seed, trial, (), **lost)


def _kind(trial: Trial, chosen: Trial | None) -> str:
    return PAPERS if trial != chosen else CHOSEN if trial.number else BOTH


def _fresh(path: Path, text: str) -> tuple[int, ...]:
    """Seeds of tests, which are not the trials'."""
    try:
        seeds = tuple(parse_seeds(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: [protocol] {str(error).removeprefix('--')}") from error
    check_fresh(f"{path}: [protocol] seeds = {text!r}", seeds, SEED, "Name others")
    return seeds


def _told(values: Mapping[str, float] | Sequence[float]) -> str:
    """Numbers as a cell has them: ``0.5 0.25``, or ``strategy.tau=0.3 train.lr=0.1``."""
    if isinstance(values, Mapping):
        return " ".join(f"{key}={value:.8g}" for key, value in values.items())
    return " ".join(f"{value:.8g}" for value in values)


def _table(flat: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The keys below a table of a flat mapping."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): v for key, v in flat.items() if key.startswith(prefix)}


def _check(what: str, found: Iterable[str], known: Iterable[str]) -> None:
    for key in map(str, found):
        if key not in known:
            raise ConfigError(f"{what}: {unknown('key', key, known)}")
