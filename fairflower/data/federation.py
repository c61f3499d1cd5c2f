"""Reader of a prepared data set on disk. Its only third-party import is NumPy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fairflower.arguments import Count, Finite, Name, Range, conform
from fairflower.config.methods import TaskSpec
from fairflower.errors import DataError, is_text, quoted
from fairflower.files import read_npy_header
from fairflower.numerics.metrics import AVG, GAP, MIN, STD
from fairflower.registry import KINDS
from fairflower.tasks import CLASSIFICATION, Targets, Task, task_of

#: Files of a prepared folder: the federation, and what was said while it was prepared.
META, REMARKS = "meta.json", "remarks.json"

#: Titles of statistics over all domains in tables and callbacks; no domain may have these names.
OVER_DOMAINS = (*(row.title for row in (AVG, STD, MIN, GAP)), AVG.phrase)

Positive = Annotated[int, Range(1, 2**53)]
Pixels = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


class Split(NamedTuple):
    """Examples and their targets: class numbers int64 [N], or others (`fairflower.tasks`).

    Images are uint8 [N, C, H, W] and their masks uint8 [N, H, W], features float32 [N, D], token
    ids int64 [N, L].
    """

    x: Pixels | Floats | Ints
    y: Targets


@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images, drawn anew each time an image is used.

    The image is padded with ``crop_padding`` black pixels on each side and cropped to its original
    size at random. With ``horizontal_flip``, it is mirrored with probability 0.5.
    """

    crop_padding: Count = 0
    horizontal_flip: bool = False


@dataclass(frozen=True)
class ClientInfo:
    """A client's domain, and its number of training examples in total and per class.

    ``class_counts`` is empty if the targets are no classes.
    """

    client_id: Count
    domain: Name
    num_examples: Positive
    class_counts: tuple[Count, ...]


