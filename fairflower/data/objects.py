"""Images of objects in several domains: Office-Caltech-10, PACS and DomainNet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.class_folders import ClassFolders
from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment, Ints


class OfficeCaltech(ClassFolders):
    """Ten kinds of objects in product photos, Caltech-256, SLR and web camera images.

    B. Gong, Y. Shi, F. Sha, K. Grauman, CVPR 2012; settings of FedHEAL (CVPR 2024) §4.1 and
    its released code. A domain's images with an index of 8 or 9 modulo 10 are test images.
    Five clients per domain with 10 % of the training images each:

    =======  ======  =====  ====  ==========
    domain   images  train  test  per client
    =======  ======  =====  ====  ==========
    amazon      958    768   190          76
    caltech    1123    899   224          89
    dslr        157    127    30          12
    webcam      295    237    58          23
    =======  ======  =====  ====  ==========

    Every client has all ten classes (see `fairflower.data.partition.cover_every_class`).
    192x192 pixels as in the released code (the papers do not state it), ImageNet's mean and
    standard deviation, random horizontal flips and no crops.

    Not on the Hugging Face Hub: it needs a folder (see `ClassFolders`). DSLR and webcam show the
    same few objects from several sides, so their test accuracy says little about other objects.
    """

    title = "Office-Caltech-10"
    domain_names = ("amazon", "caltech", "dslr", "webcam")
    classes = (
        *("backpack", "bike", "calculator", "headphones", "keyboard"),
        *("laptop", "monitor", "mouse", "mug", "projector"),
    )
    aliases: ClassVar[Mapping[str, str]] = {"back_pack": "backpack", "laptop_computer": "laptop"}
    subfolders = ("office_caltech10", "office_caltech_10")
    image_size = 192
    augment = Augment(horizontal_flip=True)
    mean, std = IMAGENET
    fraction = 0.1
    every_class = True

    def is_test(self, labels: Ints) -> npt.NDArray[np.bool_]:
        """Return whether the index modulo 10 is 8 or 9, in any class."""
        test: npt.NDArray[np.bool_] = np.arange(len(labels)) % 10 >= 8
        return test


class PACS(ClassFolders):
    """Seven kinds of objects in photos, paintings, cartoons and sketches.

    D. Li, Y. Yang, Y.-Z. Song, T. Hospedales, ICCV 2017; settings of FedEquilibria (2025),
    where stated. Five clients per domain with 10 % of the training images each:

    ============  ======  =====  ====  ==========
    domain        images  train  test  per client
    ============  ======  =====  ====  ==========
    photo           1670   1333   337         133
    art_painting    2048   1637   411         163
    cartoon         2344   1873   471         187
    sketch          3929   3141   788         314
    ============  ======  =====  ====  ==========

    The paper does not name the test images. The steps in its accuracies give their number: a fifth
    of every class, rounded up. Here it is every fifth image of a class, from the first, sorted by
    the SHA-256 of the file: independent of names and of the order of rows, but not of a resize or
    a new compression. Some sketches show the same photo, so a split by image, as the paper's must
    be, is optimistic.

    128x128 pixels, ImageNet's mean and standard deviation and random horizontal flips (not stated
    in the paper; as for Office-Caltech-10 in FedHEAL's code). Clients' images are drawn without
    regard to class.

    FedGCR (AAAI 2024) divides 600 training images of the first domain, and fewer of each further
    domain: ``data.imbalance-factor`` 5 or 10 with ``data.examples-per-client`` 120 or 60 (see
    `fairflower.data.client_groups.imbalanced_groups`).

    Read from a folder (see `ClassFolders`) or from ``flwrlabs/pacs`` on the Hub.
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

    X. Peng, Q. Bai, X. Xia, Z. Huang, K. Saenko, B. Wang, ICCV 2019; the order of domains and ten
    of the 345 classes as in FedGCR (AAAI 2024). Folders of other classes are skipped.

    224x224 pixels, not normalized and with random flips, as in the released code (which also
    rotates images by up to 30 degrees). Every fifth image of a class, from the first, is a test
    image; the paper does not state its split. All training images of a domain are divided equally,
    or by ``data.imbalance-factor`` (see `fairflower.data.client_groups`).

    Not on the Hugging Face Hub: it needs a folder (see `ClassFolders`).
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
