"""Checkpoints for resuming stopped or killed runs.

A checkpoint is a file such as ``checkpoints/round-000007.safetensors`` in the run folder. Its
arrays are the global model and the state of the strategy and the exchanges. Its header has the
round, the wall time, the run config and the sizes of files that grow. The states of random
generators are not saved, because random draws are derived from the seed and their purpose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fairflower.config import ModelConfig, RunConfig
from fairflower.config.run import (
    changed_settings,
    check_keys,
    check_values,
    execution_keys,
)
from fairflower.errors import ConfigError, RunFolderError, logger, quoted
from fairflower.files import Arrays, DamagedFile, read_arrays, sealed_facts, write_arrays
from fairflower.participation.availability import absolute_trace
from fairflower.registry import METRICS
from fairflower.registry.user_metrics import metric_names
from fairflower.server import contents

if TYPE_CHECKING:
    from fairflower.data import Federation

#: Settings that may change when a run is resumed: execution settings except the folder, and the
#: number of rounds. (A new number of rounds changes the result of methods with a schedule over all
#: rounds.)
CHANGEABLE = execution_keys() - {"run-name", "output-dir", "resume", "checkpoint.best"}
CHANGEABLE |= {"num-server-rounds"}


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a round."""

    server_round: int  # 0 before training
    model: Arrays  # the global model
    state: Arrays  # FairStrategy.state_dict()
    seconds: float  # wall time so far, in all sessions
    sizes: Mapping[str, int]  # bytes of the growing files of the run folder
    config: Mapping[str, Any]  # RunConfig.to_flat()
    facts: Mapping[str, Any] = field(default_factory=dict)  # RunFolder.kept_facts()
    best_round: int = 0  # the best so far by ``checkpoint.best``; 0 if none is kept
    best: Arrays = field(default_factory=dict)  # its model; empty if it is ``model``


