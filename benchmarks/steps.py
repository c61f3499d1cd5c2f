"""Measure the cost of ways to train: an epoch of each client, relative to plain SGD.

    python benchmarks/steps.py            # a minute
    python benchmarks/steps.py --quick

One client, one thread, color images of 32x32 pixels, batches of 64, the second round of a run.
`sgd` is the unit. SAM and GSAM compute two gradients per step, so the goal is a ratio near 2: they
add only a few passes over the parameters. `sgd in bf16` sets `train.precision = "bf16"`; whether
bf16 is faster depends on the processor.

Times are CPU seconds of this process; all rows are measured in turn in every repetition. Ratios
compare minimum with minimum and median with median.
"""

from __future__ import annotations

import argparse
import time

import torch
from common import described_parser, log_progress, machine_and_versions, markdown, times_and_ratios
from made_up import made_up_client

from fairflower.clients import Trainer
from fairflower.config import ClientConfig, TrainConfig
from fairflower.training.build import build_trainer
from fairflower.training.modes import flushed_denormals

BF16 = " in bf16"


def make_trainer(name: str, model: str, images: int) -> Trainer:
    """Return the trainer of a client with random images, after a first round."""
    precision = "bf16" if name.endswith(BF16) else "float32"
    network, data = made_up_client(model, images)
    settings = TrainConfig(local_epochs=1, batch_size=64, lr=0.001, precision=precision)
    method = name.removesuffix(BF16)
    trainer = build_trainer(ClientConfig(method), network, data, settings, client_id=0, seed=0)
    trainer.train(1)
    return trainer


def measure(model: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the CPU seconds of every method's epoch, measured in turn."""
    trainers = {name: make_trainer(name, model, options.images) for name in options.clients}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    for repetition in range(1, options.repetitions + 1):
        log_progress(f"{model}: repetition {repetition} of {options.repetitions}")
        for name, trainer in trainers.items():
            begin = time.process_time()
            with flushed_denormals():
                trainer.train(2)
            seconds[name].append(time.process_time() - begin)
    return seconds


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = described_parser(__doc__)
    parser.add_argument("--models", default="cnn,resnet10", help="models (default: cnn,resnet10)")
    parser.add_argument(
        "--clients",
        default="sam,gsam,harmofl",
        help="methods besides sgd (default: sam,gsam,harmofl)",
    )
    parser.add_argument(
        "--images", type=int, default=256, help="images of the client (default: 256)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=9, help="repetitions per row (default: 9)"
    )
    parser.add_argument("--quick", action="store_true", help="128 images, 2 repetitions")
    options = parser.parse_args()
    options.clients = ["sgd", f"sgd{BF16}", *filter(None, options.clients.split(","))]
    if options.quick:
        options.images, options.repetitions = 128, 2
    return options


def main() -> None:
    """Measure the models and print a table for each."""
    options = parse_options()
    torch.set_num_threads(1)
    print(f"\n{options.images} images, batches of 64, 1 thread")
    print(machine_and_versions("torch"))
    for model in options.models.split(","):
        seconds = measure(model, options)
        rows = [[name, *times_and_ratios(times, seconds["sgd"])] for name, times in seconds.items()]
        header = ["", "min s", "median s", "x sgd (min)", "x sgd (median)"]
        print(f"\n{model}\n\n{markdown(header, rows)}", flush=True)


if __name__ == "__main__":
    main()
