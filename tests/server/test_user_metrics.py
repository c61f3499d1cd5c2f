"""User metrics in runs: at the server, at clients, in tables; and failing metrics."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from runs import config, history, interrupt_first, run, run_each
from safetensors.numpy import load_file
from scipy.special import softmax
from sklearn.metrics import f1_score, roc_auc_score

from fairflower.client_app import _data
from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.errors import ConfigError, MetricError
from fairflower.report import read_run, read_summary, write_summary
from fairflower.report.analysis import analyze
from fairflower.report.tables import user_tables
from fairflower.server.checkpoint import resumed_config
from fairflower.server.evaluation import CentralizedEvaluator

BOTH = "user_metrics:macro_f1, user_metrics:roc"
ALL = f"{BOTH}, user_metrics:confidence_gap"


def expected_metrics(run_config: RunConfig, folder: Path, x: Any, y: Any) -> dict[str, float]:
    """Return the metrics of a run's final model, computed by scikit-learn."""
    evaluator = CentralizedEvaluator(run_config, prepare(run_config.data))
    model = evaluator.model
    arrays = load_file(folder / "model.safetensors")
    model.load_state_dict({name: torch.tensor(a) for name, a in arrays.items()}, strict=False)
    model.eval()
    data = evaluator.federation
    mean, std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in (data.mean, data.std))
    with torch.inference_mode():
        logits = model((torch.tensor(x).float() / 255 - mean) / std).numpy()
    p = softmax(logits.astype(float), axis=1)
    return {
        "macro_f1": f1_score(y, logits.argmax(1), average="macro", zero_division=0),
        "roc": roc_auc_score(y, p, multi_class="ovo", labels=range(10)),
    }


def last(folder: Path, level: str, metric: str) -> dict[str, float]:
    rows = [r for r in history(folder) if r["level"] == level and r["metric"] == metric]
    return {r["name"]: float(r["value"]) for r in rows if r["round"] == "2"}


def test_user_metrics_of_the_server_equal_scikit_learn(tmp_path: Path) -> None:
    run_config = config(tmp_path, **{"evaluate.metrics": BOTH, "data.test-examples": 60})
    folder = run(run_config)
    data = prepare(run_config.data)
    expected = {d: expected_metrics(run_config, folder, *data.test(d)) for d in data.domains}
    for metric in ("macro_f1", "roc"):
        actual = last(folder, "domain", metric)
        assert list(actual) == list(data.domains)
        assert actual == pytest.approx({d: of[metric] for d, of in expected.items()}, abs=1e-6)


@pytest.mark.slow
def test_user_metrics_of_clients_equal_scikit_learn_and_domains_have_weighted_means(
    tmp_path: Path,
) -> None:
    changes = {"evaluate.metrics": BOTH, "evaluate.by": "clients", "data.test-examples": 60}
    run_config = config(tmp_path, **changes, **{"data.clients-per-domain": 2})
    folder = run(run_config, nodes=8)
    data = prepare(run_config.data)
    tests = [_data(data, k).test for k in range(8)]
    expected = [expected_metrics(run_config, folder, test.x, test.y) for test in tests]
    for metric in ("macro_f1", "roc"):
        values, sums, sizes = last(folder, "client", metric), {}, {}
        assert len(values) == 8
        for k, (client, test) in enumerate(zip(data.clients, tests, strict=True)):
            assert values[str(k)] == pytest.approx(expected[k][metric], abs=1e-6)
            sums[client.domain] = sums.get(client.domain, 0) + expected[k][metric] * len(test.y)
            sizes[client.domain] = sizes.get(client.domain, 0) + len(test.y)
        means = {domain: sums[domain] / sizes[domain] for domain in sums}
        assert last(folder, "domain", metric) == pytest.approx(means, abs=1e-6)


def test_user_metrics_change_neither_the_model_nor_other_metrics(tmp_path: Path) -> None:
    plain = run(config(tmp_path / "plain"))
    own = run(config(tmp_path / "own", **{"evaluate.metrics": "user_metrics:changes_its_input"}))
    models = [(folder / "model.safetensors").read_bytes() for folder in (plain, own)]
    assert models[0] == models[1]
    for metric in ("accuracy", "loss", "balanced_accuracy"):
        assert last(plain, "domain", metric) == last(own, "domain", metric)
    assert set(last(own, "domain", "changes_its_input").values()) == {1.0}


