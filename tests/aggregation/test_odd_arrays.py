"""Arrays that are no ordinary real numbers: large integers, booleans, and infinite buffers."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as draw_arrays

from fairflower.aggregation.cohort import Cohort, merge_integers
from fairflower.arrays import arrays_of, record_of
from fairflower.errors import ConfigError, Diverged
from fairflower.flower_compat import set_ids
from fairflower.strategies import (
    QFFL,
    TERM,
    FairStrategy,
    FedAvg,
    FedHEAL,
    FedMGDAPlus,
    FedPW,
    Uniform,
)
from fairflower.testing.rounds import Rounds, reply

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
    merged = merge_integers(values[0], list(values), weights)
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
    merged = merge_integers(each[0], each, WEIGHTS)
    assert (merged.dtype, merged.shape, int(merged)) == (np.dtype(dtype), (), mean)


def test_a_third_of_three_is_one() -> None:
    """1/3 and 2/3 are rounded, and their products would be rounded down to 0."""
    weights = np.array([1.0, 2.0]) / 3
    assert merge_integers(np.array(0), [np.array(3), np.array(0)], weights) == 1


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
    result = merge_integers(np.array([received]), each, np.array(weights))
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


# --- own apps, in which the model that the clients received is not known --------------------------


class Nodes:
    """A grid of four connected nodes."""

    run_id = 1

    def get_node_ids(self) -> list[int]:
        return [10, 11, 12, 13]


def own_app(
    strategy: FairStrategy, start: dict[str, np.ndarray], nan_at: dict[int, str] | None = None
) -> list[dict[str, np.ndarray]]:
    """Run two rounds without `enroll`; client k returns w = k + 1 and a mask with -inf."""
    arrays, models = record_of(start), []
    for number in (1, 2):
        replies = []
        config = ConfigRecord({"train.lr": 0.1, "train.momentum": 0.0})
        asked = list(strategy.configure_train(number, arrays, config, Nodes()))  # type: ignore[arg-type]
        for i, message in enumerate(asked):
            set_ids(message, message_id=f"{number}-{i}")
            k = message.metadata.dst_node_id - 10
            model = {"mask": np.array([0, -INF, INF]), "n": np.array(2**61 + 4 * k)}
            model["w"] = np.full(3, k + 1, np.float32)
            if name := (nan_at or {}).get(k):
                model[name][0] = np.nan
            numbers = {"num-examples": 10 * (k + 1), "received_loss": 1.0}
            replies.append(reply(message, model, numbers))
        merged, _ = strategy.aggregate_train(number, replies)
        assert merged is not None
        models.append(arrays_of(arrays := merged))
    return models


NODES = {"min_train_nodes": 4, "min_available_nodes": 4}
STARTS: dict[str, dict[str, np.ndarray]] = {
    "empty": {},
    "placeholder": {"mask": np.zeros(1), "w": np.zeros((1, 1))},
    "float64": {"w": np.zeros(3), "mask": np.array([0, -np.inf, np.inf]), "n": np.array(0)},
}


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("rule", [FedAvg, TERM, Uniform])
@pytest.mark.parametrize("nan_at", [{}, {0: "w"}, {0: "mask"}])
def test_masks_of_clients_stay_where_the_received_model_is_not_known(
    rule: type[FairStrategy], start: str, nan_at: dict[int, str]
) -> None:
    strategy = rule(buffers=["mask"], **NODES)  # type: ignore[arg-type]
    weights = np.array([float(not nan_at), 1, 1, 1])
    if rule is FedAvg:
        weights *= [1, 2, 3, 4]
    for merged in own_app(strategy, STARTS[start], nan_at):
        assert list(strategy.dropped) == [10 + k for k in nan_at]
        np.testing.assert_array_equal(merged["mask"], np.array([0, -INF, INF]))
        assert merged["w"].dtype == np.float32
        if rule is not TERM:
            k = np.average(range(4), weights=weights)
            np.testing.assert_allclose(merged["w"], k + 1, rtol=1e-6)
            assert merged["n"] == 2**61 + int(4 * k + 1e-6)


def test_a_mask_that_is_no_buffer_is_named_and_no_client_blamed() -> None:
    with pytest.raises(ConfigError, match=r"'mask' of the model holds NaN or .*buffers="):
        own_app(FedAvg(**NODES), {})  # type: ignore[arg-type]


@pytest.mark.parametrize("start", STARTS)
def test_rules_that_need_the_received_model_say_so_with_masks(start: str) -> None:
    with pytest.raises(ConfigError, match=r"unlike the one that was sent .*: start from a model"):
        own_app(QFFL(buffers=["mask"], **NODES), STARTS[start])  # type: ignore[arg-type]


def test_a_clients_model_is_not_copied_as_the_received_one() -> None:
    class Own(FedAvg):
        def merge(self, cohort: Cohort) -> dict[str, np.ndarray]:
            return {**cohort.received}

    with pytest.raises(ConfigError, match="Own, or an exchange, compares"):
        own_app(Own(buffers=["mask"], **NODES), {})  # type: ignore[arg-type]


def test_a_rule_that_merges_nan_is_named_where_the_received_model_is_not_known() -> None:
    class Own(FedAvg):
        def merge(self, cohort: Cohort) -> dict[str, np.ndarray]:
            return super().merge(cohort) | {"w": np.full(3, np.nan, np.float32)}

    with pytest.raises(Diverged, match=r"Own merged holds NaN or infinite values in 'w'.* Bound"):
        own_app(Own(buffers=["mask"], **NODES), {})  # type: ignore[arg-type]
