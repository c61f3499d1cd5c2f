"""q-FFL: Fair Resource Allocation in Federated Learning (Li et al., ICLR 2020)."""

from collections.abc import Mapping
from math import inf
from typing import Annotated, Any, ClassVar, Literal, Unpack

import numpy as np

from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search, Vector

#: Added to losses, as in the authors' code, so that F^(q-1) stays finite.
TINY = 1e-10


class QFFL(FairStrategy):
    """Minimize the sum of the clients' losses to the power q + 1.

    Let F_k be the received model's loss on client k's data. q-FedAvg (Alg. 2) takes the largest
    step that an estimate of the objective's curvature allows::

        h_k   = q F_k^(q-1) ||L Delta_k||^2 + L F_k^q
        theta <- theta + L sum_k F_k^q Delta_k / sum_k h_k

    Every client reports ``received_loss``, the mean loss over its data before training. The number
    of examples is not used; in the paper it determines how often a client is selected. With q = 0
    the model is the plain mean of the clients' models. BatchNorm statistics are updated with the
    same coefficients, which sum to at most 1.

    Raises ``ValueError`` if q is infinite and the rule is ``"qfedavg"``. Before a round, if q > 0,
    the rule is ``"qfedavg"``, and the config sent to the clients has a ``train.optimizer`` other
    than ``sgd``, or does not determine L.

    Parameters
    ----------
    q : float >= 0
        Power of the loss. Larger values give more weight to large losses. Default 1 (the paper's
        value for Synthetic and Sent140; Vehicle 5, Shakespeare 0.001). With ``rule = "weights"``, q
        may be infinite: all weight goes to the client with the largest loss, or is shared by tied
        clients (FedISM's experiments call this AFL).
    lr : float > 0, optional
        1/L, the clients' learning rate divided by 1 - m for momentum m. Default:
        ``train.lr / (1 - train.momentum)`` in the config sent to the clients, which fairflower's
        app sets. In other apps, send these keys or set ``lr``.
    rule : {"qfedavg", "weights"}
        ``"weights"`` averages the models with weights F^q, normalized, as in FedISM's experiments.
        It needs no L, so clients may use any optimizer.

    See Also
    --------
    TERM : Weights by the exponential of the loss.
    AFL : The worst mixture of the losses.
    PropFair : Weights by the inverse of the distance from a worst-case loss.

    Notes
    -----
    L Delta_k has to be the sum of the gradients of the local steps; hence L = 1/lr in the paper,
    which uses plain SGD. With momentum m, a gradient contributes to all later steps: its factor
    approaches lr / (1 - m) over many steps, hence L = (1 - m) / lr. (`SCAFFOLD` uses the exact
    factor for a client's number of steps, but all clients share one L.) Adam's steps are not a sum
    of gradients, so no L exists for them.

    Flower's ``QFedAvg`` treats BatchNorm statistics and step counters as parameters, and uses
    ``train_loss``, the mean loss during training. Another implementation includes the statistics in
    the step but not in the model, so that every tensor after the first BatchNorm layer gets the
    step of a different tensor.

    Examples
    --------
    >>> from fairflower.strategies import QFFL
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 3.0])
    >>> strategy = QFFL(q=1.0, rule="weights")
    >>> strategy.merge(cohort)["w"].round(3).tolist()
    [4.0]
    >>> strategy.diagnostics["weights"].round(3).tolist()
    [0.25, 0.75]
    """

    paper: ClassVar[str] = "Li, Sanjabi, Beirami, Smith, ICLR 2020"
    keeps_agreement = False  # the step's norm differs from the updates'
    measurements = ("received_loss",)
    sums_suffice = True
    private = True
    config_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"lr": ("train.lr", "train.momentum")}

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
                f"q = {q}: with rule = 'qfedavg', q must be finite. Set a finite q, or "
                "rule = 'weights'."
            )
        super().__init__(**options)
        self.q, self.lr, self.rule = q, lr, rule
        self.L = 0.0  # not known yet

    def read_config(self, config: Mapping[str, Any]) -> None:
        if self.rule != "weights" and config.get("privacy.noise-multiplier"):
            raise ValueError(
                "privacy.noise-multiplier above 0: strategy.name = 'qffl': its step size depends "
                "on the norms of individual updates. Set strategy.rule = 'weights', or set "
                "privacy.noise-multiplier = 0."
            )
        if self.rule == "weights" or self.q == 0:
            return
        if (optimizer := config.get("train.optimizer", "sgd")) != "sgd":
            raise ValueError(
                f"train.optimizer = {optimizer!r}: q-FedAvg is defined for clients that train with "
                "'sgd'. Set train.optimizer = 'sgd', or strategy.rule = 'weights' "
                "(QFFL(rule='weights'))."
            )
        lr, momentum = config.get("train.lr"), config.get("train.momentum")
        if self.lr is not None:
            self.L = 1 / self.lr
        elif (lr or 0) > 0 and momentum is not None and 0 <= momentum < 1:
            self.L = (1 - momentum) / lr
        else:
            raise ValueError(
                f"train.lr = {lr}, train.momentum = {momentum} in the clients' config: QFFL needs "
                "a learning rate above 0 and a momentum in [0, 1). Set both keys, QFFL(lr=...), "
                "or QFFL(rule='weights')."
            )

    def weigh(self, cohort: Cohort) -> Vector:
        F = losses_of(cohort)
        power = (F / F.max()) ** self.q
        return cohort.cap(power / power.sum())

    def square_factors(self, cohort: Cohort) -> Vector | None:
        return None if self.rule == "weights" or self.q == 0 else 1 / losses_of(cohort)

    def combine(self, cohort: Cohort, weights: Vector) -> Arrays:
        if self.rule == "weights" or self.q == 0:
            return cohort.average(weights)
        F = losses_of(cohort)
        return cohort.move(self.qfedavg_step(weights, self.q, cohort.squared_norms(), F))

    def qfedavg_step(
        self, weights: Vector, powers: Vector | float, squared_norms: Vector, F: Vector
    ) -> Vector:
        """Return the coefficients of the updates, shape (K,), for losses F and their powers."""
        if not self.L:  # no round was configured
            self.read_config({})
        # F^q and h, both divided by L sum_j F_j^q_j, so that neither overflows.
        h = weights * (1 + powers * self.L * squared_norms / F)
        step: Vector = weights / h.sum()
        self.diagnostics["coefficients"] = step
        return step


def losses_of(cohort: Cohort) -> Vector:
    """Return the clients' losses F, shape (K,), made positive."""
    return np.asarray(np.maximum(cohort.metrics["received_loss"], 0) + TINY)
