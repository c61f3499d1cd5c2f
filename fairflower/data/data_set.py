"""Base classes of data sets, and checks of what data sets return.

A data set has domains with the same classes and different examples. A sensitive attribute of each
example (``data.groups``) may define groups of people.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from inspect import get_annotations
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from fairflower.config import DataConfig
from fairflower.config.text import unknown
from fairflower.data.federation import OVER_DOMAINS, Augment, Floats, Ints, Pixels, check_names
from fairflower.data.files import data_folder, described, logger, read_targets
from fairflower.errors import DataError
from fairflower.tasks import CLASSIFICATION, Targets, Task, task_of

#: Mean and standard deviation of ImageNet per channel, for networks pretrained on ImageNet.
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Opened = TypeVar("Opened")


class DataSet(ABC):
    """Base class of data sets, before their examples are divided among clients.

    Constructing a data set must be cheap, because every client constructs it; only the methods read
    examples. Examples are images unless the data set is a `FeatureSet` or a `TokenSet`. See
    `docs/your-own-parts.md`.

    >>> class Stripes(DataSet):
    ...     image_size = 8
    ...     def all_domains(self):
    ...         return ["light", "dark"]
    ...     def labels(self, domain, split):
    ...         return np.arange(10) % 2
    ...     def images(self, domain, split, rows):
    ...         return np.full((len(rows), 8, 8), 200 if domain == "light" else 50, np.uint8)
    ...     def fingerprint(self):
    ...         return 1
    ...     def source(self, domain):
    ...         return "made by hand"
    >>> Stripes(DataConfig(domains="dark")).domains
    ('dark',)

    `fairflower.testing.check_data` checks a data set.
    """

    #: Kind of the examples: "images", "features" or "tokens".
    kind: ClassVar[str] = "images"
    #: What is learnt, a name with arguments; ``data.task`` replaces it.
    task: str = CLASSIFICATION
    #: Number of classes or, for other tasks, of the network's outputs. None means the length of
    #: ``classes`` or, if it is empty, what the targets say: one more than the largest label.
    num_classes: int | None = None
    #: Class names in the order of the labels, or names of the targets; empty if they have none.
    classes: tuple[str, ...] = ()
    #: Side in pixels to which images are resized, unless ``data.image-size`` is set. None means
    #: that images keep their size, which must then be the same in all domains.
    image_size: ClassVar[int | None] = None
    #: Number of channels, 3 or 1. None means 3 if any domain has color images, else 1.
    channels: ClassVar[int | None] = None
    #: Augmentation of training images.
    augment: ClassVar[Augment] = Augment()
    #: Mean and standard deviation (``std``) per channel, for images in [0, 1].
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    #: Default fraction of a domain's training examples that each client gets. None means that the
    #: domain is divided equally among its clients.
    fraction: ClassVar[float | None] = None
    #: Domain -> published number of training images, to which ``fraction`` refers. The default is
    #: the number of images in the source.
    published_sizes: ClassVar[Mapping[str, int]] = {}
    #: Maximum number of training images of a domain that is divided equally. None means all images.
    domain_size: ClassVar[int | None] = None
    #: Whether ``data.imbalance-factor`` is also the ratio of sizes between a domain's last client
    #: and its first (see `fairflower.data.partition.imbalanced_groups`).
    imbalanced_within: ClassVar[bool] = False
    #: Whether every client gets examples of every class of its domain.
    every_class: ClassVar[bool] = False
    #: Whether a rule chooses the test examples, and not the files or the class.
    redrawable: bool = False
    #: Whether tests also report the AUC.
    auc: ClassVar[bool] = False
    #: Sensitive attribute (a possible value of ``data.groups``) -> names of its groups of people.
    attributes: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: How rows of a table become features, as text (`learn_encoding`), or at a site its sums for
    #: this; empty if they are features. ``given`` is that of all sites, which a site has to use.
    encoding = given = ""

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        if config.task:
            self.task = config.task
        #: The domains to read: those of the clients and the held-out domain.
        self.domains = select_domains(config.domains, self.all_domains(), config.held_out)
        check_names(self.domains)
        if taken := sorted(set(OVER_DOMAINS).intersection(self.domains)):
            raise DataError(
                f"The domain name {taken[0]!r} is reserved for a column in tables. Rename it."
            )

    @property
    def client_domains(self) -> tuple[str, ...]:
        """Return the domains of clients: all domains that are read, except the held-out domain."""
        return tuple(domain for domain in self.domains if domain != self.config.held_out)

    @property
    def folder(self) -> Path | None:
        """Absolute path of the folder with local files. None if no local files are read."""
        return None

    @abstractmethod
    def all_domains(self) -> Sequence[str]:
        """Return the names of all domains, in the default order."""

    @abstractmethod
    def labels(self, domain: str, split: str) -> Targets:
        """Return the targets of a domain's "train" or "test" examples, class numbers int64 [N].

        Other tasks have other targets (`fairflower.tasks`).
        """

    @property
    def group_names(self) -> tuple[str, ...]:
        """Return the names of the groups of people; empty if ``data.groups`` is not set."""
        wanted = self.config.groups
        if wanted and wanted not in self.attributes:
            known = ", ".join(self.attributes) or "it has none"
            raise DataError(
                f"data.groups = {wanted!r}: {self.config.name} has no such attribute ({known}). "
                "Name another attribute, or remove data.groups."
            )
        return self.attributes[wanted] if wanted else ()

    def group_of(self, domain: str, split: str) -> Ints:
        """Return the group of people of each example of a domain, int64 [N].

        ``data.groups`` defines the groups, and they are numbered in the order of `group_names`. A
        subclass with ``attributes`` must define this method.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has attributes, but no method group_of. Define "
            f"{type(self).__name__}.group_of(domain, split)."
        )

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """Return the images of these rows, uint8 [len(rows), H, W] or [len(rows), H, W, 3]."""
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} has no method images. Define {name}.images(domain, split, rows), or derive "
            f"{name} from fairflower.data.FeatureSet or TokenSet."
        )

    def examples(self, domain: str, split: str, rows: Ints) -> Pixels | Floats | Ints:
        """Return the images, features or token ids of these rows.

        Raises ``DataError`` if they do not have the documented type and shape.
        """
        x = np.asarray(self.images(domain, split, rows))
        picture = x.ndim == 3 or (x.ndim == 4 and x.shape[3] in (1, 3))
        if x.dtype != np.uint8 or not picture or len(x) != len(rows):
            expected = f"uint8 [{len(rows)}, H, W] or [{len(rows)}, H, W, 3]"
            raise invalid_values_error(self, domain, split, "images", x, expected)
        return x

    @abstractmethod
    def fingerprint(self) -> Any:
        """Return a JSON value that changes with the examples, such as file sizes and times."""

    @abstractmethod
    def source(self, domain: str) -> str:
        """Describe the source of a domain's examples."""

    def learn_encoding(self, rows: Mapping[str, Ints], site: bool) -> None:  # noqa: B027
        """Learn from these training rows of each domain how examples are encoded.

        It is called before `examples`, with the rows on which clients train; those of a ``site``
        have sums as `encoding`. By default, nothing is learnt.
        """

    def units(self, domain: str, split: str) -> Sequence[str]:
        """Return for each example of a split its patient (``data.patient``, or ``data.redraw``).

        Examples with the same text stay together within their domain.
        """
        setting, name = self.config.unit
        remedy = "Remove the setting" if self.config.patient else "Set it to rows"
        raise DataError(f"{setting} = {name!r}: {self.config.name} has no such column. {remedy}.")

    def places(self, domain: str, split: str, rows: Ints) -> Ints:
        """Return numbers of these rows by which federations are compared (`draw_anew`)."""
        return rows

    def partitioner(self) -> Any:
        """Return a flwr-datasets partitioner that divides a domain's training examples, or None.

        The partitioner receives the column ``label`` and those of `columns`. None means that the
        ``data.*`` settings divide the examples.
        """
        return None

    def columns(self, domain: str, split: str) -> Mapping[str, npt.NDArray[Any]]:
        """Return additional columns for the partitioner, of shape [N], for example the writers.

        If there are any, the partitioner also divides the test examples, and each client is tested
        on the test examples of its partition.
        """
        return {}

    def train_size(self, domain: str, available: int, clients: int) -> int:
        """Return how many of a domain's ``available`` training examples its ``clients`` get."""
        if self.config.examples_per_client:
            return self.config.examples_per_client * clients
        fraction = self.config.fraction or self.fraction
        if fraction is None:
            return min(available, self.domain_size or available)
        # 1e-9, because a product such as 0.29 * 100 = 28.999999999999996 stands for 29.
        return int(fraction * self.published_sizes.get(domain, available) + 1e-9) * clients


