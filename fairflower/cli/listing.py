"""``fairflower list``: list methods, data sets, models and settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.table import Table

from fairflower import config as run_config
from fairflower.arguments import argument_specs
from fairflower.cli.terminal import console, friendly_errors, text_table
from fairflower.errors import ConfigError, require
from fairflower.registry.named import distribution_of

_Methods = type[run_config.ClientConfig | run_config.StrategyConfig]
_Described = type[run_config.DataSpec | run_config.ModelSpec]


@friendly_errors(extra="")
def list_(
    what: Annotated[
        str,
        typer.Argument(help="What to list: strategies, clients, data, models, settings or all."),
    ] = "all",
) -> None:
    """List strategies, clients, data sets, models or settings, with their papers and arguments.

    Arguments are shown with their defaults and, in parentheses, the search range of `fairflower
    tune` and other accepted words. `all` does not include the settings.
    """
    tables = {
        "strategies": lambda: _methods("Strategies", run_config.StrategyConfig),
        "clients": lambda: _methods("Clients", run_config.ClientConfig),
        "data": lambda: _described("Data sets", run_config.DataSpec),
        "models": lambda: _described("Models", run_config.ModelSpec),
        "settings": _settings,
    }
    if what not in {"all", *tables}:
        raise ConfigError(run_config.unknown("list", what, {"all", *tables}))
    if what not in ("strategies", "data", "models"):
        require("train", f"`fairflower list {what}`")
    for name, made in tables.items():
        if what == name or (what == "all" and name != "settings"):
            console.print(made())


def _methods(title: str, kind: _Methods) -> Table:
    rows = [
        (name, _summary(method), method.paper, _arguments(method))
        for name, method in kind.REGISTRY.items()
    ]
    rows += _offered(kind)
    columns = ("name", "description", "paper", f"arguments ({kind.TABLE}.*)")
    return text_table(f"{title} ({kind.TABLE}.name)", columns, rows)


def _described(title: str, kind: _Described) -> Table:
    rows = [(name, line) for name, line in kind.REGISTRY.lines.items()]
    for name, line, package, arguments in _offered(kind):
        rows.append((name, f"{line} (from {package}; arguments: {arguments})"))
    return text_table(f"{title} ({kind.TABLE}.name)", ("name", "description"), rows)


def _offered(kind: _Methods | _Described) -> Iterator[tuple[str, str, str, str]]:
    """Yield the name, summary (or error), package and arguments of other packages' components."""
    for name, offer in kind.REGISTRY.offers().items():
        try:
            component = kind(name).factory
            yield name, _summary(component), distribution_of(offer), _arguments(component)
        except ConfigError as error:
            yield name, str(error), distribution_of(offer), ""


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").strip().partition("\n")[0]


def _arguments(factory: Any) -> str:
    shown = []
    for name, spec in argument_specs(factory).items():
        words = ", ".join(word for word in spec.words if word != spec.default)
        more = [str(spec.search)] * bool(spec.search) + [f"or {words}"] * bool(words)
        text = run_config.argument_to_key(name)
        if spec.default is not inspect.Parameter.empty:
            text += "=none" if spec.default is None else f"={run_config.shown(spec.default)}"
        shown.append(text + f" ({', '.join(more)})" * bool(more))
    return ", ".join(shown) or "none"


def _settings() -> Table:
    texts = run_config.key_help()
    rows = (
        (key, repr(default) if isinstance(default, str) else str(default).lower(), texts[key])
        for key, default in run_config.keys().items()
    )
    return text_table("Settings (run config keys)", ("key", "default", "meaning"), rows)
