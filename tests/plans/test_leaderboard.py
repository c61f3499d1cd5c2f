"""The leaderboard: one file for many studies, and sentences that follow from their rows."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np
import pytest
from command import call
from run_folders import Page
from scipy import stats
from shipped import LEADERBOARD
from studies import by_tau, make

from fairflower.config import RunConfig
from fairflower.errors import ConfigError, Diverged, RunError
from fairflower.plans.leaderboard import Leaderboard
from fairflower.plans.tuning import Tuning
from fairflower.registry import STRATEGIES
from fairflower.report.leaderboard import (
    AVERAGE,
    COLUMNS,
    WORST,
    Board,
    add_to_board,
    answers,
    board_tables,
    read_board,
)
from fairflower.report.pages import generated, write_board
from fairflower.report.tables.cells import Table

FILE = """
[protocol]
strategies = "fedavg,fedheal,qffl:rule=weights"
budget = 3
select = "worst"
seeds = "1-3"
best = 1
clients = "scaffold"

[settings]
num-server-rounds = 4

[settings.data]
clients-per-domain = 1
examples-per-client = 30
test-examples = 10
validation-fraction = 0.5

[benchmarks.plain.data]
domains = "plain,rotated"

[benchmarks.noisy]
metric = "balanced_accuracy"

[benchmarks.noisy.data]
domains = "plain,inverted"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "board.toml"
    path.write_text(FILE)
    return path


def quality(config: RunConfig) -> tuple[float, float]:
    """Better with a tau near 0.5, and a bit by the seed."""
    worst, other = by_tau(config)
    bonus = {"fedavg": 0.0, "uniform": 0.01, "fedheal": 0.05}.get(config.strategy.name, -0.2)
    return worst - 0.2 + bonus + 0.001 * config.seed**2, other


def board_of(file: Path, folder: Path) -> tuple[Leaderboard, list[Tuning], list[dict[str, Any]]]:
    """Studies of all benchmarks, made without any training, and their rows."""
    made = Leaderboard.read(file)
    studies = [made.study(one, folder) for one in made.benchmarks]
    for study in studies:
        make(study, quality)
    found = [row for s, b in zip(studies, made.benchmarks, strict=True) for row in made.rows(s, b)]
    return made, studies, found


@pytest.mark.slow
def test_a_file_is_studies_with_one_protocol(file: Path, tmp_path: Path) -> None:
    made, (plain, noisy), _ = board_of(file, tmp_path)
    labels = ["fedavg", "uniform", "fedheal", "qffl:rule=weights"]
    for study in (plain, noisy):
        assert sorted(method.name for method in study.methods) == sorted(labels)
        assert all(method.budget == 3 for method in study.methods)  # their training is tuned, too
        assert all("train.lr" in method.tunables for method in study.methods)
        assert all(method.protocol.defaults for method in study.methods)
    assert noisy.methods[0].protocol.metric == "balanced_accuracy"
    assert plain.methods[0].config.data.domains == "plain,rotated"
    assert plain.methods[0].config.num_server_rounds == 4
    other = made.study(made.benchmarks[0], tmp_path, best=["fedheal"])
    assert {method.name for method in other.methods} == {"scaffold+fedheal", "scaffold+uniform"}
    assert other.folder == plain.folder
    some = made.study(made.benchmarks[0], tmp_path, ["fedheal"])
    assert [method.name for method in some.methods] == ["fedheal"]
    some = made.study(made.benchmarks[0], tmp_path, ["fedavg"], ["fedheal", "fedavg"])
    assert [method.name for method in some.methods] == ["scaffold+fedavg"]


