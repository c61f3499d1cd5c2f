"""Group fairness in runs: at the server and at clients, in history, tables and verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from runs import config, history, interrupt_first, run, run_each
from safetensors.numpy import load_file

from fairflower.aggregation.records import InvalidReply, check_test
from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.numerics.group_fairness import DIFFERENCES, GROUP_COUNTS, METRICS
from fairflower.report import read_run, read_summary, write_report, write_summary
from fairflower.report.analysis import analyze
from fairflower.report.cells import UNDEFINED
from fairflower.report.figures import canvas
from fairflower.report.figures.comparison import sketches_of_groups
from fairflower.report.methods import group_runs
from fairflower.report.tables import group_tables
from fairflower.server.checkpoint import resumed_config
from fairflower.server.evaluation import CentralizedEvaluator, counts_in

HEARTS: dict[str, Any] = {
    "data.name": "heart-disease",
    "data.groups": "sex",
    "data.examples-per-client": 0,
    "data.test-examples": 0,
    "data.clients-per-domain": 1,
}
NAMES = [metric.name for metric in METRICS]


def hearts(tmp_path: Path, **changes: Any) -> RunConfig:
    return config(tmp_path, **{**HEARTS, **changes})


def rows(folder: Path, level: str, name: str) -> dict[str, float]:
    return {
        r["metric"]: float(r["value"])
        for r in history(folder)
        if (r["round"], r["level"], r["name"]) == ("2", level, name) and r["metric"] in NAMES
    }


def people(run_config: RunConfig, folder: Path) -> list[tuple[Any, Any, Any]]:
    """Return each client's labels, predictions of the final model, and groups, on test data."""
    data = prepare(run_config.data)
    model = CentralizedEvaluator(run_config, data).model
    arrays = load_file(folder / "model.safetensors")
    model.load_state_dict({name: torch.tensor(a) for name, a in arrays.items()})
    model.eval()
    predictions = []
    for client in data.clients:
        x, y = data.client_test(client.client_id)
        scaled = (torch.tensor(x) - torch.tensor(data.mean)) / torch.tensor(data.std)
        with torch.inference_mode():
            predictions.append(
                (y, model(scaled).argmax(1).numpy(), data.groups_of(client.client_id))
            )
    return predictions


def expected(y: Any, p: Any, g: Any) -> dict[str, float]:
    """Compute the metrics that are defined in a loop over two groups."""

    def rates(chosen: Any) -> list[float]:
        parts = [p[chosen & (g == group)] for group in (0, 1)]
        return [float(part.mean()) if len(part) else math.nan for part in parts]

    parity, opportunity, false = map(rates, (y >= 0, y == 1, y == 0))
    differences = [max(r) - min(r) for r in (parity, opportunity, false)]
    ratios = [1.0 if max(r) == 0 else min(r) / max(r) for r in (parity, opportunity, false)]
    odds = np.max(differences[1:]), np.min(ratios[1:])
    values = [*differences[:2], odds[0], *ratios[:2], odds[1]]
    defined = [
        not any(map(math.isnan, used)) for used in (parity, opportunity, [*opportunity, *false])
    ]
    return {
        name: float(value)
        for name, value, there in zip(NAMES, values, defined * 2, strict=True)
        if there
    }


@pytest.mark.parametrize("by", ["server", "clients", "both"])
def test_group_metrics_in_the_history_equal_a_loop_over_groups(tmp_path: Path, by: str) -> None:
    config = hearts(tmp_path, **{"evaluate.by": by})
    folder = run(config)
    each = people(config, folder)
    whole = expected(*map(np.concatenate, zip(*each, strict=True)))
    assert rows(folder, "all", "global") == pytest.approx(whole)
    assert list(whole) == NAMES
    local = [expected(*of_client) for of_client in each]
    for k, values in enumerate(local):
        assert rows(folder, "client", str(k)) == pytest.approx(values)
        # A domain has a single client here.
        domain = prepare(config.data).clients[k].domain
        assert rows(folder, "domain", domain) == pytest.approx(values)
    worst = {
        m.name: (min if m.better > 0 else max)(v[m.name] for v in local if m.name in v)
        for m in METRICS
    }
    assert rows(folder, "all", "worst_client") == pytest.approx(worst)
    assert "equalized_odds_difference" not in local[2]  # all women in Switzerland are ill
    assert not any("nan" in r["value"] for r in history(folder))


