"""What leaves a site in a run: found in a rehearsal, and said in the words of the registries.

A rehearsal runs the same server and the same app in this process for two rounds of one epoch, with
the run's other settings, and notes every message. Sizes are those of Flower's protobuf messages.
"""

from __future__ import annotations

import json
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, Message, RecordDict
from rich.console import Console

from fairflower.aggregation.exchange import Exchange
from fairflower.client_app import app, largest_data
from fairflower.config import RunConfig
from fairflower.config.secure import CONSORTIUM, SIGNING_KEY
from fairflower.config.site import TESTS_OTHERS
from fairflower.config.text import Scalar
from fairflower.deploy.credentials import make_key_pair
from fairflower.engines.inline import InlineGrid
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Key, Stage, recorddict_to_proto, set_ids
from fairflower.numerics.group_fairness import GROUP_COUNTS
from fairflower.paths import client_states
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import FAILED_METRICS
from fairflower.secure.client import MEASURE
from fairflower.secure.protocol import SIGN_LIST, SIGNED
from fairflower.secure.sums import SUMS
from fairflower.server.session import Session
from fairflower.tables.sites import SiteTable
from fairflower.training.client_state import OWN

#: Type of a message, or the step of secure aggregation -> when a site answers it.
WHEN = {
    "query": "once, before the first round",
    SUMS: "once, before the first round (secure aggregation)",
    MEASURE: "each round, before training",
    "train": "each round",
    **dict.fromkeys((*Stage.all(), SIGN_LIST), "each round (secure aggregation)"),
    "evaluate": "each test; the last one is after the run",
}

#: Steps of secure aggregation, records and numbers -> what they are. Exchanges and measurements
#: have words of their own.
WORDS = {
    Stage.SETUP: "public keys of this round; also before the first one, if a table is summed up",
    Stage.SHARE_KEYS: "shares of the keys, each encrypted for another site",
    SUMS: "sums of the table under masks: the server learns those over all sites",
    Stage.COLLECT_MASKED_VECTORS: "update of the model under masks",
    SIGN_LIST: "signature of the keys, the model, the settings and the list of present sites",
    Stage.UNMASK: "shares that remove the masks from the sum, and from no single update",
    SIGNED: "name of the site and signature of its keys, or of what it was told to train with",
    "fitres.num_examples": "echo of the weight that the server gave",
    "fitres.status": "that the site could train",
    "arrays": "trained model",
    GROUP_COUNTS: "counts of test examples for each group of people",
    FAILED_METRICS: "names of your own metrics that failed",
    OWN: "this site's own model",
    "site": "description of the site's data: domain, numbers of training examples of each class, "
    "of test and validation examples, names of classes and groups",
    "version": "version of fairflower",
    "tests-only": "that the site only tests",
    "rows": "digest of each row, with a key of the sites",
    "rows-of": "digest of that key and the columns",
    TESTS_OTHERS: "that the site tests other sites' own models",
    "federation": "the same of the whole shared data set",
    "digest": "SHA-256 of the shared data and its description",
    "partition-id": "number from the node config",
    "num-partitions": "number from the node config",
    "num-examples": "number of examples",
    "client-id": "the client's number, which the server gave",
    "train_loss": "mean loss during training",
    "eval_loss": "mean loss on the test examples",
    "state-round": "round in which the site's own state was written",
}

#: Steps and records -> who gets them, if not only the server.
RECIPIENTS = {
    Stage.SHARE_KEYS: "other sites; the server passes them on, and cannot read them",
    **dict.fromkeys((Stage.SETUP, SIGN_LIST, SIGNED), "the server and all sites"),
    "arrays": "the server; all sites get the merged model",
    OWN: "the server; sites that test others' models get it",
}

#: What the description of a table has besides: with its sums, and with none.
TABLE = "columns, sums, and the number of patients (data.patient)"
DECLARED = "columns as the schema declares them, and the number of patients (data.patient); no sums"

_MASKED = (*Stage.all(), SIGN_LIST, SUMS)


class Leaving(NamedTuple):
    """A record that leaves a site: a row of the table, in the order of `COLUMNS`."""

    when: str
    #: The record's name in messages, and what it is, for each of its parts.
    record: str
    what: str
    #: Bytes of the largest such record in the rehearsal.
    size: int
    recipient: str
    kept: str

    def cells(self) -> list[str]:
        """Return the texts of the row."""
        return [f"{value:,}" if isinstance(value, int) else value for value in self]


COLUMNS = ("when", "record", "what it is", "bytes", "who gets it", "kept at the server")


class Sent(NamedTuple):
    """A record of a message: its kind or stage, round, site, name, bytes, and keys of values."""

    kind: str
    server_round: int
    site: int
    name: str
    size: int
    keys: tuple[str, ...]


