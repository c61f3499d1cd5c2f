"""Images that clients keep out of training, to choose hyper-parameters by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from fairflower.data.federation import Ints
from fairflower.errors import DataError
from fairflower.seeds import derive_seed


def hold_out(
    rows: Mapping[str, Sequence[Ints]], labels: Mapping[str, Ints], share: float, seed: int
) -> dict[str, tuple[list[Ints], list[Ints]]]:
    """Divide each client's rows into those for training and those for validation.

    ``rows`` has those of each client, int64 [n], by group; ``labels`` [N] are the classes of all
    rows of a group's domain. Of ``n`` images ``int(share * n)`` are for validation, at least one,
    drawn by ``seed``, the group's name and the client's place in it, and by nothing else. They are
    of all classes in proportion, as far as one of each stays for training; so an image that
    clients share for want of others is in nobody's validation. Both keep their order.
    ``DataError`` if that leaves a client without training images of one of its classes, or without
    any for validation; it says which share does not.
    """
    _check(rows, labels, share)
    divided = {}
    for name, clients in rows.items():
        drawn = [
            _drawn(labels[name][own], share, derive_seed(seed, name, place, "validation"))
            for place, own in enumerate(clients)
        ]
        pairs = list(zip(clients, drawn, strict=True))
        divided[name] = [own[~out] for own, out in pairs], [own[out] for own, out in pairs]
    return divided


def set_aside(
    pools: Mapping[str, Ints], rows: Mapping[str, Sequence[Ints]], count: int, seed: int
) -> dict[str, list[Ints]]:
    """Draw validation rows from those that no client holds, for each client of each group.

    ``pools`` has a group's rows, int64 [N], and ``rows`` those of each of its clients. ``count`` of
    a group's other rows, or all if there are fewer, are drawn by ``seed`` and the group's name, and
    dealt to its clients, as test examples are. ``DataError`` if there are fewer than clients.
    """
    found = {}
    for name, clients in rows.items():
        unused = np.setdiff1d(pools[name], np.concatenate(clients))
        if len(unused) < len(clients):
            raise DataError(
                f"data.validation-examples = {count}: the {len(clients)} clients of {name!r} train "
                f"on all but {len(unused)} of its {len(pools[name])} training examples. Lower "
                "data.fraction or data.examples-per-client, or use data.validation-fraction."
            )
        rng = np.random.default_rng(derive_seed(seed, name, "validation"))
        drawn = rng.permutation(unused)[: max(count, len(clients))]
        found[name] = np.array_split(drawn, len(clients))
    return found


def _wanted(images: int, share: float) -> int:
    # A product like 0.29 * 100 = 28.999999999999996 means 29.
    return max(1, int(share * images + 1e-9))


def _drawn(labels: Ints, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Which of a client's images are for validation."""
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    quotas = share * counts
    taken = np.minimum((quotas + 1e-9).astype(int), counts - 1)
    order = rng.permutation(len(classes))  # of equal claims not always the first class's wins
    while taken.sum() < _wanted(len(labels), share):
        claims = np.where(taken < counts - 1, quotas - taken, -np.inf)
        taken[order[np.argmax(claims[order])]] += 1
    out = np.zeros(len(labels), np.bool_)
    for label, count in zip(classes, taken, strict=True):
        out[rng.permutation(np.flatnonzero(labels == label))[:count]] = True
    return out


def _check(rows: Mapping[str, Sequence[Ints]], labels: Mapping[str, Ints], share: float) -> None:
    """Refuse a share that some client cannot spare, with the largest that all can."""
    sizes = [
        (name, len(own), len(np.unique(labels[name][own])))
        for name, clients in rows.items()
        for own in clients
    ]
    for client, (name, images, classes) in enumerate(sizes):
        if _wanted(images, share) <= images - classes:
            continue
        largest = min((n - kinds) / n for _, n, kinds in sizes)
        remedy = f"The largest share that works is {math.floor(1e4 * largest) / 1e4:g}."
        if largest == 0:
            remedy = (
                "No share works where a client has but one image of each: raise data.fraction, "
                "data.examples-per-client or data.dirichlet-alpha, or set it to 0."
            )
        raise DataError(
            f"data.validation-fraction = {share:g}: client {client} ({name}) has {images} training "
            f"examples of {classes} classes, of which one each has to stay in training. {remedy}"
        )
