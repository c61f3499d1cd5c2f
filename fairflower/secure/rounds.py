"""The server's part: a round of training under secure aggregation, in two exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays
from fairflower.aggregation.messages import RoundRequest, add_client_config
from fairflower.aggregation.records import (
    InvalidReply,
    check_finite,
    decode_record,
    is_finite,
    stack_common_metrics,
)
from fairflower.aggregation.replies import Replies, ReplyCheck
from fairflower.aggregation.strategy import FairStrategy
from fairflower.arrays import record_of
from fairflower.errors import ConfigError, Diverged, logger
from fairflower.numerics.simplex import on_simplex
from fairflower.numerics.threads import one_thread
from fairflower.secure.client import MEASURE
from fairflower.secure.protocol import (
    SMALLEST_SUM,
    Halted,
    LostClients,
    Send,
    masked_mean,
    masked_sizes,
    shares_of,
)
from fairflower.secure.vectors import (
    CHECKS,
    MaskingInstructions,
    SumCohort,
    WeightedSum,
    WrongSum,
    decode,
    quantization_range,
    size_of,
)
from fairflower.seeds import derive_seed

#: The server warns if a client's weight is above this value: the sum is then mostly its model.
DOMINANT_WEIGHT = 0.5


@dataclass
class _Round:
    """A round's messages and replies, by client."""

    server_round: int
    asked: dict[int, Message]  # the strategy's train messages, by client
    received: Arrays
    check: ReplyCheck
    numbers: dict[int, MetricRecord] = field(default_factory=dict)  # metrics before training
    trained: dict[int, MetricRecord] = field(default_factory=dict)  # metrics after training
    dropped: dict[int, str] = field(default_factory=dict)


