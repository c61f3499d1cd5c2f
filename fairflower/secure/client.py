"""The client's part: Flower's mod for SecAgg+, and what a client checks before it answers.

Flower's mod answers the four messages of a round. For the third message it calls the app, which
trains, and then masks the app's reply; it expects the records of Flower's classic API. The mod
trusts every request of the expected stage. A client of fairflower compares a request with the
protocol's constants and with what it was told before in this round, which Flower's mod keeps in
``Context.state``. ``docs/privacy.md`` says what it cannot see.
"""

import hashlib
import os
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict

from fairflower.arrays import arrays_of, record_of
from fairflower.config.run import is_setting
from fairflower.config.secure import CONSORTIUM, KEY, TRAINED
from fairflower.errors import logger
from fairflower.flower_compat import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
    is_supernode,
    secaggplus_mod,
    secaggplus_workflow,
)
from fairflower.paths import home
from fairflower.secure.consortium import Consortium, NotSigned
from fairflower.secure.protocol import (
    MAX_SHARES,
    SIGN_LIST,
    SIGNED,
    SMALLEST_SUM,
    aes_masks,
    constants_of,
)
from fairflower.secure.sums import SUMS
from fairflower.secure.vectors import MaskingInstructions, encode
from fairflower.seeds import derive_seed

#: Message type of the first exchange. A site with an older version has no function for this type
#: and answers with an error. It does not train, and no array leaves it.
MEASURE = "train.measure"

#: What the server reads, whatever the reason is.
REFUSED = (
    "this client did not answer the server. Either the request does not follow secure aggregation, "
    "or training diverged or gave an update that is out of range (lower train.lr). The site's own "
    "log has the reason. Nothing was sent"
)

#: The same for sums of a table, for which nobody trains.
REFUSED_SUMS = (
    "this site did not answer the server. Either the request for sums of its table does not follow "
    "secure aggregation (a run asks once: start a new one), or the table does not follow the "
    "schema; the site's own log says which column. Nothing was sent"
)

#: Examples on which a client can test, other than its test examples; see the app.
_SPLITS = ("train", "validation")

#: Record of ``Context.state`` with the last rounds in which the client measured and trained.
_ROUNDS = "fairflower.secure"

App = Callable[[Message, Context], Message]


def secure_mod(message: Message, context: Context, call_next: App) -> Message:
    """Mask the reply to a train message that belongs to Flower's SecAgg+ protocol.

    Messages of type `MEASURE` go to the app, once in a round. Other train messages do if neither
    the run nor the node config requires secure aggregation; else ``ValueError`` is raised. It has
    the text `REFUSED` for requests that do not follow the protocol and for updates out of range;
    only the site's own log has the reason.
    """
    records = message.content.config_records
    measures = message.metadata.message_type == MEASURE
    if not measures and RECORD_KEY_CONFIGS not in records:
        if must_mask(message, context):
            raise ValueError(
                "the server asked for an unmasked model, but secure-aggregation = true is set for "
                "this run or in this site's node config. Nothing was sent"
            )
        return call_next(message, context)
    failures: list[Exception] = []

    def answer(request: Message, _: Context) -> Message:
        try:
            reply = call_next(request, context)
        except Exception as error:
            if not isinstance(error, FloatingPointError):  # divergence gets the fixed text
                failures.append(error)
            raise
        return reply if measures else _as_classic(request, reply)

    random_state = np.random.get_state()  # Flower's rounding uses it
    try:
        if measures:
            claim_round(message, context, "measure")
            return answer(message, context)
        consortium = Consortium.of(context.node_config)
        asked: Any = records[RECORD_KEY_CONFIGS]
        stage = asked.get(Key.STAGE)
        check_request(message, context, consortium)
        if consortium and stage == SIGN_LIST:
            told: Any = context.state.config_records[RECORD_KEY_STATE]
            proofs = records.get(SIGNED, ConfigRecord())
            present, threshold = asked[Key.ACTIVE_NODE_ID_LIST], told["threshold"]
            signed = consortium.sign_list(present, threshold, proofs, context)
            return Message(RecordDict({RECORD_KEY_CONFIGS: signed}), reply_to=message)
        with aes_masks():
            reply: Message = secaggplus_mod(message, context, answer)
        if consortium and stage == Stage.SETUP:
            keys: Any = reply.content.config_records[RECORD_KEY_CONFIGS]
            pair = [keys[Key.PUBLIC_KEY_1], keys[Key.PUBLIC_KEY_2]]
            place = _place(message, context)
            reply.content[SIGNED] = consortium.sign_keys(place, context.node_id, pair)
        elif consortium and stage == Stage.COLLECT_MASKED_VECTORS:
            reply.content[SIGNED] = consortium.sign_request(context)
        return reply
    except Exception as error:
        if error in failures:
            raise
        raise _refusal(error, SUMS in records.get("config", {})) from None
    finally:
        np.random.set_state(random_state)


