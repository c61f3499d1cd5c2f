"""``fairflower compare``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from fairflower.cli.options import ConfigOverrides, Jobs, with_settings
from fairflower.cli.report import print_report, readable_runs
from fairflower.cli.terminal import console, text_table
from fairflower.config import ClientConfig, StrategyConfig, check_key, methods_of
from fairflower.errors import ConfigError
from fairflower.paths import new_folder, run_folders
from fairflower.plans.comparison import run_comparison
from fairflower.plans.execution import announce
from fairflower.plans.plan import FEDERATIONS, Plan, replicates, resolve_jobs


@with_settings(
    *("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr"),
    *("engine", "ray_address", "workers"),
)
def compare(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated strategies; arguments follow after colons, for example "
            "fedavg,fedheal,fedheal:beta=none. Uniform averaging is always added. Default: "
            "fedavg and strategy.name."
        ),
    ] = None,
    federations: Annotated[
        str | None,
        typer.Option(
            help="Federations, for example 0,1,2 or 0-9. Each number is the seed of the "
            "partition, the clients' data and the run (data.seed = seed). "
            f"Default: {FEDERATIONS}, unless --seeds is given."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds on the federation of data.seed, for example 0-4, instead of --federations. "
            "Verdicts then hold only for this federation."
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated methods of local training, each combined with every strategy, "
            "for example sgd,fedprox:mu=0.1. Default: client.name."
        ),
    ] = None,
    leave_one_domain_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-domain-out",
            help="Repeat all runs with each domain held out in turn (data.held-out), and print a "
            "table of the accuracies on the held-out domains.",
        ),
    ] = False,
    overrides: ConfigOverrides,
    jobs: Jobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the comparison. Default: a new folder.")
    ] = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Print the runs, the smallest difference that they can detect, and how many "
            "federations a difference of 2 points takes; then stop.",
        ),
    ] = False,
    pilot: Annotated[
        list[Path] | None,
        typer.Option(
            help="Runs from which --plan takes the spread: run folders, folders of run folders or "
            "summaries (.csv); repeatable. Default: the runs in --output-dir."
        ),
    ] = None,
) -> None:
    """Train every strategy with every client on every federation, and write a report.

    A config's strategy.* arguments apply to the strategy that the config names, wherever it is
    listed, and to no other. `--set strategy.tau=0.4` applies to all strategies that have a tau.
    Arguments after colons override both; tau=default restores the strategy's default. The same
    holds for clients. The plan is printed first, with all arguments that are not defaults.

    An --output-dir that is used again keeps its runs: completed runs are not repeated, unfinished
    runs are resumed, and the report covers all of them.
    """
    folder = new_folder("comparisons", output_dir)
    parallel_runs = resolve_jobs(overrides.settings, parse_jobs(jobs))
    numbers, federated = replicates(federations, seeds)
    if federated and "data.seed" in overrides.assigned:
        raise ConfigError(
            "--set data.seed: --federations sets it for each federation. Choose federations with "
            "--federations, or give --seeds for several seeds on a federation."
        )
    grid = plan_of(overrides, strategies, numbers, clients, folder / "runs", federated)
    if leave_one_domain_out:
        grid = hold_out_each(grid)
    if plan:
        announce(grid, console)
        earlier = [folder / "runs"] if (folder / "runs").exists() else []
        print_power(grid, len(numbers), pilot or earlier)
        return
    if pilot:
        raise ConfigError("--pilot is used only with --plan. Add --plan, or leave --pilot out.")
    run_comparison(
        grid,
        folder,
        console,
        parallel_runs,
        lambda: print_report(run_folders(folder / "runs"), folder / "report"),
    )


#: Keys that the runs of a comparison cannot share -> what to do instead.
_OTHERWISE = {
    "seed": "name them with --federations or --seeds",
    "strategy.name": "name them with --strategies",
    "run-name": "runs are named by method and seed",
    "output-dir": "give --output-dir",
    "resume": "an earlier --output-dir is resumed",
}


def parse_jobs(jobs: str) -> int | None:
    """Return the number that ``--jobs`` gives; None for ``auto``."""
    if jobs == "auto":
        return None
    if not jobs.isdecimal() or int(jobs) < 1:
        raise ConfigError(f"--jobs {jobs!r}: expected auto, or a whole number from 1.")
    return int(jobs)


def plan_of(
    overrides: ConfigOverrides,
    strategies: str | None,
    seeds: list[int],
    clients: str | None,
    folder: Path,
    federations: bool = False,
) -> Plan:
    """Return the plan of every client with every strategy and seed; run folders go to ``folder``.

    ``ConfigError`` for a setting that the runs cannot share, or that no method has.
    """
    for key, instead in _OTHERWISE.items():
        if key in overrides.assigned:
            raise ConfigError(f"This command does not take --set {key}: {instead}.")
    if clients is not None and "client.name" in overrides.assigned:
        raise ConfigError("--set client.name: --clients names the clients. Leave one of them out.")
    settings = overrides.settings | {"output-dir": str(folder)}
    chosen = () if strategies is None else StrategyConfig.parse(strategies)
    trainers = () if clients is None else ClientConfig.parse(clients)
    named = [*chosen, *trainers, *methods_of(overrides.settings)]
    for key in overrides.settings:
        check_key(key, named)
    return Plan.grid(settings, chosen, seeds, overrides.shared, trainers, federations)


def hold_out_each(plan: Plan) -> Plan:
    """Return the plan with each domain of its data held out in turn."""
    from fairflower.data.cache import make_data_set

    return plan.leaving_each_out(make_data_set(plan.runs[0].data).domains)


def print_power(plan: Plan, federations: int, pilot: list[Path]) -> None:
    """Print which differences a plan can detect, by the spread of the ``pilot`` runs."""
    from fairflower.plans.power import (
        EFFECT,
        comparisons_of,
        design_power,
        detectable_in_sd,
        spreads,
    )
    from fairflower.statistics.differences import MIN_PAIRS

    def points(value: float) -> str:
        return "unknown" if math.isnan(value) else f"{value:.1f}"

    methods = comparisons_of(plan)
    if federations < MIN_PAIRS:
        console.print(
            f"Fewer than {MIN_PAIRS} pairs give intervals and no verdict.", highlight=False
        )
    if not pilot:
        console.print(
            f"Smallest detectable difference: {points(detectable_in_sd(methods, federations))} "
            "standard deviations of the paired differences. For percentage points, give earlier "
            "runs with --pilot, or run a few federations first with --output-dir.",
            soft_wrap=True,
            highlight=False,
        )
        return
    pilot_spreads = spreads(
        readable_runs([path for given in pilot for path in run_folders(given)], console)
    )
    rows = [
        (
            row.spread.metric,
            f"{row.spread.sd:.2f}",
            points(row.detectable),
            str(row.for_difference),
            f"{row.for_equivalence} (within {row.spread.margin:g})",
        )
        for row in design_power(pilot_spreads, methods, federations)
    ]
    columns = (
        *("metric", "SD of differences", "smallest detectable difference"),
        *(f"pairs for {EFFECT:g} points", "pairs for equivalence"),
    )
    title = f"What {federations} pairs detect of {methods} methods against Uniform"
    table = text_table(title, columns, rows)
    pilots = f"{pilot_spreads[0].methods} earlier method{'s' * (pilot_spreads[0].methods > 1)}"
    table.caption = (
        "In percentage points, with 80 % power at 5 % over all methods and metrics. SD of "
        f"{pilots}, paired by {pilot_spreads[0].unit}."
    )
    console.print(table)
