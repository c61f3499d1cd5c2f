"""Conclusions from a leaderboard's rows, checked with known effects and with SciPy."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from test_stages import FILE

from experiments.leaderboard.analysis import Findings, examples_tested
from experiments.leaderboard.design import Design, Margins
from experiments.leaderboard.document import write
from experiments.leaderboard.ledger import Ledger, Row
from experiments.leaderboard.sentences import conclusion, format_p_value, left, recorded, sentences
from experiments.leaderboard.stages import CONFIRMATION, REFERENCE, SWEEP, Planned, Stages
from experiments.leaderboard.tables import tables
from fairflower.statistics import Difference

GAINS = {"uniform": 0.0, "fedheal": 5.0, "gsam+fedism": 0.0}


def findings(
    folder: Path,
    gains: dict[str, float] = GAINS,
    federations: int = 24,
    spread: float = 1.0,
    file: str = FILE,
) -> Findings:
    """Rows of a confirmation; domain "a" is the worst, and methods gain only there."""
    folder.mkdir(exist_ok=True)
    path = folder / "board.toml"
    numbers = f'federations = "0-{federations - 1}"'
    path.write_text(re.sub(r'federations = "0-[12]"', numbers, file))
    design = Design.read(path)
    stages = Stages(design, Ledger(design.results))
    rng = np.random.default_rng(7)
    levels: dict[tuple[str, int], float] = {}
    for run in stages.left():
        if run.method not in gains or run.stage == SWEEP:
            continue
        validation, test = "0.5 0.5", ""
        if run.stage in (CONFIRMATION, REFERENCE):
            place = run.benchmark, run.federation
            level = levels.get(place) or rng.normal(50, 5)
            levels[place] = level
            worst = level + gains[run.method] + rng.normal(0, spread)
            validation, test = "", f"{worst / 100} 0.9"
        stages.ledger.add(row_of(run, validation, test))
    return Findings(stages)


def row_of(run: Planned, validation: str, test: str, outcome: str = "completed") -> Row:
    return Row(
        *(run.stage, run.benchmark, run.method, run.federation, run.settings, "a b"),
        *(validation, test, outcome, "" if outcome == "completed" else "NaN", "one", 1.0, "d"),
        run.key,
    )


def key(results: Findings, benchmark: str, method: str, federation: int) -> str:
    (of,) = [b for b in results.design.benchmarks if b.name == benchmark]
    runs = results.stages.confirmation(of)
    return next(r.key for r in runs if (r.method, r.federation) == (method, federation))


def test_a_gain_is_found_with_scipys_bonferroni_interval(tmp_path: Path) -> None:
    results = findings(tmp_path)
    plain, noisy = results.design.benchmarks
    judged = results.judged(plain)
    accuracies = results.accuracies(plain)
    pairs = {
        method: [accuracies[method][f][0] - accuracies["uniform"][f][0] for f in range(24)]
        for method in ("fedheal", "gsam+fedism")
    }
    assert conclusion(judged["fedheal"]).startswith("better by at least ")
    for method, own in pairs.items():
        one = judged[method]
        assert (one.mean, one.n) == (pytest.approx(np.mean(own)), 24)
        # Moderation brings variances together and adds degrees of freedom.
        spreads = [np.std(values, ddof=1) for values in pairs.values()]
        assert min(spreads) <= one.error * math.sqrt(24) + 1e-9
        assert one.error * math.sqrt(24) <= max(spreads) + 1e-9
        assert one.df >= 23
        width = stats.t.ppf(1 - 0.05 / 4, one.df) * one.error
        assert (one.low, one.high) == pytest.approx((one.mean - width, one.mean + width))
    # The federations of the other benchmark overlap: its variance factor is 1/n + 0.5.
    other = results.judged(noisy)["fedheal"]
    alone = results._alone(results.accuracies(noisy), [primary_of(results)], 0.0, "uniform")
    once = alone["worst half", "fedheal"]
    assert other.error == pytest.approx(once.error * math.sqrt((1 / 24 + 0.5) * 24))


def primary_of(results: Findings) -> object:
    from experiments.leaderboard.analysis import primary

    return primary(results.design)


def test_references_are_rows_of_their_own_and_change_nothing_else(tmp_path: Path) -> None:
    gains = {"alone": -8.0, "uniform": 0.0, "fedheal": 5.0, "gsam+fedism": 0.0, "pooled": 9.0}
    listed = FILE.replace("again = 2", 'again = 2\nreferences = "alone,pooled"')
    results = findings(tmp_path, gains, 6, file=listed)
    path = results.design.path
    path.write_text(path.read_text().replace('references = "alone,pooled"', ""))
    without = Findings(Stages(Design.read(path), results.stages.ledger))
    assert sentences(results) == sentences(without)
    shown, expected = tables(results), tables(without)
    assert [table.title for table in shown] == [table.title for table in expected]
    for table, other in zip(shown, expected, strict=True):
        rows, others = table.groups[0].rows, other.groups[0].rows
        assert [row for row in rows if row.name not in ("alone", "pooled")] == others
        if table.title.endswith(", confirmed"):
            assert rows[: len(others)] == others
            assert table.caption.count(" Alone and pooled: mean differences, not judged.") == 1
    for benchmark in results.design.benchmarks:
        accuracies, beside = results.accuracies(benchmark), results.of_references(benchmark)
        for name in ("alone", "pooled"):
            differences = [
                np.subtract(accuracies[name][f], accuracies["uniform"][f]) for f in range(6)
            ]
            expected_gain, _ = np.mean(differences, axis=0)
            assert beside["worst half", name] == pytest.approx(expected_gain)
            assert beside["a", name] == pytest.approx(expected_gain)
            assert beside["average", name] == pytest.approx(np.mean(differences))
    first = results.of_references(results.design.benchmarks[0])["worst half", "pooled"]
    cells = next(row.cells for row in shown[1].groups[0].rows if row.name == "pooled")
    assert [cell.text for cell in cells[1:3]] == [f"+{first:.2f}", "not judged"]


def test_sentences_report_counts_and_the_largest_detectable_difference(tmp_path: Path) -> None:
    lines = sentences(findings(tmp_path / "few", federations=4))
    assert lines[0] == "plain: fewer than 5 federations so far, so there is no conclusion."
    results = findings(tmp_path / "many", spread=0.5)
    lines = sentences(results)
    assert lines[0].startswith(
        "plain: 2 methods were compared with uniform on the worst half of the domains in 24 "
        "federations: 1 better (fedheal), 1 equivalent (gsam+fedism), 0 worse, 0 undecided; "
        "the largest difference that is detectable with 80 % power is 0."
    )
    least = float(lines[0].split(" power is ")[1].split(" ")[0])
    assert least == pytest.approx(
        max(one.detectable for one in results.judged(results.design.benchmarks[0]).values()),
        abs=0.005,
    )
    assert (
        "2 of 2 benchmarks are finished, with 2 independent data sets. Conclusions over "
        "benchmarks need all of them, their runs with uniform's other finalists, and 5 data sets."
        in lines
    )
    (counts, _) = tables(results)[0].groups[0].rows
    assert counts.name == "plain (2 domains)"
    *numbers, largest = (cell.text for cell in counts.cells)
    assert numbers == ["1 (1)", "1 (1)", "0", "0"]
    assert largest.startswith(f"{least:.2f} (")
    assert not any("none" in line.split() for line in lines)


def test_conclusions_that_hold_for_other_finalists_of_the_reference_are_counted(
    tmp_path: Path,
) -> None:
    """If the reference's other finalists are as good as fedheal, fedheal is no longer better."""
    results = findings(tmp_path)
    plain, rows = results.design.benchmarks[0], results.stages.ledger.rows
    fedheal = {r.federation: r.test for r in results.rows["plain"] if r.method == "fedheal"}
    runs = [*results.stages.references(plain)]
    assert len(runs) == 24 * (results.design.again - 1)
    assert not {run.settings for run in runs} & {r.settings for r in results.rows["plain"][:1]}
    for run in runs:
        rows[run.key] = dataclasses.replace(rows[run.key], test=fedheal[run.federation])
    again = Findings(results.stages)
    first = again.judged(plain)
    for family in again.other_references(plain).values():
        assert family["fedheal"].mean == 0
        shift = first["fedheal"].mean
        assert family["gsam+fedism"].mean == pytest.approx(first["gsam+fedism"].mean - shift)
    text = " ".join(sentences(again))
    assert "these conclusions stay: 0 of 1 better, 0 of 1 equivalent." in text
    *numbers, _ = (cell.text for cell in tables(again)[0].groups[0].rows[0].cells)
    assert numbers == ["1 (0)", "1 (0)", "0", "0"]
    del rows[runs[0].key]
    *numbers, _ = (c.text for c in tables(Findings(results.stages))[0].groups[0].rows[0].cells)
    assert numbers == ["1", "1", "0", "0"], "a run is missing"


