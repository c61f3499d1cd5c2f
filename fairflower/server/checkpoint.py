"""Checkpoints: what the server needs to go on with a run that was stopped or killed.

They lie in the run folder, ``checkpoints/round-000007.safetensors``: the global model and
what strategy and exchanges carry from round to round, as arrays; in the file's header
the round, the time it took, the run config and how far its histories had been written. Every random
choice is derived from the seed and what it is about, so there is no generator to save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairflower.config import RunConfig, check_key, execution, keys, methods_of, read_toml
from fairflower.config.methods import DEFAULT
from fairflower.errors import ConfigError, logger, quoted
from fairflower.files import Arrays, DamagedFile, read_arrays, sealed_facts, write_arrays
from fairflower.server.folder import read_facts

#: Settings that may be others when a run goes on: those of its execution, except where its
#: folder is. (More rounds move its result where a method has a schedule over all of them.)
CHANGEABLE = execution() - {"run-name", "output-dir", "resume"} | {"num-server-rounds"}


@dataclass(frozen=True)
class Checkpoint:
    """A run after a round."""

    server_round: int  # 0 before training
    model: Arrays  # the global model
    state: Arrays  # FairStrategy.state_dict()
    seconds: float  # wall time so far, in all sessions
    sizes: Mapping[str, int]  # bytes of those files of the run folder that grow
    config: Mapping[str, Any] = field(default_factory=dict)  # {}: by an earlier version


def save(run: Path, checkpoint: Checkpoint, keep: int) -> None:
    """Write a checkpoint into a run folder, and leave the newest ``keep`` there."""
    arrays = {f"model/{name}": array for name, array in checkpoint.model.items()}
    arrays |= {f"state/{name}": array for name, array in checkpoint.state.items()}
    facts = {
        "round": checkpoint.server_round,
        "seconds": checkpoint.seconds,
        "sizes": dict(checkpoint.sizes),
        "config": dict(checkpoint.config),
    }
    path = run / "checkpoints" / f"round-{checkpoint.server_round:06}.safetensors"
    write_arrays(path, arrays, facts)
    prune(run, keep)


def load(run: Path) -> Checkpoint | None:
    """The newest checkpoint of a run folder; None if none was ever written.

    One that is damaged is passed over with a warning; ``ConfigError`` if all are.
    """
    problems = []
    for path in _paths(run):
        try:
            arrays, facts = read_arrays(path)
        except DamagedFile as error:
            problems.append(str(error))
            logger.warning("%s The one before it is tried.", error)
            continue
        return Checkpoint(
            server_round=facts["round"],
            model=_part(arrays, "model/"),
            state=_part(arrays, "state/"),
            seconds=facts["seconds"],
            sizes=facts["sizes"],
            config=facts.get("config", {}),
        )
    if problems:
        listed = "".join(f"\n  {problem}" for problem in problems)
        raise ConfigError(f"{run} has no checkpoint that is whole. Start the run anew.{listed}")
    return None


def prune(run: Path, keep: int) -> None:
    """Delete all but the newest ``keep`` checkpoints, and what a killed run left half-written."""
    kept = set(_paths(run)[:keep])
    for path in set((run / "checkpoints").glob("*")) - kept:
        path.unlink(missing_ok=True)


def resumed_config(run: Path, given: Mapping[str, Any]) -> RunConfig:
    """The config by which a run folder's run goes on, with the keys that the user gave beside.

    ``ConfigError`` if the folder is none, its run is completed, its clients would get other
    images, or a key is given, or was changed in its ``config.toml``, that would make it another
    run.
    """
    run = run.expanduser().absolute()
    facts = read_facts(run)
    # A run made before a setting existed ran with what is now its default.
    own = keys() | read_toml(run / "config.toml")
    check_same_data(run, facts, own)
    _check_unchanged(run, own)
    methods = methods_of(own)
    for key, value in given.items():
        check_key(key, methods)
        if key not in CHANGEABLE and value != own.get(key):
            raise ConfigError(
                f"{key} = {value!r} was given, but {run} goes on by its own settings ({key} = "
                f"{own.get(key)!r}). Only these may change: {', '.join(sorted(CHANGEABLE))}."
            )
    changed = {key: value for key, value in given.items() if key in CHANGEABLE}
    config = RunConfig.from_flat(own | changed | {"resume": str(run)})
    done = int(facts["rounds"])
    if facts["status"] == "completed" and facts.get("ended_early"):
        raise ConfigError(
            f"{run} is completed: it ended after round {done}, {facts['ended_early']}. Start "
            "another run, with a larger stop.patience, or 0."
        )
    if config.num_server_rounds < done:
        raise ConfigError(
            f"num-server-rounds = {config.num_server_rounds}: {run} has {done} rounds already."
        )
    if facts["status"] == "completed" and config.num_server_rounds == done:
        raise ConfigError(
            f"{run} is completed: all of its {done} rounds are there. Give it more "
            "(num-server-rounds) or start another run."
        )
    if done and not _paths(run):
        raise ConfigError(f"{run} has no checkpoint (checkpoint.every = 0?). Start the run anew.")
    if facts["status"] == "completed" and facts.get("client_state"):
        raise ConfigError(
            f"{run} is completed, and what its clients kept from round to round "
            f"({config.client.name}) is deleted then. Start a run with more rounds."
        )
    return config


def _check_unchanged(run: Path, own: Mapping[str, Any]) -> None:
    """Refuse settings that are not those by which the run's newest checkpoint was made."""
    for path in _paths(run):
        with suppress(DamagedFile):
            begun = sealed_facts(path).get("config")
            break
    else:
        return  # it begins anew
    if not begun:  # an earlier version's
        return
    begun = keys() | begun
    changed = [
        f"{key} = {quoted(own.get(key, DEFAULT))}, begun with {quoted(begun.get(key, DEFAULT))}"
        for key in dict.fromkeys([*begun, *own])
        if key not in CHANGEABLE and own.get(key, DEFAULT) != begun.get(key, DEFAULT)
    ]
    if changed:
        raise ConfigError(
            f"{run / 'config.toml'} was changed since the run began: {'; '.join(changed)}. Change "
            "it back, or start another run with this file as --config."
        )


def check_same_data(run: Path, facts: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse a run that was begun when the same config gave clients other images.

    Its ``run.json``, ``facts``, has no ``images``, the fingerprint of the draw, which tells
    since then.
    """
    redrawn = config.get("data.corrupted-clients") or config.get("data.name") == "pacs"
    if "images" not in facts and redrawn:
        raise ConfigError(
            f"{run} was made by an earlier version, which chose the images of clean and of "
            "corrupted clients, and PACS's test images, otherwise. Make it anew, in another folder."
        )


def resumable_configs(folder: Path) -> Iterator[RunConfig]:
    """Configs to go on by, of all runs below a folder that are not completed and can go on.

    Of several of the same run that with the most rounds comes last.
    """
    found = []
    for info in sorted(folder.rglob("run.json")):
        with suppress(ConfigError):
            facts = read_facts(info.parent)
            if facts["status"] != "completed":
                found.append((facts["rounds"], resumed_config(info.parent, {})))
    yield from (config for _, config in sorted(found, key=lambda pair: pair[0]))


def _paths(run: Path) -> list[Path]:
    """The checkpoints of a run folder, the newest first."""
    return sorted(run.glob("checkpoints/round-*.safetensors"), reverse=True)


def _part(arrays: Arrays, prefix: str) -> Arrays:
    return {name.removeprefix(prefix): a for name, a in arrays.items() if name.startswith(prefix)}
