"""Does fairness pay for other tasks than classes? The runs of tasks.toml, and what tasks.md says.

python -m experiments.tasks --output-dir <folder>     # the runs that are left, then the summaries
python -m experiments.tasks --page                    # tasks.md anew, from the summaries
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import fairflower as ff
from fairflower.errors import Diverged

HERE = Path(__file__).parent
DESIGN: dict[str, Any] = tomllib.loads((HERE / "tasks.toml").read_text(encoding="utf-8"))
TRIALS = HERE / "tasks-trials.csv"
COLUMNS = ("task", "method", "lr", "federation", "better", "worst half", "average", "seconds")


class Method(NamedTuple):
    """A strategy and a client."""

    strategy: str
    client: str

    def __str__(self) -> str:
        return self.strategy if self.client == "sgd" else f"{self.client}+{self.strategy}"


def methods() -> list[Method]:
    """Return the methods of the design."""
    design = DESIGN["design"]
    plain = [Method(name, "sgd") for name in design["strategies"].split(",")]
    return [*plain, Method(design["with-gsam"], "gsam")]


def numbers(text: str) -> range:
    """Return the federations that a text such as 0-9 names."""
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def run(task: str, method: Method, lr: float, federation: int, folder: Path, test: bool) -> Any:
    """Return a run's result, from its folder if it is there; None if it diverged."""
    own = {key: value for key, value in DESIGN["tasks"][task].items() if key != "tuned-on"}
    settings = merged(DESIGN["settings"], own)
    name = f"{task}-{method}-{lr:g}-{federation}".replace(":", "-").replace("=", "-")
    path, lost = folder / name, folder / f"{name}.diverged"
    if lost.exists():
        return None
    try:
        if (path / "run.json").exists():
            if json.loads((path / "run.json").read_text(encoding="utf-8"))["status"] == "completed":
                (result,) = ff.read(path)
                return result
            return ff.run(resume=path, progress=False)
        settings["data"] |= {"seed": federation}
        settings["train"] |= {"lr": lr}
        settings |= {"run-name": name, "evaluate": {"test": test}, "checkpoint": {"every": 5}}
        return ff.run(
            settings,
            strategy=method.strategy,
            client=method.client,
            seed=federation,
            output_dir=folder,
            progress=False,
        )
    except Diverged as error:
        lost.write_text(f"{error}\n", encoding="utf-8")
        return None


def merged(common: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return settings, of tables too, of which a task's own count first."""
    tables = {key: merged(common.get(key, {}), v) for key, v in own.items() if isinstance(v, dict)}
    return {key: dict(v) if isinstance(v, dict) else v for key, v in common.items()} | own | tables


def worst_half(result: Any) -> tuple[float, float]:
    """Return the mean primary score of the worst half of the domains that define it, and of all."""
    better = result.run.primary.better
    defined = [value for value in result.score.values() if not math.isnan(value)]
    scores = sorted(defined, key=lambda value: better * value)
    return fmean(scores[: len(scores) // 2]), fmean(scores)


def trials() -> list[dict[str, str]]:
    """Return the rows of all trials that were made."""
    if not TRIALS.exists():
        return []
    with TRIALS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def tune(task: str, folder: Path) -> dict[Method, float]:
    """Try the learning rates on validation examples; return the best one of each method."""
    settings = DESIGN["tasks"][task]
    chosen = {}
    for method in methods():
        means = {}
        for step in DESIGN["design"]["steps"]:
            lr = float(f"{settings['train']['lr'] * step:.3g}")
            values: list[float] = []
            for federation in numbers(settings["tuned-on"]):
                tried = {"task": task, "method": str(method), "lr": f"{lr:g}"}
                tried["federation"] = str(federation)
                row = next((row for row in trials() if tried.items() <= row.items()), None)
                if row is None:
                    result = run(task, method, lr, federation, folder / "trials", test=False)
                    worst, average = worst_half(result) if result else (math.nan, math.nan)
                    seconds = result.run.info["seconds"] if result else math.nan
                    row = tried | {
                        "better": str(result.run.primary.better if result else 0),
                        "worst half": f"{worst:.6g}",
                        "average": f"{average:.6g}",
                        "seconds": f"{seconds:.1f}",
                    }
                    add(row)
                values.append(int(row["better"]) * float(row["worst half"]))
            means[lr] = -math.inf if math.isnan(fmean(values)) else fmean(values)
        chosen[method] = max(means, key=means.__getitem__)
    return chosen


def add(row: dict[str, str]) -> None:
    """Append a trial's row."""
    new = not TRIALS.exists()
    with TRIALS.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


def carry_out(tasks: Iterable[str], folder: Path) -> None:
    """Make all runs that are left, task after task; write a task's summary when it is complete."""
    for task in tasks:
        summary = HERE / f"tasks-{task}.csv"
        if summary.exists():
            continue
        chosen = tune(task, folder)
        results = None
        for method, lr in chosen.items():
            for federation in numbers(DESIGN["design"]["federations"]):
                result = run(task, method, lr, federation, folder / "tests", test=True)
                if result is not None:
                    results = result if results is None else results + result
            print(task, method, lr, "done", flush=True)
        if results is not None:
            results.summary(summary)


def tables() -> Iterator[str]:
    """Yield for each task what came out: the scores, and differences from uniform weights."""
    raise NotImplementedError


def main() -> None:
    """Carry out what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("tasks-runs"))
    parser.add_argument("--tasks", nargs="+", choices=DESIGN["tasks"], default=DESIGN["tasks"])
    parser.add_argument("--page", action="store_true")
    given = parser.parse_args()
    if not given.page:
        carry_out(given.tasks, given.output_dir)


if __name__ == "__main__":
    main()
