"""Rounds of secure aggregation: models, what the server sees, failing and lying clients."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from parametrize import mark_others_nightly
from secure_federation import CONFIG, STAGES, SecureFederation, raise_at, stage_of
from sgd_clients import batch_normed, linear, sgd_trainer
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn

from fairflower.arrays import arrays_of, record_of
from fairflower.clients import make_client_app
from fairflower.errors import ConfigError, RoundFailed
from fairflower.participation import PowerOfChoice
from fairflower.secure import client, protocol
from fairflower.secure.client import REFUSED, secure_mod
from fairflower.secure.protocol import Halted
from fairflower.secure.vectors import scale_of
from fairflower.strategies import (
    QFFL,
    STRATEGIES,
    TERM,
    FairStrategy,
    FedISM,
    FedNova,
    Uniform,
)

ARGUMENTS: dict[str, dict[str, Any]] = {"fedeba+": {"alpha": 0.0}, "propfair": {"M": 5.0}}


def make_strategy(name: str) -> FairStrategy:
    return STRATEGIES[name](**ARGUMENTS.get(name, {}))


SUMS = [name for name in STRATEGIES if make_strategy(name).sums_suffice]


def flat(arrays: dict[str, np.ndarray]) -> np.ndarray:
    return np.concatenate([a.reshape(-1).astype(np.float64) for a in arrays.values()])


def assert_close(actual: Any, expected: Any, received: Any, error: float) -> None:
    """Equal up to the quantization error of one round, and single precision."""
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        allowed = error * scale_of(received[name]) + 1e-6 * max(1, np.abs(array).max())
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=allowed, err_msg=name)
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(actual[name], array)


def test_sums_suffice_for_the_listed_strategies() -> None:
    names = "fedavg uniform afl term superquantile propfair aaggff fairfed fedga fedism pa3fed "
    names += "eagle qffl fednova fedeba+"
    assert {*names.split(), "fedism+"} <= {*SUMS}


# --- models of plain rounds ----------------------------------------------------------------


@pytest.mark.few(5)
@pytest.mark.parametrize("name", [*SUMS, "qffl weights"])
def test_the_model_equals_that_of_plain_rounds(name: str) -> None:
    def federation(secure: bool) -> SecureFederation:
        strategy = QFFL(rule="weights") if name == "qffl weights" else make_strategy(name)
        return SecureFederation(strategy, net=batch_normed, secure=secure)

    masked, plain = federation(True), federation(False)
    for _ in range(2):
        received = arrays_of(plain.model)
        masked.model = plain.model  # so that the error is that of a single round
        expected, actual = plain.train(), masked.train()
        error = masked.strategy.diagnostics.pop("quantization_error")
        assert error < 1e-6
        assert_close(actual, expected, received, error)
        assert masked.strategy.client_ids == plain.strategy.client_ids == (0, 1, 2, 3, 4)
        assert masked.strategy.diagnostics.keys() == plain.strategy.diagnostics.keys()
        for key, values in plain.strategy.diagnostics.items():
            np.testing.assert_allclose(masked.strategy.diagnostics[key], values, atol=1e-6)
        assert masked.strategy.client_metrics.keys() == plain.strategy.client_metrics.keys()
    states = masked.strategy.state_dict(), plain.strategy.state_dict()
    assert states[0].keys() == states[1].keys()
    for key, values in states[1].items():
        np.testing.assert_allclose(states[0][key], values, atol=1e-6)


@pytest.mark.parametrize("clients", [16, pytest.param(40, marks=pytest.mark.nightly)])
def test_many_clients_share_keys_with_a_subset_and_give_the_plain_model(
    clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if clients < 40:
        monkeypatch.setattr(protocol, "MAX_SHARES", 9)
    masked = SecureFederation(Uniform(), clients=clients)
    plain = SecureFederation(Uniform(), clients=clients, secure=False)
    masked.disturb = raise_at("collect_masked_vectors", 7, 8, 13)
    plain.disturb = raise_at("", 7, 8, 13)
    received = arrays_of(plain.model)
    actual, expected = masked.train(), plain.train()
    assert len(masked.strategy.client_ids) == clients - 3
    assert_close(actual, expected, received, masked.strategy.diagnostics["quantization_error"])


def test_secure_rounds_are_reproducible_bit_for_bit() -> None:
    first, second = (SecureFederation(TERM()) for _ in range(2))
    first.train(), second.train()
    assert flat(first.train()).tobytes() == flat(second.train()).tobytes()


# --- what the server sees ------------------------------------------------------------------


def seen(federation: SecureFederation) -> list[np.ndarray]:
    """Return every array in every reply that the server received, as numbers."""
    arrays = []
    for _, _, reply in federation.replies:
        for record in reply.content.array_records.values():
            arrays += [a.reshape(-1).astype(np.float64) for a in arrays_of(record).values()]
        for config in reply.content.config_records.values():
            for value in config.values():
                for item in value if isinstance(value, list) else [value]:
                    if isinstance(item, bytes) and item.startswith(b"\x93NUMPY"):
                        arrays.append(bytes_to_ndarray(item).reshape(-1).astype(np.float64))
    return arrays


def largest_correlation(federation: SecureFederation, received: dict[str, np.ndarray]) -> float:
    """Return the largest correlation of an array of `seen` with a client's model or update."""
    secrets = [flat(model) for model in federation.trained.values()]
    secrets += [secret - flat(received) for secret in secrets]
    correlations = [0.0]
    for array in seen(federation):
        for secret in secrets:
            n = min(len(array), len(secret))
            if n > 1:
                correlations.append(abs(np.corrcoef(array[:n], secret[:n])[0, 1]))
    return max(correlations)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", SUMS)
