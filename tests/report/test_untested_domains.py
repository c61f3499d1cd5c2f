"""Domains that were not tested: tables, curves and verdicts without them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import (
    ALL,
    Page,
    constant,
    edit,
    give_clients,
    make_run,
    printed_tables,
    rising,
    tables_of,
    trained_by,
    without_tests,
)

from fairflower.numerics import metrics
from fairflower.report import read_run, write_report
from fairflower.report.cells import DASH
from fairflower.report.figures import diagnostics
from fairflower.report.figures.comparison import sketches_of_products
from fairflower.report.methods import group_runs
from fairflower.report.pages import markdown_tables
from fairflower.report.tables import (
    score_table,
)


@pytest.mark.usefixtures("drawn_once")
def test_a_run_that_lost_a_site_reports_the_other_domains(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", without_tests(ALL, c=range(3, 7)))
    edit("history.csv", "2,domain,c,accuracy,0.4\n", "")(folder)
    run = read_run(folder)
    assert run.rounds.tolist() == list(range(7))
    np.testing.assert_array_equal(run.final(5), [0.54, 0.9, np.nan])
    page = write_report([run], tmp_path / "out")
    page = Page(page.read_text("utf-8"))
    row = page.table("Accuracy per domain, mean of the last 5 tested rounds (2 to 6)")
    assert row["fedheal federation 0"] == {
        "method": "fedheal federation 0",
        "a": "54.00",
        "b": "90.00",
        "c": DASH,
        "AVG": "72.00†",
        "STD ddof 1": f"{36 / math.sqrt(2):.2f}†",
        "MIN": "54.00†",
        "GAP": "36.00†",
    }
    exported = (tmp_path / "out" / "tables.md").read_text("utf-8")
    assert "| STD ddof 1 | STD ddof 0 |" in exported
    assert "| 18.00† |" in exported
    last = page.table("Accuracy per domain, last round (6)")["fedheal federation 0"]
    assert (last["a"], last["c"], last["AVG"], last["GAP"]) == ("56.00", DASH, "73.00†", "34.00†")
    fairness = page.table("Fairness over 2 domains")["fedheal federation 0"]
    assert fairness["Jain"] == f"{(0.54 + 0.9) ** 2 / (2 * (0.54**2 + 0.9**2)):.4f}†"
    note = (
        "fedheal, seed 0: c was not tested in rounds 2 to 6. Numbers marked † do not cover "
        "all domains in the same rounds, so they are not compared with other runs."
    )
    text = printed_tables(folder)
    assert note in text
    assert note in page.text
    assert note in (tmp_path / "out" / "tables.md").read_text()
    assert "fedheal: not compared, because some domains were not tested in every round." in text
    assert "nan" not in page.text


def test_a_site_that_came_back_counts_only_in_its_tested_rounds(
    tmp_path: Path,
) -> None:
    """c is tested in rounds 3 and 5 of 2 to 6."""
    values = [accuracies | {"c": 0.1 * r} for r, accuracies in enumerate(ALL)]
    folder = make_run(tmp_path / "r", without_tests(values, c=[2, 4, 6]))
    page = tables_of(folder)
    row = page.table("Accuracy per domain, mean of the last 5")["fedheal federation 0"]
    assert (row["c"], row["AVG"], row["MIN"]) == ("40.00", f"{(54 + 90 + 40) / 3:.2f}†", "40.00†")
    assert page.table("Fairness over 3 domains")["fedheal federation 0"]["MIN"] == "40.00†"
    row = page.table("Accuracy per domain, last round")["fedheal federation 0"]
    assert (row["c"], row["AVG"], row["MIN"]) == (DASH, "73.00†", "56.00†")
    assert (
        "c was not tested in rounds 2, 4 and 6. "
        "Numbers marked † do not cover all domains in the same rounds, so they are not compared "
        "with other runs."
    ) in printed_tables(folder)


def test_an_absence_before_the_averaged_rounds_changes_no_result(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg"),
        make_run(tmp_path / "h", without_tests(ALL, c=[0, 1])),
    ]
    text = printed_tables(*folders)
    assert "c was not tested in rounds 0 and 1." in text
    assert "†" not in text
    assert "fedheal: worst domain +0.00 points against FedAvg" in text


def test_the_last_round_is_compared_if_every_domain_was_tested_in_it(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg"),
        make_run(tmp_path / "h", without_tests(ALL, c=[4])),
    ]
    page = tables_of(*folders)
    assert (
        page.table("Accuracy per domain, mean of the last 5")["fedheal federation 0"]["MIN"]
        == "40.00†"
    )
    assert page.table("Accuracy per domain, last round")["fedheal federation 0"]["MIN"] == "40.00"


def test_an_unfinished_round_is_not_read_as_an_absence(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", without_tests(ALL, c=[6]), status="running")
    assert read_run(folder).rounds.tolist() == list(range(7))
    edit("history.csv", "6,run,,seconds,2.5\n", "")(folder)
    assert read_run(folder).rounds.tolist() == list(range(6))


@pytest.mark.parametrize("away", [range(1, 7), range(3, 7), [4]], ids=str)
@pytest.mark.parametrize("lost", ["fedheal", "uniform"])
def test_runs_not_tested_on_the_same_domains_and_rounds_are_not_compared(
    tmp_path: Path, lost: str, away: Sequence[int]
) -> None:
    """Without its worst domain fedheal would be the fairest, so it must not be compared."""
    folders = [
        make_run(
            tmp_path / f"{label}-{seed}",
            without_tests(constant(a=a, b=0.9, c=0.4), **({"c": away} if label == lost else {})),
            label=label,
            seed=seed,
        )
        for label, a in (("fedavg", 0.5), ("uniform", 0.6), ("fedheal", 0.7))
        for seed in range(3)
    ]
    page = tables_of(*folders)
    table = page.table("Difference from the baselines")
    first = list(table[next(name for name in table if name.startswith(lost))].values())
    assert set(first[1:]) == {DASH}
    (whole,) = {"uniform", "fedheal"} - {lost}
    row_of = table[f"{whole} 3 seeds of federation 0"]
    assert row_of["MIN vs FedAvg"] == "+0.00 [0.00, 0.00]"
    text = printed_tables(*folders)
    assert f"{lost}: not compared, because some domains were not tested in every round." in text
    assert ("MIN vs Uniform" in row_of) == (lost == "fedheal")
    comparison = group_runs(map(read_run, folders))[0]
    (group,) = score_table(comparison, 5).groups
    bold = {row.name: [cell.tone for cell in row.cells] for row in group.rows}
    assert not any(bold[lost])
    (row,) = (row for row in group.rows if row.name == lost)
    assert [cell.text.endswith("†") for cell in row.cells] == 3 * [False] + 5 * [True]
    assert bold[whole][0] == "best"
    # If the only other method lacks a domain, there is nothing to compare with.
    alone = printed_tables(*(folder for folder in folders if not folder.name.startswith("fedavg")))
    if lost == "uniform":
        assert (
            "fedheal: no FedAvg or Uniform run with the same settings, rounds and seeds, tested on "
            "every domain, to compare with."
        ) in alone


def test_a_seed_that_lacks_a_domain_is_left_out_if_another_seed_has_all_domains(
    tmp_path: Path,
) -> None:
    folders = [
        make_run(tmp_path / f"r{s}", without_tests(ALL, c=range(2, 7)) if s else ALL, seed=s)
        for s in range(2)
    ]
    (method,) = group_runs(map(read_run, folders))[0].methods
    assert [run.seed for run in method.runs] == [0]
    text = printed_tables(*folders)
    assert (
        "seed 1 (completed after round 6 of 6), is left out of tables and figures: c was not "
        in (text)
    )
    assert (
        "tested in rounds 2 to 6, but other runs of the method were tested on all domains" in text
    )
    assert "†" not in text


def test_longer_runs_that_lack_a_domain_are_kept_over_shorter_complete_runs(tmp_path: Path) -> None:
    lost = make_run(tmp_path / "lost", without_tests(ALL, c=range(2, 7)))
    short = make_run(tmp_path / "short", ALL[:4], seed=1, status="stopped")
    edit("config.toml", "num-server-rounds = 3", "num-server-rounds = 6")(short)
    (method,) = group_runs(map(read_run, [lost, short]))[0].methods
    assert [run.seed for run in method.runs] == [0]
    assert [(run.seed, why) for run, why in method.left_out] == [(1, "other seeds reached round 6")]


def test_seeds_that_lack_different_domains_are_averaged_over_common_domains(
    tmp_path: Path,
) -> None:
    lost = [{"c": range(7)}, {"b": range(1, 7)}]
    folders = [
        make_run(
            tmp_path / f"r{s}",
            without_tests([{"a": 0.5 + 0.1 * s, "b": 0.9, "c": 0.4, "d": 0.2}] * 7, **without),
            seed=s,
            domains=["a", "b", "c", "d"],
        )
        for s, without in enumerate(lost)
    ]
    page = tables_of(*folders)
    row = page.table("Accuracy per domain, mean of the last 5")["fedheal 2 seeds"]
    spread = 10 / math.sqrt(2)
    assert row["a"] == f"55.00 ± {spread:.2f}"
    assert (row["b"], row["c"], row["d"]) == (DASH, DASH, "20.00 ± 0.00")
    assert row["AVG"] == f"37.50† ± {spread / 2:.2f}"
    assert row["GAP"] == f"35.00† ± {spread:.2f}"
    text = printed_tables(*folders)
    assert "seed 0: c was not tested in any round. Numbers marked" in text
    assert "seed 1: b was not tested in rounds 1 to 6. Numbers marked" in text


def test_curves_continue_over_the_tested_domains_and_mark_incomplete_rounds(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"r{s}", without_tests(ALL, c=lost), seed=s)
        for s, lost in enumerate([[2], [2, 5]])
    ]
    (method,) = group_runs(map(read_run, folders))[0].methods
    curve = method.curve(metrics.MIN)
    assert curve.whole.tolist() == [True, True, False, True, True, False, True]
    np.testing.assert_allclose(curve.mean, [0.4, 0.4, 0.52, 0.4, 0.4, 0.55, 0.4])
    of_c = method.curve(metrics.AVG, [2])
    np.testing.assert_array_equal(np.isnan(of_c.mean), ~curve.whole)
    np.testing.assert_array_equal(of_c.mean[curve.whole], 0.4)


def test_personal_models_that_were_not_tested_are_a_dash(tmp_path: Path) -> None:
    personal = without_tests(rising(0.8, rounds=6), b=range(6))
    folder = make_run(tmp_path / "d", rising(0.5), label="ditto", personal=personal)
    page = tables_of(folder)
    row = page.table("Accuracy of personal models")["ditto federation 0"]
    assert (row["a"], row["b"], row["AVG"], row["GAP"]) == ("83.00", DASH, "83.00†", DASH)
    assert row["STD ddof 1"] == row["STD ddof 0"] == DASH
    row = page.table("Accuracy per domain, mean of the last 5")["ditto federation 0"]
    assert row["AVG"] == "72.00", "the global model was tested everywhere"


def test_personal_models_that_missed_a_test_are_marked(tmp_path: Path) -> None:
    personal = rising(0.8, rounds=6)
    folder = make_run(
        tmp_path / "d", rising(0.5), label="ditto", personal=without_tests(personal, b=[4])
    )
    other = make_run(tmp_path / "e", rising(0.5), label="fedper", personal=personal)
    page = tables_of(folder, other)
    table = page.table("Accuracy of personal models")
    assert (table["ditto federation 0"]["b"], table["ditto federation 0"]["GAP"]) == (
        "90.00",
        "7.00†",
    )
    assert table["fedper federation 0"]["GAP"] == "7.00"


def test_a_single_tested_domain_of_several_has_no_spread(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", without_tests(rising(0.5), b=range(1, 7)))
    page = tables_of(folder)
    row = page.table("Accuracy per domain, mean of the last 5")["fedheal federation 0"]
    assert (row["AVG"], row["MIN"]) == ("54.00†", "54.00†")
    assert {row[name] for name in ("STD ddof 1", "STD ddof 0", "GAP")} == {DASH}
    row = page.table("Fairness over 1 domains")["fedheal federation 0"]
    assert (row["AVG"], row["MIN"], row["MAX"]) == ("54.00†", "54.00†", "54.00†")
    assert {row[name] for name in ("STD ddof 0", "GAP", "Jain", "Gini", "entropy")} == {DASH}


def test_the_types_table_covers_only_tested_clients(tmp_path: Path) -> None:
    """Three clients of a (0.54), one of b (0.9), and two of c, which are absent."""
    clients = {r: [0.54, 0.54, 0.54, 0.9] for r in range(7)}
    folder = make_run(tmp_path / "r", without_tests(ALL, c=range(2, 7)), clients=clients)
    give_clients(folder, a=3, b=1, c=2)
    page = tables_of(folder)
    row = page.table("Client types and clients")["fedheal federation 0"]
    assert row["Avg over domains"] == "72.00†"
    assert row["Avg over clients"] == f"{100 * (3 * 0.54 + 0.9) / 4:.2f}†"
    assert page.table("Fairness over 4 clients")["fedheal federation 0"]["MIN"] == "54.00†"


def test_dropped_test_replies_are_noted_with_their_reason(tmp_path: Path) -> None:
    reason = "no reply before the timeout"
    records = [
        {"round": r, "client_ids": [0, 1, 2], "weights": [0.2, 0.3, 0.5]} for r in range(1, 7)
    ]
    records.insert(2, {"round": 2, "dropped_in_test": {"3": reason}})
    records.append({"round": 6, "dropped_in_test": {"3": reason, "10": reason}})
    folder = make_run(tmp_path / "r", ALL, diagnostics=records)
    run = read_run(folder)
    assert [record["round"] for record in run.diagnostics] == list(range(1, 7))
    assert run.diagnostics[1] == records[1] | records[2]
    assert f"3 test replies were dropped, from clients 3, 10 ({reason})." in printed_tables(folder)
    assert diagnostics.recorded(run, axes=1)["weights"].values.shape == (6, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("away", "saved"), [(range(1, 7), "drawn_once"), ([4], "undrawn")], ids=["always", "once"]
)
def test_grid_figures_leave_out_methods_that_lack_a_domain(
    tmp_path: Path, away: Sequence[int], saved: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(saved)
    cells = {"sgd": (0.5, 0.6), "fedprox": (0.8, 0.7)}
    folders = [
        trained_by(client, strategy, a, tmp_path)
        for client, row in cells.items()
        for strategy, a in zip(("fedavg", "uniform"), row, strict=True)
    ]
    for r in away:
        edit("history.csv", f"{r},domain,a,accuracy,0.8\n", "")(tmp_path / "fedprox+fedavg")
    (comparison,) = group_runs([read_run(folder) for folder in folders])
    heat, convergence = sketches_of_products(comparison)
    _, worst, *_ = heat.figure.axes
    values = worst.images[0].get_array()
    np.testing.assert_allclose(np.ma.filled(values, np.nan), [[50, 60], [np.nan, 70]])
    assert "dotted" in convergence.caption
    write_report([read_run(folder) for folder in folders], tmp_path / "out")
    nothing = [read_run(tmp_path / "fedprox+fedavg")]
    write_report(nothing, tmp_path / "alone")


@given(data=st.data())
def test_tables_average_over_tested_rounds_and_domains_for_any_gaps(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Brute force, for any gaps that leave a domain in each round."""
    shape = (data.draw(st.integers(1, 7)), data.draw(st.integers(1, 3)))
    values = np.array(data.draw(st.lists(
        st.lists(st.integers(0, 100), min_size=shape[1], max_size=shape[1]),
        min_size=shape[0], max_size=shape[0],
    ))) / 100  # fmt: skip
    tested = np.array(data.draw(st.lists(
        st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]).filter(any),
        min_size=shape[0], max_size=shape[0],
    )))  # fmt: skip
    names = list("abc"[: shape[1]])
    accuracies = [
        {name: float(v) for name, v, there in zip(names, row, mask, strict=True) if there}
        for row, mask in zip(values, tested, strict=True)
    ]
    folder = tmp_path_factory.mktemp("any") / "r"
    make_run(
        folder,
        accuracies,
        rounds=range(1, shape[0] + 1),
        domains=names,
    )
    run = read_run(folder)
    last = [[values[r, d] for r in range(shape[0])[-5:] if tested[r, d]] for d in range(shape[1])]
    expected = [100 * sum(column) / len(column) if column else None for column in last]
    (row,) = score_table(group_runs([run])[0], 5).groups[0].rows
    cells = [cell.text for cell in row.cells]
    assert cells[: shape[1]] == [DASH if w is None else f"{w:.2f}" for w in expected]
    there = [w for w in expected if w is not None]
    mark = "" if tested[-5:].all() else "†"
    assert cells[shape[1]].endswith(mark)
    assert float(cells[shape[1]].rstrip("†")) == pytest.approx(sum(there) / len(there), abs=0.006)
    gap = f"{max(there) - min(there):.2f}{mark}" if len(there) > 1 or shape[1] == 1 else DASH
    assert cells[-2:] == [f"{min(there):.2f}{mark}", gap]
    text = markdown_tables([run])
    for d, name in enumerate(names):
        if tested[:, d].all():
            assert f"{name} was not tested" not in text
    assert ("not tested in" in text) == (not tested.all())
