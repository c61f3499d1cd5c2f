"""The leaderboard's design, the order of its runs, and the rows of its ledger."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import studies
from command import BOARD, call
from experiment_files import LEADERBOARD
from parametrize import mark_others_nightly

from experiments.leaderboard.design import Design, parse_method
from experiments.leaderboard.ledger import COLUMNS, Ledger, Row, key_of
from experiments.leaderboard.points import LR, points, ranges
from experiments.leaderboard.runs import LeaderboardRuns, progress
from experiments.leaderboard.stages import (
    CONFIRMATION,
    FINALISTS,
    REFERENCE,
    SCREENING,
    SWEEP,
    Planned,
    Stages,
)
from fairflower.config import RunConfig
from fairflower.config.text import argument_to_key
from fairflower.data import DataError, prepare
from fairflower.errors import ConfigError, Diverged, RunFolderError
from fairflower.numerics.metrics import WORST_HALF
from fairflower.registry import REFERENCES, STRATEGIES

FILE = """
[protocol]
results = "rows.csv"
reference = "uniform"
screened = "fedavg,uniform,fedheal,afl"
confirmed = "uniform,fedheal,gsam+fedism"
points = 4
again = 2
scrambling = 31
tuned-on = "100-101"
federations = "0-1"
margin = 3.0

[settings]
num-server-rounds = 4

[settings.data]
clients-per-domain = 1
examples-per-client = 30
test-examples = 10
validation-examples = 20

[benchmarks.plain.data]
domains = "plain,rotated"

[benchmarks.noisy]
federations = "0-2"
overlap = 0.5

[benchmarks.noisy.data]
domains = "plain,inverted"

[sweeps.skew]
of = "plain"
methods = "uniform,fedheal"
federations = "50-51"

[sweeps.skew.settings]
data.fraction = 0.0

[sweeps.skew.vary]
train.local-epochs = [1, 2]
data.clients-per-domain = [2]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "board.toml"
    path.write_text(FILE)
    return path


def stages_of(file: Path) -> Stages:
    design = Design.read(file)
    return Stages(design, Ledger(design.results))


def quality(config: RunConfig) -> tuple[float, float]:
    """Accuracies that are best near learning rate 0.05 and tau 0.5 and depend on the federation."""
    tau = float(config.strategy.args.get("tau") or 0.3)
    lr = abs(np.log(config.train.lr / 0.05)) / 10
    return 0.6 - lr - abs(tau - 0.5) / 4 + 0.01 * (config.seed % 7), 0.9


def make(file: Path, most: int = 9999, quality: studies.Quality = quality) -> list[RunConfig]:
    """Complete the runs that are left, but at most ``most``, without training."""
    making = LeaderboardRuns(stages_of(file), file.parent / "at-work", jobs=2)
    return studies.run_study(making, quality, most=most)  # type: ignore[arg-type]


# --- the design ----------------------------------------------------------------------------------


