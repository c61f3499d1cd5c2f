"""TuningStudies: equal budgets, choices by validation data only, and resumed studies."""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from processes import belonging_to, environment, run, started
from rich.console import Console
from run_folders import Page
from studies import Quality, by_tau, run_study, tuned_of, tuning, write_run

from fairflower.arguments import ArgumentSpec, Search
from fairflower.cli.tune import Select
from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, Diverged, RoundFailed, RunFolderError
from fairflower.plans.execution import locked_folder
from fairflower.plans.tuning import TuningProtocol, TuningStudies, search_space
from fairflower.registry import CLIENTS, STRATEGIES
from fairflower.report import read_run, terminal_table, write_report
from fairflower.report.analysis import analyze
from fairflower.report.methods import group_runs
from fairflower.report.tuning import CRITERIA, Trial, chosen, tuning_tables
from fairflower.server.contents import read_config, read_facts
from fairflower.server.folder import rewrite_config
from fairflower.server.session import Session

# --- trials --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_methods_have_the_same_budget_and_try_the_papers_values_first(
    tmp_path: Path,
) -> None:
    studies = tuning(tmp_path, "fedheal,qffl", training=True, seeds=[1])
    runs = run_study(studies)
    trials = [config for config in runs if not config.evaluate.test]
    tests = [config for config in runs if config.evaluate.test]
    assert {config.tuned for config in trials} == {""}
    training = "train.lr,train.local-epochs"
    assert {config.strategy.name: config.tuned for config in tests} == {
        "fedheal": f"strategy.tau,strategy.beta,{training}",
        "qffl": f"strategy.q,{training}",
        "uniform": training,
    }
    assert [len(one.trials) for one in studies.tuned()] == [5, 5, 5]  # and Uniform
    assert len(trials) == len({studies.title(config) for config in trials}) == 15
    assert studies.title(trials[0]).endswith(" train.lr=0.05 train.local-epochs=5")
    assert all(config.seed == 0 for config in trials)
    for one in studies.tuned():
        defaults = {"strategy.tau": 0.3, "strategy.beta": 0.4, "strategy.q": 1.0}
        defaults |= {"train.lr": 0.05, "train.local-epochs": 5}
        assert one.trials[0].values == {key: defaults[key] for key in one.ranges}
        assert len({tuple(trial.values.values()) for trial in one.trials}) == 5
        for trial in one.trials:
            for key, search in one.ranges.items():
                assert search.low <= trial.values[key] <= search.high
    rates = [[t.values["train.lr"] for t in one.trials] for one in studies.tuned()]
    assert all(of_one == rates[0] for of_one in rates), (
        "methods share the values of shared settings"
    )


@pytest.mark.slow
def test_given_values_are_not_tuned_and_methods_without_ranges_have_one_trial(
    tmp_path: Path,
) -> None:
    studies = tuning(tmp_path, "fedheal:tau=0.4,fedavg")
    of_method = {one.method: one for one in studies.tuned()}
    assert list(of_method["fedheal:tau=0.4"].ranges) == ["strategy.beta"]
    assert len(of_method["fedavg"].trials) == len(of_method["uniform"].trials) == 1


@pytest.mark.slow
def test_chosen_values_are_tested_with_other_seeds_than_the_trials(tmp_path: Path) -> None:
    studies = tuning(tmp_path)
    tests = [config for config in run_study(studies) if config.evaluate.test]
    assert sorted(config.seed for config in tests) == [1, 1, 1, 2, 2, 2]
    best = min(
        tuned_of(studies, "fedheal").trials, key=lambda t: abs(t.values["strategy.tau"] - 0.5)
    )
    fedheal = [config for config in tests if config.strategy.name == "fedheal"]
    for config in fedheal:
        assert config.strategy.args == {
            "tau": best.values["strategy.tau"],
            "beta": best.values["strategy.beta"],
        }
    assert studies.total == 7 + 6
    with pytest.raises(ConfigError, match=r"--seeds: the trials have seed 0"):
        tuning(tmp_path / "other", seeds=[0, 1])


