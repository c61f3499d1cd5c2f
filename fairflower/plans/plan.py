"""A plan: run configs of strategies and clients for several federations or seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflower.config import ClientConfig, DataConfig, RunConfig, StrategyConfig
from fairflower.config.methods import Choice, DataSpec, MethodSpec
from fairflower.config.run import COMPARED_TABLES, PROTECTION, check_tuned, data_key, method_key
from fairflower.config.text import (
    argument_to_key,
    counted,
    is_argument,
    key_to_argument,
    names_in,
    unknown,
)
from fairflower.errors import USER_ERRORS, ConfigError, quoted
from fairflower.participation.availability import check_same_trace
from fairflower.paths import file_name
from fairflower.registry import REFERENCES
from fairflower.server.checkpoint import (
    check_same_examples,
    check_same_parts,
    resumable_configs,
    with_absolute_paths,
)
from fairflower.server.folder import rewrite_config, runs_home

if TYPE_CHECKING:  # slow to import
    from fairflower.report import Run

#: Largest number of federations or seeds; a larger number is assumed to be a typing error.
MAX_SEEDS = 1000

#: Default of ``--federations``.
FEDERATIONS = "0-9"


def grid_configs(
    flat: Mapping[str, Any],
    strategies: Sequence[StrategyConfig] = (),
    shared: Mapping[str, Any] | None = None,
    clients: Sequence[ClientConfig] = (),
) -> list[RunConfig]:
    """Return a run config for every combination of client and strategy.

    The arguments ``strategy.*`` and ``client.*`` in ``flat`` apply only to the methods that it
    names (`MethodSpec.override`) or, if it names none, to all methods that have them, like those in
    ``shared``, which override ``flat``. Arguments of the given strategies and clients, by default
    the methods that ``flat`` names, override all others. Raises ``ConfigError`` if no method has an
    argument in ``shared``, or if a config is invalid.

    >>> pairs = grid_configs({}, StrategyConfig.parse("fedavg,fedheal"), {"strategy.tau": 0.4})
    >>> [config.label for config in pairs]
    ['fedavg', 'fedheal:tau=0.4']
    """
    tables = [kind.TABLE for kind in (StrategyConfig, ClientConfig) if kind.KEY not in flat]
    of_all = {k: v for k, v in flat.items() if is_argument(k) and k.partition(".")[0] in tables}
    shared = {**of_all, **(shared or {})}
    flat = {key: value for key, value in flat.items() if key not in shared}
    pairs = product(
        _share(clients or [ClientConfig(ClientConfig.of(flat).name)], shared),
        _share(strategies or [StrategyConfig(StrategyConfig.of(flat).name)], shared),
    )
    configs = [
        RunConfig.from_flat(strategy.override(client.override(flat))) for client, strategy in pairs
    ]
    _check_trains(configs[0])
    return configs


def references_named(given: str | Iterable[str] | None) -> list[str]:
    """Return the names of references; raise ``ConfigError`` for others, none, or equal ones.

    >>> references_named("alone,pooled"), references_named(None)
    (['alone', 'pooled'], [])
    """
    names = names_in(given) if isinstance(given, str) else list(given or ())
    distinct = len(set(names)) == len(names)
    if set(names) <= set(REFERENCES) and distinct and (names or given is None):
        return names
    expected = f"expected {' or '.join(REFERENCES)}, or both"
    raise ConfigError(f"references = {quoted(given)}: {expected}.")


def single_run_config(
    flat: Mapping[str, Any], chosen: Iterable[MethodSpec], overrides: Mapping[str, Any]
) -> RunConfig:
    """Return a run's config: ``flat`` with the chosen methods, overridden by ``overrides``.

    If ``flat`` names the same strategy or client, or none, its arguments in ``flat`` are kept
    unless the chosen method sets them.
    """
    for method in chosen:
        flat = method.override(flat)
    config = RunConfig.from_flat({**flat, **overrides})
    _check_trains(config)
    if config.resume:
        raise ConfigError(
            f"resume = {config.resume!r}: this setting cannot be set here. Use --resume (in "
            "Python, the argument resume), which also restores the run's settings."
        )
    return config


def _check_trains(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a model would be tested without training."""
    if config.evaluate.model:
        raise ConfigError(
            f"evaluate.model = {config.evaluate.model!r}: use fairflower evaluate (in Python, "
            "ff.evaluate), which also takes the settings of the model's run."
        )


