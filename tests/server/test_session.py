"""Whole runs on the inline engine."""

from __future__ import annotations

import io
import itertools
import json
import math
import threading
from contextlib import suppress

import numpy as np
import pytest
import torch
import torchvision
from apps import app_with_handlers
from flwr.app import Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.exit import exit_handler
from parametrize import STRATEGY_PER_NEEDS, mark_others_nightly
from resuming import resume
from rich.console import Console
from runs import config, history, run
from safetensors.numpy import load_file
from safetensors.torch import save_file

from fairflower.client_app import app as client_app
from fairflower.client_app import trainer_of
from fairflower.config import RunConfig
from fairflower.config.text import flatten_tables, read_toml
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, RoundFailed, RunInterrupted, StrategyError
from fairflower.flower_compat import stopping_with_flower
from fairflower.models import pretrained
from fairflower.report import read_run
from fairflower.report.notes import run_notes
from fairflower.server.contents import read_facts
from fairflower.server.evaluation import CentralizedEvaluator
from fairflower.server.folder import lock_folder
from fairflower.server.session import Session
from fairflower.strategies import FedAvg


def test_a_completed_run_writes_all_files_of_its_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["bin/fairflower", "run", "--output-dir", "my runs"])
    run_config = config(tmp_path)
    folder = run(run_config)
    facts = json.loads((folder / "run.json").read_text())
    assert facts["command"] == "fairflower run --output-dir 'my runs'"
    assert facts["status"] == "completed"
    assert facts["rounds"] == 2
    assert facts["versions"]["flwr"]
    assert [client["client_id"] for client in facts["clients"]] == [0, 1, 2, 3]
    assert RunConfig.from_flat(flatten_tables(read_toml(folder / "config.toml"))) == run_config
    rows = history(folder)
    accuracies = [r for r in rows if r["level"] == "domain" and r["metric"] == "accuracy"]
    assert len(accuracies) == 3 * 4  # rounds 0, 1, 2 of four domains
    assert all(0 <= float(row["value"]) <= 1 for row in accuracies)
    lines = [json.loads(line) for line in (folder / "diagnostics.jsonl").open()]
    assert [line["round"] for line in lines] == [1, 2]
    assert all(sum(line["weights"]) == pytest.approx(1) for line in lines)
    model = load_file(folder / "model.safetensors")
    assert sum(array.size for array in model.values()) == facts["num_parameters"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"),
    mark_others_nightly(
        itertools.product(("fedavg", "uniform", "fedheal"), ("cnn", "resnet10")),
        {("fedavg", "cnn"), ("uniform", "cnn"), ("fedheal", "cnn"), ("fedheal", "resnet10")},
    ),
)
def test_strategies_return_finite_models_for_cnn_and_resnet(tmp_path, strategy, model):
    few = {"data.examples-per-client": 8, "data.test-examples": 4}
    folder = run(config(tmp_path, **few, **{"strategy.name": strategy, "model.name": model}))
    for array in load_file(folder / "model.safetensors").values():
        assert array.dtype in (np.float32, np.int64)
        assert np.isfinite(array).all()


@pytest.mark.slow
def test_pretrained_weights_are_read_once_and_sent(tmp_path, monkeypatch):
    """Sites have no such file: it only determines the first model that the server sends."""
    path = tmp_path / "resnet18.safetensors"
    published = torchvision.models.resnet18(weights=None).state_dict()
    save_file(published, path)
    opened = []
    read = pretrained.load_weights_file
    monkeypatch.setattr(
        pretrained, "load_weights_file", lambda name: opened.append(name) or read(name)
    )
    folder = run(
        config(
            tmp_path,
            **{
                "num-server-rounds": 1,
                "data.domains": "plain",
                "data.examples-per-client": 4,
                "data.test-examples": 4,
                "model.name": "resnet18",
                "model.weights": str(path),
                "train.lr": 0.0,
                "strategy.name": "uniform",
            },
        ),
        nodes=1,
    )
    assert opened == [str(path)]
    model = load_file(folder / "model.safetensors")
    for name, array in published.items():
        if name.endswith((".weight", ".bias")) and not name.startswith("fc."):
            np.testing.assert_allclose(model[f"body.{name}"], array.numpy(), atol=1e-6)


