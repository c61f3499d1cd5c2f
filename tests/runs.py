"""Small whole runs on the inline engine."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from processes import TIMEOUT
from rich.console import Console

from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.engines.inline import InlineGrid
from fairflower.server.session import Session

SMALL = {
    "engine": "inline",
    "num-server-rounds": 2,
    "round-timeout": TIMEOUT,  # by default a site that refuses to take part is awaited for an hour
    "data.clients-per-domain": 1,
    "data.examples-per-client": 20,
    "data.test-examples": 20,
    "train.local-epochs": 1,
}


def config(tmp_path, **changes) -> RunConfig:
    return RunConfig.from_flat(SMALL | {"output-dir": str(tmp_path)} | changes)


def run(run_config: RunConfig, app: ClientApp = client_app, nodes: int = 4, **options):
    return Session(InlineGrid(app, nodes), run_config, Console(quiet=True), **options).run()


def run_each(make_config: Callable[..., RunConfig], tmp_path, strategies, **changes) -> list[Path]:
    """Run each strategy with five seeds."""
    return [
        run(make_config(tmp_path, **changes, **own, **{"run-name": f"{name}-{seed}"}))
        for name in strategies
        for seed in range(5)
        for own in [{"strategy.name": name, "seed": seed}]
    ]


def interrupt_first(server_round: int, _: Any) -> None:
    """Interrupt a run after its first round; a callback for ``on_round``."""
    if server_round == 1:
        raise KeyboardInterrupt


def history(folder) -> list[dict[str, str]]:
    with (folder / "history.csv").open() as file:
        return list(csv.DictReader(file))
