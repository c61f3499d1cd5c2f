"""Servers that alter messages to read one client's update, and what clients refuse."""

from __future__ import annotations

import copy
import errno
import os
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import runs
from curious_server import CuriousServer, flat
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from parametrize import mark_others_nightly
from safetensors.numpy import load_file
from secure_federation import SecureFederation, raise_at

from fairflower.arrays import arrays_of
from fairflower.client_app import app as client_app
from fairflower.clients import make_client_app
from fairflower.engines.inline import FIRST_NODE, answer
from fairflower.errors import RoundFailed
from fairflower.secure import client, protocol
from fairflower.secure.client import REFUSED
from fairflower.secure.protocol import Halted
from fairflower.strategies import QFFL, Uniform

# Sites mark their answers there, and the Flower runs of all tests have the same id.
pytestmark = pytest.mark.usefixtures("own_home")

SETTINGS: dict[str, Any] = {
    "secure-aggregation": True,
    "strategy.name": "uniform",
    "num-server-rounds": 1,
    "data.clients-per-domain": 2,
    "fraction-train": 0.625,  # 5 of 8 clients
}

# --- attacks on the real app ---------------------------------------------------------------


def name_the_victim_often(server: CuriousServer, stage: str, node: int, asked: Any) -> None:
    """Name the victim as present as often as the threshold needs, and all others as absent."""
    if stage == "unmask":
        asked["active_nids"] = [server.victim] * 5
        asked["dead_nids"] = server.nodes[1:]


def hide_neighbors(server: CuriousServer, stage: str, node: int, asked: Any) -> None:
    """Name two of four neighbors to the victim, and these two as absent to all."""
    if stage == "collect_masked_vectors" and node == server.victim:
        kept = [i for i, source in enumerate(asked["srcs"]) if source in server.nodes[1:3]]
        for key in ("srcs", "ctxts"):
            asked[key] = [asked[key][i] for i in kept]
    if stage == "unmask":
        asked["active_nids"] = [server.nodes[i] for i in (0, 3, 4)]
        asked["dead_nids"] = [server.nodes[i] for i in (1, 2)]


def ask_for_signs(server: CuriousServer, stage: str, node: int, asked: Any) -> None:
    """Choose a range in which Flower's masks are 0, and one bit per parameter."""
    if stage == "setup" and node == server.victim:
        asked.update({"mod_range": 2, "target_range": 1, "clipping_range": 1e-12})


def attack(tmp_path: Path, alter: Any) -> CuriousServer:
    """Run a round of the real app with altered messages; return the server."""
    server = CuriousServer(client_app)
    server.alter = lambda *request: alter(server, *request)
    app = ClientApp()
    for register in (app.train(), app.train("measure")):
        register(server)
    app.query()(client_app)
    with suppress(RoundFailed):  # if too few clients answer
        runs.run(runs.config(tmp_path, **SETTINGS), app, nodes=8)
    return server