def test_a_design_is_read_from_its_file(file: Path) -> None:
    design = Design.read(file, {"num-server-rounds": 2})
    plain, noisy = design.benchmarks
    assert (plain.federations, noisy.federations, noisy.overlap) == ((0, 1), (0, 1, 2), 0.5)
    assert dataclasses.astuple(design.margins) == (3.0, 1.0, 1.0)
    config = design.config(noisy, "gsam+fedism", 2, **{LR: 0.2})
    assert (config.seed, config.data.seed, config.num_server_rounds) == (2, 2, 2)
    assert (config.label, config.train.lr) == ("gsam+fedism", 0.2)
    (sweep,) = design.sweeps
    assert [{**place} for place in sweep.places.values()] == [
        {"data.fraction": 0.0, "train.local-epochs": 1},
        {"data.fraction": 0.0, "train.local-epochs": 2},
        {"data.fraction": 0.0, "data.clients-per-domain": 2},
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "margin = 3.0",
            'references = "alon"',
            "references = 'alon': expected alone or pooled, or",
        ),
        ('screened = "', 'screened = "alone,', "'alone' is a reference.* Move it to references = "),
        ('reference = "uniform"', 'reference = "pooled"', "'pooled' is a reference, which is not"),
        ("points = 4", "poins = 4", "Unknown key 'poins'. Did you mean 'points'"),
        ("points = 4", "points = 0", "points = 0: expected a number in"),
        ("points = 4", "points = true", "points = True: expected a whole number"),
        ("scrambling = 31", "scrambling = -1", "scrambling = -1: expected a number in"),
        ('results = "rows.csv"', "results = 3", "results = 3: expected text"),
        ("margin = 3.0", "margin = nan", "margin = nan: expected a number in"),
        ("overlap = 0.5", 'overlap = "half"', r"\[benchmarks.noisy\] overlap = 'half'"),
        ('of = "plain"', 'of = ["plain"]', r"\[sweeps.skew\] of = "),
        ("[1, 2]", "3", "vary.*local-epochs = 3: expected a list"),
        ("[1, 2]", "[]", "vary.*local-epochs = .*: expected a list"),
        (
            "[benchmarks.plain.data]",
            "[benchmarks]\nx = 1\n[benchmarks.plain.data]",
            "benchmarks.x = 1",
        ),
        ("again = 2\n", "", r"\[protocol\] lacks again"),
        ("[settings]", "[setings]", r"toml: Unknown table 'setings'\. Did you mean 'settings'"),
        ('screened = "fedavg,', 'screened = "fedagv,', "Did you mean 'fedavg'"),
        ('screened = "fedavg,', 'screened = "uniform,', "'uniform' is listed twice"),
        (
            'confirmed = "uniform,',
            'confirmed = "fedavg,',
            "the list 'confirmed' lacks the reference method 'uniform'",
        ),
        ('confirmed = "uniform,', 'confirmed = ["uniform", "', "board.toml"),
        (
            'federations = "0-1"',
            'federations = "0-100"',
            "plain: federation 100 is also in tuned-on",
        ),
        (
            'federations = "50-51"',
            'federations = "101"',
            "skew: federation 101 is also in tuned-on",
        ),
        (
            'federations = "50-51"',
            'federations = "1-3"',
            "skew: federation 1 is also one of plain",
        ),
        (
            "[benchmarks.noisy]",
            '[benchmarks.noisy]\nsame-data = "plane"',
            "noisy: same-data = 'plane': expected a benchmark without this key .plain.",
        ),
        ('federations = "0-1"', 'federations = "1-0"', "plain: federations = '1-0'"),
        (
            "[settings.data]",
            "[settings.data]\nseed = 3",
            "plain sets data.seed, but the leaderboard sets this key",
        ),
        (
            'of = "plain"',
            'of = "plane"',
            r"sweeps.skew\] needs a key .of. with a benchmark .plain, noisy",
        ),
        ("train.local-epochs = [1, 2]", "train.local-epoch = [1]", "local-epoch"),
        ("[1, 2]", "[1]\ndata.seed = [7]", "sweep skew sets data.seed, but the leaderboard sets"),
        ("data.fraction = 0.0", "seed = 7", "sweep skew sets seed, but the leaderboard sets this"),
        ("[settings.data]", "[settings.train]\nlr = 0.0\n[settings.data]", "plain: train.lr = 0, "),
        ('results = "rows.csv"', 'results = "rows.md"', r"'rows.md': expected a .csv file"),
        ('results = "rows.csv"', 'results = ""', "expected a .csv file"),
        ('methods = "uniform,', 'methods = "afl,', "sweep skew: the list 'methods' lacks the ref"),
        ('methods = "uniform,', 'methods = "uniform,fedfv,', "sweep skew: fedfv is not tuned"),
        ("validation-examples = 20", "validation-example = 20", "validation-examples"),
        ("validation-examples = 20", "", "plain has no validation examples.* Set data.validation-"),
        (
            'screened = "fedavg,uniform,fedheal,afl"',
            'screened = ["fedagv"]',
            "Did you mean 'fedavg'",
        ),
    ],
)
def test_an_invalid_design_is_refused(file: Path, old: str, new: str, message: str) -> None:
    assert old in FILE
    file.write_text(FILE.replace(old, new))
    with pytest.raises(ConfigError, match=message):
        Design.read(file)