@pytest.mark.few(3)
@pytest.mark.parametrize("metric", NAMES)
def test_group_metrics_equal_those_of_fairlearn(tmp_path_factory: Any, metric: str) -> None:
    """With random labels and predictions, in three groups that all have both labels."""
    fairlearn = pytest.importorskip("fairlearn.metrics")
    from fairflower.numerics.group_fairness import counts_by_group

    rng = np.random.default_rng(NAMES.index(metric))
    for _ in range(20):
        y, p, g = rng.integers(0, 2, 90), rng.integers(0, 2, 90), np.arange(90) % 3
        y[:6] = [0, 0, 0, 1, 1, 1]
        theirs = getattr(fairlearn, metric)(y, p, sensitive_features=g)
        ours = next(m for m in METRICS if m.name == metric)(counts_by_group(y, p, g, 3))
        assert ours == pytest.approx(theirs)


def test_undefined_metrics_are_named_with_their_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = run(hearts(tmp_path))
    reasons = json.loads((folder / "run.json").read_text())["undefined_metrics"]
    text = "equalized odds (every label is disease among female)"
    assert reasons["domain switzerland"] == reasons["client 2 of switzerland"] == text
    assert f"Undefined for domain switzerland: {text}." in caplog.messages
    assert len([m for m in caplog.messages if m.startswith("Undefined for")]) == 4
    (chapter,) = analyze([read_run(folder)]).chapters
    notes = [note for note in chapter.notes if "undefined" in note]
    assert len(notes) == 1
    assert notes[0].startswith("Group fairness is undefined for client 2 of switzerland, client 3")


def test_a_report_shows_undefined_for_domains_with_one_group(tmp_path: Path) -> None:
    """Each domain has people of a single group, so that no client has a defined metric."""
    settings = {"data.name": "randhie", "data.groups": "health", "data.clients-per-domain": 1}
    config = hearts(tmp_path, **{**settings, "data.examples-per-client": 20})
    (chapter,) = analyze([read_run(run(config))]).chapters
    tables = [t for t in chapter.tables if "between groups" in t.title]
    assert tables
    by_domain = [
        cell.text
        for table in tables
        for group in table.groups
        for row in group.rows
        for column, cell in zip(table.columns, row.cells, strict=True)
        if column in ("excellent", "good", "fair", "poor")
    ]
    assert set(by_domain) == {UNDEFINED}


def test_groups_change_neither_the_model_nor_the_other_metrics(tmp_path: Path) -> None:
    plain, grouped = (run(hearts(tmp_path / g, **{"data.groups": g})) for g in ("", "age"))
    models = [(folder / "model.safetensors").read_bytes() for folder in (plain, grouped)]
    assert models[0] == models[1]
    kept = [
        [r for r in history(f) if r["level"] in ("domain", "client") and r["metric"] not in NAMES]
        for f in (plain, grouped)
    ]
    assert kept[0] == kept[1]


def test_validation_and_held_out_domains_have_group_metrics(tmp_path: Path) -> None:
    changes = {"data.validation-fraction": 0.3, "data.held-out": "hungary"}
    folder = run(hearts(tmp_path, **changes), nodes=3)
    assert next(iter(rows(folder, "all-validation", "global"))) == NAMES[0]
    assert rows(folder, "validation", "cleveland")
    assert len(rows(folder, "held-out", "hungary")) == 6
    assert "client 1 of switzerland (validation)" in read_run(folder).info["undefined_metrics"]


