"""Replies of simulated clients, valid and invalid, and the weights that they get."""

from __future__ import annotations

import numpy as np
from flwr.app import Error, Message

from fairflower.testing.rounds import MODEL, Rounds, reply


def error_reply(message: Message, reason: str) -> Message:
    return Message(Error(code=2, reason=reason), reply_to=message)


def valid_reply(message: Message, client: int, **metrics) -> Message:
    values = {"num-examples": 3, "client-id": client, "train_loss": 0.5} | metrics
    return reply(message, {k: a + np.ones((), a.dtype) for k, a in MODEL.items()}, values)


def weights_by(metric: str, rounds: Rounds, values, examples=None) -> np.ndarray:
    """Return the weights of a round with these values of a metric and different updates."""
    if not isinstance(values, dict):
        values = dict(enumerate(values))
    rounds.step(
        {k: {"x": np.array([1.0 + k])} for k in values},
        {k: examples[k] if examples else 10 ** (k % 4) for k in values},
        metrics={k: {metric: value} for k, value in values.items()},
    )
    return np.asarray(rounds.strategy.diagnostics["weights"])
