"""``python -m experiments.leaderboard``: tune methods, and compare them on many federations."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from experiments.leaderboard.analysis import Findings
from experiments.leaderboard.design import Design
from experiments.leaderboard.document import write
from experiments.leaderboard.ledger import Ledger
from experiments.leaderboard.runs import LeaderboardRuns, progress
from experiments.leaderboard.stages import Stages
from fairflower.cli.options import DataDir, InlineJobs
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.config.text import names_in
from fairflower.errors import ConfigError
from fairflower.paths import new_folder
from fairflower.plans.execution import auto_jobs, execute, locked_folder, parse_jobs
from fairflower.plans.plan import Plan

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@friendly_errors()
def leaderboard(
    file: Annotated[
        Path, typer.Argument(help="TOML file that defines the design and its benchmarks.")
    ],
    benchmarks: Annotated[
        str,
        typer.Option(
            help="Comma-separated benchmarks to run. Default: all benchmarks in the file."
        ),
    ] = "",
    data_dir: DataDir = None,
    plan: Annotated[
        bool,
        typer.Option(
            "--plan", help="Only print the number of remaining runs and their expected core-hours."
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Only write the report on the finished runs.")
    ] = False,
    jobs: InlineJobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder for unfinished runs. Default: a new folder.")
    ] = None,
) -> None:
    """Tune all methods with the same budget, then compare them on many federations.

    FILE defines the methods, the benchmarks and a CSV file of results. Every finished run becomes a
    row of the CSV file and is not repeated, so a stopped command can be continued on any machine
    that has both files and the data. A run folder is removed when its row has been written.
    --report writes a Markdown file with text, tables and a figure next to the CSV file.
    """
    if plan and report:
        raise ConfigError("--plan and --report cannot be combined. Remove one of them.")
    parallel_runs = parse_jobs(jobs)
    design = Design.read(file, {"data.dir": data_dir} if data_dir else {})
    chosen = _named(benchmarks, [benchmark.name for benchmark in design.benchmarks], file)
    if plan:
        _show(Stages(design, Ledger(design.results), chosen))
        return
    if report:
        if benchmarks:
            raise ConfigError("--report covers all benchmarks. Remove --benchmarks.")
        say_where("document", write(Findings(Stages(design, Ledger(design.results)))))
        return
    folder = new_folder("leaderboards", output_dir)
    with locked_folder(folder), Ledger.locked(design.results) as ledger:
        stages = Stages(design, ledger, chosen)
        first = next(stages.left(), None)
        if first is None:
            console.print(f"All runs are in {escape(str(design.results))}.", soft_wrap=True)
            return
        runs = LeaderboardRuns(
            stages, folder / "at-work", parallel_runs or auto_jobs(Plan([first.config]), 99)
        )
        console.print(
            f"{runs.total} runs are left. Results are written to {escape(str(design.results))}",
            soft_wrap=True,
        )
        execute(runs.plan, console, jobs=runs.jobs, study=runs, home=folder)


def _named(text: str, known: list[str], file: Path) -> list[str]:
    """Return the benchmarks that ``--benchmarks`` names, or all, in the order of the file."""
    chosen = names_in(text)
    if wrong := set(chosen) - set(known):
        raise ConfigError(
            f"--benchmarks: {file} does not define {', '.join(sorted(wrong))}. Choose from "
            f"{', '.join(known)}."
        )
    return [name for name in known if not chosen or name in chosen]


def _show(stages: Stages) -> None:
    """Print the number of remaining runs in each stage and their expected core-hours."""
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
    more = (
        f" plus an unknown number for {', '.join(unknown)}, where no run has finished yet"
        if unknown
        else ""
    )
    console.print(f"Total: {left} runs are left, {known:.1f} core-hours{more}.", soft_wrap=True)


if __name__ == "__main__":
    app()
