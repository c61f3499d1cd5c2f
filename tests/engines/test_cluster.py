"""Ray clusters: nodes that cannot run clients, lost nodes, and the commands of the guide."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from processes import ROOT, TIMEOUT, environment, run, started, wait_for

from fairflower.config import RunConfig
from fairflower.deploy.local import free_port
from fairflower.engines import ray_cluster
from fairflower.engines.ray_cluster import (
    NodeReport,
    RayNode,
    RayNodes,
    Workers,
    assign_workers,
    connect,
    report_node,
    worker_capacity,
)
from fairflower.errors import ConfigError, DataError, EngineError
from fairflower.machine import versions

FOUR = [RayNode(name, name, size) for name, size in (("a", 1), ("b", 0), ("c", 3), ("d", 2))]


@pytest.mark.parametrize(
    ("resources", "cpus", "gpus", "workers"),
    [
        ({"CPU": 7.0}, 2, 0, 3),
        ({"CPU": 8.0, "GPU": 1.0}, 1, 0.25, 4),
        ({"CPU": 8.0, "GPU": 2.0}, 1, 0.4, 4),  # two workers per GPU: no worker spans two GPUs
        ({"CPU": 8.0, "GPU": 3.0}, 1, 2, 1),
        ({"CPU": 8.0}, 1, 0.25, 0),
        ({}, 1, 0, 0),  # a head node without resources for clients
    ],
)
def test_worker_capacity_follows_from_cpus_and_gpus(resources, cpus, gpus, workers):
    assert worker_capacity(resources, cpus, gpus) == workers


def test_workers_are_assigned_to_the_nodes_in_turn():
    assert "".join(node.node_id for node in assign_workers(FOUR, 100)) == "acdcdc"
    assert "".join(node.node_id for node in assign_workers(FOUR, 4)) == "acdc"
    assert assign_workers(FOUR, 0) == assign_workers([], 4) == []


START_PROBLEMS = {
    "busy": ("less busy, give Ray more time", {}),
    "long path": ("is too long for sockets. Set RAY_TMPDIR", {"RAY_TMPDIR": 0}),
    "long TMPDIR": ("is too long for sockets. Set RAY_TMPDIR", {"TMPDIR": 0}),
    "full": ("/tmp is full or not writable. Free space, or set RAY_TMPDIR", {}),
    "files": ("A process may open only 200 files. Allow more (ulimit -n 1024)", {}),
}


@pytest.mark.posix
@pytest.mark.parametrize("cause", START_PROBLEMS)
def test_a_failing_start_of_ray_has_the_remedy_of_its_cause(cause: str, monkeypatch) -> None:
    import resource

    def init(*_: Any, **__: Any) -> None:
        raise Exception("The current node timed out during startup")  # as Ray does

    words, changed = START_PROBLEMS[cause]
    for name in ("RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name in changed:
        monkeypatch.setenv(name, f"/scratch/{'x' * 60}")
    free = 0 if cause == "full" else 2**40
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=free))
    files = 200 if cause == "files" else resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda what: (files, files))
    monkeypatch.setattr(ray_cluster.prepare_ray(), "init", init)
    with pytest.raises(
        EngineError, match=r"timed out during startup.*, or choose engine"
    ) as failed:
        connect("", 1)
    for problem, (text, _) in START_PROBLEMS.items():
        assert (text in str(failed.value)) == (text == words), problem


@pytest.mark.parametrize("address", ["local", "10.0.0.1", "http://10.0.0.1:6379", "10.0.0.1:x"])
def test_a_malformed_ray_address_is_refused(address: str):
    with pytest.raises(ConfigError, match="expected auto, host:port or ray://host:port"):
        connect(address, 1)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_without_a_ray_cluster_is_refused(scheme: str):
    address = f"{scheme}127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=f"'{address}': no Ray cluster answers.*ray start"):
        connect(address, 1)


def test_ray_address_is_refused_with_the_inline_engine():
    with pytest.raises(ConfigError, match=r"ray-address.*engine = .inline. runs only on this"):
        RunConfig.from_flat({"ray-address": "auto", "engine": "inline"})


def test_a_node_reports_packages_of_other_versions(monkeypatch: pytest.MonkeyPatch):
    here = report_node(lambda: "data", versions())
    assert here.prepared == "data"
    assert not here.error
    # Accepted: another build of the same version, and another fairflower, whose code is sent.
    needed = versions() | {"fairflower": "0.0.1"}
    needed["torch"] = needed["torch"].partition("+")[0] + "+cu999"
    assert not report_node(None, needed).error
    error = report_node(None, needed | {"flwr": "0.9", "numpy": "1.0"}).error
    assert re.match(r"flwr [\d.]+ \(needed: 0.9\), numpy [\d.]+ \(needed: 1.0\)\. Install", error)


class Ray:
    """A stand-in for Ray with nodes of one CPU each, which return a report or raise an error."""

    exceptions = SimpleNamespace(
        RayError=ArithmeticError,
        RayTaskError=FloatingPointError,
        TaskUnschedulableError=ZeroDivisionError,
        NodeDiedError=OverflowError,
    )

    def __init__(self, **reports: NodeReport | ArithmeticError) -> None:
        self.reports = reports
        self.lost: set[str] = set()

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {
                "NodeID": name * 56,
                "Alive": name not in self.lost,
                "NodeManagerAddress": name,
                "NodeManagerHostname": name,
                "Resources": {"CPU": 1.0},
            }
            for name in self.reports
        ]

    def remote(self, **resources: float) -> Any:
        def call(node: str) -> Any:
            sign = SimpleNamespace(remote=lambda: node)
            return SimpleNamespace(__ray_ready__=sign, node=node)

        def options(scheduling_strategy: Any, **_: Any) -> Any:
            return SimpleNamespace(remote=lambda *_: function(scheduling_strategy.node_id[0]))

        function = call if resources["num_cpus"] else str
        return lambda thing: SimpleNamespace(options=options)

    def wait(self, names: list[str], **_: Any) -> tuple[list[str], list[str]]:
        return names, []

    def get(self, name: str) -> NodeReport:
        report = self.reports[name]
        if isinstance(report, ArithmeticError):
            raise report
        return report


def missing() -> None:
    raise DataError("FAIRFLOWER_DATA = '/data': there is no folder /data.")


def test_nodes_that_cannot_run_clients_are_named_before_the_run_starts(monkeypatch):
    monkeypatch.setattr(ray_cluster, "_NODE_LOSS_TIMEOUT", 0)
    good = report_node(None, {})
    full = ArithmeticError("the node is out of memory")
    ray = Ray(a=good, b=report_node(missing, {}), c=full, d=good._replace(prepared="others"))
    with pytest.raises(ConfigError) as caught:
        RayNodes(ray, 1, 0, None).begin()
    assert str(caught.value).splitlines() == [
        "Clients cannot run on these Ray nodes:",
        "  b: FAIRFLOWER_DATA = '/data': there is no folder /data. (A node uses the "
        "environment in which `ray start` was called.)",
        "  c: the node is out of memory",
        "  d: its data differ from the data on this machine. Copy the same files to this node.",
    ]
    with pytest.raises(ConfigError, match="there is no folder /data"):
        RayNodes(Ray(a=good), 1, 0, missing).begin()


def test_a_node_that_died_before_the_check_is_skipped(caplog):
    nodes = RayNodes(
        Ray(a=report_node(None, {}), b=ZeroDivisionError(), c=OverflowError()), 1, 0, None
    )
    assert [node.name for node in nodes.begin()] == ["a"]
    assert [record.message for record in caplog.records] == [
        "Ray node b is lost.",
        "Ray node c is lost.",
    ]


def test_a_node_that_dies_during_the_check_is_skipped_after_any_error_of_ray(caplog, monkeypatch):
    ray = Ray(a=report_node(None, {}), b=ArithmeticError("its worker has crashed"))
    waited = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 3:  # Ray notices
            ray.lost.add("b")

    monkeypatch.setattr(ray_cluster.time, "sleep", sleep)
    assert [node.name for node in RayNodes(ray, 1, 0, None).begin()] == ["a"]
    assert caplog.messages == ["Ray node b is lost."]
    # An error in fairflower's code on the node is raised at once.
    ray = Ray(a=report_node(None, {}), b=FloatingPointError("no such function"))
    with pytest.raises(ConfigError, match="b: no such function"):
        RayNodes(ray, 1, 0, None).begin()
    assert len(waited) == 3


def test_a_joining_node_is_used_if_it_can_run_clients_and_named_if_not(caplog):
    good = report_node(None, {})
    ray = Ray(a=good)
    nodes = RayNodes(ray, 1, 0, None)
    assert [node.name for node in nodes.begin()] == ["a"]
    assert nodes.joined() == []
    ray.reports |= {"b": good, "c": report_node(missing, {})}
    assert [node.name for node in nodes.joined()] == ["b"]
    assert "c is not used: FAIRFLOWER_DATA" in caplog.text
    assert nodes.joined() == []


def test_nodes_with_different_hardware_are_named_in_a_warning(caplog):
    good = report_node(None, {})
    ray = Ray(a=good, b=good._replace(hardware="Arm, NEON"), c=good)
    RayNodes(ray, 1, 0, None).begin()
    (warning,) = caplog.messages
    assert warning.startswith("The Ray nodes have 2 kinds of hardware")
    assert "a, c: " in warning
    assert "b: Arm, NEON" in warning
    caplog.clear()
    RayNodes(Ray(a=good, b=good), 1, 0, None).begin()
    assert not caplog.messages


def test_workers_of_a_lost_node_are_replaced_on_other_nodes(caplog):
    good = report_node(None, {})
    ray = Ray(a=good, b=good, c=good)
    workers = Workers(ray, object, (), 2, RayNodes(ray, 1, 0, None))

    def where() -> str:
        workers.collect_started()
        return "".join(worker.node.name for worker in workers.ready)

    assert where() == "ab"
    ray.lost.add("a")
    workers.replace(workers.ready[0])
    assert where() == "bc"
    # A worker that dies on a connected node is replaced on this node.
    workers.replace(workers.ready[0])
    assert where() == "cb"
    # Ray lists a lost node as alive for a while; a worker cannot start on it.
    lost = ray.reports["c"] = ArithmeticError("it was lost")
    workers.replace(workers.ready[0])
    ray.lost.add("c")
    assert where() == "b"
    assert [text for text in caplog.messages if "lost" in text] == [
        "Ray node a is lost.",
        "Ray node c is lost.",
    ]
    ray.reports["b"] = lost
    workers.replace(workers.ready[0])
    assert where() == ""
    assert not workers.starting
    assert "A worker cannot start on b: it was lost" in caplog.text
    ray.reports["d"] = good
    workers.look_for_nodes()
    assert where() == "d"


def test_client_resources_that_no_node_has_are_refused():
    ray = Ray(a=report_node(None, {}))
    for cpus, gpus in ((2, 0.0), (1, 0.5)):
        with pytest.raises(ConfigError, match=f"client-cpus = {cpus}, client-gpus = {gpus:g}: no"):
            Workers(ray, object, (), 2, RayNodes(ray, cpus, gpus, None, cluster=False))


# --- two nodes on this machine -----------------------------------------------------------


#: Two classes, for two clients.
IMAGES = {"x": np.zeros((8, 8, 8), np.uint8), "y": np.arange(8) % 2}
SPLITS = ("train", "test")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder whose path is short enough for Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp") as path:
        yield Path(path)


def commands_of_the_guide(folder: Path) -> list[str]:
    """Return the commands of docs/cluster.md, with a free port and a short run."""
    text = (ROOT / "docs" / "cluster.md").read_text()
    (block,) = re.findall(r"^```sh try\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    block = block.replace("6390", str(free_port())).replace("$RAY_TMPDIR", str(folder))
    # Long enough for Ray to see that a node is gone.
    short = " --rounds 150 --epochs 1 --set data.clients-per-domain=2 --set evaluate.every=100"
    return [line + short * line.startswith("fairflower") for line in block.splitlines()]


# Nightly: on a busy machine Ray at times takes minutes to see that a node is gone.
@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_on_two_nodes_of_which_one_is_killed_equals_a_run_on_one_machine(folder: Path):
    data = folder / "data"
    data.mkdir()
    np.savez(data / "noise.npz", **{f"{k}_{split}": IMAGES[k] for k in IMAGES for split in SPLITS})
    env = environment(folder, RAY_TMPDIR=str(folder), FAIRFLOWER_DATA=str(data))
    _, head, _, other, _, run_there, run_here, compare, _ = commands_of_the_guide(folder)
    log, history = folder / "log.txt", folder / "runs" / "cluster" / "history.csv"
    with log.open("w") as output:

        @contextmanager
        def begin(line: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
            call = ["bash", "-c", f"exec env {line.partition('&')[0]}"]
            with started(call, env=env, stdout=output, stderr=subprocess.STDOUT) as process:
                yield process
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # Ray is slow to end after SIGTERM

        with begin(head, env):
            wait_until_written("Ray runtime started", log)
            with begin(other, {**env, "FAIRFLOWER_DATA": str(folder / "nowhere")}):
                wait_until_written("Ray runtime started", log, 2)
                refused = run([*run_there.split(), "--data", "npz"], env=env, expect=2)
                message = " ".join(refused.split())
                assert "Clients cannot run on these Ray nodes: " in message
                assert "/nowhere'" in message
            with begin(other, env) as second:
                wait_until_written("Ray runtime started", log, 3)
                with begin(run_there, env) as cli:
                    wait_until_written("\n2,run", history, unless=cli)
                    os.killpg(second.pid, signal.SIGKILL)
                    assert cli.wait(TIMEOUT) == 0, log.read_text()
        notes = (history.parent / "log.txt").read_text()
        # Which of them depends on whether the node was training when it was killed.
        assert "has died. Its clients are retried once" in notes or "is lost." in notes
        assert "continues without" not in notes
        run(run_here.split(), env=env)
        run(compare.split(), env=env)


def wait_until_written(
    text: str, file: Path, times: int = 1, unless: subprocess.Popen[str] | None = None
) -> None:
    def written() -> bool:
        return file.exists() and file.read_text().count(text) >= times

    over = unless.poll if unless else lambda: None
    wait_for(lambda: written() or over() is not None, f"{text!r} in {file}")
    assert written(), f"the run has ended without {text!r} in {file}"
