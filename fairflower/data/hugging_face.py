"""Images and labels of Hugging Face data sets, in a folder or on the Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fairflower.data.federation import Ints, Pixels
from fairflower.data.files import (
    check_columns,
    check_regular,
    checked_labels,
    explained,
    open_regular,
)
from fairflower.data.images import FileTable, picture_in
from fairflower.errors import DataError, require

if TYPE_CHECKING:  # not in every installation
    from datasets import Dataset, DatasetDict
    from PIL import Image


@dataclass(frozen=True)
class HuggingFaceImages:
    """Rows of a Hugging Face data set with an ``image`` column; ``where`` is its name in errors."""

    data: Dataset
    where: str

    def check_columns(self, *names: str) -> None:
        """Raise ``DataError`` if a column is missing."""
        check_columns(self.where, names, self.data.column_names)

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column [N], with names instead of numbers if the column has class names."""
        values: npt.NDArray[Any] = np.asarray(self.data[name][:])
        names = getattr(self.data.features[name], "names", None)
        if names is None or values.dtype.kind not in "iu" or not len(values):
            return values
        numbers = checked_labels(f"{self.where}: {name}", values, len(names))
        return np.array([names[k] for k in numbers])

    def table(self, rows: Ints, labels: Ints) -> FileTable:
        """Return the table of the images in these rows, which have these labels."""
        files, mode = self._files

        def where(position: int) -> str:
            return f"{self.where}: row {rows[position]}"

        def pictures(positions: Ints) -> Iterator[Image.Image]:
            chosen = files.select(rows[positions])
            for position, example in zip(positions.tolist(), chosen, strict=True):
                yield picture_in(example["image"], where(position), mode)

        return FileTable(labels, where, pictures)

    def hashes(self, rows: Ints) -> list[str]:
        """Return the SHA-256 of each row's image file, or "" for a row without a file."""
        files = (example["image"] for example in self._files[0].select(rows))
        return [_hash(file) if isinstance(file, dict) else "" for file in files]

    @cached_property
    def _files(self) -> tuple[Dataset, str | None]:
        """The undecoded image column, for `picture_in`, and the color mode of its images."""
        from datasets import Image

        images, feature = self.data.select_columns(["image"]), self.data.features["image"]
        if not isinstance(feature, Image):
            return images, None
        return images.cast_column("image", Image(decode=False)), feature.mode


@dataclass(frozen=True)
class HuggingFaceSplits:
    """A domain in a Hugging Face ``DatasetDict``: train and test, with the columns image and label.

    Images are resized to squares with a side of ``image_size``. Labels must be below
    ``num_classes``, if it is given. ``where`` is the folder or name of the data in error messages.
    """

    splits: DatasetDict
    where: str
    image_size: int
    num_classes: int | None = None

    def labels(self, split: str) -> Ints:
        """Return the labels of a split, int64 [N]."""
        return self._table(split).labels

    def images(self, split: str, rows: Ints) -> Pixels:
        """Return the images of these rows, uint8 [len(rows), image_size, image_size, 3]."""
        return self._table(split).pixels(rows, self.image_size, f"{self.where}: {split}")[0]

    def _table(self, split: str) -> FileTable:
        if split not in self.splits:
            raise DataError(
                f"{self.where}: found the splits {', '.join(map(str, self.splits))}; "
                "expected train and test."
            )
        images = HuggingFaceImages(self.splits[split], f"{self.where}: {split}")
        images.check_columns("image", "label")
        values = np.asarray(images.data["label"][:])
        labels = checked_labels(f"{images.where}: label", values, self.num_classes)
        return images.table(np.arange(len(labels)), labels)


def load_hub(name: str, subset: str | None, remedy: str, splits: Sequence[str]) -> DatasetDict:
    """Download a data set from the Hugging Face Hub through flwr-datasets."""
    require("sim", f"{name} on the Hugging Face Hub", "flwr_datasets", "datasets")
    from datasets import DatasetDict
    from flwr_datasets import FederatedDataset

    with explained(f"{name} cannot be downloaded from the Hugging Face Hub", remedy):
        hub = FederatedDataset(dataset=name, subset=subset, partitioners={}, shuffle=False)
        return DatasetDict({split: hub.load_split(split) for split in splits})


def load_saved(folder: Path) -> Dataset | DatasetDict:
    """Load the data set that ``save_to_disk`` wrote to a folder."""
    require("sim", "A Hugging Face data set", "datasets")
    from datasets import load_from_disk

    for path in folder.rglob("*"):
        if path.exists() and not path.is_dir():
            check_regular(path)
    with explained(f"{folder} is not a Hugging Face data set written with save_to_disk"):
        return load_from_disk(str(folder))


def is_hf_dataset_folder(folder: Path) -> bool:
    """Return whether Hugging Face's ``save_to_disk`` wrote this folder."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a regular file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hash(file: dict[str, Any]) -> str:
    content = file["bytes"]
    return hashlib.sha256(content).hexdigest() if content else file_hash(Path(file["path"]))
