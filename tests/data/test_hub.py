"""Small copies of CIFAR-10 and FEMNIST in their Hub formats; data sets with partitioners."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    NaturalIdPartitioner,
    ShardPartitioner,
)
from PIL import Image as Picture
from runs import SMALL, run

from fairflower.config import DataConfig, RunConfig
from fairflower.data import Federation, images, prepare
from fairflower.data.sites import open_site
from fairflower.errors import DataError
from fairflower.published.image_sets import CIFAR10
from fairflower.report import read_run

#: Writer -> number of images; `f3_13` has too few.
WRITERS = {"f0_10": 12, "f1_11": 7, "f2_12": 20, "f3_13": 2}


def square(value: int, side: int, mode: str) -> Any:
    return Picture.new(mode, (side, side), value if mode == "L" else (value, 0, 0))


def cifar(count: int = 40) -> DatasetDict:
    """Images whose red value is the number of the image."""

    def split(n: int) -> Dataset:
        features = Features({"img": Image(), "label": ClassLabel(num_classes=10)})
        pictures = [square(i, 32, "RGB") for i in range(n)]
        return Dataset.from_dict({"img": pictures, "label": [i % 10 for i in range(n)]}, features)

    return DatasetDict(train=split(count), test=split(20))


def femnist() -> DatasetDict:
    """Images of the writers in turn, whose brightness is 10 times the writer's image number."""
    rows = sorted((i, w) for w, count in WRITERS.items() for i in range(count))
    features = Features(
        {
            "image": Image(),
            "writer_id": Value("string"),
            "hsf_id": Value("int64"),
            "character": ClassLabel(num_classes=62),
        }
    )
    columns = {
        "image": [square(10 * i, 28, "L") for i, _ in rows],
        "writer_id": [w for _, w in rows],
        "hsf_id": [0] * len(rows),
        "character": [i % 3 for i, _ in rows],
    }
    return DatasetDict(train=Dataset.from_dict(columns, features))


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    cifar().save_to_disk(str(tmp_path / "cifar10"))
    femnist().save_to_disk(str(tmp_path / "femnist"))
    return DataConfig(name="cifar10", dir=str(tmp_path), clients_per_domain=2)


def numbers(federation: Federation, client: int, split: str = "train") -> list[int]:
    data = federation.train(client) if split == "train" else federation.client_test(client)
    return [int(image) for image in data.x[:, 0, 5, 5]]


def changed(config: DataConfig, **changes: Any) -> DataConfig:
    return DataConfig(**vars(config) | changes)


# --- CIFAR-10 -------------------------------------------------------------------------------


def test_cifar_is_one_domain_of_equal_or_dirichlet_shares(config: DataConfig) -> None:
    equal = prepare(config)
    assert (equal.domains, equal.shape, equal.num_classes) == (("cifar10",), (3, 32, 32), 10)
    assert sorted(numbers(equal, 0) + numbers(equal, 1)) == list(range(40))
    assert [client.num_examples for client in equal.clients] == [20, 20]
    shifted = prepare(changed(config, dirichlet_alpha=0.2))
    assert sorted(numbers(shifted, 0) + numbers(shifted, 1)) == list(range(40))
    shares = [np.array(client.class_counts) / client.num_examples for client in shifted.clients]
    assert np.abs(shares[0] - shares[1]).max() > 0.1


