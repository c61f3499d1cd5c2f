"""The number of parallel runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairflower.errors import ConfigError, installed
from fairflower.numerics.threads import cpus
from fairflower.plans.plan import Plan

#: Setting for parallel clients -> its values that ask for none, the default first.
_INACTIVE: dict[str, tuple[Any, ...]] = {
    "ray-address": ("",),
    "engine": ("auto", "inline"),
    "workers": (0,),
    "client-gpus": ("auto", 0),
}


def for_parallel_clients(flat: Mapping[str, Any]) -> str:
    """Return the first key in ``flat`` that only runs with parallel clients follow; "" if none."""
    return next((key for key, off in _INACTIVE.items() if flat.get(key, off[0]) not in off), "")


def resolve_jobs(flat: Mapping[str, Any], jobs: int | None, dashes: str = "--") -> int | None:
    """Return the number of parallel runs; None means that `auto_jobs` decides.

    If ``jobs`` is None, the result is 1 if ``flat`` sets an engine, its workers or a cluster, and
    None otherwise. Raises ``ConfigError`` for several jobs with settings `for_parallel_clients`.
    The error writes ``dashes`` before the option's name; in Python there are none.
    """
    if jobs not in (None, 1) and (key := for_parallel_clients(flat)):
        raise ConfigError(
            f"{dashes}jobs {jobs}: parallel runs use the inline engine, on this machine and with "
            f"one client at a time, but {key} = {flat[key]!r} is set. Remove {dashes}jobs or {key}."
        )
    chosen = flat.get("ray-address") or flat.get("workers") or flat.get("engine", "auto") != "auto"
    return 1 if jobs is None and chosen else jobs


def auto_jobs(plan: Plan, runs: int | None = None) -> int:
    """Choose the number of parallel runs for this machine.

    The number is as large as the CPU cores and, on a GPU, its memory allow. If there are fewer
    runs, it is the number of runs, or 1 with Ray, whose parallel clients use all cores. If
    ``client-gpus`` is a number, it is 1, because this setting applies to parallel clients.

    Parameters
    ----------
    runs : int, optional
        Expected number of runs of a study, which never uses Ray. Default: the plan is not a study.
    """
    # Imported late, because torch is slow to import.
    from fairflower.plans.devices import runs_that_fit

    if any(config.client_gpus not in ("auto", 0.0) for config in plan.runs):
        return 1
    capacity = cpus() // max(config.client_cpus for config in plan.runs)
    if capacity > 1 and (fitting := runs_that_fit(plan.runs)):
        capacity = min(capacity, fitting)
    count = len(plan.runs) if runs is None else runs
    if count >= capacity:
        return max(1, capacity)
    return 1 if runs is None and installed("ray") else max(1, count)
