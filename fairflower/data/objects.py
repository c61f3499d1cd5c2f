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
    aliases: ClassVar[Mapping[str, str]] = {"back_pack": "backpack", "laptop_computer": "laptop"}
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
    `fairflower.data.client_groups.imbalanced_groups`).

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
    `fairflower.data.client_groups`).

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
