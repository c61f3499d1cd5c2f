"""Compare the seconds per round with other simulators of federated training.

    python benchmarks/peers.py --pfl /path/to/an/environment/bin/python

All programs train the same network from the same initial weights on the same images, with the same
number of steps of the same SGD, and average the models by numbers of images. None of them crops
images or evaluates; only fairflower's engines write files, their run folders. Each program runs in
its own process. The programs alternate, and their first rounds are not counted.

- bare loop: PyTorch alone, in one process (see `engine.py`).
- inline, ray, jobs: fairflower's engines; jobs is two concurrent inline runs, with the seconds
  divided by two.
- flower's engine: fairflower's app on Flower's own simulation engine.
- plain Flower: `peer_flower.py`, an app as in Flower's tutorial, on Flower's simulation engine.
- pfl: `peer_pfl.py` on pfl-research's simulator, in one process, in an environment of its own
  (`pip install "pfl[pytorch]" torchvision safetensors`); skipped without `--pfl`.
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

from common import described_parser, log_progress, machine_and_versions, markdown, times_and_ratios
from engine import CASES, time_bare_loop, time_engine
from peer_task import Task

from fairflower.config import RunConfig

ALL: dict[str, dict[str, Any]] = {
    **CASES,
    "cnn, 200 clients": {"data.clients-per-domain": 50, "data.examples-per-client": 4},
}
FAIRFLOWER: dict[str, dict[str, Any]] = {
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
    if name in FAIRFLOWER:
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
    """Run each program in turn, and return the seconds of every counted round."""
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
                log_progress(
                    f"{case}, repetition {repetition + 1} of {options.repetitions}: {name}"
                )
                config = RunConfig.from_flat(common | FAIRFLOWER.get(name, {}))
                folder = Path(scratch, f"{repetition}-{number}")
                seconds[name] += rounds_of(name, config, folder, options.pfl)
    return seconds


def main() -> None:
    """Measure the cases and print a table for each."""
    parser = described_parser(__doc__)
    parser.add_argument("--cases", default=";".join(ALL), help=f"of {'; '.join(ALL)}")
    parser.add_argument(
        "--repetitions", type=int, default=3, help="runs of each program (default: 3)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds per run (default: 5)")
    parser.add_argument("--pfl", default="", help="Python of an environment with pfl")
    parser.add_argument("--quick", action="store_true", help="1 run of 2 counted rounds")
    options = parser.parse_args()
    if options.quick:
        options.repetitions, options.rounds = 1, 2
    cases = [case.strip() for case in options.cases.split(";")]
    if unknown := [case for case in cases if case not in ALL]:
        sys.exit(f"Unknown cases {unknown}; there are {'; '.join(ALL)}.")
    names = [BARE, *FAIRFLOWER, PLAIN, *([PFL] if options.pfl else [])]
    print(f"\n{machine_and_versions('torch', 'flwr', 'ray', 'numpy')}")
    for case in cases:
        seconds = measure(case, names, options)
        print(f"\n{case}: {options.repetitions} x {options.rounds} rounds\n", flush=True)
        rows = [[name, *times_and_ratios(s, seconds[BARE])] for name, s in seconds.items()]
        print(markdown(["s", "round min", "round", "x bare (min)", "x bare"], rows), flush=True)


if __name__ == "__main__":
    main()