class SecureAggregation:
    """Training rounds under secure aggregation.

    The strategy has ``sums_suffice = True``, and ``send`` sends messages and returns the replies
    that arrive before the timeout.
    """

    def __init__(self, strategy: FairStrategy, send: Send) -> None:
        self.strategy, self.send = strategy, send

    def train(
        self, server_round: int, messages: Sequence[Message], arrays: ArrayRecord
    ) -> ArrayRecord:
        """Send the strategy's train messages and return the next global model.

        Raises ``Halted`` if the masks cannot be removed, or if the sum is wrong. The strategy then
        has its state from before the round. Raises ``RoundFailed`` if fewer than ``min_clients``
        replies are usable.
        """
        strategy, before = self.strategy, self.strategy.state_dict()
        received = decode_record(arrays)
        asked = {strategy._enrolled.client_of(message): message for message in messages}
        check = ReplyCheck(strategy, arrays, strategy._enrolled.sizes)
        now = _Round(server_round, asked, received, check)
        strategy.diagnostics, strategy.clusters = {}, None
        strategy.client_ids, strategy.client_metrics = (), {}
        try:
            merged = self._merged(now)
        except Halted:
            strategy.load_state_dict(before)
            strategy.diagnostics, strategy.client_ids = {}, ()
            raise
        finally:
            strategy.dropped = dict(sorted(now.dropped.items()))
        return record_of(merged)

    def _merged(self, now: _Round) -> Arrays:
        """Return the next global model."""
        cohort = self._measure(now)
        with one_thread():  # the same bits on any number of cores
            weights = _checked(np.asarray(self.strategy.weigh(cohort)), len(cohort))
            weights = cohort.cap(weights)
            factors = self.strategy.square_factors(cohort)
        total, clients = self._sum(now, cohort, weights, factors)
        with one_thread():
            return self._conclude(now, self._cohort(now, clients, total), cohort.client_ids)

    def _measure(self, now: _Round) -> SumCohort:
        """Run the first exchange and return the clients' numbers as a cohort."""
        strategy = self.strategy
        messages = [Message(m.content, m.metadata.dst_node_id, MEASURE) for m in now.asked.values()]
        names = [n for n in strategy._measurements if n not in strategy.used_next_round]

        def check(client: int, content: RecordDict, metrics: MetricRecord) -> MetricRecord:
            if content.array_records:
                raise InvalidReply("it sent arrays, but the server requested only numbers")
            now.check.check_numbers(client, metrics, names)
            return metrics

        replies = strategy.new_replies(RoundRequest(now.server_round, messages=messages))
        now.dropped = replies.dropped
        now.numbers = replies.read(self.send(messages), check).usable
        replies.check_enough()
        replies.check_cap(strategy.max_client_weight)
        return self._cohort(now, sorted(now.numbers))

    def _cohort(
        self, now: _Round, clients: Sequence[int], total: WeightedSum | None = None
    ) -> SumCohort:
        """Return a cohort of these clients, with their numbers and the sum of their updates."""
        # Weights and factors were computed from the numbers of the first exchange.
        both = [{**now.trained.get(k, {}), **now.numbers[k]} for k in clients]
        metrics = stack_common_metrics([MetricRecord(numbers) for numbers in both])
        return SumCohort(
            now.server_round,
            tuple(clients),
            metrics[self.strategy.weighted_by_key],
            now.received,
            (),
            metrics,
            self.strategy.buffers_of(now.received),
            population=len(self.strategy._enrolled.nodes or ()),
            max_weight=self.strategy.max_client_weight,
            total=total,
        )

    def _sum(
        self,
        now: _Round,
        cohort: SumCohort,
        weights: NDArray[np.float64],
        factors: NDArray[np.float64] | None,
    ) -> tuple[WeightedSum, list[int]]:
        """Run the second exchange; return the sum of weighted updates and the clients in it.

        If clients fail before training, they are dropped, and the exchange starts again.
        """
        shares = dict(zip(cohort.client_ids, weights.tolist(), strict=True))
        each = (
            dict(zip(cohort.client_ids, factors.tolist(), strict=True))
            if factors is not None
            else {}
        )
        while True:
            _check_enough_clients(shares)
            instructions = self._instructions(now, shares, each)
            try:
                return self._masked(now, instructions)
            except LostClients as lost:
                at = {m.metadata.dst_node_id: client for client, m in now.asked.items()}
                replies = self.strategy.new_replies(RoundRequest(now.server_round))
                for node, reason in lost.reasons.items():
                    replies.drop(at[node], reason)
                    del shares[at[node]]
                now.dropped |= replies.dropped

    def _instructions(
        self, now: _Round, shares: Mapping[int, float], factors: Mapping[int, float]
    ) -> dict[int, MaskingInstructions]:
        """Return the values for each client. Weights become integers, of which the largest is Q."""
        most, Q = max(shares.values()), quantization_range(len(shares))
        buffers = tuple(sorted(self.strategy.buffers_of(now.received))) if factors else ()
        draws = np.random.default_rng(derive_seed(self.strategy._seed, now.server_round, "checks"))
        return {
            client: MaskingInstructions(
                round(share / most * Q),
                Q,
                tuple(draws.uniform(-1, 1, CHECKS).tolist()),
                factors.get(client),
                buffers,
            )
            for client, share in sorted(shares.items())
        }

    def _masked(
        self, now: _Round, instructions: Mapping[int, MaskingInstructions]
    ) -> tuple[WeightedSum, list[int]]:
        contents = {}
        for client, values in instructions.items():
            message = Message(
                now.asked[client].content, now.asked[client].metadata.dst_node_id, "train"
            )
            add_client_config(message, self.strategy.configrecord_key, values.to_config())
            contents[message.metadata.dst_node_id] = message.content
        read: list[Replies] = []

        def usable(messages: Sequence[Message], replies: list[Message]) -> list[Message]:
            request = RoundRequest(now.server_round, messages=messages)
            read.append(self.strategy.new_replies(request))
            now.trained = (
                read[-1].read(replies, lambda *reply: self._check(now, instructions, *reply)).usable
            )
            now.dropped |= read[-1].dropped
            _check_enough_clients({client: instructions[client].ratio for client in now.trained})
            nodes = {now.asked[client].metadata.dst_node_id for client in now.trained}
            return [r for r in replies if r.metadata.src_node_id in nodes and not r.has_error()]

        try:
            mean = masked_mean(self.send, now.server_round, contents, usable)
            read[0].check_enough()
            clients = sorted(now.trained)
            return decode(mean, now.received, [instructions[client] for client in clients]), clients
        except WrongSum as error:
            names = ", ".join(map(str, sorted(now.trained)))
            raise Halted(f"{error} (one of clients {names})") from error

    def _check(
        self,
        now: _Round,
        instructions: Mapping[int, MaskingInstructions],
        client: int,
        content: RecordDict,
        metrics: MetricRecord,
    ) -> MetricRecord:
        """Return a client's training metrics; raise ``InvalidReply`` if the sum must exclude it."""
        mine = instructions[client]
        used = metrics.pop("num_examples", None)  # the weight, in Flower's record
        if any(len(record) for record in content.array_records.values()):
            raise InvalidReply("it sent arrays that are not masked")
        now.check.check_numbers(client, metrics, self.strategy.used_next_round)
        now.check.check_policy({**metrics, **now.numbers[client]})
        for name, value in metrics.items():
            check_finite(name, value)
        if used != mine.weight:
            raise InvalidReply(f"it used the weight {used} instead of {mine.weight}")
        planned, steps = now.numbers[client].get("steps"), metrics.get("steps")
        if planned is not None and steps != planned:
            raise InvalidReply(f"it took {steps} steps, but had announced {planned}")
        try:
            sizes = masked_sizes(content)
        except Exception as error:
            raise InvalidReply(f"its masked vector cannot be read ({error!r})") from error
        size = size_of(now.received, mine.factor is not None)
        if sizes != [1, size]:
            raise InvalidReply(f"its masked arrays have {sizes} numbers, expected {[1, size]}")
        return metrics

    def _conclude(self, now: _Round, cohort: SumCohort, measured: tuple[int, ...]) -> Arrays:
        """Return the next global model from the sum, and record the merge in the strategy."""
        strategy = self.strategy
        assert cohort.total is not None
        kept = [measured.index(client) for client in cohort.client_ids]
        for name, value in strategy.diagnostics.items():  # remove clients that failed since
            if np.shape(value)[:1] == (len(measured),):
                strategy.diagnostics[name] = np.asarray(value)[kept]
        strategy.note_cohort(cohort)
        strategy.diagnostics["weights"] = cohort.total.weights
        merged = strategy.combine(cohort, cohort.total.weights)
        strategy.diagnostics["quantization_error"] = cohort.total.error
        if lost := [n for n, a in merged.items() if (is_finite(now.received[n]) > is_finite(a))]:
            raise Diverged(
                f"Round {now.server_round}: the merged model holds NaN or infinite values in "
                f"{lost[0]!r}."
            )
        _warn_if_shown(now.server_round, cohort)
        strategy.note_trained(cohort)
        strategy.note_merged(cohort)
        return merged


