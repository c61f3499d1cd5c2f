"""The power of a planned comparison, compared with closed forms and statsmodels."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from run_folders import make_run
from statsmodels.stats.power import TTestPower

from fairflower.cli.run import print_power
from fairflower.cli.terminal import console
from fairflower.config import StrategyConfig
from fairflower.errors import ConfigError
from fairflower.plans.plan import Plan
from fairflower.plans.power import Spread, comparisons_of, design_power, level_of, spreads
from fairflower.report import find_readable_runs, read_runs

#: Accuracy of domain a by seed; domain b always has 0.9.
UNIFORM = [0.50, 0.52, 0.48, 0.51, 0.49]
OTHERS = {"fedheal": [0.60, 0.61, 0.62, 0.60, 0.62], "fedavg": [0.50, 0.50, 0.51, 0.52, 0.48]}


@pytest.fixture
def pilot(tmp_path: Path) -> Path:
    for label, accuracies in {"uniform": UNIFORM, **OTHERS}.items():
        for seed, a in enumerate(accuracies):
            rounds = [{"a": a, "b": 0.9}] * 3
            make_run(tmp_path / f"runs/{label}-{seed}", rounds, label=label, seed=seed)
    return tmp_path / "runs"


def test_spreads_are_standard_deviations_of_differences_paired_by_seed(pilot: Path) -> None:
    by_metric = {one.metric: one for one in spreads(list(find_readable_runs(pilot)))}
    worst = [
        np.var(100 * np.subtract(accuracies, UNIFORM), ddof=1) for accuracies in OTHERS.values()
    ]
    assert by_metric["worst domain"].sd == pytest.approx(math.sqrt(np.mean(worst)))
    assert by_metric["average"].sd == pytest.approx(by_metric["worst domain"].sd / 2)
    assert by_metric["STD"].sd == pytest.approx(by_metric["worst domain"].sd / math.sqrt(2))
    assert {one.methods for one in by_metric.values()} == {2}


@pytest.mark.parametrize(("sd", "methods"), [(1.0, 1), (2.4, 5), (3.3, 40)])
def test_design_power_equals_the_power_of_paired_t_tests(sd: float, methods: int) -> None:
    (design,) = design_power([Spread("worst domain", sd, 2.0, methods, "federation")], methods, 10)
    test, level = TTestPower(), level_of(methods, 1)
    needed = test.solve_power(effect_size=2 / sd, alpha=level, power=0.8)
    assert design.for_difference == math.ceil(needed)
    power = test.power(effect_size=design.detectable / sd, nobs=10, alpha=level)
    assert power == pytest.approx(0.8, abs=1e-4)
    assert design.for_equivalence >= 2


def test_comparisons_are_counted_within_each_client() -> None:
    from fairflower.config import ClientConfig

    clients = ClientConfig.parse("sgd,fedprox")
    plan = Plan.grid({}, StrategyConfig.parse("fedavg,fedheal"), [0, 1], clients=clients)
    assert comparisons_of(plan) == 2


def test_earlier_runs_of_other_data_or_rounds_are_warned_about(pilot: Path) -> None:
    words = {}
    for name in ("digits", "uci-digits"):
        flat = {"data.name": name, "num-server-rounds": 2 if name == "digits" else 7}
        with console.capture() as capture:
            print_power(Plan.grid(flat, StrategyConfig.parse("fedavg"), [0, 1]), 2, [pilot])
        words[name] = " ".join(capture.get().split())
    assert "Warning" not in words["digits"]
    assert (
        "Warning: The earlier runs may have another spread than the planned runs: "
        "num-server-rounds is 2 instead of 7; data.name is 'digits' instead of 'uci-digits'."
    ) in words["uci-digits"]


def test_runs_without_pairs_are_refused(pilot: Path) -> None:
    with pytest.raises(ConfigError, match="no method shares two federations or seeds"):
        spreads(read_runs(pilot / "fedheal-0"))


def test_power_is_printed_in_points_with_a_pilot_and_else_in_standard_deviations(
    pilot: Path,
) -> None:
    plan = Plan.grid({}, StrategyConfig.parse("fedavg,fedheal"), [0, 1, 2])
    with console.capture() as capture:
        print_power(plan, 3, [pilot])
    text = " ".join(capture.get().split())
    assert "Fewer than 5 pairs give confidence intervals, but no verdicts." in text
    assert "worst" in text
    assert "(within 2)" in text
    with console.capture() as capture:
        print_power(plan, 10, [])

    least = TTestPower().solve_power(nobs=10, alpha=0.05 / 6, power=0.8)
    assert f"detectable difference: {least:.1f} standard" in " ".join(capture.get().split())
    with console.capture() as capture:
        print_power(plan, 1, [])
    assert capture.get().startswith("A single federation or seed allows no inference")
    assert "Smallest" not in capture.get()
    with console.capture() as capture:
        print_power(plan, 1, [pilot])
    assert "Differences that 1 pair can detect" in " ".join(capture.get().split())
