"""Runs made, and read back."""

from __future__ import annotations

import glob
import warnings
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from rich.console import Console

from fairflower.api.overrides import (
    MethodLike,
    SettingsLike,
    ShortSettings,
    method,
    methods,
    settings_from_options,
    settings_of,
)
from fairflower.api.results import Result, Results
from fairflower.config import ClientConfig, StrategyConfig
from fairflower.errors import ConfigError, RunFolderError
from fairflower.paths import new_folder, run_folders
from fairflower.plans.execution import announce, execute, locked_folder, remaining_plan
from fairflower.plans.plan import FEDERATIONS, Plan, parse_seeds, resolve_jobs, single_run_config
from fairflower.report import Run, read_run, read_runs
from fairflower.server.checkpoint import resumed_config

if TYPE_CHECKING:  # Flower is slow to import, and what is wrong is said before
    from fairflower.server.callbacks import OnRound


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
    """Train one federation, as ``fairflower run`` does.

    Parameters
    ----------
    settings : mapping or path, optional
        Run config keys (``{"train.lr": 0.01}`` or ``{"train": {"lr": 0.01}}``), or a TOML file
        of them; ``fairflower list settings`` shows all. All other arguments win over them.
    strategy, client : str, class or mapping, optional
        Aggregation rule and local training: ``"fedheal:tau=0.4"``, ``FedHEAL``, or
        ``{"name": "fedheal", "tau": 0.4}``. By default those of ``settings``.
    seed : int, optional
        Of everything but the partition.
    output_dir : path, optional
        Where the run folder is made; default: ``~/.fairflower/runs``.
    resume : path, optional
        Folder of a run that was stopped or killed, to go on with. Only how it is executed may
        be given beside, and ``rounds``.
    on_round : callable, optional
        Called after every round of training with its number and its figures, a dict:
        ``accuracy/<domain>``, ``accuracy/AVG``, ``accuracy/MIN``, ``accuracy/STD`` (fractions)
        and ``loss/<domain>``, where it was tested; ``train_loss``; ``seconds``. Where it returns
        True or raises ``StopRun``, the run is stopped there, and can be resumed.
    progress : bool
        Whether to show rounds as they are made.
    **options
        Settings under shorter names: `ShortSettings`.

    Raises
    ------
    ConfigError, DataError, RoundFailed
        What cannot be run, with the remedy.
    KeyboardInterrupt
        If it was stopped by Ctrl-C or a notebook's stop button; the run folder can be resumed.
    """
    given = settings_from_options({**options, "seed": seed, "output_dir": output_dir})
    if resume is None:
        rule = None if strategy is None else method(StrategyConfig, strategy)
        training = None if client is None else method(ClientConfig, client)
        config = single_run_config(settings_of(settings), rule, training, given)
    else:
        for name, value in {"settings": settings, "strategy": strategy, "client": client}.items():
            if value is not None:
                raise ConfigError(f"{name}: a run that is resumed keeps its own settings.")
        config = resumed_config(Path(resume), given)
    console = Console(quiet=not progress)
    plan = Plan([config])
    announce(plan, console)
    (folder,) = execute(plan, console, on_round=on_round)
    return Result(read_run(folder))


