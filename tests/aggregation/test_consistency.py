"""Update consistency against counting signs by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import runs
from scipy.stats import binom

from fairflower.aggregation.consistency import BINS, SignConsistency, histogram
from fairflower.report import read_run, write_report
from fairflower.report.figures.diagnostics import windows
from fairflower.strategies import FedAvg
from fairflower.testing.rounds import Rounds


def by_hand(signs: np.ndarray) -> np.ndarray:
    """Return shares of coordinates by consistency; ``signs`` [rounds, coordinates] are boolean."""
    rounds, coordinates = signs.shape
    counts = np.zeros(BINS)
    for column in signs.T:
        same = max(column.sum(), rounds - column.sum())
        # Bin b is [1/2 + b / 2B, 1/2 + (b+1) / 2B), in whole numbers; the last one holds 1.
        b = min((2 * same - rounds) * BINS // rounds, BINS - 1)
        counts[b] += 1
    return counts / coordinates


@pytest.mark.parametrize("window", [2, 5, 10])
def test_histograms_match_sign_counts_in_every_window(window):
    random = np.random.default_rng(0)
    model = {"w": np.zeros((3, 50), np.float32), "bn.running_mean": np.zeros(4, np.float32)}
    strategy = FedAvg(observers=[SignConsistency(window)])
    rounds = Rounds(strategy, model, range(2))
    steadiness = random.random((2, 3, 50))
    for _ in range(2):
        seen = []
        for r in range(window):
            moves = np.where(random.random((2, 3, 50)) < steadiness, 1, -1) * random.random()
            moves[:, 0, 0] = 0  # no movement counts as an increase
            seen.append(moves.reshape(2, -1) >= 0)
            bn = random.normal(size=4)
            rounds.step({k: {"w": moves[k], "bn.running_mean": bn} for k in range(2)})
            assert ("consistency_histogram" in strategy.diagnostics) == (r == window - 1)
        actual = strategy.diagnostics["consistency_histogram"]
        for k in range(2):
            np.testing.assert_allclose(actual[k], by_hand(np.array(seen)[:, k]))


def test_consistency_counts_only_rounds_with_participation():
    model = {"w": np.zeros(2, np.float32)}
    strategy = FedAvg(observers=[SignConsistency(4)], min_clients=1)
    rounds = Rounds(strategy, model, range(3))
    up, mixed = {"w": np.ones(2)}, {"w": np.array([1.0, -1.0])}
    for moves in ({0: up, 1: mixed}, {0: up}, {0: up, 1: up}, {0: up, 1: mixed, 2: up}):
        rounds.step(moves)
    actual = strategy.diagnostics["consistency_histogram"]
    assert actual[0][-1] == 1
    # Client 1: one coordinate rose in 3 of 3 rounds, the other in 1 of 3.
    assert actual[1][-1] == 0.5
    assert actual[1][int((2 / 3 - 0.5) * 2 * BINS)] == 0.5
    assert np.isnan(actual[2]).all()


@pytest.mark.slow
def test_the_histogram_of_random_signs_is_binomial():
    signs = np.random.default_rng(1).random((10, 200_000)) < 0.5
    n = np.arange(11)
    np.testing.assert_allclose(histogram(n / 10, binom.pmf(n, 10, 0.5)), by_hand(signs), atol=0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_report_of_an_observed_run_shows_consistency(tmp_path: Path):
    chosen = {"strategy.name": "fedavg", "num-server-rounds": 4, "observe.window": 2}
    run = read_run(runs.run(runs.config(tmp_path, **chosen)))
    observed = windows(run)
    assert list(observed) == [2, 4]
    assert set(observed[4]) == set(run.domains)
    for shares in observed[4].values():
        assert shares.sum() == pytest.approx(1)
    write_report([run], tmp_path / "report")
    assert (tmp_path / "report" / "figures" / "consistency.png").exists()
