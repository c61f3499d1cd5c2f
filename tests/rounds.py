"""Replies of clients that a test makes up, good and bad."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Error, Message

from fairflower.strategies import STRATEGIES
from fairflower.testing.rounds import MODEL, Rounds, record, reply, still, unpack, updates

__all__ = ["MODEL", "Rounds", "failure", "good", "record", "reply", "still", "unpack", "updates"]

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def failure(message: Message, reason: str) -> Message:
    return Message(Error(code=2, reason=reason), reply_to=message)


def good(message: Message, client: int, **metrics) -> Message:
    values = {"num-examples": 3, "client-id": client, "train_loss": 0.5} | metrics
    return reply(message, {k: a + np.ones((), a.dtype) for k, a in MODEL.items()}, values)
