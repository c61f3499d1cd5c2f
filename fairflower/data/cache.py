"""Preparing a benchmark once, and finding it again.

A prepared benchmark is a folder ``<home>/cache/data/<name>-<hash>`` with ``meta.json`` and
one file per client. The hash covers all that decides its contents: the settings, and the
source files' paths, sizes and times. The folder is written elsewhere and moved into place,
so it is either complete or absent, and processes may prepare the same one at once.
"""

from __future__ import annotations

import hashlib
import json
import logging
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

import numpy as np

from fairflower.config import DataConfig, DataSpec
from fairflower.data.client_groups import ClientGroup, client_groups
from fairflower.data.corruptions import corrupt, corruption_text
from fairflower.data.data_set import DataSet, client_count_key, too_few
from fairflower.data.federation import (
    META,
    Augment,
    ClientInfo,
    Federation,
    Floats,
    Ints,
    Pixels,
    Split,
    client_file,
)
from fairflower.data.images import to_chw
from fairflower.data.partition import divide, split_rng
from fairflower.data.validation import hold_out, set_aside
from fairflower.data.vectors import FeatureSet, TokenSet
from fairflower.errors import DataError
from fairflower.paths import file_name, home

logger = logging.getLogger(__name__)

#: Raise it when the files or the draw change; older folders are then left alone.
_FORMAT = 4

#: What a client's examples are for -> of which examples of the data set they are.
SPLITS = {"train": "train", "validation": "train", "test": "test"}
#: Group -> the rows of each of its clients, int64 [n].
Rows = dict[str, list[Ints]]
#: Group -> examples, as a data set reads them.
Found = dict[str, Pixels | Floats | Ints]


def prepare(config: DataConfig, *, site: bool = False) -> Federation:
    """Divide a benchmark among clients, or open it if that was done before.

    Of a run config's ``data`` table ``augment`` is the only key that needs no other folder.
    Classes without images are warned of, but not of a ``site``, which may lack some. ``DataError``
    if the data is missing or malformed, or too little for the clients. ``ConfigError`` if there is
    no such data set.
    """
    data_set = make_data_set(config)
    folder = home() / "cache" / "data" / f"{file_name(config.name)}-{_hash(config, data_set)}"
    if not (folder / META).is_file():
        logger.info("Preparing %s in %s", config.name, folder)
        _build(data_set, folder, site)
    return _open(folder, config.augment)


def with_absolute_dir(config: DataConfig) -> DataConfig:
    """The config with ``dir`` absolute and no longer dependent on $FAIRFLOWER_DATA.

    For a process that prepares the same data elsewhere: another working directory or
    environment, as Flower's clients have.
    """
    folder = make_data_set(config).folder
    return replace(config, dir=str(folder)) if folder else config


@lru_cache(maxsize=8)
def _open(folder: Path, augment: bool) -> Federation:
    """One object for all who ask, so that what it has found of its data is found once."""
    federation = Federation.open(folder)
    return federation if augment else replace(federation, augment=Augment())


def make_data_set(config: DataConfig) -> DataSet:
    """The benchmark that ``data.name`` names, not yet divided."""
    chosen = DataSpec.read(config.name)
    chosen.check()
    data_set: DataSet = chosen.factory(config, **chosen.args)
    return data_set


def _hash(config: DataConfig, data_set: DataSet) -> str:
    settings = {**vars(config), "domains": data_set.domains}
    for elsewhere in ("augment", "dir"):  # not in the files; in the fingerprint
        del settings[elsewhere]
    for since in ("validation_fraction", "validation_examples"):  # not in earlier folders
        if not settings[since]:
            del settings[since]
    return _digest([_FORMAT, settings, data_set.fingerprint()])[:12]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _build(data_set: DataSet, folder: Path, site: bool) -> None:
    federation, splits = _divide(data_set, folder, site)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=folder.parent) as scratch:
            fresh = Path(scratch, folder.name)
            fresh.mkdir(mode=0o700)  # patients' images may be in it
            for client_id, own in enumerate(splits):
                pairs = [(f"{axis}_{s}", getattr(own[s], axis)) for s in own for axis in "xy"]
                np.savez(client_file(fresh, client_id), **dict(pairs))
            (fresh / META).write_text(federation.to_json(), encoding="utf-8")
            fresh.rename(folder)
    except OSError as error:
        if (folder / META).is_file():
            return  # another process was first
        raise DataError(
            f"Cannot write the prepared data to {folder} ({error}). "
            "Delete that folder if it exists, or set FAIRFLOWER_HOME to another place."
        ) from error


