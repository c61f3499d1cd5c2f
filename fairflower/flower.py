"""The few places where fairflower touches Flower's less public or ageing parts.

Tested on the oldest and the newest Flower that pyproject.toml admits.
"""

from __future__ import annotations

import logging
import os
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp


def identify(run_id: int = 1, node_id: int = 1) -> None:
    """Let this process construct ``Message`` objects outside a Flower run.

    Newer Flower takes the sender of a message from the process's task identity,
    which only its own runtimes set.
    """
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:  # older Flower leaves the sender to the Grid
        return
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = run_id, run_id, node_id


def set_message_id(message: Message, message_id: str) -> None:
    """Give a message the id that a SuperLink would give it."""
    message.metadata.__dict__["_message_id"] = message_id


def simulate(
    server_app: ServerApp,
    client_app: ClientApp,
    num_supernodes: int,
    *,
    num_cpus: int,
    client_cpus: int,
    client_gpus: float,
) -> None:
    """Run two apps on Flower's simulation engine, on Ray, in this process.

    ``run_simulation`` is Flower's only way to do so without a daemon and a copy
    of the app, and is announced to go; the error then says what to run instead.
    """
    try:
        from flwr.simulation import run_simulation
    except ImportError as error:
        raise RuntimeError(
            "This version of Flower has no run_simulation any more. Use `flwr run .`, "
            "`fairflower run --engine inline`, or a Flower that pyproject.toml was tested with."
        ) from error
    # Ray would otherwise start its workers through the `uv run` that started us, and
    # warn about GPUs that it hides; clients look at what Ray granted, not at that.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # noqa: F401  # before the server's thread meets a half-imported Ray

    backend: Any = {
        "client_resources": {"num_cpus": client_cpus, "num_gpus": client_gpus},
        "init_args": {
            "num_cpus": num_cpus,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
    }
    run_simulation(server_app, client_app, num_supernodes, backend_config=backend)
