"""Time and memory of one merge, relative to the least possible cost of a merge.

Twenty clients reply with a ResNet-10 of 4,903,242 parameters, and the server merges the replies
into one model. Every strategy has to read each update at least once. The floor is therefore one
float32 matrix-vector product, weights (K,) times updates (K, D), by NumPy's BLAS with all its
threads, over updates in one contiguous block of memory. It is timed right before every other
measurement.

    python benchmarks/merge.py            # about two minutes
    python benchmarks/merge.py --quick

Rows: `merge` is the strategy alone, from the clients' arrays to the new ones. `aggregate_train` is
the method that a server calls, from Flower messages to an ArrayRecord; it includes unpacking, the
check of every array (shape, dtype, NaN) and packing. FedHEAL has merged a round before, so that its
tables exist. Ratios compare minimum with minimum and median with median; on a busy machine, rely on
the ratio of minima. Absolute seconds depend on the machine.

Memory is measured in a separate process for each row, which merges three rounds. It is the peak
beyond the memory of the replies alone: `resident` is the kernel's count (Linux), `allocated` that
of NumPy and Python (tracemalloc). Both include the result and the strategy's state for its next
round, which is also shown separately. The unit `cohorts` is the size of the replies.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    described_parser,
    log_progress,
    machine_facts,
    markdown,
    times_and_ratios,
    version_facts,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from threadpoolctl import threadpool_info

from fairflower.aggregation.cohort import Arrays
from fairflower.aggregation.records import decode_record, is_buffer
from fairflower.flower_compat import set_ids, set_task_identity
from fairflower.models import build
from fairflower.strategies import Cohort, FairStrategy, FedAvg, FedHEAL, Uniform

METHODS: dict[str, Callable[[], FairStrategy]] = {
    "FedAvg": FedAvg,
    "Uniform": Uniform,
    "FedHEAL (paper)": lambda: FedHEAL(variant="paper"),
    "FedHEAL (released)": lambda: FedHEAL(variant="released"),
}
FLOWER = "Flower's FedAvg"
STEPS = ("merge", "aggregate_train")
FIRST_NODE = 1000
MB = 1e6


class Answers:
    """Replies of a cohort of clients as Flower messages, with the same models in every round.

    The global model alternates between rounds instead, so that updates change their signs as in
    training, without a second cohort in memory.
    """

    def __init__(self, model: str, clients: int) -> None:
        random = np.random.default_rng(0)
        state = build(model, num_classes=10, shape=(3, 32, 32), seed=0).state_dict()
        start = {name: tensor.numpy() for name, tensor in state.items()}
        self.sent = [_record(_nearby(start, random)) for _ in range(3)]
        self.replies = [
            RecordDict(
                {
                    "arrays": _record(_nearby(start, random)),
                    "metrics": MetricRecord({"num-examples": 100 + k, "client-id": k}),
                }
            )
            for k in range(clients)
        ]

    @property
    def num_bytes(self) -> int:
        """Size of the replies in bytes."""
        arrays = [reply.array_records["arrays"] for reply in self.replies]
        return sum(len(array.data) for record in arrays for array in record.values())

    def cohort(self, server_round: int) -> Cohort:
        """Return a round's replies as a cohort, whose arrays are views of the messages' bytes."""
        received = decode_record(self._sent(server_round))
        returned = [decode_record(reply.array_records["arrays"]) for reply in self.replies]
        return Cohort(
            server_round=server_round,
            client_ids=tuple(range(len(returned))),
            num_examples=100 + np.arange(len(returned), dtype=np.float64),
            received=received,
            returned=tuple(returned),
            buffers=frozenset(name for name, array in received.items() if is_buffer(name, array)),
        )

    def messages(self, server_round: int, strategy: FairStrategy) -> list[Message]:
        """Return a round's replies to the messages of ``strategy``."""
        strategy.enroll({k: FIRST_NODE + k for k in range(len(self.replies))}, seed=0)
        sent, no_grid = self._sent(server_round), None
        requests = strategy.configure_train(server_round, sent, ConfigRecord(), no_grid)  # type: ignore[arg-type]
        messages = []
        for i, message in enumerate(requests):
            set_ids(message, message_id=f"{server_round}-{i}")
            content = self.replies[message.metadata.dst_node_id - FIRST_NODE]
            messages.append(Message(content, reply_to=message))
        return messages

    def _sent(self, server_round: int) -> ArrayRecord:
        return self.sent[server_round % len(self.sent)]


class Server:
    """A strategy that merges one round after another."""

    def __init__(self, method: str, answers: Answers) -> None:
        self.answers = answers
        self.strategy = METHODS[method]() if method in METHODS else FedAvg()
        self.flower = flower.FedAvg() if method == FLOWER else None
        self.round = 0

    def run(self, step: str) -> float:
        """Return the seconds of the next round's ``merge`` or ``aggregate_train``."""
        self.round += 1
        if step == "merge":
            return _seconds(self.strategy.merge, self.answers.cohort(self.round))
        messages = self.answers.messages(self.round, self.strategy)
        aggregate = (self.flower or self.strategy).aggregate_train
        return _seconds(aggregate, self.round, messages)


