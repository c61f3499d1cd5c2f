"""What Flower's own tests of its strategies expect also holds for ours.

The facts are those of ``flwr/serverapp/strategy/*_test.py`` and ``flwr/server/strategy/*_test.py``:
``aggregate_train`` and ``aggregate_fit`` without ``configure_*``, with replies from nowhere.
"""

from __future__ import annotations

import logging
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from classic_server import OK, Proxy
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.common import EvaluateRes, FitRes, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import strategy as classic
from flwr.serverapp import strategy as flower
from parametrize import every_strategy

from fairflower.arrays import arrays_of
from fairflower.classic.strategy import LegacyStrategy
from fairflower.errors import ConfigError, RoundFailed
from fairflower.exchanges import ControlVariates
from fairflower.strategies import STRATEGIES, FedAvg, FedHEAL
from fairflower.testing.rounds import MODEL, Rounds, make_cohort, reply

RANDOM = np.random.default_rng(5)


def answer(node: int, record: ArrayRecord | None, **metrics: Any) -> Message:
    content = {"metrics": MetricRecord({"num-examples": 1, **metrics})}
    if record is not None:
        content["arrays"] = record
    return Message(RecordDict(content), reply_to=Message(RecordDict(), node, "train"))


def train_both(replies: list[Message]) -> tuple[ArrayRecord, MetricRecord]:
    """Return our FedAvg's results, which are those of Flower's."""
    wanted, means = flower.FedAvg().aggregate_train(1, replies)
    arrays, metrics = FedAvg().aggregate_train(1, replies)
    assert arrays is not None
    assert list(arrays) == list(wanted)
    for name, array in arrays.items():
        assert array.numpy().shape == wanted[name].numpy().shape
        np.testing.assert_allclose(array.numpy(), wanted[name].numpy(), rtol=1e-6)
    assert metrics.keys() == means.keys()
    for key, value in means.items():
        assert metrics[key] == pytest.approx(value)
    return arrays, metrics


def test_replies_are_averaged_by_examples_without_configure_train() -> None:
    """FedAvgM's test, without momentum."""
    first = [np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([7, 8, 9, 10], np.float32)]
    second = [np.array([[29, 23, 19], [17, 13, 11]], np.float32), np.array([7, 5, 3, 2], "f4")]
    replies = [
        answer(1, ArrayRecord(first), **{"num-examples": 1}),
        answer(2, ArrayRecord(second), **{"num-examples": 2}),
    ]
    arrays, _ = train_both(replies)
    for array, a, b in zip(arrays.values(), first, second, strict=True):
        np.testing.assert_allclose(array.numpy(), (a + 2 * b) / 3, rtol=1e-6)
        assert array.numpy().dtype == np.float32


@pytest.mark.parametrize("shape", [(), (1,), (7, 3)])
def test_arrays_of_any_shape_are_averaged_by_fractional_weights(shape: tuple[int, ...]) -> None:
    arrays = [[RANDOM.normal(size=shape) for _ in range(4)] for _ in range(3)]
    weights = [0.25, 0.4, 0.35]
    replies = [
        answer(k, ArrayRecord([np.asarray(a) for a in arrays[k]]), **{"num-examples": w})
        for k, w in enumerate(weights)
    ]
    merged, _ = train_both(replies)
    for i, array in enumerate(merged.values()):
        mean = np.average([a[i] for a in arrays], axis=0, weights=weights)
        np.testing.assert_allclose(array.numpy(), mean)


def test_numbers_and_lists_of_metrics_are_averaged_without_the_weights() -> None:
    vectors = RANDOM.normal(size=(3, 3)).tolist()
    replies = [
        answer(k, ArrayRecord([np.ones(2)]), a=1, b=2.0 * k, c=vectors[k], **{"num-examples": w})
        for k, w in enumerate([0.25, 0.4, 0.35])
    ]
    _, metrics = train_both(replies)
    assert set(metrics) == {"a", "b", "c"}


def test_another_weight_and_other_names_of_records_are_accepted() -> None:
    def named(node: int, weight: float) -> Message:
        records = {
            "global-model": ArrayRecord([np.full((7, 3), float(node))]),
            "my-metrics": MetricRecord({"weight": weight}),
        }
        return Message(RecordDict(records), reply_to=Message(RecordDict(), node, "train"))

    arrays, _ = FedAvg(weighted_by_key="weight").aggregate_train(
        1, [named(1, 0.25), named(2, 0.75)]
    )
    assert arrays is not None
    np.testing.assert_allclose(arrays["0"].numpy(), 1.75)


