"""Sites with their own data, and a server without data."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import call
from flwr.app import ConfigRecord, Context, Message, RecordDict
from PIL import Image
from rich.console import Console

from fairflower.client_app import app
from fairflower.config import DataConfig, RunConfig
from fairflower.data import prepare
from fairflower.data.federation import Augment, Federation
from fairflower.data.sites import as_in, merge_sites, open_site
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, DataError
from fairflower.report import read_run
from fairflower.server.checkpoint import resumed_config
from fairflower.server.discovery import NodeDiscovery
from fairflower.server.registration import (
    NodeTracker,
    register_clients,
    register_resumed_clients,
)
from fairflower.server.session import Session
from fairflower.server.setup import set_up

SMALL = {"num-server-rounds": 2, "train.local-epochs": 1, "data.name": "npz"}
RNG = np.random.default_rng(0)


def npz(path: Path, classes: int = 3, side: int = 8, colour: bool = False, train: int = 12) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shape = (side, side, 3) if colour else (side, side)
    np.savez(
        path,
        x_train=RNG.integers(0, 256, (train, *shape), np.uint8),
        y_train=np.arange(train) % classes,
        x_test=RNG.integers(0, 256, (6, *shape), np.uint8),
        y_test=np.arange(6) % classes,
    )


def grid(nodes: list[dict[str, Any]]) -> InlineGrid:
    inline_grid = InlineGrid(app, len(nodes))
    for context, node in zip(inline_grid.contexts.values(), nodes, strict=True):
        context.node_config = {k: str(v) if isinstance(v, Path) else v for k, v in node.items()}
    return inline_grid


def run(tmp_path: Path, nodes: InlineGrid, **changes: Any) -> Path:
    config = RunConfig.from_flat(SMALL | {"output-dir": str(tmp_path / "runs")} | changes)
    return Session(nodes, config, Console(quiet=True)).run()


def test_a_site_whose_fraction_is_less_than_an_example_is_refused(tmp_path: Path) -> None:
    """The count 0 would mean the data set's default, a fraction of a published size."""
    folder = tmp_path / "digits"
    npz(folder / "usps.npz", train=80)
    config = DataConfig(name="digits", dir=str(folder), fraction=0.01)
    with pytest.raises(DataError, match=r"= 0.01 of the site's 80 training examples is less than"):
        open_site(config, "usps")


def test_a_site_does_not_hide_errors_in_data_that_are_prepared_again(tmp_path: Path) -> None:
    npz(tmp_path / "one.npz", classes=1)
    config = DataConfig(name="npz", dir=str(tmp_path), clients_per_domain=1)
    assert open_site(config, "one").num_classes == 1
    for _ in range(2):
        with pytest.raises(DataError, match="examples of one class only"):
            prepare(config)


def test_data_with_the_same_labels_and_sizes_are_told_apart(tmp_path: Path) -> None:
    prepared = []
    for name in ("here", "there"):
        npz(tmp_path / name / "a.npz")
        config = DataConfig(name="npz", dir=str(tmp_path / name), clients_per_domain=2)
        prepared.append(replace(prepare(config), sources=(), folder=tmp_path))
        assert not open_site(config, "a").fingerprint, "nobody can check a guess of a site's data"
    assert prepared[0] != prepared[1]
    assert prepared[0].clients == prepared[1].clients


def test_sites_with_own_folders_train_the_same_model_as_clients_of_one_folder(
    tmp_path: Path,
) -> None:
    """A site with grayscale images, and a site with color images and more classes."""
    npz(tmp_path / "all" / "grey.npz")
    npz(tmp_path / "all" / "red.npz", classes=5, colour=True, train=20)
    divided = {"data.dir": str(tmp_path / "all"), "data.clients-per-domain": 1}
    expected = run(tmp_path, InlineGrid(app, 2), **divided)
    sites = []
    for domain in ("red", "grey"):  # the server numbers them by domain
        folder = tmp_path / f"site {domain}"
        folder.mkdir()
        shutil.copy(tmp_path / "all" / f"{domain}.npz", folder)
        sites.append({"domain": domain, "data-dir": folder})
    actual = run(tmp_path, grid(sites), **{"evaluate.by": "clients"})

    model, same = ((path / "model.safetensors").read_bytes() for path in (expected, actual))
    assert model == same
    facts, of_sites = (json.loads((path / "run.json").read_text()) for path in (expected, actual))
    for key in ("clients", "domains", "num_classes", "shape"):
        assert facts[key] == of_sites[key]
    assert str(tmp_path / "site") not in json.dumps(of_sites["sources"])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("client", "strategy"),
    [
        ("fedbn", "fairrfl"),
        ("silobn", "fedism+"),
        ("fedper", "fedpw"),
        ("fedrep", "daa"),
        ("lg-fedavg", "dq-ffl"),
    ],
)
def test_local_arrays_of_sites_give_the_same_results_as_those_of_clients(
    client: str, strategy: str, tmp_path: Path
) -> None:
    for domain in "abc":
        npz(tmp_path / "all" / f"{domain}.npz")
        (tmp_path / f"site {domain}").mkdir()
        shutil.copy(tmp_path / "all" / f"{domain}.npz", tmp_path / f"site {domain}")
    chosen = {
        "client.name": client,
        "strategy.name": strategy,
        "model.name": "cnn:norm=batch",
        "evaluate.by": "clients",
        "num-server-rounds": 3,
    }
    divided = {"data.dir": str(tmp_path / "all"), "data.clients-per-domain": 1}
    expected = run(tmp_path, InlineGrid(app, 3), **divided, **chosen)
    sites = grid([{"domain": d, "data-dir": tmp_path / f"site {d}"} for d in "bca"])
    actual = run(tmp_path, sites, **chosen)
    model, same = ((path / "model.safetensors").read_bytes() for path in (expected, actual))
    assert model == same
    personal = [read_run(path).personal for path in (expected, actual)]
    assert personal[0].rounds.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(personal[0].values, personal[1].values)


