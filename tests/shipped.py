"""What `experiments/` has."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "experiments"

#: A protocol and its benchmarks, where the other files have one run's settings.
LEADERBOARD = FOLDER / "leaderboard.toml"


def configs() -> list[Path]:
    """The files of run settings."""
    return sorted(set(FOLDER.glob("*.toml")) - {LEADERBOARD})
