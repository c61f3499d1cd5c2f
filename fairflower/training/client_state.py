"""A client's state between rounds: in Flower's ``Context.state`` and on the client's disk.

``Context.state`` is lost if a SuperNode stops and, in a simulation, when the run ends. Therefore
the state is also written to
``$FAIRFLOWER_HOME/state/<run id>/<client id>/round-000007.safetensors``. It is read from there if
the context has no state: after a restart of the SuperNode, or if the run is resumed from a
checkpoint. Clients without state write nothing.

A resumed run may repeat rounds, for which each client needs its earlier state. Therefore the files
of all rounds that a checkpoint may need are kept. The server deletes a run's remaining files if it
has access to them, as in a simulation. Otherwise a client of another run deletes them after `DAYS`
days.
"""

import math
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context

from fairflower.arrays import arrays_of, record_of
from fairflower.files import Arrays, DamagedFile, read_arrays, write_arrays
from fairflower.paths import client_states
from fairflower.training.trainer import Trainer, round_of

#: Part of the state for the model that a client keeps to itself (the strategy ``alone``).
OWN = "own-model"

_PREFIX = "fairflower/"
_STAMP = "fairflower"

#: The state of another run is deleted from the disk this many days after its last change.
DAYS = 30


def load_state(
    trainer: Trainer, context: Context, config: Mapping[str, Any], before: float = math.inf
) -> int:
    """Load the trainer's state from an earlier round of this run; return that round, or 0.

    State is stored with the message's ``run-id`` and round, because a node may serve several runs.
    State from other runs is ignored. State from round ``before`` or later is ignored, because these
    rounds are repeated. State from rounds after ``merged-round``, the last round in which the
    server merged this client, is ignored, because late or dropped updates do not count. Without a
    valid run id, as in other apps, they count, and state of rounds up to ``merged-round`` is always
    loaded, because a strategy may be started again.
    """
    trainer.state = {}
    folder = _folder(trainer, config)
    merged = float(config.get("merged-round", math.inf))
    if folder is not None:  # otherwise there is no earlier state
        before = min(before, merged + 1)
    elif math.isfinite(merged):  # a strategy that is started again counts rounds from 1 again
        before = max(before, merged + 1)
    files = [written for written in _files(folder) if written < before]
    stamp = context.state.config_records.get(_STAMP, ConfigRecord())
    in_context = int(stamp["round"]) if stamp and stamp["run-id"] == _run_id(config) else -1  # type: ignore[arg-type]
    # The context may have the state of a late round, while the disk has that of a later round.
    if max(files, default=0) <= in_context < before:
        trainer.state = {
            name.removeprefix(_PREFIX): arrays_of(record)
            for name, record in context.state.array_records.items()
            if name.startswith(_PREFIX)
        }
        return in_context
    written, trainer.state = newest_state(folder, before)
    return written


def newest_state(folder: Path | None, before: float) -> tuple[int, dict[str, Arrays]]:
    """Return the newest state in a client's folder from before a round, and its round, or 0."""
    files = {written: path for written, path in _files(folder).items() if written < before}
    for written in sorted(files, reverse=True):
        try:
            arrays, _ = read_arrays(files[written])
        except (DamagedFile, FileNotFoundError):
            continue  # the server logs a warning with the client's id
        state: dict[str, Arrays] = {}
        for path, array in arrays.items():
            name, _, leaf = path.partition("/")
            state.setdefault(name, {})[leaf] = array
        return written, state
    return 0, {}


def save_state(trainer: Trainer, context: Context, config: Mapping[str, Any]) -> None:
    """Store the trainer's state for its next round."""
    for name in [name for name in context.state if name.startswith(_PREFIX)]:
        del context.state[name]
    for name, arrays in trainer.state.items():
        context.state[_PREFIX + name] = record_of(arrays)
    now = round_of(config)
    context.state[_STAMP] = ConfigRecord({"run-id": _run_id(config), "round": now})
    folder = _folder(trainer, config)
    if folder is None or not trainer.state:
        return
    flat = {f"{name}/{leaf}": a for name, part in trainer.state.items() for leaf, a in part.items()}
    facts = {"round": now, "client": trainer.client_id}
    write_arrays(folder / f"round-{now:06}.safetensors", flat, facts)
    checkpoints, files = config.get("checkpoint-rounds", ()), _files(folder)
    merged = float(config.get("merged-round", math.inf))
    for old in files.keys() - rounds_to_keep(files, now, checkpoints, merged):
        with suppress(PermissionError):  # Windows, if another process reads it: retried next round
            files[old].unlink(missing_ok=True)
    _delete_old_states(folder.parent)


def rounds_to_keep(
    rounds: Iterable[int], now: int, checkpoints: Iterable[int], merged: float = math.inf
) -> set[int]:
    """Return those of the ``rounds`` whose state a run may need after round ``now``.

    ``checkpoints`` are the rounds of the server's checkpoints when round ``now`` began. If the run
    resumes from a checkpoint, a client uses its newest state that is not newer than the checkpoint.
    If its update from round ``now`` is not merged, the client continues with its newest state up to
    round ``merged``.

    >>> sorted(rounds_to_keep({3, 5, 6, 7}, 7, [5, 6]))
    [5, 6, 7]
    >>> sorted(rounds_to_keep({3, 7, 8}, 8, [5]))
    [3, 7, 8]
    >>> sorted(rounds_to_keep({3, 5, 6, 7}, 7, [5, 6], merged=5))
    [5, 7]
    """
    last = min(merged, now - 1)
    known = [r for r in rounds if r <= last]
    candidates = ([r for r in known if r <= c] for c in (last, *checkpoints))
    # Later rounds exist if the reply of round ``now`` was late.
    return {max(older) for older in candidates if older} | {r for r in rounds if r >= now}


def _run_id(config: Mapping[str, Any]) -> str:
    return str(config.get("run-id", ""))


def _folder(trainer: Trainer, config: Mapping[str, Any]) -> Path | None:
    """Return the folder of the client's state; None if the run id is not valid."""
    run_id = _run_id(config)
    # A server's text must not become an arbitrary path.
    if not re.fullmatch("[0-9a-f]{32}", run_id):
        return None
    return client_states() / run_id / str(trainer.client_id)


def _files(folder: Path | None) -> dict[int, Path]:
    paths = folder.glob("round-*.safetensors") if folder else ()
    return {int(path.stem.removeprefix("round-")): path for path in paths}


def _delete_old_states(current: Path) -> None:
    """Delete the states of other runs that have not changed for `DAYS` days."""
    oldest = time.time() - DAYS * 24 * 3600
    for run in current.parent.iterdir():
        with suppress(OSError):  # another client may delete it, too
            # Its clients' folders are looked at only if it is old: there may be thousands.
            if run == current or run.stat().st_mtime >= oldest:
                continue
            if max(path.stat().st_mtime for path in (run, *run.iterdir())) < oldest:
                shutil.rmtree(run)