@pytest.mark.parametrize("name", ["tiny_data_sets:Table", "tiny_data_sets:Texts"])
def test_sites_with_tables_or_texts_train_the_same_model_as_clients(
    name: str, tmp_path: Path
) -> None:
    data = {"data.name": name, "data.clients-per-domain": 1}
    expected = run(tmp_path, InlineGrid(app, 2), **data)
    sites = grid([{"domain": "b"}, {"domain": "a"}])  # the server numbers them by domain
    actual = run(tmp_path, sites, **data, **{"evaluate.by": "clients"})
    model, same = ((path / "model.safetensors").read_bytes() for path in (expected, actual))
    assert model == same
    assert read_run(actual).final() == pytest.approx(read_run(expected).final())


def image_site(folder: Path, classes: dict[str, int]) -> Path:
    for name, count in classes.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (9, 7), (len(name), i, 0)).save(folder / name / f"{i}.png")
    return folder


def test_sites_with_different_classes_use_common_class_numbers(tmp_path: Path) -> None:
    config = DataConfig(name="images", image_size=8)
    folders = [
        image_site(tmp_path / "a", {"cat": 5, "sheep": 10}),
        image_site(tmp_path / "b", {"horses": 5, "cat": 5}),
    ]
    sites = [
        open_site(DataConfig(**{**vars(config), "dir": str(folder)}), f"farm {folder.name}")
        for folder in folders
    ]
    whole = merge_sites(sites)
    assert whole.classes == ("cat", "horses", "sheep")
    assert whole.domains == ("farm a", "farm b")
    assert [client.class_counts for client in whole.clients] == [(4, 0, 8), (4, 4, 0)]
    assert whole.test_sizes == (3, 2)
    for site in sites:
        x, y = as_in(whole, site, site.train(0))
        lengths = [len(whole.classes[label]) for label in y]
        assert x[:, 0, 0, 0].tolist() == lengths, "red says how long the class's name is"


def test_two_sites_may_have_the_same_domain(tmp_path: Path) -> None:
    for name in ("one", "two"):
        npz(tmp_path / name / "x.npz")
    sites = [
        open_site(DataConfig(name="npz", dir=str(tmp_path / name)), "scanner")
        for name in ("one", "two")
    ]
    whole = merge_sites(sites)
    assert whole.domains == ("scanner",)
    assert whole.clients_of("scanner") == [0, 1]
    assert whole.test_sizes == (12,)


def test_a_site_trains_on_all_its_images_by_default(digits_dir: str) -> None:
    def size(**changes: Any) -> int:
        config = DataConfig(name="digits", dir=digits_dir, test_examples=10, **changes)
        return open_site(config, "usps").clients[0].num_examples

    with np.load(Path(digits_dir, "usps.npz")) as arrays:
        available = len(arrays["y_train"])
    assert size() == available > 72, "the benchmark gives a client one per cent"
    assert size(fraction=0.5) == available // 2
    assert size(examples_per_client=30) == 30


# --- sites that do not answer ----------------------------------------------------------------


class Away(InlineGrid):
    """A grid in which a node stops answering some types of messages after a round."""

    def __init__(self, nodes: list[dict[str, Any]], node: int, after: int, *kinds: str) -> None:
        super().__init__(app, len(nodes))
        self.contexts = grid(nodes).contexts
        self.node, self.after, self.kinds = node, after, kinds

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        heard = [
            message_id
            for message_id in message_ids
            if message_id not in self._pending or not self._unheard(self._pending[message_id])
        ]
        return super().pull_messages(heard)

    def _unheard(self, message: Message) -> bool:
        metadata = message.metadata
        if metadata.dst_node_id != self.node or metadata.message_type not in self.kinds:
            return False
        return int(message.content.config_records["config"]["server-round"]) > self.after


