"""Measure time and memory of rounds with increasing numbers of clients.

    python benchmarks/many.py                     # about ten minutes
    python benchmarks/many.py --cases resnet10 --clients 200 --store 1000
    python benchmarks/many.py --cases messages    # 51 rounds: does the server's memory grow?

The goal is that time is linear in the number of clients, and memory constant. Every case is
`fairflower run` on the ray engine, in its own process. Each client has a few random images, so that
the benchmark measures the cost of a client rather than of its training. The model is evaluated at
the end only.

Columns: `round` is the median of all rounds except the first, and `ms a client` is `round` divided
by the number of clients. Memory is the peak of a process's anonymous pages in MB, sampled four
times a second: of the `server` until the end of the `second` round and of the `last` round, which
includes the evaluation; and of the largest worker. A second table shows the server's memory in
single rounds. `store` is the peak of shared memory filled by Ray's object store, which holds the
clients' models of a round, and `disk` the peak of its files on disk; `--store` limits the store's
size. In the case `messages`, clients do not train, but return the received model.
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
from common import described_parser, log_progress, machine_and_versions, markdown

# isort: split
import psutil

IMAGES = 8  # per client
CASES: dict[str, tuple[dict[str, Any], int, str]] = {
    # settings, side of an image in pixels, numbers of clients
    "cnn": ({"num-server-rounds": 10}, 16, "250,500,1000"),
    "resnet10": ({"num-server-rounds": 4, "model.name": "resnet10"}, 32, "50,100,200"),
    "messages": (
        {"num-server-rounds": 51, "model.name": "resnet10", "train.local-epochs": 0},
        32,
        "200",
    ),
}
DEFAULT_CASES = "cnn,resnet10"
MEMORY_AFTER = (2, 5, 10, 15, 20, 25, 50)


@dataclass
class Peaks:
    """Peak memory in MB; the server's by number of finished rounds."""

    server: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    worker: float = 0
    store: float = 0
    disk: float = 0


def write_data(folder: Path, clients: int, side: int) -> None:
    """Write an npz domain with `IMAGES` random training images and a test image per client."""
    draws = np.random.default_rng(0)
    arrays = {}
    for split, count in (("train", IMAGES * clients), ("test", clients)):
        arrays[f"x_{split}"] = draws.integers(0, 256, (count, side, side), np.uint8)
        arrays[f"y_{split}"] = np.arange(count) % 10
    np.savez(folder / "noise.npz", **arrays)


def settings(case: str, clients: int, folder: Path) -> dict[str, Any]:
    """Return the run config of a case with a number of clients."""
    return {
        "engine": "ray",
        "strategy.name": "uniform",
        "data.name": "npz",
        "data.dir": folder,
        "data.clients-per-domain": clients,
        "data.examples-per-client": IMAGES,
        "train.local-epochs": 1,
        "evaluate.every": 1000,
        "evaluate.batch-size": 50,  # bounds the memory of evaluation
        "output-dir": folder,
        "run-name": "run",
        **CASES[case][0],
    }


def run(case: str, clients: int, store: int) -> tuple[list[dict[str, float]], Peaks]:
    """Execute a run; return the seconds of each round, and peak memory."""
    # Ray creates sockets below this folder, whose paths must be short.
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
    """Yield the timings of each finished round except 0, from history.csv: name -> seconds."""
    seconds: dict[int, dict[str, float]] = defaultdict(dict)
    with (run_folder / "history.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["level"] == "run" and row["round"] != "0":
                seconds[int(row["round"])][row["metric"]] = float(row["value"])
    yield from seconds.values()


def watch(process: subprocess.Popen[bytes], folder: Path) -> Peaks:
    """Sample the memory of a run's processes until the run ends."""
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
    """Return the size of a kind of a process's pages, in MB, as counted by the kernel."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = (int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))
    return next(found, 0)  # no such line: the process has ended


def stored(raylet: int) -> tuple[float, float]:
    """Return the MB of shared memory and of disk in a raylet's open, deleted object files."""
    filled = {True: 0.0, False: 0.0}
    for file in Path(f"/proc/{raylet}/fd").iterdir():
        with suppress(OSError):
            place = str(file.readlink())
            if "plasma" in place and place.endswith("(deleted)"):
                filled[place.startswith("/dev/shm")] += file.stat().st_blocks * 512 / 2**20
    return filled[True], filled[False]


def row(clients: int, seconds: list[dict[str, float]], peaks: Peaks) -> list[str]:
    """Return the cells of a run's row."""
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
    """Format the server's peak memory in a round, in MB; "" if the round was not sampled."""
    megabytes = peaks.server.get(server_round - 1)
    return "" if megabytes is None else f"{megabytes:.0f}"


def main() -> None:
    """Measure the cases and print two tables for each."""
    parser = described_parser(__doc__)
    parser.add_argument("--cases", default=DEFAULT_CASES, help=f"of {', '.join(CASES)}")
    parser.add_argument("--clients", help="numbers of clients, comma-separated")
    parser.add_argument("--rounds", type=int, help="rounds of each run (default: the case's)")
    parser.add_argument(
        "--store",
        type=int,
        default=0,
        help="limit of the object store in MB; 0 means Ray's default",
    )
    options = parser.parse_args()
    print(f"\n{machine_and_versions('torch', 'flwr', 'ray', 'numpy')}")
    header = ["clients", "rounds", "round s", "ms a client", "merge s", "server MB: second"]
    header += ["last", "worker MB", "store MB", "disk MB"]
    memory_header = ["clients", *(f"round {r}" for r in MEMORY_AFTER)]
    for case in options.cases.split(","):
        if options.rounds:
            CASES[case][0]["num-server-rounds"] = options.rounds
        table, memory = [], []
        for clients in map(int, (options.clients or CASES[case][2]).split(",")):
            log_progress(f"{case}, {clients} clients")
            seconds, peaks = run(case, clients, options.store)
            table.append(row(clients, seconds, peaks))
            memory.append([str(clients), *(server_memory(peaks, r) for r in MEMORY_AFTER)])
            log_progress(" | ".join(table[-1]))
        print(f"\n{case}, {IMAGES} images a client\n\n{markdown(header, table)}")
        print(f"\nServer MB, at most, in a round\n\n{markdown(memory_header, memory)}", flush=True)


if __name__ == "__main__":
    main()
