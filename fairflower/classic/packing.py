"""Packing of additional named arrays into the list of arrays that classic Flower sends.

A `flwr.client.NumPyClient` receives a list of arrays and a config of scalars, and returns a list of
arrays and metrics that are scalars. Additional arrays, such as a Fisher diagonal or control
variates, follow the model's arrays in the list. A JSON string names them, for example ``{"fisher":
["0.weight", "0.bias"]}``; its key is ``measured`` in metrics and ``shared`` in configs.

Examples
--------
>>> import numpy as np
>>> from fairflower.classic.packing import pack, split, unpack
>>> model, fisher = [np.ones(2), np.zeros(1)], {"w": np.ones(2)}
>>> parameters, note = pack(model, {"fisher": fisher})
>>> len(parameters), note
(3, {'measured': '{"fisher": ["w"]}'})
>>> unpack(note["measured"], parameters[2:])
{'fisher': {'w': array([1., 1.])}}
>>> split([np.ones(2), np.zeros(1)], {"shared": '{"control": ["w"]}'})
([array([1., 1.])], {'control': {'w': array([0.])}})
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: Metric in which a client describes the arrays that follow the model's arrays.
MEASURED = "measured"
#: Config key in which the server describes the arrays that follow the model's arrays.
SHARED = "shared"

_Array = TypeVar("_Array")


def pack(
    model: Sequence[NDArray[Any]], measured: Mapping[str, Mapping[str, ArrayLike]]
) -> tuple[list[NDArray[Any]], dict[str, str]]:
    """Append arrays to a model's arrays; return the list for ``fit`` and a metric that names them.

    ``measured`` has named arrays for each kind, such as ``fisher``, with a value for each trained
    parameter, in the order of the model. Tensors are accepted, on any device; bfloat16 becomes
    float32. Without arrays there is no metric.
    """
    extra = [_array(value) for arrays in measured.values() for value in arrays.values()]
    names = {name: list(arrays) for name, arrays in measured.items()}
    return [*model, *extra], {MEASURED: json.dumps(names)} if names else {}


def unpack(
    note: str, extra: Sequence[_Array], name: str = MEASURED
) -> dict[str, dict[str, _Array]]:
    """Undo ``pack`` and return the named arrays by kind.

    Raises ``ValueError`` if ``note``, which is the value of the key ``name``, does not match the
    arrays.
    """
    names = _names(note, name)
    if (named := count(note, name)) != len(extra):
        raise ValueError(
            f"{name!r} names {named} arrays, but {len(extra)} follow the model's arrays"
        )
    arrays = iter(extra)
    return {kind: {str(key): next(arrays) for key in part} for kind, part in names.items()}


def count(note: str, name: str = MEASURED) -> int:
    """Return how many arrays a note names."""
    return sum(map(len, _names(note, name).values()))


def split(
    parameters: Sequence[_Array], config: Mapping[str, Any]
) -> tuple[list[_Array], dict[str, dict[str, _Array]]]:
    """Split the parameters of ``NumPyClient.fit`` into arrays of the model and of exchanges.

    The latter are named arrays for each exchange; none if the server sent only the model. Raises
    ``ValueError`` if the config does not match the arrays.
    """
    note = str(config.get(SHARED, "{}"))
    place = max(0, len(parameters) - count(note, SHARED))
    return list(parameters[:place]), unpack(note, parameters[place:], SHARED)


def _array(value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a tensor; PyTorch may be absent
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy has none
            value = value.float()
    return np.asarray(value)


def _names(note: str, name: str) -> dict[str, list[str]]:
    try:
        names = json.loads(note)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name!r} is not valid JSON ({error})") from error
    if not isinstance(names, dict) or not all(isinstance(part, list) for part in names.values()):
        raise ValueError(f"{name!r} is {note!r}: expected lists of array names by kind")
    return names