PROMPTED = {
    "prompt-vit-tiny": (133_514, {"prompts", "gc_net", "head"}),
    "vpt-vit-tiny": (1_802, {"prompts", "head"}),
}


@pytest.mark.few(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "network"),
    [(s, "prompt-vit-tiny") for s in STRATEGY_PER_NEEDS]
    + [(s, "vpt-vit-tiny") for s in ("afl", "fedgcr")],
)
def test_only_trainable_parameters_of_prompt_models_are_sent(tmp_path, strategy, network):
    """In every training message, in both directions."""
    sent: list[int] = []

    class CountsBytes(InlineGrid):
        def _deliver(self, message):
            reply = super()._deliver(message)
            if message.metadata.message_type == MessageType.TRAIN:
                for content in (message.content, reply.content):
                    arrays = content["arrays"].values()
                    sent.append(sum(array.numpy().nbytes for array in arrays))
            return reply

    few = {"num-server-rounds": 1, "data.examples-per-client": 8, "data.test-examples": 4}
    run_config = config(tmp_path, **few, **{"strategy.name": strategy, "model.name": network})
    console = Console(file=io.StringIO())
    folder = Session(CountsBytes(client_app, 4), run_config, console).run()
    facts = json.loads((folder / "run.json").read_text())
    trained, parts = PROMPTED[network]
    assert facts["num_parameters"] == trained
    assert facts["model_bytes"] == 4 * trained
    assert sent == [4 * trained] * 2 * 4  # both directions, 4 clients
    model = load_file(folder / "model.safetensors")
    assert {name.partition(".")[0] for name in model} == parts
    assert all(np.isfinite(array).all() for array in model.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "domains"),
    [
        ({"data.imbalance-factor": 5}, [5, 3, 2, 1]),
        (
            {"data.domains": "plain", "data.clients-per-domain": 6, "data.corrupted-clients": 2}
            | {"data.dirichlet-alpha": 1.0},
            [4, 2],
        ),
    ],
)
def test_imbalanced_and_corrupted_federations_are_trained_and_evaluated(tmp_path, shape, domains):
    run_config = config(tmp_path, **shape, **{"evaluate.by": "both", "evaluate.auc": True})
    folder = run(run_config, nodes=sum(domains))
    facts = json.loads((folder / "run.json").read_text())
    names = [client["domain"] for client in facts["clients"]]
    assert [names.count(name) for name in facts["domains"]] == domains
    scores = ("accuracy", "balanced_accuracy", "auc")
    for level, name, metrics in (
        *(("domain", name, scores) for name in facts["domains"]),
        *(("client", str(client), scores[:1]) for client in range(sum(domains))),
    ):
        for metric in metrics:
            (value,) = (
                float(row["value"])
                for row in history(folder)
                if (row["round"], row["level"], row["name"]) == ("2", level, name)
                and row["metric"] == metric
            )
            assert 0 <= value <= 1


def test_the_same_config_gives_the_same_bits_and_another_seed_does_not(tmp_path):
    one, two, other = (
        (run(config(tmp_path, seed=seed, **{"fraction-train": 0.5})) / "model.safetensors")
        for seed in (0, 0, 1)
    )
    assert one.read_bytes() == two.read_bytes() != other.read_bytes()


def test_the_number_of_rounds_does_not_change_the_partition(tmp_path):
    facts = [
        json.loads((run(config(tmp_path, **{"num-server-rounds": n})) / "run.json").read_text())
        for n in (0, 1)
    ]
    assert facts[0]["clients"] == facts[1]["clients"]


def test_evaluation_by_clients_gives_the_accuracies_of_the_server(tmp_path):
    by_clients = history(run(config(tmp_path, **{"evaluate.by": "clients"})))
    by_server = history(run(config(tmp_path)))

    def accuracy(rows, level):
        return {
            (r["round"], r["name"]): float(r["value"])
            for r in rows
            if r["level"] == level and r["metric"] == "accuracy" and r["round"] != "0"
        }

    assert "0" not in {r["round"] for r in by_clients if r["metric"] == "accuracy"}
    # One client per domain, so its test set is the domain's.
    assert accuracy(by_clients, "domain") == accuracy(by_server, "domain")
    assert len(accuracy(by_clients, "client")) == 2 * 4


