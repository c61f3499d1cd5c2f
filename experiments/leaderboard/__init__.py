"""Leaderboards: all methods are tuned with the same effort, then compared as a design prescribes.

`design` reads the design, `points` generates the settings to try, `ledger` stores each finished
run as a row of a CSV file, `stages` lists the remaining runs, and `runs` executes them.
"""
