"""Keys that tell whether runs have the same method, or the same data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fairflower.config.methods import DEFAULT
from fairflower.config.run import RunConfig, execution_keys, methods_of
from fairflower.config.text import METHOD_TABLES, argument_to_key, names_in, shown
from fairflower.errors import quoted

#: Tables in which the methods of a comparison may differ; their value `default` means missing.
COMPARED_TABLES = (*METHOD_TABLES, "bound.")


def tested_split(config: Mapping[str, Any]) -> str:
    """Return the examples on which a run is judged: ``test`` or, without tests, ``validation``."""
    return "test" if config.get("evaluate.test", True) else "validation"


def method_key(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the settings that identify a run's method: all but seed and execution settings.

    Arguments that equal the method's defaults are left out.
    """
    left = {"seed", *execution_keys()}
    for choice in methods_of(config):
        defaults = choice.defaults() if choice.args else {}
        given = choice.args.items()
        left |= {
            f"{choice.TABLE}.{argument_to_key(a)}"
            for a, v in given
            if v == defaults.get(a, DEFAULT)
        }
    return frozenset(
        (key, shown(value))
        for key, value in config.items()
        if key not in left and not (key.startswith(COMPARED_TABLES) and value == DEFAULT)
    )


def data_key(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the settings that determine the clients' data: ``data.*`` but execution settings."""
    left = execution_keys()
    return frozenset(
        (key, shown(value))
        for key, value in config.items()
        if key.startswith("data.") and key not in left
    )


def tuned_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the settings and arguments that were tuned for a run's method (``tuned``)."""
    return names_in(str(config.get("tuned", "")))


def changed_settings(
    begun: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> str:
    """Return in words which settings differ, or ""; a setting that is missing has its default."""
    begun, now = ({**RunConfig().concise(), **settings} for settings in (begun, now))
    return "; ".join(
        f"{key} was {quoted(begun.get(key, DEFAULT))} and is {quoted(now.get(key, DEFAULT))}"
        for key in dict.fromkeys([*begun, *now])
        if key not in may_change and now.get(key, DEFAULT) != begun.get(key, DEFAULT)
    )
