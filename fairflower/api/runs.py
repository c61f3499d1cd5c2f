"""Functions that train: a run, a comparison; and a function that reads run folders."""

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
from fairflower.data.cache import make_data_set
from fairflower.errors import ConfigError, RunFolderError
from fairflower.paths import new_folder, run_folders
from fairflower.plans.comparison import run_comparison
from fairflower.plans.execution import announce, execute
from fairflower.plans.plan import Plan, replicates, resolve_jobs, single_run_config
from fairflower.report import Run, read_run, read_runs
from fairflower.server.checkpoint import resumed_config

if TYPE_CHECKING:  # Flower is slow to import, and errors in arguments come first
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
    """Train a federation, as ``fairflower run`` does.

    Parameters
    ----------
    settings : mapping or path, optional
        Run config keys (``{"train.lr": 0.01}`` or ``{"train": {"lr": 0.01}}``), or a TOML file
        of them; ``fairflower list settings`` shows all keys. The other arguments override them.
    strategy, client : str, class or mapping, optional
        Strategy and method of local training: ``"fedheal:tau=0.4"``, ``FedHEAL``, or
        ``{"name": "fedheal", "tau": 0.4}``. Default: the methods of ``settings``.
    seed : int, optional
        Seed of everything but the partition. Default: the ``seed`` of ``settings``, else 0.
    output_dir : path, optional
        Parent of the run folder. Default: ``~/.fairflower/runs``.
    resume : path, optional
        Run folder of a stopped or killed run to resume. Only ``rounds`` and settings of the
        execution, such as ``workers``, may be given with it.
    on_round : callable, optional
        Called after every round of training with its number and a dict of metrics:
        ``accuracy/<domain>``, ``accuracy/AVG``, ``accuracy/MIN``, ``accuracy/STD`` (fractions;
        ddof 1) and ``loss/<domain>`` if the round was tested; ``train_loss``; ``seconds``. The run
        stops, and can be resumed, if the callable returns True or raises ``StopRun``.
    progress : bool
        Whether to print rounds as they end.
    **options
        Settings under shorter names: `ShortSettings`.

    Returns
    -------
    Result
        The run, read from its folder.

    Raises
    ------
    ConfigError, DataError, RoundFailed
        If the run cannot begin or go on; the message has the remedy.
    KeyboardInterrupt
        After Ctrl-C or a notebook's stop button; the run folder can be resumed.

    See Also
    --------
    compare : several strategies on several federations.
    read : runs from their folders.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> small = {"data.clients-per-domain": 1, "train.local-epochs": 1, "engine": "inline"}
    >>> result = run(small, strategy="uniform", rounds=1, output_dir=mkdtemp(), progress=False)
    >>> result.status, sorted(result.accuracy)
    ('completed', ['inverted', 'plain', 'printed', 'rotated'])
    """
    overrides = settings_from_options({**options, "seed": seed, "output_dir": output_dir})
    if resume is None:
        rule = None if strategy is None else method(StrategyConfig, strategy)
        trainer = None if client is None else method(ClientConfig, client)
        config = single_run_config(settings_of(settings), rule, trainer, overrides)
    else:
        for name, value in {"settings": settings, "strategy": strategy, "client": client}.items():
            if value is not None:
                raise ConfigError(f"{name}: a resumed run keeps its settings. Leave it out.")
        config = resumed_config(Path(resume), overrides)
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
    leave_one_domain_out: bool = False,
    jobs: int | None = None,
    output_dir: str | PathLike[str] | None = None,
    progress: bool = True,
    **options: Unpack[ShortSettings],
) -> Results:
    """Train every client with every strategy on every federation, as ``fairflower compare`` does.

    Parameters
    ----------
    settings : mapping or path, optional
        Settings of all runs, as in `run`.
    strategies : str, class, mapping or an iterable of these, optional
        Strategies; uniform averaging is always added. Default: FedAvg and the strategy of
        ``settings``.
    clients : str, class, mapping or an iterable of these, optional
        Methods of local training. Default: the method of ``settings``.
    federations : iterable of int, or str, optional
        ``range(20)``, ``[0, 7]`` or ``"0-19"``: each number is the seed of the partition, the
        clients' data and the run. Default: ``"0-9"``, unless ``seeds`` is given.
    seeds : iterable of int, or str, optional
        Seeds on the federation of ``data.seed``. Verdicts then hold only for this federation.
    leave_one_domain_out : bool
        Whether to repeat all runs with each domain held out in turn (``data.held-out``).
    jobs : int, optional
        Number of parallel runs, each in a process on the inline engine. Default: one per core
        if there are as many runs, no run uses a GPU and neither ``engine``, ``ray_address`` nor
        ``workers`` is given; otherwise 1.
    output_dir : path, optional
        Folder of the comparison. Default: a new folder in ``~/.fairflower/comparisons``. In an
        earlier comparison's folder, completed runs are kept and unfinished runs are resumed.
    progress : bool
        Whether to print runs and rounds as they end.
    **options
        Settings under shorter names: `ShortSettings`.

    Returns
    -------
    Results
        All runs in the folder.

    Raises
    ------
    ConfigError, DataError, RoundFailed
        If a run cannot begin or go on; the message has the remedy. A run's failure is raised after
        the other runs have ended.

    See Also
    --------
    run : a single run.
    fairflower.api.results.Results : tables, verdicts and figures of the runs.
    """
    if jobs is not None and jobs < 1:
        raise ConfigError(f"jobs = {jobs}: expected a whole number from 1, or None.")
    numbers, federated = replicates(federations, seeds)
    rules, trainers = methods(StrategyConfig, strategies), methods(ClientConfig, clients)
    if (strategies is not None and not rules) or (clients is not None and not trainers):
        raise ConfigError("strategies, clients: name at least one, or leave the argument out.")
    if "seed" in options:
        raise ConfigError("seed: compare takes seeds, as in seeds=[3].")
    folder = new_folder("comparisons", None if output_dir is None else Path(output_dir))
    flat = settings_of(settings) | settings_from_options(options)
    parallel_runs = resolve_jobs(flat, jobs)
    flat = {key: value for key, value in flat.items() if key not in ("run-name", "resume")}
    flat["output-dir"] = str(folder / "runs")
    plan = Plan.grid(flat, rules, numbers, clients=trainers, federations=federated)
    if leave_one_domain_out:
        plan = plan.leaving_each_out(make_data_set(plan.runs[0].data).domains)
    run_comparison(plan, folder, Console(quiet=not progress), parallel_runs)
    return read(folder / "runs")


def read(*paths: str | PathLike[str]) -> Results:
    """Return runs from run folders, folders of run folders, summaries (.csv), or glob patterns.

        ff.read("runs/*"), ff.read("grid", "experiments/fedgcr-table5-cpu.csv")

    Each run is read once. Matches of a pattern that are not runs are skipped. A run that cannot be
    read gives a warning.

    Raises
    ------
    RunFolderError
        If no run can be read.
    ConfigError
        If a path has no run.
    """
    runs: list[Run] = []
    for place in dict.fromkeys(place for path in paths for place in _places(str(path))):
        try:
            runs += read_runs(place)
        except RunFolderError as error:
            warnings.warn(f"Left out: {error}", stacklevel=2)
    if not runs:
        raise RunFolderError(
            f"There is no run to read in {', '.join(map(str, paths)) or 'no path'}."
        )
    return Results(runs)


def _places(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.exists() or not glob.has_magic(pattern):
        return run_folders(path)
    matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
    return [
        place
        for match in matches
        if match.suffix == ".csv" or (match.is_dir() and any(match.rglob("run.json")))
        for place in run_folders(match)
    ]