def test_personal_models_are_evaluated_beside_the_global_model(tmp_path):
    ditto = {"client.name": "ditto", "client.lambda": 0.0}
    rows = history(run(config(tmp_path, **ditto, **{"evaluate.by": "both"})))
    plain = history(run(config(tmp_path)))

    def values(rows, level, metric):
        return {
            (r["round"], r["name"]): float(r["value"])
            for r in rows
            if (r["level"], r["metric"]) == (level, metric) and r["round"] != "0"
        }

    assert values(rows, "domain", "accuracy") == values(plain, "domain", "accuracy")
    domains, clients = (values(rows, level, "personal_accuracy") for level in ("domain", "client"))
    # One client per domain, in the domains' order.
    assert list(domains.values()) == list(clients.values())
    assert len(domains) == 2 * 4
    assert domains != values(rows, "domain", "accuracy")
    assert not values(plain, "domain", "personal_accuracy")


def test_a_server_without_data_gets_the_federation_from_its_clients(tmp_path, monkeypatch):
    everywhere = run(config(tmp_path, **{"evaluate.by": "both"}))
    monkeypatch.setattr("fairflower.server.setup.prepare", None)  # the server must not need it
    monkeypatch.setattr("fairflower.server.setup.is_deployed", lambda grid: True)
    folder = run(config(tmp_path, **{"evaluate.by": "clients"}))
    assert load_model(folder) == load_model(everywhere)
    facts, expected = (json.loads((path / "run.json").read_text()) for path in (folder, everywhere))
    for key in ("clients", "domains", "num_classes", "shape"):
        assert facts[key] == expected[key]


