"""Data sets in folders: of images per class, of files with splits, and users' arrays.

The images may also be a Hugging Face data set, in a folder or on the Hub. All images are read by a
`fairflower.data.images.FileTable`, and arrays by an `NpzFile`.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data import files
from fairflower.data.data_set import DataSet, DataSetOfFiles
from fairflower.data.federation import Ints, Pixels
from fairflower.data.images import (
    SUFFIXES,
    FileTable,
    HuggingFaceImages,
    file_hash,
    is_hf_dataset_folder,
    load_hub,
    load_saved,
    read_picture,
    split_table,
)
from fairflower.errors import DataError
from fairflower.tasks import Targets

if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict

#: File extensions of images: torchvision's, others that Pillow reads, and those of DICOM files.
EXTENSIONS = (
    *(".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"),
    *(".gif", ".jfif", ".jpe", ".pnm"),
    *SUFFIXES,
)

_OF_WINDOWS = ("thumbs.db", "desktop.ini")  # files that Windows adds to folders
OTHER = -1  # label of images to skip, because their class is not part of the data set


class ClassFolders(DataSetOfFiles[FileTable]):
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
        """
        return files.every_fifth(labels)

    def labels(self, domain: str, split: str) -> Targets:
        return self._open(domain).labels[self._positions(domain, split)]

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """Decode the images of these rows only. Returns uint8 [len(rows), S, S, 3]."""
        side, source = self.config.image_size or self.image_size, self.source(domain)
        chosen = self._positions(domain, split)[rows]
        pixels, largest = self._open(domain).pixels(chosen, side, source, self.bits)
        self._warn_of_depth(domain, largest)
        return pixels

    def _warn_of_depth(self, domain: str, largest: int) -> None:
        """Warn if ``largest``, the largest value in images with over 8 bits, is far below white."""

    def fingerprint(self) -> Any:
        places = dict.fromkeys(map(self.place, self.domains))
        return [folder_stamp(place) if place else self.hub for place in places]

    def source(self, domain: str) -> str:
        return str(self.place(domain) or f"Hugging Face {self.hub}")

    def place(self, domain: str) -> Path | None:
        """Return the folder of a domain, or of all together. None means the Hub."""
        root = self._root
        return root / domain if root and not is_hf_dataset_folder(root) else root

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
        if self.hub:
            remedy += f", or unset both to download {self.hub} from the Hugging Face Hub"
        raise DataError(
            f"{self.title} is neither in {self.folder} nor in its subfolders "
            f"{', '.join(self.subfolders)}. {remedy}."
        )

    def _positions(self, domain: str, split: str) -> Ints:
        """Return the positions of a split's images among all images of the domain."""
        return np.flatnonzero(self.is_test(self._open(domain).labels) == (split == "test"))

    def _read(self, domain: str) -> FileTable:
        folder = self.place(domain)
        if folder is None:
            assert self.hub is not None
            remedy = "Set data.dir or FAIRFLOWER_DATA to a folder with the images"
            return self._from_hugging_face(load_hub(self.hub, None, remedy, ("train",)), domain)
        if is_hf_dataset_folder(folder):
            alone = folder != self._root
            return self._from_hugging_face(load_saved(folder), domain, alone)
        by_content, records = self.by_content, self.records(folder)
        entries = sorted((k, file_hash(p) if by_content else p.name, p) for k, p in records)
        numbers, _, paths = [*zip(*entries, strict=True)] or ((), (), ())
        labels = np.array(numbers, np.int64)
        self._check_complete(str(folder), labels)
        return FileTable(
            labels, lambda i: str(paths[i]), lambda at: (read_picture(paths[i]) for i in at)
        )

    def records(self, folder: Path) -> list[tuple[int, Path]]:
        """Return the class and the file of every image of a domain, given its `place`."""
        where = str(folder)
        images = images_by_class(folder, lambda name: self._class_of(name, where) != OTHER)
        return [(self._class_of(name, where), path) for name, path in images]

    def _from_hugging_face(
        self, data: Dataset | DatasetDict, domain: str, alone: bool = False
    ) -> FileTable:
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
        wanted = ("image", "label") if alone else ("image", "label", "domain")
        files.check_columns(where, wanted, data.column_names)
        rows = np.arange(len(data))
        if not alone:
            rows = np.flatnonzero(images.column("domain") == domain)
        labels = images.column("label")[rows]
        if labels.dtype.kind in "iu" and len(labels):
            labels = files.checked_labels(f"{where}: label", labels, len(self.classes))
        else:
            labels = np.array([self._class_of(str(name), where) for name in labels], np.int64)
        rows, labels = rows[labels != OTHER], labels[labels != OTHER]
        self._check_complete(where if alone else f"{where}: {domain}", labels)
        hashes = images.hashes(rows) if self.by_content else [""] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: (labels[i], hashes[i]))
        return images.table(rows[order], labels[order])

    def _class_of(self, name: str, where: str) -> int:
        name = self.aliases.get(name, name)
        if name in self.classes:
            return self.classes.index(name)
        if self.others:
            return OTHER
        raise DataError(f"{where}: found the class {name!r}; expected {', '.join(self.classes)}.")

    def _check_complete(self, where: str, labels: Ints) -> None:
        if absent := ", ".join(name for i, name in enumerate(self.classes) if i not in labels):
            raise DataError(f"{where} has no images of {absent}. Add the missing images.")


