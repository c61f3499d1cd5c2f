"""fairflower in Python and notebooks: make runs, compare them, read them back.

    run = ff.run(strategy="fedheal:tau=0.4", rounds=30)
    results = ff.compare(strategies=["fedavg", "fedheal"], clients="moon", federations="0-9")
    results.table, results.history, results.differences  # pandas DataFrames
    results.plot("worst")

``making`` makes runs as the commands do, by the settings that ``given`` reads; ``results`` is
what they come to.
"""

from fairflower.api.making import compare, read, run
from fairflower.api.results import Result, Results
from fairflower.errors import StopRun

__all__ = ["Result", "Results", "StopRun", "compare", "read", "run"]
