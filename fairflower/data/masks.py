"""A user's own images with masks, for segmentation."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data import files
from fairflower.data.federation import Ints, Pixels
from fairflower.data.folders import EXTENSIONS, OwnImages, files_in
from fairflower.data.images import FileTable, nearest, read_mask, read_picture
from fairflower.errors import DataError
from fairflower.tasks import Targets
from fairflower.tasks.segmentation import UNKNOWN


class MaskFolder(OwnImages):
    """Images in ``data.dir`` (or ``$FAIRFLOWER_DATA``) with masks of their pixels' classes.

    An image ``<site>/images/<name>`` has the mask ``<site>/masks/<name>`` of the same size, in any
    of the formats of images; file extensions may differ. A folder with ``images`` and ``masks`` is
    a single site, named after the folder. The values in masks are class numbers from 0, the
    background, and 255 where the class is unknown. Only if all masks have no other values than 0
    and 255, and not more than two ``classes`` are declared, 255 is class 1. Masks are resized as
    their images are, but by nearest neighbor.

    ``classes`` is the number of classes, with the background. By default, it is one more than the
    largest class number of any site; set it if sites with data of their own may lack classes. For
    the rest, such as ``bits``, see `OwnImages`.
    """

    task = "segmentation"
    title = "A folder of images with masks"
    content = "<site>/images/<image> and <site>/masks/<mask>"
    joined = "Put all images of a site into one folder"

    def __init__(
        self,
        config: DataConfig,
        *,
        classes: Annotated[int | None, Range(2, UNKNOWN)] = None,
        bits: Annotated[int | None, Range(8, 16)] = None,
    ) -> None:
        super().__init__(config, bits)
        self.num_classes = classes
        #: Values in the masks of each domain that was opened.
        self._values: dict[str, npt.NDArray[Any]] = {}

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of the test images, bool [N]: the first image and every fifth after it."""
        chosen: npt.NDArray[np.bool_] = np.arange(len(labels)) % 5 == 0
        return chosen

    def labels(self, domain: str, split: str) -> Targets:
        masks = super().labels(domain, split)
        return masks // UNKNOWN if self._binary else masks

    @cached_property
    def _binary(self) -> bool:
        """Whether 255 is class 1, because masks have no other values than 0 and 255."""
        for domain in self.domains:
            self._open(domain)
        held = {d: set(values.tolist()) for d, values in self._values.items()}
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

    def _from_files(self, folder: Path) -> FileTable:
        side = self.config.image_size or self.image_size
        paths, masks = ([*_by_stem(folder / name).items()] for name in ("images", "masks"))
        of = dict(masks)
        for stem, path in paths:
            if stem not in of:
                raise DataError(
                    f"{path} has no mask. Expected a file {folder / 'masks' / stem} with one of "
                    f"the extensions {', '.join(EXTENSIONS)}."
                )
        if unused := of.keys() - dict(paths).keys():
            raise DataError(f"{of[min(unused)]} is the mask of no image. Add its image to images.")
        if len(paths) < 2:
            raise DataError(
                f"{folder} has too few images: {len(paths)}. The first image is a test image, and "
                "at least one must be left for training. Add images."
            )
        found = f"{folder}: {len(paths)} masks of {side}x{side} pixels take"
        files.check_memory(found, len(paths) * side**2, "Lower data.image-size.")
        labels, values = np.empty((len(paths), side, side), np.uint8), np.empty(0, np.int64)
        sizes: list[tuple[int, ...]] = []
        for k, (stem, _) in enumerate(paths):
            mask = self._mask(of[stem])
            values = np.union1d(values, mask)
            labels[k] = nearest(mask[None], (side, side))[0]
            sizes.append(mask.shape)
        domain = next(d for d in self.domains if self.place(d) == folder)
        self._values[domain] = values

        def pictures(rows: Ints) -> Iterator[Any]:
            for row in rows.tolist():
                picture = read_picture(path := paths[row][1])
                height, width = sizes[row]
                if picture.size != (width, height):
                    raise DataError(
                        f"{of[path.stem]}: the mask has {width}x{height} pixels; expected "
                        f"{picture.width}x{picture.height}, as its image {path}."
                    )
                yield picture

        return FileTable(labels, lambda row: str(paths[row][1]), pictures)

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
