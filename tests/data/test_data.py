"""Preparing, dividing and reopening a benchmark; the embedded data set."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fairflower import client_app
from fairflower.config import DataConfig, RunConfig
from fairflower.config.settings import EvaluateConfig
from fairflower.data import Augment, Federation, cache, prepare
from fairflower.data.data_set import select_domains
from fairflower.data.federation import Ints, Pixels
from fairflower.data.folders import DomainNpzFolder
from fairflower.data.partition import divide
from fairflower.errors import DataError, UserError
from fairflower.published import uci_digits
from fairflower.published.uci_digits import UCIDigits
from fairflower.server.setup import check_client_settings
from fairflower.testing import check_data

UCI = DataConfig(name="uci-digits")


@pytest.fixture
def uci() -> Federation:
    return prepare(UCI)


@pytest.fixture
def small(tmp_path: Path) -> DataConfig:
    """Two domains of 40 and 20 images whose pixels are the number of the image."""
    for domain, offset, size in (("a", 0, 40), ("b", 100, 20)):
        numbers = np.arange(offset, offset + size, dtype=np.uint8)
        x = np.broadcast_to(numbers[:, None, None], (size, 4, 4))
        y = np.arange(size) % 3
        np.savez(tmp_path / f"{domain}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    return DataConfig(name="npz", dir=str(tmp_path), clients_per_domain=2)


def numbers(federation: Federation) -> list[list[int]]:
    """Which images of ``small`` each client trains on."""
    count = len(federation.clients)
    return [federation.train(i).x[:, 0, 0, 0].tolist() for i in range(count)]


# --- any data set -----------------------------------------------------------------------


def test_built_in_data_sets_pass_check_data(small: DataConfig) -> None:
    check_data(UCIDigits)
    check_data(DomainNpzFolder, small)


class Fickle(DomainNpzFolder):
    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        return super().images(domain, split, rows) + np.uint8(len(rows))


class FromMinusOne(DomainNpzFolder):
    def labels(self, domain: str, split: str) -> Ints:
        return super().labels(domain, split) - 1


class Scaled(DomainNpzFolder):
    def images(self, domain: str, split: str, rows: Ints) -> Any:
        return super().images(domain, split, rows) / 255


class Restless(DomainNpzFolder):
    def fingerprint(self) -> Any:
        return id(self)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Fickle, "a, train: images of row 0 differ between calls"),
        (
            FromMinusOne,
            "FromMinusOne: a: train: labels: found labels from -1 to 1; expected 0 to 65535",
        ),
        (Scaled, r"a: train: images: found float64 \[5, 4, 4\]; expected uint8 \[5, H, W\]"),
        (Restless, "the fingerprint differs between calls"),
    ],
)
def test_check_data_reports_violated_rules(
    kind: type[DomainNpzFolder], message: str, small: DataConfig
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_data(kind, small)


class Listed(DomainNpzFolder):
    def labels(self, domain: str, split: str) -> Any:
        return super().labels(domain, split).tolist()


class Whole(Listed):
    def labels(self, domain: str, split: str) -> Any:
        return [*super().labels(domain, split), 0.5]


class FromOne(DomainNpzFolder):
    classes = ("one", "two", "three")

    def labels(self, domain: str, split: str) -> Ints:
        return super().labels(domain, split) + 1


class ChannelsFirst(DomainNpzFolder):
    def images(self, domain: str, split: str, rows: Ints) -> Any:
        return np.repeat(super().images(domain, split, rows)[:, None], 3, axis=1)


class Colored(DomainNpzFolder):
    channels = 1

    def images(self, domain: str, split: str, rows: Ints) -> Any:
        return np.repeat(super().images(domain, split, rows)[..., None], 3, axis=3)


class OneClass(DomainNpzFolder):
    def labels(self, domain: str, split: str) -> Ints:
        return np.zeros_like(super().labels(domain, split))


class Everything(DomainNpzFolder):
    def images(self, domain: str, split: str, rows: Ints) -> Any:
        return super().images(domain, split, np.arange(20))


class NoRows(DomainNpzFolder):
    def images(self, domain: str, split: str) -> Any:  # type: ignore[override]
        return super().images(domain, split, np.arange(20))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            FromMinusOne,
            "FromMinusOne: a: train: labels: found labels from -1 to 1; expected 0 to 65535",
        ),
        (Whole, r"a: train: labels: found float64 \[41\]; expected whole-number labels \[N\]"),
        (FromOne, "a: train: labels: found labels from 1 to 3; expected 0 to 2, the class numbers"),
        (Scaled, r"a: train: images: found float64 \[40, 4, 4\]; expected uint8 \[40, H, W\]"),
        (ChannelsFirst, r"a: train: images: found uint8 \[40, 3, 4, 4\]; expected"),
        (Colored, "Colored: found color images, but Colored.channels is 1. Set it to 3"),
        (OneClass, "OneClass: found examples of one class only; expected at least two classes"),
        (Everything, r"a: train: images: found uint8 \[20, 4, 4\]; expected uint8 \[40, H, W\]"),
        (NoRows, r"data\.name = 'test_data:NoRows': it failed with TypeError: .*images\(\)"),
    ],
)
def test_invalid_data_of_a_data_set_are_refused_before_division(
    kind: type[DomainNpzFolder], message: str, small: DataConfig
) -> None:
    with pytest.raises(UserError, match=message):
        prepare(replace(small, name=f"test_data:{kind.__name__}"))
    assert prepare(replace(small, name="test_data:Listed")).num_classes == 3


# --- the federation ---------------------------------------------------------------------


def test_embedded_default_has_the_documented_sizes(uci: Federation) -> None:
    assert uci.domains == ("plain", "inverted", "rotated", "printed")
    assert [client.num_examples for client in uci.clients] == [120] * 5 + [60] * 5 + [40] * 10
    assert uci.test_sizes == (200, 200, 200, 200)
    assert (uci.shape, uci.num_classes, uci.augment) == ((3, 16, 16), 10, Augment(crop_padding=1))


def test_clients_are_ordered_by_domain_and_described_correctly(uci: Federation) -> None:
    assert [client.client_id for client in uci.clients] == list(range(20))
    for index, client in enumerate(uci.clients):
        assert client.domain == uci.domains[index // 5]
        x, y = uci.train(index)
        assert x.dtype == np.uint8
        assert y.dtype == np.int64
        assert x.shape == (client.num_examples, *uci.shape)
        assert client.class_counts == tuple(np.bincount(y, minlength=10))


def test_the_test_set_of_a_domain_joins_its_clients_shares(uci: Federation) -> None:
    for domain, size in zip(uci.domains, uci.test_sizes, strict=True):
        x, y = uci.test(domain)
        shares = [uci.client_test(client) for client in uci.clients_of(domain)]
        assert len(x) == len(y) == size == sum(len(share.y) for share in shares)
        assert [len(share.y) for share in shares] == [40] * 5
        np.testing.assert_array_equal(x, np.concatenate([share.x for share in shares]))


def test_changing_a_returned_array_does_not_change_the_federation(uci: Federation) -> None:
    before = uci.train(0).x.copy()
    uci.train(0).x[:] = 0
    np.testing.assert_array_equal(uci.train(0).x, before)


def test_unknown_client_and_domain_are_named(uci: Federation) -> None:
    for client in (20, -1):
        with pytest.raises(DataError, match=f"20 clients; there is no client {client}"):
            uci.train(client)
    with pytest.raises(DataError, match=r"no domain 'mnist'. Its domains are plain, inverted"):
        uci.test("mnist")


# --- the embedded data set --------------------------------------------------------------


def test_no_source_image_is_used_twice() -> None:
    rows = uci_digits.source_rows()
    assert {key: len(value) for key, value in rows.items()} == {
        ("plain", "train"): 600,
        ("inverted", "train"): 300,
        ("rotated", "train"): 200,
        **{(domain, "test"): 200 for domain in ("plain", "inverted", "rotated")},
    }
    used = np.concatenate(list(rows.values()))
    assert len(np.unique(used)) == len(used)
    assert used.min() >= 0
    assert used.max() < 1797


def test_train_and_test_come_from_different_writing_sessions() -> None:
    from sklearn.datasets import load_digits

    rows = uci_digits.source_rows()
    last_train = max(value.max() for (_, split), value in rows.items() if split == "train")
    first_test = min(value.min() for (_, split), value in rows.items() if split == "test")
    # A session starts with three times 0-9; the test images start with a session.
    assert last_train < 1157 <= first_test
    assert load_digits().target[1157:1187].tolist() == 3 * list(range(10))


def test_train_and_test_fonts_are_disjoint_and_shipped() -> None:
    train, test = uci_digits.fonts("train"), uci_digits.fonts("test")
    assert not set(train) & set(test)
    assert all(path.is_file() for path in train + test)


def test_no_test_image_is_a_training_image(uci: Federation) -> None:
    train = {image.tobytes() for i in range(20) for image in uci.train(i).x}
    test = [image.tobytes() for domain in uci.domains for image in uci.test(domain).x]
    assert len(train) == 1300
    assert not train.intersection(test)


def test_domains_look_as_documented(uci: Federation) -> None:
    images = {domain: uci.test(domain).x.astype(float) for domain in uci.domains}
    for grey in ("plain", "rotated"):
        assert (images[grey] == images[grey][:, :1]).all()
    for colour in ("inverted", "printed"):
        assert (images[colour] != images[colour][:, :1]).any(axis=(1, 2, 3)).all()
    border, middle = (slice(None), slice(None), [0, -1]), np.s_[:, :, 4:12, 4:12]
    assert images["plain"][border].mean() < 40 < images["plain"][middle].mean()
    assert images["inverted"][border].mean() > images["inverted"][middle].mean() + 40


@pytest.mark.slow
def test_generation_does_not_depend_on_the_global_random_state() -> None:
    np.random.seed(1)
    first = uci_digits.generate()
    np.random.seed(2)
    second = uci_digits.generate()
    for split in first:
        for one, other in zip(first[split], second[split], strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_handwritten_digits_are_recognizable_at_their_size() -> None:
    """The nearest training image has the right class, so the images are digits and not noise."""
    splits = uci_digits.generate()
    for domain, least in (("plain", 0.9), ("rotated", 0.5)):
        (x, y), (x_test, y_test) = splits[domain, "train"], splits[domain, "test"]
        gap = x_test[:, None, ..., 0].astype(np.float32) - x[None, ..., 0]
        nearest = y[np.square(gap).sum((2, 3)).argmin(1)]
        assert (nearest == y_test).mean() > least


# --- what the partition depends on ------------------------------------------------------


def test_the_partition_depends_only_on_its_seed(small: DataConfig) -> None:
    first = numbers(prepare(small))
    np.random.seed(7)  # the global random state
    assert numbers(prepare(replace(small, test_examples=10))) == first
    assert numbers(prepare(replace(small, image_size=8))) == first
    assert numbers(prepare(replace(small, seed=1))) != first


def test_the_partition_of_a_domain_does_not_depend_on_other_domains(small: DataConfig) -> None:
    both = numbers(prepare(small))
    assert numbers(prepare(replace(small, domains="b"))) == both[2:]
    assert numbers(prepare(replace(small, domains="b,a"))) == both[2:] + both[:2]


def test_more_clients_do_not_change_the_first_clients(small: DataConfig) -> None:
    two = numbers(prepare(replace(small, domains="a", examples_per_client=5)))
    four = replace(small, domains="a", examples_per_client=5, clients_per_domain=4)
    assert numbers(prepare(four))[:2] == two


def test_test_sets_do_not_depend_on_the_number_of_clients(small: DataConfig) -> None:
    two, three = prepare(small).test("a"), prepare(replace(small, clients_per_domain=3)).test("a")
    np.testing.assert_array_equal(two.x, three.x)


def test_fewer_test_examples_are_the_first_of_more(small: DataConfig) -> None:
    def test_set(count: int) -> list[int]:
        x = prepare(replace(small, test_examples=count)).test("a").x
        return x[:, 0, 0, 0].tolist()  # type: ignore[no-any-return]

    assert len(test_set(7)) == 7
    assert test_set(7) == test_set(12)[:7]
    assert sorted(test_set(0)) == sorted(test_set(1000)) == list(range(40))
    assert test_set(0) != sorted(test_set(0))


def test_labels_stay_with_their_images_in_training_and_test(small: DataConfig) -> None:
    federation = prepare(small)
    for client in federation.clients:
        offset = 0 if client.domain == "a" else 100
        for x, y in (federation.train(client.client_id), federation.client_test(client.client_id)):
            np.testing.assert_array_equal((x[:, 0, 0, 0].astype(int) - offset) % 3, y)


# --- sizes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [20, 20, 10, 10]),
        ({"clients_per_domain": 3}, [13, 13, 13, 6, 6, 6]),
        ({"fraction": 0.29}, [11, 11, 5, 5]),
        ({"fraction": 0.5}, [20, 20, 10, 10]),
        ({"examples_per_client": 7}, [7, 7, 7, 7]),
    ],
)
def test_client_sizes_follow_the_config(
    small: DataConfig, change: dict[str, int | float], expected: list[int]
) -> None:
    federation = prepare(replace(small, **change))  # type: ignore[arg-type]
    assert [client.num_examples for client in federation.clients] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fraction": 0.6}, r"'a' has 40 training examples, but 2 clients x 24 examples = 48"),
        ({"examples_per_client": 11}, r"'b' has 20 training examples, but 2 clients x 11 .* 22"),
        (
            {"clients_per_domain": 21},
            r"'b' has too few training examples: 20 for 21 clients. Lower data.clients-per-",
        ),
        ({"fraction": 0.001}, r"would get no training example. Lower data.clients-per-domain"),
        ({"domains": "a,c"}, r"data.domains = 'a,c': Unknown domain 'c'"),
        ({"domains": "a,a"}, r"names a domain twice"),
    ],
)
def test_impossible_settings_are_explained(
    small: DataConfig, change: dict[str, int | float], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(replace(small, **change))  # type: ignore[arg-type]


def test_domains_are_taken_in_the_order_given() -> None:
    assert select_domains(" b ,a", "abc") == ("b", "a")
    assert select_domains("", "abc") == ("a", "b", "c")


@pytest.mark.parametrize("chosen", [{}, {"domains": "AVG"}, {"domains": "a", "held_out": "AVG"}])
def test_a_domain_name_that_is_reserved_for_a_metric_is_refused(
    chosen: dict[str, Any], small: DataConfig
) -> None:
    shutil.copy(Path(small.dir, "a.npz"), Path(small.dir, "AVG.npz"))
    with pytest.raises(DataError, match="The domain name 'AVG' is reserved"):
        prepare(replace(small, **chosen))
    assert prepare(replace(small, domains="a")).domains == ("a",)


# --- the partition ----------------------------------------------------------------------


@given(
    available=st.integers(1, 30),
    clients=st.integers(1, 4),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_clients_have_disjoint_rows_of_their_sizes(
    available: int, clients: int, seed: int, data: st.DataObject
) -> None:
    available = max(available, clients)
    each = st.integers(1, available // clients)
    sizes = data.draw(st.lists(each, min_size=1, max_size=clients), label="sizes")
    parts = divide("a", np.zeros(available, np.int64), sizes, seed)
    assert [len(part) for part in parts] == sizes
    rows = np.concatenate(parts).tolist()
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(available))


def test_partitions_are_unchanged_since_release_0_1() -> None:
    """Partitions are identified by their seed, so no change of the code may alter them."""
    mnist = divide("mnist", np.arange(8), [3, 3], seed=0)
    assert [part.tolist() for part in mnist] == [[3, 0, 4], [2, 5, 1]]
    (usps,) = divide("usps", np.arange(4), [2], seed=0)
    assert usps.tolist() == [0, 1]


def test_every_image_is_drawn_with_equal_probability() -> None:
    drawn = np.zeros(8)
    for seed in range(200):
        drawn[divide("a", np.arange(8), [2], seed)[0]] += 1
    # 200 draws with probability 1/4: 50 and a standard deviation of 6.
    assert drawn.sum() == 400
    assert (abs(drawn - 50) < 25).all()


# --- the cache --------------------------------------------------------------------------


def run(code: str, home: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "FAIRFLOWER_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=env,
        text=True,
        stdout=subprocess.PIPE,
    )


def test_concurrent_preparation_gives_the_same_data(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In threads: they race for the folder as processes do."""
    elsewhere = numbers(prepare(small))
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path))
    divide, all_have = cache._divide, threading.Barrier(3)

    def at_once(*args: Any) -> Any:
        divided = divide(*args)
        all_have.wait(60)
        return divided

    monkeypatch.setattr(cache, "_divide", at_once)
    with ThreadPoolExecutor(3) as pool:
        federations = list(pool.map(prepare, [small] * 3))
    assert [numbers(federation) for federation in federations] == [elsewhere] * 3
    assert [path.name for path in (tmp_path / "cache" / "data").iterdir()] == [
        federations[0].folder.name
    ]


