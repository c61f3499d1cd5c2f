"""``fairflower report`` and ``export``, and the report that other commands print at the end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from fairflower.cli.options import Best, DataDir, output
from fairflower.cli.terminal import console, friendly_errors, printable, say_where
from fairflower.errors import ConfigError, RunFolderError
from fairflower.paths import check_output, check_output_file, run_folders

if TYPE_CHECKING:
    from fairflower.report import Run
    from fairflower.report.tuning import Tuned


@friendly_errors()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(help="Run folders, folders of run folders, or summaries (.csv) of runs."),
    ],
    out: Annotated[
        Path | None,
        output(
            "Output folder for the HTML page, or output file for another format. Default: the "
            "HTML page is written to `report` in the folder of the runs (for summaries there is "
            "no page, and for runs in several folders --out is needed), and other formats are "
            "printed.",
        ),
    ] = None,
    format_: Annotated[
        Literal["html", "latex", "csv", "md"],
        typer.Option(
            "--format",
            "-f",
            help="html: a page with tables and figures. latex: all tables, for the booktabs "
            "package. csv: the first table. md: the printed tables and verdicts as Markdown.",
        ),
    ] = "html",
    table: Annotated[
        str,
        typer.Option(
            help="Print only the tables whose title contains this text, such as 'Accuracy' or "
            "'worst domain', in the terminal or with --format latex or md."
        ),
    ] = "",
    figures: Annotated[
        Literal["pdf"] | None,
        typer.Option(metavar="pdf", help="pdf: also save each figure of the page as PDF."),
    ] = None,
    summary: Annotated[
        Path | None,
        typer.Option(help="Also write the data for tables and verdicts to this .csv file."),
    ] = None,
    round_: Annotated[
        Literal["last", "best"],
        typer.Option(
            "--round",
            help="last: tables and verdicts of the last five tested rounds. best: of the best "
            "round, which validation examples chose (checkpoint.best).",
        ),
    ] = "last",
    into: Annotated[
        Path | None,
        typer.Option(
            help="Also update the tables and verdicts of the summary in this Markdown file."
        ),
    ] = None,
) -> None:
    """Print the fairness tables of runs, and write an HTML page with figures.

    A summary has the last five tested rounds of every run: `report RUNS --summary x.csv` writes
    values to x.csv, and settings and facts to x.runs.json. `report x.csv` prints the same tables
    and verdicts from them, and `report x.csv --into x.md` updates those in a document.
    """
    if (table and format_ == "csv") or (figures and (table or format_ != "html")):
        raise ConfigError(
            "--table needs --format html, latex or md, and --figures the page (--format html, "
            "without --table). Remove one of the options."
        )
    _check_places(runs, format_, out, summary, into)
    source = summary or (runs[0] if len(runs) == 1 and runs[0].suffix == ".csv" else None)
    if into and source is None:
        raise ConfigError("--into needs a summary. Add --summary FILE.csv.")
    # A pattern such as runs/* also matches the folder of an earlier report.
    runs = [r for r in runs if r.name != "report" or not (r / "index.html").exists()] or runs
    paths = run_folders(*runs)
    if format_ != "html":
        if summary or into:
            raise ConfigError(
                f"--format {format_} cannot be combined with --summary or --into. Remove one of "
                "the options."
            )
        write_text(format_, paths, out, table, best=round_ == "best")
        return
    page = None if table else out or _page_folder(runs, paths)
    best = round_ == "best"
    if not print_report(paths, page, summary, table=table, pdf=bool(figures), best=best):
        raise typer.Exit(1)
    if into and source:
        from fairflower.report.pages import generated_markdown, replace_generated_block

        replace_generated_block(into, source, generated_markdown(source))
        say_where("document", into)


def _check_places(
    runs: list[Path], format_: str, out: Path | None, summary: Path | None, into: Path | None
) -> None:
    """Check that inputs exist, and that outputs can be written and are no inputs or each other."""
    for given in runs:
        if not given.expanduser().exists():
            raise ConfigError(f"{given} does not exist. Check this path, or omit it.")
    page, file = (out, None) if format_ == "html" else (None, out)
    files = {"--summary": summary, "--into": into, "--out": file}
    for option, written in files.items():
        if written:
            check_output_file(written, ".csv" if option == "--summary" else "", option)
            if not (folder := written.parent).absolute().is_dir():
                raise ConfigError(f"{written}: the folder {folder} does not exist. Create it.")
    if page:
        check_output(page)
        if page.is_file() or page.suffix == ".html":
            raise ConfigError(
                f"--out {out}: expected a folder; the page is written to index.html in it, and the "
                "figures beside it."
            )
        files["--out"] = page / "summary.csv"  # beside the page, and perhaps an input
    taken = {os.path.realpath(run.expanduser()): "read and overwritten" for run in runs}
    for written in filter(None, files.values()):
        if use := taken.get(place := os.path.realpath(written)):
            raise ConfigError(f"{written} would be {use}. Choose another output.")
        taken[place] = "written twice"


def _page_folder(runs: list[Path], paths: list[Path]) -> Path | None:
    """Return the default folder of the HTML page of ``runs``; None if all are summaries."""
    folders = [path.expanduser().absolute() for path in paths if path.suffix != ".csv"]
    if not folders:
        return None
    if len(runs) == 1:
        return runs[0].expanduser().absolute() / "report"
    parents = list(dict.fromkeys(folder.parent for folder in folders))
    if len(parents) > 1:
        raise ConfigError(
            f"The runs are in several folders, such as {parents[0]} and {parents[1]}. Choose the "
            "folder of the page with --out."
        )
    return parents[0] / "report"


def write_text(
    format_: str, paths: list[Path], out: Path | None, table: str = "", best: bool = False
) -> None:
    """Write the tables of runs as text to the file ``out``, or print them."""
    from fairflower.report.analysis import Analysis
    from fairflower.report.frames import csv_table
    from fairflower.report.pages import latex, markdown_tables

    messages = Console(stderr=True)
    runs = readable_runs(paths, messages, best)
    if not runs:
        raise typer.Exit(1)
    analysis = Analysis(tuple(runs), table=table)
    for chapter in analysis.chapters if format_ != "md" else []:
        for note in chapter.notes:  # CSV and LaTeX output do not contain notes
            messages.print(f"Note: {note}", markup=False, soft_wrap=True)
    text = {"latex": latex, "csv": csv_table, "md": markdown_tables}[format_](analysis)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.write_text(text, encoding="utf-8")
    say_where("report", out)


def print_report(
    paths: list[Path],
    out: Path | None = None,
    summary: Path | None = None,
    tuned: Sequence[Tuned] = (),
    table: str = "",
    pdf: bool = False,
    best: bool = False,
) -> bool:
    """Print the tables of runs and write a report; return False if no run can be read.

    The page is written to the folder ``out``, with figures also as PDF if ``pdf``, and the summary
    (.csv) to the file ``summary``. Trials of ``tuned`` methods are printed even if there are no
    runs. Only tables with the text ``table`` in their titles are printed. With ``best``, they
    are of the best rounds.
    """
    from fairflower.report import Analysis, terminal_table, write_report, write_summary

    runs = readable_runs(paths, console, best)
    analysis = Analysis(tuple(runs), tuple(tuned), table)
    if runs or tuned:
        console.print(terminal_table(analysis))
    if runs and summary:
        write_summary(runs, summary)
        say_where("summary", summary)
    if runs and out:
        say_where("report", write_report(analysis, out, pdf=pdf))
    return bool(runs)


def readable_runs(paths: list[Path], messages: Console, best: bool = False) -> list[Run]:
    """Return the runs that can be read, or their best rounds; print why others are skipped."""
    from fairflower.report import read_runs

    runs = []
    for path in paths:
        try:
            runs += [run.at_best() if best else run for run in read_runs(path)]
        except RunFolderError as error:
            messages.print(f"[yellow]Skipped:[/] {escape(printable(error))}", soft_wrap=True)
    return runs


@friendly_errors()
def export(
    run: Annotated[Path, typer.Argument(help="Run folder.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            "-f",
            metavar="onnx|torchscript|state-dict",
            help="onnx or torchscript: the model including normalization, so that it accepts raw "
            "examples. state-dict: the model's arrays for PyTorch, as safetensors.",
        ),
    ] = "onnx",
    out: Annotated[Path | None, output("Output file. Default: a file in the run folder.")] = None,
    data_dir: DataDir = None,
    best: Best = False,
) -> None:
    """Export a run's final model for use in other programs."""
    from fairflower.api.final_model import FORMATS
    from fairflower.api.final_model import export as write
    from fairflower.report import read_run

    if out:
        check_output_file(out, Path(FORMATS.get(format_, "")).suffix)
    say_where("model", write(read_run(run), format_, out, data_dir or "", best))
