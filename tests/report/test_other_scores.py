"""Reports on tasks whose primary score is not accuracy: its unit, direction, range and margins."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import resuming
from rich.console import Console
from run_folders import MINUS, make_run, page_of, printed_tables

import fairflower
from fairflower.api.results import Results
from fairflower.data import FeatureSet
from fairflower.errors import ConfigError, RunFolderError
from fairflower.numerics.metrics import summaries, worst_fraction
from fairflower.numerics.scores import ACCURACY, AUC, Score
from fairflower.plans.power import spreads
from fairflower.report import Run, analyze, read_run, read_summary, write_summary
from fairflower.report.cells import DASH
from fairflower.report.figures import comparison as figures
from fairflower.report.frames import differences_frame, table_frame
from fairflower.report.methods import group_runs
from fairflower.report.notes import run_notes
from fairflower.report.pages import latex, markdown_tables
from fairflower.report.tuning import Trial, Tuned, chosen, tuning_tables
from fairflower.server.progress import RunProgress
from fairflower.trackers import metrics_markdown

RMSE = {"name": "rmse", "better": -1, "unit": "days", "low": 0.0, "title": "RMSE"}
RMSE["phrase"] = "root mean squared error"
MAE = {**RMSE, "name": "mae", "title": "MAE", "phrase": "mean absolute error"}
R2 = {"name": "r2", "better": 1, "unit": "", "title": "R2"}

#: Method -> RMSE in the domains a, b and c by seed. The second has the best worst domain.
VALUES = {
    "fedavg": [(2.0, 3.0, 8.0), (2.1, 3.1, 8.2), (1.9, 3.0, 7.9), (2.0, 2.9, 8.1), (2.0, 3.1, 8.0)],
    "fedheal": [(3.0, 3.0, 5.0), (3.1, 3.2, 5.1), (3.1, 2.9, 4.9), (3.0, 3.1, 5.0), (2.9, 3, 5.2)],
    "uniform": [(2.0, 3.1, 8.0), (2.1, 3, 8.21), (1.9, 3.0, 7.9), (2.0, 2.9, 8.1), (2.0, 3.1, 8.0)],
}


def make(
    folder: Path, values: Sequence[float], name: str, scores: Any = (RMSE, MAE, R2), **more: Any
) -> Run:
    """Return a run of a regression with these values in each of seven rounds."""
    rounds = [dict(zip("abc", values, strict=True))] * 7
    task = {"task": "regression:unit=days", "scores": list(scores), "test_sizes": [9, 8, 7]}
    facts: dict[str, Any] = {"classes": [], **task, **more}
    made = make_run(folder, rounds, label=name, score=scores[0]["name"], **facts)
    file = made / "run.json"
    file.write_text(re.sub(r'"class_counts": \[[^]]*\]', '"class_counts": []', file.read_text()))
    return read_run(made)


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [
        make(tmp_path / f"{name}-{seed}", values, name, seed=seed)
        for name, by_seed in VALUES.items()
        for seed, values in enumerate(by_seed)
    ]


def test_a_lower_worst_domain_is_fairer(runs: list[Run]) -> None:
    (chapter,) = analyze(runs).chapters
    said = {verdict.name: str(verdict) for verdict in chapter.verdicts[""]}
    worst = [max(a) - max(b) for a, b in zip(VALUES["fedheal"], VALUES["fedavg"], strict=True)]
    mean = f"{statistics.mean(worst):.2f}".replace("-", MINUS)
    start = f"fedheal: worst domain {mean} ± {statistics.stdev(worst):.2f} days against FedAvg, "
    assert said["fedheal"].startswith(start)
    assert "fairer (worst domain, STD) than FedAvg and Uniform" in said["fedheal"]
    assert "an average" not in said["fedheal"]  # it is better, too
    assert "less fair" not in "".join(said.values())
    assert "Fairer: lower value of the worst domain" in chapter.legend


def test_a_higher_average_is_worse(tmp_path: Path) -> None:
    values = {"fedavg": VALUES["fedavg"], "fedheal": [(7.5, 7.4, 7.6 + s / 99) for s in range(5)]}
    runs = [
        make(tmp_path / f"{name}-{seed}", row, name, seed=seed)
        for name, rows in values.items()
        for seed, row in enumerate(rows)
    ]
    verdict = str(analyze(runs).chapters[0].verdicts[""][1])
    assert "fairer (worst domain, STD) than FedAvg, with an average above FedAvg's" in verdict


def test_margins_are_relative_to_the_average_of_the_reference(runs: list[Run]) -> None:
    frame = differences_frame(runs).set_index(["method", "against", "metric"])
    averages = {name: np.mean(values) for name, values in VALUES.items()}
    for (_, against, metric), row in frame.iterrows():
        share = 0.02 if metric == "MAX" else 0.01
        assert row.margin == pytest.approx(share * averages[against.lower()])
    text = str(analyze(runs).chapters[0].verdicts[""][0])
    within = 0.02 * averages["uniform"]
    assert f"equivalent (worst domain within {within:.3g}, STD within {within / 2:.3g})" in text


def test_a_score_may_have_a_margin_of_its_own(tmp_path: Path) -> None:
    runs = [
        make(tmp_path / f"{name}-{seed}", row, name, [{**RMSE, "margin": 0.5}], seed=seed)
        for name in ("fedavg", "uniform")
        for seed, row in enumerate(VALUES[name])
    ]
    assert set(differences_frame(runs).margin) == {1.0, 0.5}
    assert not any("Margins of" in note for note in analyze(runs).chapters[0].notes)


def test_runs_declare_a_margin_and_are_compared_only_with_runs_that_have_the_same(
    tmp_path: Path,
) -> None:
    margins = {"fedavg": 1.5, "uniform": 1.5, "fedheal": 0.25}
    runs = [
        make(
            *(tmp_path / f"{name}-{seed}", row, name),
            seed=seed,
            config=f"[evaluate]\nmargin = {margins[name]}\n",
        )
        for name, rows in VALUES.items()
        for seed, row in enumerate(rows)
    ]
    frame = differences_frame(runs)
    assert set(zip(frame.method, frame.against, strict=True)) == {
        ("fedavg", "Uniform"),
        ("uniform", "FedAvg"),
    }
    for _, row in frame.iterrows():
        assert row.margin == (1.5 if row.metric == "MAX" else 0.75)
    notes = "\n".join(analyze(runs).chapters[0].notes)
    assert "differ in evaluate.margin: 1.5 (fedavg, uniform), 0.25 (fedheal)" in notes
    assert "(evaluate.margin): 1.5 days in the worst domain, half of it for STD." in notes
    assert "Margins of" not in notes
    write_summary(runs, tmp_path / "all.csv")
    pd.testing.assert_frame_equal(frame, differences_frame(read_summary(tmp_path / "all.csv")))


def test_a_declared_margin_decides_what_is_equivalent(tmp_path: Path) -> None:
    """Differences of about half a point of accuracy, within 2 points and not within 0.2."""

    def verdict(margin: float) -> str:
        folders = [
            make_run(
                tmp_path / f"{margin}-{name}-{seed}",
                [{"a": 0.8 + seed / 1e3 + gain, "b": 0.7 + seed / 2e3 + gain}] * 3,
                **{"label": name, "seed": seed, "test_sizes": [10**6] * 2},  # type: ignore[arg-type]
                config=f"[evaluate]\nmargin = {margin}\n",
            )
            for name, gains in (
                ("uniform", [0.0] * 6),
                ("fedheal", [0.004, -0.004, 0.003, -0.003, 0.002, -0.002]),
            )
            for seed, gain in enumerate(gains)
        ]
        verdicts = analyze([*map(read_run, folders)]).chapters[0].verdicts[""]
        (text,) = (str(line) for line in verdicts if str(line).startswith("fedheal"))
        return text

    assert "equivalent (worst domain within 2, STD within 1)" in verdict(0.0)
    assert "equivalent (worst domain within 1, STD within 0.5)" in verdict(1.0)
    assert "undecided" in verdict(0.2)


def test_a_declared_margin_cannot_be_changed_when_a_run_is_resumed(tmp_path: Path) -> None:
    settings = {"num-server-rounds": 1, "evaluate.margin": 1.0, "data.name": "heart-disease"}
    folder = resuming.session(resuming.config(tmp_path, **settings)).run()
    with pytest.raises(ConfigError, match=r"evaluate\.margin = 2\.0 was given, but"):
        resuming.resume(folder, **{"num-server-rounds": 2, "evaluate.margin": 2.0})


def test_tables_name_unit_and_direction(runs: list[Run]) -> None:
    (chapter,) = analyze(runs).chapters
    table, *_ = chapter.tables
    assert chapter.title == "digits: a, b, c (RMSE, days; lower is better)"
    assert table.title.startswith("RMSE per domain, mean of the last 5 tested rounds")
    spelled = "Test RMSE, days; lower is better. RMSE: root mean squared error. MAX: worst domain. "
    assert table.caption.startswith(f"{spelled}GAP: worst minus best. ")
    assert table.columns[-2:] == ["MAX", "GAP"]
    assert table.footers[0] == "Test examples by domain: a 9, b 8, c 7."
    best = {
        title: {row.name for row in table.groups[0].rows if row.cells[k].tone == "best"}
        for k, title in enumerate(table.columns)
    }
    assert best["MAX"] == best["c"] == {"fedheal"}
    assert best["a"] == {"fedavg", "uniform"}
    text = "".join(t.title + t.caption for t in chapter.all_tables)
    assert "accuracy" not in text
    assert "%" not in text.replace("95 %", "").replace("80 %", "")
    assert "points" not in text


def test_the_table_has_the_largest_value_as_the_worst(runs: list[Run]) -> None:
    frame = table_frame(runs)
    for name, values in VALUES.items():
        expected = statistics.mean(map(max, values)), statistics.stdev(map(max, values))
        assert frame.loc[name, "MAX"].tolist() == pytest.approx(expected)
        assert frame.loc[name, ("AVG", "mean")] == pytest.approx(np.mean(values))


def test_other_scores_have_tables_and_no_verdicts(tmp_path: Path) -> None:
    folder = make(tmp_path / "r", (1.0, 2.0, 3.0), "fedavg").path
    lines = [
        f"{r},domain,{d},r2,{v}\n" for r in range(7) for d, v in zip("ab", (0.5, -3), strict=True)
    ]
    with (folder / "history.csv").open("a") as history:
        history.writelines(lines)
    run = read_run(folder)
    chapter = analyze([run]).chapters[0]
    table = next(t for t in chapter.tables if t.title.startswith("R2 per domain"))
    assert table.caption.startswith("Test R2; higher is better. MIN: worst domain.")
    assert "some domains or clients have no value in these rounds" in table.caption
    assert [cell.text for cell in table.groups[0].rows[0].cells[:3]] == [
        "0.50",
        f"{MINUS}3.00",
        DASH,
    ]
    assert not any("MAE" in table.title for table in chapter.tables)
    result = Results([run])[0]
    assert result.score == {"a": 1.0, "b": 2.0, "c": 3.0}
    r2 = result.scores["r2"]
    assert math.isnan(r2.pop("c"))
    assert r2 == {"a": 0.5, "b": -3.0}
    with pytest.raises(AttributeError, match=r"RMSE, days; lower is better\. Use score"):
        _ = result.accuracy


def test_small_values_have_three_digits(tmp_path: Path) -> None:
    runs = [make(tmp_path / "r", (0.0123, 0.0456, 0.0789), "fedavg")]
    assert "0.0123 0.0456 0.0789" in printed_tables(runs[0].path)
    assert group_runs(runs)[0].score.digits == 4


def test_the_title_is_spelled_out(tmp_path: Path) -> None:
    score = {"name": "concordance", "better": 1, "unit": "%", "low": 0.0, "high": 1.0, "title": "C"}
    run = make(tmp_path / "r", (0.5, 0.6, 0.7), "fedavg", [score])
    table = analyze([run]).chapters[0].tables[0]
    assert table.caption.startswith("Test C in %. C: concordance. MIN: worst domain.")


def test_a_summary_gives_the_same_report(runs: list[Run], tmp_path: Path) -> None:
    write_summary(runs, tmp_path / "s.csv")
    assert markdown_tables(read_summary(tmp_path / "s.csv")) == markdown_tables(runs)


def test_latex_and_the_page_have_the_score(runs: list[Run], tmp_path: Path) -> None:
    text = latex(runs)
    assert r"\caption{RMSE per domain, mean" in text
    assert "Test RMSE, days; lower is better." in text
    page = page_of(tmp_path / "out", *(run.path for run in runs))
    assert re.search(r"<h3 id=.tables-1.>RMSE</h3>", page.text)
    rows = page.tables[""]  # of the clients
    assert rows[0] == ["client", "domain", "examples"]
    assert set(map(len, rows)) == {3}
    assert "Accuracy" not in page.text


def test_axes_name_the_score(runs: list[Run]) -> None:
    (comparison,) = group_runs(runs)
    labels = {
        name: figures.plot(comparison, name).axes[0].get_ylabel()
        for name in ("average", "worst", "std", "bars")
    }
    assert labels == {
        "average": "AVG of RMSE over domains, days",
        "worst": "MAX of RMSE over domains, days",
        "std": "STD of RMSE over domains (ddof 1), days",
        "bars": "RMSE, days; lower is better",
    }
    (bars,) = figures.plot(comparison, "bars").axes
    assert bars.get_ylim()[0] == 0
    assert bars.get_ylim()[1] > 8.2


def test_runs_with_other_scores_are_chapters_of_their_own(tmp_path: Path) -> None:
    values, auc = (
        (0.5, 0.6, 0.7),
        {"name": "auc", "better": 1, "unit": "%", "high": 1.0, "low": 0.0},
    )
    runs = [
        read_run(
            make_run(tmp_path / "classes", [dict(zip("abc", values, strict=True))], label="fedavg")
        ),
        make(tmp_path / "auc", values, "fedavg", [auc]),
        make(tmp_path / "rmse", values, "fedavg"),
        make(tmp_path / "hours", values, "fedavg", [{**RMSE, "unit": "hours"}]),
    ]
    titles = [chapter.title.partition(" (")[2] for chapter in analyze(runs).chapters]
    rmse = ["RMSE, days; lower is better)", "RMSE, hours; lower is better)"]
    assert titles == ["", "auc in %)", *rmse]
    assert len(table_frame(runs)) == 4
    with pytest.raises(ConfigError, match=r"domains or primary scores \(.*RMSE"):
        Results(runs).plot("average")
    with pytest.raises(ConfigError, match="different primary scores"):
        spreads(runs)


@pytest.mark.parametrize(
    ("score", "value", "expected"),
    [
        (RMSE, -0.5, r"a number >= 0"),
        ({**R2, "high": 1.0}, 1.5, r"a number in \[-inf, 1"),
        ({**RMSE, "high": 1.0}, 1.5, r"a number in \[0.0, 1.0\]"),
    ],
)
def test_values_beyond_the_range_are_refused(
    score: Mapping[str, Any], value: float, expected: str, tmp_path: Path
) -> None:
    with pytest.raises(RunFolderError, match=f"line 3: {score['name']} {value} .*{expected}"):
        make(tmp_path / "r", (value, 0.5, 0.5), "fedavg", [score])


def test_an_infinite_value_counts_as_no_test(tmp_path: Path) -> None:
    run = make(tmp_path / "r", (1.0, 2.0, math.inf), "fedavg")
    assert np.isnan(run.final()).tolist() == [False, False, True]
    assert any("c has no RMSE in any round" in note for note in run_notes(run))


def test_undefined_scores_are_said_once(tmp_path: Path) -> None:
    undefined = {"domain c": "r2 (all values of a target are equal)"}
    runs = [
        make(tmp_path / name, (1.0, 2.0, 3.0), name, undefined_metrics=undefined)
        for name in ("fedavg", "uniform")
    ]
    found = [note for note in analyze(runs).chapters[0].notes if "r2" in note]
    assert found == ["Scores are undefined for domain c: r2 (all values of a target are equal)."]


def test_relative_summaries_need_values_above_zero() -> None:
    r2 = replace(ACCURACY, name="r2", low=-math.inf, unit="")
    assert not {"Jain", "Gini", "entropy"} & {row.title for row in summaries(r2)}
    assert summaries(AUC)[-1].title == "entropy"
    values = [float(k) for k in range(20)]
    rows = {row.title: row for row in summaries(Score("mae", -1, "days"))}
    assert rows["worst 10 %"](values) == 18.5 == worst_fraction(values, better=-1)
    assert (rows["MAX"](values), rows["MAX"].better, rows["MAX"].phrase) == (19, -1, "worst domain")
    assert (rows["MIN"](values), rows["MIN"].better, rows["MIN"].phrase) == (0, 0, "best domain")


def test_tuning_chooses_the_lower_value() -> None:
    score = Score("rmse", -1, "days", high=math.inf, title="RMSE")
    rows = [(5.0, 1.0), (4.0, 3.9), (4.03, 1.0), (4.2, 0.5)]
    trials = [Trial(k, {}, "completed", row) for k, row in enumerate(rows)]
    best = {select: chosen(trials, select, score) for select in ("worst", "average")}
    assert (best["worst"], best["average"]) == (trials[1], trials[3])
    assert chosen(trials, "worst-then-average", score) == trials[2]  # 1 % of 4.0 is 0.04
    (table,) = tuning_tables([Tuned("fedavg", {}, tuple(trials), "worst", score)])
    assert table.caption.startswith("RMSE, days; lower is better. Mean of the last five")
    assert "Chosen: the lowest worst domain." in table.caption
    texts = dict(zip(table.columns, (c.text for c in table.groups[0].rows[0].cells), strict=True))
    assert (texts["chosen MAX"], texts["chosen AVG"]) == ("4.00", "3.95")


def test_the_power_of_a_plan_is_in_the_unit(runs: list[Run]) -> None:
    found = {spread.metric: spread for spread in spreads(runs)}
    average = np.mean(VALUES["uniform"])
    assert found["worst domain"].margin == pytest.approx(0.02 * average)
    assert {spread.effect for spread in found.values()} == {found["worst domain"].margin}
    assert found["STD"].score.stated == "RMSE, days; lower is better"


def test_trackers_and_the_screen_show_the_unit(tmp_path: Path) -> None:
    score = Score(**{**RMSE, "high": math.inf})  # type: ignore[arg-type]
    table = metrics_markdown({"rmse/a": 4.5, "rmse/MAX": 12.25}, score)
    assert table.splitlines()[0] == "| | RMSE, days; lower is better |"
    assert table.splitlines()[2:] == ["| a | 4.50 |", "| MAX | 12.25 |"]
    out = StringIO()
    progress = RunProgress(Console(file=out, force_terminal=True, width=100), "fedavg", 2)
    progress.start(tmp_path, score=score)
    progress.round(1, {"a": 4.5, "b": 12.25}, {"held_out_rmse/c": 7.0})
    progress.stop()
    assert "RMSE, days; lower is better" in out.getvalue()
    assert "MAX 12.25" in out.getvalue().splitlines()[-1]
    assert out.getvalue().rstrip().endswith("held out: c 7")


# --- from data to verdicts ------------------------------------------------------------


class Visits(FeatureSet):
    """Visits at three places, of which the smallest differs from the others."""

    task = "regression:unit=visits"
    slopes: ClassVar = {"city": (160, 2.0), "town": (60, 1.5), "village": (20, -2.0)}

    def all_domains(self) -> list[str]:
        return [*self.slopes]

    def _rows(self, domain: str, split: str) -> tuple[Any, Any]:
        size, slope = self.slopes[domain]
        rng = np.random.default_rng([size, split == "test"])
        x = rng.normal(size=(size, 2)).astype(np.float32)
        return x, (3 + slope * x[:, 0] + rng.normal(0, 0.3, size)).astype(np.float32)

    def labels(self, domain: str, split: str) -> Any:
        return self._rows(domain, split)[1]

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return self._rows(domain, split)[0][rows]

    def fingerprint(self) -> Any:
        return 1

    def source(self, domain: str) -> str:
        return "a test"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_regression_is_compared_and_judged(tmp_path: Path) -> None:
    results = fairflower.compare(
        {"model.name": "mlp", "engine": "inline", "train.local-epochs": 2},
        data=f"{__name__}:Visits",
        strategies=["fedavg"],
        seeds=range(5),
        rounds=3,
        jobs=1,
        output_dir=tmp_path,
        progress=False,
    )
    history = results.history.query("level == 'domain' and metric == 'rmse' and round > 0")
    means = history.groupby(["method", "seed", "name"])["value"].mean()
    worst = means.groupby(["method", "seed"]).max()
    for method in ("fedavg", "uniform"):
        shown = results.table.loc[method, "MAX"]
        assert shown.tolist() == pytest.approx([worst[method].mean(), worst[method].std()])
    lower = worst["fedavg"].mean() > worst["uniform"].mean()
    assert lower, "the small domain is served better by equal weights"
    said = next(verdict for verdict in results.verdicts if verdict.startswith("uniform"))
    assert "visits against FedAvg" in said
    assert ": fairer (worst domain" in said
    page = results.report(tmp_path / "report").read_text()
    assert "RMSE, visits; lower is better" in page
    summed = tmp_path / "s.csv"
    results.summary(summed)
    assert fairflower.read(summed).verdicts == results.verdicts
