"""The projection onto the simplex."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.numerics.simplex import project

points = st.lists(st.floats(-5, 5), min_size=1, max_size=8).map(np.array)


@given(points)
def test_the_projection_satisfies_the_kkt_conditions(v):
    """w = max(v - theta, 0) with one theta for all, on the simplex: that is the optimum."""
    w = project(v)
    assert w.min() >= 0
    assert w.sum() == pytest.approx(1)
    theta = (v - w)[w > 0]
    assert np.ptp(theta) < 1e-9
    assert (v[w == 0] <= theta.max() + 1e-9).all()


@given(points, st.floats(-1e6, 1e6))
def test_the_projection_is_shift_invariant_and_idempotent(v, shift):
    np.testing.assert_allclose(project(v + shift), project(v), atol=1e-8)
    np.testing.assert_allclose(project(project(v)), project(v), atol=1e-15)


def test_the_projection_includes_the_last_term_of_the_sum():
    """A known AFL implementation sums only the larger coordinates and leaves the simplex."""
    v = np.array([0.6, 0.5, 0.4])
    u = np.sort(v)[::-1]
    wrong = (u.cumsum() - u - 1) / np.arange(1, 4)
    assert np.maximum(v - wrong[-1], 0).sum() > 1.3
    np.testing.assert_allclose(project(v), [0.6 - 0.5 / 3, 0.5 - 0.5 / 3, 0.4 - 0.5 / 3])


def test_huge_coordinates_keep_precision():
    np.testing.assert_allclose(project([1e300, 1e300, -1e300]), [0.5, 0.5, 0])
    np.testing.assert_allclose(project([1e16, 0.2, 0.3]), [1, 0, 0])


@pytest.mark.parametrize("bad", [[], [np.nan], [np.inf, 0], [[1.0]]])
def test_invalid_vectors_are_refused(bad):
    with pytest.raises(ValueError, match="vector of finite numbers"):
        project(bad)