def _divide(
    data_set: DataSet, folder: Path, site: bool
) -> tuple[Federation, list[dict[str, Split]]]:
    """The federation, and each client's data by what they are for."""
    config, domains = data_set.config, data_set.domains
    labels = {s: {d: data_set.labels(d, s) for d in domains} for s in ("train", "test")}
    parts = client_groups(data_set, labels["train"])
    rows = _rows(data_set, parts, labels)
    found = {s: _examples(data_set, parts, rows[s], SPLITS[s]) for s in rows}
    shape = _shape(data_set, found)
    mean, std = _mean_and_std(data_set, shape)
    trained, tested = (np.unique(np.concatenate([*labels[s].values()])) for s in labels)
    largest = max(int(trained[-1]), int(tested[-1]))
    num_classes = data_set.num_classes or len(data_set.classes) or 1 + largest
    if not site:
        _warn_of_classes(data_set, num_classes, trained, tested)
    clients: list[ClientInfo] = []
    data: list[dict[str, Split]] = []
    for part in parts:
        shares: dict[str, list[Split]] = {}
        for s, source in ((s, SPLITS[s]) for s in rows):
            own = rows[s][part.name]
            examples = _to_training_layout(config, part, found[s][part.name], own, source, shape)
            x = np.split(examples, np.cumsum([len(share) for share in own])[:-1])
            y = [labels[source][part.domain][share] for share in own]
            shares[s] = [Split(*pair) for pair in zip(x, y, strict=True)]
        for splits in zip(*shares.values(), strict=True):
            data.append(dict(zip(shares, splits, strict=True)))
            labels_of = data[-1]["train"].y
            counts = tuple(np.bincount(labels_of, minlength=num_classes).tolist())
            clients.append(ClientInfo(len(clients), part.name, len(labels_of), counts))
    federation = Federation(
        name=config.name,
        folder=folder,
        domains=tuple(part.name for part in parts),
        sources=tuple(_source(data_set, part, shape) for part in parts),
        num_classes=num_classes,
        shape=shape,
        mean=mean,
        std=std,
        augment=data_set.augment,
        test_sizes=_sizes(rows["test"]),
        clients=tuple(clients),
        auc=data_set.auc,
        classes=data_set.classes,
        fingerprint=_digest(
            {s: {name: [r.tolist() for r in own] for name, own in rows[s].items()} for s in rows}
        ),
        validation_sizes=_sizes(rows.get("validation", {})),
    )
    return federation, data


def _sizes(rows: Rows) -> tuple[int, ...]:
    return tuple(sum(map(len, own)) for own in rows.values())


def _rows(
    data_set: DataSet, parts: list[ClientGroup], labels: Mapping[str, Mapping[str, Ints]]
) -> dict[str, Rows]:
    """By what they are for, in the order of the parts; without validation if there is none."""
    config = data_set.config
    train = _train_rows(data_set, parts, labels["train"])
    test = _test_rows(config, parts, labels["test"])
    if count := config.validation_examples:
        pools = {part.name: part.rows for part in parts}
        unused = set_aside(pools, train, count, config.seed)
        return {"train": train, "validation": unused, "test": test}
    if not config.validation_fraction:
        return {"train": train, "test": test}
    own_labels = {part.name: labels["train"][part.domain] for part in parts}
    divided = hold_out(train, own_labels, config.validation_fraction, config.seed)
    kept, out = ({name: pair[i] for name, pair in divided.items()} for i in range(2))
    return {"train": kept, "validation": out, "test": test}


def _warn_of_classes(data_set: DataSet, num_classes: int, train: Ints, test: Ints) -> None:
    """Name the classes that have no examples, and those that are tested and never trained."""
    names = data_set.classes or tuple(map(str, range(num_classes)))
    empty = [names[k] for k in np.setdiff1d(range(num_classes), [*train, *test])]
    if empty:
        remedy = "" if data_set.classes else " Number labels from 0, without gaps."
        logger.warning(
            "%s: of %d classes %s has no example.%s",
            *(data_set.config.name, num_classes, shortened(empty), remedy),
        )
    if unlearnt := [names[k] for k in np.setdiff1d(test, train)]:
        logger.warning(
            "%s: there are test examples of class %s, but none to train on.",
            *(data_set.config.name, shortened(unlearnt)),
        )


def _train_rows(data_set: DataSet, parts: list[ClientGroup], labels: Mapping[str, Ints]) -> Rows:
    """For each group, the rows of each of its clients."""
    if parts[0].trained_on:
        return {part.name: list(part.trained_on) for part in parts}
    config, rows = data_set.config, {}
    for part in parts:
        own = divide(
            part.name,
            labels[part.domain][part.rows],
            part.sizes,
            config.seed,
            every_class=data_set.every_class,
            alpha=config.dirichlet_alpha,
            client_count_key=client_count_key(config),
        )
        rows[part.name] = [part.rows[share] for share in own]
    return rows


