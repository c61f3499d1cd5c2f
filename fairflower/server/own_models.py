"""Tests of the models that clients keep, for the reference strategy ``alone``."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from fairflower.aggregation.messages import RoundRequest
from fairflower.aggregation.records import check_arrays, check_test, decode_record
from fairflower.arrays import record_of
from fairflower.config.site import SHARES, TESTS_OTHERS
from fairflower.errors import ConfigError, logger
from fairflower.files import Arrays
from fairflower.numerics import group_fairness as fairness
from fairflower.paths import client_states
from fairflower.server.evaluation import Tested
from fairflower.server.folder import RunFolder
from fairflower.server.history import OWN_LEVELS, SHARED_LEVELS, domain_scores, test_keys
from fairflower.server.setup import RunSetup
from fairflower.training.client_state import OWN, newest_state

#: Largest number of clients of a domain whose models the server tests, so that a test takes at most
#: this many times as long as that of a global model.
MOST_CLIENTS = 20


class OwnModels:
    """Tests each client's own model, which the clients of a simulation keep on this machine."""

    def __init__(self, setup: RunSetup, folder: RunFolder) -> None:
        self.setup, self.folder = setup, folder

    def test(self, server_round: int, split: str, initial: Arrays) -> Tested:
        """Test models on their clients' domains; return the means over the clients of a domain.

        A held-out domain has the mean over all clients, and no group fairness. ``initial`` is the
        model of clients that have not trained yet.
        """
        found: dict[str, list[Mapping[str, float]]] = {d: [] for d in self.setup.federation.domains}
        failed: dict[str, dict[str, str]] = {}
        counts: dict[int, fairness.Counts] = {}
        for client, own, model in self._models(initial):
            tested = self.setup.evaluator(model, split, [own])
            self._write(server_round, split, client, own, tested)
            for domain, values in tested.scores.items():
                found.setdefault(domain, []).append(values)
                failed.setdefault(domain, {}).update(tested.failed.get(domain, {}))
            counts |= {k: of for k, of in tested.counts.items() if k == client}
        return Tested({domain: _means(values) for domain, values in found.items()}, failed, counts)

    def test_elsewhere(self, server_round: int, initial: Arrays) -> None:
        """Test each model on the test examples of the other domains, and write the scores."""
        for client, own, model in self._models(initial):
            if others := [domain for domain in self.setup.federation.domains if domain != own]:
                tested = self.setup.evaluator(model, "test", others)
                for domain in others:
                    self._write(server_round, "test", client, domain, tested)

    def _write(
        self, server_round: int, split: str, client: int, domain: str, tested: Tested
    ) -> None:
        name = self.setup.federation.learns.primary.name
        values = {n: value for n, value in tested.scores[domain].items() if n == name}
        self.folder.append_metrics(server_round, OWN_LEVELS[split], f"{client}/{domain}", values)

    def _models(self, initial: Arrays) -> Iterator[tuple[int, str, Arrays]]:
        """Yield tested clients, each with its domain and its model of the last merged round."""
        states, federation = client_states() / self.folder.run_id, self.setup.federation
        tested = (federation.clients_of(domain)[:MOST_CLIENTS] for domain in federation.domains)
        for client in (client for clients in tested for client in clients):
            last = self.setup.strategy.merged_rounds.get(client, 0)
            _, state = newest_state(states / str(client), before=last + 1)
            if last and OWN not in state:
                raise ConfigError(
                    f"The model that client {client} keeps (strategy.name = 'alone') is not in "
                    f"{states}. Repeat the run on one machine, or set evaluate.by = 'clients'."
                )
            yield client, federation.clients[client].domain, state.get(OWN, initial)


@dataclass
class SharedModels:
    """Tests models of sites at other sites; each site decides whether it shares, and tests.

    A shared model is in the server's memory until it has been tested, and in no file.
    """

    setup: RunSetup
    folder: RunFolder
    grid: Grid
    settings: Mapping[str, Any]  # of all messages
    exchange: Callable[[Iterable[Message]], list[Message]]  # messages -> replies

    def test_elsewhere(self, server_round: int, initial: Arrays) -> None:
        """Ask for models like ``initial``, test each where sites agree, and write the scores."""
        federation = self.setup.federation
        everyone = [client.client_id for client in federation.clients]
        own = self._ask(server_round, "send", initial, everyone)
        shared = {client: answer.model for client, answer in own.items() if answer.model}
        testing = {client for client, answer in own.items() if answer.tests_others}
        for key, agreed in ((SHARES, shared.keys()), (TESTS_OTHERS, testing)):
            if lacking := [client for client in own if client not in agreed]:
                name_of = self.setup.strategy._enrolled.name_of
                logger.info("Without %s: %s.", key, ", ".join(map(name_of, lacking)))
        name = federation.learns.primary.name
        for client, model in shared.items():
            tested = {client: own[client]}
            tested |= self._ask(server_round, "test", model, testing - {client})
            answers = {site: answer.metrics for site, answer in sorted(tested.items())}
            keys = test_keys(answers, federation.learns, ())
            for domain, of in domain_scores(answers, keys, federation).items():
                values = {n: value for n, value in of.items() if n == name}
                cell = f"{client}/{domain}"
                self.folder.append_metrics(server_round, SHARED_LEVELS["test"], cell, values)

    def _ask(
        self, server_round: int, what: str, model: Arrays, clients: Collection[int]
    ) -> dict[int, "_Answer"]:
        """Have clients test a model, or their own ones; return the usable answers by client."""
        strategy, federation = self.setup.strategy, self.setup.federation
        arrays, most = record_of(model), self.setup.max_test_sizes("test")
        groups, scores = len(federation.group_names), federation.learns.scores

        def read(client: int, content: RecordDict, metrics: MetricRecord) -> _Answer:
            check_test("num-examples", most, groups, client, content, metrics, scores=scores)
            sent = content.array_records.get(OWN)
            own = check_arrays(decode_record(sent), model) if sent else {}
            node = content.config_records.get("node", ConfigRecord())
            return _Answer(metrics, own, bool(node.get(TESTS_OTHERS)))

        config = ConfigRecord({**self.settings, "split": "test", OWN: what})
        messages = strategy.configure_evaluate(server_round, arrays, config, self.grid)
        messages = [m for m in messages if strategy._enrolled.client_of(m) in clients]
        replies = strategy.new_replies(RoundRequest(server_round, arrays, messages))
        return replies.read(self.exchange(messages), read).usable


class _Answer(NamedTuple):
    """A site's answer: its test, its own model or no arrays, and whether it tests others'."""

    metrics: MetricRecord
    model: Arrays
    tests_others: bool


def _means(found: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric that all models have."""
    common = [name for name in found[0] if all(name in values for values in found)]
    return {name: float(np.mean([values[name] for values in found])) for name in common}
