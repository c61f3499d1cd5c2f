"""Verdicts of every measure against SciPy's paired t test; summaries; the report command."""

from __future__ import annotations

import errno
import json
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

import command
import numpy as np
import pytest
from brute_force import closed_p
from hypothesis import given
from hypothesis import strategies as st
from run_folders import (
    ALL,
    MINUS,
    clustered,
    constant,
    edit,
    give_clients,
    make_run,
    page_of,
    printed_tables,
    rising,
    tables_of,
    with_scores,
    without_tests,
)
from scipy import stats

from fairflower.api.runs import read
from fairflower.errors import ConfigError, RunFolderError
from fairflower.numerics.group_fairness import METRICS
from fairflower.report import read_run, read_summary, write_report, write_summary
from fairflower.report.analysis import analyze
from fairflower.report.contrasts import (
    Contrast,
    against_plain,
    contrasts_of,
    judge_family,
    judged_groups,
    measures,
    paired_differences,
)
from fairflower.report.frames import history_frame
from fairflower.report.methods import Comparison, Method, group_runs
from fairflower.report.pages import (
    GENERATED,
    generated_markdown,
    markdown_tables,
    replace_generated_block,
)
from fairflower.server.contents import Value

SIGMA = "\N{GREEK SMALL LETTER SIGMA}"


