"""Keyed digests of a site's rows, by which rows at two sites are counted without their content."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace

import pandas as pd

from fairflower.config import DataConfig
from fairflower.data.cache import make_data_set
from fairflower.tables.columns import Column, Kind
from fairflower.tables.data_set import TableFolder
from fairflower.tables.schema import kind_of, parse
from fairflower.tables.warnings import compared


def row_digests(config: DataConfig, domain: str, key: str) -> tuple[str, list[str]]:
    """Return a digest of the key and the columns, and one of each row in `rows_of`, sorted.

    Digests are those of HMAC-SHA-256, of 64 bits: who has no ``key`` cannot try out rows. Rows of
    two sites can be compared if the first digest is the same. Data that are no table have none.
    """
    kinds, frame = rows_of(config, domain)
    if not kinds:
        return "", []
    rows = frame[[*sorted(kinds)]].drop_duplicates(keep=False).astype(object).to_numpy().tolist()
    texts = map(json.dumps, (sorted(kinds.items()), *rows))
    first, *others = (
        hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()[:16] for text in texts
    )
    return first, sorted(others)


def rows_of(config: DataConfig, domain: str) -> tuple[dict[str, Kind], pd.DataFrame]:
    """Return the kinds of a domain's columns, and its `compared` rows, with their targets.

    Numbers are compared as numbers, whatever the decimal mark is.
    """
    data_set = make_data_set(replace(config, domains=""))
    if not isinstance(data_set, TableFolder):
        return {}, pd.DataFrame()
    name = domain if domain in data_set.domains else data_set.domains[0]  # as `open_site`
    tables, where, targets = data_set.files, data_set.source(name), data_set.target_names
    frame = tables.frame(name)
    columns = tables.columns({name: frame}, targets, site=True)
    columns += [Column(target, kind_of(where, frame[target])) for target in targets]
    columns = [column for column in columns if column.is_used]
    raw = parse(where, frame, columns, tables.schema.format.decimal)
    kinds = {column.name: column.kind for column in columns}
    return kinds, compared(raw, kinds)
