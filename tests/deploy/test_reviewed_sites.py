"""What reviewers of policies, audit logs and answers found, and what now holds."""

from __future__ import annotations

import errno
import io
import json
import os
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import tiny_data_sets
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from table_sites import numbers, site_of
from toy_trainers import quadratic_trainer

from fairflower.client_app import app
from fairflower.config import RunConfig, TrainConfig
from fairflower.config.site import SiteConfig
from fairflower.deploy.audit import AuditLog, entry
from fairflower.deploy.credentials import make_certificates, make_key_pair
from fairflower.deploy.policy import Policy
from fairflower.deploy.site import Site
from fairflower.engines.inline import answer
from fairflower.errors import ConfigError
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Key, Stage
from fairflower.training.app import train_round
from fairflower.training.client_state import OWN
from fairflower.training.trainer import Trainer

OPEN = 'strategies = ["*"]\nclients = ["*"]\nmodels = ["*"]\ndata = ["*"]\n'
PRIVATE = {"privacy.noise-multiplier": 1.0, "privacy.max-epsilon": 8.0}


def policy(folder: Path, more: str) -> Policy:
    (folder / "policy.toml").write_text(OPEN + more)
    return Policy.read(folder / "policy.toml")


def message(kind: str = MessageType.TRAIN, beside: Any = (), **settings: Any) -> Message:
    config = {**RunConfig().to_flat(), **settings, "server-round": 1, **dict(beside)}
    content = ConfigRecord({key: value for key, value in config.items() if value is not None})
    return Message(RecordDict({"config": content}), 1, kind)


# --- policies --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["noise-multiplier", "number-noise-multiplier"])
def test_noise_of_almost_nothing_is_no_noise(name: str, tmp_path: Path) -> None:
    held = policy(tmp_path, 'protection = "differential-privacy"')
    asked = {**PRIVATE, "strategy.name": "qffl", "privacy.number-noise-multiplier": 1.0}
    held.check(message(beside={"measure": "received_loss"}, **asked))
    with pytest.raises(ConfigError, match=rf"smallest-noise = 0\.1\): privacy\.{name} = 1e-12"):
        held.check(
            message(beside={"measure": "received_loss"}, **asked | {f"privacy.{name}": 1e-12})
        )


@pytest.mark.parametrize(("present", "allowed"), [(33, True), (32, False)])
def test_the_last_step_names_at_most_the_sites_that_share_secrets(
    present: int, allowed: bool, tmp_path: Path
) -> None:
    """33, also of 41 in a sum."""
    held = policy(tmp_path, "smallest-others = 40")
    asked = {Key.STAGE: Stage.UNMASK, Key.ACTIVE_NODE_ID_LIST: list(range(present))}
    step = Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(asked)}), 1, MessageType.TRAIN)
    if allowed:
        held.check(step)
    else:
        with pytest.raises(ConfigError, match=r"smallest-others = 40\): 32 sites in the sum"):
            held.check(step)


@pytest.mark.parametrize("part", ["strategy", "client", "model", "data"])
def test_a_part_without_a_name_is_not_allowed(part: str, tmp_path: Path) -> None:
    names = {"strategy": "fedavg", "client": "sgd", "model": "mlp", "data": "npz"}
    held = Policy(*([name] for name in names.values()))
    names = {f"{part}.name": name for part, name in names.items()}
    held.check(message(**names))
    with pytest.raises(ConfigError, match=rf"{part}\.name = ''"):
        held.check(message(**names | {f"{part}.name": ""}))


def test_nothing_that_only_a_server_reads_is_imported_at_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site_spy.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    named = {"participation.policy": "site_spy:Policy", "track": "site_spy:Tracker"}
    for kind in ("query", "train", "evaluate"):
        policy(tmp_path, "").check(message(kind, **named))


# --- the audit log ---------------------------------------------------------------------------