def limit_tests(message: Message, context: Context, call_next: App) -> Message:
    """Test a model once in a round on each split if the client masks its models; a mod.

    Else a server could compute a client's gradient from the losses of many models.
    """
    if message.metadata.message_type == MessageType.EVALUATE and must_mask(message, context):
        try:
            config = message.content.config_records["config"]
            _require("own-model" not in config, "a model that a client keeps would have no mask")
            split = config.get("split")
            claim_round(message, context, f"test on {split if split in _SPLITS else 'test'}")
        except Exception as error:
            raise _refusal(error) from None
    return call_next(message, context)


def _refusal(reason: Exception, of_sums: bool = False) -> ValueError:
    """Log the reason, and return the exception with the text that the server reads."""
    logger.warning("This client did not answer the server: %s", str(reason) or repr(reason))
    said = REFUSED_SUMS if of_sums else REFUSED
    return ValueError(f"{reason}. Nothing was sent" if isinstance(reason, NotSigned) else said)


def _as_classic(request: Message, reply: Message) -> Message:
    """Return a train reply in classic Flower's format: a vector, the weight and the metrics."""
    content = reply.content
    if beside := [name for name in content.array_records if name != "arrays"]:
        raise ValueError(
            f"the client's method returns {beside[0]!r} in addition to the model, and secure "
            "aggregation does not mask it"
        )
    config = request.content.config_records["config"]
    instructions = MaskingInstructions.from_config(config)
    sent = arrays_of(content.array_records["arrays"])
    if SUMS in config:
        _require(instructions.ratio == 1, "sums with a weight")
        vector = sent["sums"]
    else:
        received = arrays_of(request.content.array_records["arrays"])
        trained: Any = content.config_records.get(TRAINED, ConfigRecord()).get("names")
        vector = encode(received, sent, instructions, trained)
    # Seed Flower's random rounding, so that runs are reproducible.
    parts = (config.get(name, 0) for name in ("seed", "client-id", "server-round"))
    np.random.seed(derive_seed(*parts, "rounding") % 2**32)  # type: ignore[arg-type]
    classic: dict[str, Any] = {
        "metrics": content.metric_records.get("metrics", MetricRecord()),
        "fitres.parameters": record_of({"vector": vector}),
        "fitres.num_examples": MetricRecord({"num_examples": instructions.weight}),
        "fitres.metrics": ConfigRecord(),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    }
    return Message(RecordDict(classic), reply_to=request)


def check_request(message: Message, context: Context, consortium: Consortium | None = None) -> None:
    """Raise an exception unless a request of the masked exchange follows the protocol.

    With a consortium, its sites must have signed keys and lists. A request for a masked vector
    uses up the client's part of the round, even if training fails.
    """
    records, node = message.content.config_records, context.node_id
    asked: Any = records[RECORD_KEY_CONFIGS]
    told: Any = context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord())
    kind, stage = message.metadata.message_type, asked.get(Key.STAGE)
    _require(kind == MessageType.TRAIN, f"the message has type {kind!r}, expected 'train'")
    if stage == Stage.SETUP:  # it may begin at any time
        _check_constants(asked)
        if consortium and asked[Key.SAMPLE_NUMBER] > MAX_SHARES:
            raise NotSigned(f"a site with a consortium file sums up to {MAX_SHARES} sites")
        return
    before, stages = told.get("current_stage"), Stage.all()
    signs = consortium and (before, stage) == (Stage.COLLECT_MASKED_VECTORS, SIGN_LIST)
    _require(
        signs or (before, stage) in pairwise(stages), f"{stage!r} does not follow after {before!r}"
    )
    if stage == Stage.SHARE_KEYS:
        keys, signed = _check_keys(asked, told, node), records.get(SIGNED, ConfigRecord())
        if consortium:
            consortium.check_keys(_place(message, context), keys, signed, context)
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        _check_nodes([*asked[Key.SOURCE_LIST], node], told["public_keys_dict:K"])
        most = MaskingInstructions.from_config(records["config"]).range
        _require(most == told["target_range"], f"the largest weight {most} is not the set-up's")
        if SUMS in records["config"]:
            _claim_sums(message, context)
        else:
            claim_round(message, context, "train")
        if consortium:
            consortium.note_request(message.content.array_records, records["config"], context)
    elif stage == Stage.UNMASK:
        present = asked[Key.ACTIVE_NODE_ID_LIST]
        _check_nodes([*present, *asked[Key.DEAD_NODE_ID_LIST]], told["rd_seed_share_dict:K"])
        _require(node in present, "this node is named as absent")
        _require(len(present) >= told["threshold"], f"only {present} are present")
        if consortium:
            signed = records.get(SIGNED, ConfigRecord())
            consortium.check_list(present, told["threshold"], signed, context)
    _mark(context, f"{told['pk1']!r} {stage}")


def _place(message: Message, context: Context) -> list[Any]:
    """Return the Flower run and the round in which a site has measured last."""
    kept: Any = context.state.config_records.get(_ROUNDS, ConfigRecord())
    return [message.metadata.run_id, kept.get(_run_of(message, context) + "measure", 0)]


