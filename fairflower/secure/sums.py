"""Exact sums of integers over sites, by a masked exchange in which nobody trains.

The protocol adds numbers from -`CLIPPING` to `CLIPPING`, which it rounds to integers below the
quantization range. Integers are sent as digits to this base, which need no rounding.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from fairflower.config.secure import KEY
from fairflower.errors import ConfigError
from fairflower.numerics import Vector
from fairflower.secure.protocol import (
    SMALLEST_SUM,
    Halted,
    LostClients,
    Send,
    masked_mean,
    masked_sizes,
    readable,
)
from fairflower.secure.vectors import CHECKS, CLIPPING, MaskingInstructions, quantization_range

#: Key in the config of a message that asks for integers instead of a model, with their bits.
SUMS = "secure.sums"


def vector_of(integers: Sequence[int], bits: int, base: int) -> Vector:
    """Return the digits of integers below 2**``bits``, as numbers that the protocol masks.

    ``base`` is the quantization range.
    """
    digits = [n // base**k % base for n in integers for k in range(_places(bits, base))]
    return np.array(digits, np.float64) * (2 * CLIPPING / base) - CLIPPING


def totals_of(mean: Vector, clients: int, bits: int, base: int) -> list[int]:
    """Return the sums of integers from the mean of the clients' `vector_of`.

    Raises `Halted` if a digit is none, because a site used another weight or version.
    """
    exact = (mean + CLIPPING) * (clients * base / (2 * CLIPPING))
    digits = np.rint(exact)
    if not (np.abs(exact - digits) < 0.01).all():
        raise Halted("a site used another weight, or has another version of fairflower")
    rows = digits.astype(np.int64).reshape(-1, _places(bits, base)).tolist()
    return [sum(digit * base**k for k, digit in enumerate(row)) for row in rows]


def _places(bits: int, base: int) -> int:
    return -(-bits // (base.bit_length() - 1))


def sum_integers(
    send: Send, settings: ConfigRecord, names: Mapping[int, str], count: int, bits: int
) -> list[int]:
    """Return the sums over all sites of ``count`` integers below 2**``bits``.

    ``settings`` is the run config, and ``names`` has the sites' names by node. Raises
    ``ConfigError`` if there are fewer than three sites, or not all of them take part.
    """
    if len(names) < SMALLEST_SUM:
        raise ConfigError(
            f"{KEY} = true: the sums of tables need {SMALLEST_SUM} sites that train, and "
            f"{len(names)} do. Add sites, or declare ranges and levels with sums = false."
        )
    base = quantization_range(len(names))
    asked = MaskingInstructions(base, base, (0.0,) * CHECKS).to_config()
    config = {**settings, **asked, SUMS: bits}
    contents = {node: RecordDict({"config": ConfigRecord(config)}) for node in names}
    expected = [1, count * _places(bits, base)]

    def check(_: Message, reply: Message) -> None:
        if (sizes := masked_sizes(reply.content)) != expected:
            raise ValueError(f"sums of other columns: {sizes} numbers, expected {expected}")

    def usable(messages: Sequence[Message], replies: list[Message]) -> list[Message]:
        found, reasons = readable(messages, replies, check)
        if reasons:
            raise LostClients(reasons)
        return found

    try:
        mean = masked_mean(send, 0, contents, usable, names)
        return totals_of(mean, len(names), bits, base)
    except (Halted, LostClients) as error:
        reasons = error.reasons if isinstance(error, LostClients) else {}
        texts = [f"{names[node]}: {why}" for node, why in reasons.items()] or [str(error)]
        raise ConfigError(
            f"{KEY} = true: the sums of the sites' tables, in which all sites have to take part, "
            f"cannot be computed ({'; '.join(texts)}). A site takes part once in a run: start a "
            "new one."
        ) from error
