"""The messages and replies of a round, for every strategy."""

from __future__ import annotations

import re

import numpy as np
import pytest
from flwr.app import Array, ConfigRecord, Message
from parametrize import every_strategy
from replies import error_reply, valid_reply
from threadpoolctl import threadpool_info, threadpool_limits

from fairflower.arrays import record_of
from fairflower.errors import ConfigError, Diverged, RoundFailed
from fairflower.exchanges.anchors import SemanticAnchors
from fairflower.strategies import STRATEGIES, FedAvg, FedEquilibria
from fairflower.testing.rounds import MODEL, Rounds, reply

# --- replies that cannot be used -----------------------------------------------------------


def wrong_arrays(change) -> object:
    def make(message: Message, client: int) -> Message:
        arrays = {k: np.array(a) for k, a in MODEL.items()}
        return reply(message, change(arrays) or arrays, {"num-examples": 3, "client-id": client})

    return make


def poisoned(arrays) -> None:
    arrays["conv.weight"][1, 2] = np.nan


def infinite(arrays) -> None:
    arrays["bn.running_mean"][0] = np.inf


BAD_REPLIES = {
    "NaN": (wrong_arrays(poisoned), "conv.weight.*NaN"),
    "infinite": (wrong_arrays(infinite), "running_mean.*infinite"),
    "shape": (wrong_arrays(lambda a: a | {"conv.weight": np.ones((4, 3))}), "shape"),
    "dtype": (wrong_arrays(lambda a: a | {"bn.running_mean": np.zeros(3)}), "float64"),
    "missing array": (wrong_arrays(lambda a: {"conv.weight": a["conv.weight"]}), "missing"),
    "extra array": (wrong_arrays(lambda a: a | {"x": np.ones(1)}), "unexpected.*x"),
    "exception": (lambda m, c: error_reply(m, "ZeroDivisionError: boom"), "boom"),
    "long story": (lambda m, c: error_reply(m, 400 * "x" + "boom"), r" \.\.\. x{296}boom\b"),
    "its own name": (lambda m, c: error_reply(m, f"Client {c}: boom"), "without client 3: boom"),
    "no num-examples": (
        lambda m, c: reply(m, MODEL, {"client-id": c}),
        "num-examples",
    ),
    "zero examples": (lambda m, c: valid_reply(m, c, **{"num-examples": 0}), "num-examples = 0"),
    "NaN examples": (
        lambda m, c: valid_reply(m, c, **{"num-examples": float("nan")}),
        "num-examples",
    ),
    "negative": (lambda m, c: valid_reply(m, c, **{"num-examples": -3}), "num-examples = -3"),
    "NaN id": (lambda m, c: valid_reply(m, float("nan")), "client-id = nan"),
    "another's id": (lambda m, c: valid_reply(m, 0), "claims to be client 0"),
}


@pytest.mark.parametrize("array", [np.ones(2, complex), np.array(["a", "b"])])
def test_arrays_that_are_not_real_numbers_are_refused(array: np.ndarray) -> None:
    """A weighted mean of complex numbers would lose their imaginary parts."""
    rounds = Rounds(FedAvg(), {"w": array}, range(2))
    with pytest.raises(ConfigError, match=f"'w' of the model has dtype {array.dtype}"):
        rounds.ask()  # before any client trains


@every_strategy
def test_a_missing_measurement_fails_the_round_with_its_name(name):
    rounds = Rounds(STRATEGIES[name](), MODEL, range(2))
    replies = [valid_reply(message, k) for k, message in enumerate(rounds.ask())]
    if not rounds.strategy.measurements:
        rounds.finish(replies)
        return
    missing, strategy = rounds.strategy.measurements[0], STRATEGIES[name].__name__
    with pytest.raises(RoundFailed, match=f"clients 0, 1: it sent no .*'{missing}'.*{strategy}"):
        rounds.finish(replies)


@pytest.mark.parametrize("kind", BAD_REPLIES)
def test_a_bad_reply_is_dropped_and_the_others_are_merged(kind, caplog):
    make, reason = BAD_REPLIES[kind]
    strategy = FedAvg()
    rounds = Rounds(strategy, MODEL, range(4))
    messages = rounds.ask()
    replies = [valid_reply(m, k) for k, m in enumerate(messages[:3])] + [make(messages[3], 3)]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        model = rounds.finish(replies)
    assert strategy.client_ids == (0, 1, 2)
    assert list(strategy.dropped) == [3]
    assert np.all(model["conv.weight"] == MODEL["conv.weight"] + 1)
    assert caplog.records
    assert re.search(reason, caplog.text)


