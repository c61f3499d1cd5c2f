"""FedNova: Tackling the Objective Inconsistency Problem (Wang et al., NeurIPS 2020)."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Unpack

import numpy as np

from fairflower.strategies.base import Arrays, Cohort, FairStrategy, Options, Range, Vector


class FedNova(FairStrategy):
    """Average the clients' updates per local step, so that more steps do not mean more weight.

    Let tau_k be client k's number of steps, m the clients' momentum, and p_k = n_k / sum_j n_j. a_k
    is the sum of the coefficients of the client's gradients in its update::

        a_k   = tau_k                                            if m = 0
        a_k   = (tau_k - m (1 - m^tau_k) / (1 - m)) / (1 - m)    if m > 0
        theta <- theta + (sum_k p_k a_k) sum_k p_k Delta_k / a_k

    Equal a_k give FedAvg. If batch sizes and epochs are equal, clients take steps in proportion to
    their number of examples; FedNova then gives them equal weights, but keeps FedAvg's step size.

    Every client reports ``steps``; a value below 1 counts as 1. BatchNorm statistics are averaged
    with weights p_k / a_k, normalized.

    Raises ``ValueError`` before a round if the config sent to the clients has a ``train.optimizer``
    other than ``sgd``, or a momentum outside [0, 1).

    Parameters
    ----------
    momentum : float in [0, 1), optional
        m, the clients' momentum. Default: ``train.momentum`` in the config sent to the clients,
        which fairflower's app sets, or else 0.

    See Also
    --------
    FedAvg : Weights by number of examples.

    Notes
    -----
    The model may leave the convex hull of the clients' models, because the coefficients may sum
    to more than 1.

    a_k is derived for SGD; for Adam it is not defined. A proximal term makes the paper's a_k
    smaller, but `FedProx` clients are treated as if they had no proximal term. The paper's optional
    server momentum is not implemented. The paper's text was not available; a_k is the closed form
    of a sum in the authors' code.

    Examples
    --------
    >>> from fairflower.strategies import FedNova
    >>> from fairflower.testing import make_cohort
    >>> strategy = FedNova()
    >>> cohort = make_cohort(updates=[[1.0], [4.0]], steps=[1, 4])
    >>> strategy.merge(cohort)["w"].round(3).tolist()
    [2.5]
    >>> strategy.diagnostics["weights"].round(3).tolist()
    [0.8, 0.2]
    """

    paper: ClassVar[str] = "Wang, Liu, Liang, Joshi, Poor, NeurIPS 2020"
    extrapolates = True  # if clients take different numbers of steps
    keeps_agreement = False  # for the same reason
    measurements = ("steps",)
    sums_suffice = True
    config_keys: ClassVar[Mapping[str, tuple[str, ...]]] = {"momentum": ("train.momentum",)}

    def __init__(
        self, *, momentum: Annotated[float | None, Range(0, 1)] = None, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.momentum = momentum

    def read_config(self, config: Mapping[str, Any]) -> None:
        super().read_config(config)
        if (optimizer := config.get("train.optimizer", "sgd")) != "sgd":
            raise ValueError(
                f"train.optimizer = {optimizer!r}: FedNova is defined for clients that train with "
                "'sgd'. Set train.optimizer = 'sgd', or choose another strategy."
            )
        if not 0 <= (self.momentum or 0.0) < 1:
            raise ValueError(
                f"momentum = {self.momentum}: FedNova needs a momentum in [0, 1). Set "
                "train.momentum in the clients' config, or FedNova(momentum=...)."
            )

    def _check_config_arguments(self) -> None:
        """Accept a config without a momentum: the clients then train without."""

    def weigh(self, cohort: Cohort) -> Vector:
        p, a = cohort.sample_weights, self._effective_steps(cohort)
        return cohort.cap(p / a / (p / a).sum())

    def combine(self, cohort: Cohort, weights: Vector) -> Arrays:
        p, a = cohort.sample_weights, self._effective_steps(cohort)
        # sum_k p_k a_k, in which each client's share is capped as well.
        taken = float((p * a / cohort.cap(p * a / (p @ a))).min())
        self.diagnostics["steps"] = a
        return cohort.move(taken * (p / a).sum() * weights, weights)

    def _effective_steps(self, cohort: Cohort) -> Vector:
        """Return the clients' a_k, shape (K,)."""
        tau, m = np.maximum(cohort.metrics["steps"], 1), self.momentum or 0.0
        return np.asarray((tau - m * (1 - m**tau) / (1 - m)) / (1 - m))