def test_toml_lists_and_comma_separated_texts_are_equivalent(file: Path) -> None:
    design = Design.read(file)
    written = FILE.replace(
        '"fedavg,uniform,fedheal,afl"', '["fedavg", "uniform", "fedheal", "afl"]'
    )
    written = written.replace('"100-101"', "[100, 101]").replace('"0-2"', "[0, 1, 2]")
    file.write_text(written.replace('"uniform,fedheal"', '["uniform", "fedheal"]'))
    assert str(Design.read(file)) == str(design)


def test_references_have_the_methods_trials_and_none_of_their_bounds(file: Path) -> None:
    given = {"bound.max-client-weight": 0.5, "server.optimizer": "adam", "strategy.name": "fedheal"}
    before = Stages(Design.read(file, given), Ledger(file.with_suffix(".csv")))
    file.write_text(FILE.replace("again = 2", 'again = 2\nreferences = ["alone", "pooled"]'))
    stages = Stages(Design.read(file, given), before.ledger)
    noisy = stages.benchmarks[1]
    assert noisy.confirmed == ("uniform", "fedheal", "gsam+fedism", *REFERENCES)
    counts = before.counts()
    assert {place: runs - counts[place] for place, runs in stages.counts().items()} == {
        **{(SCREENING, name): 2 * 4 for name in ("plain", "noisy")},
        **{(FINALISTS, name): 2 * 2 for name in ("plain", "noisy")},
        **{(CONFIRMATION, name): 2 * n for name, n in {"plain": 2, "noisy": 3}.items()},
        **{(REFERENCE, name): 0 for name in ("plain", "noisy")},
        (SWEEP, "plain"): 0,
    }
    for name in REFERENCES:
        config = stages.design.config(noisy, name, 1)
        assert (config.reference, config.client.name, config.seed) == (name, "sgd", 1)
        assert (config.bound.max_client_weight, config.server.optimizer) == (1.0, "none")
        assert stages.points(noisy, name) == [{LR: p[LR]} for p in stages.points(noisy, "fedavg")]
    assert {run.key for run in before.planned()} <= {run.key for run in stages.planned()}


def test_a_method_name_is_parsed_into_client_and_strategy() -> None:
    for text, names in {
        "fedavg": ("sgd", "fedavg"),
        "fedmgda+": ("sgd", "fedmgda+"),
        "fedmgda+:epsilon=0.2": ("sgd", "fedmgda+"),
        "scaffold+fedmgda+": ("scaffold", "fedmgda+"),
    }.items():
        assert tuple(choice.name for choice in parse_method(text)) == names


@pytest.mark.slow
def test_the_shipped_design_screens_and_confirms_what_its_protocol_says() -> None:
    design = Design.read(LEADERBOARD)
    later = {"fedism+", "fedpw", "fairrfl", "dq-ffl", "daa"}  # built after the protocol was written
    later |= {"median", "trimmed-mean", "krum", "multi-krum", "bulyan", "geometric-median"}
    later |= {"fedomg", "fedawa", "fedaware"}
    later |= {*REFERENCES}
    screened = {parse_method(method)[1].name for method in design.screened}
    assert screened == {*STRATEGIES} - later
    assert len(design.screened) == 27
    for one in design.benchmarks:
        assert len(one.confirmed) == 13
        assert len(one.federations) >= 24
        config = design.config(one, "uniform", 0)
        assert config.data.validation_examples == 1000
        assert config.num_server_rounds % config.evaluate.every == 0


# --- the points ----------------------------------------------------------------------------------


def test_methods_try_the_same_learning_rates_and_the_papers_values_first(file: Path) -> None:
    design = Design.read(file)
    tried = {}
    for method in ("fedavg", "fedheal", "scaffold+fedism"):
        searched = ranges(design.config(design.benchmarks[0], method, 0))
        first, *others = points(searched, 9, design.scrambling)
        assert first == {key: one.default for key, one in searched.items()}
        tried[method] = [one[LR] for one in others]
        for key, one in searched.items():
            places = [
                (
                    np.log(point[key] / one.search.low) / np.log(one.search.high / one.search.low)
                    if one.search.log
                    else (point[key] - one.search.low) / (one.search.high - one.search.low)
                )
                for point in others
            ]
            # One point in every eighth of the range, up to rounding to three digits.
            expected = (np.arange(8) + 0.5) / 8
            np.testing.assert_allclose(sorted(places), expected, atol=1 / 16 + 0.005)
    assert tried["fedavg"] == tried["fedheal"] == tried["scaffold+fedism"]
    assert 0.05 / 4 <= min(tried["fedavg"]) <= max(tried["fedavg"]) <= 2.5 * 0.05


