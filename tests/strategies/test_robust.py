"""Robust rules against Flower's strategies and brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from flwr.serverapp import strategy as flower
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from resuming import config, session

import fairflower as ff
from fairflower.arrays import arrays_of
from fairflower.errors import ConfigError, RoundFailed
from fairflower.strategies import (
    STRATEGIES,
    Bulyan,
    FedAvg,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
    Uniform,
)
from fairflower.testing import make_cohort
from fairflower.testing.rounds import MODEL, Rounds, reply, updates

NETWORK = {
    "conv.weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
    "head.bias": np.zeros(2, np.float32),
}

CASES: list[tuple[Any, Any, int]] = [
    *((Median(), flower.FedMedian(), clients) for clients in (1, 2, 5, 8)),
    *((TrimmedMean(), flower.FedTrimmedAvg(), clients) for clients in (3, 5, 11)),
    (TrimmedMean(beta=0.3), flower.FedTrimmedAvg(beta=0.3), 7),
    (Krum(f=2), flower.Krum(num_malicious_nodes=2), 9),
    (Krum(f=0), flower.Krum(), 4),
    (MultiKrum(f=2, m=4), flower.MultiKrum(num_malicious_nodes=2, num_nodes_to_select=4), 9),
    (MultiKrum(f=1), flower.MultiKrum(num_malicious_nodes=1, num_nodes_to_select=3), 6),
    (Bulyan(f=1), flower.Bulyan(num_malicious_nodes=1), 7),
    (Bulyan(f=2), flower.Bulyan(num_malicious_nodes=2), 12),
    (Bulyan(f=0), flower.Bulyan(), 5),
]


@pytest.mark.parametrize(("ours", "theirs", "clients"), CASES)
def test_models_equal_those_of_flowers_strategies(ours, theirs, clients):
    random = np.random.default_rng(clients)
    rounds = Rounds(ours, NETWORK, range(clients))
    for server_round in range(1, 4):
        messages, theirs_too, replies = rounds.ask(), [], []
        for k, message in enumerate(messages):
            returned = {
                n: (a + random.normal(size=a.shape)).astype(np.float32)
                for n, a in rounds.model.items()
            }
            metrics = {"num-examples": int(random.integers(1, 50))}
            theirs_too.append(reply(message, returned, metrics))  # Flower empties the replies
            replies.append(reply(message, returned, metrics | {"client-id": k}))
        expected = arrays_of(theirs.aggregate_train(server_round, theirs_too)[0])
        merged = rounds.finish(replies)
        for key, array in expected.items():
            np.testing.assert_allclose(merged[key], array, rtol=1e-5, atol=1e-6)


finite = st.floats(-5, 5, width=32)
cohorts = st.integers(1, 9).flatmap(lambda K: arrays(np.float64, (K, 3), elements=finite))


@given(cohorts)
def test_the_median_is_numpys_and_its_weights_are_shares(rows):
    rule = Median()
    np.testing.assert_allclose(rule.merge(make_cohort(rows))["w"], np.median(rows, axis=0))
    assert rule.diagnostics["weights"].sum() == pytest.approx(1)


@given(cohorts, st.integers(0, 1000))
def test_coordinates_do_not_depend_on_who_sent_which_value(rows, seed):
    shuffled = np.random.default_rng(seed).permuted(rows, axis=0)
    for rule in (Median(), TrimmedMean(beta=0.3)):
        one, other = (rule.merge(make_cohort(r))["w"] for r in (rows, shuffled))
        np.testing.assert_array_equal(one, other)


@given(arrays(np.float64, (7, 2), elements=finite))
def test_bulyan_averages_the_values_nearest_to_the_median(rows):
    """One of seven may lie: five are selected, and three values of each coordinate averaged."""
    rule = Bulyan(f=1)
    merged = rule.merge(make_cohort(rows))["w"]
    best = rows[np.argsort(rule.diagnostics["scores"], kind="stable")[:5]]
    for column, value in zip(best.T, merged, strict=True):
        column, middle = np.sort(column), np.median(column)
        distances = [abs(column[s : s + 3] - middle).sum() for s in range(3)]
        means = [column[s : s + 3].mean() for s in range(3)]
        nearest = [
            mean for mean, d in zip(means, distances, strict=True) if d <= min(distances) + 1e-9
        ]
        assert min(abs(value - mean) for mean in nearest) < 1e-9


@given(arrays(np.float64, (7, 2), elements=finite))
def test_krums_scores_are_sums_of_the_smallest_squared_distances(rows):
    rule = Krum(f=2)
    rule.merge(make_cohort(rows))
    for k, row in enumerate(rows):
        others = np.delete(rows, k, axis=0)
        squares = np.sort(np.square(others - row).sum(axis=1))[:3]
        assert rule.diagnostics["scores"][k] == pytest.approx(squares.sum(), abs=1e-9)


def test_of_equal_scores_the_lowest_client_wins():
    for rows in permutations([[0.0], [1.0], [2.0]]):
        rule = Krum(f=0)  # with one neighbor, all scores are 1
        assert rule.merge(make_cohort(rows))["w"] == rows[0]


def test_the_geometric_median_has_the_smallest_mean_distance():
    random = np.random.default_rng(4)
    rows, n = random.normal(size=(6, 3)) + 5, random.integers(1, 50, 6)
    n[-1] = n.sum() / 2
    rows[-1] *= 1000

    def distance(point: np.ndarray) -> float:
        return float((n * np.linalg.norm(rows - point, axis=1)).sum())

    found = GeometricMedian(iterations=200).merge(make_cohort(rows, n))["w"]
    best = distance(found)
    assert np.linalg.norm(found) < 100
    for _ in range(200):
        assert distance(found + 1e-3 * random.normal(size=3)) >= best - 1e-9
    falling = [
        distance(GeometricMedian(iterations=i).merge(make_cohort(rows, n))["w"])
        for i in (1, 2, 4, 8)
    ]
    assert all(after <= before for before, after in pairwise(falling))


def test_weiszfeld_iterations_match_a_written_loop():
    random = np.random.default_rng(2)
    rows, n = random.normal(size=(5, 4)), np.array([1, 9, 4, 2, 3])
    alpha = n / n.sum()
    point = alpha @ rows
    for _ in range(4):
        w = alpha / np.maximum(0.5, np.linalg.norm(rows - point, axis=1))
        point = w @ rows / w.sum()
    merged = GeometricMedian(nu=0.5).merge(make_cohort(rows, n))["w"]
    np.testing.assert_allclose(merged, point, atol=1e-9)


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "krum", "multi-krum", "bulyan"])
def test_three_of_twenty_clients_cannot_drag_the_model(name):
    random = np.random.default_rng(3)
    rows = random.normal(size=(20, 5))
    rows[17:] = 1e6
    merged = STRATEGIES[name]().merge(make_cohort(rows))["w"]
    assert np.abs(merged).max() <= np.abs(rows[:17]).max()
    assert np.abs(FedAvg().merge(make_cohort(rows))["w"]).max() > 1e5


@pytest.mark.parametrize("name", ["median", "trimmed-mean", "bulyan"])
def test_statistics_are_merged_like_parameters_and_counters_averaged(name):
    steps = updates(np.random.default_rng(1), range(5))
    model = Rounds(STRATEGIES[name](), MODEL, range(5)).step(steps)
    rows = np.array([steps[k]["bn.running_mean"] for k in range(5)])
    alone = STRATEGIES[name]().merge(make_cohort(rows))["w"]
    if name != "bulyan":  # whose selection depends on the parameters
        np.testing.assert_allclose(
            model["bn.running_mean"] - MODEL["bn.running_mean"], alone, atol=1e-6
        )
    mean = Rounds(Uniform(), MODEL, range(5)).step(steps)
    assert model["bn.num_batches_tracked"] == mean["bn.num_batches_tracked"]


@pytest.mark.parametrize(
    ("rule", "fewest"), [(Krum(f=2), 7), (MultiKrum(f=2), 7), (Bulyan(f=2), 11)]
)
def test_too_few_clients_fail_the_round_with_the_bound(rule, fewest):
    rows = np.random.default_rng(1).normal(size=(fewest, 2))
    rule.merge(make_cohort(rows))
    with pytest.raises(RoundFailed, match=rf"{fewest - 1} replies .* needs {fewest} \(. f \+ 3"):
        rule.merge(make_cohort(rows[1:]))


@pytest.mark.parametrize(("kind", "fewest"), [(Krum, 5), (MultiKrum, 5), (Bulyan, 7)])
def test_a_default_that_resists_no_liar_is_warned_of_once(kind, fewest, caplog):
    rows = np.random.default_rng(1).normal(size=(fewest, 2))
    kind(f=0).merge(make_cohort(rows[1:]))
    kind().merge(make_cohort(rows))
    assert not caplog.messages
    rule = kind()
    for server_round in (1, 2):
        rule.merge(replace(make_cohort(rows[1:]), server_round=server_round))
    (text,) = caplog.messages
    assert text.endswith(
        f"{fewest - 1} clients in a round none may lie (f = 0); f = 1 needs {fewest}."
    )


def test_too_few_clients_are_refused_before_any_run(tmp_path):
    """A plan has no run then, although another strategy's could start."""
    settings = {"data.clients-per-domain": 1, "data.examples-per-client": 5}
    bound = r"'krum' needs 5 clients in a round \(2 f \+ 3 with f = 1\), but 4 are"
    with pytest.raises(ConfigError, match=bound):
        ff.compare(settings, strategies=["fedavg", "krum:f=1"], seeds=[0], output_dir=tmp_path)
    assert not list(tmp_path.rglob("run.json"))
    with pytest.raises(ConfigError, match=r"'krum' needs 5 clients"):
        session(config(tmp_path, **settings, **{"strategy.name": "krum", "strategy.f": 1})).run()
