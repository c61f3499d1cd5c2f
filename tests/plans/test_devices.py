"""Use of GPUs by default: shares, printed lines and errors, with simulated GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from runs import SMALL
from runs import config as config_of
from runs import run as run_small
from typer.testing import CliRunner

from fairflower.cli import app
from fairflower.config import RunConfig
from fairflower.errors import ConfigError, EngineError
from fairflower.plans import devices
from fairflower.plans.devices import parallel_line, place_clients
from fairflower.plans.execution import auto_jobs
from fairflower.plans.plan import Plan
from fairflower.server.checkpoint import resumed_config
from fairflower.training import app as client_part
from fairflower.training import device as training_device

GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A stand-in for GPUs of 80 GiB, on which each client takes 10 GiB and the tests 5."""

    def install(count: int = 1, cpus: int = 16, need: tuple[int, int] = (10, 5)) -> None:
        names = ["NVIDIA H200"] * count
        monkeypatch.setattr(devices, "gpu_names", lambda: names)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[0])
        monkeypatch.setattr(devices, "cpus", lambda: cpus)
        monkeypatch.setattr("fairflower.plans.execution.cpus", lambda: cpus)
        monkeypatch.setattr(devices, "choose_device", on_gpu)
        monkeypatch.setattr(devices, "free_memory", lambda device: 80 * GIB)
        devices._measured.cache_clear()
        measured = devices.Need(need[0] * GIB, need[1] * GIB)
        monkeypatch.setattr(
            devices, "in_process", lambda runs, device, free: [measured] * len(runs)
        )

    yield install
    devices._measured.cache_clear()


def on_gpu(name: str = "auto") -> torch.device:
    return torch.device("cuda" if name == "auto" else name)


def config(**changes) -> RunConfig:
    return RunConfig.from_flat({key.replace("_", "-"): value for key, value in changes.items()})


def placed(clients: int = 20, **changes):
    return place_clients([config(**changes)], clients)


def test_a_device_with_unknown_memory_sets_no_limit(monkeypatch):
    monkeypatch.setattr(devices, "choose_device", lambda name: torch.device("mps"))
    shared = placed(engine="ray")
    assert (shared.config.client_gpus, shared.num_gpus) == (0.0, None)
    assert shared.line.startswith("mps")
    assert devices.runs_that_fit([config()]) is None
    assert parallel_line([config()], 2) == "mps, 2 runs at a time"


def test_clients_per_gpu_are_limited_by_its_memory_and_the_cpus(gpu):
    gpu()
    seven = placed()  # (80 - 5) / 10
    assert seven.line == "cuda (NVIDIA H200), 7 clients at a time"
    assert seven.config.workers == 7
    assert seven.config.client_gpus == 0.1428
    assert seven.num_gpus == 1
    assert placed(clients=3).config.client_gpus == 0.3333
    assert placed(workers=2).line.endswith("2 clients at a time")
    assert placed(client_cpus=4).config.workers == 4
    gpu(cpus=2)
    assert placed().config.workers == 2


def test_workers_use_all_gpus_unless_the_device_has_an_index(gpu):
    gpu(count=2)
    both = placed()  # 7 clients on the GPU of the server's tests, 8 on the other
    assert (both.config.workers, both.config.client_gpus, both.num_gpus) == (15, 0.125, 2)
    one = place_clients([RunConfig.from_flat({"train.device": "cuda:1"})], 20)
    assert (one.config.workers, one.config.client_gpus) == (7, 0.0)


def test_the_line_of_the_inline_engine_names_the_gpu(gpu):
    gpu()
    assert placed(engine="inline").line == "cuda (NVIDIA H200), one client at a time"


