"""The design of a leaderboard: a TOML file that is written before the runs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from fairflower.arguments import Count, Range, conform
from fairflower.config import ClientConfig, RunConfig, StrategyConfig
from fairflower.config.run import COMPARED_TABLES
from fairflower.config.text import flatten_tables, is_argument, names_in, read_tables, unknown
from fairflower.errors import ConfigError, quoted
from fairflower.plans.plan import grid_configs, parse_seeds, references_named
from fairflower.registry import REFERENCES

#: Types of the file's keys, by table.
_TRIED = Annotated[int, Range(1, 4096)]
_POINTS = Annotated[float, Range(0, 100)]
_NUMBERS = str | int  # "0-4", or a single number
#: Keys whose values are lists: text with commas, or a list of TOML.
_LISTS = ("screened", "confirmed", "methods", "references", "tuned-on", "federations")
_REQUIRED: Mapping[str, Any] = {
    **{"results": str, "reference": str, "screened": str, "confirmed": str},
    **{"points": _TRIED, "again": _TRIED, "scrambling": Count},
    **{"tuned-on": _NUMBERS, "federations": _NUMBERS},
}
_PROTOCOL: Mapping[str, Any] = {
    **{**_REQUIRED, "references": str},
    **{"margin": _POINTS, "margin-average": _POINTS, "margin-std": _POINTS},
}
_BENCHMARK: Mapping[str, Any] = {
    **{"federations": _NUMBERS, "confirmed": str, "same-data": str},
    "overlap": Annotated[float, Range(0, 1e6)],
}
_SWEEP: Mapping[str, Any] = {
    **{"of": str, "methods": str, "federations": _NUMBERS},
    **{"vary": dict[str, Any], "settings": dict[str, Any]},
}
_TABLES: Mapping[str, Any] = {
    **{"protocol": dict[str, Any], "settings": dict[str, Any]},
    **{"benchmarks": dict[str, dict[str, Any]], "sweeps": dict[str, dict[str, Any]]},
}

#: Keys that the federation and the stage decide: partition, first model, batches and tests.
_OWN = ("seed", "data.seed", "evaluate.test")


@dataclass(frozen=True)
class Margins:
    """Differences in points below which two methods count as equivalent."""

    worst: float = 2.0  # in the worst half of the domains, the worst domain and each domain
    average: float = 1.0
    std: float = 1.0

    def __str__(self) -> str:
        return f"{self.worst:g} {self.average:g} {self.std:g}"


@dataclass(frozen=True, eq=False)
class Benchmark:
    """A data set with its settings, and the methods and federations of its confirmation."""

    name: str
    settings: Mapping[str, Any]  # run config keys
    confirmed: tuple[str, ...]  # methods; last ``alone`` and ``pooled``, which are not judged
    federations: tuple[int, ...]
    #: Ratio of test examples to training examples in a federation, if federations are redrawn from
    #: the same examples (Nadeau and Bengio 2003). 0 if federations hardly overlap, or if claims are
    #: about these examples only.
    overlap: float = 0.0
    #: Name of the benchmark that has the same people or images; empty if none has. Means over
    #: benchmarks count both as one.
    same_data: str = ""


@dataclass(frozen=True)
class Sweep:
    """Variations of a benchmark's settings. Methods keep the values chosen on the benchmark."""

    name: str
    benchmark: Benchmark
    methods: tuple[str, ...]
    federations: tuple[int, ...]
    #: Name of each variation, such as ``train.local-epochs=8`` -> run config keys that override
    #: the benchmark's.
    places: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Design:
    """The methods, benchmarks and federations of a leaderboard, and how methods are tuned.

    A method's name is a strategy, such as ``fedheal``, or a client and a strategy, such as
    ``gsam+fedism``. In federation i, ``seed`` and ``data.seed`` are i, so the partition, the
    clients' data, the initial model and the batches all depend on i.
    """

    path: Path
    reference: str
    screened: tuple[str, ...]
    benchmarks: tuple[Benchmark, ...]  # in the order of the file
    sweeps: tuple[Sweep, ...]
    points: int  # settings tried for each method, the first being the paper's
    again: int  # number of best points that are tried on the other federations, too
    scrambling: int  # seed for the points
    tuned_on: tuple[int, ...]  # federations; all points are tried on the first
    margins: Margins
    results: Path

    @classmethod
    def read(cls, path: Path, given: Mapping[str, Any] | None = None) -> Design:
        """Read a TOML file with tables ``protocol``, ``settings``, ``benchmarks`` and ``sweeps``.

        ``settings`` are run config keys for all benchmarks. Keys in ``benchmarks.<name>`` override
        them, and keys in ``given`` override both.

        Raises
        ------
        ConfigError
            If the file is not a design, has an unknown key or method, or uses a federation both for
            tuning and for confirmation.
        """
        file = read_tables(path)
        _checked(str(path), file, _TABLES, "table")
        protocol, common, tables, sweeps = (file.get(name, {}) for name in _TABLES)
        protocol = _checked(f"{path}: [protocol]", protocol, _PROTOCOL)
        if missing := [key for key in _REQUIRED if key not in protocol]:
            raise ConfigError(
                f"{path}: [protocol] lacks {', '.join(missing)}. Add every missing key; "
                "experiments/leaderboard.toml is an example."
            )
        _methods(path, protocol["reference"])
        tuned_on = _federations(path, "tuned-on", protocol["tuned-on"])
        benchmarks = [
            _benchmark(path, name, protocol, common, table, given or {})
            for name, table in tables.items()
        ]
        design = cls(
            path=path,
            reference=protocol["reference"],
            screened=_methods(path, protocol["screened"]),
            benchmarks=tuple(benchmarks),
            sweeps=tuple(_sweep(path, name, table, benchmarks) for name, table in sweeps.items()),
            points=protocol["points"],
            again=protocol["again"],
            scrambling=protocol["scrambling"],
            tuned_on=tuned_on,
            margins=_margins(protocol),
            results=path.parent / protocol["results"],
        )
        design._check()
        return design

    def config(
        self, benchmark: Benchmark, method: str, federation: int, **settings: Any
    ) -> RunConfig:
        """Return the config of a run; ``settings`` are run config keys, arguments among them."""
        client, strategy = parse_method(method)
        flat: dict[str, Any] = {**benchmark.settings, "seed": federation, "data.seed": federation}
        if method in REFERENCES:  # as in `Plan.grid`
            flat = {k: v for k, v in flat.items() if not k.startswith(COMPARED_TABLES)}
        # `grid_configs` gives the arguments in its first mapping only to the method named there.
        arguments = {k: v for k, v in settings.items() if is_argument(k)}
        others = {k: v for k, v in settings.items() if k not in arguments}
        (config,) = grid_configs({**flat, **others}, [strategy], arguments, [client])
        return config

    def _check(self) -> None:
        if self.results.suffix != ".csv":
            raise ConfigError(
                f"{self.path}: results = {self.results.name!r}: expected a .csv file."
            )
        if not self.benchmarks:
            raise ConfigError(f"{self.path}: each benchmark needs a table [benchmarks.<name>].")
        self._check_federations()
        independent = {b.name for b in self.benchmarks if not b.same_data}
        for benchmark in self.benchmarks:
            self._check_benchmark(benchmark, independent)
        for sweep in self.sweeps:
            self._check_sweep(sweep)

    def _check_federations(self) -> None:
        tested = [(benchmark.name, benchmark.federations) for benchmark in self.benchmarks]
        for name, federations in [*tested, *((s.name, s.federations) for s in self.sweeps)]:
            if both := sorted(set(federations) & set(self.tuned_on)):
                raise ConfigError(
                    f"{self.path}: {name}: federation {both[0]} is also in tuned-on, but methods "
                    "must not be tested on federations on which they are tuned. Remove it from "
                    "one of the lists."
                )

    def _check_benchmark(self, benchmark: Benchmark, independent: Collection[str]) -> None:
        where = f"{self.path}: {benchmark.name}"
        if benchmark.same_data and benchmark.same_data not in independent:
            raise ConfigError(
                f"{where}: same-data = {benchmark.same_data!r}: expected a benchmark without this "
                f"key ({', '.join(sorted(independent))})."
            )
        if self.reference not in benchmark.confirmed:
            raise ConfigError(
                f"{where}: the list 'confirmed' lacks the reference method {self.reference!r}. "
                "Add it."
            )
        self._check_owned(benchmark.name, benchmark.settings)
        if "train.lr" in benchmark.settings and not benchmark.settings["train.lr"]:
            raise ConfigError(
                f"{where}: train.lr = 0, but learning rates are tried in proportion to it. Set one "
                "above 0."
            )
        for method in dict.fromkeys((*benchmark.confirmed, *self.screened)):
            if not self.config(benchmark, method, 0).data.validated:
                raise ConfigError(
                    f"{where} has no validation examples, on which a leaderboard chooses among "
                    "trials. Set data.validation-examples (per domain) or "
                    "data.validation-fraction, for example in [settings.data]."
                )

    def _check_sweep(self, sweep: Sweep) -> None:
        where = f"{self.path}: sweep {sweep.name}"
        if both := sorted(set(sweep.federations) & set(sweep.benchmark.federations)):
            raise ConfigError(
                f"{where}: federation {both[0]} is also one of {sweep.benchmark.name}, so the same "
                "data would support two claims. Remove it from one of the lists."
            )
        if self.reference not in sweep.methods:
            raise ConfigError(
                f"{where}: the list 'methods' lacks the reference method {self.reference!r}. Add "
                "it."
            )
        if untuned := set(sweep.methods) - {*self.screened, *sweep.benchmark.confirmed}:
            raise ConfigError(
                f"{where}: {sorted(untuned)[0]} is not tuned. Add it to 'screened', or to "
                f"'confirmed' of {sweep.benchmark.name}."
            )
        for place in sweep.places.values():
            self._check_owned(f"sweep {sweep.name}", place)
            for method in sweep.methods:
                self.config(sweep.benchmark, method, 0, **place)

    def _check_owned(self, name: str, settings: Mapping[str, Any]) -> None:
        for key in _OWN:
            if key in settings:
                raise ConfigError(
                    f"{self.path}: {name} sets {key}, but the leaderboard sets this key for each "
                    "federation and stage. Remove it."
                )


