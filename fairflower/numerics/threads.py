"""Number of CPUs that this process may use, and a temporary limit of one thread."""

import os
import sys
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

from threadpoolctl import ThreadpoolController


def cpus() -> int:
    """Return the number of CPUs that this process may use, which a batch scheduler may limit."""
    allowed = getattr(os, "sched_getaffinity", None)  # macOS has none
    return len(allowed(0)) if allowed else os.cpu_count() or 1


def one_thread() -> AbstractContextManager[Any]:
    """Limit BLAS and OpenMP to a single thread in a ``with`` block.

    Results are then identical, bit for bit, on any number of cores. The libraries must already be
    imported: `FairStrategy` merges in such a block, and what is imported later needs its own.

    >>> import numpy as np
    >>> with one_thread():
    ...     float(np.ones(3) @ np.ones(3))
    3.0
    """
    limited: AbstractContextManager[Any] = _libraries(len(sys.modules)).limit(limits=1)
    return limited


@lru_cache(maxsize=1)
def _libraries(modules: int) -> ThreadpoolController:
    """Cache the thread pools until new modules are imported, because finding them is slow."""
    return ThreadpoolController()
