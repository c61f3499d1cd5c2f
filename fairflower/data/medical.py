"""Medical images: HAM10000, ISIC 2019 and RSNA ICH, a single domain each."""

from __future__ import annotations

import csv
import io
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.class_folders import ClassFolders, Domain
from fairflower.data.client_groups import stratified_mask
from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment, Ints
from fairflower.data.files import stamp
from fairflower.data.opening import explained, open_regular
from fairflower.data.split_files import SplitFiles
from fairflower.errors import DataError
from fairflower.seeds import derive_seed

if TYPE_CHECKING:
    from datasets import DatasetDict

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")

#: Lesions whose images are test images, where the source has no split by lesion.
TEST_SHARE = 0.2

#: How the data set on the Hub writes a diagnosis -> class.
_LONG = {
    "actinic_keratoses": "akiec",
    "basal_cell_carcinoma": "bcc",
    "benign_keratosis-like_lesions": "bkl",
    "dermatofibroma": "df",
    "melanoma": "mel",
    "melanocytic_nevi": "nv",
    "vascular_lesions": "vasc",
}


class HAM10000(SplitFiles):
    """Seven kinds of skin lesions in 10,015 images, two thirds of them nevi: a single domain.

    P. Tschandl, C. Rosendahl, H. Kittler, Scientific Data 5 (2018), CC BY-NC 4.0. Like a
    small ISIC 2019, of which it is a part. Classes as in the original and in DermaMNIST:
    akiec, bcc, bkl, df, mel, nv, vasc.

    28x28 pixels, or ``data.image-size`` of a source that has more; ImageNet's mean and
    standard deviation, random flips and shifts by a pixel. All training images are divided
    among ``data.clients-per-domain`` clients.

    A folder with ``ham10000.npz`` or ``ham10000_28.npz`` (x_train, y_train, x_test, y_test),
    a saved Hugging Face data set ``ham10000``, or ``marmal88/skin_cancer`` on the Hub. The
    splits of the latter overlap, image by image, so they are pooled, each image is taken
    once, and the images of every fifth lesion, drawn at random but always the same, become
    the test set: no lesion is on both sides.
    """

    title = "HAM10000"
    domain_names = ("ham10000",)
    classes = CLASSES
    hub: ClassVar[dict[str, tuple[str, str | None]]] = {"ham10000": ("marmal88/skin_cancer", None)}
    hub_splits = ("train", "validation", "test")
    other_files: ClassVar[dict[str, tuple[str, str]]] = {"ham10000": ("ham10000_28", "")}
    image_size: ClassVar[int] = 28
    channels: ClassVar[int] = 3
    augment = Augment(crop_padding=1, horizontal_flip=True)
    mean, std = IMAGENET
    auc = True

    def adapt(self, data: DatasetDict) -> DatasetDict:
        """Train and test by lesion, if the data set has diagnoses instead of labels."""
        from datasets import DatasetDict, concatenate_datasets

        pool = concatenate_datasets(list(data.values()))
        if missing := {"image_id", "lesion_id", "dx"} - set(pool.column_names):
            if "label" in pool.column_names:
                return data
            raise DataError(
                f"HAM10000: found the columns {', '.join(pool.column_names)}; expected label, "
                f"or {', '.join(sorted(missing))}, too."
            )
        _, distinct = np.unique(np.asarray(pool["image_id"][:]), return_index=True)
        lesions = np.asarray(pool["lesion_id"][:])[distinct]
        diagnoses = pool["dx"][:]
        labels = np.array([_class_of(diagnoses[i]) for i in distinct])
        kinds = np.unique(lesions)
        drawn = np.random.default_rng(0).permutation(kinds)[: round(TEST_SHARE * len(kinds))]
        test = np.isin(lesions, drawn)
        images = pool.select_columns(["image"])
        return DatasetDict(
            {
                split: images.select(distinct[chosen]).add_column("label", labels[chosen].tolist())
                for split, chosen in (("train", ~test), ("test", test))
            }
        )


def _class_of(diagnosis: str) -> int:
    name = _LONG.get(diagnosis.lower(), diagnosis.lower())
    if name not in CLASSES:
        raise DataError(
            f"HAM10000: found the diagnosis {diagnosis!r}; expected {', '.join(CLASSES)}."
        )
    return CLASSES.index(name)


