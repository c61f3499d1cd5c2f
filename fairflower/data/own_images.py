"""A user's own images: in folders of classes, with masks, or listed by a manifest."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data import files
from fairflower.data.federation import Ints
from fairflower.data.folders import (
    EXTENSIONS,
    ClassFolders,
    OwnFiles,
    files_in,
    folders_in,
    images_by_class,
)
from fairflower.data.images import (
    SUFFIXES,
    FileTable,
    nearest,
    patient_in,
    read_mask,
    read_picture,
)
from fairflower.errors import DataError, quoted
from fairflower.tasks import Targets, task_of
from fairflower.tasks.segmentation import UNKNOWN

if TYPE_CHECKING:
    from PIL import Image

#: Folder names that stand for splits and not for domains.
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation"}

#: Name of a table that lists images; without it, folders do.
MANIFEST = "manifest.csv"

#: Value of ``data.patient`` that reads the patients of DICOM files.
PATIENT = "PatientID"


class OwnImages(OwnFiles, ClassFolders):
    """Images in ``data.dir`` (or ``$FAIRFLOWER_DATA``), in a folder per domain or in a manifest.

    Without folders of domains, the images are a single domain, named after the folder. Hidden
    folders and ``__MACOSX`` are skipped. Every fifth image by file name, starting with the first,
    is a test image. Folders named train and test are therefore not accepted as domains.

    A table ``manifest.csv`` in the folder lists images instead, wherever they are in the folder.
    Column ``file`` has their paths, relative to the folder, and ``domain`` their domains (without
    it, they are a single one). ``split`` has train or test; without it, every fifth image in the
    order of the rows is a test image. ``data.patient`` and ``data.groups`` name further columns.

    ``data.patient = "PatientID"`` reads the patients of DICOM files. Without ``data.patient``, a
    warning counts those who have training and test images.

    Gray images with more than 8 bits are assumed to have 16, or ``bits`` if it is given, because
    files do not state their bit depth. DICOM files are scaled by
    `fairflower.data.images.read_dicom`. Images are resized to 128x128 pixels unless
    ``data.image-size`` is set. Each domain is divided equally among its clients by default. Images
    are not augmented; mean and standard deviation are 0.5.
    """

    #: What to do with folders of splits.
    joined: ClassVar[str]
    #: Columns of a manifest with the targets.
    targets: tuple[str, ...]
    image_size = 128

    def __init__(self, config: DataConfig, bits: int | None) -> None:
        super().__init__(config)
        self.bits, self._depth_known = bits or 16, bits is not None
        #: The rows of each domain that was opened, and a mask of its test images.
        self._listed: dict[str, tuple[files.Table, npt.NDArray[np.bool_]]] = {}
        if len(self.domains) > 1 and _SPLITS.issuperset(map(str.lower, self.domains)):
            raise DataError(
                f"{self.folder}: {', '.join(self.domains)} are not domains. Expected "
                f"{self.content}; every fifth image becomes a test image. {self.joined}, or set "
                "data.domains to a single folder."
            )

    @property
    def redrawable(self) -> bool:  # type: ignore[override]
        return not any("split" in table.columns for table in self.manifest.values())

    @cached_property
    def manifest(self) -> dict[str, files.Table]:
        """The rows of each domain in manifest.csv; empty if there is none."""
        path = self.folder / MANIFEST
        if not path.exists():
            return {}
        named = {name: key for key, name in self._columns.items() if name != PATIENT}
        needed = {"file": "", **dict.fromkeys(self.targets, ""), **named}
        unknown = () if task_of(self.task).classes else self.targets  # labels may be missing
        table = files.read_csv(path, needed, ("domain", "split", PATIENT), unknown)
        if not table.lines:
            problem = "has no rows. List an image in each row."
            raise DataError(f"{path} {problem}", public=f"{MANIFEST} {problem}")
        for name in {"file", "mask"} & table.columns.keys():
            self._check_paths(table, name)
        of = np.array(table.columns.get("domain", [self.folder.name] * len(table.lines)))
        return {domain: table.where(of == domain) for domain in sorted(set(of.tolist()))}

    def _check_paths(self, table: files.Table, column: str) -> None:
        """Raise ``DataError`` for a path that is no image in the folder, or is listed twice."""
        first: dict[Path, int] = {}
        for row, name in enumerate(table.columns[column]):
            path, problem = Path(name), ""
            if path.is_absolute() or ".." in path.parts:
                problem = "is outside the folder. Give a path relative to it"
            elif path.suffix.lower() not in EXTENSIONS:
                problem = f"has no extension of images ({', '.join(EXTENSIONS)})"
            elif not (self.folder / path).is_file():
                problem = f"is not a file in {self.folder}. Correct the path, or add the file"
            elif first.setdefault(path, row) != row and column == "file":
                problem = f"is also in line {table.lines[first[path]]}. Remove one of the rows"
            if problem:
                public = ": a path is no image in the folder, or is listed twice."
                raise table.wrong(row, f": {column} {quoted(name)} {problem}.", public)

    @cached_property
    def _single(self) -> bool:
        """Whether most images are in folders of the folder itself; others are then misplaced."""
        folders = folders_in(self.folder)
        flat = sum(len(files_in(folder)[0]) for folder in folders)
        deep = (files_in(inner)[0] for folder in folders for inner in folders_in(folder) if flat)
        return flat > sum(map(len, deep))

    def all_domains(self) -> Sequence[str]:
        """Return the sorted names of the domains in the manifest, or of their folders."""
        if self.manifest:
            return [*self.manifest]
        folders = folders_in(self.folder)
        if not folders:
            raise DataError(
                f"{self.folder} has no subfolders. Expected {self.content} in it, or {MANIFEST}."
            )
        return [path.name for path in ([self.folder] if self._single else folders)]

    def place(self, domain: str) -> Path:
        return self.folder if self.manifest or self._single else self.folder / domain

    def source(self, domain: str) -> str:
        return f"{self.folder / MANIFEST}: {domain}" if self.manifest else str(self.place(domain))

    @abstractmethod
    def listed(self, domain: str) -> files.Table:
        """Return the manifest of a domain's folder, with the columns ``file`` and ``targets``."""

    @abstractmethod
    def targets_of(self, domain: str, table: files.Table) -> Targets:
        """Return the targets of a manifest's rows."""

    def picture(self, table: files.Table, row: int) -> Image.Image:
        """Return the image in a row of a manifest."""
        return read_picture(self.folder / table.columns["file"][row])

    def _read(self, domain: str) -> FileTable:
        table = self.manifest.get(domain) or self.listed(domain)
        paths = [self.folder / name for name in table.columns["file"]]
        labels, (setting, name) = self.targets_of(domain, table), self.config.unit
        if name == PATIENT not in table.columns:
            table.columns[PATIENT] = [patient_in(path) for path in paths]
            if lacking := [k for k, of in enumerate(table.columns[PATIENT]) if not of]:
                found = f"{len(lacking)} of {len(paths)} images are no DICOM files with a {PATIENT}"
                text = f"{setting} = {name!r}: {found}, such as {paths[lacking[0]]}."
                raise DataError(text, public=f"{setting} = {name!r}: {found}.")
        patients = self._column(table, setting) if self.config.patient else None
        strata = labels if labels.dtype.kind == "i" else task_of(self.task).strata(labels)
        test = table.is_test(strata, patients)
        if test.all():
            unit = "patient" if patients else "image"
            raise DataError(
                f"{self.source(domain)} has too few {unit}s: the first {unit} of a class is a test "
                f"{unit}, and no class has another {unit} for training. Add images."
            )
        if not name and all(path.suffix.lower() in SUFFIXES for path in paths):
            self._warn_of_patients(domain, np.array([patient_in(path) for path in paths]), test)
        self._listed[domain] = table, test
        return FileTable(
            labels,
            lambda row: str(paths[row]),
            lambda rows: (self.picture(table, row) for row in rows.tolist()),
        )

    def _positions(self, domain: str, split: str) -> Ints:
        self._open(domain)
        return np.flatnonzero(self._listed[domain][1] == (split == "test"))

    def _column(self, table: files.Table, setting: str) -> list[str]:
        """Return the column of a manifest that a setting names; raise ``DataError`` without it."""
        if (name := self._columns[setting]) not in table.columns:
            remedy = "Set it to rows, or list" if setting == "data.redraw" else "List"
            raise DataError(
                f"{setting} = {name!r}: {self.config.name} has no such column. {remedy} the images "
                f"in a file {MANIFEST} with this column."
            )
        return table.columns[name]

    def values_of(self, setting: str, domain: str, split: str) -> Sequence[str]:
        rows = self._positions(domain, split)
        values = self._column(self._listed[domain][0], setting)
        return [values[row] for row in rows]

    def _warn_of_patients(self, domain: str, patients: Any, test: npt.NDArray[np.bool_]) -> None:
        """Warn if the PatientID of DICOM files says that patients are in both splits."""
        every, both = set(patients), set(patients[test]) & set(patients[~test])
        if both and len(every) > 1 and "" not in every:
            files.logger.warning(
                "%s: %d of %d patients (%s in DICOM files) have training and test images, which "
                "makes scores too good. Set data.patient = %s to keep patients together.",
                *(domain, len(both), len(every), PATIENT, PATIENT),
            )

    def _warn_of_depth(self, domain: str, largest: int) -> None:
        bits = next(bits for bits in (8, 10, 12, 14, 16) if largest < 2**bits)
        if largest and bits < 16 and not self._depth_known:
            self._depth_known = True  # warn once
            name = f"{self.config.name}:bits={bits}"
            files.logger.warning(
                "%s: the images are dark, because the largest value in the 16-bit images is %d "
                "and white is 65535. If white is %d, set data.name = %s (--data %s).",
                *(self.source(domain), largest, 2**bits - 1, name, name),
            )


