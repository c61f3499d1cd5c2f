"""The report against tables computed by hand, and a page that must stand alone."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from rich.console import Console
from run_folders import (
    ALL,
    MINUS,
    Page,
    clustered,
    constant,
    edit,
    give_clients,
    lose,
    make_run,
    page_of,
    rising,
    shown,
    with_scores,
)

from fairflower.config import RunConfig
from fairflower.errors import RunFolderError
from fairflower.numerics import metrics
from fairflower.report import clusters, methods, read_run, terminal_table, write_report
from fairflower.report.figures import canvas, diagnostics
from fairflower.report.figures import clusters as cluster_figures
from fairflower.report.figures.comparison import draw
from fairflower.report.figures.grids import sketches_of_products, sketches_of_sweeps
from fairflower.report.measures import measures
from fairflower.report.methods import MeanStd, group_runs
from fairflower.report.pages import markdown_tables
from fairflower.report.tables.accuracy import (
    accuracy_table,
    clusters_table,
    fairness_table,
    product_table,
    quality_table,
    types_table,
)
from fairflower.server.folder import RunFolder


@pytest.fixture
def drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures for the page as they are, but with no layout sought, and files without pixels."""
    savefig = Figure.savefig

    def save(figure: Figure, target: Any, **options: Any) -> None:
        if options.get("format") == "svg":
            savefig(figure, target, **options)
        else:
            figure.set_layout_engine("none")
            Path(target).touch()

    monkeypatch.setattr(Figure, "savefig", save)


# --- reading -----------------------------------------------------------------------------


def test_reads_what_the_run_folder_writes(tmp_path: Path) -> None:
    config = RunConfig.from_flat(
        {"output-dir": str(tmp_path), "seed": 4, "strategy.name": "fedheal", "num-server-rounds": 2}
    )
    clients = [{"client_id": 0, "domain": "a", "num_examples": 3, "class_counts": [1, 2]}]
    folder = RunFolder.create(config, {"domains": ["a"], "clients": clients})
    for r in range(3):
        folder.history(r, "domain", "a", {"accuracy": 0.25 * r, "loss": 1.0})
        folder.history(r, "client", "0", {"accuracy": 0.5, "train_loss": 1.0})
        folder.history(r, "run", "", {"seconds": 1.0})
    folder.diagnostics(1, [0], {"weights": np.ones(1), "scale": 0.5}, {})
    folder.diagnostics(2, [0], {"weights": np.ones(1)}, {1: "its reply has NaN"})
    running = read_run(folder.path)
    folder.finish("completed")
    run = read_run(folder.path)
    assert (running.status, run.status, run.seed, run.label) == (
        "running",
        "completed",
        4,
        "fedheal",
    )
    assert run.rounds.tolist() == run.by_client.rounds.tolist() == [0, 1, 2]
    assert run.accuracy.tolist() == [[0.0], [0.25], [0.5]]
    assert run.by_client.accuracy.tolist() == [[0.5]] * 3
    assert run.clients[0].class_counts == (1, 2)
    assert run.config["strategy.name"] == "fedheal"
    assert run.final(window=5).tolist() == [0.375]
    assert "1 replies were dropped, of client 1" in shown(folder.path)


def test_a_stopped_run_is_readable_and_marked(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=4), status="stopped", rounds=[0, 1, 2, 3])
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("num-server-rounds = 3", "num-server-rounds = 20"))
    text = shown(folder)
    assert "seed 0, stopped after round 3 of 20" in text
    assert "mean of all 3 tested rounds (1 to 3)" in text
    page = page_of(tmp_path / "out", folder)
    assert (
        page.table("Accuracy per domain, mean of all 3")[
            "fedheal seed 0, stopped after round 3 of 20"
        ]["a"]
        == "52.00"
    )


def test_what_is_half_written_is_left_out(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=3), status="running")
    with (folder / "history.csv").open("a") as history:
        history.write("3,domain,a,accuracy,0.7\n3,domain,b,accuracy,0.1")
    with (folder / "diagnostics.jsonl").open("a") as lines:
        lines.write('{"round": 1, "client_ids": [], "x": 1}\n{"round": 2, "cli')
    run = read_run(folder)
    assert run.rounds.tolist() == [0, 1, 2]
    assert len(run.diagnostics) == 1


def test_only_tested_rounds_count(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=4), rounds=[0, 5, 10, 15])
    run = read_run(folder)
    assert run.final_rounds(5) == (5, 10, 15)
    assert run.final(5).tolist() == pytest.approx([0.52, 0.9])
    assert run.final(1).tolist() == pytest.approx([0.53, 0.9])


def test_an_untrained_model_can_be_reported(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", constant(1, a=0.1, b=0.2))
    assert "Accuracy per domain, round 0" in shown(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "run.json").unlink(), "not a run folder: it has no run.json"),
        (lambda folder: (folder / "history.csv").unlink(), "it has no history.csv"),
        (edit("run.json", "{", "["), "run.json is not valid JSON"),
        (edit("run.json", '"label"', '"lable"'), "it has no 'label'"),
        (edit("run.json", '"domains": ["a", "b"]', '"domains": ["a"]'), "client 2 is of none"),
        (edit("run.json", '"client_id"', '"id"'), "run.json does not describe a run"),
        (edit("history.csv", "round,level", "level,round"), "history.csv has the columns"),
        (edit("history.csv", "accuracy,0.9", "accuracy,90.0"), "line 5: accuracy 90.0 of domain b"),
        (edit("history.csv", "0,domain,a,accuracy", "x,domain,a,accuracy"), "line 3: cannot read"),
        (edit("diagnostics.jsonl", "{", ""), "diagnostics.jsonl, line 1 is not valid JSON"),
        (edit("diagnostics.jsonl", "round", "r"), "line 1: expected an object with a 'round'"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Any, message: str) -> None:
    folder = make_run(tmp_path / "r", rising(0.5), diagnostics=[{"round": 1}])
    damage(folder)
    with pytest.raises(RunFolderError, match=re.escape(message)) as caught:
        read_run(folder)
    assert str(folder) in str(caught.value)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"There is no run folder .*nowhere"):
        read_run(tmp_path / "nowhere")
    folder = make_run(tmp_path / "r", constant(1, a=0.1), status="failed", error="it burnt")
    with pytest.raises(
        RunFolderError, match=r"trained and tested \(failed\)\. Its error: it burnt"
    ):
        read_run(folder)
    (folder / "config.toml").write_text("seed = = 1")
    with pytest.raises(RunFolderError, match=r"config\.toml is not valid TOML"):
        read_run(folder)


def test_no_runs() -> None:
    with pytest.raises(RunFolderError, match="No runs"):
        terminal_table([])
    with pytest.raises(RunFolderError, match="No runs"):
        write_report([], Path("never"))


# --- numbers -----------------------------------------------------------------------------


def test_table_by_hand(tmp_path: Path) -> None:
    """Last five of rounds 0 to 6: a is 0.52 ... 0.56 with mean 0.54, b is 0.9."""
    page = page_of(tmp_path / "out", make_run(tmp_path / "r", rising(0.5)))
    row = page.table("Accuracy per domain, mean of the last 5 tested rounds (2 to 6)")
    assert row["fedheal seed 0"] == {
        "method": "fedheal seed 0",
        "a": "54.00",
        "b": "90.00",
        "AVG": "72.00",
        "STD ddof 1": f"{36 / math.sqrt(2):.2f}",
        "STD ddof 0": "18.00",
        "MIN": "54.00",
        "GAP": "36.00",
    }
    last = page.table("Accuracy per domain, last round (6)")["fedheal seed 0"]
    assert (last["a"], last["AVG"], last["STD ddof 0"]) == ("56.00", "73.00", "17.00")
    fairness = page.table("Fairness over 2 domains")["fedheal seed 0"]
    jain = (0.54 + 0.9) ** 2 / (2 * (0.54**2 + 0.9**2))
    assert fairness["Jain"] == f"{jain:.4f}"
    assert fairness["Gini"] == f"{0.36 / (2 * (0.54 + 0.9)):.4f}"
    assert (fairness["worst 10 %"], fairness["GAP"]) == ("54.00", "36.00")