def sections(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Title -> sentences of the single comparison."""
    (chapter,) = analyze(list(map(read_run, folders))).chapters
    return {title: [*map(str, said)] for title, said in chapter.verdicts.items()}


# --- class-balanced accuracy -----------------------------------------------------------------


def scored(folder: Path, label: str, seed: int, clean: float, noisy: float, **options: Any) -> Path:
    """A run whose class-balanced accuracies vary by ten points around the given means."""
    run = make_run(folder / f"{label}-{seed}", constant(clean=0.5, corrupted=0.4), label=label,
                   seed=seed, **options)  # fmt: skip
    waves = [0.0, 0.0, 0.1, -0.1, 0.05, -0.05, 0.0]
    return with_scores(
        run, balanced_accuracy=[{"clean": clean + w, "corrupted": noisy + w} for w in waves]
    )


def test_class_balanced_accuracy_is_judged_by_paired_differences(tmp_path: Path) -> None:
    """Seeds and rounds differ by ten points, but the methods by two points in every seed."""
    noisy = [0.20, 0.30, 0.40, 0.25, 0.35]
    gains = [0.015, 0.02, 0.025, 0.018, 0.022]
    folders = [
        scored(tmp_path, label, seed, 0.5, noisy[seed] + (gains[seed] if label == "uniform" else 0))
        for label in ("fedavg", "uniform")
        for seed in range(5)
    ]
    text = printed_tables(*folders)
    assert "30.00" in text
    sentences = sections(folders)["Against the baselines, class-balanced accuracy"]
    assert sentences[1] == (
        "uniform: clean ACC +0.00 ± 0.00, corrupted ACC +2.00 ± 0.38, average ACC +1.00 ± 0.19, "
        f"ACC gap {MINUS}2.00 ± 0.38 points against FedAvg (5 seeds of federation 0): better "
        "(corrupted ACC, average ACC, ACC gap) than FedAvg."
    )
    assert sentences[1] in text
    row = tables_of(*folders).table("Difference from the baselines, class-balanced accuracy")[
        "uniform 5 seeds of federation 0"
    ]
    # By Bonferroni over four metrics: t(1 - 0.05 / 8; 4) = 4.315, and 0.38 / sqrt(5) = 0.170.
    assert row["corrupted ACC vs FedAvg"].startswith("+2.00 ▲ [1.27, 2.73]; ")
    assert row["ACC gap vs FedAvg"].startswith(f"{MINUS}2.00 ▲ [{MINUS}2.73, {MINUS}1.27]; ")
    assert row["clean ACC vs FedAvg"] == "+0.00 [0.00, 0.00]"


@given(
    st.lists(
        st.tuples(*[st.integers(0, 40)] * 4), min_size=5, max_size=8
    )
)  # fmt: skip
def test_significant_differences_are_those_that_scipys_paired_test_rejects(
    tmp_path_factory: pytest.TempPathFactory, values: Sequence[tuple[int, ...]]
) -> None:
    root = tmp_path_factory.mktemp("t")
    table = np.array(values) / 50 + 0.1
    folders = [
        scored(root, label, seed, float(row[place]), float(row[place + 1]))
        for seed, row in enumerate(table)
        for label, place in (("fedavg", 0), ("fedism", 2))
    ]
    (comparison,) = group_runs(map(read_run, folders))
    fedavg, fedism = comparison.methods
    pairs = paired_differences(fedism, fedavg, measures(comparison)[1])
    assert pairs is not None
    one = judge_family({"fedism": pairs})["fedism"]
    metrics = ((clean_of, 1), (noisy_of, 1), (mean_of, 1), (gap_of, -1))
    differences = []
    for judged, (values_of, sign) in zip(one.by_metric, metrics, strict=True):
        new, old = values_of(table[:, 2:]), values_of(table[:, :2])
        difference = 100 * (new - old)
        assert judged.difference.mean == pytest.approx(difference.mean(), abs=1e-9)
        assert judged.difference.std == pytest.approx(difference.std(ddof=1), abs=1e-9)
        differences.append((difference, sign, judged.sign))
    # A difference that is the same in all pairs, but not 0, cannot be tested.
    tested = [d for d in differences if d[0].std() > 1e-9 or abs(d[0].mean()) < 1e-9]
    margin = one.by_metric[0].difference.margin
    p = [p_values(d, margin) for d, _, _ in tested]
    rejected = [closed_p(p, place, kind=0) < 0.05 for place in range(len(p))]
    signs = [s * int(np.sign(d.mean())) * r for (d, s, _), r in zip(tested, rejected, strict=True)]
    assert [counted for _, _, counted in tested] == signs
    words = {1: "better", -1: "worse"}
    actual = {word for word in ("better", "worse") if word in one.judgment[0]}
    assert actual == {words[s] for s in signs if s}
    if not actual:
        assert one.judgment[0].startswith(("equivalent", "undecided"))


def p_values(pairs: np.ndarray, margin: float) -> tuple[float, float]:
    """SciPy's p-values of no difference, and of a difference that is at least the margin."""
    if pairs.std() < 1e-9:
        return 1.0, 0.0
    below = stats.ttest_1samp(pairs, margin, alternative="less").pvalue
    above = stats.ttest_1samp(pairs, -margin, alternative="greater").pvalue
    return stats.ttest_1samp(pairs, 0).pvalue, max(below, above)


def clean_of(table: np.ndarray) -> np.ndarray:
    return table[:, 0]


def noisy_of(table: np.ndarray) -> np.ndarray:
    return table[:, 1]


def mean_of(table: np.ndarray) -> np.ndarray:
    return table.mean(axis=1)


def gap_of(table: np.ndarray) -> np.ndarray:
    return abs(table[:, 0] - table[:, 1])


def test_p_values_are_corrected_over_the_methods_of_a_table(tmp_path: Path) -> None:
    """A difference has a larger p value beside methods with a larger spread than alone."""
    noisy = [0.20, 0.30, 0.40, 0.25, 0.35]
    gains = {
        "fedism": (0.01, 0.012, 0.017, 0.011, 0.015),
        "afl": (0.01, -0.01, 0.0, 0.02, -0.02),
        "term": (0.0, 0.02, -0.01, 0.01, -0.02),
    }
    runs = {
        label: [
            scored(tmp_path, label, seed, 0.5, noisy[seed] + gains.get(label, (0.0,) * 5)[seed])
            for seed in range(5)
        ]
        for label in ("fedavg", *gains)
    }
    p = stats.ttest_1samp(gains["fedism"], 0).pvalue

    def contrast(*labels: str) -> Contrast:
        (comparison,) = group_runs(read_run(path) for label in labels for path in runs[label])
        return contrasts_of(comparison)[1].against_baselines["fedism"]["FedAvg"]

    alone = contrast("fedavg", "fedism")["corrupted ACC"]
    assert alone.sign == 1
    one, other = alone.difference, contrast("fedavg", *gains)["corrupted ACC"].difference
    assert other.p > 3 * one.p
    assert one.p == pytest.approx(4 * p)  # of four metrics, three of which move alike
    assert other.error > one.error
    assert other.std == pytest.approx(one.std)


def test_p_values_are_corrected_over_methods_with_enough_seeds_and_the_same_baseline(
    tmp_path: Path,
) -> None:
    """Methods with two seeds, or with another client and so another baseline, do not count."""
    noisy, gains = [0.20, 0.30, 0.40, 0.25, 0.35], (0.01, 0.012, 0.017, 0.011, 0.015)
    wild = (0.01, -0.01, 0.0, 0.02, -0.02)
    moon = '[client]\nname = "moon"\n'
    folders = [
        scored(tmp_path, label, seed, 0.5, noisy[seed] + gain, strategy=rule, config=config)
        for label, rule, config, more in (
            ("fedavg", "fedavg", "", (0.0,) * 5),
            ("fedism", "fedism", "", gains),
            ("term", "term", "", (0.0, 0.02)),
            ("moon+fedavg", "fedavg", moon, (0.0,) * 5),
            ("moon+fedism", "fedism", moon, wild),
        )
        for seed, gain in enumerate(more)
    ]
    (comparison,) = group_runs(map(read_run, folders))
    contrasts = contrasts_of(comparison)[1].against_baselines
    assert contrasts["term"]["FedAvg"].n == 2
    for name, of in (("fedism", gains), ("moon+fedism", wild)):
        p = contrasts[name]["FedAvg"].differences[1].p
        assert p == pytest.approx(min(1.0, 4 * stats.ttest_1samp(of, 0).pvalue))


# --- other measures and comparisons ------------------------------------------------------------


def test_fedgcrs_sigma_over_types_is_judged(tmp_path: Path) -> None:
    """Three clients of domain a and one of b; fedgcr gains about 4 points on a and none on b."""
    folders = [
        give_clients(
            make_run(
                tmp_path / f"{label}{seed}",
                constant(a=0.5 + 0.01 * seed + gain * (1 + (seed - 2) / 40), b=0.9),
                label=label,
                seed=seed,
            ),
            a=3,
            b=1,
        )
        for label, gain in (("fedavg", 0.0), ("fedgcr", 0.04))
        for seed in range(5)
    ]
    (sentence,) = sections(folders)["Against the baselines, client types and clients"]
    client = 100 * (np.std([0.56, 0.56, 0.56, 0.9]) - np.std([0.52, 0.52, 0.52, 0.9]))
    assert sentence == (
        f"fedgcr: average over clients +3.00 ± 0.12, {SIGMA} type {MINUS}2.00 ± 0.08, "
        f"{SIGMA} client {MINUS}{-client:.2f} ± 0.07 points against FedAvg (5 seeds of federation "
        f"0): better "
        f"(average over clients, {SIGMA} type, {SIGMA} client) than FedAvg."
    )


def trained(
    folder: Path, client: str, strategy: str, a: Callable[[int], float], train: str = ""
) -> list[Path]:
    """Five runs; seeds add offsets to ``a`` that differ between methods and are 0 on average."""
    label = strategy if client == "sgd" else f"{client}+{strategy}"
    number = zlib.crc32(label.encode()) % 24
    offsets = list(permutations((-2, -1, 0, 1, 2)))[number * 5]
    return [
        make_run(
            folder / f"{label}-{seed}",
            constant(a=a(seed) + 0.001 * offsets[seed], b=0.9),
            label=label,
            strategy=strategy,
            seed=seed,
            config=f'{train}[client]\nname = "{client}"\n',
        )
        for seed in range(5)
    ]


def test_a_grid_is_judged_within_each_client_and_within_each_strategy(
    tmp_path: Path,
) -> None:
    steady: Mapping[tuple[str, str], float] = {
        ("sgd", "fedavg"): 0.50,
        ("sgd", "fedheal"): 0.60,
        ("moon", "fedavg"): 0.70,
        ("moon", "fedheal"): 0.70,
        ("fedprox", "fedavg"): 0.40,
        ("fedprox", "fedheal"): 0.30,
    }
    folders = [
        folder
        for (client, strategy), a in steady.items()
        for folder in trained(tmp_path, client, strategy, lambda s, a=a: a + 0.01 * s)  # type: ignore[misc]
    ]
    actual = sections(folders)
    assert actual["Strategies by local training, accuracy over domains"] == [
        "fedheal against FedAvg: fairer (worst domain, STD) with sgd; equivalent (worst domain "
        "within 2, STD within 1) with moon; less fair (worst domain, STD) with fedprox."
    ]
    assert actual[
        "Variants of local training compared with plain local training, accuracy over domains"
    ] == [
        "moon against sgd: fairer (worst domain, STD) with fedavg, fedheal.",
        "fedprox against sgd: less fair (worst domain, STD) with fedavg, fedheal.",
    ]
    text = markdown_tables([read_run(folder) for folder in folders])
    _, _, table = text.partition(
        "**Variants of local training compared with plain local training, accuracy over"
    )
    assert (
        "| *moon against sgd* | | | |\n| fedavg (5 seeds of federation 0) | **+20.00 ▲**" in table
    )


def test_grids_of_two_settings_are_two_groups_of_one_table(tmp_path: Path) -> None:
    folders = [
        folder
        for momentum in (0.0, 0.9)
        for client, strategy in product(("sgd", "fedprox"), ("fedavg", "uniform"))
        for folder in trained(
            tmp_path / str(momentum),
            client,
            strategy,
            lambda s: 0.5 + 0.01 * s,
            f"momentum = {momentum}\n",
        )
    ]
    text = markdown_tables([read_run(folder) for folder in folders])
    _, _, table = text.partition("**Variants of local training compared with plain local training")
    assert table.partition("\n\n**")[0].count("| *fedprox against sgd* |") == 2


def methods_named(comparison: Comparison, *names: str) -> list[Method]:
    return [one for name in names for one in comparison.methods if one.name == name]


def test_p_values_against_the_plain_client_are_corrected_over_the_methods(tmp_path: Path) -> None:
    gains = {
        "fedavg": (0.01, 0.012, 0.017, 0.011, 0.015),
        "afl": (0.01, -0.01, 0.0, 0.02, -0.02),
    }
    folders = [
        folder
        for strategy, gain in gains.items()
        for client, more in (("sgd", (0.0,) * 5), ("moon", gain))
        for folder in trained(tmp_path, client, strategy, lambda s, more=more: 0.5 + more[s])  # type: ignore[misc]
    ]
    (comparison,) = group_runs(map(read_run, folders))
    (block,) = judged_groups(against_plain, comparison, measures(comparison)[0])
    assert (block.heading, block.other, set(block.contrasts)) == ("moon", "sgd", set(gains))
    worst = paired_differences(
        *methods_named(comparison, "moon+fedavg", "fedavg"), measures(comparison)[0]
    )
    assert worst is not None
    p = stats.ttest_1samp(worst.values[0], 0).pvalue
    # Three metrics of two methods; the metrics of this method move alike.
    assert block.contrasts["fedavg"].differences[0].p == pytest.approx(6 * p)


def test_values_of_an_argument_are_judged_against_the_lowest_value(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"{t}-{seed}",
            constant(a=a + 0.01 * seed + noise * (seed - 2), b=0.9),
            label=f"fedequilibria:t={t}",
            strategy="fedequilibria",
            seed=seed,
        )
        for t, a, noise in ((0.0, 0.6, 0.0), (0.5, 0.61, 0.02), (1.0, 0.5, 0.001))
        for seed in range(5)
    ]
    for folder in folders:
        edit("config.toml", "[train]", f"t = {folder.name.partition('-')[0]}\n[train]")(folder)
    assert sections(folders)[
        "Values of an argument compared with its lowest value, accuracy over domains"
    ] == [
        f"strategy.t, fedequilibria:t=0.5: worst domain +1.00 ± 3.16, STD {MINUS}0.71 ± 2.24, "
        "average +0.50 ± 1.58 points against fedequilibria:t=0.0 (5 seeds of federation 0): "
        "undecided against fedequilibria:t=0.0 (detectable: worst domain 8.7, STD 6.2).",
        f"strategy.t, fedequilibria:t=1.0: worst domain {MINUS}10.00 ± 0.16, STD +7.07 ± 0.11, "
        f"average {MINUS}5.00 ± 0.08 points against fedequilibria:t=0.0 (5 seeds of federation 0): "
        "less fair (worst domain, STD) than fedequilibria:t=0.0.",
    ]


