"""Seconds per round beside other simulators of federated training, measured in turn.

    python benchmarks/peers.py --pfl /path/to/an/environment/bin/python

Everybody trains the same network from the same weights on the same images with as many steps
of the same SGD, and averages by images; nobody crops, tests or writes but for ours, which
write their run folder. Each program runs in a process of its own, in turn, again and again,
with a first round that is not counted.

- bare loop: PyTorch alone, in one process (`engine.py` says what it does).
- inline, ray, jobs: fairflower's engines; jobs is two inline runs at once, seconds by two.
- flower's engine: fairflower's app on Flower's own simulation engine.
- plain Flower: `peer_flower.py`, an app as Flower's tutorial has it, on Flower's simulation.
- pfl: `peer_pfl.py` on pfl-research's simulator, one process, in an environment of its own
  (`pip install "pfl[pytorch]" torchvision safetensors`); left out without `--pfl`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import described_parser, machine_facts, markdown, say, times_and_ratios, version_facts
from engine import CASES, time_bare_loop, time_engine
from peer_task import Task

from fairflower.config import RunConfig

ALL: dict[str, dict[str, Any]] = {
    **CASES,
    "cnn, 200 clients": {"data.clients-per-domain": 50, "data.examples-per-client": 4},
}
OURS: dict[str, dict[str, Any]] = {
    "inline": {"engine": "inline"},
    "ray, 1 worker": {"engine": "ray", "workers": 1},
    "ray, 2 workers": {"engine": "ray", "workers": 2},
    "jobs, 2 inline": {"engine": "inline"},
    "flower's engine, 2 workers": {"engine": "flower", "workers": 2},
}
BARE, PLAIN, PFL = "bare loop", "plain Flower, 2 workers", "pfl, 1 process"


def rounds_of(name: str, config: RunConfig, folder: Path, pfl: str) -> list[float]:
    """Run one program and return the seconds of its counted rounds."""
    if name == BARE:
        return time_bare_loop(config, folder).rounds
    if name == "jobs, 2 inline":
        with ThreadPoolExecutor() as pool:
            both = pool.map(lambda k: time_engine(config, folder / str(k)).rounds, range(2))
            return [seconds / 2 for rounds in both for seconds in rounds]
    if name in OURS:
        return time_engine(config, folder).rounds
    folder.mkdir(parents=True)
    Task.write(config, folder)
    script = "peer_flower.py" if name == PLAIN else "peer_pfl.py"
    here = Path(__file__).parent
    python = sys.executable if name == PLAIN else pfl
    paths = os.pathsep.join([str(here), str(here.parent)])
    done = subprocess.run(
        [python, str(here / script), str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode or not (folder / "rounds.txt").exists():
        sys.exit(f"{script} failed:\n{done.stdout[-3000:]}")
    return [float(line) for line in (folder / "rounds.txt").read_text().split()]


def measure(case: str, names: list[str], options: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of every counted round of each program."""
    seconds: dict[str, list[float]] = defaultdict(list)
    common = {
        **ALL[case],
        "strategy.name": "fedavg",
        "num-server-rounds": options.rounds + 1,
        "train.device": "cpu",
        "data.augment": False,
        "run-name": "run",
    }
    with tempfile.TemporaryDirectory(prefix="fairflower-benchmark-") as scratch:
        os.environ["FAIRFLOWER_HOME"] = scratch
        for repetition in range(options.repetitions):
            for number, name in enumerate(names):
                say(f"{case}, repetition {repetition + 1} of {options.repetitions}: {name}")
                config = RunConfig.from_flat(common | OURS.get(name, {}))
                folder = Path(scratch, f"{repetition}-{number}")
                seconds[name] += rounds_of(name, config, folder, options.pfl)
    return seconds


def main() -> None:
    parser = described_parser(__doc__)
    parser.add_argument("--cases", default=";".join(ALL), help=f"of {'; '.join(ALL)}")
    parser.add_argument("--repetitions", type=int, default=3, help="runs of each (default: 3)")
    parser.add_argument("--rounds", type=int, default=5, help="counted per run (default: 5)")
    parser.add_argument("--pfl", default="", help="Python of an environment that has pfl")
    parser.add_argument("--quick", action="store_true", help="1 run of 2 counted rounds")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.rounds = 1, 2
    cases = [case.strip() for case in options.cases.split(";")]
    if unknown := [case for case in cases if case not in ALL]:
        sys.exit(f"Unknown cases {unknown}; there are {'; '.join(ALL)}.")
    names = [BARE, *OURS, PLAIN, *([PFL] if options.pfl else [])]
    print(f"\n{machine_facts()}\n{version_facts('torch', 'flwr', 'ray', 'numpy')}")
    for case in cases:
        seconds = measure(case, names, options)
        print(f"\n{case}: {options.repetitions} x {options.rounds} rounds\n", flush=True)
        rows = [[name, *times_and_ratios(s, seconds[BARE])] for name, s in seconds.items()]
        print(markdown(["s", "round min", "round", "x bare (min)", "x bare"], rows), flush=True)


if __name__ == "__main__":
    main()
