"""Options that several commands share, most of them run config keys under shorter names."""

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
from fairflower.errors import ConfigError

_Choice = TypeVar("_Choice", StrategyConfig, ClientConfig)

Client = Annotated[
    str | None, typer.Option(help="Local training (client.name), e.g. fedprox:mu=0.1.")
]
DataDir = Annotated[str | None, typer.Option(help="Folder of local data (data.dir).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")]
Jobs = Annotated[str, typer.Option(metavar="auto|N", help="Runs at a time; auto: one per core.")]
_Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file of run config tables.")
]
_Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Any run config key; repeatable."),
]


@dataclass(frozen=True)
class ConfigOverrides:
    """What a command line says about run configs: a file, and run config keys."""

    config: Path | None
    options: dict[str, Any]  # of those in `SHORT_NAMES`
    assigned: dict[str, Any]  # of ``--set``

    @functools.cached_property
    def file(self) -> dict[str, Any]:
        """The keys that the config file sets."""
        return run_config.read_toml(self.config) if self.config else {}

    @property
    def settings(self) -> dict[str, Any]:
        """All keys; those of ``--set`` win over options, and these over the file."""
        return self.file | self.options | self.assigned

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of methods given by ``--set``: for all methods that take them."""
        return {
            k: v
            for k, v in self.assigned.items()
            if k.startswith(("strategy.", "client.")) and not k.endswith(".name")
        }


def with_settings(*names: str, **defaults: Any) -> Callable[[Callable[..., None]], Any]:
    """Give a command these of `SHORT_NAMES`, with their ``defaults``, ``--config`` and ``--set``.

    The command gets what they say as its argument ``overrides``, in whose place ``--help`` lists
    the options in this order. Its errors are shown as `friendly_errors` shows them.
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
                option: Any = Annotated[kind | None, typer.Option(help=f"{meaning} ({key}).")]
                parameters.append(_parameter(name, option, defaults.get(name)))
        parameters += [_parameter("config", _Config), _parameter("set_", _Set)]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return call

    return decorate


def _parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def single_choice(choices: list[_Choice]) -> _Choice:
    """The only method that an option names."""
    if len(choices) > 1:
        raise ConfigError(f"--{choices[0].TABLE}: expected one; `compare` takes several.")
    return choices[0]
