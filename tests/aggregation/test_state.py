"""State of strategies as plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.aggregation.state import flatten_state, unflatten_state
from fairflower.exchanges import ControlVariates
from fairflower.strategies import FedAvg, FedFV, FedHEAL, FedLF, FedMDFG
from fairflower.testing import make_cohort
from fairflower.testing.rounds import Rounds

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
def test_any_state_survives_flattening(state):
    assert equal(unflatten_state(flatten_state(state)), state)


def test_values_that_cannot_be_stored_are_named():
    with pytest.raises(TypeError, match="p/#3: cannot keep"):
        flatten_state({"p": {3: object()}})


def test_numpy_scalars_become_arrays_without_dimensions():
    flat = flatten_state({"a": {0: np.float32(1.5)}})
    assert unflatten_state(flat) == {"a": {0: np.array(1.5, np.float32)}}


def test_a_restored_state_shares_no_arrays_with_its_origin():
    first, second = FedHEAL(tau=0.5, beta=0.0), FedHEAL(tau=0.5, beta=0.0)
    same, opposed = make_cohort([[1.0, 1.0], [3.0, 3.0]]), make_cohort([[1.0, 1.0], [3.0, -3.0]])
    first.merge(same)
    second.load_state_dict(first.state_dict())
    first.merge(opposed)
    (rises,) = second.rises[1].values()
    assert rises.tolist() == [1, 1]


@pytest.mark.parametrize("strategy", [FedFV, FedLF, FedMDFG])
def test_arrays_without_dimensions_are_kept(strategy):
    """For example, a learned temperature."""
    received = {"t": np.array(1.0, np.float32), "w": np.ones(2, np.float32)}
    rounds = Rounds(strategy(min_clients=1), received, range(2))
    moves = {k: {name: array + k for name, array in received.items()} for k in range(2)}
    rounds.step(moves, metrics={k: {"received_loss": 1.0 + k} for k in range(2)})
    again = strategy(min_clients=1)
    again.load_state_dict(rounds.strategy.state_dict())
    assert again.memory[1]["t"] == rounds.strategy.memory[1]["t"]


def test_a_state_with_other_exchanges_is_refused():
    with_c = FedAvg(exchanges=[ControlVariates()])
    with pytest.raises(ValueError, match=r"has exchanges 'control', but the strategy"):
        FedAvg().load_state_dict(with_c.state_dict())
    with pytest.raises(ValueError, match="from round to round"):
        with_c.load_state_dict(FedAvg().state_dict())


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_an_integer_beyond_64_bits_is_named(number):
    with pytest.raises(TypeError, match="p/#3: cannot keep"):
        flatten_state({"p": {3: number}})