def test_opening_a_federation_imports_no_heavy_library(uci: Federation) -> None:
    code = (
        "import json, sys\n"
        "from fairflower.config import DataConfig\n"
        "from fairflower.data import prepare\n"
        "prepare(DataConfig(name='uci-digits')).train(3)\n"
        "print(json.dumps(list(sys.modules)))"
    )
    loaded = set(json.loads(run(code, uci.folder.parents[2]).communicate(timeout=300)[0]))
    heavy = {"flwr_datasets", "datasets", "pandas", "torch", "sklearn", "matplotlib", "flwr"}
    assert not loaded & heavy


def test_prepared_data_are_reused(small: DataConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare(small)
    monkeypatch.setattr(cache, "_build", lambda *_: pytest.fail("prepared again"))
    assert prepare(small) == first
    assert Federation.open(first.folder) == first


def test_augmentation_does_not_change_the_prepared_folder(uci: Federation) -> None:
    bare = prepare(replace(UCI, augment=False))
    assert prepare(replace(UCI, augment=False)) is bare, "the cached federation is returned"
    assert (bare.augment, bare.folder) == (Augment(), uci.folder)


def test_data_are_prepared_again_for_a_new_cache_version(
    small: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = prepare(small)
    monkeypatch.setattr(cache, "_VERSION", cache._VERSION + 1)
    assert prepare(small).folder != before.folder


def test_changed_files_are_prepared_again(small: DataConfig) -> None:
    before = prepare(small)
    path = Path(small.dir, "a.npz")
    with np.load(path) as arrays:
        changed = {key: value[:-1] for key, value in arrays.items()}
    np.savez(path, **changed)
    after = prepare(small)
    assert after.folder != before.folder
    assert after.test_sizes == (39, 20)


def test_data_are_prepared_again_after_changed_attributes(
    small: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(small, name="test_data:Listed")
    before = prepare(config)
    monkeypatch.setattr(Listed, "mean", (0.1, 0.2, 0.3))
    assert prepare(config).mean == (0.1,)
    monkeypatch.setattr(Listed, "mean", DomainNpzFolder.mean)
    assert prepare(config) is before


def test_an_interrupted_preparation_leaves_no_files(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / "home"))
    with monkeypatch.context() as patch:
        patch.setattr(Federation, "to_json", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(small)
    assert list((tmp_path / "home" / "cache" / "data").iterdir()) == []
    assert len(prepare(small).clients) == 4


def test_an_unfinished_preparation_is_not_used(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = prepare(small).folder.name
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / "home"))
    unfinished = tmp_path / "home" / "cache" / "data" / ".unfinished-x" / name
    unfinished.mkdir(parents=True)
    (unfinished / "x_train.npy").write_bytes(b"half")
    assert len(numbers(prepare(small))) == 4


def test_a_worker_caches_large_data_up_to_a_limit_in_bytes(
    uci: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_app, "_cached", kept := {})
    monkeypatch.setattr(client_app, "_sizes", sizes := {})
    size = sum(a.nbytes for split in uci.splits(0, "train", "test") for a in split)
    monkeypatch.setattr(client_app, "_MOST_BYTES", 3 * size)  # the clients have about as much
    clients = [*range(6), 3, 4]
    for client in clients:
        read = client_app._data(uci, client)
        np.testing.assert_array_equal(read.train.x, uci.train(client).x)
        assert client_app._data(uci, client) is read
        total = sum(a.nbytes for data in kept.values() for a in (*data.train, *data.test))
        assert total <= 3 * size
    assert [key[1] for key in kept][-2:] == [3, 4]
    monkeypatch.setattr(client_app, "_MOST_BYTES", 0)
    client_app._data(uci, 0)
    assert len(kept) == len(sizes) == 1
    monkeypatch.setattr(client_app, "_MOST_BYTES", 100 * size)
    monkeypatch.setattr(client_app, "_MOST_CLIENTS", 4)
    for client in clients:
        client_app._data(uci, client)
    assert kept.keys() == sizes.keys()
    assert [key[1] for key in kept] == [2, 5, 3, 4]
    outputs = torch.zeros(100 * size, dtype=torch.uint8)
    client_app._data(uci, 4).first_stages[0] = (None, outputs)  # type: ignore[assignment]
    client_app._data(uci, 5)
    assert [key[1] for key in kept] == [5], "outputs of a frozen first stage count"


@pytest.mark.parametrize("clients", [2, 20])
def test_the_files_of_a_federation_do_not_grow_in_number_with_its_clients(
    small: DataConfig, clients: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = prepare(replace(small, clients_per_domain=clients))
    arrays = [f"{kind}_{split}.npy" for split in ("test", "train") for kind in ("ends", "x", "y")]
    there = {*arrays, "meta.json", "remarks.json"}
    assert {path.name for path in federation.folder.iterdir()} == there
    opened: list[str] = []
    sound = Path.open
    monkeypatch.setattr(Path, "open", lambda p, *a: opened.append(p.name) or sound(p, *a))  # type: ignore[func-returns-value]
    federation.test("b")
    federation.train(1)
    assert sorted(opened) == sorted(arrays)


def test_arrays_read_from_a_federation_are_their_readers_own(small: DataConfig) -> None:
    federation = prepare(small)
    before = federation.train(1)
    for array in federation.train(1):
        assert array.flags.writeable
        array[:] = 0
    for one, other in zip(before, federation.train(1), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("alpha", [0.0, 100.0])
def test_fewer_test_examples_than_clients_are_enough_if_the_server_tests(
    small: DataConfig, alpha: float
) -> None:
    few = replace(small, test_examples=2, clients_per_domain=3, dirichlet_alpha=alpha)
    federation = prepare(replace(few, validation_examples=2, examples_per_client=6))
    many = prepare(replace(small, test_examples=10))
    assert federation.test_sizes == (2, 2)
    for domain in federation.domains:
        rows = [federation.client_test(k).y for k in federation.clients_of(domain)]
        assert sorted(map(len, rows)) == [0, 1, 1]
        np.testing.assert_array_equal(federation.test(domain).y, np.concatenate(rows))
        assert {*federation.test(domain).x.ravel()} <= {*many.test(domain).x.ravel()}
    for by in ("server", "clients", "both"):
        config = replace(RunConfig(), data=few, evaluate=EvaluateConfig(by=by))
        if by == "server":
            check_client_settings(config, federation)
            continue
        with pytest.raises(DataError, match=r"'a' has too few test examples: 2 for 3 clients"):
            check_client_settings(config, federation)
        tuned = replace(config, evaluate=EvaluateConfig(by=by, test=False))
        check_client_settings(tuned, federation)
        held = replace(few, validation_examples=2)
        with pytest.raises(DataError, match=r"'a' has too few validation examples"):
            check_client_settings(
                replace(tuned, data=held), replace(federation, validation_sizes=(2, 2))
            )


def test_a_held_out_domain_cannot_have_the_name_of_a_group_of_clients(tmp_path: Path) -> None:
    x, y = np.zeros((6, 4, 4), np.uint8), np.arange(6) % 2
    for domain in ("a", "clean"):
        np.savez(tmp_path / f"{domain}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    config = DataConfig(name="npz", dir=str(tmp_path), clients_per_domain=2)
    with pytest.raises(DataError, match=r"'clean' is also the name of a group of clients"):
        prepare(replace(config, corrupted_clients=1, held_out="clean"))


def test_a_home_folder_that_cannot_be_written_is_reported(
    small: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set FAIRFLOWER_HOME to another folder"):
        prepare(small)


def test_damaged_prepared_folders_are_named(small: DataConfig, tmp_path: Path) -> None:
    federation = prepare(small)
    path = federation.folder / "x_train.npy"
    whole = path.read_bytes()
    objects = np.array([{}] * 100, object)
    for damaged in (b"half", b"", whole[:-1], whole[:100], b"PK" + whole[2:], objects):
        if isinstance(damaged, bytes):
            path.write_bytes(damaged)
        else:
            np.save(path, damaged, allow_pickle=True)
        with pytest.raises(DataError, match=r"x_train.npy .*Delete the folder"):
            federation.train(len(federation.clients) - 1)
    with pytest.raises(DataError, match="is not a prepared federation"):
        Federation.open(tmp_path)