def _share(choices: Sequence[Choice], shared: Mapping[str, Any]) -> list[Choice]:
    """Add shared arguments to each method that accepts them and does not set them."""
    table = f"{choices[0].TABLE}."
    args = {
        key_to_argument(k.removeprefix(table)): v for k, v in shared.items() if k.startswith(table)
    }
    known = {argument_to_key(arg) for choice in choices for arg in choice.factory.arguments()}
    for key in map(argument_to_key, args):
        if key not in known:
            methods = ", ".join(dict.fromkeys(choice.name for choice in choices))
            message = f"{table}{key} is not an argument of {methods}. Remove it."
            raise ConfigError(unknown(f"argument of {methods}", key, known) if known else message)
    return [
        dataclasses.replace(
            choice,
            args={a: v for a, v in args.items() if a in choice.factory.arguments()}
            | dict(choice.args),
        )
        for choice in choices
    ]


def parse_seeds(given: str | Iterable[int], name: str = "seeds") -> list[int]:
    """Return numbers of federations or seeds; raise ``ConfigError`` if they are none.

    >>> parse_seeds("0-2"), parse_seeds("3,7"), parse_seeds(range(2))
    ([0, 1, 2], [3, 7], [0, 1])
    """
    numbers: Iterable[Any] = given
    if isinstance(given, str):
        first, dash, last = given.partition("-")
        numbers = given.split(",")
        if dash:
            ends = first.strip(), last.strip()
            short = all(end.isdecimal() and len(end) < 10 for end in ends)
            numbers = range(int(first), int(last) + 1) if short else ()
    try:
        values = list(islice(numbers, MAX_SEEDS + 1))
        found = [int(value) for value in values]
        whole = all(v == n for v, n in zip(values, found, strict=True) if not isinstance(v, str))
        if whole and min(found) >= 0 and len(set(found)) == len(found) <= MAX_SEEDS:
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(
        f"{name} = {quoted(given)}: expected distinct numbers >= 0, at most {MAX_SEEDS}, for "
        "example 0,1,2 or 0-2."
    )


def replicates(
    federations: str | Iterable[int] | None, seeds: str | Iterable[int] | None
) -> tuple[list[int], bool]:
    """Return the numbers of federations or seeds, and whether they are federations.

    If neither is given, the federations are `FEDERATIONS`. Raises ``ConfigError`` if both are
    given, or if the numbers are not distinct integers.

    >>> replicates(None, "0-2"), replicates([3, 7], None)
    (([0, 1, 2], False), ([3, 7], True))
    """
    if seeds is not None and federations is not None:
        raise ConfigError(
            "federations and seeds cannot be combined, because a federation's number is also its "
            "seed. Remove one of them."
        )
    if seeds is not None:
        return parse_seeds(seeds), False
    return parse_seeds(FEDERATIONS if federations is None else federations, "federations"), True


def settings_of_each(federated: bool) -> dict[str, str]:
    """Return the settings that each run of a comparison has for itself, and what to do instead."""
    of_federations = {
        "data.seed": "federations sets it; use seeds for several seeds on one federation"
    }
    return {
        "seed": "use federations or seeds",
        "run-name": "runs are named after their method and seed",
        "output-dir": "use --output-dir (in Python, output_dir)",
        "resume": "use the --output-dir (in Python, output_dir) of the comparison to resume",
    } | (of_federations if federated else {})


def redrawable(flat: Mapping[str, Any]) -> bool:
    """Return whether several federations of a user's data draw the test examples anew by default.

    With one client per domain they would otherwise be the same division.
    """
    if not DataSpec.read(str(flat.get("data.name", DataConfig.name))).own:
        return False
    from fairflower.data.cache import make_data_set  # slow to import

    with suppress(*USER_ERRORS):  # raised again where the data are prepared
        return make_data_set(RunConfig.from_message(flat).data).redrawable
    return False


