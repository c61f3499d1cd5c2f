"""Time and memory of one merge, over the least that a merge could take.

Twenty clients answer with a ResNet-10 of 4,903,242 parameters, and the server
makes one model of it. Whatever the rule, it has to read every update once, so the
floor is one float32 matrix-vector product, weights (K,) times updates (K, D), by
NumPy's BLAS with all its threads, over updates that lie ready in one block of
memory. It is timed right before every other measurement.

    python benchmarks/merge.py            # two minutes or so
    python benchmarks/merge.py --quick

How to read it. `merge` is the rule alone, from the clients' arrays to the new ones.
`aggregate_train` is what a server calls: Flower messages in, an ArrayRecord out, with
unpacking, the check of every array (shape, dtype, NaN) and packing. FedHEAL is past
its first round, so its tables exist. Ratios compare min with min and median with
median; on a busy machine believe the first. Absolute seconds belong to the machine.

Memory is that of a process of its own for each row, in which three rounds are merged:
the most that it held beyond what it held with the replies alone. `resident` is the
kernel's count (Linux), `allocated` that of NumPy and Python (tracemalloc); both
include the result and what the rule keeps for its next round, which is also shown
apart. A cohort is the size of the replies themselves.
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
from common import described_parser, machine_facts, markdown, say, times_and_ratios, version_facts
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from threadpoolctl import threadpool_info

from fairflower.aggregation.cohort import Arrays
from fairflower.aggregation.records import decode_record, is_buffer
from fairflower.flower_compat import set_message_id, set_task_identity
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
    """What a cohort of clients sends back: always the same models, as Flower packs them.

    The global model that they were given differs from round to round instead, so that
    updates change their signs as in training, without a second cohort in memory.
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
        """Size of the replies."""
        arrays = [reply.array_records["arrays"] for reply in self.replies]
        return sum(len(array.data) for record in arrays for array in record.values())

    def cohort(self, server_round: int) -> Cohort:
        """A round's replies as a merge sees them: views of the messages' bytes."""
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
        """A round's replies to what ``strategy`` asks."""
        strategy.enroll({k: FIRST_NODE + k for k in range(len(self.replies))}, seed=0)
        sent, no_grid = self._sent(server_round), None
        asked = strategy.configure_train(server_round, sent, ConfigRecord(), no_grid)  # type: ignore[arg-type]
        messages = []
        for i, message in enumerate(asked):
            set_message_id(message, f"{server_round}-{i}")
            content = self.replies[message.metadata.dst_node_id - FIRST_NODE]
            messages.append(Message(content, reply_to=message))
        return messages

    def _sent(self, server_round: int) -> ArrayRecord:
        return self.sent[server_round % len(self.sent)]


class Server:
    """A strategy, asked for one round after another."""

    def __init__(self, method: str, answers: Answers) -> None:
        self.answers = answers
        self.strategy = METHODS[method]() if method in METHODS else FedAvg()
        self.flower = flower.FedAvg() if method == FLOWER else None
        self.round = 0

    def run(self, step: str) -> float:
        """Seconds of the next round's ``merge`` or ``aggregate_train``."""
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
        """Seconds of the product."""
        return _seconds(np.dot, self.weights, self.updates, self.step)


def measure_times(answers: Answers, repetitions: int) -> dict[str, list[float]]:
    """Seconds of every step of every method and of the floor, interleaved."""
    floor = Floor(answers)
    servers = {method: Server(method, answers) for method in (*METHODS, FLOWER)}
    seconds: dict[str, list[float]] = {"floor": []}
    for repetition in range(repetitions + 1):
        say(f"repetition {repetition} of {repetitions}" if repetition else "warming up")
        for method, server in servers.items():
            for step in STEPS if method in METHODS else STEPS[1:]:
                measured = {"floor": floor.run(), f"{method}: {step}": server.run(step)}
                if repetition:
                    for name, value in measured.items():
                        seconds.setdefault(name, []).append(value)
    return seconds


def measure_memory(answers: Answers, method: str, step: str) -> dict[str, float]:
    """Bytes beyond those of the replies, over three rounds, in this fresh process."""
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
    """Run ``measure_memory`` in a process that has done nothing else."""
    say(f"memory of {method}: {step}")
    command = [sys.executable, str(Path(__file__).absolute()), "--memory-of", method, step]
    command += ["--model", options.model, "--clients", str(options.clients)]
    # glibc then gives every freed array back at once, and reuses none unseen.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def parse_options() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=20, help="per step (default: 20)")
    parser.add_argument("--quick", action="store_true", help="3 repetitions")
    parser.add_argument("--clients", type=int, default=20, help="in the cohort (default: 20)")
    parser.add_argument("--model", default="resnet10", help="whose arrays (default: resnet10)")
    parser.add_argument("--memory-of", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.repetitions = 3
    return options


def main() -> None:
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
    header = ["memory", "resident MB", "allocated MB", "of it kept MB", "cohorts"]
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
    """The model after made-up training: every real number moved a little."""
    return {
        name: array + np.float32(0.01) * random.standard_normal(array.shape, np.float32)
        if array.dtype.kind == "f"
        else array + 10
        for name, array in start.items()
    }


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def _reset_resident_peak() -> None:
    """Let the kernel forget what this process held before (Linux only)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        say("This system cannot say how much memory was resident at most; see `allocated`.")


def _status(field: str) -> float:
    """A size in bytes from /proc/self/status; NaN where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith(field))


if __name__ == "__main__":
    main()
