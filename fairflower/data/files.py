"""Reading a domain's images and labels from files of others, with every check.

Two formats: ``<domain>.npz`` and a Hugging Face data set. Both give the same two methods.
"""

from __future__ import annotations

import logging
import math
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.data.federation import Ints, Pixels
from fairflower.data.images import eight_bit, picture_in, resize
from fairflower.data.opening import (
    check_regular,
    explained,
    free_memory,
    gigabytes,
    open_regular,
)
from fairflower.errors import DataError

if TYPE_CHECKING:  # not in every installation
    from datasets import Dataset, DatasetDict

logger = logging.getLogger(__name__)

NPZ_FORMAT = (
    "x_train, x_test (uint8 images [N, H, W] or [N, H, W, 3]) and y_train, y_test "
    "(whole-number labels [N])"
)

#: Labels beyond are no numbers of classes.
MOST_CLASSES = 2**16


class Header(NamedTuple):
    """What an array says of itself before its numbers."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


@dataclass(frozen=True)
class NpzFile:
    """A domain as one ``.npz`` file of ``x_train, y_train, x_test, y_test``.

    Deflate, LZMA or no compression; nothing in it is unpickled, and nothing decompressed that
    would not fit the memory by its header. Labels must be below ``num_classes``, if given.
    """

    path: Path
    num_classes: int | None = None

    def labels(self, split: str) -> Ints:
        """Labels of a split, checked."""
        key = f"y_{split}"
        return checked_labels(f"{self.path}: {key}", self._array(key), self.num_classes)

    def images(self, split: str, rows: Ints) -> Pixels:
        """The images of these rows; the whole array is checked."""
        key, count = f"x_{split}", len(self.labels(split))
        with self._member(key) as (header, member):
            sizes = header.shape[1:]
            picture = len(sizes) == 2 or (len(sizes) == 3 and sizes[2] in (1, 3))
            if header.dtype != np.uint8 or not picture or 0 in sizes:
                raise self._wrong(key, _found(header), "uint8 images [N, H, W] or [N, H, W, 3]")
            if header.shape[0] != count:
                found = f"{header.shape[0]} images"
                raise self._wrong(key, found, f"{count}, as y_{split} has labels")
            return np.lib.format.read_array(member)[rows]

    def _array(self, key: str) -> npt.NDArray[Any]:
        with self._member(key) as (_, member):
            return np.lib.format.read_array(member)

    @contextmanager
    def _member(self, key: str) -> Iterator[tuple[Header, IO[bytes]]]:
        """An array's header, checked, and the array to be read."""
        with explained(f"{self.path} cannot be read"), open_regular(self.path, None) as file:
            if not zipfile.is_zipfile(file):
                raise DataError(f"{self.path} is no .npz file. Expected one with {NPZ_FORMAT}.")
            remedy = f"Expected an .npz file with {NPZ_FORMAT}, and no Python objects"
            problem = f"{self.path}: {key} cannot be read"
            with explained(problem, remedy), zipfile.ZipFile(file) as archive:
                keys = [name.removesuffix(".npy") for name in archive.namelist()]
                if key not in keys:
                    raise self._wrong(key, f"only {', '.join(keys) or 'nothing'}", NPZ_FORMAT)
                size = archive.getinfo(f"{key}.npy").file_size
                with archive.open(f"{key}.npy") as member:
                    header = _header(member)
                    self._check_size(key, header, size - member.tell())
                    member.seek(0)
                    yield header, member

    def _check_size(self, key: str, header: Header, size: int) -> None:
        needed = math.prod(header.shape) * header.dtype.itemsize
        if not header.dtype.hasobject and needed != size:
            there = f"{_found(header)}, {needed} bytes, of which the file has {size}"
            raise self._wrong(key, there, "all of them")
        if needed > (free := free_memory()):
            raise DataError(
                f"{self.path}: {key}: found {_found(header)}, {gigabytes(needed)}; expected no "
                f"more than the free memory, {gigabytes(free)}. Store fewer or smaller images."
            )

    def _wrong(self, key: str, found: str, expected: str) -> DataError:
        return DataError(f"{self.path}: {key}: found {found}; expected {expected}.")


