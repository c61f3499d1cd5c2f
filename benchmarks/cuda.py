"""Check correctness, speed and the papers' numbers on a GPU, in calls of ten minutes.

    python benchmarks/cuda.py                       # repeat until all parts are done
    python benchmarks/cuda.py --device cpu --quick  # test of the program itself; a minute

The program stops at its time limit (`--minutes`) and prints a table with the device's name. A
second call resumes where the first stopped: each finished part is a line of `rows.jsonl`, in the
device's folder below `--output-dir`. Failed parts are tried again. Requirements: torch,
torchvision, flwr, and the dependencies of the inline engine and of the strategies. Parts 1 and 2
use synthetic images, and random weights of ViT-B/16; the papers' data are read from
FAIRFLOWER_DATA.

1. `right`: every strategy, and every client, trains two rounds on the CPU and twice on the device.
   The distance between the models may be at most a fraction of the distance from the initial model
   (column `tolerance`), and both runs on the device must produce the same bits. For bf16, the
   reference is float32 on the device. Methods that decide by signs or by order may differ more
   where a tie is resolved differently: inspect them. TF32 is not compared, as no setting controls
   it.
2. `fast`: seconds of a round without evaluation, as minimum and median of three, and images per
   second by the median. `resnet10, 32x32` has the size of FedHEAL's experiment: 20 clients with
   600, 72, 732 and 100 images, 10 epochs, batches of 64. The bare loop is PyTorch alone; it repeats
   the first of the prompts' two stages at every use, where the engine computes it once. "Several
   processes" are workers of the ray engine, skipped without Ray.
3. `papers`: FedHEAL's Digits (ResNet-10, 200 rounds of 10 epochs), then Office-Caltech at 192
   pixels, by fedavg, uniform, fedheal and fedequilibria with seed 0, `--jobs` runs at a time, next
   to the papers' tables. For Office-Caltech, FedEquilibria's paper uses ResNet-12 and 5 epochs.
   Accuracies are means over the last five rounds in percent. STD is over domains (ddof 1; in
   FedEquilibria's paper ddof 0, of the last round).

This program has not yet run on CUDA.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from common import described_parser, log_progress, machine_facts, markdown, version_facts

from fairflower.errors import NotInstalled

Row = dict[str, Any]
KINDS = ("right", "fast", "papers")

#: Seconds reserved for the table, and for a part that is still running at the time limit.
RESERVE = 8

#: AVG / STD of FedHEAL's tables 1 and 2, and AVG / STD / MIN of FedEquilibria's table 1.
PUBLISHED = {
    "digits: fedavg": ("76.00 / 23.82", "76.57 / 22.18 / 39.60"),
    "digits: fedheal": ("78.09 / 22.08", "77.88 / 20.05 / 44.40"),
    "digits: fedequilibria": ("", "79.04 / 17.48 / 50.00"),
    "office-caltech: fedavg": ("58.35 / 11.13", "57.62 / 9.57 / 43.10"),
    "office-caltech: fedheal": ("64.85 / 3.80", "59.94 / 9.50 / -"),
    "office-caltech: fedequilibria": ("", "61.23 / 8.03 / 51.72"),
}


# --- rows on disk -----------------------------------------------------------------------


def add_row(folder: Path, kind: str, name: str, row: Row) -> None:
    """Append a part's row; a later row of the same part replaces it."""
    line = json.dumps({"kind": kind, "name": name} | row) + "\n"
    with (folder / "rows.jsonl").open("a", encoding="utf-8") as file:
        file.write(line)


def read_rows(folder: Path) -> dict[tuple[str, str], Row]:
    """Return the last row of each part; an incomplete line of a killed process is skipped."""
    rows = {}
    path = folder / "rows.jsonl"
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows[row.pop("kind"), row.pop("name")] = row
    return rows


def is_finished(row: Row | None) -> bool:
    """Return whether a part has a complete result."""
    return row is not None and not {"begun", "error"} & row.keys() and not row.get("unfinished")


# --- processes --------------------------------------------------------------------------


def run_parts(options: argparse.Namespace) -> None:
    """Measure parts one after another until the time limit; runs in a child process."""
    from cuda_parts import measure

    for name in options.names:
        if time.time() > options.until:
            return
        before = read_rows(options.folder).get((options.kind, name), {})
        add_row(options.folder, options.kind, name, {"begun": True} | before)
        try:
            row = measure(
                *(options.kind, name, options.device, options.folder),
                *(options.quick, options.until),
            )
        except NotInstalled as error:
            row = {"left_out": str(error)}
        except Exception as error:
            log_progress(traceback.format_exc())
            row = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        add_row(options.folder, options.kind, name, row)
        if "error" in row:
            return  # after a CUDA error, the process cannot be used any more