def test_a_numeric_client_gpus_is_kept_or_refused(gpu):
    gpu()
    half = placed(client_gpus=0.5)
    assert half.config.client_gpus == 0.5
    assert half.line == "cuda (NVIDIA H200), 0.5 of a GPU per client, 2 clients at a time"
    assert placed(client_gpus=0.0).line == (
        "cpu, because client-gpus = 0; cuda (NVIDIA H200) is not used by clients ("
        'client-gpus = "auto" uses it)'
    )
    with pytest.raises(ConfigError, match="client-gpus = 2: this machine has 1 GPU, cuda"):
        placed(client_gpus=2)
    second = RunConfig.from_flat({"client-gpus": 0.5, "train.device": "cuda:1"})
    with pytest.raises(ConfigError, match=r"'cuda:1': Ray chooses each client's GPU"):
        place_clients([second], 20)


def test_a_cluster_without_client_gpus_gets_advice(gpu):
    gpu()
    assert "set client-gpus to the fraction of a GPU per client" in placed(ray_address="auto").line
    assert placed(ray_address="auto", client_gpus=0.5).line == ""


def test_a_client_that_does_not_fit_on_a_gpu_is_refused_with_its_bytes(gpu):
    gpu(need=(90, 0))
    with pytest.raises(ConfigError, match=r"needs 96,636,764,160 bytes.* 85,899,345,920 are free"):
        placed()


def test_parallel_runs_are_limited_by_the_gpu_memory(gpu):
    gpu()
    runs = [config(seed=seed) for seed in range(8)]
    assert auto_jobs(Plan(runs)) == 5  # 80 / (10 + 5)
    assert auto_jobs(Plan(runs[:4])) == 1  # fewer than fit: clients run in parallel instead
    assert parallel_line(runs, 5) == "cuda (NVIDIA H200), 5 runs at a time"
    gpu(count=3)
    assert "2 more GPUs are not used by parallel runs" in parallel_line(runs, 5)


def test_gpu_memory_is_measured_once_per_method(gpu, monkeypatch):
    gpu()
    asked = []
    need = devices.Need(GIB, GIB)
    monkeypatch.setattr(
        devices, "in_process", lambda runs, device, free: asked.extend(runs) or [need] * len(runs)
    )
    kinds = [{}, {"seed": 1}, {"client.name": "fedprox"}, {"strategy.name": "fedism"}]
    place_clients([RunConfig.from_flat(kind) for kind in kinds], 20)
    assert sorted(run.label for run in asked) == ["fedheal", "fedism", "fedprox+fedheal"]


