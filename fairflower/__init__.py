"""Fair federated learning on Flower: one global model that works for every client.

    import fairflower as ff

    run = ff.run(strategy="fedheal", rounds=30)
    results = ff.compare(strategies=["fedavg", "fedheal"], seeds=range(3))
    results = ff.read("runs/*")

Importing fairflower is fast, because the modules behind these functions are imported on first use.
"""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fairflower.errors import require

if TYPE_CHECKING:
    from fairflower.api import Result, Results, compare, evaluate, read, run
    from fairflower.errors import StopRun

__all__ = ["Result", "Results", "StopRun", "__version__", "compare", "evaluate", "read", "run"]

try:
    __version__ = metadata.version("fairflower")
except metadata.PackageNotFoundError:  # in a Flower app bundle, not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require("train", f"fairflower.{name}")
    return getattr(importlib.import_module("fairflower.api"), name)


def __dir__() -> list[str]:
    return __all__
