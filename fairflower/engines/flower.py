"""Flower's own simulation engine, which runs the clients on Ray.

``run_simulation`` is Flower's only way to simulate without a daemon and a copy of the
app. Flower has announced its end.
"""

from __future__ import annotations

import logging
from importlib.metadata import version

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fairflower.engines.cluster import prepare_ray
from fairflower.errors import ConfigError


def run_by_flower(
    server_app: ServerApp,
    client_app: ClientApp,
    num_supernodes: int,
    *,
    num_cpus: int,
    client_cpus: int,
    client_gpus: float,
) -> None:
    """Run two apps, with the clients on ``num_cpus`` CPUs in all.

    Raises
    ------
    ConfigError
        If this version of Flower has no ``run_simulation`` any more.
    """
    prepare_ray()  # before Flower imports Ray
    from flwr import simulation  # late: it is slow

    run_simulation = getattr(simulation, "run_simulation", None)
    if not callable(run_simulation):  # a module of that name outlives the function
        raise ConfigError(
            f"engine = 'flower': Flower {version('flwr')} has no run_simulation. Choose "
            "engine = 'ray', which gives the same bits."
        )
    backend = {
        "client_resources": {"num_cpus": client_cpus, "num_gpus": client_gpus},
        "init_args": {
            "address": "local",  # whatever cluster runs on this machine
            "num_cpus": num_cpus,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        },
    }
    run_simulation(server_app, client_app, num_supernodes, backend_config=backend)
