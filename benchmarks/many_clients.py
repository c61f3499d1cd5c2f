"""Measure what a client costs that is hardly ever sampled, with up to 100,000 clients.

    python benchmarks/many_clients.py --pfl /path/to/an/environment/bin/python

The goals are for 100,000 clients on two cores: prepared and two rounds in 4 minutes, 1.5 GB of
memory, and at most 2 ms for one more client.

The data are four domains of random gray images with 16x16 pixels, 4 training images per client and
400 test images per domain. `fairflower run` divides and writes the data, then trains 100 clients
in each of two rounds (FedHEAL, `cnn`, ray engine with two workers), and the server tests the model.
Every run is a process of its own, with an empty home folder. `pfl` is pfl-research's simulator on
the same images (`peer_pfl.py`): federated averaging with as many clients and steps, in one process,
without tests and run folder; its data are already divided and in one file. It is skipped without
`--pfl` (`pip install "pfl[pytorch]" safetensors` in that environment).

Columns: `wall s` is a command's whole time with all imports, `CPU s` the processor time of all its
processes (user and system; other work on the machine changes it less), and `MB` the peak of their
memory together, sampled twice a second (proportional set size: shared pages count once). Ray's own
processes are included. `ms a client` compares a row with the first: seconds for one more client.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import ray  # noqa: F401  # brings psutil with it
from common import described_parser, log_progress, machine_and_versions, markdown
from peer_task import Task

# isort: split
import psutil

from fairflower.config import RunConfig

DOMAINS, IMAGES, TESTS, SAMPLED = 4, 4, 400, 100


class Cost(NamedTuple):
    """What a command needs: seconds, processor seconds and MB of all its processes."""

    wall: float
    cpu: float
    memory: float


def write_data(folder: Path, clients: int) -> None:
    """Write the domains as npz files, with `IMAGES` training images per client."""
    for domain in range(DOMAINS):
        draws, arrays = np.random.default_rng(domain), {}
        for split, count in (("train", IMAGES * clients // DOMAINS), ("test", TESTS)):
            arrays[f"x_{split}"] = draws.integers(0, 256, (count, 16, 16), np.uint8)
            arrays[f"y_{split}"] = np.arange(count) % 10
        np.savez(folder / f"{domain}.npz", **arrays)


def settings(folder: Path, clients: int) -> dict[str, Any]:
    """Return the run config for a number of clients."""
    return {
        "engine": "ray",
        "workers": 2,
        "strategy.name": "fedheal",
        "model.name": "cnn",
        "train.device": "cpu",
        "data.name": "npz",
        "data.dir": str(folder),
        "data.clients-per-domain": clients // DOMAINS,
        "data.examples-per-client": IMAGES,
        "fraction-train": SAMPLED / clients,
        "num-server-rounds": 2,
        "output-dir": str(folder),
        "run-name": "run",
    }


def cost(command: list[str], folder: Path) -> Cost:
    """Execute a command and return what it needed."""
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])])
    # Ray creates sockets below this folder, whose paths must be short.
    env = {**os.environ, "FAIRFLOWER_HOME": str(folder), "RAY_TMPDIR": str(folder)}
    env |= {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    begin, memory, seconds = time.monotonic(), 0.0, dict[int, float]()
    with (folder / "output.txt").open("w+") as output:
        process = psutil.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        while process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                together = 0.0
                for each in (process, *process.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess):
                        used = each.cpu_times()
                        seconds[each.pid] = used.user + used.system
                        together += each.memory_full_info().pss / 1e6
                memory = max(memory, together)
            time.sleep(0.5)
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read()[-3000:]}")
    return Cost(time.monotonic() - begin, sum(seconds.values()), memory)


def measure(clients: int, pfl: str) -> list[Cost]:
    """Return what fairflower needs and, given the Python of its environment, pfl."""
    with tempfile.TemporaryDirectory(prefix="ff-", dir="/tmp") as scratch:
        folder = Path(scratch)
        write_data(folder, clients)
        flat = settings(folder, clients)
        pairs = [f"--set={key}={value}" for key, value in flat.items()]
        costs = [cost([sys.executable, "-m", "fairflower.cli", "run", *pairs], folder)]
        if pfl:
            os.environ["FAIRFLOWER_HOME"] = scratch
            Task.write(RunConfig.from_flat(flat), folder)
            costs.append(cost([pfl, str(Path(__file__).parent / "peer_pfl.py"), scratch], folder))
        return costs


def row(clients: int, costs: list[Cost], first: tuple[int, list[Cost]]) -> list[str]:
    """Return the cells for a number of clients; ``first`` are those of the first row."""
    cells = [f"{clients:,}"]
    for now, before in zip(costs, first[1], strict=True):
        more = clients - first[0]
        each = f"{1e3 * (now.wall - before.wall) / more:.2f}" if more else ""
        each_cpu = f"{1e3 * (now.cpu - before.cpu) / more:.2f}" if more else ""
        cells += [f"{now.wall:.1f}", each, f"{now.cpu:.1f}", each_cpu, f"{now.memory:.0f}"]
    return cells


def main() -> None:
    """Measure each number of clients and print a table."""
    parser = described_parser(__doc__)
    parser.add_argument("--clients", default="1000,10000,100000", help="numbers of clients")
    parser.add_argument("--pfl", default="", help="Python of an environment with pfl")
    options = parser.parse_args()
    print(f"\n{machine_and_versions('torch', 'flwr', 'ray', 'numpy')}\n")
    names = ["fairflower", *(["pfl"] if options.pfl else [])]
    header = ["clients"]
    for name in names:
        header += [f"{name} wall s", "ms a client", "CPU s", "ms a client", "MB"]
    table: list[list[str]] = []
    first: tuple[int, list[Cost]] | None = None
    for clients in map(int, options.clients.split(",")):
        log_progress(f"{clients} clients")
        costs = measure(clients, options.pfl)
        first = first or (clients, costs)
        table.append(row(clients, costs, first))
        log_progress(" | ".join(table[-1]))
    print(markdown(header, table), flush=True)


if __name__ == "__main__":
    main()