@pytest.mark.slow
def test_chosen_values_are_tested_on_other_federations_than_the_trials(tmp_path: Path) -> None:
    studies = tuning(tmp_path, federations=True)
    runs = run_study(studies)
    trials = [config for config in runs if not config.evaluate.test]
    tests = [config for config in runs if config.evaluate.test]
    assert {(c.seed, c.data.seed) for c in trials} == {(0, 0)}
    assert sorted((c.seed, c.data.seed) for c in tests) == [(1, 1)] * 3 + [(2, 2)] * 3
    assert {c.run_name for c in tests if c.strategy.name == "fedavg"} == {
        "fedavg-federation1",
        "fedavg-federation2",
    }
    assert not run_study(tuning(tmp_path, federations=True)), "nothing is left"
    with pytest.raises(ConfigError, match="--federations: the trials have federation 0"):
        tuning(tmp_path / "other", federations=True, seeds=[0, 1])
    with pytest.raises(ConfigError, match="--federations: the trials have federation 2"):
        tuning(tmp_path / "third", federations=True, settings={"data.seed": 2})


#: Numeric arguments that are not searched.
NOT_SEARCHED = {"rounds", "batches"}


@pytest.mark.parametrize("methods", [STRATEGIES, CLIENTS], ids=["strategies", "clients"])
def test_every_numeric_argument_has_a_search_range_with_its_default_in_it(methods: Any) -> None:
    for method in methods.values():
        for name, one in method.argument_specs().items():
            if isinstance(one.default, (int, float)) and name not in NOT_SEARCHED:
                assert one.search, f"{method.__name__}: {name} has no Search beside its Range"
                assert one.search.low <= one.default <= one.search.high, (method, name)
                for end in (one.search.low, one.search.high):
                    one.check(name, int(end) if one.whole else end)


@given(st.floats(0, 1), st.floats(1e-6, 10), st.floats(1.5, 1e4), st.booleans())
def test_search_values_are_in_their_range(
    place: float, low: float, ratio: float, log: bool
) -> None:
    search = Search(low, low * ratio, log)
    assert search.low <= search.at(place) <= search.high
    assert search.at(0) == pytest.approx(low, rel=0.01)
    assert search.at(1) == pytest.approx(low * ratio, rel=0.01)
    assert Search(1, 3).at(place, whole=True) == min(1 + int(3 * place), 3)


def test_ranges_of_training_settings_are_around_the_values_of_the_config() -> None:
    config = RunConfig.from_flat({"train.lr": 0.001, "train.optimizer": "adam"})
    space = search_space(config, training=True)
    assert space["train.lr"].search == Search(0.0002, 0.005, log=True)
    assert space["train.local-epochs"].search == Search(1, 10)
    none = RunConfig.from_flat({"train.lr": 0.0, "train.local-epochs": 0})
    assert not [key for key in space if key.startswith("server.")]
    assert not {"train.lr", "train.local-epochs"} & set(search_space(none, training=True))


def test_the_server_optimizers_rate_and_momentum_are_tuned() -> None:
    space = search_space(RunConfig.from_flat({"server.optimizer": "adam"}))
    assert space["server.lr"] == ArgumentSpec(0.1, search=Search(0.01, 1, log=True))
    assert space["server.momentum"] == ArgumentSpec(0.9, search=Search(0, 0.99))
    plain = {"server.optimizer": "sgd", "server.lr": 2.0}
    space = search_space(RunConfig.from_flat(plain))
    assert space["server.lr"] == ArgumentSpec(2.0, search=Search(0.2, 20, log=True))
    assert "server.momentum" not in space
    for name in ("alone", "pooled"):  # which take no such step
        assert not search_space(RunConfig.from_flat({**plain, "strategy.name": name}))


# --- choices -------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(*[st.integers(0, 40)] * 3), min_size=1, max_size=6),
    st.sampled_from(list(CRITERIA)),
)
@example([(3, 3, 16), (7, 7, 7)], "worst-then-average")  # within one point: equal
def test_the_chosen_trial_is_the_best_by_the_criterion(
    found: list[tuple[int, ...]], select: str
) -> None:
    trials = [
        Trial(k, {}, "completed", tuple(v / 400 for v in values)) for k, values in enumerate(found)
    ]
    best = chosen(trials, select)
    assert best
    worst = [min(values) for values in found]
    if select == "worst":
        assert best.number == worst.index(max(worst)), "the first of equal ones"
    else:
        among = [k for k in range(len(found)) if select == "average" or worst[k] >= max(worst) - 4]
        sums = [sum(found[k]) for k in among]
        assert math.isclose(fmean(best.scores), max(sums) / 3 / 400)