@pytest.mark.parametrize(
    "bad",
    [
        {"global-model": ArrayRecord([np.ones(3)]), "m": MetricRecord({"num-examples": [0.1]})},
        {"global-model": ArrayRecord([np.ones(3)]), "m": MetricRecord({"loss": 0.1})},
        {"global-model": ArrayRecord([np.ones(3)])},
        {
            "global-model": ArrayRecord([np.ones(3)]),
            "another-model": ArrayRecord([np.ones(3)]),
            "m": MetricRecord({"num-examples": 1}),
        },
    ],
    ids=["weight is a list", "no weight", "no metrics", "two models"],
)
def test_replies_that_flower_refuses_are_not_merged(bad: dict[str, Any]) -> None:
    replies = [
        Message(RecordDict(dict(bad)), reply_to=Message(RecordDict(), node, "train"))
        for node in (1, 2, 3)
    ]
    with pytest.raises(flower.strategy_utils.InconsistentMessageReplies):
        flower.FedAvg().aggregate_train(1, replies)
    with pytest.raises(RoundFailed, match="0 of 3"):
        FedAvg().aggregate_train(1, replies)


def test_models_with_different_names_are_not_merged_with_each_other() -> None:
    replies = [answer(k, ArrayRecord({n: Array(np.ones(3))})) for k, n in enumerate("aab")]
    strategy = FedAvg()
    arrays, _ = strategy.aggregate_train(1, replies)
    assert list(arrays) == ["a"]
    assert "unexpected ['b']" in strategy.dropped[2]


def test_no_replies_give_no_results() -> None:
    for strategy in (flower.FedAvg(), FedAvg()):
        assert strategy.aggregate_train(1, []) == (None, None)
        assert strategy.aggregate_evaluate(1, []) is None


def test_tests_are_averaged_without_configure_evaluate() -> None:
    replies = [
        answer(k, None, eval_loss=loss, **{"num-examples": n})
        for k, (n, loss) in enumerate([(1, 2.0), (2, 1.0), (1, 2.0)])
    ]
    for strategy in (flower.FedAvg(), FedAvg()):
        assert dict(strategy.aggregate_evaluate(1, replies)) == {"eval_loss": pytest.approx(1.5)}


# --- the classic strategy -------------------------------------------------------------------


@pytest.mark.parametrize("available", [9, 10, 19, 20])
def test_numbers_of_clients_are_those_of_the_classic_fedavg(available: int) -> None:
    theirs = classic.FedAvg(fraction_evaluate=0.05, min_available_clients=3)
    ours = LegacyStrategy(FedAvg(fraction_evaluate=0.05, min_available_nodes=3))
    assert ours.num_fit_clients(available) == theirs.num_fit_clients(available)
    assert ours.num_evaluation_clients(available) == theirs.num_evaluation_clients(available)


def fit(values: list[np.ndarray], examples: int) -> FitRes:
    return FitRes(OK, ndarrays_to_parameters(values), examples, {})


def test_classic_results_are_averaged_without_configure_fit() -> None:
    results = [
        (Proxy(k), fit([RANDOM.normal(size=(100, 64)), RANDOM.normal(size=(31, 6, 3))], n))
        for k, n in enumerate((1, 5))
    ]
    wanted, _ = classic.FedAvg().aggregate_fit(1, results, [])
    ours, _ = LegacyStrategy(FedAvg()).aggregate_fit(1, results, [])
    for a, b in zip(parameters_to_ndarrays(ours), parameters_to_ndarrays(wanted), strict=True):
        np.testing.assert_allclose(a, b)


def test_classic_rounds_without_results_give_none() -> None:
    for strategy in (classic.FedAvg(), LegacyStrategy(FedAvg())):
        for failures in ([], [Exception()]):
            assert strategy.aggregate_fit(1, [], failures) == (None, {})
            assert strategy.aggregate_evaluate(1, [], failures) == (None, {})


