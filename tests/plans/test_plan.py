"""Plans of runs: what is left of them, how many runs are made at a time, and their ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from resuming import config, session

from fairflower.config import keys
from fairflower.errors import ConfigError
from fairflower.plans import parallel
from fairflower.plans.plan import Plan, resolve_jobs, run_key
from fairflower.report import read_run


def test_a_completed_run_on_other_examples_is_not_compared(tmp_path: Path) -> None:
    made = config(tmp_path)
    run = read_run(session(made).run())
    other = config(tmp_path, seed=1)
    assert Plan([made, other]).without([run]).runs == [other]
    run.info["digest"] = "of other examples"
    with pytest.raises(ConfigError, match=r"had other examples than data\.dir has now"):
        Plan([made, other]).without([run])
    assert not Plan([made]).without([run]).runs, "nothing is left that could be mixed with it"


@pytest.mark.parametrize(
    ("settings", "jobs"),
    [
        ({}, None),
        (keys(), None),  # the config.toml of a run has all keys
        ({"workers": 2}, 1),
        ({"engine": "ray"}, 1),
        ({"ray-address": "auto"}, 1),
    ],
)
def test_settings_of_an_engine_mean_one_run_at_a_time(
    settings: dict[str, Any], jobs: int | None
) -> None:
    assert resolve_jobs(settings, None) == jobs


def test_a_path_means_the_same_run_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trace.csv").write_text("round,client\n1,0\n1,1\n1,2\n1,3\n")
    monkeypatch.chdir(tmp_path)
    here, absolute = (
        config(tmp_path, **{"participation.availability": path})
        for path in ("trace.csv", str(tmp_path / "trace.csv"))
    )
    assert run_key(here.to_flat()) == run_key(absolute.to_flat())
    assert session(here).config == absolute


def test_runs_are_stopped_if_what_waits_for_them_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    for name in ("stop", "close"):
        monkeypatch.setattr(parallel._Processes, name, lambda self, name=name: called.append(name))
    with pytest.raises(MemoryError), parallel._processes(1):
        raise MemoryError
    assert called == ["stop", "close"]
