"""Products of methods of which some pairs stand for all; the others run with ``--nightly``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from fairflower.registry import STRATEGIES

#: How a strategy merges does not depend on the network; what it has measured does.
ONE_FOR_EACH_NEED = [
    *{kind().needs: name for name, kind in reversed([*STRATEGIES.items()])}.values()
]


def thinned(product: Iterable[tuple[Any, ...]], standing_for_all: Collection[Any]) -> list[Any]:
    """Values for ``parametrize``: all of a product, ``nightly`` where others stand for them."""
    return [
        pytest.param(*values, marks=() if values in standing_for_all else pytest.mark.nightly)
        for values in product
    ]
