"""``fairflower leaderboard``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from fairflower.cli.compare import at_once
from fairflower.cli.options import DataDir, Jobs
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.errors import ConfigError
from fairflower.paths import new_folder
from fairflower.plans.execution import alone_in, execute

if TYPE_CHECKING:
    from fairflower.plans.leaderboard import Benchmark, Leaderboard
    from fairflower.plans.tuning import Tuning


@friendly_errors()
def leaderboard(
    file: Annotated[Path, typer.Argument(help="TOML file of a protocol and its benchmarks.")],
    benchmarks: Annotated[
        str, typer.Option(help="Comma-separated, of the file's; default: all.")
    ] = "",
    strategies: Annotated[
        str,
        typer.Option(help="Comma-separated, of the file's, whose other rows stay; default: all."),
    ] = "",
    data_dir: DataDir = None,
    part: Annotated[
        Literal["rules", "clients"] | None,
        typer.Option(help="All with plain local training, or the best with other; default: both."),
    ] = None,
    jobs: Jobs = "auto",
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of the studies; default: a new one.")
    ] = None,
) -> None:
    """Tune and test every aggregation rule on every benchmark of a file; write the leaderboard.

    Each benchmark is a study as of `fairflower tune`, in a folder of its own below --output-dir,
    and goes on where it was stopped or killed. The best of the rules, once all benchmarks have
    them, are tuned and tested with other local training, too. Next to FILE, `<name>.csv` gets what
    came out, and `<name>.md` its tables, conclusions and figures, as index.html in the folder,
    where tables can be sorted. What they have of other benchmarks and methods stays; results by
    another protocol are not mixed with.
    """
    # Late: Optuna and pandas take a while to import.
    from fairflower.plans.leaderboard import Leaderboard
    from fairflower.report.leaderboard import read_board

    at_a_time = at_once(jobs)
    board = Leaderboard.read(file, {"data.dir": data_dir} if data_dir else {})
    names = [one.name for one in board.benchmarks]
    rules = [rule.label for rule in board.rules]
    chosen = _named("--benchmarks", benchmarks, names, file)
    only = _named("--strategies", strategies, rules, file) if strategies else None
    todo = [one for one in board.benchmarks if one.name in chosen]
    results = file.with_suffix(".csv")
    if results.exists():
        earlier = read_board(results)
        for one in todo:
            board.check(one, earlier, results)
    folder = new_folder("leaderboards", output_dir)
    with alone_in(folder, study=True):
        for one in todo if part != "clients" else []:
            _make(board, board.study(one, folder, only), one, at_a_time, file)
        if board.clients and part != "rules":
            measured = read_board(results) if results.exists() else None
            lacking = measured.lacking(names, rules) if measured else names
            if not measured or lacking:
                said = (
                    "Other local training is for the rules that are best on all benchmarks, and "
                    f"{results} lacks {', '.join(lacking)} yet."
                )
                if part == "clients":
                    raise ConfigError(f"{said} Measure them first.")
                console.print(escape(said), soft_wrap=True)
                return
            best = measured.best(rules, board.best)
            console.print(f"With other local training, too: {', '.join(best)}")
            for one in todo if only is None or set(only) & set(best) else []:
                _make(board, board.study(one, folder, only, best), one, at_a_time, file)


def _named(option: str, text: str, known: list[str], file: Path) -> list[str]:
    """The names of an option, in the order of those ``known``; without any all of these."""
    given = [name.strip() for name in text.split(",") if name.strip()]
    if wrong := set(given) - set(known):
        raise ConfigError(
            f"{option}: {file} has no {', '.join(sorted(wrong))}, but {', '.join(known)}."
        )
    return [name for name in known if not given or name in given]


def _make(
    board: Leaderboard, study: Tuning, benchmark: Benchmark, jobs: int | None, file: Path
) -> None:
    """Make what is left of a study, and put it into the files."""
    from fairflower.report.pages import write_board

    left = f"[bold]{benchmark.name}[/]: {study.total} runs are left; to {escape(str(study.folder))}"
    console.print(left, soft_wrap=True)
    execute(study.plan, console, jobs=jobs, study=study)
    page = study.folder.parent / "index.html"
    write_board(file, list(board.rows(study, benchmark)), page)
    say_where("leaderboard", page)
