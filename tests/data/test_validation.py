"""Validation examples: whose they are, how many, and that no client trains on them."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from hypothesis import assume, given
from hypothesis import strategies as st

from fairflower.arrays import record_of
from fairflower.client_app import app
from fairflower.config import DataConfig, RunConfig
from fairflower.data import Federation, prepare
from fairflower.data.partition import ClientGroup, Units, cover_every_class
from fairflower.data.rows import hold_out, set_aside
from fairflower.data.sites import merge_sites, open_site
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, DataError
from fairflower.report import read_run

SMALL = {"clients_per_domain": 2, "examples_per_client": 40, "test_examples": 20}


def data(**changes: Any) -> Federation:
    return prepare(DataConfig(**{**SMALL, **changes}))


@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=30), min_size=1, max_size=4),
    st.floats(0.001, 0.999),
    st.integers(0, 3),
)
def test_every_client_holds_out_a_share_of_every_class_or_is_refused(
    found: list[list[int]], share: float, seed: int
) -> None:
    labels = np.array([label for client in found for label in client])
    ends = np.cumsum([len(client) for client in found])
    rows = np.split(np.random.default_rng(seed).permutation(len(labels)), ends[:-1])
    expected = [max(1, int(share * len(own) + 1e-9)) for own in rows]
    spare = [len(own) - len(np.unique(labels[own])) for own in rows]
    if any(w > s for w, s in zip(expected, spare, strict=True)):
        with pytest.raises(DataError, match=r"data.validation-fraction = .*: client \d \(a\) has"):
            hold_out({"a": rows}, {"a": labels}, share, seed)
        return
    train, validation = (part["a"] for part in hold_out({"a": rows}, {"a": labels}, share, seed))
    for own, kept, out, count in zip(rows, train, validation, expected, strict=True):
        assert sorted([*kept, *out]) == sorted(own)
        assert len(out) == count
        assert kept.tolist() == [row for row in own if row in set(kept)], "the order is kept"
        before, after = Counter(labels[own].tolist()), Counter(labels[kept].tolist())
        assert before.keys() == after.keys()
        for label, n in before.items():
            quota = min(share * n, n - 1)
            assert n - after[label] > quota - 1, "in proportion to the classes"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 9))
def test_the_fraction_that_an_error_suggests_is_the_largest_possible(
    counts: list[int], seed: int
) -> None:
    assume(max(counts) > 1)
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = {"a": [np.arange(len(labels))]}
    with pytest.raises(DataError, match="client 0") as refused:
        hold_out(rows, {"a": labels}, 1.0, seed)
    named = re.search(r"Set it to at most ([\d.]+)\.", str(refused.value))
    assert named
    largest = float(named[1])
    hold_out(rows, {"a": labels}, largest, seed)
    more = largest + 1 / len(labels) + 1e-4  # it is rounded down
    with pytest.raises(DataError):
        hold_out(rows, {"a": labels}, more, seed)


@given(
    st.lists(st.integers(0, 2), min_size=12, max_size=24),
    st.lists(st.integers(3, 6), min_size=2, max_size=3),
    st.integers(0, 9),
)
def test_no_client_trains_on_validation_images_of_another_client(
    values: list[int], sizes: list[int], seed: int
) -> None:
    assume(sum(sizes) <= len(values))
    labels, rng = np.array(values), np.random.default_rng(seed)
    order = cover_every_class(rng.permutation(len(labels)), labels, sizes, rng)
    rows = np.split(order[: sum(sizes)], np.cumsum(sizes)[:-1])
    assume(all(len(own) > len(np.unique(labels[own])) for own in rows))
    train, validation = (part["a"] for part in hold_out({"a": rows}, {"a": labels}, 0.01, seed))
    assert not {*np.concatenate(validation)} & {*np.concatenate(train)}


def test_a_client_for_which_no_fraction_works_is_named() -> None:
    with pytest.raises(DataError, match=r"client 1 \(b\) has 2 .* No fraction works"):
        hold_out(
            {"a": [np.arange(9)], "b": [np.arange(2)]},
            {"a": np.zeros(9, int), "b": np.array([0, 1])},
            0.2,
            0,
        )


def test_validation_is_taken_from_training_and_tests_are_unchanged() -> None:
    whole, divided = data(), data(validation_fraction=0.25)
    assert divided.validation_sizes == (20,) * len(whole.domains)
    for client in divided.clients:
        kept, out = (
            divided.train(client.client_id),
            divided.client_test(client.client_id, "validation"),
        )
        before = whole.train(client.client_id)
        assert client.num_examples == len(kept.y) == 30
        assert client.class_counts == tuple(np.bincount(kept.y, minlength=10))

        def images(*splits: Any) -> Counter[bytes]:
            return Counter(x.tobytes() for split in splits for x in split.x)

        assert images(kept, out) == images(before)
        now, then = divided.client_test(client.client_id), whole.client_test(client.client_id)
        np.testing.assert_array_equal(now.x, then.x)
    np.testing.assert_array_equal(
        divided.test("plain", "validation").y,
        np.concatenate([divided.client_test(k, "validation").y for k in (0, 1)]),
    )


def test_the_validation_draw_depends_on_the_seed_but_not_on_other_domains() -> None:
    def out(client: int, **changes: Any) -> bytes:
        federation = data(validation_fraction=0.25, **changes)
        return federation.client_test(client, "validation").x.tobytes()

    assert out(0) == out(0, domains="plain")
    assert out(0) != out(0, seed=1)


def test_a_validation_image_is_corrupted_as_in_training() -> None:
    kind = {"corrupted_clients": 1, "domains": "plain"}
    whole, divided = data(**kind), data(**kind, validation_fraction=0.25)
    before = {x.tobytes() for x in whole.train(1).x}
    assert {x.tobytes() for x in divided.client_test(1, "validation").x} < before


def test_a_federation_without_validation_is_written_without_its_arrays() -> None:
    federation = data()
    assert not [*federation.folder.glob("*_validation.npy")]
    assert federation.validation_sizes == ()


@given(st.integers(4, 60), st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 80))
def test_unused_examples_are_divided_among_clients_for_validation_or_refused(
    available: int, sizes: list[int], count: int
) -> None:
    assume(sum(sizes) <= available)
    pool = np.random.default_rng(0).permutation(1000)[:available]
    group, units = ClientGroup("a", "a", pool, ()), Units.single(np.zeros(1000, int))
    rows = np.split(pool[: sum(sizes)], np.cumsum(sizes)[:-1])
    left = available - sum(sizes)
    if not left:
        with pytest.raises(DataError, match=f"'a' leave none of its {available}"):
            set_aside(group, rows, count, 0, units)
        return
    drawn = set_aside(group, rows, count, 0, units)
    together = np.concatenate(drawn).tolist()
    assert len({*together}) == len(together) == min(max(count, len(sizes)), left)
    assert {*together} <= {*pool} - {*pool[: sum(sizes)]}
    assert len(drawn) == len(sizes)
    assert max(map(len, drawn)) - min(map(len, drawn)) <= 1


def test_validation_on_unused_examples_changes_neither_training_nor_tests() -> None:
    whole, validated = data(), data(validation_examples=50)
    assert validated.validation_sizes == (50,) * len(whole.domains)
    assert data(validation_examples=5000).validation_sizes == (520, 220, 120, 120)
    for client in whole.clients:
        kept = validated.train(client.client_id)
        np.testing.assert_array_equal(kept.x, whole.train(client.client_id).x)
        out = validated.client_test(client.client_id, "validation")
        assert len(out.y) == 25
        assert not {x.tobytes() for x in out.x} & {x.tobytes() for x in kept.x}
        now, then = validated.client_test(client.client_id), whole.client_test(client.client_id)
        np.testing.assert_array_equal(now.x, then.x)
    assert whole.folder != validated.folder


def test_validation_fraction_and_examples_cannot_be_combined() -> None:
    both = {"data.validation-fraction": 0.2, "data.validation-examples": 50}
    with pytest.raises(ConfigError, match="are both set"):
        RunConfig.from_flat(both)
    assert not RunConfig.from_flat({**dict([*both.items()][1:]), "evaluate.test": False}).evaluates(
        "test"
    )


# --- runs ----------------------------------------------------------------------------------------

KEPT = {"data.validation-fraction": 0.2}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Runs that are tested by the server or by clients, with and without test images."""
    place = tmp_path_factory.mktemp("runs")
    return {
        (by, test): runs.run(
            runs.config(
                place / f"{by}-{test}", **KEPT, **{"evaluate.by": by, "evaluate.test": test}
            )
        )
        for by in ("server", "clients")
        for test in (True, False)
    }


