"""Reference rows: each client on its own, and all examples together."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fairflower.aggregation.hooks import Options
from fairflower.aggregation.participation import Draw, Participation
from fairflower.strategies.fedavg import Uniform


class Alone(Uniform):
    """Merge nothing: each client trains a model of its own, which it keeps.

    The answer to "would this client do better alone?". Every client starts from the same initial
    model and trains in the rounds in which the other strategies would ask it, with the same
    batches, optimizer and learning rates, but goes on from its own model. Its reply has the model
    that it received, so no trained model leaves the client, and the global model stays the initial
    one. Each client's own model is tested instead of the global model.

    See Also
    --------
    Pooled : One model on all examples together.

    Notes
    -----
    Clients must answer with fairflower's client app (`fairflower.clients.make_client_app`), which
    keeps the model as the client's state; other apps would merge with equal weights.
    """

    paper: ClassVar[str] = "the reference without a federation"
    sums_suffice = False
    single_updates = ("keeps every client's model at the client", "uniform")

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        return {"reference": "alone"}


class Pooled(Uniform):
    """Train one model on the training examples of all clients together.

    The row to reach: what the same network, optimizer and learning rates achieve without a
    federation. In fairflower's runs the first client trains in every round, on the examples of all
    clients in their order, for as many epochs. If only some clients train in a round
    (``fraction-train``), the other strategies thus see an example less often.

    See Also
    --------
    Alone : Each client on its own examples.

    Notes
    -----
    The data must be in one place, as in a simulation: sites that keep their data are refused.
    """

    paper: ClassVar[str] = "the reference with all data in one place"
    sums_suffice = False
    single_updates = ("trains one model on the examples of all clients", "uniform")

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        return {"reference": "pooled"}


class FirstClient(Participation):
    """Select the first client in every round."""

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> Sequence[int]:
        return draw.clients[:1]


def reference_options(name: str) -> Options:
    """Return the options of a reference that override its run's, which are for updates.

    In every round of ``pooled``, the first client trains.
    """
    options: Options = {"clip_update_norm": None, "clip_update_median": None, "observers": ()}
    if name == "pooled":
        options |= {"fraction_train": 1e-9, "min_clients": None, "max_client_weight": 1.0}
        options |= {"participation": FirstClient(), "availability": None}
    return options