def test_no_message_correlates_with_a_clients_model_or_update(name: str) -> None:
    federation = SecureFederation(make_strategy(name))
    received = arrays_of(federation.model)
    federation.train()
    assert len(federation.trained) == 5
    assert len(federation.replies) == 5 * len(STAGES)
    assert sum(array.size > 700 for array in seen(federation)) == 5  # the masked vectors
    # Of 775 numbers, chance correlations have a standard deviation of 0.036.
    assert largest_correlation(federation, received) < 0.2


def test_the_correlation_check_finds_the_models_of_a_plain_round() -> None:
    federation = SecureFederation(Uniform(), secure=False)
    received = arrays_of(federation.model)
    federation.train()
    assert largest_correlation(federation, received) == pytest.approx(1)


def test_the_same_update_is_masked_differently_each_time() -> None:
    vectors = []
    for _ in range(2):
        federation = SecureFederation(Uniform())
        federation.train()
        vectors.append(max(seen(federation), key=len))
    assert abs(np.corrcoef(*vectors)[0, 1]) < 0.2


# --- clients that fail ---------------------------------------------------------------------


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_fails_is_left_out_of_the_sum(stage: str) -> None:
    masked, plain = SecureFederation(Uniform()), SecureFederation(Uniform(), secure=False)
    masked.disturb, plain.disturb = raise_at(stage, 2), raise_at("", 2)
    if stage == "unmask":  # it has sent its masked update, which the others can unmask
        plain.disturb = raise_at("")
    received = arrays_of(plain.model)
    actual, expected = masked.train(), plain.train()
    assert_close(actual, expected, received, masked.strategy.diagnostics["quantization_error"])
    if stage == "unmask":
        assert masked.strategy.client_ids == (0, 1, 2, 3, 4)
    else:
        assert masked.strategy.client_ids == (0, 1, 3, 4)
        assert masked.strategy.dropped == {2: "client 2 is away"}
        assert len(masked.strategy.diagnostics["weights"]) == 4


