"""How a client computes measurements for a strategy, with any training method.

A strategy that needs more than the trained model sends names of measurements in the config
(`fairflower.registry.measurements` has what the server assumes of them), as
one string: ``config["measure"] = "fisher,received_loss"``. Every trainer computes them in eval mode
on its training examples, without augmentation. Measurements do not change the trained model.

Measured arrays are sent as an ArrayRecord with the measurement's name. It has an array for each
trainable parameter, under the parameter's name and with the type in which it is sent, except for
parameters that stay with the client. Representations, ``class_counts`` and
``received_group_counts`` are a single array named ``h``; its length is the model's number of
features, the number of classes, or six times the number of groups.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairflower.config.secure import WEIGHT_KEY
from fairflower.config.text import names_in, unknown
from fairflower.errors import ConfigError
from fairflower.files import Arrays
from fairflower.models import initial_local_arrays, to_numpy, trainable
from fairflower.numerics import metrics
from fairflower.numerics.group_fairness import counts_by_group
from fairflower.registry.measurements import MEASUREMENTS, load_measurement
from fairflower.training.batches import batch_slices
from fairflower.training.features import mean_representation
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.gradients import losses_at, mean_gradient, sharpness
from fairflower.training.modes import eval_mode, reproducible, temporarily
from fairflower.training.trainer import Trainer, round_of

#: Key of `Trainer.state` for the model that the client trained in its last round.
LAST_TRAINED = "last-trained"

#: Key of `Trainer.state` for `standalone_loss`, which trains for at most `EPOCHS` epochs and stops
#: after `PATIENCE` epochs in which the loss has not decreased by `MIN_DECREASE`. The numbers are
#: this project's choice.
STANDALONE = "trained-alone"
EPOCHS, PATIENCE, MIN_DECREASE = 50, 5, 0.01


def score(trainer: Trainer) -> float:
    """Return the task's primary score, for classes accuracy, 0 to 1, on the training examples."""
    primary = trainer.task.primary
    value = trainer.evaluate(trainer.train_examples)[primary.name]
    if math.isnan(value):
        raise ValueError(f"{primary.name} is undefined for this client's training examples.")
    return value


def balanced_accuracy(trainer: Trainer) -> float:
    """Return the mean accuracy over the client's classes on the training examples, 0 to 1."""
    return metrics.balanced_accuracy(trainer.data.train.y, _predicted(trainer))


def _predicted(trainer: Trainer) -> NDArray[Any]:
    with torch.inference_mode():
        batches = trainer.train_examples.eval_batches(trainer.eval_batch_size)
        return torch.cat([trainer.task.predict(trainer.model(x)) for x, _ in batches]).cpu().numpy()


def without_own_part(trainer: Trainer, measure: Callable[[Trainer], float]) -> float:
    """Measure the received model without the client's part in it.

    The measured model is theta_-k = (theta - c theta_k) / (1 - c), where theta_k is the model that
    the client trained in its last round, and c its ``coefficient`` in the received model, which the
    server sends. If theta_k or c is missing, the received model is measured.
    """
    c = float(trainer.round_config.get("coefficient", 0))
    trained = trainer.state.get(LAST_TRAINED)
    if trained is None or not 0 < c < 1:
        return measure(trainer)
    received, parameters = trainer.send(), trainable(trainer.model)
    rest = {n: _rest(n, a, trained[n], c, n in parameters) for n, a in received.items()}
    try:
        trainer.receive(rest)
        return measure(trainer)
    finally:
        trainer.receive(received)


def _rest(
    name: str, received: NDArray[Any], trained: NDArray[Any], c: float, parameter: bool
) -> NDArray[Any]:
    """Return (theta - c theta_k) / (1 - c); variances are at least 0.

    Integers, NaN and infinite values are returned as received.
    """
    if received.dtype.kind != "f":
        return received
    with np.errstate(invalid="ignore"):
        rest = (received.astype(np.float64) - c * trained) / (1 - c)
    if name.endswith("running_var") and not parameter:
        rest = np.maximum(rest, 0)  # 0 up to rounding errors
    return np.where(np.isfinite(received), rest, received).astype(received.dtype)


