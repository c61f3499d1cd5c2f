"""Measurements on a client that a strategy can ask for, whatever the method of training.

A strategy that needs more than a trained model puts names of `MEASUREMENTS` into the
config that it sends: ``config["measure"] = "fisher,received_loss"``, one text, because
Flower's configs hold single values only. Every trainer then measures them on its
training images as they are, in eval mode. The trained model is the same to the last bit,
measured or not.

Arrays are an ArrayRecord of the measurement's name, float32, one array per trainable
parameter under its name. A representation is one array ``h``, as long as the model makes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fairflower.config import unknown
from fairflower.errors import ConfigError
from fairflower.numerics import metrics
from fairflower.training.features import mean_representation
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.gradients import mean_gradient, sharpness
from fairflower.training.modes import eval_mode, reproducible
from fairflower.training.trainer import NDArray, Trainer, server_round


@dataclass(frozen=True)
class Measurement:
    """Something to measure on a client."""

    #: On which model: before training, or after it.
    model: Literal["received", "trained"]
    #: Measures the trainer's model, which is in eval mode, and leaves it as it is. A float
    #: goes into the reply's metrics, named tensors become an ArrayRecord. Random draws from
    #: torch's global generator are reproducible.
    compute: Callable[[Trainer], float | Mapping[str, Tensor]]
    #: The same in words, for tables.
    what: str
    #: Whether the client has to keep its trained model for the next round's.
    keeps: bool = False


#: Where `Trainer.state` holds the model that the client trained in the round before.
KEPT = "last-trained"

#: Where it holds what `standalone_loss` found; the most epochs of that, and when it stops before.
ALONE = "trained-alone"
EPOCHS, PATIENCE, FALL = 50, 5, 0.01


def accuracy(trainer: Trainer) -> float:
    """Share of the training images that the model recognises."""
    return trainer.measure(trainer.train_examples)[1]


def balanced_accuracy(trainer: Trainer) -> float:
    """Mean over the client's classes of the share that the model recognises of each."""
    with torch.inference_mode():
        batches = trainer.train_examples.eval_batches(trainer.eval_batch_size)
        found = torch.cat([trainer.model(x).argmax(1) for x, _ in batches]).cpu().numpy()
    return metrics.balanced_accuracy(trainer.data.train.y, found)


def without_own_part(measure: Callable[[Trainer], float]) -> Callable[[Trainer], float]:
    """Measure the received model without the client's part in it.

    That is theta_-k = (theta - c theta_k) / (1 - c), where theta_k is the model that the
    client trained in the round before, and c its ``coefficient`` in the received one, as
    the server tells it. Where one of them is not known, it is the received model itself.
    """

    def measure_the_rest(trainer: Trainer) -> float:
        c, own = float(trainer.round_config.get("coefficient", 0)), trainer.state.get(KEPT)
        if own is None or not 0 < c < 1:
            return measure(trainer)
        received = trainer.send()
        try:
            trainer.receive({name: _rest(name, a, own[name], c) for name, a in received.items()})
            return measure(trainer)
        finally:
            trainer.receive(received)

    return measure_the_rest


def _rest(name: str, received: NDArray, own: NDArray, c: float) -> NDArray:
    """(theta - c theta_k) / (1 - c); counters as received, variances not below 0."""
    if received.dtype.kind != "f":
        return received
    rest = (received.astype(np.float64) - c * own) / (1 - c)
    if name.endswith("running_var"):
        rest = np.maximum(rest, 0)  # what is 0 up to rounding
    return rest.astype(received.dtype)


def standalone_loss(trainer: Trainer) -> float:
    """Find the lowest mean cross entropy that plain training alone reaches, once for all rounds.

    From the first model that the client receives it trains an epoch at a time, with the run's
    steps, until `PATIENCE` epochs have not lowered the loss by `FALL`, or `EPOCHS` are over.
    """
    kept = trainer.state.get(ALONE)
    if kept is None:
        kept = trainer.state[ALONE] = {"loss": np.array(_train_alone(trainer))}
    return float(kept["loss"])