def test_more_than_16_tuned_settings_are_refused(file: Path) -> None:
    design = Design.read(file)
    searched = ranges(design.config(design.benchmarks[0], "fedavg", 0))
    many = {f"strategy.x{k}": searched[LR] for k in range(17)}
    with pytest.raises(ConfigError, match=r"17 settings to tune \(strategy.x0, .*at most 16"):
        points(many, 9, design.scrambling)


# --- the runs ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_follow_the_stages_and_the_best_in_validation_is_confirmed(file: Path) -> None:
    done = make(file)
    stages = stages_of(file)
    rows = [*stages.ledger.rows.values()]
    counts = Counter((row.stage, row.benchmark) for row in rows)
    assert counts == stages.counts()
    assert len({(c.run_name) for c in done}) == len(done) == len(rows)
    assert not any(line.left for line in progress(stages))
    for row in rows:
        on_test = row.stage in (CONFIRMATION, REFERENCE, SWEEP)
        assert bool(row.test) == on_test
        assert bool(row.validation) != on_test
        assert (row.federation >= 100) != on_test
        assert len(row.accuracies) == len(row.domain_names) == 2
    for benchmark in stages.benchmarks:
        for method in benchmark.confirmed:
            mine = [row for row in rows if (row.benchmark, row.method) == (benchmark.name, method)]
            first = {r.settings: WORST_HALF(r.accuracies) for r in mine if r.stage == SCREENING}
            again = {r.settings: WORST_HALF(r.accuracies) for r in mine if r.stage == FINALISTS}
            assert {*again} == {*sorted(first, key=first.__getitem__)[-2:]}
            again = {settings: again[settings] for settings in first if settings in again}
            best = max(again, key=lambda settings: first[settings] + again[settings])
            confirmed = [r for r in mine if r.stage == CONFIRMATION]
            assert {r.settings for r in confirmed} == {best}
            assert [r.federation for r in confirmed] == [*benchmark.federations]
    places = {row.settings.split(" ", 1)[-1] for row in rows if row.stage == SWEEP}
    assert any("data.clients-per-domain=2" in place for place in places)
    order = [(row.benchmark, row.stage) for row in rows if row.method == "fedheal"]
    claims = [pair for pair in order if pair[1] != SWEEP]
    assert claims == sorted(
        claims,
        key=lambda pair: (pair[0] != "plain", [SCREENING, FINALISTS, CONFIRMATION].index(pair[1])),
    )


def test_titles_of_leaderboard_runs_are_unique(file: Path) -> None:
    making = LeaderboardRuns(stages_of(file), file.parent / "at-work", jobs=9)
    titles = [making.title(config) for config in making.plan.runs]
    assert len(set(titles)) == len(titles) == 9
    assert titles[0] == "screening, plain: uniform train.lr=0.05"


@pytest.mark.nightly
@pytest.mark.slow
def test_a_later_session_runs_only_what_the_ledger_lacks(file: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "board.toml").write_text(FILE)
    make(whole / "board.toml")
    names = []
    while configs := make(file, most=17):
        names += [config.run_name for config in configs]
    assert len(set(names)) == len(names)

    def without_order(path: Path) -> list[str]:
        return sorted((path / "rows.csv").read_text().splitlines())

    assert without_order(file.parent) == without_order(whole)


