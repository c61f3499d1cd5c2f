"""The ``fairflower`` command: one module per subcommand, put together here.

Whatever takes long to import (Flower, torch, pandas, matplotlib) is imported by the functions
that use it, so that ``--help`` and a mistyped option answer at once.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

import fairflower
from fairflower.cli import (
    compare,
    data,
    deploy,
    export,
    landscape,
    leaderboard,
    listing,
    report,
    run,
    sharpness,
    tune,
)
from fairflower.cli.terminal import console

app = typer.Typer(
    help="Fair federated learning on Flower: one global model that works for every client.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Show the version."""
    if version:
        console.print(f"fairflower {fairflower.__version__}", highlight=False)
        raise typer.Exit


for command in (
    *(run.run, compare.compare, tune.tune, report.report),
    *(leaderboard.leaderboard, landscape.landscape, sharpness.sharpness, export.export),
):
    app.command()(command)
app.command("list")(listing.list_)

data_app = typer.Typer(help="Look at data sets.", no_args_is_help=True)
data_app.command("show")(data.show)
app.add_typer(data_app, name="data")

deploy_app = typer.Typer(help="A federation of real processes.", no_args_is_help=True)
deploy_app.command("trial")(deploy.trial)
deploy_app.command("certificates")(deploy.certificates)
deploy_app.command("key")(deploy.key)
app.add_typer(deploy_app, name="deploy")


def main() -> None:
    """Entry point of the ``fairflower`` command."""
    for stream in (sys.stdout, sys.stderr):
        # File names may hold what a terminal cannot show: no reason to end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app()
