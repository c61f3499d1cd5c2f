"""A round's messages: the selected clients, and each client's config."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from flwr.app import ArrayRecord, Message, RecordDict
from flwr.serverapp import Grid

from fairflower.aggregation.hooks import StrategyHooks
from fairflower.aggregation.records import check_mergeable, decode_record
from fairflower.errors import logger
from fairflower.flower_compat import copied, privacy_wrapper


@dataclass(frozen=True)
class RoundRequest:
    """What a strategy's ``configure_*`` requested in a round; only the round if not called."""

    server_round: int
    arrays: ArrayRecord | None = None  # the model in the messages
    messages: Sequence[Message] = ()
    population: int = 0  # number of clients that could be selected
    losses: Mapping[int, float] = field(default_factory=dict)  # that candidates sent, by client


@dataclass
class EnrolledClients:
    """The clients that a strategy knows."""

    #: Client id -> node id, for all clients; None before ``FairStrategy.enroll``.
    nodes: dict[int, int] | None = None
    #: Client id -> number of training examples, where known.
    sizes: Mapping[int, int] = field(default_factory=dict)
    #: Node id -> client id, for enrolled clients and for clients that have replied.
    clients: dict[int, int] = field(default_factory=dict)
    #: Client id -> name of its site in messages. Empty in simulations.
    names: Mapping[int, str] = field(default_factory=dict)
    #: Clients that only test.
    testers: Collection[int] = ()
    #: Clients without examples that the log has named.
    empty: set[int] = field(default_factory=set)
    #: Client -> round and reason, as the log has last named it.
    logged: dict[int, tuple[int, str]] = field(default_factory=dict, compare=False)
    #: Very long vectors of the last round that had any, as text.
    large_norms: list[str] = field(default_factory=list)

    def client_of(self, message: Message) -> int:
        """Return the id of the client that gets a message, or the node id of an unknown client."""
        node = message.metadata.dst_node_id
        return self.clients.get(node, node)

    def name_of(self, *clients: int) -> str:
        """Return the names of clients in messages.

        >>> EnrolledClients(names={0: "north"}).name_of(0, 2, 3)
        'north, clients 2, 3'
        """
        named = [self.names[client] for client in clients if client in self.names]
        others = ", ".join(str(client) for client in clients if client not in self.names)
        numbers = [f"client{'s' * (len(clients) - len(named) > 1)} {others}"] if others else []
        return ", ".join([*named, *numbers])

    @property
    def training(self) -> dict[int, int]:
        """Client id -> node id, for the clients that train."""
        return {k: node for k, node in (self.nodes or {}).items() if k not in self.testers}

    def connected(self, grid: Grid, at_least: int) -> dict[int, int]:
        """Return node ids by client id: of those that train or, if none is enrolled, are connected.

        Waits for ``at_least`` connected nodes, since Flower's ``FedAvg`` counts them before it
        waits: in round 1 it would select among the first that connected.
        """
        if self.nodes is not None:
            return self.training
        while len(nodes := list(grid.get_node_ids())) < at_least:
            logger.info("Waiting for nodes: %d of %d are connected.", len(nodes), at_least)
            time.sleep(1)
        return {self.clients.get(node, node): node for node in nodes}


def add_client_config(message: Message, config_key: str, values: Mapping[str, float | str]) -> None:
    """Add values to the config of a client's message."""
    if values:
        # All messages of a round share their content, so it is copied.
        config = message.content.config_records[config_key]
        message.content = RecordDict({**message.content, config_key: copied(config, values)})


def check_dp_compatible(strategy: StrategyHooks, model: ArrayRecord) -> None:
    """Raise ``ValueError`` if Flower's differential privacy would clip more than parameters.

    Raises ``ConfigError``, before any client trains, for a model that cannot be merged.
    """
    arrays = decode_record(model)
    buffers = sorted(strategy.buffers_of(arrays))
    check_mergeable(arrays, arrays.keys() - buffers)
    if not (wrapper := privacy_wrapper()):
        return
    if ours := [exchange for exchange in strategy.exchanges if not exchange.returned]:
        raise ValueError(
            f"{wrapper} adds noise to the merged model after {type(ours[0]).__name__} has used it. "
            "Remove this exchange."
        )
    beside = strategy._array_measurements + [exchange.name for exchange in strategy.exchanges]
    if beside:
        raise ValueError(
            f"{wrapper} clips all arrays that a client sends, but clients of "
            f"{type(strategy).__name__} also send {' and '.join(beside)}. Choose a strategy whose "
            "clients send only a model and numbers."
        )
    if buffers:
        raise ValueError(
            f"{wrapper} would clip {buffers[0]} like a parameter and add noise to it. Use a "
            "model without BatchNorm statistics, for example with GroupNorm."
        )
