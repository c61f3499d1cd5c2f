"""FairFed: the AAAI 2023 formula (not the version without the sum), and group fairness."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from replies import weights_by

from fairflower.clients import SGD
from fairflower.config import RunConfig
from fairflower.data import Split
from fairflower.errors import ConfigError
from fairflower.models.small import MLP
from fairflower.numerics.group_fairness import counts_by_group
from fairflower.strategies import FairFed
from fairflower.testing import make_cohort
from fairflower.testing.federations import SETTINGS
from fairflower.testing.rounds import Rounds
from fairflower.training.measurements import train_and_measure

EXAMPLES = {0: 100, 1: 60, 2: 40}
weights = partial(weights_by, "received_score", examples=EXAMPLES)


def start(**arguments) -> Rounds:
    return Rounds(FairFed(min_clients=1, **arguments), {"x": np.zeros(1)}, range(4))


def test_weights_of_two_rounds_match_a_hand_computation():
    """Global metrics .5 .8 + .3 .6 + .2 .4 = .66 and .5 .5 + .3 .9 + .2 .6 = .64."""
    rounds = start(beta=0.5)
    first = np.array([0.5, 0.3, 0.2]) - 0.5 * (np.array([0.14, 0.06, 0.26]) - 0.46 / 3)
    np.testing.assert_allclose(weights(rounds, (0.8, 0.6, 0.4)), first)
    np.testing.assert_allclose(rounds.strategy.diagnostics["gap"], (0.14, 0.06, 0.26))
    assert rounds.model["x"][0] == pytest.approx(first @ [1, 2, 3])
    second = first - 0.5 * (np.array([0.14, 0.26, 0.04]) - 0.44 / 3)
    np.testing.assert_allclose(weights(rounds, (0.5, 0.9, 0.6)), second)


def test_a_weight_cap_does_not_change_the_global_metric():
    """Golden: the mean of .9, .5, .1 over 900, 50, 50 examples is .84."""
    cohort = make_cohort([[1.0]] * 3, [900, 50, 50], received_score=[0.9, 0.5, 0.1])
    strategy = FairFed()
    strategy.weigh(replace(cohort, max_weight=0.4))
    np.testing.assert_allclose(strategy.diagnostics["gap"], [0.06, 0.34, 0.74])


def test_gaps_are_absolute_differences_from_the_mean_over_clients():
    """Without the sum, the gap would be m_k (1 - n_k / n): the best client would lose most."""
    rounds = start(beta=0.1)
    actual = weights(rounds, (0.9, 0.5, 0.1), examples=dict.fromkeys(range(3), 1))
    np.testing.assert_allclose(actual[0], actual[2])
    assert actual[1] > actual[0]
    assert weights(start(beta=0.1), (0.9, 0.8, 0.8))[0] > 0.49


def test_equal_metrics_give_fedavg_weights():
    rounds = start(beta=1.0)
    for _ in range(3):
        np.testing.assert_allclose(weights(rounds, (0.7, 0.7, 0.7)), (0.5, 0.3, 0.2))


@given(st.integers(0, 10_000), st.just(0.0) | st.floats(0, 100))
def test_weights_stay_on_the_simplex_for_any_beta_and_equal_fedavg_for_beta_0(seed, beta):
    random = np.random.default_rng(seed)
    rounds = start(beta=beta)
    for _ in range(5):
        present = sorted(random.choice(4, random.integers(1, 5), replace=False).tolist())
        n = {k: int(random.integers(1, 500)) for k in present}
        actual = weights(rounds, {k: float(random.random()) for k in present}, examples=n)
        assert actual.min() >= 0
        assert actual.sum() == pytest.approx(1)
        if beta == 0:
            np.testing.assert_allclose(actual, np.array(list(n.values())) / sum(n.values()))


def test_a_client_with_weight_0_can_regain_weight_in_the_next_round():
    """Clipped weights are stored, so negative values do not accumulate."""
    rounds = start(beta=1.0)
    for _ in range(20):
        actual = weights(rounds, (0.9, 0.85, 0.2))
    assert actual[2] == 0
    assert weights(rounds, (0.9, 0.1, 0.7))[2] > 0


def test_any_reported_metric_can_be_used():
    strategy = FairFed(metric="calibration_error", min_clients=1)
    assert strategy.measurements == ("calibration_error",)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    actual = weights_by("calibration_error", rounds, (0.0, 0.0, 0.3), EXAMPLES)
    assert actual[2] < 0.2


# --- fairness between groups of people -------------------------------------------------------

NEED = "received_group_counts"

#: People and predicted positives of two groups at three clients: the differences of the rates are
#: 0.1, -0.05 and 0.3, and that of all people together is 0.08.
PEOPLE = [(100, 30, 400, 80), (160, 40, 140, 42), (40, 20, 160, 32)]


def counted(metric: str) -> list[list[int]]:
    """Return counts whose labels make the rates of `PEOPLE` those of the metric."""
    rows = []
    for n, s, m, t in PEOPLE:
        if metric == "equal_opportunity_difference":
            rows.append([n, s, n, s, 0, 0, m, t, m, t, 0, 0])
        else:
            rows.append([n, s, 0, 0, n, s, m, t, 0, 0, m, t])
    return rows


def by_counts(counts, metric: str, beta: float = 0.3, **options) -> np.ndarray:
    sizes = np.array(counts)[:, ::6].sum(axis=1)
    cohort = make_cohort([[1.0]] * len(counts), sizes, measured={NEED: counts})
    return FairFed(beta=beta, metric=metric, **options).weigh(cohort)


@pytest.mark.parametrize(
    "metric", ["demographic_parity_difference", "equal_opportunity_difference"]
)
def test_group_fairness_weights_match_golden_values(metric):
    """w (.5, .3, .2), F (.1, -.05, .3), F of all .08, beta .3: gaps .02, .13 and .22."""
    np.testing.assert_allclose(by_counts(counted(metric), metric), (0.531, 0.298, 0.171), atol=1e-9)


def test_the_global_difference_is_computed_from_summed_counts():
    strategy = FairFed(metric="demographic_parity_difference")
    cohort = make_cohort([[1.0]] * 3, [500, 300, 200], measured={NEED: counted(strategy.metric)})
    strategy.weigh(cohort)
    assert strategy.diagnostics["global_difference"] == pytest.approx(0.08)
    np.testing.assert_allclose(strategy.diagnostics["gap"], (0.02, 0.13, 0.22))


def test_large_counts_are_summed_without_rounding():
    """Clients send float32; sums of these counts in float32 would be rounded."""
    row = np.tile(np.array([500_001, 200_000, 300_001, 150_000, 200_000, 50_000], np.float32), 2)
    cohort = replace(make_cohort([[1.0]] * 40), measured={NEED: ({"h": row},) * 40})
    strategy = FairFed(metric="equal_opportunity_difference")
    np.testing.assert_allclose(strategy.weigh(cohort), 1 / 40)
    assert strategy.diagnostics["global_difference"] == 0


def test_a_client_without_one_of_the_groups_is_compared_by_accuracy():
    """Client 2 has nobody in the second group: its gap is that of accuracies, .9 and 2.1 / 3."""
    counts = [
        [50, 30, 30, 20, 20, 10, 50, 25, 25, 15, 25, 10],  # accuracy (30 + 30) / 100 = .6
        [50, 30, 30, 20, 20, 10, 50, 25, 25, 15, 25, 10],
        [100, 50, 50, 45, 50, 5, 0, 0, 0, 0, 0, 0],
    ]
    strategy = FairFed(beta=0.0, metric="equal_opportunity_difference")
    strategy.weigh(make_cohort([[1.0]] * 3, measured={NEED: counts}))
    whole = 85 / 110 - 30 / 50  # of the first group's and the second's positives
    local = 20 / 30 - 15 / 25
    expected = [abs(local - whole)] * 2
    accuracies = [(20 + 10 + 15 + 15) / 100] * 2 + [0.9]
    expected.append(abs(0.9 - np.mean(accuracies)))
    np.testing.assert_allclose(strategy.diagnostics["gap"], expected)


def test_accuracy_is_used_if_the_global_difference_is_undefined():
    counts = [[10, 5, 0, 0, 10, 5, 10, 5, 10, 5, 0, 0], [10, 1, 0, 0, 10, 1, 10, 9, 10, 9, 0, 0]]
    strategy = FairFed(metric="equal_opportunity_difference")
    strategy.weigh(make_cohort([[1.0]] * 2, measured={NEED: counts}))
    np.testing.assert_allclose(strategy.diagnostics["gap"], (0.2, 0.2))  # .5 and .9 around .7
    assert "global_difference" not in strategy.diagnostics


def test_equal_gaps_of_two_or_three_groups_give_equal_weights():
    counts = [[10, k, 0, 0, 10, k, *[10, 5, 0, 0, 10, 5], *[10, 5, 0, 0, 10, 5]] for k in (2, 8)]
    actual = by_counts(counts, "demographic_parity_difference", beta=1.0)
    np.testing.assert_allclose(actual, (0.5, 0.5))  # both have a gap of .3
    two = [row[:12] for row in counts]
    actual = by_counts(two, "demographic_parity_difference", beta=1.0)
    np.testing.assert_allclose(actual, (0.5, 0.5))
    assert FairFed(metric="equalized_odds_difference").measurements == (NEED,)


def test_clients_send_group_counts_of_their_training_examples():
    from tiny_data_sets import data

    tabular = data("features")
    labels = np.arange(12) % 2
    groups = np.arange(12) // 6
    train = Split(tabular.train.x, labels)
    kept = replace(
        tabular, train=train, groups={"train": groups, "test": np.zeros(9, int)}, num_groups=2
    )
    client = SGD(MLP(2, (4,), hidden=6), kept, SETTINGS, client_id=0, seed=0)
    client.model.eval()
    scaled = (torch.tensor(train.x) - 0.5) / 2
    predicted = client.model(scaled).argmax(1).numpy()
    _, arrays = train_and_measure(client, {"measure": NEED, "server-round": 1})
    h = arrays[NEED]["h"]
    assert h.dtype == np.float32
    expected = counts_by_group(labels, predicted, groups, 2)
    np.testing.assert_array_equal(h.reshape(2, 6), expected)
    client.data = replace(kept, groups={})
    with pytest.raises(ConfigError, match=r"have no group labels. Set data\.groups"):
        train_and_measure(client, {"measure": NEED, "server-round": 1})


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.ones(7), "7 counts of people"),
        ([30, 2, 0, 0, 30, 2, 4, 1, 0, 0, 4, 1], "it counted 34 people; expected 40"),
        ([30, 2, 10, 4, 20, 0, 10, 1, 0, 0, 10, 1], "the numbers contradict each other"),
    ],
)
def test_a_client_with_invalid_counts_is_dropped(counts, message):
    strategy = FairFed(metric="demographic_parity_difference", min_clients=1)
    rounds = Rounds(strategy, {"x": np.zeros(1)}, range(3))
    good = [10, 5, 0, 0, 10, 5, 30, 9, 0, 0, 30, 9]
    rounds.step(
        {k: {"x": np.ones(1)} for k in range(3)},
        dict.fromkeys(range(3), 40),
        measured={k: {NEED: {"h": np.array(counts if k == 1 else good, float)}} for k in range(3)},
    )
    assert list(strategy.client_ids) == [0, 2]
    assert message in strategy.dropped[1]


def test_group_metrics_require_data_groups_and_no_secure_aggregation():
    flat = {"strategy.name": "fairfed", "strategy.metric": "demographic_parity_difference"}
    with pytest.raises(ConfigError, match=r"data\.groups is empty. Set data\.groups"):
        RunConfig.from_flat(flat)
    flat |= {"data.groups": "sex", "data.name": "heart-disease"}
    with pytest.raises(ConfigError, match="'fairfed' needs each client's counts of people"):
        RunConfig.from_flat(flat | {"secure-aggregation": True})
    RunConfig.from_flat(flat)
