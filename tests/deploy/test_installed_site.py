"""Sites of real processes under attack by whoever submits the run, and their workers."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_data_sets
from flwr.app import Context, Message, MessageType, RecordDict
from httpx import HTTPStatusError
from processes import ROOT, belonging_to, wait_for
from rich.console import Console
from safetensors.numpy import load_file

from fairflower import __version__
from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.config.text import toml_value
from fairflower.deploy.local import HOST, LocalDeployment, Process, free_port, script
from fairflower.deploy.site import Worker, WorkerEnded
from fairflower.engines.inline import InlineGrid
from fairflower.flower_compat import TaskQueue, set_task_identity
from fairflower.server.session import Session

DOMAINS = ("plain", "inverted", "rotated")
POLICY = 'strategies = ["fedavg"]\nclients = ["sgd"]\nmodels = ["cnn"]\ndata = ["npz"]\n'

#: Leaves a file where the process has its home, in whatever process it runs.
MARK = """import os as _os, pathlib as _pathlib
if _home := _os.environ.get("FAIRFLOWER_HOME"):
    _pathlib.Path(_home, "ran-{name}").touch()
"""
OWN_DATA = (
    MARK.format(name="data")
    + """
from fairflower.data.folders import DomainNpzFolder

class Data(DomainNpzFolder):
    'Data.'
"""
)


def write_bundle(folder: Path) -> None:
    """Write an app with its own fairflower, whose checks are removed, and other code to import."""
    shutil.copytree(
        ROOT / "fairflower", folder / "fairflower", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file, old, new in (
        ("deploy/policy.py", "        records, kind =", "        return\n        records, kind ="),
        ("secure/client.py", "    sources = [message", "    return False\n    sources = [message"),
        ("config/site.py", '    wrong = ""\n', "    return\n"),
    ):
        path = folder / "fairflower" / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    client = folder / "fairflower" / "client_app.py"
    client.write_text(client.read_text() + MARK.format(name="client"))
    package = folder / "fairflower" / "__init__.py"
    package.write_text(package.read_text() + MARK.format(name="package"))
    (folder / "sitecustomize.py").write_text(MARK.format(name="sitecustomize"))
    (folder / "own_data.py").write_text(OWN_DATA)


def flowers_own(trial: LocalDeployment, name: str, node: dict[str, Any]) -> Process:
    """A SuperNode that runs a bundle's code, as Flower means it."""
    site = trial.make_site(name, node)
    command = [
        script("flower-supernode"),
        *("--superlink", f"{HOST}:{trial.port}", "--host", HOST, "--port", str(free_port())),
        *("--root-certificates", str(trial.certificates.authority)),
        *("--auth-supernode-private-key", str(site.home / "key")),
        *("--node-config", " ".join(f"{k}={toml_value(v)}" for k, v in node.items())),
    ]
    return Process(name, command, site.home, site.log)


def set_policy(site: Process, more: str = "") -> None:
    (site.home / "policy.toml").write_text(POLICY + more)
    file = site.home / "site.toml"
    file.write_text('policy = "policy.toml"\n' + file.read_text())