def test_a_choice_of_the_largest_learning_rate_is_reported(tmp_path: Path) -> None:
    results = findings(tmp_path)
    plain, stages = results.design.benchmarks[0], results.stages
    rates = [point["train.lr"] for point in stages.points(plain, "fedheal")]
    best = stages.screened(plain, "fedheal", rates.index(max(rates)))
    for run in [best, *stages.trials(plain, "fedheal", rates.index(max(rates)))]:
        row = stages.ledger.rows.get(run.key) or row_of(run, "", "")
        stages.ledger.rows[run.key] = dataclasses.replace(row, validation="0.9 0.9")
    for run in [*stages.left()]:
        stages.ledger.rows[run.key] = row_of(run, "", "0.5 0.9")
    assert "fedheal" in Findings(stages).at_largest_rate(plain)
    assert "largest learning rate that it tried for" in " ".join(sentences(Findings(stages)))


def test_methods_tuned_to_the_same_values_are_both_judged(tmp_path: Path) -> None:
    """Methods that are tuned to the same values share their runs."""
    twins = FILE.replace("fedheal,gsam+fedism", "fedheal,fedheal:tau=0.3")
    results = findings(
        tmp_path, {"uniform": 0.0, "fedheal": 5.0, "fedheal:tau=0.3": 5.0}, file=twins
    )
    judged = results.judged(results.design.benchmarks[0])
    assert {"fedheal", "fedheal:tau=0.3"} <= judged.keys()


