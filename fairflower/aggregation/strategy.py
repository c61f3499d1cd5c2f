"""FairStrategy: Flower's FedAvg, but replies are validated and merged as a cohort."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp import strategy as flower
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.hooks import Observer, Options, StrategyHooks, checked_options
from fairflower.aggregation.messages import (
    EnrolledClients,
    RoundRequest,
    add_client_config,
    check_dp_compatible,
)
from fairflower.aggregation.participation import (
    Draw,
    Participation,
    Uniform,
    checked_candidates,
    checked_choice,
    note_merged,
)
from fairflower.aggregation.records import (
    InvalidReply,
    aggregate_metrics,
    check_finite,
    check_names,
    check_test,
    check_type,
    is_finite,
    stack_common_metrics,
)
from fairflower.aggregation.replies import Replies, ReplyCheck
from fairflower.aggregation.state import collect_state, parts_of, restore_state
from fairflower.arguments import Configurable
from fairflower.arrays import record_of
from fairflower.errors import Diverged, RoundFailed, StrategyError, naming_failures, require
from fairflower.numerics.scores import Score
from fairflower.numerics.threads import one_thread
from fairflower.seeds import derive_seed

#: What candidates of the participation policy were asked, among a strategy's requests.
_CANDIDATES = "candidates"


class FairStrategy(StrategyHooks, Configurable, flower.FedAvg):
    """Base class of fairflower's strategies.

    A subclass defines the clients' weights (``weigh``) or the merged model (``merge``);
    `StrategyHooks` lists all hooks, and `Options` the arguments of every strategy. This class sends
    messages, and validates and orders replies.

    Attributes
    ----------
    client_ids : tuple of int
        Ids of the clients in the last cohort, in the order of ``diagnostics``.
    client_metrics : dict of str -> ndarray of shape (K,)
        The scalar metrics that all clients of the last cohort sent.
    dropped : dict of int -> str
        Reasons, by client id, why clients that were selected in the last round were not merged.
    merged_rounds : dict of int -> int
        Last round in which each client was merged, by client id.
    """

    def __init__(self, **options: Unpack[Options]) -> None:
        if type(self).extra:
            require(type(self).extra, type(self).__name__)
        values = checked_options(options)
        self._buffers, self.exchanges = values.pop("buffers"), values.pop("exchanges")
        self._min_clients: int | None = values.pop("min_clients")
        self._observers: Sequence[Observer] = values.pop("observers")
        self._participation: Participation = values.pop("participation")
        self._availability = values.pop("availability")
        self.max_client_weight: float = values.pop("max_client_weight")
        self.clip_update_norm: float | None = values.pop("clip_update_norm")
        self.clip_update_median: float | None = values.pop("clip_update_median")
        super().__init__(**values)
        self.diagnostics = {}
        self.client_ids: tuple[int, ...] = ()
        self.client_metrics: dict[str, NDArray[np.float64]] = {}
        self.dropped: dict[int, str] = {}
        self.clusters = None
        self.merged_rounds: dict[int, int] = {}
        self._enrolled = EnrolledClients()
        self._requests: dict[str, RoundRequest] = {}  # what was asked -> the last round's request

    def state_dict(self) -> Arrays:
        """Return the state as named arrays, not copies: the next merge may change them."""
        return collect_state(parts_of(self, self._participation, self._observers))

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Restore a saved state; raise ``ValueError`` if it has other parts or attributes."""
        restore_state(parts_of(self, self._participation, self._observers), state)

    # --- called by Flower ------------------------------------------------------------

    def enroll(
        self,
        nodes: Mapping[int, int],
        seed: int,
        sizes: Mapping[int, int] | None = None,
        names: Mapping[int, str] | None = None,
        testers: Collection[int] = (),
    ) -> None:
        """Select clients by id from now on, because Flower's node ids differ between runs.

        ``nodes`` has the node id of every client of the federation, and ``sizes`` the number of
        training examples of clients of which it is known; a reply with a different number is
        dropped. ``seed`` is for the selections and the exchanges' random draws. ``names`` has the
        names of sites, which messages use; of two sites, both must train, unless ``min_clients`` is
        1. ``testers`` are clients that test and do not train.
        """
        known = self._enrolled
        known.nodes, known.sizes = dict(sorted(nodes.items())), sizes or {}
        known.clients = {node: client for client, node in nodes.items()}
        known.names, known.testers = names or {}, frozenset(testers)
        self._seed = self.seed = seed
        for exchange in self.exchanges:
            exchange._seed = exchange.seed = seed

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        **options: Any,
    ) -> flower.Result:
        """Run rounds, continuing from the state of earlier calls (see Flower's ``FedAvg``)."""
        config = ConfigRecord({"num-server-rounds": num_rounds, **(train_config or {})})
        return super().start(grid, initial_arrays, num_rounds, timeout, config, **options)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return train messages for this round's clients (see Flower's ``FedAvg``).

        Raises ``ValueError`` if a Flower wrapper for differential privacy would clip arrays that
        are not parameters, or if the strategy does not support the config (`read_config`).
        """
        check_dp_compatible(self, arrays)
        self.read_config(config)
        if self._enrolled.nodes is None:  # fairflower's app sends all settings
            self._check_config_arguments()
        if self._measurements:
            config["measure"] = ",".join(self._measurements)
        nodes = self._enrolled.connected(grid, self.min_available_nodes)
        uniform = type(self._participation) is Uniform and self._availability is None
        if self._enrolled.nodes is None and uniform:
            messages = list(super().configure_train(server_round, arrays, config, grid))
        else:
            with _keeping(arrays):
                draw = self._draw(server_round, nodes)
            losses = self._request(_CANDIDATES, server_round).losses
            chosen = checked_choice(self._participation, draw, losses)
            asked = [nodes[client] for client in chosen]
            messages = self._messages(MessageType.TRAIN, server_round, arrays, config, asked)
        for exchange in self.exchanges:
            if shared := exchange.broadcast(server_round):
                record = record_of(shared)
                for message in messages:
                    message.content[exchange.name] = record
        configs = [self.client_config, *(exchange.client_config for exchange in self.exchanges)]
        self._add_own(messages, configs)
        self._requests[MessageType.TRAIN] = RoundRequest(server_round, arrays, messages, len(nodes))
        return messages

    def configure_candidates(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> list[Message]:
        """Return messages that ask the participation policy's candidates for their losses.

        They are evaluate messages for the clients' training examples (``split = "train"``);
        `note_candidates` reads the replies. The list is empty if the policy has no candidates.
        """
        if self._enrolled.nodes is None:
            return []
        draw = self._draw(server_round, self._enrolled.training)
        if not (candidates := checked_candidates(self._participation, draw)):
            return []
        config["split"] = "train"
        nodes = [self._enrolled.nodes[client] for client in candidates]
        messages = self._messages(MessageType.EVALUATE, server_round, arrays, config, nodes)
        return self._requested_tests(server_round, arrays, messages)

    def note_candidates(self, server_round: int, replies: Iterable[Message]) -> None:
        """Store the candidates' losses; raise ``RoundFailed`` if too few replies are usable."""
        answers = self._evaluations(server_round, replies, self._enrolled.sizes)
        losses = {client: float(answer["eval_loss"]) for client, answer in answers.items()}  # type: ignore[arg-type]
        self._requests[_CANDIDATES] = RoundRequest(server_round, losses=losses)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return evaluate messages for this round's clients (see Flower's ``FedAvg``)."""
        if self._enrolled.nodes is None or self.fraction_evaluate == 0.0:
            messages = list(super().configure_evaluate(server_round, arrays, config, grid))
        else:
            draw = self._draw(server_round, self._enrolled.nodes, test=True)
            nodes = [self._enrolled.nodes[client] for client in Uniform().choose(draw, {})]
            messages = self._messages(MessageType.EVALUATE, server_round, arrays, config, nodes)
        return self._requested_tests(server_round, arrays, messages)

    def _messages(
        self, kind: str, server_round: int, arrays: ArrayRecord, config: ConfigRecord, nodes: Any
    ) -> list[Message]:
        config["server-round"] = server_round
        content = RecordDict({self.arrayrecord_key: arrays, self.configrecord_key: config})
        return list(self._construct_messages(content, nodes, kind))

    def _requested_tests(
        self, server_round: int, arrays: ArrayRecord, messages: list[Message]
    ) -> list[Message]:
        """Complete a round's evaluate messages, and note that they were requested."""
        self._add_own(messages)
        self._requests[MessageType.EVALUATE] = RoundRequest(server_round, arrays, messages)
        return messages

    def _request(self, kind: str, server_round: int) -> RoundRequest:
        """Return what this object's ``configure_*`` requested in a round; nothing if not called."""
        nothing = RoundRequest(server_round)
        last = self._requests.get(kind, nothing)
        return last if last.server_round == server_round else nothing

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next global model and the clients' mean metrics.

        Both are None if there were neither messages nor replies. Raises ``RoundFailed`` if fewer
        than ``min_clients`` replies are usable, or too few for ``max_client_weight``; ``Diverged``
        if the merged model has NaN or infinite values; ``StrategyError`` if `merge` returns wrong
        arrays; and ``ConfigError`` if it needs the received model, but this model is not known.
        """
        request, messages = self._request(MessageType.TRAIN, server_round), list(replies)
        if not (request.messages or messages):
            return None, None
        with _keeping(request.arrays):
            check = ReplyCheck(self, request.arrays, self._enrolled.sizes)
            usable = check.read(self.new_replies(request), messages)
            usable.check_cap(self.max_client_weight)
            cohort = self._gathered(check, usable)
            with one_thread():  # the same bits on any number of cores
                merged = self.merge(cohort)
                _check_arrays(type(self).__name__, merged, check.received)
                merged = self._corrected(check, cohort, merged)
        self.note_merged(cohort)
        contents = [usable.usable[client].content for client in cohort.client_ids]
        key, function = self.weighted_by_key, self.train_metrics_aggr_fn
        return record_of(merged), aggregate_metrics(cohort.metrics, key, function, contents)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the mean of the clients' test metrics, weighted by ``weighted_by_key``.

        Replies with errors, NaN, infinite values or impossible sizes are dropped and listed in
        ``dropped``. Only metrics that all clients sent are averaged. None if no reply is left.
        """
        request, messages = self._request(MessageType.EVALUATE, server_round), list(replies)
        if not (request.messages or messages):
            return None
        answers = self.new_replies(request).read(messages, _finite).usable
        if not answers:
            return None
        contents, metrics = zip(*(answers[client] for client in sorted(answers)), strict=True)
        key, function = self.weighted_by_key, self.evaluate_metrics_aggr_fn
        return aggregate_metrics(stack_common_metrics(metrics), key, function, list(contents))

    def _evaluations(
        self,
        server_round: int,
        replies: Iterable[Message],
        max_test_sizes: Mapping[int, int],
        num_groups: int = 0,
        scores: Sequence[Score] = (),
    ) -> dict[int, MetricRecord]:
        """Return the clients' test metrics by client id; accuracies are from 0 to 1.

        For the other arguments see `check_test`. Raises ``RoundFailed`` as in training.
        """
        known = self.weighted_by_key, max_test_sizes, num_groups
        check = partial(check_test, *known, scores=scores)
        answers = self.new_replies(self._request(MessageType.EVALUATE, server_round))
        answers.read(replies, check).check_enough()
        return answers.usable

    # --- internals -------------------------------------------------------------------

    def new_replies(self, request: RoundRequest) -> Replies:
        """Return an object for the replies to a request, which also fills ``self.dropped``."""
        replies = Replies(request, self._enrolled, self.weighted_by_key, self._min_clients)
        self.dropped = replies.dropped
        return replies

    def note_cohort(self, cohort: Cohort) -> None:
        """Store which clients are merged, and what they reported."""
        self.client_ids = cohort.client_ids
        self.client_metrics = {k: v for k, v in cohort.metrics.items() if k != "client-id"}

    def note_merged(self, cohort: Cohort) -> None:
        """Store that the clients have been merged, for their state and for the policy."""
        self.merged_rounds |= dict.fromkeys(cohort.client_ids, cohort.server_round)
        note_merged(self._participation, cohort)

    def _gathered(self, check: ReplyCheck, replies: Replies) -> Cohort:
        """Return the usable replies as a cohort, with bounded updates."""
        cohort = check.gather(replies, self.max_client_weight)
        self.note_cohort(cohort)
        self.diagnostics, self.clusters = {}, None
        norm, median = self.clip_update_norm, self.clip_update_median
        if norm is not None or median is not None:
            cohort, self.diagnostics["clipped"] = cohort.clipped(norm, median)
        if median is not None:
            returned = [(e, cohort.measured[e.name]) for e in self.exchanges if e.returned]
            bounded = {e.name: tuple(e.bound(arrays, median)) for e, arrays in returned}
            cohort = replace(cohort, measured=cohort.measured | bounded)
        return cohort

    def _corrected(self, check: ReplyCheck, cohort: Cohort, merged: Arrays) -> Arrays:
        """Return the merged model as the exchanges correct it, and complete the diagnostics."""
        cohort = replace(cohort, clusters=self.clusters)
        if "weights" in self.diagnostics:  # capped, as in `Cohort.average`
            self.diagnostics["weights"] = cohort.cap(np.asarray(self.diagnostics["weights"]))
        for exchange in self.exchanges:
            kind = type(exchange)
            with naming_failures(StrategyError, f"The exchange {kind.__name__}", kind.__module__):
                exchange.collect(cohort)
                merged = exchange.correct(cohort, merged)
            self.diagnostics.update(exchange.diagnostics)
        _check_finite(type(self).__name__, merged, cohort, known=not check.unknown)
        for observer in self._observers:
            self.diagnostics.update(observer(cohort))
        unset, received = check.unset, check.received
        return merged | {n: np.where(unset[n], received[n], merged[n]) for n in unset}

    def _draw(self, server_round: int, nodes: Mapping[int, int], test: bool = False) -> Draw:
        """Return the draw of a round; raise ``RoundFailed`` if no client is available."""
        clients, seed, availability = sorted(nodes), self._seed, self._availability
        fraction, at_least = self.fraction_train, self.min_train_nodes
        if test:
            fraction, at_least = self.fraction_evaluate, self.min_evaluate_nodes
            # Another draw than for training, whose clients' data would make tests look better.
            seed, availability = derive_seed(seed, "evaluate"), None
        wanted = max(int(len(clients) * fraction + 1e-9), at_least)
        if availability is not None and not (clients := availability(server_round, clients)):
            raise RoundFailed(
                f"Round {server_round}: no client is available. Check participation.availability."
            )
        sizes = self._enrolled.sizes
        return Draw(server_round, tuple(clients), min(wanted, len(clients)), seed, sizes)

    def _add_own(
        self,
        messages: Iterable[Message],
        configs: Iterable[Callable[[int], Mapping[str, float | str]]] = (),
    ) -> None:
        """Add what each client needs to find its state, what it is told, and its own arrays.

        A client discards its state from rounds after ``merged-round``. Without enrolled clients,
        an unknown client gets no such round, because the server may have merged it before a
        restart.
        """
        for message in messages:
            client = self._enrolled.client_of(message)
            last = self.merged_rounds.get(client, None if self._enrolled.nodes is None else 0)
            values: dict[str, float | str] = {} if last is None else {"merged-round": last}
            for told in configs:
                values |= told(client)
            add_client_config(message, self.configrecord_key, values)
            own = {e.name: a for e in self.exchanges if (a := e.arrays_for(client))}
            if own:  # all messages of a round share their content, so it is copied
                records = {name: record_of(arrays) for name, arrays in own.items()}
                message.content = RecordDict({**message.content, **records})