@dataclass
class Rehearsal:
    """Records of the requests and replies of a rehearsal, and what a site needs, in bytes."""

    config: RunConfig
    requests: list[Sent] = field(default_factory=list)
    replies: list[Sent] = field(default_factory=list)
    #: What the sites' descriptions have of their tables.
    table: str = ""
    #: State that a site's client keeps on disk during the run.
    disk: int = 0
    #: This process before the rehearsal (Python with PyTorch), and the examples in memory.
    process: int = 0
    examples: int = 0

    def leaving(self) -> list[Leaving]:
        """Return what leaves a site, in the order in which it does."""
        rows: dict[tuple[str, str], tuple[int, list[str]]] = {}
        for sent in self.replies:
            size, keys = rows.get((sent.kind, sent.name), (0, []))
            keys = [*dict.fromkeys((*keys, *sent.keys))]
            rows[sent.kind, sent.name] = max(size, sent.size), keys
        listed = []
        for kind, name in sorted(rows, key=lambda row: [*WHEN].index(row[0])):
            size, keys = rows[kind, name]
            what, recipient = self._what(kind, name, keys), self._recipient(kind, name, keys)
            kept = self._kept(kind, name, keys)
            listed.append(Leaving(WHEN[kind], name, what, size, recipient, kept))
        return listed

    def of_site(self, site: int) -> Rehearsal:
        """Return the records of one site."""
        requests, replies = (
            [sent for sent in of if sent.site == site] for of in (self.requests, self.replies)
        )
        return replace(self, requests=requests, replies=replies)

    @property
    def model(self) -> int:
        """The model in messages."""
        return max(record.size for record in self.requests if record.name == "arrays")

    @property
    def memory(self) -> int:
        """Memory of a site's process, but for the activations of the network.

        Python with PyTorch, the examples, and six models: the network, its gradient, the
        optimizer's momentum, the received and the sent arrays, and the reply as bytes.
        """
        return self.process + self.examples + 6 * self.model

    def sizes(self) -> str:
        """Return in sentences what a site needs: the largest site, in its second round."""
        sites = {record.site for record in self.replies}
        received, sent = (
            max(
                sum(r.size for r in records if (r.server_round, r.site) == (2, site))
                for site in sites
            )
            for records in (self.requests, self.replies)
        )
        return (
            f"A round: {received:,} bytes to a site and {sent:,} bytes from it, tests included, "
            f"without the overhead of the network. Disk at a site: {self.disk:,} bytes of state. "
            f"Memory of a site's process: {self.memory / 1e6:,.0f} MB = {self.process / 1e6:,.0f} "
            f"MB (Python with PyTorch) + {self.examples / 1e6:,.1f} MB (examples) + 6 x "
            f"{self.model / 1e6:,.1f} MB (model); the activations of a batch come on top, and grow "
            "with train.batch-size."
        )

    def markdown(self) -> str:
        """Return the table and the sizes as Markdown."""
        table = "".join(f"| {' | '.join(row.cells())} |\n" for row in self.leaving())
        return f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n{table}\n{self.sizes()}\n"

    def _what(self, kind: str, name: str, keys: Sequence[str]) -> str:
        """Return what a record is, and what each of its values is."""
        word = self._word(kind if name == RECORD_KEY_CONFIGS else name)
        if name == "arrays" and self.config.privacy.on:
            word += ", its update clipped (differential privacy)"
        other = "score of a test, or a mean from which scores are made"
        return word or "; ".join(f"{key}: {self._word(key) or other}" for key in keys)

    def _word(self, name: str) -> str:
        """Return what a record or a number is; "" for a score or a user's metric."""
        if name in WORDS:
            return WORDS[name] + f"; of a table {self.table}" * bool(name == "site" and self.table)
        if exchange := self._exchanges.get(name):
            return f"for {(exchange.__doc__ or name).splitlines()[0].rstrip('.')}"
        if name in self.config.evaluate.metrics:
            return "your own metric (evaluate.metrics)"
        return MEASUREMENTS[name].description.replace("``", "") if name in MEASUREMENTS else ""

    @cached_property
    def _exchanges(self) -> dict[str, Exchange]:
        client = self.config.client
        made = client.factory.make_exchanges(client.args)
        return {exchange.name: exchange for exchange in made}

    def _recipient(self, kind: str, name: str, keys: Sequence[str]) -> str:
        if words := RECIPIENTS.get(name) or RECIPIENTS.get(kind):
            return words
        if "site" in keys:
            return "the server; all sites get the names, and the encoding of tables"
        if not (exchange := self._exchanges.get(name)):
            return "the server"
        own = type(exchange).arrays_for is not Exchange.arrays_for
        return "the server; " + (
            "this site gets it back" if own else "all sites get what it makes or collects of it"
        )

    def _kept(self, kind: str, name: str, keys: Sequence[str]) -> str:
        """Return where the server keeps a record; methods' states are in checkpoints."""
        if kind == SUMS and name == RECORD_KEY_CONFIGS:
            return "memory, until the round ends; in the run folder those over all sites"
        if (kind in _MASKED and name != "metrics") or name == OWN or keys == ["rows", "rows-of"]:
            return "memory, until the round ends"
        if not (name in MEASUREMENTS or name == "arrays" or name in self._exchanges):
            return "run folder, until it is deleted"
        methods = [self.config.strategy.make(), *self._exchanges.values()]
        state = [name for method in methods for name in method.STATE]
        parts = ["merged models"] * (name == "arrays")
        parts += [f"what the methods make of it ({', '.join(state)})"] * bool(state)
        kept = f"; in the run folder {' and '.join(parts)}" if parts else ""
        return f"memory, until the round ends{kept}"


