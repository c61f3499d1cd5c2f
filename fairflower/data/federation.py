"""A prepared benchmark on disk, and what is read from it: numpy and nothing heavier."""

from __future__ import annotations

import hashlib
import json
import math
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fairflower.errors import DataError
from fairflower.numerics.metrics import AVG, GAP, MIN, STD
from fairflower.registry import KINDS

META = "meta.json"

#: Titles of numbers over all domains in tables and callbacks: no domain may have such a name.
OVER_DOMAINS = (*(row.title for row in (AVG, STD, MIN, GAP)), AVG.phrase)

Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Split(NamedTuple):
    """Examples, and their labels, int64 [N] in ``0 .. num_classes - 1``.

    Images are uint8 [N, C, H, W], features float32 [N, D], token ids int64 [N, L].
    """

    x: Pixels | Floats | Ints
    y: Ints


@dataclass(frozen=True)
class Augment:
    """What is done at random to a training image, anew each time it is used.

    ``crop_padding`` pixels of black are added on every side and a crop of the original size
    is taken; with ``horizontal_flip`` half the images are mirrored.
    """

    crop_padding: int = 0
    horizontal_flip: bool = False


@dataclass(frozen=True)
class ClientInfo:
    """One client's place in the federation; ``class_counts`` are of its training images."""

    client_id: int
    domain: str
    num_examples: int
    class_counts: tuple[int, ...]