class DomainImageFolder(OwnImages):
    """Images in ``data.dir`` (or ``$FAIRFLOWER_DATA``) as ``<domain>/<class>/<image>``.

    A folder with ``<class>/<image>`` is a single domain, named after the folder. The classes
    are the sorted names of the class folders of all domains; a domain may lack classes. Class names
    that differ only in case or spaces raise an error, unless a domain has both. Images in deeper
    folders raise an error. Every fifth image of a class is a test image. For the rest, such as
    ``bits``, see `OwnImages`.

    In ``manifest.csv``, ``target`` (default ``label``) is the column with the classes. For another
    task (``data.task``) it has the numbers, or several columns do, as in
    ``images:target=time;event``; an empty cell is an unknown label.
    """

    title = "A folder of images"
    content = "<domain>/<class>/<image>"
    joined = "Put all images of a class into one folder"

    def __init__(
        self,
        config: DataConfig,
        *,
        target: str = "label",
        bits: Annotated[int | None, Range(8, 16)] = None,
    ) -> None:
        self.targets = tuple(name.strip() for name in target.split(";"))
        super().__init__(config, bits)
        learns, count = task_of(self.task), len(self.targets)
        self._named = learns.classes or not self.manifest
        if (count > 1 and self._named) or (target != "label" and not self.manifest):
            raise DataError(
                f"{config.name}: found {count} target columns for {self.task}; expected one, in "
                f"{self.folder / MANIFEST}. Set data.task, or correct target."
            )
        if self._named:
            self.classes = self._class_names()
        elif all(learns.num_outputs(np.zeros((1, n))) == n for n in (count, count + 1)):
            self.classes = self.targets  # an output for each, not for each interval of time

    def _class_names(self) -> tuple[str, ...]:
        label, held = self.targets[0], {}
        for domain in self.domains:
            of = (path.name for path in folders_in(self.place(domain)))
            listed = self.manifest.get(domain)
            held[domain] = set(listed.columns[label] if listed else of)
        remedy = "Change the labels" if self.manifest else "Rename their folders"
        return files.all_names(f"{self.folder}: the classes", held, remedy)

    def targets_of(self, domain: str, table: files.Table) -> Targets:
        if self._named:
            return files.places(table.columns[self.targets[0]], self.classes)
        values = np.stack([table.numbers(name) for name in self.targets], axis=1)
        return values if len(self.targets) > 1 else values[:, 0]

    def listed(self, domain: str) -> files.Table:
        folder = self.place(domain)
        if domain == self.domains[0] and (stray := files_in(self.folder)[0]):
            files.logger.warning("%s is not in the folder of a class and is skipped.", stray[0])
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
        images = sorted((name, path.name, str(path)) for name, path in images_by_class(folder))
        if not images:
            raise DataError(f"{folder} has no images. Expected <domain>/<class>/<image>.")
        names, _, paths = zip(*images, strict=True)
        return files.Table(folder, {"file": [*paths], self.targets[0]: [*names]}, [])


