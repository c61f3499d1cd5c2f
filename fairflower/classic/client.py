"""Trainers as clients of classic Flower's apps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Context
from flwr.client import NumPyClient
from numpy.typing import NDArray

from fairflower.classic.packing import pack, split
from fairflower.models import travelling
from fairflower.training.app import evaluate_round, train_round
from fairflower.training.trainer import Trainer

NDArrays = list[NDArray[Any]]


class NumPyTrainer(NumPyClient):
    """A trainer behind classic Flower's interface, the same to the last bit as behind messages.

    Return ``NumPyTrainer(trainer, context).to_client()`` from ``client_fn``. Parameters are
    the model's arrays that travel, in the order of its state dict.

    Parameters
    ----------
    trainer
        The client's method of training, with its model and data.
    context
        The one that ``client_fn`` gets. What the trainer keeps from round to round is
        kept there, as with the message API.
    """

    def __init__(self, trainer: Trainer, context: Context) -> None:
        self.trainer = trainer
        self.context = context

    def get_parameters(self, config: Mapping[str, Any]) -> NDArrays:
        """Copy the model's arrays."""
        return list(self.trainer.send().values())

    def fit(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train the given parameters; ``config`` has to hold ``server-round``.

        What exchanges share follows the model in ``parameters``. What goes back to them
        does so in the result, and so do arrays that the config asks for under
        ``measure``; numbers are among the metrics. See `fairflower.classic.packing`.
        """
        model, self.trainer.shared = split(parameters, config)
        self._receive(model)
        metrics, beside = train_round(self.trainer, self.context, config)
        arrays, note = pack(self.get_parameters(config), beside)
        return arrays, len(self.trainer.data.train.y), {**metrics, **note}

    def evaluate(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Test the given parameters on the client's own test images."""
        self._receive(parameters)
        metrics = evaluate_round(self.trainer, self.context, config)
        return metrics.pop("eval_loss"), len(self.trainer.data.test.y), metrics

    def _receive(self, parameters: Sequence[NDArray[Any]]) -> None:
        names = list(travelling(self.trainer.model))
        if len(parameters) != len(names):
            raise ValueError(
                f"{self.trainer}: expected the {len(names)} arrays of the model, "
                f"got {len(parameters)}."
            )
        self.trainer.receive(dict(zip(names, parameters, strict=True)))
