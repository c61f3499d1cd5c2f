"""Flower's SecAgg+ workflow for one round of messages, on any grid.

The workflow belongs to Flower's classic API: it asks a strategy which clients train, sends four
messages to each of them, and passes the weighted mean to the strategy. Here one object stands in
for the strategy and for the grid, which adds the model and the config to the messages of the third
stage, in which clients train.
"""

import hashlib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from fairflower.arrays import view
from fairflower.errors import RoundFailed, logger, shorten_error
from fairflower.flower_compat import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    RECORD_KEY_CONFIGS,
    FitIns,
    Key,
    LegacyContext,
    Parameters,
    SecAggPlusWorkflow,
    Stage,
    WorkflowKey,
    parameters_to_ndarrays,
    secaggplus_mod,
    secaggplus_workflow,
)
from fairflower.numerics import Vector
from fairflower.process_wide import Setting, process_wide
from fairflower.secure.vectors import CLIPPING, quantization_range

Send = Callable[[list[Message]], list[Message]]

#: Smallest number of clients in a sum: with two, each would know the other's model.
SMALLEST_SUM = 3

#: Elliptic curve of the keys in Flower's protocol.
CURVE = "secp384r1"

#: Largest number of clients among which a client's keys are shared, including this client.
MAX_SHARES = 33

#: Record with the sites' signatures, next to the protocol's, if they have a consortium file; and
#: the additional stage, before the last, in which they sign the list of those that are present.
SIGNED, SIGN_LIST = "fairflower.signed", "sign_list"


class Halted(RoundFailed):
    """A round in which no sum could be computed; the message says why."""


class LostClients(Exception):
    """Clients that failed before training, with the reason by node; the others start again."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__(str(dict(reasons)))
        self.reasons = dict(reasons)


def shares_of(clients: int) -> tuple[int, int]:
    """Return the number of shares of a client's keys, and the number needed to restore them.

    >>> [shares_of(K) for K in (3, 4, 5, 10, 20, 100)]
    [(3, 3), (4, 3), (5, 3), (10, 6), (20, 11), (33, 17)]
    """
    shares = min(clients, MAX_SHARES)
    return shares, max(SMALLEST_SUM, shares // 2 + 1)


def constants_of(clients: int) -> dict[str, int | float]:
    """Return the protocol's constants, which a set-up for this number of clients names."""
    shares, threshold = shares_of(clients)
    return {
        Key.SHARE_NUMBER: shares,
        Key.THRESHOLD: threshold,
        Key.CLIPPING_RANGE: CLIPPING,
        Key.TARGET_RANGE: quantization_range(clients),
        Key.MOD_RANGE: 2**32,
        Key.MAX_WEIGHT: float(quantization_range(clients)),
    }


def masked_mean(
    send: Send,
    server_round: int,
    contents: Mapping[int, RecordDict],
    usable: Callable[[Sequence[Message], list[Message]], list[Message]],
    names: Mapping[int, str],
) -> Vector:
    """Return the weighted mean of the clients' vectors, by Flower's protocol.

    ``send`` sends messages and returns the replies that arrive before the timeout. ``contents`` has
    the content of the train message for each node. ``usable`` gets the train messages and their
    replies, and returns the replies that may be added to the sum, or raises `Halted`. ``names``
    has the nodes' names for messages.

    Raises ``Halted`` if too few clients are left to remove the masks; and ``LostClients`` if
    clients fail before training.
    """
    count = len(contents)
    shares, threshold = shares_of(count)
    workflow = SecAggPlusWorkflow(
        num_shares=1.0 if shares == count else shares,
        reconstruction_threshold=threshold / shares if shares == count else threshold,
        max_weight=float(quantization_range(count)),
        clipping_range=CLIPPING,
        quantization_range=quantization_range(count),
    )
    partner = _Partner(send, contents, usable, names)
    config = ConfigRecord({WorkflowKey.CURRENT_ROUND: server_round})
    state = RecordDict({MAIN_CONFIGS_RECORD: config, MAIN_PARAMS_RECORD: ArrayRecord()})
    context = Context(run_id=0, node_id=0, node_config={}, state=state, run_config={})
    try:
        with aes_masks():
            workflow(partner, LegacyContext(context, strategy=partner, client_manager=partner))
    except Exception as error:
        if error is partner.failure:
            raise
        raise Halted(
            f"a client's reply does not follow Flower's protocol ({type(error).__name__}: {error})."
            " All sites must have this version of fairflower, and versions of Flower that work "
            "together"
        ) from error
    if partner.mean is None:
        raise Halted(
            f"{partner.answered} of {count} clients {partner.task}. Removing the masks requires "
            f"{threshold} of the {shares} clients that share a client's keys"
        )
    return partner.mean


