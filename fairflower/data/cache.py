"""Preparation of a data set on disk, once for all runs with the same federation.

A prepared data set is a folder ``<home>/cache/data/<name>-<hash>`` with ``meta.json`` and a few
arrays, of which each client has a range of rows (`fairflower.data.federation.prepared_file`). The
hash covers the version of the preparation, all settings that affect the content, the paths, sizes
and modification times of the source files, and the declared attributes of a user's own data set.
The folder is written under a temporary name and then moved into place, so it is always either
complete or absent, and several processes may prepare the same data set at once.
"""

import hashlib
import json
import logging
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np

from fairflower.config import DataConfig
from fairflower.config.methods import DataSpec
from fairflower.config.settings import OF_TABLES
from fairflower.data.data_set import (
    DataSet,
    FeatureSet,
    TokenSet,
    attributes_of,
    check_classes,
    check_comparable,
    check_smallest,
    check_used,
    groups_of,
    mean_and_std,
    source_of,
)
from fairflower.data.federation import (
    META,
    REMARKS,
    Augment,
    ClientInfo,
    Federation,
    Floats,
    Ints,
    Pixels,
    check_names,
    prepared_file,
)
from fairflower.data.files import Remarks, noted
from fairflower.data.files import logger as data_logger
from fairflower.data.images import corrupt, corruption_text, nearest, to_chw
from fairflower.data.partition import ClientGroup, Units
from fairflower.data.rows import (
    SPLITS,
    Rows,
    divided_rows,
    division_of,
    draw_anew,
    draw_facts,
    test_rows,
)
from fairflower.errors import DataError
from fairflower.machine import release_memory
from fairflower.paths import file_name, home
from fairflower.tasks import CLASSIFICATION, Targets, Task, task_of

logger = logging.getLogger(__name__)

#: Version of the preparation: of the file format, of the random partition, and of how images and
#: texts become arrays. Raise it with every change. Folders of other versions are ignored.
_VERSION = 9

#: Group -> its examples as the data set returns them.
Examples = dict[str, Pixels | Floats | Ints]
#: Name of a prepared file -> its rows; those of a group are one client's after another's.
Arrays = dict[str, Any]


def prepare(
    config: DataConfig, *, site: bool = False, least: int = 1, encoding: str = ""
) -> Federation:
    """Divide a data set among clients, or reuse the result of an earlier call.

    ``config`` is the ``data`` table of a run config; every key except ``augment`` affects the
    prepared files. The data of a single ``site`` have no fingerprint and may lack classes, about
    which a warning is logged otherwise. ``least`` is the smallest number of examples that must
    share the name of a class or group of people. An ``encoding`` of tables is not learnt again.

    Raises ``DataError`` if the data are missing, malformed or too few for the clients, and
    ``ConfigError`` if no data set has this name.
    """
    with noted() as remarks:
        data_set = make_data_set(config)
        data_set.given = encoding
        with DataSpec.read(config.name).naming_failures():
            digest = _hash(data_set, site, least)
            folder = home() / "cache" / "data" / f"{file_name(config.name)}-{digest}"
            if not (folder / META).is_file():
                logger.info("Preparing %s in %s", config.name, folder)
                _build(data_set, folder, site, least, remarks)
                release_memory()
        return _open(folder, config.augment)


def shared_examples(a: DataConfig, b: DataConfig) -> dict[str, float]:
    """Return, for each split, which share of the smaller federation's examples both have, 0 to 1.

    The configs must have the same data set.
    """
    first, second = _held_examples(a), _held_examples(b)
    smaller = {s: max(1, min(len(first[s]), len(second[s]))) for s in first}
    return {s: len(first[s] & second[s]) / smaller[s] for s in first}


def _held_examples(config: DataConfig) -> dict[str, set[tuple[str, int]]]:
    """Return the domains and rows of all clients' examples, by split."""
    data_set = make_data_set(config)
    _, groups, rows = divided_rows(data_set)
    held: dict[str, set[tuple[str, int]]] = {split: set() for split in rows}
    for split, group in product(rows, groups):
        own = np.concatenate(rows[split][group.name])
        places = data_set.places(group.domain, SPLITS[split], own)
        held[split] |= {(group.domain, k) for k in places}
    return held


def with_absolute_dir(config: DataConfig) -> DataConfig:
    """Return the config with an absolute ``dir``, taken from ``data.dir`` or $FAIRFLOWER_DATA.

    With this config, processes in another working directory or environment prepare the same data.
    """
    folder = make_data_set(config).folder
    if folder is None and config.dir:  # a user's own data set may read it
        folder = Path(config.dir).expanduser().absolute()
    return replace(config, dir=str(folder)) if folder else config


