"""Medical images: HAM10000, ISIC 2019 and RSNA ICH, each a single domain."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment, Ints
from fairflower.data.files import check_columns, explained, open_regular, stamp
from fairflower.data.folders import ClassFolders, SplitFiles
from fairflower.data.images import FileTable
from fairflower.data.partition import stratified_mask
from fairflower.errors import DataError
from fairflower.seeds import derive_seed

if TYPE_CHECKING:
    import pandas as pd
    from datasets import DatasetDict

CLASSES = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")

#: Fraction of the lesions whose images become test images if the source is not split by lesion.
TEST_SHARE = 0.2

#: Diagnosis as written in the data set on the Hub -> class.
_CLASS_OF_DIAGNOSIS = {
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

    P. Tschandl, C. Rosendahl, H. Kittler, Scientific Data 5 (2018), CC BY-NC 4.0. The data set is a
    part of ISIC 2019. The classes are those of the original and of DermaMNIST: akiec, bcc, bkl, df,
    mel, nv, vasc.

    Images are 28x28 pixels, or ``data.image-size`` if the source has larger images. They are
    normalized by ImageNet's mean and standard deviation, and augmented by random flips and shifts
    of one pixel. All training images are divided among ``data.clients-per-domain`` clients.

    The data are read from a folder with ``ham10000.npz`` or ``ham10000_28.npz`` (x_train, y_train,
    x_test, y_test) or a saved Hugging Face data set ``ham10000``, or from ``marmal88/skin_cancer``
    on the Hub. The splits on the Hub share images. They are therefore pooled without duplicates,
    and a random fifth of the lesions, the same in every run, becomes the test set. All images of a
    lesion are thus in the same split.
    """

    title = "HAM10000"
    domain_names = ("ham10000",)
    classes = CLASSES
    hub: ClassVar = {"ham10000": ("marmal88/skin_cancer", None)}
    hub_splits = ("train", "validation", "test")
    other_files: ClassVar = {"ham10000": ("ham10000_28", "")}
    image_size = 28
    channels = 3
    augment = Augment(crop_padding=1, horizontal_flip=True)
    mean, std = IMAGENET
    auc = True

    def adapt(self, data: DatasetDict) -> DatasetDict:
        """Split the images by lesion, if the data set has diagnoses instead of labels."""
        from datasets import DatasetDict, concatenate_datasets

        pool = concatenate_datasets(list(data.values()))
        if missing := {"image_id", "lesion_id", "dx"} - set(pool.column_names):
            if "label" in pool.column_names:
                return data
            raise DataError(
                f"HAM10000: found the columns {', '.join(pool.column_names)}; missing: label,"
                f" or {', '.join(sorted(missing))}. Add or rename columns."
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
    name = _CLASS_OF_DIAGNOSIS.get(diagnosis.lower(), diagnosis.lower())
    if name not in CLASSES:
        raise DataError(
            f"HAM10000: found the diagnosis {diagnosis!r}; expected {', '.join(CLASSES)}."
        )
    return CLASSES.index(name)


class ImageTable(ClassFolders):
    """A domain of medical images, in a folder and a table that a subclass reads.

    Images are resized to a square. The table and the image folder may be in ``data.dir`` (or
    ``$FAIRFLOWER_DATA``) or in one of its ``subfolders``. A random fifth of the images of each
    class, rounded up and the same in every run, are test images. If you overwrite an image, delete
    the prepared data, because the change is not detected.

    Images are 224x224 pixels, normalized by ImageNet's mean and standard deviation.
    Training images are randomly flipped and shifted by up to 2 %, as in the released code of FedISM
    (IJCAI 2024), which also rotates images by up to 10 degrees.
    """

    #: File name of the table, which is in the same folder as ``image_folder``.
    table: ClassVar[str]
    image_folder: ClassVar[str]
    image_size = 224
    augment = Augment(crop_padding=4, horizontal_flip=True)
    mean, std = IMAGENET
    auc = True

    @abstractmethod
    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Return the class and the file of every image."""

    def layout(self) -> str:
        return f"{self.table} and {self.image_folder}"

    def is_in(self, folder: Path) -> bool:
        return (folder / self.table).is_file() and (folder / self.image_folder).is_dir()

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of a random fifth of every class, rounded up, bool [N]."""
        rng = np.random.default_rng(derive_seed(0, self.title, "test"))
        return ~stratified_mask(labels, lambda count: 4 * count // 5, rng)

    def fingerprint(self) -> Any:
        """Return the stamp of the table, and the modification time of the image folder."""
        assert self._root is not None
        return [stamp(self._root / self.table), (self._root / self.image_folder).stat().st_mtime_ns]

    def source(self, domain: str) -> str:
        return str(self._root)

    def _read(self, domain: str) -> FileTable:
        assert self._root is not None
        records = ((label, path.name, path) for label, path in self.records(self._root))
        return self._of_files(records, self._root)


def read_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read columns of a CSV file as text. Raises ``DataError`` if a column or value is missing."""
    import pandas as pd

    problem, remedy = f"{path} cannot be read as a table", "Replace it with the original file"
    with explained(problem, remedy), open_regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("error", pd.errors.ParserWarning)  # of rows with too many values
        table = pd.read_csv(
            file,
            dtype=str,
            index_col=False,
            keep_default_na=False,
            na_values=[""],
            encoding="utf-8-sig",
        )
        table = table.rename(columns=str.strip).apply(lambda column: column.str.strip())
        check_columns(str(path), columns, table.columns)
        table = table[list(columns)]
        incomplete = table.isna().any(axis=1)
        if incomplete.any():
            row = int(incomplete.argmax())
            values = ", ".join(table.iloc[row].fillna("nothing"))
            raise DataError(
                f"{path}, row {row + 1}: found {values}; expected a value in every "
                f"column. {remedy}."
            )
        if len(table) and (length := table.map(len).max().max()) > 255:
            raise ValueError(f"a value has {length} characters")
        return table


def parse_numbers(texts: pd.Series, path: Path) -> npt.NDArray[np.float64]:
    """Return a column as numbers. Raises ``DataError`` for the first text that is not a number."""
    import pandas as pd

    numbers = pd.to_numeric(texts, errors="coerce")
    for text in texts[numbers.isna()]:
        raise DataError(f"{path}: found {text!r}; expected a number. Correct it.")
    return np.asarray(numbers, np.float64)


class ISIC2019(ImageTable):
    """Eight kinds of skin lesions in 25,331 dermatoscopic images: a single domain.

    P. Tschandl et al. 2018, N. Codella et al. 2018, M. Combalia et al. 2019 (CC BY-NC 4.0). The
    files are those of the challenge: ``ISIC_2019_Training_GroundTruth.csv`` (a column per class,
    with a single 1 per row) and ``ISIC_2019_Training_Input/<image>.jpg``. The split and the
    settings are those of FedISM (see `ImageTable`):

    =====  =====  ======  =====  ===  =====  ===  ====  ===  ======
    class  MEL    NV      BCC    AK   BKL    DF   VASC  SCC  all
    =====  =====  ======  =====  ===  =====  ===  ====  ===  ======
    train  3,617  10,300  2,658  693  2,099  191   202  502  20,262
    test     905   2,575    665  174    525   48    51  126   5,069
    =====  =====  ======  =====  ===  =====  ===  ====  ===  ======

    The split is by image: images of one lesion may be in both splits, so tests may look too good.
    (The challenge's metadata name most lesions; HAM10000, a part of it, is split by lesion.)
    Preparation is much faster if the images are already reduced to 224 pixels.
    """

    title = "ISIC 2019"
    domain_names = ("isic2019",)
    classes = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")
    table = "ISIC_2019_Training_GroundTruth.csv"
    image_folder = "ISIC_2019_Training_Input"
    subfolders = ("isic2019", "ISIC2019", "ISIC_2019")

    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Return the class and the file of every image of the eight classes."""
        path, folder = root / self.table, root / self.image_folder
        files = {file.name for file in folder.iterdir()}
        table = read_table(path, ("image", *self.classes))
        columns = [parse_numbers(table[name], path) for name in self.classes]
        values = np.stack(columns, axis=1)
        names = np.array([f"{image}.jpg" for image in table["image"]], object)
        known = values.any(axis=1)  # the others are of class "UNK"
        for row in np.flatnonzero(known & (np.sort(values)[:, -2:] != [0, 1]).any(axis=1)):
            raise DataError(
                f"{path}: {table['image'][row]} has the classes {values[row].tolist()}; expected "
                "exactly one 1. Correct it."
            )
        for name in names[known]:
            if name not in files:
                raise DataError(f"{folder} has no file {name}. Add it.")
        labels = values[known].argmax(axis=1).tolist()
        return [(label, folder / name) for label, name in zip(labels, names[known], strict=True)]


#: Number of slices in FedISM.
SLICES = 25_000


class RSNAICH(ImageTable):
    """Five kinds of hemorrhage in 25,000 head CT slices: a single domain.

    A. Flanders et al., Radiology: Artificial Intelligence 2 (2020), non-commercial use. The files
    are the published ``stage_2_train.csv`` (ID, Label, with six rows per slice) and the DICOM
    files, which `fairflower.data.images.read_dicom` reads. Instead of these you may use images
    ``stage_2_train/<ID>.png`` or ``.jpg`` that you have windowed and exported. Slices without an
    image are skipped.

    The settings are those of FedISM (see `ImageTable`). Only slices with exactly one of the five
    kinds are used. If there are more than 25,000, a random 25,000 are used, the same in every run;
    it is not known which slices the paper used. The table does not name the patients, so a patient
    may have slices in both train and test, as in the paper.
    """

    title = "RSNA ICH"
    domain_names = ("rsna-ich",)
    classes = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural")
    table = "stage_2_train.csv"
    image_folder = "stage_2_train"
    subfolders = ("rsna-ich", "rsna-intracranial-hemorrhage-detection")

    def records(self, root: Path) -> list[tuple[int, Path]]:
        """Return the class and the file of every slice with exactly one kind of hemorrhage."""
        path = root / self.table
        files = {
            file.stem: file
            for file in sorted((root / self.image_folder).iterdir())
            if file.suffix.lower() in (".dcm", ".png", ".jpg", ".jpeg")
        }
        table = read_table(path, ("ID", "Label"))
        rows = table["ID"].str.rpartition("_")[[0, 2]].set_axis(["image", "kind"], axis=1)
        used = rows["image"].isin(list(files)) & rows["kind"].isin(self.classes)
        positive = rows[used][parse_numbers(table["Label"][used], path) == 1].drop_duplicates()
        alone = positive[~positive["image"].duplicated(keep=False)]
        kinds = dict(zip(alone["image"], alone["kind"], strict=True))
        images = sorted(kinds)
        if len(images) > SLICES:
            rng = np.random.default_rng(derive_seed(0, self.title, "slices"))
            images = [images[i] for i in rng.choice(len(images), SLICES, replace=False)]
        return [(self.classes.index(kinds[image]), files[image]) for image in images]
