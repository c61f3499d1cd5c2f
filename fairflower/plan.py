"""Several runs on one federation: strategies times seeds, with the same data."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflower.config import ConfigError, RunConfig, Scalar, keys, parse_assignment

if TYPE_CHECKING:  # Flower is slow to import, and a plan is checked before it runs
    from flwr.serverapp import Grid
    from rich.console import Console


@dataclass(frozen=True)
class Variant:
    """A strategy with the arguments that differ from its defaults.

    >>> Variant("fedheal", {"tau": 0.4, "beta": None}).label
    'fedheal:tau=0.4:beta=none'
    """

    name: str
    args: Mapping[str, Scalar | None] = field(default_factory=dict)

    @classmethod
    def of(cls, config: RunConfig) -> Variant:
        """The strategy of a run config."""
        return cls(config.strategy.name, config.strategy.args)

    @property
    def label(self) -> str:
        """How tables and figures call it."""
        shown = [
            f"{arg.replace('_', '-')}={'none' if value is None else value}"
            for arg, value in self.args.items()
        ]
        return ":".join([self.name, *shown])

    def flat(self) -> dict[str, Any]:
        """Its run config keys."""
        args = {
            f"strategy.{arg.replace('_', '-')}": "none" if value is None else value
            for arg, value in self.args.items()
        }
        return {"strategy.name": self.name, **args}


def parse_variants(text: str) -> list[Variant]:
    """Read ``"fedavg,fedheal:tau=0.4:beta=none"``.

    >>> [v.label for v in parse_variants("fedavg,fedheal:tau=0.4:beta=none")]
    ['fedavg', 'fedheal:tau=0.4:beta=none']
    """
    variants = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, *assignments = part.split(":")
        args: dict[str, Scalar | None] = {}
        for assignment in assignments:
            key, value = parse_assignment(assignment)
            args[key.replace("-", "_")] = None if value == "none" else value
        variants.append(Variant(name.strip(), args))
    if not variants:
        raise ConfigError("No strategy was named. Example: --strategies fedavg,fedheal")
    labels = [variant.label for variant in variants]
    for label in labels:
        if labels.count(label) > 1:
            raise ConfigError(f"Strategy {label!r} is named twice; remove one.")
    return variants


def parse_seeds(text: str) -> list[int]:
    """Read ``"0,1,5"`` or ``"0-2"``.

    >>> parse_seeds("0-2"), parse_seeds("3,7")
    ([0, 1, 2], [3, 7])
    """
    try:
        first, dash, last = text.partition("-")
        seeds = (
            list(range(int(first), int(last) + 1))
            if dash
            else [int(part) for part in text.split(",")]
        )
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text!r}: expected different numbers as 0,1,2 or 0-2.")
    return seeds


@dataclass
class Plan:
    """Runs to be made one after another on the same nodes.

    Attributes
    ----------
    runs : list of (label, RunConfig)
        All with the same data and engine.
    """

    runs: list[tuple[str, RunConfig]]

    @classmethod
    def grid(cls, flat: Mapping[str, Any], variants: list[Variant], seeds: list[int]) -> Plan:
        """Every variant with every seed; uniform averaging always among them.

        Arguments of strategies in ``flat`` go to the variants that take them and
        do not set them themselves.
        """
        from fairflower.strategies import STRATEGIES

        if not any(variant.name == "uniform" for variant in variants):
            variants = [*variants, Variant("uniform")]
        for key in flat:
            if key not in keys():
                RunConfig.from_flat({key: flat[key]})  # names the key and the nearest valid one
        common = {key: value for key, value in flat.items() if not key.startswith("strategy.")}
        shared = {key: value for key, value in flat.items() if key not in common}
        runs = []
        for seed in seeds:
            for variant in variants:
                strategy = STRATEGIES.get(variant.name)
                taken = strategy.arguments() if strategy else ()
                own = {
                    key: value
                    for key, value in shared.items()
                    if key.removeprefix("strategy.").replace("-", "_") in taken
                }
                settings = common | own | variant.flat() | {"seed": seed}
                settings["run-name"] = f"{variant.label.replace(':', '-')}-seed{seed}"
                runs.append((variant.label, RunConfig.from_flat(settings)))
        return cls(runs)

    def execute(
        self, grid: Grid, console: Console, stop: threading.Event, folders: list[Path]
    ) -> None:
        """Make the runs; ``folders`` gets each run folder as the run ends.

        A run that fails does not keep the others from running; the first
        failure is raised at the end.
        """
        from fairflower.errors import USER_ERRORS
        from fairflower.session import Session

        failure: Exception | None = None
        for number, (label, config) in enumerate(self.runs, 1):
            title = label
            if len(self.runs) > 1:
                title = f"{label}, seed {config.seed} ({number} of {len(self.runs)})"
            session = Session(grid, config, console, label=label, title=title, stop=stop)
            try:
                session.run()
            except USER_ERRORS as error:
                failure = failure or error
                if len(self.runs) > 1:
                    console.print(f"[red]{title} failed:[/] {error}", soft_wrap=True)
            finally:
                if session.folder is not None:
                    folders.append(session.folder.path)
        if failure is not None:
            raise failure
