"""Plans over federations: one number sets the data seed and the seed of a run."""

from __future__ import annotations

import pytest

from fairflower.config import StrategyConfig
from fairflower.errors import ConfigError
from fairflower.plans.plan import Plan, replicates


def test_a_federation_sets_the_data_seed_and_the_seed() -> None:
    plan = Plan.grid({"data.seed": 9}, StrategyConfig.parse("fedavg"), [3, 4], federations=True)
    assert [(c.strategy.name, c.data.seed, c.seed, c.run_name) for c in plan.runs] == [
        ("fedavg", 3, 3, "fedavg-federation3"),
        ("uniform", 3, 3, "uniform-federation3"),
        ("fedavg", 4, 4, "fedavg-federation4"),
        ("uniform", 4, 4, "uniform-federation4"),
    ]
    assert "  seed      3, 4\n  data seed 3, 4\n" in plan.summary()


def test_seeds_do_not_change_the_data_seed() -> None:
    plan = Plan.grid({"data.seed": 9}, StrategyConfig.parse("uniform"), [3, 4])
    assert [(c.data.seed, c.seed, c.run_name) for c in plan.runs] == [
        (9, 3, "uniform-seed3"),
        (9, 4, "uniform-seed4"),
    ]
    assert "  data seed 9\n" in plan.summary()
    assert "data seed" not in Plan.grid({}, StrategyConfig.parse("uniform"), [3, 4]).summary()


def test_more_than_a_thousand_federations_are_refused_without_listing_them() -> None:
    with pytest.raises(ConfigError, match="expected distinct numbers >= 0, at most 1000"):
        replicates(range(10**15), None)
