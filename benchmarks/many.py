"""Time and memory of rounds with many clients: linear in them, and flat.

    python benchmarks/many.py                     # ten minutes or so
    python benchmarks/many.py --cases resnet10 --clients 200 --store 1000
    python benchmarks/many.py --cases messages    # 51 rounds: does the server's memory grow?

Every case is `fairflower run` in a process of its own on the ray engine, on images drawn at
random, a few for each client: what is measured is the cost of a client, not of its training.
The model is tested at the end alone.

How to read it. `round` is the median of all rounds but the first, `ms a client` that over the
clients. Memory is the most that a process had, sampled four times a second, in MB of its own
(anonymous) pages: of the `server` until the `second` round had ended and until the `last` had,
which has the test, and of the largest of the workers. A second table has the server's in single
rounds. Apart from that, `store` is what Ray's object store, which holds the clients' models of a
round, has ever filled of the shared memory, and `disk` of the disk; `--store` makes it smaller
than it would be. In the case `messages` clients do not train: they return the model they received.
"""

from __future__ import annotations

import csv
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import ray  # noqa: F401  # brings psutil with it
from common import described_parser, machine_facts, markdown, say, version_facts

# isort: split
import psutil

IMAGES = 8  # of a client
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    # settings, side of an image, numbers of clients
    "cnn": ({"num-server-rounds": 10}, 16, "250,500,1000"),
    "resnet10": ({"num-server-rounds": 4, "model.name": "resnet10"}, 32, "50,100,200"),
    "messages": (
        {"num-server-rounds": 51, "model.name": "resnet10", "train.local-epochs": 0},
        32,
        "200",
    ),
}
BY_DEFAULT = "cnn,resnet10"
MEMORY_AFTER = (2, 5, 10, 15, 20, 25, 50)


@dataclass
class Peaks:
    """The most memory, in MB: of the server by round, and of all else."""

    server: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    worker: float = 0
    store: float = 0
    disk: float = 0


def write_data(folder: Path, clients: int, side: int) -> None:
    """Leave an npz domain of just enough images, drawn at random."""
    draws = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", IMAGES * clients), ("test", clients)):
        arrays[f"x_{split}"] = draws.integers(0, 256, (count, side, side), np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 10
    np.savez(folder / "noise.npz", **arrays)


def settings(case: str, clients: int, folder: Path) -> dict[str, Any]:
    return {
        "engine": "ray",
        "strategy.name": "uniform",
        "data.name": "npz",
        "data.dir": folder,
        "data.clients-per-domain": clients,
        "data.examples-per-client": IMAGES,
        "train.local-epochs": 1,
        "evaluate.every": 1000,
        "evaluate.batch-size": 50,  # for testing not to take more memory with more clients
        "output-dir": folder,
        "run-name": "run",
        **CASES[case][0],
    }


def run(case: str, clients: int, store: int) -> tuple[list[dict[str, float]], Peaks]:
    """Seconds of each round, and memory."""
    # Paths of sockets below it must be short.
    with tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp") as scratch:
        folder = Path(scratch)
        write_data(folder, clients, CASES[case][1])
        pairs = [f"--set={key}={value}" for key, value in settings(case, clients, folder).items()]
        env = {**environ, "FAIRFLOWER_HOME": scratch, "RAY_TMPDIR": scratch}
        if store:
            env["RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"] = str(store * 2**20)
        with (folder / "output.txt").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "fairflower.cli", "run", *pairs],
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            peaks = watch(process, folder)
            if process.wait():
                output.seek(0)
                sys.exit(f"{case} with {clients} clients failed:\n{output.read()[-3000:]}")
        return list(rounds(folder / "run")), peaks


