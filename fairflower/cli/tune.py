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
from fairflower.plans.plan import replicates
from fairflower.plans.protocol import EXAMPLES, SHARE, VALIDATION, TuningProtocol

if TYPE_CHECKING:
    from fairflower.plans.tuning import TuningStudies


#: Default of --seeds; the trials have seed 0.
SEEDS = "1-3"

#: Criteria and metrics of the choice among trials: `CRITERIA` and `METRICS` of
#: `fairflower.report.tuning` describe them.
Select = Literal["worst", "average", "worst-then-average"]
Metric = Literal["accuracy", "balanced_accuracy"]


@with_settings("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr", "seed")
def tune(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated strategies; arguments after colons are not tuned. Uniform "
            "averaging is always added. Default: fedavg and strategy.name."
        ),
    ] = None,
    clients: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated methods of local training, each combined with every strategy. "
            "Default: client.name."
        ),
    ] = None,
    budget: Annotated[
        int,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of trials of each method; the first has the paper's values.",
        ),
    ] = 12,
    select: Annotated[
        Select, typer.Option(help="Criterion of the choice, on validation images.")
    ] = "worst-then-average",
    metric: Annotated[
        Metric, typer.Option(help="Metric of the criterion: accuracy, or its mean over classes.")
    ] = "accuracy",
    tune_training: Annotated[
        bool, typer.Option("--tune-training", help="Also tune learning rate and local epochs.")
    ] = False,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Also test the paper's values.")
    ] = False,
    prune: Annotated[
        bool, typer.Option(help="Stop trials that are clearly worse than the paper's values.")
    ] = True,
    federations: Annotated[
        str | None,
        typer.Option(
            help="Federations of the tests, for example 1,2,3 or 1-10. Each number is the seed of "
            "the partition, the clients' data and the run (data.seed = seed)."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Seeds of the tests on the trials' federation, for example 1-5, instead of "
            "--federations. "
            f"Default: {SEEDS}."
        ),
    ] = None,
    overrides: ConfigOverrides,
    jobs: Jobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the study. Default: a new folder.")
    ] = None,
) -> None:
    """Tune every method with the same budget on validation images, then test the chosen values.

    Each method has the same number of trials: the paper's values, then values drawn at random from
    the ranges that `fairflower list` shows. Trials train with the config's seed and are compared on
    images held out from training (data.validation-fraction, here 0.2 by default). The chosen values
    are trained on the federations of --federations, or with the seeds of --seeds, and tested on the
    test images.

    An --output-dir that is used again resumes its study.
    """
    folder = new_folder("studies", output_dir)
    overrides, parallel_runs = _with_validation(overrides), parse_jobs(jobs)
    numbers, federated = replicates(federations, seeds or (None if federations else SEEDS))
    plan = plan_of(
        overrides, strategies, [overrides.settings.get("seed", 0)], clients, folder / "runs"
    )
    from fairflower.plans.tuning import TuningStudies  # late: it is slow to import

    with locked_folder(folder, study=True):
        protocol = TuningProtocol(
            budget, numbers, select, metric, tune_training, defaults, prune, federated
        )
        tuning = TuningStudies(folder, plan.runs, protocol)
        _announce(tuning)
        _make(tuning, parallel_runs)


def _make(tuning: TuningStudies, jobs: int | None) -> None:
    """Run a study and print its report, also after a failure or interruption."""
    try:
        execute(tuning.plan, console, jobs=jobs, study=tuning)
    finally:
        tests = sorted(info.parent for info in (tuning.folder / "runs").glob("*/run.json"))
        print_report(tests, tuning.folder / "report", tuned=tuning.tuned())


def _with_validation(overrides: ConfigOverrides) -> ConfigOverrides:
    """Return the settings with validation images; ``ConfigError`` if a study refuses them."""
    if "seed" in overrides.assigned:
        raise ConfigError("This command does not take --set seed: give --seed.")
    if overrides.settings.get("ray-address"):
        raise ConfigError("ray-address: a study runs only on this machine. Leave it out.")
    if not overrides.settings.get("evaluate.test", True):
        raise ConfigError("evaluate.test = false: a study tests the chosen values. Remove it.")
    if overrides.settings.get(EXAMPLES):
        return overrides
    if overrides.assigned.get(VALIDATION, SHARE) == 0:
        raise ConfigError(f"{VALIDATION} = 0: a study needs validation images. Raise it.")
    # A run's config.toml has all settings, and 0 for this share by default.
    share = overrides.file.get(VALIDATION) or SHARE
    return replace(overrides, options={VALIDATION: share, **overrides.options})


def _announce(tuning: TuningStudies) -> None:
    """Print ranges and numbers of trials of each method, and how many runs are left."""
    for method in tuning.tuned():
        ranges = "; ".join(f"{key} from {search}" for key, search in method.ranges.items())
        trials = f"{len(method.trials)} trial{'s' * (len(method.trials) > 1)}"
        console.print(
            f"{method.method}: {trials}, {ranges or 'nothing to tune'}",
            highlight=False,
            markup=False,
        )
    done = sum(
        trial.outcome != "unfinished" for method in tuning.tuned() for trial in method.trials
    )
    if done:
        console.print(f"{done} trials are completed already.")
    console.print(
        f"{tuning.total} runs are left; output in {escape(str(tuning.folder))}", soft_wrap=True
    )
