"""Arrays of the network that the server keeps for each client (``client.keep = "server"``)."""

from __future__ import annotations

import math

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.records import check_arrays


class PersonalArrays(Exchange):
    """Each client's own arrays, which the server stores and sends back to that client alone.

    Clients return these arrays with the model. The server does not merge them. It stores the newest
    arrays of each client that has been in a cohort, and adds them to the client's next train or
    test message. A client that has never been in a cohort gets none, and starts with the network's
    initial values.

    Notes
    -----
    The server has to know which client runs on a node, from ``FairStrategy.enroll`` or from a reply
    since the server started.
    """

    name = "personal"
    remedy = "Set client.keep = 'client', so that these arrays do not leave the client"
    STATE = ("arrays",)

    def __init__(self) -> None:
        self.arrays: dict[int, Arrays] = {}  # client -> its arrays
        self.initial: Arrays | None = None

    def prepare(self, local: Arrays) -> None:
        self.initial = local

    def arrays_for(self, client_id: int) -> Arrays:
        return self.arrays.get(client_id, {})

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
        return check_arrays(arrays, zeros if self.initial is None else self.initial)

    def collect(self, cohort: Cohort) -> None:
        for client, arrays in zip(cohort.client_ids, cohort.measured[self.name], strict=True):
            self.arrays[client] = {name: np.array(array) for name, array in arrays.items()}
