"""Functions that carry out a run or a comparison, and read run folders.

Their arguments are converted to run config keys and methods.
"""

from __future__ import annotations

import glob
import warnings
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
from rich.console import Console

from fairflower.api.results import Result, Results
from fairflower.config import ClientConfig, StrategyConfig
from fairflower.config.methods import PARTS, Choice
from fairflower.config.run import check_keys, check_methods, refuse_keys
from fairflower.config.settings import SHORT_NAMES
from fairflower.config.text import (
    argument_to_key,
    flatten_tables,
    is_argument,
    read_toml,
    unknown,
)
from fairflower.errors import ConfigError, RunFolderError, quoted
from fairflower.paths import new_folder, path_of, run_folders
from fairflower.plans.execution import announce, execute, parse_jobs, run_comparison
from fairflower.plans.plan import (
    Plan,
    domains_to_hold_out,
    replicates,
    settings_of_each,
    single_run_config,
)
from fairflower.registry import METRICS
from fairflower.report import Run, read_run, read_runs
from fairflower.server.checkpoint import evaluation_config, resumed_config

if TYPE_CHECKING:  # Flower is slow to import, and errors in arguments come first
    from fairflower.server.progress import OnRound

#: Run config keys, either dotted or nested in tables, or the path of a TOML file. Values that name
#: a class or a function may also be this class or function.
SettingsLike = Mapping[str, Any] | str | PathLike[str]

#: A method: a name with arguments (``"fedheal:tau=0.4"``), a class, or a mapping with the key
#: ``name`` (a name or a class) and the arguments.
MethodLike = str | type | Mapping[str, Any]

#: Key whose value names a class or a function -> the registry of names.
_REGISTRIES = {kind.KEY: kind.REGISTRY for kind in PARTS.values()} | {"evaluate.metrics": METRICS}


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


def run(
    settings: SettingsLike | None = None,
    *,
    strategy: MethodLike | None = None,
    client: MethodLike | None = None,
    seed: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    resume: str | PathLike[str] | None = None,
    on_round: OnRound | None = None,
    progress: bool = True,
    **options: Unpack[ShortSettings],
) -> Result:
    """Train a federation, like ``fairflower run``.

    Parameters
    ----------
    settings : mapping or path, optional
        Run config keys (``{"train.lr": 0.01}`` or ``{"train": {"lr": 0.01}}``), or the path of a
        TOML file. ``fairflower list settings`` shows all keys. The other arguments override these
        settings.
    strategy, client : str, class or mapping, optional
        Strategy and client: ``"fedheal:tau=0.4"``, ``FedHEAL``, or
        ``{"name": "fedheal", "tau": 0.4}``. Default: the methods of ``settings``.
    seed : int, optional
        Random seed for everything except the partition. Default: ``seed`` in ``settings``,
        otherwise 0.
    output_dir : path, optional
        Folder in which the run folder is created. Default: ``~/.fairflower/runs``.
    resume : path, optional
        Run folder of a stopped or killed run to resume. Only ``rounds`` and execution settings such
        as ``workers`` may be changed.
    on_round : callable, optional
        Called after every training round with its number and a dict of metrics: ``train_loss``,
        ``seconds`` and, if the model was tested in this round, ``loss/<domain>``,
        ``accuracy/<domain>``, ``accuracy/AVG``, ``accuracy/MIN`` and ``accuracy/STD`` (with ddof
        1). Accuracies are between 0 and 1. If other than classes is learnt, the names are those of
        its scores, with MAX instead of MIN if lower values are better. If the callable returns True
        or raises ``StopRun``, the run stops and can be resumed.
    progress : bool
        Whether to print a line after every round.
    **options
        Settings with short names; see `ShortSettings`.

    Returns
    -------
    Result
        The run, read from its folder.

    Raises
    ------
    ConfigError, DataError, RoundFailed
        If the run cannot start or continue; the message explains what to do.
    KeyboardInterrupt
        After Ctrl-C or a notebook's stop button; the run folder can be resumed.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> small = {"data.clients-per-domain": 1, "train.local-epochs": 1, "engine": "inline"}
    >>> result = run(small, strategy="uniform", rounds=1, output_dir=mkdtemp(), progress=False)
    >>> result.status, sorted(result.accuracy)
    ('completed', ['inverted', 'plain', 'printed', 'rotated'])
    """
    if on_round is not None and not callable(on_round):
        raise ConfigError(f"on_round = {quoted(on_round)}: expected a function.")
    overrides = settings_from_options({**options, "seed": seed, "output_dir": output_dir})
    if resume is None:
        given = {StrategyConfig: strategy, ClientConfig: client}
        chosen = [method(kind, value) for kind, value in given.items() if value is not None]
        config = single_run_config(settings_of(settings), chosen, overrides)
    else:
        beside = {"settings": settings, "strategy": strategy, "client": client}
        config = resumed_config(path_of("resume", resume), overrides, beside)
    console = Console(quiet=not progress)
    plan = Plan([config])
    announce(plan, console)
    (folder,) = execute(plan, console, on_round=on_round)
    return Result(read_run(folder))


