"""A site's policy against the settings of messages, its audit log, and the file of its settings."""

from __future__ import annotations

import json
import re
import stat
import sys
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
from command import call, invoke
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from processes import environment
from processes import run as run_command

from fairflower.arrays import record_of
from fairflower.config import RunConfig
from fairflower.config.run import schema
from fairflower.config.site import WITHDRAWN, SiteConfig
from fairflower.deploy.audit import AuditLog, entry
from fairflower.deploy.credentials import make_key_pair
from fairflower.deploy.policy import TEMPLATE, Policy
from fairflower.deploy.site import Site, Worker, WorkerEnded, _work
from fairflower.errors import ConfigError
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Key, Stage
from fairflower.registry import MODELS, STRATEGIES
from fairflower.secure.consortium import Consortium

OPEN = 'strategies = ["*"]\nclients = ["*"]\nmodels = ["*"]\ndata = ["*"]\n'


def policy(folder: Path, more: str = "", text: str = OPEN) -> Policy:
    path = folder / "policy.toml"
    path.write_text(text + more)
    return Policy.read(path)


def message(settings: Mapping[str, Any], kind: str = MessageType.TRAIN, **more: Any) -> Message:
    """A message as fairflower's server sends it: with all settings."""
    config = {k: v for k, v in {**RunConfig().to_flat(), **settings}.items() if v is not None}
    content = RecordDict({"config": ConfigRecord({**config, "server-round": 1, **more})})
    return Message(content, dst_node_id=1, message_type=kind)


def step(stage: str, **asked: Any) -> Message:
    """A message of Flower's protocol that has no settings."""
    record = ConfigRecord({Key.STAGE: stage, **asked})
    return Message(
        RecordDict({RECORD_KEY_CONFIGS: record}), dst_node_id=1, message_type=MessageType.TRAIN
    )


# Refused by: the policy's lines after OPEN, the message's settings, its kind, and the answer.
REFUSED = [
    ('strategies = ["fedavg", "qffl"]', {"strategy.name": "fedheal"}, "train", "'fedheal'"),
    ('strategies = ["qffl"]', {"strategy.name": "fedavg:tau=1"}, "query", "'fedavg'"),
    ('clients = ["sgd"]', {"client.name": "fedprox:mu=1"}, "train", "'fedprox'"),
    ('models = ["mlp"]', {"model.name": "cnn"}, "evaluate", "'cnn'"),
    ('models = ["timm:*"]', {"model.name": "hf:bert"}, "train", "'hf:bert'"),
    ('models = ["*"]', {"model.name": "timm:vit"}, "train", "'timm:vit'"),
    ('data = ["npz"]', {"data.name": "images:bits=12"}, "query", "'images'"),
    ("", {"data.name": "site_spy:Data"}, "query", "'site_spy:Data'"),
    ("", {"model.name": "site_spy:Net"}, "train", "'site_spy:Net'"),
    ("", {"client.name": "site_spy:Trainer"}, "train", "'site_spy:Trainer'"),
    ("", {"strategy.name": "site_spy:Rule"}, "train", "'site_spy:Rule'"),
    ("", {"data.task": "site_spy:Task"}, "train", "'site_spy:Task'"),
    ("", {"evaluate.metrics": "site_spy:leak"}, "evaluate", "'site_spy:leak'"),
    ("", {"model.name": "cnn", "model.adapter": "lora:r=8"}, "train", "'lora'"),
    ("most-rounds = 20", {"num-server-rounds": 21}, "train", "round 21"),
    ("smallest-others = 2", {"min-clients": 2}, "train", "min-clients = 2 (expected 3 or more)"),
    ("trains = false", {}, "train", "train"),
    ("trains = false", {}, "train.measure", "train.measure"),
    ("", {"model.name": "resnet18", "model.weights": "imagenet"}, "train", "'imagenet'"),
    ('protection = "secure-aggregation"', {}, "query", "no secure-aggregation"),
    ('protection = "either"', {}, "train", "the run has neither"),
    (
        'protection = "differential-privacy"',
        {"secure-aggregation": True},
        "train",
        "no differential-privacy",
    ),
    (
        "largest-epsilon = 4",
        {"privacy.noise-multiplier": 1.0, "privacy.max-epsilon": 8.0},
        "train",
        "privacy.max-epsilon = 8",
    ),
    ("", {"privacy.noise-multiplier": 1.0}, "train", "privacy.max-epsilon = 0"),
    ("fewest-examples = 20", {"data.examples-per-client": 19}, "query", "per-client = 19"),
]


