"""Runs with a held-out domain: history, reports, and `compare --leave-one-domain-out`."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import torch
from command import call
from runs import config, history, run
from safetensors.numpy import load_file
from torch import nn

from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.errors import ConfigError
from fairflower.plans.plan import Plan, domains_to_hold_out
from fairflower.report import analyze, read_run, read_summary, write_summary
from fairflower.report.frames import table_frame
from fairflower.report.pages import markdown_tables
from fairflower.server.checkpoint import resumed_config
from fairflower.server.evaluation import CentralizedEvaluator

#: Domains of uci-digits, the default data set.
DOMAINS = prepare(RunConfig().data).domains
FLAGS = [
    *("--engine", "inline", "--rounds", "1", "--epochs", "1", "--strategies", "uniform"),
    *("--set", "data.clients-per-domain=1", "--set", "data.examples-per-client=20"),
    *("--set", "data.test-examples=20"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    run_config = config(tmp_path_factory.mktemp("held"), **{"data.held-out": DOMAINS[0]})
    return run(run_config, nodes=len(DOMAINS) - 1)


def test_the_held_out_domain_is_tested_in_every_round_but_is_not_among_the_domains(folder):
    rows = [row for row in history(folder) if row["level"] == "held-out"]
    assert {row["name"] for row in rows} == {DOMAINS[0]}
    assert [row["round"] for row in rows if row["metric"] == "accuracy"] == ["0", "1", "2"]
    assert DOMAINS[0] not in {row["name"] for row in history(folder) if row["level"] == "domain"}
    read = read_run(folder)
    assert read.domains == DOMAINS[1:]
    assert read.held_out_domain == DOMAINS[0]
    assert read.held_out.values.shape == (3, 1)


def test_the_held_out_accuracy_equals_a_test_as_an_ordinary_domain(folder):
    whole = RunConfig.from_flat({**config(folder.parent).concise()})
    tests = CentralizedEvaluator(whole, prepare(whole.data))
    accuracy = tests(load_file(folder / "model.safetensors")).scores[DOMAINS[0]]["accuracy"]
    assert read_run(folder).held_out.values[-1, 0] == accuracy


def test_training_with_a_held_out_domain_equals_training_without_the_domain(folder, tmp_path):
    alone = run(config(tmp_path, **{"data.domains": ",".join(DOMAINS[1:])}), nodes=3)
    models = [path / "model.safetensors" for path in (folder, alone)]
    assert models[0].read_bytes() == models[1].read_bytes()
    np.testing.assert_array_equal(read_run(folder).values, read_run(alone).values)


def test_tables_mark_the_held_out_domain_and_exclude_it_from_avg(folder, tmp_path):
    read = read_run(folder)
    frame = table_frame([read])
    column = (f"{DOMAINS[0]} (held out)", "mean")
    assert frame[column].item() == pytest.approx(100 * read.held_out.final()[0])
    assert frame["AVG", "mean"].item() == pytest.approx(100 * read.final().mean())
    text = markdown_tables([read])
    assert f"{DOMAINS[0]} (held out)" in text
    assert "not part of AVG, STD, MIN or GAP" in text
    write_summary([read], tmp_path / "x.csv")
    again = markdown_tables(read_summary(tmp_path / "x.csv"))
    assert again.splitlines()[:5] == text.splitlines()[:5]


def test_a_run_with_validation_only_does_not_test_the_held_out_domain(tmp_path):
    run_config = config(
        tmp_path,
        **{"data.held-out": DOMAINS[0], "evaluate.test": False, "data.validation-fraction": 0.2},
    )
    assert not [row for row in history(run(run_config, nodes=3)) if row["level"] == "held-out"]


def test_a_resumed_run_has_the_same_held_out_accuracies(folder, tmp_path):
    changes = {"data.held-out": DOMAINS[0], "num-server-rounds": 1}
    stopped = run(config(tmp_path, **changes), nodes=3)
    run(resumed_config(stopped, {"num-server-rounds": 2}), nodes=3)
    np.testing.assert_array_equal(
        read_run(stopped).held_out.values, read_run(folder).held_out.values
    )


@pytest.mark.slow
def test_compare_holds_out_each_domain_in_turn(tmp_path, undrawn):
    out = tmp_path / "grid"
    text = call("compare", "--leave-one-domain-out", "--seeds", "0", *FLAGS, "--output-dir", out)
    assert "Leave one domain out" in text
    runs = [read_run(path) for path in sorted((out / "runs").iterdir())]
    assert {run.held_out_domain for run in runs} == set(DOMAINS)
    (table,) = analyze(runs).held_out_tables
    assert table.columns == [*sorted(DOMAINS), "mean", "minimum"]
    accuracies = {run.held_out_domain: 100 * run.held_out.final()[0] for run in runs}
    values = [accuracies[name] for name in sorted(DOMAINS)]
    (row,) = table.groups[0].rows
    expected = [*values, np.mean(values), min(values)]
    assert [cell.text for cell in row.cells] == [f"{value:.2f}" for value in expected]
    assert "Leave one domain out" in (out / "report" / "index.html").read_text()
    with (out / "report" / "summary.csv").open() as file:
        held_out = {row["name"] for row in csv.DictReader(file) if row["level"] == "held-out"}
    assert held_out == set(DOMAINS)
    again = call("compare", "--leave-one-domain-out", "--seeds", "0", *FLAGS, "--output-dir", out)
    assert "4 of 4 runs are already completed" in again


def test_domains_that_cannot_be_held_out_are_refused():
    with pytest.raises(ConfigError, match="would leave no domain to train on"):
        domains_to_hold_out({"data.domains": DOMAINS[0]})
    with pytest.raises(ConfigError, match="Remove this setting"):
        domains_to_hold_out({"data.held-out": DOMAINS[0]})
    assert domains_to_hold_out({}) == list(DOMAINS)


def test_a_plan_with_adabn_holds_out_each_domain_under_unique_run_names():
    grid = Plan.grid({"evaluate.adabn": True}, (), [0, 1], held_out=DOMAINS)
    assert [config.data.held_out for config in grid.runs] == [d for d in DOMAINS for _ in range(6)]
    assert grid.runs[0].run_name == f"without-{DOMAINS[0]}-fedavg-seed0"
    assert len({config.run_name for config in grid.runs}) == len(grid.runs)


# --- AdaBN ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def last_metrics():
    """Metrics of the last round of each run of ``adapted``, as a callback got them."""
    return {}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory, last_metrics):
    chosen = {"data.held-out": DOMAINS[0], "evaluate.adabn": True, "model.name": "cnn:norm=batch"}
    configs = [
        config(tmp_path_factory.mktemp("adapted"), **chosen, **{"client.name": client})
        for client in ("sgd", "silobn")
    ]

    def keep(client):
        def on_round(server_round, metrics):
            last_metrics[client] = metrics

        return on_round

    return [run(one, nodes=3, on_round=keep(one.client.name)) for one in configs]


def test_callbacks_get_both_accuracies_of_the_held_out_domain(adapted, last_metrics):
    assert list(last_metrics) == ["sgd", "silobn"]
    for folder, metrics in zip(adapted, last_metrics.values(), strict=True):
        read = read_run(folder)
        assert metrics[f"held_out_accuracy/{DOMAINS[0]}"] == read.held_out.values[-1, 0]
        assert metrics[f"held_out_adabn_accuracy/{DOMAINS[0]}"] == read.adapted.values[-1, 0]


def test_the_held_out_domain_is_tested_with_its_own_batchnorm_statistics(adapted):
    """The accuracy equals that of a plain loop over its test examples with the merged model."""
    for folder in adapted:
        config = RunConfig.from_flat(read_run(folder).config)
        tests = CentralizedEvaluator(config, prepare(config.data))
        tests.adabn = False
        tests(load_file(folder / "model.safetensors"))
        network, norms = (
            tests.model,
            [m for m in tests.model.modules() if isinstance(m, nn.BatchNorm2d)],
        )
        ((x, y),) = (
            pair for e in tests._chunks(DOMAINS[0], "test") for pair in e.eval_batches(500)
        )
        network.train()
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            network(x)
            expected = (network.eval()(x).argmax(1) == y).double().mean().item()
        read = read_run(folder)
        assert read.adapted.rounds.tolist() == [0, 1, 2]
        assert read.adapted.values[-1, 0] == pytest.approx(expected)
        plain = read.held_out.values[-1, 0]
        assert read.held_out_score(DOMAINS[0], 1) == plain
        assert read.held_out_score(DOMAINS[0], 1, adapted=True) == pytest.approx(expected)


def test_adabn_tests_change_neither_the_model_nor_other_tests(adapted, tmp_path):
    chosen = {"data.held-out": DOMAINS[0], "model.name": "cnn:norm=batch"}
    plain = run(config(tmp_path, **chosen), nodes=3)
    models = [path / "model.safetensors" for path in (plain, adapted[0])]
    assert models[0].read_bytes() == models[1].read_bytes()
    for tests in ("held_out", "by_client"):
        np.testing.assert_array_equal(
            getattr(read_run(plain), tests).values, getattr(read_run(adapted[0]), tests).values
        )
    np.testing.assert_array_equal(read_run(plain).values, read_run(adapted[0]).values)


def test_tables_and_summaries_have_a_column_for_adabn(adapted, tmp_path):
    runs = [read_run(path) for path in adapted]
    text = markdown_tables(runs)
    assert f"{DOMAINS[0]} (held out) | {DOMAINS[0]} (held out, AdaBN)" in text
    assert "BatchNorm statistics estimated from the domain's unlabeled test examples" in text
    frame = table_frame(runs)
    assert frame[f"{DOMAINS[0]} (held out, AdaBN)", "mean"].tolist() == pytest.approx(
        [100 * run.adapted.final()[0] for run in runs]
    )
    write_summary(runs, tmp_path / "x.csv")
    again = read_summary(tmp_path / "x.csv")
    assert markdown_tables(again).splitlines()[:6] == text.splitlines()[:6]


def test_leave_one_domain_out_with_adabn_has_a_second_table(adapted, tmp_path):
    chosen = {"evaluate.adabn": True, "model.name": "cnn:norm=batch"}
    other = run(config(tmp_path, **chosen, **{"data.held-out": DOMAINS[1]}), nodes=3)
    runs = [read_run(path) for path in (adapted[0], other)]
    plain, second = analyze(runs).held_out_tables
    assert "AdaBN" not in plain.title
    assert "with AdaBN" in second.title
    own = [replace(run, config={**run.config, "strategy.name": "alone"}) for run in runs]
    said = " Alone: mean over the clients' own models. Each column"
    for table, of_alone in zip((plain, second), analyze(own).held_out_tables, strict=True):
        assert of_alone.caption == table.caption.replace(" Each column", said)
    (row,) = second.groups[0].rows
    accuracies = {run.held_out_domain: 100 * run.adapted.final()[0] for run in runs}
    expected = [accuracies[name] for name in second.columns[:2]]
    assert [cell.text for cell in row.cells][:2] == [f"{value:.2f}" for value in expected]


def test_adabn_needs_a_held_out_domain_and_warns_without_batchnorm(tmp_path):
    with pytest.raises(ConfigError, match=r"evaluate\.adabn = true: .*data\.held-out is empty"):
        RunConfig.from_flat({"evaluate.adabn": True})
    run_config = config(tmp_path, **{"data.held-out": DOMAINS[0], "evaluate.adabn": True})
    folder = run(run_config, nodes=3)
    assert (folder / "log.txt").read_text().count(
        "no BatchNorm layers with running statistics"
    ) == 1
    assert not read_run(folder).adapted.rounds.size
