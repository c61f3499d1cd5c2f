"""Adapter from trainers to classic Flower clients."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Context
from numpy.typing import NDArray

from fairflower.classic.packing import pack, split
from fairflower.flower_compat import NumPyClient
from fairflower.models import exchanged_arrays
from fairflower.training.app import evaluate_round, train_round
from fairflower.training.trainer import Trainer

NDArrays = list[NDArray[Any]]


class NumPyTrainer(NumPyClient):  # type: ignore[misc]
    """A `flwr.client.NumPyClient` that uses a trainer; its results equal those of the message API.

    Return ``NumPyTrainer(trainer, context).to_client()`` from ``client_fn``. The parameters are
    those arrays of the model that server and clients exchange, in the order of the state dict.

    Parameters
    ----------
    trainer
        The client's trainer, with its model and data.
    context
        The argument of ``client_fn``, which stores the trainer's state between rounds.

    See Also
    --------
    LegacyStrategy : The strategy on the server.
    make_client_app : The equivalent for the message API.

    Examples
    --------
    >>> from fairflower.classic.client import NumPyTrainer
    >>> from fairflower.clients import SGD
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> def client_fn(context):
    ...     number = int(context.node_config["partition-id"])
    ...     trainer = SGD(tiny_model(), data(number), SETTINGS, client_id=number, seed=0)
    ...     return NumPyTrainer(trainer, context).to_client()
    """

    def __init__(self, trainer: Trainer, context: Context) -> None:
        self.trainer = trainer
        self.context = context

    def get_parameters(self, config: Mapping[str, Any]) -> NDArrays:
        """Return copies of the model's arrays."""
        return list(self.trainer.send().values())

    def fit(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[NDArrays, int, dict[str, Any]]:
        """Train the model with the given parameters; ``config`` must contain ``server-round``.

        In ``parameters``, arrays of exchanges follow the model's arrays. The result has the same
        layout: the model's arrays come first, followed by arrays of exchanges and arrays that the
        config requests with the key ``measure``. Measured numbers are returned as metrics. See
        `fairflower.classic.packing`.
        """
        model, self.trainer.shared = split(parameters, config)
        self._receive(model)
        metrics, measured = train_round(self.trainer, self.context, config)
        arrays, note = pack(self.get_parameters(config), measured)
        return arrays, len(self.trainer.data.train.y), {**metrics, **note}

    def evaluate(
        self, parameters: Sequence[NDArray[Any]], config: Mapping[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
        """Test the model with the given parameters on the client's test examples.

        Arrays of exchanges follow the model's arrays, as for ``fit``.
        """
        model, self.trainer.shared = split(parameters, config)
        self._receive(model)
        metrics = evaluate_round(self.trainer, self.context, config)
        return metrics.pop("eval_loss"), len(self.trainer.data.test.y), metrics

    def _receive(self, parameters: Sequence[NDArray[Any]]) -> None:
        names = list(exchanged_arrays(self.trainer.model))
        if len(parameters) != len(names):
            raise ValueError(
                f"{self.trainer}: expected {len(names)} arrays, as in the model, but got "
                f"{len(parameters)}."
            )
        self.trainer.receive(dict(zip(names, parameters, strict=True)))