@lru_cache(maxsize=8)
def _open(folder: Path, augment: bool) -> Federation:
    """Open a folder once per process, so that all callers share the cached values."""
    federation = Federation.open(folder)
    return federation if augment else replace(federation, augment=Augment())


def make_data_set(config: DataConfig) -> DataSet:
    """Create the data set that ``data.name`` selects, before it is divided."""
    chosen = DataSpec.read(config.name)
    chosen.check()
    data_set: DataSet = chosen.make(config)
    if not data_set.domains:
        where = f" in data.dir = {config.dir!r}" if config.dir else ""
        raise DataError(f"{config.name} found no domain{where}. Correct data.dir.")
    if config.redraw:
        if not chosen.own:
            raise DataError(
                f"data.redraw = {config.redraw!r}: {config.name} has published test examples. "
                "Remove data.redraw."
            )
        draw_anew(data_set)
    return data_set


def _hash(data_set: DataSet, site: bool, least: int) -> str:
    settings = {**vars(data_set.config), "domains": data_set.domains, "site": site}
    # Not part of the content, or covered by the fingerprint or by `least`.
    unset = [key for key in ("patient", *OF_TABLES) if not settings[key]]
    for key in ("augment", "dir", "smallest_group", *unset):
        del settings[key]
    settings |= {"least": least} if least > 1 else {}
    settings |= {"encoding": data_set.given} if data_set.given else {}
    settings |= {"task": data_set.task} if data_set.task != CLASSIFICATION else {}
    content = [_VERSION, settings, data_set.fingerprint()]
    if not type(data_set).__module__.startswith("fairflower."):  # others change with `_VERSION`
        content.append(attributes_of(data_set))
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]


def _build(data_set: DataSet, folder: Path, site: bool, least: int, remarks: Remarks) -> None:
    if least > 1:
        check_smallest(data_set, least)
    federation, groups = _divide(data_set, folder, site)
    if site and least > 1:
        check_used(data_set, groups[0], least)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as scratch:
            fresh = Path(scratch, folder.name)
            fresh.mkdir(mode=0o700)  # patients' images may be in it
            for name in {name: None for arrays in groups for name in arrays}:
                _write(prepared_file(fresh, name), [a[name] for a in groups if name in a])
            (fresh / META).write_text(federation.to_json(), encoding="utf-8")
            if remarks:
                (fresh / REMARKS).write_text(json.dumps(list(dict.fromkeys(remarks))))
            fresh.rename(folder)
    except OSError as error:
        if (folder / META).is_file():
            return  # another process was first
        raise DataError(
            f"Cannot write the prepared data to {folder} ({error}). "
            "Delete that folder if it exists, or set FAIRFLOWER_HOME to another folder."
        ) from error