@pytest.mark.slow
def test_trials_can_be_chosen_by_balanced_accuracy(tmp_path: Path) -> None:
    """Here balanced accuracy is best where accuracy is worst."""
    studies = tuning(tmp_path, metric="balanced_accuracy", budget=12)
    run_study(studies, lambda config: (1.5 * by_tau(config)[0] - 0.45, 0.1))
    one = tuned_of(studies, "fedheal")
    assert one.chosen
    assert min(one.chosen.scores) == max(min(trial.scores) for trial in one.completed)
    far = {trial.number: abs(trial.values["strategy.tau"] - 0.5) for trial in one.trials}
    assert one.chosen.number == max(far, key=far.__getitem__)


def test_balanced_accuracy_is_refused_if_clients_evaluate(tmp_path: Path) -> None:
    asked = RunConfig.from_flat({"evaluate.by": "clients"})
    with pytest.raises(ConfigError, match="clients do not report this score"):
        TuningStudies(tmp_path, [asked], TuningProtocol(5, [1, 2], "average", "balanced_accuracy"))


@pytest.mark.slow
def test_the_papers_values_are_tested_beside_the_chosen_values(tmp_path: Path) -> None:
    studies = tuning(tmp_path, defaults=True)
    done = [config for config in run_study(studies) if config.evaluate.test]
    values = [(c.strategy.name, c.strategy.args.get("tau"), c.seed) for c in done]
    best = tuned_of(studies, "fedheal").chosen
    assert best
    assert best.number  # trial 0 has the paper's values
    tau = best.values["strategy.tau"]
    # Methods without ranges are tested once.
    expected = [("fedavg", None), ("uniform", None), ("fedheal", tau), ("fedheal", 0.3)]
    assert sorted(values, key=str) == sorted(
        [(*one, seed) for one in expected for seed in (1, 2)], key=str
    )
    assert not run_study(tuning(tmp_path, defaults=True))


@pytest.mark.slow
def test_only_completed_trials_are_chosen(tmp_path: Path) -> None:
    assert chosen([], "worst") is None
    studies = tuning(tmp_path)
    run_study(studies, most=4)
    one = tuned_of(studies, "fedheal")
    assert {trial.outcome for trial in one.trials} == {"completed", "unfinished"}
    assert one.chosen in one.completed


def test_the_tune_command_offers_every_criterion() -> None:
    assert set(get_args(Select)) == set(CRITERIA)


@pytest.mark.slow
def test_the_report_shows_ranges_choices_and_trials(tmp_path: Path) -> None:
    studies = tuning(tmp_path)
    run_study(studies, diverging(above=0.6))
    runs = [read_run(path.parent) for path in (tmp_path / "runs").glob("*/run.json")]
    page = write_report(analyze(runs, studies.tuned()), tmp_path / "report")
    tables = Page(page.read_text(encoding="utf-8"))
    one = tuned_of(studies, "fedheal")
    best = one.chosen
    assert best
    row = tables.table("Tuning")["fedheal"]
    counts = [len(one.trials), one.count("lost")]
    assert [row[name] for name in ("trials", "lost")] == list(map(str, counts))
    assert 0 < counts[1] < counts[0]
    assert row["chosen MIN"] == f"{100 * min(best.scores):.2f}"
    (cells,) = (
        row for row in tables.tables["Ranges and chosen values"] if row[0] == "strategy.tau"
    )
    assert cells[1:] == ["0 to 1", "0.3", str(best.values["strategy.tau"])]
    drawn = (tmp_path / "report" / "figures" / "tuning-1.svg").read_text()
    for key in one.ranges:
        assert key in drawn
    assert "is lost: Round 2: 0 of 2 clients" in (tmp_path / "report" / "tables.md").read_text()
    assert "Ranges and chosen" in terminal(studies)


def terminal(studies: TuningStudies) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(terminal_table(analyze([], studies.tuned())))
    return capture.get()


# --- failed trials -------------------------------------------------------------------------------


def diverging(above: float) -> Quality:
    """Return `by_tau`, but with trials that diverge if tau is greater than ``above``."""

    def quality(config: RunConfig) -> tuple[float, float]:
        if float(config.strategy.args.get("tau") or 0) > above and not config.evaluate.test:
            raise Diverged("Round 2: 0 of 2 clients\n  client 0: the loss became nan")
        return by_tau(config)

    return quality


