"""``fairflower leaderboard``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fairflower.cli.compare import parse_jobs
from fairflower.cli.options import DataDir, Jobs
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.errors import ConfigError
from fairflower.paths import new_folder
from fairflower.plans.execution import execute, locked_folder
from fairflower.plans.plan import Plan, auto_jobs

if TYPE_CHECKING:
    from fairflower.leaderboard.stages import Stages


@friendly_errors()
def leaderboard(
    file: Annotated[Path, typer.Argument(help="TOML file of a design and its benchmarks.")],
    benchmarks: Annotated[
        str, typer.Option(help="Comma-separated benchmarks of the file. Default: all.")
    ] = "",
    data_dir: DataDir = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Print how many runs are left and how long they take; then stop."
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write the report of the finished runs; then stop.")
    ] = False,
    jobs: Jobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the unfinished runs. Default: a new folder.")
    ] = None,
) -> None:
    """Tune methods with the same budget, then compare them over federations by a written design.

    Every finished run becomes a row of the CSV file that FILE names for its results, and is not
    repeated: a stopped or killed command is resumed on any machine that has both files and the
    data. Run folders are removed when their row is written. --report writes sentences, tables and a
    figure from these rows, as a Markdown file beside them.
    """
    # Late: scipy takes a while to import.
    from fairflower.leaderboard.design import Design
    from fairflower.leaderboard.ledger import Ledger
    from fairflower.leaderboard.runs import LeaderboardRuns
    from fairflower.leaderboard.stages import Stages

    parallel_runs = parse_jobs(jobs)
    design = Design.read(file, {"data.dir": data_dir} if data_dir else {})
    chosen = _named(benchmarks, [benchmark.name for benchmark in design.benchmarks], file)
    stages = Stages(design, Ledger(design.results), chosen)
    if plan:
        _show(stages)
        return
    if report:
        from fairflower.leaderboard.analysis import Findings  # late: so is pandas
        from fairflower.leaderboard.document import write

        say_where("document", write(Findings(stages)))
        return
    folder = new_folder("leaderboards", output_dir)
    with locked_folder(folder):
        first = next(stages.left(), None)
        if first is None:
            console.print(f"All runs are in {escape(str(design.results))}.", soft_wrap=True)
            return
        runs = LeaderboardRuns(
            stages, folder / "at-work", parallel_runs or auto_jobs(Plan([first.config]), 99)
        )
        console.print(
            f"{runs.total} runs are left; results go to {escape(str(design.results))}",
            soft_wrap=True,
        )
        execute(runs.plan, console, jobs=runs.jobs, study=runs)


def _named(text: str, known: list[str], file: Path) -> list[str]:
    """Return the benchmarks that ``--benchmarks`` names, in the file's order; default: all."""
    chosen = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := set(chosen) - set(known):
        raise ConfigError(
            f"--benchmarks: {file} has no {', '.join(sorted(wrong))}, but {', '.join(known)}."
        )
    return [name for name in known if not chosen or name in chosen]


def _show(stages: Stages) -> None:
    """Print how many runs of each stage are left, and their core-hours."""
    from fairflower.leaderboard.runs import progress

    lines = progress(stages)
    for line in lines:
        hours = "unknown" if line.hours is None else f"{line.hours:.1f}"
        console.print(
            f"{line.benchmark:<18} {line.stage:<13} {line.left:>5} of {line.runs:>5} runs left, "
            f"{hours} core-hours",
            highlight=False,
            soft_wrap=True,
        )
    known = sum(line.hours or 0.0 for line in lines)
    left = sum(line.left for line in lines)
    unknown = sorted({line.benchmark for line in lines if line.left and line.hours is None})
    more = f" and those of {', '.join(unknown)}, which have no finished run" if unknown else ""
    console.print(f"In all {left} runs, {known:.1f} core-hours{more}.", soft_wrap=True)
