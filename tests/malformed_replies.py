"""Values that no honest client sends, and replies with such a value in one field."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

#: Values for a metric.
NUMBERS: tuple[float | list[float], ...] = (
    *(float("nan"), float("inf"), float("-inf"), [], [1.0], [float("nan")] * 3),
    *(10**400, -(10**400), 10**5000, -(10**5000), 2**1024, 2**63, 2**64, 2**53 + 1, -(2**63)),
    *(1.7976931348623157e308, -1.7976931348623157e308, 1e200, -1e200, 3.5e38, 1e20, 1e-200),
    *(5e-324, -5e-324, 0, 0.0, -0.0, -1, -0.5, 0.5, 1, 2, 1 + 1e-16, 1e9, -1e9),
)

#: Values for texts, and for names of metrics, arrays and records.
TEXTS = (
    *(
        "",
        " ",
        "\0",
        "\n",
        "a\nb",
        "\ud800",
        "é" * 3,
        "\x1b[31m",
        "[bold]",
        "%s",
        "{0}",
        "../..",
        "/",
    ),
    *(",", '"', "accuracy", "num-examples", "client-id", "state-round", "__class__", "x" * 100_000),
)

#: Fill values for an array of the same shape and dtype, and other dtypes.
VALUES = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e20, -1e20, 1e9, 1e-45, -1.0, 0.0, 1.0)
DTYPES = (
    *("f2", "f4", "f8", "g", ">f4", ">f8", "c8", "c16", "g", "?", "i1", "i8", "u1", "u8", ">i8"),
    *("S3", "U3", "M8[s]", "m8[s]", "V4", "i4,f4", "(2,)f4"),
)


def npy_bytes(array: NDArray[Any]) -> bytes:
    """Return the bytes that `numpy.save` writes for an array."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npy_header(text: str, version: int = 1) -> bytes:
    """Return the start of a file in the format of `numpy.save`, with any header."""
    size = len(text).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + size + text.encode()


def bytes_for(array: NDArray[Any]) -> Iterator[bytes]:
    """Yield bytes to send instead of the bytes of an array."""
    whole = npy_bytes(array)
    yield from (b"", b"<html>", whole[:6], whole[:7], whole[:-1], whole + b"\0" * 9, whole[::-1])
    yield whole.replace(b"NUMPY\x01", b"NUMPY\x09")
    form = "{'descr': %s, 'fortran_order': %s, 'shape': %s}"
    shapes = ("()", "(-1,)", "(2**62,)", "(4294967296, 4294967296)", "(1e3,)", "[3]", "(True,)")
    for shape in (*shapes, "(9223372036854775807, 3)", "(0,)", f"({'9' * 5000},)", "None"):
        yield npy_header(form % ("'<f4'", "False", shape)) + bytes(48)
    for descr in ("'O'", "'|V0'", "'<U0'", "None", "[]", "'<f4,<f4'", "'<f3'", "'__import__'"):
        yield npy_header(form % (descr, "False", array.shape)) + bytes(96)
    yield npy_header(form % ("'<f4'", "7", array.shape)) + bytes(48)
    yield npy_header("[" * 9000) + bytes(48)
    yield npy_header("(" * 300 + ")" * 300, 2) + bytes(48)
    yield npy_header("{}", 2)
    yield b"\x93NUMPY\x02\x00\xff\xff\xff\xff"


@cache  # many replies have the same arrays
def arrays_for(data: bytes) -> list[Array]:
    """Return Flower arrays to send instead of an array, given the bytes of the array."""
    return list(_arrays_for(np.load(io.BytesIO(data))))


