"""Keyed digests of a site's rows, by which rows at two sites are counted without their content."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from fairflower.config import DataConfig
from fairflower.data.cache import make_data_set
from fairflower.tables.data_set import TableFolder
from fairflower.tables.schema import parse


def row_digests(
    config: DataConfig, domain: str, key: str, only: Collection[str] | None = None
) -> tuple[str, list[str]]:
    """Return a digest of the key and the columns, and one of each different row, sorted.

    Digests are those of HMAC-SHA-256, of 64 bits: who has no ``key`` cannot try out rows. Rows of
    two sites can be compared if the first digest is the same. Numbers are compared as numbers,
    whatever the decimal mark is; rows that the site has twice are left out. ``only`` names the
    columns that are compared, by default all. Data that are no table have no digests.
    """
    data_set = make_data_set(replace(config, domains=""))
    if not isinstance(data_set, TableFolder):
        return "", []
    name = domain if domain in data_set.domains else data_set.domains[0]  # as `open_site`
    frame = data_set.files.frame(name)
    listed = data_set.files.columns({name: frame}, (), site=True)
    used = [c for c in listed if c.is_used and (only is None or c.name in only)]
    columns = sorted(used, key=lambda c: c.name)
    raw = parse(data_set.source(name), frame, columns, data_set.files.schema.format.decimal)
    cells = raw.x.astype(object)
    for k, column in enumerate(columns):
        if column.kind == "category":
            cells[:, k] = raw.texts(column.name)
    rows, counts = np.unique([json.dumps(row) for row in cells.tolist()], return_counts=True)
    about = json.dumps([(column.name, column.kind) for column in columns])
    first, *others = (_digest(key, text) for text in (about, *rows[counts == 1].tolist()))
    return first, sorted(others)


def _digest(key: str, text: str) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()[:16]