def test_cifar_and_femnist_are_loaded_from_the_hub_without_a_folder(
    config: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetched(name: str, *rest: Any) -> DatasetDict:
        asked.append(name)
        return cifar() if "cifar" in name else femnist()

    monkeypatch.delenv("FAIRFLOWER_DATA", raising=False)
    monkeypatch.setattr("fairflower.data.folders.load_hub", fetched)
    for name in ("cifar10", "femnist"):
        federation = prepare(changed(config, name=name, dir=""))
        assert federation.sources == (f"Hugging Face {asked[-1]}",)
    assert asked == ["uoft-cs/cifar10", "flwrlabs/femnist"]


def test_the_hub_is_read_by_flwr_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for FederatedDataset: only the requested splits are loaded."""

    class Reached:
        def __init__(self, dataset: str, **options: Any) -> None:
            assert (dataset, options["partitioners"]) == ("flwrlabs/femnist", {})

        def load_split(self, split: str) -> Dataset:
            return femnist()[split]

    monkeypatch.setattr("flwr_datasets.FederatedDataset", Reached)
    splits = images.load_hub("flwrlabs/femnist", None, "", ("train",))
    assert set(splits) == {"train"}


class Shards(CIFAR10):
    def partitioner(self) -> Any:
        return ShardPartitioner(4, "label", num_shards_per_partition=2, shuffle=False)


def test_clients_hold_the_partitions_of_a_flwr_datasets_partitioner(config: DataConfig) -> None:
    """Four partitions of two shards of five, as the partitioner itself makes them."""
    federation = prepare(changed(config, name="test_hub:Shards", clients_per_domain=4))
    own = Shards(config).partitioner()
    own.dataset = cifar()["train"]
    for client in range(4):
        expected = [int(np.asarray(row["img"])[0, 0, 0]) for row in own.load_partition(client)]
        assert sorted(numbers(federation, client)) == sorted(expected)
    assert sorted(i for k in range(4) for i in numbers(federation, k, "test")) == list(range(20))


def test_clients_are_drawn_from_a_larger_number_of_partitions(config: DataConfig) -> None:
    four = prepare(changed(config, name="test_hub:Shards", clients_per_domain=4))
    all_of = [sorted(numbers(four, client)) for client in range(4)]
    draws = set()
    for seed in range(4):
        two = prepare(changed(config, name="test_hub:Shards", seed=seed))
        drawn = [all_of.index(sorted(numbers(two, client))) for client in range(2)]
        assert drawn == sorted(drawn)
        draws.add(tuple(drawn))
    assert len(draws) > 1
    with pytest.raises(
        DataError, match=r"has only 4 partitions .* expected 5. Lower data.clients-per-"
    ):
        prepare(changed(config, name="test_hub:Shards", clients_per_domain=5))


@pytest.mark.parametrize(
    "changes",
    [
        {"fraction": 0.1},
        {"examples_per_client": 3},
        {"dirichlet_alpha": 1.0},
        {"corrupted_clients": 1},
        {"imbalance_factor": 5},
        {"validation_examples": 2},
    ],
)
def test_settings_that_divide_data_are_refused_with_a_partitioner(
    changes: dict[str, Any], config: DataConfig
) -> None:
    with pytest.raises(DataError, match=r"data.*: test_hub:Shards is divided by its partitioner"):
        prepare(changed(config, name="test_hub:Shards", **changes))


class Skewed(CIFAR10):
    def partitioner(self) -> Any:
        return DirichletPartitioner(2, "writer", alpha=1.0)


def test_a_partitioner_without_its_column_is_refused(config: DataConfig) -> None:
    message = "DirichletPartitioner cannot divide the examples of 'cifar10' by label"
    with pytest.raises(DataError, match=message):
        prepare(changed(config, name="test_hub:Skewed"))


def test_a_site_cannot_use_a_data_set_with_a_partitioner(config: DataConfig) -> None:
    with pytest.raises(DataError, match=r"the data of a site are not divided. Choose another"):
        open_site(changed(config, name="femnist"), "femnist")


# --- FEMNIST --------------------------------------------------------------------------------


def test_a_femnist_client_is_a_writer_tested_on_their_own_images(config: DataConfig) -> None:
    federation = prepare(changed(config, name="femnist", clients_per_domain=3))
    assert (federation.domains, federation.shape) == (("femnist",), (1, 28, 28))
    assert federation.class_names[10] == "A"
    for client, count in enumerate(list(WRITERS.values())[:3]):
        test = [i for i in range(count) if i % 5 == 0]
        assert sorted(numbers(federation, client, "test")) == [10 * i for i in test]
        trained = sorted(set(range(count)) - set(test))
        assert sorted(numbers(federation, client)) == [10 * i for i in trained]
        x, y = federation.train(client)
        assert np.array_equal(x[:, 0, 0, 0] // 10 % 3, y)
    assert federation.test_sizes == (3 + 2 + 4,)


def test_a_run_on_femnist_has_the_accuracy_of_each_writer(
    config: DataConfig, tmp_path: Path
) -> None:
    flat = {
        "data.name": "femnist",
        "data.dir": config.dir,
        "data.clients-per-domain": 3,
        "evaluate.by": "clients",
        "output-dir": str(tmp_path),
    }
    result = read_run(
        run(
            RunConfig.from_flat(
                SMALL | flat | {"data.examples-per-client": 0, "data.test-examples": 0}
            ),
            nodes=3,
        )
    )
    assert result.by_client.final().shape == (3,)
    weights = np.array([3, 2, 4]) / 9
    assert result.final() == pytest.approx([weights @ result.by_client.final()])


def test_a_writer_with_too_few_images_is_not_a_client(config: DataConfig) -> None:
    with pytest.raises(
        DataError, match="'femnist' has only 3 partitions with at least two training"
    ):
        prepare(changed(config, name="femnist", clients_per_domain=4))
    with pytest.raises(DataError, match=r"data.test-examples: femnist is divided"):
        prepare(changed(config, name="femnist", test_examples=4))
    kept = prepare(changed(config, name="femnist", clients_per_domain=3, validation_fraction=0.1))
    assert [client.num_examples for client in kept.clients] == [8, 4, 15]


def test_femnist_without_writers_is_refused(config: DataConfig, tmp_path: Path) -> None:
    folder = tmp_path / "anonymous"
    anonymous = femnist()["train"].remove_columns("writer_id")
    DatasetDict(train=anonymous).save_to_disk(str(folder / "femnist"))
    with pytest.raises(
        DataError, match=r"expected the split train with the columns image, writer_id"
    ):
        prepare(changed(config, name="femnist", dir=str(folder)))
    x, y = np.zeros((9, 28, 28), np.uint8), np.zeros(9, np.int64)
    arrays = tmp_path / "arrays"
    arrays.mkdir()
    np.savez(arrays / "femnist.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    with pytest.raises(DataError, match=r"femnist.npz does not name the writers. Use"):
        prepare(changed(config, name="femnist", dir=str(arrays)))


class Writers(CIFAR10):
    """A data set whose test examples have the writers in another order, and one more writer."""

    def partitioner(self) -> Any:
        return NaturalIdPartitioner("writer")

    def columns(self, domain: str, split: str) -> dict[str, np.ndarray]:
        names = list("abcd") if split == "train" else list("edcb")
        rows = 40 if split == "train" else 20
        return {"writer": np.array([names[i % len(names)] for i in range(rows)])}


def test_a_client_is_tested_on_the_examples_of_its_writer(config: DataConfig) -> None:
    """Writer a has no test examples, and writer e no training examples."""
    federation = prepare(changed(config, name="test_hub:Writers", clients_per_domain=3))
    for client in range(3):
        trained, tested = numbers(federation, client), numbers(federation, client, "test")
        (writer,) = {"abcd"[i % 4] for i in trained}
        assert {"edcb"[i % 4] for i in tested} == {writer}
    with pytest.raises(DataError, match="has only 3 partitions with at least two"):
        prepare(changed(config, name="test_hub:Writers", clients_per_domain=4))


class OneSided(Writers):
    def columns(self, domain: str, split: str) -> dict[str, np.ndarray]:
        table = super().columns(domain, split)
        return table if split == "train" else {"author": table["writer"]}


def test_a_column_that_only_one_split_has_is_named(config: DataConfig) -> None:
    with pytest.raises(DataError, match="only one of the splits has the column 'author'"):
        prepare(changed(config, name="test_hub:OneSided", clients_per_domain=2))
