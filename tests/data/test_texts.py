"""Folders of texts, tokenized, and a run with a network of transformers and adapters."""

from __future__ import annotations

import csv
import json
import re
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import fairflower
from fairflower.config import DataConfig, RunConfig
from fairflower.data import DataError, files, prepare
from fairflower.data.texts import DomainTextFolder, hash_tokens
from fairflower.errors import ConfigError
from fairflower.testing import check_data

WORDS = {"books": "page novel", "shoes": "sole lace", "tools": "saw nail"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "texts"
    place.mkdir()
    for domain, words in WORDS.items():
        rows = [
            f'"{words}, {("bad", "good")[k % 2]} {k}",{("no", "yes")[k % 2]}' for k in range(40)
        ]
        (place / f"{domain}.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    return place


def opened(folder: Path, **options: Any) -> DomainTextFolder:
    return DomainTextFolder(DataConfig(name="texts", dir=str(folder)), **options)


def test_a_folder_of_texts_passes_check_data_and_is_tokenized(folder: Path) -> None:
    (folder / "._books.csv").write_bytes(b"\0\5\x16\7 of macOS")
    check_data(DomainTextFolder, DataConfig(name="texts", dir=str(folder)))
    data = opened(folder, length=4)
    assert (data.domains, data.classes) == (("books", "shoes", "tools"), ("no", "yes"))
    assert [len(data.labels("shoes", split)) for split in ("train", "test")] == [32, 8]
    ids = data.tokens("books", "test", np.array([0, 1]))
    assert data.texts("books", "test", np.array([0, 1])) == [
        "page novel, bad 0",
        "page novel, good 1",
    ]
    np.testing.assert_array_equal(ids[0], hash_tokens("page novel, bad"))
    assert (
        opened(folder, length=9).tokens("books", "test", np.array([0]))[0, 5:].tolist() == [0] * 4
    )


def test_bytes_are_tokens_of_a_table_too(folder: Path) -> None:
    ids = opened(folder, tokenizer="bytes", length=9).tokens("books", "test", np.array([0]))
    assert ids[0].tolist() == [1 + byte for byte in b"page nove"]
    assert opened(folder, tokenizer="bytes").vocabulary == 257


ASCII = "Good, good books: 3.5 stars_really don't a-b (c)\tEnd!?"


def test_tokens_of_ascii_texts_are_words_and_punctuation_as_ever() -> None:
    old = [
        1 + zlib.crc32(word.encode()) % 4095 for word in re.findall(r"\w+|[^\w\s]", ASCII.lower())
    ]
    assert hash_tokens(ASCII) == old
    every = "".join(map(chr, range(128)))
    assert len(hash_tokens(every)) == len(re.findall(r"\w+|[^\w\s]", every))


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("我喜欢这本书。", 7),
        ("ひらがなとカタカナ", 9),
        ("\U00020000\U0002a6d6", 2),
        ("第3章 good书", 5),
        ("한국어 단어", 2),  # Korean has spaces
        ("русские слова", 2),
        ("naïve café", 2),
    ],
)
def test_scripts_without_spaces_give_a_token_for_each_character(text: str, count: int) -> None:
    tokens = hash_tokens(text)
    assert len(tokens) == count
    for form in ("NFC", "NFD"):
        assert hash_tokens(unicodedata.normalize(form, text)) == tokens


