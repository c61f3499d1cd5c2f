"""Rounds of a strategy with artificial replies, for tests."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import ArrayLike, NDArray

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.records import is_buffer
from fairflower.arrays import arrays_of, record_of
from fairflower.flower_compat import set_ids, set_task_identity
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.strategies import FairStrategy
from fairflower.testing.failures import Arrays

#: A toy model with a trained array, a running mean and a step counter, like batch norm.
MODEL: Arrays = {
    "conv.weight": np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
    "bn.running_mean": np.linspace(-1, 1, 3, dtype=np.float32),
    "bn.num_batches_tracked": np.array(5, np.int64),
}

_FIRST_NODE = 1000


def make_cohort(
    updates: ArrayLike,
    num_examples: ArrayLike | None = None,
    *,
    server_round: int = 1,
    measured: Mapping[str, ArrayLike] | None = None,
    **metrics: ArrayLike,
) -> Cohort:
    """Make a cohort of K clients, for examples and for tests of a strategy.

    Parameters
    ----------
    updates : array of shape (K, d)
        Each client's update to a model whose only array, ``w``, contains d zeros.
    num_examples : array of shape (K,), optional
        Number of training examples of each client. Default: 100.
    server_round : int
        The round, counted from 1.
    measured : mapping of str -> array of shape (K, d), optional
        Vectors measured by the clients, for example ``fisher``.
    **metrics : array of shape (K,)
        Numbers reported by the clients, for example ``received_loss``.

    Examples
    --------
    >>> from fairflower.strategies import FedAvg
    >>> FedAvg().merge(make_cohort([[1.0], [5.0]], num_examples=[100, 300]))
    {'w': array([4.])}
    """
    returned = tuple({"w": update} for update in np.asarray(updates, np.float64))
    K = len(returned)
    vectors = {
        name: tuple(
            {"h" if MEASUREMENTS.assumed(name).shape == "vector" else "w": row}
            for row in np.asarray(rows, np.float64)
        )
        for name, rows in (measured or {}).items()
    }
    return Cohort(
        server_round,
        tuple(range(K)),
        np.full(K, 100.0) if num_examples is None else np.asarray(num_examples, np.float64),
        {"w": np.zeros_like(returned[0]["w"])},
        returned,
        {name: np.asarray(values, np.float64) for name, values in metrics.items()},
        measured=vectors,
    )


class Rounds:
    """Runs rounds of a strategy with artificial replies, as a ServerApp does with real replies.

    It begins with a global model, as named arrays, and the ids of all clients in the federation.
    The attribute ``model`` is the current model, and ``config`` that in the messages to clients.

    Examples
    --------
    >>> from fairflower.strategies import FedAvg
    >>> rounds = Rounds(FedAvg(), {"w": np.zeros(1)}, clients=[0, 1])
    >>> rounds.step({0: {"w": np.ones(1)}, 1: {"w": 3 * np.ones(1)}})
    {'w': array([2.])}
    """

    def __init__(self, strategy: FairStrategy, model: Arrays, clients: Sequence[int]) -> None:
        set_task_identity()
        self.strategy = strategy
        self.model = {name: np.asarray(array) for name, array in model.items()}
        strategy.enroll({client: _FIRST_NODE + client for client in clients}, seed=0)
        self.round = 0
        self.config: dict[str, Any] = {"train.lr": 0.05, "train.momentum": 0.0}

    def ask(self) -> list[Message]:
        """Start a round, and return the messages to clients."""
        self.round += 1
        config = ConfigRecord(dict(self.config))
        messages = list(
            self.strategy.configure_train(self.round, record_of(self.model), config, None)  # type: ignore[arg-type]
        )
        for i, message in enumerate(messages):
            set_ids(message, message_id=f"{self.round}-{i}")
        return messages

    def step(
        self,
        updates: Mapping[int, Arrays],
        examples: Mapping[int, float] | None = None,
        order: Sequence[int] | None = None,
        metrics: Mapping[int, Mapping[str, Any]] | None = None,
        measured: Mapping[int, Mapping[str, Arrays]] | None = None,
    ) -> dict[str, NDArray[Any]]:
        """Run a round in which clients return the model plus ``updates``; return the next model.

        ``examples`` has the number of training examples of each client, by default 100; ``order``
        is that of the replies, by default of ``updates``. ``metrics`` and ``measured`` have
        reported numbers and named arrays; missing measurements are replaced by artificial values.
        """
        asked = {message.metadata.dst_node_id - _FIRST_NODE: message for message in self.ask()}
        replies = []
        for client in order if order is not None else updates:
            arrays = {
                name: (array + updates[client][name]).astype(array.dtype)
                for name, array in self.model.items()
            }
            values = {"num-examples": 100, "client-id": client, "train_loss": 1.0}
            values |= {"num-examples": examples[client]} if examples else {}
            values |= dict(metrics[client]) if metrics else {}
            made_up = self.make_up(client)
            scalars = {k: v for k, v in made_up.items() if not isinstance(v, dict)}
            vectors = {k: v for k, v in made_up.items() if k not in scalars}
            vectors |= measured[client] if measured else {}
            replies.append(reply(asked[client], arrays, scalars | values, vectors))
        return self.finish(replies)

    def make_up(self, client: int) -> dict[str, Any]:
        """Return artificial measurements for a client, the same in every test."""
        random = np.random.default_rng([client, self.round])
        trained = {
            name: np.abs(random.normal(size=array.shape)).astype(array.dtype)
            for name, array in self.model.items()
            if not is_buffer(name, array)
        }
        made_up: dict[str, Any] = {}
        for need in (*self.strategy.measurements, *self.strategy.reported_metrics):
            measured = MEASUREMENTS.assumed(need)
            match measured.shape:
                case "vector":
                    h = random.normal(size=7).astype(np.float32)
                    made_up[need] = {"h": h if measured.low < 0 else np.abs(h)}
                case "parameters":
                    made_up[need] = dict(trained)
                case _:  # between 0 and 1 if the range allows it
                    low, high = max(measured.low, min(0, measured.high - 1)), measured.high
                    made_up[need] = low + (min(high, low + 1) - low) * float(random.random())
        return made_up

    def finish(self, replies: Sequence[Message]) -> dict[str, NDArray[Any]]:
        """Finish a round with these replies; return the next model."""
        merged, _ = self.strategy.aggregate_train(self.round, replies)
        assert merged is not None
        self.model = arrays_of(merged)
        return self.model


def reply(
    message: Message,
    arrays: Arrays,
    metrics: Mapping[str, Any],
    vectors: Mapping[str, Arrays] | None = None,
) -> Message:
    """Make a client's reply with a model, metrics and named arrays."""
    content = RecordDict({"arrays": record_of(arrays), "metrics": MetricRecord(dict(metrics))})
    for name, values in (vectors or {}).items():
        content[name] = record_of(values)
    return Message(content, reply_to=message)


def updates(
    random: np.random.Generator, clients: Iterable[int]
) -> dict[int, dict[str, NDArray[Any]]]:
    """Draw a random update to `MODEL` for each client."""
    return {
        client: {
            "conv.weight": random.normal(size=(3, 4)).astype(np.float32),
            "bn.running_mean": random.normal(size=3).astype(np.float32),
            "bn.num_batches_tracked": np.array(random.integers(1, 9)),
        }
        for client in clients
    }


def zero_update() -> dict[str, NDArray[Any]]:
    """Return an update to `MODEL` that is all zeros."""
    return {name: np.zeros_like(array) for name, array in MODEL.items()}
