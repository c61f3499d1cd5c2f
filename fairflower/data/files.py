"""Labels and images in ``.npz`` files, and helper functions for reading local files."""

from __future__ import annotations

import logging
import math
import os
import unicodedata
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.data.federation import Ints, Pixels
from fairflower.data.opening import TABLES, check_memory, explained, open_regular
from fairflower.errors import DataError
from fairflower.files import read_npy_header

logger = logging.getLogger(__name__)

NPZ_FORMAT = (
    "x_train, x_test (uint8 images [N, H, W] or [N, H, W, 3]) and y_train, y_test "
    "(whole-number labels [N])"
)

#: Upper bound on labels if the number of classes is not declared.
MAX_CLASSES = 2**16


class Header(NamedTuple):
    """Shape and type of a stored array, read before its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True)
class NpzFile:
    """A domain in an ``.npz`` file with ``x_train``, ``y_train``, ``x_test`` and ``y_test``.

    The file may be compressed (deflate, LZMA). Python objects are rejected, and so are arrays whose
    header states a size above the free memory. Labels must be below ``num_classes``, if it is
    given.
    """

    path: Path
    num_classes: int | None = None

    def labels(self, split: str) -> Ints:
        """Return the labels of a split, int64 [N]."""
        key = f"y_{split}"
        with self._member(key) as (_, member):
            values = np.lib.format.read_array(member)
        return checked_labels(f"{self.path}: {key}", values, self.num_classes)

    def values(self, setting: str, name: str, split: str) -> list[str]:
        """Return the values of ``<name>_<split>`` as strings, one for each label of the split."""
        key, count = f"{name}_{split}", len(self.labels(split))
        expected = f"whole numbers or strings [{count}], one for each label in y_{split}"
        with self._member(key, f"{expected} ({setting} = {name!r})") as (header, member):
            if header.dtype.kind not in "iubU" or header.shape != (count,):
                raise self._wrong(key, header, expected)
            values = [str(value) for value in np.lib.format.read_array(member)]
        if "" in values:
            raise self._wrong(key, f"an empty text for example {values.index('')}", expected)
        return values

    def images(self, split: str, rows: Ints) -> Pixels:
        """Return the images of these rows, after checking the whole array."""
        key, count = f"x_{split}", len(self.labels(split))
        with self._member(key) as (header, member):
            sizes = header.shape[1:]
            picture = len(sizes) == 2 or (len(sizes) == 3 and sizes[2] in (1, 3))
            if header.dtype != np.uint8 or not picture or 0 in sizes:
                table = f". {TABLES}" if len(header.shape) == 2 else ""
                raise self._wrong(key, header, f"uint8 images [N, H, W] or [N, H, W, 3]{table}")
            if header.shape[0] != count:
                images = f"{header.shape[0]} images"
                raise self._wrong(key, images, f"{count}, the number of labels in y_{split}")
            return np.lib.format.read_array(member)[rows]

    @contextmanager
    def _member(self, key: str, expected: str = NPZ_FORMAT) -> Iterator[tuple[Header, IO[bytes]]]:
        """Open an array, check its size, and yield its header and its file."""
        with explained(f"{self.path} cannot be read"), open_regular(self.path, None) as file:
            if not zipfile.is_zipfile(file):
                raise DataError(f"{self.path} is not an .npz file. Expected {NPZ_FORMAT}.")
            remedy = f"Expected an .npz file with {NPZ_FORMAT}, without Python objects"
            problem = f"{self.path}: {key} cannot be read"
            with explained(problem, remedy), zipfile.ZipFile(file) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
                if key not in keys:
                    raise self._wrong(key, f"only {', '.join(keys) or 'nothing'}", expected)
                size = archive.getinfo(f"{key}.npy").file_size
                with archive.open(f"{key}.npy") as member:
                    shape, _, dtype = read_npy_header(member)
                    header = Header(shape, dtype)
                    self._check_size(key, header, size - member.tell())
                    member.seek(0)
                    yield header, member

    def _check_size(self, key: str, header: Header, size: int) -> None:
        needed = math.prod(header.shape) * header.dtype.itemsize
        if not header.dtype.hasobject and needed != size:
            raise self._wrong(key, f"{size} bytes of data for {header}", f"{needed} bytes")
        found = f"{self.path}: {key}: found {header},"
        check_memory(found, needed, "Store fewer or smaller images.")

    def _wrong(self, key: str, content: object, expected: str) -> DataError:
        public = f"{key} in an .npz file is missing or wrong; expected {expected}"
        return DataError(
            f"{self.path}: {key}: found {content}; expected {expected}.", public=public
        )


def data_folder(config: DataConfig) -> Path | None:
    """Return the absolute path of ``data.dir`` or ``$FAIRFLOWER_DATA``; None if neither is set."""
    name = config.dir or os.environ.get("FAIRFLOWER_DATA", "")
    if not name:
        return None
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        key = "data.dir" if config.dir else "FAIRFLOWER_DATA"
        raise DataError(
            f"{key} = {name!r}: the folder {folder} does not exist.",
            public="the folder of the data does not exist",
        )
    return folder


def needed_folder(config: DataConfig, content: str) -> Path:
    """Return `data_folder`; raise ``DataError``, which names the ``content``, if it is not set."""
    folder = data_folder(config)
    if folder is None:
        raise DataError(
            f"The data set {config.name!r} needs a folder. Set data.dir (or FAIRFLOWER_DATA) to a "
            f"folder with {content}."
        )
    return folder


def checked_labels(where: str, values: npt.NDArray[Any], num_classes: int | None) -> Ints:
    """Return the labels as int64 [N], if they are valid.

    Raises ``DataError`` if they are not whole numbers from 0 to ``num_classes - 1``. ``where`` says
    in the error message where the labels are.
    """
    if values.ndim != 1 or values.dtype.kind not in "iu":
        header = Header(values.shape, values.dtype)
        raise DataError(f"{where}: found {header}; expected whole-number labels [N].")
    if len(values) == 0:
        raise DataError(f"{where}: found no labels; expected at least one example.")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= (num_classes or MAX_CLASSES):
        allowed = f"0 to {(num_classes or MAX_CLASSES) - 1}, the class numbers"
        raise DataError(f"{where}: found labels from {low} to {high}; expected {allowed}.")
    return values.astype(np.int64)


def check_twins(what: str, held: Mapping[str, Iterable[str]], remedy: str) -> None:
    """Raise ``DataError`` if names are too similar; ``held`` maps each domain to its names."""
    of = {domain: set(names) for domain, names in held.items()}
    alike: dict[str, list[str]] = {}
    for name in sorted(set().union(*of.values())):
        alike.setdefault(_plain(name).casefold(), []).append(name)
    for twins in alike.values():
        # If a domain has both "A" and "a", they are different.
        together = any(names.issuperset(twins) for names in of.values())
        if len(twins) > 1 and not (together and len(set(map(_plain, twins))) == len(twins)):
            places = [next(d for d, names in of.items() if name in names) for name in twins]
            listed = ", ".join(f"{n!r} (in {d})" for n, d in zip(twins, places, strict=True))
            raise DataError(
                f"{what} {listed} differ only in case, spaces or code points. {remedy}. If they "
                "are the same, use the same name; otherwise, use clearly different names."
            )


def _plain(name: str) -> str:
    """Normalize a name, because an accented letter may have one or two code points."""
    return unicodedata.normalize("NFC", name).strip()


def stamp(path: Path) -> list[Any]:
    """Return a cheap fingerprint: the path, size and time of a file or of all files in a folder.

    Subfolders may be symbolic links, as class folders may. Deeper linked folders are not read.
    """
    files = [path]
    if path.is_dir():
        linked = (p for p in path.iterdir() if p.is_symlink() and p.is_dir())
        files = sorted(file for folder in (path, *linked) for file in folder.rglob("*"))
    stats = ((file, file.stat()) for file in files if file.is_file())
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]