def domains_tested(folder: Path) -> dict[int, dict[str, float]]:
    """Return round -> domain -> accuracy from the history."""
    accuracies: dict[int, dict[str, float]] = {}
    with (folder / "history.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            if (row["level"], row["metric"]) == ("domain", "accuracy"):
                accuracies.setdefault(int(row["round"]), {})[row["name"]] = float(row["value"])
    return accuracies


def reported(folder: Path, out: Path) -> str:
    """Return the tables of `fairflower report` after checking that its page and figures exist."""
    call("report", folder, "--out", out)
    assert (out / "index.html").stat().st_size > 10_000
    assert {"average.png", "worst.png", "bars.png", "domains.png"} <= {
        path.name for path in (out / "figures").iterdir()
    }
    return (out / "tables.md").read_text()


def mean_row(tables: str) -> list[str]:
    return next(line for line in tables.splitlines() if "seed 0" in line).strip("| ").split(" | ")


AWAY = {"evaluate.by": "clients", "round-timeout": 0.3, "num-server-rounds": 3}


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("terminal", [False, True])
def test_a_site_that_stops_answering_does_not_affect_the_others_in_the_report(
    folders: list[Path], tmp_path: Path, terminal: bool
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    output = io.StringIO()
    console = Console(file=output, force_terminal=terminal, width=150)
    config = RunConfig.from_flat(SMALL | AWAY | {"output-dir": str(tmp_path / "runs")})
    folder = Session(Away(nodes, 1001, 1, "train", "evaluate"), config, console).run()

    tested = domains_tested(folder)
    assert [sorted(row) for row in tested.values()] == [["a", "b", "c"], ["a", "c"], ["a", "c"]]
    records = read_run(folder).diagnostics
    gone = {"1": "no reply before the timeout"}
    assert [record.get("dropped") for record in records] == [None, gone, gone]
    assert [record.get("dropped_in_test") for record in records] == [None, gone, gone]
    assert ("b     \N{EN DASH}" if not terminal else "\N{EN DASH}") in output.getvalue()

    tables = reported(folder, tmp_path / "out")
    means = {d: 100 * np.mean([tested[r][d] for r in tested if d in tested[r]]) for d in "abc"}
    worst = min(means.values())
    row = mean_row(tables)
    assert row[1:5] == [*(f"{means[d]:.2f}" for d in "abc"), f"{np.mean([*means.values()]):.2f}†"]
    assert row[7] == f"{worst:.2f}†"
    assert "b was not tested in rounds 2 and 3. Numbers" in tables
    assert "2 test replies were dropped, from client 1 (no reply before the timeout)." in tables
    last = mean_row(tables[tables.index("last round (3)") :])
    assert last[2] == "\N{EN DASH}"
    assert last[7] == f"{100 * min(tested[3].values()):.2f}†"


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_site_that_never_answers_a_test_is_a_dash_in_the_report(
    folders: list[Path], tmp_path: Path
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    folder = run(tmp_path, Away(nodes, 1000, 0, "evaluate"), **AWAY)
    tested = domains_tested(folder)
    assert [sorted(row) for row in tested.values()] == [["b", "c"]] * 3
    assert all(record["client_ids"] == [0, 1, 2] for record in read_run(folder).diagnostics)
    tables = reported(folder, tmp_path / "out")
    means = [100 * np.mean([tested[r][d] for r in tested]) for d in "bc"]
    row = mean_row(tables)
    assert row[1:4] == ["\N{EN DASH}", *(f"{mean:.2f}" for mean in means)]
    assert row[7:9] == [f"{min(means):.2f}†", f"{max(means) - min(means):.2f}†"]
    assert "a was not tested in any round. Numbers marked † do not cover all domains" in tables


@pytest.mark.slow
def test_a_resumed_run_records_missing_test_replies_once(
    folders: list[Path], tmp_path: Path
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    whole = run(tmp_path, Away(nodes, 1000, 1, "evaluate"), **AWAY)
    first = run(tmp_path, Away(nodes, 1000, 1, "evaluate"), **AWAY | {"num-server-rounds": 2})
    with (first / "diagnostics.jsonl").open("a") as file:  # from an interrupted round
        file.write('{"round": 3, "client_ids": [0]}\n{"round": 3, "dropped_in_test": {"2": "x"}}\n')
    config = resumed_config(first, {"num-server-rounds": 3})
    Session(Away(nodes, 1000, 1, "evaluate"), config, Console(quiet=True)).run()
    text, same = ((path / "diagnostics.jsonl").read_text() for path in (whole, first))
    assert text == same
    assert text.count("dropped_in_test") == 2
    model, same_model = ((path / "model.safetensors").read_bytes() for path in (whole, first))
    assert model == same_model


# --- incompatible sites, registration and return of sites -----------------------------------


def test_sites_with_images_of_different_sizes_are_refused(tmp_path: Path) -> None:
    for side in (8, 16):
        npz(tmp_path / str(side) / "x.npz", side=side)

    def sites(**changes: int) -> list[Any]:
        return [
            open_site(DataConfig(name="npz", dir=str(tmp_path / str(side)), **changes), f"s{side}")
            for side in (8, 16)
        ]

    with pytest.raises(DataError, match=r"s8 8x8, s16 16x16.*data\.image-size"):
        merge_sites(sites())
    assert merge_sites(sites(image_size=8)).shape == (1, 8, 8)
    unseen = [replace(site, held_out="c", held_out_size=1) for site in sites(image_size=8)]
    assert merge_sites(unseen) == merge_sites(sites(image_size=8))  # held-out data are the server's


@pytest.mark.parametrize(
    ("change", "constant"),
    [
        ({"std": (1e-300,)}, r"std = \(0\.5, 0\.5, 0\.5\) and \(1e-300,\)"),
        ({"mean": (0.1,)}, r"mean = \(0\.5, 0\.5, 0\.5\) and \(0\.1,\)"),
        ({"augment": Augment(crop_padding=4)}, "augment = "),
    ],
)
def test_sites_with_different_constants_are_refused(
    tmp_path: Path, change: dict[str, Any], constant: str
) -> None:
    npz(tmp_path / "gray" / "x.npz")
    npz(tmp_path / "colour" / "x.npz", colour=True)
    gray, colour = (
        open_site(DataConfig(name="npz", dir=str(tmp_path / name)), name)
        for name in ("gray", "colour")
    )
    assert merge_sites([gray, colour]).std == (0.5, 0.5, 0.5)
    odd = replace(gray, **change)
    with pytest.raises(DataError, match=f"Sites colour and gray declare different .*{constant}"):
        merge_sites([odd, colour])
    with pytest.raises(DataError, match="declare different constants"):
        merge_sites([gray, odd])


def test_a_site_may_have_one_class_but_not_all_sites_the_same(tmp_path: Path) -> None:
    sites = []
    for number, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        x, y = np.zeros((8, 4, 4), np.uint8), np.full(8, number)
        np.savez(tmp_path / name / "x.npz", x_train=x, y_train=y, x_test=x, y_test=y)
        sites.append(open_site(DataConfig(name="npz", dir=str(tmp_path / name)), name))
    assert merge_sites(sites).num_classes == 2
    with pytest.raises(DataError, match="npz: found examples of one class only"):
        merge_sites(sites[:1])


def test_a_site_whose_domain_is_not_in_the_run_is_refused(tmp_path: Path) -> None:
    npz(tmp_path / "x.npz")
    config = DataConfig(name="npz", dir=str(tmp_path), domains="north, south")
    assert open_site(config, "south").domains == ("south",)
    with pytest.raises(DataError, match=r"north, south.*does not include 'east'"):
        open_site(config, "east")


def test_a_site_with_several_domains_must_name_one_of_them(tmp_path: Path) -> None:
    for name in ("north", "south"):
        npz(tmp_path / f"{name}.npz")
    config = DataConfig(name="npz", dir=str(tmp_path))
    assert prepare(config).domains == ("north", "south")
    assert open_site(config, "south").domains == ("south",)
    with pytest.raises(DataError, match=r"Unknown domain 'suoth'\. Did you mean 'south'"):
        open_site(config, "suoth")


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    for k in range(3):
        npz(tmp_path / f"site-{k}" / "x.npz")
    return [tmp_path / f"site-{k}" for k in range(3)]


def settings_of(**changes: Any) -> ConfigRecord:
    flat = {"data.name": "npz", "evaluate.by": "clients"} | changes
    return ConfigRecord(RunConfig.from_flat(flat).to_flat())


def register(
    nodes: list[dict[str, Any]] | InlineGrid, sites: int = 0, timeout: float = 20, **changes: Any
) -> Any:
    there = nodes if isinstance(nodes, InlineGrid) else grid(nodes)
    discovery = NodeDiscovery(there, timeout, threading.Event(), settings_of(**changes))
    return register_clients(discovery, None, sites)


def test_sites_are_numbered_by_domain_and_then_by_node(folders: list[Path]) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("bab", folders, strict=True)]
    registry = register(nodes)
    assert registry.nodes == {0: 1001, 1: 1000, 2: 1002}
    assert [client.domain for client in registry.federation.clients] == ["a", "b", "b"]


def test_a_site_that_connects_during_registration_takes_part(
    folders: list[Path],
) -> None:
    class Growing(InlineGrid):
        looks, simulated = 0, False

        def get_node_ids(self) -> Iterable[int]:
            self.looks += 1
            return list(super().get_node_ids())[: self.looks]

    there = Growing(app, 0)
    there.contexts = grid([{"domain": "a", "data-dir": f} for f in folders]).contexts
    assert register(there).nodes == {0: 1000, 1: 1001, 2: 1002}


def test_sites_may_set_partition_ids_but_only_all_of_them(folders: list[Path]) -> None:
    nodes: list[dict[str, Any]] = [
        {"domain": d, "data-dir": f, "partition-id": k}
        for d, f, k in zip("aab", folders, (2, 0, 1), strict=True)
    ]
    assert register(nodes).nodes == {0: 1001, 1: 1002, 2: 1000}
    del nodes[1]["partition-id"]
    with pytest.raises(ConfigError, match=r"3 sites have the partition-ids \[1, 2\]"):
        register(nodes)


def again(nodes: list[dict[str, Any]], lost: int, **changes: Any) -> dict[int, int]:
    """Return client -> node after node ``lost`` reconnected as node 7000 with ``changes``."""
    registry = register(nodes)
    there = grid(nodes)
    config = there.contexts.pop(lost).node_config | changes
    there.contexts[7000] = Context(1, 7000, config, RecordDict(), {})
    tracker = NodeTracker(NodeDiscovery(there, 20, threading.Event(), settings_of()), registry)
    tracker.locate()
    return registry.nodes


def test_a_restarted_site_is_recognized_by_a_unique_domain_or_its_partition_id(
    folders: list[Path],
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("bac", folders, strict=True)]
    assert again(nodes, 1000) == {0: 1001, 1: 7000, 2: 1002}
    nodes[2]["domain"] = "b"
    for lost in (1000, 1002):
        assert again(nodes, lost) == {0: 1001, 1: 1000, 2: 1002}, "another site has domain b"
    numbered = [node | {"partition-id": k} for k, node in enumerate(nodes)]
    assert again(numbered, 1000) == {0: 7000, 1: 1001, 2: 1002}


@pytest.mark.parametrize("other", [{"train": 15}, {"side": 16}, {"colour": True}, {"classes": 2}])
def test_a_restarted_site_with_different_data_is_ignored(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, other: dict[str, int]
) -> None:
    npz(tmp_path / "other" / "x.npz", **other)  # type: ignore[arg-type]
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("bac", folders, strict=True)]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert again(nodes, 1000, **{"data-dir": str(tmp_path / "other")})[1] == 1000
    assert "Node 7000 is ignored: Client 1 (b) has different data" in caplog.text


def test_a_restarted_site_with_a_class_that_the_run_lacks_is_ignored(tmp_path: Path) -> None:
    sites = [{"cat": 8, "dog": 8}, {"cat": 9, "dog": 7}, {"cat": 8, "fox": 8}]
    farms = [image_site(tmp_path / str(k), classes) for k, classes in enumerate(sites)]
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("ab", farms, strict=False)]
    settings = {"data.name": "images", "data.image-size": 8}
    registry, there = register(nodes, **settings), grid(nodes)
    del there.contexts[1000]
    returned = {"domain": "a", "data-dir": str(farms[2])}
    there.contexts[7000] = Context(1, 7000, returned, RecordDict(), {})
    discovery = NodeDiscovery(there, 0.5, threading.Event(), settings_of(**settings))
    NodeTracker(discovery, registry).locate()
    assert registry.nodes[0] == 1000
    with pytest.raises(ConfigError, match=r"Client 0 \(a\) has different data"):
        register_resumed_clients(discovery, registry)


def test_a_restarted_client_of_a_shared_data_set_needs_the_same_data(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, divided = shares(tmp_path, [40] * 4), {"data.clients-per-domain": 2}
    npz(tmp_path / "other" / "a.npz", train=20)
    shutil.copy(tmp_path / "40" / "b.npz", tmp_path / "other")
    for folder, node in (("other", 1001), ("40", 7000)):
        registry, there = register(nodes, **divided), grid(nodes)
        config = there.contexts.pop(1001).node_config | {"data-dir": str(tmp_path / folder)}
        there.contexts[7000] = Context(1, 7000, config, RecordDict(), {})
        tracker = NodeTracker(
            NodeDiscovery(there, 20, threading.Event(), settings_of(**divided)), registry
        )
        with caplog.at_level("WARNING", logger="flwr.fairflower"):
            tracker.locate()
        assert registry.nodes[1] == node
    assert caplog.text.count("Node 7000 is ignored: Client 1 (a) has different data") == 1


@pytest.mark.slow
def test_a_run_of_sites_is_resumed_only_with_the_same_sites(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("aab", folders, strict=True)]
    settings = {"evaluate.by": "clients", "strategy.name": "fedheal"}
    whole = run(tmp_path, grid(nodes), **settings)
    first = run(tmp_path, grid(nodes), **settings | {"num-server-rounds": 1})

    def go_on(there: InlineGrid) -> Path:
        config = resumed_config(first, {"num-server-rounds": 2, "round-timeout": 0.5})
        return Session(there, config, Console(quiet=True)).run()

    moved = grid(nodes)
    moved.contexts[7000] = Context(1, 7000, moved.contexts.pop(1000).node_config, RecordDict(), {})
    with pytest.raises(ConfigError, match="cannot be distinguished in any other way"):
        go_on(moved)
    npz(tmp_path / "more" / "x.npz", train=15)
    other = [*nodes[:2], nodes[2] | {"data-dir": tmp_path / "more"}]
    with pytest.raises(ConfigError, match=r"Client 2 \(b\) has different data"):
        go_on(grid(other))
    with pytest.raises(ConfigError, match="0 of 3 clients answered"):
        go_on(grid([]))
    alone = grid(nodes)  # only one site has domain b
    alone.contexts[7000] = Context(1, 7000, alone.contexts.pop(1002).node_config, RecordDict(), {})
    stranger = Context(1, 8000, {"domain": "c", "data-dir": str(folders[0])}, RecordDict(), {})
    alone.contexts[8000] = stranger
    go_on(alone)
    assert "Node 8000 is ignored" in caplog.text
    model, same = ((path / "model.safetensors").read_bytes() for path in (whole, first))
    assert model == same


@pytest.mark.slow
def test_a_resumed_run_continues_without_a_site_until_it_reconnects(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(InlineGrid):
        """Site b reconnects after round 3 has started."""

        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            for message in messages:
                if message.content["config"].get("server-round") == 3:
                    self.contexts[9000] = Context(1, 9000, node, RecordDict(), {})
            return super().push_messages(messages)

    nodes = [{"domain": d, "data-dir": f} for d, f in zip("aab", folders, strict=True)]
    first = run(tmp_path, grid(nodes), **{"evaluate.by": "clients", "num-server-rounds": 1})
    node = {"domain": "b", "data-dir": str(folders[2])}
    there = Late(app, 0)
    there.contexts = grid(nodes[:2]).contexts
    config = resumed_config(first, {"num-server-rounds": 4, "round-timeout": 0.5})
    Session(there, config, Console(quiet=True)).run()
    rounds = read_run(first).diagnostics
    assert [record["client_ids"] for record in rounds] == [[0, 1, 2], [0, 1], [0, 1], [0, 1, 2]]
    assert "Client 2 (b) has not reconnected" in caplog.text


def test_a_new_site_of_the_same_domain_does_not_replace_a_returning_site(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(InlineGrid):
        """Node 1001 appears when nodes are listed the second time, after node 8000."""

        looks, simulated = 0, False

        def get_node_ids(self) -> Iterable[int]:
            self.looks += 1
            return [node for node in super().get_node_ids() if self.looks > 1 or node != 1001]

    nodes = [{"domain": d, "data-dir": f} for d, f in zip("aab", folders, strict=True)]
    first = run(tmp_path, grid(nodes), **{"evaluate.by": "clients", "num-server-rounds": 1})
    there = Later(app, 0)
    there.contexts = grid(nodes).contexts
    newcomer = {"domain": "a", "data-dir": str(folders[2])}
    there.contexts[8000] = Context(1, 8000, newcomer, RecordDict(), {})
    config = resumed_config(first, {"num-server-rounds": 2, "round-timeout": 60.0})
    Session(there, config, Console(quiet=True)).run()
    assert read_run(first).diagnostics[-1]["client_ids"] == [0, 1, 2]
    assert "Node 8000 is ignored, because it was not part" in caplog.text


def test_the_candidate_with_the_same_data_is_recognized_as_the_site(
    folders: list[Path], tmp_path: Path
) -> None:
    npz(tmp_path / "other" / "x.npz", train=15)
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    first = run(tmp_path, grid(nodes), **{"evaluate.by": "clients", "num-server-rounds": 1})
    there = grid(nodes)
    other = {"domain": "a", "data-dir": str(tmp_path / "other")}
    there.contexts[5] = Context(1, 5, other, RecordDict(), {})
    session = Session(there, resumed_config(first, {"num-server-rounds": 2}), Console(quiet=True))
    setup = set_up(there, session.config, session.resume, session.stop)
    assert setup.registry.nodes == {0: 1000, 1: 1001, 2: 1002}
    sent = Federation.from_json(setup.settings()["federation"], tmp_path)
    assert (sent.shape, sent.classes) == (setup.federation.shape, setup.federation.classes)
    assert sent.clients == sent.domains == sent.test_sizes == sent.validation_sizes == ()


def test_a_site_that_reconnects_without_its_domain_is_ignored(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("aab", folders, strict=True)]
    first = run(tmp_path, grid(nodes), **{"evaluate.by": "clients", "num-server-rounds": 1})
    there = grid(nodes)
    share = {"partition-id": 0, "num-partitions": 1, "data-dir": str(folders[1])}
    there.contexts[1001].node_config = share
    config = resumed_config(first, {"num-server-rounds": 2, "round-timeout": 0.3})
    Session(there, config, Console(quiet=True)).run()
    assert "Node 1001 is ignored, because it was not part" in caplog.text
    assert "Client 1 (a) has not reconnected" in caplog.text
    assert read_run(first).diagnostics[-1]["client_ids"] == [0, 2]


def test_a_site_that_cannot_open_its_folder_is_named_once(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"domain": "mnist", "data-dir": folders[0]}, {"domain": "usps", "data-dir": "/gone"}]
    caplog.set_level("INFO", logger="flwr.fairflower")
    with pytest.raises(ConfigError, match=r"1 of 2 clients answered"):
        run(tmp_path, grid(nodes), **{"evaluate.by": "clients", "sites": 2})
    assert "Waiting for clients" not in caplog.text  # nobody else can come
    why = "Node 1001 cannot take part: site 'usps': the folder of the data does not exist (the "
    why += "site's own log says more)"
    assert [line for line in caplog.messages if "usps" in line] == [why]


@pytest.mark.slow
def test_a_waiting_resumed_run_names_the_missing_clients_and_the_timeout(
    folders: list[Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(NodeDiscovery, "FIRST_NOTICE_SECONDS", 0.0)
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    settings = {"evaluate.by": "clients", "num-server-rounds": 1, "min-clients": 1}
    first = run(tmp_path, grid(nodes), **settings)
    there = grid(nodes[:2])
    there.simulated = False
    there.contexts[1001].node_config["data-dir"] = str(tmp_path / "gone")
    config = resumed_config(first, {"num-server-rounds": 2, "round-timeout": 0.4})
    with caplog.at_level("INFO", logger="flwr.fairflower"):
        Session(there, config, Console(quiet=True)).run()
    (notice,) = [line for line in caplog.messages if line.startswith("Waiting for clients")]
    assert "Client 1 (b), Client 2 (c)" in notice
    assert "Client 0" not in notice
    assert "0.4 s" in notice
    assert "round-timeout, which can be changed when resuming" in notice
    assert any("Node 1001 is ignored" in m and "does not exist" in m for m in caplog.messages)


# --- nodes' descriptions of their data --------------------------------------------------------


class Describing(InlineGrid):
    """A grid in which a node changes the description of its data."""

    def __init__(
        self, nodes: list[dict[str, Any]], key: str, change: Callable[[Any], Any], node: int = 1001
    ) -> None:
        super().__init__(app, 0)
        self.contexts = grid(nodes).contexts
        self.key, self.change, self.node = key, change, node

    def _deliver(self, message: Message) -> Message:
        reply = super()._deliver(message)
        if message.metadata.dst_node_id == self.node:
            answer = json.loads(reply.content["node"][self.key])
            self.change(answer)
            reply.content["node"][self.key] = json.dumps(answer)
        return reply


WRONG: dict[str, Any] = {
    "clients = ()": {"clients": []},
    "domains = ()": {"domains": []},
    "domains[0] = 3: expected text": {"domains": [3]},
    "domains = 'b'": {"domains": "b"},
    "domains[0] = ''": {"domains": [""]},
    r"domains[0] = 'b\r'": {"domains": ["b\r"], "client": {"domain": "b\r"}},
    r"domains[0] = '\udc80'": {"domains": ["\udc80"], "client": {"domain": "\udc80"}},
    "held_out = 'b'": {"held_out": "b", "held_out_size": 3},
    "held_out = 'AVG'": {"held_out": "AVG", "held_out_size": 3},
    "held_out_size = 0": {"held_out": "unseen", "held_out_size": 0},
    "held_out_size = 5": {"held_out_size": 5},
    "domains = ('b', 'b')": {"domains": ["b", "b"], "sources": ["", ""], "test_sizes": [3, 3]},
    "class_counts = (4, 4, 4)": {"num_classes": 4},
    "num_classes = '3'": {"num_classes": "3"},
    "classes = ('x', 'x', 'x')": {"classes": ["x"] * 3},
    "shape = 'abc'": {"shape": "abc"},
    "shape[2] = -8: expected a number in [1, ": {"shape": [1, 8, -8]},
    "shape = (4, 8, 8)": {"shape": [4, 8, 8], "mean": [0.5] * 4, "std": [0.5] * 4},
    "mean[0] = nan": {"mean": [float("nan")]},
    "std = (0.0,)": {"std": [0.0]},
    "test_sizes[0] = -1": {"test_sizes": [-1]},
    "test_sizes = (3, 3)": {"test_sizes": [3, 3]},
    "crop_padding = 1000000000": {"augment": {"crop_padding": 10**9}},
    "auc = 'no'": {"auc": "no"},
    "fingerprint = 7: expected text": {"fingerprint": 7},
    "sources = ()": {"sources": []},
    "domain = 'c'": {"client": {"domain": "c"}},
    "clients[0].domain = ['b']": {"client": {"domain": ["b"]}},
    "client_id = 7": {"client": {"client_id": 7}},
    "class_counts = (6, 6)": {"client": {"class_counts": [6, 6]}},
    "clients[0].class_counts[1] = -4": {"client": {"class_counts": [16, -4, 0]}},
    "clients[0].class_counts[0] = 4.0: expected a whole number": {
        "client": {"class_counts": [4.0, 4.0, 4.0]}
    },
    "clients[0].num_examples = -5": {"client": {"num_examples": -5}},
    "num_examples = 13": {"client": {"num_examples": 13}},
    "clients[0].num_examples = True": {"client": {"num_examples": True, "class_counts": [1, 0, 0]}},
    "clients[0].num_examples = 0": {"client": {"num_examples": 0, "class_counts": [0, 0, 0]}},
    "clients[0].num_examples = 1000000": {
        "client": {"num_examples": 10**30, "class_counts": [10**30, 0, 0]}
    },
}


def changed(changes: dict[str, Any]) -> Callable[[Any], None]:
    def change(answer: Any) -> None:
        for field, value in changes.items():
            answer["clients"][0].update(value) if field == "client" else answer.update(
                {field: value}
            )

    return change


def test_an_invalid_description_is_refused(folders: list[Path]) -> None:
    site = open_site(DataConfig(name="npz", dir=str(folders[1])), "b")
    site.check()
    for reason, changes in WRONG.items():
        description = json.loads(site.to_json())
        changed(changes)(description)
        with pytest.raises(DataError, match=re.escape(reason)):
            Federation.from_json(json.dumps(description), site.folder).check()


def test_a_site_with_an_invalid_description_is_named_and_left_out(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        registry = register(Describing(nodes, "site", changed({"domains": [3]})))
    assert registry.nodes == {0: 1000, 1: 1002}
    problem = "its description of its data is invalid: domains[0] = 3: expected text"
    assert f"without node 1001: {problem}" in caplog.text


def test_a_site_with_several_clients_is_left_out(
    folders: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    def double(answer: Any) -> None:
        answer["clients"].append(answer["clients"][0] | {"client_id": 1})

    nodes = [{"domain": d, "data-dir": f} for d, f in zip("abc", folders, strict=True)]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert register(Describing(nodes, "site", double)).nodes == {0: 1000, 1: 1002}
    assert "without node 1001: a site must have a single client and a single domain" in caplog.text


def shares(tmp_path: Path, sizes: list[int]) -> list[dict[str, Any]]:
    """Nodes that divide a data set of two domains with this many training images each."""
    for size in set(sizes):
        for domain in "ab":
            npz(tmp_path / f"{size}" / f"{domain}.npz", train=size)
    return [
        {"partition-id": k, "num-partitions": len(sizes), "data-dir": tmp_path / f"{size}"}
        for k, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("odd", [0, 3])
def test_clients_that_share_a_data_set_must_have_the_same_data(tmp_path: Path, odd: int) -> None:
    sizes = [40] * 4
    sizes[odd] = 20
    divided = {"data.clients-per-domain": 2}
    with pytest.raises(
        ConfigError, match=rf"Node {1000 + odd}: the data differ from those of the other 3 nodes\."
    ):
        register(shares(tmp_path, sizes), **divided)
    registry = register(shares(tmp_path, [40] * 4), **divided)
    assert [client.num_examples for client in registry.federation.clients] == [20] * 4
    with pytest.raises(
        ConfigError, match=r"Node 1001: the data differ from those of node 1000\..*data-dir"
    ):
        register(shares(tmp_path, [40, 20]), **{"data.clients-per-domain": 1})


def test_the_same_data_in_another_folder_are_accepted(tmp_path: Path) -> None:
    nodes = shares(tmp_path, [40, 40])
    shutil.copytree(tmp_path / "40", tmp_path / "a copy")
    nodes[1]["data-dir"] = tmp_path / "a copy"
    assert len(register(nodes, **{"data.clients-per-domain": 1}).nodes) == 2


def test_a_client_with_an_invalid_description_is_named(tmp_path: Path) -> None:
    change = changed({"test_sizes": [6]})
    there = Describing(shares(tmp_path, [40] * 4), "federation", change, 1000)
    with pytest.raises(ConfigError, match=r"missing: \[0\](?s:.*)node 1000: .*test_sizes = \(6,\)"):
        register(there, timeout=0.2, **{"data.clients-per-domain": 2})


def test_only_the_first_client_describes_a_shared_data_set(tmp_path: Path) -> None:
    """Each description is as long as all clients: from all, they would grow with the square."""
    nodes, described = shares(tmp_path, [40] * 4), []

    class Counting(InlineGrid):
        def _deliver(self, message: Message) -> Message:
            reply = super()._deliver(message)
            described.append("federation" in reply.content["node"])
            return reply

    there = Counting(app, 0)
    there.contexts = grid(nodes).contexts
    registry = register(there, **{"data.clients-per-domain": 2})
    assert len(registry.federation.clients) == 4
    assert described == [True, False, False, False]


def test_missing_sites_are_reported_with_the_remedy_for_sites(
    folders: list[Path],
) -> None:
    with pytest.raises(ConfigError, match=r"0 of 2 clients answered\. .*domain=") as caught:
        register([], sites=2, timeout=0.1)
    assert "partition-id" not in str(caught.value)
    assert "round-timeout" not in str(caught.value)

    class Silent(InlineGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            return []

    there = Silent(app, 0)
    there.contexts = grid([{"domain": "a", "data-dir": f} for f in folders]).contexts
    with pytest.raises(ConfigError, match=r"domain=.*increase round-timeout(?s:.*)1002: no answer"):
        register(there, sites=3, timeout=0.1)


def test_settings_that_divide_a_benchmark_are_refused_for_sites(
    folders: list[Path], tmp_path: Path
) -> None:
    nodes = [{"domain": d, "data-dir": f} for d, f in zip("ab", folders, strict=False)]
    with pytest.raises(ConfigError, match=r"data\.corrupted-clients.*sites with their own data"):
        run(tmp_path, grid(nodes), **{"evaluate.by": "clients", "data.corrupted-clients": 1})


def test_sites_and_clients_of_a_shared_data_set_cannot_be_mixed(folders: list[Path]) -> None:
    nodes = [
        {"domain": "a", "data-dir": folders[0]},
        {"partition-id": 0, "num-partitions": 2, "data-dir": folders[1]},
    ]
    with pytest.raises(ConfigError, match=r"Node 1001 has a share.*--node-config"):
        register(nodes)


def test_a_site_that_cannot_read_its_data_is_named_and_left_out(
    folders: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"domain": "a", "data-dir": f} for f in (*folders[:2], tmp_path / "gone")]
    with caplog.at_level("WARNING", logger="flwr.fairflower"):
        assert list(register(nodes).nodes.values()) == [1000, 1001]
    assert "without node 1002" in caplog.text
    assert "gone" in caplog.text
    with pytest.raises(ConfigError, match=r"2 of 3 clients(?s:.*)domain=(?s:.*)node 1002:.*exist"):
        register(nodes, sites=3, timeout=0.2)


def test_sites_are_refused_by_a_server_with_its_own_data(folders: list[Path]) -> None:
    nodes = grid([{"domain": "a", "data-dir": folders[0]}])
    with pytest.raises(ConfigError, match=r'evaluate\.by = "clients"'):
        register_clients(NodeDiscovery(nodes, 0.2, threading.Event()), 1)
