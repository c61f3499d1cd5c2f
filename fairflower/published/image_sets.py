"""Images of digits, objects, letters, skin and brains, with settings of papers that use them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment, Ints, Pixels
from fairflower.data.files import NpzFile, every_fifth, read_csv, stamp
from fairflower.data.folders import ClassFolders, SplitFiles
from fairflower.data.partition import stratified_mask
from fairflower.errors import DataError, quoted, require
from fairflower.seeds import derive_seed

if TYPE_CHECKING:
    from datasets import DatasetDict


class Digits(SplitFiles):
    """MNIST, USPS, SVHN and SYN, with the settings of FedHEAL (CVPR 2024, §4.1 and released code).

    Images are 32x32 pixels with three channels (gray is repeated). They are normalized by
    ImageNet's mean and standard deviation, and augmented by random crops with a padding of 4,
    without flips. With five clients per domain and 1 % each, a client has **600, 72, 732 or 100**
    images (MNIST, USPS, SVHN, SYN), drawn without regard to class.

    The percentage refers to the *published* size of a domain (60,000, 7,291, 73,257 and 10,000
    training images). A file with only a part of a domain therefore gives the same sizes if it is
    large enough. ``data.examples-per-client`` sets another number.

    See `SplitFiles` for the sources. Ganin's SYN is not on the Hub. Leave it out (``data.domains =
    "mnist,usps,svhn"``) or use a folder. A re-creation of SYN in this folder may be named
    ``synlike.npz``, and the federation's ``sources`` then mention it.
    """

    title = "Digits"
    domain_names: ClassVar[tuple[str, ...]] = ("mnist", "usps", "svhn", "syn")
    hub: ClassVar = {
        "mnist": ("ylecun/mnist", None),
        "usps": ("flwrlabs/usps", None),
        "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    }
    other_files: ClassVar = {"syn": ("synlike", "a stand-in for SYN")}
    num_classes = 10
    image_size = 32
    channels = 3
    augment = Augment(crop_padding=4)
    mean, std = IMAGENET
    fraction: ClassVar[float | None] = 0.01
    published_sizes: ClassVar = {"mnist": 60_000, "usps": 7_291, "svhn": 73_257, "syn": 10_000}


class DigitFive(Digits):
    """MNIST, USPS, SYN, MNIST-M and SVHN, in the order and with the settings of FedGCR (AAAI 2024).

    Images are not augmented; mean and standard deviation are 0.5. A domain has 2,975 training
    images, like the first domain in the runs of the released code. With ``data.imbalance-factor`` 5
    or 10, each further domain has fewer (see `fairflower.data.partition`). The full test sets
    are used.

    Images are 32x32 pixels, which suits small networks. The paper's ViT-B/16 needs 224x224
    (``data.image-size``). For the paper's equal domains, which are half as large, set
    ``data.clients-per-domain = 2`` and ``data.examples-per-client = 743``. The released code
    instead divides a domain into one quarter and three quarters.
    """

    title = "Digit-Five"
    domain_names = ("mnist", "usps", "syn", "mnistm", "svhn")
    hub: ClassVar = {**Digits.hub, "mnistm": ("Mike0307/MNIST-M", None)}
    augment = Augment()
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    fraction = None
    published_sizes: ClassVar = {}
    domain_size = 2975


class OfficeCaltech(ClassFolders):
    """Ten kinds of objects in product photos, Caltech-256, DSLR images and webcam images.

    B. Gong, Y. Shi, F. Sha, K. Grauman, CVPR 2012, with the settings of FedHEAL (CVPR 2024, §4.1
    and released code). The test images of a domain are those whose index is 8 or 9 modulo 10. A
    domain has five clients with 10 % of its training images each:

    =======  ======  =====  ====  ==========
    domain   images  train  test  per client
    =======  ======  =====  ====  ==========
    amazon      958    768   190          76
    caltech    1123    899   224          89
    dslr        157    127    30          12
    webcam      295    237    58          23
    =======  ======  =====  ====  ==========

    Every client has all ten classes (see `fairflower.data.partition.cover_every_class`). Images
    are 192x192 pixels as in the released code (the papers do not state the size). They are
    normalized by ImageNet's mean and standard deviation, and augmented by random horizontal flips,
    without crops.

    The data set is not on the Hugging Face Hub, so it needs a folder (see `ClassFolders`). DSLR and
    webcam show the same few objects from several angles, so their test accuracy says little about
    other objects.
    """

    title = "Office-Caltech-10"
    domain_names = ("amazon", "caltech", "dslr", "webcam")
    classes = (
        *("backpack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop", "monitor", "mouse", "mug", "projector"),
    )
    aliases: ClassVar = {"back_pack": "backpack", "laptop_computer": "laptop"}
    subfolders = ("office_caltech10", "office_caltech_10")
    image_size = 192
    augment = Augment(horizontal_flip=True)
    mean, std = IMAGENET
    fraction = 0.1
    every_class = True

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of the images whose index in the domain is 8 or 9 modulo 10, bool [N]."""
        test: npt.NDArray[np.bool_] = np.arange(len(labels)) % 10 >= 8
        return test