def save(run: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write a checkpoint to a run folder, and delete all but the newest ``keep`` checkpoints."""
    arrays = {f"model/{name}": array for name, array in checkpoint.model.items()}
    arrays |= {f"state/{name}": array for name, array in checkpoint.state.items()}
    arrays |= {f"best/{name}": array for name, array in checkpoint.best.items()}
    facts: dict[str, Any] = {"round": checkpoint.server_round, "seconds": checkpoint.seconds}
    facts["best"] = checkpoint.best_round
    facts |= {name: dict(getattr(checkpoint, name)) for name in ("sizes", "config", "facts")}
    sizes = checkpoint.sizes.items()
    facts["digests"] = {name: contents.file_digest(run / name, n) for name, n in sizes}
    write_arrays(_path(run, checkpoint.server_round), arrays, facts)
    prune(run, keep)


def load(run: Path) -> Checkpoint | None:
    """Return the newest usable checkpoint of a run folder, or None if there is none.

    Damaged checkpoints, and those of rounds of which the history or the diagnostics have lost or
    changed a line, are skipped with a warning. Raises ``ConfigError`` if none is left.
    """
    problems = []
    for path in _paths(run):
        try:
            arrays, facts = read_arrays(path)
            for name, size in facts["sizes"].items():
                _check_begins_as(run / name, size, facts["digests"][name], path.name)
            return Checkpoint(
                server_round=facts["round"],
                model=_part(arrays, "model/"),
                state=_part(arrays, "state/"),
                best_round=facts["best"],
                best=_part(arrays, "best/"),
                **{name: facts[name] for name in ("seconds", "sizes", "config")},
            )
        except (DamagedFile, KeyError) as error:
            lacking = f"{path} has no {error}: an earlier version of fairflower has written it."
            problems.append(lacking if isinstance(error, KeyError) else str(error))
            logger.warning("%s Trying the previous checkpoint.", problems[-1])
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"All checkpoints of {run} are unusable. Start a new run.{listed}")
    return None


def model_of(run: Path, server_round: int) -> Arrays:
    """Return the global model in the checkpoint of a round.

    Raises ``DamagedFile`` if it is damaged, and ``FileNotFoundError`` if it was not kept.
    """
    return _part(read_arrays(_path(run, server_round))[0], "model/")


def _check_begins_as(file: Path, size: int, digest: str, name: str) -> None:
    """Raise ``DamagedFile`` if a file has lost or changed some of the bytes at a checkpoint."""
    if file.exists() and not file.is_file():
        return  # `RunFolder.reopen` refuses a named pipe or a folder
    if size > (file.stat().st_size if file.exists() else 0):
        raise DamagedFile(f"{file} is shorter than at the time of {name} (lines or line ends).")
    if contents.file_digest(file, size) != digest:
        raise DamagedFile(f"{file} has been changed since the time of {name}.")


def earlier_facts(run: Path) -> dict[str, Any]:
    """Return the contents of a run's ``run.json`` or, if it is lost, of its newest checkpoint.

    The latter lack the clients. They do not replace a ``run.json`` that counts the rounds that have
    begun, for differential privacy.
    """
    try:
        return contents.read_facts(run)
    except RunFolderError as error:
        facts = _newest_header(run).get("facts")
        if not facts or "privacy" in facts:
            raise
        logger.warning("%s The newest checkpoint is read instead.", error)
        known = contents.checked_facts({"clients": [], **facts}, run / "checkpoints")
        del known["clients"]
        return known


def prune(run: Path, keep: int) -> None:
    """Delete temporary files of a killed run, and all but the newest ``keep`` checkpoints."""
    _delete([*_paths(run)[keep:], *run.glob("checkpoints/.round-*.tmp")])


def delete_later(run: Path, server_round: int) -> None:
    """Delete the checkpoints of later rounds: damaged ones, if the run goes on from this round."""
    _delete(path for path in _paths(run) if _round(path) > server_round)


def run_config(path: Path, settings: Mapping[str, Any]) -> RunConfig:
    """Return the config of the run in ``path``; a ``ConfigError`` names its file."""
    try:
        return RunConfig.from_flat(settings)
    except ConfigError as error:
        raise ConfigError(f"{path / 'config.toml'}: {error}") from error


def resumed_config(
    run: Path, given: Mapping[str, Any], beside: Mapping[str, Any] | None = None
) -> RunConfig:
    """Return the config for resuming a run, including settings given by the user.

    Raises ``ConfigError`` if another argument, in ``beside``, is not None, ``run`` is not a run
    folder, the run is completed, its clients would get different data, or a setting that is not
    `CHANGEABLE` differs in ``given`` or in ``config.toml``.
    """
    for name in (name for name, value in (beside or {}).items() if value is not None):
        raise ConfigError(f"{name}: a resumed run keeps its settings. Remove this argument.")
    run = run.expanduser().absolute()
    try:
        facts, flat = earlier_facts(run), contents.read_config(run)
    except RunFolderError as error:
        raise ConfigError(str(error)) from error
    begun = _newest_header(run).get("config", flat)  # without a checkpoint the run begins again
    absolute = with_absolute_paths(flat)
    if changes := changed_settings(with_absolute_paths(begun), absolute, CHANGEABLE):
        raise ConfigError(
            f"{run / 'config.toml'} has been changed since the run began: {changes}. Undo the "
            "change, or start a new run with this file as --config."
        )
    _check_given(run, flat, given)
    changed = {key: value for key, value in given.items() if key in CHANGEABLE}
    settings = flat | changed | {"resume": str(run)}
    config = RunConfig.from_flat(settings) if changed else run_config(run, settings)
    _check_resumable(run, facts, config)
    return config


#: Settings of a run that have no effect on tests of its model, and may not fit them.
_OF_TRAINING = ("privacy.", "stop.", "secure-aggregation", "sites", "late-sites")


def evaluation_config(model: str | Path, given: Mapping[str, Any]) -> RunConfig:
    """Return the config for testing a model: the settings of its run folder, and those ``given``.

    Other ``given`` data or another ``given`` model replace all settings of the run's. Without a run
    folder, other settings have their defaults. Raises ``ConfigError`` if there is no such model, or
    the clients of its run trained alone.
    """
    path, folder = model_at(model)
    flat: dict[str, Any] = {"num-server-rounds": 1}
    if folder:
        trained = contents.read_config(folder)
        if trained["strategy.name"] == "alone":
            raise ConfigError(
                f"evaluate.model = {quoted(str(model))}: its run (strategy.name = 'alone') has no "
                "common model to test, because each client kept its own."
            )
        replaced = tuple(f"{table}." for table in ("data", "model") if f"{table}.name" in given)
        flat = {
            key: value
            for key, value in trained.items()
            if not key.startswith((*_OF_TRAINING, *replaced))
            and (key.startswith("data.") or key not in execution_keys())
        }
    return RunConfig.from_flat(flat | {"engine": "inline", **given, "evaluate.model": str(path)})


def model_at(model: str | Path) -> tuple[Path, Path | None]:
    """Return the file of a model that ``evaluate.model`` names, and its run folder or None.

    Raises ``ConfigError`` if there is no such file, or no such kind of file.
    """
    path, start = Path(model).expanduser().absolute(), f"evaluate.model = {quoted(str(model))}"
    path = path / contents.MODEL if path.is_dir() else path
    if path.suffix not in (".safetensors", ".onnx", ".pt"):
        raise ConfigError(
            f"{start}: expected a run folder, or a file .safetensors, .onnx or .pt (TorchScript)."
        )
    if not path.is_file():
        raise ConfigError(f"{start}: there is no file {path}.")
    return path, path.parent if (path.parent / "run.json").is_file() else None


def _check_given(run: Path, flat: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for a given setting that is invalid or may not change."""
    before = with_absolute_paths(flat)
    for key, value in given.items():
        check_keys([key])
        check_values({key: value})
        asked = with_absolute_paths({**flat, key: value})
        if key not in CHANGEABLE and asked.get(key) != before.get(key):
            with suppress(ConfigError):  # 0 may stand for a default that the run has stored
                if RunConfig.from_flat(asked).to_flat().get(key) == before.get(key):
                    continue
            raise ConfigError(
                f"{key} = {value!r} was given, but {run} is resumed with its settings ({key} = "
                f"{flat.get(key)!r}). Only these may change: {', '.join(sorted(CHANGEABLE))}."
            )


def _check_resumable(run: Path, facts: Mapping[str, Any], config: RunConfig) -> None:
    """Raise ``ConfigError`` if there is nothing to resume, or nothing to resume from."""
    done, complete = int(facts["rounds"]), facts["status"] == "completed"
    problem, last, states = "", config.num_server_rounds, facts.get("client_state")
    if complete and (reason := facts.get("ended_early")):
        limit = "privacy.max-epsilon" if "privacy.max-epsilon" in reason else "stop.patience"
        problem = f"{run} is complete: it ended after round {done}: {reason}. Start a new run with "
        problem += f"a larger {limit}, or with {limit} = 0."
    elif last < done:
        problem = f"num-server-rounds = {last}: {run} already has {done} rounds."
    elif complete and last == done:
        remedy = "Start" if states else "Increase num-server-rounds, or start"
        problem = f"{run} is complete: all of its {done} rounds are done. {remedy} a new run."
    elif done and not _paths(run):
        problem = (
            f"{run} has no checkpoint (perhaps because checkpoint.every = 0). Start a new run."
        )
    elif complete and states:
        problem = f"{run} is complete, and the state of its clients ({config.client.name}) was "
        problem += "deleted after the last round. Start a new run with more rounds."
    if problem:
        raise ConfigError(problem)
    check_own_states(run, facts)


def check_own_states(run: Path, facts: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a run folder is a copy, and its clients' state the original's."""
    if facts.get("client_state") and (original := contents.original_of(run, facts)):
        raise ConfigError(
            f"{run} is a copy of {original}, and only one of them can go on with the state of "
            f"their clients. Resume {original}, or start a new run."
        )


def rounds(run: Path) -> list[int]:
    """Return the rounds of a run's checkpoints, in increasing order."""
    return sorted(map(_round, _paths(run)))


def _newest_header(run: Path) -> Mapping[str, Any]:
    """Return the metadata of the newest readable checkpoint; empty if there is none."""
    for path in _paths(run):
        with suppress(DamagedFile):
            return sealed_facts(path)
    return {}


def with_absolute_paths(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keys of a config with absolute paths, as in the config of a new run."""
    model = ModelConfig(flat["model.name"], flat["model.weights"]).resolve()
    trace = absolute_trace(flat["participation.availability"])
    paths = {"model.name": model.name, "model.weights": model.weights}
    return {**flat, **paths, "participation.availability": trace}


def part_digests(config: RunConfig) -> dict[str, str]:
    """Return the digests of a user's own files, by the run config key that names them.

    Built-in parts, those of installed packages, and files that are missing have no digest.
    """
    parts = (part for part in config.parts if part.KEY != "track")  # it changes no result
    files = {part.KEY: [part.REGISTRY.own_file(part.name)] for part in parts}
    places = sorted(metric_names(config.evaluate.metrics).values())
    files["evaluate.metrics"] = [METRICS.own_file(place) for place in places]
    if config.model.file:
        files["model.weights"] = [Path(config.model.file).expanduser()]
    found = {key: [_digest(p) for p in paths if p and p.is_file()] for key, paths in files.items()}
    texts = {key: " ".join(digests).encode() for key, digests in found.items() if digests}
    return {key: hashlib.sha256(text).hexdigest()[:16] for key, text in texts.items()}


def check_same_parts(run: Path, earlier: Mapping[str, str], config: RunConfig) -> None:
    """Raise ``ConfigError`` if a file of a part, or of weights, has changed since a run.

    ``earlier`` are the digests in the run's ``run.json``.
    """
    now = part_digests(config) if earlier else {}
    for key, digest in earlier.items():
        if now.get(key, digest) != digest:
            raise ConfigError(
                f"The file of {config.to_flat()[key]} ({key}) has changed since {run} was "
                "created. Restore the file, or choose another folder."
            )


def _digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of_version(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _digest_of_version(path: Path, modified: int, size: int) -> str:
    """Return the digest of a file; cached, because weights are large and runs are many."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_same_examples(run: Path, facts: Mapping[str, Any], federation: Federation) -> None:
    """Raise ``ConfigError`` if the clients of a run had other examples than ``federation``.

    Runs without data on the server have no digest.
    """
    if facts.get("digest") and facts["digest"] != federation.digest:
        raise ConfigError(
            f"The clients of {run} had other examples than data.dir has now. Restore the data, or "
            "name the folder of the run's data (data.dir)."
        )


def resumable_configs(folder: Path) -> list[RunConfig]:
    """Return the configs of all runs below a folder that can be resumed.

    The configs are sorted by the number of completed rounds.
    """
    resumable = []
    for info in sorted(folder.rglob("run.json")):
        with suppress(ConfigError, RunFolderError):
            facts = earlier_facts(info.parent)
            if facts["status"] != "completed":
                resumable.append((facts["rounds"], resumed_config(info.parent, {})))
    return [config for _, config in sorted(resumable, key=lambda pair: pair[0])]


def _paths(run: Path) -> list[Path]:
    """Return the checkpoint files of a run folder, newest first."""
    return sorted(run.glob(f"checkpoints/round-{6 * '[0-9]'}.safetensors"), reverse=True)


def _path(run: Path, server_round: int) -> Path:
    return run / "checkpoints" / f"round-{server_round:06}.safetensors"


def _round(path: Path) -> int:
    return int(path.stem.removeprefix("round-"))


def _delete(paths: Iterable[Path]) -> None:
    for path in paths:
        with suppress(PermissionError):  # on Windows, if another process has it open
            path.unlink(missing_ok=True)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