@pytest.mark.slow
def test_a_trial_that_diverges_is_lost_and_other_trials_continue(tmp_path: Path) -> None:
    studies = tuning(tmp_path)
    run_study(studies, diverging(above=0.5))
    one = tuned_of(studies, "fedheal")
    lost = [trial for trial in one.trials if trial.outcome == "lost"]
    assert lost
    assert all(trial.values["strategy.tau"] > 0.5 for trial in lost)
    assert lost[0].reason == "Round 2: 0 of 2 clients client 0: the loss became nan"
    assert len(one.trials) == 5, "lost trials count"
    best = one.chosen
    assert best
    assert best.values["strategy.tau"] <= 0.5


@pytest.mark.slow
def test_a_method_without_completed_trials_is_not_tested(tmp_path: Path) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        if config.strategy.name == "fedheal":
            raise Diverged("nan")
        return by_tau(config)

    studies = tuning(tmp_path)
    done = run_study(studies, failing)
    assert {c.strategy.name for c in done if c.evaluate.test} == {"fedavg", "uniform"}
    one = tuned_of(studies, "fedheal")
    assert one.chosen is None


@pytest.mark.slow
def test_the_papers_values_are_not_tested_if_their_trial_diverged(
    tmp_path: Path,
) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        if config.strategy.args.get("tau") == 0.3:
            raise Diverged("nan")
        return by_tau(config)

    studies = tuning(tmp_path, "fedheal", defaults=True)
    done = [
        c for c in run_study(studies, failing) if c.evaluate.test and c.strategy.name == "fedheal"
    ]
    best = tuned_of(studies, "fedheal").chosen
    assert best
    assert best.number
    assert [(c.strategy.args["tau"], c.seed) for c in done] == [
        (best.values["strategy.tau"], seed) for seed in (1, 2)
    ]


@pytest.mark.slow
def test_a_trial_without_a_result_for_every_domain_is_lost(tmp_path: Path) -> None:
    studies = tuning(tmp_path, "fedheal")
    config = next(c for c in studies.plan.runs if c.strategy.name == "fedheal")
    write_run(config, (0.9, 0.8))
    history = tmp_path / "trials" / config.run_name / "history.csv"
    lines = history.read_text().splitlines(keepends=True)
    history.write_text("".join(x for x in lines if not x.startswith("4,validation,rotated")))
    studies.ended(config, None)
    one = tuned_of(studies, "fedheal")
    assert one.trials[0].outcome == "lost"
    assert one.trials[0].reason == "some domains were not tested in every round"
    assert one.chosen is None


@pytest.mark.slow
def test_a_test_run_that_diverged_is_not_repeated(tmp_path: Path) -> None:
    def failing(config: RunConfig) -> tuple[float, float]:
        if config.evaluate.test and config.strategy.name == "fedheal" and config.seed == 2:
            raise Diverged("Round 2: the merged model holds NaN")
        return by_tau(config)

    studies = tuning(tmp_path)
    run_study(studies, failing)
    again = tuning(tmp_path)
    assert again.total == 0
    (method,) = (one for one in again.methods if one.name == "fedheal")
    assert method.tuned().chosen
    first, second = (read_facts(tmp_path / "runs" / f"fedheal-seed{seed}") for seed in (1, 2))
    assert first["status"] == "completed"
    assert "Round 2: the merged model holds NaN" in second["error"]
    # The same for a run that diverged before its first evaluation.
    history = tmp_path / "runs" / "fedheal-seed2" / "history.csv"
    history.write_text(history.read_text().partition("\n")[0] + "\n")
    assert tuning(tmp_path).total == 0


