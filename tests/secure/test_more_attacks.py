"""Attacks on whole rounds of secure aggregation, and honest rounds that must not be refused."""

from __future__ import annotations

import copy
import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import tiny_data_sets
import torch
from apps import app_with_handlers
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from curious_server import CuriousServer, flat
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, RECORD_KEY_STATE
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from resuming import config, outcome, resume, session
from rich.console import Console
from safetensors.numpy import load_file
from secure_federation import SecureFederation, raise_at, stage_of
from sgd_clients import SETTINGS, random_client_data, sgd_trainer
from test_attacks import Recorded, assert_refused
from torch import nn

from fairflower.arrays import arrays_of, record_of
from fairflower.client_app import app as client_app
from fairflower.client_app import guarded, trainer_of
from fairflower.clients import make_client_app
from fairflower.config import RunConfig
from fairflower.data import Augment
from fairflower.engines import inline
from fairflower.engines.inline import FIRST_NODE, InlineGrid, answer
from fairflower.errors import RoundFailed, RunInterrupted
from fairflower.flower_compat import set_task_identity
from fairflower.secure import client, protocol
from fairflower.secure.client import REFUSED, secure_mod
from fairflower.secure.protocol import masks_of
from fairflower.server.checkpoint import resumed_config
from fairflower.server.contents import read_facts
from fairflower.server.session import Session
from fairflower.strategies import Uniform
from fairflower.training.gradients import mean_gradient

ATTACKED: dict[str, Any] = {
    "secure-aggregation": True,
    "strategy.name": "uniform",
    "num-server-rounds": 1,
    "data.clients-per-domain": 2,
    "fraction-train": 0.625,  # 5 of 8 clients, with the largest weight 2^29
}

SECURE: dict[str, Any] = {
    "secure-aggregation": True,
    "strategy.name": "uniform",
    "fraction-train": 1.0,
}


# Sites mark their answers there, and the Flower runs of all tests have the same id.
pytestmark = pytest.mark.usefixtures("own_home")