def test_a_benchmark_is_judged_when_all_its_runs_are_finished(tmp_path: Path) -> None:
    results = findings(tmp_path)
    del results.stages.ledger.rows[key(results, "plain", "fedheal", 23)]
    assert [benchmark.name for benchmark in results.benchmarks] == ["noisy"]
    assert not any(line.startswith("plain") for line in sentences(results))
    assert [table.title for table in tables(results)] == ["Summary", "noisy, confirmed", "Tuning"]
    assert left(results).startswith("Remaining runs of the confirmation: plain 1.")
    assert not left(findings(tmp_path / "all"))


def test_rows_that_the_design_no_longer_plans_do_not_count(tmp_path: Path) -> None:
    whole = findings(tmp_path)
    fewer = dataclasses.replace(whole.design.benchmarks[0], federations=tuple(range(8)))
    design = dataclasses.replace(whole.design, benchmarks=(fewer,))
    results = Findings(Stages(design, whole.stages.ledger))
    assert results.left(fewer) == 0
    assert {difference.n for difference in results.judged(fewer).values()} == {8}


def test_a_lower_std_is_marked_as_better(tmp_path: Path) -> None:
    """Domain "b" has 90 % and "a" about 50 %, so a gain on "a" lowers the spread."""
    results = findings(tmp_path)
    (_, plain, *_) = tables(results)
    (row,) = [row for row in plain.groups[0].rows if row.name == "fedheal"]
    cells = dict(zip(plain.columns, row.cells, strict=True))
    assert cells["against uniform"].text.endswith("▲")
    assert cells["STD ddof 0"].text.startswith("\N{MINUS SIGN}")
    assert cells["STD ddof 0"].text.endswith("▲")
    assert "▲ better" in plain.caption


def swept(folder: Path) -> Findings:
    results = findings(folder, federations=8)
    (sweep,) = results.stages.sweeps
    wide = dataclasses.replace(sweep, federations=tuple(range(50, 58)))
    results.stages.sweeps = [wide]
    rng = np.random.default_rng(3)
    for _, run in results.stages.swept(wide):
        value = 0.5 + 0.05 * (run.method == "fedheal") + rng.normal(0, 0.004)
        results.stages.ledger.add(row_of(run, "", f"{value} 0.9"))
    return results


