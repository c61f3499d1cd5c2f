"""``fairflower run``: train a federation."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fairflower.cli.options import (
    Client,
    ConfigOverrides,
    method_named,
    refuse_second_name,
    with_settings,
)
from fairflower.cli.report import print_report
from fairflower.cli.terminal import console
from fairflower.config import ClientConfig, StrategyConfig
from fairflower.errors import ConfigError
from fairflower.plans.execution import announce, execute
from fairflower.plans.plan import Plan, single_run_config
from fairflower.server.checkpoint import resumed_config


@with_settings(
    *("data", "data_dir", "model", "rounds", "fraction_train", "epochs", "lr", "seed"),
    *("engine", "ray_address", "workers", "output_dir"),
)
def run(
    *,
    strategy: Annotated[
        str | None,
        typer.Option(
            help="Strategy (strategy.name), for example fedheal:tau=0.4, or module:Class."
        ),
    ] = None,
    client: Client = None,
    overrides: ConfigOverrides,
    resume: Annotated[
        Path | None,
        typer.Option(help="Run folder of a stopped run to resume with its own settings."),
    ] = None,
) -> None:
    """Train a federation and write a run folder.

    Settings come from the defaults, --config, other options and --set, in this order; later sources
    override earlier sources. If --strategy or --client names the same method as the config file,
    or the file names none, the method keeps its other arguments from the file; otherwise these
    arguments are dropped.
    `fairflower list settings` shows all keys for --set.

    --resume continues a stopped or killed run; the result is the same as without the interruption.
    Only --rounds and execution settings (--engine, --workers, --data-dir, ...) may be changed.
    """
    refuse_second_name(overrides, StrategyConfig, "--strategy", strategy)
    refuse_second_name(overrides, ClientConfig, "--client", client)
    if resume is None:
        chosen = [*method_named(StrategyConfig, strategy), *method_named(ClientConfig, client)]
        config = single_run_config(overrides.file, chosen, overrides.options | overrides.assigned)
    else:
        named = {"strategy": strategy, "client": client, "config": overrides.config}
        for option, value in named.items():
            if value is not None:
                raise ConfigError(
                    f"--{option}: a resumed run keeps its settings. Remove this option."
                )
        config = resumed_config(resume, overrides.options | overrides.assigned)
    plan = Plan([config])
    announce(plan, console)
    folders = execute(plan, console)
    print_report(folders)
    path = escape(shlex.quote(str(folders[0])))
    console.print(f"Report with figures: [bold]fairflower report {path}[/]", soft_wrap=True)