class MaskFolder(OwnImages):
    """Images in ``data.dir`` (or ``$FAIRFLOWER_DATA``) with masks of their pixels' classes.

    An image ``<site>/images/<name>`` has the mask ``<site>/masks/<name>`` of the same size, in any
    of the formats of images; file extensions may differ. A folder with ``images`` and ``masks`` is
    a single site, named after the folder. The values in masks are class numbers from 0, the
    background, and 255 where the class is unknown. Only if all masks have no other values than 0
    and 255, and not more than two ``classes`` are declared, 255 is class 1. Masks are resized as
    their images are, but by nearest neighbor. In ``manifest.csv``, the column ``mask`` has the
    masks' paths.

    ``classes`` is the number of classes, with the background. By default, it is one more than the
    largest class number of any site; set it if sites with data of their own may lack classes. For
    the rest, such as ``bits``, see `OwnImages`.
    """

    task = "segmentation"
    title = "A folder of images with masks"
    content = "<site>/images/<image> and <site>/masks/<mask>"
    joined = "Put all images of a site into one folder"
    targets = ("mask",)

    def __init__(
        self,
        config: DataConfig,
        *,
        classes: Annotated[int | None, Range(2, UNKNOWN)] = None,
        bits: Annotated[int | None, Range(8, 16)] = None,
    ) -> None:
        super().__init__(config, bits)
        self.num_classes = classes
        #: Values in the masks of each domain that was opened, and the shape of each mask.
        self._held: dict[str, npt.NDArray[Any]] = {}
        self._sizes: dict[Path, tuple[int, ...]] = {}

    def labels(self, domain: str, split: str) -> Targets:
        masks = super().labels(domain, split)
        return masks // UNKNOWN if self._binary else masks

    @cached_property
    def _binary(self) -> bool:
        """Whether 255 is class 1, because masks have no other values than 0 and 255."""
        for domain in self.domains:
            self._open(domain)
        held = {d: set(values.tolist()) for d, values in self._held.items()}
        known = set().union(*held.values())
        if known <= {0}:
            raise DataError(f"{self.folder}: all masks are 0. Expected a class from 1 in a mask.")
        binary = [d for d, values in held.items() if UNKNOWN in values and values <= {0, UNKNOWN}]
        if binary and (self.num_classes or 2) > 2:
            return False  # 255 is unknown
        if binary and not known <= {0, UNKNOWN}:
            raise DataError(
                f"{self.source(binary[0])}: found masks with no other values than 0 and 255, but "
                f"255 means unknown, because masks of another site have the class "
                f"{max(known - {UNKNOWN})}. Write class numbers."
            )
        absent = np.setdiff1d(np.arange(max(known - {UNKNOWN}, default=0)), [*known])
        if not binary and self.num_classes is None and len(absent):
            files.logger.warning(
                "%s: masks have values up to %d, but none of %d classes below, such as %d. Number "
                "classes from 0, without gaps.",
                *(self.folder, max(known - {UNKNOWN}), len(absent), absent[0]),
            )
        return bool(binary)

    def listed(self, domain: str) -> files.Table:
        folder = self.place(domain)
        found: dict[str, dict[str, Path]] = {"images": {}, "masks": {}}
        for kind, path in images_by_class(folder, found.__contains__):
            if (other := found[kind].setdefault(path.stem, path)) != path:
                raise DataError(f"{path} and {other} have the same name. Rename one, and its mask.")
        for place in (folder / kind for kind, of in found.items() if not of):
            problem = "has no images" if place.is_dir() else "does not exist"
            raise DataError(f"{place} {problem}. Expected {self.content}.")
        paths, masks = found.values()
        for stem, path in paths.items():
            if stem not in masks:
                raise DataError(
                    f"{path} has no mask. Expected a file {folder / 'masks' / stem} with one of "
                    f"the extensions {', '.join(EXTENSIONS)}."
                )
        if unused := masks.keys() - paths.keys():
            path = masks[min(unused)]
            raise DataError(f"{path} is the mask of no image. Add its image to images.")
        columns = [*map(str, paths.values())], [str(masks[stem]) for stem in paths]
        return files.Table(folder, dict(zip(("file", "mask"), columns, strict=True)), [])

    def targets_of(self, domain: str, table: files.Table) -> Targets:
        side = self.config.image_size or self.image_size
        paths = [self.folder / name for name in table.columns["mask"]]
        found = f"{table.path}: {len(paths)} masks of {side}x{side} pixels take"
        files.check_memory(found, len(paths) * side**2, "Lower data.image-size.")
        labels, values = np.empty((len(paths), side, side), np.uint8), np.empty(0, np.int64)
        most = (self.num_classes or UNKNOWN) - 1
        for k, path in enumerate(paths):
            mask = read_mask(path)
            if (wrong := mask[((mask < 0) | (mask > most)) & (mask != UNKNOWN)]).size:
                raise DataError(
                    f"{path}: found the value {wrong[0]}; expected class numbers from 0 to {most},"
                    f" or {UNKNOWN} for unknown."
                )
            values = np.union1d(values, mask)
            labels[k] = nearest(mask[None], (side, side))[0]  # fits uint8
            self._sizes[path] = mask.shape
        self._held[domain] = values
        return labels

    def picture(self, table: files.Table, row: int) -> Image.Image:
        """Return the image in a row; raise ``DataError`` if its mask has another size."""
        picture, path = super().picture(table, row), self.folder / table.columns["mask"][row]
        height, width = self._sizes[path]
        if picture.size != (width, height):
            raise DataError(
                f"{path}: the mask has {width}x{height} pixels; expected "
                f"{picture.width}x{picture.height}, as its image {table.columns['file'][row]}."
            )
        return picture