def test_a_sweep_names_gains_and_lost_runs(tmp_path: Path) -> None:
    results = swept(tmp_path)
    (sweep,) = results.stages.sweeps
    assert list(sweep.places) == [
        "train.local-epochs=1",
        "train.local-epochs=2",
        "data.clients-per-domain=2",
    ]
    lines = [line for line in sentences(results) if line.startswith("Sweep")]
    assert len(lines) == 3
    assert all(": fedheal beats uniform by at least " in line for line in lines)
    for place, run in results.stages.swept(sweep):
        if place == "train.local-epochs=2" and run.federation == 50 and run.method == "fedheal":
            results.stages.ledger.add(row_of(run, "", "", "lost"))
    text = "Sweep skew, train.local-epochs=2: fedheal is lost in 1 of 8 federations; the others"
    assert any(line.startswith(text) for line in sentences(Findings(results.stages)))


def test_a_sweep_over_overlapping_federations_has_wider_intervals(tmp_path: Path) -> None:
    results = swept(tmp_path)
    (sweep,) = results.stages.sweeps
    alone = results.swept(sweep)
    overlapping = dataclasses.replace(sweep.benchmark, overlap=0.5)
    wider = results.swept(dataclasses.replace(sweep, benchmark=overlapping))
    for place, difference in alone.items():
        assert wider[place].error == pytest.approx(difference.error * math.sqrt(1 + 8 * 0.5))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "better by at least 1.50 points"),
        ({"mean": -3.0, "low": -4.5, "high": -1.5}, "worse by at least 1.50 points"),
        ({"p": 0.2, "p_same": 0.01, "margin": 2.0}, "equivalent within 2 points"),
        ({"p": 0.2, "p_same": 0.3}, "undecided"),
        ({"n": 4}, "4 federations: too few"),
    ],
)
def test_a_difference_is_better_worse_equivalent_or_undecided(
    changes: dict[str, float], expected: str
) -> None:
    one = Difference(3.0, 1.0, 24, 1.5, 4.5, 0.001)
    assert conclusion(dataclasses.replace(one, **changes)) == expected  # type: ignore[arg-type]
    undecided = dataclasses.replace(one, p=0.3, error=0.5, df=23, p_same=0.4)
    assert (
        conclusion(undecided)
        == f"undecided; a difference of {undecided.detectable:.2f} points would have been found "
        "with 80 % power"
    )


def test_lost_runs_are_named_and_excluded_from_comparisons(tmp_path: Path) -> None:
    results = findings(tmp_path)
    rows = results.stages.ledger.rows
    at = key(results, "plain", "fedheal", 3)
    rows[at] = dataclasses.replace(rows[at], test="", outcome="lost", reason="NaN")
    assert results.judged(results.design.benchmarks[0])["fedheal"].n == 23
    (_, plain, *_) = tables(results)
    assert plain.footers == ["fedheal, federation 3, is lost: NaN"]
    assert "plain: fedheal is lost in 1 of 24 federations; the others are compared." in sentences(
        results
    )
    for federation in range(24):
        at = key(results, "plain", "fedheal", federation)
        rows[at] = dataclasses.replace(rows[at], test="", outcome="lost", reason="NaN")
    again = Findings(results.stages)
    assert "plain: fedheal is lost in all federations, so it is not compared." in sentences(again)


def test_completed_runs_that_diverged_are_named_and_count(tmp_path: Path) -> None:
    results = findings(tmp_path)
    rows = results.stages.ledger.rows
    for federation in (3, 5):
        at = key(results, "plain", "fedheal", federation)
        reason = f"its largest loss on a domain was {federation}1 at the end"
        rows[at] = dataclasses.replace(rows[at], reason=reason)
    assert results.judged(results.design.benchmarks[0])["fedheal"].n == 24
    (_, plain, *_) = tables(results)
    assert plain.footers == [
        "fedheal, federation 3, counts, but its largest loss on a domain was 31 at the end",
        "fedheal, federation 5, counts, but its largest loss on a domain was 51 at the end",
    ]
    assert "plain: fedheal diverged in 2 of 24 federations, whose accuracies count." in sentences(
        results
    )