@pytest.mark.slow
def test_rows_are_those_of_the_studies(file: Path, tmp_path: Path) -> None:
    _, (plain, noisy), found = board_of(file, tmp_path)
    for study in (plain, noisy):
        own = [row for row in found if row["benchmark"] == study.folder.name]
        for one in study.tuned():
            mine = [row for row in own if row["method"] == one.method]
            kinds = [row["kind"] for row in mine]
            same = one.chosen == one.trials[0]
            assert kinds.count("trial") == 3
            assert kinds.count("both") == 3 * same
            assert kinds.count("chosen") == kinds.count("paper's") == 3 * (not same)
            for row in mine:
                assert set(row) == set(COLUMNS)
                if row["kind"] in ("chosen", "both"):
                    assert one.chosen
                    assert row["settings"].startswith(
                        " ".join(f"{k}={v:.8g}" for k, v in one.chosen.values.items())
                    )
    row = next(r for r in found if (r["method"], r["kind"]) == ("uniform", "both"))
    worst = 0.9 - 0.2 - 0.2 + 0.01 + 0.001 * row["number"] ** 2
    expected = [(0.1 + 3 * value) / 4 for value in (worst, 0.8)]  # of all four rounds
    assert [float(v) for v in row["figures"].split()] == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("after_round", "named"), [(0, "new"), (2, "old and new")])
def test_the_processors_are_those_of_the_rounds_that_a_test_has(
    after_round: int, named: str, file: Path, tmp_path: Path
) -> None:
    made, (study, _), _ = board_of(file, tmp_path)
    path = next((study.folder / "runs").glob("uniform-seed1/run.json"))
    session = {"after_round": after_round, "machine": {"processor": "new"}}
    facts = json.loads(path.read_text()) | {"machine": {"processor": "old"}, "resumed": [session]}
    path.write_text(json.dumps(facts))
    found = [row for row in made.rows(study, made.benchmarks[0]) if row["processor"]]
    assert [(row["method"], row["number"], row["processor"]) for row in found] == [
        ("uniform", 1, named)
    ]


@pytest.mark.slow
def test_the_file_keeps_other_benchmarks_and_gives_the_same_document(
    file: Path, tmp_path: Path
) -> None:
    _, _, found = board_of(file, tmp_path)
    page = tmp_path / "index.html"
    write_board(file, found, page)
    text = file.with_suffix(".md").read_text()
    assert generated(file.with_suffix(".csv")) in text
    for figure in ("differences", "domains-plain", "domains-noisy"):
        assert (file.parent / "figures" / f"board-{figure}.png").exists()
    first = file.with_suffix(".csv").read_text()
    shown = Page(page.read_text(encoding="utf-8"))
    assert "fedheal" in shown.table("Tuned: worst domain")
    text = page.read_text(encoding="utf-8")
    for anchor in re.findall(r'<td[^>]*><a href="#([^"]+)"', text):
        assert f'<tr id="{unquote(anchor)}">' in text
    write_board(file, [row for row in found if row["benchmark"] == "noisy"], page)
    assert sorted(file.with_suffix(".csv").read_text().splitlines()) == sorted(first.splitlines())
    assert read_board(file.with_suffix(".csv")).benchmarks == ["plain", "noisy"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("budget", "budgte", "Unknown key 'budgte'. Did you mean 'budget'"),
        ('"worst"', '"worts"', "Did you mean 'worst'"),
        ("[settings]", "[setings]", "Did you mean 'settings'"),
        ('"balanced_accuracy"', '"balanced"', "balanced_accuracy"),
        ('strategies = "fedavg,', 'strategies = "fedagv,', "Did you mean 'fedavg'"),
        ("[benchmarks.", "[settings.", "board.toml"),
        ('seeds = "1-3"', 'seeds = "0-3"', r"\[protocol\] seeds = .* seed of the trials"),
        ('seeds = "1-3"', 'seeds = "3-1"', r"board.toml: \[protocol\] seeds '3-1'"),
        ("budget = 3", "budget = 0", "budget = 0: expected a whole number, 1 or more"),
        ("budget = 3", 'budget = "many"', "budget = 'many': expected a whole number"),
        ("best = 1", "", "best = 0: expected a whole number, 1 or more"),
        ('strategies = "fedavg,fedheal', 'strategies = ["fedavg', "board.toml"),
        ('clients = "scaffold"', 'clients = ["scaffold"]', "clients: expected one text"),
        ("[settings]", "[settings]\nseed = 7", "trials have seed 0, tests those of"),
        ("[benchmarks.noisy]", "[benchmarks.noisy]\nseed = 7", "trials have seed 0"),
    ],
)
def test_a_wrong_file_is_refused_by_name(
    file: Path, tmp_path: Path, old: str, new: str, said: str
) -> None:
    file.write_text(FILE.replace(old, new))

    def read() -> None:
        made = Leaderboard.read(file)
        made.study(made.benchmarks[0], tmp_path)

    with pytest.raises(ConfigError, match=said):
        read()


