"""Who takes part in a run, and what they are to do: settled before the first round."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fairflower.aggregation.consistency import SignConsistency
from fairflower.config import DataConfig, RunConfig
from fairflower.data import Federation, prepare
from fairflower.errors import ConfigError
from fairflower.server.evaluation import CentralizedEvaluator
from fairflower.server.folder import read_facts
from fairflower.server.registration import (
    ClientRegistry,
    check_num_supernodes,
    register_clients,
    register_resumed_clients,
)
from fairflower.strategies import FairStrategy


@dataclass(frozen=True)
class RunSetup:
    """A run's clients, its initial model and a strategy that knows the clients.

    ``federation`` is by the clients' own account where they do the testing.
    """

    config: RunConfig
    federation: Federation
    registry: ClientRegistry
    evaluator: CentralizedEvaluator
    strategy: FairStrategy

    def enroll(self, nodes: Mapping[int, int]) -> None:
        """Tell the strategy at which node each client is."""
        federation = self.federation
        sizes = {client.client_id: client.num_examples for client in federation.clients}
        self.strategy.enroll(nodes, self.config.seed, sizes)

    def most_tested(self, split: str) -> dict[int, int]:
        """Give the most images of a split that each client can have: all of its domain."""
        federation = self.federation
        sizes = federation.test_sizes if split == "test" else federation.validation_sizes
        of_domain = dict(zip(federation.domains, sizes, strict=True))
        return {client.client_id: of_domain[client.domain] for client in federation.clients}

    def settings(self) -> dict[str, Any]:
        """Give what every message carries: the run config and, for sites, what they all have."""
        flat: dict[str, Any] = self.config.to_flat()
        if self.registry.sites:
            # The clients' own accounts stay between them and the server.
            flat["federation"] = replace(self.federation, clients=()).to_json()
        return flat

    def facts(self) -> dict[str, Any]:
        """Give what ``run.json`` says of the federation and the model."""
        federation = self.federation
        facts = {
            "num_parameters": self.evaluator.num_parameters,
            "model_bytes": sum(a.nbytes for a in self.evaluator.arrays().values()),
            "num_classes": federation.num_classes,
            "classes": list(federation.classes),
            "shape": list(federation.shape),
            "domains": list(federation.domains),
            "sources": list(federation.sources),
            "test_sizes": list(federation.test_sizes),
            "images": federation.fingerprint,
            "clients": [asdict(client) for client in federation.clients],
            "nodes": self.registry.known_by_node(),
        }
        if self.config.evaluate.by != "clients":  # else only they have the data
            facts["digest"] = federation.digest
        if self.registry.sites:  # which the run can go on without while some are away
            known = json.loads(federation.to_json())
            facts["sites"] = {"federation": known, "numbered": self.registry.numbered}
        return facts


def set_up(grid: Grid, config: RunConfig, resume: Path | None, stop: threading.Event) -> RunSetup:
    """Call the roll, and make what a run needs; ``resume`` is the folder of one that goes on.

    ``ConfigError`` or ``DataError`` if the run cannot begin.
    """
    federation, registry = _register(grid, config, resume, stop)
    num_clients = len(federation.clients)
    check_num_supernodes(len(registry.nodes), num_clients)
    _check_client_settings(config, num_clients)
    registry = registry._replace(
        nodes={client: registry.nodes[client] for client in range(num_clients)}
    )
    evaluator = CentralizedEvaluator(config, federation)
    strategy = _make_strategy(config, evaluator.buffers)
    setup = RunSetup(config, federation, registry, evaluator, strategy)
    setup.enroll(registry.nodes)
    return setup


def _register(
    grid: Grid, config: RunConfig, resume: Path | None, stop: threading.Event
) -> tuple[Federation, ClientRegistry]:
    timeout = config.round_timeout
    if config.evaluate.by != "clients":
        federation = prepare(config.data)
        return federation, register_clients(grid, len(federation.clients), timeout, stop)
    settings = ConfigRecord(dict(config.to_flat()))
    if earlier := _resumed_registry(resume):
        registry = register_resumed_clients(grid, earlier, timeout, stop, settings)
    else:
        registry = register_clients(grid, None, timeout, stop, settings, config.sites)
    if registry.sites:
        _check_undivided(config.data)
    assert registry.federation is not None
    if config.data.validated and not registry.federation.validation_sizes:
        raise ConfigError(
            "data.validation-fraction or data.validation-examples is set, and not all clients keep "
            "images out of training. Start their SuperNodes with this version of fairflower."
        )
    return registry.federation, registry


def _resumed_registry(resume: Path | None) -> ClientRegistry | None:
    """The sites of a run that goes on, as far as it is known where they are."""
    if resume is None or "sites" not in (facts := read_facts(resume)):
        return None
    federation = Federation.from_json(json.dumps(facts["sites"]["federation"]), resume)
    nodes = {int(client): node for client, node in facts["nodes"].items()}
    return ClientRegistry(nodes, federation, True, facts["sites"]["numbered"])


def _check_undivided(data: DataConfig) -> None:
    """Refuse to make harder what sites have of their own."""
    if data.dirichlet_alpha or data.corrupted_clients or data.imbalance_factor > 1:
        raise ConfigError(
            "data.dirichlet-alpha, data.corrupted-clients and data.imbalance-factor divide one "
            "data set among clients; sites with data of their own (domain in the node config) "
            "are as they are. Leave these at their defaults."
        )


def _check_client_settings(config: RunConfig, num_clients: int) -> None:
    """Refuse what so few clients cannot fulfil."""
    asked = max(1, int(num_clients * config.fraction_train + 1e-9))
    if config.min_clients > asked:
        raise ConfigError(
            f"min-clients = {config.min_clients}: a round asks {asked} clients. Lower it, "
            "or raise fraction-train or data.clients-per-domain."
        )
    if config.bound.max_client_weight * asked < 1:
        raise ConfigError(
            f"bound.max-client-weight = {config.bound.max_client_weight}: the weights of the "
            f"{asked} clients of a round cannot sum to 1. Give at least 1/{asked}."
        )


def _make_strategy(config: RunConfig, buffers: list[str]) -> FairStrategy:
    return config.strategy.factory(  # type: ignore[no-any-return]
        **config.strategy.args,
        fraction_train=config.fraction_train,
        min_train_nodes=1,
        min_evaluate_nodes=1,
        min_available_nodes=1,
        min_clients=config.min_clients or None,
        buffers=buffers,
        exchanges=config.client.factory.make_exchanges(config.client.args),
        observers=[SignConsistency(window)] if (window := config.observe.window) else [],
        max_client_weight=config.bound.max_client_weight,
        clip_update_norm=config.bound.clip_update_norm or None,
        clip_update_median=config.bound.clip_update_median or None,
    )