@dataclass(frozen=True)
class HuggingFace:
    """A domain as a Hugging Face ``DatasetDict``: train and test, image and label.

    Images are resized to squares of side ``image_size``, as they may differ in size; labels
    must be below ``num_classes``, if given. ``where`` is the data's folder or name, for messages.
    """

    splits: DatasetDict
    where: str
    image_size: int
    num_classes: int | None = None

    def labels(self, split: str) -> Ints:
        """Labels of a split, checked."""
        values = np.asarray(self._column(split, "label")["label"][:])
        return checked_labels(f"{self.where}: {split}: label", values, self.num_classes)

    def images(self, split: str, rows: Ints) -> Pixels:
        """The images of these rows, uint8 [len(rows), image_size, image_size, 3]."""
        data, mode = undecoded(self._column(split, "image").select(rows))
        pictures = np.empty((len(rows), self.image_size, self.image_size, 3), np.uint8)
        for i, row in enumerate(data):
            where = f"{self.where}: {split}: row {rows[i]}"
            picture = eight_bit(picture_in(row["image"], where, mode), where)
            pictures[i] = resize(picture[None], (self.image_size, self.image_size))[0]
        return pictures

    def _column(self, split: str, name: str) -> Dataset:
        if split not in self.splits:
            raise DataError(
                f"{self.where}: found the splits {', '.join(map(str, self.splits))}; "
                "expected train and test."
            )
        columns = self.splits[split].column_names
        if name not in columns:
            raise DataError(
                f"{self.where}: {split}: found the columns {', '.join(columns)}; "
                "expected image and label."
            )
        return self.splits[split].select_columns([name])


def data_folder(config: DataConfig) -> Path | None:
    """``data.dir``, else ``$FAIRFLOWER_DATA``, as an absolute path; None if neither is set."""
    name = config.dir or os.environ.get("FAIRFLOWER_DATA", "")
    if not name:
        return None
    folder = Path(name).expanduser().absolute()
    if not folder.is_dir():
        key = "data.dir" if config.dir else "FAIRFLOWER_DATA"
        raise DataError(f"{key} = {name!r}: there is no folder {folder}.")
    return folder


def load_hub(name: str, subset: str | None, remedy: str, splits: Sequence[str]) -> DatasetDict:
    """A data set from the Hugging Face Hub, through flwr-datasets."""
    from datasets import DatasetDict
    from flwr_datasets import FederatedDataset

    with explained(f"{name} cannot be fetched from the Hugging Face Hub", remedy):
        hub = FederatedDataset(dataset=name, subset=subset, partitioners={}, shuffle=False)
        return DatasetDict({split: hub.load_split(split) for split in splits})


def load_saved(folder: Path) -> Dataset | DatasetDict:
    """What was written with ``save_to_disk``."""
    from datasets import load_from_disk

    for path in folder.rglob("*"):
        if path.exists() and not path.is_dir():
            check_regular(path)
    with explained(f"{folder} is not a Hugging Face data set written with save_to_disk"):
        return load_from_disk(str(folder))


def undecoded(data: Dataset) -> tuple[Dataset, str | None]:
    """The same with its images as files, for `picture_in`, and the mode that they are to have."""
    from datasets import Image

    kind = data.features["image"]
    if not isinstance(kind, Image):
        return data, None
    return data.cast_column("image", Image(decode=False)), kind.mode


def checked_labels(where: str, values: npt.NDArray[Any], num_classes: int | None) -> Ints:
    """Labels as int64 [N]; a DataError if they are not whole numbers from 0 to below a limit."""
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise DataError(f"{where}: found {_found(values)}; expected whole-number labels [N].")
    if len(values) == 0:
        raise DataError(f"{where}: found no labels; expected at least one image.")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= (num_classes or MOST_CLASSES):
        allowed = f"0 to {(num_classes or MOST_CLASSES) - 1}, the classes' numbers"
        raise DataError(f"{where}: found labels from {low} to {high}; expected {allowed}.")
    return values.astype(np.int64)


def stamp(path: Path) -> list[Any]:
    """Path, size and time of a file, or of every file in a folder: a cheap fingerprint."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    stats = ((file, file.stat()) for file in files if file.is_file())
    return [[str(file), stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def _header(member: IO[bytes]) -> Header:
    """That of an array in NumPy's format; versions after 2.0 are of records, which are not read."""
    version = np.lib.format.read_magic(member)
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    shape, _, dtype = read[version](member)
    return Header(shape, dtype)


def _found(values: npt.NDArray[Any] | Header) -> str:
    return f"{values.dtype} {list(values.shape)}"
