"""Choice of the engine for ``engine = "auto"``, and errors if Ray is not installed."""

from __future__ import annotations

from fairflower.config import RunConfig
from fairflower.errors import NotInstalled, installed, require

_REMEDY = 'pip install "fairflower[sim]"'


def chosen_engine(config: RunConfig) -> str:
    """Return the engine of a run: ``"ray"``, ``"flower"`` or ``"inline"``.

    ``engine = "auto"`` means Ray if it is installed, and otherwise this process. Raises
    ``NotInstalled`` if ``engine`` or ``ray-address`` requires Ray, and Ray is not installed.
    """
    if installed("ray"):
        return "ray" if config.engine == "auto" else config.engine
    if config.ray_address:
        require("sim", f"ray-address = {config.ray_address!r}", "ray")
    if config.engine in ("auto", "inline"):
        return "inline"
    raise NotInstalled(
        f"engine = {config.engine!r} needs ray. Run: {_REMEDY}, or set engine = 'inline', which "
        "gives exactly the same results."
    )


def engine_line(config: RunConfig) -> str:
    """Explain why a run uses the inline engine; return "" if its config sets the engine.

    If the inline engine ignores ``workers``, the line says so.
    """
    if config.engine == "inline" and config.workers:
        return f"inline, one client at a time; workers = {config.workers} has no effect"
    if config.engine != "auto" or installed("ray"):
        return ""
    line = (
        "inline, one client at a time, because Ray is not installed. For parallel clients: "
        f"{_REMEDY}"
    )
    return line + f"; workers = {config.workers} has no effect" * bool(config.workers)