#: Before training, in training and after it.
FAILS_AT = ("measure", "collect_masked_vectors", "unmask")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    mark_others_nightly(
        itertools.product(SUMS, FAILS_AT),
        {*zip(SUMS, itertools.cycle(FAILS_AT)), *itertools.product(("qffl", "term"), FAILS_AT)},
    ),
)
def test_every_strategy_continues_without_a_failing_client(name: str, stage: str) -> None:
    clients = 9 if name == "superquantile" else 5  # most of its weights are 0
    masked = SecureFederation(make_strategy(name), clients)
    plain = SecureFederation(make_strategy(name), clients, secure=False)
    masked.disturb, plain.disturb = raise_at(stage, 2), raise_at("", *(2,) * (stage != "unmask"))
    received = arrays_of(plain.model)
    actual, expected = masked.train(), plain.train()
    there = tuple(k for k in range(clients) if k != 2 or stage == "unmask")
    assert masked.strategy.client_ids == there
    diagnostics = masked.strategy.diagnostics
    if stage == "collect_masked_vectors" and name not in ("qffl", "fednova"):
        # Its metric influenced the weights of the others, which keep their proportions.
        weights = np.array(diagnostics["weights"])
        assert weights.sum() == pytest.approx(1)
        updates = np.array([flat(masked.trained[k]) - flat(received) for k in there])
        np.testing.assert_allclose(flat(actual), flat(received) + weights @ updates, atol=1e-6)
    else:
        assert_close(actual, expected, received, diagnostics["quantization_error"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_client_that_does_not_answer_in_time_is_left_out(stage: str) -> None:
    federation = SecureFederation(Uniform())
    federation.silent = (stage, 4)
    received = flat(arrays_of(federation.model))
    actual = flat(federation.train())
    there = range(5 if stage == "unmask" else 4)
    assert federation.strategy.client_ids == tuple(there)
    if stage != "unmask":
        assert federation.strategy.dropped == {4: "no reply before the timeout"}
    updates = [flat(federation.trained[k]) - received for k in there]
    np.testing.assert_allclose(actual, received + np.mean(updates, axis=0), atol=1e-6)


def test_the_weight_of_a_client_that_fails_after_measuring_goes_to_the_others() -> None:
    federation = SecureFederation(FedISM())
    federation.disturb = raise_at("collect_masked_vectors", 1)
    received = flat(arrays_of(federation.model))
    actual = flat(federation.train())
    S = federation.strategy.diagnostics["sharpness"]
    weights = S**2 / (S**2).sum()
    assert federation.strategy.client_ids == (0, 2, 3, 4)
    assert len(S) == 4
    np.testing.assert_allclose(federation.strategy.diagnostics["weights"], weights, atol=1e-6)
    updates = [flat(federation.trained[k]) - received for k in (0, 2, 3, 4)]
    np.testing.assert_allclose(actual, received + weights @ np.array(updates), atol=1e-6)
    assert 1 not in federation.strategy.merged_rounds


@pytest.mark.parametrize("stage", ["collect_masked_vectors", "unmask"])
def test_a_halted_round_changes_neither_the_model_nor_the_state(stage: str) -> None:
    federation = SecureFederation(FedISM())
    federation.train()
    before = federation.model, federation.strategy.state_dict()
    federation.disturb = raise_at(stage, 0, 1, 2)
    with pytest.raises(Halted, match=r"2 (of 5 )?clients"):
        federation.train()
    assert federation.model is before[0]
    state = federation.strategy.state_dict()
    assert all(np.array_equal(state[key], before[1][key]) for key in before[1])
    assert federation.strategy.client_ids == ()
    federation.disturb = raise_at("")
    federation.train()
    assert federation.strategy.client_ids == (0, 1, 2, 3, 4)


def test_too_few_measured_clients_fail_the_round_as_without_secure_aggregation() -> None:
    federation = SecureFederation(TERM())
    federation.disturb = raise_at("measure", 0, 1, 2)
    with pytest.raises(RoundFailed, match="2 of 5 clients sent a usable reply") as failed:
        federation.train()
    assert not isinstance(failed.value, Halted)


def test_weights_stay_below_the_cap_when_a_client_fails() -> None:
    federation = SecureFederation(Uniform(max_client_weight=0.2))
    federation.disturb = raise_at("collect_masked_vectors", 4)
    received = flat(arrays_of(federation.model))
    actual = flat(federation.train())
    updates = [flat(federation.trained[k]) - received for k in range(4)]
    np.testing.assert_allclose(actual, received + 0.2 * np.sum(updates, axis=0), atol=1e-6)


# --- weights -------------------------------------------------------------------------------


class WithWeights(Uniform):
    """A strategy with weights that the test sets."""

    weights = (0.5, 0.3, 0.2, 0.0, 0.0)

    def weigh(self, cohort: Any) -> Any:
        return np.array(self.weights)


def test_clients_with_weight_0_do_not_change_the_model() -> None:
    federation = SecureFederation(WithWeights())
    received = flat(arrays_of(federation.model))
    actual = flat(federation.train())
    updates = [flat(federation.trained[k]) - received for k in range(5)]
    expected = received + np.array(WithWeights.weights) @ np.array(updates)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_a_sum_of_two_clients_halts_the_round() -> None:
    strategy = WithWeights()
    strategy.weights = (0.5, 0.5, 0.0, 0.0, 0.0)
    federation = SecureFederation(strategy)
    with pytest.raises(Halted, match=r"2 of 5 clients have a weight above 0.*max-client-weight"):
        federation.train()
    assert not federation.trained


@pytest.mark.parametrize("weights", [(2, -1, 0, 0, 0), (1, 1, 1, 1, 1), (np.nan,) * 5])
def test_invalid_weights_are_refused(weights: Any) -> None:
    strategy = WithWeights()
    strategy.weights = weights
    with pytest.raises(ConfigError, match="non-negative numbers with sum 1"):
        SecureFederation(strategy).train()


def test_a_strategy_that_uses_single_updates_is_refused() -> None:
    class Curious(Uniform):
        def combine(self, cohort: Any, weights: Any) -> Any:
            return cohort.average(weights + cohort.gram()[0])

    class Reweighing(Uniform):
        def combine(self, cohort: Any, weights: Any) -> Any:
            return cohort.average(np.array([0.5, 0.5, 0, 0, 0]))

    for strategy in (Curious(), Reweighing()):
        with pytest.raises(ConfigError, match="uses individual updates"):
            SecureFederation(strategy).train()


def test_a_dominant_weight_in_the_sum_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    strategy = WithWeights()
    strategy.weights = (0.9, 0.05, 0.05, 0.0, 0.0)
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        SecureFederation(strategy).train()
    assert "client 0 has weight 0.90, so the sum shows most of its model" in caplog.text


# --- invalid replies and sites -------------------------------------------------------------


def test_a_client_that_uses_another_weight_than_instructed_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation = SecureFederation(Uniform())
    as_classic = client._as_classic

    def lie(request: Message, reply: Message) -> Message:
        answer = as_classic(request, reply)
        if request.content["config"]["client-id"] == 3:
            number = answer.content["fitres.num_examples"]
            number["num_examples"] = number["num_examples"] // 2
        return answer

    def cover_up(stage: str, k: int, reply: Message) -> None:
        if stage == "collect_masked_vectors" and k == 3:
            number = reply.content["fitres.num_examples"]
            number["num_examples"] = 2 * number["num_examples"]

    monkeypatch.setattr(client, "_as_classic", lie)
    federation.after = cover_up
    with pytest.raises(
        Halted, match=r"a client used a different weight, or .* \(one of clients 0, 1, 2, 3"
    ):
        federation.train()
    federation.after = lambda stage, k, reply: None  # its reply shows the weight: it is dropped
    federation.train()
    assert federation.strategy.dropped == {3: "it used the weight 268435456 instead of 536870912"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c.update({"x": record_of(sgd_trainer(linear()).send())}), "not masked"),
        (lambda c: c.metric_records["metrics"].update({"train_loss": np.inf}), "finite"),
        (lambda c: c.metric_records["metrics"].update({"num-examples": 3}), "18 training"),
        (lambda c: c[RECORD_KEY_CONFIGS].update({"masked_params": [b"x"]}), "cannot be read"),
        (lambda c: c[RECORD_KEY_CONFIGS].update(masked_params=[]), "expected [1, 775]"),
        (lambda c: c.pop("fitres.status"), "cannot be read (KeyError('fitres.status'))"),
        (lambda c: c["fitres.status"].update({"code": 99}), "cannot be read"),
        (lambda c: c["metrics"].update({"num-examples": [18]}), "lack 'num-examples'"),
    ],
)
def test_replies_that_cannot_be_summed_are_left_out(change: Any, reason: str) -> None:
    federation = SecureFederation(Uniform())

    def spoil(stage: str, client: int, reply: Message) -> None:
        if stage == "collect_masked_vectors" and client == 2:
            change(reply.content)

    federation.after = spoil
    federation.train()
    assert reason in federation.strategy.dropped[2]
    assert federation.strategy.client_ids == (0, 1, 3, 4)