def test_a_method_without_completed_trials_is_named_and_the_others_are_judged(
    tmp_path: Path,
) -> None:
    results = findings(tmp_path, {"uniform": 0.0, "gsam+fedism": 0.0})
    plain = results.design.benchmarks[0]
    assert results.left(plain) == 24
    for number in range(results.design.points):
        trial = results.stages.screened(plain, "fedheal", number)
        results.stages.ledger.add(row_of(trial, "", "", "lost"))
    assert results.stages.chosen(plain, "fedheal") == -1
    assert results.left(plain) == 0
    assert list(results.judged(plain)) == ["gsam+fedism"]
    assert (
        "plain: fedheal is not compared, because no finalist completed all its trials."
        in sentences(results)
    )
    counts = results.stages.counts()
    assert counts[CONFIRMATION, "plain"] == 2 * 24
    assert counts[SWEEP, "plain"] == 3 * 1 * 2, "the sweep's other method is never tuned"


def test_margins_changed_after_the_runs_are_reported(tmp_path: Path) -> None:
    results = findings(tmp_path)
    rows = results.stages.ledger.rows
    for key, row in rows.items():
        rows[key] = dataclasses.replace(row, margins="3 1 1")
    assert not any("margins" in line for line in sentences(results))
    changed = dataclasses.replace(results.design, margins=Margins(worst=5.0))
    again = Findings(Stages(changed, results.stages.ledger))
    assert sentences(again)[0] == (
        "plain: the margins are 5 1 1 points and were 3 1 1 when runs were confirmed, so its "
        "equivalences are by margins set afterwards."
    )


def six(same_data: str = "") -> str:
    """A design with six benchmarks; the last may have the data of another."""
    more = [
        f"[benchmarks.more{i}]\n{same_data * (i == 8)}\nnum-server-rounds = {i}\n"
        f'[benchmarks.more{i}.data]\ndomains = "plain,rotated"\n'
        for i in range(5, 9)
    ]
    return FILE + "\n".join(more)


def test_six_data_sets_give_conclusions_and_ranks_over_benchmarks(tmp_path: Path) -> None:
    results = findings(tmp_path, GAINS | {"fedheal": 9.0}, file=six())
    over = "Over 6 benchmarks with 6 independent data sets, "
    lines = [line.removeprefix(over) for line in sentences(results) if "ver 6 benchmarks" in line]
    counted = "1 better (fedheal), 1 equivalent (gsam+fedism), 0 worse, 0 undecided"
    assert lines[0].startswith(f"the mean gain over uniform on the worst half: {counted}; the larg")
    stay = "compared with each of uniform's other finalists on one benchmark at a time, these con"
    assert lines[1].startswith(stay)
    assert lines[1].endswith(f"stay: {counted}.")
    assert lines[2].endswith(f"depend equally much on the benchmark: {counted}.")
    assert lines[3].startswith("By ranks over 6 benchmarks with 6 independent data sets: Friedman'")
    (table,) = [table for table in tables(results) if table.title == "Over the benchmarks"]
    rows = {row.name: [cell.text for cell in row.cells] for row in table.groups[0].rows}
    assert list(rows) == ["fedheal", "gsam+fedism"]
    assert rows["fedheal"][-2] == "the same"
    gains = [results.judged(b)["fedheal"].mean for b in results.benchmarks]
    assert rows["fedheal"][:6] == [f"+{gain:.2f}" for gain in gains]
    assert rows["fedheal"][6] == f"+{sum(gains) / 6:.2f} ▲"


@pytest.mark.nightly
def test_conclusions_over_benchmarks_that_other_finalists_change_are_named(tmp_path: Path) -> None:
    """With another setting, uniform weights are 60 points better on one benchmark."""
    results = findings(tmp_path, GAINS | {"fedheal": 9.0}, file=six())
    plain = results.design.benchmarks[0]
    rows = results.stages.ledger.rows
    run, *_ = results.stages.references(plain)
    for other in results.stages.references(plain):
        if other.settings == run.settings:
            low, high = map(float, rows[other.key].test.split())
            rows[other.key] = dataclasses.replace(rows[other.key], test=f"{low + 0.3} {high}")
    results = Findings(results.stages)
    (stay,) = [line for line in sentences(results) if "on one benchmark at a time" in line]
    assert "0 better, " in stay
    (table,) = [table for table in tables(results) if table.title == "Over the benchmarks"]
    rows_of = {row.name: [cell.text for cell in row.cells] for row in table.groups[0].rows}
    assert rows_of["fedheal"][-2] == f"undecided (plain, {run.settings})"


