"""``fairflower compare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fairflower.cli.options import ConfigOverrides, with_settings
from fairflower.cli.report import print_report
from fairflower.cli.terminal import console
from fairflower.config import ClientConfig, StrategyConfig, check_key, methods_of
from fairflower.errors import ConfigError
from fairflower.paths import new_folder, run_folders
from fairflower.plans.execution import announce, execute, locked_folder, remaining_plan
from fairflower.plans.plan import FEDERATIONS, Plan, parse_seeds, resolve_jobs


@with_settings(
    *("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr"),
    *("engine", "ray_address", "workers"),
)
def compare(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated aggregation rules; arguments after colons, as in "
            "fedavg,fedheal,fedheal:beta=none. Uniform averaging is always added; default: "
            "fedavg and strategy.name."
        ),
    ] = None,
    federations: Annotated[
        str | None,
        typer.Option(
            help="Federations, comma-separated or a range as 0-9: each number draws who holds "
            "what and the model's and batches' seed (data.seed = seed). Default: "
            f"{FEDERATIONS}, without --seeds."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds on one federation (data.seed) instead of federations, as 0-4: verdicts "
            "are then of that federation alone."
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated methods of local training, each with every strategy, as in "
            "sgd,fedprox:mu=0.1; default: client.name alone."
        ),
    ] = None,
    overrides: ConfigOverrides,
    jobs: Annotated[
        str,
        typer.Option(
            metavar="auto|N",
            help="Runs at a time, each in its own process and on the inline engine. auto: one "
            "per core if there are as many runs, none uses a GPU and no engine is chosen; else 1.",
        ),
    ] = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="The comparison's folder; default: a new one.")
    ] = None,
) -> None:
    """Train every strategy (times client) on every federation; write one report.

    A config's strategy.* arguments are those of the strategy that it names, each time it is
    listed, and of no other; `--set strategy.tau=0.4` goes to all strategies that have a tau.
    Arguments after colons win over both, one by one; tau=default is the strategy's default.
    Clients are treated alike. Seeds come from --federations or --seeds alone. What is run is
    printed first, with all arguments that are not defaults.

    A folder used again keeps its earlier runs: those that are completed are not made again,
    others go on where they were, and the report covers them all.
    """
    folder = new_folder("comparisons", output_dir)
    count = resolve_jobs(overrides.settings, parse_jobs(jobs))
    numbers, own = replicates(overrides, federations, seeds)
    plan = plan_of(overrides, strategies, numbers, clients, folder / "runs", own)
    announce(plan, console)
    with locked_folder(folder):
        rest = remaining_plan(plan, folder / "runs", console)
        folders: list[Path] = []
        try:
            execute(rest, console, folders, count)
        finally:
            if folders or len(rest.runs) < len(plan.runs):
                print_report(run_folders(folder / "runs"), folder / "report")


#: Keys that many runs cannot have in common -> what to do.
_OTHERWISE = {
    "seed": "name them by --federations or --seeds",
    "strategy.name": "name them by --strategies",
    "run-name": "runs are named by method and seed",
    "output-dir": "give --output-dir",
    "resume": "an earlier --output-dir goes on where it was",
}


def parse_jobs(jobs: str) -> int | None:
    """Read ``--jobs``; None for ``auto``."""
    if jobs == "auto":
        return None
    if not jobs.isdecimal() or int(jobs) < 1:
        raise ConfigError(f"--jobs {jobs!r}: expected auto, or a whole number from 1.")
    return int(jobs)


def replicates(
    overrides: ConfigOverrides, federations: str | None, seeds: str | None
) -> tuple[list[int], bool]:
    """The numbers of ``--federations`` or ``--seeds``, and whether they are federations."""
    if seeds is not None and federations is not None:
        raise ConfigError(
            "--federations and --seeds: give one of them. Federations draw the seed, too."
        )
    if seeds is not None:
        return parse_seeds(seeds), False
    if "data.seed" in overrides.assigned:
        raise ConfigError(
            "--set data.seed: every federation has its own. Name them by --federations, or give "
            "--seeds for several seeds on one."
        )
    return parse_seeds(federations or FEDERATIONS, "--federations"), True


def plan_of(
    overrides: ConfigOverrides,
    strategies: str | None,
    seeds: list[int],
    clients: str | None,
    folder: Path,
    federations: bool = False,
) -> Plan:
    """Every client with every strategy and seed, to be written below ``folder``."""
    for key, instead in _OTHERWISE.items():
        if key in overrides.assigned:
            raise ConfigError(f"This command does not take --set {key}: {instead}.")
    if clients is not None and "client.name" in overrides.assigned:
        raise ConfigError("--set client.name: --clients names them. Leave one of them out.")
    settings = overrides.settings | {"output-dir": str(folder)}
    chosen = () if strategies is None else StrategyConfig.parse(strategies)
    trainers = () if clients is None else ClientConfig.parse(clients)
    named = [*chosen, *trainers, *methods_of(overrides.settings)]
    for key in overrides.settings:
        check_key(key, named)
    return Plan.grid(settings, chosen, seeds, overrides.shared, trainers, federations)
