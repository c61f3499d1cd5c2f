"""Bounds on one client's influence, against closed forms and by properties."""

from __future__ import annotations

import json
import math
from statistics import median_low

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from parametrize import every_strategy
from replies import error_reply, valid_reply
from resuming import config, session

from fairflower.aggregation.records import InvalidReply, others_medians
from fairflower.errors import ConfigError, RoundFailed
from fairflower.exchanges import ControlVariates, Prototypes
from fairflower.numerics.simplex import cap_weights
from fairflower.strategies import STRATEGIES, Cohort, FedAvg, FedHEAL, Uniform
from fairflower.testing.rounds import MODEL, Rounds, updates, zero_update

weights_and_caps = st.tuples(
    st.lists(st.floats(0, 1), min_size=1, max_size=12), st.floats(0, 1)
).filter(lambda pair: sum(pair[0]) > 1e-6)


@given(weights_and_caps)
def test_capped_weights_stay_on_the_simplex_in_order_and_in_proportion(pair):
    weights = np.array(pair[0]) / sum(pair[0])
    cap = max(pair[1], 1 / len(weights))
    capped = cap_weights(weights, cap)
    assert capped.sum() == pytest.approx(1)
    assert capped.min() >= 0
    assert capped.max() <= cap * (1 + 1e-9)
    order = np.argsort(weights, kind="stable")
    assert (np.diff(capped[order]) >= -1e-12).all()
    free = (capped < cap * (1 - 1e-9)) & (weights > 1e-9)
    ratios = capped[free] / weights[free]  # the excess is shared in proportion to weights
    assert max(ratios, default=0) - min(ratios, default=0) <= 1e-6 * max(ratios, default=0)
    if weights.max() <= cap:
        assert capped is weights


def test_capped_weights_match_a_hand_computation():
    # 0.6 is capped to 0.35; 0.25 left over goes 3:1 and lifts the next to 0.4875: capped, too.
    np.testing.assert_allclose(cap_weights(np.array([0.6, 0.3, 0.1]), 0.35), [0.35, 0.35, 0.3])
    np.testing.assert_allclose(cap_weights(np.array([1.0, 0.0, 0.0]), 0.5), [0.5, 0.25, 0.25])
    np.testing.assert_allclose(cap_weights(np.array([0.9, 0.1]), 0.5), [0.5, 0.5])
    with pytest.raises(ValueError, match=r"3 weights of at most 0\.3"):
        cap_weights(np.full(3, 1 / 3), 0.3)


def cohort(*moves: float) -> Cohort:
    """Return clients that move along (3, 4) / 5; their statistics move by a tenth of that."""
    received = {"w": np.ones(2, np.float32), "bn.running_var": np.ones(1, np.float32)}
    received["n"] = np.array(7)
    returned = [
        {
            "w": (1 + move * np.array([0.6, 0.8])).astype(np.float32),
            "bn.running_var": np.array([1 + move / 10], np.float32),
            "n": np.array(9),
        }
        for move in moves
    ]
    ids, buffers = tuple(range(len(moves))), frozenset({"bn.running_var", "n"})
    return Cohort(1, ids, np.ones(len(moves)), received, tuple(returned), buffers=buffers)


def test_longer_updates_are_scaled_down_to_the_bound():
    given = cohort(1.0, 4.0)
    clipped, factors = given.clipped(max_norm=2.0)
    np.testing.assert_allclose(factors, [1, 0.5])
    np.testing.assert_allclose(clipped.returned[1]["w"], [1 + 1.2, 1 + 1.6], rtol=1e-6)
    np.testing.assert_allclose(clipped.returned[1]["bn.running_var"], [1.2], rtol=1e-6)
    assert clipped.returned[1]["n"] == 9
    assert clipped.returned[0] is given.returned[0]
    assert given.returned[1]["w"][0] == np.float32(1 + 4 * 0.6), "the replies stay as they are"


def test_the_bound_can_be_a_multiple_of_the_median_norm():
    moves = 1.0, 2.0, 3.0, 40.0, 0.0, 0.0
    _, factors = cohort(*moves).clipped(median=2.0)
    # The lower median of those that moved is 2.
    np.testing.assert_allclose(factors, [1, 1, 1, 4 / 40, 1, 1], rtol=1e-6)
    _, factors = cohort(*moves).clipped(max_norm=2.0, median=2.0)
    np.testing.assert_allclose(factors, [1, 1, 2 / 3, 2 / 40, 1, 1], rtol=1e-6)


def test_batchnorm_statistics_have_their_own_norm():
    given = cohort(1.0, 1.0, 1.0)
    given.returned[2]["bn.running_var"][:] = 1e4
    clipped, factors = given.clipped(median=1.0)
    assert factors[2] == pytest.approx(0.1 / (1e4 - 1))
    assert clipped.returned[2]["bn.running_var"] == pytest.approx(1.1)


