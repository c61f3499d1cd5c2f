"""``fairflower leaderboard``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairflower.cli.compare import at_once
from fairflower.cli.options import DataDir, Jobs
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.errors import ConfigError
from fairflower.paths import new_folder
from fairflower.plans.execution import execute
from fairflower.plans.plan import fitting

if TYPE_CHECKING:
    from fairflower.plans.leaderboard import Benchmark
    from fairflower.plans.tuning import Tuning


@friendly_errors()
def leaderboard(
    file: Annotated[Path, typer.Argument(help="TOML file of a protocol and its benchmarks.")],
    benchmarks: Annotated[
        str, typer.Option(help="Comma-separated, of the file's; default: all.")
    ] = "",
    data_dir: DataDir = None,
    jobs: Jobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the studies; default: a new one.")
    ] = None,
) -> None:
    """Tune and test every aggregation rule on every benchmark of a file; write the leaderboard.

    Each benchmark is a study as of `fairflower tune`, in a folder of its own below --output-dir,
    and goes on where it was stopped or killed. The best of the rules are tuned and tested
    with other local training, too. Next to FILE, `<name>.csv` gets what came out, and
    `<name>.md` its tables, conclusions and figures, as index.html in the folder, where tables can
    be sorted. Other benchmarks in them stay.
    """
    # Late: Optuna and pandas take a while to import.
    from fairflower.plans.leaderboard import Leaderboard, best_rules
    from fairflower.server.folder import hold

    at_a_time = at_once(jobs)
    board = Leaderboard.read(file, {"data.dir": data_dir} if data_dir else {})
    chosen = [name.strip() for name in benchmarks.split(",") if name.strip()]
    if wrong := set(chosen) - {one.name for one in board.benchmarks}:
        names = ", ".join(one.name for one in board.benchmarks)
        raise ConfigError(f"--benchmarks: {file} has no {', '.join(sorted(wrong))}, but {names}.")
    todo = [one for one in board.benchmarks if not chosen or one.name in chosen]
    folder = new_folder("leaderboards", output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    held = hold(folder)
    studies: dict[str, list[Tuning]] = {}
    try:
        for one in todo:
            studies[one.name] = [board.rules_on(one, folder)]
            _make(studies[one.name][0], one, at_a_time)
            _write(file, folder, todo, studies)
        if board.clients and len(todo) == len(board.benchmarks):
            best = best_rules([study for (study,) in studies.values()], board.best)
            console.print(f"With other local training, too: {', '.join(best)}")
            for one in todo:
                studies[one.name].append(board.best_on(one, folder, best))
                _make(studies[one.name][1], one, at_a_time)
                _write(file, folder, todo, studies)
    finally:
        os.close(held)


def _make(study: Tuning, benchmark: Benchmark, jobs: int | None) -> None:
    """Make what is left of a study."""
    console.print(f"[bold]{benchmark.name}[/]: {study.total} runs are left; to {study.folder}")
    if study.plan.runs:
        execute(study.plan, console, jobs=jobs or fitting(study.plan, study.total), agenda=study)


def _write(
    file: Path, folder: Path, todo: list[Benchmark], studies: dict[str, list[Tuning]]
) -> None:
    """Put what there is into the files."""
    from fairflower.plans.leaderboard import rows
    from fairflower.report.pages import write_board

    found = [row for one in todo for study in studies.get(one.name, []) for row in rows(study, one)]
    page = folder / "index.html"
    write_board(file, found, page)
    say_where("leaderboard", page)
