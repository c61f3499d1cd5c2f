"""``engine = "auto"``: this process where Ray would only cost time, and where Ray cannot start."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from fairflower.config import RunConfig
from fairflower.engines import launch
from fairflower.errors import EngineError
from fairflower.plans import execution

SMALL, LARGE = 500, 10_000_000


@pytest.fixture(autouse=True)
def four_cpus_and_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execution, "cpus", lambda: 4)
    monkeypatch.setattr(execution, "installed", lambda extra: True)


@pytest.mark.parametrize(
    ("flat", "examples", "engine"),
    [
        ({}, SMALL, "inline"),
        ({}, LARGE, "ray"),
        ({}, float("inf"), "ray"),
        ({"model.name": "resnet10"}, SMALL, "ray"),
        ({"num-server-rounds": 1000}, SMALL, "ray"),
        ({"workers": 2}, SMALL, "ray"),
        ({"client-cpus": 3}, LARGE, "inline"),
        ({"ray-address": "auto"}, SMALL, "ray"),
        ({"engine": "ray"}, SMALL, "ray"),
        ({"engine": "inline"}, LARGE, "inline"),
    ],
)
def test_auto_takes_ray_only_where_it_can_save_time(
    flat: dict[str, Any], examples: float, engine: str
) -> None:
    config = RunConfig.from_flat({"train.device": "cpu", "train.local-epochs": 1, **flat})
    assert execution.chosen_engine(config, examples)[0] == engine


def test_the_summary_says_why_clients_run_in_this_process() -> None:
    config = RunConfig.from_flat({"train.device": "cpu", "train.local-epochs": 1})
    line = execution.chosen_engine(config, SMALL)[1]
    assert (
        line == "inline, one client at a time, because Ray's start would take longer than it saves"
    )


@pytest.mark.parametrize("fall_back", [True, False])
def test_clients_run_in_this_process_if_ray_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fall_back: bool
) -> None:
    def no_ray(*args: Any, **options: Any) -> None:
        raise EngineError("Ray cannot start: no space left.")

    monkeypatch.setattr(launch, "RayGrid", no_ray)
    config = RunConfig.from_flat({"engine": "ray"})
    grids: list[Any] = []
    if not fall_back:
        with pytest.raises(EngineError, match="no space left"):
            launch.launch(grids.append, config, 2)
        return
    with caplog.at_level(logging.WARNING):
        launch.launch(grids.append, config, 2, fall_back=True)
    assert [len(list(grid.get_node_ids())) for grid in grids] == [2]
    assert "Ray cannot start: no space left. Clients now run one at a time" in caplog.text


def test_an_error_of_the_run_itself_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RayGrid", lambda *args, **options: _Closing())
    calls: list[Any] = []

    def fails(grid: Any) -> None:
        calls.append(grid)
        raise EngineError("a client crashed")

    with pytest.raises(EngineError, match="a client crashed"):
        launch.launch(fails, RunConfig.from_flat({"engine": "ray"}), 2, fall_back=True)
    assert len(calls) == 1


class _Closing:
    def close(self) -> None:
        pass