def accuracies(folder: Path, level: str) -> dict[str, str]:
    return {
        row["name"]: row["value"]
        for row in runs.history(folder)
        if row["level"] == level and row["metric"] == "accuracy" and row["round"] == "2"
    }


def test_validation_has_its_own_history_rows_and_server_and_clients_agree(folders: Any) -> None:
    server, clients = folders["server", True], folders["clients", True]
    assert list(accuracies(server, "validation")) == list(accuracies(server, "domain"))
    assert accuracies(server, "validation") != accuracies(server, "domain")
    for level in ("domain", "validation"):
        there, here = accuracies(server, level), accuracies(clients, level)
        assert {k: float(v) for k, v in there.items()} == pytest.approx(
            {k: float(v) for k, v in here.items()}
        )
    assert list(accuracies(clients, "client-validation")) == ["0", "1", "2", "3"]
    assert not accuracies(server, "client-validation")


def test_the_model_does_not_depend_on_the_evaluation_settings(folders: Any) -> None:
    models = {(folder / "model.safetensors").read_bytes() for folder in folders.values()}
    assert len(models) == 1


@pytest.mark.parametrize("by", ["server", "clients"])
def test_a_run_without_tests_is_read_by_its_validation_accuracy(by: str, folders: Any) -> None:
    untested = folders[by, False]
    assert not accuracies(untested, "domain")
    assert bool(accuracies(untested, "client-validation")) is (by == "clients")
    run = read_run(untested)
    values = [float(v) for v in accuracies(folders[by, True], "validation").values()]
    np.testing.assert_array_equal(run.values[-1], values)
    recorded = [read_run(folders[by, test]).sizes for test in (True, False)]
    federation = prepare(RunConfig.from_flat(dict(run.config)).data)
    assert recorded == [list(federation.test_sizes), list(federation.validation_sizes)]
    assert recorded[0] != recorded[1], "verdicts need the number of examples that were tested"


