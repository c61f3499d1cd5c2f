"""The measurements of `cuda.py`: one function for each kind of part, which returns a row.

A part runs in its own process, on the given device.
"""

from __future__ import annotations

import contextlib
import csv
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors.numpy import load_file

from fairflower.client_app import app as client_app
from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.config import RunConfig
from fairflower.config.text import read_toml
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import UserError, installed
from fairflower.models import copy_arrays
from fairflower.registry import CLIENTS, STRATEGIES
from fairflower.server.checkpoint import resumed_config
from fairflower.server.session import Session
from fairflower.training.build import build_model

EXPERIMENTS = Path(__file__).absolute().parent.parent / "experiments"

Row = dict[str, Any]

#: Maximum distance between the models of CPU and device, as a fraction of the distance from the
#: initial model. Kernels sum in different orders, and cuDNN's convolutions round to TF32.
TOLERANCES = {"float32": 0.02, "bf16": 0.3}

SYNTHETIC = {"data.name": "made_up:MadeUpDigits"}
SMALL: dict[str, Any] = {
    **SYNTHETIC,
    "data.image-size": 16,
    "num-server-rounds": 2,
    "data.clients-per-domain": 1,
    "data.examples-per-client": 24,
    "data.test-examples": 20,
    "train.local-epochs": 1,
}

#: Settings of each timed case, and the settings that replace them under --quick.
PROMPTS_224 = {"model.name": "prompt-vit-b-16", "data.image-size": 224}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cnn, 16x16": (
        {**SYNTHETIC, "data.image-size": 16, "data.examples-per-client": 72},
        {"data.examples-per-client": 8},
    ),
    "resnet10, 32x32": (
        {**SYNTHETIC, "model.name": "resnet10", "train.local-epochs": 10},
        {"data.examples-per-client": 4, "data.clients-per-domain": 1, "train.local-epochs": 1},
    ),
    "ViT-B/16 prompts, 224x224": (
        {
            **SYNTHETIC,
            "data.examples-per-client": 32,
            "train.batch-size": 32,
            "train.local-epochs": 1,
            **PROMPTS_224,
        },
        {
            "data.examples-per-client": 4,
            "data.clients-per-domain": 1,
            "model.name": "prompt-vit-tiny",
            "data.image-size": 32,
        },
    ),
}
PROGRAMS = ("bare loop", "inline", "several processes")
#: Timed rounds, after one warm-up round.
ROUNDS = 3

#: Data set of the papers -> file of the experiment's settings.
PAPERS = {"digits": "fedheal-digits.toml", "office-caltech": "fedheal-office.toml"}
METHODS = ("fedavg", "uniform", "fedheal", "fedequilibria")


def items(quick: bool) -> dict[str, list[str]]:
    """Return the names of all parts by kind, in the order in which they run."""
    pairs = [f"{strategy} with sgd" for strategy in STRATEGIES]
    pairs += [f"uniform with {client}" for client in CLIENTS if client not in ("sgd", "fedavg")]
    pairs += ["fedavg with sgd in bf16"]
    timings = [f"{case}: {program}" for case in CASES for program in PROGRAMS]
    runs = [f"{data}: {method}" for data in PAPERS for method in METHODS]
    if quick:
        pairs = ["fedheal with sgd", "uniform with scaffold", "fedavg with sgd in bf16"]
        timings = [name for name in timings if not name.endswith(PROGRAMS[-1])]
        runs = ["digits: fedheal"]
    return {"right": pairs, "fast": timings, "papers": runs}


def measure(kind: str, name: str, device: str, folder: Path, quick: bool, until: float) -> Row:
    """Measure a part and return its row."""
    if kind == "right":
        return right(name, device)
    if kind == "fast":
        return fast(name, device, folder, quick)
    return papers(name, device, folder, quick, until)


def run(flat: Mapping[str, Any], folder: Path) -> Path:
    """Execute a run in this process and return its run folder."""
    config = RunConfig.from_flat({"engine": "inline", "output-dir": str(folder), **flat})
    return session(config).run()