def test_methods_are_judged_against_plain_fedavg_of_another_model(tmp_path: Path) -> None:
    folders = []
    for model, client, a in (("vpt", "sgd", 0.5), ("prompt", "sgd", 0.5), ("prompt", "fedgc", 0.6)):
        for folder in trained(tmp_path / model, client, "fedavg", lambda s, a=a: a + 0.01 * s):  # type: ignore[misc]
            edit("config.toml", "[train]", f'[model]\nname = "{model}"\n[train]')(folder)
            folders.append(folder)
    sentences = sections(folders)["Comparison of models, accuracy over domains"]
    assert [text.partition(":")[0] for text in sentences] == [  # fedgc+fedavg is never a baseline
        "FedAvg of vpt, fedavg (model.name=prompt)",
        "FedAvg of vpt, fedgc+fedavg",
        "FedAvg of prompt, fedavg (model.name=vpt)",
    ]
    assert sentences[1].startswith("FedAvg of vpt, fedgc+fedavg: worst domain +10.00 ±")
    assert sentences[1].endswith("fairer (worst domain, STD) than fedavg (model.name=vpt).")
    assert sentences[0].startswith("FedAvg of vpt, fedavg (model.name=prompt): worst domain +0.00")
    assert "equivalent" in sentences[0]


@pytest.mark.parametrize("other", ["nothing", "train.lr", "round"])
def test_models_are_compared_only_if_settings_and_rounds_are_equal(
    other: str, tmp_path: Path
) -> None:
    folders = []
    for model in ("vpt", "prompt"):
        short = (model, other) == ("prompt", "round")
        values, status = (ALL[:4], "stopped") if short else (ALL, "completed")
        folder = make_run(tmp_path / model, values, label="fedavg", status=status)
        edit("config.toml", "[train]", f'[model]\nname = "{model}"\n[train]')(folder)
        if (model, other) == ("prompt", "train.lr"):
            edit("config.toml", "lr = 0.01", "lr = 0.1")(folder)
        if short:
            edit("config.toml", "rounds = 3", "rounds = 6")(folder)
        folders.append(folder)
    there = "Comparison of models, accuracy over domains" in sections(folders)
    assert there == (other == "nothing")