def test_clients_do_not_train_on_validation_images(tmp_path: Path) -> None:
    """Other validation images give the same update."""
    config = runs.config(tmp_path, **KEPT)
    federation = prepare(config.data)
    grid = InlineGrid(app, 4)
    node = min(grid.get_node_ids())
    from fairflower.server.evaluation import CentralizedEvaluator

    arrays = record_of(CentralizedEvaluator(config, federation).arrays())

    def update() -> Any:
        flat = ConfigRecord({**config.to_flat(), "server-round": 1})
        message = Message(RecordDict({"arrays": arrays, "config": flat}), node, MessageType.TRAIN)
        (reply,) = grid.send_and_receive([message])
        metrics = reply.content.metric_records["metrics"]
        assert metrics["num-examples"] == 16
        return {k: a.numpy().tobytes() for k, a in reply.content["arrays"].items()}

    before = update()
    from fairflower import client_app

    path = federation.folder / "x_validation.npy"
    saved = path.read_bytes()
    try:
        np.save(path, np.zeros_like(np.load(path)))
        client_app._cached.clear()
        assert update() == before
    finally:
        path.write_bytes(saved)
        client_app._cached.clear()


def test_evaluation_without_tests_needs_validation_examples() -> None:
    with pytest.raises(ConfigError, match=r"evaluate.test = false: .* data.validation-fraction"):
        RunConfig.from_flat({"evaluate.test": False})


# --- sites ---------------------------------------------------------------------------------------


def npz(path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (30, 8, 8), np.uint8)
    np.savez(
        path, x_train=x[:24], y_train=np.arange(24) % 3, x_test=x[24:], y_test=np.arange(6) % 3
    )


def test_sites_hold_out_the_same_validation_images_as_clients_of_one_folder(tmp_path: Path) -> None:
    (tmp_path / "all").mkdir()
    for seed, domain in enumerate(("grey", "red")):
        npz(tmp_path / "all" / f"{domain}.npz", seed)
        (tmp_path / domain).mkdir()
        shutil.copy(tmp_path / "all" / f"{domain}.npz", tmp_path / domain)
    settings = {**KEPT, "data.name": "npz", "data.clients-per-domain": 1, "model.name": "cnn"}
    settings |= {"data.examples-per-client": 0, "data.test-examples": 0, "data.smallest-group": 1}
    divided = runs.run(
        runs.config(tmp_path / "divided", **settings, **{"data.dir": str(tmp_path / "all")}),
        nodes=2,
    )
    grid = InlineGrid(app, 2)
    for domain, context in zip(("grey", "red"), grid.contexts.values(), strict=True):
        context.node_config = {"domain": domain, "data-dir": str(tmp_path / domain)}
        context.node_config["smallest-group"] = 1
    from rich.console import Console

    from fairflower.server.session import Session

    config = runs.config(tmp_path / "sites", **settings, **{"evaluate.by": "clients"})
    sites = Session(grid, config, Console(quiet=True)).run()
    assert len({(f / "model.safetensors").read_bytes() for f in (divided, sites)}) == 1
    there, here = accuracies(divided, "validation"), accuracies(sites, "validation")
    assert {k: float(v) for k, v in there.items()} == pytest.approx(
        {k: float(v) for k, v in here.items()}
    )


def test_sites_have_no_validation_if_one_site_has_none(tmp_path: Path) -> None:
    sites = []
    for seed, share in enumerate((0.25, 0.0)):
        (tmp_path / str(seed)).mkdir()
        npz(tmp_path / str(seed) / "x.npz", seed)
        config = DataConfig(name="npz", dir=str(tmp_path / str(seed)), validation_fraction=share)
        sites.append(open_site(config, f"site {seed}"))
    assert merge_sites(sites[:1] * 2).validation_sizes == (12,)
    assert merge_sites(sites).validation_sizes == ()
