"""Data sets of texts, which a tokenizer converts to token ids: of a class, or to learn the next.

They are a user's own, besides an embedded one in six languages.
"""

from __future__ import annotations

import json
import re
import unicodedata
import zlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data import files
from fairflower.data.data_set import DataSetOfFiles, TokenSet
from fairflower.data.federation import Ints
from fairflower.data.folders import OwnFiles, folders_in
from fairflower.errors import DataError, require

#: Ranges of scripts that write no spaces between words: Thai, Lao, Burmese, Khmer, kana, Chinese.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_UNSPACED += "\U00020000-\U0003ffff"

#: Words, characters of these scripts, and punctuation marks.
_WORD = re.compile(rf"[{_UNSPACED}]|(?:(?![{_UNSPACED}])\w)+|[^\w\s]")

HASH_VOCABULARY = 4096  # number of token ids of the built-in tokenizer

CORPUS_SUFFIXES = (".txt", ".jsonl")  # extensions of texts without classes

#: Split, "train" or "test" -> its texts.
Texts = dict[str, list[str]]


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


class BlockSet(TokenizedSet):
    """A data set for the task next-token, whose examples are blocks; a subclass defines `texts`.

    The texts of a domain's split, each followed by a line break, are joined, and cut into blocks of
    ``length`` tokens (default 64). An example's targets are the tokens that follow those of its
    block, so the first token of the next block, too. The end of the last block is padded. A block
    may begin and end anywhere, with bytes also within a letter.

    The ``tokenizer`` ``bytes`` (default) has ids 1 to 256, a byte in UTF-8 plus 1, and ``hash`` and
    those of transformers are as in `TextSet`; their padding token, if it occurs in a text, is not
    predicted. Special tokens of a tokenizer begin and end each text.
    """

    task = "next-token"

    def __init__(
        self,
        config: DataConfig,
        *,
        tokenizer: str = "bytes",
        length: Annotated[int, Range(1, 2**20)] = 64,
    ) -> None:
        super().__init__(config, tokenizer=tokenizer, length=length)
        self._blocks: dict[tuple[str, str], Ints] = {}

    @abstractmethod
    def texts(self, domain: str, split: str) -> Sequence[str]:
        """Return the texts of a domain's split, none of them empty."""

    @property
    def num_classes(self) -> int:  # type: ignore[override]
        """Number of token ids, of which the network predicts one at each place."""
        return self.vocabulary

    def tokens(self, domain: str, split: str, rows: Ints) -> Ints:
        return self.blocks(domain, split)[rows, :-1]

    def labels(self, domain: str, split: str) -> Ints:
        return self.blocks(domain, split)[:, 1:]

    def blocks(self, domain: str, split: str) -> Ints:
        """Return the blocks of a split, each with the first token of the next, int64 [N, L + 1]."""
        if (domain, split) not in self._blocks:
            texts = self.texts(domain, split)
            size = sum(map(len, texts))
            what = f"{self.source(domain)}: the tokens of {size} letters take"
            files.check_memory(what, 32 * size, "Store fewer texts in it.")
            parts = [np.asarray(self.encoder.encode(f"{text}\n", None)) for text in texts]
            stream = np.concatenate([*parts, np.zeros(0, np.int64)])
            count = -(-(len(stream) - 1) // self.length)
            padded = np.zeros(max(0, count) * self.length + 1, np.int64)
            padded[: len(stream)] = stream[: len(padded)]
            windows = np.lib.stride_tricks.sliding_window_view(padded, self.length + 1)
            blocks = windows[:: self.length] if count > 0 else windows[:0]
            self._blocks[domain, split] = blocks[blocks[:, 1:].any(axis=1)]
        return self._blocks[domain, split]


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
        return files.all_names(f"{self.folder}: the classes", held, "Change the labels")

    def labels(self, domain: str, split: str) -> Ints:
        labels = self._open(domain)[split].columns["label"]
        if not labels:
            raise DataError(
                f"{self.source(domain)} has no {split} texts. Add some. Without a column split, "
                "the first text of a class and every fifth after it are test texts."
            )
        return files.places(labels, self.classes)

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


class Languages(BlockSet):
    """The same interface texts in six languages of five scripts.

    An example is 64 bytes of short texts of a website and of the pages of its administrators:
    labels, questions and error messages, in part with HTML and with names such as ``%(size)d``. The
    domain is the language:

    ========  ========  =======  ======  =====  ====
    domain    script    letters  bytes   train  test
    ========  ========  =======  ======  =====  ====
    german    Latin     22,891   24,116  314    64
    french    Latin     24,101   25,891  336    69
    russian   Cyrillic  22,740   40,086  521    106
    greek     Greek     23,784   41,462  535    114
    hebrew    Hebrew    16,049   27,099  350    74
    japanese  Japanese  12,101   29,198  379    78
    ========  ========  =======  ======  =====  ====

    All 659 texts are in all six languages, and every fifth of them in the order of the English
    originals, starting with the first, is a test text in all of them. So no test text is a
    translation of a training text, nor its double in any language. Domains differ in size because
    UTF-8 has one byte for most Latin letters, two for Cyrillic, Greek and Hebrew letters, and three
    for Japanese ones: with sample weighting, Greek has 1.7 times the weight of German for the same
    texts. A letter's first byte is easy to predict, given the script. Losses per byte therefore
    compare methods in the same language, but not how well two languages are learnt.

    Source: translations of Django 5.2.19 (the files ``django.mo`` and ``djangojs.mo`` of its
    wheel), by its translators, copyright Django Software Foundation and individual contributors,
    BSD-3-Clause (the license is in ``languages.json``), https://www.djangoproject.com.
    ``experiments/embed_languages.py`` created the embedded file.
    """

    def all_domains(self) -> Sequence[str]:
        return tuple(_embedded())

    def texts(self, domain: str, split: str) -> Sequence[str]:
        texts = _embedded()[domain]
        return [text for k, text in enumerate(texts) if (k % 5 == 0) == (split == "test")]

    def fingerprint(self) -> Any:
        """Return the version of the embedded texts."""
        return {"version": 1, "tokenizer": files.stamp_of(self.tokenizer)}

    def source(self, domain: str) -> str:
        return "interface texts of Django"


@cache
def _embedded() -> dict[str, list[str]]:
    """Return the texts of each language."""
    content = files.embedded(__package__, "languages", "texts")
    texts = (of_language.split("\0") for of_language in content["texts"].split("\1"))
    return dict(zip(content["languages"], texts, strict=True))


class DomainCorpus(BlockSet, DataSetOfFiles[Texts]):
    """Texts in ``data.dir`` (or ``$FAIRFLOWER_DATA``) as ``<domain>/*.txt`` or ``*.jsonl``.

    A folder with such files itself is a single domain, named after the folder. Each .txt file is a
    text, and so is each line of a .jsonl file, an object with the key ``text``; both are encoded in
    UTF-8. Every fifth text of a domain, by file name and line, starting with the first, is a test
    text, so a domain needs at least two texts. Other files and hidden files are skipped. Each
    domain is divided equally among its clients by default.
    """

    title = "A folder of texts without classes"

    @property
    def folder(self) -> Path:
        return files.needed_folder(self.config, "<domain>/*.txt or <domain>/*.jsonl")

    def all_domains(self) -> Sequence[str]:
        """Return the names of the domains' folders, sorted."""
        folders, stray = folders_in(self.folder), _files_in(self.folder)
        if folders and stray:
            raise DataError(
                f"{stray[0]} is not in the folder of a domain: {self.folder} must contain "
                "<domain>/*.txt or <domain>/*.jsonl. Move it to one, or remove it."
            )
        if not (folders or stray):
            raise DataError(
                f"{self.folder} has no texts. Expected <domain>/*.txt or <domain>/*.jsonl in it."
            )
        return [path.name for path in folders or [self.folder]]

    def texts(self, domain: str, split: str) -> Sequence[str]:
        return self._open(domain)[split]

    def fingerprint(self) -> Any:
        paths = (path for domain in self.domains for path in _files_in(self._place(domain)))
        return [*map(files.stamp, paths), files.stamp_of(self.tokenizer)]

    def source(self, domain: str) -> str:
        return str(self._place(domain))

    def _place(self, domain: str) -> Path:
        return self.folder / domain if folders_in(self.folder) else self.folder

    def _read(self, domain: str) -> Texts:
        texts: list[str] = []
        for path in _files_in(self._place(domain)):
            with (
                files.explained(f"{path} cannot be read as text in UTF-8"),
                files.open_regular(path) as file,
            ):
                size = file.seek(0, 2)
                files.check_memory(f"{path}: reading it takes", 5 * size, "Divide the file.")
                file.seek(0)
                text = file.read().decode("utf-8-sig")
            lines = text.split("\n") if path.suffix == ".jsonl" else []
            if path.suffix == ".txt":
                texts.append(_checked(text, f"{path}"))
            for number, line in enumerate(lines, 1):
                if line.strip():
                    texts.append(_text_in(line, f"{path}: line {number}"))
        if len(texts) < 2:
            raise DataError(
                f"{self.source(domain)}: found {len(texts)} texts in files *.txt and *.jsonl; "
                "expected at least 2, because the first and every fifth after it is a test text. "
                "Add texts, or divide a long one into several files.",
                public="too few texts; expected at least 2",
            )
        return {"test": texts[::5], "train": [t for k, t in enumerate(texts) if k % 5]}


def _files_in(folder: Path) -> list[Path]:
    """Return the sorted files with texts in a folder, without hidden ones."""
    paths = (p for p in folder.iterdir() if not p.name.startswith("."))
    return sorted(path for path in paths if path.suffix in CORPUS_SUFFIXES)


def _text_in(line: str, where: str) -> str:
    """Return the text in a line of a .jsonl file; ``where`` names it in errors."""
    try:
        found = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON ({error}).", public="a line is not JSON") from error
    text = found.get("text") if isinstance(found, dict) else None
    if not isinstance(text, str):
        known = ", ".join(found) if isinstance(found, dict) else type(found).__name__
        raise DataError(
            f"{where}: found {known}; expected an object with the key text, a string.",
            public="a line has no key text; expected a string",
        )
    return _checked(text, where)


def _checked(text: str, where: str) -> str:
    """Return a text; raise ``DataError`` if it is empty or cannot be encoded."""
    if not text.strip():
        remedy = "Add text to it, or remove it."
        raise DataError(
            f"{where}: the text is empty. {remedy}", public=f"a text is empty. {remedy}"
        )
    if text.encode(errors="replace").decode() != text:
        raise DataError(
            f"{where}: the text has half of a surrogate pair, which is no letter. Correct it.",
            public="a text has half of a surrogate pair",
        )
    return text
