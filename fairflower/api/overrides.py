"""Converts arguments of Python functions to run config keys and methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from typing import Any, TypedDict, TypeVar

import numpy as np

from fairflower.config import (
    ClientConfig,
    StrategyConfig,
    argument_to_key,
    check_key,
    flatten_tables,
    key_to_argument,
    methods_of,
    read_toml,
    unknown,
)
from fairflower.config.short_names import SHORT_NAMES
from fairflower.errors import ConfigError
from fairflower.registry import CLIENTS, DATA_SETS, MODELS, STRATEGIES

#: Run config keys, dotted or in tables, or a TOML file of them.
SettingsLike = Mapping[str, Any] | str | PathLike[str]

#: A method: its name with arguments (``"fedheal:tau=0.4"``), a class, or a mapping with ``name``
#: (a name or a class) and arguments.
MethodLike = str | type | Mapping[str, Any]

_Choice = TypeVar("_Choice", StrategyConfig, ClientConfig)

_REGISTRIES = {"strategy": STRATEGIES, "client": CLIENTS, "data": DATA_SETS, "model": MODELS}


class ShortSettings(TypedDict, total=False):
    """Settings under shorter names, which are also options of the commands."""

    data: str | type
    data_dir: str | PathLike[str]
    model: str | type
    rounds: int
    fraction_train: float
    epochs: int
    lr: float
    engine: str
    ray_address: str
    workers: int


def settings_of(settings: SettingsLike | None) -> dict[str, Any]:
    """Return run config keys with their values; ``ConfigError`` for an unknown key."""
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        try:
            flat = {
                argument_to_key(key): _plain(value)
                for key, value in flatten_tables(settings).items()
            }
        except RecursionError:
            raise ConfigError(
                "settings: expected keys or tables of keys, got deeper nesting."
            ) from None
    else:
        flat = read_toml(str(settings))
    for table in _REGISTRIES:
        if isinstance(flat.get(f"{table}.name"), type):
            flat[f"{table}.name"] = name_of(table, flat[f"{table}.name"])
    named = methods_of(flat)
    for key in flat:
        check_key(key, named)
    return flat


def settings_from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return run config keys for settings under shorter names; settings of None are left out."""
    settings = {}
    for name, value in options.items():
        if name not in SHORT_NAMES:
            raise ConfigError(
                f"{unknown('argument', name, SHORT_NAMES)} Other run config keys go into "
                "settings={...}."
            )
        if value is not None:
            key = SHORT_NAMES[name][0]
            table = key.partition(".")[0]
            settings[key] = name_of(table, value) if isinstance(value, type) else _plain(value)
    return settings


def method(kind: type[_Choice], given: MethodLike | _Choice) -> _Choice:
    """Return a method as a config.

    ``ConfigError`` for several methods, and for an object: a run config needs a method's name and
    arguments, which an object does not have.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, str):
        chosen = kind.parse(given)
        if len(chosen) != 1:
            raise ConfigError(f"{kind.TABLE} = {given!r}: expected a single method.")
        return chosen[0]
    if isinstance(given, type):
        return kind(name_of(kind.TABLE, given))
    if isinstance(given, Mapping) and "name" in given:
        args = {
            key_to_argument(argument_to_key(k)): _plain(v) for k, v in given.items() if k != "name"
        }
        named = method(kind, given["name"])
        args = {name: None if value == "none" else value for name, value in args.items()}
        return kind(named.name, {**named.args, **args})
    raise ConfigError(
        f"{kind.TABLE} = {given!r}: expected a name with arguments ('{kind.name}', "
        "'name:argument=value'), a class, or a dict of its name and arguments. Objects are "
        "refused, because a run config has names and arguments."
    )


def methods(
    kind: type[_Choice], given: MethodLike | Iterable[MethodLike | _Choice] | None
) -> list[_Choice]:
    """Return the given methods as configs; an empty list for None."""
    if given is None:
        return []
    if isinstance(given, str):
        return kind.parse(given)
    if isinstance(given, type | Mapping | kind):
        return [method(kind, given)]
    return [method(kind, item) for item in given]


def name_of(table: str, given: type) -> str:
    """Return the name of a class in run configs: its registered name, or ``module:Class``."""
    registry = _REGISTRIES.get(table)
    if registry is None:
        raise ConfigError(f"{table} = {given!r}: expected a name, a number or a word, not a class.")
    for name in registry.data:
        if registry[name] is given:
            return name
    if given.__module__ == "__main__":
        raise ConfigError(
            f"{table}: {given.__qualname__} is defined in a notebook or script, from which the "
            "processes that train cannot import it. Move it into a module, and import that."
        )
    return f"{given.__module__}:{given.__qualname__}"


def _plain(value: Any) -> Any:
    """Return a value as a run config scalar."""
    if value is None:
        return "none"
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PathLike) else value
