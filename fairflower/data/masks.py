"""A user's own images with masks, for segmentation."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data import files
from fairflower.data.federation import Pixels
from fairflower.data.folders import EXTENSIONS, OwnImages, files_in
from fairflower.data.images import nearest, read_mask
from fairflower.errors import DataError
from fairflower.tasks import Targets
from fairflower.tasks.segmentation import UNKNOWN

if TYPE_CHECKING:
    from PIL import Image


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
        paths, masks = (_by_stem(folder / name) for name in ("images", "masks"))
        for stem, path in paths.items():
            if stem not in masks:
                raise DataError(
                    f"{path} has no mask. Expected a file {folder / 'masks' / stem} with one of "
                    f"the extensions {', '.join(EXTENSIONS)}."
                )
        if unused := masks.keys() - paths.keys():
            raise DataError(
                f"{masks[min(unused)]} is the mask of no image. Add its image to images."
            )
        columns = {
            "file": [*map(str, paths.values())],
            "mask": [str(masks[stem]) for stem in paths],
        }
        return files.Table(folder, columns, [])

    def targets_of(self, domain: str, table: files.Table) -> Targets:
        side = self.config.image_size or self.image_size
        paths = [self.folder / name for name in table.columns["mask"]]
        found = f"{table.path}: {len(paths)} masks of {side}x{side} pixels take"
        files.check_memory(found, len(paths) * side**2, "Lower data.image-size.")
        labels, values = np.empty((len(paths), side, side), np.uint8), np.empty(0, np.int64)
        for k, path in enumerate(paths):
            mask = self._mask(path)
            values = np.union1d(values, mask)
            labels[k] = nearest(mask[None], (side, side))[0]
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

    def _mask(self, path: Path) -> Pixels:
        """Return a mask, uint8 [H, W]; raise ``DataError`` if a value is no class number."""
        mask, most = read_mask(path), (self.num_classes or UNKNOWN) - 1
        if (wrong := mask[((mask < 0) | (mask > most)) & (mask != UNKNOWN)]).size:
            raise DataError(
                f"{path}: found the value {wrong[0]}; expected class numbers from 0 to {most}, or "
                f"{UNKNOWN} for unknown."
            )
        return mask.astype(np.uint8)


def _by_stem(folder: Path) -> dict[str, Path]:
    """Return the images in a folder by their names without extension, sorted by name."""
    if not folder.is_dir():
        raise DataError(
            f"{folder} does not exist. Expected <site>/images/<image> and <site>/masks/<mask>."
        )
    paths, others = files_in(folder)
    if not paths:
        raise DataError(f"{folder} has no images. Images have {', '.join(EXTENSIONS)}.")
    if others:
        text = "%s: %d files have no image extension and are skipped, for example %s."
        files.logger.warning(text, folder, len(others), others[0])
    by_stem: dict[str, Path] = {}
    for path in paths:
        if (other := by_stem.setdefault(path.stem, path)) != path:
            raise DataError(f"{path} and {other} have the same name. Rename one, and its mask.")
    return by_stem
