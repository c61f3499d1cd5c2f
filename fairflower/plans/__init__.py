"""Planning and executing several runs: comparisons and tuning studies."""
