"""Gains of taking part: against numbers computed by hand from synthetic runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from run_folders import make_run, printed_tables, tables_of
from scipy import stats

from fairflower.report import analyze, read_run, read_summary, write_summary
from fairflower.report.figures.canvas import METHOD_COLORS, line_styles
from fairflower.report.figures.comparison import sketches_of_own_models
from fairflower.report.figures.diagnostics import sketches
from fairflower.report.frames import differences_frame
from fairflower.report.gains import QUESTION, client_gains, elsewhere
from fairflower.report.methods import group_runs
from fairflower.report.pages import write_report
from fairflower.server.history import WINDOW

RNG = np.random.default_rng(3)
SEEDS, ROUNDS = 6, 7
SIZES = [50, 400]
DOMAINS = ["a", "b"]  # with clients 0 and 1, and 2 and 3

#: Method -> accuracies [seeds, rounds, domains].
SHIFTS = {"fedavg": [0.10, -0.10], "uniform": [0.05, 0.05], "pooled": [0.12, 0.11]}
VALUES = {
    name: np.round(0.6 + np.array(shift) + RNG.normal(0, 0.01, (SEEDS, ROUNDS, 2)), 4)
    for name, shift in SHIFTS.items()
}
#: Accuracies [seeds, rounds, clients, domains] of the models that were trained alone.
OWN = np.round(0.6 + RNG.normal(0, 0.01, (SEEDS, ROUNDS, 4, 2)), 4)
OWN[:, :, 3, 1] -= 0.15  # client 3 gains under every method


def alone_run(folder, seed, by_clients=False):
    """A run whose domains have the means over their clients' own models."""
    diagonal = np.stack([OWN[seed, :, k, k // 2] for k in range(4)], axis=1)
    means = diagonal.reshape(ROUNDS, 2, 2).mean(2)
    accuracies = [dict(zip(DOMAINS, row.tolist(), strict=True)) for row in means]
    clients = {r: row.tolist() for r, row in enumerate(diagonal)} if by_clients else None
    make_run(folder, accuracies, label="alone", seed=seed, clients=clients, test_sizes=SIZES)
    if not by_clients:
        lines = [
            f"{r},own,{k}/{DOMAINS[d]},accuracy,{OWN[seed, r, k, d]:.4f}\n"
            for r, k, d in itertools.product(range(1, ROUNDS), range(4), range(2))
            if d == k // 2 or r == ROUNDS - 1
        ]
        with (folder / "history.csv").open("a") as file:
            file.writelines(lines)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    place = tmp_path_factory.mktemp("gains")
    made = [alone_run(place / f"alone-{seed}", seed) for seed in range(SEEDS)]
    for (name, values), seed in itertools.product(VALUES.items(), range(SEEDS)):
        rows = [dict(zip(DOMAINS, row, strict=True)) for row in values[seed].tolist()]
        made.append(
            make_run(place / f"{name}-{seed}", rows, label=name, seed=seed, test_sizes=SIZES)
        )
    return made


@pytest.fixture(scope="module")
def analysis(folders):
    return analyze([read_run(folder) for folder in folders])


def by_hand(name):
    """Gains [seeds, clients] in points: means over the last rounds, on the client's domain."""
    method = VALUES[name][:, -WINDOW:].mean(1)
    own = OWN[:, -WINDOW:].mean(1)
    return 100 * np.stack([method[:, k // 2] - own[:, k, k // 2] for k in range(4)], axis=1)


def test_gains_of_domains_are_paired_differences_from_alone(analysis):
    alone, _, pooled = analysis.chapters[0].gains
    assert (alone.heading, pooled.heading) == ("alone", "pooled")
    assert list(alone.contrasts) == ["fedavg", "uniform", "pooled"]
    assert list(pooled.contrasts) == ["fedavg", "uniform"]
    for name, contrast in alone.contrasts.items():
        gains = by_hand(name).reshape(SEEDS, 2, 2).mean(2)
        for d, one in enumerate(contrast.by_metric):
            assert one.difference.mean == pytest.approx(gains[:, d].mean())
            assert one.difference.std == pytest.approx(gains[:, d].std(ddof=1))
            assert one.difference.level == 0.05 / 6  # of three methods and two domains
    short = pooled.contrasts["fedavg"]["b"].difference.mean
    expected = 100 * (VALUES["fedavg"] - VALUES["pooled"])[:, -WINDOW:, 1].mean()
    assert short == pytest.approx(expected)


def test_gains_over_clients_are_those_by_hand(analysis, folders):
    over_clients = analysis.chapters[0].gains[1].contrasts
    for name in VALUES:
        gains = by_hand(name)
        average, smallest, losing = (one.difference for one in over_clients[name].by_metric)
        for found, expected in (
            (average, gains.mean(1)),
            (smallest, gains.min(1)),
            (losing, (gains < 0).sum(1)),
        ):
            assert found.mean == pytest.approx(expected.mean())
            assert found.std == pytest.approx(expected.std(ddof=1))
            width = stats.t.ppf(0.975, SEEDS - 1) * stats.sem(expected)
            assert np.isnan(found.low) or found.high - found.low >= 2 * width
    # The standard error of an accuracy p is at most sqrt(p (1 - p) / 50), at p = 0.5, and that
    # of the difference of two sqrt(2) times as much: 10 points.
    printed = printed_tables(*folders)
    assert "a client of a has only 50 test examples, which alone give a gain a" in printed
    assert "standard error of up to 10.0 points" in printed
    table = tables_of(*folders).table("Difference from training alone, over clients")
    lost = {row.split()[0]: cells["clients that lose"][:3] for row, cells in table.items()}
    assert lost == {"fedavg": "1.0", "uniform": "0.0", "pooled": "0.0"}


def test_two_runs_are_too_few_for_intervals_of_clients(tmp_path):
    folders = [alone_run(tmp_path / f"alone-{seed}", seed) for seed in range(2)]
    for seed, b in enumerate((0.1, 0.9)):  # clients 2 and 3 lose, or none
        rows = [{"a": 0.9, "b": b}] * ROUNDS
        folders.append(make_run(tmp_path / f"fedavg-{seed}", rows, label="fedavg", seed=seed))
    (row,) = tables_of(*folders).table("Difference from training alone, over clients").values()
    assert row["clients that lose"] == "1.0 too few pairs"
    assert row["average gain"].endswith("too few pairs")


def test_no_interval_has_more_clients_that_lose_than_there_are(tmp_path):
    folders = [alone_run(tmp_path / f"alone-{seed}", seed) for seed in range(5)]
    for seed, b in enumerate((0.1, 0.1, 0.1, 0.1, 0.9)):
        rows = [{"a": 0.1, "b": b}] * ROUNDS
        folders.append(make_run(tmp_path / f"fedavg-{seed}", rows, label="fedavg", seed=seed))
    table = tables_of(*folders).table("Difference from training alone, over clients")
    assert "3.6 [2.0, 4.0]" in table["fedavg 5 seeds of federation 0"]["clients that lose"]


def test_the_clients_of_gains_are_those_whose_model_was_tested(tmp_path):
    folders = [alone_run(tmp_path / "alone", 0)]
    lines = folders[0].joinpath("history.csv").read_text().splitlines(keepends=True)
    folders[0].joinpath("history.csv").write_text("".join(r for r in lines if ",own,3/" not in r))
    folders.append(make_run(tmp_path / "fedavg", [dict.fromkeys(DOMAINS, 0.5)] * ROUNDS))
    assert "Of 3 clients." in printed_tables(*folders)


def test_verdicts_say_who_is_better_off_than_alone(analysis, folders, tmp_path):
    fedavg, uniform, _ = map(str, analysis.chapters[0].verdicts[QUESTION])
    assert fedavg.endswith("mixed (a better; b worse) compared with training alone.")
    assert uniform.endswith("better off (a, b) than training alone.")
    some = [folder for folder in folders if folder.name.startswith("alone")]
    for seed, b in enumerate(np.linspace(0.2, 0.9, SEEDS).tolist()):
        rows = [{"a": 0.9, "b": b}] * ROUNDS
        some.append(make_run(tmp_path / f"noisy-{seed}", rows, label="fedavg", seed=seed))
    (noisy,) = map(str, analyze([*map(read_run, some)]).chapters[0].verdicts[QUESTION])
    assert noisy.endswith("better off (a) than training alone, undecided (b).")
    frame = differences_frame(analysis).query("against == 'alone' and measure == 'by domain'")
    verdicts = {name: rows["verdict"].tolist() for name, rows in frame.groupby("method")}
    assert verdicts["fedavg"] == ["better", "worse"]
    assert verdicts["uniform"] == verdicts["pooled"] == ["better", "better"]


def test_references_are_neither_judged_nor_bold_nor_in_the_families_of_others(analysis, folders):
    chapter = analysis.chapters[0]
    methods = [m.name for m in chapter.comparison.methods]
    assert methods == ["fedavg", "uniform", "alone", "pooled"]
    assert [verdict.name for verdict in chapter.verdicts[""]] == ["fedavg", "uniform"]
    without = [folder for folder in folders if folder.name.startswith(("fedavg", "uniform"))]
    alone = analyze([read_run(folder) for folder in without])
    assert chapter.verdicts[""] == alone.chapters[0].verdicts[""]
    for group in chapter.tables[0].groups:
        tones = {row.name: {cell.tone for cell in row.cells} for row in group.rows}
        assert tones["alone"] == tones["pooled"] == {""}
        assert tones["uniform"] | tones["fedavg"] == {"", "best"}


def test_figures_draw_weights_of_methods_but_not_of_references(tmp_path):
    weighed = [{"round": r, "client_ids": [0, 1], "weights": [0.5, 0.5]} for r in (1, 2)]
    rows = [dict.fromkeys(DOMAINS, 0.7)] * 3
    folders = [
        make_run(tmp_path / name, rows, label=name, diagnostics=weighed)
        for name in ("alone", "fedavg", "pooled")
    ]
    comparison = analyze([*map(read_run, folders)]).chapters[0].comparison
    (draft,) = sketches(comparison, line_styles(["fedavg"], METHOD_COLORS))
    assert [axes.get_title() for axes in draft.figure.axes] == [
        "fedavg: weights of each client",
        "fedavg: sum per domain",
    ]


def test_a_table_shows_where_models_trained_alone_serve(folders):
    table = tables_of(*folders).table("Trained at, tested on: alone, last round (6)")
    assert list(table) == DOMAINS
    for d, e in itertools.product(range(2), range(2)):
        values = 100 * OWN[:, -1, 2 * d : 2 * d + 2, e].mean(1)
        cell = f"{values.mean():.2f} ± {values.std(ddof=1):.2f}"
        assert table[DOMAINS[d]][DOMAINS[e]] == cell


def test_a_summary_and_a_page_have_the_same_gains(analysis, folders, tmp_path):
    write_summary(analysis.runs, tmp_path / "x.csv")
    again = analyze(read_summary(tmp_path / "x.csv")).chapters[0]
    assert again.verdicts == analysis.chapters[0].verdicts
    page = write_report(analysis, tmp_path / "page")
    assert 'data-name="alone"' in page.read_text()
    assert (tmp_path / "page" / "figures" / "alone.png").exists()


def test_gains_are_of_the_clients_own_examples_if_all_clients_tested(tmp_path):
    alone = read_run(alone_run(tmp_path / "alone", 0, by_clients=True))
    tests = {r: (0.7 + 0.01 * np.arange(4)).tolist() for r in range(ROUNDS)}
    rows = [dict(zip(DOMAINS, row, strict=True)) for row in VALUES["fedavg"][0].tolist()]
    folder = make_run(tmp_path / "fedavg", rows, label="fedavg", clients=tests)
    own = OWN[0, -WINDOW:].mean(0)
    expected = [100 * (0.7 + 0.01 * k - own[k, k // 2]) for k in range(4)]
    np.testing.assert_allclose(client_gains(read_run(folder), alone), expected)


def test_captions_count_a_clients_own_examples_if_clients_and_server_tested(tmp_path):
    alone = alone_run(tmp_path / "alone", 0, by_clients=True)
    with (alone / "history.csv").open("a") as file:
        file.write(f"{ROUNDS - 1},own,0/a,accuracy,0.5\n")
    tests = {r: [0.7] * 4 for r in range(ROUNDS)}
    rows = [dict.fromkeys(DOMAINS, 0.7)] * ROUNDS
    make_run(tmp_path / "fedavg", rows, label="fedavg", clients=tests, test_sizes=SIZES)
    printed = printed_tables(alone, tmp_path / "fedavg")
    assert "Of 4 clients." in printed
    assert "a client of a has only 25 test examples" in printed  # of 50 for two clients


@pytest.mark.parametrize("personal", [False, True])
def test_captions_name_methods_whose_personal_models_are_compared(tmp_path, personal):
    for name in ("alone", "fedavg"):
        folder = make_run(tmp_path / name, [dict.fromkeys(DOMAINS, 0.7)] * ROUNDS, label=name)
        with (folder / "history.csv").open("a") as file:
            for r in range(1, ROUNDS) if personal or name == "alone" else ():
                file.writelines(f"{r},domain,{d},personal_accuracy,0.8\n" for d in DOMAINS)
                file.writelines(f"{r},client,{k},personal_accuracy,0.8\n" for k in range(2))
    text = printed_tables(tmp_path / "alone", tmp_path / "fedavg")
    assert text.count("Personal models: fedavg.") == 2 * personal


@pytest.mark.parametrize("personal", [False, True])
def test_a_global_model_that_lacks_a_part_gains_or_loses_nothing(tmp_path, personal):
    """FedBN's has initial normalization at the server; with tests by clients, theirs count."""
    rows = [dict.fromkeys(DOMAINS, 0.7)] * ROUNDS
    tests = {"personal": rows[1:]} if personal else {}
    make_run(tmp_path / "alone", rows, label="alone", **tests)
    kept = {"local_arrays": ["bn.weight"], "strategy": "fedavg"}
    make_run(tmp_path / "fedbn", rows, label="fedbn+fedavg", **kept, **tests)
    make_run(tmp_path / "fedavg", rows, label="fedavg")
    analysis = analyze([read_run(folder) for folder in sorted(tmp_path.iterdir())])
    compared = analysis.chapters[0].gains[0].contrasts.keys()
    assert compared == ({"fedbn+fedavg", "fedavg"} if personal else {"fedavg"})
    write_summary(analysis.runs, tmp_path / "x.csv")
    again = analyze(read_summary(tmp_path / "x.csv")).chapters[0]
    assert again.gains[0].contrasts.keys() == compared


def test_methods_with_masks_are_compared_with_references_without(tmp_path):
    rows = [dict.fromkeys(DOMAINS, 0.7)] * ROUNDS
    masked = {"fedavg": "", "alone": ""} | {"uniform": "[privacy]\nnoise-multiplier = 1.0\n"}
    folders = [
        make_run(tmp_path / name, rows, label=name, config=config, test_sizes=SIZES)
        for name, config in masked.items()
    ]
    table = tables_of(*folders).table("Difference from training alone, by domain")
    assert [name.split()[0] for name in table] == ["fedavg", "uniform"]
    text = printed_tables(*folders)
    assert "Only methods with the same settings are compared, and references." in text
    assert text.count("no FedAvg run with the same settings") == 1  # not uniform with fedavg


def test_elsewhere_averages_the_clients_of_a_domain(tmp_path):
    (method,) = group_runs([read_run(alone_run(tmp_path / "alone", 2))])[0].methods
    values, rows, columns = elsewhere(method)
    np.testing.assert_allclose(values, [OWN[2, -1].reshape(2, 2, 2).mean(1)])
    assert rows == columns == [0, 1]


def test_sites_that_do_not_agree_have_no_row_or_no_column(tmp_path):
    domains = ["a", "b", "c"]
    folder = make_run(tmp_path / "alone", [dict.fromkeys(domains, 0.5)] * 3, label="alone")
    with (folder / "history.csv").open("a") as file:
        for name, score in {"0/a": 0.9, "0/b": 0.8, "1/b": 0.7}.items():  # both clients of a
            file.write(f"2,shared,{name},accuracy,{score}\n")
    table = tables_of(folder).table("Trained at, tested on: alone, last round (2)")
    assert table == {"a": {"method": "a", "b": "75.00"}}
    text = tables_of(folder).text
    assert "No row: b and c (no model was shared)." in text
    assert "standard deviation over" not in text  # of a single run
    assert "No column: a and c (no other model was tested)." in text
    with np.errstate(all="raise"):
        (drawn,) = sketches_of_own_models(analyze([read_run(folder)]).chapters[0].comparison)
    axes = drawn.figure.axes[0]
    ticks = [
        [text.get_text() for text in axis.get_ticklabels()] for axis in (axes.yaxis, axes.xaxis)
    ]
    assert ticks == [["a"], ["b"]]
