"""Noise on the merged model, for differential privacy (docs/differential-privacy.md)."""

from typing import ClassVar

import numpy as np

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.errors import RoundFailed
from fairflower.numerics.noise import gaussian, noise_source

#: Relative margin for rounding in single precision, for the clipped norms and for the noise.
MARGIN = 1e-3


class NoisySum(Exchange):
    """Gaussian noise that is added to the merged model; clients send nothing for it.

    The model is theta + sum_k w_k Delta_k with ``|Delta_k| <= clip`` and ``w_k <= max_weight``, so
    that one client changes it by at most ``clip * max_weight``. In every coordinate, the standard
    deviation of the noise is ``multiplier`` times this bound.

    Parameters
    ----------
    multiplier : float > 0
        Noise multiplier.
    clip : float > 0
        Cap on an update's norm; the strategy's ``clip_update_norm`` ensures it.
    max_weight : float in (0, 1]
        The strategy's ``max_client_weight``.
    noise_seed : int
        Seed for the noise, for experiments. 0 uses the operating system's random numbers.
    """

    name: ClassVar[str] = "privacy"
    returned: ClassVar[bool] = False

    def __init__(
        self, multiplier: float, clip: float, max_weight: float, noise_seed: int = 0
    ) -> None:
        self.multiplier, self.clip, self.max_weight = multiplier, clip, max_weight
        self.noise_seed = noise_seed

    @property
    def std(self) -> float:
        """Standard deviation of the noise in each coordinate."""
        return self.multiplier * self.clip * self.max_weight * (1 + MARGIN)

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        """Return the model with noise; raise ``RoundFailed`` if an update was not clipped."""
        largest = float(np.sqrt(cohort.squared_norms().max()))
        if largest > self.clip * (1 + MARGIN):
            raise RoundFailed(
                f"Round {cohort.server_round}: an update of norm {largest:.6g} exceeds "
                f"privacy.clip = {self.clip}, so the noise would not suffice. The model is too "
                "large for single precision at this clip: raise privacy.clip."
            )
        self.diagnostics = {"noise_std": self.std}
        source = noise_source(self.noise_seed, self.seed, cohort.server_round, "model")
        noisy = dict(merged)
        for name in cohort.parameters:
            values = merged[name]
            noise = self.std * gaussian(values.size, source).reshape(values.shape)
            noisy[name] = (values + noise).astype(values.dtype)
        return noisy
