"""Where fairflower keeps its files."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$FAIRFLOWER_HOME``, by default ``~/.fairflower``: runs, prepared data, clients' state."""
    return Path(os.environ.get("FAIRFLOWER_HOME") or "~/.fairflower").expanduser().absolute()


def client_states() -> Path:
    """The folder of what clients keep from round to round: ``<run id>/<client id>/``."""
    return home() / "state"
