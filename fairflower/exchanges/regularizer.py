"""FedDyn's state on the server (Acar et al., ICLR 2021)."""

from __future__ import annotations

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange


class DynamicRegularizer(Exchange):
    """FedDyn's h, which corrects every merged model on the server (the paper's Algorithm 1)::

        h <- h - alpha (1/N) sum_{k in cohort} (theta_k - theta)
        theta <- mean_{k in cohort} theta_k - h / alpha

    N is the number of all clients. The server stores H = -h / alpha, a sum of model updates, so
    only clients need alpha. No arrays are sent or returned.

    Here the strategy's merged model replaces the mean, in the model and in H: with K of N clients,
    H <- H + (K/N) (merged - theta). With ``uniform`` this is Algorithm 1. With other fixed weights
    w, the method converges to a point where sum_k w_k grad L_k = 0 (exactly so only if all
    clients take part); so does the authors' code, whose weights are the numbers of examples. The
    printed equations would converge to the optimum of the mean loss with any strategy. Buffers are
    not corrected. Clients keep the sums of their whole updates, even if bounds clip what is merged;
    then H differs from the clients' sums, and a run does not converge to this point.
    """

    name = "regularizer"
    returned = False
    STATE = ("H",)

    def __init__(self) -> None:
        self.H: Arrays = {}

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        share = np.float32(len(cohort) / cohort.population)
        corrected = dict(merged)
        for name in cohort.parameters:
            step = share * (merged[name] - cohort.received[name])
            self.H[name] = self.H[name] + step if name in self.H else step
            corrected[name] = (merged[name] + self.H[name]).astype(merged[name].dtype)
        return corrected