class ImageTable(ClassFolders):
    """One domain of medical images, without a split: a subclass reads the table.

    Images are resized to a square and looked for in ``data.dir`` (or ``$FAIRFLOWER_DATA``)
    and its ``subfolders``. Of every class a fifth, rounded up and drawn at random but always
    the same, are test images. An image that is overwritten in place is not noticed; delete
    the prepared data then.

    224x224 pixels, ImageNet's mean and standard deviation, and in training random flips and
    shifts by up to 2 %, as in the released code of FedISM (IJCAI 2024, which also turns
    images by up to 10 degrees).
    """

    #: File name of the table; ``image_folder`` lies beside it.
    table: ClassVar[str]
    image_folder: ClassVar[str]
    image_size = 224
    augment = Augment(crop_padding=4, horizontal_flip=True)
    mean, std = IMAGENET
    auc = True

    @abstractmethod
    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Class and file of every image."""

    def layout(self) -> str:
        return f"{self.table} and {self.image_folder}"

    def is_in(self, place: Path) -> bool:
        return (place / self.table).is_file() and (place / self.image_folder).is_dir()

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """A random fifth of every class, rounded up."""
        rng = np.random.default_rng(derive_seed(0, self.title, "test"))
        return ~stratified_mask(labels, lambda count: 4 * count // 5, rng)

    def fingerprint(self) -> Any:
        """The table, and when an image was last added, removed or renamed."""
        assert self._root is not None
        return [stamp(self._root / self.table), (self._root / self.image_folder).stat().st_mtime_ns]

    def source(self, domain: str) -> str:
        return str(self._root)

    def _read(self, domain: str) -> Domain:
        assert self._root is not None
        records = ((label, path.name, path) for label, path in self.records(self._root))
        return self._of_files(records, self._root)


def read_table(path: Path, columns: tuple[str, ...]) -> Iterator[list[str]]:
    """Values of these columns of a CSV file, row by row; a DataError if any are missing."""
    with (
        explained(f"{path} cannot be read as a table", "Replace it by the original"),
        io.TextIOWrapper(open_regular(path), encoding="utf-8-sig", newline="") as file,
    ):
        reader = csv.reader(file)
        header = [name.strip() for name in next(reader, [])]
        if missing := [name for name in columns if name not in header]:
            raise DataError(
                f"{path}: found the columns {', '.join(header)}; {', '.join(missing)} expected, "
                "too."
            )
        places = [header.index(name) for name in columns]
        for row in reader:
            if len(row) < len(header):
                raise DataError(f"{path}, line {reader.line_num}: found {row}; it is cut off.")
            yield [row[place].strip() for place in places]


def number(text: str, path: Path) -> float:
    """A value of a table."""
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{path}: found {text!r} where a number is expected.") from None


class ISIC2019(ImageTable):
    """Eight kinds of skin lesions in 25,331 dermatoscopic images: a single domain.

    P. Tschandl et al. 2018, N. Codella et al. 2018, M. Combalia et al. 2019 (CC BY-NC 4.0), as
    the challenge publishes them: ``ISIC_2019_Training_GroundTruth.csv`` (a column per class,
    one of which is 1) and ``ISIC_2019_Training_Input/<image>.jpg``. Split and settings of
    FedISM, see `ImageTable`:

    =====  =====  ======  =====  ===  =====  ===  ====  ===  ======
    class  MEL    NV      BCC    AK   BKL    DF   VASC  SCC  all
    =====  =====  ======  =====  ===  =====  ===  ====  ===  ======
    train  3,617  10,300  2,658  693  2,099  191   202  502  20,262
    test     905   2,575    665  174    525   48    51  126   5,069
    =====  =====  ======  =====  ===  =====  ===  ====  ===  ======

    Copies that are already reduced to 224 pixels are prepared much faster.
    """

    title = "ISIC 2019"
    domain_names = ("isic2019",)
    classes = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    table = "ISIC_2019_Training_GroundTruth.csv"
    image_folder = "ISIC_2019_Training_Input"
    subfolders = ("isic2019", "ISIC2019", "ISIC_2019")

    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Class and file of every image that has one of the eight classes."""
        path, folder = root / self.table, root / self.image_folder
        there = {file.name for file in folder.iterdir()}
        found = []
        for image, *texts in read_table(path, ("image", *self.classes)):
            values = [number(text, path) for text in texts]
            if sorted(values)[-2:] != [0.0, 1.0]:
                if not any(values):  # "UNK"
                    continue
                raise DataError(f"{path}: {image} has the classes {values}; expected a single 1.")
            if f"{image}.jpg" not in there:
                raise DataError(f"{folder} has no {image}.jpg. Complete the copy.")
            found.append((values.index(1.0), folder / f"{image}.jpg"))
        return found


#: Slices that FedISM takes of all.
SLICES = 25_000


class RSNAICH(ImageTable):
    """Five kinds of haemorrhage in 25,000 slices of computed tomographies of heads: one domain.

    A. Flanders et al., Radiology: Artificial Intelligence 2 (2020), non-commercial use:
    ``stage_2_train.csv`` (ID, Label: six rows per slice) as published, and the DICOM files, as
    `fairflower.data.dicom.read_dicom` reads them or, before those, exported as
    ``stage_2_train/<ID>.png`` or ``.jpg``, windowed as you like; slices without an image are
    passed over. Settings of FedISM (see `ImageTable`): slices with exactly
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

    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Class and file of the slices with one kind of haemorrhage."""
        path = root / self.table
        files = {
            file.stem: file
            for file in sorted((root / self.image_folder).iterdir())
            if file.suffix.lower() in (".dcm", ".png", ".jpg", ".jpeg")
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