def standalone_loss(trainer: Trainer) -> float:
    """Return the lowest mean loss that the client reaches by training alone.

    In its first round, the client trains the received model until the loss has not decreased by
    `MIN_DECREASE` for `PATIENCE` epochs, for at most `EPOCHS` epochs. Later rounds return the same
    value.
    """
    if kept := trainer.state.get(STANDALONE):
        return float(kept["loss"])
    plain = replace(
        trainer.settings,
        local_epochs=1,
        sharpness="none",
        logit_adjustment=False,
        precision="float32",
    )
    ours: dict[str, Any] = {"client_id": trainer.client_id, "seed": trainer.seed}
    alone = Trainer(trainer.model, trainer.data, plain, device=trainer.device, **ours)
    alone.train_examples = trainer.train_examples
    received = trainer.send()
    lowest = target = trainer.evaluate(trainer.train_examples)["loss"]
    waited = 0
    try:
        for epoch in range(1, EPOCHS + 1):
            # A diverged loss is not the lowest.
            with torch.enable_grad(), suppress(FloatingPointError):
                alone.run_epochs(epoch)
            loss = trainer.evaluate(trainer.train_examples)["loss"]
            lowest = min(lowest, loss)  # this order ignores NaN
            target, waited = (loss, 0) if loss < target - MIN_DECREASE else (target, waited + 1)
            if waited == PATIENCE:
                break
    finally:
        trainer.receive(received)
        trainer.load_local_arrays()
        for p in trainer.trainable:
            p.grad = None
    trainer.state[STANDALONE] = {"loss": np.array(lowest)}
    return lowest


def representation(trainer: Trainer) -> dict[str, Tensor]:
    """Return FedGCR's mean representation h~; see `mean_representation`."""
    batches = trainer.train_examples.eval_batches(trainer.eval_batch_size)
    return mean_representation(trainer.model, batches, trainer.represent)


def group_counts(trainer: Trainer) -> dict[str, Tensor]:
    """Return six counts for each group of people; see `fairflower.numerics.group_fairness`."""
    data = trainer.data
    if not data.groups:
        raise ConfigError(
            "received_group_counts: the training examples have no group labels. Set "
            "data.groups, or choose a measurement that needs no groups."
        )
    predicted = _predicted(trainer)
    counts = counts_by_group(data.train.y, predicted, data.groups["train"], data.num_groups)
    return {"h": torch.from_numpy(counts.ravel().astype(np.float32))}


def class_counts(trainer: Trainer) -> dict[str, Tensor]:
    """Return the number of training examples per class."""
    counts = np.bincount(trainer.data.train.y, minlength=trainer.data.num_classes)
    return {"h": torch.tensor(counts, dtype=torch.float32, device=trainer.device)}


#: How a client computes the measurements in `MEASUREMENTS`: functions of the trainer, as
#: `fairflower.registry.measurements.measurement` describes them.
COMPUTE: dict[str, Callable[[Trainer], Any]] = {
    "received_loss": lambda t: t.evaluate(t.train_examples)["loss"],
    "received_score": score,
    "received_accuracy": score,
    "received_balanced_accuracy": balanced_accuracy,
    "local_loss": standalone_loss,
    "sharpness": lambda t: sharpness(t.model, t.train_examples, rho=t.measure_rho, task=t.task),
    "perturbed_loss": lambda t: losses_at(
        t.model, t.train_examples, rho=t.measure_rho, task=t.task
    )[1],
    "minus_score": lambda t: without_own_part(t, score),
    "minus_accuracy": lambda t: without_own_part(t, score),
    "minus_balanced_accuracy": lambda t: without_own_part(t, balanced_accuracy),
    "gradient": lambda t: mean_gradient(t.model, t.train_examples, task=t.task),
    "steps": lambda t: t.steps,
    "trained_loss": lambda t: t.evaluate(t.train_examples)["loss"],
    "fisher": lambda t: fisher_diagonal(
        t.model, t.train_examples, memory_mb=t.measure_memory_mb, task=t.task
    ),
    "representation": representation,
    "received_representation": representation,
    "received_group_counts": group_counts,
    "class_counts": class_counts,
}


