"""Benchmarks that come as one folder of images per domain and class, without a split.

The same images as a Hugging Face data set, saved or on the Hub, serve as well.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
from PIL import Image

from fairflower.data import dicom
from fairflower.data.data_set import DataSetOfFiles
from fairflower.data.federation import Ints, Pixels
from fairflower.data.files import checked_labels, load_hub, load_saved, stamp, undecoded
from fairflower.data.images import eight_bit, picture_in, read_picture, resize
from fairflower.data.opening import open_regular
from fairflower.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

#: What torchvision's ImageFolder takes for an image, and DICOM files.
EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *dicom.SUFFIXES,
)

#: The label of what is passed over.
OTHER = -1


@dataclass(frozen=True)
class Domain:
    """One domain's images, not yet decoded, class after class.

    ``labels`` are int64 [N], ascending; ``where`` names the image at a place, for messages,
    and ``picture`` reads and decodes it.
    """

    labels: Ints
    where: Callable[[int], str]
    picture: Callable[[int], Image.Image]


class ClassFolders(DataSetOfFiles[Domain]):
    """A benchmark that is published as images alone: a subclass says what is test.

    Images are resized to a square. Where they come from, in this order:

    1. ``data.dir`` or, if that is empty, ``$FAIRFLOWER_DATA``, or one of its
       ``subfolders``: with a folder per domain that has either a folder per class, or a
       Hugging Face data set (``save_to_disk``; image, label); or as a whole a Hugging Face
       data set (image, domain, label).
    2. With neither set, the Hugging Face Hub, through flwr-datasets, if it has them.

    Images are taken by class, then by file name, as torchvision's ImageFolder does; those of a
    data set by class, then as they are stored. Where order decides what is test and files and
    rows may come in different ones, ``by_content`` makes it the same for both.
    """

    #: Another name of a class -> its name here.
    aliases: ClassVar[Mapping[str, str]] = {}
    #: Whether images of other classes may be among them; they are passed over.
    others: ClassVar[bool] = False
    #: Whether images are instead taken by class, then by the SHA-256 of their files.
    by_content: ClassVar[bool] = False
    #: Where the domains are also looked for.
    subfolders: ClassVar[tuple[str, ...]] = ()
    #: Hugging Face id of a data set with a single split. None: not on the Hub.
    hub: ClassVar[str | None] = None
    image_size: ClassVar[int]
    channels: ClassVar[int] = 3
    #: Of the whole numbers in grey pictures that have more than 8.
    bits: int = 16

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Which of a domain's images are test images, given their labels, ascending.

        The first image of a class and every fifth after it, unless a subclass says otherwise.

        >>> ClassFolders.is_test(None, np.array([0, 0, 0, 0, 0, 0, 1, 1])).nonzero()[0].tolist()
        [0, 5, 6]
        """
        place = np.arange(len(labels)) - np.searchsorted(labels, labels)
        chosen: npt.NDArray[np.bool_] = place % 5 == 0
        return chosen

    def labels(self, domain: str, split: str) -> Ints:
        return self._open(domain).labels[self._places(domain, split)]

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """The images of these rows and no others are decoded; uint8 [len(rows), S, S, 3]."""
        side = self.config.image_size or self.image_size
        source = self._open(domain)
        pictures = np.empty((len(rows), side, side, 3), np.uint8)
        largest = 0
        for i, place in enumerate(self._places(domain, split)[rows].tolist()):
            picture = source.picture(place)
            pixels = eight_bit(picture, source.where(place), self.bits)
            pictures[i] = resize(pixels[None], (side, side))[0]
            if picture.mode.startswith("I"):
                largest = max(largest, int(np.asarray(picture).max()))
        self._warn_of_depth(domain, largest)
        return pictures

    def _warn_of_depth(self, domain: str, largest: int) -> None:
        """Hear the largest whole number of a domain's grey pictures of more than 8 bits, or 0."""

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
        """The folder of a domain."""
        assert self._root is not None
        return self._root / domain

    def layout(self) -> str:
        """What the folder is to hold, for messages."""
        return (
            f"<domain>/<class>/<image> for the domains {', '.join(self.domains)}, or a Hugging "
            "Face data set written with save_to_disk (image, domain, label)"
        )

    def is_in(self, place: Path) -> bool:
        """True if a folder holds that."""
        return is_hf_dataset_folder(place) or all(
            (place / domain).is_dir() for domain in self.domains
        )

    @cached_property
    def _root(self) -> Path | None:
        """The folder that holds the images; None: the Hub."""
        remedy = f"Set data.dir or FAIRFLOWER_DATA to a folder that has {self.layout()}"
        if self.folder is None:
            if self.hub is None:
                raise DataError(f"{self.title} is not on the Hugging Face Hub. {remedy}.")
            return None
        for place in (self.folder, *(self.folder / name for name in self.subfolders)):
            if self.is_in(place):
                return place
        places = ", ".join(self.subfolders)
        if self.hub:
            remedy += f". With neither set, {self.hub} is fetched from the Hugging Face Hub"
        raise DataError(
            f"{self.title} is not in {self.folder}, nor in its subfolders {places}. {remedy}."
        )

    def _places(self, domain: str, split: str) -> Ints:
        """Where a split's images are among all of the domain."""
        return np.flatnonzero(self.is_test(self._open(domain).labels) == (split == "test"))

    def _read(self, domain: str) -> Domain:
        if self._root is None:
            assert self.hub is not None
            remedy = "Set data.dir or FAIRFLOWER_DATA to a folder of the images"
            return self._from_hugging_face(load_hub(self.hub, None, remedy, ("train",)), domain)
        if is_hf_dataset_folder(self._root):
            return self._from_hugging_face(load_saved(self._root), domain)
        if is_hf_dataset_folder(folder := self.place(domain)):
            return self._from_hugging_face(load_saved(folder), domain, alone=True)
        return self._from_files(folder)

    def _from_files(self, folder: Path) -> Domain:
        found = {path: self._class_of(path.name, str(folder)) for path in folders_in(folder)}
        files = (
            (label, _hash_of(path) if self.by_content else path.name, path)
            for class_folder, label in found.items()
            if label != OTHER
            for path in images_in(class_folder)
        )
        return self._of_files(files, folder)

    def _of_files(self, files: Iterable[tuple[int, str, Path]], folder: Path) -> Domain:
        """Image files by their labels, then by the texts beside these."""
        found = sorted(files)
        paths = [path for _, _, path in found]
        labels = np.array([label for label, _, _ in found], np.int64)
        self._check_complete(str(folder), labels)
        return Domain(labels, lambda i: str(paths[i]), lambda i: read_picture(paths[i]))

    def _from_hugging_face(
        self, data: Dataset | DatasetDict, domain: str, alone: bool = False
    ) -> Domain:
        """A domain's images in a data set that has others, too, unless it is ``alone``."""
        where = self.source(domain)
        if isinstance(data, dict):
            if len(data) != 1:
                raise DataError(
                    f"{where}: found the splits {', '.join(map(str, data))}; expected a single "
                    "one, as the benchmark has its own rule for train and test. Concatenate them."
                )
            (data,) = data.values()
        wanted = {"image", "label"} if alone else {"image", "domain", "label"}
        if missing := wanted - set(data.column_names):
            raise DataError(
                f"{where}: found the columns {', '.join(data.column_names)}; "
                f"{', '.join(sorted(missing))} expected, too."
            )
        rows = np.arange(len(data))
        if not alone:
            rows = np.flatnonzero(_values(data, "domain", where) == domain)
        values = _values(data, "label", where)[rows]
        if values.dtype.kind in "iu" and len(values):
            values = checked_labels(f"{where}: label", values, len(self.classes))
        else:
            values = np.array([self._class_of(str(name), where) for name in values], np.int64)
        rows, values = rows[values != OTHER], values[values != OTHER]
        self._check_complete(where if alone else f"{where}: {domain}", values)
        images, mode = undecoded(data.select_columns(["image"]))
        hashes = _hashes(images, rows) if self.by_content else [""] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: (values[i], hashes[i]))
        rows, values = rows[order], values[order]

        def name(i: int) -> str:
            return f"{where}: row {rows[i]}"

        return Domain(
            values, name, lambda i: picture_in(images[int(rows[i])]["image"], name(i), mode)
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
            raise DataError(f"{where} has no images of {', '.join(absent)}. Complete the copy.")


def folders_in(folder: Path) -> list[Path]:
    """The folders in a folder, sorted, but for hidden ones and what macOS puts beside in zips."""
    found = (p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX")
    return sorted(path for path in found if path.is_dir())


def images_in(folder: Path) -> list[Path]:
    """The image files in a folder, sorted, by their names; not hidden ones."""
    found = (p for p in folder.iterdir() if not p.name.startswith("."))
    return sorted(path for path in found if path.suffix.lower() in EXTENSIONS)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _hash_of(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _hashes(images: Dataset, rows: Ints) -> list[str]:
    """Of these rows' image files; empty where the column holds something else."""
    files = (row["image"] for row in images.select(rows))
    return [
        ""
        if not isinstance(f, dict)
        else _hash(f["bytes"])
        if f["bytes"]
        else _hash_of(Path(f["path"]))
        for f in files
    ]


def is_hf_dataset_folder(folder: Path) -> bool:
    """True if a folder was written by Hugging Face's ``save_to_disk``."""
    return any((folder / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _stamp(folder: Path) -> Any:
    """As ``stamp``, but thousands of files are not looked at for every message of a run.

    A process looks again only when a file of a class was added, removed or renamed.
    """
    if is_hf_dataset_folder(folder):
        return stamp(folder)
    folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    return _digest(folder, tuple(path.stat().st_mtime_ns for path in folders))


@lru_cache(maxsize=32)
def _digest(folder: Path, _times: tuple[int, ...]) -> str:
    return _hash(json.dumps(stamp(folder)).encode())


def _values(data: Dataset, column: str, where: str) -> npt.NDArray[Any]:
    """A column, with names instead of numbers where the data set knows the names."""
    values: npt.NDArray[Any] = np.asarray(data[column][:])
    names = getattr(data.features[column], "names", None)
    if names is None or values.dtype.kind not in "iu" or not len(values):
        return values
    return np.array([names[k] for k in checked_labels(f"{where}: {column}", values, len(names))])