class Floor:
    """One matrix-vector product over the stacked updates."""

    def __init__(self, answers: Answers) -> None:
        cohort = answers.cohort(1)
        size = sum(cohort.received[name].size for name in cohort.floats)
        self.updates = np.empty((len(cohort), size), np.float32)
        for row, arrays in zip(self.updates, cohort.returned, strict=True):
            flat = [(arrays[n] - cohort.received[n]).reshape(-1) for n in cohort.floats]
            np.concatenate(flat, out=row)
        self.weights = cohort.sample_weights.astype(np.float32)
        self.step = np.empty(self.updates.shape[1], np.float32)

    def run(self) -> float:
        """Return the seconds of the product."""
        return _seconds(np.dot, self.weights, self.updates, self.step)


def measure_times(answers: Answers, repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every step of every strategy and of the floor, measured in turn."""
    floor = Floor(answers)
    servers = {method: Server(method, answers) for method in (*METHODS, FLOWER)}
    seconds: dict[str, list[float]] = {"floor": []}
    for repetition in range(repetitions + 1):
        log_progress(f"repetition {repetition} of {repetitions}" if repetition else "warming up")
        for method, server in servers.items():
            for step in STEPS if method in METHODS else STEPS[1:]:
                measured = {"floor": floor.run(), f"{method}: {step}": server.run(step)}
                if repetition:
                    for name, value in measured.items():
                        seconds.setdefault(name, []).append(value)
    return seconds


def measure_memory(answers: Answers, method: str, step: str) -> dict[str, float]:
    """Return the bytes beyond the replies over three rounds; call it in a fresh process."""
    server = Server(method, answers)
    gc.collect()
    tracemalloc.start()
    _reset_resident_peak()
    before = _status("VmRSS")
    for _ in range(3):
        server.run(step)
    resident = _status("VmHWM") - before
    _, allocated = tracemalloc.get_traced_memory()
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    return {"resident": resident, "allocated": allocated, "kept": kept}


def in_fresh_process(options: argparse.Namespace, method: str, step: str) -> dict[str, float]:
    """Run ``measure_memory`` in a new process."""
    log_progress(f"memory of {method}: {step}")
    command = [sys.executable, str(Path(__file__).absolute()), "--memory-of", method, step]
    command += ["--model", options.model, "--clients", str(options.clients)]
    # glibc then returns every freed array to the kernel at once, so that all allocations count.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = described_parser(__doc__)
    parser.add_argument(
        "--repetitions", type=int, default=20, help="repetitions per step (default: 20)"
    )
    parser.add_argument("--quick", action="store_true", help="3 repetitions")
    parser.add_argument(
        "--clients", type=int, default=20, help="clients in the cohort (default: 20)"
    )
    parser.add_argument(
        "--model", default="resnet10", help="model of the replies (default: resnet10)"
    )
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 3
    return options


def main() -> None:
    """Measure times and memory, and print both tables."""
    options = parse_options()
    logging.getLogger("flwr").setLevel(logging.WARNING)
    set_task_identity()
    answers = Answers(options.model, options.clients)
    if options.memory_of:
        print(json.dumps(measure_memory(answers, *options.memory_of)))
        return

    threads = max(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
    print(
        f"\n{options.clients} clients x {options.model}: {answers.num_bytes / MB:.0f} MB of replies"
    )
    print(f"{machine_facts()}; {threads} BLAS threads")
    print(version_facts("numpy", "flwr"), end="\n\n")

    seconds = measure_times(answers, options.repetitions)
    header = ["time", "min s", "median s", "x floor (min)", "x floor (median)"]
    rows = [[name, *times_and_ratios(s, seconds["floor"])] for name, s in seconds.items()]
    print(markdown(header, rows), end="\n\n", flush=True)

    cohort = answers.num_bytes
    del answers
    header = ["memory", "resident MB", "allocated MB", "state MB", "cohorts"]
    rows = []
    for method, step in (name.split(": ") for name in seconds if name != "floor"):
        used = in_fresh_process(options, method, step)
        megabytes = [f"{used[key] / MB:.0f}" for key in ("resident", "allocated", "kept")]
        most = max(used["resident"], used["allocated"])
        rows.append([f"{method}: {step}", *megabytes, f"{most / cohort:.2f}"])
    print(markdown(header, rows))


def _seconds(call: Callable[..., Any], *arguments: Any) -> float:
    begin = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - begin


def _nearby(start: Arrays, random: np.random.Generator) -> Arrays:
    """Return the model after simulated training: floats moved a little, integers raised by 10."""
    return {
        name: array + np.float32(0.01) * random.standard_normal(array.shape, np.float32)
        if array.dtype.kind == "f"
        else array + 10
        for name, array in start.items()
    }


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def _reset_resident_peak() -> None:
    """Reset the kernel's record of this process's peak memory (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        log_progress("This system does not report peak resident memory; see `allocated`.")


def _status(field: str) -> float:
    """Return a size in bytes from /proc/self/status; NaN on other systems than Linux."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