@pytest.mark.parametrize("bounded_first", [True, False])
@pytest.mark.parametrize(
    ("table", "key", "value", "default"),
    [("bound", "max-client-weight", "0.3", "1.0"), ("server", "optimizer", "adam", "none")],
)
def test_a_method_is_compared_with_the_baseline_of_the_same_bound_and_server_optimizer(
    table: str, key: str, value: str, default: str, bounded_first: bool, tmp_path: Path
) -> None:
    literal = value if table == "bound" else f'"{value}"'
    bounds = {"bounded": f"[{table}]\n{key} = {literal}\n", "free": ""}
    worst = {("bounded", "fedavg"): 0.2, ("free", "fedavg"): 0.5}
    names = sorted(bounds, reverse=not bounded_first)
    folders = [
        make_run(
            tmp_path / f"{name}-{label}-{seed}",
            constant(a=worst.get((name, label), 0.6), b=0.9),
            label=label,
            seed=seed,
            config=bounds[name],
        )
        for label in ("fedavg", "fedheal")
        for name in names
        for seed in range(5)
    ]
    texts = {text.partition(" points")[0] for text in sections(folders)[""]}
    assert {
        f"fedheal ({table}.{key}={value}): worst domain +40.00 ± 0.00",
        f"fedheal ({table}.{key}={default}): worst domain +10.00 ± 0.00",
    } <= texts


# --- processors --------------------------------------------------------------------------------

AMD = {"processor": "AMD EPYC family 25 model 1", "kernels": "AVX2", "instructions": "avx2"}
INTEL = {"processor": "Xeon", "kernels": "AVX512", "instructions": "avx2 avx512f", "gpu": "H100"}


def test_every_report_names_the_processor_and_versions_under_its_first_table(
    tmp_path: Path,
) -> None:
    folders = [
        make_run(tmp_path / label, ALL, label=label, machine=AMD,
                 versions={"flwr": "1.41.0", "torch": "2.15.0"})
        for label in ("fedavg", "fedheal")
    ]  # fmt: skip
    line = (
        "Run on AMD EPYC family 25 model 1 (kernels AVX2; instruction sets avx2); flwr 1.41.0, "
        "torch 2.15.0."
    )
    text = markdown_tables([read_run(folder) for folder in folders])
    first, _, rest = text.partition("**Accuracy per domain, last round")
    assert f"\n\n{line}\n\n" in first
    assert line not in rest
    assert line in printed_tables(*folders)
    assert line in tables_of(*folders).text
    assert "the same kind of processor" not in text


@pytest.mark.parametrize("resumed", [False, True])
def test_runs_on_several_kinds_of_processor_are_named(tmp_path: Path, resumed: bool) -> None:
    fedavg = make_run(tmp_path / "f", ALL, label="fedavg", machine=AMD)
    later = {"after_round": 3, "machine": INTEL, "versions": {"flwr": "1.41.0"}}
    options = {"machine": AMD, "resumed": [later]} if resumed else {"machine": INTEL}
    fedheal = make_run(tmp_path / "h", ALL, **options)
    both = "fedavg, fedheal" if resumed else "fedavg"
    text = printed_tables(fedavg, fedheal)
    assert (
        "Run on AMD EPYC family 25 model 1 (kernels AVX2; "
        f"instruction sets avx2) ({both}) and Xeon (kernels AVX512; instruction sets avx2 avx512f; "
        "GPU H100) (fedheal); "
    ) in text
    assert " Results are reproducible only on the same kind of processor." in text


def test_a_restarted_run_counts_as_run_on_its_last_machine(tmp_path: Path) -> None:
    again = {"after_round": 0, "machine": AMD, "versions": {"flwr": "1.41.0"}}
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg", machine=AMD),
        make_run(tmp_path / "h", ALL, machine=INTEL, resumed=[again]),
    ]
    assert "the same kind of processor" not in printed_tables(*folders)
    old = make_run(tmp_path / "o", ALL, label="uniform")
    assert "a processor that was not recorded (uniform)" in printed_tables(*folders, old)


# --- summaries ---------------------------------------------------------------------------------


def everything(root: Path) -> list[Path]:
    """Runs of many kinds: client tests, personal models, missing tests, failed and resumed runs."""
    rng = np.random.default_rng(7)
    folders = []
    for label in ("fedavg", "uniform", "fedheal"):
        for seed in range(3):
            values = rng.integers(0, 59, (9, 2)) / 58
            accuracies = [dict(zip(("a", "b c"), row, strict=True)) for row in values.tolist()]
            machine = INTEL if label == "uniform" else AMD
            folders.append(
                make_run(root / f"{label}-{seed}", accuracies, label=label, seed=seed,
                         machine=machine, clients={r: rng.random(4).tolist() for r in range(9)})
            )  # fmt: skip
    folders.append(make_run(root / "other", ALL, config="momentum = 0.5\n", label="fedavg"))
    folders.append(make_run(root / "lost", without_tests(ALL, c=[4]), label="uniform"))
    late = make_run(root / "late", ALL[:4], label="uniform", seed=1, status="failed", error="burnt")
    folders += [late, make_run(root / "more", ALL, label="uniform", seed=2, model_bytes=None)]
    later = {"after_round": 3, "machine": INTEL, "versions": {"flwr": "1.42.0"}}
    folders.append(make_run(root / "again", ALL, seed=3, resumed=[later], sources=["x"]))
    folders.append(
        make_run(root / "own", ALL, label="ditto", personal=rising(0.8, rounds=6)[:5],
                 diagnostics=[{"round": 1, "dropped": {"0": "NaN"}}])
    )  # fmt: skip
    return folders


