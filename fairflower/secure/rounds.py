"""The server's part: a round of training under secure aggregation, in two exchanges."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict

from fairflower.aggregation.cohort import Arrays
from fairflower.aggregation.messages import RoundRequest, add_client_config
from fairflower.aggregation.records import (
    InvalidReply,
    check_finite,
    is_finite,
    stack_common_metrics,
)
from fairflower.aggregation.replies import ReplyCheck
from fairflower.aggregation.strategy import FairStrategy
from fairflower.arrays import record_of
from fairflower.errors import Diverged, logger
from fairflower.numerics import Vector
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


def train_masked(
    strategy: FairStrategy,
    send: Send,
    server_round: int,
    messages: Sequence[Message],
    arrays: ArrayRecord,
) -> ArrayRecord:
    """Send the strategy's train messages and return the next global model.

    The strategy has ``sums_suffice = True``, and ``send`` sends messages and returns the replies
    that arrive before the timeout. Raises ``Halted`` if the masks cannot be removed, or if the sum
    is wrong. The strategy then has its state from before the round. Raises ``RoundFailed`` if fewer
    than ``min_clients`` replies are usable.
    """
    before = strategy.state_dict()
    asked = {strategy._enrolled.client_of(message): message for message in messages}
    check = ReplyCheck(strategy, arrays, strategy._enrolled.sizes)
    now = _Round(strategy, send, server_round, asked, check)
    strategy.diagnostics, strategy.clusters = {}, None
    strategy.client_ids, strategy.client_metrics = (), {}
    try:
        return record_of(now.merged())
    except Halted:
        strategy.load_state_dict(before)
        strategy.diagnostics, strategy.client_ids = {}, ()
        raise
    finally:
        strategy.dropped = dict(sorted(now.dropped.items()))


@dataclass
class _Round:
    """A round: its messages and replies by client, and the exchanges that merge them."""

    strategy: FairStrategy
    send: Send
    server_round: int
    asked: dict[int, Message]  # the strategy's train messages, by client
    check: ReplyCheck
    numbers: dict[int, MetricRecord] = field(default_factory=dict)  # metrics before training
    trained: dict[int, MetricRecord] = field(default_factory=dict)  # metrics after training
    dropped: dict[int, str] = field(default_factory=dict)

    def merged(self) -> Arrays:
        """Return the next global model."""
        cohort = self._measure()
        with one_thread():  # the same bits on any number of cores
            weights = np.asarray(self.strategy.weigh(cohort))
            cohort.check_weights(weights)
            weights = cohort.cap(weights)
            factors = self.strategy.square_factors(cohort)
        total, clients = self._sum(cohort.client_ids, weights, factors)
        with one_thread():
            return self._conclude(self._cohort(clients, total), cohort.client_ids)

    def _measure(self) -> SumCohort:
        """Run the first exchange and return the clients' numbers as a cohort."""
        strategy = self.strategy
        messages = [
            Message(m.content, m.metadata.dst_node_id, MEASURE) for m in self.asked.values()
        ]
        names = [n for n in strategy._measurements if n not in strategy.used_next_round]

        def check(client: int, content: RecordDict, metrics: MetricRecord) -> MetricRecord:
            if content.array_records:
                raise InvalidReply("it sent arrays, but the server requested only numbers")
            self.check.check_numbers(client, metrics, names)
            return metrics

        replies = strategy.new_replies(RoundRequest(self.server_round, messages=messages))
        self.dropped = replies.dropped
        self.numbers = replies.read(self.send(messages), check).usable
        replies.check_enough()
        replies.check_cap(strategy.max_client_weight)
        return self._cohort(sorted(self.numbers))

    def _cohort(self, clients: Sequence[int], total: WeightedSum | None = None) -> SumCohort:
        """Return a cohort of these clients, with their numbers and the sum of their updates."""
        # Weights and factors were computed from the numbers of the first exchange.
        both = [{**self.trained.get(k, {}), **self.numbers[k]} for k in clients]
        metrics = stack_common_metrics([MetricRecord(numbers) for numbers in both])
        return SumCohort(
            self.server_round,
            tuple(clients),
            metrics[self.strategy.weighted_by_key],
            self.check.received,
            (),
            metrics,
            self.check.buffers,
            population=len(self.strategy._enrolled.nodes or ()),
            max_weight=self.strategy.max_client_weight,
            total=total,
        )

    def _sum(
        self, clients: Sequence[int], weights: Vector, factors: Vector | None
    ) -> tuple[WeightedSum, list[int]]:
        """Run the second exchange; return the sum of weighted updates and the clients in it.

        If clients fail before training, they are dropped, and the exchange starts again.
        """
        shares = dict(zip(clients, weights.tolist(), strict=True))
        each = {} if factors is None else dict(zip(clients, factors.tolist(), strict=True))
        at = {message.metadata.dst_node_id: client for client, message in self.asked.items()}
        while True:
            _check_enough_clients(shares)
            try:
                return self._masked(self._instructions(shares, each))
            except LostClients as lost:
                replies = self.strategy.new_replies(RoundRequest(self.server_round))
                for node, reason in lost.reasons.items():
                    replies.drop(at[node], reason)
                    del shares[at[node]]
                self.dropped |= replies.dropped

    def _instructions(
        self, shares: Mapping[int, float], factors: Mapping[int, float]
    ) -> dict[int, MaskingInstructions]:
        """Return the values for each client. Weights become integers, of which the largest is Q."""
        most, Q = max(shares.values()), quantization_range(len(shares))
        buffers = tuple(sorted(self.check.buffers)) if factors else ()
        draws = np.random.default_rng(derive_seed(self.strategy._seed, self.server_round, "checks"))
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
        self, instructions: Mapping[int, MaskingInstructions]
    ) -> tuple[WeightedSum, list[int]]:
        """Train the clients; return the sum of their masked updates and the clients in it."""
        contents = {}
        for client, values in instructions.items():
            asked = self.asked[client]
            message = Message(asked.content, asked.metadata.dst_node_id, "train")
            add_client_config(message, self.strategy.configrecord_key, values.to_config())
            contents[message.metadata.dst_node_id] = message.content
        read = self.strategy.new_replies(RoundRequest(self.server_round))

        def usable(messages: Sequence[Message], replies: list[Message]) -> list[Message]:
            read.request = RoundRequest(self.server_round, messages=messages)
            read.read(replies, partial(self._check, instructions))
            self.trained = read.usable
            self.dropped |= read.dropped
            _check_enough_clients({client: instructions[client].ratio for client in self.trained})
            nodes = {self.asked[client].metadata.dst_node_id for client in self.trained}
            return [r for r in replies if r.metadata.src_node_id in nodes and not r.has_error()]

        try:
            known = self.strategy._enrolled
            titles = {node: known.names.get(k, f"Node {node}") for node, k in known.clients.items()}
            mean = masked_mean(self.send, self.server_round, contents, usable, titles)
            read.check_enough()
            clients = sorted(self.trained)
            told = [instructions[client] for client in clients]
            return decode(mean, self.check.received, told), clients
        except WrongSum as error:
            names = self.strategy._enrolled.name_of(*sorted(self.trained))
            raise Halted(f"{error} (one of {names})") from error

    def _check(
        self,
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
        self.check.check_numbers(client, metrics, self.strategy.used_next_round)
        self.check.check_policy({**metrics, **self.numbers[client]})
        for name, value in metrics.items():
            check_finite(name, value)
        if used != mine.weight:
            raise InvalidReply(f"it used the weight {used} instead of {mine.weight}")
        planned, steps = self.numbers[client].get("steps"), metrics.get("steps")
        if planned is not None and steps != planned:
            raise InvalidReply(f"it took {steps} steps, but had announced {planned}")
        try:
            sizes = masked_sizes(content)
        except Exception as error:
            raise InvalidReply(f"its masked vector cannot be read ({error!r})") from error
        size = size_of(self.check.received, mine.factor is not None)
        if sizes != [1, size]:
            raise InvalidReply(f"its masked arrays have {sizes} numbers, expected {[1, size]}")
        return metrics

    def _conclude(self, cohort: SumCohort, measured: tuple[int, ...]) -> Arrays:
        """Return the next global model from the sum, and record the merge in the strategy."""
        strategy = self.strategy
        assert cohort.total is not None
        kept = [measured.index(client) for client in cohort.client_ids]
        for name, value in strategy.diagnostics.items():  # remove clients that failed since
            if np.shape(value)[:1] == (len(measured),):
                strategy.diagnostics[name] = np.asarray(value)[kept]
        strategy.note_cohort(cohort)
        weights = strategy.diagnostics["weights"] = cohort.total.weights
        merged = strategy.combine(cohort, weights)
        for exchange in strategy.exchanges:  # only of the server: clients with any are refused
            merged = exchange.correct(cohort, merged)
        strategy.diagnostics["quantization_error"] = cohort.total.error
        if lost := [
            n for n, a in merged.items() if is_finite(self.check.received[n]) > is_finite(a)
        ]:
            raise Diverged(
                f"Round {self.server_round}: the merged model holds NaN or infinite values in "
                f"{lost[0]!r}."
            )
        if (weight := float(weights.max())) > DOMINANT_WEIGHT:
            logger.warning(
                "Round %d: %s has weight %.2f, so the sum shows most of its model. "
                "bound.max-client-weight caps weights.",
                self.server_round,
                strategy._enrolled.name_of(cohort.client_ids[int(weights.argmax())]),
                weight,
            )
        strategy.note_trained(cohort)
        strategy.note_merged(cohort)
        return merged


def _check_enough_clients(shares: Mapping[int, float]) -> None:
    """Raise `Halted` if the sum would include too few clients."""
    weighted = sum(share > 0 for share in shares.values())
    if weighted < SMALLEST_SUM:
        raise Halted(
            f"{weighted} of {len(shares)} clients have a weight above 0, but a sum needs at least "
            f"{SMALLEST_SUM} to hide each client (decrease bound.max-client-weight to spread "
            "weights)"
        )


def described(clients: int) -> dict[str, int]:
    """Return the parameters of the protocol for this number of clients, for ``run.json``."""
    shares, threshold = shares_of(clients)
    return {
        "clients": clients,
        "shares": shares,
        "threshold": threshold,
        "quantization_range": quantization_range(clients),
    }
