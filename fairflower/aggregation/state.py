"""What a rule carries from round to round, as plain arrays that any file can hold.

>>> flat = flatten_state({"p": {0: 0.25, 7: 0.75}, "beta": None})
>>> {name: array.tolist() for name, array in flat.items()}
{'p/#0!': 0.25, 'p/#7!': 0.75, 'beta?': 0}
>>> unflatten_state(flat)
{'p': {0: 0.25, 7: 0.75}, 'beta': None}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays

# A path's parts are joined by "/"; "#" marks a whole number as key. A last sign says
# what the array stands for: "!" a number, "?" None, "{" an empty dict, none an array.
_ESCAPES = str.maketrans({sign: f"%{ord(sign):02X}" for sign in "%/#!?{"})
_VALUES: dict[str, Callable[[NDArray[Any]], Any]] = {
    "": lambda array: array,
    "!": lambda array: array.item(),
    "?": lambda array: None,
    "{": lambda array: {},
}


class StatefulPart(NamedTuple):
    """An object with attributes that are carried from round to round."""

    kind: str
    name: str
    place: Any
    attributes: tuple[str, ...]


def collect_state(carriers: Sequence[StatefulPart]) -> Arrays:
    """What they carry, as named arrays."""
    state: dict[str, dict[str, Any]] = {}
    for kind, name, place, attributes in carriers:
        state.setdefault(kind, {})[name] = {a: getattr(place, a) for a in attributes}
    return flatten_state(state)


def restore_state(carriers: Sequence[StatefulPart], state: Mapping[str, NDArray[Any]]) -> None:
    """Set the attributes that `collect_state` read.

    ``ValueError``, before anything is changed, if ``state`` has other attributes.
    """
    saved = unflatten_state(state)
    for kind, name, place, attributes in carriers:
        values = saved.get(kind, {}).get(name, {})
        if set(values) != set(attributes):
            raise ValueError(
                f"{type(place).__name__} keeps {sorted(attributes)} from round to round, but the "
                f"saved state holds {sorted(values)}. It is another strategy's, or another "
                "version's."
            )
    for kind, name, place, _ in carriers:
        for attribute, value in saved.get(kind, {}).get(name, {}).items():
            setattr(place, attribute, value)


def flatten_state(state: Mapping[Any, Any], parent: str = "") -> Arrays:
    """Nested dicts (keys: text or whole numbers) of numbers, None and arrays, as arrays.

    ``TypeError`` names anything else by its path.
    """
    flat: Arrays = {}
    for key, value in state.items():
        path = parent + (f"#{key}" if isinstance(key, int) else key.translate(_ESCAPES))
        if isinstance(value, Mapping) and value:
            flat |= flatten_state(value, path + "/")
        elif isinstance(value, Mapping):
            flat[path + "{"] = np.zeros((), np.int8)
        elif value is None:
            flat[path + "?"] = np.zeros((), np.int8)
        elif isinstance(value, np.ndarray):
            flat[path] = value
        elif isinstance(value, (bool, int, float)):
            flat[path + "!"] = np.asarray(value)
        else:
            raise TypeError(f"{path}: cannot keep {value!r} from round to round.")
    return flat


def unflatten_state(flat: Mapping[str, NDArray[Any]]) -> dict[Any, Any]:
    """Undo ``flatten_state``: the same keys, numbers and arrays, in the same order."""
    state: dict[Any, Any] = {}
    for path, array in flat.items():
        *parents, leaf = path.split("/")
        sign = leaf[-1:] if leaf[-1:] in _VALUES else ""
        place = state
        for parent in parents:
            place = place.setdefault(_key(parent), {})
        place[_key(leaf.removesuffix(sign))] = _VALUES[sign](array)
    return state


def _key(part: str) -> str | int:
    return int(part[1:]) if part.startswith("#") else unquote(part)