def _arrays_for(array: NDArray[Any]) -> Iterator[Array]:
    for value in VALUES:
        with np.errstate(invalid="ignore"):
            yield Array(np.full_like(array, value))
    for dtype in DTYPES:
        yield _packed(np.zeros(array.shape, dtype))
    yield _packed(np.full(array.shape, np.longdouble("1e4000")))
    yield _packed(np.full(array.shape, 1e300))
    shapes = ((), (0,), (1,), (0, 3), (array.size + 1,), (2, *array.shape), (*array.shape[::-1], 1))
    for shape in shapes:
        yield _packed(np.zeros(shape, array.dtype))
    yield _packed(np.asfortranarray(array))
    yield _packed(np.ones(array.shape, array.dtype)[..., None])
    for data in bytes_for(array):
        yield Array(str(array.dtype), array.shape, "numpy.ndarray", data)
    whole = npy_bytes(array)
    yield Array("junk", (-1,), "numpy.ndarray", whole)
    yield Array("float32", (10**9,), "torch.Tensor", whole)
    yield Array("", (), "", whole)


def _packed(array: NDArray[Any]) -> Array:
    return Array(str(array.dtype), array.shape, "numpy.ndarray", npy_bytes(array))


@dataclass(frozen=True)
class Mutation:
    """A change of one field of a reply to an invalid value."""

    field: str
    value: str
    change: Callable[[RecordDict], None]

    def __str__(self) -> str:
        return f"{self.field} = {self.value[:60]}"

    def __call__(self, message: Message) -> Message:
        self.change(message.content)
        return message


def mutations(content: RecordDict) -> Iterator[Mutation]:
    """Yield all mutations of one field of a reply with this content."""
    for key in list(content):
        yield Mutation(key, "no record", lambda c, key=key: c.pop(key))
        for other in (ArrayRecord(), MetricRecord(), ConfigRecord()):
            name = type(other).__name__
            yield Mutation(key, f"an empty {name}", lambda c, k=key, o=other: _set(c, k, o))
        for text in TEXTS:
            yield Mutation(key, f"renamed {text!r}", lambda c, k=key, t=text: _set(c, t, c.pop(k)))
        record = content[key]
        if isinstance(record, MetricRecord):
            yield from _on_metrics(key, record)
        elif isinstance(record, ArrayRecord):
            yield from _on_arrays(key, record)
    for text in (*TEXTS, "config"):
        config = ConfigRecord({"run-id": text, "client-id": 10**400, "server-round": -1})
        yield Mutation("config", repr(text), lambda c, t=text, v=config: _set(c, t, v))


def _on_metrics(key: str, record: MetricRecord) -> Iterator[Mutation]:
    for name in (*record, "state-round", "unasked", "accuracy", "personal_accuracy"):
        for number in NUMBERS:
            value = f"a number of {number.bit_length()} bits" if _long(number) else repr(number)
            yield Mutation(f"{key}[{name}]", value, lambda c, n=name, v=number: _set(c[key], n, v))
        if name in record:
            yield Mutation(f"{key}[{name}]", "missing", lambda c, n=name: c[key].pop(n))
    for text in TEXTS:
        yield Mutation(f"{key}[{text!r}]", "1.0", lambda c, t=text: _set(c[key], t, 1.0))


def _on_arrays(key: str, record: ArrayRecord) -> Iterator[Mutation]:
    for name in record:
        yield Mutation(f"{key}[{name}]", "missing", lambda c, n=name: c[key].pop(n))
        for i, bad in enumerate(arrays_for(record[name].data)):
            value = f"array {i}, {bad.dtype} {bad.shape} {len(bad.data)} bytes"
            yield Mutation(f"{key}[{name}]", value, lambda c, n=name, v=bad: _set(c[key], n, v))
        for text in TEXTS:
            yield Mutation(
                f"{key}[{name}]", f"named {text!r}", lambda c, n=name, t=text: _rename(c[key], n, t)
            )
    extra = Array(np.zeros(3, np.float32))
    for text in TEXTS:
        yield Mutation(f"{key}[{text!r}]", "added", lambda c, t=text: _set(c[key], t, extra))


def _set(place: Any, key: str, value: Any) -> None:
    place[key] = value


def _rename(place: Any, key: str, other: str) -> None:
    place[other] = place.pop(key)


def _long(number: object) -> bool:
    return isinstance(number, int) and number.bit_length() > 1100
