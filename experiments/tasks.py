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
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache, partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import fairflower as ff
from fairflower.errors import Diverged
from fairflower.numerics.metrics import over_domains
from fairflower.plans.plan import parse_seeds
from fairflower.report import analyze, read_summary
from fairflower.report.contrasts import (
    Contrast,
    fairness,
    judge_family,
    over,
    paired_differences,
)
from fairflower.report.methods import Comparison
from fairflower.report.pages import replace_generated_block

HERE = Path(__file__).parent
DESIGN: dict[str, Any] = tomllib.loads((HERE / "tasks.toml").read_text(encoding="utf-8"))
ORDER = ("better", "worse", "equivalent", "undecided")
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


def rates(task: str) -> list[float]:
    """Return the learning rates that every method tries."""
    lr = DESIGN["tasks"][task]["train"]["lr"]
    return [float(f"{lr * step:.3g}") for step in DESIGN["design"]["steps"]]


def tune(task: str, folder: Path) -> None:
    """Make the trials of a task that are left."""
    grid = product(methods(), rates(task), parse_seeds(DESIGN["tasks"][task]["tuned-on"]))
    for method, lr, federation in grid:
        row = {"task": task, "method": str(method), "lr": f"{lr:g}", "federation": str(federation)}
        if any(row.items() <= made.items() for made in trials()):
            continue
        result = run(task, method, lr, federation, folder / "trials", test=False)
        worst, average = worst_half(result) if result else (math.nan, math.nan)
        row["better"] = str(result.run.primary.better if result else 0)
        row |= {"worst half": f"{worst:.6g}", "average": f"{average:.6g}"}
        row["seconds"] = f"{result.run.info['seconds'] if result else math.nan:.1f}"
        new = not TRIALS.exists()
        with TRIALS.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)


def best(task: str) -> dict[Method, float]:
    """Return each method's learning rate with the best mean over trials; the lowest of equals."""
    made = trials()

    def value(method: Method, lr: float) -> float:
        of = {"task": task, "method": str(method), "lr": f"{lr:g}"}
        rows = [row for row in made if of.items() <= row.items()]
        mean = fmean(int(row["better"]) * float(row["worst half"]) for row in rows)
        return -math.inf if math.isnan(mean) else mean

    return {method: max(rates(task), key=partial(value, method)) for method in methods()}


def carry_out(tasks: Iterable[str], folder: Path) -> None:
    """Make all runs that are left, task after task; write a task's summary when it is complete."""
    for task in tasks:
        summary = HERE / f"tasks-{task}.csv"
        if summary.exists():
            continue
        tune(task, folder)
        results = None
        for method, lr in best(task).items():
            for federation in parse_seeds(DESIGN["design"]["federations"]):
                result = run(task, method, lr, federation, folder / "tests", test=True)
                if result is not None:
                    results = result if results is None else results + result
            print(task, method, lr, "done", flush=True)
        if results is not None:
            results.summary(summary)


# --- the page ------------------------------------------------------------------------


def text(source: Path) -> str:
    """Return what tasks.md says of a task's summary, or of all tasks, given the trials."""
    return f"\n{overview() if source == TRIALS else details(source)}\n"


def finished() -> dict[str, Path]:
    """Return the summaries of the tasks that are complete."""
    paths = {task: HERE / f"tasks-{task}.csv" for task in DESIGN["tasks"]}
    return {task: path for task, path in paths.items() if path.exists()}


@cache
def judged(summary: Path) -> tuple[Comparison, dict[str, Contrast]]:
    """Return a task's comparison, and each method's differences from the reference."""
    (chapter,) = analyze(read_summary(summary)).chapters
    comparison = chapter.comparison
    measure = fairness(comparison)
    by_name = {method.name: method for method in comparison.methods}
    reference = by_name.pop(DESIGN["design"]["reference"])
    pairs = {name: paired_differences(m, reference, measure) for name, m in by_name.items()}
    return comparison, judge_family(pairs)


def counted(contrasts: Mapping[str, Contrast], title: str) -> str:
    """Return which methods are better, worse, equivalent or undecided in a metric."""
    by_verdict: dict[str, list[str]] = {}
    for name, contrast in contrasts.items():
        by_verdict.setdefault(contrast[title].verdict, []).append(name)
    named = [f"{word}: {', '.join(by_verdict[word])}" for word in ORDER if word in by_verdict]
    return "; ".join(named)


