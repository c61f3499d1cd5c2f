"""Choice of the engine and of the number of parallel runs, if nobody has chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fairflower.config import RunConfig
from fairflower.errors import ConfigError, NotInstalled, installed, require
from fairflower.numerics.threads import cpus
from fairflower.plans.plan import Plan
from fairflower.registry import MODEL_OF

_REMEDY = 'pip install "fairflower[sim]"'

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


#: Number of times that examples are used below which a small network is trained before Ray starts.
_FEW_USES = 20_000


def chosen_engine(config: RunConfig, examples: float = math.inf) -> str:
    """Return the engine of a run: ``"ray"``, ``"flower"`` or ``"inline"``.

    ``engine = "auto"`` means Ray if it is installed and can save time, and otherwise this process,
    with the same results: it cannot if one client trains at a time anyway, or on few ``examples``
    (of all runs; infinite means unknown, hence Ray). Raises ``NotInstalled`` if ``engine`` or
    ``ray-address`` requires Ray, and Ray is not installed.
    """
    if installed("ray"):
        if config.engine != "auto":
            return config.engine
        wanted = config.ray_address or config.workers > 1 or config.client_gpus != "auto"
        uses = examples * config.num_server_rounds * config.train.local_epochs
        small = config.model.name in MODEL_OF.values() and uses < _FEW_USES
        if wanted or math.isinf(uses) or not (small or cpus() < 2 * config.client_cpus):
            return "ray"
        from fairflower.training.device import choose_device  # late: it imports torch

        return "inline" if choose_device(config.train.device).type == "cpu" else "ray"
    if config.ray_address:
        require("sim", f"ray-address = {config.ray_address!r}", "ray")
    if config.engine in ("auto", "inline"):
        return "inline"
    raise NotInstalled(
        f"engine = {config.engine!r} needs ray. Run: {_REMEDY}, or set engine = 'inline', which "
        "gives exactly the same results."
    )


def engine_line(config: RunConfig) -> str:
    """Explain why a run uses the inline engine (`chosen_engine`); "" if its config sets the engine.

    If the inline engine ignores ``workers``, the line says so.
    """
    if config.engine == "inline" and config.workers:
        return f"inline, one client at a time; workers = {config.workers} has no effect"
    if config.engine != "auto":
        return ""
    if installed("ray"):
        return "inline, one client at a time, because Ray's start would take longer than it saves"
    line = (
        "inline, one client at a time, because Ray is not installed. For parallel clients: "
        f"{_REMEDY}"
    )
    return line + f"; workers = {config.workers} has no effect" * bool(config.workers)