def test_a_message_with_many_keys_and_a_long_error_fill_no_audit_log() -> None:
    """Else few refused messages would push all older lines out of it."""
    beside = {f"key-{k}-{'x' * 10_000}": "y" * 10_000 for k in range(1000)}
    line = entry(message(beside=beside), "z" * 100_000, refused=True)
    assert len(json.dumps(line)) < 50_000
    assert line["left-out"] == 900
    assert "left-out" not in entry(message(beside={"split": "train"}), "", refused=True)


class FullDisk(io.FileIO):
    """A file on a disk with a number of free bytes."""

    free = 10**6

    def write(self, data: Any) -> int:
        if not FullDisk.free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: FullDisk.free])
        FullDisk.free -= written
        return written


def test_a_line_for_which_the_disk_was_full_is_not_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was sent then, so the line would be wrong."""
    path = tmp_path / "audit.jsonl"

    def opened(*_: Any) -> Any:
        return io.TextIOWrapper(io.BufferedWriter(FullDisk(path, "a")), encoding="utf-8")

    monkeypatch.setattr("logging.FileHandler._open", opened)
    log = AuditLog(path)
    log.write(message(), "first", refused=True)
    for _ in range(2):
        monkeypatch.setattr(FullDisk, "free", 20)
        with pytest.raises(OSError, match="No space left"):
            log.write(message(), "lost", refused=True)
    monkeypatch.setattr(FullDisk, "free", 10**6)
    log.write(message(), "last", refused=True)
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["reason"] for line in lines] == ["first", "last"]


# --- a site's file ---------------------------------------------------------------------------


def test_paths_of_the_node_config_begin_at_the_folder_of_the_sites_file(tmp_path: Path) -> None:
    file = tmp_path / "site.toml"
    own = "data-dir = 'data'\nconsortium = 'sites'\nsigning-key = '/keys/north'\n"
    file.write_text(f"superlink = 'a:1'\n[node]\ndomain = 'north'\n{own}")
    node = SiteConfig.read(file).node
    assert node == {
        "domain": "north",
        "data-dir": str(tmp_path / "data"),
        "consortium": str(tmp_path / "sites"),
        "signing-key": "/keys/north",
    }


def test_the_key_of_digests_is_in_no_list_of_processes(tmp_path: Path) -> None:
    node = {"domain": "north", "row-digests": "a key of the sites"}
    site = Site(SiteConfig("a:1", audit_log=str(tmp_path / "audit.jsonl"), node=node))
    assert not any("row-dig" in part or "a key" in part for part in site.command(1, tmp_path))
    context = Context(1, 1, {"domain": "north"}, RecordDict(), {})
    task: Any = SimpleNamespace(message=message(), context=context, is_client_app=True, keep=None)
    task.answer = lambda reply, after: given.append(after.node_config)
    given = list[Any]()
    site._worker = SimpleNamespace(answer=lambda asked, context, _: ("no data", context))  # type: ignore[assignment]
    site.answer(task)
    assert given == [node]


# --- what an answer has ----------------------------------------------------------------------


def asked(folder: Path, node: dict[str, Any], kind: str = "query", **settings: Any) -> Message:
    """Return a site's reply to a message with the settings of a run on its table."""
    flat = {**RunConfig().to_flat(), "evaluate.by": "clients", **settings}
    config = ConfigRecord({k: v for k, v in flat.items() if v is not None})
    context = Context(1, 1, {"domain": "s", "data-dir": str(folder), **node}, RecordDict(), {})
    return answer(app, Message(RecordDict({"config": config}), 1, kind), context)


@pytest.mark.parametrize("kind", ["train", "train.measure"])
def test_a_site_that_only_tests_measures_nothing_on_training_examples(
    kind: str, tmp_path: Path
) -> None:
    reply = asked(tmp_path, {"tests-only": True}, kind)
    assert "this site only tests: its node config has tests-only = true" in reply.error.reason


TABLE = {"data.name": "table", "data.target": "y", "model.name": "mlp"}