def _write(path: Path, parts: list[Any]) -> None:
    """Write arrays one after another as a single array, without a copy of it in memory."""
    shape = sum(map(len, parts)), *parts[0].shape[1:]
    header = {"descr": parts[0].dtype.str, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for part in parts:
            file.write(np.ascontiguousarray(part).data)


def _divide(data_set: DataSet, folder: Path, site: bool) -> tuple[Federation, list[Arrays]]:
    """Return the federation, and arrays: of each group, of the held-out domain, and of `_ends`."""
    config = data_set.config
    labels, groups, rows = divided_rows(data_set)
    unseen = []  # the held-out domain, if any, as a group without training examples
    if config.held_out:
        unseen = [ClientGroup(config.held_out, config.held_out, np.empty(0, np.int64), (1,))]
    if config.held_out in rows["train"]:
        raise DataError(
            f"data.held-out = {config.held_out!r} is also the name of a group of clients. Rename "
            "this domain."
        )
    unseen_rows = {
        group.name: test_rows(config, group, Units.single(labels["test"][group.domain]))
        for group in unseen
    }
    divided = {**rows, "test": rows["test"] | unseen_rows}
    data_set.learn_encoding(_trained(groups, rows["train"]), site)
    examples = {s: _examples(data_set, [*groups, *unseen], divided[s], SPLITS[s]) for s in divided}
    shape = _shape(data_set, examples)
    task = task_of(data_set.task)  # of a table, `learn_encoding` has learnt the scale
    num_classes = _num_outputs(data_set, labels, task, site)
    data = {
        group.name: _arrays(data_set, group, divided, examples, labels, shape)
        for group in (*groups, *unseen)
    }
    clients: list[ClientInfo] = []
    for group in groups:
        for y in _by_client(data[group.name]["y_train"], rows["train"][group.name]):
            counts = np.bincount(y, minlength=num_classes).tolist() if task.classes else []
            clients.append(ClientInfo(len(clients), group.name, len(y), tuple(counts)))
    domains = tuple(group.name for group in groups)
    check_names((*data_set.classes, *data_set.group_names))
    federation = Federation(
        name=config.name,
        folder=folder,
        domains=domains,
        sources=tuple(_source(data_set, group, shape) for group in groups),
        num_classes=num_classes,
        shape=shape,
        **mean_and_std(data_set, shape),
        augment=data_set.augment,
        test_sizes=_sizes(rows["test"]),
        clients=tuple(clients),
        auc=data_set.auc,
        classes=data_set.classes,
        # A site's would tell the server whether its guess of the data is right.
        fingerprint="" if site else _fingerprint(data, divided),
        validation_sizes=_sizes(rows.get("validation", {})),
        held_out=config.held_out,
        held_out_size=sum(_sizes(unseen_rows)),
        division="" if site else division_of(data_set, groups, rows),
        redraw={} if site else draw_facts(data_set, groups, rows, labels),
        groups=config.groups,
        group_names=data_set.group_names,
        task=data_set.task,
        encoding=data_set.encoding,
    )
    return federation, [*data.values(), {f"ends_{s}": _ends(divided[s]) for s in divided}]


def _trained(groups: list[ClientGroup], rows: Rows) -> dict[str, Ints]:
    """Return the rows of each domain on which any client trains, int64 [N]."""
    by_domain: dict[str, list[Ints]] = {}
    for group in groups:
        by_domain.setdefault(group.domain, []).extend(rows[group.name])
    return {domain: np.unique(np.concatenate(own)) for domain, own in by_domain.items()}


def _num_outputs(
    data_set: DataSet, labels: Mapping[str, Mapping[str, Targets]], task: Task, site: bool
) -> int:
    """Return the number of classes or outputs; raise ``DataError`` if targets do not fit together.

    A single ``site`` may lack classes.
    """
    config = data_set.config
    sizes = {y.shape[1:]: domain for of in labels.values() for domain, y in of.items()}
    if len(sizes) > 1:
        texts = (f"{domain} {list(size)}" for size, domain in sizes.items())
        raise DataError(f"{config.name}: targets differ in shape: {', '.join(texts)}.")
    trained, tested = (np.concatenate([*labels[s].values()]) for s in ("train", "test"))
    most = max(task.num_outputs(y) for y in (trained, tested))
    count = data_set.num_classes or len(data_set.classes) or most
    if not site:
        if task.classes:
            check_classes(config.name, count)
            _warn_of_classes(data_set, count, np.unique(trained), np.unique(tested))
        elif problem := task.pointless(trained):
            raise DataError(
                f"{config.name}: found {problem}. Correct the targets, or add examples."
            )
        check_comparable(config.name, config.groups, data_set.group_names, count, task)
    return count


def _arrays(
    data_set: DataSet,
    group: ClientGroup,
    rows: Mapping[str, Rows],
    examples: Mapping[str, Examples],
    labels: Mapping[str, Mapping[str, Targets]],
    shape: tuple[int, ...],
) -> Arrays:
    """Return a group's arrays: for each split x, y and, if there are groups of people, g.

    x are contiguous, and images are in the layout for training and corrupted if the group is.
    """
    arrays: Arrays = {}
    config, domain, task = data_set.config, group.domain, task_of(data_set.task)
    for split in (s for s in rows if group.name in rows[s]):
        order, source = np.concatenate(rows[split][group.name]), SPLITS[split]
        x: Any = examples[split][group.name]
        size = x.shape[1:3]
        x = to_chw(x, *shape) if len(shape) == 3 else np.ascontiguousarray(x)
        if group.corrupted and len(shape) == 3:
            how = config.corruption, config.severity
            x = corrupt(x, order, *how, seed=config.seed, domain=domain, split=source)
        y = labels[source][domain]
        if config.groups:
            arrays[f"g_{split}"] = groups_of(data_set, domain, source, y)[order]
        y = y[order]
        if task.pixelwise and len(shape) == 3:
            if y.shape[1:] != size:
                found, expected = ("x".join(map(str, side)) for side in (y.shape[1:], size))
                raise DataError(
                    f"{config.name}: {domain}: found masks of {found} pixels; expected {expected}, "
                    "the images' size."
                )
            y = nearest(y, shape[1:])
        arrays |= {f"x_{split}": x, f"y_{split}": y}
    return arrays


def _by_client(array: Any, shares: Iterable[Ints]) -> list[Any]:
    """Divide an array of a group's clients, each of which has as many rows as its share."""
    return np.split(array, np.cumsum([len(share) for share in shares])[:-1])


def _ends(rows: Rows) -> Ints:
    """Return 0, and the end of each client's rows in the arrays of all groups."""
    sizes = (len(share) for by_client in rows.values() for share in by_client)
    return np.cumsum([0, *sizes], dtype=np.int64)


def _fingerprint(groups: Mapping[str, Arrays], rows: Mapping[str, Rows]) -> str:
    """Return `Federation.fingerprint`, from the arrays of each client in turn."""
    digest = hashlib.sha256()
    splits = "train", "test", "validation"
    order = [*(f"{axis}_{s}" for s in splits for axis in "xy"), *(f"g_{s}" for s in splits)]
    for group, arrays in groups.items():
        names = [name for name in order if name in arrays]
        shares = (_by_client(arrays[name], rows[name[2:]][group]) for name in names)
        for array in (array for client in zip(*shares, strict=True) for array in client):
            digest.update(f"{array.dtype.str} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _sizes(rows: Rows) -> tuple[int, ...]:
    return tuple(sum(map(len, by_client)) for by_client in rows.values())


def _warn_of_classes(data_set: DataSet, num_classes: int, train: Ints, test: Ints) -> None:
    """Warn about classes without examples, and about classes that have only test examples."""
    names, start = data_set.classes or range(num_classes), f"{data_set.config.name}: "
    if empty := [str(names[k]) for k in np.setdiff1d(range(num_classes), [*train, *test])]:
        remedy = "" if data_set.classes else " Number labels from 0, without gaps."
        text = f"out of {num_classes} classes, these have no examples: {shortened(empty)}.{remedy}"
        data_logger.warning(start + text)
    if unlearnt := [str(names[k]) for k in np.setdiff1d(test, train)]:
        text = f"these classes have test examples, but no training examples: {shortened(unlearnt)}."
        data_logger.warning(start + text)


def _examples(data_set: DataSet, groups: list[ClientGroup], rows: Rows, split: str) -> Examples:
    """Read each group's examples in the order of its rows, and each row of a domain only once."""
    examples: Examples = {}
    for domain in dict.fromkeys(group.domain for group in groups if group.name in rows):
        wanted = {g.name: np.concatenate(rows[g.name]) for g in groups if g.domain == domain}
        distinct = np.unique(np.concatenate(list(wanted.values())))
        read = data_set.examples(domain, split, distinct)
        examples |= {name: read[np.searchsorted(distinct, rs)] for name, rs in wanted.items()}
    return examples


def _shape(data_set: DataSet, examples: Mapping[str, Examples]) -> tuple[int, ...]:
    """Return `Federation.shape`, the common shape of all examples."""
    shapes = [x.shape[1:] for by_group in examples.values() for x in by_group.values()]
    if isinstance(data_set, FeatureSet | TokenSet):
        if len(set(shapes)) > 1:
            raise DataError(
                f"{data_set.config.name}: examples have different numbers of {data_set.kind} "
                f"({_sizes_in(examples)}). Give all examples the same number."
            )
        vocabulary = (data_set.vocabulary,) if isinstance(data_set, TokenSet) else ()
        return *vocabulary, *shapes[0]
    color = any(shape[2:] == (3,) for shape in shapes)
    channels = data_set.channels or (3 if color else 1)
    if color and channels == 1:
        raise DataError(
            f"{data_set.config.name}: found color images, but {type(data_set).__name__}.channels "
            "is 1. Set it to 3 or None, or return gray images."
        )
    if side := data_set.config.image_size or data_set.image_size:
        return channels, side, side
    if len({shape[:2] for shape in shapes}) > 1:
        raise DataError(
            f"The images differ in size ({_sizes_in(examples)}). Set data.image-size to resize "
            "them all."
        )
    return channels, *shapes[0][:2]


def _sizes_in(examples: Mapping[str, Examples]) -> str:
    """Describe the size of each group's examples, for each split if the splits differ."""
    sizes: dict[str, dict[str, str]] = {}  # group -> size -> the last split of this size
    for split, by_group in examples.items():
        for name, x in by_group.items():
            sizes.setdefault(name, {})["x".join(map(str, x.shape[1:3]))] = SPLITS[split]
    several = {name: [f"{s} in {split}" for s, split in of.items()] for name, of in sizes.items()}
    shown = {name: several[name] if len(of) > 1 else list(of) for name, of in sizes.items()}
    return ", ".join(f"{name} {' and '.join(texts)}" for name, texts in shown.items())


def _source(data_set: DataSet, group: ClientGroup, shape: tuple[int, ...]) -> str:
    """Describe the source of a group's examples and, if they are corrupted, the corruption."""
    source = source_of(data_set, group.domain)
    if not group.corrupted:
        return source
    config = data_set.config
    return f"{source} with {corruption_text(config.corruption, config.severity, min(shape[1:]))}"
