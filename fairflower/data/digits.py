"""Handwritten, photographed and printed digits: Digits and Digit-Five."""

from __future__ import annotations

from typing import ClassVar

from fairflower.data.data_set import IMAGENET
from fairflower.data.federation import Augment
from fairflower.data.split_files import SplitFiles


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
    hub: ClassVar[dict[str, tuple[str, str | None]]] = {
        "mnist": ("ylecun/mnist", None),
        "usps": ("flwrlabs/usps", None),
        "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
    }
    other_files: ClassVar[dict[str, tuple[str, str]]] = {"syn": ("synlike", "a stand-in for SYN")}
    num_classes: ClassVar[int] = 10
    image_size: ClassVar[int] = 32
    channels: ClassVar[int] = 3
    augment = Augment(crop_padding=4)
    mean, std = IMAGENET
    fraction: ClassVar[float | None] = 0.01
    published_sizes: ClassVar[dict[str, int]] = {
        "mnist": 60_000,
        "usps": 7_291,
        "svhn": 73_257,
        "syn": 10_000,
    }


class DigitFive(Digits):
    """MNIST, USPS, SYN, MNIST-M and SVHN, in the order and with the settings of FedGCR (AAAI 2024).

    Images are not augmented; mean and standard deviation are 0.5. A domain has 2,975 training
    images, like the first domain in the runs of the released code. With ``data.imbalance-factor`` 5
    or 10, each further domain has fewer (see `fairflower.data.client_groups`). The full test sets
    are used.

    Images are 32x32 pixels, which suits small networks. The paper's ViT-B/16 needs 224x224
    (``data.image-size``). For the paper's equal domains, which are half as large, set
    ``data.clients-per-domain = 2`` and ``data.examples-per-client = 743``. The released code
    instead divides a domain into one quarter and three quarters.
    """

    title = "Digit-Five"
    domain_names = ("mnist", "usps", "syn", "mnistm", "svhn")
    hub: ClassVar[dict[str, tuple[str, str | None]]] = {
        **Digits.hub,
        "mnistm": ("Mike0307/MNIST-M", None),
    }
    augment = Augment()
    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    fraction = None
    published_sizes: ClassVar[dict[str, int]] = {}
    domain_size = 2975
