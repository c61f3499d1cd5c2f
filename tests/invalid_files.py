"""Invalid folders and files, by their names in `invalid_inputs`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from run_folders import make_run, rising
from runs import config

X, Y = np.zeros((8, 4, 4), np.uint8), np.arange(8) % 2
VALID_ARRAYS = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y}


class Malicious:
    """An object whose unpickling fails the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


def npz(**changes: Any) -> Callable[[Path], None]:
    """Return a function that creates a folder of one domain, ``a.npz``."""

    def make(place: Path) -> None:
        place.mkdir()
        arrays = {
            name: array for name, array in (VALID_ARRAYS | changes).items() if array is not None
        }
        np.savez(place / "a.npz", **arrays)

    return make


def text(content: str | bytes) -> Callable[[Path], None]:
    def make(place: Path) -> None:
        place.write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def images(*paths: str, mode: str = "L", pixels: Any = None) -> Callable[[Path], None]:
    """Return a function that creates a folder: two classes in domain ``a``, and ``paths``."""

    def make(place: Path) -> None:
        sound = [f"a/{label}/{number}.png" for label in ("cat", "dog") for number in range(3)]
        for path in (*sound, *paths):
            file = place / os.fsdecode(path.encode("latin-1"))
            file.parent.mkdir(parents=True, exist_ok=True)
            image = Image.new("L", (4, 4), 99) if path in sound else Image.new(mode, (4, 4))
            if pixels is not None and path not in sound:
                image = Image.fromarray(pixels)
            image.save(file)

    return make


def with_files(folder: Callable[[Path], None], **files: str | bytes) -> Callable[[Path], None]:
    """Return a function that adds files; in names, ``__`` is a slash and ``_`` a dot."""

    def make(place: Path) -> None:
        folder(place)
        for name, content in files.items():
            path = place / name.replace("__", "/").replace("_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            text(content)(path)

    return make


def run(without: str = "", **files: str | bytes) -> Callable[[Path], None]:
    """Return a function that makes the folder of a completed run, with changed files."""

    def make(place: Path) -> None:
        make_run(place, rising(0.5, rounds=5))
        settings = config(place.parent, **{"num-server-rounds": 4})
        (place / "config.toml").write_text(settings.to_toml(), encoding="utf-8")
        if without:
            (place / without).unlink()
        for name, content in files.items():
            text(content)(place / name.replace("_", "."))

    return make


def pipe(place: Path) -> None:
    os.mkfifo(place)


PLACES: dict[str, Callable[[Path], None]] = {
    "empty": Path.mkdir,
    "text": text("hello"),
    "key": text("a key"),
    "certificates": with_files(Path.mkdir, ca_crt="a certificate"),
    # configs
    "utf16": text("seed = 1".encode("utf-16")),
    "latin": text("run-name = 'caf\xe9'".encode("latin-1")),
    "apart": text("[data]\nclients-per-domain = 1"),
    "small": text("num-server-rounds = 1\n[data]\nexamples-per-client = 20"),
    "torn": text("[train\nlr = 0.1"),
    "text-seed": text("seed = 'one'"),
    "twice": text("seed = 1\nseed = 2"),
    "unknown-table": text("[trian]\nlr = 0.1"),
    "list": text("[train]\nlr = [0.1, 0.2]"),
    "date": text("seed = 2026-01-01"),
    "nested": text("[train.lr]\nvalue = 0.1"),
    "scalar": text("train = 3"),
    "method-scalar": text('strategy = "fedheal"'),
    "deep": text("a=" + "[" * 9000),
    "pipe": pipe,
    # data
    "npz": npz(),
    "no-y": npz(y_test=None),
    "floats": npz(x_train=X / 255),
    "deep-pixels": npz(x_train=X.astype(np.uint16)),
    "flat": npz(x_test=X.reshape(8, 16)),
    "channels-first": npz(x_train=np.zeros((8, 3, 4, 4), np.uint8)),
    "four-channels": npz(x_train=np.zeros((8, 4, 4, 4), np.uint8)),
    "fewer-labels": npz(y_train=Y[:5]),
    "real-labels": npz(y_train=Y / 1.0),
    "text-labels": npz(y_train=np.array(["cat"] * 8)),
    "one-hot": npz(y_train=np.eye(8, dtype=int)),
    "negative": npz(y_train=Y - 1),
    "huge-label": npz(y_train=np.where(Y, 3_000_000_000, 0)),
    "large-label": npz(y_train=np.where(Y, 5_000_000, 0)),
    "no-tests": npz(x_test=X[:0], y_test=Y[:0]),
    "objects": npz(y_train=np.array([{}] * 8)),
    "no-zip": with_files(Path.mkdir, a_npz="hello"),
    "half-zip": with_files(Path.mkdir, a_npz=b"PK\x03\x04" + bytes(40)),
    "sizes": lambda place: (npz()(place), np.savez(place / "b.npz", **VALID_ARRAYS | {
        "x_train": np.zeros((8, 5, 5), np.uint8), "x_test": np.zeros((8, 5, 5), np.uint8)})),
    "split-sizes": lambda place: (npz()(place), np.savez(place / "b.npz", **VALID_ARRAYS | {
        "x_train": np.zeros((8, 5, 5), np.uint8)})),
    "latin-npz": with_files(npz(), **{os.fsdecode(b"caf\xe9_npz"): "hello"}),
    "images": images(),
    "latin-domain": images("caf\xe9/cat/0.png"),
    "latin-class": images("a/caf\xe9/0.png"),
    "nested-images": images("a/cat/patient/0.png"),
    "stray-image": images("a/readme.png"),
    "empty-domain": with_files(images(), b__notes_txt="ours"),
    "one-image": images("b/cat/0.png", "b/dog/0.png"),
    "broken-image": with_files(images(), a__cat__0_png="no image", a__cat__1_png="no image"),
    "half-image": with_files(images(), a__dog__0_png=b"\x89PNG\r\n\x1a\n", a__dog__1_png=b""),
    "signed": images("a/cat/0.tif", "a/cat/1.tif", pixels=np.full((4, 4), -1000, np.int32)),
    "real": images("a/cat/0.tif", "a/cat/1.tif", pixels=np.full((4, 4), 255, np.float32)),
    "no-dicom": with_files(images(), a__cat__0_dcm="no DICOM", a__cat__1_dcm="no DICOM"),
    # run folders
    "run": run(),
    "namesake": lambda place: (place.mkdir(), run()(place / "run")),
    "no-facts": run(without="run.json"),
    "piped-facts": lambda place: (run(without="run.json")(place), pipe(place / "run.json")),
    "torn-facts": run(run_json="{"),
    "no-config": run(without="config.toml"),
    "torn-config": run(config_toml="[train\n"),
    "no-history": run(without="history.csv"),
    "torn-history": run(history_csv="round,level\n1"),
    "bad-csv": text("no,summary\n1,2\n"),
}  # fmt: skip


def make(places: Path) -> None:
    """Create all of `PLACES` in a folder."""
    for name, create in PLACES.items():
        create(places / name)
    for old in ("bad-csv",):
        (places / old).rename(places / f"{old.replace('-', '.')}")
