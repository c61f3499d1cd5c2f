"""Texts of which the next token is learnt: an embedded data set in six languages, and your own."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from fairflower.arguments import Range
from fairflower.config import DataConfig
from fairflower.data import files
from fairflower.data.data_set import DataSetOfFiles
from fairflower.data.federation import Ints
from fairflower.data.folders import encodable, folders_in
from fairflower.data.texts import TokenizedSet
from fairflower.errors import DataError

SUFFIXES = (".txt", ".jsonl")

#: Split, "train" or "test" -> its texts.
Texts = dict[str, list[str]]


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
        return encodable(path.name for path in folders or [self.folder])

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
    return sorted(path for path in paths if path.suffix in SUFFIXES)


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
