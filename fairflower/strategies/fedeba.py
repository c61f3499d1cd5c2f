"""FedEBA+: Fair and Effective Federated Learning via an Entropy-Based Model (Wang et al.)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.directions import angle
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range, Search


class FedEBAPlus(FairStrategy):
    """Weights of the largest entropy for their mean loss, and a share of one common step.

    With F_k the received model's loss on client k's data (Eq. 3)::

        w_k   = exp(F_k / tau) / sum_j exp(F_j / tau)

    and, while losses are no more unequal than an angle theta between them and (1, ..., 1), the
    model is aligned with the step that everybody together would take (Eq. 7, 8)::

        theta <- theta + (1 - alpha) sum_k w_k Delta_k + alpha Delta,
        Delta  = -lr mean_k grad F_k(theta),     one plain step on the whole data

    The weights are TERM's (`TERM`) with t = 1 / tau, but for the number of examples, which does
    not enter here. The clients have to report ``received_loss`` and, unless alpha is 0, to
    send their ``gradient``. BatchNorm statistics are averaged by w. A single step is short
    beside a round of them, so alignment is, for the most part, 1 - alpha times the step; no
    client's is taken for longer than its update.

    **Reconstructed**: of the paper's versions the abstracts and others' accounts were at hand,
    which give the equations by number, but not all of their values. **Half of it**: where
    losses are more unequal than theta, the paper's clients align each of their steps with the
    mean gradient weighted by w, which takes two messages a round. That is not in it; there it
    is the weights alone. Do not report its figures as FedEBA+'s.

    Parameters
    ----------
    tau : float > 0
        Temperature: infinity would be equal weights. Default 0.5 (ours).
    alpha : float in [0, 1]
        Share of the common step. Default 0.5 (ours; the paper tries several). 0 is the
        paper's ablation with the weights alone; nothing but losses is measured then.
    theta : float in [0, 90]
        In degrees. Default 45 (ours).
    lr : float > 0, optional
        The step's length. By default ``train.lr`` of the config that goes to the clients in
        that round, as in fairflower's own app.

    Raises
    ------
    ValueError
        Before a round, if alpha > 0 and neither gives a learning rate above 0.
    """

    paper: ClassVar[str] = "after Wang et al., ICML 2026 (reconstructed)"
    extrapolates = True  # by the step on gradients, which no client took
    keeps_agreement = False  # likewise
    FROM_CONFIG: ClassVar[Mapping[str, tuple[str, ...]]] = {"lr": ("train.lr",)}

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
        self.tau, self.alpha, self.theta, self.lr = tau, alpha, theta, lr
        self.needs = ("received_loss", "gradient") if alpha > 0 else ("received_loss",)

    def read_config(self, config: Mapping[str, Any]) -> None:
        super().read_config(config)
        if self.alpha > 0 and not (self.lr or 0) > 0:
            raise ValueError(
                f"lr = {self.lr}: FedEBA+ needs a learning rate above 0 for its common step, "
                "which train.lr in the clients' config, or FedEBAPlus(lr=...), gives. "
                "alpha = 0 needs none."
            )

    def merge(self, cohort: Cohort) -> Arrays:
        F = cohort.metrics["received_loss"]
        tilt = np.exp((F - F.max()) / self.tau)
        weights = cohort.cap(tilt / tilt.sum())
        unequal = angle(F)
        self.diagnostics |= {"weights": weights, "angle": unequal}
        if self.alpha == 0 or unequal > self.theta:
            return cohort.average(weights)
        both = replace(cohort, returned=(*cohort.returned, *self._one_step(cohort)))
        K = len(cohort)
        coefficients = np.append((1 - self.alpha) * weights, np.full(K, self.alpha / K))
        return both.move(coefficients, np.append(weights, np.zeros(K)))

    def _one_step(self, cohort: Cohort) -> list[Arrays]:
        """The clients' models after one step from the received one, on all of their data.

        It is no longer than all that the client did, so that bounds on updates hold for it, too.
        """
        assert self.lr is not None  # read before the round
        moved, steep = cohort.squared_norms(), cohort.gram("gradient").diagonal()
        longest = np.sqrt(np.divide(moved, steep, out=np.zeros(len(cohort)), where=steep > 0))
        trained, received = cohort.parameters, cohort.received
        return [
            {n: a - lr * g[n] if n in trained else a for n, a in received.items()}
            for lr, g in zip(
                np.minimum(self.lr, longest).astype(np.float32),
                cohort.measured["gradient"],
                strict=True,
            )
        ]
