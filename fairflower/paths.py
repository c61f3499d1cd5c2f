"""Where fairflower keeps its files."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$FAIRFLOWER_HOME``, by default ``~/.fairflower``: run folders and prepared data."""
    return Path(os.environ.get("FAIRFLOWER_HOME") or "~/.fairflower").expanduser().absolute()