def session(config: RunConfig, **options: Any) -> Session:
    """Return a silent session on the inline engine."""
    grid = InlineGrid(client_app, len(prepare(config.data).clients))
    return Session(grid, config, Console(quiet=True), **options)


# --- right ------------------------------------------------------------------------------


def right(name: str, device: str) -> Row:
    """Train a method once on the CPU and twice on the device, and compare the models."""
    name, _, precision = name.partition(" in ")
    strategy, _, client = name.partition(" with ")
    trainer = CLIENTS[client]
    batch_norm = issubclass(trainer, LocalArraysTrainer)
    model = trainer.models[0] if trainer.models else "resnet10" if batch_norm else "cnn"
    flat = SMALL | {"strategy.name": strategy, "client.name": client, "model.name": model}
    if trainer.optimizer:
        flat["train.optimizer"] = trainer.optimizer
    reference_settings, precision = flat | {"train.precision": "float32"}, precision or "float32"
    flat["train.precision"] = precision
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        # For bf16, the reference is float32 on the device.
        reference = "cpu" if precision == "float32" else device
        first, *others = (
            load_file(run(settings | {"train.device": where}, Path(scratch)) / "model.safetensors")
            for settings, where in ((reference_settings, reference), (flat, device), (flat, device))
        )
    config = RunConfig.from_flat(reference_settings)
    data = prepare(config.data)
    start = copy_arrays(build_model(config.model, config.client, data, config.seed))
    path_length = distance(first, start)
    difference = distance(others[0], first) / path_length if path_length else float("nan")
    tolerance = TOLERANCES[precision]
    same = all(np.array_equal(others[0][key], others[1][key]) for key in others[0])
    return {
        "difference": difference,
        "tolerance": tolerance,
        "same_bits": same,
        "right": bool(difference <= tolerance and same),
        "seconds": time.perf_counter() - begin,
    }


def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """Return the Euclidean distance of two models' floating-point arrays."""
    squares = [
        np.square(a[key].astype(np.float64) - b[key]).sum()
        for key in a
        if a[key].dtype.kind == "f" and key in b
    ]
    return float(np.sqrt(np.sum(squares)))


# --- fast -------------------------------------------------------------------------------


def fast(name: str, device: str, folder: Path, quick: bool) -> Row:
    """Return the seconds of a round, and the training images per second."""
    case, _, program = name.partition(": ")
    full, small = CASES[case]
    flat = full | (small if quick else {})
    flat = {"strategy.name": "fedavg", "data.test-examples": 20, "train.device": device} | flat
    flat |= {"num-server-rounds": 1 + (1 if quick else ROUNDS)}
    if flat.get("model.name") == "prompt-vit-b-16":
        flat["model.weights"] = str(random_vit(folder))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        if program == "bare loop":
            from engine import bare_loop

            bare_loop(RunConfig.from_flat(flat), place)
            rounds = [float(line) for line in (place / "rounds.txt").read_text().split()]
        elif program == "inline":
            rounds = seconds_of(run(flat, place))
        else:
            if not installed("ray"):
                return {"left_out": "Ray is not installed"}
            where = "cpu" if device == "cpu" else "auto"  # the GPU share of a worker
            rounds = seconds_of(on_ray(flat | {"output-dir": scratch, "train.device": where}))
    config = RunConfig.from_flat(flat)
    images = sum(client.num_examples for client in prepare(config.data).clients)
    median = statistics.median(rounds[1:])
    row: Row = {"seconds": min(rounds[1:]), "median": median}
    row["images_per_second"] = images * config.train.local_epochs / median
    if device == "cuda" and program != PROGRAMS[-1]:
        row["gpu_mb"] = torch.cuda.max_memory_reserved() / 2**20
    return row