class _RecordingGrid(InlineGrid):
    """An inline grid that notes requests and replies."""

    rehearsal: Rehearsal
    server_round = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._run_id = secrets.randbits(63)  # a site masks its sums once in a run

    def _deliver(self, message: Message) -> Message:
        set_ids(message, run_id=self._run_id)
        node, content = message.metadata.dst_node_id, message.content
        config: Any = content.get("config", {})
        asked: Any = content.get(RECORD_KEY_CONFIGS, {})
        kind = asked.get(Key.STAGE, message.metadata.message_type)  # Flower's mod removes it
        kind = SUMS if SUMS in config else kind
        self.server_round = config.get("server-round", self.server_round)
        self.rehearsal.requests += records_of(content, kind, self.server_round, node)
        reply = super()._deliver(message)
        if reply.has_content():
            self.rehearsal.replies += records_of(reply.content, kind, self.server_round, node)
            said: Any = reply.content.get("node", {})
            if table := json.loads(str(said.get("site", "{}"))).get("encoding"):
                self.rehearsal.table = TABLE if SiteTable.from_json(table).sums else DECLARED
        return reply


def rehearse(
    config: RunConfig, node_configs: Sequence[Mapping[str, Scalar]], consortium: bool = False
) -> Rehearsal:
    """Run two rounds in this process, and return the messages.

    ``config`` is that of the run, and ``node_configs`` those of the sites. As a ``consortium`` they
    have keys that are made for the rehearsal. Raises the errors of `Session.run`.
    """
    grid = _RecordingGrid(app, len(node_configs))
    with tempfile.TemporaryDirectory() as folder:
        nodes = _with_keys(node_configs, Path(folder)) if consortium else node_configs
        for context, node in zip(grid.contexts.values(), nodes, strict=True):
            context.node_config = dict(node)
        short = replace(
            config,
            num_server_rounds=2,
            train=replace(config.train, local_epochs=1),
            evaluate=replace(config.evaluate, every=1),
            output_dir=str(Path(folder) / "runs"),
        )
        grid.rehearsal = rehearsal = Rehearsal(config, process=peak_memory())

        def measure_disk(server_round: int, _: Any) -> None:
            assert session.folder is not None
            kept = (client_states() / session.folder.run_id).rglob("*")
            size = sum(path.stat().st_size for path in kept if path.is_file())
            rehearsal.disk = -(-size // len(node_configs))

        session = Session(grid, short, Console(quiet=True), on_round=measure_disk)
        session.run()
    rehearsal.examples = largest_data()
    return rehearsal


def _with_keys(
    node_configs: Sequence[Mapping[str, Scalar]], folder: Path
) -> list[dict[str, Scalar]]:
    """Return the node configs of a consortium, whose files are in a folder."""
    keys = [folder / f"site-{k}" for k in range(len(node_configs))]
    lines = [f"{key.name} {make_key_pair(key).read_text(encoding='ascii')}" for key in keys]
    sites = folder / "sites"
    sites.write_text("\n".join(lines), encoding="ascii")
    return [
        {**node, CONSORTIUM: str(sites), SIGNING_KEY: str(key)}
        for node, key in zip(node_configs, keys, strict=True)
    ]


def records_of(content: RecordDict, kind: str, server_round: int, site: int) -> list[Sent]:
    """Return a message's records that are not empty, with their sizes in bytes."""
    records = []
    for name, record in content.items():
        size = recorddict_to_proto(RecordDict({name: record})).ByteSize()
        keys = () if isinstance(record, ArrayRecord) else tuple(record)
        if len(record):
            records.append(Sent(kind, server_round, site, name, size, keys))
    return records


def peak_memory() -> int:
    """Return the largest resident memory of this process in bytes; 0 on systems without /proc."""
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="ascii")
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])
    return 0
