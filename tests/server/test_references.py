"""The references `alone` and `pooled`: against loops written out, and what leaves a client."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import resuming
import tiny_data_sets
import torch
from apps import app_with_handlers
from resuming import outcome, resume, stopped
from rich.console import Console
from run_folders import tables_of
from runs import config, history, interrupt_first, run
from safetensors.numpy import load_file
from torch.nn import functional as F

from fairflower.api.final_model import kept_arrays
from fairflower.client_app import app as client_app
from fairflower.config import ClientConfig, DataConfig, ModelConfig
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, RunFolderError
from fairflower.paths import client_states
from fairflower.report import read_run
from fairflower.seeds import derive_seed
from fairflower.server import session
from fairflower.server.checkpoint import resumed_config
from fairflower.server.own_models import MOST_CLIENTS
from fairflower.server.session import Session
from fairflower.training.build import build_model

HEART = {
    "data.name": "heart-disease",
    "data.clients-per-domain": 1,
    "data.examples-per-client": 0,
    "data.test-examples": 0,
    "train.local-epochs": 2,
    "train.lr-schedule": "linear",
}
ROUNDS = 2


def heart(**changes):
    return prepare(DataConfig(name="heart-disease", **{"clients_per_domain": 1, **changes}))


def first_model(federation):
    return build_model(ModelConfig("mlp"), ClientConfig(), federation, 0)


def scaled(federation, x):
    return (torch.tensor(x) - torch.tensor(federation.mean)) / torch.tensor(federation.std)


def trained(model, federation, split, client, rounds):
    """A plain PyTorch loop with torch's SGD, a new one in every round."""
    x, y = scaled(federation, split.x), torch.tensor(split.y)
    model = copy.deepcopy(model).train()
    for r in rounds:
        draws = torch.Generator().manual_seed(derive_seed(0, client, r, "batches"))
        optimizer = torch.optim.SGD(
            model.parameters(),
            0.05 * (1 - (r - 1) / ROUNDS),
            momentum=0.9,
            weight_decay=1e-5,
            fused=True,
        )
        for _ in range(2):
            order = torch.randperm(len(y), generator=draws)
            for rows in order.split(64):
                assert len(rows) > 1  # else it would belong to the batch before
                optimizer.zero_grad()
                F.cross_entropy(model(x[rows]), y[rows]).backward()
                optimizer.step()
    return model


def same_bits(arrays, model):
    expected = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert arrays.keys() == expected.keys()
    return all(arrays[name].tobytes() == expected[name].tobytes() for name in expected)


def kept_models(folder):
    """The model that each client keeps, of its last round."""
    states = client_states() / read_run(folder).info["run_id"]
    newest = {int(place.name): max(place.iterdir()) for place in states.iterdir()}
    return {
        client: {name.partition("/")[2]: array for name, array in load_file(path).items()}
        for client, path in newest.items()
    }


def test_alone_trains_each_client_as_a_plain_loop_to_the_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(session.shutil, "rmtree", lambda *_, **__: None)  # keep clients' states
    settings = HEART | {"strategy.name": "alone", "checkpoint.keep": 9}
    folder = run(config(tmp_path, **settings))
    federation, kept = heart(), kept_models(folder)
    start = first_model(federation)
    rows = [r for r in history(folder) if r["level"] == "own" and r["round"] == str(ROUNDS)]
    found = {r["name"]: float(r["value"]) for r in rows if r["metric"] == "accuracy"}
    assert len(kept) == 4
    for k, client in enumerate(federation.clients):
        model = trained(start, federation, federation.train(k), k, [1, 2])
        assert same_bits(kept[k], model)
        for domain in federation.domains:
            x, y = federation.test(domain)
            with torch.inference_mode():
                hits = model.eval()(scaled(federation, x)).argmax(1).numpy() == y
            assert found[f"{k}/{domain}"] == pytest.approx(hits.mean(), abs=1e-12)
        own = read_run(folder).values[-1][federation.domains.index(client.domain)]
        assert own == found[f"{k}/{client.domain}"]
    assert same_bits(load_file(folder / "model.safetensors"), start)  # nothing was merged
    for which in (None, ROUNDS, 1):  # round 1 has a checkpoint with the initial model
        with pytest.raises(RunFolderError, match="has no common model: each client kept its own"):
            kept_arrays(read_run(folder), which)