def test_a_missing_metric_of_the_participation_policy_is_named() -> None:
    federation = SecureFederation(Uniform(participation=PowerOfChoice(loss="train", d=5)))

    def spoil(stage: str, client: int, reply: Message) -> None:
        if stage == "collect_masked_vectors" and client == 2:
            del reply.content["metrics"]["train_loss"]

    federation.after = spoil
    federation.train()
    assert "no metric 'train_loss', which PowerOfChoice needs" in federation.strategy.dropped[2]
    assert federation.strategy.client_ids == (0, 1, 3, 4)


def test_a_client_refuses_to_send_an_update_out_of_range(caplog: pytest.LogCaptureFixture) -> None:
    federation = SecureFederation(Uniform())

    def explode(stage: str, client: int, message: Message) -> None:
        if stage == "collect_masked_vectors" and client == 1:
            config = message.content.config_records["config"]
            config["explode"] = 1

    original = federation._trainer

    def exploding(context: Any, config: Any) -> Any:
        trainer = original(context, config)
        if "explode" in config:
            send = trainer.send
            trainer.send = lambda: {n: a + 100 for n, a in send().items()}
        return trainer

    federation.app = make_client_app(exploding, mods=[secure_mod])
    federation.disturb = explode
    federation.train()
    assert federation.strategy.dropped == {1: REFUSED}
    assert "is out of range: secure aggregation allows values of at most 8" in caplog.text


