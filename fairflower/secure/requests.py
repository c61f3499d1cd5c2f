"""What a client checks before it answers a request of a round under secure aggregation.

Flower's mod keeps keys, names and shares in ``Context.state`` and trusts every request of the
expected stage. A client of fairflower also compares a request with the protocol's constants and
with what the server told it before in this round. ``docs/privacy.md`` says what it cannot see.
"""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from typing import Any

from flwr.app import ConfigRecord, Context, Message, MessageType
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.server.workflow.secure_aggregation import secaggplus_workflow

from fairflower.config import is_setting
from fairflower.paths import home
from fairflower.secure.protocol import MOST_CLIENTS, SMALLEST_SUM, constants_of
from fairflower.secure.vectors import MaskingInstructions

#: Record of ``Context.state`` with the last rounds in which the client measured and trained.
_ROUNDS = "fairflower.secure"

#: Stage -> the stage that the client must have answered before; a set-up may begin at any time.
_BEFORE = {
    Stage.SHARE_KEYS: Stage.SETUP,
    Stage.COLLECT_MASKED_VECTORS: Stage.SHARE_KEYS,
    Stage.UNMASK: Stage.COLLECT_MASKED_VECTORS,
}

#: Seconds after which the marks of answered requests are deleted.
_DAY = 24 * 3600


def check_request(message: Message, context: Context) -> None:
    """Raise an exception unless a request of the masked exchange follows the protocol.

    The text of the exception is for the site's own log. A request for a masked vector uses up the
    client's part of the round, also if training fails later.
    """
    records, node = message.content.config_records, message.metadata.dst_node_id
    asked: Any = records[RECORD_KEY_CONFIGS]
    told: Any = context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord())
    kind, stage = message.metadata.message_type, asked.get(Key.STAGE)
    _require(kind == MessageType.TRAIN, f"the message has type {kind!r}, expected 'train'")
    _require(stage == Stage.SETUP or stage in _BEFORE, f"there is no stage {stage!r}")
    if stage == Stage.SETUP:
        _check_constants(asked)
        return
    before = told.get("current_stage")
    _require(before == _BEFORE[stage], f"{stage!r} does not follow after {before!r}")
    if stage == Stage.SHARE_KEYS:
        _check_keys(asked, told, node)
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        _check_nodes([*asked[Key.SOURCE_LIST], node], told["public_keys_dict:K"])
        most = MaskingInstructions.from_config(records["config"]).range
        _require(most == told["target_range"], f"the largest weight {most} is not the set-up's")
        claim_round(message, context, "train")
    else:
        present = asked[Key.ACTIVE_NODE_ID_LIST]
        _check_nodes([*present, *asked[Key.DEAD_NODE_ID_LIST]], told["rd_seed_share_dict:K"])
        _require(node in present, "this node is named as absent")
        least = max(SMALLEST_SUM, told["threshold"])
        _require(len(present) >= least, f"{len(present)} nodes are present, fewer than {least}")
    if "domain" in context.node_config:
        _claim_answer(told["pk1"], str(stage))


def claim_round(message: Message, context: Context, task: str) -> None:
    """Note that the client measures or trains in a round; raise ``ValueError`` unless it may.

    It measures once and trains once in a round, after it has measured, and rounds only increase. A
    run keeps its settings. Flower's run id and fairflower's identify the run.
    """
    config: Any = message.content.config_records.get("config", ConfigRecord())
    run = f"{message.metadata.run_id} {config.get('run-id')} "
    settings = sorted((key, value) for key, value in config.items() if is_setting(key))
    digest = hashlib.sha256(repr(settings).encode()).hexdigest()
    kept: Any = context.state.config_records.get(_ROUNDS, ConfigRecord())
    now, last = config.get("server-round"), kept.get(run + task, 0)
    _require(
        type(now) is int and last < now <= config["num-server-rounds"],
        f"round {now!r} to {task} does not follow after round {last}",
    )
    _require(task == "measure" or kept.get(run + "measure") == now, f"round {now} has no measuring")
    _require(kept.get(run + "settings", digest) == digest, "the run's settings have changed")
    context.state[_ROUNDS] = ConfigRecord({**kept, run + task: now, run + "settings": digest})


def has_masked(message: Message, context: Context) -> bool:
    """Return whether a message is of a Flower run that has asked the client for masked models."""
    kept = context.state.config_records.get(_ROUNDS, ConfigRecord())
    return any(key.startswith(f"{message.metadata.run_id} ") for key in kept)


def _check_constants(asked: Any) -> None:
    """Raise ``ValueError`` unless a set-up has the protocol's constants for its clients."""
    clients = asked.get(Key.SAMPLE_NUMBER)
    _require(
        type(clients) is int and SMALLEST_SUM <= clients <= MOST_CLIENTS,
        f"{Key.SAMPLE_NUMBER} = {clients!r}, expected {SMALLEST_SUM} to {MOST_CLIENTS}",
    )
    for key, value in constants_of(clients).items():
        text = f"{key} = {asked.get(key)!r}, expected {value!r} for {clients} clients"
        _require(type(asked.get(key)) is type(value) and asked[key] == value, text)


def _check_keys(asked: Any, told: Any, node: int) -> None:
    """Raise ``ValueError`` unless there are keys of as many nodes as the set-up has shares.

    Flower's mod checks that the client's own keys are among them. It compares keys as texts, and a
    key can be encoded in several ways.
    """
    keys = {int(name): pair for name, pair in asked.items() if name != Key.STAGE}
    _require(len(keys) == len(asked) - 1 == told["share_num"], f"keys of {len(keys)} nodes")
    _require(node in keys, "this node's keys are missing")
    read: Any = secaggplus_workflow.bytes_to_public_key  # type: ignore[attr-defined]
    points = {read(key).public_numbers() for pair in keys.values() for key in pair}
    _require(len(points) == 2 * len(keys), "a key belongs to two nodes")


def _check_nodes(named: list[int], known: list[int]) -> None:
    """Raise ``ValueError`` unless exactly the known nodes are named, each once."""
    _require(sorted(named) == sorted(known), f"named are {sorted(named)}, expected {sorted(known)}")


def _claim_answer(public_key: bytes, stage: str) -> None:
    """Raise ``FileExistsError`` if a set-up's request has been answered, by whichever process.

    ``Context.state`` cannot tell, as two processes of a site may begin with the same state.
    """
    folder = home() / "secure"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process deletes it, too
            if path.stat().st_mtime < time.time() - _DAY:
                path.unlink()
    mark = folder / f"{hashlib.sha256(public_key).hexdigest()}-{stage}"
    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
