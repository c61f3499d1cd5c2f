"""``fairflower tune``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from fairflower.cli.compare import parse_jobs, plan_of
from fairflower.cli.options import ConfigOverrides, Jobs, with_settings
from fairflower.cli.report import print_report
from fairflower.cli.terminal import console
from fairflower.errors import ConfigError
from fairflower.paths import new_folder
from fairflower.plans.execution import execute, locked_folder
from fairflower.plans.plan import parse_seeds
from fairflower.plans.protocol import EXAMPLES, SHARE, VALIDATION, TuningProtocol

if TYPE_CHECKING:
    from fairflower.plans.tuning import TuningStudies


#: What a trial is chosen by, and what that is of: `CRITERIA` and `METRICS` of
#: `fairflower.report.tuning` have them in words.
Select = Literal["worst", "average", "worst-then-average"]
Metric = Literal["accuracy", "balanced_accuracy"]


@with_settings("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr", "seed")
def tune(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated aggregation rules; what is given after colons stays as it is. "
            "Uniform averaging is always added; default: fedavg and strategy.name."
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated methods of local training, each with every strategy; default: "
            "client.name alone."
        ),
    ] = None,
    budget: Annotated[
        int, typer.Option(min=1, help="Trials of each method, the paper's values among them.")
    ] = 12,
    select: Annotated[
        Select, typer.Option(help="What to choose by, on validation images.")
    ] = "worst-then-average",
    metric: Annotated[
        Metric, typer.Option(help="What that is: accuracy, or its mean over classes.")
    ] = "accuracy",
    tune_training: Annotated[
        bool, typer.Option("--tune-training", help="Tune learning rate and local epochs, too.")
    ] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Test the paper's values, too, beside those chosen.")
    ] = False,
    prune: Annotated[
        bool, typer.Option(help="End trials early that are clearly behind the paper's values.")
    ] = True,
    seeds: Annotated[
        str, typer.Option(help="Seeds of the tests: comma-separated, or a range as 1-5.")
    ] = "1-3",
    overrides: ConfigOverrides,
    jobs: Jobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="The study's folder; default: a new one.")
    ] = None,
) -> None:
    """Tune every method alike on validation images, then test what was chosen, once.

    Each method has the same number of trials, drawn at random in the ranges that `fairflower list`
    shows, the first with the paper's values. They train with the config's seed and are compared on
    images that clients keep out of training (data.validation-fraction, here 0.2 by default).
    What is chosen is trained with the seeds of --seeds and tested on the test images.

    A folder used again goes on where it was stopped or killed.
    """
    folder = new_folder("studies", output_dir)
    overrides, parallel_runs = _with_validation(overrides), parse_jobs(jobs)
    plan = plan_of(
        overrides, strategies, [overrides.settings.get("seed", 0)], clients, folder / "runs"
    )
    from fairflower.plans.tuning import TuningStudies  # late: Optuna takes a while to import

    with locked_folder(folder, study=True):
        protocol = TuningProtocol(
            budget, parse_seeds(seeds), select, metric, tune_training, defaults, prune
        )
        tuning = TuningStudies(folder, plan.runs, protocol)
        _announce(tuning)
        _make(tuning, parallel_runs)


def _make(tuning: TuningStudies, jobs: int | None) -> None:
    """Make all runs, and report on what was made, whatever happens to the rest."""
    try:
        execute(tuning.plan, console, jobs=jobs, study=tuning)
    finally:
        tests = sorted(info.parent for info in (tuning.folder / "runs").glob("*/run.json"))
        print_report(tests, tuning.folder / "report", tuned=tuning.tuned())


def _with_validation(overrides: ConfigOverrides) -> ConfigOverrides:
    """The settings with images for validation."""
    if "seed" in overrides.assigned:
        raise ConfigError("This command does not take --set seed: give --seed.")
    if overrides.settings.get("ray-address"):
        raise ConfigError("ray-address: a study's runs are made on this machine. Leave it out.")
    if not overrides.settings.get("evaluate.test", True):
        raise ConfigError("evaluate.test = false: what is chosen is tested. Remove it.")
    if overrides.settings.get(EXAMPLES):
        return overrides
    if overrides.assigned.get(VALIDATION, SHARE) == 0:
        raise ConfigError(f"{VALIDATION} = 0: choices are made on validation images. Raise it.")
    # A run's config.toml has all settings, this one mostly at its default, which is 0.
    share = overrides.file.get(VALIDATION) or SHARE
    return replace(overrides, options={VALIDATION: share, **overrides.options})


def _announce(tuning: TuningStudies) -> None:
    """Print what is tuned, and how much of it is there already."""
    for one in tuning.tuned():
        ranges = "; ".join(f"{key} from {search}" for key, search in one.ranges.items())
        trials = f"{len(one.trials)} trial{'s' * (len(one.trials) > 1)}"
        console.print(
            f"{one.method}: {trials}, {ranges or 'nothing to tune'}", highlight=False, markup=False
        )
    done = sum(trial.outcome != "unfinished" for one in tuning.tuned() for trial in one.trials)
    if done:
        console.print(f"{done} trials are there already.")
    console.print(f"{tuning.total} runs are left; to {escape(str(tuning.folder))}", soft_wrap=True)