def test_client_accuracies_have_their_own_table(tmp_path: Path) -> None:
    """Clients 0..3 test every round but client 3, which never answers."""
    clients = {r: [0.5, 0.6, 0.9] for r in range(7)}
    page = page_of(tmp_path / "out", make_run(tmp_path / "r", rising(0.5), clients=clients))
    row = page.table("Fairness over 3 clients")["fedheal seed 0"]
    assert (row["AVG"], row["MIN"], row["MAX"], row["GAP"]) == (
        "66.67", "50.00", "90.00", "40.00",
    )  # fmt: skip
    assert row["STD ddof 1"] == f"{100 * np.std([0.5, 0.6, 0.9], ddof=1):.2f}"


def test_quality_table_by_hand(tmp_path: Path) -> None:
    """Mean and population std over two seeds times the last five rounds, as FedISM's."""
    rng = np.random.default_rng(0)
    acc, auc = rng.uniform(0.3, 0.9, (2, 2, 7, 2))
    folders = [
        with_scores(
            make_run(tmp_path / f"r{seed}", constant(7, clean=0.8, corrupted=0.7), seed=seed),
            balanced_accuracy=[dict(zip(("clean", "corrupted"), v, strict=True)) for v in a],
            auc=[dict(zip(("clean", "corrupted"), v, strict=True)) for v in b],
        )
        for seed, (a, b) in enumerate(zip(acc.tolist(), auc.tolist(), strict=True))
    ]
    title = "Class-balanced accuracy and AUC, the last 5 tested rounds (2 to 6)"
    row = page_of(tmp_path / "out", *folders).table(title)["fedheal 2 seeds"]
    for name, values in (("ACC", acc), ("AUC", auc)):
        last = 100 * values[:, 2:]
        wanted = {"clean": last[..., 0], "corrupted": last[..., 1], "average": last.mean(axis=2)}
        for group, cells in wanted.items():
            assert row[f"{group} {name}"] == f"{cells.mean():.2f} ± {np.std(cells, ddof=0):.2f}"
    assert title in shown(*folders)
    assert title in markdown_tables([read_run(folder) for folder in folders])


def test_quality_table_marks_the_best_of_comparable_methods(tmp_path: Path) -> None:
    folders = []
    for label, clean in (("fedavg", 0.9), ("fedism", 0.6)):
        made = make_run(tmp_path / label, constant(clean=0.5, corrupted=0.5), label=label)
        values = constant(clean=clean, corrupted=1 - clean)
        folders.append(with_scores(made, balanced_accuracy=values))
    page = page_of(tmp_path / "out", *folders)
    rows = page.table("Class-balanced accuracy, the last 5")
    assert list(rows["fedavg seed 0"]) == [
        "method", "clean ACC", "corrupted ACC", "average ACC",
    ]  # fmt: skip
    assert rows["fedism seed 0"]["average ACC"] == "50.00 ± 0.00"
    text = markdown_tables([read_run(folder) for folder in folders])
    assert "| fedavg (seed 0) | **90.00** ±0.00 | 10.00 ±0.00 |" in text


def test_quality_table_is_for_those_who_need_it(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", rising(0.5))
    assert "Class-balanced" not in shown(plain)
    with (plain / "history.csv").open("a") as history:
        history.writelines(f"6,domain,{d},balanced_accuracy,0.5\n" for d in "ab")
    assert "Class-balanced" not in shown(plain)
    with (plain / "history.csv").open("a") as history:
        history.writelines(f"{r},domain,{d},auc,0.75\n" for r in range(7) for d in "ab")
    assert "Class-balanced accuracy and AUC" in shown(plain)
    old = make_run(tmp_path / "old", rising(0.5))
    edit("config.toml", "[data]", "[data]\ncorrupted-clients = 1")(old)
    assert "Class-balanced" not in shown(old)


def test_an_auc_that_could_not_be_had_is_a_dash(tmp_path: Path) -> None:
    values = [*constant(6, a=0.5, b=0.5), {"a": math.nan, "b": 0.5}]
    folder = make_run(tmp_path / "r", rising(0.5))
    with_scores(folder, auc=values, balanced_accuracy=constant(a=0.5, b=0.5))
    row = page_of(tmp_path / "out", folder).table("Class-balanced")["fedheal seed 0"]
    assert row["a AUC"].startswith("\N{EN DASH}")
    assert row["b AUC"] == "50.00 ± 0.00"


def test_types_table_by_hand(tmp_path: Path) -> None:
    """Three clients of a (0.54 on average) and one of b (0.9)."""
    folder = give_clients(make_run(tmp_path / "r", rising(0.5)), a=3, b=1)
    row = page_of(tmp_path / "out", folder).table("Client types and clients, mean of the last 5")
    assert row["fedheal seed 0"] == {
        "method": "fedheal seed 0",
        "Avg over domains": "72.00",
        "Avg over clients": f"{100 * (3 * 0.54 + 0.9) / 4:.2f}",
        "σ type": "18.00",  # noqa: RUF001
        "σ client": f"{100 * np.std([0.54, 0.54, 0.54, 0.9]):.2f}",  # noqa: RUF001
    }


def test_types_table_takes_the_clients_own_tests_where_all_tested(tmp_path: Path) -> None:
    own = {r: [0.1, 0.2, 0.3, 0.8] for r in range(7)}
    folder = give_clients(make_run(tmp_path / "r", rising(0.5), clients=own), a=3, b=1)
    row = page_of(tmp_path / "out", folder).table("Client types")["fedheal seed 0"]
    assert (row["Avg over domains"], row["Avg over clients"]) == ("72.00", "35.00")
    some = {r: [0.1, 0.2, 0.3] for r in range(7)}
    folder = give_clients(make_run(tmp_path / "s", rising(0.5), clients=some), a=3, b=1)
    row = page_of(tmp_path / "out", folder).table("Client types")["fedheal seed 0"]
    assert row["Avg over clients"] == "63.00"


def test_types_table_needs_domains_of_unequal_weight(tmp_path: Path) -> None:
    assert "Client types" not in shown(make_run(tmp_path / "r", rising(0.5)))


def test_types_table_stands_beside_clusters_also_where_domains_weigh_the_same(
    tmp_path: Path,
) -> None:
    found = clustered(tmp_path / "r", [[0, 0, 1, 1]] * 6)
    plain = make_run(tmp_path / "f", rising(0.5), label="fedavg")
    rows = page_of(tmp_path / "out", found, plain).table("Client types and clients, mean of")
    assert set(rows) == {"fedgcr seed 0", "fedavg seed 0"}
    for row in rows.values():
        assert row["Avg over domains"] == row["Avg over clients"] == "72.00"
        assert row["σ type"] == row["σ client"] == "18.00"  # noqa: RUF001


def test_personal_models_have_their_own_table(tmp_path: Path) -> None:
    own = make_run(tmp_path / "d", rising(0.5), label="ditto", personal=rising(0.8, rounds=6))
    plain = make_run(tmp_path / "f", rising(0.5), label="fedavg")
    page = page_of(tmp_path / "out", own, plain)
    row = page.table("Accuracy of personal models, mean of the last 5 tested rounds (2 to 6)")
    assert list(row) == ["ditto seed 0"]
    assert (row["ditto seed 0"]["a"], row["ditto seed 0"]["b"]) == ("83.00", "90.00")
    assert (row["ditto seed 0"]["AVG"], row["ditto seed 0"]["MIN"]) == ("86.50", "83.00")
    assert "personal models" not in page_of(tmp_path / "other", plain).text
    assert "Accuracy of personal models" in shown(own)


def test_seeds_become_one_row(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"r{seed}", constant(a=0.5 + shift, b=0.9), seed=seed)
        for seed, shift in [(2, 0.04), (0, 0.0), (1, 0.02)]
    ]
    row = page_of(tmp_path / "out", *folders).table("Accuracy per domain, mean of the last 5")
    assert row["fedheal 3 seeds"]["a"] == "52.00 ± 2.00"
    assert row["fedheal 3 seeds"]["b"] == "90.00 ± 0.00"
    assert row["fedheal 3 seeds"]["AVG"] == "71.00 ± 1.00"
    assert row["fedheal 3 seeds"]["GAP"] == "38.00 ± 2.00"
    assert "52.00 71.00" not in shown(*folders)
    assert [run.seed for run in group_runs(map(read_run, folders))[0].methods[0].runs] == [0, 1, 2]


