"""Every strategy with arrays of 16 bits, such as those of adapters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fairflower.strategies import STRATEGIES
from fairflower.testing import Rounds

CLIENTS = 4


def steps(seed: int) -> dict[int, dict[str, Any]]:
    """Return updates that float16 and float32 both represent exactly."""
    random = np.random.default_rng(seed)
    return {
        k: {
            "a": random.integers(-20, 20, (3, 4)) / 64 * (k + 1),
            "b": random.integers(-20, 20, 5) / 64,
        }
        for k in range(CLIENTS)
    }


def one_round(name: str, dtype: Any) -> tuple[dict[str, Any], Any]:
    model = {
        "a": np.arange(-6, 6).reshape(3, 4).astype(dtype) / dtype(8),
        "b": np.linspace(-1, 1, 5).astype(dtype),
    }
    rounds = Rounds(STRATEGIES[name](), model, range(CLIENTS))
    merged = rounds.step(steps(0), {k: 10 * (k + 1) for k in range(CLIENTS)})
    return merged, rounds.strategy.diagnostics["weights"]


@pytest.mark.parametrize("name", STRATEGIES)
def test_float16_is_merged_in_float32_and_returned_as_float16(name: str) -> None:
    half, weights = one_round(name, np.float16)
    single, expected = one_round(name, np.float32)
    np.testing.assert_allclose(weights, expected, rtol=1e-3, atol=1e-4)
    for key, array in half.items():
        assert array.dtype == np.float16
        assert single[key].dtype == np.float32
        # Half a unit in the last place of the largest number, about 4.
        np.testing.assert_allclose(array, single[key], rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", STRATEGIES)
def test_long_float16_updates_do_not_overflow(name: str) -> None:
    """Their squares exceed 65504, the largest number of float16."""
    model = {"a": np.zeros(100, np.float16)}
    random = np.random.default_rng(1)
    rounds = Rounds(STRATEGIES[name](), model, range(CLIENTS))
    for _ in range(2):
        moves = {k: {"a": 300 * random.standard_normal(100)} for k in range(CLIENTS)}
        merged = rounds.step(moves)
        assert np.isfinite(merged["a"]).all()
        weights = np.asarray(rounds.strategy.diagnostics["weights"])
        assert weights.min() >= 0
        assert weights.sum() == pytest.approx(1, abs=1e-6)