def _test_rows(config: DataConfig, parts: list[ClientGroup], labels: Mapping[str, Ints]) -> Rows:
    """For each group, a random order of its domain's test rows, cut off and dealt to clients."""
    rows = {}
    for part in parts:
        if part.tested_on:
            rows[part.name] = list(part.tested_on)
            continue
        order = split_rng(config.seed, part.domain, "test").permutation(len(labels[part.domain]))
        kept = order[: config.test_examples or None]
        if len(kept) < len(part.sizes):
            remedy = f"Lower {client_count_key(config)}"
            if len(order) >= len(part.sizes):  # there are enough, and fewer were asked for
                remedy += " or raise data.test-examples"
            raise too_few(part.name, len(kept), "test", len(part.sizes), remedy)
        rows[part.name] = np.array_split(kept, len(part.sizes))
    return rows


def _examples(data_set: DataSet, parts: list[ClientGroup], rows: Rows, split: str) -> Found:
    """For each group, the examples of its rows in their order; those of two are read once."""
    found: Found = {}
    for domain in data_set.domains:
        wanted = {p.name: np.concatenate(rows[p.name]) for p in parts if p.domain == domain}
        distinct = np.unique(np.concatenate(list(wanted.values())))
        read = data_set.examples(domain, split, distinct)
        found |= {name: read[np.searchsorted(distinct, own)] for name, own in wanted.items()}
    return found


def _shape(data_set: DataSet, found: Mapping[str, Found]) -> tuple[int, ...]:
    """`Federation.shape`, to which every example is brought."""
    shapes = [x.shape[1:] for own in found.values() for x in own.values()]
    if isinstance(data_set, FeatureSet | TokenSet):
        if len(set(shapes)) > 1:
            raise DataError(
                f"{data_set.config.name}: examples differ in their number of "
                f"{data_set.kind} ({_sizes_in(found)}). Give all of them the same."
            )
        vocabulary = (data_set.vocabulary,) if isinstance(data_set, TokenSet) else ()
        return *vocabulary, *shapes[0]
    colour = any(shape[2:] == (3,) for shape in shapes)
    channels = data_set.channels or (3 if colour else 1)
    side = data_set.config.image_size or data_set.image_size
    if side:
        return channels, side, side
    sizes = {shape[:2] for shape in shapes}
    if len(sizes) > 1:
        raise DataError(
            f"The images differ in size ({_sizes_in(found)}). Set data.image-size to resize them "
            "all."
        )
    height, width = sizes.pop()
    return channels, height, width


def _sizes_in(found: Mapping[str, Found]) -> str:
    """Every group's size in words; of each split, where a group's splits differ."""
    listing = []
    for name in found["train"]:
        splits = {  # size -> the last split that has it
            "x".join(map(str, own[name].shape[1:3])): SPLITS[split] for split, own in found.items()
        }
        several = [f"{size} in {split}" for size, split in splits.items()]
        listing.append(f"{name} {' and '.join(several if len(several) > 1 else splits)}")
    return ", ".join(listing)


def _mean_and_std(
    data_set: DataSet, shape: tuple[int, ...]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of channels or features, as the data set declares them."""
    if data_set.kind == "tokens":
        return (), ()
    mean, std = data_set.mean, data_set.std
    if data_set.kind == "images":
        mean, std = mean[: shape[0]], std[: shape[0]]
    elif not (mean or std):
        mean, std = (0.0,) * shape[0], (1.0,) * shape[0]
    if not len(mean) == len(std) == shape[0]:
        raise DataError(
            f"{data_set.config.name}: {shape[0]} channels or features, but {len(mean)} means and "
            f"{len(std)} standard deviations. Declare one of each in {type(data_set).__name__}."
        )
    return mean, std


def _to_training_layout(
    config: DataConfig,
    part: ClientGroup,
    found: Any,
    rows: list[Ints],
    split: str,
    shape: tuple[int, ...],
) -> Any:
    """A group's examples as training uses them, a contiguous array; images corrupted if it is."""
    if len(shape) != 3:
        return np.ascontiguousarray(found)
    pixels = to_chw(found, shape[0], shape[1:])
    if not part.corrupted:
        return pixels
    return corrupt(
        pixels,
        np.concatenate(rows),
        config.corruption,
        config.severity,
        seed=config.seed,
        domain=part.domain,
        split=split,
    )


def _source(data_set: DataSet, part: ClientGroup, shape: tuple[int, ...]) -> str:
    """Where a group's examples come from and what was done to them."""
    source = data_set.source(part.domain)
    if not part.corrupted:
        return source
    config = data_set.config
    return f"{source} with {corruption_text(config.corruption, config.severity, min(shape[1:]))}"