def several(tmp_path: Path, label: str, values: Sequence[float], **options: Any) -> list[Path]:
    """One run per value of domain a; domain b is 0.9 throughout."""
    return [
        make_run(tmp_path / f"{label}-{s}", constant(a=a, b=0.9), label=label, seed=s, **options)
        for s, a in enumerate(values)
    ]


def test_verdict_is_paired_by_seed(tmp_path: Path) -> None:
    """Seeds differ by 20 points, methods by 3 to 5: only pairs can tell them apart."""
    folders = [
        *several(tmp_path, "uniform", [0.3, 0.5, 0.7, 0.4, 0.6]),
        *several(tmp_path, "fedheal", [0.33, 0.54, 0.75, 0.435, 0.645]),
        *several(tmp_path, "fedavg", [0.2, 0.55, 0.6, 0.3, 0.65]),
    ]
    text = shown(*folders)
    assert (
        "fedheal: worst domain +8.00 ± 8.02 points against FedAvg, +4.00 ± 0.79 points against "
        f"Uniform, STD {MINUS}5.66 ± 5.67 and {MINUS}2.83 ± 0.56 (5 seeds of federation 0): "
        "undecided against FedAvg (seen from worst domain"
    ) in text
    assert "fairer (worst domain, STD) than Uniform." in text
    assert "uniform: worst domain" in text
    alone = shown(*folders[:3])
    assert "uniform: no FedAvg run with the same settings, rounds and seeds to compare" in alone
    table = page_of(tmp_path / "out", *folders).table("Difference to the baselines")
    row = table["fedheal 5 seeds of federation 0"]
    assert row["MIN vs Uniform"].startswith("+4.00 ▲ [")
    assert row["STD vs Uniform"].startswith(f"{MINUS}2.83 ▲ [")
    assert row["AVG vs Uniform"].startswith("+2.00 ▲ [")
    assert table["uniform 5 seeds of federation 0"]["MIN vs Uniform"] == "\N{EN DASH}"
    assert table["fedavg 5 seeds of federation 0"]["MIN vs Uniform"].startswith(f"{MINUS}4.00 [")


def test_verdicts_need_five_seeds_and_clear_differences(tmp_path: Path) -> None:
    two = [
        *several(tmp_path / "2", "uniform", [0.5, 0.5]),
        *several(tmp_path / "2", "x", [0.6, 0.6]),
    ]
    said = "(2 seeds of federation 0): too few pairs for a verdict (5 needed) against Uniform"
    assert said in shown(*two)
    table = page_of(tmp_path / "out", *two).table("Difference to the baselines")
    assert table["x 2 seeds of federation 0"]["MIN vs Uniform"] == "+10.00 ± 0.00", "no mark"
    noisy = [
        *several(tmp_path / "n", "uniform", [0.5] * 5),
        *several(tmp_path / "n", "x", [0.48, 0.54, 0.57, 0.6, 0.51]),
    ]
    assert "x: worst domain +4.00 ± 4.74 points against Uniform" in shown(*noisy)
    assert "undecided against Uniform (seen from worst domain" in shown(*noisy)


def test_of_two_seeds_one_sentence_is_said_for_all_methods(tmp_path: Path) -> None:
    labels = ("fedavg", "fedheal", "uniform")
    runs = [
        make_run(tmp_path / f"{label}-{seed}", ALL, label=label, seed=seed)
        for label in labels
        for seed in (0, 1)
    ]
    said = "fedavg, uniform and fedheal: too few pairs for a verdict (5 needed); the tables have"
    text = " ".join(shown(*runs).split())
    assert text.count("too few pairs") == 1
    assert said in text


def test_clients_of_a_domain_are_told_apart_by_their_shades() -> None:
    from fairflower.report.figures.canvas import DOMAIN_COLORS, shades

    assert len(shades(DOMAIN_COLORS[0], 1)) == 1
    for color in DOMAIN_COLORS:
        found = np.array(shades(color, 5))
        assert ((found >= 0) & (found <= 1)).all()
        assert (np.diff(found.sum(axis=1)) > 0.1).all()  # dark to light


def test_less_spread_because_all_are_worse_is_not_fairer(tmp_path: Path) -> None:
    uniform = [make_run(tmp_path / f"u{s}", constant(a=0.5, b=0.9), label="uniform", seed=s)
               for s in range(5)]  # fmt: skip
    bad = [
        make_run(tmp_path / f"x{s}", constant(a=a, b=0.41), label="x", seed=s)
        for s, a in enumerate((0.4, 0.402, 0.404, 0.401, 0.403))
    ]
    assert (
        "mixed (STD better; worst domain worse) beside Uniform, with an average below Uniform's"
        in shown(*uniform, *bad)
    )


def test_estimates() -> None:
    assert MeanStd.of([1.0, 2.0, 3.0]) == MeanStd(2.0, 1.0, 3)
    assert math.isnan(MeanStd.of([1.0]).std)


def test_bold_is_the_best_of_comparable_methods(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", constant(a=0.5, b=0.9), label="fedavg"),
        make_run(tmp_path / "u", constant(a=0.6, b=0.9), label="uniform"),
        make_run(tmp_path / "l", constant(a=0.8, b=0.8), label="fedheal", config="momentum = 0.5"),
    ]
    page = page_of(tmp_path / "out", *folders).text
    table = page[page.index("<caption><span>Accuracy per domain, mean") :]
    table = table[: table.index("</table>")]
    best = re.findall(r'<td class="better"><strong>([\d.]+)', table)
    # b is a tie; STD and GAP are best where they are lowest; fedheal stands alone.
    assert best == ["90.00", "60.00", "90.00", "75.00", "21.21", "15.00", "60.00", "30.00"]


def test_the_best_of_every_figure_is_what_is_fairer(tmp_path: Path) -> None:
    """Of the best domain, and of numbers of clusters, none is better."""
    folders = [
        give_clients(make_run(tmp_path / label, constant(a=a, b=0.9), label=label), a=3, b=1)
        for label, a in (("fedavg", 0.5), ("uniform", 0.6))
    ]
    (comparison,) = group_runs(map(read_run, folders))
    for table in (fairness_table(comparison, "domains"), types_table(comparison)):
        (group,) = table.groups
        fedavg, uniform = (
            {c for c, cell in zip(table.columns, row.cells, strict=True) if cell.tone}
            for row in group.rows
        )
        assert fedavg == set()
        assert uniform == set(table.columns) - {"MAX"}
    folders = [
        clustered(tmp_path / label, rows, label=label)
        for label, rows in (("one", [[0, 0, 0, 0]] * 6), ("own", [[0, 0, 1, 1]] * 6))
    ]
    (comparison,) = group_runs(map(read_run, folders))
    found = clusters_table(comparison, 5)
    tones = [[cell.tone for cell in row.cells] for row in found.groups[0].rows]
    assert tones == [["", "", ""], ["", "better", "better"]]