def changed_reply(stage: str, client: int, **values: Any) -> Callable[[str, int, Message], None]:
    """Return a function for ``after`` that changes the protocol's record; None removes a value."""

    def after(now: str, k: int, reply: Message) -> None:
        if (now, k) == (stage, client):
            record = reply.content.config_records[RECORD_KEY_CONFIGS]
            record.update({key: value for key, value in values.items() if value is not None})
            for key in [key for key, value in values.items() if value is None]:
                del record[key]

    return after


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("stage", "values"),
    [
        ("setup", {"pk1": None}),
        ("setup", {"pk2": b"not a key"}),
        ("share_keys", {"dsts": None}),
        ("share_keys", {"ctxts": []}),
        ("share_keys", {"ctxts": "text"}),
        ("share_keys", {"dsts": [1, 2, 3, 4]}),
        ("unmask", {"nids": None}),
        ("unmask", {"shares": [b"x"]}),
        ("unmask", {"nids": [1, 2, 3, 4, 5]}),
    ],
)
def test_a_client_whose_reply_flower_cannot_read_is_left_out(
    stage: str, values: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    masked, plain = SecureFederation(Uniform()), SecureFederation(Uniform(), secure=False)
    masked.after = changed_reply(stage, 2, **values)
    if stage != "unmask":  # otherwise the others can unmask its update
        plain.disturb = raise_at("", 2)
    received = arrays_of(plain.model)
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        actual, expected = masked.train(), plain.train()
    assert_close(actual, expected, received, masked.strategy.diagnostics["quantization_error"])
    assert masked.strategy.client_ids == plain.strategy.client_ids
    if stage == "unmask":
        assert "Node 1002 does not help to remove the masks: its reply does not" in caplog.text
    else:
        assert "does not follow Flower's protocol" in masked.strategy.dropped[2]


def test_shares_that_restore_nothing_halt_the_round_but_not_the_run() -> None:
    federation = SecureFederation(Uniform())
    federation.after = changed_reply("unmask", 2, shares=[b"x"] * 5)
    with pytest.raises(Halted, match="does not follow Flower's protocol"):
        federation.train()
    federation.after = lambda stage, client, reply: None
    federation.train()
    assert federation.strategy.client_ids == (0, 1, 2, 3, 4)


def test_metrics_after_training_do_not_replace_those_that_determined_the_weights() -> None:
    honest, lying = (SecureFederation(QFFL(q=1.0)) for _ in range(2))

    def lie(stage: str, client: int, reply: Message) -> None:
        if (stage, client) == ("collect_masked_vectors", 2):
            reply.content["metrics"].update({"received_loss": 0.0, "odd": [1.0, 2.0]})

    lying.after = lie
    assert flat(lying.train()).tobytes() == flat(honest.train()).tobytes()
    assert not lying.strategy.dropped


def test_a_connection_error_is_not_treated_as_an_invalid_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    federation, send = SecureFederation(Uniform()), SecureFederation._send

    def fail(self: SecureFederation, messages: list[Message]) -> list[Message]:
        if stage_of(messages[0]) == "share_keys":
            raise OSError("no connection")
        return send(self, messages)

    monkeypatch.setattr(SecureFederation, "_send", fail)
    with pytest.raises(OSError, match="no connection"):
        federation.train()


def test_a_site_does_not_unmask_a_node_both_as_present_and_as_absent(
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation = SecureFederation(Uniform())

    def curious(stage: str, client: int, message: Message) -> None:
        if stage == "unmask":
            message.content.config_records[RECORD_KEY_CONFIGS]["dead_nids"] = [1002]

    federation.disturb = curious
    with pytest.raises(Halted, match="0 of 5 clients helped to remove the masks"):
        federation.train()
    assert "named are [1000, 1001, 1002, 1002, 1003, 1004]" in caplog.text
    assert not any(
        "shares" in reply.content.get(RECORD_KEY_CONFIGS, {})
        for _, _, reply in federation.replies
        if reply.has_content()
    )


@pytest.mark.parametrize("stage", ["collect_masked_vectors", "anything"])
def test_a_site_sends_no_update_for_a_message_type_that_flower_does_not_mask(
    stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower's mod masks replies to "train", but its ClientApp also trains for "train.default"."""
    federation = SecureFederation(Uniform())
    config = {**CONFIG, "server-round": 1, "client-id": 2, "secure.weight": 1, "secure.range": 1}
    content = {
        "arrays": federation.model,
        "config": ConfigRecord({**config, "secure-aggregation": True}),
        RECORD_KEY_CONFIGS: ConfigRecord({"stage": stage}),
    }
    (reply,) = federation._send([Message(RecordDict(content), 1002, "train.default")])
    assert reply.error.reason.endswith(REFUSED)
    assert "the message has type 'train.default', expected 'train'" in caplog.text
    assert not federation.trained


def test_a_client_with_another_number_of_steps_than_announced_is_dropped() -> None:
    federation = SecureFederation(FedNova())

    def more(stage: str, client: int, reply: Message) -> None:
        if stage == "collect_masked_vectors" and client == 0:
            reply.content["metrics"]["steps"] = 99.0

    federation.after = more
    federation.train()
    assert federation.strategy.dropped == {0: "it took 99.0 steps, but had announced 4.0"}


def test_a_site_without_the_mod_is_named_and_sends_nothing() -> None:
    federation = SecureFederation(Uniform(), mods=())
    with pytest.raises(Halted):
        federation.train()
    assert "no ArrayRecord 'arrays'" in federation.strategy.dropped[0]
    assert not federation.trained


def test_a_site_of_an_earlier_version_is_named_and_sends_nothing() -> None:
    federation = SecureFederation(Uniform(), measures=False)
    with pytest.raises(RoundFailed, match="No train function registered with name 'measure'"):
        federation.train()
    assert not federation.trained


def test_a_client_sends_no_unmasked_model_in_a_secure_run() -> None:
    federation = SecureFederation(Uniform())
    strategy = federation.strategy
    config = {"secure-aggregation": True, "seed": 0}
    messages = list(strategy.configure_train(1, federation.model, ConfigRecord(config), None))
    replies = federation._send(messages)
    assert all("asked for an unmasked model" in reply.error.reason for reply in replies)


def test_a_site_can_require_secure_aggregation() -> None:
    federation = SecureFederation(Uniform(), secure=False)
    federation.grid.contexts[1002].node_config["secure-aggregation"] = True
    federation.train()
    assert "this site's node config. Nothing was sent" in federation.strategy.dropped[2]


def test_weights_and_model_are_computed_by_one_thread() -> None:
    """As in plain rounds; clients that train in this process may use more threads."""
    threads: dict[str, set[int]] = {}

    def note(what: str) -> None:
        threads.setdefault(what, set()).update(p["num_threads"] for p in threadpool_info())

    class Spy(Uniform):
        def weigh(self, cohort: Any) -> Any:
            note("weigh")
            return super().weigh(cohort)

        def combine(self, cohort: Any, weights: Any) -> Any:
            note("combine")
            return super().combine(cohort, weights)

    federation = SecureFederation(Spy())
    federation.disturb = lambda stage, client, message: note("clients")
    with threadpool_limits(2):
        federation.train()
    assert threads["weigh"] == threads["combine"] == {1}
    assert 2 in threads["clients"]


class Centered(nn.Sequential):
    """Has a buffer and a parameter whose names do not tell which is which."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Flatten(), nn.Linear(192, 4))
        self.register_buffer("center", torch.zeros(4))
        self.running_var = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) * self.running_var
        if self.training:
            self.center.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.center


def qffl_on_centered(**options: Any) -> SecureFederation:
    strategy = QFFL(q=1.0, buffers=["center"])
    strategy._trained = frozenset(["1.weight", "1.bias", "running_var"])
    return SecureFederation(strategy, net=Centered, **options)


def test_clients_know_which_arrays_are_trained_whatever_their_names() -> None:
    masked, plain = qffl_on_centered(), qffl_on_centered(secure=False)
    model, expected = masked.train(), plain.train()
    assert masked.strategy.dropped == {}
    assert expected["center"].any()
    for name, array in expected.items():
        np.testing.assert_allclose(model[name], array, atol=1e-5, err_msg=name)
    for _, _, reply in masked.replies:
        assert "secure.trained" not in reply.content


def test_a_parameter_with_the_name_of_a_buffer_is_not_left_out_of_the_norm() -> None:
    """Otherwise the server could ask for the norm of the others."""
    federation = qffl_on_centered()

    def alter(stage: str, k: int, message: Message) -> None:
        if (stage, k) == ("collect_masked_vectors", 2):
            config = message.content.config_records["config"]
            config["secure.buffers"] = ["center", "running_var"]

    federation.disturb = alter
    federation.train()
    assert federation.strategy.dropped == {2: REFUSED}