def load_model(folder) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def answering(answer) -> ClientApp:
    """Return fairflower's app with evaluation replies changed by ``answer(client, metrics)``."""

    def evaluate(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        answer(context.node_config["partition-id"], reply.content["metrics"])
        return reply

    return app_with_handlers(evaluate=evaluate)


def crash(client, metrics):
    if client == 1:
        raise MemoryError("no room to test")


def nan(client, metrics):
    if client == 1:
        metrics["accuracy"] = float("nan")


def incomplete(client, metrics):
    if client == 1:
        del metrics["accuracy"]


@pytest.mark.parametrize(
    ("answer", "reason"), [(crash, "no room to test"), (nan, "nan"), (incomplete, "lack")]
)
def test_a_client_that_fails_to_evaluate_is_named_and_left_out(tmp_path, caplog, answer, reason):
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        folder = run(config(tmp_path, **{"evaluate.by": "clients"}), answering(answer))
    assert "without client 1" in caplog.text
    assert reason in caplog.text
    names = {r["name"] for r in history(folder) if r["level"] == "domain"}
    assert names == {"plain", "rotated", "printed"}


def test_an_evaluation_without_valid_replies_fails_the_run(tmp_path):
    def all_crash(client, metrics):
        raise MemoryError("no room to test")

    with pytest.raises(RoundFailed, match=r"0 of 4.*(?s:.*)no room to test"):
        run(config(tmp_path, **{"evaluate.by": "clients"}), answering(all_crash))


def test_evaluation_every_second_round_includes_the_last(tmp_path):
    rows = history(run(config(tmp_path, **{"evaluate.every": 2, "num-server-rounds": 3})))
    assert {r["round"] for r in rows if r["level"] == "domain"} == {"0", "2", "3"}


# --- failures ----------------------------------------------------------------------------


def failing(clients: set[int]) -> ClientApp:
    """Return fairflower's app, in which these clients raise an error in training."""

    def train(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] in clients:
            raise MemoryError("no room for the model")
        return client_app(message, context)

    return app_with_handlers(train=train)


def test_a_failing_client_is_left_out_and_recorded(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        folder = run(config(tmp_path), failing({2}))
    assert "without client 2" in caplog.text
    assert "no room for the model" in caplog.text
    line = json.loads((folder / "diagnostics.jsonl").read_text().splitlines()[0])
    assert line["client_ids"] == [0, 1, 3]
    assert "no room" in line["dropped"]["2"]


def test_too_many_failing_clients_fail_the_run_with_their_errors(tmp_path):
    with pytest.raises(RoundFailed, match=r"clients 0, 1, 3: .*no room"):
        run(config(tmp_path), failing({0, 1, 3}))
    (folder,) = tmp_path.iterdir()
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "failed"
    assert "RoundFailed" in facts["error"]
    assert history(folder)


class Breaks(FedAvg):
    def weigh(self, cohort):
        return cohort.gram("nothing").sum(axis=0)  # raises in fairflower's code


def test_an_error_in_a_strategy_is_short_and_the_log_has_the_traceback(tmp_path):
    run_config = config(tmp_path, **{"strategy.name": f"{__name__}:Breaks"})
    short = r"Breaks failed with KeyError: 'nothing' \(test_session.py, line \d+, in weigh\)"
    with pytest.raises(StrategyError, match=short) as caught:
        run(run_config)
    (folder,) = tmp_path.iterdir()
    assert str(caught.value).endswith(f"The traceback is in {folder / 'log.txt'}.")
    log = (folder / "log.txt").read_text()
    assert 'cohort.gram("nothing")' in log
    assert log.count("KeyError: 'nothing'\n") == 1
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["status"], facts["error"]) == ("failed", f"StrategyError: {caught.value}")


class TooMuch(FedAvg):
    def weigh(self, cohort):
        return 2 * super().weigh(cohort)


class Verbose(FedAvg):
    def weigh(self, cohort):
        self.diagnostics |= {"small": torch.arange(3.0), "large": np.zeros((101, 101))}
        return super().weigh(cohort)


def test_diagnostics_with_too_many_numbers_are_not_stored(tmp_path):
    folder = run(config(tmp_path, **{"strategy.name": f"{__name__}:Verbose"}))
    lines = [json.loads(line) for line in (folder / "diagnostics.jsonl").read_text().splitlines()]
    assert [line["small"] for line in lines] == [[0.0, 1.0, 2.0]] * 2
    assert not any("large" in line for line in lines)


def test_invalid_weights_name_the_strategy_and_the_round(tmp_path):
    run_config = config(tmp_path, **{"strategy.name": f"{__name__}:TooMuch"})
    with pytest.raises(ConfigError, match=r"Round 1, .*TooMuch: Weights \[.* with sum 1"):
        run(run_config)


def test_an_exploding_loss_fails_the_run_and_advises_a_lower_learning_rate(tmp_path):
    with pytest.raises(RoundFailed, match=r"Lower train\.lr"):
        run(config(tmp_path, **{"train.lr": 1e30}))


@pytest.mark.parametrize(("times", "diverged"), [(10, False), (1e-3, True)])
def test_a_diverged_model_is_warned_of_and_noted_in_reports(
    times, diverged, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr("fairflower.server.rounds.DIVERGED", times)
    folder = run(config(tmp_path))
    facts = json.loads((folder / "run.json").read_text())
    assert facts["status"] == "completed"
    assert ("training has diverged. Decrease train.lr" in caplog.text) is diverged
    losses = [float(r["value"]) for r in history(folder) if r["metric"] == "loss"]
    assert facts.get("diverged") == (max(losses[-4:]) if diverged else None)
    note = f"training diverged: the last model's loss is {max(losses[-4:]):.3g}. Lower train.lr."
    assert (note in run_notes(read_run(folder))) is diverged
    # A run killed between its last checkpoint and the warning.
    caplog.clear()
    facts.pop("diverged", None)
    (folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))
    resume(folder)
    assert ("training has diverged. Decrease train.lr" in caplog.text) is diverged
    assert (note in run_notes(read_run(folder))) is diverged


@pytest.mark.parametrize(
    "settings",
    [
        {
            **{"privacy.noise-multiplier": 1.0, "privacy.clip": 1.0, "strategy.name": "uniform"},
            "bound.max-client-weight": 0.4,
        },
        {"secure-aggregation": True, "strategy.name": "uniform"},
        {"strategy.name": "uniform"},
    ],
)
def test_settings_advised_after_divergence_are_valid(settings, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("fairflower.server.rounds.DIVERGED", 1e-3)
    run(run_config := config(tmp_path, **settings))
    advice = caplog.text.partition("has diverged.")[2].partition("\n")[0]
    keys = [key for key in run_config.to_flat() if key in advice]
    assert "train.lr" in keys
    assert ("privacy.clip" in keys) is ("privacy.clip" in settings)
    for key in keys:
        RunConfig.from_flat(run_config.to_flat() | {key: 0.001})


def test_a_nan_loss_counts_as_divergence(tmp_path, caplog, monkeypatch):
    """Finite weights can give infinite logits, and these a NaN loss."""
    test = CentralizedEvaluator.__call__

    def lost(self, *args):
        tested = test(self, *args)
        tested.scores[list(tested.scores)[1]]["loss"] = math.nan
        return tested

    monkeypatch.setattr(CentralizedEvaluator, "__call__", lost)
    folder = run(config(tmp_path))
    assert "training has diverged. Decrease train.lr" in caplog.text
    assert "the last model's loss is nan" in str(run_notes(read_run(folder)))


class RunNotRunning(BaseException):
    """Raised by older versions of Flower when a run was stopped."""


@pytest.mark.parametrize("how", [RunInterrupted, SystemExit, RunNotRunning])
def test_a_stopped_run_leaves_a_readable_folder(tmp_path, how):
    stop = threading.Event()

    def train(message: Message, context: Context) -> Message:
        if message.content["config"]["server-round"] == 2:
            if how is not RunInterrupted:  # what `flwr stop` raises in a ServerApp
                raise how(0)
            stop.set()
        return client_app(message, context)

    with pytest.raises(how):
        run(config(tmp_path), app_with_handlers(train=train), stop=stop)
    (folder,) = tmp_path.iterdir()
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["status"], facts["rounds"]) == ("stopped", 1)
    assert load_file(folder / "model.safetensors")


def test_flowers_exit_handler_waits_until_the_run_folder_is_written(tmp_path):
    """Flower's simulation runs the ServerApp in a thread, as here, and then ends the process."""
    begun, stop = threading.Event(), threading.Event()

    def train(message: Message, context: Context) -> Message:
        begun.set()
        stop.wait(60)
        return client_app(message, context)

    def serve() -> None:
        with suppress(RunInterrupted), stopping_with_flower(stop):
            run(config(tmp_path), app_with_handlers(train=train), stop=stop)

    server = threading.Thread(target=serve)
    server.start()
    assert begun.wait(60)
    exit_handler.trigger_exit_handlers(run_before_force_exit=True)
    (folder,) = tmp_path.iterdir()
    assert read_facts(folder)["status"] == "stopped"
    server.join()


def test_min_clients_above_the_clients_per_round_is_refused_before_the_run(tmp_path):
    with pytest.raises(
        ConfigError, match=r"min-clients = 3: only 2 clients are selected per round\."
    ):
        run(config(tmp_path, **{"min-clients": 3, "fraction-train": 0.5}))
    assert not list(tmp_path.iterdir())


def test_too_few_nodes_are_refused_with_the_num_supernodes_needed(tmp_path):
    with pytest.raises(ConfigError, match="num-supernodes=4"):
        run(config(tmp_path), nodes=3)


def test_more_nodes_than_clients_are_accepted(tmp_path):
    folder = run(config(tmp_path), nodes=6)
    assert len(read_facts(folder)["clients"]) == 4


def test_runs_of_the_same_name_get_different_folders(tmp_path):
    run_config = config(tmp_path, **{"run-name": "mine", "num-server-rounds": 0})
    assert {run(run_config).name, run(run_config).name} == {"mine", "mine-2"}


@pytest.mark.parametrize("left", [(), (".lock",)])
def test_an_empty_folder_of_a_killed_run_is_reused(tmp_path, left):
    run_config = config(tmp_path, **{"run-name": "mine", "num-server-rounds": 0})
    (tmp_path / "mine").mkdir()
    for name in left:
        (tmp_path / "mine" / name).touch()
    assert run(run_config).name == "mine"


def test_a_folder_locked_by_another_process_is_not_used(tmp_path):
    run_config = config(tmp_path, **{"run-name": "mine", "num-server-rounds": 0})
    (tmp_path / "mine").mkdir()
    held = lock_folder(tmp_path / "mine")
    assert run(run_config).name == "mine-2"
    held.release()


def test_a_trainer_reads_the_data_dir_of_the_node_config(tmp_path):
    context = Context(
        1, 1, {"partition-id": 0, "data-dir": str(tmp_path / "gone")}, RecordDict(), {}
    )
    with pytest.raises(ValueError, match="gone"):
        trainer_of(context, {"data.name": "digits"})
