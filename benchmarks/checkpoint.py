"""Measure the seconds and bytes of a checkpoint, which a run writes after every round by default.

    python benchmarks/checkpoint.py            # about a minute

Two rounds of twenty clients are merged first, so that the state includes FedHEAL's tables and the
gradients that FedFV remembers. `save` writes the file and waits for the disk; `load` reads the file
and verifies its checksum. For comparison: a round of this size takes seconds to minutes. For
shorter rounds, raise `checkpoint.every` to write fewer checkpoints.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import log_progress, machine_facts, markdown, version_facts
from merge import MB, Answers

from fairflower.aggregation.records import decode_record
from fairflower.flower_compat import set_task_identity
from fairflower.server import checkpoint
from fairflower.server.checkpoint import Checkpoint
from fairflower.strategies import FairStrategy, FedAvg, FedFV, FedHEAL

METHODS: dict[str, Callable[[], FairStrategy]] = {
    "FedAvg": FedAvg,
    "FedHEAL": FedHEAL,
    "FedFV, tau=3": lambda: FedFV(tau=3),
}
REPETITIONS = 5


def main() -> None:
    """Measure every strategy with two models and print the table."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    set_task_identity()
    rows = []
    for model in ("cnn", "resnet10"):
        answers = Answers(model, clients=20)
        for reply in answers.replies:
            reply.metric_records["metrics"]["received_loss"] = 1.0
        for name, make in METHODS.items():
            log_progress(f"{name}, {model}")
            rows.append([name, model, *measure(make(), answers)])
    print(f"\n{machine_facts()}; {version_facts('numpy')}", end="\n\n")
    print(markdown(["strategy", "model", "MB", "save s", "load s"], rows))


def measure(strategy: FairStrategy, answers: Answers) -> list[str]:
    """Return the cells of a row: megabytes, and median seconds to save and to load."""
    for server_round in (1, 2):
        strategy.aggregate_train(server_round, answers.messages(server_round, strategy))
    model = decode_record(answers.sent[0])
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        for server_round in range(REPETITIONS):
            begin = time.perf_counter()
            state = Checkpoint(server_round, model, strategy.state_dict(), 0.0, {}, {})
            checkpoint.save(Path(folder), state, keep=2)
            saved = time.perf_counter()
            checkpoint.load(Path(folder))
            seconds["save"].append(saved - begin)
            seconds["load"].append(time.perf_counter() - saved)
        (*_, newest) = Path(folder).rglob("*.safetensors")
        size = newest.stat().st_size
    return [f"{size / MB:.1f}", *(f"{statistics.median(s):.3f}" for s in seconds.values())]


if __name__ == "__main__":
    main()
