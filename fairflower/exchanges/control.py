"""SCAFFOLD's shared state (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fairflower.aggregation.bounds import clip_factors
from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.records import norm


class ControlVariates(Exchange):
    """SCAFFOLD's c: the mean of all clients' control variates c_k.

    Clients return the changes c_k+ - c_k. The server adds them to c, independently of the weights
    of the models: c <- c + (1/N) sum_{k in cohort} (c_k+ - c_k), where N is the number of all
    clients (the paper's Eq. 5). The server's step size is 1.

    As in the paper, c is a plain mean. Once the control variates have converged, every client
    follows the mean gradient, so a run converges to the optimum of the clients' mean loss, whatever
    weights the strategy gives. (FedDyn's authors weigh c in their code of SCAFFOLD.) Clients keep
    whole changes, even if bounds clip what the server adds to c; then c is no longer the mean, and
    a run does not converge to this optimum.
    """

    name = "control"
    STATE = ("c",)

    def __init__(self) -> None:
        self.c: Arrays = {}

    def broadcast(self, server_round: int) -> Arrays:
        return self.c

    def bound(self, returned: Sequence[Arrays], median: float) -> Sequence[Arrays]:
        factors = clip_factors(np.array([norm(r) for r in returned]), median=median)
        return [
            {name: np.asarray(f * array, array.dtype) for name, array in changes.items()}
            for f, changes in zip(factors, returned, strict=True)
        ]

    def collect(self, cohort: Cohort) -> None:
        for name in cohort.parameters:
            change = np.zeros(cohort.received[name].shape, np.float64)
            for returned in cohort.measured[self.name]:
                change += returned[name]
            c = self.c.get(name, 0) + change / cohort.population
            self.c[name] = np.asarray(c, cohort.received[name].dtype)