class FeatureSet(DataSet):
    """A data set whose examples have D features; a subclass defines `features`.

    As for token ids, settings for images raise an error or (``data.augment``) have no effect.
    Features are standardized by the declared ``mean`` and ``std``, each with D numbers. These must
    be known before the run, for example from a codebook. They are not estimated from clients'
    data, because clients do not share data. By default, features are used unchanged.
    """

    kind = "features"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    #: Names of the features, for ``fairflower data show``. If empty, their numbers are shown.
    feature_names: tuple[str, ...] = ()

    @abstractmethod
    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        """Return the features of these rows, finite float32 [len(rows), D]."""

    def examples(self, domain: str, split: str, rows: Ints) -> Floats:
        x, place = np.asarray(self.features(domain, split, rows)), (self, domain, split, self.kind)
        if x.dtype != np.float32 or x.ndim != 2 or len(x) != len(rows):
            raise invalid_values_error(*place, x, f"float32 [{len(rows)}, D]")
        if not np.isfinite(x).all():
            expected = "finite numbers, without missing values"
            raise invalid_values_error(*place, "NaN or infinity", expected)
        return x


class TokenSet(DataSet):
    """A data set whose examples have L token ids; a subclass defines `tokens` and ``vocabulary``.

    Ids are 0 to ``vocabulary - 1``. Texts with fewer than L tokens are padded at the end with id 0.
    """

    kind = "tokens"
    #: Number of ids, including 0. It must be known before the run, because the model's shape
    #: depends on it.
    vocabulary: ClassVar[int] = 0

    @abstractmethod
    def tokens(self, domain: str, split: str, rows: Ints) -> Ints:
        """Return the token ids of these rows, whole numbers [len(rows), L]."""

    def examples(self, domain: str, split: str, rows: Ints) -> Ints:
        if self.vocabulary < 1:
            raise DataError(
                f"{type(self).__name__}.vocabulary is missing. Set it to the number of token ids, "
                "including 0."
            )
        x, place = np.asarray(self.tokens(domain, split, rows)), (self, domain, split, self.kind)
        if x.dtype.kind not in "iu" or x.ndim != 2 or len(x) != len(rows):
            raise invalid_values_error(*place, x, f"whole numbers [{len(rows)}, L]")
        if x.size and not 0 <= x.min() <= x.max() < self.vocabulary:
            expected = f"0 to vocabulary - 1 = {self.vocabulary - 1}"
            raise invalid_values_error(*place, f"{x.min()} to {x.max()}", expected)
        return x.astype(np.int64)