def _train_alone(trainer: Trainer) -> float:
    """Give the lowest loss on the way; the model is afterwards what it was."""
    plain = replace(
        trainer.settings,
        local_epochs=1,
        sharpness="none",
        logit_adjustment=False,
        precision="float32",
    )
    alone = Trainer(
        trainer.model,
        trainer.data,
        plain,
        client_id=trainer.client_id,
        seed=trainer.seed,
        device=trainer.device,
    )
    alone.train_examples = trainer.train_examples
    received = trainer.send()
    lowest = target = trainer.measure(trainer.train_examples)[0]
    waited = 0
    try:
        for epoch in range(1, EPOCHS + 1):
            with torch.enable_grad(), suppress(FloatingPointError):  # worse than what it had
                alone.run_epochs(epoch)
            loss = trainer.measure(trainer.train_examples)[0]
            lowest = min(lowest, loss)  # in this order never NaN
            target, waited = (loss, 0) if loss < target - FALL else (target, waited + 1)
            if waited == PATIENCE:
                break
    finally:
        trainer.receive(received)
        for p in trainer.trainable:
            p.grad = None
    return lowest


def representation(trainer: Trainer) -> dict[str, Tensor]:
    """Measure FedGCR's h~; see `mean_representation`."""
    batches = trainer.train_examples.eval_batches(trainer.eval_batch_size)
    return mean_representation(trainer.model, batches)


MEASUREMENTS: dict[str, Measurement] = {
    "received_loss": Measurement(
        "received", lambda t: t.measure(t.train_examples)[0], "mean cross entropy"
    ),
    "received_accuracy": Measurement("received", accuracy, "accuracy, 0 to 1"),
    "received_balanced_accuracy": Measurement(
        "received", balanced_accuracy, "mean of the accuracies on the client's classes"
    ),
    "local_loss": Measurement(
        "received", standalone_loss, "the lowest that training alone reaches, found once"
    ),
    "sharpness": Measurement(
        "received",
        lambda t: sharpness(t.model, t.train_examples, rho=t.measure_rho),
        "rise of the mean cross entropy at distance rho, up the gradient",
    ),
    "minus_accuracy": Measurement(
        "received", without_own_part(accuracy), "accuracy without the client's part", keeps=True
    ),
    "minus_balanced_accuracy": Measurement(
        "received",
        without_own_part(balanced_accuracy),
        "likewise, mean over the client's classes",
        keeps=True,
    ),
    "gradient": Measurement(
        "received",
        lambda t: mean_gradient(t.model, t.train_examples),
        "gradient of the mean cross entropy",
    ),
    "steps": Measurement("trained", lambda t: float(t.steps), "optimiser steps of the round"),
    "trained_loss": Measurement(
        "trained", lambda t: t.measure(t.train_examples)[0], "mean cross entropy"
    ),
    "fisher": Measurement(
        "trained",
        lambda t: fisher_diagonal(t.model, t.train_examples, memory_mb=t.measure_memory_mb),
        "diagonal of the empirical Fisher: mean of squared per-sample gradients",
    ),
    "representation": Measurement(
        "trained", representation, "one array ``h``: mean over classes of their images' mean"
    ),
    "received_representation": Measurement(
        "received", representation, "likewise, by the received model"
    ),
}


def train_and_measure(
    trainer: Trainer, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, dict[str, NDArray]]]:
    """Train on the received model, and measure what the config asks for on the way.

    Metrics are what training reports, and the measured numbers; arrays come by name for each
    measured vector. ``ConfigError`` before anything is trained, on a name that is not in
    `MEASUREMENTS`.
    """
    names, now = requested(config), server_round(config)
    trainer.round_config = config
    arrays: dict[str, dict[str, NDArray]] = {}

    def measure(model: str) -> dict[str, float]:
        numbers = {}
        for name in names:
            if MEASUREMENTS[name].model == model:
                seed = trainer.derive_seed(now, name)
                with reproducible(seed, trainer.device), eval_mode(trainer.model):
                    value = MEASUREMENTS[name].compute(trainer)
                if isinstance(value, Mapping):
                    arrays[name] = {key: t.cpu().numpy() for key, t in value.items()}
                else:
                    numbers[name] = value
        return numbers

    metrics = measure("received")
    metrics |= trainer.train(now)
    metrics |= measure("trained")
    if any(MEASUREMENTS[name].keeps for name in names):
        trainer.state[KEPT] = trainer.send()
    return metrics, arrays


def requested(config: Mapping[str, Any]) -> list[str]:
    """Read the names under ``measure``, each once.

    >>> requested({"measure": "fisher, received_loss"}), requested({})
    (['fisher', 'received_loss'], [])
    """
    names = [name.strip() for name in str(config.get("measure", "")).split(",")]
    for name in filter(None, names):
        if name not in MEASUREMENTS:
            raise ConfigError(unknown("measurement", name, MEASUREMENTS))
    return list(dict.fromkeys(filter(None, names)))