@dataclass
class Plan:
    """A list of run configs that share nodes, data set and engine."""

    runs: list[RunConfig]

    def __post_init__(self) -> None:
        check_tuned(self.runs)

    @classmethod
    def grid(
        cls,
        flat: Mapping[str, Any],
        strategies: Sequence[StrategyConfig],
        seeds: Sequence[int],
        shared: Mapping[str, Any] | None = None,
        clients: Sequence[ClientConfig] = (),
        federations: bool = False,
        held_out: Sequence[str] = (),
        references: str | Iterable[str] | None = None,
    ) -> Plan:
        """Return a plan with every combination of client, strategy and seed (`grid_configs`).

        `uniform` is always added to the strategies; without any, FedAvg and the strategy that
        ``flat`` names are used. If ``federations``, each seed also defines a federation, by setting
        ``data.seed``; otherwise all runs share that of ``data.seed``. Each of the domains
        ``held_out`` is held out in turn: all runs are repeated for each. Each of the ``references``
        (`references_named`) is one more method, with plain local training, without bounds, masks or
        noise. Raises ``ConfigError`` if a method is given twice.
        """
        names = references_named(references)
        if not strategies:
            named = StrategyConfig.of(flat).name
            strategies = [StrategyConfig(name) for name in dict.fromkeys(("fedavg", named))]
        if not any(strategy.name == "uniform" for strategy in strategies):
            strategies = [*strategies, StrategyConfig("uniform")]
        if federations and len(seeds) > 1 and redrawable(flat):
            flat = {"data.redraw": "rows", **flat}
        parts = [(f"without-{file_name(d)}-", {"data.held-out": d}) for d in held_out]
        runs = []
        for (prefix, without), seed in product(parts or [("", {})], seeds):
            drawn: dict[str, Any] = {**without, "seed": seed}
            if federations:
                drawn["data.seed"] = seed
            configs = grid_configs({**flat, **drawn}, strategies, shared, clients)
            apart = *COMPARED_TABLES, *PROTECTION
            plain = {k: v for k, v in flat.items() if not k.startswith(apart)}
            rows = ({**plain, **drawn, StrategyConfig.KEY: name} for name in names)
            configs += map(RunConfig.from_flat, rows)
            labels = [config.label for config in configs]
            for label, config in zip(labels, configs, strict=True):
                if labels.count(label) > 1:
                    raise ConfigError(f"Method {label!r} is given twice. Remove one of them.")
                unit = "federation" if federations else "seed"
                name = f"{prefix}{file_name(label)}-{unit}{seed}"
                runs.append(dataclasses.replace(config, run_name=name, resume=""))
        return cls(runs)

    def summary(self) -> str:
        """Describe the plan: data, rounds, methods, seeds and output folder.

        The description of a single run is one line.

        >>> plan = Plan.grid({"output-dir": "/out"}, StrategyConfig.parse("fedheal:tau=0.4"), [0])
        >>> print(plan.summary())
        2 runs on uci-digits
          rounds    30
          strategy  fedheal:tau=0.4, uniform
          client    sgd
          seed      0
          to        /out
        Arguments of methods that are not shown are at their defaults.
        """
        runs = self.runs
        data_seeds = dict.fromkeys(config.data.seed for config in runs)
        values: dict[str, Iterable[object]] = {
            "rounds": (config.num_server_rounds for config in runs),
            "strategy": (config.strategy.label for config in runs),
            "client": (config.client.label for config in runs),
            "seed": (config.seed for config in runs),
            "held out": (config.data.held_out for config in runs),
            "data seed": () if list(data_seeds) == [DataConfig.seed] else data_seeds,
            "to": (config.resume or runs_home(config) for config in runs),
        }
        facts = {name: ", ".join(dict.fromkeys(map(str, of))) for name, of in values.items()}
        start = f"{counted(len(runs), 'run')} on {runs[0].data.name}"
        if len(runs) == 1:
            return ", ".join([start, *(f"{name} {text}" for name, text in facts.items() if text)])
        end = "Arguments of methods that are not shown are at their defaults."
        return "\n".join([start, fact_lines(facts), end])

    def without(self, earlier_runs: Iterable[Run]) -> Plan:
        """Return the plan without runs that are already completed.

        Runs with equal `run_key` are the same run. Raises ``ConfigError`` if the clients of any
        earlier run with the same data settings had different data than the clients of the new runs
        would get, or if a file of availabilities, of a part or of weights has changed.
        """
        planned = [(run_key(config.to_flat()), config) for config in self.runs]
        by_key = dict(planned)
        earlier = [(run_key(run.config), run) for run in earlier_runs]
        for key, run in earlier:
            if key in by_key:
                check_same_files(run.path, run.info, by_key[key])
        completed = {key for key, run in earlier if run.status == "completed"}
        left = [config for key, config in planned if key not in completed]
        if left:
            _check_same_examples([run for _, run in earlier], [config for _, config in planned])
        return Plan(left)

    def update_tuned(self, earlier_runs: Iterable[Run]) -> int:
        """Write `tuned` of the planned runs to the folders of those that are already completed.

        Reports compare methods by this setting, which is not in a `run_key`. Return the number of
        folders that were changed.
        """
        tuned = {run_key(config.to_flat()): config.tuned for config in self.runs}
        changed = 0
        for run in earlier_runs:
            now = tuned.get(run_key(run.config), run.config["tuned"])
            if run.status == "completed" and now != run.config["tuned"]:
                rewrite_config(run.path, {"tuned": now})
                changed += 1
        return changed

    def resuming(self, folder: Path) -> Plan:
        """Return the plan with ``resume`` set for each run that ``folder`` has unfinished.

        If several run folders match a run, the last is used.
        """
        folders = {run_key(config.to_flat()): config.resume for config in resumable_configs(folder)}
        resumed = ((config, folders.get(run_key(config.to_flat()), "")) for config in self.runs)
        return Plan([dataclasses.replace(config, resume=resume) for config, resume in resumed])


