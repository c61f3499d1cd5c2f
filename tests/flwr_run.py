"""``flwr run`` with a dedicated SuperLink."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from processes import SCRIPTS, TIMEOUT, environment, run, started

from fairflower.deploy.local import free_port


class Flower:
    """The command ``flwr`` in the folder of an app, with a dedicated SuperLink."""

    def __init__(self, app: Path, home: Path, scripts: Path = SCRIPTS) -> None:
        self.app = app
        self.home = home
        self.scripts = scripts
        self.port = free_port()
        self.env = environment(
            home,
            PATH=os.pathsep.join([str(scripts), os.environ.get("PATH", "")]),
            FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1",
            FLWR_LOCAL_SUPERLINK_HTTP_API_PORT=str(self.port),
        )

    def of(self, app: Path) -> Flower:
        """Return the command in the folder of another app, with the same SuperLink."""
        other = copy.copy(self)
        other.app = app
        return other

    def __call__(self, *arguments: str) -> str:
        return run([self.scripts / "flwr", *arguments], env=self.env, cwd=self.app)

    def start(self, settings: dict[str, str], supernodes: int) -> str:
        """Submit a run and return its ID."""
        pairs = " ".join(f"{key}={value}" for key, value in settings.items())
        federation = f"num-supernodes={supernodes} client-resources-num-cpus=1"
        options = ["--run-config", pairs, "--federation-config", federation]
        return str(json.loads(self("run", ".", "--format", "json", *options))["run-id"])

    def run(self, settings: dict[str, str], supernodes: int) -> dict[str, Any]:
        """Execute a run and return its row in ``flwr ls`` after it has finished."""
        run_id = self.start(settings, supernodes)
        self("log", run_id, "--stream")  # blocks until the run ends
        (row,) = json.loads(self("ls", "--run-id", run_id, "--format", "json"))["runs"]
        assert row["status"].startswith("finished"), self("log", run_id, "--show")
        return dict(row)


@contextmanager
def superlink(app: Path, home: Path, scripts: Path = SCRIPTS) -> Iterator[Flower]:
    """Start a SuperLink at the port where ``flwr run`` expects its local SuperLink."""
    home.mkdir(exist_ok=True)
    flower = Flower(app, home, scripts)
    log = flower.home / "superlink.log"
    database = flower.home / "state.db"
    command = [scripts / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    command += ["--port", str(flower.port), "--database", database]
    with (
        log.open("w") as output,
        started(command, env=flower.env, stdout=output, stderr=subprocess.STDOUT) as process,
    ):
        deadline = time.monotonic() + TIMEOUT
        while not answers(flower.port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
        yield flower


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