def audit(site: Process) -> list[dict[str, Any]]:
    text = (site.home / "audit" / "audit.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def marks(site: Process) -> set[str]:
    return {path.name for path in site.home.glob("ran-*")}


@pytest.mark.slow
def test_no_code_of_a_bundle_runs_at_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = tiny_data_sets.digits_folders(tmp_path, DOMAINS, most=20)
    nodes = [{"domain": d, "data-dir": str(folder)} for d, folder in folders.items()]
    settings = {
        "strategy.name": "fedavg",
        "num-server-rounds": 1,
        "data.name": "npz",
        "evaluate.by": "clients",
        "train.local-epochs": 1,
        "min-clients": 1,
    }
    messages: list[str] = []
    trial = LocalDeployment(tmp_path / "trial", nodes[:2], messages.append)
    held, masking = trial.sites
    set_policy(held)
    set_policy(masking, 'protection = "secure-aggregation"\n')
    for number in "12":
        write_bundle(trial.folder / "apps" / number)
    with trial:
        # The bundle's checks are gone, but a site's own are not.
        trained = trial.run(RunConfig.from_flat(settings))
        # A bundle's own data set class, also at a SuperNode of Flower's.
        open_ = flowers_own(trial, "site-2", nodes[2])
        trial.sites.append(open_)
        trial._admit(open_)
        wait_for(trial.complete, "all sites to be online")
        monkeypatch.syspath_prepend(str(trial.folder / "apps" / "2"))
        monkeypatch.delenv("FAIRFLOWER_HOME", raising=False)
        own = {"data.name": "own_data:Data", "num-server-rounds": 0}
        trial.run(RunConfig.from_flat({**settings, **own}))
        # A user of the machine without the secret gets no message.
        (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)", held.output())
        with pytest.raises(HTTPStatusError, match="401"):
            TaskQueue(f"{HOST}:{port}", b"x" * 32).next()
    wait_for(lambda: not belonging_to(tmp_path), "all processes to end")

    # All of it ran at a SuperNode of Flower's and at the server, so it would have run here.
    assert marks(open_) >= {"ran-client", "ran-package", "ran-data"}
    assert marks(trial.superlink) >= {"ran-package", "ran-data"}
    for site in (held, masking):
        assert not marks(site)
        assert not (site.home / "flwr" / "apps").exists(), "the bundle is unpacked at the site"

    # What the sites answered and refused, and with which line of their policies.
    first, *others = dict.fromkeys(line["run"] for line in audit(held))
    assert len(others) == 1
    of_first = [line for line in audit(held) if line["run"] == first]
    assert [(line["kind"], line["outcome"]) for line in of_first] == [
        *(("query", "answered"), ("train", "answered"), ("evaluate", "answered"))
    ]
    left = {name: list(array.shape) for name, array in load_file(trained / MODEL).items()}
    sent = of_first[1]["sent"]["arrays"]
    assert list(sent) == ["arrays"]
    assert {name: array["shape"] for name, array in sent["arrays"].items()} == left
    line = "Refused by the site's policy (line {}): {}"
    by_class = line.format('4: data = ["npz"]', "data.name = 'own_data:Data'")
    masked = line.format('5: protection = "secure-aggregation"', "no secure-aggregation")
    refused = [line for line in audit(held) if line["run"] != first]
    assert refused
    assert all(by_class in line["reason"] and not line["sent"] for line in refused)
    assert {line["outcome"] for line in audit(masking)} == {"refused"}
    assert masked in audit(masking)[0]["reason"]
    told = " ".join(" ".join(messages).split())
    assert by_class in told
    assert masked in told

    # The other site made the same model as in one process.
    grid = InlineGrid(client_app, 1)
    (context,) = grid.contexts.values()
    context.node_config = nodes[0]
    config = RunConfig.from_flat({**settings, "output-dir": str(tmp_path / "one")})
    same = Session(grid, config, Console(quiet=True)).run()
    assert (same / MODEL).read_bytes() == (trained / MODEL).read_bytes()


MODEL = "model.safetensors"


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


@pytest.mark.slow
def test_a_killed_worker_is_started_again_by_the_next_message(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_task_identity(7, 1)
    context = Context(7, 1, {"partition-id": 3}, RecordDict(), {})
    question = Message(RecordDict(), dst_node_id=1, message_type=MessageType.QUERY)
    pids: list[int] = []

    def ask(question: Message = question, keep: Any = lambda: None) -> Any:
        reply, _ = worker.answer(question, context, keep)
        pids.append(worker._running[0].pid)  # type: ignore[index, arg-type]
        return reply if isinstance(reply, str) else dict(reply.content["node"])

    answer = {"partition-id": 3, "version": __version__}
    assert [ask(), ask()] == [answer] * 2
    assert pids[0] == pids[1]
    with socket.socket(fileno=os.dup(worker._running[1].fileno())) as pipe:  # type: ignore[index]
        assert not pipe.getsockname()  # no file: a folder of any file system will do
    assert ask(Message(RecordDict(), 1, "train")).startswith("<class 'RuntimeError'>")
    os.kill(pids[0], signal.SIGKILL)
    worker._running[0].join()  # type: ignore[index]
    monkeypatch.setattr("fairflower.deploy.site.KEEP", 0.01)

    def kill() -> None:
        os.kill(worker._running[0].pid, signal.SIGKILL)  # type: ignore[index, arg-type]
        monkeypatch.setattr("fairflower.deploy.site.KEEP", 10.0)

    with pytest.raises(WorkerEnded, match="exit code -9"):
        ask(keep=kill)
    assert ask() == answer
    assert len(set(pids)) == 2
