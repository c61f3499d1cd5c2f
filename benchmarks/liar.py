"""Measure how far one lying client of ten can drag the model, strategy by strategy.

    python benchmarks/liar.py              # about a minute

1. Five rounds. Nine honest clients send updates of norm 1 that share a common direction, with
   cosine 1/2 between each two. The tenth client, the liar, sends the opposite of the common
   direction, and lies about three things: its number of examples, the norm of its update (a
   million instead of 1), and the measurements that the strategy reads. For losses and sharpness,
   honest values are 0.3 to 0.7, and lies are 0, a million or minus a million; for accuracies, lies
   are 0 or 1; Fisher diagonals, gradients and the like are a million times too small or too large.
   The lie is the same in every round, or alternates with its opposite. All combinations are tried;
   the table shows the worst.

   `weight` is the liar's largest weight; an equal share is 0.1. `goes` is the model's progress per
   round if all ten clients are honest, in norms of an honest update. `dragged` is the distance
   between the final models with and without the liar, divided by the rounds. A liar with an equal
   share and an update of norm 1 drags by about 0.17. The bounds are `max_client_weight=0.2`
   ("cap") and `clip_update_median=1` ("clip").
2. Thirty rounds, for strategies with a state: the effect of lies about measurements alone, with an
   honest number of examples and an update of norm 1; and, within both bounds, of lies about
   measurements together with a false number of examples and norm.
3. Lies outside the model. Here clients train: client k has the loss ||w - m_k||^2 / 2, with m_k at
   distance 1 from the initial model. The liar trains honestly, but returns to the exchange a vector
   against the others, of the given norm. With FedDyn, which returns nothing, and with plain SGD,
   the liar's model is false instead. `ends` is the distance from the initial model after thirty
   rounds if all clients are honest. The other columns are distances from there with the liar, also
   within `clip_update_norm=1` ("norm").
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from common import log_progress, markdown, version_facts
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fairflower.aggregation.cohort import Arrays
from fairflower.aggregation.records import decode_record
from fairflower.arrays import record_of
from fairflower.errors import RoundFailed
from fairflower.exchanges import (
    ControlVariates,
    DynamicRegularizer,
    Exchange,
    Prototypes,
    centers,
)
from fairflower.flower_compat import set_ids, set_task_identity
from fairflower.numerics.clustering import Clusters
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.strategies import STRATEGIES, FairStrategy, FedAvg

CLIENTS, SHAPE = 10, (1, 400)
LIAR = CLIENTS - 1
SHORT, LONG = 5, 30
CAP = {"max_client_weight": 0.2}
CLIP = {"clip_update_median": 1.0}
NORM = {"clip_update_norm": 1.0}
BOUNDS: dict[str, dict[str, float]] = {"none": {}, "cap": CAP, "clip": CLIP, "both": CAP | CLIP}

TRUTH = 0.5  # the liar's honest value, and the mean of the others
#: Claimed value -> value in even rounds, for a liar that alternates.
NUMBERS = {TRUTH: TRUTH, 0.0: 1e6, 1e6: -1e6, -1e6: 1e6}
ACCURACIES = {TRUTH: TRUTH, 0.0: 1.0, 1.0: 0.0}
EXAMPLES = (100, 2**53)
FACTORS = (1e-6, 1.0, 1e6)
NORMS = (1.0, 1e6)


class Lie(NamedTuple):
    """Claims of the tenth client, by default the truth. Pairs are for odd and even rounds."""

    honest: bool = True
    examples: int = 100
    numbers: Mapping[str, tuple[float, float]] = MappingProxyType({})
    factors: tuple[float, float] = (1.0, 1.0)  # multiply every measured vector
    norm: float = 1.0


#: A function from strategy, received model, client ID and message content to a client's reply.
Answer = Callable[[FairStrategy, Arrays, int, RecordDict], RecordDict]


# --- strategies ------------------------------------------------------------------------------


def values_read(strategy: FairStrategy) -> tuple[str, ...]:
    """Return the names of measurements that a strategy requests, and of metrics that it reads."""
    return (*strategy.measurements, *strategy.reported_metrics)


def lies_to_try(strategy: FairStrategy) -> Iterator[Lie]:
    """Yield the lies to try on a strategy: only about values that it reads and accepts."""
    scalars = [name for name in values_read(strategy) if name not in strategy._array_measurements]
    choices = [ACCURACIES if s.endswith(("accuracy", "score")) else NUMBERS for s in scalars]
    factors = FACTORS if len(scalars) < len(values_read(strategy)) else (1.0,)
    claims = {}  # a dict as an ordered set
    for factor, *numbers in product(factors, *choices):
        same = zip(numbers, numbers, strict=True)
        other = zip(numbers, map(dict.get, choices, numbers), strict=True)
        claims[(factor, factor), tuple(same)] = None
        claims[(factor, 1 / factor), tuple(other)] = None
    for (pair, numbers), examples, norm in product(claims, EXAMPLES, NORMS):
        yield Lie(False, examples, dict(zip(scalars, numbers, strict=True)), pair, norm)


@lru_cache(maxsize=CLIENTS * LONG)
def honest_update(client: int, server_round: int) -> np.ndarray:
    """Return an update with cosine 1/2 to other clients' updates.

    It is the sum of the common direction and of a direction of its own, with equal weights.
    """
    own = np.random.default_rng([client, server_round]).normal(size=SHAPE)
    own[0, 0] = 0.0
    return (own / np.linalg.norm(own) - opposing_vector(1.0)) / np.sqrt(2)


def opposing_vector(norm: float) -> np.ndarray:
    """Return a vector of a given norm against the common direction of the honest updates."""
    vector = np.zeros(SHAPE)
    vector[0, 0] = -norm
    return vector


def honest_value(client: int) -> tuple[float, float]:
    """Return a client's honest loss, sharpness or accuracy, 0.3 to 0.7, for odd and even rounds."""
    value = TRUTH if client == LIAR else 0.3 + 0.05 * client
    return value, value


