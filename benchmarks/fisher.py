"""Time and memory of a Fisher diagonal, relative to one local epoch of training on the same images.

    python benchmarks/fisher.py            # a few minutes
    python benchmarks/fisher.py --quick

One client, one thread, color images of 32x32 pixels, batches of 64. `epoch` is one local epoch of
plain SGD, the unit. `fisher` and `gradient` are measurements that strategies request
(fairflower/training/measurements.py). Two other ways to compute the same Fisher diagonal are
measured for comparison: `torch.func` alone (vmap of grad, the fallback for models with layers other
than convolutions, linear layers, batch and group norms), and a loop over samples.

Times are CPU seconds of this process; all rows are measured in turn in every repetition. Ratios
compare minimum with minimum and median with median. The goal for ResNet-10 is a ratio below 2. The
ratio depends on the CPU: the Fisher diagonal reads and writes a square of every parameter's
gradient for each sample, while training accesses the parameters once per batch.

Memory is the peak of a separate process beyond its memory before, as counted by the kernel (Linux
only). `--memory-mb` is the limit passed to `fisher`; its result and, for a moment, five arrays as
large as the model come on top.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest.mock import patch

import torch
from common import described_parser, log_progress, machine_and_versions, markdown, times_and_ratios
from made_up import made_up_client
from torch import Tensor
from torch.nn import functional as F

from fairflower.clients import SGD, fisher_diagonal, mean_gradient
from fairflower.config import TrainConfig
from fairflower.training.modes import eval_mode

RESIDENT = Path("/proc/self/status")


def make_trainer(model: str, images: int) -> SGD:
    """Return the trainer of a client with random images that are cropped as Digits are."""
    network, data = made_up_client(model, images)
    settings = TrainConfig(local_epochs=1, batch_size=64, lr=0.001)
    trainer = SGD(network, data, settings, client_id=0, seed=0)
    assert len(trainer.train_examples) == images  # also moves them to the device
    return trainer


def epoch(trainer: SGD, memory_mb: float) -> None:
    trainer.train(1)


def fisher(trainer: SGD, memory_mb: float) -> None:
    fisher_diagonal(trainer.model, trainer.train_examples, memory_mb=memory_mb)


def fisher_by_torch_func(trainer: SGD, memory_mb: float) -> None:
    with patch("fairflower.training.fisher._is_exact_by_layer", lambda *_: False):
        fisher(trainer, memory_mb)


def fisher_by_loop(trainer: SGD, memory_mb: float) -> None:
    parameters = list(trainer.model.parameters())
    total: list[Tensor] = [torch.zeros_like(p) for p in parameters]
    with eval_mode(trainer.model):
        for x, y in trainer.train_examples.eval_batches(1):
            loss = F.cross_entropy(trainer.model(x), y)
            for square, gradient in zip(total, torch.autograd.grad(loss, parameters), strict=True):
                square.addcmul_(gradient, gradient)


def gradient(trainer: SGD, memory_mb: float) -> None:
    mean_gradient(trainer.model, trainer.train_examples)


ROWS: dict[str, Callable[[SGD, float], None]] = {
    "epoch": epoch,
    "fisher": fisher,
    "gradient": gradient,
    "fisher by torch.func": fisher_by_torch_func,
    "fisher by a loop": fisher_by_loop,
}


def measure_times(model: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the CPU seconds of every row, measured in turn."""
    trainer = make_trainer(model, options.images)
    seconds: dict[str, list[float]] = {name: [] for name in ROWS}
    for repetition in range(options.repetitions + 1):
        log_progress(f"{model}: repetition {repetition} of {options.repetitions}")
        for name, run in ROWS.items():
            begin = time.process_time()
            run(trainer, options.memory_mb)
            if repetition:  # the first repetition is a warm-up
                seconds[name].append(time.process_time() - begin)
    return seconds


def measure_memory(model: str, name: str, images: int, memory_mb: float) -> float:
    """Return the peak of additional memory in megabytes; call it in a fresh process."""
    torch.set_num_threads(1)
    trainer = make_trainer(model, images)
    gc.collect()
    if not RESIDENT.exists():
        return math.nan
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _resident_mb("VmRSS")
    ROWS[name](trainer, memory_mb)
    return _resident_mb("VmHWM") - before


def parse_options() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("--models", default="resnet10,cnn", help="default: resnet10,cnn")
    parser.add_argument(
        "--images", type=int, default=256, help="images of the client (default: 256)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=7, help="repetitions per row (default: 7)"
    )
    parser.add_argument(
        "--memory-mb", type=float, default=512, help="memory limit of `fisher` (default: 512)"
    )
    parser.add_argument("--quick", action="store_true", help="128 images, 2 repetitions")
    options = parser.parse_args()
    if options.quick:
        options.images, options.repetitions = 128, 2
    return options


def main() -> None:
    options = parse_options()
    torch.set_num_threads(1)
    print(f"\n{options.images} images, batches of 64, 1 thread, {options.memory_mb:g} MB")
    print(machine_and_versions("torch"))
    # glibc in the spawned processes then returns every freed array to the kernel, so that all
    # allocations count.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    spawn = multiprocessing.get_context("spawn")
    for model in options.models.split(","):
        seconds = measure_times(model, options)
        rows = []
        with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as fresh:
            for name, measured in seconds.items():
                log_progress(f"memory of {model}: {name}")
                task = fresh.submit(measure_memory, model, name, options.images, options.memory_mb)
                times = times_and_ratios(measured, seconds["epoch"])
                rows.append([name, *times, f"{task.result():.0f}"])
        print(f"\n{model}\n")
        header = ["", "min s", "median s", "x epoch (min)", "x epoch (median)", "peak MB"]
        print(markdown(header, rows), flush=True)


def _resident_mb(field: str) -> float:
    lines = RESIDENT.read_text().splitlines()
    return next(float(line.split()[1]) / 2**10 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