def _checked(weights: NDArray[np.float64], clients: int) -> NDArray[np.float64]:
    """Return the weights; raise ``ConfigError`` unless they are non-negative with sum 1."""
    if weights.shape != (clients,) or not on_simplex(weights):
        raise ConfigError(f"Weights {weights}: expected {clients} non-negative numbers with sum 1.")
    return weights


def _check_enough_clients(shares: Mapping[int, float]) -> None:
    """Raise `Halted` if the sum would include too few clients."""
    weighted = sum(share > 0 for share in shares.values())
    if weighted < SMALLEST_SUM:
        raise Halted(
            f"{weighted} of {len(shares)} clients have a weight above 0, but a sum needs at least "
            f"{SMALLEST_SUM} to hide each client (decrease bound.max-client-weight to spread "
            "weights)"
        )


def _warn_if_shown(server_round: int, cohort: SumCohort) -> None:
    """Warn if the sum is mostly a single client's model."""
    assert cohort.total is not None
    k = int(np.argmax(cohort.total.weights))
    if (weight := float(cohort.total.weights[k])) > DOMINANT_WEIGHT:
        logger.warning(
            "Round %d: client %d has weight %.2f, so the sum shows most of its model. "
            "bound.max-client-weight caps weights.",
            server_round,
            cohort.client_ids[k],
            weight,
        )


def described(clients: int) -> dict[str, Any]:
    """Return the parameters of the protocol for this number of clients, for ``run.json``."""
    shares, threshold = shares_of(clients)
    return {
        "clients": clients,
        "shares": shares,
        "threshold": threshold,
        "quantization_range": quantization_range(clients),
    }
