"""Features and token ids are prepared, divided, batched and shown as images are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from rich.console import Console
from tiny_data_sets import Table, Texts, TwoDomains

from fairflower.config import DataConfig
from fairflower.data import (
    DataSet,
    FeatureSet,
    Federation,
    Split,
    TokenSet,
    data_folder,
    prepare,
    with_absolute_dir,
)
from fairflower.data.cache import make_data_set
from fairflower.data.data_set import attributes_of
from fairflower.data.show import clients_table, examples_table
from fairflower.data.sites import as_in, fits, merge_sites, open_site
from fairflower.errors import DataError, UserError
from fairflower.published.tables import RandHIE, _table
from fairflower.registry import KINDS
from fairflower.testing import check_data
from fairflower.training.batches import ClientData, examples_of

TABLE = DataConfig(name="tiny_data_sets:Table", clients_per_domain=2)
TEXTS = DataConfig(name="tiny_data_sets:Texts", clients_per_domain=2)


def rows(federation: Federation, split: str = "train") -> list[list[int]]:
    """Return the rows of `Table` or `Texts` that each client holds."""
    numbers = []
    for client in federation.clients:
        x = federation.train(client.client_id).x
        if split != "train":
            x = federation.client_test(client.client_id, split).x
        first = x[:, 0].astype(int) % 1000
        numbers.append((first // 10 if federation.kind == "features" else first - 1).tolist())
    return numbers


class Hospitals(FeatureSet):
    """A user's own table, which reads data.dir as the documentation's example does."""

    @property
    def folder(self) -> Path | None:
        return data_folder(self.config)

    def all_domains(self) -> list[str]:
        assert self.folder is not None
        return sorted(path.stem for path in self.folder.glob("*.csv"))

    def labels(self, domain: str, split: str) -> Any:
        return np.arange(10) % 2

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return np.ones((len(rows), 2), np.float32)

    def fingerprint(self) -> Any:
        return 0

    def source(self, domain: str) -> str:
        return domain


def test_a_table_of_ones_own_may_read_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = DataConfig(name="test_vectors:Hospitals", dir="tables")
    (tmp_path / "tables").mkdir()
    with pytest.raises(DataError, match=r"Hospitals found no domain in data.dir = 'tables'"):
        prepare(config)
    (tmp_path / "tables" / "north, main.csv").touch()
    (tmp_path / "tables" / "south.csv").touch()
    assert prepare(config).domains == ("north, main", "south")
    assert with_absolute_dir(config).dir == str(tmp_path / "tables")
    named = replace(config, domains="north, main")
    assert prepare(replace(named, clients_per_domain=1)).domains == ("north, main",)


def test_long_arrays_of_a_data_set_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    data_set = make_data_set(TABLE)
    monkeypatch.setattr(type(data_set), "mean", np.zeros(2000), raising=False)
    before = attributes_of(data_set)
    other = np.zeros(2000)
    other[1000] = 1
    monkeypatch.setattr(type(data_set), "mean", other)
    assert attributes_of(data_set) != before


def test_features_of_another_precision_are_features() -> None:
    split = Split(np.ones((3, 2)), np.zeros(3, np.int64))
    assert ClientData(split, split, (0.0, 0.0), (1.0, 1.0), num_classes=2).kind == "features"


# --- federations ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "kind", "shape", "dtype"),
    [(TABLE, "features", (3,), np.float32), (TEXTS, "tokens", (41, 5), np.int64)],
)
def test_every_row_is_held_by_a_client_with_its_label(
    config: DataConfig, kind: str, shape: tuple[int, ...], dtype: type
) -> None:
    federation = prepare(config)
    assert (federation.kind, federation.shape, federation.domains) == (kind, shape, ("a", "b"))
    for domain in (0, 2):
        held = rows(federation)[domain : domain + 2]
        assert sorted(held[0] + held[1]) == list(range(40))
        assert len(held[0]) == len(held[1])
    for client in federation.clients:
        x, y = federation.train(client.client_id)
        assert x.dtype == dtype
        assert np.array_equal(y % 4, np.array(rows(federation)[client.client_id]) % 4)


@pytest.mark.parametrize("config", [TABLE, TEXTS])
def test_the_settings_that_divide_images_also_divide_vectors(config: DataConfig) -> None:
    few = prepare(replace(config, examples_per_client=7, test_examples=6))
    assert [client.num_examples for client in few.clients] == [7] * 4
    assert few.test_sizes == (6, 6)
    shifted = prepare(replace(config, dirichlet_alpha=0.3))
    assert len({client.class_counts for client in shifted.clients}) > 1
    kept = prepare(replace(config, validation_fraction=0.25))
    for train, out in zip(rows(kept), rows(kept, "validation"), strict=True):
        assert (len(train), len(out)) == (15, 5)
        assert not set(train) & set(out)
    unequal = prepare(replace(config, imbalance_factor=2))
    assert [client.domain for client in unequal.clients] == ["a"] * 2 + ["b"]


def test_features_without_a_declared_scale_are_not_standardized() -> None:
    federation = prepare(replace(TABLE, name="test_vectors:Bare"))
    assert federation.mean == (0.0,) * 3
    x, y = next(examples_of(federation.train(0), federation.mean, federation.std).eval_batches(50))
    assert np.array_equal(x.numpy(), federation.train(0).x)
    assert np.array_equal(y.numpy(), federation.train(0).y)


class Bare(Table):
    mean = std = ()


def test_batches_are_standardized_by_the_declared_scale() -> None:
    federation = prepare(TABLE)
    split = federation.train(0)
    examples = examples_of(split, federation.mean, federation.std)
    (x, _), *_ = examples.eval_batches(50)
    expected = (split.x - np.array([100, 101, 0])) / np.array([10, 1, 1])
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-6)
    batches = [x for x, _ in examples.epoch_batches(8, torch.Generator().manual_seed(0))]
    assert [len(x) for x in batches] == [8, 8, 4]
    drawn = torch.cat(batches)
    assert not torch.equal(drawn, x)
    assert torch.equal(drawn.sort(0).values, x.sort(0).values)


def test_token_ids_are_not_changed_in_batches() -> None:
    federation = prepare(TEXTS)
    split = federation.train(1)
    (x, _), *_ = examples_of(split, (), ()).eval_batches(50)
    assert x.dtype == torch.int64
    assert np.array_equal(x.numpy(), split.x)


@pytest.mark.parametrize("config", [TABLE, TEXTS])
def test_a_federation_of_vectors_is_read_back_and_checked(config: DataConfig) -> None:
    federation = prepare(config)
    again = Federation.from_json(federation.to_json(), federation.folder)
    again.check()
    assert again == federation
    wrong: list[dict[str, Any]] = [
        {"domains": ("AVG", *federation.domains[1:])},
        {"shape": ()},
        {"shape": (1, 2, 3, 4)},
        {"mean": (1.0,) * 9},
        {"augment": replace(federation.augment, crop_padding=1)},
    ]
    for change in wrong:
        with pytest.raises(DataError):
            replace(federation, **change).check()


# --- rules for data sets --------------------------------------------------------------------


def test_tables_and_texts_pass_check_data() -> None:
    for kind in (Table, Bare, Texts):
        check_data(kind)


class Missing(Table):
    def features(self, domain: str, split: str, rows: Any) -> Any:
        return np.where(rows[:, None] == 0, np.nan, 1).astype(np.float32)


class Doubled(Table):
    def features(self, domain: str, split: str, rows: Any) -> Any:
        return super().features(domain, split, rows).astype(np.float64)


class Half(Table):
    def features(self, domain: str, split: str, rows: Any) -> Any:
        return super().features(domain, split, rows[1:])


class Unscaled(Table):
    mean = (0.0,)


class Beyond(Texts):
    vocabulary = 40


class Unbounded(Texts):
    vocabulary = 0


class Words(Texts):
    def tokens(self, domain: str, split: str, rows: Any) -> Any:
        return np.full((len(rows), 2), "word")


class Growing(Table):
    mean = std = ()

    def features(self, domain: str, split: str, rows: Any) -> Any:
        return np.zeros((len(rows), 3 + (domain == "b")), np.float32)


class Nothing(TwoDomains, DataSet):
    pass


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Missing, "a: train: features: found NaN or infinity; expected finite numbers"),
        (Doubled, r"a: train: features: found float64 \[\d+, 3\]; expected float32 \[\d+, D\]"),
        (Unscaled, "features, .* in mean or std|3 channels or features, but 1 means"),
        (
            Beyond,
            "a: train: tokens: found 1 to 40; expected 0 to vocabulary - 1 = 39|found 0 to 40",
        ),
        (Unbounded, r"Unbounded\.vocabulary is missing\. Set it to the number"),
        (Words, "expected whole numbers"),
        (Half, r"a: train: features: found float32 \[\d+, 3\]; expected float32 \[\d+, D\]"),
    ],
)
def test_data_sets_that_violate_a_rule_are_refused(kind: type[Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_data(kind)
    with pytest.raises(DataError, match=message):
        prepare(replace(TABLE, name=f"test_vectors:{kind.__name__}"))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_domain_without_examples_in_a_split_is_refused(
    split: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def labels(self: Table, domain: str, of: str) -> Any:
        return np.arange(0 if of == split else 12) % 4

    monkeypatch.setattr(Table, "labels", labels)
    named = "training" if split == "train" else split
    with pytest.raises(DataError, match=rf"'a' has no {named} examples\. Add examples, or remove"):
        prepare(replace(TABLE, seed=71))


def test_splits_with_different_numbers_of_features_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def features(self: Table, domain: str, split: str, rows: Any) -> Any:
        return np.zeros((len(rows), 4 if (domain, split) == ("b", "test") else 3), np.float32)

    monkeypatch.setattr(Table, "features", features)
    message = r"\(a 3, b 3 in train and 4 in test\)"
    for held_out in (0, 0.2):
        with pytest.raises(DataError, match=message):
            prepare(replace(TABLE, seed=71, validation_fraction=held_out))


def test_domains_with_different_numbers_of_features_are_refused() -> None:
    with pytest.raises(DataError, match=r"have different numbers of features \(a 3, b 4\)"):
        prepare(replace(TABLE, name="test_vectors:Growing"))


def test_a_data_set_without_examples_names_the_method_to_define() -> None:
    with pytest.raises(UserError, match=r"Nothing\.images.*FeatureSet or TokenSet"):
        prepare(replace(TABLE, name="test_vectors:Nothing"))


# --- sites ----------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TABLE, TEXTS])
def test_sites_with_vectors_are_merged_into_one_federation(config: DataConfig) -> None:
    sites = [open_site(config, domain) for domain in ("a", "b")]
    whole = merge_sites(sites)
    assert whole.shape == sites[0].shape
    for site in sites:
        assert fits(site, whole)
        x, y = as_in(whole, site, site.train(0))
        assert np.array_equal(x, site.train(0).x)
        assert np.array_equal(y, site.train(0).y)


def test_sites_with_different_numbers_of_features_are_refused() -> None:
    one, other = open_site(TABLE, "a"), replace(open_site(TABLE, "b"), shape=(4,))
    with pytest.raises(DataError, match=r"sites' features differ in size \(a 3, b 4\). Give all"):
        merge_sites([one, other])
    assert not fits(one, other)
    with pytest.raises(DataError, match="differ in size"):
        merge_sites([one, open_site(TEXTS, "b")])


# --- the tables of clients and examples -----------------------------------------------------


def shown(federation: Federation, names: tuple[str, ...] = ()) -> str:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(clients_table(federation), examples_table(federation, names))
    return captured.get()


def test_features_are_shown_by_their_means_and_deviations() -> None:
    output = shown(prepare(TABLE), Table.feature_names)
    (line,) = (line for line in output.splitlines() if "tens and one" in line)
    # Rows 0 to 39: the mean of 10 n + 1; domain b has a thousand more.
    assert line.split()[3:] == ["196", "±115", "1.2e+03", "±115"]
    assert "feature 2" in shown(prepare(TABLE))


def test_texts_are_shown_by_their_length_and_vocabulary() -> None:
    lines = [line.split() for line in shown(prepare(TEXTS)).splitlines()]
    assert ["tokens", "per", "text", "3", "±0", "3", "±0"] in lines
    assert ["distinct", "tokens,", "out", "of", "40", "40", "40"] in lines


# --- the embedded table ---------------------------------------------------------------------

SITES = DataConfig(name="randhie:groups=site:visits=1")


def test_randhie_passes_check_data() -> None:
    check_data(RandHIE)
    check_data(RandHIE, SITES, groups="site", visits=1)


def test_randhie_has_the_means_of_the_original_data() -> None:
    """Means before rounding, in statsmodels 0.15.0."""
    expected = {
        "mdvis": 2.860426,
        "logc": 2.383341,
        "idp": 0.259980,
        "lpi": 4.707894,
        "physlm": 0.123500,
        "disea": 11.244492,
        "linc": 8.708265,
        "num": 1.248156,
        "educdec": 11.966805,
        "xage": 25.722328,
        "female": 0.517038,
        "child": 0.401337,
        "fchild": 0.193710,
    }
    table = _table("randhie")
    assert {len(column) for column in table.values()} == {20190}
    for name, mean in expected.items():
        assert table[name].mean() == pytest.approx(mean, rel=2e-4), name
    shares = [(table["health"] == number).mean() for number in (1, 2, 3)]
    assert shares == pytest.approx([0.362, 0.077, 0.015], abs=5e-4)


@pytest.mark.parametrize("config", [DataConfig(name="randhie"), SITES], ids=["health", "site"])
def test_no_person_of_randhie_is_in_both_training_and_test(config: DataConfig) -> None:
    data_set = RandHIE(config, **({"groups": "site", "visits": 1} if config == SITES else {}))
    seen = []
    for domain in data_set.domains:
        train, test = (data_set.column("person", domain, split) for split in ("train", "test"))
        assert not set(train) & set(test)
        seen += [*train, *test]
    assert sorted(seen) == sorted(_table("randhie")["person"])


def test_randhie_has_its_documented_sizes_and_statistics() -> None:
    federation = prepare(DataConfig(name="randhie", clients_per_domain=1))
    assert [client.num_examples for client in federation.clients] == [8807, 5838, 1242, 236]
    assert federation.test_sizes == (2212, 1471, 318, 66)
    x = np.concatenate([federation.train(k).x for k in range(4)]).astype(np.float64)
    np.testing.assert_allclose(federation.mean, x.mean(0), rtol=1e-3)
    np.testing.assert_allclose(federation.std, x.std(0), rtol=1e-3)
    poor = federation.test("poor").y.sum() + federation.train(3).y.sum()
    assert poor / 302 == pytest.approx(0.65, abs=0.005)


@pytest.mark.parametrize("groups", ["health", "site"])
def test_visits_are_numbers_of_which_classes_are_made(groups: Literal["health", "site"]) -> None:
    config = DataConfig(name=f"randhie:target=visits:groups={groups}", clients_per_domain=1)
    federation = prepare(config)
    check_data(RandHIE, config, target="visits", groups=groups)
    numbers, classes = (RandHIE(DataConfig(), groups=groups, target=t) for t in ("visits", "class"))
    for domain in federation.domains:
        visits = numbers.labels(domain, "test")
        np.testing.assert_array_equal(visits >= 2, classes.labels(domain, "test"))
        np.testing.assert_array_equal(np.sort(federation.test(domain).y), np.sort(visits))
    y = np.concatenate([federation.train(k).y for k in range(4)]).astype(float)
    task: Any = federation.learns
    assert (task.primary.unit, federation.num_classes) == ("visits", 1)
    if groups == "health":
        assert (task.center, task.scale) == pytest.approx((y.mean(), y.std()), rel=1e-3)


def test_prepared_data_are_not_reused_for_another_task(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DataConfig(name="heart-disease:target=severity", clients_per_domain=1)
    prepare(config)
    monkeypatch.setattr("fairflower.published.tables._GRADES", other := "regression:unit=points")
    assert prepare(config).task == other


def test_the_embedding_script_gives_the_columns_and_values_of_randhie(tmp_path: Path) -> None:
    import embed_randhie
    import pandas as pd

    columns = {name: [0.0, 1.0, 2.0] for name in embed_randhie.ROUNDED}
    years = {"zper": [7, 7, 9], "site": [1, 1, 2], "mdvis": [3, 0, 1]}
    health = {"hlthg": [0, 0, 0], "hlthf": [1, 1, 0], "hlthp": [0, 0, 1]}
    frame = pd.DataFrame({**columns, **years, **health, "educdec": [12.0, None, 9.04]})
    frame.to_csv(tmp_path / "randhie.csv")
    packed = json.loads(embed_randhie.packed(tmp_path / "randhie.csv"))
    assert packed["columns"] == json.loads(embed_randhie.OUTPUT.read_text())["columns"]
    import base64
    import zlib

    text = zlib.decompress(base64.b85decode(packed["values"])).decode()
    row = dict(zip(packed["columns"], text.split(";"), strict=True))
    assert row["person"] == "0,0,1"
    assert row["health"] == "2,2,3"
    assert row["educdec"] == "12,12,9"


def test_the_kind_of_examples_follows_from_the_length_of_their_shape() -> None:
    assert {KINDS[1]: FeatureSet.kind, KINDS[2]: TokenSet.kind} == {
        "features": "features",
        "tokens": "tokens",
    }