# --- honest runs ---------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"train.lr-schedule": "cosine"},
        {"train.lr-warmup": 2},
        {
            "participation.policy": "power-of-choice",
            "fraction-train": 0.75,
            "evaluate.by": "both",
            "data.validation-fraction": 0.2,
        },
    ],
    ids=["schedule", "warm-up", "tests"],
)
def test_a_run_gives_the_model_of_the_plain_run_in_each_round(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    """Learning rates change by round; candidates and models are tested on several splits."""
    folders = [
        session(
            config(tmp_path / str(secure), **{**SECURE, "secure-aggregation": secure, **settings})
        ).run()
        for secure in (True, False)
    ]
    for line in map(json.loads, (folders[0] / "diagnostics.jsonl").read_text().splitlines()):
        assert not line.get("dropped")
    assert "did not answer" not in (folders[0] / "log.txt").read_text()
    masked, plain = (load_file(folder / "model.safetensors") for folder in folders)
    for name, array in plain.items():
        np.testing.assert_allclose(masked[name], array, atol=1e-5)


def test_a_run_with_tests_by_clients_is_resumed_and_extended(tmp_path: Path) -> None:
    settings = {
        **SECURE,
        "evaluate.by": "clients",
        "participation.policy": "power-of-choice",
        "fraction-train": 0.75,
    }
    whole = session(config(tmp_path / "whole", **{**settings, "num-server-rounds": 4})).run()
    folder = session(config(tmp_path / "first", **settings)).run()
    extended = resume(folder, **{"num-server-rounds": 4})
    assert outcome(extended) == outcome(whole)


def test_sites_resume_a_run_in_another_flower_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is killed in round 2, in which some sites have sent their masked vectors."""
    folders = tiny_data_sets.digits_folders(tmp_path, ("plain", "inverted", "rotated"), most=20)
    settings = {**SECURE, "data.name": "npz", "evaluate.by": "clients", "sites": 3}
    settings |= {"participation.policy": "power-of-choice"}
    count = 0

    def train(message: Message, context: Context) -> Message:
        nonlocal count
        count += stage_of(message) == "unmask"
        if count == 5:  # the second site in the second round
            stop.set()
        return client_app(message, context)

    def run_of_sites(flower_run: int, run_config: RunConfig, app: ClientApp = client_app) -> Path:
        monkeypatch.setattr(inline, "RUN_ID", flower_run)
        set_task_identity(flower_run)  # it names the run of messages
        grid = InlineGrid(app, 3)
        for context, (domain, folder) in zip(grid.contexts.values(), folders.items(), strict=True):
            context.node_config = {"domain": domain, "data-dir": str(folder)}
            context.node_config["secure-aggregation"] = True
            context.run_config = {"secure-aggregation": True}
        own = Session(grid, run_config, Console(quiet=True), stop=stop)
        try:
            return own.run()
        except RunInterrupted:
            assert own.folder is not None
            return own.folder.path

    stop = threading.Event()
    whole = run_of_sites(11, config(tmp_path / "whole", **settings))
    app = app_with_handlers(train=train)
    app.train("measure")(train)
    killed = run_of_sites(12, config(tmp_path / "killed", **settings), app)
    assert stop.is_set()
    assert read_facts(killed)["status"] == "stopped"
    stop = threading.Event()
    assert outcome(run_of_sites(13, resumed_config(killed, {}))) == outcome(whole)


# --- tests of many models ------------------------------------------------------------------


def losses_of(app: ClientApp, tmp_path: Path, moves: list[np.ndarray]) -> tuple[list[float], Any]:
    """Run a round with an app, then ask client 0 for the losses of moved models; return these.

    The model is also returned. The list ends at a refusal.
    """
    kept: dict[str, Any] = {}

    def keep(message: Message, context: Context) -> Message:
        if context.node_id == FIRST_NODE and stage_of(message) == "collect_masked_vectors":
            kept.update(content=copy.deepcopy(message.content), context=context)
        return app(message, context)

    server_app = app_with_handlers(train=keep, evaluate=app)
    server_app.train("measure")(keep)
    runs.run(runs.config(tmp_path, **{**SECURE, "num-server-rounds": 1}), server_app)
    content, losses = kept["content"], []
    model = arrays_of(content["arrays"])
    name = "head.weight"  # the loss is smooth in it
    for move in moves:
        arrays = {**model, name: model[name] + move.astype(np.float32)}
        settings = ConfigRecord({**content["config"], "split": "train"})
        asked = RecordDict({"arrays": record_of(arrays), "config": settings})
        reply = answer(app, Message(asked, FIRST_NODE, "evaluate"), kept["context"])
        if reply.has_error():
            assert reply.error.reason.endswith(REFUSED)
            break
        losses.append(float(reply.content["metrics"]["eval_loss"]))
    return losses, (kept, model, name)


def test_tests_of_many_models_give_a_gradient_only_without_the_limit(tmp_path: Path) -> None:
    """Finite differences of losses; a client tests once per round on each split."""
    unlimited = make_client_app(trainer_of, mods=[secure_mod], around=[guarded])
    _, (_, model, name) = losses_of(unlimited, tmp_path / "first", [])
    shape, moves = model[name].shape, []
    for place in range(8):
        move = np.zeros(shape)
        move.flat[place] = 1e-2
        moves += [move, -move]
    losses, (kept, model, name) = losses_of(unlimited, tmp_path / "unlimited", moves)
    steps = (np.array(losses[0::2]) - losses[1::2]) / 2e-2
    trainer = trainer_of(kept["context"], kept["content"]["config"])
    trainer.receive(model)
    gradient = mean_gradient(trainer.model, trainer.train_examples)[name].numpy().reshape(-1)[:8]
    assert np.abs(gradient).max() > 1e-3
    np.testing.assert_allclose(steps, gradient, rtol=0.01, atol=1e-4)
    limited, _ = losses_of(client_app, tmp_path / "limited", moves)
    assert len(limited) == 1


def test_a_client_tests_once_per_round_and_split_with_the_settings_of_the_run(
    tmp_path: Path,
) -> None:
    grid = InlineGrid(client_app, 1)
    (context,) = grid.contexts.values()
    flat_config = runs.config(tmp_path, **SECURE, **{"data.validation-fraction": 0.2}).to_flat()
    model = record_of(trainer_of(context, flat_config).send())

    def refused(split: str | None, server_round: Any, **changes: Any) -> bool:
        settings = {**flat_config, "run-id": "a", "server-round": server_round, **changes}
        content = {
            "arrays": model,
            "config": ConfigRecord(settings | ({"split": split} if split else {})),
        }
        reply = answer(client_app, Message(RecordDict(content), FIRST_NODE, "evaluate"), context)
        if reply.has_error():
            assert_refused(reply)
        return reply.has_error()

    asked = [
        ("test", 1),
        ("train", 1),
        ("validation", 1),
        ("other", 1),
        (None, 1),
        ("test", 1),
        ("test", 3),
    ]
    assert [refused(*pair) for pair in asked] == [False, False, False, True, True, True, True]
    assert refused("test", 2, **{"data.test-examples": 1})
    assert refused("test", 2.0)
    assert refused("test", 2, **{"own-model": "send"})
    assert not refused("test", 2)
    plain = {"secure-aggregation": False, "run-id": "plain"}
    assert not any(refused("test", 1, **plain) for _ in range(3))


# --- other runs ----------------------------------------------------------------------------


def at_sites(federation: SecureFederation, **run_config: Any) -> None:
    """Make all clients sites of their own data, whose Flower run has this run config."""
    for context in federation.grid.contexts.values():
        context.node_config["domain"] = "hospital"
        context.run_config = run_config


def test_a_site_answers_one_run_in_a_flower_run() -> None:
    federation = Recorded()
    at_sites(federation)
    federation.train()
    other = {"run-id": "other"}
    assert_refused(federation.again(1, "measure", **other))
    assert_refused(federation.again(1, "measure", **other, **{"server-round": 2}))
    assert not federation.again(1, "measure", **{"server-round": 2}).has_error()
    federation.requests[1, "plain"] = copy.deepcopy(federation.requests[1, "measure"])
    reply = federation.again(1, "plain", **other, **{"secure-aggregation": False})
    assert "asked for an unmasked model" in reply.error.reason


def test_a_site_believes_the_config_of_the_flower_run_and_not_only_messages() -> None:
    federation = SecureFederation(Uniform(), secure=False)
    at_sites(federation, **{"secure-aggregation": True})
    with pytest.raises(Exception, match="0 of 5 clients sent a usable reply"):
        federation.train()
    assert not federation.trained
    at_sites(federation, **{"secure-aggregation": False})
    federation.train()


@pytest.mark.parametrize("stage", ["measure", "setup"])
def test_two_processes_of_a_site_do_not_both_measure_or_train_in_a_round(stage: str) -> None:
    """The second begins with the state from before the first's answer, also with other keys."""
    federation = Recorded()
    at_sites(federation)
    twin = federation.train_with_twin(stage)
    if stage == "measure":
        assert_refused(federation.again(1, "measure", twin))
        return
    trained = len(federation.trained)
    federation.trained.clear()
    federation.round -= 1  # the masked exchange again; the twin's state has only the measuring
    at, federation.context = FIRST_NODE + 2, twin
    for node, context in federation.grid.contexts.items():
        if node != at:
            kept: Any = context.state["fairflower.secure"]
            kept.update({key: 0 for key in kept if key.endswith(("measure", "train"))})
    federation.grid.contexts[at] = twin
    kept = twin.state["fairflower.secure"]
    kept.update({key: 0 for key in kept if key.endswith("measure")})
    with pytest.raises(Exception, match="0 of 5 clients sent a usable reply"):
        federation.train()
    assert (trained, federation.trained) == (5, {})


# --- keys and names ------------------------------------------------------------------------


def negative(key: bytes) -> bytes:
    """Return the key at the negative point, which gives the same shared secrets."""
    public: Any = load_pem_public_key(key)
    numbers, curve = public.public_numbers(), ec.SECP384R1()
    p = 2**384 - 2**128 - 2**96 + 2**32 - 1
    return public_key_to_bytes(
        ec.EllipticCurvePublicNumbers(numbers.x, p - numbers.y, curve).public_key()
    )


def test_a_key_and_its_negative_are_refused() -> None:
    """The masks with a lower and a higher neighbor would be the same and cancel."""
    federation = Recorded()

    def negate(stage: str, k: int, message: Message) -> None:
        if (stage, k) == ("share_keys", 2):
            asked: Any = message.content.config_records[RECORD_KEY_CONFIGS]
            asked["1003"] = [negative(asked["1001"][0]), asked["1003"][1]]

    federation.disturb = negate
    federation.train()
    assert federation.strategy.dropped == {2: REFUSED}


def test_a_client_under_another_name_is_still_not_absent() -> None:
    federation = Recorded()
    replies: list[Message] = []

    def rename(stage: str, k: int, message: Message) -> None:
        if (stage, k) == ("unmask", 2):
            message.metadata.__dict__["_dst_node_id"] = FIRST_NODE
            asked: Any = message.content.config_records[RECORD_KEY_CONFIGS]
            present = [node for node in asked["active_nids"] if node != FIRST_NODE + 2]
            asked["active_nids"], asked["dead_nids"] = present, [FIRST_NODE + 2]

    federation.disturb = rename
    federation.after = lambda stage, k, reply: (
        replies.append(reply) if (stage, k) == ("unmask", 2) else None
    )
    federation.train()
    assert not replies


def same_keys(answer_record: Any) -> None:
    answer_record["pk2"] = answer_record["pk1"]


def other_curve(answer_record: Any) -> None:
    answer_record["pk1"] = public_key_to_bytes(ec.generate_private_key(ec.SECP256R1()).public_key())


@pytest.mark.parametrize("change", [same_keys, other_curve])
def test_a_client_with_unusable_keys_does_not_stop_the_others(
    change: Callable[[Any], None],
) -> None:
    federation = SecureFederation(Uniform())
    federation.after = lambda stage, k, reply: (
        change(reply.content.config_records[RECORD_KEY_CONFIGS])
        if (stage, k) == ("setup", 2)
        else None
    )
    federation.train()
    assert federation.strategy.client_ids == (0, 1, 3, 4)
    assert list(federation.strategy.dropped) == [2]


# --- what nothing holds against ------------------------------------------------------------


def test_two_sums_give_the_update_of_the_client_that_only_one_has() -> None:
    """``docs/privacy.md`` says so, for two runs or a round that is repeated after a crash."""
    with_all, without = SecureFederation(Uniform()), SecureFederation(Uniform())
    without.disturb = raise_at("measure", 2)
    received = flat(arrays_of(with_all.model))
    sums = [flat(f.train()) - received for f in (with_all, without)]
    update = flat(with_all.trained[2]) - received
    np.testing.assert_allclose(5 * sums[0] - 4 * sums[1], update, atol=1e-5)


@pytest.mark.few(1)
@pytest.mark.parametrize("mended", [True, False])
def test_a_client_that_the_server_calls_lost_is_read_only_with_masks_of_32_bits(
    mended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's generator takes 32 bits of a seed.

    The server has the client's masked vector, and tells the others that the client has failed. They
    help to remove the masks that they share with it. A single mask is left, and the known weight
    tells its seed. The test tries 2^14 seeds around it; all 2^32 take some minutes.
    """
    server = CuriousServer(client_app)
    if not mended:
        server.generator = pseudo_rand_gen
        for module in (client, protocol):
            monkeypatch.setattr(module, "aes_masks", nullcontext)
    states: list[Any] = []

    def lie(stage: str, node: int, asked: Any) -> None:
        if stage == "unmask":
            asked["active_nids"], asked["dead_nids"] = server.nodes[1:], [server.victim]

    def train(message: Message, context: Context) -> Message:
        trains = stage_of(message) == "collect_masked_vectors"
        reply = server(message, context)
        if trains and context.node_id == server.victim:
            states.append(context.state.config_records[RECORD_KEY_STATE])
        return reply

    server.alter = lie
    app = app_with_handlers(train=train)
    app.train("measure")(train)
    with suppress(RoundFailed):
        runs.run(runs.config(tmp_path, **ATTACKED), app, nodes=8)
    left = server.without_pairwise_masks()
    assert left is not None
    weight, vector = left
    seed = states[-1]["rd_seed"]
    near = int(np.bitwise_xor.reduce(np.frombuffer(seed, "<u4")))
    found = [
        tried
        for tried in range(max(0, near - 2**13), min(2**32, near + 2**13))
        if np.random.RandomState(tried).randint(0, 2**32 - 1) == (weight[0] - 2**29) % 2**32
    ]
    if mended:
        assert found == []
        masks = masks_of(seed, 2**32, [(1,), vector.shape])
    else:
        assert found == [near]
        masks = pseudo_rand_gen(seed, 2**32, [(1,), vector.shape])
    update = server.update(2**29, (vector - masks[1]) % 2**32)
    np.testing.assert_allclose(update, server.true_update, atol=1e-6)


def test_masks_differ_by_seed_and_use_the_whole_range_and_the_whole_seed() -> None:
    seed = bytes(range(44))
    (one, many) = masks_of(seed, 2**32, [(), (2**16,)])
    assert (one.shape, one.dtype, many.dtype) == ((), np.int64, np.int64)
    assert 0 <= many.min() < 2**20
    assert 2**32 - 2**20 < many.max() < 2**32
    assert abs(many.mean() / 2**31 - 1) < 0.02
    # Flower's generator draws the same numbers for a seed with two words exchanged.
    other = masks_of(seed[4:8] + seed[:4] + seed[8:], 2**32, [(2**16,)])[0]
    assert abs(np.corrcoef(many, other)[0, 1]) < 0.02
    key = hashlib.sha256(seed).digest()
    block = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(bytes(16))
    np.testing.assert_array_equal([one, *many[:3]], np.frombuffer(block, "<u4"))


BINS = 400


class TrappedFederation(SecureFederation):
    """Clients that take one step on all their images, which are not augmented."""

    def _trainer(self, context: Context, config: Any) -> Any:
        k = context.node_id - FIRST_NODE
        data = replace(random_client_data(train=10 + 4 * k, seed=k), augment=Augment(0, False))
        settings = replace(
            SETTINGS, local_epochs=1, batch_size=64, lr=0.5, momentum=0.0, weight_decay=0.0
        )
        return sgd_trainer(self.net(), data=data, client_id=k, settings=settings)


def trap() -> nn.Module:
    """Return a network whose hidden units differ only in the brightness at which they react."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(192, BINS), nn.ReLU(), nn.Linear(BINS, 4))
    with torch.no_grad():
        network[1].weight.fill_(1 / 192)
        network[1].bias.copy_(torch.linspace(0.12, -0.12, BINS))
        network[3].weight.copy_(torch.tensor([0.03, -0.01, 0.02, -0.04])[:, None].expand(4, BINS))
        network[3].bias.zero_()
    return network


def test_one_model_for_all_clients_shows_single_images_in_the_sum() -> None:
    """``docs/privacy.md`` says so: masks do not hide what is in the sum."""
    federation = TrappedFederation(Uniform(), net=trap)
    received = arrays_of(federation.model)
    merged = federation.train()
    weight, bias = (merged[n].astype(float) - received[n] for n in ("1.weight", "1.bias"))
    rows, sizes = np.diff(weight, axis=0), np.diff(bias)
    found = {j: rows[j] / sizes[j] for j in range(BINS - 1) if abs(sizes[j]) > 1e-6}
    images = {
        (k, i): (image / 255 - 0.5) / 0.5
        for k in range(5)
        for i, image in enumerate(
            random_client_data(train=10 + 4 * k, seed=k).train.x.reshape(-1, 192)
        )
    }
    recovered = {
        owner
        for guess in found.values()
        for owner, image in images.items()
        if np.abs(guess - image).max() < 0.02
    }
    assert len(images) == 90
    assert len(recovered) > 30
    assert {k for k, _ in recovered} == {0, 1, 2, 3, 4}