def test_seeds_that_did_not_end_are_remarked_whichever_they_are(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / status, ALL, seed=seed, status=status)
        for seed, status in enumerate(("completed", "stopped"))
    ]
    table = page_of(tmp_path / "out", *folders).table("Accuracy per domain, mean")
    assert list(table) == ["fedheal 2 seeds, stopped after round 6 of 6"]


def test_what_some_seed_did_not_measure_is_in_no_table(tmp_path: Path) -> None:
    """One seed of two has personal models, clients' tests and an AUC."""
    balanced = constant(a=0.5, b=0.5)
    folders = []
    for label in ("fedavg", "uniform"):
        more: dict[str, Any] = {
            "personal": rising(0.8, rounds=6),
            "clients": {r: [0.5] * 4 for r in range(7)},
        }
        for seed, (own, scores) in enumerate([(more, {"auc": balanced}), ({}, {})]):
            made = make_run(
                tmp_path / f"{label}-{seed}", rising(0.5), label=label, seed=seed, **own
            )
            folders.append(with_scores(made, balanced_accuracy=balanced, **scores))
    page = page_of(tmp_path / "out", *folders)
    captions = " ".join(page.tables)
    assert "Accuracy per domain" in captions
    assert "Class-balanced accuracy, the last 5" in captions
    for missing in ("personal models", "clients", "AUC"):
        assert missing not in captions
    without = make_run(tmp_path / "without", rising(0.5), label="fedavg", seed=2)
    edit("config.toml", "[data]", "[data]\ncorrupted-clients = 1")(without)
    rows = page_of(tmp_path / "other", *folders, without).table("Class-balanced accuracy, the last")
    assert list(rows) == ["uniform 2 seeds"]


def test_one_group_has_no_average_beside_it(tmp_path: Path) -> None:
    folder = with_scores(make_run(tmp_path / "r", constant(a=0.5)), auc=constant(a=0.6),
                         balanced_accuracy=constant(a=0.5))  # fmt: skip
    (comparison,) = group_runs([read_run(folder)])
    assert [[f.title for f in one.figures] for one in measures(comparison)[1:]] == [
        ["a ACC"], ["a AUC"],
    ]  # fmt: skip
    row = page_of(tmp_path / "out", folder).table("Class-balanced")["fedheal seed 0"]
    assert list(row) == ["method", "a ACC", "a AUC"]


def test_beside_a_figure_that_could_not_be_had_none_is_the_best(tmp_path: Path) -> None:
    folders = []
    for label, last in (("fedavg", 0.5), ("uniform", math.nan)):
        values = [*constant(6, a=0.5, b=0.5), {"a": last, "b": 0.5}]
        made = make_run(tmp_path / label, constant(a=0.5, b=0.5), label=label)
        folders.append(with_scores(made, auc=values, balanced_accuracy=constant(a=0.5, b=0.5)))
    table = quality_table(group_runs(map(read_run, folders))[0])
    at = table.columns.index("a AUC")
    assert [row.cells[at].tone for row in table.groups[0].rows] == ["", ""]


# --- domains that were not tested -----------------------------------------------------------


DASH = "\N{EN DASH}"