_REMEDY = (
    "Set data.dir or FAIRFLOWER_DATA to a folder that has, for each domain, <domain>.npz "
    "(x_train, y_train, x_test, y_test) or a Hugging Face data set saved as <domain>"
)


class SplitFiles(DataSetOfFiles["files.NpzFile | DatasetDict"]):
    """A data set whose domains have train and test images; a subclass names the domains.

    Images are read from one of these sources:

    1. The folder ``data.dir`` (or ``$FAIRFLOWER_DATA`` if ``data.dir`` is empty). It has, for each
       domain, ``<domain>.npz``, or a folder ``<domain>`` that Hugging Face's ``save_to_disk`` wrote
       (train and test, image and label), or the domain's file in ``other_files``.
    2. The Hugging Face Hub, through flwr-datasets, if no folder is set and the domain is in
       ``hub``.
    """

    #: Domain -> its Hugging Face id and configuration, for domains on the Hub.
    hub: ClassVar[Mapping[str, tuple[str, str | None]]] = {}
    #: Splits to download from the Hub; `adapt` converts them to train and test.
    hub_splits: ClassVar[tuple[str, ...]] = ("train", "test")
    #: Domain -> alternative name of its .npz file, and a remark that `source` adds.
    other_files: ClassVar[Mapping[str, tuple[str, str]]] = {}
    image_size: ClassVar[int]

    def labels(self, domain: str, split: str) -> Ints:
        opened = self._open(domain)
        if isinstance(opened, dict):
            return split_table(opened, split, self.source(domain), *self._learnt).labels
        return opened.labels(split)

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """Return the images of these rows. Only Hugging Face images are resized, to a square."""
        opened, where = self._open(domain), self.source(domain)
        if isinstance(opened, dict):
            table, size = split_table(opened, split, where, *self._learnt), self.image_size
            return table.pixels(rows, self.config.image_size or size, f"{where}: {split}")[0]
        return opened.images(split, rows)

    @property
    def _learnt(self) -> tuple[int | None, str]:
        return self.num_classes or len(self.classes) or None, self.task

    def fingerprint(self) -> Any:
        paths = {domain: self._path(domain) for domain in self.domains}
        return [files.stamp(path) if path else [self.hub[domain]] for domain, path in paths.items()]

    def source(self, domain: str) -> str:
        path = self._path(domain)
        if path is None:
            return f"Hugging Face {self.hub[domain][0]}"
        other, remark = self.other_files.get(domain, (domain, ""))
        return f"{path} ({remark})" if remark and path.stem == other else str(path)

    def adapt(self, data: DatasetDict) -> DatasetDict:
        """Convert a downloaded data set to the splits train and test, with image and label."""
        return data

    def _path(self, domain: str) -> Path | None:
        """Return the file or folder of a domain. None means the Hub."""
        if self.folder is None:
            if domain not in self.hub:
                raise DataError(
                    f"{self.title}: {domain!r} is not on the Hugging Face Hub. {_REMEDY}, or "
                    f"leave it out with data.domains = {','.join(self.hub)!r}."
                )
            return None
        file, folder = self.folder / f"{domain}.npz", self.folder / domain
        other, _ = self.other_files.get(domain, (domain, ""))
        for path in (file, folder, self.folder / f"{other}.npz"):
            if path.exists():
                return path
        raise DataError(f"{self.title}: neither {file} nor {folder} exists. {_REMEDY}.")

    def _read(self, domain: str) -> files.NpzFile | DatasetDict:
        path = self._path(domain)
        if path and not path.is_dir():
            return files.NpzFile(path, *self._learnt)
        data = load_saved(path) if path else load_hub(*self.hub[domain], _REMEDY, self.hub_splits)
        if not isinstance(data, dict):
            raise DataError(
                f"{path}: found a single split; expected a DatasetDict with train and test."
            )
        return self.adapt(data)