@pytest.mark.slow
def test_a_completed_test_run_beside_an_empty_folder_counts(tmp_path: Path) -> None:
    """A run killed before it writes run.json leaves such a folder; its repetition uses another."""
    studies = tuning(tmp_path, "fedavg")
    run_study(studies)
    folder = tmp_path / "runs" / "fedavg-seed1"
    folder.rename(tmp_path / "runs" / "fedavg-seed1-2")
    folder.mkdir()
    again = tuning(tmp_path, "fedavg")
    assert again.total == 0
    assert [
        read_facts(path.parent)["status"] for path in tmp_path.glob("runs/fedavg-*/run.json")
    ] == ["completed"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "problem", [OSError("No space left on device"), RoundFailed("client 0: [Errno 28] No space")]
)
def test_a_trial_that_fails_without_divergence_is_repeated(
    problem: Exception, tmp_path: Path
) -> None:
    def full(config: RunConfig) -> tuple[float, float]:
        raise problem

    studies = tuning(tmp_path, "fedheal")
    run_study(studies, full, most=2)
    assert {t.outcome for one in studies.tuned() for t in one.trials} == {"unfinished"}
    again = tuning(tmp_path, "fedheal")
    run_study(again)
    assert {t.outcome for one in again.tuned() for t in one.trials} == {"completed"}


# --- resumed studies -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("most", [3, 8])
def test_a_stopped_study_continues_with_the_remaining_runs(most: int, tmp_path: Path) -> None:
    whole = tuning(tmp_path / "whole")
    expected = run_study(whole)
    first = run_study(tuning(tmp_path / "twice"), most=most)
    # As left by a run that was killed at its start.
    (tmp_path / "twice" / "trials" / "fedheal-trial4").mkdir(exist_ok=True)
    again = tuning(tmp_path / "twice")
    assert again.total == len(expected) - most
    rest = run_study(again)
    assert len(first) + len(rest) == len(expected)
    assert again.tuned() == whole.tuned()
    assert {c.run_name for c in first + rest} == {c.run_name for c in expected}
    assert not run_study(tuning(tmp_path / "twice")), "nothing is left"


@pytest.mark.slow
def test_a_killed_trial_is_repeated_and_finished_trials_are_kept(tmp_path: Path) -> None:
    run_study(tuning(tmp_path, "fedheal"), diverging(above=0.6), most=4)
    killed = tmp_path / "trials" / "fedheal-trial0" / "run.json"
    killed.write_text(killed.read_text().replace("completed", "running"))
    again = tuning(tmp_path, "fedheal")
    assert {trial.outcome for trial in tuned_of(again, "fedheal").trials[1:4]} == {
        "completed",
        "lost",
    }
    names = [config.run_name for config in again.plan.runs]
    assert names == ["fedheal-trial0", "fedheal-trial4", "uniform-trial0"]


def test_a_copied_study_repeats_unfinished_trials_whose_clients_have_state(tmp_path: Path) -> None:
    settings = {"client.name": "scaffold"}
    config = tuning(tmp_path / "study", "fedavg", settings).plan.runs[0]
    path = Session(InlineGrid(app, 2), config, Console(quiet=True), on_round=lambda *_: True).run()
    shutil.copytree(tmp_path / "study", tmp_path / "copy")
    resumed = [
        tuning(tmp_path / n, "fedavg", settings).plan.runs[0].resume for n in ("study", "copy")
    ]
    assert resumed == [str(path), ""]


@pytest.mark.slow
def test_a_study_is_read_from_its_run_folders(tmp_path: Path) -> None:
    first = tuning(tmp_path)
    run_study(first, diverging(above=0.6))
    assert tuned_of(first, "fedheal").count("lost")
    assert {path.name for path in tmp_path.iterdir()} == {"trials", "runs"}
    with locked_folder(tmp_path, "study"):
        again = tuning(tmp_path)
    assert again.total == 0
    assert again.tuned() == first.tuned()
    assert again.test_folders() == first.test_folders() == sorted((tmp_path / "runs").iterdir())