def grouped_clients(root: Path) -> list[Path]:
    rows = [[0, 0, 1, 1], [None, 0, 1, 0], [5, None, 9, None], [0, 1, 2, 3], *[[0, 0, 1, 1]] * 2]
    folder = clustered(root / "r", rows)
    order = json.loads((folder / "run.json").read_text())
    order["clients"] = order["clients"][2:] + order["clients"][:2]  # clients of b come first
    (folder / "run.json").write_text(json.dumps(order))
    return [folder, make_run(root / "f", rising(0.5), label="fedavg")]


def hospitals(root: Path) -> list[Path]:
    return [
        scored(root, label, seed, 0.5 + shift, 0.3 + 2 * shift + 0.01 * seed)
        for label, shift in (("fedavg", 0.0), ("uniform", 0.0123456), ("fedism", 0.02))
        for seed in range(3)
    ]


def few_patients(root: Path) -> list[Path]:
    """Differences whose spread is below the worth of one of 16 examples, which then decides."""
    return [
        make_run(
            root / f"{label}-{seed}",
            constant(a=0.8, b=0.6 + shift + 0.001 * (seed % 2) * (label == "afl")),
            label=label,
            seed=seed,
            test_sizes=[100, 16],
        )
        for label, shift in (("fedavg", 0.0), ("uniform", 0.01), ("afl", 0.02), ("term", 0.3))
        for seed in range(6)
    ]


@pytest.mark.parametrize("make", [everything, grouped_clients, hospitals, few_patients])
def test_a_summary_gives_the_same_tables_and_verdicts_as_its_runs(
    tmp_path: Path, make: Callable[[Path], list[Path]]
) -> None:
    runs = [read_run(folder) for folder in make(tmp_path)]
    write_summary(runs, tmp_path / "x.csv")
    again = read_summary(tmp_path / "x.csv")
    text = markdown_tables(runs)
    for run in runs:
        text = text.replace(f"({run.path})", f"({run.path.name})")
    assert markdown_tables(again) == text
    assert str(tmp_path) not in (tmp_path / "x.csv").read_text()
    write_summary(again, tmp_path / "y.csv")
    assert (tmp_path / "y.csv").read_bytes() == (tmp_path / "x.csv").read_bytes()


def test_a_summary_keeps_domains_that_are_named_like_other_places(tmp_path: Path) -> None:
    metrics = {m.name: np.full((7, 4), 0.25) + np.arange(4) / 8 for m in METRICS}
    clients = {r: [0.5, 0.75, 0.25, 1.0] for r in range(7)}
    for domains in (("client", "global"), ("a", "b")):
        values = constant(**dict(zip(domains, (0.5, 0.9), strict=True)))
        groups = {"sex": ["f", "m"]}
        run = read_run(make_run(tmp_path / domains[0], values, clients=clients, groups=groups))
        places = [*product(["all"], ["global", "worst_client"]), *product(["domain"], domains)]
        for name, matrix in metrics.items():
            for r, (place, value) in product(range(7), enumerate(matrix[0])):
                run.history.put(Value(r, *places[place], name, float(value)))
        write_summary([run], tmp_path / "x.csv")
        (again,) = read_summary(tmp_path / "x.csv")
        assert again.domains == domains
        assert again.final().tolist() == [0.5, 0.9]
        assert again.by_client.final().tolist() == clients[0]
        for name, history in again.group_metrics.items():
            assert history.values.tolist() == metrics[name][-5:].tolist()


def test_a_summary_keeps_the_order_of_each_runs_domains(tmp_path: Path) -> None:
    """Runs that hold out different domains have different first domains."""
    folders = [
        make_run(
            tmp_path / "-".join(domains),
            constant(**dict(zip(domains, (0.5, 0.9), strict=True))),
            test_sizes=list(sizes),
            clients={0: [0.25, 0.5, 0.75, 1.0]},
        )
        for domains, sizes in ((("a", "b"), (10, 20)), (("c", "a"), (30, 10)))
    ]
    runs = [read_run(folder) for folder in folders]
    write_summary(runs, tmp_path / "x.csv")
    for run, again in zip(runs, read_summary(tmp_path / "x.csv"), strict=True):
        assert again.domains == run.domains
        assert again.info["test_sizes"] == run.info["test_sizes"]
        assert [c.domain for c in again.clients] == [c.domain for c in run.clients]
        assert again.final().tolist() == run.final().tolist()


def test_a_run_and_a_summary_of_the_same_data_are_not_noted_as_different(tmp_path: Path) -> None:
    ours = make_run(tmp_path / "a", constant(a=0.5, b=0.9))
    theirs = make_run(tmp_path / "b", constant(a=0.5, b=0.9), label="uniform")
    write_summary([read_run(theirs)], tmp_path / "x.csv")
    runs = [read_run(ours), *read_summary(tmp_path / "x.csv")]
    assert "different data or clients" not in markdown_tables(runs)


