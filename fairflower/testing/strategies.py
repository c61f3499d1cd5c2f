"""Checks for strategies."""

import difflib
import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from fairflower.aggregation.cohort import Cohort
from fairflower.config.privacy import is_proven
from fairflower.config.text import unknown
from fairflower.numerics.simplex import on_simplex
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.secure.vectors import SumCohort, WeightedSum
from fairflower.strategies import FairStrategy
from fairflower.testing.failures import (
    Arrays,
    as_assertions,
    check_arrays,
    check_hooks,
    check_ranges,
)
from fairflower.testing.rounds import MODEL, Rounds, updates, zero_update

#: Creates a new strategy with the given `fairflower.aggregation.strategy.Options`.
Make = Callable[..., FairStrategy]


def check_strategy(rule: type[FairStrategy], **arguments: Any) -> None:
    """Run all `CHECKS` on a strategy; this takes at most a second.

    The subclass of `FairStrategy` is constructed many times with ``arguments``. Raises
    ``AssertionError`` if a property is violated; the message explains how to correct it.

    Examples
    --------
    >>> from fairflower.strategies import TERM
    >>> check_strategy(TERM, t=2.0)
    """
    check_hooks(rule, FairStrategy)
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.ERROR)  # no warnings about absent clients
    try:
        with as_assertions(rule):
            for check in CHECKS:
                check(lambda **options: rule(**arguments, **options))
    finally:
        log.setLevel(level)


def check_arguments(make: Make) -> None:
    """Check that arguments declare ranges and do not repeat those that all strategies have."""
    rule = type(make())
    check_ranges(rule)
    assert "fraction_train" not in rule.arguments(), (
        "do not repeat arguments of FedAvg; accept them as **options."
    )
    options = make(fraction_train=0.5, min_train_nodes=3)
    assert (options.fraction_train, options.min_train_nodes) == (0.5, 3), (
        "pass **options to super().__init__."
    )


def check_measurements(make: Make) -> None:
    """Check that ``measurements`` exist, and that no name in ``reported_metrics`` is misspelt."""
    rule, known = make(), [*MEASUREMENTS, "train_loss", "num-examples"]
    for name in rule.reported_metrics:
        near = difflib.get_close_matches(name, known, cutoff=0.8)
        assert name in known or not near, unknown("metric", name, known)
    for name in rule._measurements:
        assert name in MEASUREMENTS, unknown("measurement", name, MEASUREMENTS)


def check_zero_updates(make: Make) -> None:
    """Check that zero updates do not change the model."""
    rounds = Rounds(make(), MODEL, range(3))
    for _ in range(3):
        model = rounds.step({k: zero_update() for k in range(3)}, {0: 5, 1: 70, 2: 900})
    _expect_same(model, MODEL, "zero updates changed the model")


def check_order_of_replies(make: Make) -> None:
    """Check that results do not depend on the order of replies or on global random numbers."""
    random = np.random.default_rng(1)
    first, second = Rounds(make(), MODEL, range(5)), Rounds(make(), MODEL, range(5))
    for _ in range(4):
        moves = updates(random, range(5))
        examples = {k: 10 * k + 1 for k in range(5)}
        _expect_same(
            first.step(moves, examples),
            second.step(moves, examples, order=random.permutation(5).tolist()),
            "the same replies in a different order gave a different model. Sum in the order of "
            "cohort.client_ids, and draw only from self.seed and the round",
        )


def check_weights_and_hull(make: Make, draws: int = 3) -> None:
    """Check that weights are on the simplex and, unless ``extrapolates``, models in the hull."""
    for clients in range(1, 7):
        for seed in range(draws):
            random = np.random.default_rng([seed, clients])
            rounds = Rounds(make(), MODEL, range(clients))
            for _ in range(3):
                before = rounds.model["conv.weight"]
                moves = updates(random, range(clients))
                examples = {k: int(random.integers(1, 1000)) for k in range(clients)}
                after = rounds.step(moves, examples)["conv.weight"]
                _expect_simplex(rounds.strategy, clients)
                if rounds.strategy.extrapolates:
                    continue
                steps = np.stack([moves[k]["conv.weight"] for k in moves])
                # A masked coordinate may keep its value, which need not be a convex combination.
                low, high = np.minimum(steps.min(0), 0), np.maximum(steps.max(0), 0)
                inside = (after >= before + low - 1e-5) & (after <= before + high + 1e-5)
                assert inside.all(), (
                    f"the merged model is outside the convex hull of the models of {clients} "
                    "clients. Set extrapolates = True if the strategy may extrapolate."
                )


