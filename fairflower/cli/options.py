"""Options shared by several commands; most are short names of run config keys."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fairflower.cli.terminal import friendly_errors
from fairflower.config.methods import Choice
from fairflower.config.run import check_keys, check_methods, check_values, schema
from fairflower.config.settings import SHORT_NAMES
from fairflower.config.text import is_argument, parse_assignments, parse_float, read_toml
from fairflower.errors import ConfigError

Client = Annotated[
    str | None, typer.Option(help="How clients train (client.name), for example fedprox:mu=0.1.")
]
Clients = Annotated[
    str | None,
    typer.Option(
        help="Comma-separated clients (ways to train), each combined with every strategy, for "
        "example sgd,fedprox:mu=0.1. Default: the value of client.name."
    ),
]
References = Annotated[
    str | None,
    typer.Option(
        help="What the methods are compared with, besides each other: alone (each client trains on "
        "its own examples only), pooled (one model on all clients' examples together), or both. "
        "They train plainly, whatever --clients are."
    ),
]
Domains = Annotated[
    list[str] | None,
    typer.Option(
        "--site",
        metavar="DOMAIN=FOLDER",
        help="Domain and data folder of a site. Repeat the option for each site.",
    ),
]
NumSites = Annotated[
    int | None,
    typer.Option("--sites", min=1, help="Number of sites. Default: one per client."),
]
OutputDir = Annotated[
    Path | None, typer.Option(help="Folder for all files of this command. Default: a new folder.")
]
Best = Annotated[
    bool, typer.Option("--best", help="Use the model of the best round (checkpoint.best).")
]
DataDir = Annotated[str | None, typer.Option(help="Folder of local data (data.dir).")]
Device = Annotated[str, typer.Option(help="Device to use: auto, cpu, cuda or cuda:N.")]
RunFolders = Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")]
_JOBS = (
    "Number of runs in parallel, each in its own process with the inline engine. auto means as "
    "many as the CPUs and the GPU memory allow."
)
#: For commands whose runs always use the inline engine, and for others.
InlineJobs = Annotated[str, typer.Option(metavar="auto|N", help=_JOBS)]
Jobs = Annotated[
    str,
    typer.Option(
        metavar="auto|N",
        help=f"{_JOBS} It means 1 if Ray is installed and there are fewer runs than that, if "
        "ray-address or workers is set, if engine is not auto, or if client-gpus is a number above "
        "0.",
    ),
]
#: Arguments of ``typer.Option`` for floats; numbers that would be rounded to 0 are rejected.
NUMBER: dict[str, Any] = {"parser": parse_float, "metavar": "FLOAT"}
_Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file with a run config.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", metavar="KEY=VALUE", help="Set a run config key. May be repeated."),
]


def output(help_: str) -> Any:
    """Return the option ``--out``."""
    return typer.Option("--out", "-o", help=help_)


@dataclass(frozen=True)
class ConfigOverrides:
    """Run config keys from a command line: from --config, from other options, and from --set."""

    config: Path | None
    options: dict[str, Any]  # from the options in `SHORT_NAMES`
    assigned: dict[str, Any]  # from ``--set``

    @functools.cached_property
    def file(self) -> dict[str, Any]:
        """The keys in the config file; errors in its keys and values name the file."""
        if self.config is None:
            return {}
        flat = read_toml(self.config)
        try:
            check_values(flat)
            check_keys(flat)
            check_methods(flat)
        except ConfigError as error:
            raise ConfigError(f"{self.config}: {error}") from error
        return flat

    @property
    def settings(self) -> dict[str, Any]:
        """All keys; ``--set`` overrides options, and options override the file."""
        return self.file | self.options | self.assigned

    @property
    def shared(self) -> dict[str, Any]:
        """Arguments of methods from ``--set``; they apply to every method that has them."""
        return {key: value for key, value in self.assigned.items() if is_argument(key)}


def with_settings(*names: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds options in `SHORT_NAMES`, ``--config`` and ``--set``.

    The command receives the values in its argument ``overrides``; ``--help`` lists the options in
    the order of ``names``, at the position of this argument. Errors are printed by
    `friendly_errors`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        @friendly_errors()
        def call(config: Path | None, set_: list[str] | None, **params: Any) -> None:
            values = {SHORT_NAMES[name]: params.pop(name) for name in names}
            options = {key: value for key, value in values.items() if value is not None}
            assigned = parse_assignments(set_ or [], "--set")
            command(overrides=ConfigOverrides(config, options, assigned), **params)

        parameters: dict[str, inspect.Parameter] = {}
        for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
            added = {n: _setting(n) for n in names} if name == "overrides" else {name: parameter}
            parameters |= added
        parameters |= {"config": _optional("config", _Config), "set_": _optional("set_", Set)}
        call.__signature__ = inspect.Signature([*parameters.values()])  # type: ignore[attr-defined]
        return call

    return decorate


def _setting(name: str) -> inspect.Parameter:
    key, spec = SHORT_NAMES[name], schema()[SHORT_NAMES[name]]
    kind, number = (int, {}) if spec.whole else (float, NUMBER) if spec.number else (str, {})
    option = typer.Option(help=f"{spec.help} Sets {key}.", **number)
    return _optional(name, Annotated[kind | None, option])


def _optional(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def methods_named(
    overrides: ConfigOverrides, kind: type[Choice], option: str, given: str | None
) -> list[Choice]:
    """Return the methods that an option names; return an empty list if it is not given.

    Raises ``ConfigError`` if ``--set`` names a strategy or a client, too, or if the option is
    ``--strategy`` or ``--client`` and names several.
    """
    if given is None:
        return []
    if kind.KEY in overrides.assigned:
        raise ConfigError(f"--set {kind.KEY} and {option} both name a {kind.TABLE}. Remove one.")
    named = kind.parse(given)
    if option == f"--{kind.TABLE}" and len(named) > 1:
        raise ConfigError(
            f"{option}: expected a single method. To train several methods, use "
            "`fairflower compare`."
        )
    return named