@contextmanager
def _keeping(arrays: ArrayRecord | None) -> Iterator[None]:
    """Add the model that was sent to a ``RoundFailed`` error."""
    try:
        yield
    except RoundFailed as failed:
        failed.arrays = arrays
        raise


def _finite(
    client: int, content: RecordDict, metrics: MetricRecord
) -> tuple[RecordDict, MetricRecord]:
    for key, value in metrics.items():
        check_finite(key, value)
    return content, metrics


def _check_arrays(name: str, merged: Any, received: Arrays) -> None:
    remedy = "Return a dict with the names, shapes and types of `cohort.received`."
    for value in merged.values() if isinstance(merged, Mapping) else [merged]:
        if not isinstance(value, (np.ndarray, np.generic)):
            raise StrategyError(f"{name}.merge returned {type(value).__name__}. {remedy}")
    try:
        check_names(merged, received)
        for key, expected in received.items():
            check_type(key, merged[key], expected)
    except InvalidReply as wrong:
        raise StrategyError(f"{name}.merge: {wrong}. {remedy}") from None


def _check_finite(name: str, merged: Arrays, cohort: Cohort, known: bool) -> None:
    """Raise ``Diverged`` if a merged model has NaN or infinite values.

    ``known`` says whether the model is known that the clients received.
    """
    lost = next((key for key, array in merged.items() if not is_finite(array)), None)
    if lost is None:
        return
    longest = "Bound"
    if known:
        squares = cohort.squared_norms()
        k = int(np.argmax(np.nan_to_num(squares, nan=np.inf)))
        longest = f"The largest update norm, {np.sqrt(squares[k]):.3g}, is that of client "
        longest += f"{cohort.client_ids[k]}. Exclude this client, or bound"
    raise Diverged(
        f"Round {cohort.server_round}: the model that {name} merged holds NaN or infinite "
        f"values in {lost!r}, and the clients' models do not. {longest} updates "
        "with clip-update-norm or clip-update-median, and resume."
    )