@pytest.mark.usefixtures("drawn_once")
def test_a_run_that_lost_a_site_for_good_is_a_table_of_the_others(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", lose(ALL, c=range(3, 7)))
    edit("history.csv", "2,domain,c,accuracy,0.4\n", "")(folder)
    run = read_run(folder)
    assert run.rounds.tolist() == list(range(7))
    np.testing.assert_array_equal(run.final(5), [0.54, 0.9, np.nan])
    page = write_report([run], tmp_path / "out")
    page = Page(page.read_text("utf-8"))
    row = page.table("Accuracy per domain, mean of the last 5 tested rounds (2 to 6)")
    assert row["fedheal seed 0"] == {
        "method": "fedheal seed 0",
        "a": "54.00",
        "b": "90.00",
        "c": DASH,
        "AVG": "72.00†",
        "STD ddof 1": f"{36 / math.sqrt(2):.2f}†",
        "STD ddof 0": "18.00†",
        "MIN": "54.00†",
        "GAP": "36.00†",
    }
    last = page.table("Accuracy per domain, last round (6)")["fedheal seed 0"]
    assert (last["a"], last["c"], last["AVG"], last["GAP"]) == ("56.00", DASH, "73.00†", "34.00†")
    fairness = page.table("Fairness over 2 domains")["fedheal seed 0"]
    assert fairness["Jain"] == f"{(0.54 + 0.9) ** 2 / (2 * (0.54**2 + 0.9**2)):.4f}†"
    note = (
        "fedheal, seed 0: c was not tested in rounds 2 to 6. Figures marked † are not of all "
        "domains in the same rounds, and so are compared with no other run."
    )
    text = shown(folder)
    assert note in text
    assert note in page.text
    assert note in (tmp_path / "out" / "tables.md").read_text()
    assert "fedheal: not compared, as not every domain was tested throughout." in text
    assert "nan" not in page.text


def test_a_site_that_came_back_counts_for_the_rounds_in_which_it_was_tested(
    tmp_path: Path,
) -> None:
    """c is tested in rounds 3 and 5 of 2 to 6."""
    values = [accuracies | {"c": 0.1 * r} for r, accuracies in enumerate(ALL)]
    folder = make_run(tmp_path / "r", lose(values, c=[2, 4, 6]))
    page = page_of(tmp_path / "out", folder)
    row = page.table("Accuracy per domain, mean of the last 5")["fedheal seed 0"]
    assert (row["c"], row["AVG"], row["MIN"]) == ("40.00", f"{(54 + 90 + 40) / 3:.2f}†", "40.00†")
    assert page.table("Fairness over 3 domains")["fedheal seed 0"]["MIN"] == "40.00†"
    row = page.table("Accuracy per domain, last round")["fedheal seed 0"]
    assert (row["c"], row["AVG"], row["MIN"]) == (DASH, "73.00†", "56.00†")
    assert (
        "c was not tested in rounds 2, 4 and 6. The mean of c is over rounds 3 and 5 alone. "
        "Figures marked † are not of all domains in the same rounds, and so are compared with no "
        "other run."
    ) in shown(folder)


def test_an_absence_before_the_rounds_that_are_averaged_changes_nothing(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg"),
        make_run(tmp_path / "h", lose(ALL, c=[0, 1])),
    ]
    text = shown(*folders)
    assert "c was not tested in rounds 0 and 1." in text
    assert "†" not in text
    assert "fedheal: worst domain +0.00 points against FedAvg" in text


def test_the_last_round_is_compared_where_it_was_tested_on_every_domain(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg"),
        make_run(tmp_path / "h", lose(ALL, c=[4])),
    ]
    page = page_of(tmp_path / "out", *folders)
    assert (
        page.table("Accuracy per domain, mean of the last 5")["fedheal seed 0"]["MIN"] == "40.00†"
    )
    assert page.table("Accuracy per domain, last round")["fedheal seed 0"]["MIN"] == "40.00"


def test_a_round_that_is_still_being_written_is_no_absence(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", lose(ALL, c=[6]), status="running")
    assert read_run(folder).rounds.tolist() == list(range(7))
    edit("history.csv", "6,run,,seconds,2.5\n", "")(folder)
    assert read_run(folder).rounds.tolist() == list(range(6))


@pytest.mark.parametrize("away", [range(1, 7), range(3, 7), [4]], ids=str)
@pytest.mark.parametrize("lost", ["fedheal", "uniform"])
def test_what_was_not_tested_on_the_same_domains_in_the_same_rounds_is_not_compared(
    tmp_path: Path, lost: str, away: Sequence[int]
) -> None:
    """Without its worst domain fedheal would be the fairest; it is in no contest."""
    folders = [
        make_run(
            tmp_path / f"{label}-{seed}",
            lose(constant(a=a, b=0.9, c=0.4), **({"c": away} if label == lost else {})),
            label=label,
            seed=seed,
        )
        for label, a in (("fedavg", 0.5), ("uniform", 0.6), ("fedheal", 0.7))
        for seed in range(3)
    ]
    page = page_of(tmp_path / "out", *folders)
    table = page.table("Difference to the baselines")
    first = list(table[next(name for name in table if name.startswith(lost))].values())
    assert set(first[1:]) == {DASH}
    (whole,) = {"uniform", "fedheal"} - {lost}
    row_of = table[f"{whole} 3 seeds of federation 0"]
    assert row_of["MIN vs FedAvg"] == "+0.00 [0.00, 0.00]"
    text = shown(*folders)
    assert f"{lost}: not compared, as not every domain was tested throughout." in text
    assert ("vs Uniform" in text) == (lost == "fedheal")
    comparison = group_runs(map(read_run, folders))[0]
    (group,) = accuracy_table(comparison, 5).groups
    bold = {row.name: [cell.tone for cell in row.cells] for row in group.rows}
    assert not any(bold[lost])
    (row,) = (row for row in group.rows if row.name == lost)
    assert [cell.text.endswith("†") for cell in row.cells] == 3 * [False] + 5 * [True]
    assert bold[whole][0] == "better"
    # With nothing but what lacks a domain beside it, there is nothing to compare with.
    alone = shown(*(folder for folder in folders if not folder.name.startswith("fedavg")))
    if lost == "uniform":
        assert (
            "fedheal: no FedAvg or Uniform run with the same settings, rounds and seeds, tested on "
            "every domain throughout, to compare with."
        ) in alone


def test_a_seed_that_lacks_a_domain_is_left_out_where_others_do_not(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"r{s}", lose(ALL, c=range(2, 7)) if s else ALL, seed=s)
        for s in range(2)
    ]
    (method,) = group_runs(map(read_run, folders))[0].methods
    assert [run.seed for run in method.runs] == [0]
    text = shown(*folders)
    assert "seed 1, completed after round 6 of 6 is left out of tables and figures: c was not " in (
        text
    )
    assert "tested in rounds 2 to 6, other runs of the method lack no domain" in text
    assert "†" not in text


def test_the_furthest_runs_stay_also_if_shorter_ones_lack_no_domain(tmp_path: Path) -> None:
    lost = make_run(tmp_path / "lost", lose(ALL, c=range(2, 7)))
    short = make_run(tmp_path / "short", ALL[:4], seed=1, status="stopped")
    edit("config.toml", "num-server-rounds = 3", "num-server-rounds = 6")(short)
    (method,) = group_runs(map(read_run, [lost, short]))[0].methods
    assert [run.seed for run in method.runs] == [0]
    assert [(run.seed, why) for run, why in method.left_out] == [(1, "other seeds reached round 6")]


def test_seeds_that_lack_different_domains_are_averaged_over_what_all_have(
    tmp_path: Path,
) -> None:
    lost = [{"c": range(7)}, {"b": range(1, 7)}]
    folders = [
        make_run(
            tmp_path / f"r{s}",
            lose([{"a": 0.5 + 0.1 * s, "b": 0.9, "c": 0.4, "d": 0.2}] * 7, **without),
            seed=s,
            domains=["a", "b", "c", "d"],
        )
        for s, without in enumerate(lost)
    ]
    page = page_of(tmp_path / "out", *folders)
    row = page.table("Accuracy per domain, mean of the last 5")["fedheal 2 seeds"]
    spread = 10 / math.sqrt(2)
    assert row["a"] == f"55.00 ± {spread:.2f}"
    assert (row["b"], row["c"], row["d"]) == (DASH, DASH, "20.00 ± 0.00")
    assert row["AVG"] == f"37.50† ± {spread / 2:.2f}"
    assert row["GAP"] == f"35.00† ± {spread:.2f}"
    text = shown(*folders)
    assert "seed 0: c was not tested in any round. Figures marked" in text
    assert "seed 1: b was not tested in rounds 1 to 6. Figures marked" in text


def test_curves_go_on_with_the_domains_that_are_left_and_say_so(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"r{s}", lose(ALL, c=lost), seed=s)
        for s, lost in enumerate([[2], [2, 5]])
    ]
    (method,) = group_runs(map(read_run, folders))[0].methods
    curve = method.curve(metrics.worst)
    assert curve.whole.tolist() == [True, True, False, True, True, False, True]
    np.testing.assert_allclose(curve.mean, [0.4, 0.4, 0.52, 0.4, 0.4, 0.55, 0.4])
    of_c = method.curve(metrics.mean, [2])
    np.testing.assert_array_equal(np.isnan(of_c.mean), ~curve.whole)
    np.testing.assert_array_equal(of_c.mean[curve.whole], 0.4)


def test_personal_models_that_were_not_tested_are_no_crash_and_named(tmp_path: Path) -> None:
    personal = lose(rising(0.8, rounds=6), b=range(6))
    folder = make_run(tmp_path / "d", rising(0.5), label="ditto", personal=personal)
    page = page_of(tmp_path / "out", folder)
    row = page.table("Accuracy of personal models")["ditto seed 0"]
    assert (row["a"], row["b"], row["AVG"], row["GAP"]) == ("83.00", DASH, "83.00†", DASH)
    assert row["STD ddof 1"] == row["STD ddof 0"] == DASH
    row = page.table("Accuracy per domain, mean of the last 5")["ditto seed 0"]
    assert row["AVG"] == "72.00", "the global model was tested everywhere"
    assert "ditto, seed 0: personal models: b was not tested in any round." in shown(folder)


def test_personal_models_are_compared_over_the_same_rounds_too(tmp_path: Path) -> None:
    personal = rising(0.8, rounds=6)
    folder = make_run(tmp_path / "d", rising(0.5), label="ditto", personal=lose(personal, b=[4]))
    other = make_run(tmp_path / "e", rising(0.5), label="fedper", personal=personal)
    page = page_of(tmp_path / "out", folder, other)
    table = page.table("Accuracy of personal models")
    assert (table["ditto seed 0"]["b"], table["ditto seed 0"]["GAP"]) == ("90.00", "7.00†")
    assert table["fedper seed 0"]["GAP"] == "7.00"


