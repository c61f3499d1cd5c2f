"""Wall time of a whole round on each engine, relative to a bare PyTorch loop.

The bare loop takes the same SGD steps on the same images, in the same order, with the same crops
and from the same initial weights, and averages the clients' models. It is PyTorch alone: all data
in memory, one model, one thread, no messages, no files. It is a lower bound for an engine, so the
difference is the engine's cost.

    python benchmarks/engine.py            # about half an hour
    python benchmarks/engine.py --quick

Every engine runs as `fairflower run` in its own process, and so does the bare loop. The programs
alternate, repetition by repetition. The first round of each run is not counted.

Columns: `round` is the time between two global models. It consists of the clients' training,
including the messages to and from them (`train`), the merge (`merge`), and writing the run folder
with the model (`write`). The time of evaluation (`evaluate`) is shown separately and is part of no
ratio. Neither is `start`, the time from the command to the first round: imports, Ray, the
registration of the clients. Columns without "min" are medians. An engine with two workers uses two
cores, the bare loop one: the best possible ratio is 0.5. `weights` is the largest difference
between the final model and the bare loop's; times are comparable only between equal models.

The settings are small, so that a round takes seconds. For example, resnet10 trains on 32 images a
client for one epoch; the papers train on hundreds of images for ten epochs, so that a message
costs a hundred times less there, relative to the training.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from common import described_parser, log_progress, machine_and_versions, markdown, times_and_ratios
from safetensors.numpy import load_file

from fairflower.config import RunConfig, TrainConfig
from fairflower.config.text import read_toml

if TYPE_CHECKING:  # only the bare loop's process imports PyTorch
    import torch
    from torch import Tensor
    from torch.nn import Module

    from fairflower.data import Federation

DIGITS_32 = {"data.image-size": 32, "data.test-examples": 100}
CASES: dict[str, dict[str, Any]] = {
    "cnn": {},  # the default run: 16x16 digits
    "cnn-32": {**DIGITS_32},
    "resnet10": {
        **DIGITS_32,
        "model.name": "resnet10",
        "data.examples-per-client": 32,
        "train.batch-size": 32,
        "train.local-epochs": 1,
    },
}
ENGINES: dict[str, dict[str, Any]] = {
    "inline": {"engine": "inline"},
    "ray, 1 worker": {"engine": "ray", "workers": 1},
    "ray, 2 workers": {"engine": "ray", "workers": 2},
    "flower, 2 workers": {"engine": "flower", "workers": 2},
}
BARE = "bare loop"
PARTS = ("train", "merge", "write", "evaluate")


@dataclass
class Outcome:
    """A run's seconds before the first round, seconds of each counted round, and final model."""

    start: float
    rounds: list[float]
    parts: dict[str, list[float]]
    model: dict[str, np.ndarray]


# --- the bare loop ---------------------------------------------------------------------


