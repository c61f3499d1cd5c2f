"""Invalid values for fields of files, configs and messages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fairflower.arguments import ArgumentSpec


def nested(depth: int, kind: type = list) -> Any:
    """Return nested lists, or nested mappings."""
    value: Any = kind()
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


#: Description -> value, of every type in JSON as Python writes and reads it.
JSON_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "minus one": -1,
    "a fraction": 0.5,
    "a small number": 5e-324,
    "a large number": 1e308,
    "a large negative number": -1e308,
    "past 64 bits": 2**64,
    "past doubles": 10**400,
    "past doubles, negative": -(10**400),
    "nan": float("nan"),
    "infinity": float("inf"),
    "minus infinity": float("-inf"),
    "an empty text": "",
    "a text": "x.075",
    "a number's text": "7",
    "a null byte": "a\0b",
    "a lone surrogate": "a\ud800b",
    "a byte that is not UTF-8": "caf\udce9",
    "a path": "../..",
    "markup": "<script>[red]${a}\\",
    "a long text": "x" * 100_000,
    "an empty list": [],
    "a list": [1, "x", None],
    "a list of lists": [[1.0], [2.0, 3.0]],
    "an empty object": {},
    "an object": {"a": 1},
}

#: Those values, and values of types that only Python or TOML has.
PYTHON_VALUES: dict[str, Any] = JSON_VALUES | {
    "more digits than Python writes": 16**5000,
    "lists in lists": nested(2000),
    "tables in tables": nested(2000, dict),
    "bytes": b"x",
    "a complex number": 1j,
    "no class": "os:no_such",
    "a module's name with a null byte": "json:dumps\0",
}


def out_of_range(allowed: ArgumentSpec) -> Iterator[Any]:
    """Yield values that an argument does not accept: NaN, past both ends, and unknown words."""
    if allowed.range:
        yield math.nan
        yield max(allowed.range.low - 1, allowed.range.above)
        if (high := allowed.range.high) != math.inf:
            yield math.inf if high is None else high + 1
    if allowed.words:
        yield "something"
    if not allowed.range:
        yield 0