@pytest.mark.usefixtures("undrawn")
def test_a_summary_is_a_csv_table_without_default_settings(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    folders = [make_run(tmp_path / f"r{s}", rising(0.5 + 0.1 * s), seed=s) for s in range(2)]
    write_report([read_run(folder) for folder in folders], tmp_path / "out")
    table = pandas.read_csv(tmp_path / "out" / "summary.csv")
    values = table[(table["metric"] == "accuracy") & (table["name"] == "a")]
    by_run = values.groupby("run")
    assert [*by_run["round"].agg(list)] == [[2, 3, 4, 5, 6]] * 2
    assert by_run["value"].agg(list)["r1"] == [0.62, 0.63, 0.64, 0.65, 0.66]
    facts = json.loads((tmp_path / "out" / "summary.runs.json").read_text())
    assert facts["usual"]["label"] == "fedheal"
    config = facts["usual"]["config"]
    assert config["train.lr"] == 0.01
    assert [run["config"].get("seed", 0) for run in facts["runs"].values()] == [0, 1]
    assert "train.momentum" not in config, "at its default"
    assert not {"run-name", "engine"} & config.keys(), "where and how it was executed"
    assert not any("diagnostics" in run for run in facts["runs"].values())


def test_a_summary_keeps_runs_whose_folders_have_one_name(tmp_path: Path) -> None:
    runs = [read_run(make_run(tmp_path / str(s) / "r", rising(s / 10), seed=s)) for s in range(3)]
    write_summary(runs, tmp_path / "x.csv")
    again = read_summary(tmp_path / "x.csv")
    assert [str(run.path) for run in again] == ["r", "r (2)", "r (3)"]
    assert [run.seed for run in again] == [0, 1, 2]
    assert [run.final()[0] for run in again] == pytest.approx([run.final()[0] for run in runs])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "a,b\n1,2\n", "is not a summary of runs"),
        (lambda text: f"method,run,seed\n{text}", "or an earlier version wrote it"),
        (lambda text: text.splitlines()[0] + "\n", "has no tested round of r"),
        (lambda text: text.replace("0.52", "x"), "line 2: cannot read"),
        (lambda text: text.replace("0.52", "7"), "line 2: accuracy 7.0 of domain a"),
        (lambda text: text.replace("r,2,", "r,-2,"), "line 2: cannot read"),
        (lambda text: text.replace("r,2,", "s,2,"), "the run s, which is not in x.runs.json"),
        (lambda text: text.rstrip() + ",more\n", "line 11: cannot read"),
        (lambda text: text.rpartition(",")[0] + "\n", "line 11: cannot read"),
    ],
)
def test_an_invalid_summary_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    write_summary([read_run(make_run(tmp_path / "r", rising(0.5)))], tmp_path / "x.csv")
    text = (tmp_path / "x.csv").read_text()
    (tmp_path / "x.csv").write_text(change(text))
    assert change(text) != text
    with pytest.raises(RunFolderError, match=re.escape(message)):
        read_summary(tmp_path / "x.csv")
    (tmp_path / "x.csv").rename(tmp_path / "y.csv")
    (tmp_path / "y.csv").write_text(text)
    for name in ("x.csv", "y.csv"):  # no values, no facts
        with pytest.raises(RunFolderError, match="Cannot read"):
            read_summary(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("", "is not valid JSON"),
        ("[]", "expected an object"),
        ({"runs": {}}, "x.csv has the run r, which is not in"),
        ({"usual": {"label": 3}}, "label = 3: expected text"),
        ({"usual": {"config": {"num-server-rounds": -1}}}, "num-server-rounds = -1"),
        ({"usual": {"clients": ["c"]}}, "the domain of client 0 is not in the list of domains"),
        ({"usual": {"status": "lost"}}, "status = 'lost': expected one of"),
        ({"usual": {"remarks": "none"}}, "remarks = 'none': expected a list"),
    ],
)
def test_invalid_facts_of_a_summary_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    write_summary([read_run(make_run(tmp_path / "r", rising(0.5)))], tmp_path / "x.csv")
    file = tmp_path / "x.runs.json"
    facts = json.loads(file.read_text())
    if isinstance(change, dict):
        usual = facts["usual"] | change.pop("usual", {})
        change = json.dumps(facts | {"usual": usual} | change)
    file.write_text(change)
    with pytest.raises(RunFolderError, match=re.escape(message)):
        read_summary(tmp_path / "x.csv")