def check_unanimity(make: Make) -> None:
    """Check that equal models are merged into the same model, if ``keeps_agreement`` is set."""
    random = np.random.default_rng(2)
    rounds = Rounds(make(), MODEL, range(4))
    count = "bn.num_batches_tracked"
    for _ in range(2):
        (move,) = updates(random, [0]).values()
        before = rounds.model
        after = rounds.step(dict.fromkeys(range(4), move))
        for key in MODEL if rounds.strategy.keeps_agreement else ():
            assert np.allclose(after[key], before[key] + move[key], rtol=1e-6, atol=1e-6), (
                f"equal values of {key} were merged into a different value. Set keeps_agreement = "
                "False if this is intended."
            )
        assert after[count] == before[count] + move[count], (
            "equal batch counters were merged into a different value. Average the buffers."
        )


def check_partial_participation(make: Make) -> None:
    """Check rounds with varying clients, some of which take part for the first time."""
    random = np.random.default_rng(4)
    rounds = Rounds(make(min_clients=1), MODEL, range(6))
    for present in ([0, 1], [1, 2, 3], [0, 5], [4], [0, 1, 2, 3, 4, 5]):
        model = rounds.step(updates(random, present), {k: k + 1 for k in present})
        assert rounds.strategy.client_ids == tuple(present)
        _expect_simplex(rounds.strategy, len(present))
        check_arrays(model, MODEL)


def check_enormous_updates(make: Make) -> None:
    """Check that a very large update from a client does not cause an overflow."""
    # The model is large, because updates far larger than the model are rejected.
    start = {"x": np.full(4, 1e24, np.float32)}
    rounds = Rounds(make(), start, range(2))
    for _ in range(2):
        check_arrays(rounds.step({0: {"x": np.full(4, 1e30)}, 1: {"x": np.full(4, 1e24)}}), start)
        _expect_simplex(rounds.strategy, 2)


def check_resuming(make: Make) -> None:
    """Check that saving and loading a strategy in every round does not change the models."""
    random = np.random.default_rng(8)
    plan = [(present, updates(random, present)) for present in ([0, 1], [1, 2, 3], [0, 3], [1, 2])]
    steady = Rounds(make(min_clients=1), MODEL, range(4))
    stopped = Rounds(make(min_clients=1), MODEL, range(4))
    for present, moves in plan:
        resumed = Rounds(make(min_clients=1), stopped.model, range(4))
        resumed.round = stopped.round
        resumed.strategy.load_state_dict(stopped.strategy.state_dict())
        stopped = resumed
        scheduled = {"train.lr": 0.1 / (steady.round + 1)}
        steady.config = stopped.config = steady.config | scheduled
        examples = {k: 10 * k + 1 for k in present}
        _expect_same(
            steady.step(moves, examples),
            stopped.step(moves, examples),
            f"resumed before round {steady.round}, the strategy gave a different model. List its "
            "state in STATE, and in every round read the config and draw from "
            "np.random.default_rng([self.seed, cohort.server_round])",
        )