@lru_cache(maxsize=CLIENTS * LONG)
def random_measurement(client: int, server_round: int, shape: int | tuple[int, int]) -> np.ndarray:
    """Return a random Fisher diagonal, gradient or representation."""
    return np.random.default_rng([client, server_round, 1]).random(shape)


def reply_with_liar(lie: Lie) -> Answer:
    """Return the reply function of nine honest clients and a liar."""

    def answer(
        strategy: FairStrategy, model: Arrays, client: int, message: RecordDict
    ) -> RecordDict:
        server_round = _round(message)
        claims, even = lie if client == LIAR else Lie(), server_round % 2 == 0
        update = (
            honest_update(client, server_round) if claims.honest else opposing_vector(claims.norm)
        )
        content = _content(client, model["w"] + update, claims.examples)
        for name in values_read(strategy):
            if name in strategy._array_measurements:
                # One array per parameter, or a single representation.
                key, shape = (
                    ("h", 8) if MEASUREMENTS.assumed(name).shape == "vector" else ("w", SHAPE)
                )
                vector = random_measurement(client, server_round, shape) * claims.factors[even]
                content[name] = record_of({key: vector.astype(np.float32)})
            else:
                content["metrics"][name] = claims.numbers.get(name, honest_value(client))[even]
        return content

    return answer


def simulate(strategy: FairStrategy, answer: Answer, rounds: int) -> tuple[np.ndarray, float]:
    """Simulate rounds; return the final model and the liar's largest weight."""
    strategy.enroll({k: k for k in range(CLIENTS)}, seed=0)
    model: Arrays = {"w": np.zeros(SHAPE, np.float32)}
    weight = 0.0
    for server_round in range(1, rounds + 1):
        # Settings that strategies read from the run config of the clients.
        config = ConfigRecord(
            {"train.lr": 0.05, "train.momentum": 0.0, "num-server-rounds": rounds}
        )
        sent: Any = record_of(model), config, None
        messages = list(strategy.configure_train(server_round, *sent))
        for i, message in enumerate(messages):
            set_ids(message, message_id=f"{server_round}-{i}")
        replies = [
            Message(answer(strategy, model, m.metadata.dst_node_id, m.content), reply_to=m)
            for m in messages
        ]
        merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        model = decode_record(merged)
        weight = max(weight, float(np.asarray(strategy.diagnostics["weights"])[LIAR]))
    return model["w"].ravel().astype(np.float64), weight


def find_clusters_once() -> None:
    """Cache the clustering of FedGCR: most lies lead to the same clusters, and it is slow."""
    find, found = centers.cluster, {}

    def cluster(*args: Any, **options: Any) -> Clusters:
        question = pickle.dumps((args, options))
        if question not in found:
            found[question] = find(*args, **options)
        return found[question]

    centers.cluster = cluster


