"""Leaderboards: methods are tuned alike, then compared over federations by a written design.

`design` reads the design, `points` has the settings that are tried, `ledger` keeps every finished
run as a row of a CSV file, `stages` says which runs are left, and `runs` makes them.
"""