def rounds(run_folder: Path) -> Iterator[dict[str, float]]:
    """What history.csv has so far of each round but 0: name -> seconds."""
    seconds: dict[int, dict[str, float]] = defaultdict(dict)
    with (run_folder / "history.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["level"] == "run" and row["round"] != "0":
                seconds[int(row["round"])][row["metric"]] = float(row["value"])
    yield from seconds.values()


def watch(process: subprocess.Popen[bytes], folder: Path) -> Peaks:
    """Look at the memory of a run until it ends."""
    peaks, server = Peaks(), psutil.Process(process.pid)
    while process.poll() is None:
        done = 0
        with suppress(FileNotFoundError):
            done = len(list(rounds(folder / "run")))
        with suppress(psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            peaks.server[done] = max(peaks.server[done], megabytes(process.pid, "RssAnon"))
            for child in server.children(recursive=True):
                name = child.name()
                if name.startswith("ray::"):
                    peaks.worker = max(peaks.worker, megabytes(child.pid, "RssAnon"))
                elif name == "raylet":
                    shared, disk = stored(child.pid)
                    peaks.store = max(peaks.store, shared)
                    spilled = folder.glob("ray/session_*/ray_spilled_objects_*/*")
                    disk += sum(file.stat().st_size for file in spilled) / 2**20
                    peaks.disk = max(peaks.disk, disk)
        time.sleep(0.25)
    return peaks


def megabytes(pid: int, kind: str) -> float:
    """Of a process's pages, by the kernel's count."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = (int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))
    return next(found, 0)  # a process that has ended has none


def stored(raylet: int) -> tuple[float, float]:
    """What its open files of objects, which have no name any more, fill of memory and disk."""
    filled = {True: 0.0, False: 0.0}
    for file in Path(f"/proc/{raylet}/fd").iterdir():
        with suppress(OSError):
            place = str(file.readlink())
            if "plasma" in place and place.endswith("(deleted)"):
                filled[place.startswith("/dev/shm")] += file.stat().st_blocks * 512 / 2**20
    return filled[True], filled[False]


def row(clients: int, seconds: list[dict[str, float]], peaks: Peaks) -> list[str]:
    whole = statistics.median(s["seconds"] - s.get("evaluate_seconds", 0) for s in seconds[1:])
    merge = statistics.median(s["merge_seconds"] for s in seconds[1:])
    last = len(seconds)
    until_second = max(mb for done, mb in peaks.server.items() if done < 2)
    until_last = max(mb for done, mb in peaks.server.items() if done < last)
    return [
        str(clients),
        str(last),
        f"{whole:.2f}",
        f"{1000 * whole / clients:.1f}",
        f"{merge:.2f}",
        *(f"{mb:.0f}" for mb in (until_second, until_last, peaks.worker, peaks.store, peaks.disk)),
    ]


def server_memory(peaks: Peaks, server_round: int) -> str:
    """MB in a round; "" if there was none."""
    megabytes = peaks.server.get(server_round - 1)
    return "" if megabytes is None else f"{megabytes:.0f}"


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--cases", default=BY_DEFAULT, help=f"of {', '.join(CASES)}")
    parser.add_argument("--clients", help="numbers of clients, comma-separated")
    parser.add_argument("--rounds", type=int, help="of each run (default: the case's)")
    parser.add_argument("--store", type=int, default=0, help="at most so many MB of object store")
    options = parser.parse_args()
    print(f"\n{machine_facts()}\n{version_facts('torch', 'flwr', 'ray', 'numpy')}")
    header = ["clients", "rounds", "round s", "ms a client", "merge s", "server MB: second"]
    header += ["last", "worker MB", "store MB", "disk MB"]
    memory_header = ["clients", *(f"round {r}" for r in MEMORY_AFTER)]
    for case in options.cases.split(","):
        if options.rounds:
            CASES[case][0]["num-server-rounds"] = options.rounds
        table, memory = [], []
        for clients in map(int, (options.clients or CASES[case][2]).split(",")):
            say(f"{case}, {clients} clients")
            seconds, peaks = run(case, clients, options.store)
            table.append(row(clients, seconds, peaks))
            memory.append([str(clients), *(server_memory(peaks, r) for r in MEMORY_AFTER)])
            say(" | ".join(table[-1]))
        print(f"\n{case}, {IMAGES} images a client\n\n{markdown(header, table)}")
        print(f"\nServer MB, at most, in a round\n\n{markdown(memory_header, memory)}", flush=True)


if __name__ == "__main__":
    main()
