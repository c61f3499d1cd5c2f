"""`fairflower deploy leaves` lists what a run's clients really send."""

from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path
from typing import Any

import processes
import pytest
import runs
import tiny_data_sets
from apps import app_with_handlers
from command import call
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from hospital_tables import SCHEMA, write_three
from rich.console import Console
from secure_federation import stage_of
from table_sites import SETTINGS, separate

from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.deploy.leaves import WHEN, WORDS, Leaving, Rehearsal, rehearse
from fairflower.engines.inline import InlineGrid
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Stage
from fairflower.registry import CLIENTS
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.secure.client import MEASURE
from fairflower.secure.protocol import SIGN_LIST, SIGNED
from fairflower.secure.sums import SUMS
from fairflower.server.session import Session

#: Settings of runs -> words that the list must have.
RUNS: dict[str, tuple[dict[str, Any], str]] = {
    "fedheal": ({"strategy.name": "fedheal"}, "trained model"),
    "scaffold": ({"client.name": "scaffold"}, "SCAFFOLD's c"),
    "fedgc": (
        {"strategy.name": "fedgcr", "client.name": "fedgc", "model.name": "prompt-vit-tiny"},
        "received_representation",
    ),
    "fedequilibria": ({"strategy.name": "fedequilibria"}, "diagonal of the empirical Fisher"),
    "fedmix": ({"client.name": "fedmix"}, "Averages of batches of every client's images"),
    "personal": ({"client.name": "fedbn:keep=server"}, "Each client's own arrays"),
    "secure": (
        {"secure-aggregation": True, "strategy.name": "qffl"},
        "update of the model under masks",
    ),
    "privacy": (
        {"privacy.noise-multiplier": 1.0, "privacy.clip": 0.1, "strategy.name": "uniform"},
        "its update clipped (differential privacy)",
    ),
    "groups": (
        {"data.name": "heart-disease", "data.groups": "sex", "model.name": "mlp"},
        "counts of test examples for each group of people",
    ),
    "reference": ({"strategy.name": "alone"}, "the site's own state"),
}
SLOW = [pytest.param(name, marks=[pytest.mark.slow] * (name != "scaffold")) for name in RUNS]
#: Methods with other data, of which the page is checked at night.
OTHERS = {"strategy.name": ("fedeba+", "daa", "fairfed", "fednova", "fedce", "eagle")}
OTHERS |= {"client.name": ("fedproto", "fpl", "fedrdn", "ditto")}


def documented() -> dict[tuple[str, str], tuple[str, str]]:
    """Return who gets a datum and where it is kept, by when it is sent and its name or words."""
    page = (processes.ROOT / "docs" / "privacy.md").read_text()
    table = page.partition("<!-- table: leaves -->")[2].partition("<!-- end -->")[0]
    rows = {}
    for line in table.strip().splitlines()[2:]:
        what, when, *place, _ = line.strip("| ").split(" | ")
        names = re.findall(r"(?:^|; |, |<br>)`([\w.-]+)`", what)
        rows |= {(when, name): tuple(place) for name in (*names, *what.split("<br>"))}
    measured = rows[WHEN[MEASURE], "the strategy's numbers, named below"]
    numbers = [name for name, kind in MEASUREMENTS.items() if kind.shape == "number"]
    return rows | {(WHEN[MEASURE], name): measured for name in numbers}


def sent_in(config: RunConfig, nodes: list[dict[str, Any]]) -> dict[Any, tuple[int, set[str]]]:
    """Return the largest size, and the names of values, of each record that clients send."""
    sent: dict[Any, tuple[int, set[str]]] = {}

    def record(message: Message, context: Context) -> Message:
        kind = stage_of(message) or message.metadata.message_type
        kind = "train.measure" if kind == "measure" else kind
        kind = SUMS if SUMS in message.content.config_records.get("config", {}) else kind
        reply = client_app(message, context)
        for name, values in reply.content.items():
            size, keys = sent.get((kind, name), (0, set()))
            wire = len(recorddict_to_proto(RecordDict({name: values})).SerializeToString())
            new = set() if isinstance(values, ArrayRecord) else {*values}
            if len(values):
                sent[kind, name] = max(size, wire), keys | new
        return reply

    app = app_with_handlers(train=record, evaluate=record, query=record)
    app.train("measure")(record)
    grid = InlineGrid(app, len(nodes))
    for context, node in zip(grid.contexts.values(), nodes, strict=True):
        context.node_config = dict(node)
    Session(grid, config, Console(quiet=True)).run()
    return sent


@pytest.mark.parametrize("name", SLOW)
def test_the_list_is_what_clients_send_in_a_whole_run(name: str, tmp_path: Path) -> None:
    settings, words = RUNS[name]
    by = "server" if name == "privacy" else "clients"
    options = {"evaluate.by": by, "num-server-rounds": 2, **settings}
    config = runs.config(tmp_path, **options)
    nodes = [{"partition-id": k, "num-partitions": 4, "smallest-group": 5} for k in range(4)]
    check(config, nodes, words)