def test_images_for_validation_are_kept_as_in_any_study(file: Path) -> None:
    for share in ("0.5", "0.2"):
        assert {
            one.settings["data.validation-fraction"] for one in Leaderboard.read(file).benchmarks
        } == {float(share)}
        file.write_text(FILE.replace("validation-fraction = 0.5\n", ""))


def test_settings_of_a_benchmark_go_over_those_of_all_and_what_is_given_over_both(
    file: Path,
) -> None:
    own = "[benchmarks.noisy]\nnum-server-rounds = 6"
    file.write_text(FILE.replace("[benchmarks.noisy]", own))

    def rounds(given: dict[str, Any]) -> list[int]:
        made = Leaderboard.read(file, given)
        return [one.settings["num-server-rounds"] for one in made.benchmarks]

    assert rounds({}) == [4, 6]
    assert rounds({"num-server-rounds": 2}) == [2, 2]


@pytest.mark.slow
def test_a_test_that_diverged_is_a_row_of_what_is_lost(file: Path, tmp_path: Path) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        if config.evaluate.test and config.strategy.name == "uniform" and config.seed == 2:
            raise Diverged("the merged model holds NaN")
        return quality(config)

    made = Leaderboard.read(file)
    study = made.study(made.benchmarks[0], tmp_path)
    make(study, failing)
    lost = [row for row in made.rows(study, made.benchmarks[0]) if row["outcome"] == "lost"]
    assert [(row["method"], row["kind"] != "trial", row["number"]) for row in lost] == [
        ("uniform", True, 2)
    ]
    assert (lost[0]["figures"], lost[0]["reason"]) == ("", "the merged model holds NaN")


def test_the_shipped_file_is_one() -> None:
    made = Leaderboard.read(LEADERBOARD)
    assert {rule.name for rule in made.rules} == {*STRATEGIES}
    for one in made.benchmarks:
        config = RunConfig.from_flat({**one.settings})
        assert one.name == config.data.name
        assert config.data.validation_fraction > 0


@pytest.mark.slow
def test_the_best_rules_are_those_of_the_best_mean_rank_in_trials(
    file: Path, tmp_path: Path
) -> None:
    made, studies, found = board_of(file, tmp_path)
    board = add_to_board(tmp_path / "x.csv", found)
    labels = [rule.label for rule in made.rules]
    worst = [
        {one.method: one.chosen.worst for one in study.tuned() if one.chosen} for study in studies
    ]
    best = sorted(labels, key=lambda name: -sum(figures[name] for figures in worst))
    assert board.best(labels, 4) == best  # each is as far from the next on both benchmarks
    assert board.best(labels, made.best) == ["fedheal"]
    assert board.best(["fedavg"], 2) == ["fedavg"]
    with_clients = [{**row, "method": f"scaffold+{row['method']}"} for row in found]
    more = add_to_board(tmp_path / "x.csv", with_clients)
    assert more.best(labels, 4) == best
    assert len(more.rows) == 2 * len(found)


@pytest.mark.slow
def test_results_by_another_protocol_are_not_mixed_with(file: Path, tmp_path: Path) -> None:
    made, _, found = board_of(file, tmp_path / "studies")
    results = file.with_suffix(".csv")
    board = add_to_board(results, [row for row in found if row["benchmark"] == "noisy"])
    for one in made.benchmarks:
        made.check(one, board, results)
    before = results.read_text()
    for old, new, said in [
        ("num-server-rounds = 4", "num-server-rounds = 5", "num-server-rounds was 4, and is 5"),
        ("[settings]", "[settings]\ntrain.lr = 0.2", "train.lr was 0.05, and is 0.2"),
        ("budget = 3", "budget = 2", "budget was 3, and is 2"),
        ('"balanced_accuracy"', '"accuracy"', "metric was balanced_accuracy, and is accuracy"),
        ('"plain,inverted"', '"plain,rotated"', "data.domains was plain,inverted, and is"),
        ('"plain,inverted"', '"plain,inverted"\nseed = 1', "data.seed was 0, and is 1"),
    ]:
        file.write_text(FILE.replace(old, new))
        shown = call("leaderboard", str(file), f"--output-dir={tmp_path / 'new'}", expect=2)
        assert f"{results} has results of noisy by another protocol: {said}" in shown
        assert results.read_text() == before
        assert not (tmp_path / "new").exists()


