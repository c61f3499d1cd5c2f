"""The ``fairflower`` command; each subcommand has a module.

Libraries that are slow to import (Flower, torch, pandas, matplotlib) are imported inside functions,
so that ``--help`` and errors about options appear immediately.
"""

import inspect
import io
import sys
from collections.abc import Callable
from typing import Annotated

import typer

import fairflower
from fairflower.cli import deploy, listing, report, run, table, tune
from fairflower.cli.terminal import PLAIN, console

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
    """Print the version if ``--version`` is given."""
    if version:
        console.print(f"fairflower {fairflower.__version__}", highlight=False)
        raise typer.Exit


def add(group: typer.Typer, *commands: Callable[..., None]) -> None:
    """Add commands; docstrings become the help texts, with paragraphs that can be rewrapped."""
    for command in commands:
        paragraphs = (inspect.getdoc(command) or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        group.command(command.__name__.strip("_"), help=text)(command)


add(app, run.run, run.compare, tune.tune, run.evaluate, report.report, report.export)
add(app, table.predict, listing.list_)

data_app = typer.Typer(help="Inspect data sets.", no_args_is_help=True)
add(data_app, listing.show, table.schema, table.statistics)
app.add_typer(data_app, name="data")

deploy_app = typer.Typer(
    help="Deploy a federation: sites, certificates, keys and trial deployments.",
    no_args_is_help=True,
)
add(deploy_app, deploy.trial, deploy.site, deploy.policy, deploy.wheelhouse, deploy.unit)
add(deploy_app, deploy.certificates, deploy.key, deploy.sites, deploy.check)
add(deploy_app, deploy.fingerprints, deploy.leaves)
app.add_typer(deploy_app, name="deploy")


def main() -> None:
    """Run the ``fairflower`` command."""
    for stream in (sys.stdout, sys.stderr):
        # Characters that the terminal cannot show, for example in a file name, must not end a run.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=PLAIN)
    app()
