"""Measure the effect of several liars in training, and the cost of bounds to honest clients.

    python benchmarks/liars.py --data-dir <folder> --output-dir <folder>   # can be resumed
    python benchmarks/liars.py                           # the table, from benchmarks/liars.csv

Digits with twenty clients: twelve of MNIST, five of USPS, two of SYN and one of SVHN. Liars are
clients of MNIST, so the small domains SVHN and SYN are always honest. All liars tell the same lie
(`Liar`). Krum, the median and the trimmed mean are Flower's strategies. The lies and the settings
are defined below; the table is in experiments/liars.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

import numpy as np
from common import markdown
from flwr.app import Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from rich.console import Console

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.hooks import Options
from fairflower.aggregation.records import decode_record
from fairflower.aggregation.strategy import FairStrategy
from fairflower.arguments import Range
from fairflower.arrays import record_of
from fairflower.config import RunConfig
from fairflower.paths import run_folders
from fairflower.plans.execution import run_comparison
from fairflower.plans.plan import Plan
from fairflower.published.image_sets import Digits
from fairflower.report import Run, read_run, write_summary
from fairflower.report.summary import read_summary
from fairflower.training.batches import Examples
from fairflower.training.trainer import Trainer

Lie = Literal["labels", "updates", "loss"]

#: ID of the first liar. Clients 0 to 11 have MNIST, in the order of their numbers of images.
FIRST = 4
#: Factor of a liar's update, and the loss that a liar claims (guessing has 2.3).
FACTOR, CLAIM = 10.0, 100.0


class UnequalDigits(Digits):
    """Digits where the clients of a domain also have unequal numbers of images."""

    imbalanced_within = True


class Liar(Trainer):
    """Plain training, where some clients lie.

    labels
        Liars train on false labels: 9 minus the digit.
    updates
        False labels, and an update ten times as long.
    loss
        False labels, and a loss of 100.
    """

    def __init__(
        self,
        *arguments: Any,
        lie: Lie = "labels",
        liars: Annotated[int, Range(0)] = 2,
        **options: Any,
    ) -> None:
        super().__init__(*arguments, **options)
        self.lie = lie if FIRST <= self.client_id < FIRST + liars else ""
        self.received: Arrays = {}

    @cached_property
    def train_examples(self) -> Examples:
        """The training examples; a liar's have false labels."""
        train = self.data.train
        if self.lie:
            train = train._replace(y=9 - train.y)
        return self.prepared(train, "training", self.data.augment)

    def evaluate(self, examples: Examples) -> dict[str, float]:
        """Return loss and accuracy; the loss of a liar may be false."""
        values = super().evaluate(examples)
        return values | {"loss": CLAIM} if self.lie == "loss" else values

    def receive(self, arrays: Mapping[str, Any]) -> None:
        """Load the received model, and keep a reference to its arrays."""
        super().receive(arrays)
        self.received = dict(arrays)

    def send(self) -> Arrays:
        """Return the model; with the lie "updates", the update is multiplied by `FACTOR`."""
        arrays = super().send()
        if self.lie != "updates":
            return arrays
        return {
            name: (self.received[name] + FACTOR * (array - self.received[name])).astype(array.dtype)
            for name, array in arrays.items()
        }


class FlowerStrategy(FairStrategy):
    """Adapter: merges the checked replies of this package by a strategy of Flower."""

    def flower(self) -> flower.FedAvg:
        """Return the Flower strategy to use."""
        raise NotImplementedError

    def merge(self, cohort: Cohort) -> Arrays:
        """Merge the clients' models by Flower's strategy."""
        replies = [
            Message(
                RecordDict(
                    {
                        "arrays": record_of(arrays),
                        "metrics": MetricRecord({"num-examples": float(examples)}),
                    }
                ),
                dst_node_id=client,
                message_type="train",
            )
            for client, arrays, examples in zip(
                cohort.client_ids, cohort.returned, cohort.num_examples, strict=True
            )
        ]
        merged, _ = self.flower().aggregate_train(cohort.server_round, replies)
        assert merged is not None
        return {
            name: array.astype(cohort.received[name].dtype)
            for name, array in decode_record(merged).items()
        }


class Krum(FlowerStrategy):
    """Krum: the model of the client with the nearest neighbors (Blanchard et al. 2017)."""

    paper = "Blanchard et al., NeurIPS 2017"

    def __init__(self, *, liars: Annotated[int, Range(0)] = 4, **options: Unpack[Options]) -> None:
        super().__init__(**options)
        self.liars = liars

    def flower(self) -> flower.FedAvg:
        return flower.Krum(num_malicious_nodes=self.liars)


class Median(FlowerStrategy):
    """The coordinate-wise median of the clients' models (Yin et al. 2018)."""

    paper = "Yin et al., ICML 2018"

    def flower(self) -> flower.FedAvg:
        return flower.FedMedian()


class TrimmedMean(FlowerStrategy):
    """The mean without the fractions ``beta`` of smallest and largest values per coordinate."""

    paper = "Yin et al., ICML 2018"

    def __init__(
        self, *, beta: Annotated[float, Range(0, 0.5)] = 0.2, **options: Unpack[Options]
    ) -> None:
        super().__init__(**options)
        self.beta = beta

    def flower(self) -> flower.FedAvg:
        return flower.FedTrimmedAvg(beta=self.beta)


# --- the runs --------------------------------------------------------------------------------

