"""Privacy audit: a lower bound of epsilon from an attack must not exceed the stated epsilon.

One run with many canaries (Steinke, Nasr and Jagielski, NeurIPS 2023): each canary takes part with
probability 1/2 and then sends the update and the number that are easiest to detect. Otherwise it
returns the received model and the number 0. The attacker sees every model and every noised number,
and guesses which canaries took part. More correct guesses than epsilon allows would disprove the
guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from fairflower.aggregation.noise import NoisySum
from fairflower.config.privacy import PrivacyConfig
from fairflower.server.privacy import epsilon
from fairflower.strategies import TERM
from fairflower.testing import Rounds
from fairflower.training.app import clipped_update, noised_numbers

pytest.importorskip("dp_accounting")

CANARIES = 1000
CLIP, CONFIDENCE = 0.5, 0.95


@dataclass
class Leak:
    """A defect that the audit has to find: less noise than stated, on sums or on numbers."""

    sums: float = 1.0
    numbers: float = 1.0


def evidence(
    privacy: PrivacyConfig, rounds: int, leak: Leak, seed: int
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return which canaries take part, and the log likelihood ratios of the observations."""
    there = np.random.default_rng(seed).random(CANARIES) < 0.5
    cap = 2 / CANARIES
    noise = NoisySum(privacy.noise_multiplier * leak.sums, CLIP, cap, noise_seed=seed + 1)
    strategy = TERM(
        t=5.0, exchanges=[noise], max_client_weight=cap, clip_update_norm=CLIP, min_clients=CANARIES
    )
    server = Rounds(strategy, {"w": np.zeros(CANARIES, np.float32)}, range(CANARIES))
    client = PrivacyConfig(
        noise_multiplier=privacy.noise_multiplier,
        number_noise_multiplier=privacy.number_noise_multiplier * leak.numbers,
        noise_seed=seed + 2,
    )
    score = np.zeros(CANARIES)
    for server_round in range(1, rounds + 1):
        before = server.model["w"].astype(np.float64)
        config = {"measure": "received_loss", "server-round": server_round}
        updates, metrics = {}, {}
        for k in range(CANARIES):
            sent = server.model["w"].copy()
            sent[k] += 100.0 * there[k]  # each canary changes another coordinate
            clipped = clipped_update({"w": sent}, server.model, CLIP)["w"]
            updates[k] = {"w": clipped - server.model["w"]}
            metrics[k] = noised_numbers({"received_loss": 100.0 * there[k]}, config, client, k)
        moved = server.step(updates, metrics=metrics)["w"] - before
        step = CLIP * np.asarray(strategy.diagnostics["weights"])
        score += (moved * step - step**2 / 2) / noise.std**2
        number = np.array([metrics[k]["received_loss"] for k in range(CANARIES)])
        width = client.loss_range
        score += (number / width - 0.5) / client.number_noise_multiplier**2
    return there, score


def p_value(guesses: int, right: int, eps: float, delta: float) -> float:
    """Return the largest probability of so many right guesses under (eps, delta): theorem 3.1."""
    q = 1 / (1 + np.exp(-eps))
    tail = float(binom.sf(right - 1, guesses, q))
    masses = np.cumsum(binom.pmf(right - np.arange(1, right + 1), guesses, q))
    steepest = float(np.max(masses / np.arange(1, right + 1), initial=0.0))
    return min(1.0, tail + 2 * CANARIES * delta * steepest)


def lower_bound(there: NDArray[np.bool_], score: NDArray[np.float64], delta: float) -> float:
    """Return a lower bound of epsilon at the confidence level `CONFIDENCE`.

    The attacker guesses for the half of the canaries with the largest absolute scores; the number
    of guesses is fixed beforehand.
    """
    surest = np.argsort(-np.abs(score), kind="stable")[: CANARIES // 2]
    right = int(np.sum((score[surest] > 0) == there[surest]))
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        excluded = p_value(len(surest), right, middle, delta) < 1 - CONFIDENCE
        low, high = (middle, high) if excluded else (low, middle)
    return low


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [1, 3])
def test_the_lower_bound_of_the_audit_does_not_exceed_the_stated_epsilon(rounds: int) -> None:
    privacy = PrivacyConfig(noise_multiplier=1.0, number_noise_multiplier=1.0)
    stated = epsilon(privacy, 1, rounds)
    actual = lower_bound(*evidence(privacy, rounds, Leak(), seed=11), privacy.delta)
    assert 0.5 < actual <= stated  # above 0.5: the attack works, so the check is not empty


@pytest.mark.slow
@pytest.mark.parametrize("leak", [Leak(sums=0.1), Leak(numbers=0.1)], ids=["sums", "numbers"])
def test_the_audit_detects_too_little_noise(leak: Leak) -> None:
    privacy = PrivacyConfig(noise_multiplier=3.0, number_noise_multiplier=3.0)
    stated = epsilon(privacy, 1, 1)
    actual = lower_bound(*evidence(privacy, 1, leak, seed=11), privacy.delta)
    assert actual > stated
