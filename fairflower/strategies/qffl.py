"""q-FFL: Fair Resource Allocation in Federated Learning (Li et al., ICLR 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, ClassVar, Literal, Unpack

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search

#: Added to losses (the authors' code): F^(q-1) stays finite.
TINY = 1e-10


class QFFL(FairStrategy):
    """Minimise the sum of the clients' losses to the power q + 1.

    With F_k the received model's loss on client k's data, q-FedAvg (Alg. 2) takes a
    step as long as an estimate of the objective's curvature allows::

        h_k   = q F_k^(q-1) ||L Delta_k||^2 + L F_k^q
        theta <- theta + L sum_k F_k^q Delta_k / sum_k h_k

    The clients have to report ``received_loss``, the loss before training: a mean over
    their own data, as the number of examples enters in the paper only by the choice of
    who takes part. With q = 0 it is the plain mean of the models. The Delta_k's
    coefficients sum to at most 1, and BatchNorm statistics move by them, too.

    L Delta_k is to be a gradient, the sum of those of the local steps, hence L = 1/lr in
    the paper, which has plain SGD. With momentum m every gradient is added to all later
    steps, m times less to each, and moves the model by up to lr / (1 - m), its limit for
    many steps: L = (1 - m) / lr. (For S steps it is their length that `SCAFFOLD` divides
    by, over S; but L is one for all clients, and what S is each client's own affair.)
    Adam's steps are no sum of gradients, and no L makes them one.

    Flower's ``QFedAvg`` treats statistics and step counters as parameters, and takes the
    loss from ``train_loss``, Flower's name for the mean over training. Another known
    implementation counts them in the step but not in the model that it writes it to,
    so every tensor behind the first BatchNorm gets another one's step.

    Parameters
    ----------
    q : float >= 0
        How much larger losses count. Default 1 (the paper's Synthetic and Sent140;
        Vehicle 5, Shakespeare 0.001). Infinite, with ``rule = "weights"`` alone, it gives
        all weight to the largest loss, equal ones sharing it: FedISM's experiments call
        that AFL.
    lr : float > 0, optional
        1/L: the clients' learning rate, with momentum m divided by 1 - m. By default
        ``train.lr / (1 - train.momentum)`` of the config that goes to the clients, as in
        fairflower's own app; other apps have to send or give it.
    rule : {"qfedavg", "weights"}
        ``"weights"``: the mean of the models by F^q, normalised, as FedISM's
        experiments have it. It needs no L, so any optimiser will do.

    Raises
    ------
    ValueError
        Before a round, if q > 0, the rule is ``"qfedavg"``, and the config that goes to the
        clients has a ``train.optimizer`` other than ``sgd``, or gives no L.
    """

    paper: ClassVar[str] = "Li, Sanjabi, Beirami, Smith, ICLR 2020"
    keeps_agreement = False  # its step has a length of its own
    needs = ("received_loss",)
    FROM_CONFIG: ClassVar[Mapping[str, tuple[str, ...]]] = {"lr": ("train.lr", "train.momentum")}

    def __init__(
        self,
        *,
        q: Annotated[float, Range(0, inf), Search(0.001, 15, log=True)] = 1.0,
        lr: Annotated[float | None, Range(above=0)] = None,
        rule: Literal["qfedavg", "weights"] = "qfedavg",
        **options: Unpack[Options],
    ) -> None:
        if q == np.inf and rule == "qfedavg":
            raise ValueError(
                f"q = {q}: q-FedAvg's step would be none at all. Give a finite q, or set "
                "rule = 'weights'."
            )
        super().__init__(**options)
        self.q, self.lr, self.rule = q, lr, rule
        self.L: float | None = None

    def read_config(self, config: Mapping[str, Any]) -> None:
        if self.rule == "weights" or self.q == 0:
            return
        optimizer = config.get("train.optimizer", "sgd")
        if optimizer != "sgd":
            raise ValueError(
                f"train.optimizer = {optimizer!r}: q-FedAvg takes the sum of a client's steps for "
                "gradients, which those of 'sgd' alone are. Set it, or strategy.rule = 'weights' "
                "(QFFL(rule='weights'))."
            )
        lr, momentum = config.get("train.lr"), config.get("train.momentum", 0.0)
        if self.lr is not None:
            self.L = 1 / self.lr
        elif (lr or 0) > 0 and 0 <= momentum < 1:
            self.L = (1 - momentum) / lr
        else:
            raise ValueError(
                f"train.lr = {lr}, train.momentum = {momentum} in the clients' config: QFFL needs "
                "a learning rate above 0 and a momentum below 1. Send them, or give "
                "QFFL(lr=...), or take QFFL(rule='weights'), which needs none."
            )

    def merge(self, cohort: Cohort) -> Arrays:
        F = np.maximum(cohort.metrics["received_loss"], 0) + TINY
        power = (F / F.max()) ** self.q
        weights = cohort.cap(power / power.sum())
        self.diagnostics["weights"] = weights
        if self.rule == "weights" or self.q == 0:
            return cohort.average(weights)
        assert self.L is not None  # read before the round
        # F^q and h, both over L sum_j F_j^q, so that neither overflows.
        h = weights * (1 + self.q * self.L * cohort.squared_norms() / F)
        step = weights / h.sum()
        self.diagnostics["coefficients"] = step
        return cohort.move(step)
