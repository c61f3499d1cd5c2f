"""Reference rows: each client alone, and the examples of all clients together."""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from fairflower.aggregation.hooks import Options
from fairflower.aggregation.participation import Draw, Participation
from fairflower.strategies.fedavg import Uniform


class Alone(Uniform):
    """Merge nothing: each client trains a model of its own, which it keeps.

    All clients start from the same initial model. A client trains in the rounds in which another
    strategy would ask it, with the same batches, optimizer and learning rates, but goes on from its
    own model. It returns the model that it received, so no trained model leaves it. Clients'
    own models are tested, and not the global model, which stays the initial one. The best round
    (``checkpoint.best``) is one for all clients, without a model.

    Clients have to be those of `fairflower.clients.make_client_app`; others know no own model.

    See Also
    --------
    Pooled : One model on all examples together.

    Examples
    --------
    >>> from fairflower.strategies import Alone
    >>> Alone().client_config(client_id=0)
    {'reference': 'alone'}
    """

    paper: ClassVar[str] = "the reference without a federation"
    sums_suffice = False
    single_updates = ("keeps every client's model at the client", "uniform")

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        return {"reference": "alone"}


class Pooled(Uniform):
    """Train one model on the training examples of all clients together: the row to reach.

    The first client trains in every round, on all examples in the clients' order, for as many
    epochs as another strategy's clients. If only some clients train in a round
    (``fraction-train``), the others' examples are thus seen less often than here. Only
    fairflower's own runs pool the data; sites that keep their data are refused.

    See Also
    --------
    Alone : Each client on its own examples.

    Examples
    --------
    >>> from fairflower.strategies import Pooled
    >>> Pooled().client_config(client_id=0)
    {'reference': 'pooled'}
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
    """Return the options of a reference that override its run's, which are for updates."""
    options: Options = {"clip_update_norm": None, "clip_update_median": None, "observers": ()}
    options["exchanges"] = ()  # a server optimizer, since clients with exchanges are refused
    if name == "pooled":
        options |= {"fraction_train": 1e-9, "min_clients": None, "max_client_weight": 1.0}
        options |= {"participation": FirstClient(), "availability": None}
    return options