def test_callbacks_and_the_terminal_get_the_global_group_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from fairflower.engines.inline import InlineGrid
    from fairflower.server.session import Session

    seen: dict[str, float] = {}
    config = hearts(tmp_path)
    console = Console(width=200)
    Session(
        InlineGrid(client_app, 4), config, console, on_round=lambda _, metrics: seen.update(metrics)
    ).run()
    (folder,) = tmp_path.iterdir()
    for name, value in rows(folder, "all", "global").items():
        assert seen[f"global_{name}"] == value
    assert {f"worst_client_{name}" for name in NAMES} <= set(seen)
    assert "demographic_parity_difference/cleveland" in seen
    shown = 100 * seen["global_demographic_parity_difference"]
    assert f"parity diff. {shown:.1f}" in capsys.readouterr().out.splitlines()[-2]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fedavg", "fairfed"])
def test_a_resumed_run_has_the_group_metrics_of_an_uninterrupted_run(
    tmp_path: Path, strategy: str
) -> None:
    changes: dict[str, Any] = {"strategy.name": strategy, "num-server-rounds": 3}
    if strategy == "fairfed":
        changes["strategy.metric"] = "equal_opportunity_difference"
    whole = run(hearts(tmp_path, **changes, **{"run-name": "whole"}))
    with pytest.raises(KeyboardInterrupt):
        run(hearts(tmp_path, **changes, **{"run-name": "stopped"}), on_round=interrupt_first)
    folder = run(resumed_config(tmp_path / "stopped", {}))
    kept = [[r for r in history(f) if "seconds" not in r["metric"]] for f in (folder, whole)]
    assert kept[0] == kept[1]
    models = [(f / "model.safetensors").read_bytes() for f in (folder, whole)]
    assert models[0] == models[1]


# --- reports -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """FedAvg and Uniform with five seeds."""
    tmp_path = tmp_path_factory.mktemp("compared")
    return run_each(hearts, tmp_path, ("fedavg", "uniform"))


@pytest.mark.slow
def test_tables_show_all_people_the_worst_client_and_each_domain(compared: list[Path]) -> None:
    runs = [read_run(folder) for folder in compared]
    (chapter,) = analyze(runs).chapters
    tables = list(group_tables(chapter.comparison))
    assert [table in chapter.tables for table in tables[:2]] == [True, True]
    assert tables[0].title.startswith("Fairness between groups by sex, all people")
    assert list(tables[0].columns) == [metric.title for metric in METRICS]
    assert "rates of positive predictions (disease); opp" in tables[0].caption
    values = [100 * np.mean(r.group_metrics[NAMES[0]].values[1:, 0]) for r in runs[:5]]
    assert tables[0].groups[0].rows[0].cells[0].text == f"{np.mean(values):.2f}"
    worst = [100 * np.mean(r.group_metrics[NAMES[1]].values[1:, 1]) for r in runs[:5]]
    assert tables[1].groups[0].rows[0].cells[1].text == f"{np.mean(worst):.2f}"
    odds = tables[4]
    assert list(odds.columns) == list(runs[0].domains)
    assert [cell.text for cell in odds.groups[0].rows[0].cells][2:] == ["undefined"] * 2


@pytest.mark.slow
def test_verdicts_compare_the_differences_between_groups(compared: list[Path]) -> None:
    (chapter,) = analyze([read_run(folder) for folder in compared]).chapters
    sections = chapter.verdicts
    for who in ("", ", worst client"):
        verdict = sections[f"Against the baselines, fairness between groups by sex{who}"][0]
        for metric in DIFFERENCES:
            assert metric.phrase in str(verdict)
    title = "Difference from the baselines, fairness between groups by sex,"
    table = next(table for table in chapter.tables if table.title.startswith(title))
    assert table.caption.endswith("Lower is better.")


