"""Encoding of the vectors that are masked: scales, sums, and the limits of integers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fairflower.aggregation.cohort import merge_integers
from fairflower.secure.vectors import (
    CLIPPING,
    MaskingInstructions,
    SumCohort,
    WrongSum,
    decode,
    encode,
    max_error,
    quantization_range,
)

MODEL = {
    "w": np.array([[0.5, -0.25], [3.0, 20.0]], np.float32),
    "running_var": np.array([400.0, 1e-9], np.float32),
    "batches": np.array(7, np.int64),
}


def instructions(
    weights: list[int], factors: list[float] | None = None
) -> list[MaskingInstructions]:
    Q = quantization_range(len(weights))
    draws = np.random.default_rng(0).uniform(-1, 1, (len(weights), 3))
    return [
        MaskingInstructions(
            round(w / max(weights) * Q),
            Q,
            tuple(draw.tolist()),
            factors[k] if factors else None,
            ("running_var", "batches"),
        )
        for k, (w, draw) in enumerate(zip(weights, draws, strict=True))
    ]


def summed(vectors: list[np.ndarray], by: list[MaskingInstructions]) -> np.ndarray:
    """Compute the mean as SecAgg+ does, without masks."""
    Q = by[0].range
    step = 2 * CLIPPING / Q
    whole = [
        np.floor((v * t.ratio + CLIPPING) / step + 0.5) for v, t in zip(vectors, by, strict=True)
    ]
    assert all(v.min() >= 0 and v.max() <= Q for v in whole)
    total = np.sum(whole, axis=0)
    assert total.max() < 2**32
    assert sum(t.weight for t in by) < 2**32
    return (total * step - len(by) * CLIPPING) / (sum(t.weight for t in by) / Q)


@pytest.mark.parametrize("shape", [(1,), (4,), (1, 2), (2, 2, 1)])
def test_an_array_of_another_shape_is_named_and_not_broadcast(shape: tuple[int, ...]) -> None:
    sent = {**MODEL, "w": np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=r"array 'w' has shape .*, the received array \(2, 2\)"):
        encode(MODEL, sent, instructions([1])[0])


@pytest.mark.parametrize("clients", [3, 4, 7, 8, 100, 1023, 5000])
def test_sums_stay_below_the_modulus(clients: int) -> None:
    Q = quantization_range(clients)
    assert clients * Q < 2**32
    assert Q == 2**30 or 2 * clients * Q >= 2**32, "no more bits are lost than needed"


@given(st.lists(st.integers(0, 1000), min_size=3, max_size=6), st.integers(0, 99))
def test_decoded_sums_equal_the_weighted_mean_up_to_the_stated_error(
    weights: list[int], seed: int
) -> None:
    assume(sum(w > 0 for w in weights) >= 3)
    rng = np.random.default_rng(seed)
    sent = [
        {
            "w": (MODEL["w"] + rng.normal(0, 1, (2, 2))).astype(np.float32),
            "running_var": MODEL["running_var"] + rng.uniform(0, 9, 2).astype(np.float32),
            "batches": MODEL["batches"] + rng.integers(0, 50),
        }
        for _ in weights
    ]
    by = instructions(weights)
    total = decode(
        summed([encode(MODEL, s, t) for s, t in zip(sent, by, strict=True)], by), MODEL, by
    )
    exact = np.array(weights) / sum(weights)
    for name, scale in (("w", 20), ("running_var", 400), ("batches", 2**16)):
        mean = sum(
            w * (s[name].astype(float) - MODEL[name]) for w, s in zip(exact, sent, strict=True)
        )
        assert np.abs(total.means[name] - mean).max() <= max_error(by) * scale + 1e-12


@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3), st.floats(1e-5, 7))
def test_sums_of_squared_norms_are_accurate_at_any_size(factors: list[float], size: float) -> None:
    by = instructions([3, 2, 1], factors)
    sent = [{**MODEL, "w": MODEL["w"] + np.float32(size * k)} for k in (1, 2, 3)]
    vectors = [encode(MODEL, s, t) for s, t in zip(sent, by, strict=True)]
    total = decode(summed(vectors, by), MODEL, by)
    squares = [float(np.square(s["w"].astype(float) - MODEL["w"]).sum()) for s in sent]
    expected = sum(w * f * s for w, f, s in zip(total.weights, factors, squares, strict=True))
    cohort = SumCohort(1, (0, 1, 2), np.ones(3), MODEL, (), total=total)
    actual = total.weights @ (np.array(factors) * cohort.squared_norms())
    assert actual == pytest.approx(expected, rel=1e-5)


def test_integer_counters_equal_those_of_the_plain_mean() -> None:
    for weights, counts in (
        *(
            ((1, 1, 1), counts)
            for counts in ((5, 5, 5), (5, 5, 6), (5, 6, 6), (1, 2, 3), (0, 0, 0))
        ),
        *((weights, (k, k, k)) for weights in ((1, 2, 4), (7, 3, 5), (9, 1, 3)) for k in (5, 6, 7)),
    ):
        by, mean = instructions([*weights]), np.dot(weights, counts) / sum(weights)
        sent = [{**MODEL, "batches": MODEL["batches"] + c} for c in counts]
        vectors = [encode(MODEL, s, t) for s, t in zip(sent, by, strict=True)]
        total = decode(summed(vectors, by), MODEL, by)
        buffers = frozenset({"running_var", "batches"})
        cohort = SumCohort(1, (0, 1, 2), np.ones(3), MODEL, (), buffers=buffers, total=total)
        model = cohort.average(total.weights)
        assert model["batches"].dtype == np.int64
        assert model["batches"] == 7 + np.floor(mean + 1e-9)
        # A rounding error must not make a variance negative.
        means = total.means | {"running_var": np.array([0, -1e-8])}
        below = replace(cohort, total=replace(total, means=means)).average(total.weights)
        assert below["running_var"].tolist() == [400, 0]
        # Counters are rounded if the error is more than half a step, as with very many clients.
        coarse = replace(cohort, total=replace(total, error=5e-5)).average(total.weights)
        assert coarse["batches"] == 7 + round(mean)


def test_a_client_that_uses_another_weight_than_instructed_is_detected() -> None:
    by = instructions([1, 1, 1, 1])
    vectors = [encode(MODEL, MODEL, t) for t in by]
    decode(summed(vectors, by), MODEL, by)
    for wrong in (0.5, 0.999):
        used = [
            *by[:3],
            MaskingInstructions(round(by[3].weight * wrong), by[3].range, by[3].checks),
        ]
        mean = summed(vectors, used)
        with pytest.raises(WrongSum, match="a different weight"):
            decode(mean, MODEL, by)


@pytest.mark.parametrize("weight", [-1, 9, 0.5, 2.0, None, True])
def test_an_instructed_weight_out_of_range_is_refused(weight: object) -> None:
    with pytest.raises(ValueError, match="largest weight 8"):
        MaskingInstructions.from_config({"secure.weight": weight, "secure.range": 8})


@pytest.mark.parametrize("value", [np.nan, np.inf, 161.0, -161.0])
def test_an_update_out_of_range_is_refused(value: float) -> None:
    (mine, *_) = instructions([1, 1, 1])
    sent = {**MODEL, "w": MODEL["w"] + np.float32(value)}
    with pytest.raises(ValueError, match=r"'w' is out of range: .* at most 160"):
        encode(MODEL, sent, mine)


def test_a_squared_norm_out_of_all_units_shows_only_in_the_sum() -> None:
    received = {"w": np.full(4, 1e6, np.float32)}
    by = instructions([1, 1, 1], [1e10, 1.0, 1.0])
    sent = [{"w": received["w"] + np.float32(4e6 * (k == 0))} for k in range(3)]
    vectors = [encode(received, s, t) for s, t in zip(sent, by, strict=True)]
    with pytest.raises(WrongSum, match="squared norm of a client's update times its factor is too"):
        decode(summed(vectors, by), received, by)


def test_the_norm_of_a_single_trained_array_is_refused() -> None:
    (mine, *_) = instructions([1, 1, 1], [1.0, 1.0, 1.0])
    chosen = replace(mine, buffers=("w", "running_var", "batches"))
    encode(MODEL, MODEL, chosen)  # "w" may be frozen
    with pytest.raises(ValueError, match=r"secure\.buffers names 'w', but this array is trained"):
        encode(MODEL, {**MODEL, "w": MODEL["w"] + 1}, chosen)


ODD = {
    "w": np.zeros(2, np.float32),
    "id": np.array([2**61 - 1, 10**12 + 39]),
    "small": np.array([250, 3], np.uint8),
    "flags": np.array([True, False, True, False]),
    "mask": np.array([0, -np.inf, np.nan], np.float32),
    "running_var": np.array([-1.0], np.float32),  # a parameter with the name of a buffer
}


@pytest.mark.parametrize("clients", [3, 100])
def test_integers_booleans_and_infinite_buffers_are_merged_as_without_masks(clients: int) -> None:
    model, by = ODD, instructions([1] * clients)
    sent = {
        **model,
        "id": model["id"] + [5, -5],
        "small": model["small"] - np.array([7, 3], np.uint8),
        "flags": ~model["flags"],
    }
    some = {**model, "flags": np.array([False, True, True, False])}
    models = [sent if k % 2 == 0 else some for k in range(clients)]  # more, or as many
    vectors = [encode(model, m, t) for m, t in zip(models, by, strict=True)]
    total = decode(summed(vectors, by), model, by)
    buffers = frozenset(model) - {"w", "running_var"}
    n = np.ones(clients)
    cohort = SumCohort(1, tuple(range(clients)), n, model, (), buffers=buffers, total=total)
    moved = cohort.average(total.weights)
    for name in ("id", "small", "flags"):
        expected = merge_integers(model[name], [m[name] for m in models], total.weights)
        assert moved[name].dtype == model[name].dtype
        np.testing.assert_array_equal(moved[name], expected)
    np.testing.assert_array_equal(moved["mask"], model["mask"])
    assert moved["running_var"] == pytest.approx(-1.0)  # parameters may be negative


def test_equal_large_integers_stay_under_masks() -> None:
    by = instructions([3, 1, 2])
    total = decode(summed([encode(ODD, ODD, t) for t in by], by), ODD, by)
    merged = SumCohort(1, (0, 1, 2), np.ones(3), ODD, (), total=total).average(total.weights)
    for name in ("id", "small", "flags", "mask"):
        np.testing.assert_array_equal(merged[name], ODD[name])


def test_a_value_that_becomes_infinite_is_not_masked() -> None:
    (values, *_) = instructions([1, 1, 1])
    with pytest.raises(ValueError, match="'mask' is out of range"):
        encode(ODD, {**ODD, "mask": np.array([-np.inf, -np.inf, np.nan], np.float32)}, values)