def test_reasons_are_cut_at_500_characters():
    rounds = Rounds(FedAvg(), MODEL, range(3))
    replies = [valid_reply(message, k) for k, message in enumerate(rounds.ask())]
    replies[1].content["arrays"]["y" * 700] = Array(np.ones(1))
    rounds.finish(replies)
    assert rounds.strategy.dropped[1].startswith("its arrays differ from the model's")
    assert len(rounds.strategy.dropped[1]) == 500


def test_merging_uses_a_single_thread():
    """Sums of several threads would depend on their number."""
    threads: list[int] = []

    class Spy(FedAvg):
        def merge(self, cohort):
            threads.extend(pool["num_threads"] for pool in threadpool_info())
            return super().merge(cohort)

    class Anchor(SemanticAnchors):
        def correct(self, cohort, merged):
            threads.extend(pool["num_threads"] for pool in threadpool_info())
            return merged

    rounds = Rounds(Spy(exchanges=[Anchor()]), MODEL, range(2))
    with threadpool_limits(2):
        before = threadpool_info()
        rounds.finish([valid_reply(message, k) for k, message in enumerate(rounds.ask())])
        assert threadpool_info() == before
    assert len(threads) >= 2
    assert set(threads) == {1}


def test_clients_without_a_reply_are_listed_as_dropped():
    strategy = FedAvg(min_clients=2)
    rounds = Rounds(strategy, MODEL, range(4))
    messages = rounds.ask()
    rounds.finish([valid_reply(messages[0], 0), valid_reply(messages[2], 2)])
    assert strategy.dropped == dict.fromkeys([1, 3], "no reply before the timeout")


def test_too_few_replies_fail_the_round_with_the_reasons():
    rounds = Rounds(FedAvg(), MODEL, range(4))
    messages = rounds.ask()
    replies = [valid_reply(messages[0], 0), error_reply(messages[1], "out of memory")]
    with pytest.raises(RoundFailed, match=r"(?s)1 of 4 .* 2 .*client 1: out of memory.*2, 3: no"):
        rounds.finish(replies)


