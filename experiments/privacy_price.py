"""Measure the cost of privacy in accuracy: on average and for the worst domain.

    python privacy_price.py --data-dir <folder> --output-dir <folder>   # the runs; can be resumed
    python privacy_price.py                                             # privacy-price.md

Five strategies on two data sets, in two comparisons: with forty clients, runs without privacy and
with differential privacy at three values of epsilon; with twelve clients, runs without privacy and
with secure aggregation. The settings that all runs of a data set share are in
privacy-digits-cpu.toml and privacy-office-cpu.toml.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from fairflower.config import RunConfig
from fairflower.config.run import method_key
from fairflower.config.text import read_toml
from fairflower.errors import RunFolderError
from fairflower.models import Classifier
from fairflower.models.small import CNN
from fairflower.numerics.metrics import AVG, MIN
from fairflower.paths import run_folders
from fairflower.plans.execution import run_comparison
from fairflower.plans.plan import Plan
from fairflower.report import Run, read_run, write_summary
from fairflower.report.cells import Cell, Group, Row, Table, format_number, judged_cell
from fairflower.report.contrasts import Measure, Metric, judge_family, paired_differences
from fairflower.report.methods import Method, federated
from fairflower.report.pages import generated_markdown, markdown_of, replace_generated_block
from fairflower.report.summary import read_summary
from fairflower.statistics import Difference

HERE = Path(__file__).parent
PAGE = HERE / "tables" / "privacy-price.md"
#: Data set -> prefix of the file of its settings, and name of the summary of its runs.
DATA = {"digits": "privacy-digits", "office": "privacy-office"}

STRATEGIES: dict[str, dict[str, Any]] = {
    "uniform": {"strategy.name": "uniform"},
    "afl": {"strategy.name": "afl"},
    "qffl": {"strategy.name": "qffl", "strategy.rule": "weights"},
    "fedism": {"strategy.name": "fedism"},
    "term": {"strategy.name": "term"},
}
CLIENTS, FEW = 40, 12
#: Epsilon -> noise multiplier of the model; the multiplier of numbers is twice as large. A strategy
#: that weighs clients by one number reaches this epsilon after five rounds at delta = 1e-5, by
#: Flower's accountant.
NOISE = {10: 1.33, 3: 3.74, 1: 10.12}
DELTA = 1e-5


class SmallCNN(Classifier):
    """The ``cnn`` with 8, 16 and 16 channels: few parameters (4,402), as noise grows with them."""

    def __init__(self, num_classes: int, shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = shape
        self.conv1 = nn.Conv2d(channels, 8, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, 8)
        self.conv2 = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, 16)
        self.conv3 = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm3 = nn.GroupNorm(4, 16)
        self.head = nn.Linear(16 * (height // 8) * (width // 8), num_classes)

    features = CNN.features


def private(epsilon: int) -> dict[str, Any]:
    """Return the settings of differential privacy; a client gets at most twice an equal weight."""
    return {
        "privacy.noise-multiplier": NOISE[epsilon],
        "privacy.number-noise-multiplier": 2 * NOISE[epsilon],
        "privacy.clip": 1.0,
        "privacy.delta": DELTA,
        "privacy.noise-seed": 1,  # combined with the run's seed
        "bound.max-client-weight": 2 / CLIENTS,
    }


#: Condition -> its settings.
CONDITIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    **{f"epsilon {epsilon}": private(epsilon) for epsilon in NOISE},
    "few, plain": {"data.clients-per-domain": FEW // 4},
    "few, secure": {"data.clients-per-domain": FEW // 4, "secure-aggregation": True},
}
#: Condition -> condition without privacy to compare with.
AGAINST = {
    **{f"epsilon {epsilon}": "plain" for epsilon in NOISE},
    "few, secure": "few, plain",
}
#: Groups of conditions that are compared, and therefore share their federations.
GROUPS = (("plain", *(f"epsilon {epsilon}" for epsilon in NOISE)), ("few, plain", "few, secure"))
#: Number of federations that run in all conditions before any further federation.
FIRST = 3


# --- the runs --------------------------------------------------------------------------------


def settings(data: str, condition: str, strategy: str) -> dict[str, Any]:
    """Return the settings that the runs of a cell share."""
    flat = read_toml(HERE / f"{DATA[data]}-cpu.toml") | CONDITIONS[condition]
    if strategy == "uniform" and "bound.max-client-weight" in flat:
        flat["bound.max-client-weight"] = 1 / CLIENTS  # uniform weights never exceed this
    return flat | STRATEGIES[strategy]


def name_of(data: str, condition: str, strategy: str) -> str:
    """Return the prefix of the names of a cell's run folders."""
    return f"{data}-{condition}-{strategy}".replace(", ", "-").replace(" ", "-")