class PACS(ClassFolders):
    """Seven kinds of objects in photos, paintings, cartoons and sketches.

    D. Li, Y. Yang, Y.-Z. Song, T. Hospedales, ICCV 2017, with the settings of FedEquilibria (2025),
    as far as the paper states them. A domain has five clients with 10 % of its training images
    each:

    ============  ======  =====  ====  ==========
    domain        images  train  test  per client
    ============  ======  =====  ====  ==========
    photo           1670   1333   337         133
    art_painting    2048   1637   411         163
    cartoon         2344   1873   471         187
    sketch          3929   3141   788         314
    ============  ======  =====  ====  ==========

    The paper does not name the test images, but the step size of its accuracies reveals their
    number: a fifth of every class, rounded up. Here the test images are every fifth image of a
    class, starting with the first, sorted by the SHA-256 of the file. This order depends neither on
    names nor on the order of rows, but it changes if images are resized or compressed again. Some
    sketches depict the same photo, so a split by image, as in the paper, is optimistic.

    Images are 128x128 pixels. They are normalized by ImageNet's mean and standard deviation, and
    augmented by random horizontal flips. The paper does not state these settings; they are those of
    FedHEAL's code for Office-Caltech-10. Clients' images are drawn without regard to class.

    FedGCR (AAAI 2024) uses 600 training images of the first domain, and fewer of each further
    domain. To reproduce this, set ``data.imbalance-factor`` to 5 or 10 and
    ``data.examples-per-client`` to 120 or 60 (see
    `fairflower.data.partition.imbalanced_groups`).

    The data are read from a folder (see `ClassFolders`) or from ``flwrlabs/pacs`` on the Hub.
    """

    title = "PACS"
    domain_names = ("photo", "art_painting", "cartoon", "sketch")
    classes = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    subfolders = ("pacs", "PACS", "kfold", "pacs/kfold", "PACS/kfold")
    hub = "flwrlabs/pacs"
    image_size = 128
    augment = Augment(horizontal_flip=True)
    mean, std = IMAGENET
    fraction = 0.1
    imbalanced_within = True
    by_content = True


class DomainNet(ClassFolders):
    """Ten kinds of objects in clip art, photos, paintings, sketches, doodles and infographics.

    X. Peng, Q. Bai, X. Xia, Z. Huang, K. Saenko, B. Wang, ICCV 2019. The order of the domains and
    the ten classes, out of 345, are those of FedGCR (AAAI 2024). Folders of other classes are
    skipped.

    Images are 224x224 pixels, not normalized, and augmented by random flips, as in the
    released code (which also rotates images by up to 30 degrees). Every fifth image of a class,
    starting with the first, is a test image; the paper does not state its split. All training
    images of a domain are divided equally, or as ``data.imbalance-factor`` says (see
    `fairflower.data.partition`).

    The data set is not on the Hugging Face Hub, so it needs a folder (see `ClassFolders`).
    """

    title = "DomainNet"
    domain_names = ("clipart", "real", "painting", "sketch", "quickdraw", "infograph")
    classes = (
        *("bird", "feather", "headphones", "ice_cream", "teapot"),
        *("tiger", "whale", "windmill", "wine_glass", "zebra"),
    )
    others = True
    subfolders = ("domainnet", "DomainNet")
    image_size = 224
    augment = Augment(horizontal_flip=True)
    mean = (0.0, 0.0, 0.0)
    std = (1.0, 1.0, 1.0)


