"""Arrays that stay with the clients, against a loop with a whole model for each client."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import resuming
from runs import config, history, run
from safetensors.numpy import load_file
from torch import nn
from toy_trainers import SETTINGS, data, models_equal, run_toy_rounds, tiny_model

from fairflower.arrays import arrays_of
from fairflower.clients import SGD
from fairflower.clients.ditto import Ditto
from fairflower.clients.fedbn import FedBN
from fairflower.clients.fedper import FedPer
from fairflower.clients.fedrep import FedRep
from fairflower.clients.lgfedavg import LGFedAvg
from fairflower.clients.silobn import SiloBN
from fairflower.errors import ConfigError, StrategyError
from fairflower.models import (
    build,
    copy_arrays,
    head_and_body,
    keep_local,
    norm_arrays,
    set_arrays,
)
from fairflower.participation import PowerOfChoice
from fairflower.report import analyze, read_run, read_summary, write_summary
from fairflower.strategies import FedAvg, FedEquilibria, Uniform
from fairflower.testing.trainers import TrainerCase
from fairflower.training.app import user_test_metrics
from fairflower.training.batches import batch_slices

STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
HEAD = {"head.weight", "head.bias"}
NORM = STATISTICS | {"norm.weight", "norm.bias"}
BODY = NORM | {"layer.weight", "layer.bias"}
LOCAL = {FedBN: NORM, SiloBN: STATISTICS, FedPer: HEAD, FedRep: HEAD, LGFedAvg: BODY}
every = pytest.mark.parametrize("kind", LOCAL)


def train(network, number: int, k: int, only=lambda name: True, epochs: int = 1):
    """Train only the chosen parameters of a client's network by SGD; return the mean loss."""
    for name, p in network.named_parameters():
        p.requires_grad_(only(name))
    settings = replace(SETTINGS, local_epochs=epochs)
    return SGD(network, data(k), settings, client_id=k, seed=0).train(number)["train_loss"]


def loop(kind, clients: int, rounds: int):
    """Train a whole model per client; after each round, average all except the local arrays."""
    own = [copy_arrays(tiny_model()) for _ in range(clients)]
    for number in range(1, rounds + 1):
        for k in range(clients):
            network = tiny_model()
            set_arrays(network, own[k], "a client")
            if kind is FedRep:
                train(network, number, k, lambda name: name in HEAD, 10)
                train(network, number, k, lambda name: name not in HEAD)
            else:
                train(network, number, k)
            own[k] = copy_arrays(network)
        for name in own[0].keys() - LOCAL[kind]:
            mean = sum(arrays[name].astype(np.float64) for arrays in own) / clients
            for arrays in own:
                arrays[name] = mean.astype(arrays[name].dtype)
    return own


@every
def test_training_matches_a_loop_that_never_averages_local_arrays(kind):
    make = TrainerCase(kind).trainer
    model, grid = run_toy_rounds(Uniform(), make, 3, 3)
    expected = loop(kind, 3, 3)
    assert model.keys() == expected[0].keys() - LOCAL[kind]
    for name, array in model.items():
        np.testing.assert_allclose(array, expected[0][name], atol=2e-6)
    nodes = sorted(grid.contexts, key=lambda n: grid.contexts[n].node_config["partition-id"])
    for node, own in zip(nodes, expected, strict=True):
        kept = arrays_of(grid.contexts[node].state.array_records["fairflower/local"])
        assert kept.keys() == LOCAL[kind]
        for name, array in kept.items():
            np.testing.assert_allclose(array, own[name], atol=2e-6)


def test_fedrep_reports_the_loss_of_both_phases_and_the_steps_of_the_body():
    network = tiny_model()
    head = train(network, 1, 0, lambda name: name in HEAD, 3)
    body = train(network, 1, 0, lambda name: name not in HEAD)
    client = FedRep(tiny_model(), data(0), SETTINGS, client_id=0, seed=0, head_epochs=3)
    assert client.train(1)["train_loss"] == pytest.approx((3 * head + body) / 4)
    slices = batch_slices(len(data(0).train.y), SETTINGS.batch_size, single=False)
    assert client.steps == len(slices)


