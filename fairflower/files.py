"""Named arrays and facts about them in one file that is there whole, or not at all.

A safetensors file with JSON and a checksum in its header. It is written under another
name, brought to the disk and then renamed, so a process (or machine) that dies at any
moment leaves the file as it was before.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from fairflower.paths import check_regular

Arrays = dict[str, NDArray[Any]]


class DamagedFile(ValueError):
    """A file that cannot be trusted; the message names it and says why."""


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]], facts: Mapping[str, Any]) -> None:
    """Write a file, in place of an earlier one, in a folder that is made if need be.

    The arrays, whose order is kept, have any type that safetensors knows; the facts are
    whatever JSON can hold.
    """
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    listing = [[name, array.dtype.str, array.shape] for name, array in dense.items()]
    text = json.dumps({"arrays": listing, "facts": facts})
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        try:
            save_file(dense, temporary, {"sealed": text, "sha256": _digest(text, dense)})
        except SafetensorError as error:  # which hides what the system said in its text
            number = re.search(r"os error (\d+)", str(error))
            code = int(number[1]) if number else errno.EIO
            raise OSError(code, os.strerror(code), str(path)) from error


def read_arrays(path: Path) -> tuple[Arrays, dict[str, Any]]:
    """The arrays, writable and in their order, and the facts.

    ``DamagedFile`` if this is not, to the last bit, what was written; ``FileNotFoundError`` if
    there is no such file.
    """
    if not path.exists():
        raise FileNotFoundError(f"There is no file {path}.")
    with _opened(path) as (file, header, content):
        arrays = {name: file.get_tensor(name) for name, _, _ in content["arrays"]}
    listing = [[name, array.dtype.str, list(array.shape)] for name, array in arrays.items()]
    if listing != content["arrays"] or header.get("sha256") != _digest(header["sealed"], arrays):
        raise DamagedFile(f"{path} is not what was written: its checksum is another.")
    return {name: np.require(a, requirements="W") for name, a in arrays.items()}, content["facts"]


def sealed_facts(path: Path) -> dict[str, Any]:
    """The facts alone; that they are what was written is not checked, as the arrays are not read.

    ``DamagedFile`` if there is no such file, or another one.
    """
    with _opened(path) as (_, _, content):
        return dict(content["facts"])


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Mapping[str, str], dict[str, Any]]]:
    """The file, its header and what is sealed there; ``DamagedFile`` where reading them fails."""
    try:
        check_regular(path, path.stat().st_mode)
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            yield file, header, json.loads(header["sealed"])
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise DamagedFile(f"{path} cannot be read ({error}).") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which then takes the place of ``path`` at once, or never.

    ``OSError`` if that is a folder, or a device or named pipe, which a user may name as an output:
    it would be gone.
    """
    with suppress(FileNotFoundError):
        check_regular(path, path.stat().st_mode)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:  # a disk is not to be filled by what is of no use
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, from the system's memory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(text: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(text.encode())
    for array in arrays.values():
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