@pytest.mark.parametrize(("lines", "settings", "kind", "words"), REFUSED)
def test_a_policy_refuses_what_it_does_not_allow_with_its_line(
    lines: str,
    settings: dict[str, Any],
    kind: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "site_spy.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    key = lines.partition(" =")[0]
    text = "".join(f"{line}\n" for line in OPEN.splitlines() if not line.startswith(f"{key} ="))
    with pytest.raises(ConfigError) as caught:
        policy(tmp_path, lines, text).check(message(settings, kind))
    error = str(caught.value)
    assert error.startswith("Refused by the site's policy (")
    assert words in error
    if lines:
        assert f"(line {text.count(chr(10)) + 1}: {lines})" in error
    assert "site_spy" not in sys.modules
    policy(tmp_path).check(message({}, kind))


@pytest.mark.parametrize(
    ("lines", "settings", "kind"),
    [
        ("", {}, "train"),
        ("fewest-examples = 20", {"data.examples-per-client": 20}, "train"),
        ('[settings]\n"train.lr" = [0.1, 0.2]\ndata.groups = [""]', {"train.lr": 0.2}, "train"),
        ('[settings]\nclient.mu = ["default", 0.1]', {"client.name": "fedprox"}, "train"),
        ('measurements = ["fisher"]', {"measure": "fisher"}, "train"),
        ("", {"strategy.name": "qffl", "measure": "received_loss"}, "train"),
        ('protection = "secure-aggregation"', {"secure-aggregation": True}, "train"),
        ('protection = "either"', {"secure-aggregation": True}, "evaluate"),
        (
            'protection = "either"\nlargest-epsilon = 8',
            {"privacy.noise-multiplier": 1.0, "privacy.max-epsilon": 8.0},
            "train",
        ),
        ("smallest-others = 2\nmost-rounds = 30", {"min-clients": 3}, "train"),
        ("trains = false", {}, "evaluate"),
        (
            "weights-from-elsewhere = true",
            {"model.name": "resnet18", "model.weights": "x"},
            "query",
        ),
        ('adapters = ["lora"]', {"model.adapter": "lora"}, "train"),
    ],
)
def test_a_policy_allows_what_it_lists(
    lines: str, settings: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    settings, more = dict(settings), {}
    if "measure" in settings:
        more["measure"] = settings.pop("measure")
    policy(tmp_path, lines).check(message(settings, kind, **more))


@pytest.mark.parametrize(
    ("lines", "settings", "words"),
    [
        (
            '"train.lr" = [0.1, 0.2]',
            {"train.lr": 0.3},
            "line 6: train.lr = [0.1, 0.2]): train.lr = 0.3",
        ),
        ("data.target = ['ill']", {}, "line 6: data.target = [\"ill\"]): data.target = ''"),
        ("client.mu = [0.1]", {"client.name": "fedprox:mu=1"}, "client.mu = 1"),
    ],
)
def test_a_policy_may_limit_any_setting(
    lines: str, settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(tmp_path, f"[settings]\n{lines}").check(message(settings))
    assert words in str(caught.value)


def test_a_part_of_the_sites_own_has_to_be_named_and_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = OPEN.replace('data = ["*"]', 'data = ["npz", "my_package.data:Table"]')
    with pytest.raises(ConfigError, match=r"line 4: data = .*: my_package is not installed here"):
        policy(tmp_path, "", own)
    monkeypatch.setattr("fairflower.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"line 3: models = .*: timm is not installed here"):
        policy(tmp_path, "", OPEN.replace('models = ["*"]', 'models = ["vpt-timm:*"]'))
    monkeypatch.undo()
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    own = OPEN.replace('data = ["*"]', 'data = ["my_package.data:Table", "npz"]')
    held = policy(tmp_path, "", own)
    asked = message({"data.name": "my_package.data:Other", "model.name": "mlp"})
    with pytest.raises(ConfigError, match=r"line 4: data = .*'my_package.data:Other'"):
        held.check(asked)
    held._check_names({"data.name": "my_package.data:Table"})


def test_names_that_a_message_leaves_out_have_the_defaults_which_are_checked(
    tmp_path: Path,
) -> None:
    held = policy(tmp_path, "", OPEN.replace('strategies = ["*"]', 'strategies = ["qffl"]'))
    bare = Message(RecordDict({"config": ConfigRecord({"server-round": 1})}), 1, MessageType.TRAIN)
    with pytest.raises(ConfigError, match="'fedheal'"):
        held.check(bare)
    with pytest.raises(ConfigError, match="'fedheal'"):
        held.check(Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN))
    held.check(Message(RecordDict(), dst_node_id=1, message_type=MessageType.QUERY))


def test_a_strategy_may_ask_only_for_its_own_measurements(tmp_path: Path) -> None:
    asked = message({"strategy.name": "fedavg"}, measure="received_loss,fisher")
    with pytest.raises(ConfigError, match=r"by default: measurements = \[\]\): fedavg with rec"):
        policy(tmp_path).check(asked)


@pytest.mark.parametrize(
    ("more", "settings", "beside", "line"),
    [
        (
            'tasks = ["classification"]',
            {},
            {"federation": '{"\\u0074ask" : "regression"}'},
            "tasks",
        ),
        ("", {}, {"federation": "no JSON"}, "invalid"),
        ("", {}, {"reference": "alone"}, "strategies"),
        ("", {}, {"own-model": "send"}, "strategies"),
        ("trains = false", {}, {"split": "train"}, "trains"),
        ('protection = "differential-privacy"', {"privacy.noise-multiplier": 1e-9}, {}, "noise"),
    ],
)
def test_what_a_message_says_beside_its_settings_is_held_to_the_policy(
    tmp_path: Path, more: str, settings: dict[str, Any], beside: dict[str, Any], line: str
) -> None:
    text = OPEN.replace('strategies = ["*"]', 'strategies = ["fedavg"]')
    assert text != OPEN
    held = policy(tmp_path, more, text)
    asked = {"strategy.name": "fedavg", "privacy.max-epsilon": 1.0, **settings}
    kind = "evaluate" if "split" in beside else MessageType.TRAIN
    with pytest.raises(ConfigError, match=line):
        held.check(message(asked, kind, **beside))


def test_replies_without_noise_are_refused_where_noise_is_required(tmp_path: Path) -> None:
    held = policy(tmp_path, 'protection = "differential-privacy"')
    private = {"privacy.noise-multiplier": 1.0, "privacy.max-epsilon": 8.0}
    held.check(message(private))
    for kind in ("evaluate", "train.measure"):
        with pytest.raises(ConfigError, match="whose reply has no noise"):
            held.check(message(private, kind))
    with pytest.raises(ConfigError, match="undoes the noise"):
        held.check(message({**private, "privacy.noise-seed": 1}))
    asked = {**private, "strategy.name": "qffl"}
    with pytest.raises(ConfigError, match=r"privacy\.number-noise-multiplier = 0"):
        held.check(message(asked, measure="received_loss"))
    held.check(message({**asked, "privacy.number-noise-multiplier": 1.0}, measure="received_loss"))
    with pytest.raises(ConfigError, match="whose reply has no noise"):  # masks beside noise
        held.check(message({**private, "secure-aggregation": True}, "evaluate"))


def test_the_number_of_sites_in_a_masked_sum_is_checked(tmp_path: Path) -> None:
    held = policy(tmp_path, "smallest-others = 3")
    held.check(step(Stage.SETUP, sample_num=4))
    held.check(step(Stage.SHARE_KEYS))
    held.check(step(Stage.UNMASK, active_nids=[1, 2, 3, 4]))
    for wrong in (step(Stage.SETUP, sample_num=3), step(Stage.UNMASK, active_nids=[1, 2, 3])):
        with pytest.raises(ConfigError, match=r"line 5: smallest-others = 3\): 3 sites in the sum"):
            held.check(wrong)
    with pytest.raises(ConfigError, match="trains"):
        policy(tmp_path, "trains = false").check(step(Stage.SETUP, sample_num=4))


@pytest.mark.parametrize("kind", ["evaluate", "train.measure"])
def test_a_step_of_the_protocol_lets_no_other_message_pass(kind: str, tmp_path: Path) -> None:
    held = policy(tmp_path, "", OPEN.replace('strategies = ["*"]', 'strategies = ["qffl"]'))
    disguised = step(Stage.SETUP, sample_num=4)
    disguised.metadata.message_type = kind
    with pytest.raises(ConfigError, match="line 1: strategies"):  # of the default settings
        held.check(disguised)


def test_networks_of_other_libraries_have_to_be_named(tmp_path: Path) -> None:
    held = policy(tmp_path, "", OPEN.replace('models = ["*"]', 'models = ["*", "timm:*"]'))
    held._check_names({"model.name": "timm:vit_tiny"})
    with pytest.raises(ConfigError, match="'hf:bert'"):
        held._check_names({"model.name": "hf:bert"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("strategy = ['*']\n" + OPEN, "line 1: Unknown key 'strategy'. Did you mean 'strategies'?"),
        (
            OPEN.replace('strategies = ["*"]\n', ""),
            "strategies is missing: expected a list of names",
        ),
        (OPEN.replace('data = ["*"]', "data = []"), "data is empty, which allows no run"),
        (OPEN.replace('clients = ["*"]', 'clients = ["sgdd"]'), "line 2: clients = ..sgdd..: Unk"),
        (
            OPEN.replace('clients = ["*"]', "clients = 'sgd'"),
            "line 2: clients = 'sgd': expected a list",
        ),
        (OPEN.replace('models = ["*"]', 'models = ["timn:*"]'), "line 3: models = .*Unknown name"),
        (OPEN + "metrics = ['*']", "line 5: metrics = .*Unknown name"),
        (OPEN + "measurements = ['*']", "line 5: measurements = .*Unknown name"),
        (OPEN + "measurements = ['fischer']", "'fischer'. Did you mean 'fisher'?"),
        (
            OPEN + "[settings]\n'data.taget' = ['ill']",
            "line 5: settings = .*Did you mean 'data.target'",
        ),
        (OPEN + "[settings]\ntrain.lr = ['big']", "train.lr = 'big': expected a number"),
        (OPEN + "[settings]\ntrain.lr = 0.1", "line 5: settings.train.lr = 0.1: expected a list"),
        (OPEN + "consortium = 3", "line 5: consortium = 3: expected an object"),
        (
            OPEN + "protection = 'secure-aggregation'\n[consortium]\nnorth = 'x'",
            "policy.toml, north: expected the site's name",
        ),
        (OPEN + "smallest-group = 9", r"line 5: smallest-group belongs to \[node\] in site.toml"),
        (OPEN + "most-rounds = 0", "line 5: most-rounds = 0: expected a number >= 1"),
        (OPEN + "trains = 1", "trains = 1: expected true or false"),
        (OPEN + "protection = 'masks'", "expected one of none, secure-aggregation, differential"),
        (OPEN + "largest-epsilon = 0", "largest-epsilon = 0: expected a number above 0"),
        (OPEN + "[data]\n", "is not valid TOML"),
        (
            OPEN.replace('["*"]', '["fedheal", "alone"]', 1) + "protection = 'secure-aggregation'",
            "line 1: strategies = .*fedheal, alone can never run with protection = .secure-aggreg",
        ),
        (OPEN + "[consortium]\nnorth = 'x'", "by default: protection = .*consortium needs"),
    ],
)
def test_a_policy_with_a_mistake_is_refused_at_the_start(
    text: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        policy(tmp_path, "", text)
    assert str(tmp_path / "policy.toml") in str(caught.value)


@pytest.mark.parametrize("protection", ["secure-aggregation", "differential-privacy", "either"])
def test_a_policy_names_the_strategies_that_its_protection_always_refuses(
    protection: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secure = {"secure-aggregation": True}
    private = {f"privacy.{key}": 1.0 for key in ("noise-multiplier", "number-noise-multiplier")}
    private |= {"privacy.clip": 1.0}
    asked = {"secure-aggregation": [secure], "differential-privacy": [private]}
    refused = []
    for name in STRATEGIES:
        arguments = {"fedeba+": {"strategy.alpha": 0}, "qffl": {"strategy.rule": "weights"}}
        flat = {"strategy.name": name, **arguments.get(name, {})}
        tried = asked.get(protection, [secure, private])
        refused += [name] * all(not accepted(flat | more) for more in tried)
    every = OPEN.replace('["*"]', json.dumps([*STRATEGIES]), 1)
    policy(tmp_path, f"protection = '{protection}'", every)
    (record,) = caplog.records
    words = f'line 1: {", ".join(refused)} can never run with protection = "{protection}".'
    assert record.getMessage().endswith(words)


def accepted(flat: Mapping[str, Any]) -> bool:
    try:
        RunConfig.from_flat(flat)
    except ConfigError:
        return False
    return True


def test_the_template_has_every_key_with_its_default(tmp_path: Path) -> None:
    written = tmp_path / "policy.toml"
    written.write_text(call("deploy", "policy"))
    held, named = Policy.read(written), tomllib.loads(written.read_text())
    defaults, own = vars(Policy()), {"path", "text"}
    assert named.keys() == {name.replace("_", "-") for name in defaults.keys() - own}
    for name in defaults.keys() - {"strategies", "clients", "models", "data", *own}:
        assert getattr(held, name) == defaults[name], name
    written.write_text(written.read_text().replace('# "data.', '"data.'))
    settings = {"data.target": ["disease"], "data.groups": ["", "sex"]}
    assert Policy.read(written).settings == settings
    held.check(message({"strategy.name": "qffl", "model.name": "mlp", "data.name": "table"}))


def test_models_in_the_templates_comment_take_what_it_says() -> None:
    (text,) = re.findall("# Rows of tables need (.*)", TEMPLATE.read_text())
    rows, texts, images = (re.findall(r"[a-z-]+", part) for part in text.split(";"))
    taken = {name: getattr(MODELS[name], "kinds", ("images",)) for name in MODELS}
    assert [name for name, kinds in taken.items() if "features" in kinds] == rows
    assert [name for name, kinds in taken.items() if "tokens" in kinds] == [
        name for name in texts if name in taken
    ]
    assert {"cnn", "mlp", "unet"} <= {*images}


def test_a_config_is_checked_against_a_policy_before_it_is_submitted(tmp_path: Path) -> None:
    policy(tmp_path, "most-rounds = 20\n", OPEN.replace('models = ["*"]', 'models = ["mlp"]'))
    config = tmp_path / "run.toml"
    config.write_text('num-server-rounds = 20\n[data]\nname = "table"\ntarget = "ill"\n')
    option = ("--policy", tmp_path / "policy.toml")
    assert "20 rounds" in call("deploy", "check", config, *option)
    config.write_text("num-server-rounds = 21\n" + config.read_text().partition("\n")[2])
    assert "line 5: most-rounds = 20" in call("deploy", "check", config, *option, expect=2)
    config.write_text('data.name = "npz"')
    assert "model.name = 'cnn'" in call("deploy", "check", config, *option, expect=2)


def test_the_documented_files_of_a_run_fit_together(tmp_path: Path) -> None:
    page = (processes.ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```toml (\S+)\n(.*?)```", page, re.DOTALL))
    for name in ("ca.crt", "site.key", *files):
        (tmp_path / name).write_text(files.get(name, ""))
    run, option = tmp_path / "run.toml", ("--policy", tmp_path / "policy.toml")
    assert "50 rounds. north, south, coast" in call("deploy", "check", run, *option)
    site = SiteConfig.read(tmp_path / "site.toml")
    assert (Path(site.policy), site.node["domain"]) == (option[1], "north")
    run.write_text(run.read_text().replace("50", "51"))
    assert "most-rounds = 50" in call("deploy", "check", run, *option, expect=2)


# --- the file of a site's settings -----------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "superlink is missing"),
        ("superlink = 'a:1'\npolcy = 'p'", "Unknown key 'polcy'. Did you mean 'policy'?"),
        ("superlink = 'a:1'\nidle-minutes = 0", "expected a number above 0"),
        ("superlink = 'a:1'\npolicy = 'p.toml'", "policy = 'p.toml': no such file"),
        ("superlink = 'a:1'\n[node]\ndata_dir = '/d'", "Did you mean 'data-dir'?"),
        ("superlink = 'a:1'\nnode = 3", "node = 3: expected a table"),
    ],
)
def test_a_mistake_in_a_sites_file_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(text)
    result = invoke("deploy", "site", str(tmp_path / "site.toml"), env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert words in " ".join(result.output.split())


def test_paths_of_a_site_begin_at_the_folder_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(OPEN)
    file = tmp_path / "site.toml"
    file.write_text("superlink = 'a:1'\npolicy = 'policy.toml'\n[node]\ndomain = 'north'\n")
    site = SiteConfig.read(file)
    assert (site.policy, dict(site.node)) == (str(tmp_path / "policy.toml"), {"domain": "north"})
    assert site.audit_log.endswith("audit/audit.jsonl")


# --- the audit log ---------------------------------------------------------------------------


def reply_to(asked: Message) -> Message:
    arrays = record_of({"w": np.array([[3.0, 4.0]], np.float32), "n": np.array([np.nan])})
    numbers = MetricRecord({"num-examples": 7, "train_loss": 0.5})
    return Message(RecordDict({"arrays": arrays, "metrics": numbers}), reply_to=asked)


def test_a_line_of_the_audit_log_says_what_left_but_no_value(tmp_path: Path) -> None:
    hidden = {"run-name": "meier", "output-dir": "/home/meier", "data.dir": "/home/meier"}
    asked = message({**hidden, "train.lr": 0.3, "strategy.name": "qffl"}, measure="received_loss")
    log = AuditLog(tmp_path / "audit" / "audit.jsonl")
    log.write(asked, reply_to(asked), refused=False)
    log.write(asked, "ConfigError: no", refused=True)
    log.close()
    answered, refused = map(json.loads, (tmp_path / "audit/audit.jsonl").read_text().splitlines())
    assert answered.pop("time").endswith("+00:00")
    assert answered == {
        "run": "1",
        "round": 1,
        "kind": "train",
        "settings": {"train.lr": 0.3, "strategy.name": "qffl"},
        "beside": {},
        "measure": "received_loss",
        "outcome": "answered",
        "reason": "",
        "sent": {
            "num-arrays": 2,
            "arrays": {
                "arrays": {"w": {"shape": [1, 2], "norm": 5.0}, "n": {"shape": [1], "norm": None}}
            },
            "values": {"metrics": ["num-examples", "train_loss"]},
        },
    }
    assert (refused["outcome"], refused["reason"]) == ("refused", "ConfigError: no")
    assert refused["sent"] == {}
    assert stat.S_IMODE((tmp_path / "audit" / "audit.jsonl").stat().st_mode) == 0o600


def test_strange_values_of_a_server_fit_into_a_line() -> None:
    asked = message({"train.lr": float("nan")}, **{"measure": "x" * 1000})
    asked.content["config"]["train.momentum"] = b"\xff"  # type: ignore[index]
    line = entry(asked, "no", refused=True)
    assert json.loads(json.dumps(line, allow_nan=False)) == line
    assert line["settings"] == {"train.lr": "nan", "train.momentum": "b'\\xff'"}
    assert len(line["measure"]) <= 120
    assert line["kind"] == "train"
    assert entry(step(Stage.SETUP), "no", refused=True)["kind"] == "train (setup)"


def test_the_audit_log_is_rotated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflower.deploy.audit.MOST_BYTES", 1000)
    log = AuditLog(tmp_path / "audit.jsonl")
    for _ in range(8):
        log.write(message({}), "no", refused=True)
    log.close()
    assert {path.name for path in tmp_path.iterdir()} >= {"audit.jsonl", "audit.jsonl.1"}
    for path in tmp_path.iterdir():
        assert path.stat().st_size <= 1000
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


# --- a site without processes ----------------------------------------------------------------


class FakeWorker:
    """Counts the messages that reach it."""

    def __init__(self) -> None:
        self.asked: list[Message] = []
        self.used = time.monotonic()

    def answer(self, asked: Message, context: Context, keep: Any) -> tuple[Message, Context]:
        self.asked.append(asked)
        if "boom" in asked.content.config_records["config"]:
            raise WorkerEnded("the site's process ended")
        return reply_to(asked), context


def answers(site: Site, *messages: Message, client_app: bool = True) -> list[Any]:
    """The replies, or the reasons for none, that leave a site."""
    sent: list[Any] = []
    for asked in messages:
        task: Any = SimpleNamespace(
            message=asked,
            context=Context(1, 1, {}, RecordDict(), {}),
            keep=lambda: None,
            is_client_app=client_app,
            answer=lambda reply, _: sent.append(reply),
        )
        site.answer(task)
    return sent


@pytest.fixture
def site(tmp_path: Path) -> Site:
    (tmp_path / "policy.toml").write_text(OPEN + "most-rounds = 30\n")
    log = str(tmp_path / "audit.jsonl")
    made = Site(SiteConfig("a:1", policy=str(tmp_path / "policy.toml"), audit_log=log))
    made._worker = FakeWorker()  # type: ignore[assignment]
    return made


def lines(site: Site) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(site.config.audit_log).read_text().splitlines()]


def test_a_refused_message_never_reaches_the_worker(site: Site) -> None:
    wrong = message({}, **{"server-round": "many"})  # of another type than a server sends
    sent = answers(site, message({"num-server-rounds": 31}), wrong, message({}))
    assert sent[0].startswith("<class 'fairflower.errors.ConfigError'>:<'Refused by the site's pol")
    assert "line 5: most-rounds = 30" in sent[0]
    assert sent[1].startswith("<class 'ValueError'>")
    assert isinstance(sent[2], Message)
    assert len(site._worker.asked) == 1  # type: ignore[attr-defined]
    outcomes = [(line["outcome"], line["reason"]) for line in lines(site)]
    assert outcomes == [("refused", sent[0]), ("refused", sent[1]), ("answered", "")]


def test_a_message_for_another_kind_of_app_is_refused(site: Site) -> None:
    (sent,) = answers(site, message({}), client_app=False)
    assert "no AgentApp" in sent
    assert lines(site)[0]["outcome"] == "refused"


def test_a_site_that_has_withdrawn_answers_nothing_else(site: Site, tmp_path: Path) -> None:
    site.file = tmp_path / "site.toml"
    sent = []
    for text in ("", "withdraw = true", "withdraw =", "withdraw = false"):
        site.file.write_text(f"superlink = 'a:1'\n{text}\n")
        sent += answers(site, message({}))
    assert [isinstance(reply, Message) for reply in sent] == [True, False, False, True]
    assert sent[1] == WITHDRAWN
    assert "the site cannot read its settings; nothing was sent" in sent[2]
    assert [line["outcome"] for line in lines(site)][1:3] == ["refused"] * 2
    assert lines(site)[1]["reason"] == WITHDRAWN


def with_policy(tmp_path: Path, more: str, **node: Any) -> SiteConfig:
    policy(tmp_path, more)
    own = {"policy": str(tmp_path / "policy.toml"), "private_key": str(tmp_path / "north.key")}
    return SiteConfig("a:1", audit_log=str(tmp_path / "audit.jsonl"), node=node, **own)


def test_a_policy_tells_the_worker_what_the_worker_checks(tmp_path: Path) -> None:
    made = Site(with_policy(tmp_path, "fewest-examples = 20", domain="d"))
    assert dict(made.node) == {"domain": "d", "fewest-examples": 20}
    assert "fewest-examples=20" in " ".join(made.command(9, Path("secret")))
    assert Site(with_policy(tmp_path, "trains = false")).node == {"tests-only": True}


def test_a_policy_lists_the_consortium(tmp_path: Path) -> None:
    names = ("north", "south", "coast")
    publics = [make_key_pair(tmp_path / f"{name}.key").read_text() for name in names]
    masks = 'protection = "secure-aggregation"\n'
    listed = "\n".join(f"{n} = {json.dumps(k)}" for n, k in zip(names, publics, strict=True))
    table = f"[consortium]\n{listed}\n"
    consortium = Consortium.of(Site(with_policy(tmp_path, masks + table)).node)
    assert consortium
    assert (list(consortium.sites), consortium.name) == ([*names], "north")
    shown = call(
        "deploy", "fingerprints", tmp_path / "policy.toml", "--key", tmp_path / "south.key"
    )
    assert [line.split()[1:] for line in shown.splitlines()] == [
        ["north"],
        ["south", "(this", "site)"],
        ["coast"],
    ]
    for text, node, words in (
        (table, {}, 'by default: protection = "none": consortium needs protection = "secure-agg'),
        ("", {"secure-aggregation": True}, "secure-aggregation needs protection = "),
        (
            masks + table,
            {"consortium": "a", "signing-key": "b"},
            r"remove consortium from \[node\]",
        ),
        (masks + table.replace("coast", "north2").replace(publics[2], publics[0]), {}, "north2"),
        (masks + table.partition("coast")[0], {}, "2 sites, expected at least 3"),
        (masks, {"consortium": str(tmp_path / "policy.toml"), "signing-key": "b"}, "0 sites"),
        (
            masks + table.replace(publics[0].strip(), "ssh-rsa A"),
            {},
            "policy.toml, north: expected",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            Site(with_policy(tmp_path, text, **node))
    policy_without = table.replace(
        json.dumps(publics[0]), json.dumps(publics[0].replace("A", "B", 1))
    )
    with pytest.raises(ConfigError, match="north"):
        Site(with_policy(tmp_path, masks + policy_without))


def test_a_worker_that_ends_gives_an_error(site: Site) -> None:
    (sent,) = answers(site, message({}, boom=1))
    assert "the site's process ended" in sent
    assert lines(site)[0]["outcome"] == "failed"


def test_nothing_is_sent_that_the_audit_log_does_not_have(site: Site) -> None:
    site._audit.close()
    Path(site.config.audit_log).unlink()
    Path(site.config.audit_log).mkdir()  # cannot be opened as a file
    (sent,) = answers(site, message({}))
    assert "the site cannot write its audit log; nothing was sent" in sent


def test_a_worker_that_is_idle_for_long_ends(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[float] = []
    site._worker = Worker()
    monkeypatch.setattr(site._worker, "end", lambda: ended.append(now))
    queue: Any = SimpleNamespace(next=lambda: None)
    for now in (29 * 60, 31 * 60):
        site._worker.used = time.monotonic() - now
        assert not site._serve(queue)
    assert ended == [31 * 60]


def test_a_message_that_cannot_be_read_is_left_to_flower(site: Site) -> None:
    def unreadable() -> None:
        raise ValueError("no such object")

    queue: Any = SimpleNamespace(next=unreadable)
    assert not site._serve(queue)


def test_a_worker_reads_the_images_again_in_a_new_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [(message({}), Context(run, 1, {}, RecordDict(), {})) for run in (7, 7, 8)]
    log: list[Any] = []

    def app(message: Message, context: Context) -> Message:
        if context.run_id == 8:
            raise ValueError("no data")
        log.append(context.run_id)
        return reply_to(message)

    def receive() -> Any:
        if not asked:
            raise EOFError
        return asked.pop(0)

    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr("fairflower.client_app.app", app)
    monkeypatch.setattr("fairflower.client_app.forget_code", lambda: log.append("again"))
    pipe: Any = SimpleNamespace(recv=receive, send=lambda answer: log.append(type(answer[0])))
    _work(pipe)
    assert log == ["again", 7, Message, 7, Message, "again", str]


@pytest.mark.slow
def test_a_site_checks_and_refuses_without_pytorch(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from fairflower.deploy.audit import entry
from fairflower.deploy.site import Policy
from fairflower.flower_compat import set_task_identity
set_task_identity()
settings = {{"data.name": "npz", "strategy.name": "qffl", "measure": "received_loss"}}
asked = Message(RecordDict({{"config": ConfigRecord(settings)}}), 1, "train")
Path("policy.toml").write_text({OPEN!r})
Policy.read(Path("policy.toml")).check(asked)
assert entry(asked, "no", refused=True)["settings"]["strategy.name"] == "qffl"
assert "torch" not in sys.modules
"""
    run_command([sys.executable, "-c", program], env=environment(tmp_path), cwd=tmp_path)


def test_the_command_of_the_supernode_leaves_messages_to_the_site(site: Site) -> None:
    command = site.command(9, Path("secret"))
    assert command[command.index("--isolation") + 1] == "process"
    assert command[command.index("--superexec-auth-secret-file") + 1] == "secret"
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert "--allow-runtime-dependency-installation" not in command


def test_every_setting_that_names_code_is_in_the_policy() -> None:
    """A new setting that names a class must not pass by the policy."""
    named = {key for key, spec in schema().items() if "module:" in spec.help}
    assert named == {
        *("data.name", "data.task", "model.name", "evaluate.metrics"),
        *("participation.policy", "track"),  # only the server reads these
    }