class DataSetOfFiles(DataSet, Generic[Opened]):
    """A data set that is read from files. Each domain is opened separately, and only once.

    ``title`` is the name of the data set in messages. ``domain_names`` are its domains in the
    default order.
    """

    title: ClassVar[str]
    domain_names: ClassVar[tuple[str, ...]]

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self._opened: dict[str, Opened] = {}

    @cached_property
    def folder(self) -> Path | None:
        """Absolute ``data.dir`` or ``$FAIRFLOWER_DATA``. None means the Hugging Face Hub."""
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
        """Open the images and labels of a domain, without reading all of them into memory."""


def attributes_of(data_set: DataSet) -> dict[str, str]:
    """Return the text of each attribute that a data set may declare, by its name."""
    kind = type(data_set)
    bases = [base for base in kind.__mro__ if base.__module__.startswith("fairflower.")]
    names = {name for base in bases for name in get_annotations(base)}
    # A property may read all files; its own text would differ between processes.
    fixed = [name for name in names if not hasattr(getattr(kind, name, None), "__get__")]
    values = {name: getattr(data_set, name, None) for name in fixed}
    # The text of a long array is abbreviated.
    return {k: repr(v.tolist() if isinstance(v, np.ndarray) else v) for k, v in values.items()}


def labels_of(data_set: DataSet, domain: str, split: str) -> Targets:
    """Return a domain's targets; raise ``DataError`` unless they are valid for its task."""
    values = data_set.labels(domain, split)
    declared = data_set.num_classes or len(data_set.classes) or None
    where = f"{type(data_set).__name__}: {domain}: {split}: labels"
    return read_targets(where, values, declared, data_set.task)


