"""The leaderboard: one file for many studies, and sentences that follow from their rows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fairflower.errors import RunFolderError
from fairflower.report.leaderboard import (
    AVERAGE,
    COLUMNS,
    WORST,
    Board,
    board_tables,
    conclusions,
    read_board,
)
from fairflower.report.tables.cells import Table

# --- what is concluded ---------------------------------------------------------------------------


def board_of(path: Path, rows: Sequence[dict[str, Any]]) -> Board:
    """The board of rows, in place of earlier rows of their methods, read back from the file."""
    new = pd.DataFrame(rows, columns=list(COLUMNS))
    if path.exists():
        old, keys = read_board(path).rows, ["benchmark", "method"]
        again = pd.MultiIndex.from_frame(old[keys]).isin(pd.MultiIndex.from_frame(new[keys]))
        new = pd.concat([old[~again], new])
    order = list(dict.fromkeys(new["benchmark"]))
    new.sort_values("benchmark", key=lambda names: names.map(order.index), kind="stable").to_csv(
        path, index=False
    )
    return read_board(path)


def made_up(tmp_path: Path, gains: dict[str, float], benchmarks: Sequence[str]) -> Board:
    """Five seeds of two domains; methods gain so many points over uniform, up to small noise."""
    rng = np.random.default_rng(0)
    found = []
    for benchmark in benchmarks:
        for number in range(1, 6):
            level = rng.uniform(40, 60)
            for method, gain in {"uniform": 0.0, **gains}.items():
                worst = level + gain + rng.normal(0, 0.5)
                for kind, value in (("chosen", worst), ("paper's", worst - 2 - gain / 10)):
                    found.append(row(benchmark, method, kind, number, value))
        for number, lr in enumerate((0.01, 0.1, 1.0)):
            for method, gain in {"uniform": 0.0, **gains}.items():
                found.append(row(benchmark, method, "trial", number, 50 + gain, lr))
    return board_of(tmp_path / "x.csv", found)


def row(
    benchmark: str, method: str, kind: str, number: int, worst: float, lr: float = 0.1
) -> dict[str, Any]:
    return {
        **{"benchmark": benchmark, "metric": "accuracy", "method": method, "kind": kind},
        **{"number": number, "settings": f"train.lr={lr} train.local-epochs=2"},
        **{"domains": "a b", "figures": f"{worst / 100} 0.9", "outcome": "completed"},
        **{"reason": "", "processor": "one"},
    }


GAINS = {"fedavg": -4.0, "fedheal": 0.0, "afl": 3.0}


def test_differences_are_paired_and_corrected_over_the_methods(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one"])
    figures = board.figures("one", WORST)
    assert figures.shape == (4, 5)
    found = board.against_reference("one", WORST)
    p = {name: stats.ttest_rel(figures.loc[name], figures.loc["uniform"]).pvalue for name in GAINS}
    least = min(p, key=p.__getitem__)
    assert found[least].p == pytest.approx(3 * p[least])
    assert {name: one.sign for name, one in found.items()} == {"fedavg": -1, "fedheal": 0, "afl": 1}
    assert found["afl"].low < 3 < found["afl"].high
    assert board.figures("one", AVERAGE).loc["afl"].mean() == pytest.approx(
        (figures.loc["afl"].mean() + 90) / 2
    )


def test_pruned_trials_count_in_the_variance_with_what_they_were_pruned_for(tmp_path: Path) -> None:
    """Where every trial of the worst learning rate is pruned, the learning rate still matters."""
    worst = {0.01: 50.0, 0.1: 50.0, 1.0: 10.0}
    found = [
        {**row("one", method, "trial", k, value, lr), "outcome": outcome}
        for method in ("uniform", "fedavg")
        for k, (lr, value) in enumerate(worst.items())
        for outcome in ["pruned" if value < 20 else "completed"]
    ]
    lost = {**row("one", "afl", "trial", 0, 0), "outcome": "lost", "figures": ""}
    tests = [row("one", "uniform", "chosen", seed, 50) for seed in (1, 2)]
    board = board_of(tmp_path / "x.csv", [*found, lost, *tests])
    assert board.variance("one")["learning rate"] == pytest.approx(1)
    assert any("over 7 trials (2 of them pruned): aggr" in line for line in conclusions(board))


def test_what_is_lost_is_told_and_in_no_mean(tmp_path: Path) -> None:
    made_up(tmp_path, GAINS, ["one"])
    gone = {**row("one", "afl", "chosen", 3, 0), "outcome": "lost", "figures": "", "reason": "NaN"}
    rows_now = read_board(tmp_path / "x.csv").rows.to_dict("records")
    there = [r for r in rows_now if (r["method"], r["kind"], r["number"]) != ("afl", "chosen", 3)]
    nowhere = {**row("one", "term", "trial", 0, 0), "outcome": "lost", "figures": ""}
    board = board_of(tmp_path / "x.csv", [*there, gone, nowhere])
    assert board.figures("one", WORST).loc["afl"].isna().sum() == 1
    assert board.against_reference("one", WORST)["afl"].n == 4
    _, _, one, _ = board_tables(board)
    assert list(one.footers)[1:] == [
        "afl with chosen values, seed 3, failed and is not in the means: NaN",
        "term: all trials failed, so it was not tested.",
    ]


def test_one_seed_tells_nothing(tmp_path: Path) -> None:
    found = [row("one", name, "both", 1, 50) for name in ("uniform", "afl")]
    board = board_of(tmp_path / "x.csv", [*found, row("one", "afl", "trial", 0, 50)])
    assert not any("Holm" in line for line in conclusions(board))
    assert "nan" not in str(board_tables(board))


@pytest.mark.parametrize("count", [1, 2])
def test_of_trials_that_came_to_the_same_no_variance_is_told(count: int, tmp_path: Path) -> None:
    names = ("uniform", "fedavg")  # of clients of one size they are one rule
    found = [row("one", name, "both", 1, 50) for name in names]
    found += [row("one", name, "trial", k, 50) for name in names for k in range(count)]
    board = board_of(tmp_path / "x.csv", found)
    assert not any("variance" in line for line in conclusions(board))
    assert [c.text for c in board_tables(board)[-1].groups[0].rows[0].cells] == ["\N{EN DASH}"]


@pytest.mark.parametrize("name", ["fedmgda+", "fedmgda+:epsilon=0.2", "scaffold+fedmgda+:eta=2"])
def test_a_plus_that_ends_a_rules_name_is_no_local_training(name: str, tmp_path: Path) -> None:
    found = [row("one", m, "trial", k, 50 + k, lr=0.1**k) for m in (name, "afl") for k in (0, 1, 2)]
    tests = [row("one", "uniform", "chosen", 1, 50)]
    shares = board_of(tmp_path / "x.csv", [*found, *tests]).variance("one")
    assert ("local training" in shares) == name.startswith("scaffold")


def test_sentences_follow_from_the_rows(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one", "two", "three"])
    said = conclusions(board)
    assert (
        "one: better than uniform weights in the worst domain, after Holm's correction over 3 "
        "methods: afl; worse: fedavg." in said
    )
    assert "Better than uniform weights on more than two of 3 benchmarks: afl (3)." in said
    (moved,) = (line for line in said if line.startswith("two: tuning changes"))
    assert "from +1.60 (fedavg) to +2.30 (afl)" in moved
    assert "chosen values is 1.00" in moved or "chosen values is 0.67" in moved
    text = "\n".join(said)
    assert "Over 3 benchmarks, Friedman's test gives p = 0.0" in text
    assert (
        "two: shares of the variance over 12 trials (0 of them pruned): aggregation 100.0 %" in text
    )


def test_what_tuning_moves_is_told_by_hand(tmp_path: Path) -> None:
    """Three seeds at the paper's and the chosen values; term has the best average of both."""
    found = []
    for number in (1, 2, 3):
        worst = 49 + number
        found += [
            row("one", "uniform", "both", number, worst),
            row("one", "afl", "paper's", number, worst + 5),
            row("one", "afl", "chosen", number, worst + 6),
            row("one", "fedheal", "paper's", number, worst - 10),
            row("one", "fedheal", "chosen", number, worst + 10),
        ]
        other = worst + (1, -1, 0.3)[number - 1]
        figures = f"{other / 100} {1 - (worst - other) / 100}"
        found.append({**row("one", "term", "both", number, other), "figures": figures})
    gone = {"outcome": "lost", "figures": ""}
    found += [{**row("one", "qffl", "paper's", 1, 0), **gone}, row("one", "qffl", "chosen", 1, 80)]
    found += [
        {**row("one", "afl", "trial", number, 50), **more}
        for number, more in enumerate(({}, {"outcome": "pruned"}, gone))
    ]
    board = board_of(tmp_path / "x.csv", found)
    (moved,) = (line for line in conclusions(board) if "tuning changes" in line)
    assert moved == (
        "one: tuning changes the worst domain by +5.25 points on average, from +0.00 (term) to "
        "+20.00 (fedheal). 2 of 4 methods keep the paper's values. Kendall's tau between the "
        "rankings with the paper's and with the chosen values is 0.00. Best with the paper's "
        "values: afl; best after tuning: qffl."
    )
    table = board_tables(board)[2]
    cells = {r.name: dict(zip(table.columns, r.cells, strict=True)) for r in rows_of(table)}
    assert list(cells) == ["qffl", "fedheal", "afl", "term", "uniform"]
    assert (cells["fedheal"]["by tuning"].text, cells["afl"]["by tuning"].text) == (
        "+20.00", "+1.00",
    )  # fmt: skip
    assert cells["fedheal"]["against uniform"].text == "+10.00"
    assert cells["afl"]["left out"].text == "2", "what was pruned, and what was lost"
    assert cells["term"][WORST].text == "51.10"
    assert not cells["term"][AVERAGE].tone, "three seeds give no verdict"


