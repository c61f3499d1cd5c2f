"""Digits: MNIST, USPS, SVHN and SYN, the benchmark of FedHEAL and FedEquilibria."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.data.base import DataSet
from fairflower.data.federation import Augment, DataError
from fairflower.data.files import (
    DomainFiles,
    HuggingFace,
    NpzFile,
    data_folder,
    load_hub,
    load_hugging_face,
    logger,
    stamp,
)

#: Domain -> Hugging Face id and configuration. SYN is not on the Hub under a known name.
HUB: dict[str, tuple[str, str | None]] = {
    "mnist": ("ylecun/mnist", None),
    "usps": ("flwrlabs/usps", None),
    "svhn": ("ufldl-stanford/svhn", "cropped_digits"),
}
_REMEDY = (
    "Set data.dir or FAIRFLOWER_DATA to a folder that has, for each domain, <domain>.npz "
    "(x_train, y_train, x_test, y_test) or a Hugging Face data set saved as <domain>"
)


class Digits(DataSet):
    """Settings of FedHEAL (CVPR 2024) §4.1 and its released code.

    32x32 pixels, grey repeated to three channels, ImageNet's mean and standard deviation,
    random crops with a padding of 4 and no flips. Five clients per domain with 1 % each
    give **600, 72, 732 and 100** images per client (MNIST, USPS, SVHN, SYN), drawn without
    regard to class.

    The fraction is of the *published* size of a domain (60,000, 7,291, 73,257 and 10,000
    training images), so a file that holds only part of a domain gives the same sizes as
    long as it has enough. ``data.examples-per-client`` sets another number.

    Where the images come from, in this order:

    1. ``data.dir`` or, if that is empty, ``$FAIRFLOWER_DATA``: ``<domain>.npz``, else
       ``<domain>`` as written by Hugging Face's ``save_to_disk`` (train and test, image
       and label). A re-creation of SYN may stand in as ``synlike.npz``; the federation's
       ``sources`` say so.
    2. With neither set, the Hugging Face Hub, through flwr-datasets. Ganin's SYN is not
       there: drop it (``data.domains = "mnist,usps,svhn"``) or use a folder.
    """

    num_classes: ClassVar[int] = 10
    image_size: ClassVar[int] = 32
    channels: ClassVar[int] = 3
    augment = Augment(crop_padding=4)
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)
    fraction = 0.01
    published_sizes: ClassVar[dict[str, int]] = {
        "mnist": 60_000,
        "usps": 7_291,
        "svhn": 73_257,
        "syn": 10_000,
    }

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self._folder = data_folder(config)
        self._files: dict[str, DomainFiles] = {}

    @property
    def folder(self) -> Path | None:
        """``data.dir`` or ``$FAIRFLOWER_DATA``, absolute; None: the Hub."""
        return self._folder

    def all_domains(self) -> Sequence[str]:
        """mnist, usps, svhn, syn."""
        return tuple(self.published_sizes)

    def labels(self, domain: str, split: str) -> npt.NDArray[np.int64]:
        """Labels of one split of a domain, int64 [N]."""
        return self._open(domain).labels(split)

    def images(self, domain: str, split: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """The images of these rows, in the files' own size."""
        return self._open(domain).images(split, rows)

    def fingerprint(self) -> Any:
        """The files, or the ids on the Hub."""
        paths = {domain: self._path(domain) for domain in self.domains}
        return [stamp(path) if path else [HUB[domain]] for domain, path in paths.items()]

    def source(self, domain: str) -> str:
        """The file, folder or Hub id."""
        path = self._path(domain)
        if path is None:
            return f"Hugging Face {HUB[domain][0]}"
        return f"{path} (a stand-in for SYN)" if path.name == "synlike.npz" else str(path)

    def _path(self, domain: str) -> Path | None:
        """A domain's file or folder; None if it is to come from the Hub."""
        if self.folder is None:
            if domain not in HUB:
                raise DataError(
                    f"Digits: {domain!r} is not on the Hugging Face Hub. {_REMEDY}, or leave "
                    f"it out with data.domains = {','.join(HUB)!r}."
                )
            return None
        file, folder = self.folder / f"{domain}.npz", self.folder / domain
        stand_in = self.folder / f"{domain}like.npz"
        if file.is_file():
            return file
        if folder.is_dir():
            return folder
        if domain == "syn" and stand_in.is_file():
            return stand_in
        raise DataError(f"Digits: neither {file} nor {folder} exists. {_REMEDY}.")

    def _open(self, domain: str) -> DomainFiles:
        if domain not in self._files:
            source = self.source(domain)
            logger.info("Reading %s from %s", domain, source)
            path = self._path(domain)
            if path and path.is_file():
                self._files[domain] = NpzFile(path, self.num_classes)
            else:
                data = load_hugging_face(path) if path else load_hub(*HUB[domain], _REMEDY)
                size = self.config.image_size or self.image_size
                self._files[domain] = HuggingFace(data, source, size, self.num_classes)
        return self._files[domain]