def test_a_split_column_divides_the_texts(folder: Path) -> None:
    table = "label,split,text\na,train,one\nb,train,two\nb,test,three\n"
    (folder / "books.csv").write_text(table)
    data = opened(folder)
    assert data.texts("books", "train", np.array([0, 1])) == ["one", "two"]
    assert data.texts("books", "test", np.array([0])) == ["three"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"text,class\na,b\n", "missing: label"),
        (
            b"age,bp,label\n61,140,1\n",
            "missing: text.* set data.name = 'table'",
        ),
        (b"text,label\nhello,\n", "line 2 has no label"),
        (b"text,label,split\nhello,a,dev\n", "split 'dev'; expected train or test"),
        (b"text,label,split\nhello,a,test\nbye,a,\n", "line 3 has no split. Add the value"),
        (b"text,label\nhello,a\nbye,b\n", "has no train texts. Add some. Without a column split"),
        (b"text,label,label\nhello,a,b\n", "found several columns named label. Rename all but one"),
        (
            b"text,label\na,b,\ngood, cheap,a\n",
            "line 3 has more values than the header. Quote texts",
        ),
        (b"text,label\na,b\n\n\nbye,\n", "line 5 has no label"),
        (b"text,label\n\xff\xfe,a\n", "cannot be read as a CSV file in UTF-8"),
    ],
)
def test_invalid_tables_are_named(folder: Path, content: bytes, message: str) -> None:
    (folder / "books.csv").write_bytes(content)
    data = opened(folder)  # reads no table
    with pytest.raises(DataError, match=rf"books\.csv.*{message}"):
        data.labels("books", "train")


@pytest.mark.parametrize("twin", ["Yes", "yes ", "YES"])
def test_labels_that_differ_only_in_case_or_spaces_are_refused(folder: Path, twin: str) -> None:
    path = folder / "shoes.csv"
    path.write_text(path.read_text().replace(",yes", f",{twin}"))
    with pytest.raises(DataError, match=rf"(?=.*'{twin}' \(in shoes\)).*'yes' \(in bo"):
        opened(folder).labels("books", "train")


def test_a_text_may_be_longer_than_pythons_csv_module_allows(folder: Path) -> None:
    usual, long = csv.field_size_limit(), "page " * 30_000
    (folder / "books.csv").write_text(f"text,label\nshort,no\n{long},no\n")
    assert opened(folder).texts("books", "train", np.array([0])) == [long]
    assert csv.field_size_limit() == usual


def test_a_table_larger_than_the_memory_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_memory", lambda: 5000)
    with pytest.raises(DataError, match=r"books\.csv: reading its 40 lines takes .*fewer texts"):
        opened(folder).labels("books", "train")


def test_texts_longer_than_the_memory_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "free_memory", lambda: 10**6)
    data = opened(folder, length=2**20)
    with pytest.raises(DataError, match=r"books\.csv: 1 texts of 1048576 tokens .*Lower length"):
        data.tokens("books", "train", np.array([0]))
    with pytest.raises(ConfigError, match=r"length = 1048577: expected .*1, 1048576"):
        RunConfig.from_flat({"data.name": "texts:length=1048577"})


@pytest.mark.parametrize(
    ("row", "groups"),
    [("hello,b\0c,m", ""), ("hello,b,f\0m", "group"), ("hello,\0,m", ""), ('hello,"c\r",m', "")],
)
def test_names_with_null_bytes_or_carriage_returns_are_refused(
    tmp_path: Path, row: str, groups: str
) -> None:
    rows = [f"text {i},{'ab'[i % 2]},{'mf'[i // 2 % 2]}" for i in range(20)]
    (tmp_path / "books.csv").write_text("\n".join(["text,label,group", *rows, row, ""]))
    config = DataConfig(name="texts", dir=str(tmp_path), groups=groups, clients_per_domain=1)
    with pytest.raises(DataError, match="a null byte, a carriage return or a character that"):
        prepare(config)


def test_a_missing_tokenizer_is_named(folder: Path) -> None:
    pytest.importorskip("transformers", reason="needs fairflower[hf]")
    pytest.importorskip("peft", reason="needs fairflower[hf]")
    data = opened(folder, tokenizer="no-one/nothing")
    with pytest.raises(DataError, match=r"not on this machine.*hf download no-one/nothing"):
        data.tokens("books", "test", np.array([0]))


