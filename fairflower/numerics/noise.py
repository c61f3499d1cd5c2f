"""Gaussian noise for differential privacy."""

import os
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fairflower.seeds import derive_seed

#: Function that returns a given number of random bytes.
Source = Callable[[int], bytes]


def noise_source(seed: int, *purpose: int | str) -> Source:
    """Return a source of random bytes: the operating system or, with a seed, a generator.

    Anyone who knows the seed can remove the noise, so set a seed only in experiments.
    """
    if not seed:
        return os.urandom
    return np.random.default_rng(derive_seed(seed, *purpose)).bytes


def gaussian(size: int, source: Source) -> NDArray[np.float64]:
    """Return ``size`` independent standard normal numbers (Box and Muller 1958).

    >>> gaussian(3, noise_source(1, "example")).round(2).tolist()
    [-0.07, -0.23, -0.55]
    """
    half = (size + 1) // 2
    bits = np.frombuffer(source(16 * half), np.uint64) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 1) / 2.0**53  # above 0, at most 1
    radius, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * np.pi * uniform[half:]
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:size]