def check_sums(make: Make) -> None:
    """Check that numbers and a weighted sum give the same model, if ``sums_suffice`` is set."""
    if not make().sums_suffice:
        return
    random = np.random.default_rng(9)
    plain, masked = (Rounds(make(), MODEL, range(4)) for _ in range(2))
    seen: list[Cohort] = []
    merge = plain.strategy.merge
    plain.strategy.merge = lambda cohort: merge(seen.append(cohort) or cohort)  # type: ignore[method-assign, func-returns-value]
    for present in ([0, 1, 2, 3], [1, 2, 3]):
        masked.ask()
        model = plain.step(updates(random, present), {k: 10 * k + 1 for k in present})
        found = _from_sums(masked.strategy, seen[-1])
        for key in MODEL:
            assert np.allclose(found[key], model[key], rtol=1e-5, atol=1e-5), (
                f"with only a weighted sum of updates, {key} was merged into a different value. "
                "Use only numbers in `weigh`, and only the cohort's `average` or `move` with these "
                "weights in `combine`, or set sums_suffice = False."
            )


def check_private(make: Make) -> None:
    """Check that weights depend only on numbers, and the model on weights, if it is ``private``."""
    if not is_proven(type(make())):
        return
    random = np.random.default_rng(10)
    pair = [Rounds(make(), MODEL, range(4)) for _ in range(2)]
    for _ in range(3):
        weights = []
        for rounds in pair:  # with the same numbers and different updates
            rounds.config["privacy.noise-multiplier"] = 1.0
            before, moves = rounds.model["conv.weight"], updates(random, range(4))
            try:
                after = rounds.step(moves)["conv.weight"]
            except ValueError:  # the strategy is private only with other arguments
                return
            weights.append(np.asarray(rounds.strategy.diagnostics["weights"]))
            mean = np.tensordot(weights[-1], [moves[k]["conv.weight"] for k in moves], 1)
            assert np.allclose(after, before + mean, rtol=1e-5, atol=1e-5), (
                "the model is not the mean of the clients' models with these weights. Merge with "
                "cohort.average, or set private = False."
            )
        assert np.array_equal(weights[0], weights[1]), (
            "other updates with the same numbers gave other weights. Use only numbers in `weigh`, "
            "or set private = False."
        )


def _from_sums(strategy: FairStrategy, cohort: Cohort) -> Arrays:
    """Compute the next model as secure aggregation does, but without masks and rounding."""
    given = {f.name: getattr(cohort, f.name) for f in fields(cohort)} | {"returned": ()}
    known = {k: v for k, v in cohort.metrics.items() if k not in strategy.used_next_round}
    numbers = SumCohort(**given | {"metrics": known})
    weights = numbers.cap(np.asarray(strategy.weigh(numbers)))
    factors = strategy.square_factors(numbers)
    means = {
        name: sum(
            w * (m[name].astype(np.float64) - array)
            for w, m in zip(weights, cohort.returned, strict=True)
        )
        for name, array in cohort.received.items()
    }
    shares = None if factors is None else weights * factors
    square = None if shares is None else float(shares @ cohort.squared_norms() / shares.sum())
    total = WeightedSum(weights, means, 0.0, square)
    summed = SumCohort(**given, total=total)
    strategy.diagnostics["weights"] = weights
    merged = strategy.combine(summed, weights)
    strategy.note_trained(summed)
    return merged


CHECKS: tuple[Callable[[Make], None], ...] = (
    check_arguments,
    check_measurements,
    check_zero_updates,
    check_order_of_replies,
    check_weights_and_hull,
    check_unanimity,
    check_partial_participation,
    check_enormous_updates,
    check_resuming,
    check_sums,
    check_private,
)


def _expect_same(a: Arrays, b: Arrays, problem: str) -> None:
    for key in MODEL:
        assert a[key].tobytes() == b[key].tobytes(), f"{problem} ({key})."


def _expect_simplex(strategy: FairStrategy, clients: int) -> None:
    assert "weights" in strategy.diagnostics, (
        "`merge` does not record the weights. Store them in self.diagnostics['weights']."
    )
    weights = np.asarray(strategy.diagnostics["weights"])
    assert weights.shape == (clients,), (
        f"weights of {clients} clients have shape {weights.shape}. Return an array of shape "
        f"({clients},)."
    )
    assert on_simplex(weights), (
        f"the weights {weights} are not on the simplex. Return weights >= 0 that sum to 1."
    )
