"""What a classic reply carries besides a model: named arrays behind the model's own.

A `flwr.client.NumPyClient` sends one list of arrays, and metrics that are single values.
Arrays of other kinds (a Fisher diagonal) follow the model's in that list, and a metric,
JSON text, tells what they are: ``{"fisher": ["0.weight", "0.bias"]}``.

>>> import numpy as np
>>> model, fisher = [np.ones(2), np.zeros(1)], {"w": np.ones(2)}
>>> parameters, note = pack(model, {"fisher": fisher})
>>> len(parameters), note
(3, {'measured': '{"fisher": ["w"]}'})
>>> unpack(note["measured"], parameters[2:])
{'fisher': {'w': array([1., 1.])}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: The metric that describes the arrays behind the model's.
MEASURED = "measured"

_Array = TypeVar("_Array")


def pack(
    model: Sequence[NDArray[Any]], measured: Mapping[str, Mapping[str, ArrayLike]]
) -> tuple[list[NDArray[Any]], dict[str, str]]:
    """Put arrays behind a model's, for ``NumPyClient.fit`` to return.

    Parameters
    ----------
    model
        The model's arrays.
    measured
        By what it is (``fisher``), named arrays: one for each trained parameter, in
        the order of the model. CPU tensors will do.

    Returns
    -------
    parameters : list of ndarray
        The first thing to return from ``fit``.
    note : dict
        To go into the metrics; empty if nothing was measured.
    """
    extra = [np.asarray(array) for arrays in measured.values() for array in arrays.values()]
    names = {name: list(arrays) for name, arrays in measured.items()}
    return [*model, *extra], {MEASURED: json.dumps(names)} if names else {}


def unpack(note: str, extra: Sequence[_Array]) -> dict[str, dict[str, _Array]]:
    """Undo ``pack``, for the arrays behind the model's.

    Raises
    ------
    ValueError
        When the note does not describe these arrays.
    """
    names = json.loads(note)
    if not isinstance(names, dict) or not all(isinstance(part, list) for part in names.values()):
        raise ValueError(f"{MEASURED!r} is {note!r}: expected names of arrays by what they are")
    count = sum(map(len, names.values()))
    if count != len(extra):
        raise ValueError(f"{MEASURED!r} names {count} arrays, but {len(extra)} follow the model's")
    arrays = iter(extra)
    return {kind: {str(name): next(arrays) for name in part} for kind, part in names.items()}
