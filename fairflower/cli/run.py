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
            help="Strategy (strategy.name), for example fedheal:tau=0.4, or module:Class."
        ),
    ] = None,
    client: Client = None,
    overrides: ConfigOverrides,
    resume: Annotated[
        Path | None, typer.Option(help="Run folder to resume with its settings.")
    ] = None,
) -> None:
    """Train a federation and write its run folder.

    Each source of settings overrides the one before: defaults, --config, options, --set. If
    --strategy or --client names the config's method, arguments in the config that it does not set
    are kept; otherwise they are dropped. `fairflower list settings` shows all keys for --set.

    --resume continues a stopped or killed run with the same result as an uninterrupted run. Only
    --rounds and settings of its execution (--engine, --workers, --data-dir, ...) may change.
    """
    if resume is None:
        rule = None if strategy is None else single_choice(StrategyConfig.parse(strategy))
        trainer = None if client is None else single_choice(ClientConfig.parse(client))
        config = single_run_config(
            overrides.file, rule, trainer, overrides.options | overrides.assigned
        )
    else:
        named = {"strategy": strategy, "client": client, "config": overrides.config}
        for option, value in named.items():
            if value is not None:
                raise ConfigError(f"--{option}: a resumed run keeps its settings. Leave it out.")
        config = resumed_config(resume, overrides.options | overrides.assigned)
    plan = Plan([config])
    announce(plan, console)
    folders = execute(plan, console)
    print_report(folders)
    path = escape(shlex.quote(str(folders[0])))
    console.print(f"Report with figures: [bold]fairflower report {path}[/]", soft_wrap=True)
