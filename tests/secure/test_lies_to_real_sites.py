"""A server that lies to three real sites with a consortium file, in messages over TLS."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest
import tiny_data_sets
from flwr.app import Message, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.serverapp import Grid
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from processes import belonging_to, wait_for
from rich.console import Console
from secure_federation import stage_of

from fairflower.arrays import arrays_of, record_of
from fairflower.config import RunConfig
from fairflower.config.text import toml_value
from fairflower.deploy.local import SUPERLINK_NAME, LocalDeployment
from fairflower.flower_compat import ensure_task_identity
from fairflower.secure.client import REFUSED
from fairflower.secure.protocol import SIGNED
from fairflower.server.contents import read_facts
from fairflower.server.session import Session

NAMES = ("north", "south", "coast")
POLICY = """strategies = ["fedavg"]
clients = ["sgd"]
models = ["mlp"]
data = ["npz"]
protection = "secure-aggregation"
smallest-others = 2
"""
SETTINGS: dict[str, Any] = {
    "sites": ",".join(NAMES),
    "min-clients": 3,
    "secure-aggregation": True,
    "strategy.name": "fedavg",
    "model.name": "mlp",
    "data.name": "npz",
    "evaluate.by": "clients",
    "evaluate.every": 100,
    "num-server-rounds": 3,
    "train.local-epochs": 1,
}

#: A ServerApp that hands on what this process says to its sites.
APP = """
from multiprocessing.connection import Client

from flwr.app import Message
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

app = ServerApp()
client = ClientApp()

@app.main()
def main(grid, context):
    with Client(("127.0.0.1", context.run_config["port"]), authkey=b"a test's") as pipe:
        while (asked := pipe.recv()) is not None:
            name, *given = asked
            if name == "push_messages":
                given = [[Message(*parts) for parts in given[0]]]
            pipe.send(list(getattr(grid, name)(*given)))
"""
PROJECT = """
[project]
name = "lies"
version = "1"
dependencies = []

[tool.flwr.app]
publisher = "nobody"

[tool.flwr.app.components]
serverapp = "lies:app"
clientapp = "lies:client"