@pytest.mark.slow
def test_a_summary_file_keeps_the_group_metrics(compared: list[Path], tmp_path: Path) -> None:
    runs = [read_run(folder) for folder in compared]
    write_summary(runs, tmp_path / "x.csv")
    assert "nan" not in (tmp_path / "x.csv").read_text()
    again = read_summary(tmp_path / "x.csv")
    one, other = (
        [list(group_tables(c.comparison)) for c in analyze(r).chapters] for r in (runs, again)
    )
    assert one == other
    notes = [[c.notes for c in analyze(r).chapters] for r in (runs, again)]
    assert notes[0] == notes[1]


@pytest.mark.slow
def test_a_report_page_plots_the_differences_between_groups_over_rounds(
    compared: list[Path], tmp_path: Path
) -> None:
    write_report([read_run(folder) for folder in compared[::5]], tmp_path / "page")
    assert list((tmp_path / "page" / "figures").glob("*groups-sex.svg"))
    assert "Differences between groups by sex" in (tmp_path / "page" / "index.html").read_text()


@pytest.mark.slow
def test_plots_of_differences_between_groups_start_at_0(compared: list[Path]) -> None:
    (comparison,) = group_runs([read_run(folder) for folder in compared])
    styles = {method.name: canvas.LineStyle("black", "-", "o") for method in comparison.methods}
    (sketch,) = sketches_of_groups(comparison, styles)
    assert [panel.get_ylim()[0] for panel in sketch.figure.axes] == [0.0] * len(DIFFERENCES)


def test_a_run_without_groups_has_no_group_tables(tmp_path: Path) -> None:
    read = read_run(run(hearts(tmp_path, **{"data.groups": ""})))
    assert not read.group_metrics
    (chapter,) = analyze([read]).chapters
    assert not any("between groups" in table.title for table in chapter.tables)


# --- replies -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (None, "0 counts of people; expected 6 for each of 2 groups"),
        ([1] * 7, "7 counts of people"),
        ([9, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0], "it counted 9 people; expected 10"),
        ([10, 0, 5, 3, 5, 0, 0, 0, 0, 0, 0, 0], "the numbers contradict each other"),
        ([-1, 0, -1, 0, 0, 0, 11, 0, 0, 0, 11, 0], "whole numbers >= 0"),
        ([0.5, 0.0, 0.5, 0.0, 0.0, 0.0, 9.5, 0.0, 9.5, 0.0, 0.0, 0.0], "whole numbers"),
        ([math.nan] * 12, "whole numbers"),
    ],
)
def test_invalid_group_counts_are_refused(counts: Any, message: str) -> None:
    metrics = MetricRecord({"accuracy": 0.5, "eval_loss": 1.0, "num-examples": 10})
    content = RecordDict({"metrics": metrics})
    if counts is not None:
        content[GROUP_COUNTS] = MetricRecord({"counts": counts})
    with pytest.raises(InvalidReply, match=message):
        check_test("num-examples", {}, 2, 0, content, metrics)


def test_a_metric_that_is_named_like_the_counts_is_ignored() -> None:
    metrics = MetricRecord({"accuracy": 0.5, "eval_loss": 1.0, "num-examples": 10})
    metrics[GROUP_COUNTS] = 1.0
    checked = check_test("num-examples", {}, 0, 0, RecordDict({"metrics": metrics}), metrics)
    assert counts_in({0: checked}) == {}


def test_valid_group_counts_are_kept() -> None:
    metrics = MetricRecord({"accuracy": 0.5, "eval_loss": 1.0, "num-examples": 10})
    counts = [4, 1, 2, 1, 2, 0, 6, 3, 3, 2, 3, 1]
    content = RecordDict({"metrics": metrics, GROUP_COUNTS: MetricRecord({"counts": counts})})
    checked = check_test("num-examples", {0: 10}, 2, 0, content, metrics)
    assert checked[GROUP_COUNTS] == counts