def test_sums_of_a_table_do_not_leave_a_site_of_a_consortium(tmp_path: Path) -> None:
    site_of(tmp_path / "s", {"age": numbers(40)})
    public = make_key_pair(tmp_path / "key").read_text()
    node = {"consortium": str(tmp_path / "sites"), "signing-key": str(tmp_path / "key")}
    (tmp_path / "sites").write_text(f"north {public}")
    assert not asked(tmp_path / "s", {}, **TABLE).has_error()
    reply = asked(tmp_path / "s", node, **TABLE)
    assert "the schema must declare a range or levels of 'age'" in reply.error.reason


@pytest.mark.parametrize("data", ["table", "npz"])
def test_a_site_describes_no_data_without_noise_in_a_run_with_noise(
    data: str, tmp_path: Path
) -> None:
    """The server refuses such runs itself, since the sites' tests have no noise either."""
    if data == "table":
        site_of(tmp_path / "s", {"age": numbers(40)})
        settings, folder = TABLE, tmp_path / "s"
    else:
        (folder,) = tiny_data_sets.digits_folders(tmp_path, ["plain"], most=50).values()
        settings = {"data.name": "npz", "statistics": True}
    node = {"row-digests": "x" * 16}
    assert not asked(folder, node, **settings).has_error()
    reply = asked(folder, node, **settings, **PRIVATE)
    assert "privacy.noise-multiplier" in reply.error.reason


def test_a_site_that_keeps_its_own_model_sends_no_trained_one_in_this_run() -> None:
    trainer = quadratic_trainer(Trainer, [1.0], [1.0], TrainConfig(local_epochs=1))
    context = Context(1, 1, {}, RecordDict(), {})
    config = {"server-round": 1, "run-id": "0" * 32, "reference": "alone"}
    train_round(trainer, context, config)
    assert OWN in trainer.state
    del config["reference"]
    with pytest.raises(ValueError, match="keeps its own model in this run, and sends none"):
        train_round(trainer, context, config | {"server-round": 2})


# --- certificates and clocks -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("ahead", "taken"), [(0, True), (-240, True), (-310, False), (6, False), (-7200, False)]
)
def test_a_superlink_takes_no_message_of_a_site_whose_clock_differs(
    ahead: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower's own two functions; docs/deployment.md says the limits, in seconds."""
    server = pytest.importorskip("flwr.superlink.routers.fleet.node_auth")
    site = pytest.importorskip("flwr.supernode.node_auth_http_interceptor")
    private, public = generate_key_pairs()
    there = server.now() + timedelta(seconds=ahead)
    monkeypatch.setattr(site, "now", lambda: there)
    request: Any = httpx.Request("POST", "https://a/v1/fleet/activate-node")
    sent = SimpleNamespace(request=request)
    site.NodeAuthHttpInterceptor(private, public).intercept(sent, lambda _: None)
    said = server.ActivateNodeRequest(public_key=public_key_to_bytes(public))
    request.state = SimpleNamespace(protobuf_request=said)
    if taken:
        server.authenticate_node(request)
    else:
        with pytest.raises(server.HTTPException, match="Invalid SuperNode authentication"):
            server.authenticate_node(request)


@pytest.mark.parametrize("days", [-2, 0, 340, 366])
def test_a_site_says_when_its_certificate_has_ended_or_soon_will(
    days: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    authority = make_certificates(tmp_path / "certificates", ["localhost"]).authority
    today = datetime.now(UTC)
    there = SimpleNamespace(now=lambda _: today + timedelta(days=days))
    monkeypatch.setattr("fairflower.deploy.credentials.datetime", there)
    config = SiteConfig("a:1", str(authority), audit_log=str(tmp_path / "audit.jsonl"))
    dates = f"from {today - timedelta(1):%Y-%m-%d} to {today + timedelta(365):%Y-%m-%d}"
    if days in (-2, 366):
        with pytest.raises(ConfigError, match=f"{dates}, but the clock says .*Set the clock, or"):
            Site(config)
    else:
        Site(config)
    assert ("Then this site cannot reach the server" in caplog.text) == (days == 340)


def test_a_file_without_a_certificate_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("none")
    with pytest.raises(ConfigError, match=r"ca\.crt: no certificate in PEM format"):
        Site(SiteConfig("a:1", str(tmp_path / "ca.crt"), audit_log=str(tmp_path / "log")))
