"""Conversion of Python arguments to run config keys and methods."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import Any, TypedDict

from fairflower.config import ClientConfig, StrategyConfig
from fairflower.config.methods import (
    AdapterSpec,
    Choice,
    DataSpec,
    MethodSpec,
    ModelSpec,
    ParticipationSpec,
    TrackerSpec,
)
from fairflower.config.run import check_key, methods_of
from fairflower.config.settings import SHORT_NAMES
from fairflower.config.text import (
    argument_to_key,
    flatten_tables,
    is_argument,
    key_to_argument,
    read_toml,
    unknown,
)
from fairflower.errors import ConfigError, quoted
from fairflower.registry import METRICS
from fairflower.registry.named import Registry

#: Run config keys, either dotted or nested in tables, or the path of a TOML file. Values that name
#: a class or a function may also be this class or function.
SettingsLike = Mapping[str, Any] | str | PathLike[str]

#: A method: a name with arguments (``"fedheal:tau=0.4"``), a class, or a mapping with the key
#: ``name`` (a name or a class) and the arguments.
MethodLike = str | type | Mapping[str, Any]

_SPECS = (
    *(StrategyConfig, ClientConfig, DataSpec, ModelSpec),
    *(AdapterSpec, ParticipationSpec, TrackerSpec),
)

#: Key whose value names a class or a function -> the registry of names.
_REGISTRIES: dict[str, Registry] = {
    **{spec.KEY: spec.REGISTRY for spec in _SPECS},
    "evaluate.metrics": METRICS,
}


class ShortSettings(TypedDict, total=False):
    """Settings with short names; the commands have options with the same names."""

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


def settings_of(settings: SettingsLike | None, chosen: Iterable[MethodSpec] = ()) -> dict[str, Any]:
    """Return settings as flat run config keys; omit settings that are None.

    An argument of a method may be None. Raises ``ConfigError`` for an unknown key, that is, also
    for an argument that neither the methods of ``settings`` nor those of ``chosen`` have.
    """
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        try:
            flat = {
                ".".join(map(argument_to_key, key.split("."))): value
                for key, value in flatten_tables(settings).items()
            }
        except RecursionError:
            raise ConfigError(
                "settings: expected run config keys, or tables of keys; the given tables are "
                "nested too deeply."
            ) from None
    else:
        flat = read_toml(str(settings))
    given = {
        key: _plain(key, value)
        for key, value in flat.items()
        if value is not None or is_argument(key)  # arguments may be None
    }
    named = [*chosen, *methods_of(given)]
    for key in flat:
        check_key(key, named)
    return given


def settings_from_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings with short names to run config keys; omit settings that are None."""
    settings = {}
    for name, value in options.items():
        if name not in SHORT_NAMES:
            raise ConfigError(
                f"{unknown('argument', name, SHORT_NAMES)} Pass other run config keys in "
                f"settings={{...}}."
            )
        if value is not None:
            key = SHORT_NAMES[name][0]
            settings[key] = _plain(key, value)
    return settings


def method(kind: type[Choice], given: MethodLike | Choice) -> Choice:
    """Convert a method to a config.

    Raises ``ConfigError`` for several methods and for instances, because a run config needs the
    name and the arguments of a method.
    """
    if isinstance(given, kind):
        return given
    if isinstance(given, str):
        chosen = kind.parse(given)
        if len(chosen) != 1:
            raise ConfigError(f"{kind.TABLE} = {given!r}: expected a single method.")
        return chosen[0]
    if isinstance(given, type):
        return kind(name_of(kind.KEY, given))
    if isinstance(given, Mapping) and "name" in given and all(isinstance(k, str) for k in given):
        args = {
            key_to_argument(argument_to_key(k)): _plain(f"{kind.TABLE}.{k}", v)
            for k, v in given.items()
            if k != "name"
        }
        named = method(kind, given["name"])
        args = {a: None if isinstance(v, str) and v == "none" else v for a, v in args.items()}
        return kind(named.name, {**named.args, **args})
    raise ConfigError(
        f"{kind.TABLE} = {given!r}: expected a name, with or without arguments ('{kind.name}', "
        "'name:argument=value'), a class, or a dict with name and arguments. Instances are not "
        "accepted, because a run config stores names and arguments."
    )


def methods(
    kind: type[Choice], given: MethodLike | Iterable[MethodLike | Choice] | None
) -> list[Choice]:
    """Convert methods to configs; return an empty list for None."""
    if given is None:
        return []
    if isinstance(given, str):
        return kind.parse(given)
    if isinstance(given, type | Mapping | kind):
        return [method(kind, given)]
    items: list[Any]
    try:
        items = list(given)
    except TypeError:  # not a list, either
        items = [given]
    return [method(kind, item) for item in items]


def name_of(key: str, given: type | FunctionType) -> str:
    """Return the name of a class or function in run configs: registered, or ``module:Class``."""
    kind = "class" if isinstance(given, type) else "function"
    registry = _REGISTRIES.get(key)
    if registry is None:
        raise ConfigError(f"{key} = {given!r}: expected a name, a number or a word, not a {kind}.")
    for name in registry.data:
        if registry.module_of(name) in sys.modules and registry[name] is given:
            return name
    if given.__module__ == "__main__" or "<" in given.__qualname__:
        raise ConfigError(
            f"{key}: {given.__qualname__} is defined in a notebook, a script or a function, so "
            f"other processes cannot import it. Move the {kind} to a module, and import it from "
            "there."
        )
    return f"{given.__module__}:{given.__qualname__}"


def path_of(name: str, value: str | PathLike[str]) -> Path:
    """Return an argument as a path; raise ``ConfigError`` if it cannot be a path."""
    if isinstance(value, str | PathLike):
        with suppress(UnicodeEncodeError):
            if b"\0" not in os.fsencode(value):
                return Path(value)
    raise ConfigError(f"{name} = {quoted(value)}: expected a path.")


def _plain(key: str, value: Any) -> Any:
    """Convert a value to a run config scalar."""
    if value is None:
        return "none"
    if isinstance(value, type | FunctionType):
        return name_of(key, value)
    if key == "evaluate.metrics" and isinstance(value, list | tuple):
        return ",".join(str(_plain(key, metric)) for metric in value)
    if hasattr(value, "tolist"):  # of NumPy, PyTorch or pandas
        return value.tolist()
    return str(value) if isinstance(value, PathLike) else value
