"""What clients keep from round to round, where clients are processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import pytest
from command import call
from processes import ROOT, SCRIPTS, TIMEOUT, environment, run, started

from fairflower.deploy.trial import free_port

pytestmark = pytest.mark.slow

# Control variates at the client and at the server: a client that forgot would end in
# other bits, and so would one whose neighbour on the same worker left something behind.
SETTINGS = {
    "client.name": "scaffold",
    "strategy.name": "uniform",
    "num-server-rounds": "2",
    "data.clients-per-domain": "1",
    "train.local-epochs": "1",
}


def model(folder: Path, name: str) -> bytes:
    return (folder / name / "model.safetensors").read_bytes()


def test_state_survives_on_supernodes(tmp_path: Path):
    """A SuperLink and a SuperNode per client, each in a process of its own."""
    app = tmp_path / "app"
    app.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, app)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fairflower", app / "fairflower", ignore=ignore)
    port = free_port()
    env = environment(tmp_path, FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1")
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{port}"\n'
        "insecure = true\n"
    )
    domains = {"data.domains": "plain,printed"}
    address = ["--insecure", "--host", "127.0.0.1", "--port"]
    link = [SCRIPTS / "flower-superlink", *address, str(port), "--database", tmp_path / "link.db"]
    with ExitStack() as stack:
        log = stack.enter_context((tmp_path / "daemons.log").open("w"))
        options = {"env": env, "stdout": log, "stderr": subprocess.STDOUT, "cwd": tmp_path}
        stack.enter_context(started(link, **options))
        wait_for(port, tmp_path / "daemons.log")
        for client in (0, 1):
            node = [SCRIPTS / "flower-supernode", *address, str(free_port())]
            node += ["--superlink", f"127.0.0.1:{port}"]
            node += ["--node-config", f"partition-id={client} num-partitions=2"]
            stack.enter_context(started(node, **options))
        pairs = SETTINGS | domains | {"output-dir": str(tmp_path), "run-name": "supernodes"}
        numbers = ("num-server-rounds", "data.clients-per-domain", "train.local-epochs")
        config = " ".join(f"{k}={v if k in numbers else repr(v)}" for k, v in pairs.items())
        flwr = [SCRIPTS / "flwr", "run", ".", "here", "--format", "json", "--run-config", config]
        run_id = json.loads(run(flwr, env=env, cwd=app))["run-id"]
        wait_until_finished(run_id, env, app, tmp_path / "daemons.log")
    pairs |= {"run-name": "inline", "engine": "inline"}
    call("run", *(f"--set={key}={value}" for key, value in pairs.items()))
    assert model(tmp_path, "supernodes") == model(tmp_path, "inline")


def wait_for(port: int, log: Path) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise AssertionError(log.read_text())


def wait_until_finished(run_id: str, env: dict[str, str], app: Path, log: Path) -> None:
    flwr = [SCRIPTS / "flwr", "ls", "here", "--run-id", str(run_id), "--format", "json"]
    deadline = time.monotonic() + TIMEOUT
    status = ""
    while time.monotonic() < deadline:
        (row,) = json.loads(run(flwr, env=env, cwd=app))["runs"]
        status = row["status"]
        if status.startswith("finished"):
            break
        time.sleep(2)
    assert status == "finished:completed", log.read_text()