class CIFAR10(SplitFiles):
    """CIFAR-10 (A. Krizhevsky 2009): ten kinds of objects, 32x32 pixels, a single domain.

    Clients get equal shares or, with ``data.dirichlet-alpha``, the shares of a Dirichlet partition.
    A subclass may define another ``partitioner`` (see `docs/your-own-parts.md`). Training images
    are augmented by random crops with a padding of 4, and flips.
    """

    title = "CIFAR-10"
    domain_names: ClassVar[tuple[str, ...]] = ("cifar10",)
    hub: ClassVar = {"cifar10": ("uoft-cs/cifar10", None)}
    classes = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    image_size = 32
    channels = 3
    augment = Augment(crop_padding=4, horizontal_flip=True)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def adapt(self, data: DatasetDict) -> DatasetDict:
        return _renamed(data, "img", "image")


class FEMNIST(SplitFiles):
    """FEMNIST (S. Caldas et al., LEAF, 2018): 62 digits and letters, 28x28, a single domain.

    Each client is a writer (by flwr-datasets' ``NaturalIdPartitioner``).
    ``data.clients-per-domain`` of about 3,600 writers are drawn with ``data.seed``. Every fifth
    image of a writer, starting with the first, is a test image of this client; ``evaluate.by =
    "clients"`` reports the accuracy of each client. Images are not augmented; mean and standard
    deviation are 0.5.
    """

    title = "FEMNIST"
    domain_names: ClassVar[tuple[str, ...]] = ("femnist",)
    hub: ClassVar = {"femnist": ("flwrlabs/femnist", None)}
    hub_splits = ("train",)
    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    image_size = 28
    channels = 1

    def adapt(self, data: DatasetDict) -> DatasetDict:
        """Divide the single published split into train and test, writer by writer."""
        from datasets import DatasetDict

        data = _renamed(data, "character", "label")
        test = every_fifth(self._writers(data, "train"))
        rows = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
        return DatasetDict({split: data["train"].select(chosen) for split, chosen in rows.items()})

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        return super().images(domain, split, rows)[..., 0]  # three equal channels

    def partitioner(self) -> Any:
        require("sim", f"data.name = {self.config.name!r}", "flwr_datasets", "datasets")
        from flwr_datasets.partitioner import NaturalIdPartitioner

        return NaturalIdPartitioner(partition_by="writer_id")

    def columns(self, domain: str, split: str) -> Mapping[str, npt.NDArray[Any]]:
        opened = self._open(domain)
        if isinstance(opened, NpzFile):
            raise DataError(
                f"{self.title}: {opened.path} does not name the writers. Use save_to_disk to save "
                f"the Hugging Face data set {self.hub[domain][0]} as {domain} instead."
            )
        return {"writer_id": self._writers(opened, split)}

    def _writers(self, data: DatasetDict, split: str) -> npt.NDArray[Any]:
        if split not in data or "writer_id" not in data[split].column_names:
            raise DataError(
                f"{self.title}: found {data}; expected the split train with the columns image, "
                f"writer_id and character. Save {self.hub['femnist'][0]} from the Hub."
            )
        return np.asarray(data[split]["writer_id"][:])


def _renamed(data: DatasetDict, old: str, new: str) -> DatasetDict:
    """Rename a column, if all splits have it."""
    renames = all(old in split.column_names for split in data.values())
    return data.rename_column(old, new) if renames else data


# --- medical images -------------------------------------------------------------------------------


#: Fraction of the lesions whose images become test images if the source is not split by lesion.
LESION_TEST_SHARE = 0.2

