"""q-FFL: Fair Resource Allocation in Federated Learning (Li et al., ICLR 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal, Unpack

import numpy as np

from fairflower.strategies.base import FairStrategy, Options
from fairflower.strategies.cohort import Arrays, Cohort

#: Added to losses (the authors' code): F^(q-1) stays finite.
TINY = 1e-10


class QFFL(FairStrategy):
    """Minimise the sum of the clients' losses to the power q + 1.

    With F_k the received model's loss on client k's data, q-FedAvg (Alg. 2) takes a
    step as long as an estimate of the objective's curvature allows, with L = 1/lr::

        h_k   = q F_k^(q-1) ||L Delta_k||^2 + L F_k^q
        theta <- theta + L sum_k F_k^q Delta_k / sum_k h_k

    The clients have to report ``received_loss``, the loss before training: a mean over
    their own data, as the number of examples enters in the paper only by the choice of
    who takes part. With q = 0 it is the plain mean of the models. BatchNorm statistics
    cannot be extrapolated and are averaged by F^q, normalised.

    Flower's ``QFedAvg`` treats them, and step counters, as parameters, and takes the
    loss from ``train_loss``, Flower's name for the mean over training. Another known
    implementation counts them in the step but not in the model that it writes it to,
    so every tensor behind the first BatchNorm gets another one's step.

    Parameters
    ----------
    q : float >= 0
        How much larger losses count. Default 1 (the paper's Synthetic and Sent140;
        Vehicle 5, Shakespeare 0.001).
    lr : float > 0, optional
        The clients' learning rate. By default ``train.lr`` of the config that goes to
        the clients, as in fairflower's own app; other apps have to give it.
    rule : {"qfedavg", "weights"}
        ``"weights"``: the mean of the models by F^q, normalised, as FedISM's
        experiments have it. It needs no ``lr``.
    """

    paper: ClassVar[str] = "Li, Sanjabi, Beirami, Smith, ICLR 2020"
    needs = ("received_loss",)
    FROM_CONFIG: ClassVar[Mapping[str, str]] = {"lr": "train.lr"}

    def __init__(
        self,
        *,
        q: float = 1.0,
        lr: float | None = None,
        rule: Literal["qfedavg", "weights"] = "qfedavg",
        **options: Unpack[Options],
    ) -> None:
        if not 0 <= q < np.inf:
            raise ValueError(f"q = {q}: expected a finite number, 0 or more.")
        if lr is not None and not 0 < lr < np.inf:
            raise ValueError(f"lr = {lr}: expected a positive number, the clients' learning rate.")
        if rule not in ("qfedavg", "weights"):
            raise ValueError(f"rule = {rule!r}: expected 'qfedavg' or 'weights'.")
        super().__init__(**options)
        self.q, self.lr, self.rule = q, lr, rule

    def merge(self, cohort: Cohort) -> Arrays:
        F = np.maximum(cohort.metrics["received_loss"], 0) + TINY
        power = (F / F.max()) ** self.q
        weights = cohort.cap(power / power.sum())
        self.diagnostics["weights"] = weights
        if self.rule == "weights" or self.q == 0:
            return cohort.average(weights)
        if not self.lr:
            raise ValueError(
                "QFFL needs the clients' learning rate, and the config that was sent to them "
                "has no positive 'train.lr'. Give it: QFFL(lr=...)."
            )
        h = weights * (1 + self.q * cohort.squared_norms() / (F * self.lr))
        step = weights / h.sum()
        self.diagnostics["coefficients"] = step
        return cohort.move(step, weights)