def strata_of(data_set: DataSet, targets: Targets) -> Ints:
    """Return the number by which each example is divided among clients, int64 [N]."""
    return task_of(data_set.task).strata(targets)


def mean_and_std(data_set: DataSet, shape: tuple[int, ...]) -> dict[str, tuple[float, ...]]:
    """Return the data set's declared mean and standard deviation per channel or feature."""
    if data_set.kind == "tokens":
        return {"mean": (), "std": ()}
    mean, std = (tuple(map(float, values)) for values in (data_set.mean, data_set.std))
    if data_set.kind == "images":
        mean, std = mean[: shape[0]], std[: shape[0]]
    elif not (mean or std):
        mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    if not len(mean) == len(std) == shape[0]:
        raise DataError(
            f"{data_set.config.name}: {shape[0]} channels or features, but {len(mean)} means and "
            f"{len(std)} standard deviations. Declare one mean and one standard deviation per "
            f"channel or feature in {type(data_set).__name__}."
        )
    if not (np.isfinite((*mean, *std)).all() and min(std) > 0):
        raise DataError(
            f"{data_set.config.name}: mean = {mean}, std = {std}: expected finite numbers, and "
            "positive ones for std. For a constant column declare std = 1."
        )
    return {"mean": mean, "std": std}


def source_of(data_set: DataSet, domain: str) -> str:
    """Return a text that says where a domain's examples come from; raise ``DataError`` if none."""
    if (source := data_set.source(domain)) and isinstance(source, str):
        return source
    raise DataError(
        f"{data_set.config.name}: source({domain!r}) returned {source!r}. Return a text that says "
        "where the domain's examples come from."
    )


def invalid_values_error(
    data_set: DataSet, domain: str, split: str, what: str, found: object, expected: str
) -> DataError:
    """Return the error for values that a data set must not return; ``what`` is their name."""
    if isinstance(found, np.ndarray):
        found = described(found.dtype, found.shape)
    where = f"{type(data_set).__name__}: {domain}: {split}: {what}"
    return DataError(f"{where}: found {found}; expected {expected}.")


def select_domains(wanted: str, domains: Sequence[str], held_out: str = "") -> tuple[str, ...]:
    """Return the domains in ``data.domains``, or all if it is empty, and last the held-out domain.

    >>> select_domains("b, a", ["a", "b", "c"]), select_domains("", ["a", "b"], held_out="a")
    (('b', 'a'), ('b', 'a'))
    """
    if not (isinstance(domains, Sequence) and all(isinstance(name, str) for name in domains)):
        raise DataError(
            f"all_domains() returned {domains!r}: expected a list or tuple of names, in an order "
            "that is always the same."
        )
    chosen = [name.strip() for name in wanted.split(",")]
    if wanted.strip() in ("", *domains):  # a name may have a comma
        chosen = [wanted.strip()] if wanted.strip() else [*domains]
    for name in chosen:
        if name not in domains:
            raise DataError(f"data.domains = {wanted!r}: {unknown('domain', name, domains)}")
    if len(set(chosen)) < len(chosen):
        raise DataError(f"data.domains = {wanted!r} names a domain twice. Name each domain once.")
    if not held_out:
        return tuple(chosen)
    if held_out not in domains:
        raise DataError(f"data.held-out = {held_out!r}: {unknown('domain', held_out, domains)}")
    if set(chosen) == {held_out}:
        raise DataError(
            f"data.held-out = {held_out!r} leaves no domain to train on. Hold out another domain, "
            "or add domains to data.domains."
        )
    return (*(domain for domain in chosen if domain != held_out), held_out)


def check_classes(name: str, num_classes: int) -> None:
    """Raise ``DataError`` if there is only one class, which any model would predict."""
    if num_classes < 2:
        raise DataError(
            f"{name}: found examples of one class only; expected at least two classes. Add "
            "examples of another class."
        )


def client_count_key(config: DataConfig) -> str:
    """Return the key of the setting that decides the number of clients."""
    return f"data.{'imbalance-factor' if config.imbalance_factor > 1 else 'clients-per-domain'}"


