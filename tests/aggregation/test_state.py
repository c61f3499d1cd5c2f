"""State as plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.aggregation.state import flatten_state, unflatten_state

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.integers(0, 3).map(lambda n: np.arange(n, dtype=np.float32)),
    st.just(np.array(3, np.int64)),
)
keys = st.one_of(st.text(max_size=5), st.integers(-5, 10**9))


def equal(one, two) -> bool:
    if isinstance(one, dict):
        return list(one) == list(two) and all(equal(one[k], two[k]) for k in one)
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and np.array_equal(one, two)
    return type(one) is type(two) and one == two


@given(
    st.dictionaries(
        keys, st.recursive(leaves, lambda inner: st.dictionaries(keys, inner), max_leaves=8)
    )
)
def test_any_state_survives_being_flattened(state):
    assert equal(unflatten_state(flatten_state(state)), state)


def test_what_cannot_be_kept_is_named():
    with pytest.raises(TypeError, match="p/#3: cannot keep"):
        flatten_state({"p": {3: object()}})
