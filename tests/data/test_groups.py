"""Clean and corrupted clients, label shift, and domains of unequal weight."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from flwr_datasets.partitioner import DirichletPartitioner
from hypothesis import given
from hypothesis import strategies as st

from fairflower.config import DataConfig
from fairflower.data import Federation, prepare
from fairflower.data.folders import DomainNpzFolder
from fairflower.data.images import corrupt
from fairflower.data.partition import (
    Units,
    client_groups,
    dirichlet_shares,
    divide,
    series_ratio,
)
from fairflower.errors import DataError

CLASSES = 4


@pytest.fixture
def one(tmp_path: Path) -> DataConfig:
    """One domain of 203 random pictures, a fifth of its ten clients corrupted."""
    write(tmp_path, "skin", 203)
    return DataConfig(
        name="npz",
        dir=str(tmp_path),
        clients_per_domain=10,
        corrupted_clients=2,
        dirichlet_alpha=1.0,
    )


def write(folder: Path, domain: str, size: int) -> None:
    rng = np.random.default_rng(list(domain.encode()))
    arrays: dict[str, Any] = {}
    for split, count in (("train", size), ("test", 40)):
        arrays[f"x_{split}"] = rng.integers(0, 256, (count, 8, 8, 3), np.uint8)
        arrays[f"y_{split}"] = rng.choice(CLASSES, count, p=[0.6, 0.2, 0.15, 0.05])
    np.savez(folder / f"{domain}.npz", **arrays)


def source(config: DataConfig, domain: str = "skin") -> tuple[np.ndarray, np.ndarray]:
    with np.load(Path(config.dir, f"{domain}.npz")) as arrays:
        return arrays["x_train"].transpose(0, 3, 1, 2), arrays["y_train"]


def held(federation: Federation, images: np.ndarray, clients: list[int]) -> list[list[int]]:
    """The rows of ``images`` that each of these clients trains on."""
    known = {image.tobytes(): row for row, image in enumerate(images)}
    return [[known[image.tobytes()] for image in federation.train(i).x] for i in clients]


def corrupted_images(config: DataConfig, images: np.ndarray, split: str = "train") -> np.ndarray:
    rows = np.arange(len(images))
    about = {"seed": config.seed, "domain": "skin", "split": split}
    return corrupt(images, rows, config.corruption, config.severity, **about)  # type: ignore[arg-type]


# --- image quality ----------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["noise", "blur"])
def test_the_last_clients_hold_a_corrupted_share_of_every_class(
    one: DataConfig, alpha: float, kind: str
) -> None:
    config = replace(one, dirichlet_alpha=alpha, corruption=kind, severity=2)
    federation = prepare(config)
    assert federation.domains == ("clean", "corrupted")
    assert federation.clients_of("clean") == list(range(8))
    assert federation.clients_of("corrupted") == [8, 9]
    images, labels = source(config)
    clean = held(federation, images, federation.clients_of("clean"))
    bad = held(federation, corrupted_images(config, images), federation.clients_of("corrupted"))
    own = np.bincount(labels)
    cut = np.array([round(0.8 * count) for count in own])
    for parts, whole in ((clean, cut), (bad, own - cut)):
        counts = np.bincount(labels[np.concatenate(parts)], minlength=CLASSES)
        # All images of the group, except for the remainder of equal shares.
        assert (counts <= whole).all()
        assert whole.sum() - counts.sum() < (1 if alpha else len(parts))
    used = [row for part in (*clean, *bad) for row in part]
    assert len(set(used)) == len(used)
    # Equal shares leave a remainder; a Dirichlet partition has none.
    assert len(used) == 203 if alpha else 190 < len(used) <= 203
    for client, part in enumerate((*clean, *bad)):
        np.testing.assert_array_equal(federation.train(client).y, labels[part])


class Stored(DomainNpzFolder):
    """A domain without files, for tests that need only labels."""

    def all_domains(self) -> list[str]:
        return ["skin"]


def drawn(labels: np.ndarray, seed: int = 0, **changes: Any) -> np.ndarray:
    """Which images are clean, bool [N], with a fifth of the clients corrupted."""
    settings: dict[str, Any] = {"clients_per_domain": 20, "corrupted_clients": 4, **changes}
    config = DataConfig(name="npz", dir=".", seed=seed, **settings)
    clean, bad = client_groups(Stored(config), {"skin": Units.single(labels)})
    assert sorted(np.concatenate([clean.rows, bad.rows])) == list(range(len(labels)))
    assert (clean.corrupted, bad.corrupted) == (False, True)
    return np.isin(np.arange(len(labels)), clean.rows)


@pytest.mark.parametrize("seed", range(5))
def test_images_sorted_by_hospital_are_distributed_randomly_over_both_groups(seed: int) -> None:
    """A hospital's images in the clean group of a class follow a hypergeometric law.

    Of N images, K the hospital's, n clean: mean n K / N, variance
    n (K / N) (1 - K / N) (N - n) / (N - 1).
    """
    rng = np.random.default_rng(7)
    labels = rng.choice(CLASSES, 6000, p=[0.6, 0.2, 0.15, 0.05])
    hospital = np.arange(len(labels)) * 3 // len(labels)
    clean = drawn(labels, seed)
    for value in range(CLASSES):
        own = labels == value
        size, kept = own.sum(), (own & clean).sum()
        assert kept == round(0.8 * size)
        for place in range(3):
            share = (own & (hospital == place)).sum() / size
            spread = np.sqrt(kept * share * (1 - share) * (size - kept) / (size - 1))
            actual = (own & clean & (hospital == place)).sum()
            assert abs(actual - kept * share) < 4 * spread


def test_every_image_is_equally_likely_to_be_clean() -> None:
    """Every image is clean in 80 % of the draws: of 400, 320 with standard deviation 8."""
    labels = np.repeat([0, 1], [30, 10])
    often = sum(drawn(labels, seed).astype(int) for seed in range(400))
    assert np.abs(often - 320).max() < 4.5 * 8
    assert not (drawn(labels, 0) == drawn(labels, 1)).all()


def test_groups_do_not_depend_on_other_data_settings(one: DataConfig) -> None:
    labels = source(one)[1]
    first = drawn(labels)
    other: dict[str, Any] = {
        "dirichlet_alpha": 1.0,
        "corruption": "blur",
        "severity": 1,
        "examples_per_client": 3,
    }
    for key, value in other.items():
        np.testing.assert_array_equal(drawn(labels, **{key: value}), first)


def test_the_fingerprint_of_a_federation_depends_on_its_clients_images(one: DataConfig) -> None:
    first = prepare(one)
    assert len(first.fingerprint) == 64
    assert first.fingerprint == Federation.from_json(first.to_json(), first.folder).fingerprint
    others = [
        replace(one, seed=1),
        replace(one, corruption="blur"),
        replace(one, corrupted_clients=3),
        replace(one, dirichlet_alpha=0.0),
        replace(one, test_examples=20),
    ]
    assert len({first.fingerprint, *(prepare(other).fingerprint for other in others)}) == 6


def test_both_groups_are_tested_on_the_same_images(one: DataConfig) -> None:
    federation = prepare(one)
    assert federation.test_sizes == (40, 40)
    with np.load(Path(one.dir, "skin.npz")) as arrays:
        images, labels = arrays["x_test"].transpose(0, 3, 1, 2), arrays["y_test"]
    for group, versions in (
        ("clean", images),
        ("corrupted", corrupted_images(one, images, "test")),
    ):
        known = {image.tobytes(): row for row, image in enumerate(versions)}
        tested = federation.test(group)
        order = [known[image.tobytes()] for image in tested.x]
        assert sorted(order) == list(range(40))
        np.testing.assert_array_equal(tested.y, labels[order])


def test_the_corruption_does_not_change_the_partition(one: DataConfig) -> None:
    noisy = prepare(one)
    blurred = prepare(replace(one, corruption="blur", severity=5))
    assert noisy.clients == blurred.clients
    np.testing.assert_array_equal(noisy.train(0).x, blurred.train(0).x)
    assert (noisy.train(9).x != blurred.train(9).x).any()
    assert noisy.sources[1].endswith("skin.npz with Gaussian noise, sigma 0.18")
    assert blurred.sources[1].endswith("skin.npz with motion blur, radius 9, sigma 2.5")
    assert noisy.sources[0].endswith("skin.npz")


def test_images_are_corrupted_after_resizing(one: DataConfig) -> None:
    """Noise of neighboring pixels is uncorrelated, which enlarged noise would not be."""
    grey = np.full((60, 8, 8), 128, np.uint8)
    labels = np.arange(60) % CLASSES
    np.savez(Path(one.dir, "skin.npz"), x_train=grey, y_train=labels, x_test=grey, y_test=labels)
    x = prepare(replace(one, image_size=32)).test("corrupted").x.astype(float)
    assert x.shape[2:] == (32, 32)
    assert abs(np.corrcoef(x[..., :-1].ravel(), x[..., 1:].ravel())[0, 1]) < 0.05


def test_several_domains_have_two_groups_each(one: DataConfig) -> None:
    write(Path(one.dir), "eyes", 60)
    federation = prepare(replace(one, clients_per_domain=3, corrupted_clients=1))
    names = ("eyes clean", "eyes corrupted", "skin clean", "skin corrupted")
    assert federation.domains == names
    assert [len(federation.clients_of(name)) for name in names] == [2, 1, 2, 1]
    alone = prepare(replace(one, clients_per_domain=3, corrupted_clients=1, domains="skin"))
    assert alone.domains == ("clean", "corrupted")
    np.testing.assert_array_equal(alone.test("corrupted").x, federation.test("skin corrupted").x)


@pytest.mark.parametrize("count", [10, 11])
def test_at_least_one_client_must_be_clean(one: DataConfig, count: int) -> None:
    with pytest.raises(
        DataError, match=f"corrupted-clients = {count}: at least one of the 10 clients"
    ):
        prepare(replace(one, corrupted_clients=count))


# --- label shift ------------------------------------------------------------------------


def shares(alpha: float, seed: int, domain: str = "a") -> np.ndarray:
    """Rows of each class [classes, clients] under a Dirichlet partition."""
    labels, clients = np.arange(CLASSES * 400) % CLASSES, 5
    parts = divide(domain, labels, [len(labels) // clients] * clients, seed, alpha=alpha)
    assert sorted(row for part in parts for row in part) == list(range(len(labels)))
    return np.stack([np.bincount(labels[part], minlength=CLASSES) for part in parts], axis=1)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.integers(1, 6),
    st.sampled_from([0.05, 0.3, 1.0, 50.0]),
    st.integers(0, 2**32),
)
def test_dirichlet_shares_match_flowers_partitioner(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    values = np.array(labels, np.int64)
    mine = dirichlet_shares(values, clients, alpha, np.random.default_rng(seed))
    partitioner = DirichletPartitioner(clients, "label", alpha, min_partition_size=2, seed=seed)
    rows = np.arange(len(values))
    partitioner.dataset = Dataset.from_dict({"label": values, "row": rows})
    with warnings.catch_warnings(action="ignore"):  # for every rejected draw
        try:
            theirs = [partitioner.load_partition(k)["row"][:] for k in range(clients)]
        except ValueError:
            assert mine is None
            return
    assert mine is not None
    assert [share.tolist() for share in mine] == theirs


@pytest.mark.slow
def test_shares_of_a_class_have_the_moments_of_a_dirichlet_distribution() -> None:
    """Of K = 5 with alpha 1: mean 1/5, variance (K - 1) / (K^2 (K + 1)) = 4 / 150."""
    drawn = np.concatenate([shares(1.0, seed) for seed in range(50)]) / 400
    assert drawn.mean(axis=0) == pytest.approx(np.full(5, 1 / 5), abs=4 * 0.163 / 14)
    assert drawn.var() == pytest.approx(4 / 150, rel=0.2)


def test_a_large_alpha_gives_equal_shares_and_a_small_alpha_concentrates_classes() -> None:
    assert abs(shares(1e7, 0) - 80).max() <= 1
    largest = np.concatenate([shares(0.05, seed).max(axis=1) for seed in range(10)])
    assert np.median(largest) > 300


def test_label_shift_depends_on_the_seed_and_the_domain() -> None:
    np.testing.assert_array_equal(shares(1.0, 3), shares(1.0, 3))
    assert (shares(1.0, 3) != shares(1.0, 4)).any()
    assert (shares(1.0, 3) != shares(1.0, 3, "b")).any()


def test_only_the_chosen_number_of_images_is_divided(one: DataConfig) -> None:
    config = replace(one, corrupted_clients=0, clients_per_domain=4, examples_per_client=20)
    federation = prepare(config)
    sizes = [client.num_examples for client in federation.clients]
    assert sum(sizes) == 80
    assert min(sizes) >= 2
    assert len(set(sizes)) > 1


def test_an_alpha_too_small_for_many_clients_is_refused(one: DataConfig) -> None:
    with pytest.raises(DataError, match=r"= 0.001 gives each of 100 clients at least two of the"):
        prepare(replace(one, clients_per_domain=100, corrupted_clients=0, dirichlet_alpha=0.001))


# --- domains of unequal weight ----------------------------------------------------------


@pytest.fixture
def five(tmp_path: Path) -> DataConfig:
    """Five domains of 3,000 images, of which the code of FedGCR takes 2,975."""
    for domain in "abcde":
        x, y = np.zeros((3000, 2, 2), np.uint8), np.arange(3000) % CLASSES
        np.savez(tmp_path / f"{domain}.npz", x_train=x, y_train=y, x_test=x[:20], y_test=y[:20])
    return DataConfig(name="npz", dir=str(tmp_path), imbalance_factor=5, examples_per_client=595)


def by_domain(federation: Federation) -> list[list[int]]:
    return [
        [federation.clients[i].num_examples for i in federation.clients_of(domain)]
        for domain in federation.domains
    ]


@pytest.mark.parametrize(
    ("domains", "factor", "ratio"),
    [(5, 5, 1.5), (5, 10, 1.8), (6, 5, 1.4), (6, 10, 1.6), (4, 5, 1.7), (4, 10, 2.16)],
)
def test_imbalance_ratios_match_fedgcr(domains: int, factor: int, ratio: float) -> None:
    assert series_ratio(factor, domains) == ratio


def test_an_imbalance_factor_above_the_limit_is_refused() -> None:
    """With five domains no decimal ratio gives 10**18 again, so a search for one would not end."""
    with pytest.raises(DataError, match=r"imbalance-factor = 10*: expected at most 1000000"):
        series_ratio(10**18, 5)


@given(st.integers(2, 60), st.integers(2, 9))
def test_the_first_domain_has_factor_times_the_clients_of_the_last(
    factor: int, domains: int
) -> None:
    ratio = series_ratio(factor, domains)
    clients = [round(ratio ** (domains - 1 - i)) for i in range(domains)]
    assert (clients[0], clients[-1]) == (factor, 1)
    assert clients == sorted(clients, reverse=True)


def test_a_small_domain_uses_all_its_images_and_limits_later_domains(five: DataConfig) -> None:
    x, y = np.zeros((100, 2, 2), np.uint8), np.arange(100) % CLASSES
    np.savez(Path(five.dir, "b.npz"), x_train=x, y_train=y, x_test=x, y_test=y)
    sizes = by_domain(prepare(five))
    assert 2970 < sum(sizes[0]) <= 5 * 595
    assert 98 <= sum(sizes[1]) <= 100
    assert sum(sizes[2]) <= 100 / 1.5


def test_all_images_of_the_first_domain_are_used_by_default(five: DataConfig) -> None:
    assert 2996 <= sum(by_domain(prepare(replace(five, examples_per_client=0)))[0]) <= 3000


def test_domains_with_unequal_numbers_of_clients_have_consistent_ids_and_tests(
    five: DataConfig,
) -> None:
    federation = prepare(five)
    assert [client.client_id for client in federation.clients] == list(range(13))
    assert federation.clients_of("b") == [5, 6, 7]
    assert federation.test_sizes == (20,) * 5
    for domain in federation.domains:
        own = federation.clients_of(domain)
        assert sum(len(federation.client_test(i).y) for i in own) == 20
    with pytest.raises(DataError, match="13 clients; there is no client 13"):
        federation.train(13)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"domains": "a"}, "imbalance-factor = 5 needs several domains"),
        (
            {"corrupted_clients": 1},
            "imbalance-factor and data.corrupted-clients cannot be combined",
        ),
        ({"examples_per_client": 700}, r"'a' has 3000 training examples, but 5 clients x 265 to"),
        ({"examples_per_client": 1}, r"[1-9] of the .* would get no training example"),
    ],
)
def test_impossible_imbalance_settings_are_refused(
    five: DataConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prepare(replace(five, **change))
