"""Files in `experiments/`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "experiments"

#: The leaderboard's protocol and benchmarks; the other files contain settings of a run.
LEADERBOARD = FOLDER / "leaderboard.toml"

#: The design of the runs on six tasks.
TASKS = FOLDER / "tasks.toml"


def run_configs() -> list[Path]:
    """Return the files with settings of a run."""
    return sorted(set(FOLDER.glob("*.toml")) - {LEADERBOARD, TASKS})
