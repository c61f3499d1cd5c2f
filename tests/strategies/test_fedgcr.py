"""FedGCR: weights against the formula and the released code, and partial participation."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from remembering import attributes, equal

from fairflower.config import RunConfig
from fairflower.errors import ConfigError
from fairflower.strategies import FedGCR
from fairflower.strategies.fedgcr import cluster_means, reweigh
from fairflower.testing.rounds import Rounds, reply

#: Representations of three types, far apart.
TYPES = 10 * np.eye(3, 6, dtype=np.float32)


def start(clients: int = 4, **arguments) -> Rounds:
    strategy = FedGCR(min_clients=1, **{"num_clusters": 2} | arguments)
    return Rounds(strategy, {"x": np.zeros(1)}, range(clients))


def step(rounds: Rounds, losses, types, examples=None) -> np.ndarray:
    """Run one round in which clients of a type are near each other; return the weights."""
    if not isinstance(losses, dict):
        losses = dict(enumerate(losses))
    types = types if isinstance(types, dict) else dict(zip(losses, types, strict=True))
    loss = "received_loss" if rounds.strategy.variant == "released" else "train_loss"
    h = "representation" if rounds.strategy.variant == "paper" else "received_representation"
    rounds.step(
        {k: {"x": np.array([1.0 + k])} for k in losses},
        examples,
        metrics={k: {loss: value} for k, value in losses.items()},
        measured={k: {h: {"h": TYPES[types[k]] + np.float32(0.01 * k)}} for k in losses},
    )
    return rounds.strategy.diagnostics["weights"]


# --- weights -------------------------------------------------------------------------------

#: Output of the released function, whose rounds begin with 0.
GOLDEN = {
    0: (0.376853, 0.525273, 0.052267, 0.045607),
    1: (0.373122, 0.529046, 0.051755, 0.046077),
    9: (0.354164, 0.548177, 0.049153, 0.048506),
    49: (0.340251, 0.562172, 0.047243, 0.050334),
}


@pytest.mark.parametrize("a", GOLDEN)
def test_weights_match_the_released_code(a):
    rounds = start(variant="released")
    rounds.round = max(a, 1)  # in its first round, all losses count as one
    weights = step(rounds, (2.3, 1.9, 0.5, 0.4), (0, 0, 1, 1), {0: 1, 1: 2, 2: 3, 3: 4})
    if a:
        np.testing.assert_allclose(weights, GOLDEN[a], atol=6e-7)
    else:
        omega, loss = np.array([0.1, 0.2, 0.3, 0.4]), 100 / np.array([43, 52, 200, 250])
        mean = cluster_means(loss, np.array([0, 0, 1, 1]), omega)
        np.testing.assert_allclose(reweigh(omega, loss, mean, 0.05, 1), GOLDEN[0], atol=6e-7)


def test_the_first_round_of_the_released_variant_is_fedavg():
    weights = step(start(variant="released"), (9.0, 1.0), (0, 1), {0: 1, 1: 3})
    np.testing.assert_allclose(weights, [0.25, 0.75])


@pytest.mark.parametrize(
    ("loss", "other"), [(0.0, 1.0), (1e-12, 1.0), (150.0, 1.0), (60.0, 45.0), (150.0, 45.0)]
)
def test_losses_that_break_the_released_code_give_valid_weights(loss, other):
    rounds = start(variant="released")
    rounds.round = 1
    weights = step(rounds, (loss, other), (0, 1))
    assert weights.sum() == pytest.approx(1)
    assert (weights[0] > weights[1]) == (loss > other)


def brute_force(n, losses, types, r, q, delta, gamma, variant="adapted") -> np.ndarray:
    """Return the weights by Eq. 3 and 5, one client after another."""
    beta = delta * (1 - gamma ** (r - 1))
    if variant == "paper":  # Eq. 2: a sum over the client's images
        losses = [count * loss for count, loss in zip(n, losses, strict=True)]
    weights = []
    for k in range(len(n)):
        cluster = [losses[j] for j in range(len(n)) if types[j] == types[k]]
        mean = sum(cluster) / len(cluster)
        weights.append(n[k] / sum(n) * (losses[k] ** (1 - beta) * mean**beta) ** (q + 1))
    return np.array(weights) / sum(weights)


@given(
    data=st.data(),
    clients=st.integers(2, 7),
    r=st.integers(1, 60),
    q=st.floats(0, 5),
    delta=st.floats(0, 1),
    gamma=st.floats(0, 1),
    variant=st.sampled_from(["adapted", "paper"]),
)
def test_weights_match_eq_3_and_5(data, clients, r, q, delta, gamma, variant):
    n = data.draw(st.lists(st.integers(1, 5000), min_size=clients, max_size=clients))
    losses = data.draw(st.lists(st.floats(1e-3, 50), min_size=clients, max_size=clients))
    types = data.draw(st.lists(st.integers(0, 2), min_size=clients, max_size=clients))
    rounds = start(
        clients, num_clusters=len(set(types)), q=q, delta=delta, gamma=gamma, variant=variant
    )
    rounds.round = r - 1
    weights = step(rounds, losses, types, dict(enumerate(n)))
    expected = brute_force(n, losses, types, r, q, delta, gamma, variant)
    np.testing.assert_allclose(weights, expected, rtol=1e-9)
    model = rounds.model["x"]
    np.testing.assert_allclose(model, sum(w * (1.0 + k) for k, w in enumerate(expected)))


#: n = 1, 2, 3, 4, mean losses 2, 1, 2, 1 and two types in the second round, beta = 1/4: by
#: hand, n (L^(3/4) L~^(1/4))^2. Adapted: L~ = 1.5 for both; paper: L = 2, 2, 6, 4, L~ = 2, 5.
BY_HAND = {
    "adapted": [1 * 2**1.5, 2 * 1, 3 * 2**1.5, 4 * 1],
    "paper": [1 * 4, 2 * 4, 3 * 6**1.5 * 5**0.5, 4 * 4**1.5 * 5**0.5],
}


@pytest.mark.parametrize("variant", BY_HAND)
def test_weights_match_a_hand_computation(variant):
    rounds = start(variant=variant)
    rounds.round = 1
    weights = step(rounds, (2.0, 1.0, 2.0, 1.0), (0, 0, 1, 1), {0: 1, 1: 2, 2: 3, 3: 4})
    expected = np.array(BY_HAND[variant])
    np.testing.assert_allclose(weights, expected / expected.sum(), rtol=1e-12)


def test_the_cluster_share_beta_grows_from_0_over_the_rounds():
    rounds = start()
    losses, types = (4.0, 1.0, 2.0, 2.0), (0, 0, 1, 1)
    first = step(rounds, losses, types)
    np.testing.assert_allclose(first, np.array([16, 1, 4, 4]) / 25)
    assert rounds.strategy.diagnostics["beta"] == 0
    second = step(rounds, losses, types)
    assert rounds.strategy.diagnostics["beta"] == pytest.approx(0.25)
    # The mean loss of their cluster is above the second client's loss and below the first's.
    assert second[1] > first[1]
    assert second[0] < first[0]
    for _ in range(60):
        step(rounds, losses, types)
    assert rounds.strategy.diagnostics["beta"] == pytest.approx(0.5)


def test_delta_1_and_gamma_0_use_only_cluster_losses():
    rounds = start(delta=1.0, gamma=0.0)
    step(rounds, (4.0, 1.0, 2.0, 2.0), (0, 0, 1, 1))
    weights = step(rounds, (4.0, 0.0, 2.0, 2.0), (0, 0, 1, 1))
    np.testing.assert_allclose(weights, [0.25] * 4)


def test_clients_with_loss_0_get_weight_0_unless_all_losses_are_0():
    np.testing.assert_allclose(step(start(2), (0.0, 3.0), (0, 1)), [0, 1])
    np.testing.assert_allclose(step(start(2), (0.0, 0.0), (0, 1), {0: 1, 1: 3}), [0.25, 0.75])


def test_huge_losses_do_not_overflow():
    np.testing.assert_allclose(step(start(2, q=4), (1e200, 1e200), (0, 1)), [0.5, 0.5])


def test_variants_have_the_documented_settings():
    strategies = {v: FedGCR(num_clusters=5, variant=v) for v in ("adapted", "paper", "released")}
    assert FedGCR().variant == "adapted"
    assert {
        v: (m.gamma, m.clustering, *m.measurements, *m.reported_metrics)
        for v, m in strategies.items()
    } == {
        "adapted": (0.5, "kmeans", "received_representation", "train_loss"),
        "paper": (0.5, "gmm", "representation", "train_loss"),
        "released": (0.9, "gmm", "received_representation", "received_loss"),
    }
    other = FedGCR(
        num_clusters=5,
        variant="released",
        gamma=0.7,
        clustering="kmeans",
        representation="trained",
    )
    assert (other.gamma, other.clustering) == (0.7, "kmeans")
    assert other.measurements == ("representation", "received_loss")


@pytest.mark.parametrize("variant", ["paper", "released"])
def test_variants_with_a_given_cluster_number_refuse_auto(variant):
    with pytest.raises(ValueError, match=r"^num_clusters = 'auto'.*in the paper, of domains"):
        FedGCR(variant=variant)
    flat = {"strategy.name": "fedgcr", "strategy.variant": variant}
    with pytest.raises(ConfigError, match=r"^strategy\.num_clusters = 'auto'.*of domains"):
        RunConfig.from_flat(flat)
    RunConfig.from_flat(flat | {"strategy.num-clusters": 5})


@pytest.mark.parametrize("variant", ["adapted", "paper", "released"])
def test_a_resumed_strategy_continues_identically(variant):
    rounds = start(6, variant=variant, num_clusters=3)
    losses, types = (4.0, 1.0, 2.0, 2.5, 3.0, 0.5), (2, 2, 1, 1, 0, 0)
    step(rounds, losses, types)
    again = start(6, variant=variant, num_clusters=3)
    again.strategy.load_state_dict(rounds.strategy.state_dict())
    again.round = rounds.round
    present = {k: losses[k] for k in (0, 2, 3, 5)}
    results = [step(r, present, {k: types[k] for k in present}) for r in (rounds, again)]
    assert np.array_equal(*results)
    names = [r.strategy.diagnostics["cluster"].tolist() for r in (rounds, again)]
    assert names == [[0, 1, 1, 2]] * 2  # the names given with all clients present


def test_a_resumed_strategy_knows_clusters_whose_clients_are_absent():
    rounds, again = (start(6, num_clusters="auto") for _ in range(2))
    types = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    step(rounds, dict.fromkeys(types, 1.0), types)
    again.strategy.load_state_dict(rounds.strategy.state_dict())
    again.round, again.model = rounds.round, rounds.model
    for r in (rounds, again):
        step(r, dict.fromkeys(range(4), 1.0), {k: types[k] for k in range(4)})
        assert set(r.strategy.centers) == {0, 1, 2}
    assert equal(attributes(rounds.strategy), attributes(again.strategy))


# --- clusters ------------------------------------------------------------------------------


def test_diagnostics_describe_the_clusters():
    rounds = start(5, num_clusters="auto")
    step(rounds, (1.0, 2.0, 3.0, 4.0, 5.0), (0, 0, 1, 1, 0))
    diagnostics = rounds.strategy.diagnostics
    assert diagnostics["cluster"].tolist() == [0, 0, 1, 1, 0]
    assert diagnostics["num_clusters"] == 2
    assert diagnostics["loss"].tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(diagnostics["cluster_loss"], [8 / 3, 8 / 3, 3.5, 3.5, 8 / 3])
    assert np.isfinite(diagnostics["bic"])
    gap = diagnostics["map_x"][2] - diagnostics["map_x"][0]
    assert abs(gap) == pytest.approx(np.sqrt(200), rel=0.01)
    assert abs(diagnostics["map_y"]).max() < 0.1
    np.testing.assert_allclose(rounds.strategy.centers[1], TYPES[1] + 0.025, rtol=1e-5)


@pytest.mark.parametrize("num_clusters", ["auto", 5])
def test_single_and_identical_clients_form_one_cluster(num_clusters):
    for clients in (1, 3):
        rounds = start(clients, num_clusters=num_clusters)
        for _ in range(2):
            rounds.step(
                {k: {"x": np.ones(1)} for k in range(clients)},
                metrics={k: {"train_loss": 2.0 + k} for k in range(clients)},
                measured={
                    k: {"received_representation": {"h": np.ones(4, np.float32)}}
                    for k in range(clients)
                },
            )
            diagnostics = rounds.strategy.diagnostics
            assert diagnostics["num_clusters"] == 1
            assert diagnostics["weights"].sum() == pytest.approx(1)
            assert diagnostics["map_x"].tolist() == [0] * clients
            assert ("bic" in diagnostics) == (clients > 1)


def test_cluster_names_persist_under_partial_participation():
    rounds = start(6, num_clusters="auto")
    types = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2}
    for present in ([0, 1, 2, 3], [0, 1, 4, 5], [2, 3], [2, 3, 4, 5], [0, 1, 2, 3, 4, 5]):
        step(rounds, {k: 1.0 + k for k in present}, {k: types[k] for k in present})
        actual = dict(zip(present, rounds.strategy.diagnostics["cluster"], strict=True))
        assert actual == {k: types[k] for k in present}


# --- replies -------------------------------------------------------------------------------


def replies(rounds: Rounds, change) -> list:
    """Return replies; the third is spoiled by ``change(metrics, vectors)``."""
    answers = []
    for k, message in enumerate(rounds.ask()):
        assert message.content["config"]["measure"] == "received_representation"
        metrics = {"num-examples": 3, "client-id": k, "train_loss": 1.0}
        vectors = {"received_representation": {"h": TYPES[k % 2]}}
        if k == 2:
            change(metrics, vectors)
        answers.append(reply(message, {"x": np.ones(1)}, metrics, vectors))
    return answers


SPOILED = {
    "no representation": (
        lambda m, v: v.clear(),
        "no ArrayRecord 'received_representation'.*'measure'",
    ),
    "another name": (
        lambda m, v: v.update(received_representation={"z": np.ones(6, np.float32)}),
        "'received_representation': expected a single array 'h', got.*z",
    ),
    "two arrays": (
        lambda m, v: v.update(received_representation={"h": TYPES[0], "z": TYPES[0]}),
        "expected a single array 'h'",
    ),
    "a matrix": (
        lambda m, v: v.update(received_representation={"h": np.ones((2, 3), np.float32)}),
        r"a vector of real numbers, got float32 \(2, 3\)",
    ),
    "whole numbers": (
        lambda m, v: v.update(received_representation={"h": np.arange(6)}),
        "got int64",
    ),
    "nothing": (
        lambda m, v: v.update(received_representation={"h": np.ones(0, np.float32)}),
        r"\(0,\)",
    ),
    "NaN": (
        lambda m, v: v.update(received_representation={"h": np.full(6, np.nan, np.float32)}),
        "NaN",
    ),
    "another length": (
        lambda m, v: v.update(received_representation={"h": np.ones(5, np.float32)}),
        r"'received_representation' has shape \(5,\); most clients sent \(6,\)",
    ),
    "no loss": (lambda m, v: m.pop("train_loss"), "no metric 'train_loss'.*must report it"),
    "NaN loss": (lambda m, v: m.update(train_loss=float("nan")), "train_loss = nan"),
    "negative loss": (lambda m, v: m.update(train_loss=-0.5), "train_loss = -0.5: expected"),
}


@pytest.mark.parametrize("kind", SPOILED)
def test_a_client_with_a_bad_representation_or_loss_is_dropped(kind, caplog):
    change, reason = SPOILED[kind]
    rounds = start(5)
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        rounds.finish(replies(rounds, change))
    assert rounds.strategy.client_ids == (0, 1, 3, 4)
    assert list(rounds.strategy.dropped) == [2]
    (line,) = caplog.messages
    assert "without client 2" in line
    assert re.search(reason, line)


def test_the_expected_length_is_the_most_common_one():
    for odd in range(4):
        rounds = start(4)
        answers = []
        for k, message in enumerate(rounds.ask()):
            h = np.ones(9, np.float32) if k == odd else TYPES[k % 2]
            metrics = {"num-examples": 3, "client-id": k, "train_loss": 1.0}
            answers.append(
                reply(message, {"x": np.ones(1)}, metrics, {"received_representation": {"h": h}})
            )
        rounds.finish(answers)
        assert list(rounds.strategy.dropped) == [odd]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_clusters", 0),
        ("num_clusters", 2.5),
        ("num_clusters", "five"),
        ("num_clusters", None),
        ("q", -0.1),
        ("q", float("nan")),
        ("delta", 1.1),
        ("gamma", -0.1),
        ("variant", "code"),
        ("clustering", "ward"),
        ("representation", "mine"),
    ],
)
def test_wrong_arguments_are_named_in_the_error(argument, value):
    with pytest.raises(ValueError, match=rf"^{argument} = "):
        FedGCR(**{argument: value})
