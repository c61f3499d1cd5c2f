"""Fixtures of the tests of data sets."""

from __future__ import annotations

import pytest

#: Fixtures that return a folder of the real data.
REAL = {"digits_dir", "office_dir", "ham_dir"}


@pytest.fixture(autouse=True)
def _no_data(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the real data from tests that do not ask for them."""
    if REAL.isdisjoint(request.fixturenames):
        monkeypatch.delenv("FAIRFLOWER_DATA", raising=False)