@pytest.mark.parametrize(
    ("settings", "schema", "words"),
    [
        ({}, "", "of a table columns, sums"),
        ({"secure-aggregation": True}, "", "sums of the table under masks"),
        ({"secure-aggregation": True}, "sums = false\n", "as the schema declares them"),
    ],
)
@pytest.mark.usefixtures("own_home")
def test_the_list_of_tables_says_whether_sums_leave(
    settings: dict[str, Any], schema: str, words: str, tmp_path: Path, monkeypatch: Any
) -> None:
    nodes = separate(write_three(tmp_path / "three"))
    for node in nodes:
        Path(node["data-dir"], "schema.toml").write_text(schema + SCHEMA)
        node["smallest-group"] = 1
    places = {"output-dir": str(tmp_path / "runs"), "evaluate.by": "clients"}
    config = RunConfig.from_flat(SETTINGS | {"strategy.name": "fedavg"} | places | settings)
    rehearse(config, nodes)  # a second rehearsal in the same home is as good
    rows = rehearse(config, nodes).leaving()
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / "other"))
    check(config, nodes, words, rehearse(config, nodes))
    (site,) = (row.what for row in rows if row.record == "node")
    masked = [row for row in rows if "sums of the table under masks" in row.what]
    assert ("sums, and" in site, len(masked)) == (not settings, bool(settings) and not schema)


@pytest.mark.slow
@pytest.mark.usefixtures("own_home")
def test_the_list_of_a_consortium_has_its_signatures(tmp_path: Path) -> None:
    settings = {"secure-aggregation": True, "strategy.name": "fedavg", "num-server-rounds": 1}
    config = runs.config(tmp_path, **{"evaluate.by": "clients", **settings})
    nodes = [{"partition-id": k, "num-partitions": 4, "smallest-group": 5} for k in range(4)]
    rows = rehearse(config, nodes, consortium=True).leaving()
    signed = {(r.when, r.recipient) for r in rows if WORDS[SIGNED] in r.what or r.record == SIGNED}
    assert signed == {("each round (secure aggregation)", "the server and all sites")}
    assert [row.what for row in rows if row.what == WORDS[SIGN_LIST]]


@pytest.mark.slow
def test_the_list_of_sites_with_their_own_folders(tmp_path: Path) -> None:
    domains = ("plain", "inverted", "rotated")
    folders = tiny_data_sets.digits_folders(tmp_path, domains, most=20)
    nodes = [{"domain": domain, "data-dir": str(folder)} for domain, folder in folders.items()]
    settings = {"data.name": "npz", "evaluate.by": "clients", "sites": 3, "seed": 1}
    check(runs.config(tmp_path, **settings), nodes, "site: description of the site's data")


def check(
    config: RunConfig, nodes: list[dict[str, Any]], words: str, rehearsal: Rehearsal | None = None
) -> None:
    """Compare the list of a rehearsal with what is recorded in a whole run."""
    rehearsal = rehearsal or rehearse(config, nodes)
    rows = rehearsal.leaving()
    sent = sent_in(config, nodes)
    assert {(row.when, row.record, row.size) for row in rows} == {
        (WHEN[kind], name, size) for (kind, name), (size, _) in sent.items()
    }
    for (kind, name), (_, keys) in sent.items():
        listed = {k for r in rehearsal.replies if (r.kind, r.name) == (kind, name) for k in r.keys}
        assert listed == keys
    check_page(rows, sent)
    assert any(words in f"{row.record} {row.what}" for row in rows)
    assert all(row.what and row.recipient and row.kept for row in rows)


def check_page(rows: list[Leaving], sent: dict[Any, tuple[int, set[str]]]) -> None:
    """Check that the page has all that clients send, who gets it, and where it is kept."""
    page, listed = documented(), {(row.when, row.record, row.size): row for row in rows}
    for (kind, name), (size, keys) in sent.items():
        row = listed[WHEN[kind], name, size]
        words = {WORDS[kind]} if name == RECORD_KEY_CONFIGS else {name}
        for datum in keys if name in ("node", "metrics") else words:
            recipient, kept = page[row.when.partition(";")[0], datum]
            assert row.recipient.startswith(recipient), datum
            assert kept in re.sub(r" \(.*\)|, until [\w ]+", "", row.kept), datum


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"), [(k, name) for k, names in OTHERS.items() for name in names]
)
def test_the_page_has_what_other_methods_send(kind: str, name: str, tmp_path: Path) -> None:
    config = runs.config(tmp_path, **{"evaluate.by": "clients", kind: name})
    nodes = [{"partition-id": k, "num-partitions": 4, "smallest-group": 5} for k in range(4)]
    check_page(rehearse(config, nodes).leaving(), sent_in(config, nodes))