def test_a_table_tells_its_settings(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one"])
    assert "Settings: not told." in board_tables(board)[2].caption
    told = row("one", "", "protocol", 0, 0) | {"settings": "num-server-rounds=30 budget=12"}
    board = add_to_board(tmp_path / "x.csv", [told])
    assert "Settings: num-server-rounds=30 budget=12." in board_tables(board)[2].caption
    assert board.figures("one", WORST).shape == (4, 5)


def test_another_csv_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("benchmark,method\na,b\n")
    with pytest.raises(RunError, match="lacks domains, figures"):
        read_board(tmp_path / "x.csv")
    with pytest.raises(RunError, match="Cannot read"):
        read_board(tmp_path / "none.csv")


# --- what is concluded ---------------------------------------------------------------------------


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
    return add_to_board(tmp_path / "x.csv", found)


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


def test_every_domain_has_its_own_figures(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one"])
    found = board.by_domain("one")
    assert list(found) == ["a", "b"]
    assert (found["b"] == 90).all(axis=None)
    worst = found["a"].clip(upper=90)
    np.testing.assert_allclose(worst, board.figures("one", WORST))


@pytest.mark.slow
def test_names_of_domains_may_have_spaces(file: Path, tmp_path: Path) -> None:
    sites = 'name = "randhie:groups=site"\ndomains = "site 1,site 2"'
    file.write_text(FILE.replace('domains = "plain,inverted"', sites))
    _, _, found = board_of(file, tmp_path)
    board = add_to_board(tmp_path / "x.csv", found)
    assert list(board.by_domain("noisy")) == ["site 1", "site 2"]
    assert "seeds, domains site 1 and site 2. " in board_tables(board)[3].caption
    assert {row["domains"] for row in found} == {"plain rotated", "'site 1' 'site 2'"}


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
    board = add_to_board(tmp_path / "x.csv", [*found, lost, *tests])
    assert board.variance("one")["learning rate"] == pytest.approx(1)
    assert any("over 7 trials (2 of them pruned), aggr" in line for line in answers(board))


def test_what_is_lost_is_told_and_in_no_mean(tmp_path: Path) -> None:
    made_up(tmp_path, GAINS, ["one"])
    gone = {**row("one", "afl", "chosen", 3, 0), "outcome": "lost", "figures": "", "reason": "NaN"}
    rows_now = read_board(tmp_path / "x.csv").rows.to_dict("records")
    there = [r for r in rows_now if (r["method"], r["kind"], r["number"]) != ("afl", "chosen", 3)]
    nowhere = {**row("one", "term", "trial", 0, 0), "outcome": "lost", "figures": ""}
    board = add_to_board(tmp_path / "x.csv", [*there, gone, nowhere])
    assert board.figures("one", WORST).loc["afl"].isna().sum() == 1
    assert board.against_reference("one", WORST)["afl"].n == 4
    _, _, one, _ = board_tables(board)
    assert list(one.footers) == [
        "afl with chosen values, seed 3, is lost and in no mean: NaN",
        "term: all trials were lost, and nothing is tested.",
    ]
    assert board.lacking(["one", "two"], ["afl", "pa3fed"]) == ["pa3fed on one", "two"]
    assert board.best(["term", "fedavg"], 1) == ["fedavg"]


def test_one_seed_tells_nothing(tmp_path: Path) -> None:
    found = [row("one", name, "both", 1, 50) for name in ("uniform", "afl")]
    board = add_to_board(tmp_path / "x.csv", [*found, row("one", "afl", "trial", 0, 50)])
    assert not any("Holm" in line for line in answers(board))
    assert "nan" not in str(board_tables(board))


@pytest.mark.parametrize("count", [1, 2])
def test_of_trials_that_came_to_the_same_no_variance_is_told(count: int, tmp_path: Path) -> None:
    names = ("uniform", "fedavg")  # of clients of one size they are one rule
    found = [row("one", name, "both", 1, 50) for name in names]
    found += [row("one", name, "trial", k, 50) for name in names for k in range(count)]
    board = add_to_board(tmp_path / "x.csv", found)
    assert not any("variance" in line for line in answers(board))
    assert [c.text for c in board_tables(board)[-1].groups[0].rows[0].cells] == ["\N{EN DASH}"]


@pytest.mark.parametrize("name", ["fedmgda+", "fedmgda+:epsilon=0.2", "scaffold+fedmgda+:eta=2"])
def test_a_plus_that_ends_a_rules_name_is_no_local_training(name: str, tmp_path: Path) -> None:
    found = [row("one", m, "trial", k, 50 + k, lr=0.1**k) for m in (name, "afl") for k in (0, 1, 2)]
    tests = [row("one", "uniform", "chosen", 1, 50)]
    shares = add_to_board(tmp_path / "x.csv", [*found, *tests]).variance("one")
    assert ("local training" in shares) == name.startswith("scaffold")


def test_sentences_follow_from_the_rows(tmp_path: Path) -> None:
    board = made_up(tmp_path, GAINS, ["one", "two", "three"])
    said = answers(board)
    assert (
        "one: better than uniform weights in the worst domain, after Holm's correction over 3 "
        "methods: afl; worse: fedavg." in said
    )
    assert "Better than uniform weights on more than two of 3 benchmarks: afl (3)." in said
    (moved,) = (line for line in said if line.startswith("two: tuning moves"))
    assert "from +1.60 (fedavg) to +2.30 (afl)" in moved
    assert "Kendall's tau is 1.00" in moved or "Kendall's tau is 0.67" in moved
    text = "\n".join(said)
    assert "Over 3 benchmarks Friedman's test gives p = 0.0" in text
    assert "two: of the variance over 12 trials (0 of them pruned), aggregation 100.0 %" in text


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
    board = add_to_board(tmp_path / "x.csv", found)
    (moved,) = (line for line in answers(board) if "tuning moves" in line)
    assert moved == (
        "one: tuning moves the worst domain by +5.25 points on average, from +0.00 (term) to "
        "+20.00 (fedheal); of 4 methods 2 keep the paper's values. Between the rankings at the "
        "paper's and at the chosen values Kendall's tau is 0.00; best at the paper's values: afl, "
        "tuned: qffl."
    )
    table = board_tables(board)[2]
    cells = {r.name: dict(zip(table.columns, r.cells, strict=True)) for r in rows_of(table)}
    assert list(cells) == ["qffl", "fedheal", "afl", "term", "uniform"]
    assert (cells["fedheal"]["by tuning"].text, cells["afl"]["by tuning"].text) == (
        "+20.00", "+1.00",
    )  # fmt: skip
    assert cells["fedheal"]["against uniform"].text == "+10.00"
    assert cells["afl"]["left out"].text == "2", "what was pruned, and what was lost"
    assert (cells["term"][WORST].text, cells["term"][AVERAGE].tone) == ("51.10", "better")


def test_a_method_that_was_not_tested_everywhere_has_no_rank(tmp_path: Path) -> None:
    made_up(tmp_path, GAINS, ["one", "two"])
    more = [
        row("two", method, "both", number, worst + number)
        for method, worst in (("pa3fed", 10), ("term", 80))
        for number in range(1, 6)
    ]
    board = add_to_board(tmp_path / "x.csv", more)
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
    said = answers(add_to_board(tmp_path / "x.csv", term))
    assert sum("methods: afl and term" in line for line in said) == 2
    assert "Better than uniform weights on more than two of 3 benchmarks: afl (3)." in said


def test_ranks_are_apart_by_more_than_the_critical_difference(tmp_path: Path) -> None:
    """Of four methods on three benchmarks it is 2.7, so that ranks 1 and 3 are not apart."""
    gains = {"afl": 3.0, "fedheal": -3.0, "fedavg": -6.0}
    said = answers(made_up(tmp_path, gains, ["one", "two", "three"]))
    (line,) = (line for line in said if "Friedman" in line)
    assert "The lowest mean rank, 1.0, is that of afl" in line
    assert line.endswith("critical difference, 2.7, it is better than that of fedavg.")
    last = [row("three", "afl", "both", number, 10 + number) for number in range(1, 6)]
    said = answers(add_to_board(tmp_path / "x.csv", last))
    (line,) = (line for line in said if "Friedman" in line)
    assert line.endswith("critical difference, 2.7, none is better than another.")


def test_a_rule_that_lost_all_trials_somewhere_is_last_there(tmp_path: Path) -> None:
    worst = {"one": {"term": 60, "afl": 50, "fedavg": 40}, "two": {"afl": 50, "fedavg": 40}}
    found = [
        row(benchmark, method, kind, number, value)
        for benchmark, methods in worst.items()
        for method, value in methods.items()
        for kind, number in (("trial", 0), ("both", 1))
    ]
    lost = {**row("two", "term", "trial", 0, 0), "outcome": "lost", "figures": ""}
    board = add_to_board(tmp_path / "x.csv", [*found, lost])
    assert board.best(["term", "afl", "fedavg"], 2) == ["afl", "term"]


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
    assert not re.search("Friedman|more than two", "\n".join(answers(board))), "of two benchmarks"


def rows_of(table: Table) -> Sequence[Any]:
    (group,) = table.groups
    return group.rows


@pytest.mark.slow
def test_other_local_training_waits_for_all_benchmarks(file: Path, tmp_path: Path) -> None:
    board_of(file, tmp_path / "out")
    command = ["leaderboard", str(file), "--output-dir", str(tmp_path / "out")]
    said = call(*command, "--part", "clients", expect=2)
    assert "board.csv lacks plain, noisy yet. Measure them first." in " ".join(said.split())
    said = " ".join(call(*command, "--benchmarks", "noisy").split())
    assert "noisy: 0 runs are left" in said
    assert "board.csv lacks plain yet" in said
    assert read_board(file.with_suffix(".csv")).benchmarks == ["noisy"]


@pytest.mark.slow
def test_the_command_makes_all_of_it_and_nothing_twice(
    file: Path, tmp_path: Path, undrawn: None
) -> None:
    quick = FILE.partition("[benchmarks.noisy]")[0].replace("budget = 3", "budget = 1")
    quick = quick.replace("1-3", "1-2").replace("num-server-rounds = 4", "num-server-rounds = 1")
    file.write_text(quick)
    command = ["leaderboard", str(file), "--output-dir", str(tmp_path / "out"), "--jobs", "1"]
    call(*command)
    text = file.with_suffix(".md").read_text()
    assert "scaffold+" in text
    first = file.with_suffix(".csv").read_text()
    assert call(*command).count("0 runs are left") == 2
    assert file.with_suffix(".csv").read_text() == first


@pytest.mark.slow
def test_a_rule_that_the_file_gets_later_is_made_alone(
    file: Path, tmp_path: Path, undrawn: None
) -> None:
    made, studies, _ = board_of(file, tmp_path)
    for study, benchmark in zip(studies, made.benchmarks, strict=True):
        write_board(file, list(made.rows(study, benchmark)), tmp_path / "index.html")
    first = set(file.with_suffix(".csv").read_text().splitlines())
    file.write_text(FILE.replace("fedavg,fedheal", "fedavg,afl,term,fedheal"))
    more = Leaderboard.read(file)
    make(more.study(more.benchmarks[0], tmp_path, ["afl"]), quality)
    command = ["leaderboard", str(file), "--output-dir", str(tmp_path), "--part", "rules"]
    said = call(*command, "--strategies", "afl", "--benchmarks", "plain")
    assert "plain: 0 runs are left" in " ".join(said.split())
    rows = set(file.with_suffix(".csv").read_text().splitlines())
    assert first < rows
    assert {row.split(",")[2] for row in rows - first} == {"afl"}
    assert {row.split(",")[0] for row in rows - first} == {"plain"}
    said = call(*command, "--strategies", "afl,ditto", expect=2)
    assert "--strategies: " in said
    assert "has no ditto, but fedavg, afl, term, fedheal" in " ".join(said.split())