@pytest.mark.slow
def test_a_resumed_run_has_the_user_metrics_of_an_uninterrupted_run(tmp_path: Path) -> None:
    whole = run(config(tmp_path, **{"evaluate.metrics": ALL, "run-name": "whole"}))
    run_config = config(tmp_path, **{"evaluate.metrics": ALL, "run-name": "stopped"})
    with pytest.raises(KeyboardInterrupt):
        run(run_config, on_round=interrupt_first)
    folder = run(resumed_config(tmp_path / "stopped", {}))
    for metric in ("macro_f1", "confidence_gap"):
        assert last(folder, "domain", metric) == last(whole, "domain", metric)
    scores = {score.name: score.better for score in read_run(folder).user_scores}
    assert scores == {"macro_f1": 1, "roc": 1, "confidence_gap": -1}


def test_a_resumed_run_keeps_the_record_of_failed_metrics(tmp_path: Path) -> None:
    settings = {"evaluate.metrics": "user_metrics:nan", "evaluate.metric-errors": "skip"}
    whole = run(config(tmp_path, **settings, **{"run-name": "whole"}))
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path, **settings, **{"run-name": "cut"}), on_round=interrupt_first)
    folder = run(resumed_config(tmp_path / "cut", {}))
    skipped = [read_run(path).info["skipped_metrics"] for path in (whole, folder)]
    assert skipped[0] == skipped[1]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """FedAvg and FedHEAL with five seeds."""
    tmp_path = tmp_path_factory.mktemp("compared")
    return run_each(config, tmp_path, ("fedavg", "fedheal"), **{"evaluate.metrics": ALL})


@pytest.mark.nightly
@pytest.mark.slow
def test_tables_show_each_user_metric_over_domains(compared: list[Path]) -> None:
    runs = [read_run(folder) for folder in compared]
    (chapter,) = analyze(runs).chapters
    f1, _, gap = user_tables(chapter.comparison)
    assert "macro_f1" in f1.title
    assert "higher is better" in f1.caption
    assert "lower is better" in gap.caption
    assert list(f1.columns[-5:]) == ["AVG", "STD ddof 1", "STD ddof 0", "MIN", "GAP"]
    assert gap.columns[-2] == "MAX"
    values = [run.scores["macro_f1"].values[run.last()].mean(axis=0).min() for run in runs[:5]]
    (row,) = (row for row in f1.groups[0].rows if row.name == "fedavg")
    assert row.cells[-2].text.startswith(f"{100 * sum(values) / 5:.2f}")


@pytest.mark.nightly
@pytest.mark.slow
def test_verdicts_and_difference_tables_name_the_user_metric(compared: list[Path]) -> None:
    (chapter,) = analyze([read_run(folder) for folder in compared]).chapters
    titles = [table.title for table in chapter.tables]
    assert any("Difference from the baselines, macro_f1 over domains" in t for t in titles)
    less = next(t for t in chapter.tables if "baselines, confidence_gap" in t.title).caption
    assert less.endswith("Lower is better. STD: ddof 1.")
    more = next(t for t in chapter.tables if "baselines, macro_f1" in t.title).caption
    assert "Lower is better" not in more
    sections = chapter.verdicts
    (verdict,) = sections["Against the baselines, macro_f1 over domains"]
    assert "worst domain of macro_f1" in str(verdict)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_summary_file_keeps_the_user_metrics(compared: list[Path], tmp_path: Path) -> None:
    runs = [read_run(folder) for folder in compared]
    write_summary(runs, tmp_path / "x.csv")
    again = read_summary(tmp_path / "x.csv")
    assert [r.user_scores for r in again] == [r.user_scores for r in runs]
    one, other = ([user_tables(c.comparison) for c in analyze(r).chapters] for r in (runs, again))
    assert one == other


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        ("raises", "KeyError: 'no threshold'"),
        ("nan", "it returned nan; expected a finite number"),
        ("infinite", "it returned inf; expected a finite number"),
        ("per_class", r"it returned an array of shape \(10,\); expected a number"),
        ("text", "it returned a str; expected a number"),
        ("masked", "it returned a masked value; expected a number"),
    ],
)
def test_a_failing_metric_is_named_with_the_domain_or_client_and_ends_the_run(
    tmp_path: Path, metric: str, words: str
) -> None:
    run_config = config(tmp_path, **{"evaluate.metrics": f"user_metrics:{metric}"})
    first = prepare(run_config.data).domains[0]
    with pytest.raises(
        MetricError, match=f"{metric} failed on domain {first} in round 0: .*{words}"
    ):
        run(run_config)
    by_clients = config(
        tmp_path, **{"evaluate.metrics": f"user_metrics:{metric}", "evaluate.by": "clients"}
    )
    where = f"client 0 of {first} in round 1"
    with pytest.raises(MetricError, match=f"{metric} failed on {where}: .*{words}"):
        run(by_clients)