def test_pooled_trains_one_model_as_a_plain_loop_on_all_examples(tmp_path):
    changes = {"fraction-train": 0.5, "bound.max-client-weight": 0.6, "min-clients": 2}
    changes |= {"participation.availability": "markov:leave=0.5:back=0.5"}
    folder = run(config(tmp_path, **HEART, **changes, **{"strategy.name": "pooled"}))
    federation = heart()
    splits = [federation.train(k) for k in range(4)]
    whole = federation.train_of_all()
    for axis in (0, 1):
        joined = np.concatenate([split[axis] for split in splits])
        np.testing.assert_array_equal(whole[axis], joined)
    model = trained(first_model(federation), federation, whole, 0, [1, 2])
    merged = load_file(folder / "model.safetensors")
    for name, tensor in model.state_dict().items():  # merging adds an update, which rounds
        np.testing.assert_allclose(merged[name], tensor.numpy(), rtol=0, atol=1e-7)


def test_a_server_optimizer_is_no_part_of_pooled_training(tmp_path):
    own = HEART | {"strategy.name": "pooled", "num-server-rounds": 1}
    plain, stepped = (
        run(config(tmp_path, **own, **more))
        for more in ({}, {"server.optimizer": "adam", "server.lr": 0.5})
    )
    plain, stepped = ((f / "model.safetensors").read_bytes() for f in (plain, stepped))
    assert plain == stepped


def test_with_a_single_client_both_references_are_a_federation_of_this_client(tmp_path):
    only = HEART | {"data.domains": "hungary"}
    folders = {
        name: run(config(tmp_path, **only, **{"strategy.name": name}), nodes=1)
        for name in ("uniform", "alone", "pooled")
    }
    uniform, pooled = (
        (folders[name] / "model.safetensors").read_bytes() for name in ("uniform", "pooled")
    )
    assert uniform == pooled
    values = [read_run(folder).values.tolist() for folder in folders.values()]
    assert values[0] == values[1] == values[2]


def test_alone_trains_in_the_rounds_in_which_others_would_ask_a_client(tmp_path):
    some = {"fraction-train": 0.5, "num-server-rounds": 3, "model.name": "mlp"}
    ran = {
        name: read_run(run(config(tmp_path, **some, **{"strategy.name": name})))
        for name in ("uniform", "alone", "pooled")
    }
    asked = {name: [r["client_ids"] for r in of.diagnostics] for name, of in ran.items()}
    assert asked["alone"] == asked["uniform"]
    assert asked["pooled"] == [[0]] * 3


@pytest.mark.parametrize("name", ["alone", "pooled"])
def test_a_reference_that_was_stopped_ends_in_the_same_bits(tmp_path, name):
    own = {"strategy.name": name, "evaluate.by": "both"}
    whole = resuming.session(resuming.config(tmp_path / "whole", **own)).run()
    folder = stopped(resuming.config(tmp_path / "stopped", **own), server_round=3)
    assert outcome(resume(folder)) == outcome(whole)


def test_no_trained_model_leaves_a_client_that_trains_alone(tmp_path):
    sent = []

    def train(message, context):
        reply = client_app(message, context)
        sent.append((message.content["arrays"], reply.content))
        return reply

    run(config(tmp_path, **{"strategy.name": "alone"}), app_with_handlers(train=train))
    assert len(sent) == 8
    for received, content in sent:
        assert set(content) == {"arrays", "metrics"}
        got = {name: array.numpy() for name, array in content["arrays"].items()}
        for name, array in received.items():
            np.testing.assert_array_equal(got[name], array.numpy())


def of_numbers(folder):
    """Settings of a regression with two domains, whose primary score is lower for better models."""
    y = np.linspace(-1, 1, 40)
    x = np.broadcast_to(np.arange(40, dtype=np.uint8)[:, None, None] * 5, (40, 8, 8))
    for shift, domain in enumerate("ab"):
        split = {"x_train": x, "y_train": y + shift, "x_test": x, "y_test": y + shift}
        np.savez(folder / f"{domain}.npz", **split)
    own = {"data.name": "npz", "data.dir": str(folder), "data.task": "regression"}
    return own | {"data.examples-per-client": 0, "data.test-examples": 0, "model.name": "mlp"}


