"""Several runs: strategies times federations, or times seeds on one federation."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.markup import escape

from fairflower.config import (
    ClientConfig,
    RunConfig,
    StrategyConfig,
    argument_to_key,
    key_to_argument,
    method_key,
)
from fairflower.errors import USER_ERRORS, ConfigError, error_text
from fairflower.numerics.threads import cpus
from fairflower.paths import file_name
from fairflower.server.checkpoint import check_same_data
from fairflower.server.folder import runs_home

if TYPE_CHECKING:  # Flower is slow to import, and a plan is checked before it runs
    from flwr.serverapp import Grid
    from rich.console import Console

    from fairflower.report import Run
    from fairflower.server.callbacks import OnRound


#: A comparison of more is a slip of the pen.
MOST_SEEDS = 1000

_Choice = TypeVar("_Choice", StrategyConfig, ClientConfig)


def grid_configs(
    flat: Mapping[str, Any],
    strategies: Sequence[StrategyConfig] = (),
    shared: Mapping[str, Any] | None = None,
    clients: Sequence[ClientConfig] = (),
) -> list[RunConfig]:
    """Every client with every strategy.

    Parameters
    ----------
    flat : mapping
        Run config keys that all have in common. Its ``strategy.*`` and ``client.*`` arguments
        are those of the methods that it names, and stay with them (`MethodSpec.override`).
    strategies, clients
        Methods, whose own arguments win over all others; by default those that ``flat`` names.
    shared : mapping, optional
        ``strategy.*`` and ``client.*`` arguments for all methods that take them; they win
        over those of ``flat``. One that no method takes is an error.
    """
    shared = shared or {}
    flat = {key: value for key, value in flat.items() if key not in shared}
    pairs = product(
        _share(clients or [ClientConfig(ClientConfig.of(flat).name)], shared),
        _share(strategies or [StrategyConfig(StrategyConfig.of(flat).name)], shared),
    )
    return [
        RunConfig.from_flat(strategy.override(client.override(flat))) for client, strategy in pairs
    ]


def single_run_config(
    flat: Mapping[str, Any],
    strategy: StrategyConfig | None,
    client: ClientConfig | None,
    given: Mapping[str, Any],
) -> RunConfig:
    """The config of one run: ``flat``, with methods in place of its own, and ``given`` over all.

    A method that ``flat`` names, too, keeps its arguments there that it does not give itself.
    """
    for choice in filter(None, (strategy, client)):
        flat = choice.override(flat)
    config = RunConfig.from_flat({**flat, **given})
    if config.resume:
        raise ConfigError(
            f"resume = {config.resume!r}: use --resume (in Python, resume=), which brings its "
            "settings."
        )
    return config


def _share(choices: Sequence[_Choice], shared: Mapping[str, Any]) -> list[_Choice]:
    """The methods, each with those shared arguments that it takes and does not have itself."""
    table = f"{choices[0].TABLE}."
    args = {
        key_to_argument(k.removeprefix(table)): v for k, v in shared.items() if k.startswith(table)
    }
    for arg in args:
        if not any(arg in choice.factory.arguments() for choice in choices):
            methods = ", ".join(dict.fromkeys(choice.name for choice in choices))
            raise ConfigError(
                f"{table}{argument_to_key(arg)} is an argument of none of {methods}. Remove it."
            )
    return [
        dataclasses.replace(
            choice,
            args={a: v for a, v in args.items() if a in choice.factory.arguments()}
            | dict(choice.args),
        )
        for choice in choices
    ]


#: Federations of a comparison of which nobody says how many.
FEDERATIONS = "0-9"


def parse_seeds(text: str, option: str = "--seeds") -> list[int]:
    """Read ``"0,1,5"`` or ``"0-2"`` of an option.

    >>> parse_seeds("0-2"), parse_seeds("3,7")
    ([0, 1, 2], [3, 7])
    """
    try:
        first, dash, last = text.partition("-")
        numbers = range(int(first), int(last) + 1) if dash else map(int, text.split(","))
        seeds = list(islice(numbers, MOST_SEEDS + 1))
    except ValueError:
        seeds = []
    if len(seeds) > MOST_SEEDS:
        raise ConfigError(f"{option} {text!r}: more than {MOST_SEEDS} numbers. Name fewer.")
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"{option} {text!r}: expected different numbers as 0,1,2 or 0-2.")
    return seeds


@dataclass
class Plan:
    """Runs to be made one after another on the same nodes, with the same data and engine."""

    runs: list[RunConfig]

    @classmethod
    def grid(
        cls,
        flat: Mapping[str, Any],
        strategies: Sequence[StrategyConfig],
        seeds: Sequence[int],
        shared: Mapping[str, Any] | None = None,
        clients: Sequence[ClientConfig] = (),
        federations: bool = False,
    ) -> Plan:
        """Every client with every strategy and seed, as `grid_configs` has it.

        With ``federations`` the seeds draw the partition and the clients' data, too:
        ``data.seed`` = ``seed``, a federation each.

        Uniform averaging is always among the strategies, by default FedAvg and the one that
        ``flat`` names. ``ConfigError`` as of `grid_configs`, and on a method that is named twice.
        """
        if not strategies:
            named = StrategyConfig.of(flat).name
            strategies = [StrategyConfig(name) for name in dict.fromkeys(("fedavg", named))]
        if not any(strategy.name == "uniform" for strategy in strategies):
            strategies = [*strategies, StrategyConfig("uniform")]
        runs = []
        for seed in seeds:
            drawn = {"seed": seed, "data.seed": seed} if federations else {"seed": seed}
            configs = grid_configs({**flat, **drawn}, strategies, shared, clients)
            labels = [config.label for config in configs]
            for label, config in zip(labels, configs, strict=True):
                if labels.count(label) > 1:
                    raise ConfigError(f"Method {label!r} is named twice; remove one.")
                unit = "federation" if federations else "seed"
                name = f"{file_name(label)}-{unit}{seed}"
                runs.append(dataclasses.replace(config, run_name=name))
        return cls(runs)

    def summary(self) -> str:
        """Say in words what is run and where to; one line if it is one run.

        >>> plan = Plan.grid({"output-dir": "/out"}, StrategyConfig.parse("fedheal:tau=0.4"), [0])
        >>> print(plan.summary())
        2 runs on uci-digits
          rounds    30
          strategy  fedheal:tau=0.4, uniform
          client    sgd
          seed      0
          to        /out
        Arguments that are not shown are the methods' defaults.
        """
        runs = self.runs
        same_data = len({config.data.seed for config in runs}) == 1
        facts: dict[str, Iterable[object]] = {
            "rounds": (config.num_server_rounds for config in runs),
            "strategy": (config.strategy.label for config in runs),
            "client": (config.client.label for config in runs),
            "seed": (config.seed for config in runs),
            "data seed": () if same_data else (config.data.seed for config in runs),
            "to": (config.resume or runs_home(config) for config in runs),
        }
        several = len(runs) > 1
        lines = [f"{len(runs)} run{'s' if several else ''} on {runs[0].data.name}"]
        for name, values in facts.items():
            shown = ", ".join(dict.fromkeys(map(str, values)))
            if shown:
                lines.append(f"  {name:<8}  {shown}" if several else f"{name} {shown}")
        if not several:
            return ", ".join(lines)
        return "\n".join([*lines, "Arguments that are not shown are the methods' defaults."])

    def without(self, made: Iterable[Run]) -> Plan:
        """The rest of the plan when runs are not made again that are completed.

        A run is the same if its config is, but for how and where it was executed;
        ``ConfigError`` if its clients had other images than they would get now.
        """
        made = list(made)
        for run in made:
            check_same_data(run.path, run.info, run.config)
        there = {run_key(run.config) for run in made if run.status == "completed"}
        return Plan([config for config in self.runs if run_key(config.to_flat()) not in there])

    def resuming(self, unfinished: Iterable[RunConfig]) -> Plan:
        """The same runs, each in the folder of an unfinished one if there is one.

        ``unfinished`` configs have ``resume``; of several for a run the last is taken.
        """
        folders = {run_key(config.to_flat()): config.resume for config in unfinished}
        return Plan(
            [
                dataclasses.replace(config, resume=folders.get(run_key(config.to_flat()), ""))
                for config in self.runs
            ]
        )

    def execute(
        self,
        grid: Grid,
        console: Console,
        stop: threading.Event,
        folders: list[Path],
        on_round: OnRound | None = None,
    ) -> None:
        """Make the runs; ``folders`` gets each run folder as the run ends.

        A run that fails does not keep the others from running; the first
        failure is raised at the end.
        """
        from fairflower.server.session import Session  # late: as Flower and torch, it is slow

        failure: Exception | None = None
        for number, config in enumerate(self.runs, 1):
            title = config.label
            if len(self.runs) > 1:
                title += f", seed {config.seed} ({number} of {len(self.runs)})"
            session = Session(grid, config, console, title=title, stop=stop, on_round=on_round)
            try:
                session.run()
            except USER_ERRORS as error:
                failure = failure or error
                if len(self.runs) > 1:
                    console.print(
                        f"[red]{escape(title)} failed:[/] {escape(error_text(error))}",
                        soft_wrap=True,
                    )
            finally:
                if session.folder is not None:
                    folders.append(session.folder.path)
        if failure is not None:
            raise failure


def run_key(flat: Mapping[str, Any]) -> tuple[frozenset[tuple[str, str]], int]:
    """What two configs of the same run have in common, by their run config keys."""
    return method_key(flat), int(flat.get("seed", 0))


def resolve_jobs(flat: Mapping[str, Any], jobs: int | None) -> int | None:
    """How many runs to make at a time of those asked for; None: as many as are `auto_jobs`.

    One by one, if run config keys choose where clients run and nobody asks for more.
    ``ConfigError`` for several on a cluster.
    """
    if jobs not in (None, 1) and flat.get("ray-address"):
        raise ConfigError(
            "--jobs makes runs side by side on this machine; on a cluster they come one after "
            "another. Leave --jobs or --ray-address out."
        )
    if jobs not in (None, 1) and flat.get("engine", "inline") != "inline":
        raise ConfigError(
            f"--jobs makes runs side by side, each on the inline engine, and engine = "
            f"{flat['engine']!r} is given. Leave one of them out."
        )
    chosen = {"engine", "ray-address", "workers"} & flat.keys()
    return 1 if jobs is None and chosen else jobs


def auto_jobs(plan: Plan, runs: int | None = None) -> int:
    """How many runs to make at a time: as many as fit the cores, if there are so many.

    ``runs`` is how many there will be, by default the plan's. One, if a run uses a GPU: its
    memory holds few. One run's clients fill the cores, too, but wait for each other every round.
    """
    from fairflower.training.device import choose_device  # late: torch is slow to import

    if any(c.client_gpus or choose_device(c.train.device).type != "cpu" for c in plan.runs):
        return 1
    room = cpus() // max(config.client_cpus for config in plan.runs)
    return max(1, room) if (runs or len(plan.runs)) >= room else 1