@pytest.mark.parametrize("alter", [name_the_victim_often, hide_neighbors])
def test_altered_lists_read_an_update_only_without_the_checks(
    alter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = attack(tmp_path, alter)
    assert len(checked.true_update) > 1000 or not checked.vector
    assert checked.stolen() is None
    assert checked.refused
    assert set(checked.refused) == {REFUSED}
    monkeypatch.setattr(client, "check_request", lambda *_: None)
    unchecked = attack(tmp_path, alter)
    np.testing.assert_allclose(unchecked.stolen(), unchecked.true_update, rtol=0, atol=1e-6)


def test_altered_ranges_read_signs_only_without_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = attack(tmp_path, ask_for_signs)
    assert not checked.vector
    assert checked.refused == [REFUSED]
    for module in (client, protocol):
        monkeypatch.setattr(module, "aes_masks", nullcontext)
    monkeypatch.setattr(client, "check_request", lambda *_: None)
    unchecked = attack(tmp_path, ask_for_signs)
    update = unchecked.true_update
    signs = unchecked.vector[1][: len(update)] % 2 - 0.5
    assert np.mean((signs > 0) == (update > 0), where=np.abs(update) > 1e-9) > 0.9


# --- requests that do not follow the protocol ----------------------------------------------


class Recorded(SecureFederation):
    """A federation that keeps all requests to client 2, and can send them again."""

    def __init__(self, strategy: Any = None, **options: Any) -> None:
        super().__init__(strategy or Uniform(), **options)
        self.requests: dict[tuple[int, str], RecordDict] = {}
        self.answers: dict[str, Message] = {}
        self.context: Context = self.grid.contexts[FIRST_NODE + 2]
        self.disturb, self.after = self._keep, self._keep_reply

    def _keep(self, stage: str, k: int, message: Message) -> None:
        if k == 2 and message.content:
            self.requests[self.round, stage] = copy.deepcopy(message.content)

    def _keep_reply(self, stage: str, k: int, reply: Message) -> None:
        if k == 2:
            self.answers[stage] = reply

    def train_with_twin(self, stage: str) -> Context:
        """Train a round; return client 2's state from before it answered a stage's request."""
        twins: list[Context] = []

        def twin(now: str, k: int, message: Message) -> None:
            self._keep(now, k, message)
            if (now, k) == (stage, 2):
                twins.append(copy.deepcopy(self.context))

        self.disturb = twin
        self.train()
        self.disturb = self._keep
        return twins[0]

    def again(
        self, server_round: int, stage: str, context: Context | None = None, **config: Any
    ) -> Message:
        """Send a request of a round again, with another config."""
        content = copy.deepcopy(self.requests[server_round, stage])
        if config:
            content["config"] = ConfigRecord({**content["config"], **config})
        kind = "train.measure" if stage == "measure" else "train"
        message = Message(content, FIRST_NODE + 2, kind)
        message.metadata.__dict__["_run_id"] = self.context.run_id
        return answer(self.app, message, context or self.context)


def assert_refused(reply: Message) -> None:
    """Check that the server reads nothing but the fixed text, from which it learns no reason."""
    assert reply.has_error()
    assert reply.error.reason.endswith(f"ValueError: {REFUSED}\n\nMessage: {REFUSED}")
    assert reply.error.reason.count("Traceback") == 1, "the text of another exception"


def neighbors_of(asked: Any) -> list[str]:
    return [name for name in asked if name not in ("stage", "1002")]


def first_key_again(asked: Any) -> None:
    """Give a node's first key to another node, in another encoding that Flower's mod reads."""
    one, other, *_ = neighbors_of(asked)
    asked[other] = [b"as a text\n" + asked[one][0], asked[other][1]]


WRONG: list[tuple[str, Callable[[Any], Any], str]] = [
    ("setup", lambda a: a.update(sample_num=2), "sample_num = 2, expected at least 3"),
    ("setup", lambda a: a.update(sample_num=2**40), "sample_num = 1099511627776, exp"),
    ("setup", lambda a: a.update(share_num=4), "share_num = 4, expected 5"),
    ("setup", lambda a: a.update(threshold=2), "threshold = 2, expected 3"),
    ("setup", lambda a: a.update(clipping_range=1e-6), "clipping_range = 1e-06, expected 8.0"),
    ("setup", lambda a: a.update(target_range=2**30), "target_range = 1073741824, expected 5368"),
    ("setup", lambda a: a.update(mod_range=2), "mod_range = 2, expected 4294967296"),
    ("setup", lambda a: a.update(max_weight=1.0), "max_weight = 1.0, expected 536870912.0"),
    ("share_keys", lambda a: a.pop(neighbors_of(a)[0]), "keys of 4 nodes"),
    ("share_keys", lambda a: a.update({"1": [*map(bytes, a["1002"])]}), "keys of 6 nodes"),
    ("share_keys", lambda a: a.update({"0" + neighbors_of(a)[0]: a["1002"]}), "keys of 5 nodes"),
    ("share_keys", lambda a: a.update({"7": a.pop("1002")}), "this node's keys are missing"),
    ("share_keys", first_key_again, "a key belongs to two nodes"),
    ("collect_masked_vectors", lambda a: a["srcs"].pop() and a["ctxts"].pop(), "named are"),
    ("collect_masked_vectors", lambda a: a.update(srcs=[a["srcs"][0]] * 4), "named are"),
    ("collect_masked_vectors", lambda a: a["srcs"].append(1002), "named are"),
    ("collect_masked_vectors", lambda a: a["srcs"].append(7), "named are"),
    ("unmask", lambda a: a.update(active_nids=[1002] * 5), "named are [1002, 1002"),
    ("unmask", lambda a: a.update(dead_nids=[1001]), "named are"),
    ("unmask", lambda a: a["active_nids"].pop(), "named are"),
    ("unmask", lambda a: a["active_nids"].append(7), "named are"),
    (
        "unmask",
        lambda a: a.update(active_nids=[1000, 1001, 1003, 1004], dead_nids=[1002]),
        "this node is named as absent",
    ),
    (
        "unmask",
        lambda a: a.update(active_nids=[1000, 1002], dead_nids=[1001, 1003, 1004]),
        "only [1000, 1002] are present",
    ),
    ("setup", lambda a: a.update(stage="share_keys"), "'share_keys' does not follow after"),
    ("setup", lambda a: a.update(stage="unmask"), "'unmask' does not follow after"),
    ("share_keys", lambda a: a.update(stage="unmask"), "'unmask' does not follow after 'setup'"),
    ("share_keys", lambda a: a.update(stage="other"), "'other' does not follow after 'setup'"),
]


@cache
def before(stage: str, strategy: Any) -> tuple[Recorded, Context]:
    """Return a federation after a round, and client 2's state from before it answered a stage.

    From this state the client answers the stage's request again.
    """
    federation = Recorded(strategy())
    context = federation.train_with_twin(stage)
    assert not federation.again(1, stage, copy.deepcopy(context)).has_error()
    return federation, context


def refuse(strategy: Any, stage: str, change: Callable[[RecordDict], Any]) -> None:
    """Check that a client, which answers a stage's request, refuses it with a change."""
    federation, context = before(stage, strategy)
    content = copy.deepcopy(federation.requests[1, stage])
    change(content)
    with mock.patch.dict(federation.requests, {(1, stage): content}):
        assert_refused(federation.again(1, stage, copy.deepcopy(context)))


@cache
def plain_model(absent: tuple[int, ...]) -> Any:
    """Return the model of a plain round without these clients."""
    federation = SecureFederation(Uniform(), secure=False)
    federation.disturb = raise_at("", *absent)
    return flat(federation.train())


@pytest.mark.parametrize(("stage", "change", "reason"), WRONG)
def test_a_client_refuses_a_request_that_does_not_follow_the_protocol(
    stage: str, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(Uniform, stage, lambda content: change(content[RECORD_KEY_CONFIGS]))
    assert f"This client did not answer the server: {reason}" in caplog.text


#: The first wrong request of each stage.
FIRST = [case for k, case in enumerate(WRONG) if case[0] not in {c[0] for c in WRONG[:k]}]


@pytest.mark.parametrize(("stage", "change", "reason"), mark_others_nightly(WRONG, FIRST))
def test_a_round_ends_without_a_client_that_refused_a_request(
    stage: str, change: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    federation = SecureFederation(Uniform())
    answered: list[str] = []

    def alter(now: str, k: int, message: Message) -> None:
        if (now, k) == (stage, 2):
            change(message.content.config_records[RECORD_KEY_CONFIGS])

    federation.disturb = alter
    federation.after = lambda now, k, reply: answered.append(now) if k == 2 else None
    model, others = flat(federation.train()), plain_model((2,) * (stage != "unmask"))
    np.testing.assert_allclose(model, others, atol=1e-6)  # the others' sum
    assert (
        answered
        == ["measure", "setup", "share_keys", "collect_masked_vectors", "unmask"][
            : 1 + ["setup", "share_keys", "collect_masked_vectors", "unmask"].index(stage)
        ]
    )
    assert f"This client did not answer the server: {reason}" in caplog.text
    if stage != "unmask":
        assert federation.strategy.dropped == {2: REFUSED}


#: What the server could instruct and the protocol cannot need.
NEEDLESS: list[dict[str, Any]] = [
    {"secure.weight": 2**40},
    {"secure.weight": -1},
    {"secure.range": 2**20, "secure.weight": 1},
    {"secure.checks": [0.5]},
    {"secure.checks": [1e9, 0.0, 0.0]},
    {"secure.checks": [float("nan"), 0.0, 0.0]},
    {"secure.square-factor": float("inf")},
    {"secure.square-factor": float("nan")},
    {"secure.square-factor": 1e30},
    {"secure.square-factor": -1.0},
    {"secure.square-factor": 1.0, "secure.buffers": ["1.weight"]},  # the norm of the other
    {"server-round": 0},
    {"server-round": 2},  # it has measured for round 1
    {"server-round": 6},  # of 5
    {"server-round": 1.5},
    {"train.lr": 1e3},
]


@pytest.mark.parametrize("change", NEEDLESS)
def test_a_client_refuses_instructions_that_the_protocol_cannot_need(change: Any) -> None:
    refuse(QFFL, "collect_masked_vectors", lambda content: content["config"].update(change))


@pytest.mark.few(1)
@pytest.mark.parametrize("change", NEEDLESS)
def test_a_round_ends_without_a_client_that_refused_instructions(change: Any) -> None:
    federation = SecureFederation(QFFL())

    def alter(stage: str, k: int, message: Message) -> None:
        if (stage, k) == ("collect_masked_vectors", 2):
            message.content.config_records["config"].update(change)

    federation.disturb = alter
    federation.train()
    assert federation.strategy.dropped == {2: REFUSED}


# --- requests that come again --------------------------------------------------------------


def test_no_request_of_a_round_is_answered_twice() -> None:
    federation = Recorded()
    federation.train()
    for stage in ("measure", "share_keys", "collect_masked_vectors", "unmask"):
        assert_refused(federation.again(1, stage))
    # A second set-up sends new keys, but no masked vector for the same round.
    assert not federation.again(1, "setup").has_error()
    assert_refused(federation.again(1, "collect_masked_vectors"))


def test_a_second_set_up_of_a_round_gives_no_second_masked_vector(
    caplog: pytest.LogCaptureFixture,
) -> None:
    federation = Recorded()
    federation.train()
    trained = len(federation.trained)
    federation.trained.clear()
    federation.round -= 1  # the whole masked exchange again, with one client less
    federation.disturb = raise_at("measure", 4)
    for context in federation.grid.contexts.values():  # as if none had measured in this round
        kept: Any = context.state["fairflower.secure"]
        kept.update({key: 0 for key in kept if key.endswith("measure")})
    with pytest.raises(Halted, match="0 of 0 clients"):
        federation.train()
    assert trained == 5
    assert not federation.trained
    assert "round 1 to train does not follow after round 1" in caplog.text


def test_shares_and_requests_of_another_round_are_refused() -> None:
    federation = Recorded()
    federation.train()

    def mix(stage: str, k: int, message: Message) -> None:
        if (stage, k) == ("collect_masked_vectors", 2):
            old = federation.requests[1, stage][RECORD_KEY_CONFIGS]
            new = message.content.config_records[RECORD_KEY_CONFIGS]
            new["ctxts"], new["srcs"] = old["ctxts"], old["srcs"]

    federation.disturb = mix
    federation.train()
    assert federation.strategy.dropped == {2: REFUSED}
    federation.disturb = lambda *_: None
    federation.train()
    assert federation.strategy.dropped == {}, "an aborted round leaves nothing"
    assert_refused(federation.again(1, "measure"))


def test_measuring_is_not_repeated_with_other_settings() -> None:
    federation = Recorded()
    federation.train()
    for change in ({}, {"train.lr": 1.0}, {"measure": "received_loss"}):
        assert_refused(federation.again(1, "measure", **change))
    assert_refused(federation.again(1, "measure", **{"server-round": 2, "train.lr": 1.0}))
    assert_refused(federation.again(1, "measure", **{"server-round": 6}))
    assert not federation.again(1, "measure", **{"server-round": 2}).has_error()


@pytest.mark.parametrize("stage", ["share_keys", "collect_masked_vectors", "unmask"])
def test_a_site_that_cannot_note_an_answer_on_its_full_disk_gives_none(
    stage: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Recorded()
    federation.context.node_config["domain"] = "hospital"

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/home/secure/mark")

    def fill(now: str, k: int, message: Message) -> None:
        federation._keep(now, k, message)
        monkeypatch.setattr(client.os, "open", full if (now, k) == (stage, 2) else os_open)

    os_open, federation.disturb = os.open, fill
    federation.train()
    assert "No space left on device: '/home/secure/mark'" in caplog.text
    assert (2 in federation.strategy.client_ids) == (stage == "unmask")
    assert (stage == "unmask") or federation.strategy.dropped[2].endswith(REFUSED)


@pytest.mark.parametrize("reference", ["alone", "pooled"])
def test_no_reference_sends_its_received_model_under_masks(reference: str) -> None:
    """Its update would be 0, and the sum that of the others."""
    federation = Recorded()
    federation.train()
    run = {"run-id": "other"}
    assert_refused(federation.again(1, "measure", reference=reference, **run))
    assert not federation.again(1, "measure", **run).has_error()


def test_another_run_is_answered_but_the_first_run_goes_on_where_it_was() -> None:
    federation = Recorded()
    federation.train()
    assert not federation.again(1, "measure", **{"run-id": "other"}).has_error()
    assert_refused(federation.again(1, "measure", **{"run-id": "other"}))
    assert_refused(federation.again(1, "measure"))


@pytest.mark.parametrize("stage", ["share_keys", "collect_masked_vectors", "unmask"])
def test_two_processes_of_a_site_do_not_both_answer(stage: str) -> None:
    """Both begin with the same state, as a SuperNode's processes may."""
    federation = Recorded()
    for context in federation.grid.contexts.values():
        context.node_config["domain"] = "hospital"
    twin = federation.train_with_twin(stage)
    assert federation.strategy.client_ids == (0, 1, 2, 3, 4)
    assert_refused(federation.again(1, stage, twin))


def test_a_run_with_masked_models_gets_no_plain_model() -> None:
    federation = Recorded()
    federation.train()
    federation.requests[1, "plain"] = copy.deepcopy(federation.requests[1, "measure"])
    reply = federation.again(1, "plain", **{"secure-aggregation": False})
    assert "asked for an unmasked model" in reply.error.reason
    other = {"run-id": "other", "secure-aggregation": False}  # nodes serve one run after another
    assert not federation.again(1, "plain", **other).has_error()


# --- bits in refusals ----------------------------------------------------------------------


def test_an_update_out_of_range_is_refused_once_in_a_round_with_the_text_of_all_refusals() -> None:
    federation = Recorded()
    received = arrays_of(federation.model)
    federation.requests.clear()

    def large(stage: str, k: int, message: Message) -> None:
        federation._keep(stage, k, message)

    federation.disturb = large
    federation.app = exploding_app(federation)
    federation.train()
    assert federation.strategy.dropped == {2: REFUSED}
    for factor in (1e-9, 1.0):
        reply = federation.again(
            1, "collect_masked_vectors", **{"secure.square-factor": factor, "secure.buffers": []}
        )
        assert_refused(reply)
    assert received


def exploding_app(federation: SecureFederation) -> ClientApp:
    """Return an app in which client 2 has an update out of range."""
    original = federation._trainer

    def trainer_of(context: Context, config: Any) -> Any:
        trainer = original(context, config)
        if context.node_id == FIRST_NODE + 2:
            send = trainer.send
            trainer.send = lambda: {name: array + 100 for name, array in send().items()}
        return trainer

    return make_client_app(trainer_of, mods=[client.secure_mod])


@pytest.mark.parametrize("factor", [1e-10, 1.0, 1e10])
def test_a_squared_norm_is_never_refused_whatever_the_factor(factor: float) -> None:
    federation = SecureFederation(QFFL())

    def ask(stage: str, k: int, message: Message) -> None:
        if (stage, k) == ("collect_masked_vectors", 2):
            message.content.config_records["config"]["secure.square-factor"] = factor

    federation.disturb = ask
    federation.train()
    assert federation.strategy.dropped == {}


def test_a_diverging_client_sends_no_reason(caplog: pytest.LogCaptureFixture) -> None:
    federation = SecureFederation(Uniform())
    train = federation._trainer

    def diverging(context: Context, config: Any) -> Any:
        trainer = train(context, config)
        if context.node_id == FIRST_NODE + 2 and "secure.weight" in config:

            def fail(*_: Any) -> None:
                raise FloatingPointError("the loss is 17.25")

            trainer.fit = trainer.train = trainer.send = fail
        return trainer

    federation.app = make_client_app(diverging, mods=[client.secure_mod])
    federation.train()
    assert federation.strategy.dropped == {2: REFUSED}
    assert "the loss is 17.25" in caplog.text


# --- what one client cannot see ------------------------------------------------------------


def test_one_client_cannot_see_that_it_has_other_settings_than_the_others(tmp_path: Path) -> None:
    """``docs/privacy.md`` says so: the sum is then mostly the update of this client."""

    def hurry(server: CuriousServer, stage: str, node: int, asked: Any) -> None:
        server.changes = {"train.lr": 0.3} if node == server.victim else {"train.lr": 1e-5}

    server = attack(tmp_path, hurry)
    assert server.refused == []
    (path,) = tmp_path.rglob("model.safetensors")
    model = load_file(path)
    step = flat({name: model[name] for name in server.received}) - flat(server.received)
    error = np.linalg.norm(5 * step - server.true_update) / np.linalg.norm(server.true_update)
    assert error < 0.01
