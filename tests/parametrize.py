"""Parameters of tests: methods and their combinations; most combinations run with ``--nightly``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from fairflower.registry import STRATEGIES

every_strategy = pytest.mark.parametrize("name", STRATEGIES)

#: One strategy per set of measurements: the merge does not depend on the network, the measurements
#: do.
STRATEGY_PER_NEEDS = [
    *{kind().measurements: name for name, kind in reversed([*STRATEGIES.items()])}.values()
]


def mark_others_nightly(
    product: Iterable[tuple[Any, ...]], standing_for_all: Collection[Any]
) -> list[Any]:
    """Return a product for ``parametrize``; all but ``standing_for_all`` are marked ``nightly``."""
    return [
        pytest.param(*values) if values in standing_for_all else at_night(*values)
        for values in product
    ]


def at_night(*values: Any) -> Any:
    """Return a case for ``parametrize`` that runs with ``--nightly`` only."""
    return pytest.param(*values, marks=pytest.mark.nightly)
