"""Sites that are registered by name: who is asked, who joins later, and what messages call them."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import ssl
import threading
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from command import call
from cryptography.hazmat.primitives import serialization
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from rich.console import Console

from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.config.site import WITHDRAWN
from fairflower.deploy.credentials import make_certificates, make_key_pair
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, RoundFailed
from fairflower.flower_compat import OneSentence, SiteKey
from fairflower.report import read_run
from fairflower.server.checkpoint import resumed_config
from fairflower.server.discovery import NodeDiscovery, incompatible
from fairflower.server.registration import NodeTracker, register_clients
from fairflower.server.session import Session

SMALL: dict[str, Any] = {
    "num-server-rounds": 1,
    "train.local-epochs": 1,
    "data.name": "npz",
    "evaluate.by": "clients",
    "round-timeout": 0.5,
}
NAMES = ("north", "south", "coast")


class NamedGrid(InlineGrid):
    """Nodes whose keys were registered with a name; ``away`` are not connected until a round."""

    def __init__(self, sites: dict[int, tuple[str, bytes, dict[str, Any]]]) -> None:
        super().__init__(app, 0)
        self.sites, self.away, self.sent = sites, dict[int, int](), list[tuple[int, str]]()
        self.failing: set[int] = set()  # nodes whose training fails
        self.withdrawn: dict[int, float] = {}  # node -> round, tests are half a round later
        self.now = 0.0
        for node, (_, _, config) in sites.items():
            self.contexts[node] = Context(1, node, config, RecordDict(), {})

    def get_node_ids(self) -> list[int]:
        return [node for node in self.sites if node not in self.away]

    def get_nodes(self) -> Any:
        facts = ((node, *self.sites[node][:2]) for node in self.get_node_ids())
        return [SimpleNamespace(node_id=n, name=name, public_key=key) for n, name, key in facts]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            kind, node = message.metadata.message_type, message.metadata.dst_node_id
            self.sent.append((node, kind))
            config: Any = message.content.config_records.get("config", {})  # not about masks
            now = int(config.get("server-round", 0))
            self.now = now + 0.5 * (kind == "evaluate")
            if kind == "evaluate":
                self.away = {n: first for n, first in self.away.items() if first > now + 1}
            folder = str(self.contexts[node].node_config["data-dir"]).removesuffix("-gone")
            gone = "-gone" * (kind == "train" and node in self.failing)
            self.contexts[node].node_config["data-dir"] = f"{folder}{gone}"
        return super().push_messages(messages)

    def _deliver(self, message: Message) -> Message:
        if self.now >= self.withdrawn.get(message.metadata.dst_node_id, 99):
            return Message(Error(2, WITHDRAWN), reply_to=message)
        return super()._deliver(message)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """Return public keys as Flower's SuperLink stores them."""
    folder = tmp_path_factory.mktemp("keys")
    return [pem(make_key_pair(folder / f"{k}")) for k in range(4)]


def pem(public: Path) -> bytes:
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    return serialization.load_ssh_public_key(public.read_bytes()).public_bytes(*form)