def test_without_a_gpu_the_config_is_kept_and_fractions_of_gpus_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(training_device, "_DEVICE", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpu = config()
    assert place_clients([cpu], 20) == devices.Placement(cpu)
    assert parallel_line([cpu], 2) == ""
    with pytest.raises(
        ConfigError, match=r"client-gpus = 0.5: PyTorch does not find a GPU. Set client-"
    ):
        placed(client_gpus=0.5)
    with pytest.raises(ConfigError, match=r"0.5: train.device = 'cpu' does not use a GPU"):
        place_clients([RunConfig.from_flat({"client-gpus": 0.5, "train.device": "cpu"})], 20)


def test_a_gpu_that_pytorch_cannot_use_is_reported_with_the_reason(monkeypatch, tmp_path):
    device, driver = tmp_path / "nvidia0", tmp_path / "version"
    device.touch()
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27\n")
    monkeypatch.setattr(training_device, "_DEVICE", device)
    monkeypatch.setattr(training_device, "_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA, so the GPU is not used; install" in placed().line
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040).")

    monkeypatch.setattr(torch.cuda, "init", init)
    with pytest.raises(ConfigError, match=r"too old .* The NVIDIA driver is 470.82.01. Update the"):
        placed()
    asked_for = RunConfig.from_flat({"train.device": "cpu"})
    assert place_clients([asked_for], 20).line == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placed().line.startswith("cpu: CUDA_VISIBLE_DEVICES hides the GPU")


def test_client_gpus_accepts_numbers_and_auto():
    assert config(client_gpus=0.0).client_gpus == 0.0
    assert config(client_gpus=1).client_gpus == 1.0
    assert config().client_gpus == "auto"
    with pytest.raises(ConfigError, match="'all': expected a number >= 0 or auto"):
        config(client_gpus="all")


def test_the_probe_measures_the_memory_of_training_and_evaluation(monkeypatch):
    """With a real client on the CPU and simulated memory readings."""
    small = RunConfig.from_flat(SMALL | {"train.local-epochs": 5, "client.name": "scaffold"})
    assert probed(small, monkeypatch) == (["train", "train"], devices.Need(72, 12))


def probed(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], devices.Need]:
    """Return the rounds of the client that the probe measured, and the probe's result."""
    asked: list[str] = []

    def counting(function: Any, kind: str) -> Any:
        return lambda *args: asked.append(kind) or function(*args)

    for name, kind in (("train_round", "train"), ("evaluate_round", "test")):
        monkeypatch.setattr(client_part, name, counting(getattr(client_part, name), kind))
    free, peak = iter([50, 50]), iter([60, 70])
    monkeypatch.setattr(devices, "free_memory", lambda device: next(free))
    monkeypatch.setattr(devices, "peak_memory", lambda device: next(peak))
    return asked, devices.probe(run, torch.device("cpu"), 100)


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        (
            {"secure-aggregation": True, "strategy.name": "fedga", "data.clients-per-domain": 2},
            ["train", "train"],
        ),
        ({"participation.policy": "power-of-choice:d=3"}, ["train", "train"]),
        ({"participation.availability": "{absent}"}, ["train", "train"]),
        ({"evaluate.by": "both"}, ["train", "train", "test"]),
        ({"client.name": "moon"}, ["train", "train"]),
    ],
    ids=["masked", "candidates", "absent", "tested by clients", "earlier model"],
)
def test_the_probe_asks_the_largest_client_whatever_the_run_selects(
    changes: dict[str, Any], asked: list[str], monkeypatch, tmp_path: Path
):
    absent = tmp_path / "absent.csv"
    absent.write_text("round,client\n1,1\n2,1\n")
    changes = {k: str(absent) if v == "{absent}" else v for k, v in changes.items()}
    assert probed(RunConfig.from_flat(SMALL | changes), monkeypatch)[0] == asked


def test_a_probe_that_runs_out_of_memory_is_reported(monkeypatch):
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr("fairflower.training.app.train_round", full)
    monkeypatch.setattr(devices, "peak_memory", lambda device: 60)
    with pytest.raises(ConfigError, match=r"single client needs more than 60 bytes.*100 are free"):
        devices.probe(RunConfig.from_flat(SMALL), torch.device("cpu"), 100)


def test_a_client_without_gpu_memory_ends_the_run_which_can_be_resumed(monkeypatch, tmp_path):
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    with monkeypatch.context() as patch:
        patch.setattr("fairflower.training.app.train_round", full)
        with pytest.raises(
            EngineError, match=r"ran out of GPU memory .* Resume the run with fewer"
        ):
            run_small(config_of(tmp_path))
    (folder,) = tmp_path.iterdir()
    assert run_small(resumed_config(folder, {})) == folder


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    ["run", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("compare", "tune"))],
)
def test_commands_use_the_gpu_by_default_and_print_it(command, gpu, monkeypatch, tmp_path):
    """Ray gives clients shares of a simulated GPU."""
    gpu(cpus=2, need=(30, 5))
    settings = {**SMALL, "output-dir": str(tmp_path), "engine": "ray"}
    if command != "run":
        del settings["engine"]
    file = tmp_path / "config.toml"
    file.write_text("".join(f'"{k}" = {v!r}\n' for k, v in settings.items()).replace('"', ""))
    small = {"compare": ["--federations=0"], "tune": ["--budget=1", "--seeds=1"]}
    more = small.get(command, [])
    result = CliRunner().invoke(app, [command, "--config", str(file), *more])
    assert result.exit_code == 0, result.output
    assert "device    cuda (NVIDIA H200), 2 " in result.output
