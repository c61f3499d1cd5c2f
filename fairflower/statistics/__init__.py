"""Pure functions that say what a comparison can conclude: NumPy and SciPy, no run and no report.

`power` plans a design, `differences` judges paired differences of several methods together, and
`benchmarks` pools them over benchmarks. Error rates and power of all of it are simulated by
``benchmarks/error_rates.py``.
"""