def test_one_domain_of_several_has_no_spread(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", lose(rising(0.5), b=range(1, 7)))
    page = page_of(tmp_path / "out", folder)
    row = page.table("Accuracy per domain, mean of the last 5")["fedheal seed 0"]
    assert (row["AVG"], row["MIN"]) == ("54.00†", "54.00†")
    assert {row[name] for name in ("STD ddof 1", "STD ddof 0", "GAP")} == {DASH}
    row = page.table("Fairness over 1 domains")["fedheal seed 0"]
    assert (row["AVG"], row["MIN"], row["MAX"]) == ("54.00†", "54.00†", "54.00†")
    assert {row[name] for name in ("STD ddof 0", "GAP", "Jain", "Gini", "entropy")} == {DASH}


def test_client_types_are_of_those_that_were_tested(tmp_path: Path) -> None:
    """Three clients of a (0.54), one of b (0.9), two of c, which are away."""
    clients = {r: [0.54, 0.54, 0.54, 0.9] for r in range(7)}
    folder = make_run(tmp_path / "r", lose(ALL, c=range(2, 7)), clients=clients)
    give_clients(folder, a=3, b=1, c=2)
    page = page_of(tmp_path / "out", folder)
    row = page.table("Client types and clients")["fedheal seed 0"]
    assert row["Avg over domains"] == "72.00†"
    assert row["Avg over clients"] == f"{100 * (3 * 0.54 + 0.9) / 4:.2f}†"
    assert page.table("Fairness over 4 clients")["fedheal seed 0"]["MIN"] == "54.00†"


def test_replies_to_tests_that_were_dropped_are_noted_with_their_reason(tmp_path: Path) -> None:
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
    assert f"3 replies to tests were dropped, of client 3, 10 ({reason})." in shown(folder)
    assert diagnostics.by_round(run, axes=1)["weights"].values.shape == (6, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("away", "saved"), [(range(1, 7), "drawn_once"), ([4], "undrawn")], ids=["always", "once"]
)
def test_figures_of_products_leave_out_what_lacks_a_domain(
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
def test_whatever_was_not_tested_the_tables_are_of_what_was(
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
    wanted = [100 * sum(column) / len(column) if column else None for column in last]
    (row,) = accuracy_table(group_runs([run])[0], 5).groups[0].rows
    cells = [cell.text for cell in row.cells]
    assert cells[: shape[1]] == [DASH if w is None else f"{w:.2f}" for w in wanted]
    there = [w for w in wanted if w is not None]
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


# --- what may be compared ----------------------------------------------------------------


def test_differing_settings_are_noted_and_not_compared(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform"),
        make_run(tmp_path / "h", constant(a=0.6, b=0.9), label="fedheal", config="momentum = 0.5"),
    ]
    note = "The runs differ in train.momentum: 0.9 (uniform), 0.5 (fedheal)."
    assert note in shown(*folders)
    assert "fedheal: no FedAvg or Uniform run with the same settings" in shown(*folders)
    page = page_of(tmp_path / "out", *folders).text
    assert note in page
    assert "train.momentum = 0.5, round 6" in page


def test_methods_that_reached_different_rounds_are_noted_and_not_compared(tmp_path: Path) -> None:
    uniform = make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform")
    short = make_run(tmp_path / "h", constant(4, a=0.6, b=0.9), status="stopped")
    edit("config.toml", "num-server-rounds = 3", "num-server-rounds = 6")(short)
    text = shown(uniform, short)
    assert (
        "The runs reached different rounds: 6 (uniform), 3 (fedheal). Only methods at the same "
        "round are compared." in text
    )
    assert "fedheal: no FedAvg or Uniform run with the same settings, rounds and seeds" in text
    (comparison,) = group_runs(map(read_run, [uniform, short]))
    groups = accuracy_table(comparison, 5).groups
    assert [group.heading for group in groups] == ["round 6", "round 3"]


def test_values_that_reached_different_rounds_are_no_sweep(tmp_path: Path) -> None:
    folders = []
    for t, last, status in (
        ("0.0", 6, "completed"),
        ("0.5", 6, "completed"),
        ("1.0", 3, "stopped"),
    ):
        values = constant(last + 1, a=0.5, b=0.9)
        name = "fedequilibria"
        folder = make_run(tmp_path / t, values, label=f"t{t}", strategy=name, status=status)
        edit("config.toml", "[train]", f"t = {t}\n[train]")(folder)
        edit("config.toml", f"rounds = {last}", "rounds = 6")(folder)
        folders.append(folder)
    assert methods.sweeps(group_runs(map(read_run, folders))[0]) == []


@pytest.mark.parametrize(
    ("config", "note"),
    [
        (
            "[evaluate]\ntest = false\n",
            "With evaluate.test = false, accuracies are on examples kept out of training",
        ),
        (
            '[evaluate]\nby = "clients"\n',
            "With evaluate.by = clients, a domain's accuracy is the mean of its clients'",
        ),
    ],
)
def test_where_models_were_tested_is_noted(tmp_path: Path, config: str, note: str) -> None:
    usual = make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform")
    assert note not in shown(usual)
    own = make_run(tmp_path / "h", constant(a=0.5, b=0.9), config=config)
    if "test = false" in config:
        edit("history.csv", ",domain,", ",validation,")(own)
    assert note in shown(usual, own)


def test_where_a_run_was_executed_is_no_difference(tmp_path: Path) -> None:
    ray = make_run(tmp_path / "u", constant(a=0.5, b=0.9), label="uniform")
    inline = make_run(tmp_path / "h", constant(a=0.6, b=0.9), label="fedheal")
    edit("config.toml", 'engine = "ray"', 'engine = "inline"\nworkers = 2')(inline)
    edit("config.toml", '"fedheal"', '"fedheal"\ntau = "default"')(inline)
    (only,) = group_runs([read_run(ray), read_run(inline)])
    assert not only.differing
    other = make_run(tmp_path / "o", constant(a=0.6, b=0.9), label="fedheal", seed=1)
    edit("config.toml", '"fedheal"', '"fedheal"\ntau = 0.3')(other)  # its default
    (only,) = group_runs(map(read_run, [ray, inline, other]))
    assert [(method.name, len(method.runs)) for method in only.methods][1:] == [("fedheal", 2)]
    assert "points against Uniform" in shown(ray, inline)


def test_namesakes_are_told_apart(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "1", constant(a=0.5, b=0.9), config="momentum = 0.5"),
        make_run(tmp_path / "2", constant(a=0.6, b=0.9), config="momentum = 0.9"),
    ]
    (only,) = group_runs(map(read_run, folders))
    assert [m.name for m in only.methods] == [
        "fedheal (train.momentum=0.5)", "fedheal (train.momentum=0.9)",
    ]  # fmt: skip


def test_a_seed_counts_once_and_only_if_it_went_as_far(tmp_path: Path) -> None:
    old = make_run(tmp_path / "old", constant(a=0.1, b=0.9), started="2025-01-01T00:00:00+00:00")
    new = make_run(tmp_path / "new", constant(a=0.5, b=0.9))
    short = make_run(tmp_path / "short", constant(3, a=0.2, b=0.9), seed=1, status="stopped")
    edit("config.toml", "num-server-rounds = 2", "num-server-rounds = 6")(short)
    (only,) = group_runs(map(read_run, [old, short, new]))
    (method,) = only.methods
    assert [run.path.name for run in method.runs] == ["new"]
    assert {run.path.name for run, _ in method.left_out} == {"old", "short"}
    text = shown(old, short, new)
    assert "stopped after round 2 of 6 is left out" in text
    assert "a newer run has the same seed" in text


@pytest.mark.usefixtures("undrawn")
def test_other_domains_are_another_comparison(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "1", constant(a=0.5, b=0.9)),
        make_run(tmp_path / "2", constant(c=0.5)),
    ]
    write_report([read_run(folder) for folder in folders], tmp_path / "out")
    page = Page((tmp_path / "out" / "index.html").read_text("utf-8"))
    assert len([attrs for tag, attrs in page.tags if tag == "section"]) == 2
    # One domain has no spread with ddof 1, and no figure of it.
    names = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert "1-std.png" in names
    assert "2-std.png" not in names
    assert "2-average.svg" in names


def test_changed_data_and_versions_are_noted(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "1", constant(a=0.5, b=0.9), sources=["one"]),
        make_run(tmp_path / "2", constant(a=0.5, b=0.9), label="uniform", sources=["two"],
                 versions={"flwr": "1.32.0"}),
    ]  # fmt: skip
    text = shown(*folders)
    assert "same data settings had different data or clients" in text
    assert "several versions of flwr: " in text
    said = "same data settings had different data or clients"
    moved = [
        make_run(tmp_path / label, constant(a=0.5, b=0.9), label=label, sources=[source])
        for label, source in (("fedavg", "/here/digits"), ("term", "/there/digits"))
    ]
    assert said not in shown(*moved), "the same file in another folder"
    give_clients(moved[0], a=2, b=2)
    assert said in shown(*moved), "other examples of the clients"


def test_uniform_is_missed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "1", constant(a=0.5, b=0.9), label="fedavg")
    assert "Uniform averaging is not among the runs" in shown(folder)
    assert "Uniform averaging is not" not in shown(*several(tmp_path, "uniform", [0.5]))


