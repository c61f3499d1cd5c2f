"""The client's part: Flower's mod for SecAgg+, applied to training in fairflower's ClientApp.

Flower's mod answers the four messages of a round. For the third message it calls the app, which
trains, and then masks the app's reply; it expects the records of Flower's classic API.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)

from fairflower.arrays import arrays_of, record_of
from fairflower.config.secure import KEY
from fairflower.errors import logger
from fairflower.secure.requests import check_request, claim_round, has_masked
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

App = Callable[[Message, Context], Message]


def secure_mod(message: Message, context: Context, call_next: App) -> Message:
    """Mask the reply to a train message that belongs to Flower's SecAgg+ protocol.

    Messages of type `MEASURE` go to the app once in a round. Other train messages go directly to
    the app, unless the run or the node config requires secure aggregation: then ``ValueError`` is
    raised, so that no unmasked model leaves the client. It is also raised, with the text `REFUSED`,
    for requests that do not follow the protocol, and for updates out of range. Only the site's own
    log has the reason, because the server could ask again and again until the reason tells it more.
    """
    records = message.content.config_records
    config = records.get("config", ConfigRecord())
    measures = message.metadata.message_type == MEASURE
    if not measures and RECORD_KEY_CONFIGS not in records:
        insists = (config, context.node_config, context.run_config)
        if any(source.get(KEY) for source in insists) or has_masked(message, context):
            raise ValueError(
                "the server asked for an unmasked model, but secure-aggregation = true is set for "
                "this run or in this site's node config. Nothing was sent"
            )
        return call_next(message, context)
    failures: list[Exception] = []

    def app(request: Message, _: Context) -> Message:
        try:
            return call_next(request, context)
        except FloatingPointError:  # training diverged
            raise
        except Exception as error:
            failures.append(error)
            raise

    try:
        if measures:
            claim_round(message, context, "measure")
            return app(message, context)
        return _answer(message, context, app)
    except Exception as error:
        if error in failures:
            raise
        logger.warning("This client did not answer the server: %s", error or repr(error))
        raise ValueError(REFUSED) from None


def _answer(message: Message, context: Context, app: App) -> Message:
    """Return the reply of Flower's mod; raise an exception if the client refuses the request."""
    config = message.content.config_records.get("config", ConfigRecord())
    unmasks = message.content.config_records[RECORD_KEY_CONFIGS].get(Key.STAGE) == Stage.UNMASK
    check_request(message, context)

    def masked(request: Message, _: Context) -> Message:
        reply = _as_classic(request, app(request, context))
        # Seed Flower's random rounding, so that runs are reproducible.
        parts = (config.get(name, 0) for name in ("seed", "client-id", "server-round"))
        seed = derive_seed(*parts, "rounding")  # type: ignore[arg-type]
        np.random.seed(seed % 2**32)
        return reply

    with _numpy_random_state():
        reply = secaggplus_mod(message, context, masked)
    if unmasks:  # nothing needs these keys and shares any more
        del context.state[RECORD_KEY_STATE]
    return reply


def _as_classic(request: Message, reply: Message) -> Message:
    """Return a train reply in classic Flower's format: a vector, the weight and the metrics."""
    content = reply.content
    if beside := [name for name in content.array_records if name != "arrays"]:
        raise ValueError(
            f"the client's method returns {beside[0]!r} in addition to the model, and secure "
            "aggregation does not mask it"
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