def test_failures_that_are_not_accepted_skip_the_classic_round() -> None:
    one: list[Any] = [(Proxy(1), fit([np.ones(2)], 1))]
    test: list[Any] = [(Proxy(1), EvaluateRes(OK, 2.3, 1, {}))]
    for make in (classic.FedAvg, lambda **options: LegacyStrategy(FedAvg(), **options)):
        strict, patient = make(accept_failures=False), make()
        assert strict.aggregate_fit(1, one, [Exception()]) == (None, {})
        assert strict.aggregate_evaluate(1, test, [Exception()]) == (None, {})
        assert patient.aggregate_fit(1, one, [Exception()])[0] is not None
        assert patient.aggregate_evaluate(1, test, [Exception()])[0] == pytest.approx(2.3)


# --- what rules that compare models with the received model do ---------------------------------


@every_strategy
@pytest.mark.parametrize("sent", [None, "float64"])
def test_a_rule_averages_the_clients_models_or_says_what_it_lacks(name: str, sent: Any) -> None:
    """No rule uses a model that the clients did not receive, without a word."""
    strategy = STRATEGIES[name](min_clients=1)
    source = Rounds(STRATEGIES[name](), MODEL, range(3))  # of made-up measurements
    returned, replies = [], []
    if sent:
        start = {n: a.astype(float) if a.dtype.kind == "f" else a for n, a in MODEL.items()}
        nodes = type("Grid", (), {"get_node_ids": lambda self: [1, 2, 3]})()
        config = {"train.lr": 0.1, "train.momentum": 0.0, "num-server-rounds": 3}
        record = ArrayRecord({n: Array(a) for n, a in start.items()})
        strategy.min_available_nodes = 3
        asked = list(strategy.configure_train(1, record, ConfigRecord(config), nodes))
        asked.sort(key=lambda m: m.metadata.dst_node_id)
    else:
        asked = [Message(RecordDict(), node, "train") for node in (1, 2, 3)]
    for k, message in enumerate(asked):
        arrays = {n: (a + k + 1).astype(a.dtype) for n, a in MODEL.items()}
        made_up = source.make_up(k)
        vectors = {n: v for n, v in made_up.items() if isinstance(v, dict)}
        scalars = {n: v for n, v in made_up.items() if n not in vectors}
        values = {"num-examples": 10 * (k + 1), "train_loss": 1.0, **scalars}
        replies.append(reply(message, arrays, values, vectors))
        returned.append(arrays["conv.weight"])
    refusal = ""
    try:
        merged, _ = strategy.aggregate_train(1, replies)
    except ConfigError as error:
        refusal = str(error)
    if refusal:
        remedy = "start from a model" if sent else r"super\(\)\.configure_train"
        assert re.search(f"compares the clients' models with .* received.*{remedy}", refusal)
        assert name not in ("fedavg", "uniform", "afl", "term", "propfair", "fedism", "daa")
        return
    weights = np.asarray(strategy.diagnostics["weights"])
    expected = np.tensordot(weights, np.array(returned), axes=1)
    np.testing.assert_allclose(arrays_of(merged)["conv.weight"], expected, rtol=1e-6)


def test_a_strategy_with_exchanges_needs_the_received_model() -> None:
    strategy = FedAvg(exchanges=[ControlVariates()])
    with pytest.raises(ConfigError, match=r"exchange.*super\(\)\.configure_train"):
        strategy.aggregate_train(1, [answer(1, ArrayRecord([np.ones(2)]))])


def test_an_unusable_client_is_not_the_one_that_updates_are_counted_from() -> None:
    values = [np.full(2, np.nan), np.ones(2), np.full(2, 3.0)]
    strategy = FedAvg()
    arrays, _ = strategy.aggregate_train(
        1, [answer(k, ArrayRecord([v])) for k, v in enumerate(values)]
    )
    np.testing.assert_array_equal(arrays["0"].numpy(), 2.0)
    assert strategy.client_ids == (1, 2)


