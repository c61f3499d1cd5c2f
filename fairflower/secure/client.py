"""The client's part: Flower's mod for SecAgg+, applied to training in fairflower's ClientApp.

Flower's mod answers the four messages of a round. For the third message it calls the app, which
trains, and then masks the app's reply; it expects the records of Flower's classic API.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict

from fairflower.arrays import arrays_of, record_of
from fairflower.config.secure import TRAINED
from fairflower.errors import logger
from fairflower.flower_compat import RECORD_KEY_CONFIGS, secaggplus_mod
from fairflower.secure.masks import aes_masks
from fairflower.secure.requests import check_request, claim_round, must_mask
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

#: Examples on which a client can test, other than its test examples; see the app.
_SPLITS = ("train", "validation")

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
        check_request(message, context)
        with aes_masks():
            reply: Message = secaggplus_mod(message, context, answer)
        return reply
    except Exception as error:
        if error in failures:
            raise
        raise _refusal(error) from None
    finally:
        np.random.set_state(random_state)


def limit_tests(message: Message, context: Context, call_next: App) -> Message:
    """Test a model once in a round on each split if the client masks its models; a mod.

    Else a server could compute a client's gradient from the losses of many models.
    """
    if message.metadata.message_type == MessageType.EVALUATE and must_mask(message, context):
        try:
            split = message.content.config_records["config"].get("split")
            claim_round(message, context, f"test on {split if split in _SPLITS else 'test'}")
        except Exception as error:
            raise _refusal(error) from None
    return call_next(message, context)


def _refusal(reason: Exception) -> ValueError:
    """Log the reason, and return the exception with the text that the server reads."""
    logger.warning("This client did not answer the server: %s", str(reason) or repr(reason))
    return ValueError(REFUSED)


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
    received = arrays_of(request.content.array_records["arrays"])
    trained: Any = content.config_records.get(TRAINED, ConfigRecord()).get("names")
    vector = encode(received, arrays_of(content.array_records["arrays"]), instructions, trained)
    # Seed Flower's random rounding, so that runs are reproducible.
    parts = (config.get(name, 0) for name in ("seed", "client-id", "server-round"))
    np.random.seed(derive_seed(*parts, "rounding") % 2**32)  # type: ignore[arg-type]
    classic: dict[str, Any] = {
        "metrics": content.metric_records["metrics"],
        "fitres.parameters": record_of({"vector": vector}),
        "fitres.num_examples": MetricRecord({"num_examples": instructions.weight}),
        "fitres.metrics": ConfigRecord(),
        "fitres.status": ConfigRecord({"code": 0, "message": ""}),
    }
    return Message(RecordDict(classic), reply_to=request)
