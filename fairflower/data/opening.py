"""Opening the files of others: no pipe is waited for, and nothing is read that is far too large."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from fairflower.errors import DataError

#: Bytes of an image file, or of a table: five times the largest image in 16 bits and colour.
MOST_BYTES = 2**30

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Turn whatever reading raises, which libraries leave open-ended, into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = f"{problem} ({type(error).__name__}: {error})."
        raise DataError(f"{reason} {remedy}." if remedy else reason) from error


def open_regular(path: Path, most: int | None = MOST_BYTES) -> BufferedReader:
    """Open a regular file of at most so many bytes, None: of any size, for reading.

    ``DataError`` if it is larger, or something else: to read a named pipe is to wait for whoever
    may write to it, and a device may have no end. ``OSError`` if the system refuses.
    """
    check_regular(path)
    # A pipe that has taken the file's place since does not block either: it is empty.
    file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")  # noqa: SIM115
    if most is not None and (size := os.fstat(file.fileno()).st_size) > most:
        file.close()
        raise DataError(f"{path} has {gigabytes(size)}; expected at most {gigabytes(most)}.")
    return file


def check_regular(path: Path) -> None:
    """Raise ``DataError`` if there is something else than a regular file."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        found = _KINDS.get(kind, "no file")
        raise DataError(f"{path} is {found}; only regular files are read. Remove or replace it.")


def gigabytes(size: int) -> str:
    """A number of bytes in words.

    >>> gigabytes(2**30), gigabytes(10**12)
    ('1.1 GB', '1,000.0 GB')
    """
    return f"{size / 1e9:,.1f} GB"


def free_memory() -> int:
    """Bytes that can be had without swapping; where the system does not tell, all of them."""
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        return 1024 * int(re.search(r"MemAvailable:\s*(\d+)", text)[1])  # type: ignore[index]
    except (OSError, TypeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
