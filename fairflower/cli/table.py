"""``fairflower data schema``, ``data statistics`` and ``predict``: a user's own tables."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from fairflower.cli.options import Best, ConfigOverrides, output, with_settings
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.config import RunConfig
from fairflower.config.run import refuse_keys
from fairflower.config.text import names_in, unknown
from fairflower.errors import ConfigError
from fairflower.paths import check_output, check_output_file


@with_settings()
def schema(
    folder: Annotated[Path, typer.Argument(help="Folder of tables, as data.dir.")],
    *,
    overrides: ConfigOverrides,
) -> None:
    """Print a schema of the tables in a folder: kinds, units, ranges and levels of the columns.

    Save it as schema.toml in the folder, correct it, and use the same file at all sites:
    `fairflower data schema DIR -s data.target=COLUMN > DIR/schema.toml`
    """
    settings = {"data.name": "table", "data.dir": str(folder)} | overrides.settings
    config = RunConfig.from_flat(settings).data
    from fairflower.tables.columns import Schema
    from fairflower.tables.folder import TableFiles
    from fairflower.tables.schema import proposed

    tables = TableFiles(config, Schema())  # the shell may have made the file to write already
    frames = {domain: tables.frame(domain) for domain in tables.domains()}
    names = names_in(config.target) or [name for name in (config.time, config.event) if name]
    columns = list(dict.fromkeys(str(c) for frame in frames.values() for c in frame))
    for name in (*names, *filter(None, (config.patient, config.split, config.groups))):
        if name not in columns:
            raise ConfigError(unknown("column", name, columns))
    typer.echo(proposed(frames, names), nl=False)


@with_settings("data")
def statistics(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder of data, as data.dir, or what a run between sites has written."
        ),
    ],
    *,
    overrides: ConfigOverrides,
    out: Annotated[
        Path | None, output("Output folder for a page, a CSV file and Markdown.")
    ] = None,
    format_: Annotated[
        Literal["text", "md", "csv"], typer.Option("--format", "-f", help="What is printed.")
    ] = "text",
) -> None:
    """Print counts, means, levels, missing cells and classes of each domain, before training.

    `fairflower data statistics DIR -s data.target=COLUMN` reads tables, or other data with --data.
    Between sites, a run with statistics=true asks them; name its folder. Counts below
    data.smallest-group are not shown.
    """
    if out:
        check_output(out)
    from fairflower.report import data_statistics as shown
    from fairflower.server.contents import STATISTICS

    if (folder / STATISTICS).is_file():
        otherwise = dict.fromkeys(overrides.assigned, "the run has its settings")
        refuse_keys(overrides.assigned, otherwise, "this command")
        data = shown.read_statistics(folder)
    else:
        settings = {"data.name": "table"} | overrides.settings | {"data.dir": str(folder)}
        data = shown.folder_statistics(RunConfig.from_flat(settings).data)
    if format_ == "text":
        console.print(shown.statistics_text(data))
    else:
        text = shown.statistics_markdown if format_ == "md" else shown.statistics_csv
        typer.echo(text(data), nl=False)
    if out:
        say_where("page", shown.write_statistics(data, out))


@friendly_errors()
def predict(
    run: Annotated[Path, typer.Argument(help="Run folder of a model of a table.")],
    rows: Annotated[Path, typer.Argument(help="Table of new rows, with columns in any order.")],
    out: Annotated[Path | None, output("Output file (.csv). Default: it is printed.")] = None,
    best: Best = False,
) -> None:
    """Predict new rows of a table with a run's final model; write them with the predictions.

    The model's encoding, in the run folder, says how columns become features; the training data are
    not needed. Columns that the model does not use are kept.
    """
    if out:
        check_output_file(out, ".csv")
    if not rows.is_file():
        raise ConfigError(f"{rows} does not exist. Check this path.")
    from fairflower.api.final_model import network
    from fairflower.report import read_run
    from fairflower.tables.columns import Format
    from fairflower.tables.reading import read_table

    frame = read_table(rows, Format())
    made = network(read_run(run), which="best" if best else None).from_rows(frame, str(rows))
    rounded = {
        k: [round(v, 6) if isinstance(v, float) else v for v in of] for k, of in made.items()
    }
    text = frame.assign(**rounded).to_csv(index=False)
    if out is None:
        typer.echo(text, nl=False)
        return
    out.write_text(text, encoding="utf-8")
    say_where("predictions", out)