def test_updates_within_the_bound_are_unchanged():
    given = cohort(1.0, 2.0)
    assert given.clipped(max_norm=2.1)[0] is given
    assert cohort(0.0, 0.0).clipped(median=1.0)[1].tolist() == [1, 1]


@pytest.mark.parametrize("huge", [1e20, 3e38, -3e38])
def test_huge_updates_are_clipped_to_finite_ones(huge):
    given = cohort(1.0, 1.0, 1.0)
    given.returned[0]["w"][:] = huge
    clipped, _ = given.clipped(median=1.0)
    norm = np.linalg.norm(clipped.returned[0]["w"].astype(float) - 1)
    assert norm <= 1 + 1e-5


# --- with strategies -----------------------------------------------------------------------

#: Claims by which a client might get all the weight, or none.
CLAIMS = [
    {"num-examples": 2**53, "received_loss": 1e9},
    {"num-examples": 1, "received_loss": 0.0},
]


def lie(name: str, claims: dict[str, float], norm: float = 1.0, **options) -> Rounds:
    """Run three rounds of five clients, of which client 0 lies."""
    random = np.random.default_rng(0)
    rounds = Rounds(STRATEGIES[name](**options), MODEL, range(5))
    for _ in range(3):
        moves = updates(random, range(5))
        moves[0] = {n: (norm * a).astype(a.dtype) for n, a in moves[0].items()}
        moves[0]["bn.num_batches_tracked"] = np.array(3)
        honest = {"num-examples": 20, **dict.fromkeys(rounds.strategy.measurements, 0.5)}
        arrays = rounds.strategy._array_measurements
        metrics = {k: {m: v for m, v in honest.items() if m not in arrays} for k in range(5)}
        metrics[0] |= {key: value for key, value in claims.items() if key in metrics[0]}
        rounds.before = rounds.model
        rounds.moves = moves
        rounds.step(moves, metrics=metrics)
    return rounds


@every_strategy
@pytest.mark.parametrize("claims", CLAIMS, ids=["everything", "nothing"])
def test_false_claims_do_not_lift_a_client_above_the_cap(name, claims):
    rounds = lie(name, claims, max_client_weight=0.3)
    weights = rounds.strategy.diagnostics["weights"]
    assert weights.max() <= 0.3 + 1e-6
    assert weights.sum() == pytest.approx(1)


@every_strategy
def test_a_huge_update_moves_the_model_no_further_than_honest_ones(name):
    bounds = {"max_client_weight": 0.3, "clip_update_median": 1.0}
    for claims in CLAIMS:
        rounds = lie(name, claims, norm=1e7, **bounds)
        moved = rounds.model["conv.weight"].astype(float) - rounds.before["conv.weight"]
        norms = [np.linalg.norm(rounds.moves[k]["conv.weight"]) for k in range(1, 5)]
        assert np.linalg.norm(moved) <= 1.5 * max(norms)
        assert rounds.strategy.diagnostics["clipped"][0] < 1e-5


@every_strategy
def test_bounds_that_are_not_reached_change_nothing(name):
    free = lie(name, {}).model
    bounded = lie(name, {}, clip_update_norm=1e9, clip_update_median=1e9).model
    assert all(free[key].tobytes() == bounded[key].tobytes() for key in MODEL)


def test_fedavg_with_a_cap_averages_by_the_capped_weights():
    random = np.random.default_rng(3)
    moves = updates(random, range(3))
    rounds = Rounds(FedAvg(max_client_weight=0.5), MODEL, range(3))
    model = rounds.step(moves, {0: 90, 1: 6, 2: 4})
    expected = sum(w * moves[k]["conv.weight"] for k, w in enumerate((0.5, 0.3, 0.2)))
    np.testing.assert_allclose(model["conv.weight"] - MODEL["conv.weight"], expected, atol=1e-6)
    np.testing.assert_allclose(rounds.strategy.diagnostics["weights"], [0.5, 0.3, 0.2])


def test_fedheal_respects_the_cap_where_other_clients_are_masked():
    """Only client 0 is consistent: without a cap it alone moves the coordinate."""

    def moved(**bound):
        rounds = Rounds(
            FedHEAL(tau=0.9, beta=None, **bound), {"w": np.zeros(1, np.float32)}, (0, 1)
        )
        for server_round in range(4):
            before = rounds.model["w"]
            wavering = (-1.0) ** server_round
            model = rounds.step({0: {"w": np.ones(1)}, 1: {"w": np.full(1, wavering)}})
        return float(model["w"][0] - before[0])

    assert moved() == pytest.approx(1.0)
    assert moved(max_client_weight=0.6) == pytest.approx(0.6)


