"""How many threads compute: as many as there are CPUs, or one for a moment."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from threadpoolctl import ThreadpoolController


def cpus() -> int:
    """Count the CPUs that this process may use: in a batch job fewer than the machine has."""
    allowed = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def one_thread(user_api: str | None = "blas") -> AbstractContextManager[Any]:
    """Hold BLAS to one thread; with None, OpenMP too: bits that do not depend on the cores.

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
