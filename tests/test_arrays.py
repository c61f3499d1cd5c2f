"""Records made of arrays, against Flower's own."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis.extra import numpy as arrays_from

from fairflower.arrays import SharedArray, arrays_of, record_of, view

ANY = arrays_from.arrays(
    dtype=arrays_from.boolean_dtypes()
    | arrays_from.integer_dtypes()
    | arrays_from.floating_dtypes(),
    shape=arrays_from.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5),
)


@given(ANY)
def test_records_equal_flowers_own(array):
    for layout in (array, np.asfortranarray(array), array[..., ::-1] if array.ndim else array):
        record = record_of({"a": layout})
        assert record["a"] == Array(np.asarray(layout, order="C"))
        back = arrays_of(record)["a"]
        assert back.dtype == layout.dtype
        assert np.array_equal(back, layout, equal_nan=layout.dtype.kind == "f")


def test_arrays_of_python_objects_are_refused():
    with pytest.raises(ValueError, match="Python objects"):
        record_of({"a": np.array([{}], dtype=object)})


def test_an_array_in_shared_memory_is_copied_only_when_serialized():
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    plain = Array(values)
    memory = np.frombuffer(plain.data, np.uint8).copy()
    shared = SharedArray(plain.dtype, plain.shape, plain.stype, memory.data)
    assert np.shares_memory(view(shared), memory)
    assert shared.data == plain.data
    copies = [pickle.loads(pickle.dumps(shared)), copy.deepcopy(shared)]
    copies.append(ArrayRecord({"w": shared})["w"])  # as a client hands on what it received
    for array in copies:
        assert type(array) is Array
        np.testing.assert_array_equal(array.numpy(), values)
    shared.data = Array(values + 1).data
    np.testing.assert_array_equal(view(shared), values + 1)
    assert bytes(memory) == plain.data
