"""Named arrays behind a model's own, in the one list that classic Flower carries.

A `flwr.client.NumPyClient` gets and sends one list of arrays, and a config or metrics that
are single values. Arrays of other kinds (a Fisher diagonal, control variates) follow the
model's in that list, and JSON text tells what they are, among the metrics as ``measured``
and in the config as ``shared``: ``{"fisher": ["0.weight", "0.bias"]}``.

>>> import numpy as np
>>> model, fisher = [np.ones(2), np.zeros(1)], {"w": np.ones(2)}
>>> parameters, note = pack(model, {"fisher": fisher})
>>> len(parameters), note
(3, {'measured': '{"fisher": ["w"]}'})
>>> unpack(note["measured"], parameters[2:])
{'fisher': {'w': array([1., 1.])}}
>>> split([np.ones(2), np.zeros(1)], {"shared": '{"control": ["w"]}'})
([array([1., 1.])], {'control': {'w': array([0.])}})
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The metric that describes the arrays behind the model's, on the way to the server.
MEASURED = "measured"
#: What describes them in the config, on the way to a client.
SHARED = "shared"

_Array = TypeVar("_Array")


def pack(
    model: Sequence[NDArray[Any]], measured: Mapping[str, Mapping[str, ArrayLike]]
) -> tuple[list[NDArray[Any]], dict[str, str]]:
    """Put arrays behind a model's: what ``NumPyClient.fit`` returns first, and a note of them.

    ``measured`` has, by what it is (``fisher``), named arrays: one for each trained parameter,
    in the order of the model. CPU tensors will do. The note is to go into the metrics; it is
    empty if nothing was measured.
    """
    extra = [np.asarray(array) for arrays in measured.values() for array in arrays.values()]
    names = {name: list(arrays) for name, arrays in measured.items()}
    return [*model, *extra], {MEASURED: json.dumps(names)} if names else {}


def unpack(
    note: str, extra: Sequence[_Array], name: str = MEASURED
) -> dict[str, dict[str, _Array]]:
    """Undo ``pack``; ``ValueError`` if the note, called ``name``, does not describe the arrays."""
    names = _names(note, name)
    count = sum(map(len, names.values()))
    if count != len(extra):
        raise ValueError(f"{name!r} names {count} arrays, but {len(extra)} follow the model's")
    arrays = iter(extra)
    return {kind: {str(key): next(arrays) for key in part} for kind, part in names.items()}


def split(
    parameters: Sequence[_Array], config: Mapping[str, Any]
) -> tuple[list[_Array], dict[str, dict[str, _Array]]]:
    """Take apart what ``NumPyClient.fit`` gets from a strategy with exchanges.

    The model's arrays (all, if the server sent nothing beside them), and named arrays by the
    exchange's name; ``ValueError`` when the config does not describe these arrays.
    """
    note = str(config.get(SHARED, "{}"))
    count = sum(map(len, _names(note, SHARED).values()))
    place = max(0, len(parameters) - count)
    return list(parameters[:place]), unpack(note, parameters[place:], SHARED)


def _names(note: str, name: str) -> dict[str, list[str]]:
    try:
        names = json.loads(note)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is no JSON ({error})") from error
    if not isinstance(names, dict) or not all(isinstance(part, list) for part in names.values()):
        raise ValueError(f"{name!r} is {note!r}: expected names of arrays by what they are")
    return names
