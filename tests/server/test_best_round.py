"""The best round's model: which round, in which file, and right after kills."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from command import call, invoke
from hypothesis import given
from hypothesis import strategies as st
from resuming import config, outcome, resume, session, stopped
from run_folders import make_run, printed_tables
from runs import history
from safetensors.numpy import load_file

import fairflower as ff
from fairflower.api.final_model import kept_arrays
from fairflower.config import RunConfig
from fairflower.errors import ConfigError, RunFolderError
from fairflower.numerics.scores import Score
from fairflower.registry import TASKS
from fairflower.server import checkpoint, folder
from fairflower.server.contents import BEST, read_facts
from fairflower.server.history import History

VALIDATED = {"data.validation-fraction": 0.5, "data.examples-per-client": 24}
KEPT = VALIDATED | {"num-server-rounds": 4, "checkpoint.keep": 9, "checkpoint.best": "average"}
CRITERIA = ("average", "worst", "worst-half")


def brute_force(scores: dict[int, list[float]], by: str, better: int) -> int:
    """Return the first round with the best value; 0 if there is none."""
    best, value = 0, -math.inf
    for number in sorted(scores):
        signed = sorted(better * s for s in scores[number])
        count = {"average": len(signed), "worst": 1, "worst-half": max(1, len(signed) // 2)}[by]
        if all(map(math.isfinite, signed)) and math.fsum(signed[:count]) / count > value + 1e-9:
            best, value = number, math.fsum(signed[:count]) / count
    return best


def in_history(path: Path, score: str = "accuracy") -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for row in history(path):
        if (row["level"], row["metric"]) == ("validation", score) and row["round"] != "0":
            found.setdefault(int(row["round"]), []).append(float(row["value"]))
    return found


def best_of(path: Path) -> tuple[Any, bytes]:
    return read_facts(path)["best"], (path / BEST).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return session(config(tmp_path_factory.mktemp("best"), **KEPT)).run()


@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.25, 0.5, math.nan]), min_size=3, max_size=3)),
    st.sampled_from(CRITERIA),
    st.sampled_from([1, -1]),
)
def test_the_round_with_the_highest_merit_is_that_of_brute_force(rounds, by, better):
    past = History(["a", "b", "c"], Score("s", better))
    for number, values in enumerate(rounds):
        for name, value in zip("abc", values, strict=True):
            past.add(number, "validation", name, {"s": value})
    merits = {number: past.merit(number, by) for number in range(len(rounds))}
    best = max(merits, key=merits.__getitem__, default=0)
    expected = brute_force(dict(enumerate(rounds[1:], start=1)), by, better)
    assert (best if merits.get(best, -math.inf) > -math.inf else 0) == expected


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("by", CRITERIA)
def test_the_primary_score_of_every_task_has_its_own_direction(name, by):
    score = TASKS[name].scores[0]
    past = History(["a", "b"], score)
    for number, value in ((1, 0.25), (2, 0.5)):
        for domain in past.domains:
            past.add(number, "validation", domain, {score.name: value})
    assert score.better in (1, -1)
    assert (past.merit(2, by) > past.merit(1, by)) == (score.better > 0)


def test_the_best_model_is_that_of_the_checkpoint_of_the_best_round(whole):
    best = brute_force(in_history(whole), "average", 1)
    assert read_facts(whole)["best"] == {"round": best, "by": "average"}
    kept = checkpoint.model_of(whole, best)
    arrays = load_file(whole / BEST)
    assert arrays.keys() == kept.keys()
    assert all((arrays[name] == array).all() for name, array in kept.items())
    rows = [row for row in history(whole) if row["metric"] == "best_round"]
    assert float(rows[-1]["value"]) == best
    assert BEST in read_facts(whole)["files"]


@pytest.mark.parametrize("by", ["worst", "worst-half"])
def test_a_task_whose_score_is_better_if_lower_has_its_own_best_round(by, tmp_path):
    settings = {"data.name": "heart-disease:target=severity", "checkpoint.best": by}
    settings |= {"data.validation-fraction": 0.3, "data.examples-per-client": 0}
    settings |= {"train.lr": 0.003, "data.test-examples": 0}
    path = session(config(tmp_path, **settings)).run()
    assert read_facts(path)["scores"][0]["better"] == -1
    found = in_history(path, read_facts(path)["scores"][0]["name"])
    assert read_facts(path)["best"]["round"] == brute_force(found, by, -1)


def test_every_moment_of_a_kill_leads_to_the_same_best_model(whole, tmp_path, monkeypatch):
    """Copies of the folder before and after every write are what kills would have left."""
    copies: list[Path] = []
    settings = KEPT | {"run-name": "run"}

    def snapshot(path: Path) -> None:
        if (path / BEST).exists() and (path / "checkpoints").exists():
            copies.append(tmp_path / f"copy-{len(copies)}")
            shutil.copytree(path, copies[-1])

    def watched(write: Any) -> Any:
        def write_and_copy(path: Path, *args: Any) -> None:
            place = path if path.is_dir() else path.parent
            snapshot(place)
            write(path, *args)
            snapshot(place)

        return write_and_copy

    with monkeypatch.context() as patched:
        patched.setattr(folder, "_replace", watched(folder._replace))
        patched.setattr(checkpoint, "save", watched(checkpoint.save))
        path = session(config(tmp_path, **settings)).run()
    assert best_of(path) == best_of(whole)
    writes = [c for c in copies if read_facts(c)["status"] == "running"]
    differing = {
        (c / BEST).read_bytes() + str(read_facts(c).get("best")).encode(): c for c in writes
    }
    assert len(differing) >= 2
    for copy in dict.fromkeys([*differing.values(), writes[-1]]):
        shutil.rmtree(path, ignore_errors=True)  # else the copies would be refused as copies
        resume(copy)
        assert best_of(copy) == best_of(whole)
        assert outcome(copy)["model"] == outcome(whole)["model"]


@pytest.mark.parametrize("server_round", [2, 4])
def test_a_stopped_run_keeps_the_best_round_before_the_stop(server_round, whole, tmp_path):
    path = stopped(config(tmp_path, **KEPT, **{"checkpoint.every": 3}), server_round)
    (path / BEST).write_bytes(b"of a later round")
    if server_round == 4:
        assert len(checkpoint.rounds(path)) == 2
    resume(path)
    assert best_of(path) == best_of(whole)


def test_a_run_with_more_rounds_keeps_the_best_of_all(whole, tmp_path):
    path = session(config(tmp_path, **KEPT | {"num-server-rounds": 3})).run()
    resume(path, **{"num-server-rounds": 4})
    assert best_of(path) == best_of(whole)


def test_the_criterion_of_a_run_cannot_be_changed_when_it_is_resumed(tmp_path):
    path = stopped(config(tmp_path, **KEPT), 2)
    with pytest.raises(ConfigError, match=r"checkpoint\.best = 'worst' was given"):
        resume(path, **{"checkpoint.best": "worst"})


def test_early_stopping_keeps_the_best_model_unless_it_is_told_not_to():
    def best(**settings: Any) -> str:
        return RunConfig.from_flat(settings).best

    assert best() == best(**{"stop.patience": 2}) == best(**VALIDATED) == ""
    assert best(**VALIDATED, **{"stop.patience": 2}) == "average"
    assert best(**VALIDATED, **{"stop.patience": 2, "checkpoint.best": "none"}) == ""


def test_a_run_that_stops_early_leaves_the_best_model_beside_the_last(tmp_path):
    settings = VALIDATED | {"stop.patience": 1, "train.lr": 0.0, "num-server-rounds": 3}
    path = session(config(tmp_path, **settings)).run()
    assert read_facts(path)["rounds"] == 2
    assert read_facts(path)["best"] == {"round": 1, "by": "average"}, "of equal rounds the first"


def test_a_best_round_without_validation_examples_is_refused():
    with pytest.raises(ConfigError, match=r"checkpoint\.best = 'worst': the best round is chosen"):
        RunConfig.from_flat({"checkpoint.best": "worst"})


def test_models_of_kept_rounds_are_networks(whole):
    run = ff.read(whole)[0]
    best = read_facts(whole)["best"]["round"]
    last, kept = run.network(), run.network(best=True)
    x = last.examples(2)
    assert (run.network(round=best)(x) == kept(x)).all()
    assert (run.network(round=4)(x) == last(x)).all()
    assert (run.network(round=1)(x) != last(x)).any()
    with pytest.raises(ConfigError, match=r"round = 9: .* models of rounds 0, 1, 2, 3, 4\. "):
        run.network(round=9)
    with pytest.raises(ConfigError, match=r"round = 'x': .* models of rounds 0, 1"):
        run.network(round="x")
    with pytest.raises(ConfigError, match="choose one of them"):
        run.network(round=1, best=True)


def test_tables_of_the_best_round_have_its_test_scores(whole, tmp_path):
    run = ff.read(whole)[0]
    best = read_facts(whole)["best"]["round"]
    rows = [r for r in history(whole) if (r["level"], r["metric"]) == ("domain", "accuracy")]
    assert run.best[0].score == {
        r["name"]: float(r["value"]) for r in rows if r["round"] == str(best)
    }
    assert f"best round on validation examples (round {best})" in str(run.best)
    run.summary(tmp_path / "x.csv")
    assert ff.read(tmp_path / "x.csv").best.table.equals(run.best.table)


def test_clients_that_train_alone_have_a_best_round_without_a_model(whole, tmp_path):
    settings = config(tmp_path, **KEPT, **{"strategy.name": "alone"})
    path = stopped(settings, 3)
    resume(path)
    best = brute_force(in_history(path), "average", 1)
    assert read_facts(path)["best"] == {"round": best, "by": "average"}
    assert not (path / BEST).exists()
    both = ff.read(whole, path).best
    assert [run.run.chosen for run in both] == [read_facts(whole)["best"]["round"], best]
    gains = both.differences.query("against == 'alone' and measure == 'by domain'")
    own, merged = both[1].accuracy, both[0].accuracy
    assert gains["mean"].tolist() == pytest.approx([100 * (merged[d] - own[d]) for d in own])
    assert "has no common model" in invoke("export", str(path), "--best").output


def test_the_report_command_shows_the_best_rounds(whole, tmp_path):
    output = call("report", str(whole), "--round", "best", "--out", str(tmp_path / "page"))
    assert "best round on validation examples (round" in output
    assert "best round on validation" in (tmp_path / "page" / "index.html").read_text()
    text = call("report", str(whole), "--round", "best", "--format", "md")
    assert "best round on validation examples (round" in text
    assert "'last', 'best'" in invoke("report", str(whole), "--round", "first").output


def test_a_run_without_a_best_round_has_no_such_table_or_model(tmp_path):
    path = make_run(tmp_path / "a", [{"a": 0.5, "b": 0.5}] * 3)
    run = ff.read(path)[0]
    with pytest.raises(RunFolderError, match=r"has no best round\. A run keeps it with"):
        _ = run.best
    with pytest.raises(RunFolderError, match=r"has no best model\. A run keeps it with"):
        kept_arrays(run.run, "best")


def test_a_file_of_another_round_than_run_json_is_refused(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "copy")
    facts = json.loads((path / "run.json").read_text())
    facts["best"]["round"] += 1
    (path / "run.json").write_text(json.dumps(facts))
    with pytest.raises(RunFolderError, match="name different rounds"):
        ff.read(path)[0].network(best=True)


def test_reports_say_which_rounds_are_best(tmp_path):
    best = {"round": 2, "by": "worst"}
    paths = [
        make_run(tmp_path / f"{name}", [{"a": 0.5}] * 3, label=name, **{"best": best})
        for name in ("fedheal", "uniform")
    ]
    assert "(checkpoint.best): 2 (uniform, fedheal)" in printed_tables(*paths)
