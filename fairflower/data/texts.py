"""Data sets of texts, which a tokenizer converts to token ids."""

from __future__ import annotations

import re
import unicodedata
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data import files
from fairflower.data.data_set import DataSetOfFiles, TokenSet
from fairflower.data.federation import Ints
from fairflower.data.folders import OwnFiles
from fairflower.errors import DataError, require

#: Ranges of scripts that write no spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNSPACED += "\U00020000-\U0003ffff"

#: Words, characters of these scripts, and punctuation marks.
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+|[^\w\s]")

HASH_VOCABULARY = 4096  # number of token ids of the built-in tokenizer


class TokenizedSet(TokenSet):
    """A data set of texts with a tokenizer, the arguments of which are those of `TextSet`."""

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: str = "hash",
        length: Annotated[int, Range(1, 2**20)] = 64,
    ) -> None:
        super().__init__(config)
        self.tokenizer, self.length = tokenizer, length

    @property
    def vocabulary(self) -> int:  # type: ignore[override]
        """Number of token ids."""
        return self.encoder.vocabulary

    @property
    def padding(self) -> int:
        """Id of the tokenizer's padding token, which is 0 in the examples."""
        return self.encoder.padding

    @cached_property
    def encoder(self) -> Encoder:
        """The tokenizer."""
        return BUILT_IN.get(self.tokenizer) or _of_transformers(self.tokenizer)


class TextSet(TokenizedSet):
    """A data set whose examples are texts; a subclass defines `texts`.

    The ``tokenizer`` ``hash`` (default) maps each word or punctuation mark, and each character of
    scripts without spaces such as Chinese and Japanese, to an id from 1 to 4095, by the CRC-32 of
    its composed lower-case form. No vocabulary has to be collected from clients, but words may
    share an id. ``bytes`` maps each byte of the text in UTF-8 to its value plus 1, so there are 257
    ids. Any other value is a folder with a tokenizer from transformers, or its name on the
    Hugging Face Hub, for example that of the network ``hf:NAME``. It needs a padding token. Nothing
    is downloaded.

    ``length`` is the number of tokens per text, by default 64. Longer texts are truncated, and
    shorter texts are padded with zeros.
    """

    @abstractmethod
    def texts(self, domain: str, split: str, rows: Ints) -> Sequence[str]:
        """Return the texts of these rows."""

    def tokens(self, domain: str, split: str, rows: Ints) -> Ints:
        size = f"{self.source(domain)}: {len(rows)} texts of {self.length} tokens take"
        files.check_memory(size, 8 * len(rows) * self.length, "Lower length (texts:length=64).")
        ids = np.zeros((len(rows), self.length), np.int64)
        for row, text in zip(ids, self.texts(domain, split, rows), strict=True):
            found = self.encoder.encode(text, self.length)[: self.length]
            row[: len(found)] = found
        return ids


@dataclass(frozen=True)
class Encoder:
    """A tokenizer: its number of ids, and the ids of a text and at most how many are needed."""

    vocabulary: int
    encode: Callable[[str, int | None], Sequence[int] | Ints]
    padding: int = 0


def hash_tokens(text: str) -> list[int]:
    """Return an id from 1 to 4095 for each word, character or punctuation mark of a text.

    >>> hash_tokens("Good, good!") == hash_tokens("good , GOOD !")
    True
    """
    words = _WORD.findall(unicodedata.normalize("NFC", text.lower()))
    return [1 + zlib.crc32(word.encode()) % (HASH_VOCABULARY - 1) for word in words]


def byte_tokens(text: str, length: int | None = None) -> Ints:
    """Return an id from 1 to 256 for each byte of a text in UTF-8.

    >>> byte_tokens("é!").tolist()
    [196, 170, 34]
    """
    data = text.encode()[:length]
    return np.frombuffer(data, np.uint8).astype(np.int64) + 1


#: Tokenizers of this package by name.
BUILT_IN = {
    "hash": Encoder(HASH_VOCABULARY, lambda text, _: hash_tokens(text)),
    "bytes": Encoder(257, byte_tokens),
}


def _of_transformers(name: str) -> Encoder:
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

    def encode(text: str, length: int | None = None) -> Ints:
        ids = made(text, truncation=length is not None, max_length=length, verbose=False)
        from fairflower.arrays import swap_padding  # late: it imports Flower

        return swap_padding(np.array(ids["input_ids"], np.int64), pad)  # type: ignore[no-any-return]

    return Encoder(len(made), encode, pad)


class DomainTextFolder(OwnFiles, TextSet, DataSetOfFiles[dict[str, files.Table]]):
    """All files ``<domain>.csv`` in ``data.dir`` (or ``$FAIRFLOWER_DATA``), sorted by name.

    A file is encoded in UTF-8 and has a header with the columns ``text`` and ``label``. An optional
    column ``split`` has the values train and test; without it, every fifth text of a class,
    starting with the first, is a test text. The classes are the sorted labels of all domains. Each
    domain is divided equally among its clients by default. ``data.groups`` names the column with
    the groups of people.
    """

    title = "A folder of texts"
    suffix = ".csv"
    content = "a .csv file per domain with the columns text and label"

    @cached_property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        """Class names; the first use reads the files of all domains."""
        tables = {domain: self._open(domain).values() for domain in self.domains}
        held = {
            d: {name for of in splits for name in of.columns["label"]}
            for d, splits in tables.items()
        }
        files.check_twins(f"{self.folder}: the classes", held, "Change the labels")
        return tuple(sorted(set().union(*held.values())))

    def labels(self, domain: str, split: str) -> Ints:
        numbers = {name: k for k, name in enumerate(self.classes)}
        labels = self._open(domain)[split].columns["label"]
        if not labels:
            raise DataError(
                f"{self.source(domain)} has no {split} texts. Add some. Without a column split, "
                "the first text of a class and every fifth after it are test texts."
            )
        return np.array([numbers[label] for label in labels], np.int64)

    def texts(self, domain: str, split: str, rows: Ints) -> Sequence[str]:
        texts = self._open(domain)[split].columns["text"]
        return [texts[row] for row in rows.tolist()]

    @property
    def redrawable(self) -> bool:  # type: ignore[override]
        return not any("split" in self._open(domain)["test"].columns for domain in self.domains)

    def values_of(self, setting: str, domain: str, split: str) -> Sequence[str]:
        return self._open(domain)[split].columns[self._columns[setting]]

    def fingerprint(self) -> Any:
        paths = map(self._path, self.domains)
        return [*map(files.stamp, paths), files.stamp_of(self.tokenizer), self.length]

    def source(self, domain: str) -> str:
        return str(self._path(domain))

    def _path(self, domain: str) -> Path:
        return self.folder / f"{domain}.csv"

    def _read(self, domain: str) -> dict[str, files.Table]:
        for key, name in self._columns.items():
            if name in ("text", "label", "split"):
                raise DataError(
                    f"{key} = {name!r}: this column has no groups of people or patients. Name "
                    f"another column, or remove {key}.",
                    public=True,
                )
        needed = {"text": "", "label": "", **{name: key for key, name in self._columns.items()}}
        remedy = f"{files.TABLES}."
        table = files.read_csv(self._path(domain), needed, ("split",), ("text",), remedy)
        test = table.is_test(table.columns["label"], table.columns.get(self.config.patient))
        return {"train": table.where(~test), "test": table.where(test)}
