"""The program behind experiments/error-rates.md runs and computes shares in percent."""

from __future__ import annotations

from pathlib import Path

import pytest


def test_rows_are_shares_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import error_rates

    rows = error_rates.rows(4, 0)
    assert [row[:2] for row in rows] == [
        [str(methods), str(replicates)]
        for methods in error_rates.METHODS
        for replicates in error_rates.REPLICATES
    ]
    assert all(0 <= float(cell) <= 100 for row in rows for cell in row[2:])
    few = error_rates.share(error_rates.any_claim, 200, 0, 10, 10)
    actual = error_rates.share(error_rates.called_better, 200, 0, 10, 24, effect=4.0)
    assert few < 12 < 95 < actual


def test_mixed_truths_count_every_false_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import error_rates

    rows = error_rates.rows_of_mixed_truths(400, 0)
    assert [row[:2] for row in rows[:3]] == [["2", "3.0"], ["2", "3.3"], ["2", "3.6"]]
    assert all(float(together) <= float(apart) for *_, together, apart in rows)
    assert max(float(row[2]) for row in rows) < 8


@pytest.mark.nightly
def test_rows_over_benchmarks_are_shares_in_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import error_rates

    rows = error_rates.rows_over_benchmarks(20, 0)
    assert [row[0] for row in rows] == ["5"] * 4 + ["6"] * 4
    assert [row[2] for row in rows[:2]] == list(error_rates.ANALYSES)
    of = {title: index for index, (title, *_) in enumerate(error_rates.OVER_BENCHMARKS, 3)}
    for row in rows:
        assert float(row[of["false equivalence"]]) <= 30 < float(row[of["4 points found"]])
        assert float(row[of["2 points found"]]) <= float(row[of["4 points found"]])
