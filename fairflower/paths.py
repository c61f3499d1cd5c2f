"""Where fairflower keeps its files."""

from __future__ import annotations

import os
import re
from datetime import datetime
from pathlib import Path

from fairflower.errors import ConfigError


def home() -> Path:
    """``$FAIRFLOWER_HOME``, by default ``~/.fairflower``: runs, prepared data, clients' state."""
    return Path(os.environ.get("FAIRFLOWER_HOME") or "~/.fairflower").expanduser().absolute()


def file_name(text: str) -> str:
    """A name as part of a file's.

    >>> file_name("moon:mu=1+my_package.rules:MinLoss")
    'moon-mu=1+my_package.rules-MinLoss'
    """
    return re.sub(r"[^\w.+=-]", "-", text)


def client_states() -> Path:
    """The folder of what clients keep from round to round: ``<run id>/<client id>/``."""
    return home() / "state"


def new_folder(kind: str, chosen: str | Path | None = None) -> Path:
    """The chosen folder, or a new one of a kind; two processes of one second do not share it."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return Path(chosen or home() / kind / name).expanduser().absolute()


def run_folders(path: Path) -> list[Path]:
    """The path itself if it is a run folder or a file, else the run folders below it.

    ``ConfigError`` where there are none.
    """
    if (path / "run.json").exists() or not path.is_dir():
        return [path]
    found = sorted(found.parent for found in path.rglob("run.json"))
    if not found:
        raise ConfigError(f"{path} is no run folder and holds none: no run.json in it.")
    return found
