"""Statistical functions that decide what a comparison of methods can conclude.

`power` helps to plan a design, `differences` judges paired differences of several methods together,
and `benchmarks` pools them over benchmarks. The script ``benchmarks/error_rates.py`` simulates
their error rates and power.
"""