DOMAINS = "mnist,usps,syn,svhn"
#: The small domains, which are honest: two clients and one client.
SMALL = ("syn", "svhn")
SETTINGS: dict[str, Any] = {
    "num-server-rounds": 20,
    "min-clients": 20,  # every round needs all clients
    "evaluate.every": 2,
    "data.name": "liars:UnequalDigits",
    "data.domains": DOMAINS,
    "data.imbalance-factor": 12,
    "data.examples-per-client": 80,
    "data.image-size": 16,
    "data.augment": False,
    "data.test-examples": 300,
    "train.local-epochs": 1,
    "train.batch-size": 32,
    "train.lr": 0.08,
}
CAP = {"bound.max-client-weight": 0.1}
CLIP = {"bound.clip-update-median": 1.0}
LOOSE = {"bound.clip-update-median": 2.0}

#: Row of the table -> strategy and bounds.
ROWS: dict[str, dict[str, Any]] = {
    "uniform": {"strategy.name": "uniform"},
    "uniform, clip 1": {"strategy.name": "uniform", **CLIP},
    "uniform, clip 2": {"strategy.name": "uniform", **LOOSE},
    "term": {"strategy.name": "term"},
    "term, cap": {"strategy.name": "term", **CAP},
    "term, cap, clip 2": {"strategy.name": "term", **CAP, **LOOSE},
    "Krum": {"strategy.name": "liars:Krum"},
    "median": {"strategy.name": "liars:Median"},
    "trimmed mean": {"strategy.name": "liars:TrimmedMean"},
}
#: Column of the table -> settings of the liars.
COLUMNS: dict[str, dict[str, Any]] = {
    "honest": {"client.name": "sgd"},
    **{
        f"{lie}, {liars}": {"client.name": "liars:Liar", "client.lie": lie, "client.liars": liars}
        for lie in ("labels", "updates", "loss")
        for liars in (2, 4)
    },
}
CSV = Path(__file__).with_name("liars.csv")


def cells() -> Iterator[tuple[str, str]]:
    """Yield pairs of row and column; false losses are tried on TERM alone, which reads losses."""
    for row, settings in ROWS.items():
        for column in COLUMNS:
            if "loss" not in column or settings["strategy.name"] == "term":
                yield row, column


def name_of(row: str, column: str) -> str:
    """Return the prefix of the names of a cell's run folders."""
    return f"{row}-{column}".replace(", ", "-").replace(" ", "-")


def plan(federations: int, folder: Path, data: str) -> Plan:
    """Return all runs, federation by federation, honest runs first."""
    runs = []
    for number in range(federations):
        for row, column in cells():
            seeds = {"seed": number, "data.seed": number, "data.dir": data}
            name = f"{name_of(row, column)}-federation{number}"
            place = {"output-dir": str(folder / "runs"), "run-name": name}
            flat = {**SETTINGS, **ROWS[row], **COLUMNS[column], **seeds, **place}
            runs.append(RunConfig.from_flat(flat))
    # Honest runs come first.
    return Plan(sorted(runs, key=lambda run: run.client.name != "sgd"))


# --- the table -------------------------------------------------------------------------------


def cell_of(run: Run) -> tuple[str, str, int]:
    """Return row, column and federation of a run, from the name of its folder."""
    for row, column in cells():
        prefix = name_of(row, column)
        if run.path.name.startswith(f"{prefix}-federation"):
            return row, column, run.seed
    raise ValueError(f"{run.path} belongs to no cell of the table.")


def table(runs: Iterable[Run]) -> str:
    """Return the table, over federations with runs in all cells of a group of columns."""
    completed = {cell_of(run): run for run in runs if run.status == "completed"}
    numbers = sorted({federation for _, _, federation in completed})

    def complete(columns: Iterable[str]) -> list[int]:
        wanted = [(row, column) for row, column in cells() if column in set(columns)]
        return [n for n in numbers if all((*cell, n) in completed for cell in wanted)]

    honest, lying = complete(["honest"]), complete(COLUMNS)
    lies = [column for column in COLUMNS if column != "honest"]
    rows = []
    for row in ROWS:
        honest_accuracies = [_accuracies(completed[row, "honest", n]) for n in honest]
        shown = [
            _format([values[name] for values in honest_accuracies]) for name in ("AVG", *SMALL)
        ]
        for column in lies:
            runs_there = [completed.get((row, column, n)) for n in lying]
            shown.append(
                _format([_accuracies(run)["AVG"] for run in runs_there if run is not None]) or "-"
            )
        rows.append([row, *shown])
    header = ["", "AVG", *SMALL, *lies]
    return (
        f"Nobody lies: federations {_listed(honest)}. Liars: federations {_listed(lying)}.\n\n"
        + markdown(header, rows)
    )


def _accuracies(run: Run) -> dict[str, float]:
    final = dict(zip(run.domains, (100 * run.final()).tolist(), strict=True))
    return final | {"AVG": float(np.mean(list(final.values())))}


def _format(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ±{np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{spread}"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def main() -> None:
    """Execute the runs if --output-dir is given, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", default="")
    parser.add_argument("--output-dir", type=Path)
    parser.add_argument("--federations", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    if options.output_dir:
        all_runs = plan(options.federations, options.output_dir.absolute(), options.data_dir)
        with suppress(KeyboardInterrupt):  # then print the table of the completed runs
            run_comparison(all_runs, options.output_dir, Console(), options.jobs)
        runs = [read_run(folder) for folder in run_folders(options.output_dir / "runs")]
        write_summary([run for run in runs if run.status == "completed"], CSV)
    runs = read_summary(CSV)
    print(f"{table(runs)}\n\n{runs[0].info['machine']['processor']}")


if __name__ == "__main__":
    main()
