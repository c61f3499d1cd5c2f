"""An analysis is computed once and shared by all output formats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import make_run, rising

from fairflower.errors import RunFolderError
from fairflower.report import (
    Run,
    analysis,
    analyze,
    contrasts,
    read_run,
    reading,
    terminal_table,
    write_report,
)
from fairflower.report.frames import csv_table, differences_frame
from fairflower.report.pages import latex, markdown_tables


def grid(root: Path) -> list[Run]:
    """Two clients times FedAvg, uniform weights and AFL, with two seeds each."""
    return [
        read_run(
            make_run(
                root / f"{client}-{strategy}-{seed}",
                rising(0.5 + 0.1 * place + 0.01 * seed),
                label=strategy if client == "sgd" else f"{client}+{strategy}",
                strategy=strategy,
                seed=seed,
                config=f'[client]\nname = "{client}"\n',
            )
        )
        for client in ("sgd", "moon")
        for place, strategy in enumerate(("fedavg", "uniform", "afl"))
        for seed in (0, 1)
    ]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each costly function with a non-empty first argument."""
    counts: Counter[str] = Counter()
    for module, name in (
        (analysis, "group_runs"),
        (analysis, "contrasts_of"),
        (contrasts, "judge_family"),
        (reading, "read_cluster_history"),
    ):
        real = getattr(module, name)

        def counted(*args: object, name: str = name, real: object = real) -> object:
            counts[name] += bool(args[0])
            return real(*args)  # type: ignore[operator]

        monkeypatch.setattr(module, name, counted)
    return counts


def test_all_formats_use_contrasts_that_are_computed_once(
    tmp_path: Path, calls: Counter[str], undrawn: None
) -> None:
    runs = grid(tmp_path / "runs")
    analysis = analyze(runs)
    with Console(file=(tmp_path / "screen.txt").open("w")) as console:
        console.print(terminal_table(analysis))
    first = Counter(calls)
    assert first["group_runs"] == first["contrasts_of"] == 1
    # Families: against FedAvg and against Uniform for each of the two clients, and moon against
    # sgd.
    assert first["judge_family"] == 5
    write_report(analysis, tmp_path / "report")
    for draw in (markdown_tables, latex, csv_table, differences_frame):
        assert len(draw(analysis)) > 0
    assert analyze(analysis) is analysis
    assert calls.pop("read_cluster_history") == len(runs)
    assert calls == {name: first[name] for name in calls}


def test_formats_give_the_same_text_for_runs_and_for_their_analysis(tmp_path: Path) -> None:
    runs = grid(tmp_path)
    analysis = analyze(runs)
    for draw in (markdown_tables, latex, csv_table):
        assert draw(runs) == draw(analysis)


def test_an_analysis_without_runs_is_refused() -> None:
    with pytest.raises(RunFolderError, match="No runs to report on"):
        _ = analyze([]).chapters
