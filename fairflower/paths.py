"""Folders of fairflower's files."""

from __future__ import annotations

import errno
import os
import re
import stat
from datetime import datetime
from io import BufferedReader, TextIOWrapper
from pathlib import Path

from fairflower.errors import ConfigError

#: Files of a run folder, without its checkpoints.
RUN_FILES = frozenset(
    ("run.json", "config.toml", "history.csv", "diagnostics.jsonl", "log.txt", "model.safetensors")
)


#: Flags of files to read. O_NONBLOCK: otherwise opening a named pipe waits for its writer. Windows
#: has neither; there O_BINARY keeps line ends.
_READ = os.O_RDONLY
for _flag in ("O_NONBLOCK", "O_CLOEXEC", "O_BINARY", "O_NOINHERIT"):
    _READ |= getattr(os, _flag, 0)


def home() -> Path:
    """Return ``$FAIRFLOWER_HOME``, by default ``~/.fairflower``."""
    return Path(os.environ.get("FAIRFLOWER_HOME") or "~/.fairflower").expanduser().absolute()


def file_name(text: str) -> str:
    """Return a name with characters that file names allow.

    >>> file_name("moon:mu=1+my_package.rules:MinLoss")
    'moon-mu=1+my_package.rules-MinLoss'
    """
    return re.sub(r"[^\w.+=-]", "-", text)


def client_states() -> Path:
    """Return the folder of clients' state between rounds, ``<run id>/<client id>/``."""
    return home() / "state"


def new_folder(kind: str, chosen: str | Path | None = None) -> Path:
    """Return the chosen folder, or a folder named by time and process below ``kind``."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    return Path(chosen or home() / kind / name).expanduser().absolute()


def run_folders(path: Path) -> list[Path]:
    """Return the path if it is a run folder or a file, else all run folders below it.

    ``ConfigError`` if there is none.
    """
    if (path / "run.json").exists() or not path.is_dir():
        return [path]
    folders = sorted(facts.parent for facts in path.rglob("run.json"))
    if not folders:
        raise ConfigError(
            f"{path} is not a run folder and contains none: there is no run.json in it."
        )
    return folders


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises
    ------
    OSError
        If the system refuses, or for a named pipe, which may never be written to, or a device,
        which may have no end.
    """
    descriptor = os.open(path, _READ)
    try:
        check_regular(path, os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """Return a regular file's text; ``OSError`` as in `open_regular`."""
    with open_regular(path) as file, TextIOWrapper(file, encoding=encoding) as text:
        return text.read()


def check_output(path: Path) -> None:
    """Raise ``ConfigError`` for a path that no output may replace.

    These are files of a run folder, and everything but regular files, such as a pipe.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path}: This is not a regular file. Choose another name.")
    if (path.parent / "run.json").exists() and path.name in RUN_FILES:
        raise ConfigError(f"{path} is the run's own file. Choose another name.")


def check_folder(path: Path) -> None:
    """Raise ``OSError`` if a path is not a folder or cannot be read."""
    if not stat.S_ISDIR(path.stat().st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))


def check_regular(path: Path, mode: int) -> None:
    """Raise ``OSError`` if a file's mode is not that of a regular file."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "This is not a regular file", str(path))
