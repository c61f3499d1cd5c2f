"""Seconds and bytes of a checkpoint, which a run writes after every round by default.

    python benchmarks/checkpoint.py            # a minute or so

Twenty clients have been merged twice, so FedHEAL has its tables and FedFV the
gradients that it remembers. `save` writes the file and waits for the disk; `load` reads
it and compares the checksum. A process of this size takes seconds to minutes for the
round before it; where it does not, `checkpoint.every` makes checkpoints rarer.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from common import machine_facts, markdown, say, version_facts
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
    logging.getLogger("flwr").setLevel(logging.WARNING)
    set_task_identity()
    rows = []
    for model in ("cnn", "resnet10"):
        answers = Answers(model, clients=20)
        for reply in answers.replies:
            reply.metric_records["metrics"]["received_loss"] = 1.0
        for name, make in METHODS.items():
            say(f"{name}, {model}")
            rows.append([name, model, *measure(make(), answers)])
    print(f"\n{machine_facts()}; {version_facts('numpy')}", end="\n\n")
    print(markdown(["strategy", "model", "MB", "save s", "load s"], rows))


def measure(strategy: FairStrategy, answers: Answers) -> list[str]:
    for server_round in (1, 2):
        strategy.aggregate_train(server_round, answers.messages(server_round, strategy))
    model = decode_record(answers.sent[0])
    seconds: dict[str, list[float]] = {"save": [], "load": []}
    with tempfile.TemporaryDirectory() as folder:
        for server_round in range(REPETITIONS):
            begin = time.perf_counter()
            now = Checkpoint(server_round, model, strategy.state_dict(), 0.0, {})
            checkpoint.save(Path(folder), now, keep=2)
            middle = time.perf_counter()
            checkpoint.load(Path(folder))
            seconds["save"].append(middle - begin)
            seconds["load"].append(time.perf_counter() - middle)
        (*_, newest) = Path(folder).rglob("*.safetensors")
        size = newest.stat().st_size
    return [f"{size / MB:.1f}", *(f"{statistics.median(s):.3f}" for s in seconds.values())]


if __name__ == "__main__":
    main()