def test_too_few_replies_for_the_cap_fail_the_round():
    rounds = Rounds(Uniform(max_client_weight=0.3, min_clients=1), MODEL, range(4))
    messages = rounds.ask()
    replies = [valid_reply(m, k) for k, m in enumerate(messages[:3])] + [
        error_reply(messages[3], "boom")
    ]
    with pytest.raises(RoundFailed, match=r"3 usable replies.*at most 0\.3(?s:.*)client 3: boom"):
        rounds.finish(replies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_client_weight": 0}, r"max_client_weight = 0: expected a number in \(0, 1\]"),
        ({"max_client_weight": 1.1}, r"in \(0, 1\]"),
        ({"clip_update_norm": 0.0}, r"clip_update_norm = 0\.0: expected a number above 0"),
        ({"clip_update_median": -1}, "clip_update_median = -1: expected a number above 0"),
    ],
)
def test_bounds_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        FedAvg(**options)


def test_a_run_takes_its_bounds_from_its_config(tmp_path):
    keys = {"bound.max-client-weight": 0.4, "bound.clip-update-median": 0.5}
    folder = session(config(tmp_path, **keys, **{"fraction-train": 1.0})).run()
    lines = [json.loads(line) for line in (folder / "diagnostics.jsonl").open()]
    for line in lines:
        assert max(line["weights"]) <= 0.4 + 1e-9
        assert min(line["clipped"]) < 1
    with pytest.raises(ConfigError, match=r"bound\.max-client-weight = 0\.3: .* 3 clients"):
        session(config(tmp_path, **{"bound.max-client-weight": 0.3})).run()


def test_zero_updates_leave_the_model_unchanged_under_all_bounds():
    rounds = Rounds(FedAvg(max_client_weight=0.5, clip_update_median=1.0), MODEL, range(3))
    model = rounds.step({k: zero_update() for k in range(3)}, {0: 5, 1: 70, 2: 900})
    assert all(model[key].tobytes() == MODEL[key].tobytes() for key in MODEL)


def test_arrays_for_an_exchange_are_clipped_by_their_median_norm():
    """Control changes of norms 1, 2, 3 and 1e6: the median is 2, and the mean is over 4."""
    model = {"w": np.zeros(3, np.float32)}
    rounds = Rounds(FedAvg(exchanges=[ControlVariates()], clip_update_median=2), model, range(4))
    axes = np.eye(3, dtype=np.float32)
    changes = [axes[0], 2 * axes[1], 3 * axes[2], 1e6 * axes[0]]
    moves = {k: {"w": axes[0]} for k in range(4)}
    rounds.step(moves, measured={k: {"control": {"w": c}} for k, c in enumerate(changes)})
    (exchange,) = rounds.strategy.exchanges
    np.testing.assert_allclose(exchange.broadcast(2)["w"], [5 / 4, 2 / 4, 3 / 4])


def test_each_client_counts_once_in_the_median_norm_of_prototypes():
    """Honest clients have two of the six classes each; the liar claims all six."""
    classes = 6
    model = {"head.weight": np.zeros((classes, 3), np.float32)}
    rounds = Rounds(FedAvg(exchanges=[Prototypes()], clip_update_median=1), model, range(4))
    unit = np.tile(np.float32([1, 0, 0]), (classes, 1))
    measured = {}
    for k in range(3):
        count = np.zeros(classes, int)
        count[[2 * k, 2 * k + 1]] = 5
        measured[k] = {"prototypes": {"mean": unit * (count > 0)[:, None], "count": count}}
    lie = {"mean": 1e6 * unit[:, ::-1], "count": np.ones(classes, int)}
    measured[3] = {"prototypes": {k: np.ascontiguousarray(v) for k, v in lie.items()}}
    rounds.step({k: {"head.weight": model["head.weight"]} for k in range(4)}, measured=measured)
    (exchange,) = rounds.strategy.exchanges
    expected = np.tile(np.float32([5 / 6, 0, 1 / 6]), (classes, 1))
    np.testing.assert_allclose(exchange.broadcast(2)["mean"], expected, rtol=1e-6)


def test_with_two_clients_the_median_is_the_shorter_update():
    rounds = Rounds(FedAvg(clip_update_median=1), {"w": np.zeros(2, np.float32)}, range(2))
    model = rounds.step({0: {"w": np.float32([1, 0])}, 1: {"w": np.float32([0, 1e6])}})
    np.testing.assert_allclose(model["w"], [0.5, 0.5])


@given(
    st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 1e30, math.inf]) | st.floats(0, 3), max_size=9)
)
def test_the_others_median_is_that_of_the_other_clients(norms):
    expected = {k: median_low([*norms[:k], *norms[k + 1 :]] or [0.0]) for k in range(len(norms))}
    assert others_medians(dict(enumerate(norms))) == expected


def test_prototype_counts_above_num_examples_are_refused():
    count = np.array([2, 3])
    arrays = {"mean": np.ones((2, 3), np.float32), "count": count}
    trained = {"head.weight": np.zeros((2, 3), np.float32)}
    Prototypes().check(arrays, trained, 5)
    with pytest.raises(InvalidReply, match="5 images in total, above num-examples"):
        Prototypes().check(arrays, trained, 4)
