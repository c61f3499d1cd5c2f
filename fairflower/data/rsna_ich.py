"""RSNA intracranial haemorrhage, a benchmark of FedISM."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np

from fairflower.data.image_table import ImageTable, number, read_table
from fairflower.seeds import derive_seed

#: Slices that FedISM takes of all.
SLICES = 25_000


class RSNAICH(ImageTable):
    """Five kinds of haemorrhage in 25,000 slices of computed tomographies of heads: one domain.

    A. Flanders et al., Radiology: Artificial Intelligence 2 (2020), non-commercial use:
    ``stage_2_train.csv`` (ID, Label: six rows per slice) as published, and the DICOM files
    exported as ``stage_2_train/<ID>.png`` or ``.jpg``, windowed as you like; slices without an
    exported image are passed over. Settings of FedISM (see `ImageTable`): slices with exactly
    one of the five kinds, and if there are more than 25,000 of them, so many at random but
    always the same. Which ones the paper took is not known. The table does not say whose a
    slice is, so slices of one patient are on both sides, as in the paper.
    """

    title = "RSNA ICH"
    domain_names = ("rsna-ich",)
    classes = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
    table = "stage_2_train.csv"
    image_folder = "stage_2_train"
    subfolders = ("rsna-ich", "rsna-intracranial-hemorrhage-detection")
    num_classes: ClassVar[int] = 5

    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Class and file of the slices with one kind of haemorrhage."""
        path = root / self.table
        files = {
            file.stem: file
            for file in sorted((root / self.image_folder).iterdir())
            if file.suffix.lower() in (".png", ".jpg", ".jpeg")
        }
        kinds: dict[str, set[int]] = {}
        for name, text in read_table(path, ("ID", "Label")):
            image, _, kind = name.rpartition("_")
            if image in files and kind in self.classes and number(text, path) == 1:
                kinds.setdefault(image, set()).add(self.classes.index(kind))
        single = sorted(image for image, found in kinds.items() if len(found) == 1)
        if len(single) > SLICES:
            rng = np.random.default_rng(derive_seed(0, self.title, "slices"))
            single = [single[i] for i in rng.choice(len(single), SLICES, replace=False)]
        return [(kinds[image].copy().pop(), files[image]) for image in single]