def test_a_method_that_was_not_tested_everywhere_has_no_rank(tmp_path: Path) -> None:
    made_up(tmp_path, GAINS, ["one", "two"])
    more = [
        row("two", method, "both", number, worst + number)
        for method, worst in (("pa3fed", 10), ("term", 80))
        for number in range(1, 6)
    ]
    board = board_of(tmp_path / "x.csv", more)
    overview = rows_of(board_tables(board)[0])
    assert [r.name for r in overview][:1] + [r.name for r in overview][-2:] == [
        "afl", "term", "pa3fed",
    ]  # fmt: skip
    dash = "\N{EN DASH}"
    assert [cell.text for cell in overview[-2].cells] == [dash, "83.00 ▲", dash]
    assert overview[0].cells[-1].text == "1.0"


def test_two_benchmarks_are_not_more_than_two(tmp_path: Path) -> None:
    made_up(tmp_path, {"afl": 3.0}, ["one", "two", "three"])
    rows_now = read_board(tmp_path / "x.csv").rows.to_dict("records")
    term = [{**r, "method": "term"} for r in rows_now
            if r["method"] == "afl" and r["benchmark"] != "three"]  # fmt: skip
    said = conclusions(board_of(tmp_path / "x.csv", term))
    assert sum("methods: afl and term" in line for line in said) == 2
    assert "Better than uniform weights on more than two of 3 benchmarks: afl (3)." in said


