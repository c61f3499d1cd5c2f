"""A server that tells sites what it likes, and computes what it then can read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from curious_server import Flat, flat
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import bytes_to_ndarray
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from secure_federation import CONFIG, SecureFederation

from fairflower.arrays import arrays_of
from fairflower.engines.inline import FIRST_NODE, answer
from fairflower.secure.protocol import SIGN_LIST, SIGNED, constants_of, masks_of
from fairflower.secure.vectors import MaskingInstructions, quantization_range, scale_of
from fairflower.strategies import Uniform

Signed = tuple[str, bytes]


class Refusal(Exception):
    """A site's refusal, with the text that the server gets."""


def _unchanged(signed: dict[int, bytes]) -> dict[int, bytes]:
    return signed


class LyingServer:
    """A server of the first round of a run, in which it asks one site after the other.

    Parameters
    ----------
    stories
        For each site the sites of which it is told, itself included; each has the same number.
    gone
        For each site those that are said to have failed; by default none.
    own
        Sites that are the server's own inventions, whose memory it reads.
    """

    def __init__(
        self,
        stories: Mapping[int, Collection[int]],
        gone: Mapping[int, Collection[int]] | None = None,
        own: Collection[int] = (),
    ) -> None:
        self.stories, self.gone, self.own = stories, gone or {}, own
        self.federation = SecureFederation(Uniform(), clients=len(stories))
        self.size = len(stories[0])
        self.told: dict[int, dict[str, Any]] = {}  # changes of the config, by site
        self.beside: dict[int, dict[str, Any]] = {}  # records beside the model, by site
        #: Whether the server goes on without sites that refuse to unmask, and their texts.
        self.goes_on, self.refusals = False, defaultdict[int, list[str]](list)
        #: Changes of what the server says of keys, and of signatures of requests and lists.
        self.forge_keys: Callable[[int, list[bytes], Signed], Signed] = lambda k, pair, signed: (
            signed
        )
        self.forge_requests = self.forge_lists = _unchanged
        self.keys: dict[int, list[bytes]] = {}
        self.requests: dict[int, bytes] = {}  # signatures of what sites were told with the model
        self._vectors: dict[int, list[Flat]] = {}
        self.shares: dict[tuple[str, int], set[bytes]] = defaultdict(set)

    def node_config(self, k: int) -> dict[str, Any]:
        return self.federation.grid.contexts[FIRST_NODE + k].node_config  # type: ignore[return-value]

    def sign_with(self, folder: Path, names: Mapping[int, str]) -> None:
        """Give sites the consortium file in a folder, and their keys there."""
        for k, name in names.items():
            files = {"consortium": str(folder / "sites"), "signing-key": str(folder / name)}
            self.node_config(k).update(files)

    def ask(self, k: int, content: dict[str, Any], kind: str = "train") -> Any:
        """Return a site's reply to a message; raise `Refusal` if it is an error."""
        context = self.federation.grid.contexts[FIRST_NODE + k]
        message = Message(RecordDict(content), FIRST_NODE + k, kind)
        message.metadata.__dict__["_run_id"] = context.run_id
        reply = answer(self.federation.app, message, context)
        if reply.has_error():
            raise Refusal(reply.error.reason)
        return reply.content.config_records

    def run(self) -> None:
        """Run the round until a site refuses, which raises `Refusal`."""
        federation, sites = self.federation, sorted(self.stories)
        config = ConfigRecord({**CONFIG, "secure-aggregation": True})
        (first, *_) = federation.strategy.configure_train(
            1, federation.model, config, federation.grid
        )
        Q = quantization_range(self.size)
        contents: dict[int, dict[str, Any]] = {}
        for k in sites:
            values = {**first.content["config"], "client-id": k, **self.told.get(k, {})}  # type: ignore[dict-item]
            contents[k] = {"arrays": federation.model, "config": ConfigRecord(values)}
            self.ask(k, contents[k], "train.measure")
            values |= MaskingInstructions(Q, Q, (0.0, 0.0, 0.0)).to_config()
            contents[k] = {"arrays": federation.model, "config": ConfigRecord(values)}
        signed = self._set_up(sites)
        sent = self._share_keys(sites, signed)
        for k in sites:
            sources = sorted({*self.stories[k]} - {k})
            asked = {
                "ctxts": [sent[j, k] for j in sources],
                "srcs": [FIRST_NODE + j for j in sources],
            }
            step = {"stage": "collect_masked_vectors", **asked}
            content = {**contents[k], **self.beside.get(k, {})}
            reply = self.ask(k, {**content, RECORD_KEY_CONFIGS: ConfigRecord(step)})
            vectors = reply[RECORD_KEY_CONFIGS]["masked_params"]
            self._vectors[k] = [bytes_to_ndarray(data) for data in vectors]
            if SIGNED in reply:
                self.requests[k] = reply[SIGNED]["signature"]
        if not self.own:
            self._unmask(sites)

    def _set_up(self, sites: list[int]) -> dict[int, Signed]:
        signed = {}
        for k in sites:
            step = {"stage": "setup", "sample_num": self.size, **constants_of(self.size)}
            reply = self.ask(k, {RECORD_KEY_CONFIGS: ConfigRecord(step)})
            pair: Any = reply[RECORD_KEY_CONFIGS]
            self.keys[k] = [pair["pk1"], pair["pk2"]]
            own: Any = reply.get(SIGNED, {"name": "", "signature": b""})
            signed[k] = self.forge_keys(k, self.keys[k], (own["name"], own["signature"]))
        return signed

    def _share_keys(
        self, sites: list[int], signed: dict[int, Signed]
    ) -> dict[tuple[int, int], bytes]:
        sent = {}
        for k in sites:
            step: dict[str, Any] = {str(FIRST_NODE + j): self.keys[j] for j in self.stories[k]}
            nodes, proofs = [FIRST_NODE + j for j in self.stories[k]], self.stories[k]
            names, signatures = zip(*(signed[j] for j in proofs), strict=True)
            record: dict[str, Any] = {
                "nodes": nodes,
                "names": [*names],
                "signatures": [*signatures],
            }
            content = {RECORD_KEY_CONFIGS: ConfigRecord({"stage": "share_keys", **step})}
            reply = self.ask(k, {**content, SIGNED: ConfigRecord(record)})[RECORD_KEY_CONFIGS]
            for node, data in zip(reply["dsts"], reply["ctxts"], strict=True):
                sent[k, node - FIRST_NODE] = data
        return sent

    def _unmask(self, sites: list[int]) -> None:
        present = {k: sorted({*self.stories[k]} - {*self.gone.get(k, ())}) for k in sites}
        nodes = {k: [FIRST_NODE + j for j in present[k]] for k in sites}
        lists, requests = dict[int, bytes](), self.forge_requests(self.requests)
        for k in sites:
            if "consortium" in self.node_config(k):
                step = {"stage": SIGN_LIST, "active_nids": nodes[k]}
                told = {"nodes": nodes[k], "signatures": [requests[j] for j in present[k]]}
                content = {RECORD_KEY_CONFIGS: ConfigRecord(step), SIGNED: ConfigRecord(told)}  # type: ignore[arg-type]
                if reply := self._ask_on(k, content):
                    lists[k] = reply[RECORD_KEY_CONFIGS]["signature"]
        lists = self.forge_lists(lists)
        for k in sites:
            mine = {j: lists[j] for j in present[k] if j in lists}
            proofs = {"nodes": [FIRST_NODE + j for j in mine], "signatures": [*mine.values()]}
            dead = [FIRST_NODE + j for j in self.gone.get(k, ())]
            step = {"stage": "unmask", "active_nids": nodes[k], "dead_nids": dead}
            content = {RECORD_KEY_CONFIGS: ConfigRecord(step), SIGNED: ConfigRecord(proofs)}  # type: ignore[arg-type]
            if reply := self._ask_on(k, content):
                told = reply[RECORD_KEY_CONFIGS]
                kinds = ["seed"] * len(nodes[k]) + ["key"] * len(dead)
                for kind, owner, share in zip(kinds, told["nids"], told["shares"], strict=True):
                    self.shares[kind, owner - FIRST_NODE].add(share)

    def _ask_on(self, k: int, content: dict[str, Any]) -> Any:
        try:
            return self.ask(k, content)
        except Refusal as refusal:
            if not self.goes_on:
                raise
            self.refusals[k].append(str(refusal))
            return None

    def stolen(self, *victims: int) -> Flat:
        """Return the sum of the updates of sites, whose masks towards all others are known."""
        total = [sum(self._vectors[k][i] for k in victims) for i in (0, 1)]
        for k in victims:
            total = self._add(total, self._seed(k), -1)
            for other in {*self.stories[k]} - {*victims}:
                shared = generate_shared_key(
                    bytes_to_private_key(self._private_key(other)),
                    bytes_to_public_key(self.keys[k][0]),
                )
                total = self._add(total, shared, -1 if k > other else 1)
        numbers, Q = total[1] % 2**32, quantization_range(self.size)
        received = arrays_of(self.federation.model)
        scales = np.concatenate([np.full(a.size, scale_of(a)) for a in received.values()])
        return np.asarray((numbers[: len(scales)] * 16 / Q - 8 * len(victims)) * scales)

    def update(self, *victims: int) -> Flat:
        """Return the sum of updates that sites have computed."""
        received = flat(arrays_of(self.federation.model))
        updates = [flat(self.federation.trained[k]) - received for k in victims]
        return np.asarray(np.sum(updates, axis=0))

    def _seed(self, k: int) -> bytes:
        shares = set(self.shares["seed", k])
        for owned in self.own:
            state = self._memory(owned)
            kept = dict(
                zip(state["rd_seed_share_dict:K"], state["rd_seed_share_dict:V"], strict=True)
            )
            shares.add(kept[FIRST_NODE + k])
        return combine_shares([*shares])

    def _private_key(self, k: int) -> bytes:
        if k in self.own:
            return self._memory(k)["sk1"]  # type: ignore[no-any-return]
        return combine_shares([*self.shares["key", k]])

    def _memory(self, k: int) -> Any:
        return self.federation.grid.contexts[FIRST_NODE + k].state["secaggplus_state"]

    def _add(self, values: list[Any], seed: bytes, sign: int) -> list[Any]:
        masks = masks_of(seed, 2**32, [array.shape for array in values])
        return [array + sign * mask for array, mask in zip(values, masks, strict=True)]