def evaluate(
    trained: str | PathLike[str],
    settings: SettingsLike | None = None,
    *,
    seed: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    progress: bool = True,
    **options: Unpack[ShortSettings],
) -> Result:
    """Test a model without training, like ``fairflower evaluate``.

    Parameters
    ----------
    trained : path
        Run folder, for its last model, or a file: ``.safetensors``, such as the run folder's
        ``best.safetensors``, or an exported ``.onnx`` or ``.pt`` (TorchScript).
    settings, seed, output_dir, progress, **options
        As in `run`. The defaults are the settings of the model's run folder; other ``data`` or
        another ``model`` (a network's name) replace all settings of the run's.

    Returns
    -------
    Result
        A run without training, whose scores are those of the model.

    Raises
    ------
    ConfigError, DataError, RunFolderError
        If the model cannot be tested on these data; the message explains why.
    """
    overrides = settings_from_options({**options, "seed": seed, "output_dir": output_dir})
    config = evaluation_config(path_of("trained", trained), settings_of(settings) | overrides)
    (folder,) = execute(Plan([config]), Console(quiet=not progress))
    return Result(read_run(folder))


def compare(
    settings: SettingsLike | None = None,
    *,
    strategies: MethodLike | Iterable[MethodLike] | None = None,
    clients: MethodLike | Iterable[MethodLike] | None = None,
    references: Iterable[str] | str | None = None,
    federations: Iterable[int] | str | None = None,
    seeds: Iterable[int] | str | None = None,
    leave_one_domain_out: bool = False,
    jobs: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    progress: bool = True,
    **options: Unpack[ShortSettings],
) -> Results:
    """Train all strategies and clients on all federations, like ``fairflower compare``.

    Parameters
    ----------
    settings : mapping or path, optional
        Settings of all runs, as in `run`. Arguments ``strategy.*`` apply only to the strategy that
        ``settings`` names, or to all strategies that have them if it names none; likewise
        ``client.*``.
    strategies : str, class, mapping or an iterable of these, optional
        Strategies to compare; `uniform` is always added. Default: FedAvg and the strategy
        in ``settings``.
    clients : str, class, mapping or an iterable of these, optional
        Ways to train; each is combined with every strategy. Default: the client in
        ``settings``.
    references : str or iterable of str, optional
        ``"alone"`` (each client trains on its own examples only) and ``"pooled"`` (one model on all
        clients' examples together), as ``"alone,pooled"`` or a list. They train plainly, whatever
        the clients are.
    federations : iterable of int, or str, optional
        Federations, as numbers: ``range(20)``, ``[0, 7]`` or ``"0-19"``. Each number is the random
        seed for the partition, the clients' data and the run. Default: ``"0-9"``, unless ``seeds``
        is given.
    seeds : iterable of int, or str, optional
        Random seeds for repeated runs on a single federation, which ``data.seed`` defines. The
        verdicts then hold only for this federation.
    leave_one_domain_out : bool
        Whether to repeat all runs with each domain held out in turn (``data.held-out``).
    jobs : int, optional
        Number of runs in parallel, each in its own process with the inline engine. Default: as many
        as the CPUs and the GPU memory allow. The default is 1 if Ray is installed and there are
        fewer runs than that, if ``ray-address`` or ``workers`` is set, if ``engine`` is not
        ``auto``, or if ``client-gpus`` is a number above 0.
    output_dir : path, optional
        Folder for the comparison. Default: a new folder in ``~/.fairflower/comparisons``. If it is
        the folder of an earlier comparison, completed runs are kept and unfinished runs are
        resumed.
    progress : bool
        Whether to print the progress of runs and rounds.
    **options
        Settings with short names; see `ShortSettings`.

    Returns
    -------
    Results
        All runs in the folder.

    Raises
    ------
    ConfigError, DataError, RoundFailed
        If a run cannot start or continue; the message explains what to do. If a run fails, the
        exception is raised after all other runs have ended.
    """
    parallel_runs = parse_jobs(jobs)
    if not isinstance(leave_one_domain_out, bool | np.bool_):
        raise ConfigError(
            f"leave_one_domain_out = {quoted(leave_one_domain_out)}: expected True or False."
        )
    numbers, federated = replicates(federations, seeds)
    strategy_configs = methods(StrategyConfig, strategies)
    client_configs = methods(ClientConfig, clients)
    given = settings_of(settings)
    named = settings_from_options(options)
    # A file may also be used for single runs.
    of_all = {**given, **named} if isinstance(settings, Mapping) else named
    refuse_keys(of_all, settings_of_each(federated), "a comparison")
    folder = new_folder("comparisons", output_dir)
    flat = given | named
    flat["output-dir"] = str(folder / "runs")
    held_out = domains_to_hold_out(flat) if leave_one_domain_out else []
    rows = strategy_configs, numbers, None, client_configs
    plan = Plan.grid(flat, *rows, federated, held_out, references)
    run_comparison(plan, folder, Console(quiet=not progress), parallel_runs)
    return read(folder / "runs")