class _Partner:
    """Grid, strategy and client manager of the workflow, for one exchange of messages per stage."""

    def __init__(
        self, send: Send, contents: Mapping[int, RecordDict], usable: Any, names: Mapping[int, str]
    ) -> None:
        self._send, self._contents, self._usable, self._names = send, contents, usable, names
        self.answered, self.task = len(contents), "answered"
        self.mean: Vector | None = None
        #: Names and signatures of the sites' keys, by node; empty without a consortium.
        self._signed: dict[int, ConfigRecord] = {}
        self._requests: dict[int, ConfigRecord] = {}  # likewise, of what each has seen
        #: Exception of an exchange; all others come from Flower's handling of the replies.
        self.failure: Exception | None = None

    def num_available(self) -> int:
        return len(self._contents)

    def configure_fit(self, *_: Any) -> list[tuple[Any, FitIns]]:
        nothing = FitIns(Parameters([], "numpy.ndarray"), {})
        return [(SimpleNamespace(node_id=node), nothing) for node in self._contents]

    def aggregate_fit(self, _: int, results: list[Any], __: Any) -> tuple[None, dict[str, Any]]:
        (mean,) = parameters_to_ndarrays(results[0][1].parameters)
        self.mean = np.asarray(mean, np.float64)
        return None, {}

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        try:
            return self._exchange(list(messages))
        except Exception as error:
            self.failure = error
            raise

    def _exchange(self, messages: list[Message]) -> list[Message]:
        stage = str(messages[0].content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
        trains = stage == Stage.COLLECT_MASKED_VECTORS
        if trains:
            for message in messages:
                secret = message.content.config_records[RECORD_KEY_CONFIGS]
                content = self._contents[message.metadata.dst_node_id]
                message.content = RecordDict({**content, RECORD_KEY_CONFIGS: secret})
        if self._signed and stage == Stage.SHARE_KEYS:
            self._add_signatures(messages, self._signed)
        elif self._signed and stage == Stage.UNMASK:
            self._add_signatures(messages, self._signed_lists(messages))
        replies = self._send(messages)
        if trains:
            replies = self._usable(messages, replies)
            self._requests, _ = _signatures(replies)
            self.task = "sent a masked vector"
        else:
            replies, reasons = readable(messages, replies, partial(_check_reply, stage, set()))
            if stage == Stage.SETUP:
                self._signed, unsigned = _signatures(replies)
                reasons |= unsigned
            if stage != Stage.UNMASK and reasons:
                raise LostClients(reasons)
            self.task = "helped to remove the masks"
            self._warn("does not help to remove the masks", reasons)
        self.answered = len(replies)
        return replies

    def _signed_lists(self, messages: Sequence[Message]) -> dict[int, ConfigRecord]:
        """Ask the present sites to sign the list of themselves; return the signatures by node."""
        present = sorted(message.metadata.dst_node_id for message in messages)
        asked = ConfigRecord({Key.STAGE: SIGN_LIST, Key.ACTIVE_NODE_ID_LIST: present})
        requests = [Message(RecordDict({RECORD_KEY_CONFIGS: asked}), k, "train") for k in present]
        self._add_signatures(requests, self._requests)
        check = partial(_check_reply, SIGN_LIST, set())
        replies, reasons = readable(requests, self._send(requests), check)
        self._warn("does not sign the list of present sites", reasons)
        return {
            reply.metadata.src_node_id: reply.content.config_records[RECORD_KEY_CONFIGS]
            for reply in replies
        }

    def _warn(self, what: str, reasons: Mapping[int, str]) -> None:
        for node, reason in reasons.items():
            logger.warning("%s %s: %s", self._names[node], what, reason)

    def _add_signatures(
        self, messages: Sequence[Message], signed: Mapping[int, ConfigRecord]
    ) -> None:
        all_signed: dict[str, Any] = {
            "nodes": list(signed),
            "names": [self._signed[node]["name"] for node in signed],
            "signatures": [record["signature"] for record in signed.values()],
        }
        for message in messages:
            message.content = RecordDict({**message.content, SIGNED: ConfigRecord(all_signed)})


def _signatures(replies: Sequence[Message]) -> tuple[dict[int, ConfigRecord], dict[int, str]]:
    """Return the records with signed keys by node, and the reason for each node without one.

    Without any signature no site has a consortium file, and no reasons are returned.
    """
    records = {
        r.metadata.src_node_id: r.content.config_records.get(SIGNED, ConfigRecord())
        for r in replies
    }
    expected = {"name": str, "signature": bytes}
    signed = {k: r for k, r in records.items() if {n: type(v) for n, v in r.items()} == expected}
    unsigned = (records.keys() - signed.keys()) if signed else set()
    reason = "it does not sign its keys, as other sites require: its node config has no consortium"
    return signed, dict.fromkeys(unsigned, reason)


def masked_sizes(content: RecordDict) -> list[int]:
    """Return the lengths of a reply's masked arrays; raise an exception if Flower cannot add them.

    The first array is the masked weight, with length 1.
    """
    secaggplus_workflow.compat.recorddict_to_fitres(content, True)
    masked: Any = content.config_records[RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS]
    arrays = [view(Array("", (), "numpy.ndarray", data)) for data in masked]
    if any(array.dtype != np.int64 for array in arrays):
        raise ValueError(
            f"expected int64 arrays, got {', '.join(str(array.dtype) for array in arrays)}"
        )
    return [array.size for array in arrays]


def readable(
    messages: Sequence[Message],
    replies: Sequence[Message],
    check: Callable[[Message, Message], None],
) -> tuple[list[Message], dict[int, str]]:
    """Return the replies that can be used, and the reason for each node without one.

    ``check`` raises an exception if the reply to a message cannot be used.
    """
    requests = {m.metadata.dst_node_id: m for m in messages}
    nodes = {m.metadata.message_id: node for node, m in requests.items()}
    reasons = dict.fromkeys(requests, "no reply before the timeout")
    found = []
    for reply in replies:
        node = nodes.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
        if reply.has_error():
            reasons[node] = shorten_error(reply.error.reason or "it failed without a message")
        elif RECORD_KEY_CONFIGS not in reply.content.config_records:
            reasons[node] = "its ClientApp lacks secure_mod, the mod for secure aggregation"
        else:
            try:
                check(requests[node], reply)
            except Exception as error:
                reasons[node] = f"its reply does not follow Flower's protocol ({error!r})"
            else:
                reasons.pop(node, None)
                found.append(reply)
    return found, reasons


def _check_reply(stage: str, keys: set[Any], request: Message, reply: Message) -> None:
    """Raise an exception if Flower, or a client that gets the reply's key, cannot read it.

    ``keys`` are those of other clients in this stage.
    """
    asked: Mapping[str, Any] = request.content.config_records[RECORD_KEY_CONFIGS]
    answer: Mapping[str, Any] = reply.content.config_records[RECORD_KEY_CONFIGS]
    if stage == Stage.SETUP:
        for key in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
            point = secaggplus_workflow.bytes_to_public_key(answer[key])
            x = point.public_numbers().x  # all other clients would refuse equal ones
            if point.curve.name != CURVE or x in keys:
                raise ValueError(f"{key} is of another curve, or occurs twice")
            keys.add(x)
        return
    if stage == SIGN_LIST:
        if type(answer["signature"]) is not bytes:
            raise ValueError("expected a signature")
        return
    if stage == Stage.SHARE_KEYS:  # the request has the keys of all neighbors, by node
        nodes, secrets = answer[Key.DESTINATION_LIST], answer[Key.CIPHERTEXT_LIST]
        expected = {int(key) for key in asked if key != Key.STAGE} - {request.metadata.dst_node_id}
    else:
        nodes, secrets = answer[Key.NODE_ID_LIST], answer[Key.SHARE_LIST]
        expected = {*asked[Key.ACTIVE_NODE_ID_LIST], *asked[Key.DEAD_NODE_ID_LIST]}
    if sorted(nodes) != sorted(expected) or [*map(type, secrets)] != [bytes] * len(expected):
        raise ValueError(f"{stage}: expected bytes for each of {len(expected)} nodes")


# --- masks from AES, in place of Flower's generator, which takes 32 bits of a seed -----------
# A server that tries all 2^32 seeds would read the update of any client that has sent its masked
# vector, but that it names as failed to the others.

_GENERATORS = [
    Setting.of(module, "pseudo_rand_gen")
    for module in (sys.modules[secaggplus_mod.__module__], secaggplus_workflow)
]


def masks_of(seed: bytes, num_range: int, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Return int64 arrays of numbers below ``num_range``, a power of 2, from AES-256-CTR."""
    key = hashlib.sha256(seed).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()  # each key is used once
    drawn = [np.frombuffer(stream.update(bytes(4 * math.prod(shape))), "<u4") for shape in shapes]
    return [a.astype(np.int64).reshape(s) % num_range for a, s in zip(drawn, shapes, strict=True)]


def aes_masks() -> AbstractContextManager[None]:
    """Make Flower's mod and its workflow use `masks_of` in the block."""
    return process_wide(dict.fromkeys(_GENERATORS, masks_of))