@every
def test_measurements_exclude_local_arrays(kind):
    strategy = FedEquilibria()
    model, _ = run_toy_rounds(strategy, TrainerCase(kind).trainer, 3, 2)
    assert not model.keys() & LOCAL[kind]
    assert not strategy.dropped


def test_norm_layers_are_found_by_type_also_in_shortcuts():
    network = build("resnet10", 10, (3, 16, 16), 0)
    norms = {name for name, m in network.named_modules() if isinstance(m, nn.BatchNorm2d)}
    assert any("downsample" in name for name in norms)
    assert {name.rpartition(".")[0] for name in norm_arrays(network, affine=True)} == norms
    keep_local(network, norm_arrays(network, affine=False))
    kept = {"running_mean", "running_var", "num_batches_tracked"}
    assert not any(name.rpartition(".")[2] in kept for name in copy_arrays(network))


def test_fedbn_without_normalization_layers_equals_sgd():
    def plain():
        network = tiny_model()
        network.norm = nn.Identity()
        return network

    models = [
        run_toy_rounds(Uniform(), TrainerCase(kind, plain).trainer, 3, 2)[0]
        for kind in (FedBN, SGD)
    ]
    assert models_equal(*models)


def test_head_and_body_cover_all_arrays():
    network = build("cnn", 10, (3, 16, 16), 0)
    head, body = head_and_body(network)
    assert head == ["head.weight", "head.bias"]
    assert {*head, *body} == copy_arrays(network).keys()


@pytest.mark.parametrize("kind", [FedPer, FedRep, LGFedAvg])
@pytest.mark.parametrize("part", ["head", "body"])
def test_a_network_without_head_or_body_is_refused(kind, part):
    def lacking():
        network = nn.Module()
        setattr(network, "last" if part == "head" else "head", nn.Linear(2, 2))
        return network

    with pytest.raises(
        ConfigError, match=f"Module has no {part}: its arrays are (last|head).weight"
    ):
        kind(lacking(), data(), SETTINGS, client_id=0, seed=0)


def test_local_heads_start_from_the_runs_seed(tmp_path):
    """With lr 0, personal models equal the server's model."""
    settings = {"client.name": "fedper", "evaluate.by": "both", "train.lr": 0.0, "seed": 3}
    read = read_run(resuming.session(resuming.config(tmp_path, **settings)).run())
    assert len(set(read.values.ravel())) > 1
    np.testing.assert_array_equal(read.personal.values[-1], read.values[-1])


def test_a_report_shows_the_spread_of_personal_models_in_a_domain(tmp_path):
    settings = {"client.name": "fedbn", "evaluate.by": "both", "data.clients-per-domain": 2}
    folder = run(config(tmp_path, **settings), nodes=8)
    read = read_run(folder)
    (chapter,) = analyze([read]).chapters
    (table,) = [t for t in chapter.tables if t.title.startswith("Spread of personal models")]
    own = read.personal_by_client.final()
    expected = [
        100 * np.std([own[k] for k, c in enumerate(read.clients) if c.domain == d], ddof=1)
        for d in read.domains
    ]
    ((row,),) = [group.rows for group in table.groups]
    assert [cell.text for cell in row.cells] == [f"{value:.2f}" for value in expected]
    write_summary([read], tmp_path / "x.csv")
    (again,) = read_summary(tmp_path / "x.csv")
    np.testing.assert_allclose(again.personal_by_client.final(), own, atol=1e-6)


def test_testing_reports_the_personal_and_the_global_model():
    client = TrainerCase(FedBN).trainer()
    client.train(1)
    metrics = client.test()
    assert sorted(metrics) == ["accuracy", "eval_loss", "personal_accuracy"]
    assert metrics["personal_accuracy"] == client.evaluate(client.test_examples)["accuracy"]
    own, fresh = {**client.state["local"]}, TrainerCase(FedBN).trainer()
    fresh.receive(client.send())
    assert fresh.evaluate(fresh.test_examples)["loss"] == metrics["eval_loss"]
    assert all(np.array_equal(own[name], client.state["local"][name]) for name in own)


def mean_logit(logits, labels):
    return float(logits.mean())


