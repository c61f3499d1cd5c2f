"""FedAvg (McMahan et al., AISTATS 2017) and uniform weights."""

from typing import ClassVar

import numpy as np

from fairflower.strategies.base import Cohort, FairStrategy, Vector


class FedAvg(FairStrategy):
    """Weight clients by their number of examples: w_k = n_k / sum_j n_j.

    BatchNorm statistics are averaged with the same weights as the parameters. BatchNorm's step
    counters become the weighted mean, truncated to an integer.

    See Also
    --------
    Uniform : Equal weights.
    FedNova : Weights that do not depend on the number of local steps.

    Examples
    --------
    >>> from fairflower.strategies import FedAvg
    >>> from fairflower.testing import make_cohort
    >>> cohort = make_cohort(updates=[[1.0], [5.0]], num_examples=[100, 300])
    >>> FedAvg().weigh(cohort).tolist()
    [0.25, 0.75]
    """

    paper: ClassVar[str] = "McMahan et al., AISTATS 2017"
    sums_suffice = True
    private = True

    def weigh(self, cohort: Cohort) -> Vector:
        return cohort.sample_weights


class Uniform(FairStrategy):
    """Weight all clients equally: w_k = 1 / K.

    This is the baseline for fair methods: equal weights already bring most of the improvement over
    FedAvg that their papers report.

    See Also
    --------
    FedAvg : Weights by number of examples.

    Examples
    --------
    >>> from fairflower.strategies import Uniform
    >>> from fairflower.testing import make_cohort
    >>> Uniform().weigh(make_cohort(updates=[[1.0], [5.0]], num_examples=[100, 300])).tolist()
    [0.5, 0.5]
    """

    paper: ClassVar[str] = "the baseline"
    sums_suffice = True
    private = True

    def weigh(self, cohort: Cohort) -> Vector:
        return np.full(len(cohort), 1 / len(cohort))
