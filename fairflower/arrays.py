"""Conversion between Flower's arrays and NumPy arrays, without copying or unpickling."""

import io
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray

from fairflower.files import read_npy_header

_MAGIC = len(np.lib.format.magic(1, 0))


def arrays_of(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Return read-only views of a record's arrays, by name.

    Raises ``ValueError`` with the array's name if its bytes are not a plain NumPy array.
    """
    arrays = {}
    for name, array in record.items():
        try:
            arrays[name] = view(array)
        except Exception as error:
            # NumPy parses headers as Python literals, which may raise exceptions of many types.
            raise ValueError(f"array {name!r} is not a plain NumPy array ({error})") from error
    return arrays


def record_of(arrays: Mapping[str, NDArray[Any]]) -> ArrayRecord:
    """Return a Flower record of the arrays, in C order.

    The bytes equal those of Flower's ``Array(array)``, but three copies are avoided.
    """
    return ArrayRecord({name: _flower_array(np.asarray(a)) for name, a in arrays.items()})


def _flower_array(array: NDArray[Any]) -> Array:
    if array.dtype.hasobject:
        raise ValueError("An array of Python objects cannot be sent.")
    data = b"".join((_head(array.dtype, array.shape), np.asarray(array, order="C").data))
    return Array(str(array.dtype), array.shape, "numpy.ndarray", data)


@lru_cache(maxsize=4096)
def _head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header that `numpy.save` writes."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(stream, header)
    return stream.getvalue()


def view(array: Array) -> NDArray[Any]:
    """Return a NumPy view of a Flower array, without copying."""
    data = array_bytes(array)
    length_size = 2 if data[6] == 1 else 4  # of the header's length, by format version
    length = int.from_bytes(data[_MAGIC : _MAGIC + length_size], "little")
    shape, order, place = _header(bytes(data[: _MAGIC + length_size + length]))
    return np.frombuffer(data, *place).reshape(shape, order=order)


class SharedArray(Array):
    """A Flower array in memory that processes share.

    `view` reads its bytes without copying; the attribute ``data``, which Flower reads, is a copy.
    """

    def __init__(self, dtype: str, shape: tuple[int, ...], stype: str, buffer: memoryview) -> None:
        self.__dict__.update(dtype=dtype, shape=shape, stype=stype, buffer=buffer)

    @property
    def data(self) -> bytes:
        """A copy of the bytes."""
        return bytes(self.__dict__["buffer"])

    @data.setter
    def data(self, value: bytes) -> None:
        self.__dict__["buffer"] = memoryview(value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy as a plain Flower array."""
        return Array, (self.dtype, self.shape, self.stype, self.data)


def array_bytes(array: Array) -> bytes | memoryview:
    """Return the bytes of a Flower array without copying."""
    return array.__dict__["buffer"] if isinstance(array, SharedArray) else array.data


@lru_cache(maxsize=4096)  # a model's headers are the same for all clients and rounds
def _header(data: bytes) -> tuple[tuple[int, ...], Any, tuple[np.dtype[Any], int, int]]:
    """Return an array's shape and order, and its dtype, number of values and offset in bytes."""
    stream = io.BytesIO(data)
    shape, fortran_order, dtype = read_npy_header(stream)
    if dtype.hasobject:
        raise ValueError("it contains Python objects")
    count = int(np.prod(shape, dtype=np.int64))
    return shape, "F" if fortran_order else "C", (dtype, count, stream.tell())


def swap_padding(ids: Any, pad: int) -> Any:
    """Swap the ids 0 and ``pad`` in an array or tensor; a second swap restores them.

    A `fairflower.data.TokenSet` pads with token id 0; a tokenizer and its network pad with ``pad``.

    >>> swap_padding(np.array([5, 1, 0]), pad=1)
    array([5, 0, 1])
    """
    if pad == 0:
        return ids
    return ids + (ids == 0) * pad - (ids == pad) * pad