#: Diagnoses as written in the data set on the Hub, in the order of the classes.
_DIAGNOSES = (
    *("actinic_keratoses", "basal_cell_carcinoma", "benign_keratosis-like_lesions"),
    *("dermatofibroma", "melanoma", "melanocytic_nevi", "vascular_lesions"),
)


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
    classes = ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc")
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
        numbers = {name: k for names in (self.classes, _DIAGNOSES) for k, name in enumerate(names)}
        every = pool["dx"][:]
        diagnoses = [every[i].lower() for i in distinct]
        if unknown := sorted({*diagnoses} - numbers.keys()):
            raise DataError(
                f"HAM10000: found the diagnosis {unknown[0]!r}; expected {', '.join(self.classes)}."
            )
        labels = np.array([numbers[name] for name in diagnoses])
        kinds = np.unique(lesions)
        drawn = np.random.default_rng(0).permutation(kinds)[: round(LESION_TEST_SHARE * len(kinds))]
        test = np.isin(lesions, drawn)
        images, split = pool.select_columns(["image"]), DatasetDict()
        for name, chosen in (("train", ~test), ("test", test)):
            rows, of = images.select(distinct[chosen]), labels[chosen].tolist()
            split[name] = rows.add_column("label", of)
        return split


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

    def layout(self) -> str:
        return f"{self.table} and {self.image_folder}"

    def is_in(self, folder: Path) -> bool:
        return (folder / self.table).is_file() and (folder / self.image_folder).is_dir()

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask of a random fifth of every class, rounded up, bool [N]."""
        rng = np.random.default_rng(derive_seed(0, self.title, "test"))
        kinds, counts = np.unique(labels, return_counts=True)
        return ~stratified_mask(labels, kinds, 4 * counts // 5, rng)

    def fingerprint(self) -> Any:
        """Return the stamp of the table, and the modification time of the image folder."""
        assert self._root is not None
        return [stamp(self._root / self.table), (self._root / self.image_folder).stat().st_mtime_ns]

    def place(self, domain: str) -> Path | None:
        return self._root


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

    def records(self, folder: Path) -> list[tuple[int, Path]]:
        """Return the class and the file of every image of the eight classes."""
        path, images = folder / self.table, folder / self.image_folder
        files = {file.name for file in images.iterdir()}
        table = read_csv(path, dict.fromkeys(("image", *self.classes), ""))
        values = np.stack([table.numbers(name) for name in self.classes], axis=1)
        names = np.array([f"{image}.jpg" for image in table.columns["image"]], object)
        known = values.any(axis=1)  # the others are of class "UNK"
        for row in np.flatnonzero(known & (np.sort(values)[:, -2:] != [0, 1]).any(axis=1)):
            raise DataError(
                f"{path}: {table.columns['image'][row]} has the classes {values[row].tolist()}; "
                "expected exactly one 1. Correct it."
            )
        for name in names[known]:
            if name not in files:
                raise DataError(f"{images} has no file {quoted(name)}. Add it.")
        labels = values[known].argmax(axis=1).tolist()
        return [(label, images / name) for label, name in zip(labels, names[known], strict=True)]


SLICES = 25_000  # number of slices in FedISM


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

    def records(self, folder: Path) -> list[tuple[int, Path]]:
        """Return the class and the file of every slice with exactly one kind of hemorrhage."""
        path = folder / self.table
        found = sorted((folder / self.image_folder).iterdir())
        files = {f.stem: f for f in found if f.suffix.lower() in (".dcm", ".png", ".jpg", ".jpeg")}
        table = read_csv(path, {"ID": "", "Label": ""})
        kinds: dict[str, set[str]] = {}
        for text, label in zip(table.columns["ID"], table.numbers("Label"), strict=True):
            image, _, kind = text.rpartition("_")
            if image in files and kind in self.classes and label == 1:
                kinds.setdefault(image, set()).add(kind)
        images = sorted(image for image, of in kinds.items() if len(of) == 1)
        if len(images) > SLICES:
            rng = np.random.default_rng(derive_seed(0, self.title, "slices"))
            images = [images[i] for i in rng.choice(len(images), SLICES, replace=False)]
        return [(self.classes.index(min(kinds[image])), files[image]) for image in images]