def test_ranks_are_apart_by_more_than_the_critical_difference(tmp_path: Path) -> None:
    """Of four methods on three benchmarks it is 2.7, so that ranks 1 and 3 are not apart."""
    gains = {"afl": 3.0, "fedheal": -3.0, "fedavg": -6.0}
    said = conclusions(made_up(tmp_path, gains, ["one", "two", "three"]))
    (line,) = (line for line in said if "Friedman" in line)
    assert "The lowest mean rank, 1.0, is that of afl" in line
    assert line.endswith("critical difference, 2.7, it is better than that of fedavg.")
    last = [row("three", "afl", "both", number, 10 + number) for number in range(1, 6)]
    said = conclusions(board_of(tmp_path / "x.csv", last))
    (line,) = (line for line in said if "Friedman" in line)
    assert line.endswith("critical difference, 2.7, no method is better than another.")


def test_tables_have_a_row_for_each_method_best_first(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one", "two"])
    overview, _, one, _, variance = board_tables(board)
    assert [r.name for r in rows_of(overview)][::3] == ["afl", "fedavg"]
    afl, *_ = rows_of(overview)
    assert afl.cells[0].text == f"{board.figures('one', WORST).loc['afl'].mean():.2f} ▲"
    assert afl.cells[-1].text == "1.0"
    fedavg = rows_of(one)[-1]
    assert (fedavg.name, fedavg.remark) == ("fedavg", "train.lr=0.1 train.local-epochs=2")
    assert [cell.link for cell in afl.cells] == ["one-afl", "two-afl", ""]
    assert fedavg.anchor == "one-fedavg"
    found = board.against_reference("one", WORST)["fedavg"]
    shown = fedavg.cells[2].spread.replace("\N{MINUS SIGN}", "-")
    assert shown == f"[{found.low:.2f}, {found.high:.2f}]"
    assert variance.columns == ["aggregation", "learning rate", "rest"]
    assert not re.search("Friedman|more than two", "\n".join(conclusions(board))), (
        "of two benchmarks"
    )


def rows_of(table: Table) -> Sequence[Any]:
    (group,) = table.groups
    return group.rows


def test_a_table_tells_its_settings(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one"])
    assert "Settings: unknown." in board_tables(board)[2].footers[0]
    told = row("one", "", "protocol", 0, 0) | {"settings": "num-server-rounds=30 budget=12"}
    board = board_of(tmp_path / "x.csv", [told])
    assert "Settings: num-server-rounds=30 budget=12." in board_tables(board)[2].footers[0]
    assert board.figures("one", WORST).shape == (4, 5)


def test_another_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("benchmark,method\na,b\n")
    with pytest.raises(RunFolderError, match="lacks domains, figures"):
        read_board(tmp_path / "x.csv")
    with pytest.raises(RunFolderError, match="Cannot read"):
        read_board(tmp_path / "none.csv")
