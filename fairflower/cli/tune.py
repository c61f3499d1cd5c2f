"""``fairflower tune``: tune methods on validation examples, and test the chosen values."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fairflower.cli.options import (
    Clients,
    ConfigOverrides,
    InlineJobs,
    OutputDir,
    References,
    with_settings,
)
from fairflower.cli.report import print_report
from fairflower.cli.run import plan_of
from fairflower.cli.terminal import console, say
from fairflower.config.run import refuse_keys
from fairflower.config.text import counted
from fairflower.errors import ConfigError
from fairflower.paths import new_folder
from fairflower.plans.execution import check_parallel, execute, locked_folder, parse_jobs
from fairflower.plans.plan import replicates

if TYPE_CHECKING:
    from fairflower.plans.tuning import TuningStudies

#: Key of the fraction of validation examples, and its default in a study.
_VALIDATION, _SHARE = "data.validation-fraction", 0.2

#: Default of --seeds. The trials have seed 0.
SEEDS = "1-3"

#: Criteria for choosing among trials; described by `CRITERIA` in `fairflower.report.tuning`.
Select = Literal["worst", "average", "worst-then-average"]


@with_settings("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr", "seed")
def tune(
    *,
    strategies: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated strategies; arguments given after colons are not tuned. "
            "uniform is always added. Default: fedavg and the value of strategy.name."
        ),
    ] = None,
    clients: Clients = None,
    references: References = None,
    budget: Annotated[
        int,
        typer.Option(
            min=1,
            max=100_000,
            help="Number of trials per method; the first trial uses the default values.",
        ),
    ] = 12,
    select: Annotated[
        Select,
        typer.Option(help="Criterion for choosing among trials, computed on validation examples."),
    ] = "worst-then-average",
    metric: Annotated[
        str,
        typer.Option(
            metavar="SCORE",
            help="Score for the criterion, one of those of the data's task: for classes accuracy "
            "or balanced_accuracy (mean over classes). Default: the task's primary score.",
        ),
    ] = "",
    tune_training: Annotated[
        bool,
        typer.Option(
            "--tune-training", help="Also tune the learning rate and the number of local epochs."
        ),
    ] = False,
    defaults: Annotated[
        bool,
        typer.Option(
            "--defaults", help="Also test each method with the default values of its arguments."
        ),
    ] = False,
    federations: Annotated[
        str | None,
        typer.Option(
            help="Federations for the tests, for example 1,2,3 or 1-10. Each number is the "
            "random seed for the partition, the clients' data and the run (data.seed = seed)."
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Random seeds for tests on the same federation as the trials, for example 1-5; an "
            f"alternative to --federations. Default: {SEEDS}."
        ),
    ] = None,
    overrides: ConfigOverrides,
    jobs: InlineJobs = "auto",
    output_dir: OutputDir = None,
) -> None:
    """Tune every method with the same budget on validation examples, then test the chosen values.

    Every method gets the same number of trials: the first uses the paper's values, and the others
    use values drawn at random from the ranges that `fairflower list` shows. All trials train with
    the config's seed and are compared on validation examples, which are held out from training
    (data.validation-fraction, 0.2 by default in this command). Each method is then trained with its
    chosen values on --federations, or with --seeds, and tested on the test examples.

    If --output-dir contains a study, the study is resumed. Its report then covers the methods and
    seeds of this command.
    """
    folder = new_folder("studies", output_dir)
    overrides, parallel_runs = _with_validation(overrides), parse_jobs(jobs)
    numbers, federated = replicates(federations, seeds or (None if federations else SEEDS))
    plan = plan_of(
        *(overrides, strategies, [overrides.settings.get("seed", 0)], clients, folder / "runs"),
        references=references,
    )
    check_parallel(plan, "the runs of a study")
    # imported late, because it is slow to import
    from fairflower.plans.tuning import TuningProtocol, TuningStudies

    with locked_folder(folder, "study"):
        protocol = TuningProtocol(
            budget, numbers, select, metric, tune_training, defaults, federated
        )
        tuning = TuningStudies(folder, plan.runs, protocol)
        _announce(tuning)
        try:
            execute(tuning.plan, console, jobs=parallel_runs, study=tuning, home=folder)
        finally:  # even after a failure or a stop
            if _num_finished(tuning) or tuning.test_folders():
                print_report(tuning.test_folders(), folder / "report", tuned=tuning.tuned())
    if failed := [method.method for method in tuning.tuned() if method.chosen is None]:
        raise ConfigError(
            f"No trial of {', '.join(failed)} was completed, so nothing was chosen or tested. The "
            "reasons are below the table of trials; with a lower train.lr, fewer trials diverge."
        )


def _with_validation(overrides: ConfigOverrides) -> ConfigOverrides:
    """Add validation examples to the settings; raise ``ConfigError`` if a study cannot use them."""
    refuse_keys(overrides.assigned, {"seed": "use --seed"}, "a study")
    if not overrides.settings.get("evaluate.test", True):
        raise ConfigError(
            "evaluate.test = false: a study has to test the chosen values. Remove this setting."
        )
    if overrides.settings.get("data.validation-examples"):
        return overrides
    if overrides.assigned.get(_VALIDATION, _SHARE) == 0:
        raise ConfigError(
            f"{_VALIDATION} = 0: a study needs validation examples. Increase this setting."
        )
    # The config.toml of a run contains all settings, including 0 for this fraction by default.
    share = overrides.file.get(_VALIDATION) or _SHARE
    return replace(overrides, options={_VALIDATION: share, **overrides.options})


def _announce(tuning: TuningStudies) -> None:
    for method in tuning.tuned():
        ranges = "; ".join(f"{key} from {search}" for key, search in method.ranges.items())
        trials = counted(len(method.trials), "trial")
        say(f"{method.method}: {trials}, {ranges or 'nothing to tune'}")
    if done := _num_finished(tuning):
        say(f"Already finished: {counted(done, 'trial')}.")
    say(f"At most {counted(tuning.total, 'run')} left. Output folder: {tuning.folder}")


def _num_finished(tuning: TuningStudies) -> int:
    return sum(trial.outcome != "unfinished" for tuned in tuning.tuned() for trial in tuned.trials)