# --- diagnostics -------------------------------------------------------------------------


def test_diagnostics_by_shape(tmp_path: Path) -> None:
    """Clients 0, 1 are of domain a and 2, 3 of domain b; rounds have two of them."""
    records = [
        {"round": 1, "client_ids": [0, 3], "weights": [0.25, 0.75], "scale": 2.0},
        {"round": 2, "client_ids": [2, 1], "weights": [0.5, 0.5], "gram": [[1, 2], [3, 4]],
         "dropped": {"0": "NaN"}, "clusters": ["x", "y"]},
    ]  # fmt: skip
    run = read_run(make_run(tmp_path / "r", rising(0.5), diagnostics=records))
    (name, weights), *others = diagnostics.by_round(run, axes=1).items()
    assert (name, others) == ("weights", [])
    assert weights.domains == ("a", "a", "b", "b")
    np.testing.assert_array_equal(
        weights.values, [[0.25, np.nan, np.nan, 0.75], [np.nan, 0.5, 0.5, np.nan]]
    )
    gram = diagnostics.pairs(run)["gram"]
    assert gram.domains == ("a", "b")  # reordered by domain
    assert gram.values.tolist() == [[4, 3], [2, 1]]
    assert list(diagnostics.by_round(run, axes=0)) == ["scale"]


# --- clusters of clients -----------------------------------------------------------------


ROUNDS = [
    [0, 0, 0, 0],
    [0, 0, 1, 1],
    [0, 0, 0, 1],
    [None, 0, 1, 0],
    [5, None, 9, None],
    [0, 1, 2, 3],
]


def test_clusters_by_hand_with_clients_that_sit_rounds_out(tmp_path: Path) -> None:
    found = read_run(clustered(tmp_path / "r", ROUNDS)).clusters
    assert found is not None
    assert found.types.tolist() == ["a", "a", "b", "b"]
    expected = [[np.nan if c is None else c for c in row] for row in ROUNDS]
    np.testing.assert_array_equal(found.ids, np.array(expected, float))
    np.testing.assert_array_equal(found.map[3], [[np.nan, np.nan], [1, 4.5], [2, 4.5], [3, 4.5]])
    assert found.metric("number").tolist() == [1, 2, 2, 2, 2, 4]
    np.testing.assert_allclose(found.metric("accuracy"), [0.5, 1, 0.75, 2 / 3, 1, 1])
    # Of pairs, by Hubert and Arabie's formula; by hand where it is not 0 or 1.
    np.testing.assert_allclose(found.metric("rand"), [0, 1, 0, -0.5, 1, 0], atol=1e-12)


def test_clusters_tables_by_hand(tmp_path: Path) -> None:
    """Seeds 0 and 1; the last five rounds, and the last one."""
    other = [[0, 0, 1, 1]] * 6
    folders = [clustered(tmp_path / "r", ROUNDS), clustered(tmp_path / "s", other, seed=1)]
    plain = make_run(tmp_path / "f", rising(0.5), label="fedavg")
    page = page_of(tmp_path / "out", *folders, plain)
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
    assert "Clusters, last round (6)" in shown(*folders)
    assert "| 100.00 ±0.00 |" in markdown_tables([read_run(folder) for folder in folders])


def test_only_tested_rounds_count_for_clusters(tmp_path: Path) -> None:
    folder = clustered(tmp_path / "r", ROUNDS)
    lines = (folder / "history.csv").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(("4,", "5,", "6,"))]
    (folder / "history.csv").write_text("".join(kept))
    run = read_run(folder)
    assert clusters.final_cluster_metric(run, "accuracy", 5) == pytest.approx((0.5 + 1 + 0.75) / 3)
    assert clusters.final_cluster_metric(run, "accuracy", 1) == 0.75


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_clusters_shows_none(tmp_path: Path) -> None:
    record = {"round": 1, "client_ids": [0, 1], "weights": [0.5, 0.5], "num_clusters": 2.0}
    others = [{"cluster": ["x", "y"]}, {"cluster": 3.0}, {"cluster": [0.0]}, {"cluster": None}]
    records = [{**record, "round": r, **other} for r, other in enumerate(others, start=1)]
    run = read_run(make_run(tmp_path / "r", rising(0.5), diagnostics=records))
    assert run.clusters is None
    assert math.isnan(clusters.final_cluster_metric(run, "number", 5))
    assert "Cluster" not in shown(run.path)
    write_report([run], tmp_path / "out")
    drawn = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert not {name for name in drawn if "map" in name or name == "clusters"}
    assert "round-num-clusters" in drawn  # as of any number that a strategy records


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_once")
def test_figures_of_clusters_take_the_place_of_their_raw_numbers(tmp_path: Path) -> None:
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
    assert "Clusters at round 12. Cluster 0: 1 a. Cluster 1: 1 a. Cluster 2: 1 b." in text


@pytest.mark.parametrize(
    ("rows", "lowest"), [([[0, 0, 1, 1]] * 6, 0.0), ([[0, 1, 0, 1]] * 6, -0.5)]
)
def test_the_axis_of_the_adjusted_rand_index_holds_0_and_1(
    tmp_path: Path, rows: Sequence[Sequence[int]], lowest: float
) -> None:
    (comparison,) = group_runs([read_run(clustered(tmp_path / "r", rows))])
    styles = {method.name: canvas.LineStyle("black", "-", "o") for method in comparison.methods}
    over_rounds, _ = cluster_figures.sketches(comparison, styles)
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
    turned = cluster_figures.aligned(places)
    np.testing.assert_array_equal(abs(turned), abs(places))
    there = [row for row in turned if np.isfinite(row).any()]
    for before, now in pairwise(there):
        kept, flipped = (np.nansum((before - sign * now) ** 2, axis=0) for sign in (1, -1))
        assert (kept <= flipped + 1e-12).all()
    # Whoever shares no client with the map before keeps its signs, as the first one does.
    shared = [np.isfinite(before * now).any() for before, now in pairwise(there)]
    if there and all(shared):
        other = cluster_figures.aligned(places * signs)
        first = np.flatnonzero(np.isfinite(places).any(axis=(1, 2)))[0]
        np.testing.assert_array_equal(other, turned * signs[first])


# --- the page ----------------------------------------------------------------------------

