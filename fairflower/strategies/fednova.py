"""FedNova: Tackling the Objective Inconsistency Problem (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.strategy import FairStrategy, Options
from fairflower.arguments import Range


class FedNova(FairStrategy):
    """Average the clients' updates per local step, so that more steps are not more weight.

    With tau_k the client's number of steps, p_k = n_k / sum_j n_j, and a_k the sum of what its
    gradients count in its update, which with momentum m is more than their number::

        a_k   = tau_k                                        for m = 0
        a_k   = (tau_k - m (1 - m^tau_k) / (1 - m)) / (1 - m)
        theta <- theta + (sum_k p_k a_k) sum_k p_k Delta_k / a_k

    Where all a_k are equal it is FedAvg. Clients of one batch size and number of epochs take
    steps in proportion to their examples: then it is equal weights, and as long a step as
    FedAvg's. The clients have to report ``steps``, which counts as 1 at least.

    BatchNorm statistics are averaged by p_k / a_k, normalised, which is what the parameters'
    updates count. The step may leave the clients' hull, as the coefficients sum to 1 or more.

    a_k is that of SGD. A proximal term makes the paper's smaller (`FedProx`'s clients are
    taken as if they had none), and Adam's steps have none. There is no momentum at the server,
    which is an option of the paper's. a_k is what the authors' code sums up, in closed form;
    the paper's text was not at hand.

    Parameters
    ----------
    momentum : float in [0, 1), optional
        m of the clients. By default ``train.momentum`` of the config that goes to them, as in
        fairflower's own app; 0 where that has none.

    Raises
    ------
    ValueError
        Before a round, if the config that goes to the clients has a ``train.optimizer`` other
        than ``sgd``, or a momentum that is not in [0, 1).
    """

    paper: ClassVar[str] = "Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020"
    extrapolates = True  # where clients take different numbers of steps
    keeps_agreement = False  # likewise
    needs = ("steps",)
    FROM_CONFIG: ClassVar[Mapping[str, tuple[str, ...]]] = {"momentum": ("train.momentum",)}

    def __init__(
        self, *, momentum: Annotated[float | None, Range(0, 1)] = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.momentum = momentum

    def read_config(self, config: Mapping[str, Any]) -> None:
        super().read_config(config)
        optimizer = config.get("train.optimizer", "sgd")
        if optimizer != "sgd":
            raise ValueError(
                f"train.optimizer = {optimizer!r}: FedNova divides a client's update by what its "
                "gradients count in it, which only those of 'sgd' do. Set it, or another strategy."
            )
        if not 0 <= (self.momentum or 0.0) < 1:
            raise ValueError(
                f"momentum = {self.momentum}: FedNova needs one in [0, 1), which "
                "train.momentum in the clients' config, or FedNova(momentum=...), gives."
            )

    def merge(self, cohort: Cohort) -> Arrays:
        tau, m = np.maximum(cohort.metrics["steps"], 1), self.momentum or 0.0
        a = (tau - m * (1 - m**tau) / (1 - m)) / (1 - m)
        p = cohort.sample_weights
        weights = cohort.cap(p / a / (p / a).sum())
        # sum_k p_k a_k, of which no client's part is above the cap, either.
        taken = float((p * a / cohort.cap(p * a / (p @ a))).min())
        self.diagnostics |= {"weights": weights, "steps": a}
        return cohort.move(taken * (p / a).sum() * weights, weights)