#: Maximum number of groups of people. An attribute with more values is probably a number, such as
#: an age in years.
MAX_GROUPS = 100


class OwnFiles(DataSet):
    """A user's own files ``<domain><suffix>`` in ``data.dir`` (or ``$FAIRFLOWER_DATA``).

    They may give each example a value of ``data.groups``; the names of the groups are the sorted
    values of all domains.
    """

    suffix: ClassVar[str]
    #: What the folder has to contain.
    content: ClassVar[str]

    @cached_property
    def folder(self) -> Path:
        return files.needed_folder(self.config, self.content)

    def all_domains(self) -> Sequence[str]:
        """Return the names of the files, sorted, without hidden files, which macOS writes."""
        paths = self.folder.glob(f"*{self.suffix}")
        names = sorted(p.stem for p in paths if not p.name.startswith("."))
        if not names:
            raise DataError(f"{self.folder} has no {self.suffix} file. Expected {self.content}.")
        return names

    @abstractmethod
    def values_of(self, setting: str, domain: str, split: str) -> Sequence[str]:
        """Return the values in the column that a setting names, one for each example.

        Raises ``DataError`` with the name of the file if the file has no values.
        """

    @property
    def _columns(self) -> dict[str, str]:
        """The columns that settings name, by setting."""
        named = ("data.groups", self.config.groups), self.config.unit
        return {setting: name for setting, name in named if name}

    def units(self, domain: str, split: str) -> Sequence[str]:
        return self.values_of(self.config.unit[0], domain, split)

    @cached_property
    def _values(self) -> dict[tuple[str, str], npt.NDArray[np.str_]]:
        places = product(self.domains, ("train", "test"))
        return {p: np.asarray(self.values_of("data.groups", *p), np.str_) for p in places}

    @cached_property
    def group_names(self) -> tuple[str, ...]:
        if not self.config.groups:
            return ()
        held: dict[str, set[str]] = {}
        for (domain, _), values in self._values.items():
            held.setdefault(domain, set()).update(map(str, set(values)))
        setting = f"data.groups = {self.config.groups!r}"
        found = sorted(set().union(*held.values()))
        if len(found) > MAX_GROUPS:
            problem = f"{setting}: found {len(found)} different values"
            remedy = f"expected at most {MAX_GROUPS} groups. Store ranges of values instead."
            raise DataError(
                f"{problem}, such as {', '.join(found[:3])}; {remedy}",
                public=f"{problem}; {remedy}",
            )
        return files.all_names(f"{setting}: the groups", held, "Change the values")

    def group_of(self, domain: str, split: str) -> Ints:
        return files.places(self._values[domain, split], self.group_names)