@pytest.mark.nightly
@pytest.mark.slow
def test_a_diverged_trial_is_a_lost_row_and_is_not_chosen(file: Path) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        best = config.strategy.name == "fedheal" and config.train.lr == 0.05
        if best and config.seed == 101:
            raise Diverged("the merged model\nholds NaN")
        return quality(config)

    make(file, quality=failing)
    rows = [row for row in stages_of(file).ledger.rows.values() if row.method == "fedheal"]
    lost = [row for row in rows if row.outcome == "lost"]
    assert lost
    assert {(row.federation, row.accuracies) for row in lost} == {(101, ())}
    assert {row.reason for row in lost} == {"the merged model holds NaN"}
    confirmed = {row.settings for row in rows if row.stage == CONFIRMATION}
    assert confirmed
    assert not confirmed & {row.settings for row in lost}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_that_failed_without_diverging_is_repeated_by_the_next_session(file: Path) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        if config.strategy.name == "uniform" and config.seed == 100:
            raise OSError("No space left on device")
        return quality(config)

    make(file, quality=failing)
    assert not any(row.method == "uniform" for row in stages_of(file).ledger.rows.values())
    make(file)
    assert not [*stages_of(file).left()]


# --- the rows ------------------------------------------------------------------------------------

ROW = Row(
    *("screening", "plain", "fedheal:tau=0.4", 100, "train.lr=0.1", "'site 1' b"),
    *("0.5 0.25", "", "completed", "", "one, two", 12.5, "abcd1234", "00ff"),
)


def test_rows_are_read_back_and_a_truncated_last_row_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    rows = [ROW, dataclasses.replace(ROW, key="11ff", outcome="lost", validation="", reason="NaN")]
    for row in rows:
        Ledger(path).add(row)
    assert [*Ledger(path).rows.values()] == rows
    assert ROW.domain_names == ["site 1", "b"]
    assert ROW.accuracies == (0.5, 0.25)
    text = path.read_text()
    path.write_text(text + "screening,plain,fedh")
    ledger = Ledger(path)
    assert [*ledger.rows.values()] == rows
    assert path.read_text() == text + "screening,plain,fedh", "reading changes nothing"
    ledger.add(dataclasses.replace(ROW, key="33ff"))
    ledger.add(dataclasses.replace(ROW, key="44ff"))
    assert [row.key for row in Ledger(path).rows.values()] == ["00ff", "11ff", "33ff", "44ff"]
    assert path.read_text().startswith(text)
    path.write_bytes(
        b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    )  # as a spreadsheet saves it
    Ledger(path).add(dataclasses.replace(ROW, key="22ff"))
    assert [row.key for row in Ledger(path).rows.values()] == ["00ff", "11ff", "22ff"]


def test_a_ledger_that_was_truncated_at_any_byte_is_continued(tmp_path: Path) -> None:
    path, first = tmp_path / "rows.csv", dataclasses.replace(ROW, domains="Zürich Genève")
    second = dataclasses.replace(first, key="11ff")
    Ledger(path).add(first)
    start = path.stat().st_size
    Ledger(path).add(second)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        kept = [first] if end >= start else []
        assert [*Ledger(path).rows.values()] == kept
        Ledger(path).add(second)
        assert [*Ledger(path).rows.values()] == [*kept, second]


def test_a_truncated_header_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("stage,bench")
    Ledger(path).add(ROW)
    assert [*Ledger(path).rows.values()] == [ROW]


def test_two_rows_of_a_run_must_agree(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    Ledger(path).add(ROW)
    Ledger(path).add(dataclasses.replace(ROW, seconds=99.0))
    assert Ledger(path).rows == {"00ff": ROW}
    Ledger(path).add(dataclasses.replace(ROW, validation="0.5 0.75"))
    with pytest.raises(RunFolderError, match="row 4: another row of the same run has other resul"):
        Ledger(path)


def test_only_one_process_at_a_time_may_add_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with Ledger.locked(path) as ledger:
        ledger.add(ROW)
        with pytest.raises(ConfigError, match="Another process is using"), Ledger.locked(path):
            pass
        assert Ledger(path).rows == {"00ff": ROW}, "others may read"
    with Ledger.locked(path) as ledger:
        assert ledger.rows == {"00ff": ROW}


def test_a_file_that_is_not_a_ledger_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("method,run\na,b\n")
    with pytest.raises(RunFolderError, match="not a leaderboard's ledger"):
        Ledger(path)
    path.write_text(",".join(COLUMNS) + "\n" + ",".join("x" for _ in COLUMNS) + "\n")
    with pytest.raises(RunFolderError, match="row 2 cannot be read"):
        Ledger(path)


def test_a_row_with_other_data_of_the_same_federation_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "rows.csv")
    ledger.add(ROW)
    ledger.add(dataclasses.replace(ROW, federation=101, data="other", key="11ff"))
    with pytest.raises(
        RunFolderError, match=r"federation 100, have different data .*other instead of abcd1234"
    ):
        ledger.add(dataclasses.replace(ROW, data="other", key="22ff"))