def bare_loop(config: RunConfig, folder: Path) -> None:
    """Train with PyTorch alone, and write ``rounds.txt`` and the model."""
    import torch
    from safetensors.torch import save_file

    from fairflower.data import prepare
    from fairflower.models import build
    from fairflower.seeds import derive_seed

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    data, train, device = prepare(config.data), config.train, torch.device(config.train.device)
    weights = config.model.weights
    model = build(config.model.name, data.num_classes, data.shape, config.seed, weights).to(device)
    mean, std = (
        torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (data.mean, data.std)
    )
    clients = load_clients(data, device)
    sizes = np.array([len(y) for _, y in clients], float)
    client_weights = (sizes / sizes.sum()).astype(np.float32).tolist()
    local = model.state_dict()
    server = {name: tensor.clone() for name, tensor in local.items()}
    model.train()

    for server_round in range(1, config.num_server_rounds + 1):
        seeds = [
            derive_seed(config.seed, client, server_round, "batches")
            for client in range(len(clients))
        ]
        begin = time.perf_counter()
        step = {name: torch.zeros_like(tensor) for name, tensor in server.items()}
        for (crops, y), weight, seed in zip(clients, client_weights, seeds, strict=True):
            for name, tensor in local.items():
                tensor.copy_(server[name])
            train_client(model, crops, y, seed, train, mean, std)
            for name, tensor in local.items():
                if tensor.is_floating_point():
                    step[name] += (tensor - server[name]) * weight
        for name, tensor in local.items():
            if tensor.is_floating_point():
                server[name] += step[name]
            else:  # BatchNorm's count of batches, equal for all clients
                server[name].copy_(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with (folder / "rounds.txt").open("a", encoding="utf-8") as file:
            print(time.perf_counter() - begin, file=file)
    save_file(server, folder / "model.safetensors")


def load_clients(data: Federation, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return all crops [image, channel, top, left, height, width] and the labels of each client."""
    import torch
    from torch.nn import functional as F

    _, height, width = data.shape
    pad = data.augment.crop_padding
    clients = []
    for client in data.clients:
        x, y = (torch.tensor(a, device=device) for a in data.train(client.client_id))
        crops = F.pad(x, (pad, pad, pad, pad)).unfold(2, height, 1).unfold(3, width, 1)
        clients.append((crops, y))
    return clients


def train_client(
    model: Module,
    crops: Tensor,
    y: Tensor,
    seed: int,
    train: TrainConfig,
    mean: Tensor,
    std: Tensor,
) -> None:
    """Train the model for a client's local epochs, with a random crop of each image per epoch."""
    import torch
    from torch.nn import functional as F

    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=train.lr,
        momentum=train.momentum,
        weight_decay=train.weight_decay,
        fused=True,
    )
    draws = torch.Generator().manual_seed(seed)
    for _ in range(train.local_epochs):
        order = torch.randperm(len(y), generator=draws)
        top, left = torch.randint(crops.shape[2], (2, len(y)), generator=draws)
        torch.rand(len(y), generator=draws)  # draws for flips, which digits do not use
        on_device = (draw.to(y.device) for draw in (order, top, left))
        batches = (torch.split(draw, train.batch_size) for draw in on_device)
        for index, i, j in zip(*batches, strict=True):
            batch = crops[index, :, i, j].to(torch.float32).div_(255).sub_(mean).div_(std)
            batch = batch.contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            F.cross_entropy(model(batch), y[index]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def time_bare_loop(config: RunConfig, folder: Path) -> Outcome:
    """Run the bare loop in a fresh process."""
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(config.to_toml(), encoding="utf-8")
    begin = time.time()
    _execute([str(Path(__file__).absolute()), "--bare-loop-in", str(folder)])
    lines = (folder / "rounds.txt").read_text().split()
    seconds = [float(line) for line in lines]
    start = (folder / "rounds.txt").stat().st_mtime - begin - sum(seconds)
    return Outcome(start, seconds[1:], {}, load_file(folder / "model.safetensors"))


# --- the engines -----------------------------------------------------------------------


def time_engine(config: RunConfig, folder: Path) -> Outcome:
    """Run ``fairflower run`` in a fresh process and read its run folder."""
    folder.mkdir(parents=True)
    file = folder / "settings.toml"
    file.write_text(config.to_toml(), encoding="utf-8")
    begin = time.time()
    _execute(["-m", "fairflower.cli", "run", "--config", str(file), "--output-dir", str(folder)])
    run = folder / config.run_name
    start = (run / "config.toml").stat().st_mtime - begin  # written as round 0 begins
    seconds: dict[int, dict[str, float]] = defaultdict(dict)
    with (run / "history.csv").open(encoding="utf-8") as history:
        for row in csv.DictReader(history):
            if row["level"] == "run" and int(row["round"]) > 1:
                seconds[int(row["round"])][row["metric"]] = float(row["value"])
    parts: dict[str, list[float]] = defaultdict(list)
    rounds = []
    for measured in seconds.values():
        train, merge = measured["train_seconds"], measured["merge_seconds"]
        evaluate = measured["evaluate_seconds"]
        rounds.append(measured["seconds"] - evaluate)
        for part, value in zip(
            PARTS, (train, merge, rounds[-1] - train - merge, evaluate), strict=True
        ):
            parts[part].append(value)
    return Outcome(start, rounds, parts, load_file(run / "model.safetensors"))


def _execute(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} failed:\n{done.stdout[-3000:]}")


# --- measuring and printing ------------------------------------------------------------


def measure(case: str, engines: list[str], options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Run the bare loop and each engine in turn, and return the outcomes of all repetitions."""
    outcomes: dict[str, list[Outcome]] = defaultdict(list)
    common = {
        **CASES[case],
        "strategy.name": "fedavg",
        "num-server-rounds": options.rounds + 1,
        "train.device": "cpu",
        "run-name": "run",
    }
    with tempfile.TemporaryDirectory(prefix="fairflower-benchmark-") as scratch:
        os.environ["FAIRFLOWER_HOME"] = scratch
        from fairflower.data import prepare

        prepare(RunConfig.from_flat(common).data)
        for repetition in range(1, options.repetitions + 1):
            for name in (BARE, *engines):
                log_progress(f"{case}, repetition {repetition} of {options.repetitions}: {name}")
                run = time_bare_loop if name == BARE else time_engine
                config = RunConfig.from_flat(common | ENGINES.get(name, {}))
                folder = Path(scratch, f"{repetition}-{name.replace(', ', '-').replace(' ', '-')}")
                outcomes[name].append(run(config, folder))
    return outcomes


def table(outcomes: dict[str, list[Outcome]]) -> str:
    """Return a Markdown table with a row for the bare loop and for each engine."""
    bare = [seconds for outcome in outcomes[BARE] for seconds in outcome.rounds]
    rows = []
    for name, runs in outcomes.items():
        rounds = [seconds for run in runs for seconds in run.rounds]
        parts = [[s for run in runs for s in run.parts.get(part, [])] for part in PARTS]
        rows.append(
            [
                name,
                *times_and_ratios(rounds, bare),
                *(f"{statistics.median(part):.4f}" if part else "" for part in parts),
                f"{statistics.median(run.start for run in runs):.1f}",
                _difference(runs, outcomes[BARE][0].model),
            ]
        )
    header = ["s", "round min", "round", "x bare (min)", "x bare", *PARTS, "start", "weights"]
    return markdown(header, rows)


def _difference(runs: list[Outcome], model: dict[str, np.ndarray]) -> str:
    """Describe the largest difference between the runs' final models and ``model``."""
    if any(run.model.keys() != model.keys() for run in runs):
        return "other arrays"
    largest = max(
        float(np.abs(run.model[name].astype(np.float64) - array).max())
        for run in runs
        for name, array in model.items()
    )
    return "same bits" if largest == 0 else f"{largest:.0e}"


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = described_parser(__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--repetitions", type=int, default=5, help="runs per engine (default: 5)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds per run (default: 5)")
    parser.add_argument("--no-ray", action="store_true", help="only the inline engine")
    parser.add_argument("--quick", action="store_true", help="1 run of 2 counted rounds")
    parser.add_argument("--bare-loop-in", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.rounds = 1, 2
    return options


def main() -> None:
    """Measure the cases and print a table for each."""
    options = parse_options()
    if options.bare_loop_in:
        folder = options.bare_loop_in
        bare_loop(RunConfig.from_flat(read_toml(folder / "config.toml")), folder)
        return

    cases = [case.strip() for case in options.cases.split(",")]
    if unknown := [case for case in cases if case not in CASES]:
        sys.exit(f"Unknown cases {unknown}; there are {', '.join(CASES)}.")
    engines = [name for name in ENGINES if not (options.no_ray and name != "inline")]
    print(f"\n{machine_and_versions('torch', 'flwr', 'ray', 'numpy')}")
    if sys.dont_write_bytecode:
        print("PYTHONDONTWRITEBYTECODE is set: `start` includes compiling every imported module")
    for case in cases:
        outcomes = measure(case, engines, options)
        print(f"\n{case}: {options.repetitions} x {options.rounds} rounds\n", flush=True)
        print(table(outcomes), flush=True)


if __name__ == "__main__":
    main()