@pytest.mark.nightly
def test_conclusions_over_benchmarks_wait_for_the_references_other_finalists(
    tmp_path: Path,
) -> None:
    results = findings(tmp_path, file=six())
    run = next(iter(results.stages.references(results.design.benchmarks[0])))
    del results.stages.ledger.rows[run.key]
    assert results.references_left() == 1
    assert not any(line.startswith("Over 6") for line in sentences(Findings(results.stages)))


@pytest.mark.nightly
def test_benchmarks_with_the_same_data_count_once(tmp_path: Path) -> None:
    results = findings(tmp_path, file=six('same-data = "plain"'))
    assert [b.name for b in results.sources["plain"]] == ["plain", "more8"]
    gains = [results.judged(b)["fedheal"].mean for b in results.benchmarks]
    first, *others, last = gains
    assert results.over_sources()["fedheal"] == pytest.approx([(first + last) / 2, *others])
    start = "Over 6 benchmarks with 5 independent data sets, the mean gain over uniform"
    assert any(line.startswith(start) for line in sentences(results))


@pytest.mark.nightly
def test_unfinished_benchmarks_prevent_conclusions_over_benchmarks(tmp_path: Path) -> None:
    results = findings(tmp_path, file=six())
    del results.stages.ledger.rows[key(results, "noisy", "uniform", 0)]
    lines = sentences(Findings(results.stages))
    assert not any(line.startswith(("Over ", "By ranks")) for line in lines)
    assert any(line.startswith("5 of 6 benchmarks are finished, with 5 indep") for line in lines)
    results = findings(tmp_path / "two")
    del results.stages.ledger.rows[key(results, "noisy", "uniform", 0)]
    start = "1 of 2 benchmarks is finished, with 1 independent data set. "
    assert any(line.startswith(start) for line in sentences(Findings(results.stages)))


@pytest.mark.nightly
def test_a_method_that_is_not_judged_on_every_benchmark_is_named(tmp_path: Path) -> None:
    results = findings(tmp_path, file=six())
    rows = results.stages.ledger.rows
    for federation in range(20):  # four are left
        at = key(results, "plain", "fedheal", federation)
        rows[at] = dataclasses.replace(rows[at], test="", outcome="lost", reason="NaN")
    lines = sentences(Findings(results.stages))
    assert any("fedheal is not compared, because a benchmark does not judge" in s for s in lines)
    assert any("on the worst half: 0 better, 1 equivalent (gsam+fedism), 0 w" in s for s in lines)


def test_methods_with_too_few_pairs_do_not_set_the_largest_detectable_difference(
    tmp_path: Path,
) -> None:
    results = findings(tmp_path)
    rows = results.stages.ledger.rows
    for federation in range(20):  # four are left
        at = key(results, "plain", "fedheal", federation)
        rows[at] = dataclasses.replace(rows[at], test="", outcome="lost", reason="NaN")
    results = Findings(results.stages)
    judged = results.judged(results.design.benchmarks[0])
    assert judged["fedheal"].detectable > judged["gsam+fedism"].detectable
    (counts, _) = tables(results)[0].groups[0].rows
    assert counts.cells[-1].text == f"{judged['gsam+fedism'].detectable:.2f} (gsam+fedism)"
    assert any(
        f" power is {counts.cells[-1].text.replace(' ', ' points ')}" in s
        for s in sentences(results)
    )


@pytest.mark.nightly
def test_a_single_method_and_the_reference_have_no_ranks(tmp_path: Path) -> None:
    lines = sentences(findings(tmp_path, {"uniform": 0.0, "fedheal": 9.0}, file=six()))
    assert not any("By ranks" in line for line in lines)


def test_a_benchmark_without_runs_of_the_reference_is_named(tmp_path: Path) -> None:
    results = findings(tmp_path)
    rows = results.stages.ledger.rows
    for federation in range(24):
        at = key(results, "plain", "uniform", federation)
        rows[at] = dataclasses.replace(rows[at], test="", outcome="lost", reason="NaN")
    assert sentences(Findings(results.stages))[0] == (
        "plain: nothing is compared, because no run of uniform or of the other methods completed."
    )


def test_a_sweep_waits_for_all_its_methods_to_be_tuned(tmp_path: Path) -> None:
    results = swept(tmp_path)
    (sweep,) = results.stages.sweeps
    assert results.swept(sweep)
    wider = dataclasses.replace(sweep, methods=(*sweep.methods, "afl"))
    assert not results.stages.tuned(wider)
    assert results.swept(wider) == {}


