"""Tables against hand-computed values: domains, clients, quality, types, personal models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from run_folders import (
    ALL,
    MINUS,
    clustered,
    constant,
    edit,
    give_clients,
    make_run,
    printed_tables,
    rising,
    runs_with,
    tables_of,
    with_scores,
)

from fairflower.report import read_run
from fairflower.report.contrasts import measures
from fairflower.report.methods import group_runs
from fairflower.report.pages import markdown_tables
from fairflower.report.tables import (
    clusters_table,
    fairness_table,
    quality_table,
    types_table,
)
from fairflower.statistics import MeanStd


def test_the_accuracy_table_matches_hand_computed_values(tmp_path: Path) -> None:
    """Last five of rounds 0 to 6: a is 0.52 ... 0.56 with mean 0.54, b is 0.9."""
    page = tables_of(make_run(tmp_path / "r", rising(0.5)))
    five = tables_of(make_run(tmp_path / "five", constant(6, a=0.5, b=0.4)))
    assert five.table("Accuracy per domain, mean of all 5 tested rounds (1 to 5)")
    row = page.table("Accuracy per domain, mean of the last 5 tested rounds (2 to 6)")
    assert row["fedheal federation 0"] == {
        "method": "fedheal federation 0",
        "a": "54.00",
        "b": "90.00",
        "AVG": "72.00",
        "STD ddof 1": f"{36 / math.sqrt(2):.2f}",
        "STD ddof 0": "18.00",
        "MIN": "54.00",
        "GAP": "36.00",
    }
    last = page.table("Accuracy per domain, last round (6)")["fedheal federation 0"]
    assert (last["a"], last["AVG"], last["STD ddof 0"]) == ("56.00", "73.00", "17.00")
    fairness = page.table("Fairness over 2 domains")["fedheal federation 0"]
    jain = (0.54 + 0.9) ** 2 / (2 * (0.54**2 + 0.9**2))
    assert fairness["Jain"] == f"{jain:.4f}"
    assert fairness["Gini"] == f"{0.36 / (2 * (0.54 + 0.9)):.4f}"
    assert (fairness["worst 10 %"], fairness["GAP"]) == ("54.00", "36.00")


def test_client_accuracies_have_their_own_table(tmp_path: Path) -> None:
    """Clients 0 to 2 test in every round; client 3 never answers."""
    clients = {r: [0.5, 0.6, 0.9] for r in range(7)}
    page = tables_of(make_run(tmp_path / "r", rising(0.5), clients=clients))
    row = page.table("Fairness over 3 clients")["fedheal federation 0"]
    assert (row["AVG"], row["MIN"], row["MAX"], row["GAP"]) == (
        "66.67†", "50.00†", "90.00†", "40.00†",
    )  # fmt: skip
    assert row["STD ddof 1"] == f"{100 * np.std([0.5, 0.6, 0.9], ddof=1):.2f}†"


def test_clients_untested_in_some_run_count_with_their_domains_accuracy(tmp_path: Path) -> None:
    """Otherwise means over clients would be compared with means over domains."""
    tests = {r: [0.1, 0.3, 0.7, 0.9] for r in range(7)}
    values = constant(a=0.4, b=0.8)
    facts = {"label": "uniform", "clients": tests}
    folders = [make_run(tmp_path / "u", values, **facts), make_run(tmp_path / "h", values)]
    for folder in folders:
        give_clients(folder, a=1, b=3)
    title = "Client types and clients"
    both = tables_of(*folders).table(title)
    assert {row["Avg over clients"] for row in both.values()} == {"70.00"}, "0.4 and three of 0.8"
    assert "A client counts with its domain's accuracy" in tables_of(*folders).text
    alone = tables_of(folders[0])
    assert alone.table(title)["uniform federation 0"]["Avg over clients"] == "50.00"
    assert "A client counts with its domain's accuracy" not in alone.text


def test_the_quality_table_matches_hand_computed_values(tmp_path: Path) -> None:
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
    row = tables_of(*folders).table(title)["fedheal 2 seeds"]
    for name, values in (("ACC", acc), ("AUC", auc)):
        last = 100 * values[:, 2:]
        expected = {"clean": last[..., 0], "corrupted": last[..., 1], "average": last.mean(axis=2)}
        for group, cells in expected.items():
            assert row[f"{group} {name}"] == f"{cells.mean():.2f} ± {np.std(cells, ddof=0):.2f}"
    assert title in printed_tables(*folders)
    assert title in markdown_tables([read_run(folder) for folder in folders])


def test_quality_table_marks_the_best_of_comparable_methods(tmp_path: Path) -> None:
    folders = []
    for label, clean in (("fedavg", 0.9), ("fedism", 0.6)):
        folder = make_run(tmp_path / label, constant(clean=0.5, corrupted=0.5), label=label)
        values = constant(clean=clean, corrupted=1 - clean)
        folders.append(with_scores(folder, balanced_accuracy=values))
    page = tables_of(*folders)
    rows = page.table("Class-balanced accuracy, the last 5")
    assert list(rows["fedavg federation 0"]) == [
        "method", "clean ACC", "corrupted ACC", "average ACC",
    ]  # fmt: skip
    assert rows["fedism federation 0"]["average ACC"] == "50.00 ± 0.00"
    text = markdown_tables([read_run(folder) for folder in folders])
    assert "| fedavg (federation 0) | **90.00** ±0.00 | 10.00 ±0.00 |" in text


def test_the_quality_table_appears_only_if_its_metrics_were_measured(tmp_path: Path) -> None:
    plain = make_run(tmp_path / "plain", rising(0.5))
    assert "Class-balanced" not in printed_tables(plain)
    with (plain / "history.csv").open("a") as history:
        history.writelines(f"6,domain,{d},balanced_accuracy,0.5\n" for d in "ab")
    assert "Class-balanced" not in printed_tables(plain)
    with (plain / "history.csv").open("a") as history:
        history.writelines(f"{r},domain,{d},auc,0.75\n" for r in range(7) for d in "ab")
    assert "Class-balanced accuracy and AUC" in printed_tables(plain)
    old = make_run(tmp_path / "old", rising(0.5))
    edit("config.toml", "[data]", "[data]\ncorrupted-clients = 1")(old)
    assert "Class-balanced" not in printed_tables(old)


def test_an_undefined_auc_is_shown_as_a_dash(tmp_path: Path) -> None:
    values = [*constant(6, a=0.5, b=0.5), {"a": math.nan, "b": 0.5}]
    folder = make_run(tmp_path / "r", rising(0.5))
    with_scores(folder, auc=values, balanced_accuracy=constant(a=0.5, b=0.5))
    row = tables_of(folder).table("Class-balanced")["fedheal federation 0"]
    assert row["a AUC"].startswith("\N{EN DASH}")
    assert row["b AUC"] == "50.00 ± 0.00"


def test_the_types_table_matches_hand_computed_values(tmp_path: Path) -> None:
    """Three clients of a (0.54 on average) and one of b (0.9)."""
    folder = give_clients(make_run(tmp_path / "r", rising(0.5)), a=3, b=1)
    row = tables_of(folder).table("Client types and clients, mean of the last 5")
    assert row["fedheal federation 0"] == {
        "method": "fedheal federation 0",
        "Avg over domains": "72.00",
        "Avg over clients": f"{100 * (3 * 0.54 + 0.9) / 4:.2f}",
        "σ type": "18.00",  # noqa: RUF001
        "σ client": f"{100 * np.std([0.54, 0.54, 0.54, 0.9]):.2f}",  # noqa: RUF001
    }


def test_the_types_table_uses_client_tests_if_all_clients_tested(tmp_path: Path) -> None:
    own = {r: [0.1, 0.2, 0.3, 0.8] for r in range(7)}
    folder = give_clients(make_run(tmp_path / "r", rising(0.5), clients=own), a=3, b=1)
    row = tables_of(folder).table("Client types")["fedheal federation 0"]
    assert (row["Avg over domains"], row["Avg over clients"]) == ("72.00", "35.00")
    some = {r: [0.1, 0.2, 0.3] for r in range(7)}
    folder = give_clients(make_run(tmp_path / "s", rising(0.5), clients=some), a=3, b=1)
    row = tables_of(folder).table("Client types")["fedheal federation 0"]
    assert row["Avg over clients"] == "63.00"


def test_types_table_needs_domains_of_unequal_weight(tmp_path: Path) -> None:
    assert "Client types" not in printed_tables(make_run(tmp_path / "r", rising(0.5)))


def test_runs_with_clusters_have_a_types_table_even_with_domains_of_equal_weight(
    tmp_path: Path,
) -> None:
    folder = clustered(tmp_path / "r", [[0, 0, 1, 1]] * 6)
    plain = make_run(tmp_path / "f", rising(0.5), label="fedavg")
    rows = tables_of(folder, plain).table("Client types and clients, mean of")
    assert set(rows) == {"fedgcr federation 0", "fedavg federation 0"}
    for row in rows.values():
        assert row["Avg over domains"] == row["Avg over clients"] == "72.00"
        assert row["σ type"] == row["σ client"] == "18.00"  # noqa: RUF001


def test_personal_models_have_their_own_table(tmp_path: Path) -> None:
    own = make_run(tmp_path / "d", rising(0.5), label="ditto", personal=rising(0.8, rounds=6))
    plain = make_run(tmp_path / "f", rising(0.5), label="fedavg")
    page = tables_of(own, plain)
    row = page.table("Accuracy of personal models, mean of the last 5 tested rounds (2 to 6)")
    assert list(row) == ["ditto federation 0"]
    assert (row["ditto federation 0"]["a"], row["ditto federation 0"]["b"]) == ("83.00", "90.00")
    assert (row["ditto federation 0"]["AVG"], row["ditto federation 0"]["MIN"]) == (
        "86.50",
        "83.00",
    )
    assert "personal models" not in tables_of(plain).text
    assert "Accuracy of personal models" in printed_tables(own)


def test_seeds_of_a_method_are_one_row_with_mean_and_spread(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"r{seed}", constant(a=0.5 + shift, b=0.9), seed=seed)
        for seed, shift in [(2, 0.04), (0, 0.0), (1, 0.02)]
    ]
    row = tables_of(*folders).table("Accuracy per domain, mean of the last 5")
    assert row["fedheal 3 seeds"]["a"] == "52.00 ± 2.00"
    assert row["fedheal 3 seeds"]["b"] == "90.00 ± 0.00"
    assert row["fedheal 3 seeds"]["AVG"] == "71.00 ± 1.00"
    assert row["fedheal 3 seeds"]["GAP"] == "38.00 ± 2.00"
    assert [run.seed for run in group_runs(map(read_run, folders))[0].methods[0].runs] == [0, 1, 2]


def test_verdict_is_paired_by_seed(tmp_path: Path) -> None:
    """Seeds differ by 20 points, methods by 3 to 5: only pairs can tell them apart."""
    folders = [
        *runs_with(tmp_path, "uniform", [0.3, 0.5, 0.7, 0.4, 0.6]),
        *runs_with(tmp_path, "fedheal", [0.33, 0.54, 0.75, 0.435, 0.645]),
        *runs_with(tmp_path, "fedavg", [0.2, 0.55, 0.6, 0.3, 0.65]),
    ]
    text = printed_tables(*folders)
    assert (
        "fedheal: worst domain +8.00 ± 8.02 points against FedAvg, +4.00 ± 0.79 points against "
        f"Uniform, STD {MINUS}5.66 ± 5.67 and {MINUS}2.83 ± 0.56 (5 seeds of federation 0): "
        "undecided against FedAvg (detectable: worst domain"
    ) in text
    assert "fairer (worst domain, STD) than Uniform." in text
    assert "uniform: worst domain" in text
    alone = printed_tables(*folders[:3])
    assert "uniform: no FedAvg run with the same settings, rounds and seeds to compare" in alone
    table = tables_of(*folders).table("Difference from the baselines")
    row = table["fedheal 5 seeds of federation 0"]
    assert row["MIN vs Uniform"].startswith("+4.00 ▲ [")
    assert row["STD vs Uniform"].startswith(f"{MINUS}2.83 ▲ [")
    assert row["AVG vs Uniform"].startswith("+2.00 ▲ [")
    assert table["uniform 5 seeds of federation 0"]["MIN vs Uniform"] == "\N{EN DASH}"
    assert table["fedavg 5 seeds of federation 0"]["MIN vs Uniform"].startswith(f"{MINUS}4.00 [")


def test_verdicts_need_five_seeds_and_clear_differences(tmp_path: Path) -> None:
    two = [
        *runs_with(tmp_path / "2", "uniform", [0.5, 0.5]),
        *runs_with(tmp_path / "2", "x", [0.6, 0.6]),
    ]
    message = "(2 seeds of federation 0): too few pairs for a verdict (5 needed) against Uniform"
    assert message in markdown_tables([read_run(folder) for folder in two])
    shown = "no verdict from 2 seeds of federation 0, 5 are needed. Repeat with --seeds 0-4."
    assert shown in printed_tables(*two)
    table = tables_of(*two).table("Difference from the baselines")
    assert table["x 2 seeds of federation 0"]["MIN vs Uniform"] == "+10.00 ± 0.00", "no mark"
    noisy = [
        *runs_with(tmp_path / "n", "uniform", [0.5] * 5),
        *runs_with(tmp_path / "n", "x", [0.48, 0.54, 0.57, 0.6, 0.51]),
    ]
    assert "x: worst domain +4.00 ± 4.74 points against Uniform" in printed_tables(*noisy)
    assert "undecided against Uniform (detectable: worst domain" in printed_tables(*noisy)


def test_one_sentence_says_that_all_methods_have_too_few_seeds(tmp_path: Path) -> None:
    labels = ("fedavg", "fedheal", "uniform")
    runs = [
        make_run(tmp_path / f"{label}-{seed}", ALL, label=label, seed=seed)
        for label in labels
        for seed in (0, 1)
    ]
    text = " ".join(printed_tables(*runs).split())
    assert text.count("no verdict") == 1
    assert "fedavg, uniform and fedheal: no verdict from 2 seeds of federation 0, 5 are" in text
    assert "Fairer: " not in text, "only words that occur are explained"
    once = [run for run in runs if run.name.endswith("-0")]
    text = " ".join(printed_tables(*once).split())
    assert "no verdict from 1 federation, 5 are needed. Repeat with --federations 0-4." in text
    assert "80 % power" not in text


def test_a_baseline_with_too_few_runs_does_not_prevent_verdicts_against_another(
    tmp_path: Path,
) -> None:
    values = [0.3, 0.5, 0.7, 0.4, 0.6]
    folders = [
        *runs_with(tmp_path, "fedavg", values[:3]),
        *runs_with(tmp_path, "uniform", values),
        *runs_with(tmp_path, "fedheal", [0.33, 0.54, 0.75, 0.435, 0.645]),
    ]
    assert "fairer (worst domain, STD) than Uniform" in printed_tables(*folders)


def test_a_single_domain_gets_no_verdict_but_a_reason(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{label}-{seed}", [{"a": 0.5 + seed / 100}], label=label, seed=seed)
        for label in ("uniform", "fedheal")
        for seed in range(5)
    ]
    assert "fedheal: not judged, because a single domain has no spread." in printed_tables(*folders)


def test_clients_of_a_domain_get_distinct_shades_of_its_color() -> None:
    from fairflower.report.figures.canvas import DOMAIN_COLORS, shades

    assert len(shades(DOMAIN_COLORS[0], 1)) == 1
    for color in DOMAIN_COLORS:
        colors = np.array(shades(color, 5))
        assert ((colors >= 0) & (colors <= 1)).all()
        assert (np.diff(colors.sum(axis=1)) > 0.1).all()  # dark to light


def test_less_spread_with_lower_accuracy_is_not_fairer(tmp_path: Path) -> None:
    uniform = [make_run(tmp_path / f"u{s}", constant(a=0.5, b=0.9), label="uniform", seed=s)
               for s in range(5)]  # fmt: skip
    bad = [
        make_run(tmp_path / f"x{s}", constant(a=a, b=0.41), label="x", seed=s)
        for s, a in enumerate((0.4, 0.402, 0.404, 0.401, 0.403))
    ]
    assert (
        "mixed (STD better; worst domain worse) compared with Uniform, with an average below "
        "Uniform's" in printed_tables(*uniform, *bad)
    )


def test_mean_std_uses_ddof_1_and_is_nan_for_one_value() -> None:
    assert MeanStd.of([1.0, 2.0, 3.0]) == MeanStd(2.0, 1.0, 3)
    assert math.isnan(MeanStd.of([1.0]).std)


def test_the_best_of_comparable_methods_is_bold(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a", constant(a=0.5, b=0.9), label="fedavg"),
        make_run(tmp_path / "u", constant(a=0.6, b=0.9), label="uniform"),
        make_run(tmp_path / "l", constant(a=0.8, b=0.8), label="fedheal", config="momentum = 0.5"),
    ]
    table = tables_of(*folders).all[0]
    cells = (cell for group in table.groups for row in group.rows for cell in row.cells)
    best = [cell.text for cell in cells if cell.tone == "best"]
    # b is a tie; the lowest STD and GAP are best; fedheal has other settings, so no mark.
    assert best == ["90.00", "60.00", "90.00", "75.00", "21.21", "15.00", "60.00", "30.00"]


def test_the_fairer_method_is_marked_best_in_every_metric(tmp_path: Path) -> None:
    """Exceptions are the best domain and the number of clusters, which have no better value."""
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
    clusters = clusters_table(comparison, 5)
    tones = [[cell.tone for cell in row.cells] for row in clusters.groups[0].rows]
    assert tones == [["", "", ""], ["", "best", "best"]]


def test_a_method_with_one_stopped_seed_is_marked(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / status, ALL, seed=seed, status=status)
        for seed, status in enumerate(("completed", "stopped"))
    ]
    table = tables_of(*folders).table("Accuracy per domain, mean")
    assert list(table) == ["fedheal 2 seeds, stopped after round 6 of 6"]


def test_metrics_that_some_seed_lacks_are_in_no_table(tmp_path: Path) -> None:
    """Only one of two seeds has personal models, client tests and an AUC."""
    balanced = constant(a=0.5, b=0.5)
    folders = []
    for label in ("fedavg", "uniform"):
        more: dict[str, Any] = {
            "personal": rising(0.8, rounds=6),
            "clients": {r: [0.5] * 4 for r in range(7)},
        }
        for seed, (own, scores) in enumerate([(more, {"auc": balanced}), ({}, {})]):
            folder = make_run(
                tmp_path / f"{label}-{seed}", rising(0.5), label=label, seed=seed, **own
            )
            folders.append(with_scores(folder, balanced_accuracy=balanced, **scores))
    page = tables_of(*folders)
    captions = " ".join(table.title for table in page.all)
    assert "Accuracy per domain" in captions
    assert "Class-balanced accuracy, the last 5" in captions
    for missing in ("personal models", "clients", "AUC"):
        assert missing not in captions
    without = make_run(tmp_path / "without", rising(0.5), label="fedavg", seed=2)
    edit("config.toml", "[data]", "[data]\ncorrupted-clients = 1")(without)
    rows = tables_of(*folders, without).table("Class-balanced accuracy, the last")
    assert list(rows) == ["uniform 2 seeds"]


def test_a_single_group_has_no_average_column(tmp_path: Path) -> None:
    folder = with_scores(make_run(tmp_path / "r", constant(a=0.5)), auc=constant(a=0.6),
                         balanced_accuracy=constant(a=0.5))  # fmt: skip
    (comparison,) = group_runs([read_run(folder)])
    assert [[f.title for f in one.metrics] for one in measures(comparison)[1:]] == [
        ["a ACC"], ["a AUC"],
    ]  # fmt: skip
    row = tables_of(folder).table("Class-balanced")["fedheal federation 0"]
    assert list(row) == ["method", "a ACC", "a AUC"]


def test_no_method_is_best_in_a_metric_that_is_undefined_for_one(tmp_path: Path) -> None:
    folders = []
    for label, last in (("fedavg", 0.5), ("uniform", math.nan)):
        values = [*constant(6, a=0.5, b=0.5), {"a": last, "b": 0.5}]
        folder = make_run(tmp_path / label, constant(a=0.5, b=0.5), label=label)
        folders.append(with_scores(folder, auc=values, balanced_accuracy=constant(a=0.5, b=0.5)))
    table = quality_table(group_runs(map(read_run, folders))[0])
    at = table.columns.index("a AUC")
    assert [row.cells[at].tone for row in table.groups[0].rows] == ["", ""]
