"""The program of experiments/privacy-price.md: its noise, its runs, and what it compares."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from experiment_files import FOLDER
from run_folders import constant, make_run

from fairflower.config.privacy import PrivacyConfig
from fairflower.config.text import read_toml
from fairflower.report import read_run
from fairflower.server.privacy import epsilon


@pytest.fixture
def price(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import privacy_price

    return privacy_price


def test_the_noise_gives_the_stated_epsilons(price: ModuleType) -> None:
    pytest.importorskip("dp_accounting")
    for stated, noise in price.NOISE.items():
        privacy = PrivacyConfig(
            noise_multiplier=noise, number_noise_multiplier=2 * noise, delta=price.DELTA
        )
        for name in price.DATA.values():
            rounds = read_toml(FOLDER / f"{name}-cpu.toml")["num-server-rounds"]
            assert 0.97 * stated < epsilon(privacy, 1, rounds) <= stated


def test_the_plan_has_a_run_in_every_cell_of_every_federation(
    price: ModuleType, tmp_path: Path
) -> None:
    runs = price.plan(4, tmp_path, "").runs
    assert len(runs) == 4 * len(price.DATA) * len(price.CONDITIONS) * len(price.STRATEGIES)
    assert len({run.run_name for run in runs}) == len(runs)
    private = [run for run in runs if run.privacy.on]
    assert {run.bound.max_client_weight for run in private if run.strategy.name == "uniform"} == {
        1 / price.CLIENTS
    }
    per_domain = {run.data.clients_per_domain for run in private}
    assert per_domain == {price.CLIENTS // 4}
    assert {run.data.clients_per_domain for run in runs if run.secure_aggregation} == {
        price.FEW // 4
    }
    # Three federations of everything come before the fourth.
    assert {run.seed for run in runs[: 3 * len(runs) // 4]} == {0, 1, 2}


def test_only_complete_federations_are_compared(price: ModuleType, tmp_path: Path) -> None:
    falls = {"plain": (0.9, 0.5), "epsilon 10": (0.8, 0.3), "epsilon 3": (0.6, 0.3)}
    folders = []
    for number in range(6):
        for cell in price.cells("digits", price.GROUPS[0]):
            high, low = falls.get(cell[1], (0.1, 0.1))
            if number == 5 and cell[2] == "term":
                continue  # this federation is not complete
            folder = make_run(
                tmp_path / f"{price.name_of(*cell)}-federation{number}",
                constant(5, a=high + 0.01 * number, b=low - 0.01 * (number % 2)),
                seed=number,
            )
            folders.append(folder)
    runs = price.complete([read_run(folder) for folder in folders], "digits")
    assert {run.seed for run in runs} == set(range(5))
    assert price.complete(runs, "office") == []
    table = price.table(runs)
    assert [group.heading for group in table.groups] == [
        f"epsilon {epsilon} against plain" for epsilon in price.NOISE
    ]
    for group in table.groups:
        assert [row.name for row in group.rows] == list(price.STRATEGIES)
    ten, three, _ = (group.rows[0] for group in table.groups)
    assert [cell.text for cell in ten.cells[1:]] == [
        "49.60",
        "\N{MINUS SIGN}15.00",
        "\N{MINUS SIGN}20.00",
        "\N{MINUS SIGN}5.00",
    ]
    assert three.cells[-1].text == "+5.00"
    assert ten.remark == "5 federations"
