"""Users' own data sets: a folder of images per domain, or an ``.npz`` file per domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    files_in,
    folders_in,
)
from fairflower.data.federation import Ints
from fairflower.data.files import NPZ_FORMAT, NpzFile, check_twins, logger, needed_folder
from fairflower.data.people import GroupsOfFiles
from fairflower.data.split_files import SplitFiles
from fairflower.errors import DataError

#: Folder names that stand for splits and not for domains.
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}


class DomainImageFolder(ClassFolders):
    """Images in ``data.dir`` (or ``$FAIRFLOWER_DATA``) as ``<domain>/<class>/<image>``.

    A folder with ``<class>/<image>`` is a single domain, named after the folder. The classes
    are the sorted names of the class folders of all domains; a domain may lack classes. Class names
    that differ only in case or spaces raise an error, unless a domain has both. Hidden folders and
    ``__MACOSX`` are skipped, and images in deeper folders raise an error. Every fifth image of a
    class by file name, starting with the first, is a test image. Folders named train and test are
    therefore not accepted as domains.

    Gray images with more than 8 bits are assumed to have 16, or ``bits`` if it is given, because
    files do not state their bit depth. DICOM files are scaled by
    `fairflower.data.dicom.read_dicom`. Images are resized to 128x128 pixels unless
    ``data.image-size`` is set. Each domain is divided equally among its clients by default. Images
    are not augmented; mean and standard deviation are 0.5.
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
                f"{self.folder}: {', '.join(self.domains)} are not domains. Expected "
                "<domain>/<class>/<image>; every fifth image becomes a test image. Put all images"
                " of a class into one folder, or set data.domains to a single folder."
            )
        held = {domain: set(_names(folders_in(self.place(domain)))) for domain in self.domains}
        self.classes = tuple(sorted(set().union(*held.values())))
        check_twins(f"{self.folder}: the classes", held, "Rename their folders")

    redrawable = True

    @cached_property
    def folder(self) -> Path:
        return needed_folder(self.config, "<domain>/<class>/<image>")

    @property
    def _root(self) -> Path:
        return self.folder

    @cached_property
    def _single(self) -> bool:
        """Whether most images are in ``<class>/<image>``; the others are then misplaced."""
        folders = folders_in(self.folder)
        flat = sum(len(files_in(folder)[0]) for folder in folders)
        deep = (files_in(inner)[0] for folder in folders for inner in folders_in(folder) if flat)
        return flat > sum(map(len, deep))

    def all_domains(self) -> Sequence[str]:
        """Return the names of the domains' folders, sorted."""
        folders = folders_in(self.folder)
        if not folders:
            raise DataError(
                f"{self.folder} has no subfolders. Expected <domain>/<class>/<image> in it."
            )
        return _names([self.folder] if self._single else folders)

    def place(self, domain: str) -> Path:
        return self.folder if self._single else self.folder / domain

    def _from_files(self, folder: Path) -> Domain:
        if folder == self.place(self.domains[0]) and (stray := files_in(self.folder)[0]):
            logger.warning("%s is not in the folder of a class and is skipped.", stray[0])
        if not self._single and (stray := files_in(folder)[0]):
            raise DataError(
                f"{stray[0]} is not in the folder of a class: {self.folder} must contain "
                "<domain>/<class>/<image>. Move it to one, or remove it."
            )
        for class_folder in folders_in(folder):
            for path in (p for below in folders_in(class_folder) for p in below.rglob("*")):
                if path.suffix.lower() in EXTENSIONS:
                    layout = "<class>/<image>" if self._single else "<domain>/<class>/<image>"
                    raise DataError(
                        f"{path} is too deep: {self.folder} must contain {layout}. Set data.dir to"
                        " another folder, or move the images."
                    )
        return super()._from_files(folder)

    def _warn_of_depth(self, domain: str, largest: int) -> None:
        bits = next(bits for bits in (8, 10, 12, 14, 16) if largest < 2**bits)
        if largest and bits < 16 and not self._depth_known:
            self._depth_known = True  # warn once
            name = f"{self.config.name}:bits={bits}"
            logger.warning(
                "%s: the images are dark, because the largest value in the 16-bit images is %d "
                "and white is 65535. If white is %d, set data.name = %s (--data %s).",
                self.source(domain),
                largest,
                2**bits - 1,
                name,
                name,
            )

    def _check_complete(self, where: str, labels: Ints) -> None:
        if not len(labels):
            raise DataError(f"{where} has no images. Expected <domain>/<class>/<image>.")
        if len(np.unique(labels)) == len(labels):
            raise DataError(
                f"{where} has too few images: the first image of a class is a test image, and no "
                "class has another image for training. Add images."
            )


class DomainNpzFolder(GroupsOfFiles, SplitFiles):
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

    @cached_property
    def folder(self) -> Path:
        return needed_folder(self.config, f"an .npz file per domain with {NPZ_FORMAT}")

    def all_domains(self) -> Sequence[str]:
        """Return the names of the files, sorted."""
        files = (path for path in self.folder.glob("*.npz") if not path.name.startswith("."))
        names = sorted(_names(files))
        if not names:
            raise DataError(
                f"{self.folder} has no .npz file. Expected a file per domain with {NPZ_FORMAT}."
            )
        return names

    def group_values(self, domain: str, split: str) -> Sequence[str]:
        return self._values_of("data.groups", self.config.groups, domain, split)

    def units(self, domain: str, split: str) -> Sequence[str]:
        return self._values_of("data.redraw", self.config.redraw, domain, split)

    def _values_of(self, key: str, name: str, domain: str, split: str) -> Sequence[str]:
        file = self._open(domain)
        if not isinstance(file, NpzFile) or name in ("x", "y"):
            raise DataError(
                f"{key} = {name!r}: {self.source(domain)} has no values with this name. Store them "
                f"in .npz files, in an array with a name other than x and y, or remove {key}."
            )
        return file.values(key, name, split)


def _names(paths: Iterable[Path]) -> list[str]:
    """Return the names of folders, or of .npz files without the extension."""
    names = [path.stem if path.suffix == ".npz" else path.name for path in paths]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise DataError(f"{name!r}: the name is not UTF-8. Rename it.") from None
    return names
