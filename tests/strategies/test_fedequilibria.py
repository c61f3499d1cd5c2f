"""FedEquilibria and FedMGDA+: weights by hand, ablations, and vectors that clients must send."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fairflower.errors import RoundFailed
from fairflower.strategies import FedAvg, FedEquilibria, FedMGDAPlus
from fairflower.testing.rounds import Rounds, reply

MODEL = {
    "w": np.zeros(2),
    "b": np.zeros(1),
    "bn.running_mean": np.zeros(1),
    "bn.num_batches_tracked": np.array(0, np.int64),
}
# Orthogonal Fisher vectors of norms 1 and 2: the closed form is w ~ 1 / |F|^2.
FISHERS = {0: {"w": [1.0, 0.0], "b": [0.0]}, 1: {"w": [0.0, 0.0], "b": [2.0]}}
MOVES = {
    0: {"w": [3.0, 0.0], "b": [4.0], "bn.running_mean": [10.0], "bn.num_batches_tracked": 4},
    1: {"w": [0.0, 15.0], "b": [0.0], "bn.running_mean": [20.0], "bn.num_batches_tracked": 4},
}


def arrays(values):
    return {k: {n: np.array(v, MODEL[n].dtype) for n, v in a.items()} for k, a in values.items()}


def run(strategy):
    rounds = Rounds(strategy, MODEL, range(2))
    fishers = arrays(FISHERS)
    measured = {k: dict.fromkeys(strategy.measurements, fishers[k]) for k in fishers}
    return rounds.step(arrays(MOVES), measured=measured)


@pytest.mark.parametrize(
    ("options", "weights"),
    [
        ({"t": 0.0}, [0.25, 0.75]),  # distances 5 and 15, buffers not counted
        ({"t": 1.0, "scale": "none"}, [0.8, 0.2]),
        ({"t": 1.0, "scale": "unit"}, [0.5, 0.5]),
        ({"t": 0.6, "scale": "none"}, [0.6 * 0.8 + 0.4 * 0.25, 0.6 * 0.2 + 0.4 * 0.75]),
        ({"t": 1.0, "space": "gradient"}, [0.5, 0.5]),
    ],
)
def test_weights_and_model_match_a_hand_computation(options, weights):
    strategy = FedEquilibria(**options)
    model = run(strategy)
    np.testing.assert_allclose(strategy.diagnostics["weights"], weights, atol=1e-7)
    for name in ("w", "b", "bn.running_mean"):
        expected = sum(w * arrays(MOVES)[k][name] for k, w in enumerate(weights))
        np.testing.assert_allclose(model[name], expected, atol=1e-5)
    assert model["bn.num_batches_tracked"] == 4


def test_only_the_ratio_of_distances_matters():
    strategy = FedEquilibria(t=0)
    rounds = Rounds(strategy, {"w": np.zeros(2)}, range(2))
    rounds.step({0: {"w": np.array([0.003, 0.004])}, 1: {"w": np.array([0.015, 0.0])}})
    np.testing.assert_allclose(strategy.diagnostics["weights"], [0.25, 0.75])


def test_diagnostics_contain_distance_conflict_norm_and_residual():
    strategy = FedEquilibria(t=0.5)
    run(strategy)
    np.testing.assert_allclose(strategy.diagnostics["conflict"], np.eye(2))
    np.testing.assert_allclose(strategy.diagnostics["fisher_norm"], [1, 2])
    np.testing.assert_allclose(strategy.diagnostics["distance"], [5, 15])
    assert strategy.diagnostics["norm"] == pytest.approx(np.sqrt(0.5))
    assert strategy.diagnostics["residual"] < 1e-6


def test_the_unscaled_equation_gives_all_weight_to_the_smallest_fisher():
    """F_k >= 0 of different scale: one-hot weights without scaling, equal ones at unit norm."""
    shape = np.array([1.0, 2.0, 3.0])
    measured = {k: {"fisher": {"w": shape * 2.0**k}} for k in range(4)}
    moves = {k: {"w": np.ones(3)} for k in range(4)}
    printed, unit = FedEquilibria(t=1.0, scale="none"), FedEquilibria(t=1.0)
    for strategy in (printed, unit):
        Rounds(strategy, {"w": np.zeros(3)}, range(4)).step(moves, measured=measured)
    np.testing.assert_allclose(printed.diagnostics["weights"], [1, 0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(unit.diagnostics["weights"], 0.25, atol=1e-6)


def test_clients_are_asked_for_the_needed_measurement():
    for strategy, asked in (
        (FedEquilibria(), "fisher"),
        (FedEquilibria(space="gradient"), "gradient"),
        (FedEquilibria(t=0), None),
        (FedAvg(), None),
    ):
        (message, *_) = Rounds(strategy, MODEL, range(2)).ask()
        assert message.content["config"].get("measure") == asked


@pytest.mark.parametrize(
    ("fisher", "message"),
    [
        (None, "sent no ArrayRecord 'fisher', which FedEquilibria needs"),
        ({"w": np.zeros(3), "b": np.zeros(1)}, "'fisher': array 'w' has shape"),
        ({"w": np.zeros(2)}, r"'fisher': .*missing \['b'\]"),
        ({"w": np.array([0, np.nan]), "b": np.zeros(1)}, "'fisher': .*NaN"),
    ],
)
def test_a_missing_or_invalid_fisher_is_logged_with_the_client(fisher, message, caplog):
    rounds = Rounds(FedEquilibria(min_clients=1), MODEL, range(2))
    good, bad = rounds.ask()
    vectors = {"fisher": arrays(FISHERS)[0]}
    replies = [
        reply(good, MODEL, {"num-examples": 1}, vectors),
        reply(bad, MODEL, {"num-examples": 1}, {"fisher": fisher} if fisher else {}),
    ]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        rounds.finish(replies)
    assert "client 1" in caplog.text
    assert re.search(message, caplog.text)


def test_the_round_fails_with_a_hint_if_no_client_sends_a_fisher():
    rounds = Rounds(FedEquilibria(), MODEL, range(2))
    replies = [reply(message, MODEL, {"num-examples": 1}) for message in rounds.ask()]
    with pytest.raises(RoundFailed, match=r"(?s)0 of 2.*clients 0, 1.*'fisher'.*'measure'"):
        rounds.finish(replies)


# --- FedMGDA+ -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "moves", "examples", "weights", "model"),
    [
        # Orthogonal unit vectors: 1/2 each is best; bounds around (.75, .25) allow (.65, .35).
        ({"epsilon": 0.1, "eta": 2.0}, [[3, 0], [0, 50]], [3, 1], [0.65, 0.35], [1.3, 0.7]),
        # 1/2 for the client orthogonal to the two others is best; its bound is 1/3 + 0.1.
        (
            *({"epsilon": 0.1}, [[2, 0], [4, 0], [0, 5]], [1, 1, 1]),
            *([None, None, 1 / 3 + 0.1], [2 / 3 - 0.1, 1 / 3 + 0.1]),
        ),
        # Sample weights.
        ({"epsilon": 0.0}, [[1, 0], [0, 1]], [3, 1], [0.75, 0.25], [0.75, 0.25]),
        # A zero update.
        ({"epsilon": 0.2}, [[5, 0], [0, 0]], [1, 1], [0.3, 0.7], [0.3, 0]),
        # Opposed updates.
        ({"epsilon": 1.0}, [[1, 1], [-4, -4]], [1, 1], [0.5, 0.5], [0, 0]),
    ],
)
def test_fedmgda_combines_unit_updates_within_the_weight_bounds(
    arguments, moves, examples, weights, model
):
    strategy = FedMGDAPlus(**arguments)
    actual = Rounds(strategy, {"w": np.zeros(2)}, range(len(moves))).step(
        {k: {"w": np.array(move, float)} for k, move in enumerate(moves)}, dict(enumerate(examples))
    )
    for weight, expected in zip(strategy.diagnostics["weights"], weights, strict=True):
        assert expected is None or weight == pytest.approx(expected, abs=1e-6)
    np.testing.assert_allclose(actual["w"], model, atol=1e-6)