def parse_method(text: str) -> tuple[ClientConfig, StrategyConfig]:
    """Return the client and the strategy that a method's name stands for.

    >>> [choice.name for choice in parse_method("gsam+fedism:q=1.0")]
    ['gsam', 'fedism']
    >>> [choice.name for choice in parse_method("fedmgda+")]
    ['sgd', 'fedmgda+']
    """
    client, plus, strategy = text.partition("+")
    if not (plus and strategy and strategy[0] != ":"):
        client, strategy = "sgd", text
    return ClientConfig.read(client), StrategyConfig.read(strategy)


def _methods(path: Path, text: str) -> tuple[str, ...]:
    names = tuple(names_in(text))
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"{path}: method {twice[0]!r} is listed twice. Remove the second entry.")
    for name in names:
        client, strategy = parse_method(name)
        client.check()
        strategy.check()
        if strategy.name in REFERENCES:
            raise ConfigError(
                f"{path}: method {name!r} is a reference, which is not compared with the others. "
                f'Move it to references = "{strategy.name}" in [protocol].'
            )
    return names


def _federations(path: Path, name: str, text: Any) -> tuple[int, ...]:
    try:
        return tuple(parse_seeds(str(text), "federations"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {name}: {error}") from error


def _margins(protocol: Mapping[str, Any]) -> Margins:
    return Margins(
        worst=float(protocol.get("margin", Margins.worst)),
        average=float(protocol.get("margin-average", Margins.average)),
        std=float(protocol.get("margin-std", Margins.std)),
    )


def _benchmark(
    path: Path,
    name: str,
    protocol: Mapping[str, Any],
    common: Mapping[str, Any],
    table: Mapping[str, Any],
    given: Mapping[str, Any],
) -> Benchmark:
    """Return a benchmark. Its settings are ``common``, then those in ``table``, then ``given``.

    The methods and the federations of ``protocol`` are used unless ``table`` has its own.
    """
    about = {key: table[key] for key in _BENCHMARK if key in table}
    about = _checked(f"{path}: [benchmarks.{name}]", about, _BENCHMARK)
    confirmed = _methods(path, about.get("confirmed", protocol["confirmed"]))
    try:
        references = references_named(protocol.get("references") or None)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    own = {key: value for key, value in table.items() if key not in about}
    return Benchmark(
        name=name,
        settings={**flatten_tables(common), **flatten_tables(own), **given},
        confirmed=(*confirmed, *references),
        federations=_federations(path, name, about.get("federations", protocol["federations"])),
        overlap=float(about.get("overlap", 0.0)),
        same_data=about.get("same-data", ""),
    )


def _sweep(path: Path, name: str, table: dict[str, Any], benchmarks: Iterable[Benchmark]) -> Sweep:
    """Return a sweep. ``vary`` maps run config keys to values, and each run changes a single key.

    ``settings`` apply to all runs of the sweep and override the benchmark's settings.
    """
    table = _checked(f"{path}: [sweeps.{name}]", table, _SWEEP)
    named = {benchmark.name: benchmark for benchmark in benchmarks}
    vary, settings = (flatten_tables(table.get(key, {})) for key in ("vary", "settings"))
    if table.get("of") not in named or not vary:
        raise ConfigError(
            f"{path}: [sweeps.{name}] needs a key 'of' with a benchmark ({', '.join(named)}) and a"
            f" table [sweeps.{name}.vary] with run config keys and their values."
        )
    for key, values in vary.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{path}: [sweeps.{name}.vary] {key} = {quoted(values)}: expected a list of values."
            )
    places = {
        f"{key}={value}": {**settings, key: value}
        for key, values in vary.items()
        for value in values
    }
    methods = _methods(path, table.get("methods", ""))
    federations = _federations(path, name, table.get("federations", ""))
    return Sweep(name, named[table["of"]], methods, federations, places)


def _checked(
    what: str, table: Mapping[str, Any], hints: Mapping[str, Any], kind: str = "key"
) -> dict[str, Any]:
    """Return a table, whose lists are joined with commas.

    Raises ``ConfigError`` for an unknown key, or a value of the wrong type. ``kind`` is what the
    keys are called.
    """
    joined = {
        key: ",".join(map(str, value)) if isinstance(value, list) and key in _LISTS else value
        for key, value in table.items()
    }
    for key, value in joined.items():
        if key not in hints:
            raise ConfigError(f"{what}: {unknown(kind, key, hints)}")
        try:
            conform(value, hints[key], key)
        except ValueError as error:
            raise ConfigError(f"{what}{': table' * (kind == 'table')} {error}") from error
    return joined