HOSTILE = '<script>alert("$x_1$")</script>'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with everything in it, and names that are markup and formulas."""
    root = tmp_path_factory.mktemp("hostile")
    records = [
        {"round": r, "client_ids": [0, 1, 2, 3], "weights": [0.1, 0.2, 0.3, 0.4], "kept": 0.5,
         "distance": [1.0, 2.0, 3.0, r], "cosine <i>": np.eye(4).tolist()}
        for r in range(1, 10)
    ]  # fmt: skip
    accuracies = [{"a&b": 0.5 + 0.01 * r, "<i>c": 0.7 + 0.01 * r} for r in range(10)]
    tests = {r: [0.5, 0.6, 0.7, 0.8] for r in range(10)}
    folders = [
        make_run(root / f"{label}{seed}", accuracies, label=name, strategy=label, seed=seed,
                 diagnostics=records, clients=tests, status="failed", error=HOSTILE,
                 command=HOSTILE, machine={HOSTILE: HOSTILE})
        for label, name in [("uniform", "uniform"), ("fedheal", HOSTILE)]
        for seed in range(2)
    ]  # fmt: skip
    write_report([read_run(folder) for folder in folders], root / "out")
    return root / "out"


@pytest.mark.slow
def test_page_stands_alone(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    page = Page(text)
    for link in page.attributes("href") + page.attributes("src"):
        assert link.startswith(("#", "data:image/png;base64,"))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"https?:|@import|url\((?!#)", text)


@pytest.mark.slow
def test_text_is_escaped(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    assert "<script" not in text
    assert "<i>" not in text
    assert text.count("&lt;script&gt;alert(") > 10
    # The label is also in the figures, where its dollars are no formula.
    assert re.search(r"<text[^>]*>&lt;script&gt;alert\(\"?(&quot;)?\$x_1\$", text)


@pytest.mark.slow
def test_ids_are_unique_and_found(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    page = Page(text)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    wanted = re.findall(r"url\(#([^)]+)\)", text)
    wanted += [href[1:] for href in page.attributes("href") if href.startswith("#")]
    assert wanted
    assert set(wanted) <= set(ids)


@pytest.mark.slow
def test_page_is_accessible_in_light_and_dark(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    page = Page(text)
    assert ("html", {"lang": "en"}) in page.tags
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    figures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(figures) == 10
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in figures)
    assert 'style="fill: currentColor' in text.replace("text-anchor: middle; ", "")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")


@pytest.mark.slow
def test_figure_files(hostile: Path) -> None:
    files = {path.name for path in (hostile / "figures").iterdir()}
    names = {"average", "worst", "std", "bars", "clients", "domains", "client-weights",
             "client-distance", "pairs-cosine-i", "round-kept"}  # fmt: skip
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    for path in (hostile / "figures").iterdir():
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_same_runs_give_the_same_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=3))
    pages = [write_report([read_run(folder)], tmp_path / name) for name in ("1", "2")]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    for path in (tmp_path / "1" / "figures").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / "figures" / path.name).read_bytes()


@pytest.mark.usefixtures("drawn_once")
def test_means_over_rounds_are_called_so(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "r", rising(0.5, rounds=4)))
    titles = [drawn.title for drawn in draw(group_runs([run])[0], tmp_path / "figures")]
    assert "Accuracy per domain, mean of all 3 tested rounds (1 to 3)" in titles
    assert not any("Final" in title for title in titles)


@pytest.mark.slow
def test_one_round(tmp_path: Path) -> None:
    record = {"round": 1, "client_ids": [0], "weights": [1.0], "cosine": [[1.0]], "kept": 0.5}
    folder = make_run(tmp_path / "r", rising(0.5, rounds=2), diagnostics=[record])
    page = Page(write_report([read_run(folder)], tmp_path / "out").read_text("utf-8"))
    assert list(page.table("Accuracy per domain, round 1")) == ["fedheal seed 0"]
    assert not [caption for caption in page.tables if caption.startswith("Accuracy per domain, la")]


def test_terminal_fits_eighty_columns(tmp_path: Path) -> None:
    values = {"mnist": 0.95, "usps": 0.88, "svhn": 0.8, "synlike": 0.64}
    folders = [
        make_run(tmp_path / f"{label}{seed}", constant(**values), label=label, seed=seed)
        for label in ("fedavg", "uniform", "fedequilibria")
        for seed in range(3)
    ]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(terminal_table([read_run(folder) for folder in folders]))
    assert (
        "fedequilibria 95.00 88.00 80.00   64.00 81.75  13.33  11.54 64.00 31.00" in capture.get()
    )


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, fairflower.report; print({'matplotlib', 'torch'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.usefixtures("undrawn")
def test_markdown_holds_the_same_numbers(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"{label[:2]}-{seed}",
            constant(a=0.5, b=0.75 + seed / 10),
            label=label,
            seed=seed,
        )
        for label in ("my|rule", "uniform")
        for seed in (0, 1)
    ]
    write_report([read_run(folder) for folder in folders], tmp_path / "report")
    text = (tmp_path / "report/tables.md").read_text()
    (first, *_) = text.split("\n\n**")
    header, ruler, *rows = [line for line in first.splitlines() if line.startswith("|")]
    assert header.startswith("| method | a | b | AVG |")
    assert {row.replace("\\|", "").count("|") for row in (header, ruler, *rows)} == {
        header.count("|")
    }
    assert rows[1].startswith("| my\\|rule (2 seeds) |")
    assert "| 50.00 ±0.00 | 80.00 ±7.07 |" in rows[1].replace("**", "")


def test_classes_have_their_names_and_test_sets_their_sizes(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"classes": ["backpack", "bike"], "test_sizes": [200, 30]}
    runs = [
        make_run(tmp_path / label, constant(1, a=0.5, b=0.6), label=label, **facts)
        for label in ("fedavg", "uniform")
    ]
    text = page_of(tmp_path / "out", *runs).text
    assert "backpack" in text
    assert "class 0" not in text
    line = "Test examples, and what one is worth in points: a 200 (one is 0.5), b 30 (one is 3.3)."
    assert line in text
    other = make_run(tmp_path / "other", constant(1, a=0.5, b=0.6), label="term", test_sizes=[2, 3])
    assert "worth" not in page_of(tmp_path / "out", *runs, other).text
    none = make_run(tmp_path / "none", constant(1, a=0.5, b=0.6), test_sizes=[200, 0])
    assert "worth" not in shown(none), "of a domain without test examples"


def test_what_a_model_costs_to_send_is_a_line_under_the_accuracy(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / label, ALL, label=label) for label in ("fedavg", "fedheal")]
    line = "Model: 100,520 bytes to and from each client in a round (25,130 trained parameters)."
    text = markdown_tables([read_run(folder) for folder in folders])
    first, second, *_ = text.split("**Accuracy per domain, last round")
    assert f"\n\n{line}\n\n" in first
    assert line not in second
    assert line in shown(*folders)
    assert line in page_of(tmp_path / "out", *folders).text


def test_models_of_several_sizes_are_a_table_by_method(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg", model_bytes=4_000, num_parameters=1_000),
        make_run(tmp_path / "h", ALL),
        make_run(tmp_path / "u", ALL, label="uniform", model_bytes=None),
    ]
    page = page_of(tmp_path / "out", *folders)
    rows = [list(row.values()) for row in page.table("Model").values()]
    assert rows == [
        ["fedavg seed 0", "4,000", "1,000"],
        ["uniform seed 0", DASH, "25,130"],
        ["fedheal seed 0", "100,520", "25,130"],
    ]
    assert "Model:" not in shown(*folders)
    assert "Model" not in shown(folders[2]), "an old run does not know"


# --- products and sweeps -------------------------------------------------------------------


def trained_by(client: str, strategy: str, a: float, folder: Path) -> Path:
    label = strategy if client == "sgd" else f"{client}+{strategy}"
    config = f'[client]\nname = "{client}"\n'
    return make_run(
        folder / label, constant(a=a, b=0.9), label=label, strategy=strategy, config=config
    )


@pytest.mark.usefixtures("undrawn")
def test_a_product_of_clients_and_strategies_is_a_table_by_client(tmp_path: Path) -> None:
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
        bold = [r.name for r in group.rows if r.cells[worst].tone == "better"]
        assert bold == [strategies[int(np.argmax(row))]]
    page = write_report(runs, tmp_path / "out")
    assert "Local training times aggregation" in page.read_text()
    assert (tmp_path / "out" / "figures" / "product.png").exists()


def test_a_product_knows_clients_with_arguments_by_their_labels(tmp_path: Path) -> None:
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
def test_one_method_of_local_training_or_one_strategy_is_no_product(
    pairs: Sequence[tuple[str, str]], tmp_path: Path
) -> None:
    folders = [trained_by(client, strategy, 0.5, tmp_path) for client, strategy in pairs]
    comparison = group_runs([read_run(folder) for folder in folders])[0]
    assert not product_table(comparison).groups
    assert list(sketches_of_products(comparison)) == []


@pytest.mark.slow
@pytest.mark.usefixtures("drawn_once")
def test_three_values_of_one_argument_are_a_sweep_and_defaults_count(tmp_path: Path) -> None:
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


def test_a_sweep_shows_values_that_are_no_numbers_and_how_well_clients_were_clustered(
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
    # Left to the method, it is auto as well.
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
