"""Arrays that are no ordinary real numbers: large integers, booleans, and infinite buffers."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as draw_arrays

from fairflower.aggregation.cohort import merge_whole
from fairflower.errors import ConfigError, Diverged
from fairflower.strategies import QFFL, FairStrategy, FedAvg, FedHEAL, FedMGDAPlus, FedPW
from fairflower.testing.rounds import Rounds

LARGE = [2**53 + 1, 10**12 + 39, 2**61 - 1, -(2**61) + 1, 2**63 - 1, -(2**63)]
WEIGHTS = np.array([0.5, 0.3, 0.2])


@pytest.mark.parametrize("value", LARGE)
@pytest.mark.parametrize("rule", [FedAvg, FedHEAL, FedMGDAPlus, FedPW, QFFL])
def test_integers_on_which_all_clients_agree_stay(rule: type[FairStrategy], value: int) -> None:
    model = {"w": np.zeros(2, np.float32), "id": np.array(value)}
    rounds = Rounds(rule(), model, range(3))
    for _ in range(2):  # FedPW differs from round 2 on
        merged = rounds.step(
            {k: {"w": np.full(2, k + 1, np.float32), "id": np.array(0)} for k in range(3)}
        )
        assert merged["id"].dtype == np.int64
        assert merged["id"] == value


@given(draw_arrays(np.int64, (3, 5)), st.lists(st.integers(1, 2**40), min_size=3, max_size=3))
def test_integers_are_merged_exactly(values: np.ndarray, counts: list[int]) -> None:
    """Against fractions: rounded down, after 1e-6 for the rounding errors of the weights."""
    weights = np.array(counts) / sum(counts)
    merged = merge_whole(values[0], list(values), weights)
    exact = [Fraction(w) for w in weights.tolist()]
    for column, got in zip(values.T.tolist(), merged.tolist(), strict=True):
        mean = sum(w * v for w, v in zip(exact, column, strict=True)) / sum(exact)
        assert got == (column[0] if len(set(column)) == 1 else floor(mean + Fraction(1, 10**6)))


@pytest.mark.parametrize(
    ("dtype", "values", "mean"),
    [
        ("uint64", [2**64 - 1, 2**64 - 3, 2**64 - 3], 2**64 - 2),
        ("uint8", [255, 0, 255], 178),  # 0.7 * 255 = 178.5
        ("int8", [-128, 127, 0], -26),  # -64 + 38.1 = -25.9, rounded down
        ("int64", [3, 0, 0], 1),
        ("int64", [2, 0, 0], 1),  # 1 up to the rounding of 0.5
    ],
)
def test_integers_of_every_type_are_rounded_down(dtype: str, values: list[int], mean: int) -> None:
    each = [np.array(v, dtype) for v in values]
    merged = merge_whole(each[0], each, WEIGHTS)
    assert (merged.dtype, merged.shape, int(merged)) == (np.dtype(dtype), (), mean)


def test_a_third_of_three_is_one() -> None:
    """1/3 and 2/3 are rounded, and their products would be rounded down to 0."""
    weights = np.array([1.0, 2.0]) / 3
    assert merge_whole(np.array(0), [np.array(3), np.array(0)], weights) == 1


@pytest.mark.parametrize(
    ("values", "weights", "merged"),
    [
        ([True, False, False], [0.6, 0.3, 0.1], True),
        ([True, False, True], [0.3, 0.6, 0.1], False),
        ([True, True, True], [0.6, 0.3, 0.1], True),
        ([True, False, False], [0.5, 0.3, 0.2], None),  # a tie: as received
        ([False, True, True], [0.5, 0.1 + 0.2, 0.2], None),
    ],
)
@pytest.mark.parametrize("received", [True, False])
def test_booleans_are_merged_by_majority_of_weight(
    values: list[bool], weights: list[float], merged: bool | None, received: bool
) -> None:
    each = [np.array([v]) for v in values]
    result = merge_whole(np.array([received]), each, np.array(weights))
    assert result.dtype == bool
    assert result.tolist() == [received if merged is None else merged]


INF = np.float32(np.inf)
MASK = np.array([0, -INF, np.nan], np.float32)


def masked_rounds(rule: FairStrategy) -> Rounds:
    model = {"w": np.ones(2, np.float32), "mask": MASK}
    return Rounds(rule, model, range(3))


@pytest.mark.parametrize("rule", [FedAvg, FedHEAL, FedMGDAPlus, FedPW, QFFL])
def test_infinite_values_of_a_buffer_stay(rule: type[FairStrategy]) -> None:
    rounds = masked_rounds(rule(buffers=["mask"], clip_update_median=2.0))
    for _ in range(2):
        merged = rounds.step(
            {k: {"w": np.full(2, 0.1, np.float32), "mask": np.zeros(3)} for k in range(3)}
        )
        np.testing.assert_array_equal(merged["mask"], MASK)
    assert np.isfinite(merged["w"]).all()
    assert (merged["w"] > 1).all()


def test_values_that_every_client_has_set_are_averaged() -> None:
    """As of a statistic that starts at infinity, such as a running minimum."""
    rounds = masked_rounds(FedAvg(buffers=["mask"]))
    asked = rounds.ask()
    from fairflower.testing.rounds import reply

    def answer(k: int, *mask: float) -> object:
        arrays = {"w": np.ones(2, np.float32), "mask": np.array(mask, np.float32)}
        return reply(asked[k], arrays, {"num-examples": 1, "client-id": k, "train_loss": 1.0})

    merged = rounds.finish(
        [answer(0, 0, 3, 1), answer(1, 0, 6, 1), answer(2, 0, 9, np.nan)]  # type: ignore[list-item]
    )
    np.testing.assert_array_equal(merged["mask"], np.array([0, 6, np.nan], np.float32))


def test_only_newly_infinite_values_are_a_clients_fault() -> None:
    rounds = masked_rounds(FedAvg(buffers=["mask"]))
    steps = {k: {"w": np.zeros(2, np.float32), "mask": np.zeros(3)} for k in range(3)}
    steps[1]["mask"] = np.array([-np.inf, 0, 0])
    rounds.step(steps)
    assert list(rounds.strategy.dropped) == [1]
    assert "array 'mask' holds NaN or infinite values" in rounds.strategy.dropped[1]
    for step in steps.values():
        step["w"] = np.array([np.nan, 0])
    with pytest.raises(Diverged):
        rounds.step(steps)


def test_infinite_parameters_are_refused_before_clients_train() -> None:
    rounds = Rounds(FedAvg(), {"w": np.array([1, INF]), "id": np.array(3)}, range(2))
    with pytest.raises(ConfigError, match=r"'w' of the model holds NaN or infinite.*buffers="):
        rounds.ask()
