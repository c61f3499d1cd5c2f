"""Reading a domain's images and labels from files of others, with every check.

Two formats: ``<domain>.npz`` and a Hugging Face data set. Both give the same two methods.
"""

from __future__ import annotations

import logging
import os
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.data.federation import Ints, Pixels
from fairflower.data.images import eight_bit, resize
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


@dataclass(frozen=True)
class NpzFile:
    """A domain as one ``.npz`` file of ``x_train, y_train, x_test, y_test``.

    Deflate, LZMA or no compression; nothing in it is unpickled. Labels must be below
    ``num_classes``, if given.
    """

    path: Path
    num_classes: int | None = None

    def labels(self, split: str) -> Ints:
        """Labels of a split, checked."""
        key = f"y_{split}"
        return checked_labels(f"{self.path}: {key}", self._array(key), self.num_classes)

    def images(self, split: str, rows: Ints) -> Pixels:
        """The images of these rows; the whole array is checked."""
        key, count = f"x_{split}", len(self._array(f"y_{split}"))
        values = self._array(key)
        picture = values.ndim == 3 or (values.ndim == 4 and values.shape[3] in (1, 3))
        if values.dtype != np.uint8 or not picture or 0 in values.shape[1:]:
            raise self._wrong(key, _found(values), "uint8 images [N, H, W] or [N, H, W, 3]")
        if len(values) != count:
            raise self._wrong(key, f"{len(values)} images", f"{count}, as y_{split} has labels")
        return values[rows]

    def _array(self, key: str) -> npt.NDArray[Any]:
        if not self.path.is_file():
            raise DataError(f"{self.path} is missing. Expected an .npz file with {NPZ_FORMAT}.")
        if not zipfile.is_zipfile(self.path):
            raise DataError(f"{self.path} is no .npz file. Expected one with {NPZ_FORMAT}.")
        remedy = f"Expected an .npz file with {NPZ_FORMAT}, and no Python objects"
        problem = f"{self.path}: {key} cannot be read"
        with explained(problem, remedy), np.load(self.path, allow_pickle=False) as arrays:
            keys = list(arrays.files)
            if key in keys:
                return np.asarray(arrays[key])
        raise self._wrong(key, f"only {', '.join(keys) or 'nothing'}", NPZ_FORMAT)

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
        from PIL import Image

        pictures = np.empty((len(rows), self.image_size, self.image_size, 3), np.uint8)
        for i, row in enumerate(self._column(split, "image").select(rows)):
            if not isinstance(row["image"], Image.Image):
                raise DataError(
                    f"{self.where}: {split}: image: found {type(row['image']).__name__}; "
                    "expected a column of the feature type datasets.Image."
                )
            picture = eight_bit(row["image"], f"{self.where}: {split}: row {rows[i]}")
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

    with explained(f"{folder} is not a Hugging Face data set written with save_to_disk"):
        return load_from_disk(str(folder))


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


def _found(values: npt.NDArray[Any]) -> str:
    return f"{values.dtype} {list(values.shape)}"
