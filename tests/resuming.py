"""Helpers for tests of checkpoints: runs that are interrupted and resumed."""

from __future__ import annotations

import csv
import json
import threading
from pathlib import Path
from typing import Any

from apps import app_with_handlers
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from rich.console import Console

from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.engines.inline import InlineGrid
from fairflower.errors import RunInterrupted
from fairflower.server.checkpoint import resumed_config
from fairflower.server.session import Session

SETTINGS = {
    "engine": "inline",
    "num-server-rounds": 3,
    "fraction-train": 0.75,
    "data.clients-per-domain": 1,
    "data.examples-per-client": 12,
    "data.test-examples": 8,
    "train.local-epochs": 1,
}


def config(folder: Path, **changes: Any) -> RunConfig:
    if changes.get("client.name") == "fedgc":  # fedgc trains prompts
        changes = {"model.name": "prompt-vit-tiny"} | changes
    return RunConfig.from_flat(SETTINGS | {"output-dir": str(folder)} | changes)


def session(
    run_config: RunConfig, app: ClientApp = client_app, nodes: int = 4, **options: Any
) -> Session:
    return Session(InlineGrid(app, nodes), run_config, Console(quiet=True), **options)


def resume(folder: Path, app: ClientApp = client_app, nodes: int = 4, **given: Any) -> Path:
    """Resume a run with a new session, as after a crash."""
    return session(resumed_config(folder, given), app, nodes).run()


def stopped(run_config: RunConfig, server_round: int, nodes: int = 4) -> Path:
    """Return the folder of a run that was stopped while a client trained in ``server_round``."""
    stop = threading.Event()

    def train(message: Message, context: Context) -> Message:
        if message.content["config"]["server-round"] == server_round:
            stop.set()
        return client_app(message, context)

    made_session = session(run_config, app_with_handlers(train=train), nodes, stop=stop)
    try:
        made_session.run()
    except RunInterrupted:
        assert made_session.folder is not None
        return made_session.folder.path
    raise AssertionError(f"the run ended before round {server_round}")


def outcome(folder: Path) -> dict[str, Any]:
    """Return the results of a run: status, model, history without times, and diagnostics."""
    with (folder / "history.csv").open() as file:
        rows = [row for row in csv.reader(file) if "seconds" not in row[3]]
    return {
        "status": json.loads((folder / "run.json").read_text())["status"],
        "model": (folder / "model.safetensors").read_bytes(),
        "history": rows,
        "diagnostics": (folder / "diagnostics.jsonl").read_text(),
    }