def claim_round(message: Message, context: Context, task: str) -> None:
    """Note that the client measures, trains or tests in a round; raise an exception unless it may.

    It measures once and then trains once in a round, and tests once on each split. Rounds only
    increase, and a run keeps its settings.
    """
    config: Any = message.content.config_records["config"]
    run = _run_of(message, context)
    fixed = {key: value for key, value in config.items() if is_setting(key) or key == "run-id"}
    if config.get("train.lr-warmup") or config.get("train.lr-schedule", "constant") != "constant":
        fixed.pop("train.lr", None)  # it has the value of the round
    digest = hashlib.sha256(repr(sorted(fixed.items())).encode()).hexdigest()
    kept: Any = context.state.config_records.get(_ROUNDS, ConfigRecord())
    now, last = config["server-round"], kept.get(run + task, 0)
    follows = type(now) is int and last < now <= config["num-server-rounds"]
    _require(follows, f"round {now} to {task} does not follow after round {last}")
    _require(task != "train" or kept.get(run + "measure") == now, f"round {now} has no measuring")
    _require(kept.get(run + "settings", digest) == digest, "the run's settings have changed")
    # A client of these sends back what it received: its update is 0, and the sum another's.
    _require("reference" not in config, f"a reference, {config.get('reference')!r}, under masks")
    context.state[_ROUNDS] = ConfigRecord({**kept, run + task: now, run + "settings": digest})
    _mark(context, f"{context.node_id} {run}{config.get('run-id')} {task} {now}")


def _claim_sums(message: Message, context: Context) -> None:
    """Note that the client sums integers; raise an exception if it has in this run.

    Else two sums, in which one client differs, would show this client's integers.
    """
    kept: Any = context.state.config_records.get(_ROUNDS, ConfigRecord())
    claimed = f"{_run_of(message, context)}sums"
    _require(claimed not in kept, "the run asks again for sums of the table")
    context.state[_ROUNDS] = ConfigRecord({**kept, claimed: 1})
    _mark(context, f"{context.node_id} {claimed}")


def must_mask(message: Message, context: Context) -> bool:
    """Return whether a message, its run, or the node config asks for masked models.

    The run does if its earlier messages did; at a SuperNode, also if the Flower run's config does.
    """
    sources = [message.content.config_records.get("config", {}), context.node_config]
    sources += [context.run_config] * is_supernode(context)
    kept = context.state.config_records.get(_ROUNDS, ConfigRecord())
    asked = any(s.get(KEY) for s in sources) or CONSORTIUM in context.node_config
    return asked or _run_of(message, context) + "settings" in kept


def _run_of(message: Message, context: Context) -> str:
    """Return the prefix of a run's entries; only simulations have several runs in a Flower run."""
    config = message.content.config_records.get("config", ConfigRecord())
    own = "" if is_supernode(context) else repr(config.get("run-id"))
    return f"{message.metadata.run_id} {own} "


def _check_constants(asked: Any) -> None:
    """Raise ``ValueError`` unless a set-up has the protocol's constants for its clients."""
    clients = asked.get(Key.SAMPLE_NUMBER)
    possible = type(clients) is int and SMALLEST_SUM <= clients <= 2**20
    _require(possible, f"{Key.SAMPLE_NUMBER} = {clients!r}, expected at least {SMALLEST_SUM}")
    for key, value in constants_of(clients).items():
        text = f"{key} = {asked.get(key)!r}, expected {value!r} for {clients} clients"
        _require(type(asked.get(key)) is type(value) and asked[key] == value, text)


def _check_keys(asked: Any, told: Any, node: int) -> dict[int, list[bytes]]:
    """Return the nodes' keys if they are different, and of as many nodes as there are shares.

    Raises ``ValueError`` otherwise.
    """
    keys = {int(name): pair for name, pair in asked.items() if name != Key.STAGE}
    _require(len(keys) == len(asked) - 1 == told["share_num"], f"keys of {len(keys)} nodes")
    _require(node in keys, "this node's keys are missing")
    # Flower's mod compares encoded keys, and a key has several encodings.
    read: Any = secaggplus_workflow.bytes_to_public_key
    # Points with the same x, a key and its negative, give the same shared secret.
    points = {read(key).public_numbers().x for pair in keys.values() for key in pair}
    _require(len(points) == 2 * len(keys), "a key belongs to two nodes")
    return keys


def _check_nodes(named: list[int], known: list[int]) -> None:
    """Raise ``ValueError`` unless exactly the known nodes are named, each once."""
    _require(sorted(named) == sorted(known), f"named are {sorted(named)}, expected {sorted(known)}")


def _mark(context: Context, answer: str) -> None:
    """Raise ``FileExistsError`` if another process of the site has answered, whatever its state."""
    if not {"domain", CONSORTIUM} & context.node_config.keys():
        return
    folder = home() / "secure"
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        with suppress(OSError):  # another process deletes it, too, or it is another user's
            if path.stat().st_mtime < time.time() - 24 * 3600:
                path.unlink()
    mark = folder / hashlib.sha256(answer.encode()).hexdigest()
    os.close(os.open(mark, os.O_CREAT | os.O_EXCL))


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)