def by_two_domains(config: RunConfig) -> tuple[float, float]:
    """Return accuracies whose worst is best at tau = 0.6, and whose average is best at tau = 1."""
    tau = float(config.strategy.args.get("tau") or 0.3)
    return tau, 0.9 - tau / 2


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "new_trials"),
    [({"budget": 10}, 5), ({"budget": 2}, 0), ({"select": "average"}, 0)],
    ids=["more", "fewer", "select"],
)
def test_more_trials_or_another_criterion_only_change_the_choice(
    changes: Any, new_trials: int, tmp_path: Path
) -> None:
    first = tuning(tmp_path, "fedheal")
    run_study(first, by_two_domains)
    again = tuning(tmp_path, "fedheal", **changes)
    runs = run_study(again, by_two_domains)
    assert len([config for config in runs if not config.evaluate.test]) == new_trials
    whole = tuning(tmp_path / "whole", "fedheal", **changes)
    run_study(whole, by_two_domains)
    assert again.tuned() == whole.tuned()
    best, before = tuned_of(again, "fedheal").chosen, tuned_of(first, "fedheal").chosen
    assert best != before
    assert best
    reported = [path for path in again.test_folders() if path.name.startswith("fedheal")]
    assert [read_config(path)["strategy.tau"] for path in reported] == [
        best.values["strategy.tau"]
    ] * 2
    assert len(list(tmp_path.glob("runs/fedheal-*"))) == 4, "earlier tests are kept"
    assert not run_study(tuning(tmp_path, "fedheal", **changes)), "nothing is left"


def by_learning_rate(config: RunConfig) -> tuple[float, float]:
    """Return accuracies of which uniform weights like large learning rates, and FedAvg small."""
    lr = config.train.lr
    lr = 0.3 - lr if config.strategy.name == "uniform" else lr
    return 0.5 - lr, 0.1 + 2 * lr


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({"select": "average", "defaults": True}, {"select": "worst", "defaults": True}),
        ({"select": "worst", "defaults": True}, {"select": "average", "defaults": True}),
        ({"training": False}, {}),
    ],
    ids=["to-worst", "to-average", "to-training"],
)
def test_tests_of_chosen_and_of_the_papers_values_are_not_mistaken_for_each_other(
    first: Any, then: Any, tmp_path: Path
) -> None:
    """They may have the same values, but reports compare them with other tests (``tuned``)."""
    for changes in (first, then):
        continued = tuning(tmp_path, "fedavg", **({"training": True} | changes))
        run_study(continued, by_learning_rate)
    fresh = tuning(tmp_path / "fresh", "fedavg", **({"training": True} | then))
    run_study(fresh, by_learning_rate)

    def tests(study: TuningStudies) -> list[tuple[Any, ...]]:
        configs = map(read_config, study.test_folders())
        keys = ("strategy.name", "seed", "train.lr", "train.local-epochs", "tuned")
        return sorted(tuple(config[key] for key in keys) for config in configs)

    assert tests(continued) == tests(fresh)


@pytest.mark.slow
def test_methods_with_a_client_that_is_tuned_for_each_are_compared(tmp_path: Path) -> None:
    """The settings that a user lists in ``tuned`` are kept."""

    def by_mu(config: RunConfig) -> tuple[float, float]:
        best = 0.5 if config.strategy.name == "uniform" else 0.02
        return 0.9 - abs(float(config.client.args["mu"] or 0) - best) / 2, 0.95

    settings = {"client.name": "fedprox", "tuned": "train.momentum"}
    study = tuning(tmp_path, "fedavg", settings, defaults=True)
    tests = [config for config in run_study(study, by_mu) if config.evaluate.test]
    assert {(bool(c.client.args["mu"] == 1.0), c.tuned) for c in tests} == {
        (True, "train.momentum"),
        (False, "train.momentum,client.mu"),
    }
    (comparison,) = group_runs([read_run(path) for path in study.test_folders()])
    uniform = [method for method in comparison.methods if method.strategy == "uniform"]
    baselines = [comparison.baseline(method, "fedavg") for method in uniform]
    assert [b and b.client for b in baselines] == [method.client for method in uniform]
    assert {method.client for method in uniform} == {"fedprox", "fedprox:mu=tuned"}
    for path in study.test_folders():  # as an earlier version wrote it
        rewrite_config(path, {"tuned": ""})
    again = tuning(tmp_path, "fedavg", settings, defaults=True)
    assert not run_study(again, by_mu)
    assert sorted(read_config(path)["tuned"] for path in again.test_folders()) == sorted(
        config.tuned for config in tests
    )


@pytest.mark.slow
@pytest.mark.parametrize("file", ["run.json", "config.toml"])
def test_a_damaged_test_is_repeated_and_the_report_leaves_it_out(file: str, tmp_path: Path) -> None:
    run_study(tuning(tmp_path, "fedheal"))
    damaged = tmp_path / "runs" / "fedheal-seed1"
    (damaged / file).write_text("")
    again = tuning(tmp_path, "fedheal")
    (repeated,) = run_study(again)
    assert repeated.seed == 1
    assert damaged not in again.test_folders()
    assert len(again.test_folders()) == 4