def compare(
    settings: SettingsLike | None = None,
    *,
    strategies: MethodLike | Iterable[MethodLike] | None = None,
    clients: MethodLike | Iterable[MethodLike] | None = None,
    federations: Iterable[int] | str | None = None,
    seeds: Iterable[int] | str | None = None,
    jobs: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    progress: bool = True,
    **options: Unpack[ShortSettings],
) -> Results:
    """Train every client with every strategy on every federation, as ``fairflower compare`` does.

    Parameters
    ----------
    settings : mapping or path, optional
        As of `run`, for all runs.
    strategies : str, class, mapping or several of them, optional
        Aggregation rules; uniform averaging is always added. Default: FedAvg and that of
        ``settings``.
    clients : likewise, optional
        Methods of local training. Default: that of ``settings``.
    federations : iterable of int, or str, optional
        ``range(20)``, ``[0, 7]``, ``"0-19"``: each number draws who holds what and the run's seed.
        Default: ten, without ``seeds``.
    seeds : likewise, optional
        Seeds on one federation, that of ``data.seed``, of which alone the verdicts are then.
    jobs : int, optional
        Runs at a time, each in its own process on the inline engine. Default: one per core if
        there are as many runs, none uses a GPU and neither ``engine``, ``ray_address`` nor
        ``workers`` is given; on a cluster 1.
    output_dir : path, optional
        The comparison's folder; default: a new one in ``~/.fairflower/comparisons``. In one that
        is used again, runs that are completed are not made again, and others go on.
    progress : bool
        Whether to show runs and rounds as they are made.
    **options
        Settings under shorter names: `ShortSettings`.

    Returns
    -------
    Results
        Of all runs in the folder.

    Raises
    ------
    ConfigError, DataError, RoundFailed
        What cannot be run, with the remedy; of a run that fails, when the others have been made.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: expected a whole number from 1, or None.")
    if seeds is not None and federations is not None:
        raise ConfigError("seeds, federations: give one of them. Federations draw the seed, too.")
    name = "federations" if seeds is None else "seeds"
    chosen = (FEDERATIONS if federations is None else federations) if seeds is None else seeds
    numbers = parse_seeds(chosen, f"--{name}") if isinstance(chosen, str) else _whole(chosen)
    if not numbers or len(set(numbers)) < len(numbers):
        raise ConfigError(f"{name} = {chosen!r}: expected different numbers, as range(3).")
    rules, trainers = methods(StrategyConfig, strategies), methods(ClientConfig, clients)
    if (strategies is not None and not rules) or (clients is not None and not trainers):
        raise ConfigError("strategies, clients: name at least one, or leave the argument out.")
    if "seed" in options:
        raise ConfigError("seed: compare takes seeds, as in seeds=[3].")
    folder = new_folder("comparisons", None if output_dir is None else Path(output_dir))
    flat = settings_of(settings) | settings_from_options(options)
    count = resolve_jobs(flat, jobs)
    plan = Plan.grid(
        {key: value for key, value in flat.items() if key not in ("run-name", "resume")}
        | {"output-dir": str(folder / "runs")},
        rules,
        numbers,
        clients=trainers,
        federations=seeds is None,
    )
    console = Console(quiet=not progress)
    announce(plan, console)
    with locked_folder(folder):
        rest = remaining_plan(plan, folder / "runs", console)
        execute(rest, console, jobs=count)
    return read(folder / "runs")


def _whole(seeds: Iterable[int]) -> list[int]:
    """The numbers; none where they are no numbers."""
    try:
        return [int(seed) for seed in seeds]
    except (TypeError, ValueError):
        return []


def read(*paths: str | PathLike[str]) -> Results:
    """Runs from their folders, folders of run folders, summaries (.csv), or patterns of these.

        ff.read("runs/*"), ff.read("grid", "experiments/fedgcr-table5-cpu.csv")

    Each run is read once. What a pattern matches and is no run is passed over; of runs that
    cannot be read there is a warning. ``RunFolderError`` where no run is left, ``ConfigError``
    where a path holds none.
    """
    runs: list[Run] = []
    for place in dict.fromkeys(place for given in paths for place in _places(str(given))):
        try:
            runs += read_runs(place)
        except RunFolderError as error:
            warnings.warn(f"Left out: {error}", stacklevel=2)
    if not runs:
        raise RunFolderError(
            f"There is no run to read in {', '.join(map(str, paths)) or 'no path'}."
        )
    return Results(runs)


def _places(given: str) -> list[Path]:
    path = Path(given).expanduser()
    if path.exists() or not glob.has_magic(given):
        return run_folders(path)
    found = sorted(map(Path, glob.glob(str(path), recursive=True)))
    return [
        place
        for match in found
        if match.suffix == ".csv" or (match.is_dir() and any(match.rglob("run.json")))
        for place in run_folders(match)
    ]
