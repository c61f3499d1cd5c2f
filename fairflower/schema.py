"""Checking values from JSON or TOML against types: the only checker of files that others wrote.

A type is a plain type, ``Annotated[float, Range(0, 1)]``, ``Annotated[str, re.compile(...)]``, a
``Literal`` of words, a list, tuple, dict or union of types, a ``TypedDict`` or a dataclass.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from fairflower.arguments import Range
from fairflower.errors import is_text, quoted

#: Integer that is at most 2**53; doubles represent all of these exactly.
Count = Annotated[int, Range(0, 2**53)]
#: Finite number.
Finite = Annotated[float, Range(-sys.float_info.max, sys.float_info.max)]
#: Name of a domain, class or group, as a run folder can store it.
Name = Annotated[str, re.compile(r"[^\r]+")]

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_WORDS |= {list: "a list", dict: "an object", NoneType: "null"}


def conform(value: Any, hint: Any, name: str = "") -> None:
    """Check a value against a type; raise ``ValueError`` naming the invalid part.

    A ``TypedDict`` may have more fields than those of the type.

    >>> conform([3, -1], list[Count], "sizes")
    Traceback (most recent call last):
        ...
    ValueError: sizes[1] = -1: expected a number in [0, 9007199254740992].
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Required, NotRequired):
        conform(value, args[0], name)
    elif origin is Annotated:
        conform(value, args[0], name)
        for note in args[1:]:
            pattern = isinstance(note, re.Pattern)
            words = f"text that matches {note.pattern}" if pattern else str(note)
            _expect(note.fullmatch(value) if pattern else value in note, words, name, value)
    elif origin in (Union, UnionType):
        _one_of(value, args, name)
    elif origin is Literal:
        words = f"one of {', '.join(args)}"
        _expect(isinstance(value, str) and value in args, words, name, value)
    elif origin in (list, tuple):
        _expect(isinstance(value, origin), _WORDS[list], name, value)
        for place, item in enumerate(value):
            conform(item, args[0], f"{name}[{place}]")
    elif origin is dict:
        _expect(isinstance(value, dict), _WORDS[dict], name, value)
        for key, item in value.items():
            conform(key, args[0], f"a key of {name}")
            conform(item, args[1], f"{name}.{quoted(key)[1:-1]}")
    elif is_typeddict(hint) or is_dataclass(hint):
        _conform_fields(value, hint, name)
    elif hint in _PLAIN:
        _expect(_PLAIN[hint](value), _WORDS[hint], name, value)
    elif hint is not Any:
        _expect(isinstance(value, hint), f"a {hint.__name__}", name, value)


def _conform_fields(value: Any, hint: Any, name: str) -> None:
    if is_dataclass(hint):
        _expect(isinstance(value, hint), _WORDS[dict], name, value)  # type: ignore[arg-type]
        value = vars(value)
    _expect(isinstance(value, dict), _WORDS[dict], name, value)
    for field, kind in _fields_of(hint).items():
        origin = get_origin(kind)
        if field in value:
            conform(value[field], kind, f"{name}.{field}" if name else field)
        elif origin is Required or (hint.__total__ and origin is not NotRequired):
            raise ValueError(f"{name or 'it'} has no {field!r}.")


@cache
def _fields_of(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint, include_extras=True)


def _one_of(value: Any, hints: tuple[Any, ...], name: str) -> None:
    """Check a value against a union of plain types and at most one other type."""
    others = [hint for hint in hints if hint not in _PLAIN]
    if not any(_PLAIN[hint](value) for hint in hints if hint in _PLAIN):
        words = " or ".join(_WORDS[hint] for hint in hints if hint in _WORDS)
        _expect(bool(others), words, name, value)
        conform(value, others[0], name)


def _is_double(value: Any) -> bool:
    whole = type(value) is int and abs(value) <= sys.float_info.max
    return whole or isinstance(value, float)


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and abs(value) < 2**64,
    float: _is_double,
    str: lambda value: isinstance(value, str) and is_text(value),
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
}


def _expect(holds: object, words: str, name: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{f'{name} = ' if name else ''}{quoted(value)}: expected {words}.")