def least(contrasts: Mapping[str, Contrast], title: str) -> str:
    """Return the largest of the smallest detectable differences, with its unit."""
    metric = next(iter(contrasts.values()))[title].metric
    most = max(contrast[title].difference.detectable for contrast in contrasts.values())
    return f"{most:.2g} {metric.points}".strip()


def sentence() -> str:
    """Return how often the methods are better or worse than uniform weights in the worst domain."""
    verdicts = [
        contrast.by_metric[0].verdict
        for path in finished().values()
        for contrast in judged(path)[1].values()
    ]
    counts = Counter(verdicts)
    said = ", ".join(f"{counts[word]} {word}" for word in ORDER)
    return f"of {len(verdicts)} comparisons on {len(finished())} tasks: {said}"


def overview() -> str:
    """Return the table over all tasks, and the learning rates that were chosen."""
    lines = [
        f"In the worst domain, against uniform weights, {sentence()}.",
        "",
        "| task | score | worst domain | would have been found | average | would have been found |",
        "|---|---|---|---:|---|---:|",
    ]
    for task, path in finished().items():
        comparison, contrasts = judged(path)
        worst, _, average = (one.metric.title for one in next(iter(contrasts.values())).by_metric)
        cells = [
            *(task, comparison.score.stated),
            *(counted(contrasts, worst), least(contrasts, worst)),
            *(counted(contrasts, average), least(contrasts, average)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    made = trials()
    lost = sum(row["better"] == "0" for row in made)
    note = f"{len(made)} trials, of which {lost} diverged. The learning rates that were chosen:"
    lines += ["", note, "", f"| task | tried | {' | '.join(map(str, methods()))} |"]
    lines.append("|---|---|" + "---:|" * len(methods()))
    for task in finished():
        tried = ", ".join(f"{lr:g}" for lr in rates(task))
        chosen = " | ".join(f"{lr:g}" for lr in best(task).values())
        lines.append(f"| {task} | {tried} | {chosen} |")
    return "\n".join(lines)


def details(source: Path) -> str:
    """Return a task's table: scores, and differences from the reference with intervals."""
    comparison, contrasts = judged(source)
    average, worst, spread, _ = over_domains(comparison.score)
    lines = [
        f"| method | {worst.title} | {average.title} | {spread.title} | {worst.title}: difference "
        f"| | {average.title}: difference | |",
        "|---|---:|---:|---:|---:|---|---:|---|",
    ]
    for method in comparison.methods:
        estimates = [over(row, comparison)(method) for row in (worst, average, spread)]
        cells = [method.name, *(f"{one.mean:.2f} ±{one.std:.2f}" for one in estimates)]
        if method.name in contrasts:
            for title in (worst.title, average.title):
                one = contrasts[method.name][title]
                d = one.difference
                cells += [f"{d.mean:+.2f} [{d.low:+.2f}, {d.high:+.2f}]", one.verdict]
        else:
            cells += [""] * 4
        lines.append(f"| {' | '.join(cells)} |")
    runs = sum(len(method.runs) for method in comparison.methods)
    planned = len(methods()) * len(parse_seeds(DESIGN["design"]["federations"]))
    some = next(iter(contrasts.values()))
    margins = ", ".join(f"{d.metric.title} {d.difference.margin:.2g}" for d in some.by_metric)
    note = (
        f"{comparison.score.stated}, mean of the last five rounds; {runs} of {planned} runs. "
        f"Margins of equivalence: {margins}."
    )
    return "\n".join([note, "", *lines])


def write_page() -> None:
    """Write what follows from trials and summaries into tasks.md."""
    for source in (TRIALS, *finished().values()):
        replace_generated_block(HERE / "tasks.md", source, text(source))


def main() -> None:
    """Carry out what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, default=Path("tasks-runs"))
    parser.add_argument("--tasks", nargs="+", choices=DESIGN["tasks"], default=DESIGN["tasks"])
    parser.add_argument("--page", action="store_true", help="only write tasks.md")
    given = parser.parse_args()
    if not given.page:
        carry_out(given.tasks, given.output_dir)
    write_page()


if __name__ == "__main__":
    main()