def read(*paths: str | PathLike[str]) -> Results:
    """Read runs from run folders, folders of run folders, summaries (.csv) or glob patterns.

        ff.read("runs/*"), ff.read("grid", "experiments/fedgcr-table5-cpu.csv")

    Each run is read only once. Files that match a pattern but are not runs are skipped. A warning
    names each run that cannot be read. Raises ``RunFolderError`` if no run can be read, and
    ``ConfigError`` if a path contains no run, or a study of ``fairflower tune``, whose trials are
    no test runs.
    """
    runs: list[Run] = []
    for place in dict.fromkeys(place for path in paths for place in _places(path)):
        try:
            runs += read_runs(place)
        except RunFolderError as error:
            warnings.warn(f"Skipped: {error}", stacklevel=2)
    if not runs:
        raise RunFolderError(
            "There are no readable runs in "
            f"{', '.join(map(str, paths)) or 'an empty list of paths'}."
        )
    return Results(runs)


def _places(pattern: str | PathLike[str]) -> list[Path]:
    path = path_of("paths", pattern).expanduser()
    if path.exists() or not glob.has_magic(str(pattern)):
        return run_folders(path)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    return run_folders(
        *(m for m in matches if m.suffix == ".csv" or (m.is_dir() and any(m.rglob("run.json"))))
    )


def settings_of(settings: SettingsLike | None) -> dict[str, Any]:
    """Return settings as flat run config keys; omit settings that are None.

    An argument of a method may be None. Raises ``ConfigError`` for an unknown key, and for an
    argument that a method named in ``settings`` does not have.
    """
    if settings is None:
        return {}
    if isinstance(settings, Mapping):
        flat = {
            ".".join(map(argument_to_key, key.split("."))): value
            for key, value in flatten_tables(settings).items()
        }
    else:
        flat = read_toml(str(settings))
    check_keys(flat)
    given = {
        key: _plain(key, value)
        for key, value in flat.items()
        if value is not None or is_argument(key)  # arguments may be None
    }
    check_methods(given)
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
            settings[SHORT_NAMES[name]] = _plain(SHORT_NAMES[name], value)
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
        args = {f"{kind.TABLE}.{argument_to_key(k)}": v for k, v in given.items() if k != "name"}
        named = method(kind, given["name"]).to_flat()
        return kind.of(named | {key: _plain(key, value) for key, value in args.items()})
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
    single = isinstance(given, Mapping) or not isinstance(given, Iterable)
    items: Any = [given] if single else given
    chosen = [method(kind, item) for item in items]
    if not chosen:
        raise ConfigError(
            f"The list of {kind.TABLE} names is empty. Name at least one, or omit it."
        )
    return chosen


def name_of(key: str, given: type | FunctionType) -> str:
    """Return the name of a class or function in run configs: registered, or ``module:Class``."""
    kind = "class" if isinstance(given, type) else "function"
    if (registry := _REGISTRIES.get(key)) is None:
        raise ConfigError(f"{key} = {given!r}: expected a name, a number or a word, not a {kind}.")
    place = f"{given.__module__}:{given.__qualname__}"
    if name := next((name for name in registry.data if registry.place(name) == place), ""):
        return name
    if given.__module__ == "__main__" or "<" in given.__qualname__:
        raise ConfigError(
            f"{key}: {given.__qualname__} is defined in a notebook, a script or a function, so "
            f"other processes cannot import it. Move the {kind} to a module, and import it from "
            "there."
        )
    return place


def _plain(key: str, value: Any) -> Any:
    if value is None:
        return "none"
    if isinstance(value, type | FunctionType):
        return name_of(key, value)
    if key == "evaluate.metrics" and isinstance(value, list | tuple):
        return ",".join(str(_plain(key, metric)) for metric in value)
    if hasattr(value, "tolist"):  # of NumPy, PyTorch or pandas
        return value.tolist()
    return str(value) if isinstance(value, PathLike) else value
