"""Checks for parts of your own: what every strategy, client, model and data set here keeps.

A check raises ``AssertionError`` with what is broken and what to do. Any test runner will do::

    def test_my_rule():
        check_strategy(MyRule, power=2.0)
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "check_strategy": "strategies",
    "make_cohort": "rounds",
    "Rounds": "rounds",
    "check_trainer": "trainers",
    "check_model": "models",
    "check_data": "data",
}

__all__ = [
    "Rounds",
    "check_data",
    "check_model",
    "check_strategy",
    "check_trainer",
    "make_cohort",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for: a strategy is checked without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
