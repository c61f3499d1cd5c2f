"""Checks of files before they are read: kind of file, size and columns."""

from __future__ import annotations

import ctypes
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from fairflower import paths
from fairflower.errors import DataError

#: Maximum size of an image file or table in bytes: five times the largest image in 16-bit color.
MAX_BYTES = 2**30

_CGROUP = Path("/proc/self/cgroup")

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def explained(problem: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception of a file-reading library to a ``DataError``."""
    try:
        yield
    except DataError as error:
        error.public = error.public or "a file cannot be read"
        raise
    except Exception as error:
        reason = f"{problem} ({type(error).__name__}: {error})."
        public = f"a file cannot be read ({type(error).__name__})"
        raise DataError(f"{reason} {remedy}." if remedy else reason, public=public) from error


def open_regular(path: Path, most: int | None = MAX_BYTES) -> BufferedReader:
    """Open a regular file of at most ``most`` bytes for reading; None means any size.

    Raises ``DataError`` if the file is larger, or if it is not a regular file: reading a named pipe
    would wait for a writer, and a device may have no end. Raises ``OSError`` if the operating
    system cannot open the file.
    """
    check_regular(path)
    file = paths.open_regular(path)
    if most is not None and (size := os.fstat(file.fileno()).st_size) > most:
        file.close()
        raise DataError(
            f"{path}: found {gigabytes(size)}; expected at most {gigabytes(most)}. Reduce its size."
        )
    return file


def check_regular(path: Path) -> None:
    """Raise ``DataError`` if the path is not a regular file."""
    kind = stat.S_IFMT(path.stat().st_mode)
    if kind != stat.S_IFREG:
        name = _KINDS.get(kind, "not a file")
        raise DataError(f"{path} is {name}; only regular files are read. Remove or replace it.")


#: What to do with files that are tables of numbers.
TABLES = "For a table of numbers write a FeatureSet: docs/your-own-parts.md, Other data than images"


def check_columns(
    where: str, wanted: Iterable[str], columns: Iterable[str], remedy: str = ""
) -> None:
    """Raise ``DataError`` if a table, ``where``, lacks a column or has two of the same name."""
    columns, wanted = list(columns), list(wanted)
    if twice := [name for name in wanted if columns.count(name) > 1]:
        found = f"found several columns named {twice[0]}. Rename all but one."
        raise DataError(f"{where}: {found}", public=f"a table: {found}")
    if missing := [name for name in wanted if name not in columns]:
        lacks = f"missing: {', '.join(missing)}. Add or rename columns."
        raise DataError(
            f"{where}: found the columns {', '.join(columns)}; {lacks} {remedy}".rstrip(),
            public=f"a table: found {len(columns)} columns; {lacks}",
        )


def gigabytes(size: int) -> str:
    """Format a number of bytes as gigabytes.

    >>> gigabytes(2**30), gigabytes(10**12)
    ('1.1 GB', '1,000.0 GB')
    """
    return f"{size / 1e9:,.1f} GB"


def check_memory(subject: str, needed: int, remedy: str) -> None:
    """Raise ``DataError`` if ``needed`` bytes exceed the free memory.

    The message consists of ``subject``, both numbers of bytes and ``remedy``.
    """
    if needed > (free := free_memory()):
        problem = f"{gigabytes(needed)}; expected no more than the free memory, {gigabytes(free)}."
        raise DataError(f"{subject} {problem} {remedy}", public=f"a file takes {problem}")


def free_memory() -> int:
    """Return the number of bytes available without swapping or, if unknown, the total memory.

    The limit of this process's control group (version 2), as of a container, counts, too.
    """
    try:
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = 1024 * int(re.search(r"MemAvailable:\s*(\d+)", text)[1])  # type: ignore[index]
        return min(free, _free_in_container(free))
    except (OSError, TypeError):
        if not hasattr(os, "sysconf"):
            return _free_on_windows()
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_in_container(otherwise: int) -> int:
    """Return the bytes that this process's Linux cgroup may still use, if it has a limit."""
    try:
        path = re.search(r"^0::(.*)$", _CGROUP.read_text(encoding="utf-8"), re.MULTILINE)[1]  # type: ignore[index]
        folder = Path(f"/sys/fs/cgroup{path}")
        limit, used = (
            int((folder / f"memory.{name}").read_text("ascii")) for name in ("max", "current")
        )
        cached = re.search(
            r"^inactive_file (\d+)$", (folder / "memory.stat").read_text("ascii"), re.MULTILINE
        )
        return max(0, limit - used + int(cached[1]))  # type: ignore[index]
    except (OSError, TypeError, ValueError):  # another system, or no limit ("max")
        return otherwise


def _free_on_windows() -> int:
    """Return the field ``ullAvailPhys`` of the Windows structure MEMORYSTATUSEX."""
    status = (ctypes.c_uint64 * 8)()
    ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] = ctypes.sizeof(status)
    ctypes.windll.kernel32.GlobalMemoryStatusEx(status)  # type: ignore[attr-defined]
    return int(status[2])
