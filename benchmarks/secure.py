"""Measure time and bytes of a round under secure aggregation, relative to a plain round.

    python benchmarks/secure.py
    python benchmarks/secure.py --clients 20 --quick

Clients have eight random images each and train for one epoch, so that messages dominate the cost of
a round. All clients run in this process, on the inline engine, with q-FFL and the default network.
The plain and the masked run alternate, and their first rounds are not counted.

Columns: `CPU s` is the processor time of a round, of server and clients together; `x plain` is its
ratio to the plain round. `MB a client` is the size of all messages to and from a client in a round,
as serialized by Flower, and `messages` is their number in both directions.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import described_parser, log_progress, machine_facts, markdown, version_facts
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.common.serde import recorddict_to_proto
from many import write_data
from rich.console import Console

from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.engines.inline import InlineGrid
from fairflower.server.session import Session

SIDE = 16


class Counter:
    """Wrapper of fairflower's app that counts messages and bytes to and from all clients."""

    def __init__(self) -> None:
        self.messages = self.bytes = 0
        self.app = ClientApp()
        for register in (self.app.train(), self.app.train("measure"), self.app.query()):
            register(self.answer)

    def answer(self, message: Message, context: Context) -> Message:
        """Return the app's reply to a message, and count both."""
        self.count(message)  # before the app, as Flower's mod removes a part of the message
        reply = client_app(message, context)
        self.count(reply)
        return reply

    def count(self, message: Message) -> None:
        """Add a message to the counts."""
        self.messages += 1
        self.bytes += recorddict_to_proto(message.content).ByteSize()

    def take_counts(self) -> tuple[int, int]:
        """Return the counts of messages and bytes, and reset them."""
        counts = self.messages, self.bytes
        self.messages = self.bytes = 0
        return counts


def rounds(
    clients: int, secure: bool, count: int, folder: Path
) -> Iterator[tuple[float, float, int]]:
    """Yield processor time, messages and bytes of each round except the first."""
    config = RunConfig.from_flat(
        {
            "num-server-rounds": count,
            "secure-aggregation": secure,
            "strategy.name": "qffl",
            "data.name": "npz",
            "data.dir": str(folder),
            "data.clients-per-domain": clients,
            "data.examples-per-client": 8,
            "train.local-epochs": 1,
            "evaluate.every": count,
            "checkpoint.every": 0,
            "output-dir": str(folder / ("secure" if secure else "plain")),
        }
    )
    counter = Counter()
    measured: list[tuple[float, float, int]] = []
    before = time.process_time()

    def on_round(server_round: int, _: Any) -> None:
        nonlocal before
        measured.append((time.process_time() - before, *counter.take_counts()))
        before = time.process_time()

    Session(InlineGrid(counter.app, clients), config, Console(quiet=True), on_round=on_round).run()
    yield from measured[1:]


def rows(numbers: list[int], count: int) -> Iterator[list[str]]:
    """Yield a plain and a masked row for each number of clients."""
    for clients in numbers:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            write_data(folder, clients, SIDE)
            plain = 0.0
            for secure in (False, True):
                log_progress(f"{clients} clients, {'masked' if secure else 'plain'}")
                measured = list(rounds(clients, secure, count, folder))
                seconds = min(time for time, _, _ in measured)
                plain = plain or seconds
                _, messages, size = measured[-1]
                yield [
                    f"{clients}, {'masked' if secure else 'plain'}",
                    f"{seconds:.2f}",
                    f"{seconds / plain:.1f}",
                    f"{size / clients / 1e6:.2f}",
                    f"{messages / clients:.0f}",
                ]


def main() -> None:
    """Print the table."""
    parser = described_parser(__doc__)
    parser.add_argument("--clients", default="20,100")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    options = parser.parse_args()
    count = 2 if options.quick else options.rounds
    table = list(rows([int(number) for number in options.clients.split(",")], count))
    print(f"{machine_facts()}; {version_facts('numpy', 'flwr', 'torch')}\n")
    print(markdown(["clients", "CPU s", "x plain", "MB a client", "messages"], table))


if __name__ == "__main__":
    main()
