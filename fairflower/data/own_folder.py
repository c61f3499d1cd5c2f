"""Your own data: a folder of images, or of ``.npz`` files, one of them per domain."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data.class_folders import (
    EXTENSIONS,
    ClassFolders,
    Domain,
    folders_in,
    images_in,
)
from fairflower.data.federation import Ints
from fairflower.data.files import NPZ_FORMAT, data_folder, logger
from fairflower.data.split_files import SplitFiles
from fairflower.errors import DataError, renamed

#: What folders are called that are no domains.
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}

__getattr__ = renamed(__name__, ImageFolder="DomainImageFolder", NpzFolder="DomainNpzFolder")


class DomainImageFolder(ClassFolders):
    """``data.dir`` (or ``$FAIRFLOWER_DATA``) with ``<domain>/<class>/<image>``.

    A folder of ``<class>/<image>`` is a single domain of its own name. The classes are
    the folders' names in all domains, sorted; a domain need not have all of them, and names
    that differ in case or spaces alone are refused, unless a domain has both. Hidden
    folders and ``__MACOSX`` are passed over, and images that lie deeper refused by name.
    Every fifth image of a class in order of the files' names, beginning with the first, is a
    test image; so folders that are called train and test are refused as domains. Grey images of
    more than 8 bits are scaled by their depth: 16 bits, or as many as ``bits`` says, for it is not
    known from a file. DICOM files are scaled as `fairflower.data.dicom.read_dicom` says.
    Images are resized to 128x128 pixels unless ``data.image-size`` says otherwise. Each
    domain is divided equally among its clients by default; there is no augmentation, and
    mean and standard deviation are 0.5.
    """

    title = "A folder of images"
    image_size = 128

    def __init__(
        self, config: DataConfig, *, bits: Annotated[int | None, Range(8, 16)] = None
    ) -> None:
        super().__init__(config)
        self.bits, self._depth_known = bits or 16, bits is not None
        if len(self.domains) > 1 and _SPLITS.issuperset(map(str.lower, self.domains)):
            raise DataError(
                f"{self.folder}: {', '.join(self.domains)} are no domains. Expected "
                "<domain>/<class>/<image>, of which every fifth image becomes a test image: put a "
                "class's images together, or name one folder as data.domains."
            )
        held = {domain: set(_names(folders_in(self.place(domain)))) for domain in self.domains}
        self.classes = tuple(sorted(set().union(*held.values())))
        self._check_twins(held)

    @cached_property
    def folder(self) -> Path:
        return _needed(self.config, "<domain>/<class>/<image>")

    @property
    def _root(self) -> Path:
        return self.folder

    @cached_property
    def _single(self) -> bool:
        return any(map(images_in, folders_in(self.folder)))

    def all_domains(self) -> Sequence[str]:
        """The names of the domains' folders, sorted."""
        found = folders_in(self.folder)
        if not found:
            raise DataError(
                f"{self.folder} has no folders. Expected <domain>/<class>/<image> in it."
            )
        return _names([self.folder] if self._single else found)

    def place(self, domain: str) -> Path:
        return self.folder if self._single else self.folder / domain

    def _from_files(self, folder: Path) -> Domain:
        for class_folder in folders_in(folder):
            for path in (p for below in folders_in(class_folder) for p in below.rglob("*")):
                if path.suffix.lower() in EXTENSIONS:
                    taken = "<class>/<image>" if self._single else "<domain>/<class>/<image>"
                    raise DataError(
                        f"{path} lies too deep: {self.folder} was taken for a folder of {taken}. "
                        "Name another folder as data.dir, or move the images."
                    )
        return super()._from_files(folder)

    def _check_twins(self, held: Mapping[str, set[str]]) -> None:
        """Refuse classes that are surely one, given those of each domain."""
        alike: dict[str, list[str]] = {}
        for name in self.classes:
            alike.setdefault(_plain(name).casefold(), []).append(name)
        for twins in alike.values():
            # A domain that has both "A" and "a" means two.
            together = any(own.issuperset(twins) for own in held.values())
            if len(twins) > 1 and not (together and len(set(map(_plain, twins))) == len(twins)):
                places = [next(d for d, own in held.items() if name in own) for name in twins]
                found = ", ".join(f"{n!r} (in {d})" for n, d in zip(twins, places, strict=True))
                raise DataError(
                    f"{self.folder}: the classes {found} read alike. Rename their folders: the "
                    "same if they are one class, else so that more than case or spaces differs."
                )

    def _warn_of_depth(self, domain: str, largest: int) -> None:
        bits = next(bits for bits in (8, 10, 12, 14, 16) if largest < 2**bits)
        if largest and bits < 16 and not self._depth_known:
            self._depth_known = True  # once will do
            name = f"{self.config.name}:bits={bits}"
            logger.warning(
                "%s: in images of 16 bits the largest number is %d, and white 65535: they come out "
                "dark. If white is %d, name the data %s (--data %s).",
                *(self.source(domain), largest, 2**bits - 1, name, name),
            )

    def _check_complete(self, where: str, labels: Ints) -> None:
        if not len(labels):
            raise DataError(f"{where} has no images. Expected <domain>/<class>/<image>.")
        if len(np.unique(labels)) == len(labels):
            raise DataError(
                f"{where} has too few images: the first of a class is a test image, and no class "
                "has a second one to train on. Add images."
            )


class DomainNpzFolder(SplitFiles):
    """Every ``<domain>.npz`` of ``data.dir`` (or ``$FAIRFLOWER_DATA``), in order of name.

    A file has ``x_train, y_train, x_test, y_test``: uint8 images [N, H, W] or
    [N, H, W, 3] and whole-number labels [N]. The classes are 0 to the largest label of
    any domain. Grey images are repeated to three channels if another domain has colour.
    Images keep their size, which must then be the same everywhere, unless
    ``data.image-size`` is set. Each domain is divided equally among its clients by
    default; there is no augmentation, and mean and standard deviation are 0.5.
    """

    title = "A folder of .npz files"

    @cached_property
    def folder(self) -> Path:
        return _needed(self.config, f"an .npz file per domain with {NPZ_FORMAT}")

    def all_domains(self) -> Sequence[str]:
        """The names of the files, sorted."""
        found = sorted(_names(self.folder.glob("*.npz")))
        if not found:
            raise DataError(
                f"{self.folder} has no .npz file. Expected one per domain with {NPZ_FORMAT}."
            )
        return found


def _names(paths: Iterable[Path]) -> list[str]:
    """Names of domains or classes: of files without the suffix."""
    names = [path.stem if path.suffix == ".npz" else path.name for path in paths]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"{name!r}: the name is not UTF-8. Rename it.") from None
    return names


def _plain(name: str) -> str:
    """A name as a person reads it: "é" is the same in one character and in two."""
    return unicodedata.normalize("NFC", name).strip()


def _needed(config: DataConfig, content: str) -> Path:
    folder = data_folder(config)
    if folder is None:
        raise DataError(
            f"The data set {config.name!r} needs a folder. Set data.dir (or FAIRFLOWER_DATA) to "
            f"one that has {content}."
        )
    return folder
