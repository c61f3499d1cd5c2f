"""Files of tables as people write them, and every odd one."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from fairflower.errors import DataError
from fairflower.tables.columns import Format
from fairflower.tables.reading import decimal_marks, numbers_of, read_table, without_unit


def read(folder: Path, text: str | bytes, name: str = "a.csv", **given: str) -> pd.DataFrame:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_table(path, Format(**given))


@pytest.mark.parametrize(
    ("text", "name", "mark", "encoding"),
    [
        (b"\xef\xbb\xbfa;b\n1,5;x\n2;y z\n", "a.csv", "semicolon", "utf-8"),
        (b'a,b\n"1,5",x\n 2 ,y z\n\n', "a.csv", "comma", "utf-8"),
        (b"a\tb\r\n1,5\tx\r\n2\ty z\r\n", "a.tsv", "tab", "utf-8"),
        ("a|b\n1,5|x\n2|y z".encode("utf-16"), "a.txt", "bar", "utf-16"),
    ],
)
def test_delimiters_and_encodings_are_detected(
    tmp_path: Path, text: bytes, name: str, mark: str, encoding: str
) -> None:
    frame = read(tmp_path, text, name)
    assert frame.to_dict("list") == {"a": ["1,5", "2"], "b": ["x", "y z"]}
    assert frame.attrs["read"] == f"{mark} between values, {encoding}, 2 columns"


def test_windows_1252_is_read_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    frame = read(tmp_path, "größe;x\n1;2\n".encode("cp1252"))
    assert list(frame) == ["größe", "x"]
    assert "Windows-1252" in caplog.text
    latin = read(tmp_path, "größe;x\n1;2\n".encode("latin-1"), encoding="latin-1")
    assert list(latin) == ["größe", "x"]


def test_parquet_is_read_as_the_same_text(tmp_path: Path) -> None:
    pd.DataFrame({"a": [1.5, None, 2], "b": ["x", None, "z"], "n": [1, 2, 3]}).to_parquet(
        tmp_path / "a.parquet"
    )
    frame = read_table(tmp_path / "a.parquet", Format())
    assert frame.to_dict("list") == {
        **{"a": ["1.5", "", "2.0"], "b": ["x", "", "z"], "n": ["1", "2", "3"]}
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n", "header without rows"),
        ("a,b\n1,2\na,b\n3,4\n", "line 3 repeats the header"),
        ("a,b,a\n1,2,3\n", "several columns named 'a'"),
        ('a,b\n1,"x\n2,y\n', "line 3 cannot be read: unexpected end of data"),
        ("a,b\n1,2,SECRET\n", "line 2 has 3 values, and the header 2"),
        ("a,b\n1,2\n3\n", "line 3 has 1 values, and the header 2"),
        ("a\n1\n2\n", "single column"),
        (b"a,b\n\0,\xff\n", "is no text in utf-8-sig or cp1252"),
    ],
)
def test_odd_files_are_refused_and_a_site_sends_no_cell(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, text)
    assert caught.value.public
    assert "SECRET" not in str(caught.value.public)
    assert "a.csv" not in str(caught.value.public)


def test_empty_lines_and_unnamed_columns_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    frame = read(tmp_path, ",a,b\n0,1,NA\n,,\n1,?,2\n")
    assert frame.to_dict("list") == {"a": ["1", ""], "b": ["", "2"]}
    assert "1 columns without a name are ignored" in caplog.text


def test_ten_thousand_columns(tmp_path: Path) -> None:
    names = ",".join(f"c{k}" for k in range(10_000))
    frame = read(tmp_path, f"{names}\n" + 3 * (",".join(["1"] * 10_000) + "\n"))
    assert frame.shape == (3, 10_000)


def cells(*values: str) -> pd.Series:
    return pd.Series(values, dtype=object)


@pytest.mark.parametrize(
    ("values", "mark", "numbers"),
    [
        (("1,5", "2"), ",", [1.5, 2]),
        (("1.5", "2"), ".", [1.5, 2]),
        (("1.234,5", "2"), ",", [1234.5, 2]),
        (("1,234.5", "-2e3"), ".", [1234.5, -2000]),
        (("1.234", "0.5"), ".", [1.234, 0.5]),
        (("1.234", "2.345"), ".", [1.234, 2.345]),
        (("0,123", ""), ",", [0.123, None]),
    ],
)
def test_decimal_marks(values: tuple[str, ...], mark: str, numbers: list[float | None]) -> None:
    assert decimal_marks("x", pd.DataFrame({"a": cells(*values)}), "") == {"a": mark}
    expected = [float("nan") if number is None else number for number in numbers]
    assert numbers_of(cells(*values), mark).tolist() == pytest.approx(expected, nan_ok=True)


def test_thousands_and_decimals_are_told_apart_by_other_columns() -> None:
    unclear = cells("1,234", "2,345")
    with pytest.raises(DataError, match="may be of decimals or of thousands"):
        decimal_marks("x", pd.DataFrame({"a": unclear}), "")
    assert decimal_marks("x", pd.DataFrame({"a": unclear}), ",") == {"a": ","}
    both = pd.DataFrame({"a": unclear, "b": cells("0,5", "1")})
    assert decimal_marks("x", both, "") == {"a": ",", "b": ","}
    points = pd.DataFrame({"a": unclear, "b": cells("0.5", "1")})
    assert decimal_marks("x", points, "") == {"a": ".", "b": "."}


def test_a_unit_behind_all_numbers_is_found() -> None:
    assert [part if isinstance(part, str) else part.tolist() for part in without_unit(
        cells("72 kg", "", "80,5 kg")
    )] == [["72", "", "80,5"], "kg"]  # fmt: skip
    for values in (("72 kg", "80 lb"), ("<5", "6"), ("2020-01-01", "2020-01-02"), ("3+", "2")):
        assert without_unit(cells(*values))[1] == ""