def test_custom_code_of_a_tokenizer_is_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", reason="needs fairflower[hf]")
    pytest.importorskip("peft", reason="needs fairflower[hf]")
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    own = {"auto_map": {"AutoTokenizer": ["own.Mine", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(DataError, match=r"ValueError: .*contains custom code"):
        opened(folder, tokenizer=str(tmp_path)).tokens("books", "test", np.array([0]))


def test_a_tokenizer_without_a_padding_token_is_refused(folder: Path, tmp_path: Path) -> None:
    """Token 0 of the tokenizer may be a word, as in GPT-2."""
    transformers = pytest.importorskip("transformers", reason="needs fairflower[hf]")
    pytest.importorskip("peft", reason="needs fairflower[hf]")
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"!": 0, "[UNK]": 1}, unk_token="[UNK]"))
    kind = transformers.PreTrainedTokenizerFast
    kind(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"has no padding token\. .*set pad_token in its tokeni"):
        opened(folder, tokenizer=str(tmp_path)).tokens("books", "test", np.array([0]))


def network_with_tokenizer(place: Path, padding: int) -> dict[str, int]:
    """Save a network, and a tokenizer that pads with token 1; return the words' ids."""
    transformers = pytest.importorskip("transformers", reason="needs fairflower[hf]")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = sorted({w for text in WORDS.values() for w in text.split()} | {"bad", "good"})
    ids = {word: k for k, word in enumerate(["[UNK]", "[PAD]", *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(place)
    torch.manual_seed(0)  # some random networks learn too little
    transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=len(ids), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=32, max_position_embeddings=8, pad_token_id=padding,
        )
    ).save_pretrained(place)  # fmt: skip
    return ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", ["fedequilibria", pytest.param("fedheal", marks=pytest.mark.nightly)]
)
def test_a_run_trains_and_sends_only_adapters_and_head(
    folder: Path, tmp_path: Path, strategy: str
) -> None:
    """The padding token of the tokenizer is not 0."""
    pytest.importorskip("peft", reason="needs fairflower[hf]")
    network = tmp_path / "network"
    ids = network_with_tokenizer(network, padding=1)
    data = opened(folder, tokenizer=str(network), length=8)
    assert data.tokens("tools", "test", np.array([1]))[0].tolist() == [
        ids["saw"], ids["nail"], 1, ids["good"], 1, 0, 0, 0,
    ]  # fmt: skip
    result = fairflower.run(
        {"data.name": f"texts:length=8:tokenizer={network}", "data.dir": str(folder),
         "num-server-rounds": 8, "engine": "inline", "model.name": f"hf:{network}",
         "model.adapter": "lora:r=2:targets=query,value", "data.clients-per-domain": 2,
         "train.optimizer": "adam", "train.lr": 0.02, "train.local-epochs": 4,
         "train.batch-size": 8},
        strategy=strategy, output_dir=str(tmp_path / "runs"), progress=False,
    )  # fmt: skip
    assert min(result.accuracy.values()) > 0.9
    arrays = load_file(next((tmp_path / "runs").glob("*/model.safetensors")))
    assert {"head.weight", "head.bias"} < set(arrays)
    assert all("lora_" in key for key in arrays if not key.startswith("head."))


@pytest.mark.slow
def test_a_network_with_another_padding_token_than_its_tokenizer_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    network_with_tokenizer(tmp_path / "network", padding=0)
    settings = {
        "data.name": f"texts:length=8:tokenizer={tmp_path / 'network'}", "data.dir": str(folder),
        "num-server-rounds": 0, "engine": "inline", "model.name": f"hf:{tmp_path / 'network'}",
        "output-dir": str(tmp_path / "runs"),
    }  # fmt: skip
    wrong = r"it pads with token 0, but the tokenizer .*network' pads with token 1, .*to 1\."
    with pytest.raises(ConfigError, match=wrong):
        fairflower.run(settings, progress=False)
    fairflower.run(settings | {"model.weights": "random"}, progress=False)
