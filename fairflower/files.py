"""Files of named arrays and JSON metadata, written atomically and with a checksum.

The format is safetensors, with the metadata and the checksum in the header. A file is written under
a temporary name, flushed to disk and renamed, so after a crash the previous file is intact. Also
cells of CSV files.
"""

import errno
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fairflower.paths import check_regular

Arrays = dict[str, NDArray[Any]]


class DamagedFile(ValueError):
    """A file is damaged; the message has its path and the reason."""


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Write arrays and metadata to a file atomically; create its folder if it is missing.

    Arrays keep their order and may have any data type that safetensors supports; ``facts``, the
    metadata, may be any JSON object.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    listing = [[name, array.dtype.str, array.shape] for name, array in dense.items()]
    text = json.dumps({"arrays": listing, "facts": facts})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        try:
            save_file(dense, temporary, {"sealed": text, "sha256": _digest(text, dense)})
        except SafetensorError as error:  # the system error is only in the exception's text
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """Return the arrays, writable and in their original order, and the metadata.

    Raises ``DamagedFile`` if the file is unreadable or its checksum does not match, and
    ``FileNotFoundError`` if it does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    with _opened(path) as (file, header, content):
        arrays = {name: file.get_tensor(name) for name, _, _ in content["arrays"]}
    listing = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    if listing != content["arrays"] or header.get("sha256") != _digest(header["sealed"], arrays):
        raise DamagedFile(f"{path} is damaged: its checksum does not match.")
    return {name: np.require(a, requirements="W") for name, a in arrays.items()}, content["facts"]


def sealed_facts(path: Path) -> dict[str, Any]:
    """Return the metadata without reading the arrays or verifying the checksum.

    Raises ``DamagedFile`` if the file is missing or unreadable.
    """
    with _opened(path) as (_, _, content):
        return dict(content["facts"])


def metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty if it cannot be read."""
    with suppress(SafetensorError, OSError), safe_open(path, framework="numpy") as file:
        return dict(file.metadata() or {})
    return {}


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Mapping[str, str], dict[str, Any]]]:
    """Yield the file, its header and its JSON; raise ``DamagedFile`` if it cannot be read."""
    try:
        check_regular(path)
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            yield file, header, json.loads(header["sealed"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read ({error}).") from error


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read an array's shape, whether it is in Fortran order, and its dtype, in NumPy's format.

    The format is 1.0 or 2.0; later formats are for records only.
    """
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    return read[np.lib.format.read_magic(file)](file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that replaces ``path`` atomically unless an exception is raised.

    Raises ``OSError`` if ``path`` is a folder, a device or a named pipe, because it would be lost.
    """
    with suppress(FileNotFoundError):
        check_regular(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        _rename(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _rename(temporary: Path, path: Path) -> None:
    """Rename a file; on Windows wait up to 2 seconds while another process has ``path`` open."""
    for _ in range(20 if sys.platform == "win32" else 0):
        with suppress(PermissionError):
            temporary.replace(path)
            return
        time.sleep(0.1)
    temporary.replace(path)


def sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk; folders are skipped on Windows."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    # Windows flushes only files that are open for writing.
    descriptor = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(text: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for array in arrays.values():
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


#: Matches text that a spreadsheet would evaluate, and what `cell_of` makes of it.
_FORMULA = re.compile(r"'*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")  # also full-width ones


def cell_of(value: Any) -> Any:
    """Return the cell of a CSV file for a name that sites and users choose.

    A text that a spreadsheet would evaluate begins with an apostrophe; numbers remain numbers.

    >>> cell_of("=1+2"), cell_of("-0.5 1e-3"), cell_of(-2), text_of(cell_of("'@x"))
    ("'=1+2", '-0.5 1e-3', -2, "'@x")
    """
    if not (isinstance(value, str) and _FORMULA.match(value)):
        return value
    with suppress(ValueError):
        _ = [float(part) for part in value.split(" ")]
        return value
    return f"'{value}"


def text_of(cell: Any) -> Any:
    """Return the text that `cell_of` made a cell of."""
    escaped = isinstance(cell, str) and cell.startswith("'") and _FORMULA.match(cell)
    return cell[1:] if escaped else cell
