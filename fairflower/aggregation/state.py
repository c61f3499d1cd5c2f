"""State of a strategy as named arrays, for checkpoints.

>>> flat = flatten_state({"p": {0: 0.25, 7: 0.75}, "beta": None})
>>> {name: array.tolist() for name, array in flat.items()}
{'p/#0!': 0.25, 'p/#7!': 0.75, 'beta?': 0}
>>> unflatten_state(flat)
{'p': {0: 0.25, 7: 0.75}, 'beta': None}
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays

# "/" joins the parts of a path; "#" marks a key that is a whole number. The last character is
# the kind of value: "!" a number, "?" None, "{" an empty dict, any other an array.
_ESCAPES = str.maketrans({sign: f"%{ord(sign):02X}" for sign in "%/#!?{"})
_VALUES: dict[str, Callable[[NDArray[Any]], Any]] = {
    "": lambda array: array,
    "!": lambda array: array.item(),
    "?": lambda array: None,
    "{": lambda array: {},
}


#: Kind and name of an object that is kept from round to round -> the object, and its attributes.
Parts = dict[tuple[str, str], tuple[Any, tuple[str, ...]]]


def parts_of(strategy: Any, policy: Any, observers: Sequence[Any]) -> Parts:
    """Return a strategy and the objects that it calls; ``STATE`` names what they keep."""
    watching = [o for o in observers if hasattr(o, "STATE")]
    return {
        ("rule", "own"): (strategy, (*strategy.STATE, "merged_rounds")),
        ("participation", "policy"): (policy, policy.STATE),
        **{("exchanges", e.name): (e, e.STATE) for e in strategy.exchanges},
        **{("observers", str(i)): (o, o.STATE) for i, o in enumerate(watching)},
    }


def collect_state(parts: Parts) -> Arrays:
    """Return the attributes of all parts as named arrays."""
    state: dict[str, dict[str, Any]] = {}
    for (kind, name), (owner, attributes) in parts.items():
        state.setdefault(kind, {})[name] = {a: getattr(owner, a) for a in attributes}
    return flatten_state(state)


def restore_state(parts: Parts, state: Mapping[str, NDArray[Any]]) -> None:
    """Set the attributes to copies of the values that `collect_state` returned.

    Raises ``ValueError``, before anything is changed, if ``state`` has other parts or attributes.
    """
    nested = unflatten_state({path: np.array(array) for path, array in state.items()})
    saved = {(kind, name): kept for kind, named in nested.items() for name, kept in named.items()}
    for kind, name in sorted(key for key in saved.keys() - parts.keys() if saved[key]):
        raise ValueError(
            f"The saved state has {kind} {name!r}, but the strategy does not. Resume with the "
            "strategy, the exchanges and the version of fairflower that saved it."
        )
    for key, (owner, attributes) in parts.items():
        if (found := set(saved.get(key, {}))) != set(attributes):
            raise ValueError(
                f"{type(owner).__name__} keeps {sorted(attributes)} from round to round, but the "
                f"saved state has {sorted(found)}. Resume with the strategy and the version of "
                "fairflower that saved it."
            )
    for key, (owner, attributes) in parts.items():
        for attribute in attributes:
            setattr(owner, attribute, saved[key][attribute])


def flatten_state(state: Mapping[Any, Any], parent: str = "") -> Arrays:
    """Return nested dicts of numbers, None and arrays as named arrays.

    Keys are text or whole numbers. A ``TypeError`` names any other key, and the path of any other
    value.
    """
    flat: Arrays = {}
    for key, value in state.items():
        if isinstance(key, Integral):
            path = f"{parent}#{int(key)}"
        elif isinstance(key, str):
            path = parent + key.translate(_ESCAPES)
        else:
            raise TypeError(
                f"{parent}{key!r}: a key of type {type(key).__name__} cannot be kept from round to "
                "round. Use text or whole numbers."
            )
        if isinstance(value, Mapping) and value:
            flat |= flatten_state(value, path + "/")
        elif isinstance(value, Mapping):
            flat[path + "{"] = np.zeros((), np.int8)
        elif value is None:
            flat[path + "?"] = np.zeros((), np.int8)
        elif isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in "biuf":
            flat[path] = np.asarray(value)
        elif isinstance(value, float) or (isinstance(value, int) and -(2**63) <= value < 2**64):
            flat[path + "!"] = np.asarray(value)
        else:
            raise TypeError(
                f"{path}: cannot keep {value!r} from round to round. Use numbers, None, arrays "
                "of numbers, or dicts of these."
            )
    return flat


def unflatten_state(flat: Mapping[str, NDArray[Any]]) -> dict[Any, Any]:
    """Return the nested dicts that were given to `flatten_state`, in the same order."""
    state: dict[Any, Any] = {}
    for path, array in flat.items():
        *parents, leaf = path.split("/")
        sign = leaf[-1:] if leaf[-1:] in _VALUES else ""
        owner = state
        for parent in parents:
            owner = owner.setdefault(_key(parent), {})
        owner[_key(leaf.removesuffix(sign))] = _VALUES[sign](array)
    return state


def _key(part: str) -> str | int:
    return int(part[1:]) if part.startswith("#") else unquote(part)