@pytest.mark.slow
def test_rows_that_are_no_longer_planned_may_have_other_data(file: Path) -> None:
    make(file, most=6)
    file.write_text(
        file.read_text().replace("examples-per-client = 30", "examples-per-client = 25")
    )
    make(file, most=3)
    assert len(stages_of(file).ledger.rows) == 9
    stages = stages_of(file)
    (planned, row), *_ = finished(stages)
    del stages.ledger.rows[planned.key]
    with pytest.raises(RunFolderError, match="have different data than in earlier runs"):
        stages.ledger.add(
            dataclasses.replace(row, data="other"), (run.key for run in stages.planned())
        )


@pytest.mark.nightly
@pytest.mark.slow
def test_early_stopping_follows_the_validation_examples_in_all_stages(file: Path) -> None:
    make(file)
    runs = [*stages_of(file).planned()]
    assert {r.stage for r in runs if r.config.data.validated} == {SCREENING, FINALISTS}
    text = file.read_text().replace(
        "num-server-rounds = 4", "num-server-rounds = 4\nstop.patience = 2"
    )
    patient = file.with_name("patient.toml")
    patient.write_text(text.replace("rows.csv", "patient.csv"))
    make(patient)
    runs = [*stages_of(patient).planned()]
    assert {run.stage for run in runs} >= {CONFIRMATION, REFERENCE, SWEEP}
    assert {run.config.data.validation_examples for run in runs} == {20}


def test_a_key_depends_on_settings_and_traces_that_affect_results(tmp_path: Path) -> None:
    flat = {"train.lr": 0.1, "strategy.name": "fedheal"}

    def key(**own: object) -> str:
        return key_of(
            RunConfig.from_flat({**flat, **{k.replace("__", "."): v for k, v in own.items()}})
        )

    assert key() == key(engine="inline", strategy__tau=0.3)
    others = [key(seed=1), key(data__seed=1), key(strategy__tau=0.4), key(strategy__name="afl")]
    assert len({key(), *others}) == 5
    trace = tmp_path / "trace.csv"
    trace.write_text("round,client\n1,0\n")
    before = key(participation__availability=str(trace))
    trace.write_text("round,client\n1,1\n")
    assert key(participation__availability=str(trace)) != before


# --- the command ---------------------------------------------------------------------------------

FEW = (
    FILE.replace("fedavg,uniform,fedheal,afl", "uniform")
    .replace("uniform,fedheal,gsam+fedism", "uniform")
    .replace("points = 4", "points = 1")
    .replace("num-server-rounds = 4", "num-server-rounds = 1")
)


def test_the_command_refuses_options_that_conflict_and_a_wrong_design(tmp_path: Path) -> None:
    file = tmp_path / "board.toml"
    file.write_text('[protocol]\nstrategies = "afl"\n[benchmarks.a]')
    conflict = call(file, "--plan", "--report", command=BOARD, expect=2)
    assert "--plan and --report cannot be combined. Remove one of them." in conflict
    wrong = call(file, command=BOARD, expect=2)
    assert "[protocol]: Unknown key 'strategies'." in " ".join(wrong.split())


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_command_completes_all_runs_and_repeats_none(jobs: int, tmp_path: Path) -> None:
    file = tmp_path / "board.toml"
    file.write_text(FEW[: FEW.index("[sweeps")])
    plan = call(file, "--plan", command=BOARD)
    assert "2 of     2 runs left, unknown core-hours" in plan
    work = f"--output-dir={tmp_path / 'work'}"
    output = call(file, "--benchmarks=plain", f"--jobs={jobs}", work, command=BOARD)
    assert "4 runs are left" in output
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + 4
    assert not [*(tmp_path / "work" / "at-work").iterdir()]
    again = call(file, "--benchmarks=plain", work, command=BOARD)
    assert "All runs are in" in again
    shown = call(file, "--benchmarks=plan", command=BOARD, expect=2)
    assert "does not define plan. Choose from plain, noisy" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("0.5 0.6", "0.5 x"),
        ("0.5 0.6", "0.5"),
        ("0.5 0.6", "0.5 nan"),
        ("completed", "won"),
        (",9.0", ",nan"),
        (",key", ""),
        ("plain", '"plain'),
        ("plain", "\udce9"),
    ],
)
def test_a_damaged_ledger_is_named(tmp_path: Path, old: str, new: str) -> None:
    row = "screening,plain,uniform,1,,a b,0.5 0.6,,completed,,cpu,9.0,digest,key,\n"
    path = tmp_path / "rows.csv"
    for text, wrong in ((row, False), (row.replace(old, new), True)):
        path.write_text(",".join(COLUMNS) + "\n" + text, errors="surrogateescape")
        if not wrong:
            assert len(Ledger(path).rows) == 1
            continue
        with pytest.raises(RunFolderError, match=r"rows\.csv"):
            Ledger(path)


