"""Data sets of texts, which a tokenizer converts to token ids."""

from __future__ import annotations

import csv
import io
import re
import sys
import unicodedata
import zlib
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data.data_set import DataSetOfFiles, TokenSet
from fairflower.data.federation import Ints
from fairflower.data.files import (
    MAX_BYTES,
    TABLES,
    check_columns,
    check_memory,
    check_twins,
    checked_labels,
    explained,
    needed_folder,
    open_regular,
    stamp,
)
from fairflower.data.people import GroupsOfFiles
from fairflower.errors import DataError, require

#: Ranges of scripts that write no spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNSPACED += "\U00020000-\U0003ffff"

#: Words, characters of these scripts, and punctuation marks.
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+|[^\w\s]")

#: Number of token ids of the built-in tokenizer.
HASH_VOCABULARY = 4096

#: Upper bound on the bytes that Python needs for a row of a table, besides its characters.
ROW_BYTES = 200


class TextSet(TokenSet):
    """A data set whose examples are texts; a subclass defines `texts`.

    Parameters
    ----------
    tokenizer
        ``hash`` (default) maps each word or punctuation mark, and each character of scripts without
        spaces such as Chinese and Japanese, to an id from 1 to 4095, by the CRC-32 of its composed
        lower-case form. No vocabulary has to be collected from clients, but words may share an id.
        Any other value is a folder with a tokenizer from transformers, or its name on the Hugging
        Face Hub, for example that of the network ``hf:NAME``. It needs a padding token. Nothing is
        downloaded.
    length
        Number of tokens per text. Longer texts are truncated, and shorter texts are padded with
        zeros. Default 64.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: str = "hash",
        length: Annotated[int, Range(1, 2**20)] = 64,
    ) -> None:
        super().__init__(config)
        self.tokenizer, self.length = tokenizer, length

    @abstractmethod
    def texts(self, domain: str, split: str, rows: Ints) -> Sequence[str]:
        """Return the texts of these rows."""

    def tokens(self, domain: str, split: str, rows: Ints) -> Ints:
        size = f"{self.source(domain)}: {len(rows)} texts of {self.length} tokens take"
        check_memory(size, 8 * len(rows) * self.length, "Lower length (texts:length=64).")
        ids = np.zeros((len(rows), self.length), np.int64)
        for row, text in zip(ids, self.texts(domain, split, rows), strict=True):
            found = self._encoder.encode(text)[: self.length]
            row[: len(found)] = found
        return ids

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        """Number of token ids."""
        return self._encoder.vocabulary

    @property
    def padding(self) -> int:
        """Id of the tokenizer's padding token, which is 0 in the examples."""
        return self._encoder.padding

    @cached_property
    def _encoder(self) -> _Encoder:
        if self.tokenizer == "hash":
            return _Encoder(HASH_VOCABULARY, hash_tokens)
        return _of_transformers(self.tokenizer, self.length)


@dataclass(frozen=True)
class _Encoder:
    vocabulary: int
    encode: Callable[[str], Sequence[int] | Ints]
    padding: int = 0


def hash_tokens(text: str) -> list[int]:
    """Return an id from 1 to 4095 for each word, character or punctuation mark of a text.

    >>> hash_tokens("Good, good!") == hash_tokens("good , GOOD !")
    True
    """
    words = _WORD.findall(unicodedata.normalize("NFC", text.lower()))
    return [1 + zlib.crc32(word.encode()) % (HASH_VOCABULARY - 1) for word in words]


def _of_transformers(name: str, length: int) -> _Encoder:
    """Load a tokenizer from transformers, and give its padding token the id 0."""
    require("hf", f"The tokenizer {name!r}")
    from transformers import AutoTokenizer

    folder = Path(name).expanduser()
    place = str(folder) if folder.is_dir() else name
    try:
        made: Any = AutoTokenizer.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise DataError(
            f"The tokenizer {name!r} is not on this machine or cannot be read ({reason}). Name a "
            "folder with tokenizer.json and tokenizer_config.json, or download the tokenizer: hf "
            f"download {name}."
        ) from error
    pad = made.pad_token_id
    if pad is None:  # 0 may be a real token
        raise DataError(
            f"The tokenizer {name!r} has no padding token. Copy it to a folder and set pad_token "
            "in its tokenizer_config.json, for example to its eos_token. Set pad_token_id in the "
            "network's config.json to the same token's id."
        )

    def encode(text: str) -> Ints:
        ids = made(text, truncation=True, max_length=length)["input_ids"]
        from fairflower.arrays import swap_padding  # late: it imports Flower

        return swap_padding(np.array(ids, np.int64), pad)  # type: ignore[no-any-return]

    return _Encoder(len(made), encode, pad)


@dataclass(frozen=True)
class _Table:
    """Texts and labels of a domain, by split."""

    texts: dict[str, list[str]]
    labels: dict[str, list[str]]
    #: Setting -> its column's values: ``data.groups`` and ``data.redraw``.
    columns: dict[str, dict[str, list[str]]]
    has_splits: bool