@pytest.mark.slow
def test_a_report_says_that_trials_are_unfinished(tmp_path: Path) -> None:
    study = tuning(tmp_path, "fedheal")
    run_study(study, most=3)
    table, *_ = tuning_tables(study.tuned())
    left = 5 - len(study.methods[0].finished)
    assert f"fedheal: unfinished: {left} of 5 trials, so the choice may change" in table.footers


@pytest.mark.slow
def test_a_completed_trial_whose_last_round_is_missing_is_named(tmp_path: Path) -> None:
    run_study(tuning(tmp_path, "fedheal"))
    history = tmp_path / "trials" / "fedheal-trial1" / "history.csv"
    lines = history.read_text().splitlines()
    history.write_text("\n".join(line for line in lines if line[:1] != "4") + "\n")
    with pytest.raises(RunFolderError, match=r"ends after round 3.*To repeat this trial, delete"):
        tuned_of(tuning(tmp_path, "fedheal"), "fedheal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"training": True}, r"trial1 has other .*local-epochs was 5 and is \d+; train.lr was"),
        (
            {"settings": {"train.lr": 0.1}},
            r"trial0 has other settings: train.lr was 0.05 and is",
        ),
        (
            {"settings": {"data.seed": 1}},
            r"trial0 has other settings: data.seed was 0 and is 1",
        ),
    ],
)
def test_a_study_with_changed_settings_is_refused(changes: Any, says: str, tmp_path: Path) -> None:
    run_study(tuning(tmp_path, "fedheal"), most=4)
    with pytest.raises(ConfigError, match=says):
        tuning(tmp_path, "fedheal", **changes)
    tuning(tmp_path, "fedheal,fedfv")  # another method may be added


@pytest.mark.slow
def test_a_study_with_other_ranges_or_another_seed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tuning(tmp_path, "fedheal")
    run_study(study, most=4)
    configs = [replace(method.config, seed=7) for method in study.methods]
    with pytest.raises(ConfigError, match="trial0 has other settings: seed was 0 and is 7"):
        TuningStudies(tmp_path, configs, study.methods[0].protocol)
    narrow = {"strategy.tau": ArgumentSpec(0.3, search=Search(0, 0.5))}
    monkeypatch.setattr("fairflower.plans.tuning.search_space", lambda *_: narrow)
    with pytest.raises(ConfigError, match=r"trial1 has other .*strategy.tau was 0\.\d+ and is"):
        tuning(tmp_path, "fedheal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "says"),
    [("run.json", "is not valid JSON"), ("config.toml", "config.toml"), ("history.csv", "columns")],
)
def test_a_damaged_trial_is_refused(file: str, says: str, tmp_path: Path) -> None:
    run_study(tuning(tmp_path, "fedheal"), most=3)
    (tmp_path / "trials" / "fedheal-trial1" / file).write_text("{")
    with pytest.raises(
        RunFolderError, match=f"fedheal-trial1.*{says}.*delete .*fedheal-trial1 and"
    ):
        tuning(tmp_path, "fedheal")


@pytest.mark.slow
def test_a_study_with_other_images_is_refused_and_with_a_copy_accepted(tmp_path: Path) -> None:
    settings = {"data.name": "npz", "data.dir": str(tmp_path / "images"), "data.domains": ""}
    settings |= {"data.examples-per-client": 0, "data.test-examples": 0}
    images(tmp_path / "images", side=8)
    run_study(tuning(tmp_path / "study", "fedheal", settings), most=1)
    shutil.copytree(tmp_path / "images", tmp_path / "copy", copy_function=shutil.copyfile)
    tuning(tmp_path / "study", "fedheal", {**settings, "data.dir": str(tmp_path / "copy")})
    for other in ({"side": 9}, {"test": (1, 0, 2)}):
        images(tmp_path / "images", **other)
        with pytest.raises(ConfigError, match=r"The clients of .*fedheal-trial0 had other"):
            tuning(tmp_path / "study", "fedheal", settings)


