"""Plans of several runs: comparisons, studies, and their execution."""