@pytest.fixture
def sites(tmp_path: Path, keys: list[bytes]) -> dict[int, tuple[str, bytes, dict[str, Any]]]:
    rng = np.random.default_rng(0)
    found = {}
    for k, name in enumerate(NAMES):
        folder = tmp_path / name
        folder.mkdir()
        y = np.arange(18) % 3
        x = rng.integers(0, 256, (18, 8, 8), np.uint8)
        np.savez(folder / "x.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
        found[1000 + k] = (name, keys[k], {"domain": f"d{k}", "data-dir": str(folder)})
    return found


def session(there: InlineGrid, tmp_path: Path, **changes: Any) -> Session:
    flat = SMALL | {"output-dir": str(tmp_path / "runs"), **changes}
    on_round = flat.pop("on_round", None)
    config = RunConfig.from_flat(flat)
    return Session(there, config, Console(quiet=True), on_round=on_round)


def named(**changes: Any) -> dict[str, Any]:
    return {"sites": "north,south", **{k.replace("_", "-"): v for k, v in changes.items()}}


def test_the_fingerprint_of_a_key_is_that_of_its_public_file(tmp_path: Path) -> None:
    public = make_key_pair(tmp_path / "key")
    digest = hashlib.sha256(base64.b64decode(public.read_text().split()[1])).digest()
    expected = f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"  # as ssh-keygen -l
    node = SimpleNamespace(name="north", public_key=pem(public))
    assert SiteKey.of(node) == ("north", expected)
    assert SiteKey.of(SimpleNamespace(name="", public_key=pem(public))) is None


def test_only_listed_sites_get_messages_and_messages_name_them(
    sites: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = NamedGrid(sites)
    there.failing = {1001}
    caplog.set_level("INFO", logger="flwr.fairflower")
    folder = session(there, tmp_path, **named(min_clients=1)).run()
    assert {node for node, _ in there.sent} == {1000, 1001}
    assert caplog.text.count("Round 1 continues without south: ") == 1
    assert "client 1" not in caplog.text
    lines = (folder / "log.txt").read_text().splitlines()
    assert lines[0].endswith("north takes part: domain d0, 18 training examples, fairflower 0.1.0")
    assert "from south (" in call("report", folder).replace("\n", " ")


def test_of_two_sites_one_alone_trains_only_if_asked_for(sites: Any, tmp_path: Path) -> None:
    there = NamedGrid(sites)
    there.failing = {1001}
    with pytest.raises(RoundFailed, match=r"1 of 2 (?s:.*)south: .*\n.*only with min-clients = 1"):
        session(there, tmp_path, **named()).run()
    del sites[1001], sites[1002]
    with pytest.raises(ConfigError, match=r"1 of 2 clients answered.*only with min-clients = 1"):
        session(NamedGrid(sites), tmp_path).run()
    session(NamedGrid(sites), tmp_path, **{"min-clients": 1}).run()


def test_an_absent_site_is_waited_for_and_named(
    sites: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = NamedGrid(sites)
    there.away = {1001: 99}
    with pytest.raises(ConfigError, match=r"not connected after 0\.5 s \(round-timeout\): south\."):
        session(there, tmp_path, **named()).run()
    assert {node for node, _ in there.sent} == {1000}


def test_two_sites_of_one_name_are_refused(sites: Any, tmp_path: Path) -> None:
    sites[1002] = ("south", *sites[1002][1:])
    with pytest.raises(ConfigError, match="registered as 'south': nodes 1001 and 1002"):
        session(NamedGrid(sites), tmp_path, **named()).run()


def test_a_site_with_another_key_is_refused_by_name(
    sites: Any, keys: list[bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = session(NamedGrid(sites), tmp_path, **named()).run()
    moved = dict(sites)
    moved[7000] = moved.pop(1000)  # another SuperLink: another node id, the same key
    config = resumed_config(folder, {"num-server-rounds": 2})
    Session(NamedGrid(moved), config, Console(quiet=True)).run()
    assert read_run(folder).diagnostics[-1]["client_ids"] == [0, 1]
    moved[7000] = ("north", keys[3], sites[1000][2])
    config = resumed_config(folder, {"num-server-rounds": 3})
    with pytest.raises(ConfigError, match="north has another key than when the run began: SHA256:"):
        Session(NamedGrid(moved), config, Console(quiet=True)).run()

    settings = ConfigRecord(dict(RunConfig.from_flat(SMALL).to_flat()))

    def discovery(there: Any) -> NodeDiscovery:
        return NodeDiscovery(NamedGrid(there), 1, threading.Event(), settings, NAMES)

    registry = register_clients(discovery(sites))
    tracker = NodeTracker(discovery(moved), registry)
    assert not tracker.locate()
    assert registry.nodes[0] == 1000
    assert "north is ignored: north has another key" in caplog.text


def test_a_late_site_joins_and_the_run_resumes_with_it_to_the_same_bits(
    sites: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = named(late_sites="coast") | {"strategy.name": "fedheal", "num-server-rounds": 4}

    def there() -> NamedGrid:
        grid = NamedGrid(sites)
        grid.away = {1002: 3}
        return grid

    def stop(server_round: int, metrics: object) -> bool:
        return server_round == 3

    caplog.set_level("INFO", logger="flwr.fairflower")
    whole = session(there(), tmp_path, **settings).run()
    assert "Round 3: coast joins: domain d2, 18 training examples" in caplog.text
    result = read_run(whole)
    assert [line["client_ids"] for line in result.diagnostics] == [
        [0, 1],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2],
    ]
    facts = json.loads((whole / "run.json").read_text())
    assert (facts["domains"], facts["joined"]) == (["d0", "d1", "d2"], {"2": 3})
    assert facts["sites"]["keys"]["2"]["name"] == "coast"
    assert "coast joined in round 3" in call("report", whole).replace("\n", " ")
    first = session(there(), tmp_path, **settings, on_round=stop).run()
    config = resumed_config(first, {})
    Session(NamedGrid(sites), config, Console(quiet=True)).run()
    model, same = ((path / "model.safetensors").read_bytes() for path in (whole, first))
    assert model == same


@pytest.mark.parametrize("strategy", ["qffl", "afl", "fedfv", "fedequilibria"])
def test_strategies_take_a_late_site(strategy: str, sites: Any, tmp_path: Path) -> None:
    there = NamedGrid(sites)
    there.away = {1002: 2}
    settings = named(late_sites="coast") | {"strategy.name": strategy, "num-server-rounds": 3}
    run = read_run(session(there, tmp_path, **settings).run())
    assert [line["client_ids"] for line in run.diagnostics] == [[0, 1], [0, 1, 2], [0, 1, 2]]


def test_a_late_site_whose_data_do_not_fit_is_named_once(
    sites: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    y, x = np.arange(18) % 6, np.zeros((18, 8, 8), np.uint8)
    np.savez(tmp_path / "coast" / "x.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    settings = named(late_sites="coast") | {"num-server-rounds": 3}
    folder = session(NamedGrid(sites), tmp_path, **settings).run()
    text = "coast is ignored: its data do not fit this run: it has classes or groups that the run"
    assert caplog.text.count(text) == 1
    assert read_run(folder).diagnostics[-1]["client_ids"] == [0, 1]


def test_a_site_may_test_without_training(sites: Any, tmp_path: Path) -> None:
    sites[1002][2]["tests-only"] = True
    there = NamedGrid(sites)
    run = read_run(session(there, tmp_path, sites=",".join(NAMES)).run())
    assert (1002, "train") not in there.sent
    assert run.diagnostics[0]["client_ids"] == [0, 1]
    assert (1002, "evaluate") in there.sent
    message = Message(RecordDict({"config": ConfigRecord({})}), 1002, "train")
    with pytest.raises(RuntimeError, match="this site only tests: its node config has tests-only"):
        app(message=message, context=there.contexts[1002])
    sites[1001][2]["tests-only"] = True
    with pytest.raises(ConfigError, match=r"1 of 3 sites train; .* only with min-clients = 1"):
        session(NamedGrid(sites), tmp_path, sites=",".join(NAMES)).run()
    sites[1001][2].pop("tests-only")
    with pytest.raises(ConfigError, match="min-clients = 3: only 2 clients"):
        session(there, tmp_path, **{"sites": ",".join(NAMES), "min-clients": 3}).run()


def test_a_site_lets_no_run_use_few_examples(
    sites: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sites[1000][2]["fewest-examples"] = 19
    session(NamedGrid(sites), tmp_path, **named(min_clients=1)).run()
    words = "without north: .*this run uses 18 of the site's training examples, fewer than the few"
    assert re.search(words, caplog.text)


def messages_to(there: NamedGrid, node: int) -> int:
    return sum(asked == node for asked, _ in there.sent)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("strategy", ["fedheal", "qffl", "fedequilibria"])
def test_a_site_that_withdraws_is_asked_no_more_also_after_resuming(
    strategy: str, sites: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    there = NamedGrid(sites)
    there.withdrawn = {1000: 2}
    settings = {"sites": ",".join(NAMES), "num-server-rounds": 3, "strategy.name": strategy}
    folder = session(there, tmp_path, **settings).run()
    assert caplog.text.count("north has withdrawn, and is asked no more in this run.") == 1
    assert "Round 2 continues without north: the site has withdrawn" in caplog.text
    assert "Round 3 continues without" not in caplog.text
    assert messages_to(there, 1000) == 4  # a query, a round with its test, and its answer
    run = read_run(folder)
    assert [line["client_ids"] for line in run.diagnostics] == [[0, 1, 2], [1, 2], [1, 2]]
    assert json.loads((folder / "run.json").read_text())["withdrawn"] == {"0": 2}
    assert "north withdrew in round 2." in call("report", folder).replace("\n", " ")
    again = NamedGrid(sites)  # the site would answer again
    Session(again, resumed_config(folder, {"num-server-rounds": 4}), Console(quiet=True)).run()
    assert messages_to(again, 1000) == 0
    assert read_run(folder).diagnostics[-1]["client_ids"] == [1, 2]


def test_a_site_that_withdraws_counts_for_min_clients(sites: Any, tmp_path: Path) -> None:
    there = NamedGrid(sites)
    there.withdrawn = {1000: 1, 1001: 1.5}
    settings = {"sites": ",".join(NAMES), "num-server-rounds": 4}
    wrong = r"^north, south: withdrawn\. 1 of 3 sites train; .* only with min-clients = 1"
    with pytest.raises(RoundFailed, match=wrong):
        session(there, tmp_path, **settings).run()
    there.withdrawn = {1000: 1.5}
    masks = {"secure-aggregation": True, "strategy.name": "qffl"}
    with pytest.raises(RoundFailed, match=r"^north: withdrawn\. secure-agg.* is 2, but .* least 3"):
        session(there, tmp_path, **settings, **masks).run()
    there = NamedGrid(sites)
    there.withdrawn = {1001: 0}
    with pytest.raises(ConfigError, match="withdrawn: south"):  # nothing is waited for
        session(there, tmp_path, **settings, **{"round-timeout": 3600}).run()
    there.withdrawn = {1000: 2}
    with pytest.raises(RoundFailed, match="2 of 3 clients sent a usable reply, fewer than the 3"):
        session(there, tmp_path, **settings, **{"min-clients": 3}).run()


def test_another_version_is_refused_by_name(
    sites: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert incompatible("1.2.9", "1.2.0") == incompatible("", "1.2.0") == ""
    assert incompatible("1.3.0", "1.2.0").startswith("it runs fairflower 1.3.0, but the server")
    monkeypatch.setattr("fairflower.client_app.__version__", "9.0.0")
    with pytest.raises(ConfigError, match=r"north: it runs fairflower 9\.0\.0, but the server"):
        session(NamedGrid(sites), tmp_path, **named()).run()


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (named(late_sites="north"), "'north' is given twice"),
        ({"late-sites": "coast"}, "late-sites = 'coast' needs the other sites' names in sites"),
        ({"sites": "north"}, "expected the names of at least 2 sites"),
        (named(min_clients=3), "min-clients = 3: sites = 'north,south' has only 2 sites"),
        (named() | {"evaluate.by": "server"}, "only sites have names"),
        ({"sites": -1}, "sites = -1: expected a whole number"),
    ],
)
def test_wrong_lists_of_sites_are_refused(changes: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RunConfig.from_flat(SMALL | changes)
    assert error in str(raised.value)


def test_an_error_of_the_user_is_one_sentence_in_flowers_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = logging.getLogger("one-sentence")
    log.addFilter(OneSentence())
    for error in (ValueError("a bug"), ConfigError("sites = 3: wrong.")):
        log.error("ServerApp raised an exception", exc_info=error)
        log.error("Exit Code: 201\nAn unhandled exception occurred in the ServerApp.")
    records = [
        (record.getMessage().split("\n")[0], bool(record.exc_info)) for record in caplog.records
    ]
    assert records == [
        ("ServerApp raised an exception", True),
        ("Exit Code: 201", False),
        ("sites = 3: wrong.", False),
    ]


def test_a_certificate_that_is_refused_is_one_sentence_in_flowers_log(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    httpx = pytest.importorskip("httpx")  # with which newer Flower's ServerApp connects
    files = [make_certificates(tmp_path / name, ["127.0.0.1"]) for name in ("server", "other")]
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files[0].certificate, files[0].key)
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.handle_request, daemon=True).start()
        trusted = ssl.create_default_context(cafile=str(files[1].authority))
        client = httpx.Client(verify=trusted, trust_env=False)
        with client, pytest.raises(httpx.ConnectError) as refused:
            client.get(f"https://127.0.0.1:{server.server_port}")
    log = logging.getLogger("refused-certificate")
    log.addFilter(OneSentence())
    log.error("ServerApp raised an exception", exc_info=refused.value)
    (record,) = caplog.records
    assert re.fullmatch(r"The SuperLink's certificate is refused \(.*\)\. .*", record.getMessage())
    assert record.exc_info is None


def test_the_command_line_lists_sites_and_checks_a_config(
    sites: Any, keys: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session(NamedGrid(sites), tmp_path, **named()).run()

    def nodes(superlink: str | None) -> list[Any]:
        times = {"last_activated_at": "2026-11-29T22:10:00", "last_deactivated_at": ""}
        status = ("online", "offline", "online")
        return [
            SimpleNamespace(
                node_id=k, name=name, public_key=keys[(0, 1, 3)[k]], status=status[k], **times
            )
            for k, name in enumerate(NAMES)
        ]

    monkeypatch.setattr("fairflower.flower_compat.nodes_at", nodes)
    monkeypatch.setattr("fairflower.cli.terminal.console.width", 250)
    listed = call("deploy", "sites", "prod").splitlines()
    (north,) = [line for line in listed if "north" in line]
    assert "online" in north
    assert "2026-11-29T22:10" in north
    assert "domain d0, 18" in north
    assert [line for line in listed if "coast" in line and "no run yet" in line]

    config = tmp_path / "run.toml"
    lines = ['sites = "north,south"', 'evaluate.by = "clients"', 'data.name = "npz"']
    config.write_text("\n".join(lines))
    assert "north (online), south (offline)" in call("deploy", "check", config, "prod")
    config.write_text("\n".join([lines[0].replace("south", "souht"), *lines[1:]]))
    assert "Did you mean 'south'?" in call("deploy", "check", config, "prod", expect=2)
    config.write_text("\n".join([*lines, 'strategy.name = "fedhael"']))
    assert "Did you mean 'fedheal'?" in call("deploy", "check", config, expect=2)
    config.write_text("\n".join([*lines, "secure-aggregation = true", 'strategy.name = "qffl"']))
    assert "secure-aggregation" in call("deploy", "check", config, expect=2)