@dataclass(frozen=True)
class Federation:
    """A data set divided among clients by `fairflower.data.prepare`, read from its folder.

    Opening a federation reads only a JSON file. ``train`` and ``client_test`` read the examples of
    a single client. Every call reads them again, so the caller may change the arrays. The argument
    ``split`` is ``"train"``, ``"test"`` or ``"validation"``. Validation examples exist if
    a setting holds them out of the training examples, for tuning hyper-parameters.
    """

    #: Name of the data set.
    name: str
    #: Folder of the prepared data.
    folder: Path
    #: Names of the groups of clients, in the order of the clients: the data set's domains, or a
    #: clean and a corrupted group for each domain.
    domains: tuple[Name, ...]
    #: Source of each domain's examples, as text.
    sources: tuple[str, ...]
    #: Number of classes or, for other tasks, of the network's outputs.
    num_classes: Positive
    #: Shape of every example: (C, H, W) for images, (D,) for features, and (V, L) for L token ids
    #: below V (the shape of one-hot vectors).
    shape: tuple[Positive, ...]
    #: Mean and standard deviation (``std``), per channel for images in [0, 1] or per feature. Empty
    #: for token ids.
    mean: tuple[Finite, ...]
    std: tuple[Finite, ...]
    #: Augmentation of training images; ``Augment()`` if ``data.augment`` is false.
    augment: Augment
    #: Number of test examples per domain.
    test_sizes: tuple[Count, ...]
    #: Clients, indexed by ``client_id`` (also Flower's partition id) and sorted by domain.
    clients: tuple[ClientInfo, ...]
    #: Whether tests also report the AUC.
    auc: bool = False
    #: Names of classes or targets; empty if they have only numbers.
    classes: tuple[Name, ...] = ()
    #: SHA-256 of all clients' examples, the same wherever the data are prepared; empty for a site
    #: and for a federation of sites.
    fingerprint: str = ""
    #: Number of validation examples per domain; empty if none are held out.
    validation_sizes: tuple[Count, ...] = ()
    #: Domain that is held out from all clients. It is not in ``domains``. Empty if there is none.
    held_out: str = ""
    #: Number of test examples of the held-out domain.
    held_out_size: Count = 0
    #: Digest of which examples each client has, whatever their order; empty as ``fingerprint``.
    division: str = ""
    #: Expected share of the "train" and "test" examples that another draw (``data.seed``) has, too,
    #: the number of "unused" training examples and, with ``data.redraw``, of "tests per training
    #: example". Empty as above.
    redraw: dict[str, Finite] = field(default_factory=dict)
    #: Sensitive attribute that divides people into groups; empty if there is none.
    groups: str = ""
    #: Names of the groups of people, in the order of their numbers.
    group_names: tuple[Name, ...] = ()
    #: What is learnt, a name with arguments; see `fairflower.tasks`.
    task: str = CLASSIFICATION
    #: How rows of a table become features, or a site's sums (`fairflower.tables`), or empty.
    encoding: str = ""

    def __hash__(self) -> int:
        """Hash only a few fields, because workers look up the federation of every message."""
        return hash((self.name, self.folder, self.fingerprint))

    @classmethod
    def open(cls, folder: str | Path) -> Federation:
        """Open a prepared folder.

        Raises ``DataError`` if the folder was not written by `fairflower.data.prepare`.
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
        """Return the federation that ``to_json`` wrote; ``folder`` need not contain its data."""
        counts: dict[str, tuple[int, ...]] = {}

        def client_in(entry: dict[str, Any]) -> Any:  # at once: all entries would take more memory
            if "class_counts" not in entry:
                return entry
            values = entry["class_counts"]
            entry["class_counts"] = counts.setdefault(str(values), tuple(values))  # most are equal
            if isinstance(entry["domain"], str):
                entry["domain"] = sys.intern(entry["domain"])
            return ClientInfo(**entry)

        meta: dict[str, Any] = json.loads(text, object_hook=client_in)
        if not all(isinstance(client, ClientInfo) for client in meta["clients"]):
            raise ValueError("a client has no class_counts")
        augment = Augment(**meta.pop("augment"))
        rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in meta.items()}
        return cls(folder=folder, augment=augment, **rest)

    def to_json(self) -> str:
        """Return the text of ``meta.json``."""
        meta = by_field(self)
        del meta["folder"]
        if not self.encoding:  # as earlier versions wrote it, whose digests are compared
            del meta["encoding"]
        return json.dumps(meta, default=by_field)

    def check(self, own: str = "") -> None:
        """Check the fields of a federation, because ``from_json`` accepts any values.

        Its task must be known here (`check_known`), or be this site's ``own``.

        Raises ``DataError`` if a field does not have the type, length and range documented above,
        if a client has no examples, or if its ``class_counts`` do not sum to ``num_examples``.
        """
        try:
            conform(self, Federation)
            check_known(self.task, own)
        except ValueError as error:
            raise DataError(str(error)) from error
        domains, classes, groups, shape = self.domains, self.classes, self.group_names, self.shape
        distinct = 0 < len(set(domains)) == len(domains)
        _expect(self, "domains", distinct and not set(OVER_DOMAINS) & set(domains))
        _expect(self, "classes", len(set(classes)) == len(classes) in (0, self.num_classes))
        _expect(self, "shape", len(shape) in KINDS)
        images, scaled = self.kind == "images", 0 if self.kind == "tokens" else shape[0]
        _expect(self, "shape", not images or shape[0] in (1, 3))
        _expect(self, "mean", len(self.mean) == scaled)
        _expect(self, "std", len(self.std) == scaled and min(self.std, default=1) > 0)
        most = max(shape[1:]) if images else 0
        _expect(self.augment, "crop_padding", self.augment.crop_padding <= most)
        _expect(self, "sources", len(self.sources) == len(domains))
        _expect(self, "test_sizes", len(self.test_sizes) == len(domains))
        _expect(self, "validation_sizes", len(self.validation_sizes) in (0, len(domains)))
        unseen = self.held_out not in (*domains, *OVER_DOMAINS) and "\r" not in self.held_out
        _expect(self, "held_out", unseen)
        _expect(self, "held_out_size", bool(self.held_out_size) == bool(self.held_out))
        named = bool(self.groups) == bool(groups) and len(set(groups)) == len(groups)
        _expect(self, "group_names", named)
        _expect(self, "clients", bool(self.clients))
        counts_classes = self.learns.classes
        for k, client in enumerate(self.clients):
            _expect(client, "client_id", client.client_id == k)
            _expect(client, "domain", client.domain in domains)
            if counts_classes:
                _expect(client, "num_examples", client.num_examples == sum(client.class_counts))
            counted = self.num_classes if counts_classes else 0
            _expect(client, "class_counts", len(client.class_counts) == counted)

    @property
    def kind(self) -> str:
        """Kind of the examples: ``"images"``, ``"features"`` or ``"tokens"``."""
        return KINDS[len(self.shape)]

    @property
    def learns(self) -> Task:
        """What is learnt."""
        return task_of(self.task)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Class names, or the class numbers as text if the classes have no names."""
        return self.classes or tuple(map(str, range(self.num_classes)))

    @property
    def digest(self) -> str:
        """The first 8 characters of ``fingerprint``, for tables."""
        return self.fingerprint[:8]

    @property
    def remarks(self) -> list[tuple[str, str]]:
        """Levels and texts of what was said while the data were prepared; they stay here."""
        path = self.folder / REMARKS
        return [*map(tuple, json.loads(path.read_text()))] if path.is_file() else []

    def train(self, client_id: int) -> Split:
        """Return the training examples of a client."""
        return self.splits(client_id, "train")[0]

    def train_of_all(self) -> Split:
        """Return the training examples of all clients, in the clients' order."""
        return self._read("train", 0, len(self.clients) - 1)

    def sizes(self, split: str) -> tuple[int, ...]:
        """Return the number of ``"test"`` or ``"validation"`` examples per domain."""
        return self.test_sizes if split == "test" else self.validation_sizes

    def client_test(self, client_id: int, split: str = "test") -> Split:
        """Return a client's part of its domain's test set.

        No two clients share an example, but clean and corrupted clients of a domain are tested on
        versions of the same examples.
        """
        return self.splits(client_id, split)[0]

    def test(self, domain: str, split: str = "test") -> Split:
        """Return a domain's test set, or its examples in another split, in the clients' order.

        The held-out domain has only the split ``"test"``.
        """
        return self._read(split, *self._clients_in(domain, split))

    def targets(self, domain: str, split: str = "test") -> Targets:
        """Return the targets of a domain's examples, without reading the examples."""
        return self._arrays("y", split, *self._clients_in(domain, split))[0]

    def _clients_in(self, domain: str, split: str) -> tuple[int, int]:
        """Return a domain's first and last client; the held-out domain is as one more client."""
        if domain and (domain, split) == (self.held_out, "test"):
            return (len(self.clients),) * 2
        if domain not in self.domains:
            raise DataError(
                f"{self.name} has no domain {domain!r}. Its domains are {', '.join(self.domains)}."
            )
        clients = self.clients_of(domain)
        return clients[0], clients[-1]

    def clients_of(self, domain: str) -> list[int]:
        """Return the ids of a domain's clients in ascending order."""
        return [client.client_id for client in self.clients if client.domain == domain]

    def splits(self, client_id: int, *names: str) -> list[Split]:
        """Return several splits of a client's data: "train", "test" or "validation"."""
        if not 0 <= client_id < len(self.clients):
            raise DataError(
                f"{self.name} was divided among {len(self.clients)} clients; there is no client "
                f"{client_id}. Start exactly one SuperNode per client."
            )
        return [self._read(name, client_id, client_id) for name in names]

    def groups_of(self, client_id: int, split: str = "test") -> Ints:
        """Return the group number of each person in a client's split, int64 [N]."""
        return self._arrays("g", split, client_id, client_id)[0]

    def test_groups(self, domain: str, split: str = "test") -> list[Ints]:
        """Return the group numbers of a domain's test examples, one array per client."""
        first, last = self._clients_in(domain, split)
        ends = self._rows(f"ends_{split}", first, last + 2)
        groups = self._rows(f"g_{split}", ends[0], ends[-1])
        return np.split(groups, ends[1:-1] - ends[0])

    def _read(self, split: str, first: int, last: int) -> Split:
        """Read the examples of the clients from ``first`` to ``last``."""
        return Split(*self._arrays("xy", split, first, last))

    def _arrays(self, axes: str, split: str, first: int, last: int) -> list[npt.NDArray[Any]]:
        ends = self._rows(f"ends_{split}", first, last + 2)
        return [self._rows(f"{axis}_{split}", ends[0], ends[-1]) for axis in axes]

    def _rows(self, name: str, first: int, last: int) -> npt.NDArray[Any]:
        """Read rows of a prepared array. Raises ``DataError`` if it cannot be read."""
        path = prepared_file(self.folder, name)
        try:
            with path.open("rb") as file:
                (_, *shape), _, dtype = read_npy_header(file)
                each = math.prod(shape)
                file.seek(int(first) * each * dtype.itemsize, 1)
                values = np.fromfile(file, dtype, int(last - first) * each)
            return values.reshape(last - first, *shape)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(
                f"Cannot read {path} ({error}). Delete the folder {path.parent} and run again."
            ) from error