[tool.flwr.app.config]
port = {port}
"""


def relayed(trial: LocalDeployment, folder: Path) -> Connection:
    """Submit the app; return the connection to it."""
    with Listener(("127.0.0.1", 0), authkey=b"a test's") as listener:
        folder.mkdir(parents=True)
        (folder / "lies.py").write_text(APP)
        (folder / "pyproject.toml").write_text(PROJECT.format(port=listener.address[1]))
        assert trial.flwr_json("run", str(folder), SUPERLINK_NAME)["run-id"]
        listener._listener._socket.settimeout(60)  # type: ignore[attr-defined]
        return listener.accept()


class LyingGrid(Grid):
    """The SuperLink's grid. The server trains in three rounds, all of them with its own messages.

    In round 2 it tells one site another model. In round 3 it sends each of `FORGERIES` to all sites
    before the honest message of the same stage.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._round = pipe, 0
        #: Contents of honest requests, by round, stage and node.
        self.sent: dict[tuple[int, str, int], RecordDict] = {}
        #: Reasons of refusals, by name of the lie.
        self.refusals: dict[str, list[str]] = defaultdict(list)

    def _do(self, *asked: Any) -> list[Any]:
        self._pipe.send(asked)
        return self._pipe.recv()  # type: ignore[no-any-return]

    def get_node_ids(self) -> list[int]:
        return sorted(node.node_id for node in self.get_nodes())

    def get_nodes(self) -> Any:
        return self._do("get_nodes")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        parts, stage = [parts_of(message) for message in messages], ""
        for content, node, _ in parts:
            stage = stage_of(Message(content, node, parts[0][2]))
            if stage == "measure":
                self._round = int(content["config"]["server-round"])  # type: ignore[index]
            self.sent[self._round, stage, node] = copied(content)
        if self._round == 2 and stage == "collect_masked_vectors":
            model = arrays_of(parts[0][0]["arrays"])  # type: ignore[arg-type]
            parts[0][0]["arrays"] = record_of({name: 9 * array for name, array in model.items()})
        lies: list[Any] = []
        for name, (when, forge, _) in FORGERIES.items():
            if self._round == 3 and stage == when:
                forged = [(copied(content), *rest) for content, *rest in parts]
                for content, node, _ in forged:
                    forge(self, node, content)
                lies += [(name, message) for message in forged]
        self.say(lies)
        return self._do("push_messages", parts)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return self._do("pull_messages", list(message_ids))

    def say(self, lies: list[Any]) -> None:
        """Send messages, and keep the reasons why they are refused, or an empty text."""
        ids = self._do("push_messages", [message for _, message in lies])
        names = dict(zip(ids, [name for name, _ in lies], strict=True))
        while names:
            for reply in self._do("pull_messages", [*names]):
                name = names.pop(reply.metadata.reply_to_message_id)
                self.refusals[name].append(reply.error.reason if reply.has_error() else "")
            time.sleep(0.2)

    def again(self, server_round: int, stage: str, node: int) -> tuple[RecordDict, int, str]:
        kind = "train.measure" if stage == "measure" else "train"
        return self.sent[server_round, stage, node], node, kind

    def end(self) -> None:
        self._pipe.send(None)

    def set_run(self, run: object) -> None:
        raise NotImplementedError

    run: Any = None

    def create_message(self, *_: Any) -> Any:
        raise NotImplementedError

    def send_and_receive(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def parts_of(message: Message) -> tuple[RecordDict, int, str]:
    return copied(message.content), message.metadata.dst_node_id, message.metadata.message_type


def copied(content: RecordDict) -> RecordDict:
    return RecordDict({name: record.copy() for name, record in content.items()})


# --- lies ------------------------------------------------------------------------------------


def others(node: int, content: RecordDict) -> dict[str, list[bytes]]:
    """The keys of all sites but one, in a request to this one."""
    asked: Any = content[RECORD_KEY_CONFIGS]
    return {name: pair for name, pair in asked.items() if name not in ("stage", str(node))}


def invent_sites(grid: LyingGrid, node: int, content: RecordDict) -> None:
    for name in others(node, content):
        own = [public_key_to_bytes(generate_key_pairs()[1]) for _ in range(2)]
        content[RECORD_KEY_CONFIGS][name] = own  # type: ignore[index]


def swap_keys(grid: LyingGrid, node: int, content: RecordDict) -> None:
    for name, pair in others(node, content).items():
        content[RECORD_KEY_CONFIGS][name] = pair[::-1]  # type: ignore[index]


def replay_keys(grid: LyingGrid, node: int, content: RecordDict) -> None:
    """Keys and signatures of all others are those of round 1."""
    old, now = grid.sent[1, "share_keys", node], content[SIGNED]
    content[RECORD_KEY_CONFIGS].update(others(node, old))
    kept: Any = dict(zip(now["nodes"], now["signatures"], strict=True))  # type: ignore[arg-type]
    before: Any = dict(zip(old[SIGNED]["nodes"], old[SIGNED]["signatures"], strict=True))  # type: ignore[arg-type]
    now["signatures"] = [*({**before, node: kept[node]}[n] for n in now["nodes"])]  # type: ignore[union-attr]


def shorter_list(grid: LyingGrid, node: int, content: RecordDict) -> None:
    """Another site has failed, of which its neighbors are not told."""
    asked: Any = content[RECORD_KEY_CONFIGS]
    lost = next(n for n in asked["active_nids"] if n != node)
    asked["active_nids"] = [n for n in asked["active_nids"] if n != lost]
    if "dead_nids" in asked:
        asked["dead_nids"] = [lost]


def second_list(grid: LyingGrid, node: int, content: RecordDict) -> None:
    """A site has signed that all are present, and shall sign that another one has failed."""
    content.clear()
    content.update(copied(grid.sent[3, "sign_list", node]))
    shorter_list(grid, node, content)


def replay_list(grid: LyingGrid, node: int, content: RecordDict) -> None:
    content[SIGNED] = grid.sent[1, "unmask", node][SIGNED]


#: Lie -> stage of its messages, what it changes in them, and a part of each refusal.
FORGERIES: dict[str, tuple[str, Callable[[LyingGrid, int, RecordDict], None], str]] = {
    "invented sites": ("share_keys", invent_sites, "that this site has not signed for this round"),
    "swapped keys": ("share_keys", swap_keys, "that this site has not signed for this round"),
    "keys of round 1": ("share_keys", replay_keys, "that this site has not signed for this round"),
    "second list": ("unmask", second_list, REFUSED),
    "list of round 1": ("unmask", replay_list, "keeps the masks: 0 sites have signed"),
    "unsigned list": ("unmask", shorter_list, "smallest-others = 2): 2 sites in the sum"),
}
#: Honest requests of a round that are repeated after the run.
REPEATED = [(3, "measure"), (1, "collect_masked_vectors"), (3, "collect_masked_vectors")]
REPEATED += [(3, "unmask")]


@dataclass
class Attacked:
    """What is left of the run: its folder, the refusals by lie, and the sites' audit logs."""

    run: Path
    refusals: dict[str, list[str]]
    audits: list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Attacked:
    place = tmp_path_factory.mktemp("lies")
    folders = tiny_data_sets.digits_folders(place, ("plain", "inverted", "rotated"), most=20)
    nodes = [
        {"domain": n, "data-dir": str(f)} for n, f in zip(NAMES, folders.values(), strict=True)
    ]
    trial = LocalDeployment(place / "trial", nodes, lambda _: None)
    keys = [f"{site.name} {(site.home / 'key.pub').read_text()}" for site in trial.sites]
    (place / "sites").write_text("\n".join(keys))
    for site in trial.sites:
        (site.home / "policy.toml").write_text(POLICY)
        file = site.home / "site.toml"
        own = f"consortium = {toml_value(str(place / 'sites'))}\nsigning-key = 'key'\n"
        file.write_text('policy = "policy.toml"\n' + file.read_text() + own)
    config = RunConfig.from_flat({**SETTINGS, "output-dir": str(place / "runs")})
    ensure_task_identity()
    with trial:
        grid = LyingGrid(relayed(trial, place / "app"))
        folder = Session(grid, config, Console(quiet=True)).run()
        node, *_ = grid.get_node_ids()
        grid.say([(f"{stage} of round {r}", grid.again(r, stage, node)) for r, stage in REPEATED])
        grid.end()
    wait_for(lambda: not belonging_to(place), "all processes to end")
    logs = [(site.home / "audit" / "audit.jsonl").read_text().splitlines() for site in trial.sites]
    audits = [[json.loads(line) for line in log] for log in logs]
    return Attacked(folder, grid.refusals, audits)


@pytest.mark.nightly
def test_each_site_refuses_each_lie_and_its_audit_log_says_so(attacked: Attacked) -> None:
    for name, (_, _, reason) in FORGERIES.items():
        assert len(attacked.refusals[name]) == 3
        assert all(reason in refusal for refusal in attacked.refusals[name]), name
    for r, stage in REPEATED:
        assert REFUSED in attacked.refusals[f"{stage} of round {r}"][0]
    for audit in attacked.audits:
        failed = [line for line in audit if line["outcome"] != "answered"]
        assert not any(line["sent"] for line in failed)
        reasons = [line["reason"] for line in failed]
        for name, refusals in attacked.refusals.items():
            if name in FORGERIES:
                assert {*refusals} & {*reasons}, name
        # Of a list with a site that trained another model, and of unmasking without signatures.
        assert sum("signs no list with site" in reason for reason in reasons) == 1


@pytest.mark.nightly
def test_no_more_leaves_a_site_than_in_honest_rounds_which_go_on(attacked: Attacked) -> None:
    facts = read_facts(attacked.run)
    assert facts["status"] == "completed"
    assert [int(r) for r in facts["halted_rounds"]] == [2]
    for audit in attacked.audits:
        answered = [
            (line["round"], line["kind"]) for line in audit if line["outcome"] == "answered"
        ]
        masked = [line for line in answered if line[1] == "train (collect_masked_vectors)"]
        assert [r for r, _ in masked] == [1, 2, 3]
        assert sum(kind == "train (unmask)" for _, kind in answered) == 2
