"""Selection of clients' validation examples, which are used to tune hyper-parameters."""

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
    """Divide each client's rows into training and validation rows.

    A client with ``n`` rows gets ``int(share * n)`` validation rows, but at least 1. They depend
    only on ``seed``, the group's name and the client's position in the group. Each class
    contributes its proportional share, but at least one row of each class stays in training. Both
    parts keep the order of the rows.

    Parameters
    ----------
    rows
        Group -> rows of each of its clients, int64 [n].
    labels
        Group -> labels of all rows of its domain, int64 [N].
    share
        Fraction of validation rows, 0 to 1.
    seed
        The seed for the data, ``data.seed``.

    Raises
    ------
    DataError
        If a client has too few rows. The message states the largest possible share.
    """
    _check(rows, labels, share)
    divided = {}
    for name, clients in rows.items():
        drawn = [
            _drawn(labels[name][held], share, derive_seed(seed, name, position, "validation"))
            for position, held in enumerate(clients)
        ]
        pairs = list(zip(clients, drawn, strict=True))
        divided[name] = [held[~out] for held, out in pairs], [held[out] for held, out in pairs]
    return divided


def set_aside(
    pools: Mapping[str, Ints], rows: Mapping[str, Sequence[Ints]], count: int, seed: int
) -> dict[str, list[Ints]]:
    """Draw each client's validation rows from the rows on which no client trains.

    In each group, ``count`` unused rows (or all, if there are fewer) are drawn at random, with a
    generator derived from ``seed`` and the group's name, and divided among the clients. ``pools``
    has the rows of each group, int64 [N], and ``rows`` the training rows of each of its clients.
    Raises ``DataError`` if a group has no unused rows.
    """
    validation = {}
    for name, clients in rows.items():
        unused = np.setdiff1d(pools[name], np.concatenate(clients))
        if not len(unused):
            raise DataError(
                f"data.validation-examples = {count}: the {len(clients)} clients of {name!r} leave"
                f" none of its {len(pools[name])} training examples unused. Lower data.fraction or "
                "data.examples-per-client, or use data.validation-fraction."
            )
        rng = np.random.default_rng(derive_seed(seed, name, "validation"))
        drawn = rng.permutation(unused)[: max(count, len(clients))]
        validation[name] = np.array_split(drawn, len(clients))
    return validation


def _wanted(images: int, share: float) -> int:
    # 1e-9, because a product such as 0.29 * 100 = 28.999999999999996 stands for 29.
    return max(1, int(share * images + 1e-9))


def _drawn(labels: Ints, share: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return a random mask of a client's validation rows, bool [N]."""
    rng = np.random.default_rng(seed)
    classes, counts = np.unique(labels, return_counts=True)
    quotas = share * counts
    taken = np.minimum((quotas + 1e-9).astype(int), counts - 1)
    order = rng.permutation(len(classes))  # breaks ties between classes at random
    while taken.sum() < _wanted(len(labels), share):
        claims = np.where(taken < counts - 1, quotas - taken, -np.inf)
        taken[order[np.argmax(claims[order])]] += 1
    out = np.zeros(len(labels), np.bool_)
    for label, count in zip(classes, taken, strict=True):
        out[rng.permutation(np.flatnonzero(labels == label))[:count]] = True
    return out


def _check(rows: Mapping[str, Sequence[Ints]], labels: Mapping[str, Ints], share: float) -> None:
    """Raise ``DataError`` if a client has too few rows for the share."""
    sizes = [
        (name, len(held), len(np.unique(labels[name][held])))
        for name, clients in rows.items()
        for held in clients
    ]
    for client, (name, images, classes) in enumerate(sizes):
        if _wanted(images, share) <= images - classes:
            continue
        largest = min((n - kinds) / n for _, n, kinds in sizes)
        remedy = f"Set it to at most {math.floor(1e4 * largest) / 1e4:g}."
        if largest == 0:
            remedy = (
                "No fraction works, because a client has only one example of each class. Raise "
                "data.fraction, data.examples-per-client or data.dirichlet-alpha, or set "
                "data.validation-fraction to 0."
            )
        raise DataError(
            f"data.validation-fraction = {share:g}: client {client} ({name}) has {images} training "
            f"examples of {classes} classes; one example of each class must stay in training. "
            f"{remedy}"
        )
