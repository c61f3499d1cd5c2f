"""A server that alters messages of secure aggregation and keeps what it needs to remove masks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.server.workflow.secure_aggregation import secaggplus_workflow as workflow
from flwr.supercore.primitives.asymmetric import bytes_to_private_key
from secure_federation import stage_of

from fairflower.arrays import arrays_of
from fairflower.secure.protocol import masks_of
from fairflower.secure.vectors import quantization_range, scale_of

Flat = np.ndarray


def flat(arrays: dict[str, np.ndarray]) -> Flat:
    return np.concatenate([a.reshape(-1).astype(np.float64) for a in arrays.values()])


class CuriousServer:
    """A handler of train messages that alters requests, passes them to an app and keeps replies.

    ``alter(stage, node, asked)`` may change the protocol's record of a request. ``nodes`` are the
    nodes of the set-up, and the first of them is the victim.
    """

    def __init__(self, app: Callable[[Message, Context], Message]) -> None:
        self.app = app
        self.alter: Callable[[str, int, Any], None] = lambda stage, node, asked: None
        self.generator = masks_of
        self.changes: dict[str, Any] = {}  # of the config of requests to measure or to train
        self.nodes: list[int] = []
        self.received: dict[str, np.ndarray] = {}
        self.true_update: Flat = np.zeros(0)
        self.vector: list[np.ndarray] = []
        self.refused: list[str] = []
        self._keys: dict[int, bytes] = {}
        self._sources: list[int] = []
        self._shares: dict[tuple[str, int], set[bytes]] = defaultdict(set)

    @property
    def victim(self) -> int:
        return self.nodes[0]

    def __call__(self, message: Message, context: Context) -> Message:
        stage, node = stage_of(message), message.metadata.dst_node_id
        if stage == "measure":
            self.nodes.append(node)
        asked: Any = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        self.alter(stage, node, asked)
        if "config" in message.content:
            message.content.config_records["config"].update(self.changes)
        seen = {key: asked[key] for key in asked}  # Flower's mod changes the record
        if stage == "collect_masked_vectors" and node == self.victim:
            self._sources = list(seen["srcs"])
            self._note_truth(message, context)
        try:
            reply = self.app(message, context)
        except Exception as error:
            self.refused.append(str(error))
            raise
        self._note(stage, node, seen, reply)
        return reply

    def _note_truth(self, message: Message, context: Context) -> None:
        """Note the update that the victim would send on a plain round."""
        plain = Context(99, context.node_id, context.node_config, RecordDict(), {})
        config = ConfigRecord({**message.content["config"], "secure-aggregation": False})
        content = RecordDict({"arrays": message.content["arrays"], "config": config})
        request = Message(content, message.metadata.dst_node_id, "train")
        trained = arrays_of(self.app(request, plain).content["arrays"])
        self.received = arrays_of(message.content["arrays"])
        self.true_update = flat(trained) - flat(self.received)

    def _note(self, stage: str, node: int, asked: dict[str, Any], reply: Message) -> None:
        answer = reply.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        if stage == "setup":
            self._keys[node] = answer["pk1"]
        elif stage == "collect_masked_vectors" and node == self.victim:
            self.vector = [bytes_to_ndarray(data) for data in answer["masked_params"]]
        elif stage == "unmask":
            kinds = ["seed"] * len(asked["active_nids"]) + ["key"] * len(asked["dead_nids"])
            for kind, owner, share in zip(kinds, answer["nids"], answer["shares"], strict=True):
                self._shares[kind, owner].add(share)

    def stolen(self) -> Flat | None:
        """Return the victim's update from its masked vector; None if masks cannot be removed."""
        seed = self._secret("seed", self.victim)
        if seed is None or not self.vector:
            return None
        values = self.without_pairwise_masks()
        if values is None:
            return None
        weight, numbers = (array % 2**32 for array in self._add(values, seed, -1))
        return self.update(weight[0], numbers)

    def without_pairwise_masks(self) -> list[Flat] | None:
        """Return the victim's arrays without the masks that it shares with others, or None."""
        values = self.vector
        for other in self._sources:
            secret, public = self._secret("key", other), self._keys[self.victim]
            if secret is None:
                secret, public = self._secret("key", self.victim), self._keys[other]
            if secret is None:
                return None
            shared = generate_shared_key(
                bytes_to_private_key(secret), workflow.bytes_to_public_key(public)
            )
            values = self._add(values, shared, -1 if self.victim > other else 1)
        return values

    def update(self, weight: int, numbers: Flat) -> Flat:
        """Return the victim's update from its weight and the numbers of its vector."""
        Q = quantization_range(len(self.nodes))
        updates = (numbers * 16 / Q - 8) / (weight / Q)
        scales = [np.full(a.size, scale_of(a)) for a in self.received.values()]
        return np.asarray(updates[: len(self.true_update)] * np.concatenate(scales))

    def _secret(self, kind: str, node: int) -> bytes | None:
        shares = self._shares[kind, node]
        least = max(3, len(self.nodes) // 2 + 1)
        return combine_shares([*shares]) if len(shares) >= least else None

    def _add(self, values: list[np.ndarray], seed: bytes, sign: int) -> list[np.ndarray]:
        masks = self.generator(seed, 2**32, [array.shape for array in values])
        return [array + sign * mask for array, mask in zip(values, masks, strict=True)]
