"""Diagnostics by their shape, and clusters of clients: tables, figures and maps."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import (
    clustered,
    make_run,
    printed_tables,
    rising,
    tables_of,
)

from fairflower.report import read_run, write_report
from fairflower.report.figures import canvas, diagnostics
from fairflower.report.methods import group_runs
from fairflower.report.pages import markdown_tables


def test_diagnostics_are_grouped_by_shape(tmp_path: Path) -> None:
    """Clients 0 and 1 are of domain a, 2 and 3 of domain b; two clients take part in a round."""
    records = [
        {"round": 1, "client_ids": [0, 3], "weights": [0.25, 0.75], "scale": 2.0},
        {"round": 2, "client_ids": [2, 1], "weights": [0.5, 0.5], "gram": [[1, 2], [3, 4]],
         "dropped": {"0": "NaN"}, "clusters": ["x", "y"]},
    ]  # fmt: skip
    run = read_run(make_run(tmp_path / "r", rising(0.5), diagnostics=records))
    (name, weights), *others = diagnostics.recorded(run, axes=1).items()
    assert (name, others) == ("weights", [])
    assert weights.domains == ("a", "a", "b", "b")
    np.testing.assert_array_equal(
        weights.values, [[0.25, np.nan, np.nan, 0.75], [np.nan, 0.5, 0.5, np.nan]]
    )
    gram = diagnostics.recorded(run, axes=2)["gram"]
    assert gram.domains == ("a", "b")  # reordered by domain
    assert gram.values.tolist() == [[4, 3], [2, 1]]
    assert list(diagnostics.recorded(run, axes=0)) == ["scale"]


ROUNDS = [
    [0, 0, 0, 0],
    [0, 0, 1, 1],
    [0, 0, 0, 1],
    [None, 0, 1, 0],
    [5, None, 9, None],
    [0, 1, 2, 3],
]


def test_cluster_metrics_match_hand_computed_values_with_absent_clients(tmp_path: Path) -> None:
    clusters = read_run(clustered(tmp_path / "r", ROUNDS)).clusters
    assert clusters is not None
    assert clusters.types.tolist() == ["a", "a", "b", "b"]
    expected = [[np.nan if c is None else c for c in row] for row in ROUNDS]
    np.testing.assert_array_equal(clusters.ids, np.array(expected, float))
    np.testing.assert_array_equal(clusters.map[3], [[np.nan, np.nan], [1, 4.5], [2, 4.5], [3, 4.5]])
    assert clusters.metric("number").tolist() == [1, 2, 2, 2, 2, 4]
    np.testing.assert_allclose(clusters.metric("accuracy"), [0.5, 1, 0.75, 2 / 3, 1, 1])
    # By Hubert and Arabie's formula over pairs, computed by hand where it is not 0 or 1.
    np.testing.assert_allclose(clusters.metric("rand"), [0, 1, 0, -0.5, 1, 0], atol=1e-12)


def test_cluster_tables_match_hand_computed_values(tmp_path: Path) -> None:
    """Seeds 0 and 1; the last five rounds, and the last one."""
    other = [[0, 0, 1, 1]] * 6
    folders = [clustered(tmp_path / "r", ROUNDS), clustered(tmp_path / "s", other, seed=1)]
    plain = make_run(tmp_path / "f", rising(0.5), label="fedavg")
    page = tables_of(*folders, plain)
    late = page.table("Clusters, mean of the last 5 tested rounds (2 to 6)")
    accuracy = [100 * (1 + 0.75 + 2 / 3 + 1 + 1) / 5, 100]
    assert late == {
        "fedgcr 2 seeds": {
            "method": "fedgcr 2 seeds",
            "clusters found": f"2.2 ± {np.std([2.4, 2], ddof=1):.1f}",
            "clustering accuracy": f"{np.mean(accuracy):.2f} ± {np.std(accuracy, ddof=1):.2f}",
            "adjusted Rand index": f"{(0.3 + 1) / 2:.4f} ± {np.std([0.3, 1], ddof=1):.4f}",
        }
    }
    last = page.table("Clusters, last round (6)")["fedgcr 2 seeds"]
    assert last["clusters found"] == f"3.0 ± {np.std([4, 2], ddof=1):.1f}"
    assert last["clustering accuracy"] == "100.00 ± 0.00"
    assert last["adjusted Rand index"] == f"0.5000 ± {np.std([0, 1], ddof=1):.4f}"
    assert "Clusters, last round (6)" in printed_tables(*folders)
    assert "| 100.00 ±0.00 |" in markdown_tables([read_run(folder) for folder in folders])


def test_only_tested_rounds_count_for_clusters(tmp_path: Path) -> None:
    folder = clustered(tmp_path / "r", ROUNDS)
    lines = (folder / "history.csv").read_text().splitlines(keepends=True)
    late = ("4,domain", "5,domain", "6,domain")
    kept = [line for line in lines if not line.startswith(late)]
    (folder / "history.csv").write_text("".join(kept))
    run = read_run(folder)
    assert run.final_clusters("accuracy", 5) == pytest.approx((0.5 + 1 + 0.75) / 3)
    assert run.final_clusters("accuracy", 1) == 0.75


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_clusters_has_no_cluster_tables_or_figures(tmp_path: Path) -> None:
    record = {"round": 1, "client_ids": [0, 1], "weights": [0.5, 0.5], "num_clusters": 2.0}
    others = [{"cluster": ["x", "y"]}, {"cluster": 3.0}, {"cluster": [0.0]}, {"cluster": None}]
    records = [{**record, "round": r, **other} for r, other in enumerate(others, start=1)]
    run = read_run(make_run(tmp_path / "r", rising(0.5), diagnostics=records))
    assert run.clusters is None
    assert math.isnan(run.final_clusters("number", 5))
    assert "Cluster" not in printed_tables(run.path)
    write_report([run], tmp_path / "out")
    drawn = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert not {name for name in drawn if "map" in name or name == "clusters"}
    assert "round-num-clusters" in drawn  # as of any number that a strategy records


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_once")
def test_cluster_figures_replace_figures_of_raw_cluster_numbers(tmp_path: Path) -> None:
    seeds = [clustered(tmp_path / f"r{s}", ROUNDS * 2, seed=s) for s in range(2)]
    config = "[strategy.extra]\n"
    two = clustered(tmp_path / "two", ROUNDS[:1], label="two", strategy="two", config=config)
    bare = clustered(tmp_path / "bare", ROUNDS, label="bare", strategy="bare", mapped=False)
    write_report([read_run(folder) for folder in [*seeds, two, bare]], tmp_path / "out")
    drawn = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert {"clusters", "clients-map-1", "clients-map-2"} <= drawn
    assert not drawn & {"clients-map-3", "client-cluster", "client-map-x", "round-num-clusters"}
    text = (tmp_path / "out" / "index.html").read_text("utf-8")
    titles = re.findall(r"round (\d+): (\d) clusters?, clustering accuracy (\d+) %", text)
    chosen = [(str(r), n, p) for r, n, p in titles[:6]]
    assert chosen == [("1", "1", "50"), ("3", "2", "75"), ("5", "2", "100"),
                      ("8", "2", "100"), ("10", "2", "67"), ("12", "4", "100")]  # fmt: skip
    assert "Clusters in round 12. Cluster 0: 1 a. Cluster 1: 1 a. Cluster 2: 1 b." in text


@pytest.mark.parametrize(
    ("rows", "lowest"), [([[0, 0, 1, 1]] * 6, 0.0), ([[0, 1, 0, 1]] * 6, -0.5)]
)
def test_the_axis_of_the_adjusted_rand_index_includes_0_and_1(
    tmp_path: Path, rows: Sequence[Sequence[int]], lowest: float
) -> None:
    (comparison,) = group_runs([read_run(clustered(tmp_path / "r", rows))])
    styles = {method.name: canvas.LineStyle("black", "-", "o") for method in comparison.methods}
    over_rounds, _ = diagnostics._cluster_sketches(comparison, styles)
    *_, panel = over_rounds.figure.axes
    low, high = panel.get_ylim()
    assert low == pytest.approx(lowest)
    assert 1 <= high < 1.05


@pytest.mark.slow
@given(data=st.data())
def test_maps_do_not_depend_on_the_signs_of_the_axes(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    shape = (data.draw(st.integers(1, 6)), data.draw(st.integers(2, 8)))
    places = rng.normal(size=(*shape, 2))
    places[rng.random(shape) < 0.2] = np.nan
    places[data.draw(st.integers(0, shape[0] - 1))] = np.nan  # a round without a map
    signs = rng.choice([-1, 1], size=(shape[0], 1, 2))
    turned = diagnostics.aligned(places)
    np.testing.assert_array_equal(abs(turned), abs(places))
    there = [row for row in turned if np.isfinite(row).any()]
    for before, now in pairwise(there):
        kept, flipped = (np.nansum((before - sign * now) ** 2, axis=0) for sign in (1, -1))
        assert (kept <= flipped + 1e-12).all()
    # A map that shares no client with the previous map keeps its signs, as the first map does.
    shared = [np.isfinite(before * now).any() for before, now in pairwise(there)]
    if there and all(shared):
        other = diagnostics.aligned(places * signs)
        first = np.flatnonzero(np.isfinite(places).any(axis=(1, 2)))[0]
        np.testing.assert_array_equal(other, turned * signs[first])