class Worst(NamedTuple):
    """Largest weight, largest drag and honest progress over some lies, both per round."""

    weight: float
    dragged: float
    goes: float


def worst(name: str, options: Mapping[str, Any], rounds: int, lies: Sequence[Lie]) -> Worst:
    """Return the maxima over lies, except lies that end the run with an error."""

    def outcome(lie: Lie) -> tuple[np.ndarray, float]:
        return simulate(
            STRATEGIES[name](min_clients=CLIENTS, **options), reply_with_liar(lie), rounds
        )

    honest, _ = outcome(Lie())
    weights, distances, errors = [], [], []
    for lie in lies:
        try:
            model, weight = outcome(lie)
        except (RoundFailed, ValueError) as error:
            errors.append(error)
        else:
            weights.append(weight)
            distances.append(float(np.linalg.norm(model - honest)))
    if errors:
        log_progress(f"  {len(errors)} of {len(lies)} lies end the run: {errors[0]}")
    goes = float(np.linalg.norm(honest))
    return Worst(max(weights), max(distances) / rounds, goes / rounds)


def row(name: str) -> list[str]:
    """Return a strategy's row of the first table."""
    lies = list(lies_to_try(STRATEGIES[name]()))
    results = {bound: worst(name, options, SHORT, lies) for bound, options in BOUNDS.items()}
    weights = [f"{results[bound].weight:.2f}" for bound in ("none", "cap")]
    dragged = [_format(results[bound].dragged) for bound in BOUNDS]
    return [f"`{name}`", *weights, _format(results["none"].goes), *dragged]


def long_row(name: str) -> list[str]:
    """Return a strategy's row of the second table."""
    lies = list(lies_to_try(STRATEGIES[name]()))
    measurements_only = [
        lie for lie in lies if lie.examples == EXAMPLES[0] and lie.norm == NORMS[0]
    ]
    everything = [lie for lie in lies if lie.examples == EXAMPLES[1] and lie.norm == NORMS[1]]
    short, long = (worst(name, {}, rounds, measurements_only) for rounds in (SHORT, LONG))
    bounded = [worst(name, BOUNDS["both"], rounds, everything) for rounds in (SHORT, LONG)]
    distances = (short.dragged, long.dragged, *(result.dragged for result in bounded))
    return [f"`{name}`", f"{short.weight:.2f}", f"{long.weight:.2f}", *map(_format, distances)]


# --- exchanges -------------------------------------------------------------------------------

STEPS, STEP = 5, 0.1
#: FedDyn's alpha and FedProto's lambda, at their defaults.
ALPHA, LAMBDA = 0.01, 1.0


class Local:
    """A client with the loss ||w - m||^2 / 2 and the trainers' equations, without torch."""

    def __init__(self, method: str, client: int) -> None:
        self.method, self.m = method, honest_update(client, 0)
        self.kept = np.zeros(SHAPE)  # c_k of SCAFFOLD, s_k of FedDyn

    def train(self, received: Arrays, shared: Arrays) -> tuple[np.ndarray, Arrays]:
        """Return the trained model, and the arrays that go back to the exchange."""
        w = w_t = received["w"].astype(np.float64)
        for _ in range(STEPS):
            w = w - STEP * (w - self.m + self._correction(w, w_t, shared))
        if self.method == "scaffold":
            change = (w_t - w) / (STEPS * STEP) - shared.get("w", 0.0)
            self.kept = self.kept + change
            return w, {"w": change.astype(np.float32)}
        self.kept = self.kept + w - w_t
        # The features are the parameters themselves, as in a linear model with a constant input.
        return w, {"mean": w.astype(np.float32), "count": np.array([100])}

    def _correction(self, w: np.ndarray, w_t: np.ndarray, shared: Arrays) -> Any:
        """Return the term that the method adds to the gradient."""
        if self.method == "scaffold":
            return shared.get("w", 0.0) - self.kept
        if self.method == "feddyn":
            return ALPHA * (self.kept + w - w_t)
        if self.method == "fedproto" and shared:
            return LAMBDA * 2 * (w - shared["mean"]) / w.size  # the gradient of a mean of squares
        return 0.0


