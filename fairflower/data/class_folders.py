"""Data sets with a folder of images per domain and class, and no published split.

The images may also be a Hugging Face data set, in a folder or on the Hub.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data import dicom
from fairflower.data.data_set import DataSetOfFiles
from fairflower.data.federation import Ints, Pixels
from fairflower.data.files import checked_labels, logger, stamp
from fairflower.data.hugging_face import (
    HuggingFaceImages,
    file_hash,
    is_hf_dataset_folder,
    load_hub,
    load_saved,
)
from fairflower.data.images import eight_bit, empty_pixels, read_picture, resize
from fairflower.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict
    from PIL import Image

#: File extensions of images: torchvision's, others that Pillow reads, and those of DICOM files.
EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *(".gif", ".jfif", ".jpe", ".pnm"),
    *dicom.SUFFIXES,
)

#: Files that Windows adds to folders.
_OF_WINDOWS = ("thumbs.db", "desktop.ini")

#: Label of images to skip, because their class is not part of the data set.
OTHER = -1


@dataclass(frozen=True)
class Domain:
    """The images of a domain, not yet decoded, sorted by class.

    ``labels`` are int64 [N] in ascending order. ``where`` returns the name of the image at a
    position, for error messages. ``pictures`` decodes the images at the given positions one at a
    time.
    """

    labels: Ints
    where: Callable[[int], str]
    pictures: Callable[[Ints], Iterator[Image.Image]]


class ClassFolders(DataSetOfFiles[Domain]):
    """A data set without a published split; a subclass may override `is_test` to define one.

    Images are resized to a square. They are read from one of these sources:

    1. The folder ``data.dir`` (or ``$FAIRFLOWER_DATA`` if ``data.dir`` is empty), or one of its
       ``subfolders``. It has a folder per domain, with a folder per class or a Hugging Face data
       set that ``save_to_disk`` wrote (image, label). Or it is a single Hugging Face data set of
       all domains (image, domain, label).
    2. The Hugging Face Hub, through flwr-datasets, if no folder is set and ``hub`` is set.

    Images are sorted by class, then by file name, as in torchvision's ImageFolder. Images of a
    Hugging Face data set are sorted by class, then by row. With ``by_content``, images are sorted
    by class, then by the SHA-256 of their files, so that both sources give the same order.
    """

    #: Alias of a class -> the class.
    aliases: ClassVar[Mapping[str, str]] = {}
    #: Whether images of unknown classes are skipped. If not, they raise an error.
    others: ClassVar[bool] = False
    #: Whether the images of a class are sorted by the SHA-256 of their files instead of by name.
    by_content: ClassVar[bool] = False
    #: Subfolders of ``data.dir`` that are also searched for the domains.
    subfolders: ClassVar[tuple[str, ...]] = ()
    #: Id on the Hugging Face Hub of a data set with a single split. None if it is not on the Hub.
    hub: ClassVar[str | None] = None
    image_size: ClassVar[int]
    channels: ClassVar[int] = 3
    #: Bit depth of integer gray images with more than 8 bits.
    bits: int = 16

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of the test images of a domain, bool [N], given its sorted labels.

        By default, the test images are the first image of each class and every fifth after it.

        >>> ClassFolders.is_test(None, np.array([0, 0, 0, 0, 0, 0, 1, 1])).nonzero()[0].tolist()
        [0, 5, 6]
        """
        position = np.arange(len(labels)) - np.searchsorted(labels, labels)
        chosen: npt.NDArray[np.bool_] = position % 5 == 0
        return chosen

    def labels(self, domain: str, split: str) -> Ints:
        return self._open(domain).labels[self._positions(domain, split)]

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """Decode the images of these rows only. Returns uint8 [len(rows), S, S, 3]."""
        side = self.config.image_size or self.image_size
        source = self._open(domain)
        positions = self._positions(domain, split)[rows]
        pixels = empty_pixels(self.source(domain), len(rows), side)
        largest = 0
        for i, picture in enumerate(source.pictures(positions)):
            values = eight_bit(picture, source.where(int(positions[i])), self.bits)
            pixels[i] = resize(values[None], (side, side))[0]
            if picture.mode.startswith("I"):
                largest = max(largest, int(np.asarray(picture).max()))
        self._warn_of_depth(domain, largest)
        return pixels

    def _warn_of_depth(self, domain: str, largest: int) -> None:
        """Warn if ``largest``, the largest value in images with over 8 bits, is far below white."""

    def fingerprint(self) -> Any:
        if self._root is None:
            return [self.hub]
        if is_hf_dataset_folder(self._root):
            return stamp(self._root)
        return [_stamp(self.place(domain)) for domain in self.domains]

    def source(self, domain: str) -> str:
        if self._root is None:
            return f"Hugging Face {self.hub}"
        return str(self._root if is_hf_dataset_folder(self._root) else self.place(domain))

    def place(self, domain: str) -> Path:
        """Return the folder of a domain."""
        assert self._root is not None
        return self._root / domain

    def layout(self) -> str:
        """Describe the expected content of the folder, for error messages."""
        return (
            f"<domain>/<class>/<image> for the domains {', '.join(self.domains)}, or a Hugging "
            "Face data set written with save_to_disk (image, domain, label)"
        )

    def is_in(self, folder: Path) -> bool:
        """Return whether a folder has the expected content."""
        return is_hf_dataset_folder(folder) or all(
            (folder / domain).is_dir() for domain in self.domains
        )

    @cached_property
    def _root(self) -> Path | None:
        """The folder that contains the images. None means the Hub."""
        remedy = f"Set data.dir or FAIRFLOWER_DATA to a folder that has {self.layout()}"
        if self.folder is None:
            if self.hub is None:
                raise DataError(f"{self.title} is not on the Hugging Face Hub. {remedy}.")
            return None
        for folder in (self.folder, *(self.folder / name for name in self.subfolders)):
            if self.is_in(folder):
                return folder
        names = ", ".join(self.subfolders)
        if self.hub:
            remedy += f", or unset both to download {self.hub} from the Hugging Face Hub"
        raise DataError(
            f"{self.title} is neither in {self.folder} nor in its subfolders {names}. {remedy}."
        )

    def _positions(self, domain: str, split: str) -> Ints:
        """Return the positions of a split's images among all images of the domain."""
        return np.flatnonzero(self.is_test(self._open(domain).labels) == (split == "test"))

    def _read(self, domain: str) -> Domain:
        if self._root is None:
            assert self.hub is not None
            remedy = "Set data.dir or FAIRFLOWER_DATA to a folder with the images"
            return self._from_hugging_face(load_hub(self.hub, None, remedy, ("train",)), domain)
        if is_hf_dataset_folder(self._root):
            return self._from_hugging_face(load_saved(self._root), domain)
        if is_hf_dataset_folder(folder := self.place(domain)):
            return self._from_hugging_face(load_saved(folder), domain, alone=True)
        return self._from_files(folder)

    def _from_files(self, folder: Path) -> Domain:
        classes = {path: self._class_of(path.name, str(folder)) for path in folders_in(folder)}
        files: list[tuple[int, str, Path]] = []
        skipped: list[Path] = []
        for class_folder, label in classes.items():
            if label != OTHER:
                images, others = files_in(class_folder)
                keys = (file_hash(path) if self.by_content else path.name for path in images)
                files += [(label, key, path) for key, path in zip(keys, images, strict=True)]
                skipped += others
        if skipped:
            logger.warning(
                "%s: %d files have no image extension and are skipped, for example %s. Images have "
                "%s.",
                folder,
                len(skipped),
                skipped[0],
                ", ".join(EXTENSIONS),
            )
        return self._of_files(files, folder)

    def _of_files(self, files: Iterable[tuple[int, str, Path]], folder: Path) -> Domain:
        """Build a domain from tuples (label, text, path), sorted by label, then by text."""
        ordered = sorted(files)
        paths = [path for _, _, path in ordered]
        labels = np.array([label for label, _, _ in ordered], np.int64)
        self._check_complete(str(folder), labels)
        return Domain(
            labels, lambda i: str(paths[i]), lambda at: (read_picture(paths[i]) for i in at)
        )

    def _from_hugging_face(
        self, data: Dataset | DatasetDict, domain: str, alone: bool = False
    ) -> Domain:
        """Build a domain from its rows in a data set, or from all rows if ``alone``."""
        where = self.source(domain)
        if isinstance(data, dict):
            if len(data) != 1:
                raise DataError(
                    f"{where}: found the splits {', '.join(map(str, data))}; expected a single "
                    f"split, because {self.title} is split by its own rule. Concatenate the "
                    "splits."
                )
            (data,) = data.values()
        images = HuggingFaceImages(data, where)
        images.check_columns("image", "label", *(() if alone else ("domain",)))
        rows = np.arange(len(data))
        if not alone:
            rows = np.flatnonzero(images.column("domain") == domain)
        labels = images.column("label")[rows]
        if labels.dtype.kind in "iu" and len(labels):
            labels = checked_labels(f"{where}: label", labels, len(self.classes))
        else:
            labels = np.array([self._class_of(str(name), where) for name in labels], np.int64)
        rows, labels = rows[labels != OTHER], labels[labels != OTHER]
        self._check_complete(where if alone else f"{where}: {domain}", labels)
        hashes = images.hashes(rows) if self.by_content else [""] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: (labels[i], hashes[i]))
        rows, labels = rows[order], labels[order]
        return Domain(
            labels, lambda i: images.row_name(rows[i]), lambda at: images.pictures(rows[at])
        )

    def _class_of(self, name: str, where: str) -> int:
        name = self.aliases.get(name, name)
        if name not in self.classes:
            if self.others:
                return OTHER
            raise DataError(
                f"{where}: found the class {name!r}; expected {', '.join(self.classes)}."
            )
        return self.classes.index(name)

    def _check_complete(self, where: str, labels: Ints) -> None:
        absent = [name for i, name in enumerate(self.classes) if i not in labels]
        if absent:
            raise DataError(
                f"{where} has no images of {', '.join(absent)}. Add the missing images."
            )


def folders_in(folder: Path) -> list[Path]:
    """Return the sorted subfolders of a folder, except hidden ones and macOS's ``__MACOSX``."""
    paths = (p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX")
    return sorted(path for path in paths if path.is_dir())


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the sorted images in a folder, by their extensions, and its other files.

    Hidden files, and those that Windows adds to folders, are left out.
    """
    paths = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    images = [path for path in paths if path.suffix.lower() in EXTENSIONS]
    rest = (path for path in paths if path.suffix.lower() not in EXTENSIONS)
    return images, [p for p in rest if p.name.lower() not in _OF_WINDOWS and p.is_file()]


def _stamp(folder: Path) -> Any:
    """Return the digest of `stamp`, cached until an image is added, removed or renamed."""
    if is_hf_dataset_folder(folder):
        return stamp(folder)
    folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    return _digest(folder, tuple(path.stat().st_mtime_ns for path in folders))


def forget_stamps() -> None:
    """Read the times of images again, because an image may have been overwritten."""
    _digest.cache_clear()


@lru_cache(maxsize=32)
def _digest(folder: Path, _times: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps(stamp(folder)).encode()).hexdigest()