@pytest.mark.parametrize("by", ["clients", "both"])
def test_clients_test_their_own_models(tmp_path, by):
    """A domain has the score of all its examples, or the mean over models that each had all."""
    changes = of_numbers(tmp_path) | {"data.clients-per-domain": 2, "evaluate.by": by}
    folder = run(config(tmp_path, **changes, **{"strategy.name": "alone"}), nodes=4)
    read = read_run(folder)
    assert read.primary.name == "rmse"
    np.testing.assert_array_equal(read.personal_by_client.values, read.by_client.values)
    scores = (read.by_client if by == "clients" else read.own_models).values
    power = 2 if by == "clients" else 1  # two clients a domain with as many tests
    means = (scores**power).reshape(len(scores), 2, 2).mean(2) ** (1 / power)
    np.testing.assert_allclose(read.values[-len(means) :], means, rtol=1e-6)


def test_who_predicts_the_same_alone_and_together_gains_nothing(tmp_path):
    """Clients without training have the initial model, whose scores do not depend on who asks."""
    changes = of_numbers(tmp_path) | {"data.clients-per-domain": 2, "evaluate.by": "clients"}
    changes |= {"train.lr": 0.0, "num-server-rounds": 1}
    alone, uniform = (
        read_run(run(config(tmp_path, **changes, **{"strategy.name": name}), nodes=4))
        for name in ("alone", "uniform")
    )
    np.testing.assert_allclose(alone.final(), uniform.final(), rtol=1e-9)


def test_the_server_tests_at_most_some_clients_of_a_domain(tmp_path):
    many = {"data.domains": "plain", "data.clients-per-domain": MOST_CLIENTS + 2}
    changes = {"strategy.name": "alone", "num-server-rounds": 1, "data.examples-per-client": 2}
    folder = run(config(tmp_path, **many, **changes), nodes=MOST_CLIENTS + 2)
    read = read_run(folder)
    tested = np.isfinite(read.own_models.values[-1])
    assert tested.tolist() == [True] * MOST_CLIENTS + [False] * 2
    assert read.values[-1][0] == pytest.approx(read.own_models.values[-1][tested].mean())


def test_a_held_out_domain_has_the_mean_over_all_models(tmp_path):
    folder = run(
        config(tmp_path, **HEART, **{"strategy.name": "alone", "data.held-out": "hungary"}), nodes=3
    )
    rows = [r for r in history(folder) if r["level"] == "held-out" and r["metric"] == "accuracy"]
    federation = heart(held_out="hungary")
    x, y = federation.test("hungary")
    start, hits = first_model(federation), []
    for k in range(3):
        model = trained(start, federation, federation.train(k), k, [1, 2])
        with torch.inference_mode():
            hits.append((model.eval()(scaled(federation, x)).argmax(1).numpy() == y).mean())
    assert float(rows[-1]["value"]) == pytest.approx(np.mean(hits))


# --- sites, and what is refused -------------------------------------------------------------


AT_SITES = {"data.examples-per-client": 0, "data.test-examples": 0, "data.name": "npz"}
AT_SITES |= {"evaluate.by": "clients"}


def session_of(nodes, run_config, app=client_app, **options):
    """A session of sites with these node configs."""
    grid = InlineGrid(app, len(nodes))
    for context, node in zip(grid.contexts.values(), nodes, strict=True):
        context.node_config = node
    return Session(grid, run_config, Console(quiet=True), **options)


def at_sites(tmp_path, name):
    """A run of two sites, each of which has its own folder."""
    folders = tiny_data_sets.digits_folders(tmp_path, ("plain", "printed"), most=30)
    nodes = [{"domain": domain, "data-dir": str(folder)} for domain, folder in folders.items()]
    return read_run(
        session_of(nodes, config(tmp_path, **AT_SITES, **{"strategy.name": name})).run()
    )


def test_sites_train_alone_and_send_only_scores_of_their_models(tmp_path):
    read = at_sites(tmp_path, "alone")
    assert read.status == "completed"
    assert np.isfinite(read.values[-1]).all()
    assert not read.own_models.rounds.size
    assert not read.cross_tests.size
    assert "no other site did: no table of other domains" in tables_of(read.path).text


BOTH = {"share-own-model": True, "test-others-models": True}
SHARES, TESTS = ({key: True} for key in BOTH)


ALONE = AT_SITES | {"strategy.name": "alone"}


def agreeing(tmp_path, *consents):
    """Node configs of four sites, ordered as clients are; two of them have one domain."""
    names = ("inverted", "plain", "rotated", "printed")
    folders = tiny_data_sets.digits_folders(tmp_path, names, most=30)
    domains = dict(zip(names, ("inverted", "plain", "plain", "printed"), strict=True))
    return [
        {"domain": domains[name], "data-dir": str(folder)} | consent
        for (name, folder), consent in zip(folders.items(), consents, strict=True)
    ]


