"""One run at the server: rounds of training and testing, written as they happen."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord
from flwr.serverapp import Grid
from rich.console import Console

from fairflower.config import ConfigError, RunConfig
from fairflower.data import Federation, prepare, resolve
from fairflower.evaluation import Arrays, Evaluator
from fairflower.names import CLIENTS
from fairflower.progress import RunProgress
from fairflower.roster import Stopped, call_the_roll, check_size, send_and_receive
from fairflower.runfolder import RunFolder
from fairflower.strategies import STRATEGIES, FairStrategy, build_exchange
from fairflower.strategies.observe import UpdateConsistency

logger = logging.getLogger("flwr").getChild("fairflower")

#: What clients may report of their tests: the global model's, and their own model's.
_ACCURACIES = ("accuracy", "personal_accuracy")


class Session:
    """A federation, a strategy and a run folder, from the first round to the last.

    Parameters
    ----------
    grid : Grid
        Flower's link to the nodes, of whatever engine.
    config : RunConfig
        What to run.
    console : Console
        Where progress is shown.
    label, title : str
        The method's name in reports, and on the screen; default ``strategy.name``.
    stop : threading.Event
        Set it to end the run early, with a readable run folder.
    """

    def __init__(
        self,
        grid: Grid,
        config: RunConfig,
        console: Console,
        *,
        label: str = "",
        title: str = "",
        stop: threading.Event | None = None,
    ) -> None:
        self.grid = grid
        # Clients get this config with every message: where files are must not
        # depend on the folder or the environment that a worker runs in.
        # Clients that have the data to themselves also know where.
        data = config.data if config.evaluate.by == "clients" else resolve(config.data)
        self.config = dataclasses.replace(config, data=data, model=config.model.resolve())
        self.console = console
        self.label = label or config.label
        self.title = title or self.label
        self.stop = stop or threading.Event()
        #: Tells clients that serve several runs which of their state is of this one.
        self.run_id = uuid.uuid4().hex
        #: Made when the first round begins.
        self.folder: RunFolder | None = None

    def run(self) -> Path:
        """Train, and return the run folder.

        Raises
        ------
        ConfigError, DataError
            If the run cannot begin.
        RoundFailed
            If too few clients sent a usable update.
        Stopped
            If ``stop`` was set.
        """
        config = self.config
        self.federation, nodes = self._meet()
        self.evaluator = Evaluator(config, self.federation)
        strategy: Any = STRATEGIES[config.strategy.name]
        method = CLIENTS[config.client.name]
        self.strategy: FairStrategy = strategy(
            **config.strategy.args,
            fraction_train=config.fraction_train,
            min_train_nodes=1,
            min_evaluate_nodes=1,
            min_available_nodes=1,
            min_clients=config.min_clients or None,
            buffers=self.evaluator.buffers,
            exchanges=[build_exchange(name, config.client.args) for name in method.exchanges],
            observers=[UpdateConsistency(window)] if (window := config.observe.window) else [],
        )
        self.strategy.enroll(nodes, config.seed)
        folder = self.folder = RunFolder(config, self.label, self._facts())
        progress = RunProgress(self.console, self.title, config.num_server_rounds)
        with _logged(folder):
            progress.start(folder.path)
            try:
                self._rounds(folder, progress)
            except Stopped:
                folder.finish("stopped")
                raise
            except BaseException as error:
                folder.finish("failed", f"{type(error).__name__}: {error}")
                raise
            else:
                folder.finish("completed")
            finally:
                progress.stop()
                self.console.print(f"run folder: {folder.path}", soft_wrap=True, style="dim")
        return folder.path

    def _meet(self) -> tuple[Federation, dict[int, int]]:
        """The federation and its nodes; as the clients know it where they do the testing."""
        config, timeout, stop = self.config, self.config.round_timeout, self.stop
        if config.evaluate.by == "clients":
            roster = call_the_roll(self.grid, None, timeout, stop, self._settings())
            federation = Federation.from_json(roster.federation, Path("at-the-clients"))
        else:
            federation = prepare(config.data)
            roster = call_the_roll(self.grid, len(federation.clients), timeout, stop)
        num_clients = len(federation.clients)
        check_size(len(roster.nodes), num_clients)
        asked = max(1, int(num_clients * config.fraction_train + 1e-9))
        if config.min_clients > asked:
            raise ConfigError(
                f"min-clients = {config.min_clients}: a round asks {asked} clients. Lower it, "
                "or raise fraction-train or data.clients-per-domain."
            )
        return federation, {client: roster.nodes[client] for client in range(num_clients)}

    def _rounds(self, folder: RunFolder, progress: RunProgress) -> None:
        arrays = _record(self.evaluator.arrays())
        last = self.config.num_server_rounds
        for server_round in range(last + 1):
            seconds: dict[str, float] = {}
            accuracies: dict[str, float] = {}
            with _timed(seconds, "seconds"):
                if server_round > 0:
                    arrays = self._train(folder, server_round, arrays, seconds)
                if server_round % self.config.evaluate.every == 0 or server_round == last:
                    with _timed(seconds, "evaluate_seconds"):
                        accuracies = self._evaluate(folder, server_round, arrays)
            folder.history(server_round, "run", "", seconds)
            progress.round(server_round, accuracies)

    def _train(
        self,
        folder: RunFolder,
        server_round: int,
        arrays: ArrayRecord,
        seconds: dict[str, float],
    ) -> ArrayRecord:
        strategy = self.strategy
        settings = self._settings()
        with _timed(seconds, "train_seconds"):
            messages = strategy.configure_train(server_round, arrays, settings, self.grid)
            replies = send_and_receive(self.grid, messages, self.config.round_timeout, self.stop)
        with _timed(seconds, "merge_seconds"):
            merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        for k, client in enumerate(strategy.client_ids):
            scalars = {name: values[k] for name, values in strategy.client_metrics.items()}
            folder.history(server_round, "client", str(client), scalars)
        folder.model(_values(merged))
        folder.diagnostics(
            server_round, strategy.client_ids, strategy.diagnostics, strategy.dropped
        )
        return merged

    def _evaluate(
        self, folder: RunFolder, server_round: int, arrays: ArrayRecord
    ) -> dict[str, float]:
        """Each domain's accuracy, as the server or the clients find it."""
        by = self.config.evaluate.by
        results: dict[str, dict[str, float]] = {}
        if by in ("clients", "both") and server_round > 0:
            results = self._ask_clients(folder, server_round, arrays)
        if by in ("server", "both"):
            # What clients alone can measure stays.
            tested = self.evaluator(_values(arrays))
            results = {domain: results.get(domain, {}) | tested[domain] for domain in tested}
        for domain, values in results.items():
            folder.history(server_round, "domain", domain, values)
        return {domain: values["accuracy"] for domain, values in results.items()}

    def _ask_clients(
        self, folder: RunFolder, server_round: int, arrays: ArrayRecord
    ) -> dict[str, dict[str, float]]:
        """The clients' own results; a domain's accuracies are their means by test images."""
        settings = self._settings()
        messages = self.strategy.configure_evaluate(server_round, arrays, settings, self.grid)
        replies = send_and_receive(self.grid, messages, self.config.round_timeout, self.stop)
        answers = self.strategy.evaluations(server_round, replies)
        accuracies = [name for name in _ACCURACIES if all(name in a for a in answers.values())]
        sums = {domain: dict.fromkeys(accuracies, 0.0) for domain in self.federation.domains}
        tested = dict.fromkeys(self.federation.domains, 0.0)
        for client, answer in sorted(answers.items()):
            domain = self.federation.clients[client].domain
            found = {name: float(answer[name]) for name in accuracies}  # type: ignore[arg-type]
            loss, n = float(answer["eval_loss"]), float(answer["num-examples"])  # type: ignore[arg-type]
            folder.history(server_round, "client", str(client), {**found, "loss": loss})
            for name, value in found.items():
                sums[domain][name] += value * n
            tested[domain] += n
        return {
            domain: {name: value / n for name, value in sums[domain].items()}
            for domain, n in tested.items()
            if n
        }

    def _settings(self) -> ConfigRecord:
        """The whole run config, which travels with every message."""
        flat: dict[str, Any] = {**self.config.to_flat(), "run-id": self.run_id}
        return ConfigRecord(flat)

    def _facts(self) -> dict[str, Any]:
        federation = self.federation
        return {
            "num_parameters": self.evaluator.num_parameters,
            "model_bytes": sum(a.nbytes for a in self.evaluator.arrays().values()),
            "num_classes": federation.num_classes,
            "shape": list(federation.shape),
            "domains": list(federation.domains),
            "sources": list(federation.sources),
            "clients": [
                {
                    "client_id": client.client_id,
                    "domain": client.domain,
                    "num_examples": client.num_examples,
                    "class_counts": list(client.class_counts),
                }
                for client in federation.clients
            ],
        }


def _record(arrays: Arrays) -> ArrayRecord:
    return ArrayRecord({name: Array(array) for name, array in arrays.items()})


def _values(arrays: ArrayRecord) -> Arrays:
    return {name: array.numpy() for name, array in arrays.items()}


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    seconds[name] = time.monotonic() - begin


@contextmanager
def _logged(folder: RunFolder) -> Iterator[None]:
    """Copy Flower's log, and fairflower's, into the run folder."""
    handler = logging.FileHandler(folder.path / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root = logging.getLogger("flwr")
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()