def cells(data: str, group: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield the cells of a data set and a group of conditions."""
    for condition in group:
        for strategy in STRATEGIES:
            yield data, condition, strategy


def plan(federations: int, folder: Path, data_dir: str) -> Plan:
    """Return all runs: first those of `FIRST` federations, then federation by federation."""
    blocks = [range(min(FIRST, federations)), *([n] for n in range(FIRST, federations))]
    order = [
        (group, data, number)
        for block in blocks
        for data in DATA
        for group in GROUPS
        for number in block
    ]
    runs = []
    for group, data, number in order:
        for cell in cells(data, group):
            flat = settings(*cell) | {
                "seed": number,
                "data.seed": number,
                "data.dir": data_dir,
                "checkpoint.every": 0,
                "output-dir": str(folder / "runs"),
                "run-name": f"{name_of(*cell)}-federation{number}",
            }
            runs.append(RunConfig.from_flat(flat))
    return Plan(runs)


def cell_of(run: Run) -> tuple[str, str, str]:
    """Return the cell of a run, from the name of its folder."""
    for data in DATA:
        for cell in cells(data, tuple(CONDITIONS)):
            if run.path.name.startswith(f"{name_of(*cell)}-federation"):
                return cell
    raise ValueError(f"{run.path} belongs to no cell of the table.")


def complete(runs: Sequence[Run], data: str) -> list[Run]:
    """Return a data set's runs, from federations where a group of conditions is complete."""
    completed = {(cell_of(run), run.seed): run for run in runs if run.status == "completed"}
    seeds = sorted({seed for _, seed in completed})
    return [
        completed[cell, seed]
        for group in GROUPS
        for cell in cells(data, group)
        for seed in seeds
        if all((other, seed) in completed for other in cells(data, group))
    ]


# --- the page --------------------------------------------------------------------------------


#: Metrics to compare. The last shows whether the worst domain loses more than the average.
METRICS = (
    Metric("average", title="AVG", of=lambda run: AVG(run.final())),
    Metric("worst domain", title="MIN", of=lambda run: MIN(run.final())),
    Metric("MIN minus AVG", of=lambda run: MIN(run.final()) - AVG(run.final())),
)


def methods(runs: Sequence[Run]) -> dict[tuple[str, str], Method]:
    """Return (condition, strategy) -> method with its runs."""
    by_cell: dict[tuple[str, str], list[Run]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        by_cell.setdefault(cell_of(run)[1:], []).append(run)
    return {
        key: Method(" ".join(key), federated(method_key(cell_runs[0].config)), tuple(cell_runs))
        for key, cell_runs in by_cell.items()
    }


def table(runs: Sequence[Run]) -> Table:
    """Return the differences from the same strategy without privacy, paired by federation."""
    by_cell = methods(runs)
    measure = Measure("price", METRICS, tuple(by_cell.values()), ("better", "worse"))
    pairs = {}
    for (condition, strategy), method in by_cell.items():
        baseline = by_cell.get((AGAINST.get(condition, ""), strategy))
        if baseline and (paired := paired_differences(method, baseline, measure)):
            pairs[condition, strategy] = paired
    judged = judge_family({" ".join(key): paired for key, paired in pairs.items()})
    groups = []
    for condition, base in AGAINST.items():
        rows = []
        for strategy in STRATEGIES:
            if (condition, strategy) in pairs:
                contrast = judged[f"{condition} {strategy}"]
                before = [by_cell[base, strategy].over_seeds(f.value) for f in METRICS[:2]]
                cells = [judged_cell(estimate, 0) for estimate in before]
                cells += [_cell(one.difference, one.sign) for one in contrast.by_metric]
                rows.append(Row(strategy, f"{contrast.n} federations", cells))
        if rows:
            groups.append(Group(f"{condition} against {base}", rows))
    return Table(
        title="What privacy takes: differences from the same strategy without it, in points",
        caption=(
            "AVG, MIN: accuracy without privacy in %, average and worst domain. Then the "
            "differences: mean over federations [simultaneous 95 % interval]; below 0 in the last "
            "column: the worst domain loses more points than the average. ▲ more, ▼ less: "
            "p < 0.05 (Holm over the table), from 5 federations on."
        ),
        columns=["AVG", "MIN", *(f"{metric.title}: difference" for metric in METRICS)],
        groups=groups,
    )


def _cell(difference: Difference, better: int) -> Cell:
    cell = judged_cell(difference, better, signed=True)
    if math.isnan(difference.low):
        return cell
    low, high = map(format_number, (difference.low, difference.high))
    return replace(cell, spread=f"[{low}, {high}]")


def text(summary: Path) -> str:
    """Return the generated part of the page: the differences, and the usual tables."""
    of_differences = "\n\n".join(["", *markdown_of([table(read_summary(summary))])])
    return f"\n{of_differences}\n\n{generated_markdown(summary)}"


def main() -> None:
    """Execute the runs if --output-dir is given, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--federations", type=int, default=10)
    options = parser.parse_args()
    if options.output_dir:
        all_runs = plan(options.federations, options.output_dir.absolute(), options.data_dir)
        with suppress(KeyboardInterrupt):  # then write the page with the completed runs
            run_comparison(all_runs, options.output_dir, Console(), 1)
        runs = []
        for folder in run_folders(options.output_dir / "runs"):
            with suppress(RunFolderError):  # the run was interrupted before its first evaluation
                runs.append(read_run(folder))
        for data, name in DATA.items():
            if complete_runs := complete(runs, data):
                write_summary(complete_runs, HERE / f"{name}.csv")
    for name in DATA.values():
        if (summary := HERE / f"{name}.csv").exists():
            replace_generated_block(PAGE, summary, text(summary))


if __name__ == "__main__":
    main()