def seconds_of(folder: Path) -> list[float]:
    """Return the seconds of a run's rounds, between global models, without evaluation."""
    rounds: dict[int, float] = {}
    with (folder / "history.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            number = int(row["round"])
            if row["level"] == "run" and number and row["metric"] in ("seconds", EVALUATION):
                sign = -1 if row["metric"] == EVALUATION else 1
                rounds[number] = rounds.get(number, 0.0) + sign * float(row["value"])
    return list(rounds.values())


EVALUATION = "evaluate_seconds"


def on_ray(flat: Mapping[str, Any]) -> Path:
    """Execute a run whose clients train in several processes that share the GPU."""
    from fairflower.engines.launch import launch
    from fairflower.plans.devices import place_clients

    config = RunConfig.from_flat(dict(flat) | {"engine": "ray"})
    num_clients = len(prepare(config.data).clients)
    placed = place_clients([config], num_clients)
    folders: list[Path] = []
    launch(
        lambda grid: folders.append(Session(grid, config, Console(quiet=True)).run()),
        placed.config,
        num_clients,
        placed.num_gpus,
    )
    return folders[0]


def random_vit(folder: Path) -> Path:
    """Return a file with random weights of ViT-B/16: times do not depend on the values."""
    from torchvision.models import vit_b_16

    path = folder / "vit_b_16.pth"
    if not path.exists():
        torch.manual_seed(0)
        part = path.with_suffix(".part")
        torch.save(vit_b_16(weights=None).state_dict(), part)
        part.replace(path)
    return path


# --- the papers' size -------------------------------------------------------------------


def papers(name: str, device: str, folder: Path, quick: bool, until: float) -> Row:
    """Train a method as in the papers, up to the time limit; a later call resumes the run."""
    data, _, method = name.partition(": ")
    flat = dict(read_toml(EXPERIMENTS / PAPERS[data]))
    if method != "fedheal":
        flat = {key: value for key, value in flat.items() if not key.startswith("strategy.")}
    flat |= {"strategy.name": method, "train.device": device, "engine": "inline"}
    flat |= {"output-dir": str(folder / "runs"), "run-name": f"{data}-{method}"}
    flat["checkpoint.every"] = 5
    if data == "office-caltech" and method == "fedequilibria":
        flat |= {"strategy.t": 0.3}
    if quick:
        flat |= {**SYNTHETIC, "num-server-rounds": 2}
        flat |= {"data.examples-per-client": 4, "data.test-examples": 20}
        flat |= {"data.clients-per-domain": 1, "data.image-size": 16}
        flat |= {"train.local-epochs": 1, "checkpoint.every": 1}
    elif not os.environ.get("FAIRFLOWER_DATA"):
        return {"left_out": "FAIRFLOWER_DATA names no folder with the data"}
    place = folder / "runs" / f"{data}-{method}"
    config = resumed_config(place, {}) if place.exists() else RunConfig.from_flat(flat)
    try:
        federation = prepare(config.data)
    except UserError as error:
        return {"left_out": str(error)}
    begin, done = time.monotonic(), []

    def on_round(server_round: int, metrics: Mapping[str, float]) -> bool:
        done.append(server_round)
        pace = (time.monotonic() - begin) / len(done)
        return time.time() + 2 * pace > until and server_round < config.num_server_rounds

    session(config, on_round=on_round).run()
    stand_ins = [source for source in federation.sources if "stand-in" in str(source)]
    return {
        "rounds": done[-1],
        "unfinished": done[-1] < config.num_server_rounds,
        "of_rounds": config.num_server_rounds,
        "seconds": (time.monotonic() - begin) / len(done),
        "accuracy": accuracies(place),
        "stand_in": bool(stand_ins),
    }


def accuracies(folder: Path, window: int = 5) -> dict[str, float]:
    """Return each domain's accuracy in percent, as mean over the last ``window`` evaluations."""
    values: dict[str, dict[int, float]] = {}
    with (folder / "history.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["level"] == "domain" and row["metric"] == "accuracy" and row["round"] != "0":
                with contextlib.suppress(ValueError):
                    values.setdefault(row["name"], {})[int(row["round"])] = float(row["value"])
    return {
        domain: 100 * statistics.fmean([rounds[r] for r in sorted(rounds)[-window:]])
        for domain, rounds in values.items()
    }