@pytest.mark.parametrize(("asked", "usable"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_by_default_half_of_the_clients_asked_must_send_usable_replies(asked, usable):
    rounds = Rounds(FedAvg(), MODEL, range(asked))
    rounds.finish([valid_reply(m, k) for k, m in enumerate(rounds.ask()[: usable + 1])])
    assert rounds.strategy.client_ids == tuple(range(usable + 1))
    replies = [valid_reply(message, k) for k, message in enumerate(rounds.ask()[:usable])]
    expected = f"{usable} of {asked} .* fewer than the {usable + 1} that"
    with pytest.raises(RoundFailed, match=expected):
        rounds.finish(replies)


@pytest.mark.parametrize(
    ("reasons", "error"),
    [
        (["the training loss became nan in epoch 1", "the loss is infinite"], Diverged),
        (["the training loss became nan in epoch 1", "No space left on device"], RoundFailed),
        (["Info is no number", "inference failed"], RoundFailed),
    ],
)
def test_divergence_is_distinguished_from_other_failures(reasons, error):
    rounds = Rounds(FedAvg(), MODEL, range(2))
    replies = [error_reply(m, reason) for m, reason in zip(rounds.ask(), reasons, strict=True)]
    with pytest.raises(RoundFailed, match="0 of 2") as raised:
        rounds.finish(replies)
    assert type(raised.value) is error


def test_min_clients_above_the_number_of_clients_is_no_divergence():
    rounds = Rounds(FedAvg(min_clients=3), MODEL, range(2))
    with pytest.raises(RoundFailed, match=r"2 of 2 .* fewer than the 3") as raised:
        rounds.finish([valid_reply(message, k) for k, message in enumerate(rounds.ask())])
    assert type(raised.value) is RoundFailed


@pytest.mark.parametrize(
    ("strategy", "update", "measured", "message"),
    [
        (FedAvg(), np.nan, {}, "array 'conv.weight' holds NaN"),
        (FedEquilibria(), 0, {"fisher": np.inf}, "its 'fisher': array 'conv.weight' holds"),
    ],
)
def test_updates_or_measurements_of_all_clients_that_are_no_numbers_are_divergence(
    strategy, update, measured, message
):
    still = {name: np.zeros_like(array) for name, array in MODEL.items()}
    conv = MODEL["conv.weight"]
    moved = {**still, "conv.weight": np.full_like(conv, update)}
    vectors = {k: {"conv.weight": np.full_like(conv, value)} for k, value in measured.items()}
    with pytest.raises(Diverged, match=f"clients 0, 1: {message}"):
        Rounds(strategy, MODEL, range(2)).step(
            dict.fromkeys(range(2), moved), measured=dict.fromkeys(range(2), vectors)
        )


def test_a_round_without_replies_fails():
    rounds = Rounds(FedAvg(min_clients=1), MODEL, range(2))
    rounds.ask()
    with pytest.raises(RoundFailed, match="0 of 2"):
        rounds.finish([])


def test_an_error_reply_from_the_superlink_is_assigned_to_the_asked_node():
    rounds = Rounds(FedAvg(min_clients=1), MODEL, range(2))
    messages = rounds.ask()
    lost = error_reply(messages[1], "node unavailable")
    lost.metadata.__dict__["_src_node_id"] = 1
    rounds.finish([valid_reply(messages[0], 0), lost])
    assert rounds.strategy.dropped == {1: "node unavailable"}


# --- values for single clients -----------------------------------------------------


class SendsSecrets(FedAvg):
    def client_config(self, client_id):
        return {"secret": client_id * 0.5} if client_id != 1 else {}


def secrets(messages: list[Message]) -> list[object]:
    return [m.content.config_records["config"].get("secret") for m in messages]


def test_each_client_receives_only_its_own_value():
    rounds = Rounds(SendsSecrets(), MODEL, range(4))
    messages = rounds.ask()
    assert secrets(messages) == [0.0, None, 1.0, 1.5]
    for message in messages:
        assert message.content.config_records["config"]["train.lr"] == 0.05
        assert message.content.array_records.keys() == {"arrays"}


def test_without_enrollment_a_client_is_known_by_the_id_it_sent():
    class Nodes:
        def get_node_ids(self):
            return [7, 9]

    strategy = SendsSecrets()
    for expected in ({7: 3.5, 9: 4.5}, {7: 10.0, 9: 11.0}):
        messages = list(
            strategy.configure_train(1, record_of(MODEL), ConfigRecord(), Nodes())  # type: ignore[arg-type]
        )
        received = dict(
            zip([m.metadata.dst_node_id for m in messages], secrets(messages), strict=True)
        )
        assert received == expected
        for i, message in enumerate(messages):
            message.metadata.__dict__["_message_id"] = str(i)
        replies = [valid_reply(m, {7: 20, 9: 22}[m.metadata.dst_node_id]) for m in messages]
        strategy.aggregate_train(1, replies)


# --- sampling --------------------------------------------------------------------------


def test_sampling_depends_on_the_seed_and_not_on_node_ids():
    def sampled(nodes, seed):
        strategy = FedAvg(fraction_train=0.3)
        rounds = Rounds(strategy, MODEL, range(10))
        strategy.enroll(nodes, seed)
        back = {node: client for client, node in nodes.items()}
        return [sorted(back[m.metadata.dst_node_id] for m in rounds.ask()) for _ in range(5)]

    ids = np.random.default_rng(0).permutation(10_000)[:10].tolist()
    one = sampled({k: 100 + k for k in range(10)}, 0)
    assert one == sampled({k: ids[k] for k in range(10)}, 0)
    assert one != sampled({k: 100 + k for k in range(10)}, 1)
    assert all(len(choice) == 3 for choice in one)


@pytest.mark.parametrize(("share", "asked"), [(0.0, 0), (0.3, 3), (1.0, 10)])
def test_fraction_evaluate_sets_the_number_of_clients_that_test(share, asked):
    strategy = FedAvg(fraction_evaluate=share)
    Rounds(strategy, MODEL, range(10))
    messages = list(strategy.configure_evaluate(1, record_of(MODEL), ConfigRecord(), None))
    assert len({message.metadata.dst_node_id for message in messages}) == len(messages) == asked