def test_a_client_without_examples_is_present_and_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    strategy = FedAvg()
    with caplog.at_level(logging.WARNING, "flwr"):
        for server_round in (1, 2):
            replies = [
                answer(k, ArrayRecord([np.full(2, float(k))]), **{"num-examples": n})
                for k, n in enumerate([0, 0, 0, 5])
            ]
            arrays, _ = strategy.aggregate_train(server_round, replies)
            np.testing.assert_array_equal(arrays["0"].numpy(), 3.0)
            assert strategy.client_ids == (3,)
            assert strategy.dropped == {}
            tests = [answer(k, None, eval_loss=float(k), **{"num-examples": k}) for k in (0, 2)]
            assert dict(strategy.aggregate_evaluate(server_round, tests)) == {"eval_loss": 2.0}
    named = [r.getMessage() for r in caplog.records]
    assert named == [
        f"Client {k} takes no part: it has no examples (num-examples = 0)." for k in (0, 1, 2)
    ]
    empty = [answer(k, ArrayRecord([np.ones(2)]), **{"num-examples": 0}) for k in range(2)]
    with pytest.raises(RoundFailed, match=r"clients 0, 1: it has no examples"):
        strategy.aggregate_train(3, empty)


@pytest.mark.parametrize("rule", [FedAvg, FedHEAL])
def test_a_failed_round_has_the_model_that_was_sent(rule: Any) -> None:
    """Also without `FairStrategy.start`: in wrappers, loops of one's own and the classic API."""
    legacy = LegacyStrategy(rule(), {"w": np.full(2, 7.0, np.float32)})
    parameters = legacy.initialize_parameters(None)
    manager = type("Manager", (), {"all": lambda self: {str(k): Proxy(k) for k in (1, 2)}})()
    legacy.configure_fit(1, parameters, manager)
    with pytest.raises(RoundFailed, match="client") as failed:
        legacy.aggregate_fit(1, [], [ValueError(), ValueError("no disk")])
    assert "ValueError() | no disk" in str(failed.value)
    np.testing.assert_array_equal(failed.value.arrays["w"].numpy(), 7.0)


# --- what only a round's config says ----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "argument", "key"),
    [("fedism+", "rounds", "num-server-rounds"), ("fedga", "rounds", "num-server-rounds")],
)
def test_in_a_wrapper_a_rule_says_which_argument_it_lacks(
    name: str, argument: str, key: str
) -> None:
    """A wrapper's ``start`` sends no number of rounds, so FedISM+ would have a constant radius."""
    record = ArrayRecord({"w": Array(np.zeros(2, np.float32))})
    nodes = SimpleNamespace(get_node_ids=lambda: [1, 2])
    wrap = partial(
        flower.DifferentialPrivacyServerSideFixedClipping,
        noise_multiplier=0.0,
        clipping_norm=1.0,
        num_sampled_clients=2,
    )
    kind = STRATEGIES[name]
    with pytest.raises(ConfigError, match=rf"{argument} = None: .*{argument}=.*'{key}'"):
        wrap(kind()).configure_train(1, record, ConfigRecord(), nodes)
    for strategy, config in ((kind(**{argument: 3}), {}), (kind(), {key: 3})):
        asked = wrap(strategy).configure_train(1, record, ConfigRecord(config), nodes)
        assert len(list(asked)) == 2
    if name == "fedism+":  # a constant radius needs no number of rounds
        assert list(wrap(kind(p=0)).configure_train(1, record, ConfigRecord(), nodes))


def test_rules_with_a_learning_rate_merge_cohorts_without_a_round() -> None:
    """QFFL: L = 1/lr, h_k = q F^(q-1) ||L Delta_k||^2 + L F^q, theta + L sum F^q Delta_k / h."""
    lr, F, moves = 0.5, np.array([1.0, 3.0]), np.array([1.0, 5.0])
    cohort = make_cohort(moves[:, None], received_loss=F)
    h = (moves / lr) ** 2 + F / lr
    merged = STRATEGIES["qffl"](lr=lr).merge(cohort)["w"]
    np.testing.assert_allclose(merged, (F * moves).sum() / lr / h.sum())
    with pytest.raises(ValueError, match=r"QFFL needs a learning rate"):
        STRATEGIES["qffl"]().merge(cohort)
    both = make_cohort(moves[:, None], received_loss=[1.0, 1.0], measured={"gradient": [[1.0]] * 2})
    assert np.isfinite(STRATEGIES["fedeba+"](lr=lr).merge(both)["w"]).all()
    with pytest.raises(ValueError, match=r"FedEBA\+ needs a learning rate"):
        STRATEGIES["fedeba+"]().merge(both)
