"""A round's messages: which clients are asked, and what each of them is told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from fairflower.aggregation.hooks import StrategyHooks
from fairflower.aggregation.records import decode_record
from fairflower.flower_compat import copied, privacy_wrapper


@dataclass(frozen=True)
class EnrolledClients:
    """The clients, as far as a strategy knows them."""

    #: Client id -> node id of the whole federation, by client id; None before
    #: ``FairStrategy.enroll``.
    nodes: dict[int, int] | None = None
    #: Client id -> training examples, where they are known.
    sizes: Mapping[int, int] = field(default_factory=dict)
    #: Node id -> client id, of those enrolled, or of those that have replied so far.
    clients: dict[int, int] = field(default_factory=dict)

    def client_of(self, message: Message) -> int:
        """Whom a message goes to; by its node while the client is not known."""
        node = message.metadata.dst_node_id
        return self.clients.get(node, node)

    def sample(self, seed: Sequence[int], fraction: float, at_least: int) -> list[int]:
        """Draw nodes by client id, so that the choice depends on ``seed`` alone."""
        assert self.nodes is not None
        nodes = list(self.nodes.values())
        size = min(len(nodes), max(int(len(nodes) * fraction + 1e-9), at_least))
        chosen = np.random.default_rng(seed).choice(len(nodes), size, replace=False)
        return [nodes[i] for i in sorted(chosen)]


def add_client_config(message: Message, config_key: str, told: Mapping[str, float | str]) -> None:
    """Add to a message's config what its client alone is to know."""
    if told:
        # The messages of a round share their content.
        config = message.content.config_records[config_key]
        message.content = RecordDict({**message.content, config_key: copied(config, told)})


def check_dp_compatible(rule: StrategyHooks, model: ArrayRecord) -> None:
    """Refuse what clipping by Flower's differential privacy would take for parameters."""
    if not (wrapper := privacy_wrapper()):
        return
    beside = [name for name in rule.measurements if name in rule.VECTORS]
    beside += [exchange.name for exchange in rule.exchanges]
    if beside:
        raise ValueError(
            f"{wrapper} takes all arrays that a client sends for the model's, but with "
            f"{type(rule).__name__} {' and '.join(beside)} would be sent, too. Choose a strategy "
            "whose clients send a model and numbers."
        )
    if buffers := sorted(rule.buffers_of(decode_record(model))):
        raise ValueError(
            f"{wrapper} would clip and blur {buffers[0]} like a parameter. Use a model without "
            "BatchNorm's statistics, with GroupNorm for example."
        )