def hits(arrays, folder):
    """Whether a model is right, for each of a site's test images, by plain PyTorch."""
    federation = prepare(DataConfig(name="npz", dir=folder, clients_per_domain=1))
    model = build_model(ModelConfig("cnn"), ClientConfig(), federation, 0)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    with np.load(f"{folder}/digits.npz") as file:
        x, y = torch.tensor(file["x_test"]).permute(0, 3, 1, 2) / 255, file["y_test"]
    mean, std = (torch.tensor(of)[:, None, None] for of in (federation.mean, federation.std))
    with torch.inference_mode():
        return model.eval()((x - mean) / std).argmax(1).numpy() == y


def test_models_of_sites_that_agree_are_tested_at_all_others_that_agree(tmp_path, monkeypatch):
    monkeypatch.setattr(session.shutil, "rmtree", lambda *_, **__: None)  # keep clients' states
    sent = []

    def evaluate(message, context):
        reply = client_app(message, context)
        sent.append((context.node_config, message.content["config"], reply.content))
        return reply

    nodes = agreeing(tmp_path, BOTH, BOTH, SHARES, TESTS)
    app = app_with_handlers(evaluate=evaluate)
    folder = session_of(nodes, config(tmp_path, **ALONE), app).run()
    kept, read = kept_models(folder), read_run(folder)
    assert read.domains == ("inverted", "plain", "printed")
    expected = np.full((4, 3), np.nan)
    for k, d in np.ndindex(3, 3):
        there = [n for n in nodes if n["domain"] == read.domains[d]]
        tests = [n for n in there if n is nodes[k] or n is not nodes[2]]
        expected[k, d] = np.concatenate([hits(kept[k], n["data-dir"]) for n in tests]).mean()
    np.testing.assert_allclose(read.cross_tests, expected, rtol=1e-6)
    for node, told, content in sent:
        asked = told.get("own-model")
        assert asked != "test" or node.get("test-others-models")
        shared = asked == "send" and node.get("share-own-model", False)
        assert [*content.array_records] == ["own-model"] * shared
    tables, log = tables_of(folder), (folder / "log.txt").read_text()
    assert "Without share-own-model: client 3 (printed)." in log
    assert "Without test-others-models: client 2 (plain)." in log
    assert "No row: printed (no model was shared)." in tables.text
    table = tables.table("Trained at, tested on: alone, last round (2)")
    assert list(table) == ["inverted", "plain"]
    for row, scores in zip(table.values(), [expected[0], expected[1:3].mean(0)], strict=True):
        assert [*row.values()][1:] == [f"{100 * value:.2f}" for value in scores]


@pytest.mark.slow
def test_sites_that_agree_are_asked_after_the_last_round_of_a_resumed_run(tmp_path):
    nodes = agreeing(tmp_path, BOTH, {}, {}, BOTH)
    whole = session_of(nodes, config(tmp_path, **ALONE)).run()
    halved = session_of(nodes, config(tmp_path, **ALONE), on_round=interrupt_first)
    with pytest.raises(KeyboardInterrupt):
        halved.run()
    folder = session_of(nodes, resumed_config(halved.folder.path, {})).run()
    found = [[r for r in history(f) if r["level"] == "shared"] for f in (whole, folder)]
    assert found[0] == found[1]
    assert {r["name"] for r in found[0]} == {
        *("0/inverted", "0/printed", "3/inverted", "3/printed")
    }


def test_sites_keep_their_data_so_pooled_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the sites of this run keep theirs\. Choose 'alone'"):
        at_sites(tmp_path, "pooled")


@pytest.mark.parametrize("name", ["alone", "pooled"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"client.name": "scaffold"}, "'scaffold' exchanges 'control'.*Set client.name = 'sgd'"),
        ({"client.name": "fedbn"}, "'fedbn' keeps normalization.*Set client.name = 'sgd'"),
        ({"privacy.noise-multiplier": 1.0}, "a reference sends no updates that masks or noise"),
        ({"secure-aggregation": True}, "a reference sends no updates that masks or noise"),
    ],
)
def test_a_reference_that_would_have_to_share_something_is_refused(
    tmp_path, name, changes, message
):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, **{"strategy.name": name}, **changes)


def test_the_server_cannot_test_models_on_other_machines(tmp_path):
    elsewhere = {"strategy.name": "alone", "ray-address": "10.0.0.1:6379", "engine": "ray"}
    with pytest.raises(ConfigError, match=r"evaluate\.by = 'server': .*on other machines"):
        run(config(tmp_path, **elsewhere))
