"""What a benchmark is: domains that share their classes and differ in their examples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy.typing as npt

from fairflower.config import DataConfig, unknown
from fairflower.data.federation import OVER_DOMAINS, Augment, Floats, Ints, Pixels
from fairflower.data.files import data_folder, logger
from fairflower.errors import DataError

#: Mean and standard deviation, per channel, by which ImageNet's networks expect images.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Opened = TypeVar("Opened")


class DataSet(ABC):
    """A benchmark before it is divided: subclass it, and name it (`docs/your-own-parts.md`).

    Making one must be cheap, since every client does it; examples are read by the methods.
    They are images, unless it is a `FeatureSet` or a `TokenSet`.
    """

    #: What its examples are: "images", "features" or "tokens".
    kind: ClassVar[str] = "images"
    #: None: as many as ``classes`` names or, if it is empty, the largest label of all plus one.
    num_classes: ClassVar[int | None] = None
    #: Their names, in the order of the labels; empty where data is labelled by numbers.
    classes: tuple[str, ...] = ()
    #: Side in pixels that images are resized to unless ``data.image-size`` says otherwise.
    #: None: as they are, the same in all domains.
    image_size: ClassVar[int | None] = None
    #: 3, 1, or None: 3 if any domain has colour.
    channels: ClassVar[int | None] = None
    #: For training images.
    augment: ClassVar[Augment] = Augment()
    #: Per channel, of images scaled to [0, 1]; as ``std``.
    mean: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    std: ClassVar[tuple[float, ...]] = (0.5, 0.5, 0.5)
    #: Share of a domain that one client gets by default. None: the whole domain is divided
    #: equally.
    fraction: ClassVar[float | None] = None
    #: Training images of a domain as published, of which ``fraction`` is a share. A domain
    #: that is not here counts as many as it has.
    published_sizes: ClassVar[Mapping[str, int]] = {}
    #: Training images that a domain has at most, where the whole domain is divided. None: all.
    domain_size: ClassVar[int | None] = None
    #: Whether ``data.imbalance-factor`` is also that between a domain's last client and its
    #: first, see `fairflower.data.client_groups.imbalanced_groups`.
    imbalanced_within: ClassVar[bool] = False
    #: Whether every client is to hold every class that its domain has.
    every_class: ClassVar[bool] = False
    #: Whether tests also give the AUC, as its papers do.
    auc: ClassVar[bool] = False

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        self.domains = select_domains(config.domains, self.all_domains())

    @property
    def folder(self) -> Path | None:
        """Where local files are read from, absolute; None if none are."""
        return None

    @abstractmethod
    def all_domains(self) -> Sequence[str]:
        """Every domain there is, in the default order."""

    @abstractmethod
    def labels(self, domain: str, split: str) -> Ints:
        """Labels of a domain's "train" or "test" examples, int64 [N]."""

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """These rows' images, uint8 [len(rows), H, W] or [len(rows), H, W, 3]."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} has no images. Define {name}.images(domain, split, rows), or derive it from "
            "fairflower.data.FeatureSet or TokenSet."
        )

    def examples(self, domain: str, split: str, rows: Ints) -> Pixels | Floats | Ints:
        """These rows, as they are read: images, features or token ids."""
        return self.images(domain, split, rows)

    @abstractmethod
    def fingerprint(self) -> Any:
        """A JSON value that changes whenever the examples could: files' sizes and times."""

    @abstractmethod
    def source(self, domain: str) -> str:
        """Where a domain's examples come from, in words."""

    def partitioner(self) -> Any:
        """A new partitioner of flwr-datasets, to divide a domain's training examples by.

        It sees them as ``label`` and what `columns` has. None: the ``data.*`` settings divide.
        """
        return None

    def columns(self, domain: str, split: str) -> Mapping[str, npt.NDArray[Any]]:
        """What a partitioner may go by beside the label, such as the writer, [N] each.

        Where there is something, it divides the test examples, too, and a client gets its own.
        """
        return {}

    def train_size(self, domain: str, available: int, clients: int) -> int:
        """How many of a domain's ``available`` training images ``clients`` of it share."""
        if self.config.examples_per_client:
            return self.config.examples_per_client * clients
        fraction = self.config.fraction or self.fraction
        if fraction is None:
            return min(available, self.domain_size or available)
        # A product like 0.29 * 100 = 28.999999999999996 means 29.
        return int(fraction * self.published_sizes.get(domain, available) + 1e-9) * clients


class DataSetOfFiles(DataSet, Generic[Opened]):
    """A benchmark whose domains are opened one by one, and each once.

    ``title`` is its name in messages, and ``domain_names`` are in the default order.
    """

    title: ClassVar[str]
    domain_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self._opened: dict[str, Opened] = {}

    @cached_property
    def folder(self) -> Path | None:
        """``data.dir`` or ``$FAIRFLOWER_DATA``, absolute; None: the Hub."""
        return data_folder(self.config)

    def all_domains(self) -> Sequence[str]:
        return self.domain_names

    def _open(self, domain: str) -> Opened:
        if domain not in self._opened:
            logger.info("Reading %s from %s", domain, self.source(domain))
            self._opened[domain] = self._read(domain)
        return self._opened[domain]

    @abstractmethod
    def _read(self, domain: str) -> Opened:
        """A domain's images and labels, which need not be in memory."""


def select_domains(wanted: str, domains: Sequence[str]) -> tuple[str, ...]:
    """The domains that ``data.domains`` names, in its order; all of them if it is empty.

    >>> select_domains("b, a", ["a", "b", "c"]), select_domains("", ["a", "b"])
    (('b', 'a'), ('a', 'b'))
    """
    chosen = [name.strip() for name in wanted.split(",")] if wanted.strip() else [*domains]
    for name in chosen:
        if name not in domains:
            raise DataError(f"data.domains = {wanted!r}: {unknown('domain', name, domains)}")
    if len(set(chosen)) < len(chosen):
        raise DataError(f"data.domains = {wanted!r} names a domain twice. Name each once.")
    if taken := sorted(set(OVER_DOMAINS).intersection(chosen)):
        raise DataError(f"A domain is called {taken[0]!r}, as a column of tables is. Rename it.")
    return tuple(chosen)


def client_count_key(config: DataConfig) -> str:
    """The setting that says how many clients there are."""
    return f"data.{'imbalance-factor' if config.imbalance_factor > 1 else 'clients-per-domain'}"


def too_few(group: str, found: int, split: str, clients: int, remedy: str) -> DataError:
    """An error of fewer examples than clients; where there are none, no ``remedy`` would help."""
    if not found:
        return DataError(
            f"Domain {group!r} has no {split} examples. Add some, or leave it out of data.domains."
        )
    return DataError(
        f"Domain {group!r} has {found} {split} examples for {clients} clients. {remedy}."
    )
