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
    """Return the weights of a round with these values of a metric and different updates.

    The weights are those by which the model moves.
    """
    if not isinstance(values, dict):
        values = dict(enumerate(values))
    before = rounds.model["x"]
    rounds.step(
        {k: {"x": np.array([1.0 + k])} for k in values},
        {k: 10 ** (k % 4) if examples is None else int(examples[k]) for k in values},
        metrics={k: {metric: value} for k, value in values.items()},
    )
    weights = np.asarray(rounds.strategy.diagnostics["weights"])
    moved = weights @ [1.0 + k for k in values]
    np.testing.assert_allclose(rounds.model["x"] - before, moved, rtol=1e-6)
    return weights