def test_confirmations_and_sweeps_come_before_the_screening_of_other_methods(file: Path) -> None:
    make(file)
    planned = [(run.stage, run.method) for run in stages_of(file).planned()]
    last = max(i for i, (stage, _) in enumerate(planned) if stage in (CONFIRMATION, SWEEP))
    others = [i for i, (_, method) in enumerate(planned) if method == "afl"]
    assert last < others[0]
    assert all(method in ("fedavg", "afl") for _, method in planned[last + 1 :])


@pytest.mark.parametrize("method", ["afl", "fedheal", "gsam+fedism", "qffl:rule=weights"])
def test_a_run_has_all_settings_of_its_point(file: Path, method: str) -> None:
    """Arguments reach every strategy, and not only the one that the settings name."""
    design = Design.read(file)
    for benchmark in design.benchmarks:
        config = design.config(benchmark, method, 0)
        for point in points(ranges(config), 4, 31)[1:]:
            assert len(point) > 1
            flat = design.config(benchmark, method, 0, **point).to_flat()
            assert {key: flat[key] for key in point} == pytest.approx(point)


def finished(stages: Stages) -> list[tuple[Planned, Row]]:
    return [(planned, row) for planned in stages.planned() if (row := stages.row(planned))]


@pytest.mark.nightly
def test_the_shipped_rows_match_the_configs_of_their_runs() -> None:
    """Every planned run's row has the digest and the settings of the config it was made with.

    Rows of earlier choices, which the design no longer plans, are not checked.
    """
    design = Design.read(LEADERBOARD)
    stages = Stages(design, Ledger(design.results))
    rows = stages.ledger.rows
    completed = [
        (planned, rows[planned.key]) for planned in stages.planned() if planned.key in rows
    ]
    assert len(completed) > 3000
    for planned, row in completed:
        assert (row.method, row.settings) == (planned.method, planned.settings)
        settings = dict(text.split("=") for text in row.settings.split())
        arguments = {k for k in settings if k.startswith("strategy.")}
        rule = parse_method(planned.method)[1]
        own = planned.config.strategy.args.keys() - rule.args
        assert arguments == {f"strategy.{argument_to_key(name)}" for name in own}


#: Data sets that need no file: they come with this package or with others.
EMBEDDED = ("heart-disease", "randhie", "uci-digits")


@pytest.mark.parametrize(
    "name",
    mark_others_nightly(((b.name,) for b in Design.read(LEADERBOARD).benchmarks), [("randhie",)]),
)
def test_federations_have_the_same_data_as_when_the_shipped_rows_were_made(name: str) -> None:
    """The same seed divides the same examples among the same clients as when the runs were made."""
    design = Design.read(LEADERBOARD)
    stages = Stages(design, Ledger(design.results), [name])
    rows = {planned.federation: (planned, row) for planned, row in finished(stages)}
    assert rows
    planned, row = rows[min(rows)]
    try:
        assert prepare(planned.config.data).digest == row.data
    except DataError as error:
        if planned.config.data.name.partition(":")[0] in EMBEDDED:
            raise
        pytest.skip(str(error))
