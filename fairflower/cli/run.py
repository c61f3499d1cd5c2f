"""``fairflower run``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fairflower.cli.options import Client, ConfigOverrides, single_choice, with_settings
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
            help="Aggregation rule (strategy.name), e.g. fedheal:tau=0.4, or module:Class."
        ),
    ] = None,
    client: Client = None,
    overrides: ConfigOverrides,
    resume: Annotated[
        Path | None, typer.Option(help="Run folder to go on with, by its own settings.")
    ] = None,
) -> None:
    """Train one federation and write its run folder.

    Later settings win: defaults, --config, the options, --set. A --strategy or --client that
    is the config's own keeps the config's arguments that it does not give; of another method
    they are left out. `fairflower list settings` shows all keys that --set takes.

    --resume goes on with a run that was stopped or killed, as if it never had been. Only
    how it is executed may change (--engine, --workers, --data-dir, ...), and --rounds.
    """
    if resume is None:
        rule = None if strategy is None else single_choice(StrategyConfig.parse(strategy))
        training = None if client is None else single_choice(ClientConfig.parse(client))
        config = single_run_config(
            overrides.file, rule, training, overrides.options | overrides.assigned
        )
    else:
        named = {"strategy": strategy, "client": client, "config": overrides.config}
        for option, value in named.items():
            if value is not None:
                raise ConfigError(f"--{option}: a run that is resumed keeps its own settings.")
        config = resumed_config(resume, overrides.options | overrides.assigned)
    plan = Plan([config])
    announce(plan, console)
    folders = execute(plan, console)
    print_report(folders)
    path = escape(shlex.quote(str(folders[0])))
    console.print(f"Figures and details: [bold]fairflower report {path}[/]", soft_wrap=True)
