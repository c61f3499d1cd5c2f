"""Statistical functions that decide what a comparison of methods can conclude.

`power` helps to plan a design, and `differences` judges paired differences of several methods
together. The script ``benchmarks/error_rates.py`` simulates their error rates and power.
"""