#: Exchange of each method.
EXCHANGES: dict[str, type[Exchange] | None] = {
    "sgd": None,
    "scaffold": ControlVariates,
    "feddyn": DynamicRegularizer,
    "fedproto": Prototypes,
}


class FalseReturn(NamedTuple):
    """False array that the tenth client sends in place of its model or its exchange's arrays."""

    norm: float = 0.0  # 0 means an honest client


def reply_of_trainers(method: str, lie: FalseReturn) -> Answer:
    """Return the reply function of ten clients that train, one of which lies."""
    clients = [Local(method, k) for k in range(CLIENTS)]
    kind = EXCHANGES[method]

    def answer(
        strategy: FairStrategy, model: Arrays, client: int, message: RecordDict
    ) -> RecordDict:
        shared = message.array_records.get(kind.name) if kind else None
        w, returned = clients[client].train(model, decode_record(shared) if shared else {})
        if client == LIAR and lie.norm:
            false = opposing_vector(lie.norm).astype(np.float32)
            if method == "scaffold":
                returned = {"w": false}
            elif method == "fedproto":
                returned = {"mean": false, "count": np.array([EXAMPLES[0]])}
            else:
                w = model["w"] + false
        content = _content(client, w, EXAMPLES[0])
        if kind and kind.returned:
            content[kind.name] = record_of(returned)
        return content

    return answer


def exchange_row(method: str, norm: float) -> list[str]:
    """Return a row of the third table."""
    kind = EXCHANGES[method]
    lie = FalseReturn(norm)

    def outcome(lie: FalseReturn, options: Mapping[str, Any]) -> np.ndarray:
        strategy = FedAvg(min_clients=CLIENTS, exchanges=[kind()] if kind else [], **options)
        return simulate(strategy, reply_of_trainers(method, lie), LONG)[0]

    honest = outcome(FalseReturn(), {})
    cells = [_format(float(np.linalg.norm(honest)))]
    for options in (*BOUNDS.values(), NORM):
        honest = outcome(FalseReturn(), options)
        cells.append(_format(float(np.linalg.norm(outcome(lie, options) - honest))))
    return [f"`{method}`", _format(norm), *cells]


# --- the tables ------------------------------------------------------------------------------


def main() -> None:
    """Print the three tables."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    set_task_identity()
    find_clusters_once()
    print(version_facts("numpy", "flwr"))
    for title, make in TABLES.items():
        print(f"\n{title}\n\n{make()}")


def strategies_table() -> str:
    """Return the table of five rounds."""
    header = ["strategy", "weight", "with cap", "goes", "dragged", "cap", "clip", "both"]
    return markdown(header, [row(name) for name in _with_progress(STRATEGIES)])


def memory_table() -> str:
    """Return the table of thirty rounds, for strategies with a state."""
    names = [name for name, strategy in STRATEGIES.items() if strategy.STATE]
    values = ("weight", "dragged", "both")
    header = [f"{value}, {rounds}" for value, rounds in product(values, (SHORT, LONG))]
    return markdown(["strategy", *header], [long_row(name) for name in _with_progress(names)])


def exchanges_table() -> str:
    """Return the table of lies outside the model."""
    header = ["client", "lie", "ends", "dragged", "cap", "clip", "both", "norm"]
    return markdown(
        header, [exchange_row(*pair) for pair in product(_with_progress(EXCHANGES), NORMS)]
    )


TABLES = {
    "Five rounds": strategies_table,
    "Thirty rounds, rules that remember": memory_table,
    "Thirty rounds, lies beside the model": exchanges_table,
}


def _with_progress(names: Iterable[str]) -> Iterator[str]:
    """Yield names, and print each as progress."""
    for name in names:
        log_progress(name)
        yield name


def _content(client: int, model: np.ndarray, examples: int) -> RecordDict:
    arrays = record_of({"w": model.astype(np.float32)})
    metrics = MetricRecord({"num-examples": examples, "client-id": client})
    return RecordDict({"arrays": arrays, "metrics": metrics})


def _round(content: RecordDict) -> int:
    return int(content.config_records["config"]["server-round"])  # type: ignore[arg-type]


def _format(distance: float) -> str:
    return f"{distance:.2f}" if distance < 1000 else f"{distance:.0e}".replace("e+0", "e")


if __name__ == "__main__":
    main()
