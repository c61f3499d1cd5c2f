"""The server's tests of the models that clients keep, for the reference strategy ``alone``."""

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np

from fairflower.errors import ConfigError
from fairflower.files import Arrays
from fairflower.numerics import group_fairness as fairness
from fairflower.paths import client_states
from fairflower.server.evaluation import Tested
from fairflower.server.folder import RunFolder
from fairflower.server.history import OWN_LEVELS
from fairflower.server.setup import RunSetup
from fairflower.training.client_state import OWN, newest_state

#: Largest number of clients of a domain whose models the server tests, so that a test takes at most
#: this many times as long as that of a global model.
MOST_CLIENTS = 20


class OwnModels:
    """Tests each client's own model, which a simulation's clients keep on this machine."""

    def __init__(self, setup: RunSetup, folder: RunFolder) -> None:
        self.setup, self.folder = setup, folder
        federation = setup.federation
        #: Domain -> the clients whose models are tested.
        self.clients = {d: federation.clients_of(d)[:MOST_CLIENTS] for d in federation.domains}

    def test(self, server_round: int, split: str, initial: Arrays) -> Tested:
        """Test models on their clients' domains; return means over the clients of each domain.

        A held-out domain has the mean over all clients, and no group fairness. ``initial`` is the
        model of clients that have not trained yet.
        """
        held_out = self.setup.federation.held_out
        values: dict[str, list[Mapping[str, float]]] = {domain: [] for domain in self.clients}
        failed: dict[str, dict[str, str]] = {}
        counts: dict[int, fairness.Counts] = {}
        for domain, client, model in self._models(initial):
            tested = self.setup.evaluator(model, split, [domain])
            for name, of in tested.scores.items():
                values.setdefault(name, []).append(of)
                if name != held_out:
                    self._write(server_round, split, client, name, of)
            for name, wrong in tested.failed.items():
                failed.setdefault(name, {}).update(wrong)
            counts |= {k: of for k, of in tested.counts.items() if k == client}
        return Tested({name: _means(found) for name, found in values.items()}, failed, counts)

    def test_elsewhere(self, server_round: int, initial: Arrays) -> None:
        """Test each model on the other domains' test examples, for the table of the last round."""
        domains = self.setup.federation.domains
        if len(domains) < 2:
            return
        for own, client, model in self._models(initial):
            others = [domain for domain in domains if domain != own]
            scores = self.setup.evaluator(model, "test", others).scores
            for domain in others:
                self._write(server_round, "test", client, domain, scores[domain])

    def _write(
        self, server_round: int, split: str, client: int, domain: str, values: Mapping[str, float]
    ) -> None:
        name = self.setup.federation.learns.primary.name
        row = {name: values[name]} if name in values else {}
        self.folder.append_metrics(server_round, OWN_LEVELS[split], f"{client}/{domain}", row)

    def _models(self, initial: Arrays) -> Iterator[tuple[str, int, Arrays]]:
        """Yield each tested client with its domain and its model of the last merged round."""
        states = client_states() / self.folder.run_id
        for domain, client in ((d, k) for d, clients in self.clients.items() for k in clients):
            last = self.setup.strategy.merged_rounds.get(client, 0)
            _, state = newest_state(states / str(client), before=last + 1)
            if last and OWN not in state:
                raise ConfigError(
                    f"The model that client {client} keeps (strategy.name = 'alone') is not in "
                    f"{states}. Repeat the run on one machine, or set evaluate.by = 'clients'."
                )
            yield domain, client, state.get(OWN, initial)


def _means(found: list[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric that all models have."""
    names = dict.fromkeys(chain.from_iterable(found))
    return {
        name: float(np.mean([values[name] for values in found]))
        for name in names
        if all(name in values for values in found)
    }
