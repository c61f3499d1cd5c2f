"""``fairflower run`` and ``fairflower compare``: train a federation, or compare methods on many."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fairflower.cli.options import (
    Client,
    Clients,
    ConfigOverrides,
    Jobs,
    OutputDir,
    References,
    methods_named,
    with_settings,
)
from fairflower.cli.report import print_report, readable_runs
from fairflower.cli.terminal import console, say, text_table
from fairflower.config import ClientConfig, StrategyConfig
from fairflower.config.methods import MethodSpec
from fairflower.config.run import refuse_keys
from fairflower.config.text import counted
from fairflower.errors import ConfigError
from fairflower.paths import new_folder, run_folders
from fairflower.plans.execution import announce, execute, parse_jobs, run_comparison
from fairflower.plans.plan import (
    FEDERATIONS,
    Plan,
    domains_to_hold_out,
    replicates,
    settings_of_each,
    single_run_config,
)
from fairflower.server.checkpoint import evaluation_config, resumed_config


@with_settings(
    *("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr", "seed"),
    *("engine", "ray_address", "workers", "output_dir"),
)
def run(
    *,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Strategy (strategy.name), for example fedheal:tau=0.4, or module:Class."
        ),
    ] = None,
    client: Client = None,
    overrides: ConfigOverrides,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run folder of a stopped run to resume with its own settings."),
    ] = None,
) -> None:
    """Train a federation and write a run folder.

    Settings come from the defaults, --config, other options and --set, in this order; later sources
    override earlier sources. If --strategy or --client names the same method as the config file,
    or the file names none, the method keeps its other arguments from the file; otherwise these
    arguments are dropped.
    `fairflower list settings` shows all keys for --set.

    --resume continues a stopped or killed run; the result is the same as without the interruption.
    Only --rounds and execution settings (--engine, --workers, --data-dir, ...) may be changed.
    """
    if resume is None:
        chosen: list[MethodSpec] = [
            *methods_named(overrides, StrategyConfig, "--strategy", strategy),
            *methods_named(overrides, ClientConfig, "--client", client),
        ]
        config = single_run_config(overrides.file, chosen, overrides.options | overrides.assigned)
    else:
        beside = {"--strategy": strategy, "--client": client, "--config": overrides.config}
        config = resumed_config(resume, overrides.options | overrides.assigned, beside)
    plan = Plan([config])
    announce(plan, console)
    folders = execute(plan, console)
    print_report(folders)
    path = escape(shlex.quote(str(folders[0])))
    say(f"Report with figures: [bold]fairflower report {path}[/]", markup=True)


@with_settings(
    *("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr"),
    *("engine", "ray_address", "workers"),
)
def compare(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated strategies, with arguments after colons, for example "
            "fedavg,fedheal,fedheal:beta=none. uniform is always added. Default: "
            "fedavg and the value of strategy.name."
        ),
    ] = None,
    federations: Annotated[
        str | None,
        typer.Option(
            help="Federations, for example 0,1,2 or 0-9. Each number is the random seed for the "
            "partition, the clients' data and the run (data.seed = seed). Default: "
            f"{FEDERATIONS}, unless --seeds is given."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Random seeds for repeated runs on the single federation that data.seed defines, "
            "for example 0-4; an alternative to --federations. The verdicts then hold only "
            "for this federation."
        ),
    ] = None,
    clients: Clients = None,
    references: References = None,
    leave_one_domain_out: Annotated[
        bool,
        typer.Option(
            "--leave-one-domain-out",
            help="Repeat all runs once for each domain, holding out that domain (data.held-out), "
            "and print a table of scores on the held-out domains.",
        ),
    ] = False,
    overrides: ConfigOverrides,
    jobs: Jobs = "auto",
    output_dir: OutputDir = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan",
            help="Only print the planned runs and the smallest difference that they can detect. "
            "With earlier runs (--pilot), also print the number of federations needed to detect a "
            "difference of 2 points (for scores that are no fractions, 2 % of the average).",
        ),
    ] = False,
    pilot: Annotated[
        list[Path] | None,
        typer.Option(
            help="Earlier runs from which --plan estimates the spread of differences: run "
            "folders, folders of run folders or summaries (.csv). May be repeated. Default: "
            "the runs in --output-dir."
        ),
    ] = None,
) -> None:
    """Train every strategy with every client on every federation, and write a report.

    Arguments strategy.* in the config file apply only to the strategy that the config file names,
    or to all strategies that have them if it names none.
    `--set strategy.tau=0.4` applies to all strategies that have an argument tau. Arguments after
    colons override both; tau=default restores the strategy's default. The same rules hold for
    clients. Before training, the command prints its plan with all arguments that differ from the
    defaults.

    If --output-dir contains earlier runs, completed runs are not repeated, unfinished runs are
    resumed, and the report covers all runs in the folder.
    """
    folder = new_folder("comparisons", output_dir)
    parallel_runs = parse_jobs(jobs)
    numbers, federated = replicates(federations, seeds)
    held_out = domains_to_hold_out(overrides.settings) if leave_one_domain_out else []
    methods = strategies, numbers, clients
    grid = plan_of(overrides, *methods, folder / "runs", federated, held_out, references)
    if plan:
        announce(grid, console)
        earlier = [folder / "runs"] if any((folder / "runs").rglob("run.json")) else []
        print_power(grid, len(numbers), pilot or earlier)
        return
    if pilot:
        raise ConfigError("--pilot has an effect only with --plan. Add --plan, or remove --pilot.")
    run_comparison(
        grid,
        folder,
        console,
        parallel_runs,
        lambda: print_report(run_folders(folder / "runs"), folder / "report"),
    )


@with_settings("data", "data_dir", "model", "seed", "output_dir")
def evaluate(
    trained: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Run folder, for its last model, or a file: .safetensors, such as "
            "RUN/best.safetensors, or an exported .onnx or .pt (TorchScript).",
        ),
    ],
    *,
    overrides: ConfigOverrides,
) -> None:
    """Test a model without training, and write a run folder that reports can show beside others.

    The settings of the model's run folder are the defaults, in particular model and data. --config,
    other options and --set override them, in this order; other data (--data) or another model
    (--model) replace all settings of the run's.
    """
    otherwise = {"resume": "test again", "evaluate.model": "name the model"}
    refuse_keys(overrides.assigned, otherwise, "this command")
    plan = Plan([evaluation_config(trained, overrides.settings)])
    folders = execute(plan, console)
    print_report(folders)


def plan_of(
    overrides: ConfigOverrides,
    strategies: str | None,
    seeds: list[int],
    clients: str | None,
    folder: Path,
    federations: bool = False,
    held_out: Sequence[str] = (),
    references: str | None = None,
) -> Plan:
    """Return a plan of runs for all clients, strategies and seeds, with run folders in ``folder``.

    Raises ``ConfigError`` for a setting that cannot be the same for all runs, or that no method
    has.
    """
    refuse_keys(overrides.assigned, settings_of_each(federations), "a comparison")
    settings = overrides.settings | {"output-dir": str(folder)}
    strategy_configs = methods_named(overrides, StrategyConfig, "--strategies", strategies)
    client_configs = methods_named(overrides, ClientConfig, "--clients", clients)
    methods = strategy_configs, seeds, overrides.shared, client_configs
    return Plan.grid(settings, *methods, federations, held_out, references)


def print_power(plan: Plan, federations: int, pilot: list[Path]) -> None:
    """Print which differences a plan can detect, given the spread in the ``pilot`` runs."""
    from fairflower.plans import power
    from fairflower.report.cells import within_range
    from fairflower.statistics import MIN_PAIRS

    methods = power.comparisons_of(plan)
    if federations == 1:
        say(
            "A single federation or seed allows no inference: one pair gives neither a confidence "
            f"interval nor a verdict. Verdicts need at least {MIN_PAIRS}."
        )
    elif federations < MIN_PAIRS:
        say(f"Fewer than {MIN_PAIRS} pairs give confidence intervals, but no verdicts.")
    if not pilot:
        if federations > 1:
            found = _points(power.detectable_in_sd(methods, federations))
            say(
                f"Smallest detectable difference: {found} standard deviations of the paired "
                "differences. To get points or the score's unit, pass earlier runs with --pilot, "
                "or first run a few federations with --output-dir."
            )
        return
    pilot_runs = readable_runs(run_folders(*pilot), console)
    pilot_spreads = power.spreads(pilot_runs)
    if differing := power.other_settings(plan, pilot_runs):
        say(
            "[yellow]Warning:[/] The earlier runs may have another spread than the planned runs: "
            f"{escape('; '.join(differing))}.",
            markup=True,
        )
    score, effect = pilot_spreads[0].score, pilot_spreads[0].effect
    places = score.digits - (score.unit == "%")
    rows = [
        (
            row.spread.metric,
            f"{row.spread.sd:.{score.digits}f}",
            within_range(row.detectable, _points(row.detectable, places), score.largest),
            str(row.for_difference),
            f"{row.for_equivalence} (within {row.spread.margin:.3g})",
        )
        for row in power.design_power(pilot_spreads, methods, federations)
    ]
    columns = ["metric", "SD of differences", "smallest detectable difference"]
    columns += [f"pairs for {effect:.3g} {score.points}".strip(), "pairs for equivalence"]
    compared, pairs = counted(methods, "method"), counted(federations, "pair")
    title = f"Differences that {pairs} can detect, for {compared} against Uniform"
    table = text_table(title, columns, rows)
    unit = "In percentage points, with" if score.unit == "%" else f"{score.stated}. With"
    pilots = counted(pilot_spreads[0].methods, "earlier method")
    table.caption = (
        f"{unit} 80 % power at the 5 % level over all methods and metrics. SD "
        f"from {pilots}, paired by {pilot_spreads[0].unit}."
    )
    console.print(table)


def _points(value: float, digits: int = 1) -> str:
    return "unknown" if math.isnan(value) else f"{value:.{digits}f}"