def start(kind: str, names: list[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a child process that measures these parts and logs to ``log.txt``."""
    command = [sys.executable, str(Path(__file__).absolute()), "--work", kind, *names]
    command += ["--device", options.device, "--folder", str(options.folder)]
    command += ["--until", str(options.until), *["--quick"] * options.quick]
    home = {"FAIRFLOWER_HOME": str(options.folder / "home"), "OMP_NUM_THREADS": "1"}
    with (options.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, env=os.environ | home, stdout=log, stderr=log)


def wait(children: list[subprocess.Popen[bytes]], kind: str, options: argparse.Namespace) -> None:
    """Wait for child processes, kill those past the time limit, and record crashed parts."""
    for child in children:
        try:
            child.wait(max(0.1, options.until + RESERVE - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for (row_kind, name), row in read_rows(options.folder).items():
        if row_kind == kind and "begun" in row and time.time() < options.until:
            codes = ", ".join(str(child.returncode) for child in children)
            add_row(options.folder, kind, name, {"error": f"the process ended with {codes}"})


def run_unfinished_parts(options: argparse.Namespace) -> None:
    """Measure the unfinished parts, kind by kind, until the time limit."""
    from cuda_parts import items

    for kind, names in items(options.quick).items():
        rows = read_rows(options.folder)
        unfinished = [name for name in names if not is_finished(rows.get((kind, name)))]
        # Each timed part has its own process, so that memory is not shared between parts.
        size = {"right": len(unfinished), "fast": 1, "papers": options.jobs}[kind]
        size = max(1, len(unfinished) if options.quick and kind == "fast" else size)
        for at in range(0, len(unfinished), size):
            group = unfinished[at : at + size]
            if kind not in options.parts or time.time() > options.until:
                continue
            log_progress(f"{kind}: {', '.join(group[:4])}{' ...' if len(group) > 4 else ''}")
            if kind == "papers":  # each in its own process, concurrently
                wait([start(kind, [name], options) for name in group], kind, options)
                continue
            while group and time.time() < options.until:
                wait([start(kind, group, options)], kind, options)
                done = read_rows(options.folder)
                tried = [name for name in group if (kind, name) in done]
                group = [name for name in group if name not in tried]
                if not tried:
                    break  # the process ended before its first part


# --- the table --------------------------------------------------------------------------


def tables(options: argparse.Namespace) -> str:
    """Return all tables as Markdown, with the names of device and libraries."""
    from cuda_parts import items

    rows, wanted = read_rows(options.folder), items(options.quick)
    libraries = version_facts("torch", "flwr", "ray", "numpy")
    parts = [f"{options.name}; {machine_facts()}; {libraries}"]
    header = {
        "right": ["right", "difference", "tolerance", "same bits", "right", "s"],
        "fast": ["fast", "round min s", "round s", "images/s", "GPU MB"],
        "papers": [
            *("papers", "rounds", "s/round", "AVG", "STD", "MIN"),
            *("FedHEAL's AVG / STD", "FedEquilibria's AVG / STD / MIN"),
        ],
    }
    for kind in KINDS:
        measured = [(name, rows[kind, name]) for name in wanted[kind] if (kind, name) in rows]
        measured = [(name, row) for name, row in measured if row.keys() != {"begun"}]
        cells = [_cells(kind, name, row, len(header[kind])) for name, row in measured]
        if cells:
            parts.append(markdown(header[kind], cells))
    if any(row.get("stand_in") for row in rows.values()):
        parts.append(
            "SYN of these digits is a stand-in, so the papers' numbers do not hold for it."
        )
    unfinished = [
        name for kind in wanted for name in wanted[kind] if not is_finished(rows.get((kind, name)))
    ]
    parts.append(
        f"{len(unfinished)} parts are left: call it again." if unfinished else "All parts are done."
    )
    return "\n\n".join(parts)


def _cells(kind: str, name: str, row: Row, width: int) -> list[str]:
    note = f"left out: {row['left_out']}" if "left_out" in row else row.get("error", "")
    if note or "seconds" not in row:
        return [name, note or "not finished", *[""] * (width - 2)]
    seconds = f"{row['seconds']:.3g}"
    if kind == "right":
        same = "yes" if row["same_bits"] else "NO"
        verdict = "yes" if row["right"] else "NO"
        return [name, f"{row['difference']:.1e}", f"{row['tolerance']:g}", same, verdict, seconds]
    if kind == "fast":
        memory = f"{row['gpu_mb']:.0f}" if "gpu_mb" in row else ""
        median, images = f"{row['median']:.3g}", f"{row['images_per_second']:.0f}"
        return [name, seconds, median, images, memory]
    values = list(row["accuracy"].values())
    summary = [statistics.fmean(values), statistics.stdev(values), min(values)]
    rounds = f"{row['rounds']} of {row['of_rounds']}"
    published = PUBLISHED.get(name, ("", "")) if row["of_rounds"] == 200 else ("", "")
    return [name, rounds, seconds, *(f"{value:.2f}" for value in summary), *published]


def is_wrong(row: Row) -> bool:
    """Return whether a part failed or its models differ too much."""
    return "error" in row or not row.get("right", True)


# --- the command ------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    """Read and check the command line."""
    parser = described_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9, help="time limit (default: 9)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs", "cuda-benchmark"))
    parser.add_argument("--parts", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="concurrent runs of `papers` (default: 4 on CUDA, 1 on the CPU)",
    )
    parser.add_argument("--quick", action="store_true", help="a few small parts")
    for hidden in ("--work", "--names"):
        parser.add_argument(hidden, nargs="*", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.parts = options.parts.split(",")
    if unknown := set(options.parts) - set(KINDS):
        parser.error(f"--parts: unknown {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    if not options.minutes > 0:
        parser.error(f"--minutes {options.minutes:g}: expected more than 0")
    options.jobs = options.jobs or (4 if options.device == "cuda" else 1)
    return options


def main() -> int:
    """Measure unfinished parts, print and write the tables; 1 if any part is wrong."""
    options = parse_options()
    if options.work:
        options.kind, *options.names = options.work
        run_parts(options)
        return 0
    options.until = time.time() + 60 * options.minutes - RESERVE
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device. To test the program, use --device cpu --quick.")
    options.name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    kind = re.sub(r"\W+", "-", options.name.lower()) + "-quick" * options.quick
    options.folder = options.output_dir.absolute() / kind
    options.folder.mkdir(parents=True, exist_ok=True)
    run_unfinished_parts(options)
    text = tables(options)
    (options.folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(map(is_wrong, read_rows(options.folder).values())))


if __name__ == "__main__":
    sys.exit(main())
