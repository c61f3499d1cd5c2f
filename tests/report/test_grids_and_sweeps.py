"""Grids of clients and strategies, and sweeps of an argument."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from run_folders import (
    clustered,
    constant,
    edit,
    make_run,
    trained_by,
)

from fairflower.report import methods, read_run, write_report
from fairflower.report.figures import canvas
from fairflower.report.figures.comparison import sketches_of_products, sketches_of_sweeps
from fairflower.report.methods import group_runs
from fairflower.report.tables import (
    product_table,
)


@pytest.mark.usefixtures("undrawn")
def test_a_grid_of_clients_and_strategies_is_a_table_grouped_by_client(tmp_path: Path) -> None:
    cells = {"sgd": (0.5, 0.6, 0.7), "fedprox": (0.8, 0.7, 0.6)}
    strategies = ("fedavg", "uniform", "fedheal")
    folders = [
        trained_by(client, strategy, a, tmp_path)
        for client, row in cells.items()
        for strategy, a in zip(strategies, row, strict=True)
    ]
    runs = [read_run(folder) for folder in folders]
    table = product_table(group_runs(runs)[0])
    assert [group.heading for group in table.groups] == ["sgd", "fedprox"]
    worst = [column == "MIN" for column in table.columns].index(True)
    for group, row in zip(table.groups, cells.values(), strict=True):
        assert [r.name for r in group.rows] == list(strategies)
        assert [r.cells[worst].text for r in group.rows] == [f"{100 * a:.2f}" for a in row]
        bold = [r.name for r in group.rows if r.cells[worst].tone == "best"]
        assert bold == [strategies[int(np.argmax(row))]]
    page = write_report(runs, tmp_path / "out")
    assert "Local training and aggregation" in page.read_text()
    assert (tmp_path / "out" / "figures" / "product.png").exists()


def test_a_grid_names_clients_with_arguments_by_their_labels(tmp_path: Path) -> None:
    clients = {  # fedprox: mu = 1; fedlsa: lambda = 0.1, tau = 0.1, alpha = 0.02
        "fedprox": 'name = "fedprox"\nmu = 1.0',
        "fedlsa:lambda=0.5:alpha=0.1": 'name = "fedlsa"\nalpha = 0.1\nlambda = 0.5',
    }
    folders = [
        make_run(
            tmp_path / f"{client}+{strategy}",
            constant(a=0.5, b=0.9),
            label=f"{client}+{strategy}",
            strategy=strategy,
            config=f"[client]\n{lines}\n",
        )
        for client, lines in clients.items()
        for strategy in ("fedavg", "uniform")
    ]
    table = product_table(group_runs(map(read_run, folders))[0])
    assert {group.heading: [row.name for row in group.rows] for group in table.groups} == {
        client: ["fedavg", "uniform"] for client in clients
    }


@pytest.mark.parametrize(
    "pairs", [[("sgd", "fedavg"), ("sgd", "fedheal")], [("sgd", "fedavg"), ("moon", "fedavg")]]
)
def test_a_single_client_or_a_single_strategy_is_not_a_grid(
    pairs: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    folders = [trained_by(client, strategy, 0.5, tmp_path) for client, strategy in pairs]
    comparison = group_runs([read_run(folder) for folder in folders])[0]
    assert not product_table(comparison).groups
    assert list(sketches_of_products(comparison)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_once")
def test_three_values_of_an_argument_including_its_default_are_a_sweep(tmp_path: Path) -> None:
    def run(t: str) -> Path:
        folder = make_run(tmp_path / f"t{t}", constant(a=0.5, b=0.9), label=f"fedequilibria{t}")
        text = (folder / "config.toml").read_text()
        own = f'[strategy]\nname = "fedequilibria"\n{f"t = {t}" if t else ""}\n'
        (folder / "config.toml").write_text(re.sub(r"\[strategy\]\nname = .*\n", own, text))
        return folder

    folders = [run("0.0"), run(""), run("1.0")]
    make_run(tmp_path / "fedavg", constant(a=0.5, b=0.9), label="fedavg")
    runs = [read_run(folder) for folder in [*folders, tmp_path / "fedavg"]]
    (sweep,) = methods.sweeps(group_runs(runs)[0])
    assert sweep.key == "strategy.t"
    assert sweep.values.tolist() == [0.0, 0.7, 1.0]
    assert [m.name for m in sweep.methods] == [run.label for run in runs[:3]]
    assert methods.sweeps(group_runs(runs[1:])[0]) == []
    edit("history.csv", "4,domain,b,accuracy,0.9\n", "")(folders[1])
    assert methods.sweeps(group_runs(map(read_run, [*folders, tmp_path / "fedavg"]))[0]) == []
    write_report(runs, tmp_path / "out")
    assert (tmp_path / "out" / "figures" / "sweep-strategy-t.png").exists()


def test_a_sweep_figure_shows_non_numeric_values_and_clustering_accuracy(
    tmp_path: Path,
) -> None:
    def run(number: str, rounds: Sequence[Sequence[int]]) -> Path:
        name = f"t{number}"
        folder = clustered(tmp_path / name, rounds, label=name, strategy="fedgcr")
        text = (folder / "config.toml").read_text()
        own = f'name = "fedgcr"\nnum-clusters = "{number}"\n' if number else 'name = "fedgcr"\n'
        (folder / "config.toml").write_text(text.replace('name = "fedgcr"\n', own))
        return folder

    kinds = {"1": [0, 0, 0, 0], "2": [0, 0, 1, 1], "3": [0, 0, 1, 2], "auto": [0, 1, 1, 1]}
    folders = [run(number, [row] * 6) for number, row in kinds.items()]
    (sweep,) = methods.sweeps(group_runs([read_run(folder) for folder in folders])[0])
    assert sweep.key == "strategy.num-clusters"
    assert sweep.values.tolist() == [1, 2, 3]
    assert {value: method.name for value, method in sweep.others.items()} == {"auto": "tauto"}
    # Without the setting, the default is auto as well.
    default = [*folders[:3], run("", [[0, 1, 1, 1]] * 6)]
    comparison = group_runs([read_run(folder) for folder in default])[0]
    (sweep,) = methods.sweeps(comparison)
    assert {value: method.name for value, method in sweep.others.items()} == {"auto": "t"}
    styles = {method.name: canvas.LineStyle("black", "-", "o") for method in comparison.methods}
    (sketch,) = sketches_of_sweeps(comparison, styles)
    *_, panel = sketch.figure.axes
    assert panel.get_ylabel() == "clustering accuracy, %"
    (bars,) = panel.containers
    np.testing.assert_allclose(list(bars.lines[0].get_ydata()), [50, 100, 100])
    (level,) = (line for line in panel.get_lines() if line.get_label() == "num-clusters = auto")
    np.testing.assert_allclose(level.get_ydata(), 75)