@pytest.mark.parametrize("by", ["server", "clients"])
def test_a_run_skips_failing_metrics_if_configured(
    tmp_path: Path, by: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = "user_metrics:nan,user_metrics:macro_f1"
    folder = run(
        config(
            tmp_path,
            **{"evaluate.metrics": metrics, "evaluate.metric-errors": "skip", "evaluate.by": by},
        )
    )
    assert len(last(folder, "domain", "macro_f1")) == 4
    assert not last(folder, "domain", "nan")
    messages = [r for r in caplog.messages if "nan failed on" in r]
    assert len(messages) == 4  # each domain or client once
    result = read_run(folder)
    assert len(result.info["skipped_metrics"]) == 4
    (chapter,) = analyze([result]).chapters
    assert [table.title.split()[0] for table in user_tables(chapter.comparison)] == ["macro_f1"]
    assert sum("the metric nan" in n and "was left out" in n for n in chapter.notes) == 4


def test_a_client_without_the_module_of_a_metric_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The module is deleted after the server has imported it, as at a site without it."""
    (tmp_path / "only_here.py").write_text("def share(logits, labels):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    run_config = config(
        tmp_path, **{"evaluate.metrics": "only_here:share", "evaluate.by": "clients"}
    )

    def leave(server_round: int, _: Any) -> None:
        (tmp_path / "only_here.py").unlink()
        sys.modules.pop("only_here")

    with pytest.raises(MetricError, match=r"share failed on client 0 of .*cannot be imported"):
        run(run_config, on_round=leave)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("user_metrics:auc", "the name of user_metrics:auc is already used"),
        ("user_metrics:validation_loss", "it is, or begins like, one of fairflower's metrics"),
        ("user_metrics:nan,user_metrics:nan", "the name of user_metrics:nan is already used"),
        ("user_metrics:macro", "has no 'macro'. Did you mean macro_f1"),
        ("absent_module:f1", "cannot be imported"),
        ("macro_f1", "expected module:function"),
        ("user_metrics:Metric", "expected a function"),
        ("user_metrics:sideways", "sideways.better = 'more': expected 1 or -1"),
        ("user_metrics:both_ways", r"both_ways.better = array\(.*: expected 1 or -1"),
        ("user_metrics:failing", "failing.better raised KeyError: 'better'"),
    ],
)
def test_invalid_user_metrics_are_refused_before_the_run(value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"evaluate.metrics: .*{words}"):
        RunConfig.from_flat({"evaluate.metrics": value})


def test_the_direction_of_a_metric_may_be_a_numpy_integer(tmp_path: Path) -> None:
    folder = run(config(tmp_path, **{"evaluate.metrics": "user_metrics:numpys"}))
    (score,) = read_run(folder).user_scores
    assert (score.name, score.better) == ("numpys", -1)


@pytest.mark.parametrize(
    ("metric", "settings"),
    [
        ("demographic_parity_difference", {"data.name": "heart-disease", "data.groups": "sex"}),
        ("adabn_accuracy", {"data.held-out": "plain", "evaluate.adabn": True}),
        ("auc_0", {"data.name": "heart-disease:target=labels"}),
    ],
)
def test_a_user_metric_with_the_name_of_another_metric_of_the_run_is_refused(
    tmp_path: Path, metric: str, settings: dict[str, Any]
) -> None:
    own = {"evaluate.metrics": f"user_metrics:{metric}"}
    sizes = {"data.examples-per-client": 0, "data.test-examples": 0}
    with pytest.raises(ConfigError, match=f"{metric} is also the name of a metric of this run"):
        run(config(tmp_path, **sizes, **settings, **own), nodes=4)
