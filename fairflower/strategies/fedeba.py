"""FedEBA+: Fair and Effective Federated Learning via an Entropy-Based Model (Wang et al.)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.directions import inequality_angle
from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Search, Vector

#: Degrees by which a computed angle may exceed theta, because it is rounded.
_ROUNDING = 1e-9


class FedEBAPlus(FairStrategy):
    """Weight clients by the exponential of their loss, and add a common gradient step.

    Let F_k be the received model's loss on client k's data. The weights are (Eq. 3)::

        w_k   = exp(F_k / tau) / sum_j exp(F_j / tau)

    If the angle between the vector of losses and (1, ..., 1) is at most theta, the model also takes
    a gradient step on the data of all clients (Eq. 7, 8)::

        theta <- theta + (1 - alpha) sum_k w_k Delta_k + alpha Delta,
        Delta  = -lr mean_k grad F_k(theta)

    Every client reports ``received_loss`` and, unless alpha is 0, sends its ``gradient``.
    BatchNorm statistics are averaged with w.

    Raises ``ValueError`` before a round if alpha > 0 and neither ``lr`` nor ``train.lr`` is above
    0.

    Parameters
    ----------
    tau : float > 0
        Temperature; large values make the weights equal. Default 0.5 (this project's choice).
    alpha : float in [0, 1]
        Share of the common step. Default 0.5 (this project's choice; the paper tries several). 0
        is the paper's ablation without a common step; clients then measure only losses.
    theta : float in [0, 90]
        Largest angle, in degrees, at which the common step is taken. Default 45 (this project's
        choice).
    lr : float > 0, optional
        Learning rate of the common step. Default: ``train.lr`` in the config sent to the clients in
        the same round, which fairflower's app sets.

    See Also
    --------
    TERM : The same weights with t = 1 / tau, multiplied by the number of examples.

    Notes
    -----
    The common step is short compared with a round of local steps, so that it mainly scales the
    round's step by 1 - alpha. A client's gradient step is never longer than its update.

    This class is **reconstructed** from the abstracts of the paper's versions and from second-hand
    accounts, which give the numbered equations but not all values. It is **incomplete**: if the
    angle is above theta, the paper's clients align every local step with the mean gradient weighted
    by w, which takes two messages per round. Here, only the weights are used in that case. Do not
    report results of this class as results of FedEBA+. Accounts differ on the model whose losses
    are used in the weights: the received one, as here, or each client's trained one.

    Examples
    --------
    >>> from fairflower.strategies import FedEBAPlus
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedEBAPlus(alpha=0.0)
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], received_loss=[1.0, 2.0])
    >>> strategy.merge(cohort)["w"].round(3).tolist()
    [4.523]
    >>> strategy.diagnostics["weights"].round(3).tolist()
    [0.119, 0.881]
    """

    paper: ClassVar[str] = "after Wang et al., ICML 2026 (reconstructed)"
    single_updates = (
        "aligns the model with every client's gradient unless strategy.alpha = 0",
        "term",
    )
    sums_suffice = True  # with strategy.alpha = 0
    extrapolates = True  # the common step is not a step of any client
    keeps_agreement = False  # for the same reason
    config_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"lr": ("train.lr",)}

    def __init__(
        self,
        *,
        tau: Annotated[float, Range(above=0), Search(0.05, 5, log=True)] = 0.5,
        alpha: Annotated[float, Range(0, 1)] = 0.5,
        theta: Annotated[float, Range(0, 90)] = 45.0,
        lr: Annotated[float | None, Range(above=0)] = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(**options)
        self.tau, self.alpha, self.theta = tau, alpha, theta
        self.lr = lr if alpha > 0 else 0.0  # without a common step it is not used
        self.measurements = ("received_loss", "gradient") if alpha > 0 else ("received_loss",)
        self.sums_suffice = alpha == 0

    def read_config(self, config: Mapping[str, Any]) -> None:
        super().read_config(config)
        if self.alpha > 0 and not (self.lr or 0) > 0:
            raise ValueError(
                f"lr = {self.lr}: FedEBA+ needs a learning rate above 0 for its common step. Set "
                "train.lr in the clients' config, FedEBAPlus(lr=...), or alpha = 0."
            )

    def weigh(self, cohort: Cohort) -> Vector:
        F = cohort.metrics["received_loss"]
        tilt = np.exp((F - F.max()) / self.tau)
        return cohort.cap(tilt / tilt.sum())

    def combine(self, cohort: Cohort, weights: Vector) -> Arrays:
        unequal = inequality_angle(cohort.metrics["received_loss"])
        self.diagnostics["angle"] = unequal
        if self.alpha == 0 or unequal > self.theta + _ROUNDING:
            return cohort.average(weights)
        both = replace(cohort, returned=(*cohort.returned, *self._one_step(cohort)))
        K = len(cohort)
        coefficients = np.append((1 - self.alpha) * weights, np.full(K, self.alpha / K))
        return both.move(coefficients, np.append(weights, np.zeros(K)))

    def _one_step(self, cohort: Cohort) -> list[Arrays]:
        """Return the clients' models after a gradient step from the received model on their data.

        The step is at most as long as the client's update, so bounds on updates apply to it, too.
        """
        moved, steep = cohort.squared_norms(), cohort.gram("gradient").diagonal()
        if self.lr is None:  # no round was configured
            self.read_config({})
        longest = np.sqrt(np.divide(moved, steep, out=np.zeros(len(cohort)), where=steep > 0))
        trained, received = cohort.parameters, cohort.received
        return [
            {n: a - lr * g[n] if n in trained else a for n, a in received.items()}
            for lr, g in zip(
                np.minimum(self.lr or 0.0, longest).astype(np.float32),
                cohort.measured["gradient"],
                strict=True,
            )
        ]
