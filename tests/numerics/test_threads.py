"""The number of CPUs for parallel work."""

from __future__ import annotations

import pytest

from fairflower.numerics.threads import cpus


def test_cpus_are_those_available_to_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert cpus() == 2
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert cpus() == 1
