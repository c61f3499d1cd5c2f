"""Data sets for next-token: languages, and folders of texts."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import pytest
from test_texts import network_with_tokenizer

from experiments import embed_languages
from fairflower.config import DataConfig
from fairflower.data import DataError, files, prepare
from fairflower.data.sites import open_site
from fairflower.data.texts import DomainCorpus, Languages
from fairflower.testing import check_data

LANGUAGES = Languages(DataConfig(name="languages"))
FIRST = {"german": "Ein JSON-Objekt", "french": "Un objet JSON", "russian": "JSON-объект",
         "greek": "Ένα αντικείμενο JSON", "hebrew": "אובייקט JSON",
         "japanese": "JSONオブジェクト"}  # fmt: skip


def text_of(x: Any) -> str:
    return bytes((x[x > 0] - 1).astype(np.uint8)).decode()


def test_languages_pass_check_data() -> None:
    check_data(Languages)
    check_data(Languages, tokenizer="hash", length=9)


def test_the_same_texts_are_in_all_languages_and_none_is_in_both_splits() -> None:
    assert LANGUAGES.domains == tuple(FIRST)
    for domain, text in FIRST.items():
        train, test = (LANGUAGES.texts(domain, split) for split in ("train", "test"))
        assert (len(train), len(test), test[3]) == (527, 132, text)
        assert len({*train, *test}) == 659
        assert min(map(len, train + test)) > 0


def test_blocks_are_the_texts_and_targets_the_bytes_that_follow() -> None:
    for domain, split in (("greek", "test"), ("japanese", "train")):
        y = LANGUAGES.labels(domain, split)
        x = LANGUAGES.tokens(domain, split, np.arange(len(y)))
        joined = "".join(f"{text}\n" for text in LANGUAGES.texts(domain, split))
        assert text_of(x.ravel())[: len(joined)] == joined
        stream = np.append(x.ravel(), 0)
        np.testing.assert_array_equal(y.ravel(), stream[1:])
        assert len(y) == -(-(len(joined.encode()) - 1) // 64)


def test_sizes_are_those_of_the_documented_table() -> None:
    federation = prepare(DataConfig(name="languages", clients_per_domain=1))
    assert (federation.shape, federation.num_classes) == ((257, 64), 257)
    assert federation.test_sizes == (64, 69, 106, 114, 74, 78)
    assert [client.num_examples for client in federation.clients] == [314, 336, 521, 535, 350, 379]
    table = {row.split()[0]: row.split() for row in str(Languages.__doc__).splitlines() if row[4:]}
    for domain, client, test in zip(
        federation.domains, federation.clients, federation.test_sizes, strict=True
    ):
        letters = [len(t) for s in ("train", "test") for t in LANGUAGES.texts(domain, s)]
        own = [t for s in ("train", "test") for t in LANGUAGES.texts(domain, s)]
        size = sum(len(text.encode()) + 1 for text in own)
        expected = [f"{sum(letters):,}", f"{size:,}", str(client.num_examples), str(test)]
        assert table[domain][2:] == expected


def test_the_license_is_in_the_file() -> None:
    path = Path(__file__).parents[2] / "fairflower" / "data" / "languages.json"
    content = json.loads(path.read_text())
    assert content["license"].startswith("Copyright (c) Django Software Foundation")
    assert path.stat().st_size < 250_000


def catalog(texts: dict[str, str]) -> bytes:
    """Return a file .mo, as GNU gettext describes it."""
    texts = {"": "Content-Type: text/plain; charset=UTF-8\n", **texts}
    pairs = [(key.encode(), text.encode()) for key, text in sorted(texts.items())]
    tables, strings, start = [b"", b""], b"", 28 + 16 * len(pairs)
    for pair in pairs:
        for k, value in enumerate(pair):
            tables[k] += struct.pack("<2I", len(value), start + len(strings))
            strings += value + b"\0"
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, start)
    return head + b"".join(tables) + strings


def test_the_embedding_script_keeps_texts_that_all_languages_have(tmp_path: Path) -> None:
    english = {"May": "{0} May", "may": "{0} May", "day\0days": "{0} day\0{0} days", "no": "{0} no"}
    with ZipFile(tmp_path / "django.whl", "w") as wheel:
        wheel.writestr("d/licenses/LICENSE", "terms")
        for code in embed_languages.LANGUAGES.values():
            texts = {key: text.format(code) for key, text in english.items()}
            texts |= {"no": ""} if code == "el" else {}
            wheel.writestr(f"django/locale/{code}/LC_MESSAGES/django.mo", catalog(texts))
            wheel.writestr(f"django/locale/{code}/LC_MESSAGES/django.po", b"skipped")
    content = json.loads(embed_languages.packed(tmp_path / "django.whl"))
    assert (content["license"], content["languages"]) == ("terms", list(FIRST))
    packed = zlib.decompress(base64.b85decode(content["texts"])).decode()
    # Of the two texts with the same translation, the first is kept.
    assert packed.split("\1")[:2] == ["de May\0de day", "fr May\0fr day"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "corpus"
    for domain in ("news", "mail"):
        (place / domain).mkdir(parents=True)
        for k in range(4):
            (place / domain / f"{k}.txt").write_text(f"{domain} {k}: grüße", encoding="utf-8")
        rows = [json.dumps({"text": f"row {k}\u2028of {domain}", "id": k}) for k in range(6)]
        (place / domain / "more.jsonl").write_text("\n".join([*rows, "", ""]), encoding="utf-8")
        (place / domain / "readme.md").write_text("skipped")
    return place


def opened(folder: Path, **options: Any) -> DomainCorpus:
    return DomainCorpus(DataConfig(name="corpus", dir=str(folder)), **options)


def test_a_folder_of_texts_is_read(folder: Path) -> None:
    check_data(DomainCorpus, DataConfig(name="corpus", dir=str(folder)), length=5)
    data = opened(folder)
    assert data.domains == ("mail", "news")
    assert data.texts("news", "test") == ["news 0: grüße", "row 1\u2028of news"]
    assert data.texts("news", "train")[:4] == [*(f"news {k}: grüße" for k in (1, 2, 3)),
                                               "row 0\u2028of news"]  # fmt: skip
    federation = prepare(DataConfig(name="corpus", dir=str(folder), clients_per_domain=1))
    assert (federation.task, federation.shape) == ("next-token", (257, 64))
    before = data.fingerprint()
    (folder / "mail" / "new.txt").write_text("one more")
    assert opened(folder).fingerprint() != before


def test_a_tokenizer_of_transformers_numbers_the_tokens(folder: Path, tmp_path: Path) -> None:
    ids = network_with_tokenizer(tmp_path / "network", padding=1)
    (folder / "news" / "0.txt").write_text("nail saw bad page novel unheard")
    data = opened(folder, tokenizer=str(tmp_path / "network"), length=4)
    assert data.num_classes == data.vocabulary == len(ids)
    (first, second) = data.labels("news", "test")[:2]
    x = data.tokens("news", "test", np.arange(2))
    # The tokenizer's padding token is 1, which is swapped with 0, here of unknown words.
    assert x[0].tolist() == [ids[w] for w in ("nail", "saw", "bad", "page")]
    assert [*x[1].tolist()[:2], second[0]] == [ids["novel"], 1, 1]
    assert [*x[0, 1:], x[1, 0]] == first.tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("1.txt", b" \n", r"news/1\.txt: the text is empty\. Add text to it, or remove it"),
        ("1.txt", b"\xff\xfe\x00", r"news/1\.txt cannot be read as text in UTF-8 \(UnicodeDecode"),
        ("more.jsonl", b'{"text": "a"}\n\n{"text": ""}', r"jsonl: line 3: the text is empty"),
        ("more.jsonl", b'{"text": "a"}\n{"txt": "b"}', "line 2: found txt; expected an object wit"),
        ("more.jsonl", b'{"text": 5}', "line 1: found text; expected an object with the key text"),
        ("more.jsonl", b"[1]", "line 1: found list; expected an object with the key text"),
        ("more.jsonl", b"text", "line 1 is not JSON"),
        ("more.jsonl", b'{"text": "\\ud800"}', "line 1: the text has half of a surrogate pair"),
    ],
)
def test_wrong_files_are_named(folder: Path, name: str, content: bytes, message: str) -> None:
    (folder / "news" / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        opened(folder).labels("news", "train")


def test_too_few_texts_and_folders_without_texts_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "single").mkdir()
    (folder / "single" / "a.txt").write_text("only this")
    with pytest.raises(DataError, match=r"single: found 1 texts .*at least 2.* several files"):
        opened(folder).labels("single", "test")
    (folder / "single" / "a.txt").unlink()
    with pytest.raises(DataError, match=r"single has no texts\. Expected <domain>/\*\.txt"):
        opened(folder / "single").labels("x", "test")
    (folder / "single").rmdir()
    monkeypatch.setattr(files, "free_memory", lambda: 10)
    with pytest.raises(DataError, match=r"0\.txt: reading it takes .*Divide the file"):
        opened(folder).labels("news", "test")


def test_a_site_may_have_a_folder_of_texts(folder: Path) -> None:
    """With a folder for its domain, or only files; but not with both."""
    config = DataConfig(name="corpus", dir=str(folder))
    assert open_site(config, "mail").domains == ("mail",)
    config = DataConfig(name="corpus", dir=str(folder / "news"))
    site = open_site(config, "a newspaper")
    assert (site.domains, site.num_classes, site.task) == (("a newspaper",), 257, "next-token")
    (folder / "more.txt").write_text("in no domain")
    with pytest.raises(DataError, match=r"more\.txt is not in the folder of a domain: .*Move it"):
        opened(folder)
