"""Memory of a client from round to round: in Flower's ``Context.state``, and on its disk.

``Context.state`` dies with a SuperNode, and in a simulation with the whole run. So it is
also written to ``$FAIRFLOWER_HOME/state/<run id>/<client id>/round-000007.safetensors``,
from where it is taken when the context has none: by a SuperNode that was restarted, and
when the server goes on from a checkpoint. Clients that keep nothing write nothing.

A server that goes on may do rounds again. Then each client has to begin as it did
before, so the files of all rounds stay that a checkpoint may need. The last files of a
run are deleted by the server where it sees them, as in a simulation, and else by a
client that has other work, after `DAYS`.
"""

from __future__ import annotations

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
from fairflower.files import DamagedFile, read_arrays, write_arrays
from fairflower.paths import client_states
from fairflower.training.trainer import Trainer, server_round

_PREFIX = "fairflower/"
_STAMP = "fairflower"

#: Days that the state of a run that is not heard of stays on a client's disk.
DAYS = 30


def load_state(
    trainer: Trainer, context: Context, config: Mapping[str, Any], before: float = math.inf
) -> int:
    """Give the trainer what it kept after an earlier round of this run, and return that round.

    That is 0 if there is none, as in a client's first round. A node may serve one run after
    another, so state bears the ``run-id`` that came with the message (none from a server that
    sends none) and the round. State of another run, or not from ``before`` this round (a run that
    is done again), is not used. Nor is that of a round whose update the server did not merge: it
    says under ``merged-round`` which was the last one, and what a client learnt in a later round
    that came too late, or was left out, is forgotten as if it had sat that round out.
    """
    trainer.state = {}
    folder = _folder(trainer, config)
    if folder is not None:  # without a copy of the round before there is no way back
        before = min(before, _last_merged_round(config) + 1)
    files = {kept: path for kept, path in _files(folder).items() if kept < before}
    stamp = context.state.config_records.get(_STAMP, ConfigRecord())
    at_hand = int(stamp["round"]) if stamp and stamp["run-id"] == _run_id(config) else -1  # type: ignore[arg-type]
    # A round that ended after a later one, for whose reply nobody waited, is in the
    # context, and the later one on the disk.
    if max(files, default=0) <= at_hand < before:
        trainer.state = {
            name.removeprefix(_PREFIX): arrays_of(record)
            for name, record in context.state.array_records.items()
            if name.startswith(_PREFIX)
        }
        return at_hand
    for kept in sorted(files, reverse=True):
        try:
            arrays, _ = read_arrays(files[kept])
        except (DamagedFile, FileNotFoundError):
            continue  # the server notices, and names the client
        for path, array in arrays.items():
            name, _, leaf = path.partition("/")
            trainer.state.setdefault(name, {})[leaf] = array
        return kept
    return 0


def save_state(trainer: Trainer, context: Context, config: Mapping[str, Any]) -> None:
    """Keep what the trainer wants to have in its next round."""
    for name in [name for name in context.state if name.startswith(_PREFIX)]:
        del context.state[name]
    for name, arrays in trainer.state.items():
        context.state[_PREFIX + name] = record_of(arrays)
    now = server_round(config)
    context.state[_STAMP] = ConfigRecord({"run-id": _run_id(config), "round": now})
    folder = _folder(trainer, config)
    if folder is None or not trainer.state:
        return
    flat = {f"{name}/{leaf}": a for name, kept in trainer.state.items() for leaf, a in kept.items()}
    facts = {"round": now, "client": trainer.client_id}
    write_arrays(folder / f"round-{now:06}.safetensors", flat, facts)
    every, keep = int(config.get("checkpoint.every", 1)), int(config.get("checkpoint.keep", 2))
    files = _files(folder)
    for kept in files.keys() - rounds_to_keep(files, now, every, keep, _last_merged_round(config)):
        files[kept].unlink(missing_ok=True)
    _delete_old_states(folder.parent)


def rounds_to_keep(
    rounds: Iterable[int], now: int, every: int, keep: int, merged: float = math.inf
) -> set[int]:
    """Select those of ``rounds`` from which a run can go on after round ``now``.

    The server has checkpoints of the last ``keep`` multiples of ``every`` before ``now``
    (none if ``every`` is 0). From each of them a client goes on with its newest state
    that is not newer. It goes on with that of the last ``merged`` round if round ``now``
    is not merged; what it has of rounds between these two was not.

    >>> sorted(rounds_to_keep({3, 5, 6, 7}, 7, every=1, keep=2))
    [5, 6, 7]
    >>> sorted(rounds_to_keep({3, 7, 8}, 8, every=5, keep=1))
    [3, 7, 8]
    >>> sorted(rounds_to_keep({3, 5, 6, 7}, 7, every=1, keep=2, merged=5))
    [5, 7]
    """
    newest = (now - 1) // every * every if every else 0
    checkpoints = [newest - i * every for i in range(keep)] if every else []
    last = min(merged, now - 1)
    known = [kept for kept in rounds if kept <= last]
    found = ([kept for kept in known if kept <= c] for c in (last, *checkpoints))
    # Later ones are there if ``now`` ended after them, for nobody waited for it any more.
    return {max(kept) for kept in found if kept} | {kept for kept in rounds if kept >= now}


def _last_merged_round(config: Mapping[str, Any]) -> float:
    """The last round that the server has merged this client in, if it says so."""
    return float(config.get("merged-round", math.inf))


def _run_id(config: Mapping[str, Any]) -> str:
    return str(config.get("run-id", ""))


def _folder(trainer: Trainer, config: Mapping[str, Any]) -> Path | None:
    """Folder of the client's state of this run; None for a run that has no proper id."""
    run_id = _run_id(config)
    if not re.fullmatch("[0-9a-f]{32}", run_id):  # a server's text must not become any path
        return None
    return client_states() / run_id / str(trainer.client_id)


def _files(folder: Path | None) -> dict[int, Path]:
    """The states in a folder, by the round that each was kept in."""
    paths = folder.glob("round-*.safetensors") if folder else ()
    return {int(path.stem.removeprefix("round-")): path for path in paths}


def _delete_old_states(mine: Path) -> None:
    oldest = time.time() - DAYS * 24 * 3600
    for run in mine.parent.iterdir():
        with suppress(OSError):  # another client may be at it, too
            if run != mine and max(p.stat().st_mtime for p in (run, *run.iterdir())) < oldest:
                shutil.rmtree(run)
