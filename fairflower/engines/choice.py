"""The engine that ``engine = "auto"`` stands for, and errors about engines that lack Ray."""

from __future__ import annotations

from fairflower.config import RunConfig
from fairflower.errors import NotInstalled, installed, require

_REMEDY = 'pip install "fairflower[sim]"'


def chosen_engine(config: RunConfig) -> str:
    """Return the engine of a run: ``"ray"``, ``"flower"`` or ``"inline"``.

    ``engine = "auto"`` is Ray if it is installed, and otherwise this process. ``NotInstalled`` if
    the config asks for Ray, by ``engine`` or ``ray-address``, and Ray is not installed.
    """
    if installed("ray"):
        return "ray" if config.engine == "auto" else config.engine
    if config.ray_address:
        require("sim", f"ray-address = {config.ray_address!r}", "ray")
    if config.engine in ("auto", "inline"):
        return "inline"
    raise NotInstalled(
        f"engine = {config.engine!r} needs ray. Run: {_REMEDY}, or choose engine = 'inline', which "
        "gives the same bits."
    )


def engine_line(config: RunConfig) -> str:
    """Return a line that says why a run is in this process, "" if its config chose the engine."""
    if config.engine != "auto" or installed("ray"):
        return ""
    line = f"inline, one client at a time, as Ray is not installed. More at a time: {_REMEDY}"
    return line + f"; workers = {config.workers} has no effect" * bool(config.workers)
