"""Sums of places merge to what the pooled table gives, in any order of places and columns."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairflower.errors import DataError
from fairflower.tables.columns import Column, Raw, Schema
from fairflower.tables.encoding import (
    Encoding,
    declared,
    differences,
    encoded,
    merged,
    summed,
    unknown_levels,
)
from fairflower.tables.schema import parse
from fairflower.tables.sites import SiteTable

COLUMNS = (Column("size", "number"), Column("kind", "category"))

NUMBERS = st.one_of(st.none(), st.floats(-1e6, 1e6).map(lambda x: round(x, 3)))
ROWS = st.lists(st.tuples(NUMBERS, st.sampled_from(["", "a", "b", "c"])), min_size=1, max_size=12)


def raw_of(rows: list[tuple[float | None, str]], columns: tuple[Column, ...] = COLUMNS) -> Raw:
    frame = pd.DataFrame(
        {
            "size": ["" if size is None else repr(size) for size, _ in rows],
            "kind": [kind for _, kind in rows],
        },
        dtype=object,
    )
    return parse("here", frame, columns, ".")


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_merged_sums_are_those_of_the_pooled_table(places: list[list[tuple[float, str]]]) -> None:
    raws = {f"site {k}": raw_of(rows) for k, rows in enumerate(places)}
    sums = {place: summed(raw) for place, raw in raws.items()}
    encodings = [merged(dict(order)) for order in itertools.permutations(sums.items())]
    assert all(each == encodings[0] for each in encodings)  # to the bit
    pooled = list(itertools.chain(*places))
    names = [column.name for column in encodings[0].columns]
    sizes = np.array([size for size, _ in pooled if size is not None], np.float64)
    assert ("size" in names) == bool(len(sizes))
    if len(sizes):
        (column,) = (c for c in encodings[0].columns if c.name == "size")
        assert column.mean == pytest.approx(sizes.mean(), rel=1e-9, abs=1e-9)
        largest = np.abs(sizes).max()
        if sizes.std() > 1e-9 * max(1, largest):
            assert column.std == pytest.approx(sizes.std(), rel=1e-9, abs=1e-9)
        assert column.may_miss == any(size is None for size, _ in pooled)
    kinds = [kind for _, kind in pooled if kind]
    if kinds:
        (column,) = (c for c in encodings[0].columns if c.name == "kind")
        common = {kind for kind in kinds if kinds.count(kind) >= 5}
        assert column.levels == tuple(sorted(common))
        assert column.other == (len(common) < len(set(kinds)))
    if names:
        whole = np.concatenate([encoded(encodings[0], raw) for raw in raws.values()])
        alone = encoded(merged({"all": summed(raw_of(pooled))}), raw_of(pooled))
        np.testing.assert_allclose(whole, alone, rtol=1e-5, atol=1e-6)


@given(ROWS, st.permutations(range(2)))
def test_the_order_of_columns_changes_nothing(
    rows: list[tuple[float, str]], order: list[int]
) -> None:
    columns = tuple(COLUMNS[k] for k in order)
    encoding = merged({"here": summed(raw_of(rows))})
    again = merged({"here": summed(raw_of(rows, columns))})
    assert again == encoding
    there = encoded(encoding, raw_of(rows, columns))
    np.testing.assert_array_equal(encoded(encoding, raw_of(rows)), there)


def test_rows_are_encoded_as_written_by_hand() -> None:
    rows = [(1.0, "a"), (2.0, "a"), (None, "a"), (3.0, "b"), (2.0, ""), *[(2.0, "a")] * 2]
    raw = raw_of(rows)
    encoding = merged({"here": summed(raw)})
    assert encoding.features == ["kind: a", "kind: other", "kind: missing", "size", "size: missing"]
    std = math.sqrt(2 / 6)
    np.testing.assert_allclose(
        encoded(encoding, raw),
        [
            [1, 0, 0, -1 / std, 0],
            [1, 0, 0, 0, 0],
            [1, 0, 0, 0, 1],
            [0, 1, 0, 1 / std, 0],
            [1, 0, 1, 0, 0],
            *[[1, 0, 0, 0, 0]] * 2,
        ],
        rtol=1e-6,
    )
    strange = raw_of([(5.0, "new")])
    assert {k: v.tolist() for k, v in unknown_levels(encoding, strange).items()} == {"kind": [0]}
    assert encoded(encoding, strange)[0, :3].tolist() == [0, 1, 0]


def test_values_survive_json_and_damaged_ones_are_refused() -> None:
    sums = summed(raw_of([(1.5, "a"), (None, "b")]))
    table = SiteTable(sums, {})
    assert SiteTable.from_json(table.to_json()) == table
    encoding = merged({"here": sums})
    assert Encoding.from_json(encoding.to_json()) == encoding
    deep = "[" * 100_000
    for text in ("[]", "{}", "{", deep, encoding.to_json().replace('"std": 1.0', '"std": 0.0')):
        with pytest.raises(ValueError, match=r"encod|Expecting|std"):
            Encoding.from_json(text)
    for text in (deep, '{"sums": 3}', table.to_json().replace('"known": 1', '"known": -1', 1)):
        with pytest.raises(ValueError, match="table"):
            SiteTable.from_json(text)


def test_other_units_codings_and_lacking_columns_are_named() -> None:
    def sums(rows: list[tuple[float | None, str]]) -> dict[str, object]:
        return summed(raw_of(rows))  # type: ignore[return-value]

    glucose = [(90.0 + k, "F") for k in range(8)], [(5.0 + k / 18, "1") for k in range(8)]
    north, south = map(sums, glucose)
    said = differences({"north": north, "south": south})  # type: ignore[dict-item]
    assert len(said) == 2
    assert "'kind' has no level in common at north and south" in said[0]
    assert "'size' has a mean of 5.19 at south and of 93.5 at north" in said[1]
    assert differences({"north": north, "again": north}) == []  # type: ignore[dict-item]
    del south["kind"]
    (said_of, _) = differences({"north": north, "south": south})  # type: ignore[dict-item]
    assert "'kind' is ignored, because south lacks it" in said_of
    around_0 = [[(x, "a") for x in (-1.0, 1.0, -1.0, 1.0, shift)] for shift in (0.05, 1.0)]
    assert differences(dict(zip("ab", map(sums, around_0), strict=True))) == []  # type: ignore[arg-type]


def test_columns_of_different_kinds_are_refused() -> None:
    coded = Column("kind", "number")
    one = summed(raw_of([(1.0, "a")]))
    other = summed(raw_of([(1.0, "1")], (COLUMNS[0], coded)))
    with pytest.raises(DataError, match="'kind' has different kinds: category at a, number at b"):
        merged({"a": one, "b": other})
    wide = (Column("size", "number", low=0), COLUMNS[1])
    there = summed(raw_of([(1.0, "a")], wide))
    with pytest.raises(DataError, match="declare the column 'size' differently"):
        merged({"a": one, "b": there})


def test_a_schema_alone_defines_an_encoding_without_sums() -> None:
    columns = {
        "size": Column("size", "number", low=0.0, high=12.0),
        "kind": Column("kind", "category", levels=("a", "b")),
    }
    encoding = declared(Schema(columns, sums=False), ["size", "kind"])
    assert not encoding.learnt
    x = encoded(encoding, raw_of([(6.0, "b"), (None, "")], tuple(columns.values())))
    assert x.tolist() == [[0, 1, 0, 0, 0, 0], [1, 0, 0, 1, 0, 1]]
    with pytest.raises(DataError, match="'size' has neither low and high nor levels"):
        declared(Schema({}, sums=False), ["size"])