@dataclass(frozen=True)
class Federation:
    """A benchmark divided among clients, read from its folder.

    Opening reads one small JSON file; ``train`` and ``client_test`` read one client's own
    file and no other. Every call reads afresh, so the arrays are the caller's to change.
    Where there is a ``split``, it is ``"test"`` or ``"validation"``: examples kept out of training
    to choose hyper-parameters by, if there are any.
    """

    #: The data set.
    name: str
    #: Where it was prepared.
    folder: Path
    #: Groups of clients whose images look alike, in the order of the clients: the data set's
    #: domains, or the clean and the corrupted clients of each.
    domains: tuple[str, ...]
    #: For each domain, where its images came from.
    sources: tuple[str, ...]
    num_classes: int
    #: The same for every example: (C, H, W) of images, (D,) of features, and (V, L) of L token
    #: ids below V, as if each were written as a one of V.
    shape: tuple[int, ...]
    #: Per channel, of images scaled to [0, 1], or per feature; as ``std``. Empty for token ids.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: For training; ``Augment()`` when ``data.augment`` is false.
    augment: Augment
    #: Test images of each domain.
    test_sizes: tuple[int, ...]
    #: ``client_id`` is the index here and Flower's partition id; domain after domain.
    clients: tuple[ClientInfo, ...]
    #: Whether tests also give the AUC.
    auc: bool = False
    #: Names of the classes; empty where data is labelled by numbers.
    classes: tuple[str, ...] = ()
    #: Of the draw: SHA-256 of the rows of every client. Sites with data of their own have none.
    fingerprint: str = ""
    #: Validation images of each domain; empty if none are kept out of training.
    validation_sizes: tuple[int, ...] = ()

    def __hash__(self) -> int:
        """Of what tells most apart: a worker looks up every message's federation."""
        return hash((self.name, self.folder, self.fingerprint))

    @classmethod
    def open(cls, folder: str | Path) -> Federation:
        """Open a prepared folder.

        ``DataError`` if the folder was not written by `fairflower.data.prepare`.
        """
        folder = Path(folder)
        try:
            return cls.from_json((folder / META).read_text(encoding="utf-8"), folder)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{folder} is not a prepared federation ({error}). Delete it and run again."
            ) from error

    @classmethod
    def from_json(cls, text: str, folder: Path) -> Federation:
        """The federation that ``to_json`` described; ``folder`` need not hold its data."""
        meta: dict[str, Any] = json.loads(text)
        augment = Augment(**meta.pop("augment"))
        clients = tuple(
            ClientInfo(**{**client, "class_counts": tuple(client["class_counts"])})
            for client in meta.pop("clients")
        )
        rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in meta.items()}
        return cls(folder=folder, augment=augment, clients=clients, **rest)

    def to_json(self) -> str:
        """The text of ``meta.json``."""
        meta = asdict(self)
        del meta["folder"]
        if not self.validation_sizes:  # as earlier versions described it, whose runs go on
            del meta["validation_sizes"]
        return json.dumps(meta, indent=1)

    def check(self) -> None:
        """Refuse what no federation can be, as ``from_json`` takes whatever it is told.

        ``DataError`` if a field has another type, length or range than it says above, a client has
        no examples, or another number of them than its ``class_counts`` add up to.
        """
        domains, num_classes = self.domains, self.num_classes
        _expect(_all(domains, _is_name) and 0 < len(set(domains)) == len(domains), domains=domains)
        _expect(not set(OVER_DOMAINS) & set(domains), domains=domains)
        _expect(_is_count(num_classes, 1), num_classes=num_classes)
        named = _all(self.classes, _is_name) and len(self.classes) in (0, num_classes)
        _expect(named and len(set(self.classes)) == len(self.classes), classes=self.classes)
        sizes = _all(self.shape, lambda n: _is_count(n, 1)) and len(self.shape) in KINDS
        _expect(sizes and (self.kind != "images" or self.shape[0] in (1, 3)), shape=self.shape)
        scaled = 0 if self.kind == "tokens" else self.shape[0]
        _expect(_all(self.mean, _is_finite, scaled), mean=self.mean)
        _expect(_all(self.std, _is_finite, scaled) and min(self.std, default=1) > 0, std=self.std)
        padding, flip = self.augment.crop_padding, self.augment.horizontal_flip
        widest = max(self.shape[1:]) if self.kind == "images" else 0
        _expect(_is_count(padding) and padding <= widest, crop_padding=padding)
        _expect(isinstance(flip, bool), horizontal_flip=flip)
        _expect(isinstance(self.auc, bool), auc=self.auc)
        _expect(isinstance(self.name, str), name=self.name)
        _expect(isinstance(self.fingerprint, str), fingerprint=self.fingerprint)
        texts = _all(self.sources, lambda source: isinstance(source, str), len(domains))
        _expect(texts, sources=self.sources)
        _expect(_all(self.test_sizes, _is_count, len(domains)), test_sizes=self.test_sizes)
        kept_out = self.validation_sizes
        _expect(_all(kept_out, _is_count, len(domains) * bool(kept_out)), validation_sizes=kept_out)
        _expect(bool(self.clients), clients=self.clients)
        for k, client in enumerate(self.clients):
            _expect(client.client_id == k, client_id=client.client_id)
            _expect(client.domain in domains, domain=client.domain)
            counts, total = client.class_counts, client.num_examples
            _expect(_all(counts, _is_count, num_classes), class_counts=counts)
            _expect(_is_count(total, 1) and total == sum(counts), num_examples=total)

    @property
    def kind(self) -> str:
        """What its examples are: ``"images"``, ``"features"`` or ``"tokens"``."""
        return KINDS[len(self.shape)]

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes' names, or else their numbers."""
        return self.classes or tuple(map(str, range(self.num_classes)))

    @cached_property
    def digest(self) -> str:
        """Eight characters of all clients' data, the same wherever and whenever prepared."""
        found = hashlib.sha256()
        names = ["train", "test", *(["validation"] if self.validation_sizes else [])]
        for client in self.clients:
            for split in self.splits(client.client_id, *names):
                for array in split:
                    found.update(f"{array.dtype.str} {array.shape}".encode())
                    found.update(array.tobytes())
        return found.hexdigest()[:8]

    def train(self, client_id: int) -> Split:
        """One client's training data."""
        return self.splits(client_id, "train")[0]

    def client_test(self, client_id: int, split: str = "test") -> Split:
        """One client's share of its domain's test set; the k shares are disjoint."""
        return self.splits(client_id, split)[0]

    def test(self, domain: str, split: str = "test") -> Split:
        """A domain's whole test set: the shares of its clients, one after the other."""
        if domain not in self.domains:
            raise DataError(
                f"{self.name} has no domain {domain!r}, only {', '.join(self.domains)}."
            )
        shares = [self.client_test(client_id, split) for client_id in self.clients_of(domain)]
        return Split(*(np.concatenate(parts) for parts in zip(*shares, strict=True)))

    def clients_of(self, domain: str) -> list[int]:
        """Ids of a domain's clients, ascending."""
        return [client.client_id for client in self.clients if client.domain == domain]

    def splits(self, client_id: int, *names: str) -> list[Split]:
        """One client's data of several splits, ``"train"``, ``"test"`` or ``"validation"``."""
        if not 0 <= client_id < len(self.clients):
            raise DataError(
                f"{self.name} was divided among {len(self.clients)} clients; there is no "
                f"client {client_id}. Run as many SuperNodes as there are clients."
            )
        path = client_file(self.folder, client_id)
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return [Split(arrays[f"x_{name}"], arrays[f"y_{name}"]) for name in names]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(
                f"Cannot read {path} ({error}). Delete the folder {self.folder} and run again."
            ) from error


def client_file(folder: Path, client_id: int) -> Path:
    """A client's own file, uncompressed: ``x_train, y_train, x_test, y_test``.

    And ``x_validation, y_validation``, where such are kept out of training.
    """
    return folder / f"client-{client_id:03d}.npz"


def _expect(holds: bool, **field: object) -> None:
    if not holds:
        ((name, value),) = field.items()
        raise DataError(f"{name} = {shortened(value)}")


def _all(values: Any, holds: Callable[[Any], bool], length: int | None = None) -> bool:
    """True for a tuple all of whose values hold, of this length if one is given."""
    fits = isinstance(values, tuple) and length in (None, len(values))
    return fits and all(map(holds, values))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_count(value: object, least: int = 0) -> bool:
    # Doubles, in which weights are computed, count no further.
    return type(value) is int and least <= value <= 2**53


def _is_finite(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