def prepared_file(folder: Path, name: str) -> Path:
    """Return the path of an array of all clients, in NumPy's format.

    For each split there are ``x_<split>`` and ``y_<split>`` and, with groups of people,
    ``g_<split>``, with the clients' rows one after another and then those of the held-out domain.
    ``ends_<split>`` has 0 and the end of each one's rows.
    """
    return folder / f"{name}.npy"


def by_field(item: Any) -> dict[str, Any]:
    """Return the values of a dataclass's fields; unlike ``asdict``, they are not copied."""
    return {name: getattr(item, name) for name in item.__dataclass_fields__}


def _expect(item: object, name: str, holds: bool) -> None:
    if not holds:
        raise DataError(f"{name} = {shortened(getattr(item, name))}")


def check_names(names: Iterable[str]) -> None:
    """Raise ``DataError`` if a run folder cannot store the name of a domain, class or group."""
    if wrong := [name for name in names if not is_text(name) or "\r" in name]:
        raise DataError(
            f"{quoted(wrong[0])}: the name of a domain, class or group has a null byte, a "
            "carriage return or a character that UTF-8 cannot encode. Rename it."
        )


def check_known(text: str, own: str = "") -> None:
    """Raise ``ValueError`` if a text of another machine names code that is not in use here.

    A task is built in, of an installed package or ``own``, or this process has its module already.
    """
    name = TaskSpec.read(text).name
    known = name in TaskSpec.REGISTRY.data or name in TaskSpec.REGISTRY.offers() or text == own
    if not known and name.partition(":")[0] not in sys.modules:
        raise ValueError(f"task = {quoted(text)}: not the task of this run's data or data.task")
