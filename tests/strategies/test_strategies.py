"""Checks of every registered strategy."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from parametrize import every_strategy
from replies import valid_reply

from fairflower.config.privacy import is_proven
from fairflower.errors import ConfigError, RoundFailed
from fairflower.strategies import STRATEGIES, FedAvg, FedHEAL, Uniform
from fairflower.testing import check_strategy
from fairflower.testing.rounds import MODEL, Rounds, updates, zero_update
from fairflower.testing.strategies import CHECKS, check_private, check_weights_and_hull


@every_strategy
@pytest.mark.parametrize(
    "check",
    [check for check in CHECKS if check is not check_weights_and_hull],
    ids=lambda check: check.__name__,
)
def test_every_strategy_passes_the_shared_checks(name, check):
    check(STRATEGIES[name])


@every_strategy
def test_weights_and_models_stay_in_their_hull(name, pytestconfig):
    draws = 10 if pytestconfig.getoption("--nightly") else 1
    check_weights_and_hull(STRATEGIES[name], draws=draws)


@pytest.mark.parametrize("name", ["adafed", "fedfv", "fedmdfg", "fedomg", "qffl"])
def test_reported_coefficients_reproduce_the_step(name):
    random = np.random.default_rng(9)
    rounds = Rounds(STRATEGIES[name](), MODEL, range(4))
    for _ in range(3):
        before, moves = rounds.model["conv.weight"], updates(random, range(4))
        step = rounds.step(moves)["conv.weight"] - before
        coefficients = rounds.strategy.diagnostics["coefficients"]
        moved = np.tensordot(coefficients, [moves[k]["conv.weight"] for k in range(4)], 1)
        np.testing.assert_allclose(moved, step, atol=1e-5)


@pytest.mark.parametrize("name", ["adafed", "fedfv", "fedlf", "fedmdfg", "fedmgda+", "fedomg"])
def test_the_reported_conflict_is_the_cosine_of_updates(name):
    random = np.random.default_rng(9)
    rounds = Rounds(STRATEGIES[name](min_clients=1), MODEL, range(4))
    for present in ([0, 1, 2, 3], [1, 3]):
        moves = updates(random, present)
        rounds.step(moves)
        flat = np.array([moves[k]["conv.weight"].ravel() for k in present])
        flat /= np.linalg.norm(flat, axis=1, keepdims=True)
        conflict = rounds.strategy.diagnostics["conflict"]
        np.testing.assert_allclose(conflict, flat @ flat.T, atol=1e-5)


class Drifts(FedAvg):
    def merge(self, cohort):
        return {name: (a + 1).astype(a.dtype) for name, a in super().merge(cohort).items()}


class Draws(FedAvg):
    def weigh(self, cohort):
        weights = np.random.random(len(cohort))
        return weights / weights.sum()


class LeapsOut(FedAvg):
    def merge(self, cohort):
        super().merge(cohort)
        return cohort.move(np.full(len(cohort), 2.0), self.diagnostics["weights"])


class Halves(FedAvg):
    def merge(self, cohort):
        super().merge(cohort)
        return cohort.move(np.full(len(cohort), 0.5 / len(cohort)), self.diagnostics["weights"])


class Undeclared(FedAvg):
    def __init__(self, *, tau: float = 0.3, **options):
        super().__init__(**options)


class KeepsToItself(FedAvg):
    def __init__(self, **options):
        super().__init__()


class Forgets(FedAvg):
    rounds = 0

    def weigh(self, cohort):
        self.rounds += 1
        weights = np.arange(len(cohort)) + self.rounds
        return weights / weights.sum()


class Silent(FedAvg):
    def merge(self, cohort):
        return cohort.average(self.weigh(cohort))


class Peeks(FedAvg):
    private, sums_suffice = True, False

    def weigh(self, cohort):
        norms = cohort.squared_norms() + 1
        return norms / norms.sum()


class Skews(FedAvg):
    private, sums_suffice = True, False

    def merge(self, cohort):
        super().merge(cohort)
        ranks = np.arange(len(cohort)) + 1
        return cohort.average(ranks / ranks.sum())


class Misspells(FedAvg):
    measurements = ("received_los",)


class Misreads(FedAvg):
    reported_metrics = ("trian_loss",)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Misspells, "Unknown measurement 'received_los'. Did you mean 'received_loss'"),
        (Drifts, "zero updates changed the model"),
        (Draws, "the same replies in a different order gave a different model"),
        (LeapsOut, "Set extrapolates = True"),
        (Halves, "Set keeps_agreement = False"),
        (Undeclared, "tau has no declared range"),
        (KeepsToItself, r"pass \*\*options to"),
        (Forgets, "List its state in STATE"),
        (Silent, r"self.diagnostics\['weights'\]"),
        (Peeks, "other updates with the same numbers gave other weights"),
        (Skews, "the model is not the mean of the clients' models with these weights"),
    ],
)
def test_check_strategy_reports_broken_requirements(rule, message):
    with pytest.raises(AssertionError, match=f"^{rule.__name__}: .*{message}"):
        check_strategy(rule)


@pytest.mark.parametrize("name", [name for name in STRATEGIES if is_proven(STRATEGIES[name])])
def test_proven_strategies_are_private_with_a_cap(name):
    arguments = {"rule": "weights"} if name == "qffl" else {}
    check_private(partial(STRATEGIES[name], max_client_weight=0.4, **arguments))


def test_a_metric_that_no_client_reports_fails_the_round():
    rounds = Rounds(Misreads(), MODEL, range(2))
    replies = [valid_reply(message, k) for k, message in enumerate(rounds.ask())]
    with pytest.raises(RoundFailed, match="it sent no metric 'trian_loss', which Misreads needs"):
        rounds.finish(replies)


def test_check_strategy_reports_a_misspelled_metric():
    with pytest.raises(AssertionError, match=r"Unknown metric 'trian_loss'. Did you mean 'train"):
        check_strategy(Misreads)


@pytest.mark.slow
def test_check_strategy_accepts_arguments_needs_no_torch_and_prints_nothing():
    code = (
        "import sys; from fairflower.testing import check_strategy; "
        "from fairflower.strategies import AFL; check_strategy(AFL, lr=0.1); "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


def test_fedavg_and_uniform_ignore_absent_clients():
    random = np.random.default_rng(7)
    for name in ("fedavg", "uniform"):
        rounds = Rounds(STRATEGIES[name](min_clients=1), MODEL, range(6))
        rounds.step(updates(random, range(6)))
        before, moves = rounds.model["conv.weight"], updates(random, [1, 4])
        after = rounds.step(moves)["conv.weight"]
        mean = (moves[1]["conv.weight"] + moves[4]["conv.weight"]) / 2
        np.testing.assert_allclose(after - before, mean, atol=1e-6)


def test_fedavg_and_uniform_compute_weighted_means():
    random = np.random.default_rng(5)
    moves, examples = updates(random, range(3)), {0: 1, 1: 2, 2: 7}
    for strategy, weights in ((FedAvg(), [0.1, 0.2, 0.7]), (Uniform(), [1 / 3] * 3)):
        model = Rounds(strategy, MODEL, range(3)).step(moves, examples)
        for key in ("conv.weight", "bn.running_mean"):
            mean = sum(w * moves[k][key].astype(float) for k, w in enumerate(weights))
            np.testing.assert_allclose(model[key], MODEL[key] + mean, atol=1e-6)


def test_step_counters_become_the_truncated_mean():
    model = {"n": np.array(10, np.int64)}
    rounds = Rounds(FedAvg(), model, range(3))
    merged = rounds.step(
        {k: {"n": np.array(up)} for k, up in enumerate((7, 8, 9))}, {0: 5, 1: 3, 2: 2}
    )
    assert merged["n"] == 17  # 17.7


def test_an_unknown_option_is_refused():
    with pytest.raises(TypeError, match="fraction_fit"):
        FedHEAL(fraction_fit=0.5)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (np.full(2, np.nan), "expected non-negative numbers with sum 1"),
        ([1.0], r"shape \(1,\) for 2 clients"),
        ([1 / 3] * 3, r"shape \(3,\) for 2 clients"),
    ],
)
def test_weights_off_the_simplex_are_refused(weights, message):
    class Broken(FedAvg):
        def weigh(self, cohort):
            return weights

    with pytest.raises(ConfigError, match=message):
        Rounds(Broken(), MODEL, range(2)).step(dict.fromkeys(range(2), zero_update()))


def test_weights_may_be_a_list():
    class Listed(FedAvg):
        def weigh(self, cohort):
            return [0.25, 0.75]

    rounds = Rounds(Listed(), {"x": np.zeros(1)}, range(2))
    rounds.step({0: {"x": np.array([1.0])}, 1: {"x": np.array([2.0])}})
    assert rounds.model["x"][0] == 1.75


# --- state ---------------------------------------------------------------------------------


def test_the_state_of_another_strategy_is_refused():
    with pytest.raises(ValueError, match=r"FedAvg keeps \['merged_rounds'\].*'rises'"):
        FedAvg().load_state_dict(FedHEAL().state_dict())


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [("fairfed", "metric", "fisher"), ("fedce", "metric", ""), ("fedga", "rounds", 1.5)],
)
def test_arguments_out_of_range_are_named_with_their_value(name, argument, value):
    with pytest.raises(ValueError, match=f"{argument} = "):
        STRATEGIES[name](**{argument: value})
