"""The client's part: Flower's mod for SecAgg+, applied to training in fairflower's ClientApp.

Flower's mod answers the four messages of a round. For the third message it calls the app, which
trains, and then masks the app's reply; it expects the records of Flower's classic API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fairflower.arrays import arrays_of, record_of
from fairflower.config.secure import KEY
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Key, Stage, secaggplus_mod
from fairflower.secure.protocol import SMALLEST_SUM
from fairflower.secure.vectors import MaskingInstructions, encode
from fairflower.seeds import derive_seed

#: Message type of the first exchange. A site with an older version has no function for this type
#: and answers with an error. It does not train, and no array leaves it.
MEASURE = "train.measure"

App = Callable[[Message, Context], Message]


def secure_mod(message: Message, context: Context, call_next: App) -> Message:
    """Mask the reply to a train message that belongs to Flower's SecAgg+ protocol.

    Other train messages go directly to the app. If the run or the node config requires secure
    aggregation, ``ValueError`` is raised instead, so that no unmasked model leaves the client. It
    is also raised for instructions with which the server could unmask a single update.
    """
    records = message.content.config_records
    config = records.get("config", ConfigRecord())
    if RECORD_KEY_CONFIGS not in records:
        if config.get(KEY) or context.node_config.get(KEY):
            raise ValueError(
                "the server asked for an unmasked model, but secure-aggregation = true is set for "
                "this run or in this site's node config. Nothing was sent"
            )
        return call_next(message, context)
    _check_instructions(message.metadata.message_type, records[RECORD_KEY_CONFIGS])

    def masked(request: Message, _: Context) -> Message:
        reply = _as_classic(request, call_next(request, context))
        # Seed Flower's random rounding, so that runs are reproducible.
        parts = (config.get(name, 0) for name in ("seed", "client-id", "server-round"))
        seed = derive_seed(*parts, "rounding")  # type: ignore[arg-type]
        np.random.seed(seed % 2**32)
        return reply

    with _numpy_random_state():
        return secaggplus_mod(message, context, masked)  # type: ignore[no-any-return]


def _check_instructions(message_type: str, instructions: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the server could unmask a single update by these instructions."""
    if message_type != "train":  # Flower's mod would pass it on without masking the reply
        raise ValueError(
            f"the server sent secure aggregation's instructions in a message of type "
            f"{message_type!r}, expected 'train'. Nothing was sent"
        )
    stage = instructions.get(Key.STAGE)
    if stage == Stage.SETUP:
        for key in (Key.SHARE_NUMBER, Key.THRESHOLD):
            if not (isinstance(number := instructions.get(key), int) and number >= SMALLEST_SUM):
                raise ValueError(
                    f"the server set {key} = {number!r} for secure aggregation, but fewer than "
                    f"{SMALLEST_SUM} do not hide this client's model. Nothing was sent"
                )
        shares, threshold = instructions[Key.SHARE_NUMBER], instructions[Key.THRESHOLD]
        if 2 * threshold <= shares:
            # One half could unmask a client's update as present, the other half as absent.
            raise ValueError(
                f"the server set {Key.THRESHOLD} = {threshold} for {shares} shares, but more than "
                "half must be needed to remove this client's mask. Nothing was sent"
            )
    elif stage == Stage.UNMASK:
        present = instructions.get(Key.ACTIVE_NODE_ID_LIST, [])
        if both := set(present).intersection(instructions.get(Key.DEAD_NODE_ID_LIST, [])):
            raise ValueError(
                f"the server named node {min(both)} as both present and absent, which would reveal "
                "its update. Nothing was sent"
            )


def _as_classic(request: Message, reply: Message) -> Message:
    """Return a train reply in classic Flower's format: a vector, the weight and the metrics."""
    content = reply.content
    if beside := [name for name in content.array_records if name != "arrays"]:
        raise ValueError(
            f"the client's method returns {beside[0]!r} in addition to the model, and secure "
            "aggregation does not mask it. Nothing was sent"
        )
    instructions = MaskingInstructions.from_config(request.content.config_records["config"])
    received = arrays_of(request.content.array_records["arrays"])
    vector = encode(received, arrays_of(content.array_records["arrays"]), instructions)
    classic: dict[str, Any] = {
        "metrics": content.metric_records["metrics"],
        "fitres.parameters": record_of({"vector": vector}),
        "fitres.num_examples": MetricRecord({"num_examples": instructions.weight}),
        "fitres.metrics": ConfigRecord(),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    }
    return Message(RecordDict(classic), reply_to=request)


@contextmanager
def _numpy_random_state() -> Iterator[None]:
    """Restore NumPy's global random state, which Flower's rounding uses."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)
