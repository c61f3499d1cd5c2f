"""Sums over a cohort: against plain loops, and identical for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

from fairflower.aggregation import cohort as module
from fairflower.aggregation.cohort import BLOCK, Cohort, partial_squared_sums
from fairflower.strategies import FedHEAL

SHAPES = {"a": (40, 90), "b": (7,), "bn.running_mean": (50,), "bn.num_batches_tracked": ()}
CLIENTS = 5


def models(seed):
    rng = np.random.default_rng(seed)
    for _ in range(CLIENTS + 1):
        model = {n: rng.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
        yield model | {"bn.num_batches_tracked": np.array(rng.integers(9))}


def cohort(seed=0, server_round=1):
    received, *returned = models(seed)
    return Cohort(
        server_round,
        tuple(range(CLIENTS)),
        np.arange(1.0, CLIENTS + 1),
        received,
        tuple(returned),
        buffers=frozenset(name for name in received if name.startswith("bn.")),
    )


def three_rounds(rule):
    return [rule.merge(cohort(r, r)) for r in (1, 2, 3)]


@pytest.mark.parametrize("variant", ["paper", "algorithm1", "released"])
def test_results_do_not_depend_on_the_number_of_threads(monkeypatch, variant):
    monkeypatch.setattr(module, "SPAN", 1000)
    seen = []
    for threads in (1, 2, 3):
        monkeypatch.setattr(module, "THREADS", threads)
        models = three_rounds(FedHEAL(variant=variant, tau=0.6))
        equal = np.full(CLIENTS, 1 / CLIENTS)
        models.append(cohort().move(np.linspace(-0.3, 0.4, CLIENTS), equal))
        seen.append([array.tobytes() for model in models for array in model.values()])
    assert seen[0] == seen[1] == seen[2]


def test_gram_and_norms_match_the_flat_updates(monkeypatch):
    monkeypatch.setattr(module, "THREADS", 2)
    monkeypatch.setattr(module, "SPAN", 1024)
    one = cohort()
    flat = np.array(
        [
            np.concatenate([(m[n] - one.received[n]).ravel() for n in one.parameters])
            for m in one.returned
        ],
        np.float64,
    )
    np.testing.assert_allclose(one.gram(), flat @ flat.T, rtol=1e-6, atol=1e-4)
    np.testing.assert_allclose(one.squared_norms(), (flat**2).sum(1), rtol=1e-5)


def test_move_averages_statistics_by_the_given_weights():
    one = cohort()
    c, w = np.linspace(-0.3, 0.4, CLIENTS), np.linspace(0.1, 0.3, CLIENTS)
    moved = one.move(c, w)
    for name in ("a", "b", "bn.running_mean"):
        by = w if name in one.buffers else c
        updates = [m[name].astype(float) - one.received[name] for m in one.returned]
        expected = one.received[name] + np.tensordot(by, updates, 1)
        np.testing.assert_allclose(moved[name], expected, atol=1e-5)


@pytest.mark.parametrize("last", [0.0, -0.1, 0.9, np.nan])
def test_move_requires_weights_for_statistics_if_coefficients_form_no_mean(last):
    rest = 0.2 if last else 0.0
    with pytest.raises(ValueError, match="give weights for the buffers"):
        cohort().move(np.array([rest] * (CLIENTS - 1) + [last]))


def test_unmasked_arrays_are_averaged_exactly_as_without_masks():
    one = cohort()
    weights = one.sample_weights  # whose sum in 32 bits is 1.0000001
    every = np.ones(SHAPES["a"], bool).reshape(-1)
    masked = one.average(weights, lambda b, k: every[b.part] if b.name == "a" else None)
    plain = one.average(weights)
    for name in ("b", "bn.running_mean"):
        assert masked[name].tobytes() == plain[name].tobytes()
    np.testing.assert_allclose(masked["a"], plain["a"], rtol=1e-4, atol=1e-6)


def test_a_client_without_a_mask_counts_with_its_full_weight():
    received, updates = np.zeros(2), ({"x": np.ones(2)}, {"x": np.full(2, 3.0)})
    one = Cohort(1, (0, 1), np.ones(2), {"x": received}, updates)
    mask = np.array([True, False])
    merged = one.average(np.array([0.5, 0.5]), lambda b, k: mask[b.part] if k else None)
    np.testing.assert_array_equal(merged["x"], [2.0, 1.0])


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 2 * BLOCK + 5])
def test_squares_are_summed_block_by_block(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    starts = range(0, size, BLOCK)
    plain = [float(np.einsum("i,i->", v, v)) for v in (values[i : i + BLOCK] for i in starts)]
    assert partial_squared_sums(values) == plain
    huge = partial_squared_sums(values * np.float32(1e25))
    np.testing.assert_allclose(huge, 1e50 * np.array(plain), rtol=1e-5)


def test_small_updates_in_half_precision_keep_their_norms():
    """Their squares are below the smallest number of 16 bits."""
    received, moved = np.zeros(10, np.float16), np.full(10, 4e-5, np.float16)
    half = Cohort(1, (0, 1), np.ones(2), {"x": received}, ({"x": moved}, {"x": 3 * moved}))
    norm = np.linalg.norm(moved.astype(np.float64))
    np.testing.assert_allclose(np.sqrt(half.squared_norms()), [norm, 3 * norm], rtol=1e-3)
    merged = half.average(np.array([0.75, 0.25]))["x"]
    assert merged.dtype == np.float16
    np.testing.assert_allclose(merged, 6e-5, rtol=2e-3)
