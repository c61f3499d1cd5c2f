"""The few places where fairflower touches Flower's less public or ageing parts.

Tested on the oldest and the newest Flower that pyproject.toml admits.
"""

from __future__ import annotations

import logging
import os
import sys
from types import FrameType
from typing import Any

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

run_simulation: Any
try:
    from flwr.simulation import run_simulation
except ImportError:
    run_simulation = None
if not callable(run_simulation):  # the module of that name outlived the function
    run_simulation = None


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


def privacy_wrapper() -> str:
    """Name of Flower's differential-privacy wrapper that is at work now; "" if there is none.

    A strategy is not told that it is wrapped; who is calling tells.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = type(frame.f_locals.get("self")).__name__
        if name.startswith("DifferentialPrivacy"):
            return name
        frame = frame.f_back
    return ""


def prepare_ray() -> None:
    """Set what has to be set before Ray is imported, and import it.

    Ray would otherwise start its workers through the `uv run` that started us, and
    warn about GPUs that it hides; clients look at what Ray granted, not at that. It is
    imported here, so that no other thread meets it half-imported.
    """
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray  # noqa: F401


def _simulate(
    server_app: ServerApp,
    client_app: ClientApp,
    num_supernodes: int,
    *,
    num_cpus: int,
    client_cpus: int,
    client_gpus: float,
) -> None:
    """Run two apps on Flower's simulation engine, on Ray, in this process."""
    assert run_simulation is not None
    backend: Any = {
        "client_resources": {"num_cpus": client_cpus, "num_gpus": client_gpus},
        "init_args": {
            "num_cpus": num_cpus,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
    }
    run_simulation(server_app, client_app, num_supernodes, backend_config=backend)


#: Flower's only way to simulate without a daemon and a copy of the app; it is announced
#: to go, and None where it is gone.
simulate: Any = _simulate if run_simulation is not None else None
