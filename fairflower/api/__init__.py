"""Python interface for scripts and notebooks: train, compare methods, and read runs.

    run = ff.run(strategy="fedheal:tau=0.4", rounds=30)
    results = ff.compare(strategies=["fedavg", "fedheal"], clients="moon", federations="0-9")
    results.table, results.history, results.differences  # pandas DataFrames
    results.plot("worst")

The module ``runs`` starts and reads runs, ``results`` provides DataFrames, figures and tables, and
``final_model`` exports a final model.
"""

from fairflower.api.results import Result, Results
from fairflower.api.runs import compare, evaluate, read, run
from fairflower.errors import StopRun

__all__ = ["Result", "Results", "StopRun", "compare", "evaluate", "read", "run"]