class DomainNpzFolder(OwnFiles, SplitFiles):
    """All files ``<domain>.npz`` in ``data.dir`` (or ``$FAIRFLOWER_DATA``), sorted by name.

    A file has ``x_train``, ``y_train``, ``x_test`` and ``y_test``: uint8 images [N, H, W] or [N, H,
    W, 3] and whole-number labels [N]. The classes are 0 to the largest label of any domain. Gray
    images are repeated in three channels if another domain has color images. Unless
    ``data.image-size`` is set, images keep their size, which must be the same in all domains. Each
    domain is divided equally among its clients by default. Images are not augmented; mean and
    standard deviation are 0.5. With ``data.groups = "sex"``, the arrays ``sex_train`` and
    ``sex_test`` are the groups of people, as whole numbers or strings [N].
    """

    title = "A folder of .npz files"
    suffix = ".npz"
    content = f"an .npz file per domain with {files.NPZ_FORMAT}"

    def values_of(self, setting: str, domain: str, split: str) -> Sequence[str]:
        file, name = self._open(domain), self._columns[setting]
        if not isinstance(file, files.NpzFile) or name in ("x", "y"):
            raise DataError(
                f"{setting} = {name!r}: {self.source(domain)} has no values with this name. Store "
                "them in .npz files, in an array with a name other than x and y, or remove "
                f"{setting}."
            )
        return file.values(setting, name, split)


def folders_in(folder: Path) -> list[Path]:
    """Return the sorted subfolders of a folder, except hidden ones and macOS's ``__MACOSX``."""
    paths = (p for p in folder.iterdir() if not p.name.startswith(".") and p.name != "__MACOSX")
    return sorted(path for path in paths if path.is_dir())


def images_by_class(
    folder: Path, wanted: Callable[[str], bool] = lambda name: True
) -> list[tuple[str, Path]]:
    """Return the class and the path of each image in the wanted class folders of a folder."""
    found: list[tuple[str, Path]] = []
    skipped: list[Path] = []
    for class_folder in (path for path in folders_in(folder) if wanted(path.name)):
        images, others = files_in(class_folder)
        found += [(class_folder.name, path) for path in images]
        skipped += others
    if skipped:
        files.logger.warning(
            "%s: %d files have no image extension and are skipped, for example %s. Images have %s.",
            *(folder, len(skipped), skipped[0], ", ".join(EXTENSIONS)),
        )
    return found


def files_in(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the sorted images in a folder, by their extensions, and its other files.

    Hidden files, and those that Windows adds to folders, are left out.
    """
    paths = sorted(p for p in folder.iterdir() if not p.name.startswith("."))
    images = [path for path in paths if path.suffix.lower() in EXTENSIONS]
    rest = (path for path in paths if path.suffix.lower() not in EXTENSIONS)
    return images, [p for p in rest if p.name.lower() not in _OF_WINDOWS and p.is_file()]


def folder_stamp(folder: Path) -> Any:
    """Return the digest of `stamp`, cached until an image is added, removed or renamed."""
    if is_hf_dataset_folder(folder):
        return files.stamp(folder)
    folders = (folder, *sorted(path for path in folder.iterdir() if path.is_dir()))
    return _digest(folder, tuple(path.stat().st_mtime_ns for path in folders))


def forget_stamps() -> None:
    """Read the times of images again, because an image may have been overwritten."""
    _digest.cache_clear()


@lru_cache(maxsize=32)
def _digest(folder: Path, _times: tuple[int, ...]) -> str:
    return hashlib.sha256(json.dumps(files.stamp(folder)).encode()).hexdigest()
