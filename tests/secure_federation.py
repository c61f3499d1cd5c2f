"""Rounds of secure aggregation in this process; messages are recorded and can be disturbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from threading import Event
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from sgd_clients import linear, random_client_data, sgd_trainer

from fairflower.aggregation.strategy import FairStrategy
from fairflower.arrays import arrays_of, record_of
from fairflower.clients import ClientData, make_client_app
from fairflower.engines.inline import FIRST_NODE, InlineGrid, send_and_receive
from fairflower.secure.client import secure_mod
from fairflower.secure.rounds import train_masked

Arrays = dict[str, np.ndarray]

#: Stages of a round, in order; Flower's masked exchange has the last four.
STAGES = ("measure", "setup", "share_keys", "collect_masked_vectors", "unmask")

#: Run config in the app's messages.
CONFIG = {
    "seed": 0,
    "train.lr": 0.05,
    "train.momentum": 0.9,
    "train.optimizer": "sgd",
    "num-server-rounds": 5,
}


def stage_of(message: Message) -> str:
    """Return the stage of a message, one of ``STAGES``; "" for plain training."""
    if message.metadata.message_type == "train.measure":
        return "measure"
    secret = message.content.config_records.get(RECORD_KEY_CONFIGS)
    return "" if secret is None else str(secret["stage"])


@cache
def data_of(client: int) -> ClientData:
    return random_client_data(train=10 + 4 * client, seed=client)


class SecureFederation:
    """Clients with random images, a strategy, and the current global model.

    ``disturb(stage, client, message)`` may raise an exception for the client, ``after(stage,
    client, reply)`` may change its reply. ``replies`` has all replies to the server, and
    ``trained`` each client's model before masking.
    """

    def __init__(
        self,
        strategy: FairStrategy,
        clients: int = 5,
        net: Callable[[], torch.nn.Module] = linear,
        mods: Sequence[Any] = (secure_mod,),
        secure: bool = True,
        measures: bool = True,
    ) -> None:
        self.strategy, self.secure, self.net = strategy, secure, net
        self.replies: list[tuple[str, int, Message]] = []
        self.trained: dict[int, Arrays] = {}
        self.disturb: Callable[[str, int, Message], None] = lambda stage, client, message: None
        self.silent: tuple[str, int] = ("", -1)  # a stage at which a client does not reply
        self.after: Callable[[str, int, Message], None] = lambda stage, client, reply: None

        def spy(message: Message, context: Context, call_next: Any) -> Message:
            reply = call_next(message, context)
            if "arrays" in reply.content:  # it was not only measured
                self.trained[context.node_id - FIRST_NODE] = arrays_of(reply.content["arrays"])
            return reply

        self.app = make_client_app(self._trainer, mods=[*mods, spy])
        if not measures:  # as in versions without secure aggregation
            del self.app._registered_funcs["train.measure"]
        self.grid = InlineGrid(self._answer, clients)  # type: ignore[arg-type]
        nodes = {k: FIRST_NODE + k for k in range(clients)}
        strategy.enroll(nodes, seed=0, sizes={k: 10 + 4 * k for k in nodes})
        self.model = record_of(sgd_trainer(net()).send())
        self.round = 0

    def _trainer(self, context: Context, config: Any) -> Any:
        k = context.node_id - FIRST_NODE
        return sgd_trainer(self.net(), data=data_of(k), client_id=k)

    def _answer(self, message: Message, context: Context) -> Message:
        stage, client = stage_of(message), context.node_id - FIRST_NODE
        self.disturb(stage, client, message)
        reply = self.app(message, context)
        self.after(stage, client, reply)
        self.replies.append((stage, client, reply))
        return reply

    def _send(self, messages: list[Message]) -> list[Message]:
        for message in messages:
            if "config" in message.content:
                config = message.content.config_records["config"]
                config["client-id"] = message.metadata.dst_node_id - FIRST_NODE
        stage = stage_of(messages[0])
        replies = send_and_receive(self.grid, messages, 60.0, Event())
        return [r for r in replies if (stage, r.metadata.src_node_id - FIRST_NODE) != self.silent]

    def train(self) -> Arrays:
        """Train a round and return the new model."""
        self.round += 1
        config = ConfigRecord({**CONFIG, "secure-aggregation": self.secure})
        messages = list(self.strategy.configure_train(self.round, self.model, config, self.grid))
        if self.secure:
            self.model = train_masked(self.strategy, self._send, self.round, messages, self.model)
        else:
            merged, _ = self.strategy.aggregate_train(self.round, self._send(messages))
            assert merged is not None
            self.model = merged
        return arrays_of(self.model)


def raise_at(stage: str, *clients: int) -> Callable[[str, int, Message], None]:
    """Return a function for ``disturb`` that raises an exception for clients at a stage."""

    def disturb(now: str, client: int, message: Message) -> None:
        if now == stage and client in clients:
            raise RuntimeError(f"client {client} is away")

    return disturb