def test_a_study_with_a_changed_availability_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("round,client\n1,0\n1,1\n2,1\n")
    settings = {"participation.availability": str(file)}
    run_study(tuning(tmp_path / "study", "fedheal", settings), most=1)
    tuning(tmp_path / "study", "fedheal", settings)
    file.write_text("round,client\n1,0\n1,1\n2,0\n")
    with pytest.raises(ConfigError, match=r"has changed since .*fedheal-trial0 was created"):
        tuning(tmp_path / "study", "fedheal", settings)


def test_the_availability_file_is_read_before_the_data_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairflower.plans.tuning.prepare", lambda config: pytest.fail("prepared"))
    with pytest.raises(ConfigError, match=r"gone\.csv'?: No such file"):
        tuning(tmp_path, "fedheal", {"participation.availability": str(tmp_path / "gone.csv")})


def images(folder: Path, side: int = 8, test: Iterable[int] = (0, 1, 2)) -> None:
    """Write two domains of three classes that differ in brightness; ``test`` labels six images."""
    folder.mkdir(exist_ok=True)
    for domain in range(2):
        rng = np.random.default_rng(domain)
        y = np.arange(30) % 3
        x = np.clip(rng.normal(60 + 70 * y[:, None, None], 30, (30, side, side)), 0, 255)
        whole = {"x_train": x[:24].astype(np.uint8), "y_train": y[:24]}
        np.savez(
            folder / f"{domain}.npz", x_test=x[24:].astype(np.uint8), y_test=[*test] * 2, **whole
        )


@pytest.mark.slow
def test_labels_of_test_images_do_not_influence_trials_or_choices(tmp_path: Path) -> None:
    """Trials are identical whatever the labels of the test images are."""
    tuned, tested = [], []
    for place, labels in enumerate([(0, 1, 2), (2, 0, 1)]):
        images(tmp_path / f"images-{place}", test=labels)
        settings = {
            **{"data.name": "npz", "data.dir": str(tmp_path / f"images-{place}")},
            **{"data.domains": "", "data.examples-per-client": 0, "data.test-examples": 0},
            **{"data.validation-fraction": 0.25, "num-server-rounds": 3, "train.local-epochs": 1},
        }
        protocol = {"select": "average", "budget": 3, "seeds": [1]}
        studies = tuning(tmp_path / f"study-{place}", "fedheal", settings, **protocol)
        todo = list(studies.plan.runs)
        for config in todo:  # the list grows
            grid = InlineGrid(app, len(prepare(config.data).clients))
            path = Session(grid, config, Console(quiet=True)).run()
            if config.evaluate.test:
                tested.append((path / "history.csv").read_text())
            todo += studies.ended(config, None)
        tuned.append(studies.tuned())
    assert tuned[0] == tuned[1]
    accuracies = [line for text in tested for line in text.splitlines() if ",domain," in line]
    half = len(accuracies) // 2
    assert accuracies[:half] != accuracies[half:], "test results do depend on the labels"


# --- the command ---------------------------------------------------------------------------------

COMMAND = [
    *(sys.executable, "-m", "fairflower.cli", "tune", "--strategies=fedheal"),
    *("--budget=2", "--seeds=1", "--jobs=2", "--rounds=4", "--epochs=1"),
    *("--set=data.clients-per-domain=1", "--set=data.examples-per-client=40"),
    "--set=data.test-examples=20",
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.posix
def test_a_killed_study_ends_with_the_models_of_an_uninterrupted_study(tmp_path: Path) -> None:
    env = environment(tmp_path)
    whole = run([*COMMAND, "--output-dir", tmp_path / "whole"], env=env)
    assert "Ranges and chosen values" in whole
    assert "Tuning: accuracy on validation examples" in whole
    begun = [*COMMAND, "--output-dir", tmp_path / "killed"]
    with started(begun, env=env) as process:
        while not list((tmp_path / "killed").glob("trials/fedheal-trial1/checkpoints/*2*")):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for _ in range(200):  # its workers end with it
            if not belonging_to(tmp_path):
                break
            time.sleep(0.05)
        assert not belonging_to(tmp_path)
    run(begun, env=env)

    def outcome(name: str) -> dict[str, Any]:
        return {
            str(path.relative_to(tmp_path / name)): path.read_bytes()
            for path in (tmp_path / name).rglob("model.safetensors")
        }

    assert outcome("killed") == outcome("whole")
    page = (tmp_path / "killed" / "report" / "index.html").read_text()
    assert "strategy.tau" in page