def test_the_page_has_every_datum_of_the_code() -> None:
    """What `WORDS`, strategies and clients have; a new one needs a row in ``docs/tables.py``."""
    exchanges = (
        e for trainer in CLIENTS.values() for e in trainer.make_exchanges({}) if e.returned
    )
    stages = {*Stage.all(), SIGN_LIST, SUMS}
    named = {name for _, name in documented()}
    assert named >= {WORDS[name] if name in stages else name for name in WORDS}
    assert named >= {*MEASUREMENTS, *(exchange.name for exchange in exchanges)}


@pytest.mark.slow
def test_the_command_writes_the_table_and_the_sizes(tmp_path: Path) -> None:
    config, out = tmp_path / "run.toml", tmp_path / "leaves.md"
    config.write_text("[data]\nexamples-per-client = 20\ntest-examples = 20\n")
    shown = call(
        "deploy", "leaves", str(config), "--out", str(out), "--set", "client.name=scaffold"
    )
    assert "What leaves a site" in shown
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    size = {
        (when.strip("| "), name): int(size.replace(",", "")) for when, name, _, size, *_ in rows[2:]
    }
    received, sent = map(
        number, re.findall(r"A round: ([\d,]+) bytes .* and ([\d,]+) bytes", shown)[0]
    )
    # A model in each direction, and a control variate; the model again to be tested.
    model, control = size["each round", "arrays"], size["each round", "control"]
    assert 0 <= received - (2 * model + control) < 12_000, "more than the config of two messages"
    assert 0 <= sent - (model + control) < 300, "more than numbers"


def test_masks_take_three_folders_and_a_policy_has_to_allow_the_run(tmp_path: Path) -> None:
    config, policy = tmp_path / "run.toml", tmp_path / "policy.toml"
    config.write_text('secure-aggregation = true\nstrategy.name = "fedavg"\n')
    two = [f"--site=north={tmp_path}", f"--site=south={tmp_path}"]
    said = call("deploy", "leaves", config, *two, expect=2)
    assert "--site is given 2 times, but secure-aggregation = true takes 3 sites" in said
    policy.write_text(call("deploy", "policy").replace('"fedavg", ', ""))
    said = call("deploy", "leaves", config, *two, "--policy", policy, expect=2)
    assert "Refused by the site's policy" in said
    assert "strategy.name = 'fedavg'" in said


def test_a_site_that_only_tests_sends_a_description_and_scores(tmp_path: Path) -> None:
    folders = tiny_data_sets.digits_folders(tmp_path, ("plain", "inverted"), most=20)
    config, policy, out = (tmp_path / name for name in ("run.toml", "policy.toml", "leaves.md"))
    config.write_text('data.name = "npz"\ndata.smallest-group = 1\n')
    names = 'strategies = ["*"]\nclients = ["*"]\nmodels = ["*"]\ndata = ["*"]\n'
    policy.write_text(f"{names}trains = false\n")
    sites = [f"--site={domain}={folder}" for domain, folder in folders.items()]
    call("deploy", "leaves", config, *sites, "--policy", policy, "--out", out)
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith("| ")]
    assert [row[0].partition(",")[0] for row in rows[2:]] == [
        "| once",
        "| each test; the last one is after the run",
    ]
    assert "tests-only: that the site only tests" in rows[2][2]


def number(text: str) -> int:
    return int(text.replace(",", ""))


#: A site that answers a message, in a process of its own; it prints how its memory grows.
SITE = """
import pickle, sys
from fairflower.client_app import app
from fairflower.deploy.leaves import peak_memory
from fairflower.engines.inline import InlineGrid
from flwr.app import Message
grid = InlineGrid(app, 4)
content = pickle.load(open(sys.argv[1], "rb"))
before = peak_memory()
reply = grid.send_and_receive([Message(content, 1000, "train")])[0]
assert reply.has_content(), reply.error
print(peak_memory() - before)
"""


@pytest.mark.nightly
@pytest.mark.slow
def test_the_memory_of_a_site_is_near_the_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []
    deliver = InlineGrid._deliver

    def keep(grid: InlineGrid, message: Message) -> Message:
        if message.metadata.message_type == "train" and not requests:
            requests.append(RecordDict({**message.content}))
        return deliver(grid, message)

    monkeypatch.setattr(InlineGrid, "_deliver", keep)
    config = runs.config(tmp_path, **{"model.name": "mlp:hidden=2500", "evaluate.by": "clients"})
    nodes: list[dict[str, Any]] = [{"partition-id": k, "num-partitions": 4} for k in range(4)]
    needs = rehearse(config, nodes)
    (tmp_path / "request").write_bytes(pickle.dumps(requests[0]))
    command = [sys.executable, "-c", SITE, tmp_path / "request"]
    grown = int(processes.run(command, env=processes.environment(tmp_path)).splitlines()[-1])
    assert needs.model > 25_000_000
    assert 0.6 < (needs.memory - needs.process) / grown < 1.6
