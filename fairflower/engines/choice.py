"""Choice of the engine for ``engine = "auto"``, and errors if Ray is not installed."""

from __future__ import annotations

import math

from fairflower.config import RunConfig
from fairflower.config.settings import Engine
from fairflower.errors import NotInstalled, installed, require
from fairflower.numerics.threads import cpus
from fairflower.registry import MODEL_OF

_REMEDY = 'pip install "fairflower[sim]"'


#: Number of times that examples are used below which a small network is trained before Ray starts.
_FEW_USES = 20_000


def chosen_engine(config: RunConfig, examples: float = math.inf) -> Engine:
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