def test_hours_count_planned_runs_and_other_processors_are_reported(tmp_path: Path) -> None:
    results = findings(tmp_path)
    plain = results.design.benchmarks[0]
    planned = sum(
        run.benchmark == "plain" and run.stage != SWEEP for run in results.stages.planned()
    )
    others = [m for m in results.design.screened if m not in plain.confirmed]
    planned -= len(
        [*results.stages.screening(plain, others), *results.stages.finalist_runs(plain, others)]
    )
    rows = results.stages.ledger.rows
    first = next(iter(rows.values()))
    rows["old"] = dataclasses.replace(first, key="old", seconds=3.6e6)  # of an earlier design
    assert results.hours(plain) == pytest.approx(planned / 3600)
    assert not results.on_other_processors(plain)
    for federation in range(3):
        at = key(results, "plain", "fedheal", federation)
        rows[at] = dataclasses.replace(rows[at], processor="two")
    again = Findings(results.stages)
    assert again.on_other_processors(plain) == {"fedheal": 3}
    assert "the uniform run of the same federation: fedheal 3." in tables(again)[1].caption
    lost = {"outcome": "lost", "processor": ""}
    for method, federation in (("uniform", 3), ("fedheal", 4)):
        at = key(results, "plain", method, federation)
        rows[at] = dataclasses.replace(rows[at], **lost)
    assert Findings(results.stages).on_other_processors(plain) == {"fedheal": 3}


def test_the_number_of_test_examples_is_inferred_from_accuracies() -> None:
    rng = np.random.default_rng(0)
    sizes = (30, 200, 1500)
    accuracies = {
        "m": {
            f: [
                100
                * float(f"{np.mean(rng.integers(n // 2, n, 5) / n):.6g}")  # a mean of five tests
                for n in sizes
            ]
            for f in range(60)
        }
    }
    assert examples_tested(accuracies) == list(sizes)
    assert examples_tested({"m": {f: [100 * rng.random()] for f in range(60)}}) == [0]
    assert examples_tested({"m": {f: [100.0] for f in range(60)}}) == [0]


@pytest.mark.slow
def test_the_document_has_tables_sentences_and_figures(tmp_path: Path) -> None:
    results = findings(tmp_path)
    document = write(results)
    text = document.read_text(encoding="utf-8")
    assert "**plain, confirmed**" in text
    assert "Nadeau and Bengio's factor, 1/n + 0.5" in text
    assert all(line in text for line in sentences(results))
    assert (tmp_path / "figures" / "rows-differences.png").exists()
    before = text
    assert write(results).read_text(encoding="utf-8") == before


def test_the_tuning_table_has_the_chosen_points_mean_on_validation_examples(tmp_path: Path) -> None:
    results = findings(tmp_path)
    plain = results.design.benchmarks[0]
    number = results.stages.chosen(plain, "fedheal")
    assert number is not None
    trials = results.stages.trials(plain, "fedheal", number)
    rows = results.stages.ledger.rows
    for trial, worst in zip(trials, (0.7, 0.6, 0.8), strict=False):
        rows[trial.key] = dataclasses.replace(rows[trial.key], validation=f"{worst} 0.9")
    values = [0.7, 0.6, 0.8][: len(trials)]
    (table,) = [one for one in tables(Findings(results.stages)) if one.title == "Tuning"]
    cells = {row.name: [cell.text for cell in row.cells] for row in table.groups[0].rows}
    assert cells["fedheal"][0] == f"{100 * sum(values) / len(values):.2f}"
    assert cells["uniform"] == ["50.00", "50.00"]


def test_all_recorded_runs_are_counted_with_their_hours(tmp_path: Path) -> None:
    results = findings(tmp_path)
    rows = results.stages.ledger.rows
    some = next(iter(rows.values()))
    rows["earlier"] = dataclasses.replace(some, key="earlier", seconds=7200.0)
    hours = 2 + (len(rows) - 1) / 3600
    assert recorded(results) == (
        f"All {len(rows):,} recorded runs took {hours:.1f} core-hours. 1 of them are with settings "
        "that are not planned any more."
    )


def test_small_p_values_are_bounded() -> None:
    assert [format_p_value(p) for p in (0.0312, 0.0001)] == ["0.031", "< 0.001"]
