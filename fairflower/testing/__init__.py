"""Checks for strategies, clients, models, data sets and tasks from any package.

A check works with any test runner and raises an ``AssertionError`` that explains which property is
violated and how to correct it::

    def test_my_strategy():
        check_strategy(MyStrategy, power=2.0)
"""

import importlib
from typing import Any

_PLACES = {
    "Rounds": "rounds",
    "check_data": "data",
    "check_model": "models",
    "check_strategy": "strategies",
    "check_task": "tasks",
    "check_trainer": "trainers",
    "make_cohort": "rounds",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    """Import a name on first use, because checks of strategies do not need torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
