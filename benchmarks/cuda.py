"""All that a GPU has to show, in ten minutes: right, fast, and the papers' numbers.

    python benchmarks/cuda.py                       # again and again, until all is done
    python benchmarks/cuda.py --device cpu --quick  # whether the program works; a minute

It stops itself in time (`--minutes`) and prints a table with the device's name. A second call goes
on where the first stopped: each finished part is a line of `rows.jsonl` in the folder of the device
below `--output-dir`. Parts that failed are tried again. Needs torch, torchvision, flwr and what the
inline engine and the strategies need. Images of 1 and 2 are made up, and so are the weights of
ViT-B/16; the papers' data are read from FAIRFLOWER_DATA.

1. `right`: every strategy, and every client, trains two rounds on the CPU and twice on the device.
   The distance of the models has to be at most a share of the way from the initial model (column
   `tolerance`), and both runs of the device have to have the same bits. In bf16 the reference is
   the device in float32. Methods that decide by signs or by order may differ more where a tie falls
   otherwise: look at them. There is no setting for TF32, so it is not compared.
2. `fast`: seconds of a round without its tests, as fastest and median of three, and images per
   second of the median. `resnet10, 32x32` has the shape of FedHEAL's work: 20 clients with 600, 72,
   732 and 100 images, 10 epochs, batches of 64. The bare loop is PyTorch alone; of the prompts' two
   stages it computes the first again at every use, where the engine computes it once. Several
   processes are workers of the ray engine, and left out without Ray.
3. `papers`: FedHEAL's Digits (ResNet-10, 200 rounds of 10 epochs), then Office-Caltech at 192
   pixels, by fedavg, uniform, fedheal and fedequilibria with seed 0, `--jobs` at a time, beside
   the papers' tables; for Office-Caltech, FedEquilibria's paper has ResNet-12 and 5 epochs.
   Accuracies are means over the last five rounds in percent, and STD is over domains (ddof 1; in
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

from common import described_parser, machine_facts, markdown, say, version_facts

from fairflower.errors import NotInstalled

Row = dict[str, Any]
KINDS = ("right", "fast", "papers")

#: Seconds that are kept for the table, and that a part may still take when time is over.
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
    """Return the last row of each part; a line that a killed process left half is passed over."""
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
    return row is not None and not {"begun", "error"} & row.keys() and not row.get("unfinished")


# --- processes --------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Make parts, one after another, until the time is over: what a child process does."""
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
            say(traceback.format_exc())
            row = {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
        add_row(options.folder, options.kind, name, row)
        if "error" in row:
            return  # an error of CUDA spoils the process


def start(kind: str, names: list[str], options: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a child process that makes these parts; what it says is in ``log.txt``."""
    command = [sys.executable, str(Path(__file__).absolute()), "--work", kind, *names]
    command += ["--device", options.device, "--folder", str(options.folder)]
    command += ["--until", str(options.until), *["--quick"] * options.quick]
    home = {"FAIRFLOWER_HOME": str(options.folder / "home"), "OMP_NUM_THREADS": "1"}
    with (options.folder / "log.txt").open("ab") as log:
        return subprocess.Popen(command, env=os.environ | home, stdout=log, stderr=log)


def wait(children: list[subprocess.Popen[bytes]], kind: str, options: argparse.Namespace) -> None:
    """Wait for child processes; kill those that are late, and note the parts of the others."""
    for child in children:
        try:
            child.wait(max(0.1, options.until + RESERVE - time.time()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    for (of, name), row in read_rows(options.folder).items():
        if of == kind and "begun" in row and time.time() < options.until:
            codes = ", ".join(str(child.returncode) for child in children)
            add_row(options.folder, kind, name, {"error": f"the process ended with {codes}"})


def make(options: argparse.Namespace) -> None:
    """Make the parts that are not finished, kind after kind, as far as the time goes."""
    from cuda_parts import items

    for kind, names in items(options.quick).items():
        rows = read_rows(options.folder)
        left = [name for name in names if not is_finished(rows.get((kind, name)))]
        # Each time has a process of its own, for a fresh memory.
        size = {"right": len(left), "fast": 1, "papers": options.jobs}[kind]
        size = max(1, len(left) if options.quick and kind == "fast" else size)
        for at in range(0, len(left), size):
            group = left[at : at + size]
            if kind not in options.parts or time.time() > options.until:
                continue
            say(f"{kind}: {', '.join(group[:4])}{' ...' if len(group) > 4 else ''}")
            if kind == "papers":  # each in a process of its own, at the same time
                wait([start(kind, [name], options) for name in group], kind, options)
                continue
            while group and time.time() < options.until:
                wait([start(kind, group, options)], kind, options)
                done = read_rows(options.folder)
                tried = [name for name in group if (kind, name) in done]
                group = [name for name in group if name not in tried]
                if not tried:
                    break  # it did not even begin


# --- the table --------------------------------------------------------------------------


def tables(options: argparse.Namespace) -> str:
    """Return all tables as Markdown, with the device's name."""
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
        made = [(name, rows[kind, name]) for name in wanted[kind] if (kind, name) in rows]
        made = [(name, row) for name, row in made if row.keys() != {"begun"}]
        cells = [_cells(kind, name, row, len(header[kind])) for name, row in made]
        if cells:
            parts.append(markdown(header[kind], cells))
    if any(row.get("stand_in") for row in rows.values()):
        parts.append(
            "SYN of these digits is a stand-in, so the papers' numbers do not hold for it."
        )
    left = [
        name for kind in wanted for name in wanted[kind] if not is_finished(rows.get((kind, name)))
    ]
    parts.append(f"{len(left)} parts are left: call it again." if left else "All parts are done.")
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
    figures = [statistics.fmean(values), statistics.stdev(values), min(values)]
    rounds = f"{row['rounds']} of {row['of_rounds']}"
    published = PUBLISHED.get(name, ("", "")) if row["of_rounds"] == 200 else ("", "")
    return [name, rounds, seconds, *(f"{figure:.2f}" for figure in figures), *published]


def is_wrong(row: Row) -> bool:
    return "error" in row or not row.get("right", True)


# --- the command ------------------------------------------------------------------------


def parse_options() -> argparse.Namespace:
    parser = described_parser(__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9, help="time limit (default: 9)")
    parser.add_argument("--output-dir", type=Path, default=Path("runs", "cuda-benchmark"))
    parser.add_argument("--parts", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--jobs", type=int, default=0, help="runs of `papers` at a time")
    parser.add_argument("--quick", action="store_true", help="few parts, tiny ones")
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
    options = parse_options()
    if options.work:
        options.kind, *options.names = options.work
        work(options)
        return 0
    options.until = time.time() + 60 * options.minutes - RESERVE
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("PyTorch finds no CUDA device. Use --device cpu --quick to try the program.")
    options.name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    kind = re.sub(r"\W+", "-", options.name.lower()) + "-quick" * options.quick
    options.folder = options.output_dir.absolute() / kind
    options.folder.mkdir(parents=True, exist_ok=True)
    make(options)
    text = tables(options)
    (options.folder / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    return int(any(map(is_wrong, read_rows(options.folder).values())))


if __name__ == "__main__":
    sys.exit(main())