def test_a_document_is_not_written_from_an_unreadable_summary(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes(b"m\xe9thode\n")
    for name in ("none.csv", "latin.csv"):
        with pytest.raises(RunFolderError, match="Cannot read"):
            replace_generated_block(
                tmp_path / "x.md", tmp_path / name, generated_markdown(tmp_path / name)
            )
    assert not (tmp_path / "x.md").exists()


def test_a_summary_that_a_spreadsheet_saved_is_read(tmp_path: Path) -> None:
    write_summary([read_run(make_run(tmp_path / "r", rising(0.5)))], tmp_path / "x.csv")
    text = (tmp_path / "x.csv").read_text()
    (tmp_path / "x.csv").write_text(text, encoding="utf-8-sig", newline="\r\n")
    facts = tmp_path / "x.runs.json"
    facts.write_text(facts.read_text(), encoding="utf-8-sig")
    (run,) = read_summary(tmp_path / "x.csv")
    assert run.final()[0] == pytest.approx(0.54)


@pytest.mark.usefixtures("undrawn")
def test_a_report_of_a_summary_reads_no_run_folder_and_omits_client_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_summary([read_run(make_run(tmp_path / "r", rising(0.5)))], tmp_path / "x.csv")
    make_run(tmp_path / "elsewhere" / "r", constant(a=0.1, b=0.1))
    monkeypatch.chdir(tmp_path / "elsewhere")
    runs = read_summary(tmp_path / "x.csv")
    assert history_frame(runs)["value"].min() > 0.5, "the run folder of this name was read"
    text = write_report(runs, tmp_path / "out").read_text(encoding="utf-8")
    assert "training examples" not in text, "how many a client has"


@pytest.mark.slow
def test_a_summary_of_seeds_that_stopped_in_different_rounds_gives_a_page(tmp_path: Path) -> None:
    folders = []
    for seed, last in enumerate((9, 19)):
        folder = make_run(tmp_path / f"r{seed}", rising(0.5, rounds=last + 1), seed=seed)
        edit("config.toml", f"rounds = {last}", "rounds = 30")(folder)  # stopped early
        folders.append(folder)
    write_summary([read_run(folder) for folder in folders], tmp_path / "x.csv")
    page = write_report(read_summary(tmp_path / "x.csv"), tmp_path / "out").read_text("utf-8")
    assert "2 seeds" in page


# --- the command -------------------------------------------------------------------------------


def call(*arguments: str | Path, code: int = 0) -> str:
    return re.sub(r"\s+", " ", command.call("report", *arguments, expect=code))


@pytest.mark.usefixtures("undrawn")
def test_a_document_is_filled_only_from_a_summary(tmp_path: Path) -> None:
    folders = hospitals(tmp_path / "runs")
    document = tmp_path / "x.md"
    document.write_text("# Title\n\nHow it was made.\n")
    written = {"summary": tmp_path / "x.csv", "document": document}
    options = ("--summary", written["summary"], "-o", tmp_path / "out", "--into", document)
    output = command.call("report", *folders, *options).splitlines()
    assert all(f"{what}: {path}" in output for what, path in written.items())
    first = document.read_text()
    assert first.startswith("# Title\n\nHow it was made.\n\n<!-- generated from x.csv -->\n")
    tables = (tmp_path / "out" / "tables.md").read_text()
    assert [part["text"].strip() for part in GENERATED.finditer(first)] == [tables.strip()]
    document.write_text(first.replace("better (", "worse (") + "\nMore.\n")
    call(tmp_path / "x.csv", "--into", document)
    assert document.read_text() == first + "\nMore.\n"
    assert not (tmp_path / "report").exists(), "a summary alone makes no page"
    call(tmp_path / "x.csv", "-o", tmp_path / "page")
    assert "uniform" in (tmp_path / "page" / "index.html").read_text()


def test_a_summary_with_a_space_in_its_name_updates_its_own_block(tmp_path: Path) -> None:
    run, document = read_run(make_run(tmp_path / "r", rising(0.5))), tmp_path / "x.md"
    write_summary([run], tmp_path / "my runs.csv")
    for _ in range(2):
        replace_generated_block(
            document, tmp_path / "my runs.csv", generated_markdown(tmp_path / "my runs.csv")
        )
    assert document.read_text().count("<!-- generated from my runs.csv -->") == 1


def test_a_document_keeps_its_text_line_endings_and_permissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    document, link = tmp_path / "x.md", tmp_path / "link.md"
    by_hand = b"# Title\r\n\r\nHow it was made.\r\n\r\n"
    document.write_bytes(by_hand)
    document.chmod(0o600)
    link.symlink_to(document)
    for text in ("old\n", "new\n"):
        replace_generated_block(link, tmp_path / "x.csv", text)
    block = b"<!-- generated from x.csv -->\r\nnew\r\n<!-- end -->\r\n"
    assert document.read_bytes() == by_hand + block
    assert link.is_symlink()
    assert document.stat().st_mode & 0o777 == 0o600

    def full(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text.encode()[:3])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        replace_generated_block(document, tmp_path / "x.csv", "more\n")
    assert document.read_bytes() == by_hand + block
    assert sorted(tmp_path.iterdir()) == [link, document]


@pytest.mark.usefixtures("undrawn")
def test_a_document_has_one_block_for_each_summary(tmp_path: Path) -> None:
    document = tmp_path / "docs" / "x.md"
    document.parent.mkdir()
    document.write_text("# Title\n")
    for name in ("a", "b", "a"):
        folder = tmp_path / name
        if not folder.exists():
            write_summary([read_run(make_run(folder, rising(0.5)))], tmp_path / f"{name}.csv")
        call(tmp_path / f"{name}.csv", "--into", document)
    summaries = [part["summary"] for part in GENERATED.finditer(document.read_text())]
    assert summaries == ["../a.csv", "../b.csv"]


def test_invalid_uses_of_the_report_command_are_refused(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5))
    document = tmp_path / "x.md"
    assert "Add --summary FILE.csv" in call(folder, "--into", document, code=2)
    assert "ends in .csv" in call(folder, "--summary", tmp_path / "x.txt", code=2)
    write_summary([read_run(folder)], tmp_path / "x.csv")
    document.mkdir()
    assert "is a folder. Name a file." in call(tmp_path / "x.csv", "--into", document, code=2)
    document.rmdir()
    call(tmp_path / "x.csv", "--into", document)
    assert document.read_text().startswith("<!-- generated from x.csv -->")
    assert "no.csv does not exist" in call(folder, tmp_path / "no.csv", code=2)
    assert not (folder / "report").exists()
    for arguments in (["--summary", "no/x.csv"], ["--format", "md", "--out", "no/x.md"]):
        assert "the folder no does not exist" in call(folder, *arguments, code=2)
    assert "is a folder" in call(folder, "--format", "latex", "--out", tmp_path, code=2)
    for out in (tmp_path / "page.html", tmp_path / "x.csv"):
        assert "expected a folder" in call(folder, "--out", out, code=2)
    with pytest.raises(ConfigError, match=r"ends in \.csv"):
        write_summary([read_run(folder)], tmp_path / "x")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("x.csv --format md --out x.csv", "x.csv would be read and overwritten"),
        ("x.csv --into link.csv", "link.csv would be read and overwritten"),
        ("x.csv --summary ../{}/x.csv", "x.csv would be read and overwritten"),
        ("page/summary.csv r --out page", "page/summary.csv would be read and overwritten"),
        ("r --summary new.csv --into ./new.csv", "new.csv would be written twice"),
    ],
)
@pytest.mark.posix
def test_an_output_that_equals_an_input_or_another_output_is_refused(
    arguments: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = read_run(make_run(tmp_path / "r", rising(0.5)))
    (tmp_path / "page").mkdir()
    summaries = [tmp_path / "x.csv", tmp_path / "page" / "summary.csv"]
    for path in summaries:
        write_summary([run], path)
    (tmp_path / "link.csv").symlink_to(tmp_path / "x.csv")
    before = [path.read_bytes() for path in summaries]
    monkeypatch.chdir(tmp_path)
    assert f"{problem}. Choose another output." in call(
        *arguments.format(tmp_path.name).split(), code=2
    )
    assert [path.read_bytes() for path in summaries] == before
    assert not (tmp_path / "new.csv").exists()


@pytest.mark.usefixtures("undrawn")
def test_the_report_page_is_written_to_the_given_folder_and_not_read_as_a_run(
    tmp_path: Path,
) -> None:
    folders = [make_run(tmp_path / "runs" / name, rising(0.5), label=name) for name in "ab"]
    call(tmp_path)
    assert (tmp_path / "report" / "index.html").exists()
    for _ in range(2):
        call(*(tmp_path / "runs").glob("*"))
        assert (tmp_path / "runs" / "report" / "index.html").exists()
    call(folders[0])
    assert (folders[0] / "report" / "index.html").exists()
    assert "newer run" not in call(tmp_path, *folders), "a run that is given twice is read once"
    other = make_run(tmp_path / "other" / "c", rising(0.5), label="c")
    message = call(folders[0], other, code=2)
    assert f"such as {folders[0].parent} and {other.parent}." in message
    assert "with --out" in message
    call(folders[0], other, "--out", tmp_path / "page")
    call(tmp_path)


def test_report_refuses_a_study_and_folders_that_contain_studies(tmp_path: Path) -> None:
    studies = [tmp_path / "boards" / name for name in ("digits", "office")]
    for study in studies:
        for name in ("runs/a", "trials/a-trial0"):
            make_run(study / name, rising(0.5))
    message = call(studies[0], code=2)
    assert f"{studies[0]} is a study." in message
    assert message.rstrip().endswith(f"name instead: {studies[0] / 'runs'}")
    tests = " ".join(str(study / "runs") for study in studies)
    for above in (tmp_path, tmp_path / "boards"):
        message = call(above, code=2)
        assert f"{above} contains studies." in message
        assert message.rstrip().endswith(f"name instead: {tests}")
        with pytest.raises(ConfigError, match="contains studies"):
            read(above)
    with pytest.raises(ConfigError, match="digits is a study"):
        read(tmp_path / "boards" / "d*")
    assert len(read(tmp_path / "boards" / "*" / "runs")) == 2
    assert not list(tmp_path.rglob("report"))
    call(*tests.split(), studies[0] / "trials", "--format", "csv")


def test_latex_writes_notes_on_failed_runs_as_comments(tmp_path: Path) -> None:
    make_run(tmp_path / "a", rising(0.5), label="fedheal", status="failed", error="X: no")
    result = command.invoke("report", tmp_path, "--format", "latex")
    assert "% fedheal: federation 0, failed after round" in result.stdout
    edit("run.json", "X: no", "X:\\n  client 2: no")(tmp_path / "a")
    result = command.invoke("report", tmp_path, "--format", "latex")
    assert "X: client 2: no" in result.stdout


# --- federations -------------------------------------------------------------------------------


def federated(
    root: Path, label: str, values: Sequence[float], shared: int | None = None
) -> list[Path]:
    """A run for each value: on federations 0, 1, ..., or with seeds on the ``shared`` one."""
    folders = []
    for number, a in enumerate(values):
        folder = make_run(
            root / f"{label}-{number}", constant(a=a, b=0.9), label=label, seed=number
        )
        drawn = number if shared is None else shared
        edit("config.toml", "[data]\n", f"[data]\nseed = {drawn}\n")(folder)
        folders.append(folder)
    return folders


def test_runs_on_several_federations_are_paired_by_federation(
    tmp_path: Path,
) -> None:
    base, gains = (0.5, 0.3, 0.7, 0.4, 0.6, 0.45), (0.06, 0.05, 0.07, 0.055, 0.065, 0.06)
    better = [a + gain for a, gain in zip(base, gains, strict=True)]
    folders = [*federated(tmp_path, "uniform", base), *federated(tmp_path, "x", better[:5])]
    (comparison,) = group_runs(map(read_run, folders))
    assert [(m.name, len(m.runs), m.unit) for m in comparison.methods] == [
        ("uniform", 6, "federation"),
        ("x", 5, "federation"),
    ]
    assert not comparison.differing
    (sentence,) = [text for text in sections(folders)[""] if text.startswith("x:")]
    assert "worst domain +6.00 ± 0.79 points against Uniform" in sentence
    assert "(5 federations): fairer" in sentence
    # A single run still counts as one federation, which is too few pairs.
    alone = sections([*folders[:6], folders[6]])[""][1]
    assert "(1 federation): too few pairs" in alone


def test_federations_that_only_some_methods_have_are_no_difference_in_config(
    tmp_path: Path,
) -> None:
    values = [0.5, 0.52, 0.48]
    folders = federated(tmp_path, "fedavg", values)
    folders += federated(tmp_path, "uniform", [0.4, *values])[1:]
    listed = "Config keys in which the methods differ"
    rows = page_of(tmp_path / "out", *folders).table(listed)
    assert list(rows) == ["strategy.name"]
    folders += federated(tmp_path, "fedheal", values, shared=0)
    rows = page_of(tmp_path / "out", *folders).table(listed)
    assert sorted(rows["data.seed"].values()) == ["0", "data.seed", "seed", "seed"]


def test_seeds_on_one_federation_name_it_and_are_not_paired_with_another(
    tmp_path: Path,
) -> None:
    values = (0.5, 0.52, 0.48, 0.51, 0.49)
    own = [*federated(tmp_path, "uniform", values, 7), *federated(tmp_path, "x", values[::-1], 7)]
    assert "(5 seeds of federation 7)" in sections(own)[""][1]
    other = [*own[:5], *federated(tmp_path / "o", "x", values, 3)]
    (comparison,) = group_runs(map(read_run, other))
    assert paired_differences(*comparison.methods[::-1], measures(comparison)[0]) is None
