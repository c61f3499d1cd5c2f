"""Helpers to test strategies on a classic Flower server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fairflower.classic.packing import pack

Arrays = Mapping[str, np.ndarray]
OK = Status(Code.OK, "")


class Proxy(ClientProxy):
    """A client proxy that is never called: the tests create the replies."""

    def __init__(self, node_id: int) -> None:
        super().__init__(str(node_id))
        self.node_id = node_id

    get_properties = get_parameters = fit = evaluate = reconnect = None  # type: ignore[assignment]


Proxy.__abstractmethods__ = frozenset()


def manager(clients: int) -> SimpleClientManager:
    client_manager = SimpleClientManager()
    for k in range(clients):
        client_manager.register(Proxy(1000 + k))
    return client_manager


def result(
    arrays: Arrays, num_examples: int, metrics: dict[str, Any], measured: Mapping[str, Arrays]
) -> FitRes:
    packed, note = pack(list(arrays.values()), measured)
    return FitRes(OK, ndarrays_to_parameters(packed), num_examples, {**metrics, **note})