def train_and_measure(
    trainer: Trainer, config: Mapping[str, Any]
) -> tuple[dict[str, float], dict[str, Arrays]]:
    """Train the received model, and take the requested measurements before and after.

    Returns the metrics (those of training and the measured numbers), and the measured arrays by
    measurement and name. If the server's config has ``rho``, it is the radius of training steps and
    measurements. Raises ``ConfigError`` before training if a name is not in `MEASUREMENTS`, or rho
    is not a valid radius.
    """
    names = requested(config)
    if WEIGHT_KEY in config:  # under secure aggregation `measure_received` has measured the others
        names = [n for n in names if MEASUREMENTS[n].model == "trained" or MEASUREMENTS[n].cached]
    with _server_settings(trainer, config):
        numbers, arrays = _measure(trainer, config, names, "received")
        numbers |= trainer.train(round_of(config))
        more_numbers, more_arrays = _measure(trainer, config, names, "trained")
    if any(MEASUREMENTS[name].needs_last_trained for name in names):
        trainer.state[LAST_TRAINED] = trainer.send()
    return numbers | more_numbers, arrays | more_arrays


def measure_received(trainer: Trainer, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the requested measurements of the received model, without training.

    ``steps`` is the number of steps that training will take. Raises ``ConfigError`` if a
    measurement is not a number.
    """
    with _server_settings(trainer, config):
        numbers, arrays = _measure(trainer, config, requested(config), "received")
    if arrays:
        raise ConfigError(
            f"Secure aggregation does not support the measurement {next(iter(arrays))!r}, which is "
            "an array. Choose another strategy."
        )
    if "steps" in requested(config):
        size = trainer.settings.batch_size
        batches = batch_slices(len(trainer.train_examples), size, single=False)
        numbers["steps"] = float(trainer.settings.local_epochs * len(batches))
    return numbers


def _server_settings(trainer: Trainer, config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Give the trainer the server's config, and for this message the server's radius, if any."""
    trainer.round_config = config
    trainer.num_rounds = int(config.get("num-server-rounds", trainer.num_rounds))
    if "rho" not in config:
        return nullcontext()
    rho = float(config["rho"])
    if not 0 <= rho < math.inf:
        raise ConfigError(f"rho = {rho} from the server: expected a number >= 0.")
    settings = replace(trainer.settings, rho=rho)  # of SAM's steps
    return temporarily([(trainer, "measure_rho", rho), (trainer, "settings", settings)])


def _measure(
    trainer: Trainer, config: Mapping[str, Any], names: Sequence[str], model: str
) -> tuple[dict[str, float], dict[str, Arrays]]:
    """Take the measurements in ``names`` that apply to ``model``; return numbers and arrays."""
    numbers: dict[str, float] = {}
    arrays: dict[str, Arrays] = {}
    for name in names:
        if MEASUREMENTS[name].model == model:
            seed = trainer.derive_seed(round_of(config), name)
            compute = COMPUTE.get(name) or load_measurement(name)
            with reproducible(seed, trainer.device), eval_mode(trainer.model):
                value = compute(trainer)
            if MEASUREMENTS[name].shape == "number":
                numbers[name] = float(value)
                continue
            named = {"h": value} if isinstance(value, Tensor) else value
            kept = named.keys() - initial_local_arrays(trainer.model).keys()
            arrays[name] = {k: to_numpy(t) for k, t in named.items() if k in kept}
    return numbers, arrays


def requested(config: Mapping[str, Any]) -> list[str]:
    """Return the distinct names of measurements under ``measure`` in a config.

    >>> requested({"measure": "fisher, received_loss"}), requested({})
    (['fisher', 'received_loss'], [])
    """
    names = names_in(str(config.get("measure", "")))
    for name in names:
        if name not in MEASUREMENTS:
            raise ConfigError(unknown("measurement", name, MEASUREMENTS))
    return list(dict.fromkeys(names))
