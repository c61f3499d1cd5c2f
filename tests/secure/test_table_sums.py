"""Sums of sites' tables under secure aggregation: those of the pooled table, and only their sum."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from hospital_tables import SCHEMA, write_three
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from secure_federation import stage_of
from table_sites import SETTINGS, run, separate

from fairflower.client_app import app
from fairflower.config import RunConfig
from fairflower.deploy.credentials import make_key_pair
from fairflower.deploy.policy import Policy
from fairflower.engines.inline import FIRST_NODE, InlineGrid
from fairflower.errors import ConfigError, DataError
from fairflower.secure.sums import totals_of, vector_of
from fairflower.secure.vectors import quantization_range
from fairflower.server.checkpoint import resumed_config
from fairflower.server.contents import read_facts
from fairflower.server.session import Session
from fairflower.tables.columns import Column
from fairflower.tables.encoding import ColumnSums, Encoding
from fairflower.tables.integers import BITS, integers_of, sums_of
from fairflower.tables.sites import SiteTable

# Sites mark their answers there, and the Flower runs of all tests have the same id.
pytestmark = pytest.mark.usefixtures("own_home")

MASKED: dict[str, Any] = {
    "secure-aggregation": True,
    "strategy.name": "fedavg",
    "evaluate.by": "clients",
    "num-server-rounds": 1,
}

Handler = Callable[[Message, Context], Message]


def hospitals(tmp_path: Path, schema: str = SCHEMA, **node: Any) -> list[dict[str, Any]]:
    nodes = separate(write_three(tmp_path / "three"))
    for own in nodes:
        Path(own["data-dir"], "schema.toml").write_text(schema)
    return [own | {"smallest-group": 1} | node for own in nodes]


def at(nodes: list[dict[str, Any]], handler: Handler = app) -> InlineGrid:
    made = InlineGrid(handler, len(nodes))  # type: ignore[arg-type]
    for context, node in zip(made.contexts.values(), nodes, strict=True):
        context.node_config = node
    return made


def encoding_of(folder: Path) -> Encoding:
    return Encoding.from_json(read_facts(folder)["sites"]["federation"]["encoding"])


@pytest.mark.parametrize("clients", [3, 10, 1000])
@given(data=st.data())
def test_sums_of_digits_are_exact(clients: int, data: st.DataObject) -> None:
    base = quantization_range(clients)
    integer = st.integers(0, 2**BITS - 1) | st.sampled_from([0, 1, base - 1, base, 2**BITS - 1])
    few = data.draw(st.lists(st.lists(integer, min_size=2, max_size=2), min_size=1, max_size=4))
    rows = [few[k % len(few)] for k in range(clients)]
    mean = np.mean([vector_of(row, BITS, base) for row in rows], axis=0)
    assert totals_of(mean, clients, BITS, base) == [sum(own) for own in zip(*rows, strict=True)]


@given(
    sites=st.lists(
        st.lists(st.floats(-5, 100, allow_nan=False), min_size=1, max_size=20),
        min_size=3,
        max_size=5,
    )
)
def test_integers_give_the_mean_and_the_squares_of_all_rows(sites: list[list[float]]) -> None:
    column = Column("x", "number", low=-5, high=100)
    totals = [0] * 4
    for own in map(np.array, sites):
        sums = ColumnSums(column, len(own), 1, own.mean(), np.square(own - own.mean()).sum())
        totals = [a + b for a, b in zip(totals, integers_of([column], {"x": sums}), strict=True)]
    found, x = sums_of([column], totals)["x"], np.concatenate(sites)
    assert (found.known, found.missing) == (len(x), len(sites))
    assert found.mean == pytest.approx(x.mean(), abs=105 * 1e-10)
    assert found.m2 == pytest.approx(np.square(x - x.mean()).sum(), abs=105**2 * 1e-10 * len(x))


def test_numbers_far_from_the_range_and_contradictions_are_refused() -> None:
    column = Column("x", "number", low=0, high=1)
    for mean in (-0.5, 1e12):
        with pytest.raises(DataError, match="x: the numbers of a column are outside of the schema"):
            integers_of([column], {"x": ColumnSums(column, 10, 0, mean)})
    with pytest.raises(DataError, match="sums of the column 'x' contradict"):
        sums_of([column], [10, 0, 5 * 2**40, 2**40])  # squares below those of ten equal numbers
    levels = Column("x", "category", levels=("a", "b"))
    with pytest.raises(DataError, match="sums of the column 'x' contradict"):
        sums_of([levels], [1, 0, 1, 1])


def asks_for_sums(message: Message) -> bool:
    return "secure.sums" in message.content.config_records.get("config", ConfigRecord())


def test_masked_sums_make_the_encoding_of_the_plain_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = hospitals(tmp_path)
    plain = run(at(nodes), tmp_path / "runs", **MASKED | {"secure-aggregation": False})
    queries: list[RecordDict] = []
    sums: list[RecordDict] = []

    def recorded(message: Message, context: Context) -> Message:
        asked, kind = asks_for_sums(message), message.metadata.message_type
        reply = app(message, context)
        (sums if asked else queries if kind == "query" else []).append(reply.content)
        return reply

    for home in ("first", "second"):  # as other Flower runs
        monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / home))
        masked = run(at(nodes, recorded), tmp_path / "runs", **MASKED)
    for a, b in zip(encoding_of(plain).columns, encoding_of(masked).columns, strict=True):
        assert replace(a, mean=0, std=1) == replace(b, mean=0, std=1)
        assert b.mean == pytest.approx(a.mean, abs=1e-8)
        assert b.std == pytest.approx(a.std, abs=1e-8)
    assert "halted_rounds" not in read_facts(masked)

    # A description has the schema's columns alone, and the sums are in a masked vector.
    for content in queries:
        site = json.loads(str(content.config_records["node"]["site"]))
        table = SiteTable.from_json(site["encoding"])
        assert not table.sums
        assert not table.targets
        assert {(c.mean, c.std) for c in Encoding.from_json(table.declared).columns} == {(0, 1)}
    vectors = []
    for content in sums:
        assert not any(map(len, content.array_records.values()))
        numbers = [dict(record) for record in content.metric_records.values() if len(record)]
        assert numbers == [{"num_examples": quantization_range(3)}]  # the same at all
        secret: Any = content.config_records[RECORD_KEY_CONFIGS]
        vectors.append(bytes_to_ndarray(secret["masked_params"][1]) % 2**32)
    digits = np.concatenate(vectors)
    assert len(np.unique(digits)) > 0.99 * len(digits)  # in plain ones most digits are 0
    assert 0.4 < np.mean(digits / 2**32) < 0.6
    assert not any((a == b).any() for a, b in zip(vectors[:3], vectors[3:], strict=True))


def test_sites_of_a_consortium_sign_sums_and_a_stopped_run_asks_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, nodes = ("north", "south", "west"), hospitals(tmp_path)
    lines = [f"{name} {make_key_pair(tmp_path / name).read_text()}" for name in names]
    (tmp_path / "sites").write_text("\n".join(lines))
    for node in nodes:
        key = str(tmp_path / str(node["domain"]))
        node |= {"consortium": str(tmp_path / "sites"), "signing-key": key}
    stages: list[str] = []

    def recorded(message: Message, context: Context) -> Message:
        stages.append(stage_of(message))
        return app(message, context)

    settings = SETTINGS | MASKED | {"num-server-rounds": 2, "output-dir": str(tmp_path / "runs")}
    config = RunConfig.from_flat(settings)
    whole = Session(at(nodes, recorded), config, Console(quiet=True)).run()
    assert stages.count("sign_list") == 3 * 3  # of the sums and of two rounds
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / "other"))  # as another Flower run
    first = Session(at(nodes), config, Console(quiet=True), on_round=lambda *_: True).run()
    stages.clear()
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tmp_path / "third"))
    again = resumed_config(first, {})
    resumed = Session(at(nodes, recorded), again, Console(quiet=True)).run()
    assert stages.count("sign_list") == 3
    assert encoding_of(resumed) == encoding_of(whole)
    models = [(path / "model.safetensors").read_bytes() for path in (whole, resumed)]
    assert models[0] == models[1]


def failing(message: Message, context: Context) -> Message:
    if asks_for_sums(message) and context.node_id == FIRST_NODE:
        raise RuntimeError("a site is away")
    return app(message, context)


@pytest.mark.parametrize(
    ("sites", "handler", "text"),
    [
        (2, app, "the sums of tables need 3 sites that train, and 2 do"),
        (3, failing, r"all sites have to take part.*the site of 'west': .*a site is away"),
    ],
)
def test_sums_over_fewer_sites_are_refused(
    sites: int, handler: Handler, text: str, tmp_path: Path
) -> None:
    nodes = hospitals(tmp_path)[:sites]
    with pytest.raises(ConfigError, match=text):
        run(at(nodes, handler), tmp_path / "runs", **MASKED)


def test_policies_and_sites_that_only_test_hold_for_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = hospitals(tmp_path)
    (tests := tmp_path / "tests").mkdir()
    shutil.copytree(nodes[0]["data-dir"], tests / "east")
    nodes.append(nodes[0] | {"domain": "east", "data-dir": str(tests / "east"), "tests-only": True})
    names: dict[str, Any] = {"strategies": ["fedavg"], "clients": ["sgd"], "data": ["table"]}
    asked: list[int] = []

    def allowed(policy: Policy) -> Handler:
        def handler(message: Message, context: Context) -> Message:
            policy.check(message)
            if asks_for_sums(message):
                asked.append(context.node_id)
            return app(message, context)

        return handler

    changes = MASKED | {"num-server-rounds": 0, "min-clients": 3}
    run(at(nodes, allowed(Policy(models=["mlp"], smallest_others=2, **names))), tests, **changes)
    assert asked == [FIRST_NODE + k for k in range(3)]
    monkeypatch.setenv("FAIRFLOWER_HOME", str(tests))  # as another Flower run
    policy = Policy(models=["mlp"], smallest_others=3, **names)
    with pytest.raises(ConfigError, match=r"smallest-others = 3\): 3 sites in the sum"):
        run(at(nodes, allowed(policy)), tests, **changes | {"min-clients": 4})


@pytest.mark.parametrize("kind", ["train", "train.measure"])
def test_a_site_sends_no_sums_without_masks(kind: str, tmp_path: Path) -> None:
    (node, *_) = hospitals(tmp_path)
    for masks in (False, True):
        flat = dict(RunConfig.from_flat(SETTINGS | MASKED).to_flat())
        flat |= {"secure.sums": BITS, "secure-aggregation": masks, "server-round": 1}
        asked = ConfigRecord(flat)
        (context,) = at([node]).contexts.values()
        message = Message(RecordDict({"config": asked}), FIRST_NODE, kind)
        with pytest.raises(RuntimeError, match=r"without masks|an unmasked|did not answer"):
            app(message, context)


def test_a_site_sums_up_once_in_a_run(tmp_path: Path) -> None:
    grid = at(hospitals(tmp_path))
    run(grid, tmp_path / "runs", **MASKED)
    with pytest.raises(
        ConfigError, match=r"request for sums of its table.*takes part once in a run"
    ):
        run(grid, tmp_path / "runs", **MASKED)


@pytest.mark.parametrize("sums", ["true", "false"])
def test_a_site_with_other_codes_than_the_schema_takes_no_part(
    sums: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = hospitals(tmp_path, f"sums = {sums}\n{SCHEMA}")
    folder = Path(nodes[2]["data-dir"])
    text = (folder / "north.csv").read_text("utf-8-sig")
    (folder / "north.csv").write_text(text.replace(";F;", ";2;").replace(";M;", ";1;"))
    with pytest.raises(
        ConfigError, match="most rows have an undeclared level of a column"
    ) as found:
        run(at(nodes), tmp_path / "runs", **MASKED, sites=3)
    assert "sex" not in str(found.value)
    assert "160 of 160 training rows at north have an undeclared level of 'sex'" in caplog.text
    mended = SCHEMA.replace('["F", "M"]', '["F", "M"]\ncodes = ["2", "1"]')
    for node in nodes:
        Path(node["data-dir"], "schema.toml").write_text(f"sums = {sums}\n{mended}")
    caplog.clear()
    assert len(encoding_of(run(at(nodes), tmp_path / "runs", **MASKED)).columns) == 4
    assert "undeclared" not in caplog.text
    few = text.replace(";F;", ";D;", 3)
    (folder / "north.csv").write_text(few)
    for _ in range(2):  # also from the cache
        caplog.clear()
        alone = {"domain": "north", "data-dir": str(folder), "smallest-group": 1}
        run(at([alone]), tmp_path / "runs", **{"evaluate.by": "clients", "statistics": True})
        assert "160 training rows at north have an undeclared level of 'sex'" in caplog.text


def test_masked_sums_need_declared_ranges_and_the_same_schema(tmp_path: Path) -> None:
    nodes = hospitals(tmp_path)
    schema = Path(nodes[0]["data-dir"], "schema.toml")
    schema.write_text(SCHEMA.replace("high = 110", "high = 120"))
    with pytest.raises(DataError, match="declare different columns, ranges or levels"):
        run(at(nodes), tmp_path / "runs", **MASKED)
    schema.write_text(SCHEMA.replace("low = 0\n", ""))
    with pytest.raises(ConfigError, match="the schema must declare a range or levels of 'age'"):
        run(at(nodes), tmp_path / "runs", **MASKED, sites=3)


def test_a_regression_is_scaled_by_masked_sums_of_the_target(tmp_path: Path) -> None:
    target = SCHEMA.replace('bmi]\nkind = "number"', 'bmi]\nkind = "target"')
    nodes, changes = hospitals(tmp_path, target), MASKED | {"data.target": "bmi"}
    tasks = []
    for masked in (True, False):
        done = run(at(nodes), tmp_path / "runs", **changes | {"secure-aggregation": masked})
        tasks.append(read_facts(done)["sites"]["federation"]["task"])
    assert tasks[0] == tasks[1]
    assert tasks[0].startswith("regression:center=2")
    for node in nodes:
        text = target.replace("low = 10\nhigh = 50\n", "")
        Path(node["data-dir"], "schema.toml").write_text(text)
    with pytest.raises(DataError, match="Declare its low and high in the schema, or set data"):
        run(at(nodes), tmp_path / "runs", **changes)