@pytest.mark.parametrize("kind", [FedBN, SiloBN, Ditto])
def test_user_metrics_use_the_global_model(kind):
    """They equal those of a client that never trained, and not the personal model's."""
    client, fresh = TrainerCase(kind).trainer(), TrainerCase(kind).trainer()
    client.train(1)
    fresh.receive(client.send())
    for trainer in (client, fresh):
        trainer.user_metrics = f"{__name__}:mean_logit"
    client.load_local_arrays()
    client.test()
    if kind is not Ditto:  # Ditto's personal model is not in the network now
        ((x, _),) = client.test_examples.eval_batches(1000)
        personal = client.model(x).mean().item()
        assert abs(personal - user_test_metrics(fresh)[0]["mean_logit"]) > 1e-6
    measured, failed, _ = user_test_metrics(client)
    assert measured == user_test_metrics(fresh)[0]
    assert not failed


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "part"),
    [
        ("fedbn", "fairrfl", "normalization"),
        ("silobn", "fedism+", "normalization"),
        ("fedper", "fedpw", "the head"),
        ("fedrep", "uniform", "the head"),
        ("lg-fedavg", "dq-ffl", "the body"),
    ],
)
def test_a_run_reports_personal_models_and_resumes_identically(name, strategy, part, tmp_path):
    chosen = {"client.name": name, "evaluate.by": "both", "strategy.name": strategy}
    chosen["model.name"] = "cnn:norm=batch"
    whole = resuming.session(resuming.config(tmp_path / "whole", **chosen)).run()
    read = read_run(whole)
    assert read.personal.rounds.tolist() == [1, 2, 3]
    (chapter,) = analyze([read]).chapters
    assert any(f"{part} stays with the clients" in note for note in chapter.notes)
    assert not set(read.info["local_arrays"]) & load_file(whole / "model.safetensors").keys()
    folder = resuming.stopped(resuming.config(tmp_path / "stopped", **chosen), 3)
    resuming.resume(folder)
    model = "model.safetensors"
    assert (folder / model).read_bytes() == (whole / model).read_bytes()
    again = read_run(folder)
    np.testing.assert_array_equal(again.personal.values, read.personal.values)


class NeedsTheHead(FedAvg):
    def weigh(self, cohort):
        assert len(cohort.received["head.weight"])
        return super().weigh(cohort)


def test_a_strategy_that_needs_a_local_array_gets_an_error_with_its_name(tmp_path):
    settings = {"client.name": "fedper", "strategy.name": f"{__name__}:NeedsTheHead"}
    with pytest.raises(StrategyError, match=r"'head\.weight' stays with the clients .*'fedper'"):
        run(config(tmp_path, **settings))
    settings["client.name"] = "sgd"
    run(config(tmp_path, **settings))


def test_missing_normalization_and_missing_personal_tests_are_logged_once(tmp_path):
    settings = {"client.name": "silobn", "strategy.name": "uniform", "num-server-rounds": 1}
    log = (run(config(tmp_path, **settings)) / "log.txt").read_text()
    assert log.count("no arrays that could stay with the clients") == 1
    settings["client.name"] = "fedbn"
    log = (run(config(tmp_path, **settings)) / "log.txt").read_text()
    assert log.count("Set evaluate.by") == 1


@pytest.mark.parametrize("kind", [FedPer, FedBN])
@pytest.mark.parametrize("keep", ["client", "server"])
def test_power_of_choice_candidates_measure_with_their_local_arrays(tmp_path, kind, keep) -> None:
    """Candidates must not use initial values in place of their local arrays."""
    asked, received = {}, {}
    choose = PowerOfChoice.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            PowerOfChoice,
            "choose",
            lambda self, draw, losses: [
                asked.update({draw.server_round: dict(losses)}),
                choose(self, draw, losses),
            ][1],
        )
        settings = {"participation.policy": "power-of-choice:d=4", "strategy.name": "qffl"}
        settings |= {"client.name": f"{kind.__name__.lower()}:keep={keep}"}
        folder = run(config(tmp_path, **settings))
    for row in history(folder):
        if (row["level"], row["metric"]) == ("client", "received_loss"):
            received.setdefault(int(row["round"]), {})[int(row["name"])] = float(row["value"])
    assert asked.keys() == received.keys() == {1, 2}
    for r, losses in asked.items():
        assert losses == pytest.approx(received[r], rel=1e-6)
