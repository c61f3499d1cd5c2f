"""Options that several commands share; most are run config keys under shorter names."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from fairflower import config as run_config
from fairflower.cli.terminal import friendly_errors
from fairflower.config import ClientConfig, StrategyConfig
from fairflower.config.short_names import SHORT_NAMES
from fairflower.config.text import parse_float
from fairflower.errors import ConfigError

_Choice = TypeVar("_Choice", StrategyConfig, ClientConfig)

Client = Annotated[
    str | None,
    typer.Option(help="Method of local training (client.name), for example fedprox:mu=0.1."),
]
DataDir = Annotated[str | None, typer.Option(help="Folder of local data (data.dir).")]
Device = Annotated[str, typer.Option(help="Device: auto, cpu, cuda or cuda:N.")]
RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")]
Jobs = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help="Number of parallel runs, each in a process on the inline engine. auto: "
        "one per core if there are as many runs, no run uses a GPU and no engine is chosen; "
        "otherwise 1.",
    ),
]
#: Arguments of ``typer.Option`` for a number that must not be rounded to 0.
NUMBER: dict[str, Any] = {"parser": parse_float, "metavar": "FLOAT"}
_Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file of run config tables.")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set a run config key; repeatable."),
]


@dataclass(frozen=True)
class ConfigOverrides:
    """Run config keys from a command line: of --config, of options, and of --set."""

    config: Path | None
    options: dict[str, Any]  # by the options of `SHORT_NAMES`
    assigned: dict[str, Any]  # by ``--set``

    @functools.cached_property
    def file(self) -> dict[str, Any]:
        """Return the keys that the config file sets."""
        return run_config.read_toml(self.config) if self.config else {}

    @property
    def settings(self) -> dict[str, Any]:
        """Return all keys; ``--set`` overrides options, and options override the file."""
        return self.file | self.options | self.assigned

    @property
    def shared(self) -> dict[str, Any]:
        """Return the methods' arguments of ``--set``, which apply to every method that has them."""
        return {
            k: v
            for k, v in self.assigned.items()
            if k.startswith(("strategy.", "client.")) and not k.endswith(".name")
        }


def with_settings(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds options of `SHORT_NAMES`, ``--config`` and ``--set``.

    The command receives their values as its argument ``overrides``, in whose place ``--help`` lists
    the options. `friendly_errors` shows its errors.

    Parameters
    ----------
    *names : str
        Options, in this order.
    **defaults
        Default values of options; otherwise None.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        @friendly_errors()
        def call(config: Path | None, set_: list[str] | None, **params: Any) -> None:
            values = {SHORT_NAMES[name][0]: params.pop(name) for name in names}
            options = {key: value for key, value in values.items() if value is not None}
            assigned = run_config.parse_assignments(set_ or [])
            command(overrides=ConfigOverrides(config, options, assigned), **params)

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            if parameter.name != "overrides":
                parameters.append(parameter)
                continue
            for name in names:
                key, kind, meaning = SHORT_NAMES[name]
                number: dict[str, Any] = NUMBER if kind is float else {}
                option: Any = Annotated[
                    kind | None, typer.Option(help=f"{meaning} ({key}).", **number)
                ]
                parameters.append(_parameter(name, option, defaults.get(name)))
        parameters += [_parameter("config", _Config), _parameter("set_", _Set)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def single_choice(choices: list[_Choice]) -> _Choice:
    """Return the single method that an option names; ``ConfigError`` for several."""
    if len(choices) > 1:
        raise ConfigError(
            f"--{choices[0].TABLE}: expected a single method; `compare` takes several."
        )
    return choices[0]