def fact_lines(facts: Mapping[str, str]) -> str:
    """Return lines with names and texts, without those of empty texts."""
    return "\n".join(f"  {name:<9} {text}" for name, text in facts.items() if text)


def run_title(config: RunConfig) -> str:
    """Return a run's name in messages: the method's label, and the domain that is held out."""
    held_out = config.data.held_out
    return f"{config.label} without {held_out}" if held_out else config.label


def run_key(flat: Mapping[str, Any]) -> tuple[frozenset[tuple[str, str]], int]:
    """Return the key that identifies a run: its `method_key` and its seed.

    Paths become absolute, as they are in run folders.
    """
    return method_key(with_absolute_paths(flat)), int(flat.get("seed", 0))


def check_same_files(path: Path, facts: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ``ConfigError`` if a file that an earlier run has read has changed since.

    It is that of availabilities or, if the run is completed, of a part or of weights.
    """
    check_same_trace(path, facts.get("availability"), config.participation.availability)
    if facts["status"] == "completed":  # others go on with corrected code
        check_same_parts(path, facts.get("parts", {}), config)


def domains_to_hold_out(flat: Mapping[str, Any]) -> list[str]:
    """Return the domains of the data, each of which can be held out in turn.

    Raises ``ConfigError`` if there are fewer than two, or if ``flat`` already holds out a domain.
    """
    from fairflower.data.cache import make_data_set  # slow to import

    if held_out := flat.get("data.held-out"):
        raise ConfigError(
            f"data.held-out = {held_out!r}: leaving one domain out sets data.held-out to each "
            "domain in turn. Remove this setting."
        )
    domains = make_data_set(RunConfig.from_message(flat).data).domains
    if len(domains) < 2:
        raise ConfigError(
            f"Leaving out {', '.join(domains)} would leave no domain to train on. Choose data "
            "with several domains."
        )
    return list(domains)


def _check_same_examples(earlier: Sequence[Run], planned: Sequence[RunConfig]) -> None:
    """Raise ``ConfigError`` if an earlier run with a planned run's data settings had other data."""
    from fairflower.data import prepare  # slow to import
    from fairflower.data.folders import forget_stamps

    forget_stamps()
    configs: dict[Hashable, DataConfig] = {}
    for config in planned:
        configs.setdefault(data_key(config.to_flat()), config.data)
    federations: dict[Hashable, Any] = {}
    for run in earlier:
        key = data_key(run.config)
        if key in configs and run.info.get("digest"):
            if key not in federations:
                federations[key] = prepare(configs[key])
            check_same_examples(run.path, run.info, federations[key])