def too_few_examples_error(
    group: str, count: int, what: str, clients: int, remedy: str
) -> DataError:
    """Return the error for fewer examples than clients. With 0 examples, ``remedy`` is not used.

    ``what`` is counted, such as "training examples".
    """
    if not count:
        return DataError(
            f"Domain {group!r} has no {what}. Add examples, or remove the domain from data.domains."
        )
    return DataError(
        f"Domain {group!r} has too few {what}: {count} for {clients} clients. {remedy}."
    )


def check_comparable(
    name: str, groups: str, group_names: Sequence[str], num_classes: int, task: Task
) -> None:
    """Raise ``DataError`` if there is only one group of people, or not exactly two classes."""
    if groups and len(group_names) < 2:
        raise DataError(
            f"data.groups = {groups!r}: found only the group {', '.join(group_names)}; expected at"
            " least two groups. Name another attribute, or remove data.groups."
        )
    if groups and not (task.classes and num_classes == 2):
        found = f"has {num_classes}" if task.classes else "has none"
        raise DataError(
            f"data.groups = {groups!r}: group-fairness metrics need two classes (class 1 is the"
            f" positive class), but {name} {found}. Remove data.groups."
        )


def check_smallest(data_set: DataSet, least: int) -> None:
    """Raise ``DataError`` if fewer than ``least`` examples have a class or group of people.

    Only names and numbers that come from the examples are checked, such as labels in a file. Labels
    that count the classes, 0, 1, 2 and so on without a gap, reveal nothing, nor do names that a
    data set's class declares.
    """
    kind = type(data_set)
    named = isinstance(kind.classes, tuple) and kind.classes
    places = [(domain, split) for split in ("train", "test") for domain in data_set.domains]
    numbers: dict[str, Any] = {}
    if task_of(data_set.task).classes and not (isinstance(kind.num_classes, int) or named):
        numbers["classes"] = partial(labels_of, data_set)
    if data_set.config.groups and kind.group_names is not DataSet.group_names:
        numbers["groups"] = data_set.group_of
    for what, of in numbers.items():
        values = np.concatenate([of(*place) for place in places])
        different, counts = np.unique(values, return_counts=True)
        counted = what == "classes" and not data_set.classes
        gapless = counted and len(counts) == different.max(initial=-1) + 1
        if not gapless and (rare := int((counts < least).sum())):
            raise DataError(
                f"{rare} of the {len(counts)} {what} have fewer than {least} examples here "
                "(data.smallest-group, and smallest-group in the node config), so they may say "
                "who has them. Join them with others, or lower both numbers.",
                public=True,
            )


def check_used(data_set: DataSet, arrays: Mapping[str, Any], least: int) -> None:
    """Raise ``DataError`` if a run uses fewer than ``least`` of a site's examples of a split.

    A site that has no more may use them. Groups of people are counted, so each needs ``least``.
    """
    for split in (split for split in ("train", "test", "validation") if f"y_{split}" in arrays):
        source = "test" if split == "test" else "train"
        has = len(labels_of(data_set, data_set.domains[0], source))
        _, counts = np.unique(arrays.get(f"g_{split}", ()), return_counts=True)
        few = f"the run uses {len(arrays[f'y_{split}'])} of this site's {split} examples"
        if rare := int((counts < least).sum()):
            few = f"{rare} of the groups of people have too few {split} examples here"
        if rare or len(arrays[f"y_{split}"]) < min(least, has):
            raise DataError(
                f"{few}, fewer than {least} (data.smallest-group, and smallest-group in the node "
                "config). Use more examples, join groups, or lower both numbers.",
                public=True,
            )


def groups_of(data_set: DataSet, domain: str, split: str, labels: Ints) -> Ints:
    """Return the groups of people of examples with these labels; raise ``DataError`` if invalid."""
    count, values = len(data_set.group_names), np.asarray(data_set.group_of(domain, split))
    place = data_set, domain, split, "groups"
    if values.dtype != np.int64 or values.shape != labels.shape:
        raise invalid_values_error(*place, values, f"int64 {list(labels.shape)}")
    if len(values) and not 0 <= values.min() <= values.max() < count:
        found = f"numbers from {values.min()} to {values.max()}"
        raise invalid_values_error(*place, found, f"0 to {count - 1}, the indices of group_names")
    return values