class DomainTextFolder(GroupsOfFiles, TextSet, DataSetOfFiles[_Table]):
    """All files ``<domain>.csv`` in ``data.dir`` (or ``$FAIRFLOWER_DATA``), sorted by name.

    A file is encoded in UTF-8 and has a header with the columns ``text`` and ``label``. An optional
    column ``split`` has the values train and test; without it, every fifth text of a class,
    starting with the first, is a test text. The classes are the sorted labels of all domains. Each
    domain is divided equally among its clients by default. ``data.groups`` names the column with
    the groups of people.
    """

    title = "A folder of texts"

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Class names; the first use reads the files of all domains."""
        held = {d: set().union(*self._open(d).labels.values()) for d in self.domains}
        check_twins(f"{self.folder}: the classes", held, "Change the labels")
        return tuple(sorted(set().union(*held.values())))

    @cached_property
    def folder(self) -> Path:
        return needed_folder(self.config, "a .csv file per domain (text, label)")

    def all_domains(self) -> Sequence[str]:
        """Return the names of the files, sorted."""
        # Hidden files are not data: macOS writes "._books.csv" beside "books.csv".
        names = sorted(p.stem for p in self.folder.glob("*.csv") if not p.name.startswith("."))
        if not names:
            raise DataError(
                f"{self.folder} has no .csv file. Expected a file per domain with the columns text"
                " and label."
            )
        return names

    def labels(self, domain: str, split: str) -> Ints:
        numbers = {name: k for k, name in enumerate(self.classes)}
        labels = self._open(domain).labels[split]
        if not labels:
            raise DataError(
                f"{self.source(domain)} has no {split} texts. Add some. Without a column split, "
                "the first text of a class and every fifth after it are test texts."
            )
        values = np.array([numbers[label] for label in labels], np.int64)
        return checked_labels(self.source(domain), values, len(numbers))

    def texts(self, domain: str, split: str, rows: Ints) -> Sequence[str]:
        texts = self._open(domain).texts[split]
        return [texts[row] for row in rows.tolist()]

    def group_values(self, domain: str, split: str) -> Sequence[str]:
        return self._open(domain).columns["data.groups"][split]

    @property
    def redrawable(self) -> bool:  # type: ignore[override]
        return not any(self._open(domain).has_splits for domain in self.domains)

    def units(self, domain: str, split: str) -> Sequence[str]:
        return self._open(domain).columns["data.redraw"][split]

    @property
    def _settings(self) -> dict[str, str]:
        """The settings that name a column, with its name."""
        by_unit = "" if self.config.redraw == "rows" else self.config.redraw
        settings = {"data.groups": self.config.groups, "data.redraw": by_unit}
        return {key: name for key, name in settings.items() if name}

    def fingerprint(self) -> Any:
        tokenizer = Path(self.tokenizer).expanduser()
        kept = stamp(tokenizer) if tokenizer.is_dir() else self.tokenizer
        return [*(stamp(self._path(domain)) for domain in self.domains), kept, self.length]

    def source(self, domain: str) -> str:
        return str(self._path(domain))

    def _path(self, domain: str) -> Path:
        return self.folder / f"{domain}.csv"

    def _read(self, domain: str) -> _Table:
        path = self._path(domain)
        if self.config.groups in ("text", "label", "split"):
            raise DataError(
                f"data.groups = {self.config.groups!r}: this column has no groups of people. Name "
                "another column, or remove data.groups.",
                public=True,
            )
        texts, labels, *empty = ({"train": [], "test": []} for _ in range(4))  # type: ignore[var-annotated]
        named = dict(zip(("data.groups", "data.redraw"), empty, strict=True))
        seen: dict[str, int] = {}
        with (
            explained(f"{path} cannot be read as a CSV file in UTF-8"),
            open_regular(path) as file,
            _long_fields(),
        ):
            _check_size(path, file)
            reader = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
            columns = reader.fieldnames or ()
            table = _Table(texts, labels, named, "split" in columns)
            wanted = ("text", "label", *self._settings.values())
            check_columns(str(path), wanted, columns, f"{TABLES}.")
            for row in reader:
                line = f"line {reader.line_num}"
                where = f"{path}: {line}"
                if problem := self._problem(row):
                    raise DataError(f"{where} {problem}", public=f"{line} of a table {problem}")
                label = row["label"]
                seen[label] = seen.get(label, -1) + 1
                split = (
                    row["split"] if "split" in columns else ("test", "train")[seen[label] % 5 > 0]
                )
                if split not in table.texts:
                    remedy = "expected train or test. Correct it, or remove the column."
                    raise DataError(
                        f"{where}: found the split {split!r}; {remedy}",
                        public=f"{line} of a table: found another split; {remedy}",
                    )
                for key, name in self._settings.items():
                    named[key][split].append(sys.intern(row[name]))
                table.texts[split].append(row["text"])
                table.labels[split].append(sys.intern(label))
        return table

    def _problem(self, row: Mapping[Any, Any]) -> str:
        """Return what is wrong with a row: too many values, or too few; empty if nothing is."""
        if any(row.get(None) or ()):  # values without a column
            return "has more values than the header. Quote texts that contain commas."
        if not row["label"] or row["text"] is None:
            return "has no label or no text. Add the missing value."
        for key, name in self._settings.items():
            if not row[name]:
                return f"has no {name} ({key}). Add the value, or remove the row."
        return ""


@contextmanager
def _long_fields() -> Iterator[None]:
    """Let the csv module read texts of any length, instead of at most 131,072 characters."""
    usual = csv.field_size_limit(MAX_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(usual)


def _check_size(path: Path, file: BufferedReader) -> None:
    """Raise ``DataError`` if the texts of a file may need more than the free memory."""
    lines = sum(part.count(b"\n") for part in iter(partial(file.read, 2**20), b""))
    needed = 2 * file.tell() + ROW_BYTES * lines
    check_memory(f"{path}: reading its {lines} lines takes", needed, "Store fewer texts in it.")
    file.seek(0)
