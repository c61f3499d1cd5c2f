"""Images of digits, objects and letters, with the settings of the papers that use them."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment, Ints, Pixels
from fairflower.data.folders import ClassFolders, SplitFiles
from fairflower.data.images import HuggingFaceSplits
from fairflower.errors import DataError, require

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
        _, writer = np.unique(self._writers(data, "train"), return_inverse=True)
        order = np.argsort(writer, kind="stable")
        first = np.searchsorted(writer[order], writer[order])
        test = np.empty(len(writer), np.bool_)
        test[order] = (np.arange(len(writer)) - first) % 5 == 0
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
        if not isinstance(opened, HuggingFaceSplits):
            raise DataError(
                f"{self.title}: {opened.path} does not name the writers. Use save_to_disk to save "
                f"the Hugging Face data set {self.hub[domain][0]} as {domain} instead."
            )
        return {"writer_id": self._writers(opened.splits, split)}

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
