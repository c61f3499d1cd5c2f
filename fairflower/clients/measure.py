"""What a strategy can have measured, whatever the client's method of training.

A strategy that needs more than a trained model puts names into the config that it
sends: ``config["measure"] = "fisher,received_loss"``, one text, because Flower's
configs hold single values only. Every trainer then measures them on its training
images as they are, in eval mode. Training is not touched: the trained model is the
same to the last bit, measured or not.

============================  ========  =================================================
name                          model     what comes back
============================  ========  =================================================
``received_loss``             received  a metric: mean cross entropy
``received_accuracy``         received  a metric: 0 to 1
``gradient``                  received  arrays: gradient of the mean cross entropy
``fisher``                    trained   arrays: diagonal of the empirical Fisher
``representation``            trained   an array: mean over classes of their images' mean
``received_representation``   received  an array: likewise
============================  ========  =================================================

Arrays are an ArrayRecord of the measurement's name, float32, one array per trainable
parameter under the parameter's name (`fairflower.clients.gradients`). A representation
is one array ``h`` of the model's own length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fairflower.clients.base import NDArray, Trainer, reproducible, server_round
from fairflower.clients.gradients import evaluating, fisher_diagonal, mean_gradient
from fairflower.config import ConfigError, unknown
from fairflower.models import Classifier


@dataclass(frozen=True)
class Measurement:
    """Something to measure on a client.

    Attributes
    ----------
    model
        Which one: the ``received`` model, before training, or the ``trained`` one.
    compute
        Measures the trainer's model, which is in eval mode, and leaves it as it is.
        A float goes into the reply's metrics, named tensors become an ArrayRecord.
        Random draws from torch's global generator are reproducible.
    """

    model: Literal["received", "trained"]
    compute: Callable[[Trainer], float | Mapping[str, Tensor]]


def representation(trainer: Trainer) -> dict[str, Tensor]:
    """What tells the client's type, balanced over its classes: FedGCR's h~ (Eq. 4), [d].

    ``h = 1/C sum_c 1/n_c sum_{x of class c} represent(x)``, over the C classes that the
    client has, so that it does not show how often it has them.

    Raises
    ------
    TypeError
        When the model is no `fairflower.models.Classifier`.
    """
    model, classes = trainer.model, trainer.data.num_classes
    if not isinstance(model, Classifier):
        raise TypeError(
            f"A representation is asked for, and {type(model).__name__} has none. Make it a "
            "fairflower.models.Classifier: set head, define features(x)."
        )
    total, count = None, torch.zeros(classes, dtype=torch.float64, device=trainer.device)
    images = trainer.train_images
    with torch.no_grad():
        for x, y in images.eval_batches(trainer.eval_batch_size):
            members = F.one_hot(y, classes).double()
            # A product, since index_add on a GPU adds in any order.
            part = members.T @ model.represent(x).double()
            total = part if total is None else total + part
            count += members.sum(0)
    assert total is not None  # there are images
    held = count > 0
    return {"h": (total[held] / count[held, None]).mean(0).float()}


MEASUREMENTS: dict[str, Measurement] = {
    "received_loss": Measurement("received", lambda t: t.measure(t.train_images)[0]),
    "received_accuracy": Measurement("received", lambda t: t.measure(t.train_images)[1]),
    "gradient": Measurement("received", lambda t: mean_gradient(t.model, t.train_images)),
    "fisher": Measurement(
        "trained",
        lambda t: fisher_diagonal(t.model, t.train_images, memory_mb=t.measure_memory_mb),
    ),
    "representation": Measurement("trained", representation),
    "received_representation": Measurement("received", representation),
}


def train_and_measure(
    trainer: Trainer, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, dict[str, NDArray]]]:
    """Train on the received model, and measure what the config asks for on the way.

    Parameters
    ----------
    trainer
        Holds the received model.
    config
        ``server-round``, and perhaps ``measure``: comma-separated names.

    Returns
    -------
    metrics : dict
        What training reports, and the measured numbers.
    arrays : dict
        For each measured vector its arrays by name.

    Raises
    ------
    ConfigError
        Before anything is trained, on a name that is not in `MEASUREMENTS`.
    """
    names = requested(config)
    arrays: dict[str, dict[str, NDArray]] = {}

    def measure(model: str) -> dict[str, float]:
        numbers = {}
        for name in names:
            if MEASUREMENTS[name].model == model:
                seed = trainer.derive_seed(server_round(config), name)
                with reproducible(seed, trainer.device), evaluating(trainer.model):
                    value = MEASUREMENTS[name].compute(trainer)
                if isinstance(value, Mapping):
                    arrays[name] = {key: t.cpu().numpy() for key, t in value.items()}
                else:
                    numbers[name] = value
        return numbers

    metrics = measure("received")
    metrics |= trainer.train(server_round(config))
    metrics |= measure("trained")
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
