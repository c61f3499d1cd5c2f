"""The rounds of a run: training, merging, testing and writing results."""

import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fairflower.aggregation.messages import add_client_config
from fairflower.arrays import arrays_of, record_of
from fairflower.engines.inline import send_and_receive
from fairflower.errors import (
    ConfigError,
    RoundFailed,
    RunInterrupted,
    StopRun,
    StrategyError,
    logger,
    naming_failures,
)
from fairflower.machine import release_memory
from fairflower.models import initial_local_arrays
from fairflower.numerics.group_fairness import Counts
from fairflower.paths import client_states
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import metric_names
from fairflower.secure.protocol import Halted
from fairflower.secure.rounds import train_masked
from fairflower.server import checkpoint
from fairflower.server.admission import admit, leave_out, note_withdrawn
from fairflower.server.checkpoint import Checkpoint
from fairflower.server.discovery import NodeDiscovery
from fairflower.server.evaluation import Findings, counts_in
from fairflower.server.examples import store_examples
from fairflower.server.folder import LOG, RunFolder
from fairflower.server.history import (
    HELD_OUT,
    LEVELS,
    Metrics,
    domain_scores,
    early_stop_reason,
    test_keys,
)
from fairflower.server.own_models import OwnModels, SharedModels
from fairflower.server.privacy import PrivacyLedger
from fairflower.server.progress import RunProgress
from fairflower.server.registration import NodeTracker
from fairflower.server.setup import RunSetup
from fairflower.strategies import FairStrategy

#: Multiple of the cross entropy of random guessing above which training counts as diverged.
DIVERGED = 10

#: Seconds between two releases of free memory, each of which takes about 0.2 seconds.
_RELEASE_EVERY = 5.0


