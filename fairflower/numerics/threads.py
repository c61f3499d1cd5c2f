"""One thread for a moment: sums whose bits do not depend on the number of cores."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from threadpoolctl import ThreadpoolController


def one_thread(user_api: str | None = "blas") -> AbstractContextManager[Any]:
    """Hold BLAS to one thread; with None, OpenMP too.

    What they are to compute with has to be imported before.
    """
    controller: AbstractContextManager[Any] = _libraries(len(sys.modules)).limit(
        limits=1, user_api=user_api
    )
    return controller


@lru_cache(maxsize=1)
def _libraries(modules: int) -> ThreadpoolController:
    """Look for thread pools again after an import: that takes longer than most sums."""
    return ThreadpoolController()