class RoundLoop:
    """Trains, merges and tests in all rounds of a run."""

    def __init__(
        self, grid: Grid, setup: RunSetup, folder: RunFolder, stop: threading.Event
    ) -> None:
        self.grid, self.setup, self.folder, self.stop = grid, setup, folder, stop
        self.config, self.strategy, self._round = setup.config, setup.strategy, 0
        self._settings = {**setup.settings(), "run-id": folder.run_id}
        numbers = len(self.strategy._measurements)
        begun = (folder.fact("privacy") or {}).get("rounds", 0)
        self._privacy = PrivacyLedger(self.config.privacy, numbers, begun)
        self._found = Findings(folder, self.config, setup.registry)
        alone, by = self.config.reference == "alone", self.config.evaluate.by
        self._own_models = OwnModels(setup, folder) if alone and by != "clients" else None
        shared = SharedModels(setup, folder, grid, self._settings, self._exchange)
        self._elsewhere = shared if alone and setup.registry.sites else self._own_models
        self._released = time.monotonic()
        described = self.settings() if by == "clients" else None
        patience = min(self.config.round_timeout, 60)
        others = NodeDiscovery(grid, patience, stop, described, self.config.listed_sites)
        self._tracker = NodeTracker(others, setup.registry)

    def settings(self) -> ConfigRecord:
        """Return the config for messages; a new record each time, because strategies add to it."""
        return ConfigRecord(dict(self._settings))

    def run(
        self,
        saved: Checkpoint | None,
        progress: RunProgress,
        on_round: Callable[[int, Metrics], bool],
    ) -> None:
        """Execute all rounds, or the rounds after a checkpoint.

        ``on_round`` gets a round's metrics after they have been written. If it returns True, the
        round is saved (unless ``checkpoint.every`` is 0) and ``StopRun`` is raised. Any other
        exception ends the run before the round is saved.
        """
        arrays = record_of(saved.model if saved else self.setup.evaluator.arrays())
        last, every = self.config.num_server_rounds, self.config.checkpoint.every
        if saved and (saved.server_round == last or self._ends_early()):
            done = saved.server_round  # the run was stopped after its last round
            _check_summed(self.folder, done)
            tested = f"{self.folder.metrics.primary.name}/"
            if not any(tested in name for name in self.folder.metrics.of(done)):
                self._evaluate(done, arrays)  # it was not known to be the last round
                self._test_elsewhere(done, arrays)
                self.folder.append_metrics(done, "run", "", self._keep_best(done, arrays))
                self._save(done, arrays)  # otherwise more rounds would cut off this test
            _end(self.folder, self.setup, done, arrays)
            return
        first = saved.server_round + 1 if saved else 0
        if trained := self.setup.trained:  # its round is tested, and nothing is left to resume
            first, last, every = trained.server_round, trained.server_round, 0
        for server_round in range(first, last + 1):
            self._round, seconds = server_round, dict[str, float]()
            accuracies: dict[str, float] = {}
            with _timed(seconds, "seconds"):
                if server_round > 0 and not trained:
                    arrays = self._train(server_round, arrays, seconds)
                ending = server_round == last or self._ends_early()
                if ending:
                    _check_summed(self.folder, server_round)
                if server_round % self.config.evaluate.every == 0 or ending:
                    with _timed(seconds, "evaluate_seconds"):
                        accuracies = self._evaluate(server_round, arrays)
                    ending = ending or self._ends_early()
                if ending:
                    self._test_elsewhere(server_round, arrays)
            overall = seconds | self._privacy.metrics() | self._keep_best(server_round, arrays)
            self.folder.append_metrics(server_round, "run", "", overall)
            metrics = self.folder.metrics.of(server_round)
            progress.round(server_round, accuracies, metrics if accuracies else {})
            # Called before the checkpoint is written, so that a resumed run calls it again.
            stopped = on_round(server_round, metrics)
            if every and (server_round % every == 0 or ending or stopped):
                self._save(server_round, arrays)
            if time.monotonic() - self._released > _RELEASE_EVERY:
                release_memory()
                self._released = time.monotonic()
            if ending:
                self.folder.note("rounds", server_round)  # unless they have been trained here
                _end(self.folder, self.setup, server_round, arrays)
                return
            if stopped:
                raise StopRun

    def _ends_early(self) -> bool:
        """Return whether the privacy budget or the loss ends the run now, and record why."""
        reason = self._privacy.budget_reason()
        reason = reason or early_stop_reason(self.config, self.folder.metrics)
        if reason:
            self.folder.note("ended_early", reason)
        return bool(reason)

    def _keep_best(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Keep the model if its round is the best so far; return the best round as a metric."""
        folder, by, merit = self.folder, self.config.best, self.folder.metrics.merit
        # Of equal rounds the first is the best.
        if by and merit(server_round, by) > merit(folder.best_round, by):
            folder.write_best(server_round, arrays_of(arrays), self.config)
        return {"best_round": folder.best_round} if folder.best_round else {}

    def _save(self, server_round: int, arrays: ArrayRecord) -> None:
        folder = self.folder
        with self._naming_failures(server_round):
            state = self.strategy.state_dict()
        now = Checkpoint(
            server_round=server_round,
            model=arrays_of(arrays),
            state=state,
            seconds=folder.seconds,
            sizes=folder.sizes(),
            config=self.config.to_flat(),
            facts=folder.kept_facts(),
            best_round=folder.best_round,
            best={} if folder.best_round == server_round else folder.best,
        )
        checkpoint.save(folder.path, now, self.config.checkpoint.keep)

    def _train(
        self, server_round: int, arrays: ArrayRecord, seconds: dict[str, float]
    ) -> ArrayRecord:
        strategy, folder = self.strategy, self.folder
        before = dict(strategy.merged_rounds)
        merged: ArrayRecord | None
        with _timed(seconds, "train_seconds"):
            messages = self._configure(server_round, arrays)
            if self.stop.is_set():
                raise RunInterrupted  # before the round counts
            if self.config.privacy.on:
                self._privacy.rounds += 1
                self.folder.note("privacy", self._privacy.facts())
            if self.config.secure_aggregation:
                merged = self._summed(server_round, messages, arrays)
            else:
                replies = self._exchange(messages)
        if not self.config.secure_aggregation:
            with _timed(seconds, "merge_seconds"), self._naming_failures(server_round):
                merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        for k, client in enumerate(strategy.client_ids):
            scalars = {name: values[k] for name, values in strategy.client_metrics.items()}
            folder.append_metrics(server_round, "client", str(client), scalars)
        folder.write_model(arrays_of(merged))
        with self._naming_failures(server_round):  # a strategy may store anything there
            secret = {"clipped"} if self.config.privacy.on else ()  # it reveals norms of updates
            values = {n: value for n, value in strategy.diagnostics.items() if n not in secret}
            folder.append_diagnostics(server_round, strategy.client_ids, values, strategy.dropped)
        _check_client_states(strategy, folder, server_round, before)
        return merged

    def _summed(
        self, server_round: int, messages: Sequence[Message], arrays: ArrayRecord
    ) -> ArrayRecord:
        """Compute the next model by secure aggregation; keep the model if there is no sum."""
        with self._naming_failures(server_round):
            try:
                return train_masked(self.strategy, self._exchange, server_round, messages, arrays)
            except Halted as reason:
                text = "Round %d: secure aggregation stopped, so the model is unchanged: %s."
                logger.warning(text, server_round, reason)
                halted = self.folder.fact("halted_rounds") or {}
                self.folder.note("halted_rounds", halted | {str(server_round): str(reason)})
                return arrays

    def _configure(self, server_round: int, arrays: ArrayRecord) -> list[Message]:
        strategy, settings = self.strategy, self.settings()
        moved = self._tracker.locate()
        if admit(self.setup, self._tracker, self.folder, server_round) or moved:
            self.setup.enroll()
        leave_out(self.setup, self.folder)
        self.setup.check_left()
        settings["checkpoint-rounds"] = checkpoint.rounds(self.folder.path)
        settings["train.lr"] = self.config.train.lr_in(server_round, self.config.num_server_rounds)
        with self._naming_failures(server_round):
            asked = strategy.configure_candidates(server_round, arrays, self.settings())
        if asked:
            strategy.note_candidates(server_round, self._exchange(asked))
        with self._naming_failures(server_round):  # uses the enrolled clients, not the grid's nodes
            return list(strategy.configure_train(server_round, arrays, settings, self.grid))

    def _evaluate(self, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return each domain's primary score on test examples, or else on validation examples."""
        splits = filter(self.config.evaluates, ("test", "validation"))
        scores = [self._evaluate_on(split, server_round, arrays) for split in splits]
        return next(filter(None, scores), {})

    def _evaluate_on(self, split: str, server_round: int, arrays: ArrayRecord) -> dict[str, float]:
        """Return each domain's primary score, from the server or clients; NaN if untested."""
        by = self.config.evaluate.by
        results: dict[str, dict[str, float]] = {}
        counts: Mapping[int, Counts] = {}
        note = " (validation)" * (split != "test")
        if by in ("clients", "both") and server_round > 0:
            results, counts = self._ask_clients(split, server_round, arrays)
            for domain, of in results.items() if by == "clients" else ():
                self._found.lacking(f"a client of domain {domain}{note}", of)
        if by in ("server", "both"):
            # Metrics that only clients measure are not replaced.
            if self._own_models and server_round > 0:
                tested = self._own_models.test(server_round, split, arrays_of(arrays))
            else:
                tested = self.setup.evaluator(arrays_of(arrays), split)
            held_out = self.setup.federation.held_out
            scores, counts = tested.scores, tested.counts
            for domain, of in scores.items():
                self._found.lacking(f"domain {domain}{note}", of)
            if unseen := scores.pop(held_out, None):
                if tested.held_out_counts is not None:
                    unseen |= self._found.of_groups(tested.held_out_counts, f"domain {held_out}")
                self.folder.append_metrics(server_round, HELD_OUT, held_out, unseen)
            for domain, wrong in tested.failed.items():
                self._found.failed(server_round, f"domain {domain}", wrong)
            results = {domain: results.get(domain, {}) | scores[domain] for domain in scores}
        for domain, values in self._found.record_groups(server_round, split, counts).items():
            results[domain] |= values
        for domain, values in results.items():
            self.folder.append_metrics(server_round, LEVELS[split][0], domain, values)
        self._found.note()
        if not results:
            return {}
        # A domain is not tested if its sites are not connected.
        federation = self.setup.federation
        name = federation.learns.primary.name
        return {d: results.get(d, {}).get(name, math.nan) for d in federation.domains}

    def _test_elsewhere(self, server_round: int, arrays: ArrayRecord) -> None:
        """Test the models that clients keep on other domains, if they keep any."""
        if self._elsewhere and server_round > 0 and self.config.evaluates("test"):
            self._elsewhere.test_elsewhere(server_round, arrays_of(arrays))

    def _ask_clients(
        self, split: str, server_round: int, arrays: ArrayRecord
    ) -> tuple[dict[str, dict[str, float]], dict[int, Counts]]:
        """Return results per domain, weighted by test examples, and counts of people per client."""
        strategy, folder, federation = self.strategy, self.folder, self.setup.federation
        leave_out(self.setup, folder)
        settings = ConfigRecord({**self._settings, "split": split})
        messages = strategy.configure_evaluate(server_round, arrays, settings, self.grid)
        most = self.setup.max_test_sizes(split)
        replies = self._exchange(messages)
        task, groups = federation.learns, len(federation.group_names)
        answers = strategy._evaluations(server_round, replies, most, groups, task.scores)
        folder.append_dropped_in_test(server_round, strategy.dropped)
        self._found.failed_at_clients(server_round, answers, replies)
        keys = test_keys(answers, task, metric_names(self.config.evaluate.metrics))
        if self.setup.trained:  # clients have no personal models without training
            keys.pop(f"personal_{task.primary.name}", None)
        for client, answer in sorted(answers.items()):
            values = {name: float(answer[key]) for name, key in keys.items() if key in answer}  # type: ignore[arg-type]
            folder.append_metrics(server_round, LEVELS[split][1], str(client), values)
        # Also of clients that train alone: means of RMSEs are below the RMSE of all examples.
        return domain_scores(answers, keys, federation), counts_in(answers)

    def _exchange(self, messages: Iterable[Message]) -> list[Message]:
        """Send a round's messages with the clients' ids, and return the replies."""
        messages = list(messages)
        clients = {node: client for client, node in self.setup.registry.nodes.items()}
        for message in messages:
            if "config" in message.content:  # messages about masks have none
                client = clients[message.metadata.dst_node_id]
                add_client_config(message, "config", {"client-id": client})
        replies = send_and_receive(self.grid, messages, self.config.round_timeout, self.stop)
        asked = {m.metadata.message_id: clients[m.metadata.dst_node_id] for m in messages}
        note_withdrawn(self.setup, self.folder, self._round, asked, replies)
        return replies

    @contextmanager
    def _naming_failures(self, server_round: int) -> Iterator[None]:
        """Raise ``StrategyError`` for exceptions in the strategy or in handling its diagnostics."""
        name, module = self.config.strategy.name, type(self.strategy).__module__
        remedy = f"The traceback is in {self.folder.path / LOG}."
        try:
            with naming_failures(StrategyError, f"Round {server_round}: {name}", module, remedy):
                yield
        except StrategyError as error:
            raise _with_remedy(error, self.setup, self.config.client.name) from error.__cause__
        except ConfigError as error:  # for example, weights that are not on the simplex
            raise ConfigError(f"Round {server_round}, {name}: {error}") from error


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    begin = time.monotonic()
    yield
    seconds[name] = time.monotonic() - begin


def _check_client_states(
    strategy: FairStrategy, folder: RunFolder, server_round: int, merged: Mapping[int, int]
) -> None:
    """Log a warning about clients that lost the state of their last merged round."""
    rounds = strategy.client_metrics.get("state-round")
    # Private clients report no such round, but their state may be on this machine.
    if rounds is not None or (client_states() / folder.run_id).is_dir():
        folder.note("client_state", True)
    if rounds is None:
        return
    for client, state in zip(strategy.client_ids, rounds.tolist(), strict=True):
        if state < merged.get(client, 0):
            text = "Round %d: %s has lost its state from round %d and trained with %s."
            how = f"its state from round {state:.0f}" if state else "a new state"
            name = strategy._enrolled.name_of(client)
            logger.warning(text, server_round, name, merged[client], how)


def _end(folder: RunFolder, setup: RunSetup, server_round: int, arrays: ArrayRecord) -> None:
    """Store examples of the final model's tests, and warn if it is far worse than guessing."""
    store_examples(setup, folder, arrays_of(arrays), server_round)
    tested = folder.metrics.of(server_round).items()
    losses = [v for name, v in tested if name.startswith(("loss/", "validation_loss/"))]
    loss = float(np.max([0.0, *losses]))  # NaN if any loss is
    guessing = setup.federation.learns.guess(setup.federation.num_classes)
    if guessing is None:  # then the initial model's loss stands for it, if it was tested
        first = folder.metrics.of(0).items()
        guessing = max((v for name, v in first if name.startswith("loss/")), default=math.inf)
    diverged = not loss <= DIVERGED * guessing
    folder.note("diverged", loss if diverged else None)
    if diverged:
        further = ", or bound the updates (bound.clip-update-norm)"
        if setup.config.privacy.on:
            further = ", or the noise (privacy.clip)"
        elif setup.config.secure_aggregation:  # the server sees no single update to bound
            further = ""
        if setup.config.server.optimizer != "none":
            further = f" or server.lr{further}"
        text = "The model's test loss is %.3g, but that of guessing is %.3g: training "
        text += "has diverged. Decrease train.lr%s."
        logger.warning(text, loss, guessing, further)


def _check_summed(folder: RunFolder, server_round: int) -> None:
    """Raise ``RoundFailed`` if secure aggregation has not produced a sum in any round."""
    halted = folder.fact("halted_rounds") or {}
    if server_round and all(str(r) in halted for r in range(1, server_round + 1)):
        raise RoundFailed(
            f"Secure aggregation stopped in every round (1 to {server_round}), so the model "
            f"is still the initial model. The last reason: {halted[str(server_round)]}. The "
            "log lists each client's reasons. Correct the cause, then resume the run."
        )


def _with_remedy(error: StrategyError, setup: RunSetup, client: str) -> StrategyError:
    """If a measurement or an array that stays on the clients is missing, add this to the error."""
    missing = error.__cause__.args[:1] if isinstance(error.__cause__, KeyError) else ()
    remedy = ""
    if missing and missing[0] in MEASUREMENTS:
        remedy = f"Clients send {missing[0]!r} if the class has it in `measurements`."
    elif missing and missing[0] in initial_local_arrays(setup.evaluator.model):
        remedy = (
            f"The array {missing[0]!r} stays with the clients (client.name = {client!r}), so the "
            "global model lacks it. Choose another client.name, or a strategy that does not need "
            "the array."
        )
    return StrategyError(f"{error} {remedy}") if remedy else error
