"""How far one lying client of ten can drag the model, strategy by strategy.

    python benchmarks/liar.py              # a minute or so

1. Five rounds. Nine honest clients move by updates of length 1 that have a direction in
   common, cosine 1/2 between each two. The tenth sends the opposite of that direction, and
   lies: about its number of examples, about the length of its update (a million instead of 1),
   and about whatever the strategy learns from its clients. Losses and sharpness, with honest
   clients from 0.3 to 0.7, are 0, a million or minus a million, accuracies 0 or 1, Fisher
   diagonals, gradients and the like a million times too small or too large; in every round
   the same, or the opposite in every second one. All combinations are tried, and the worst is
   shown.

   `weight` is the largest weight that the liar gets, where 0.1 would be its share. `goes` is
   how far the model goes per round if all ten are honest, in lengths of an honest update,
   and `dragged` how far the liar drags it from there: the distance between the final models
   over the rounds. One that has its share and no more drags by about 0.17. The bounds are
   `max_client_weight=0.2` ("cap") and `clip_update_median=1` ("clip").
2. What thirty rounds add under rules that remember: to what the liar gets by its words
   alone, with an honest number of examples and an update of length 1; and, within both
   bounds, by an absurd number and length besides.
3. Lies beside the model. Here clients train: each has the loss ||w - m||^2 / 2, with its own m
   at distance 1 from where the model starts. The liar trains honestly, but what it returns
   to the exchange is a vector against the others, of that length. With FedDyn, which returns
   nothing, and with plain SGD, its model is as false. `ends` is how far from the start
   thirty rounds lead if all are honest; then, how far from there they end with the liar,
   also within `clip_update_norm=1` ("norm").
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
from common import markdown, say, version_facts
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fairflower.aggregation import clusters
from fairflower.aggregation.cohort import Arrays
from fairflower.aggregation.records import decode_record
from fairflower.arrays import record_of
from fairflower.errors import RoundFailed
from fairflower.exchanges import (
    ControlVariates,
    DynamicRegularizer,
    Exchange,
    Prototypes,
)
from fairflower.flower_compat import set_message_id, set_task_identity
from fairflower.numerics.clustering import Clusters
from fairflower.strategies import STRATEGIES, FairStrategy, FedAvg

CLIENTS, SHAPE = 10, (1, 400)
LIAR = CLIENTS - 1
SHORT, LONG = 5, 30
CAP = {"max_client_weight": 0.2}
CLIP = {"clip_update_median": 1.0}
NORM = {"clip_update_norm": 1.0}
BOUNDS: dict[str, dict[str, float]] = {"none": {}, "cap": CAP, "clip": CLIP, "both": CAP | CLIP}

TRUTH = 0.5  # the liar's, and the mean of the others'
#: What is said instead, and what in every second round by one who contradicts itself.
NUMBERS = {TRUTH: TRUTH, 0.0: 1e6, 1e6: -1e6, -1e6: 1e6}
ACCURACIES = {TRUTH: TRUTH, 0.0: 1.0, 1.0: 0.0}
EXAMPLES = (100, 2**53)
FACTORS = (1e-6, 1.0, 1e6)
LENGTHS = (1.0, 1e6)


class Lie(NamedTuple):
    """What the tenth client says; by default the truth. Pairs are for odd and even rounds."""

    honest: bool = True
    examples: int = 100
    numbers: Mapping[str, tuple[float, float]] = MappingProxyType({})
    factors: tuple[float, float] = (1.0, 1.0)  # for every vector that is measured
    length: float = 1.0


#: A client's answer in a round: the received model, its own id, what the message carried.
Answer = Callable[[FairStrategy, Arrays, int, RecordDict], RecordDict]


# --- strategies ------------------------------------------------------------------------------


def learnt(strategy: FairStrategy) -> tuple[str, ...]:
    """What it asks its clients for, and what it reads of what they say unasked."""
    return (*strategy.needs, *strategy.reads)


def lies(strategy: FairStrategy) -> Iterator[Lie]:
    """All that may pay, of this strategy, without what it does not look at, or refuses."""
    scalars = [name for name in learnt(strategy) if name not in strategy.ARRAY_MEASUREMENTS]
    choices = [ACCURACIES if s.endswith("accuracy") else NUMBERS for s in scalars]
    factors = FACTORS if len(scalars) < len(learnt(strategy)) else (1.0,)
    words = {}  # as a dict: each once, in order
    for factor, *numbers in product(factors, *choices):
        same = zip(numbers, numbers, strict=True)
        other = zip(numbers, map(dict.get, choices, numbers), strict=True)
        words[(factor, factor), tuple(same)] = None
        words[(factor, 1 / factor), tuple(other)] = None
    for (pair, numbers), examples, length in product(words, EXAMPLES, LENGTHS):
        yield Lie(False, examples, dict(zip(scalars, numbers, strict=True)), pair, length)


@lru_cache(maxsize=CLIENTS * LONG)
def honest_update(client: int, server_round: int) -> np.ndarray:
    """Cosine 1/2 with those of others: the common direction, and as much of its own."""
    own = np.random.default_rng([client, server_round]).normal(size=SHAPE)
    own[0, 0] = 0.0
    return (own / np.linalg.norm(own) - against(1.0)) / np.sqrt(2)


def against(length: float) -> np.ndarray:
    """The opposite of what the honest updates have in common."""
    vector = np.zeros(SHAPE)
    vector[0, 0] = -length
    return vector


def truth(client: int) -> tuple[float, float]:
    """An honest loss, sharpness or accuracy: 0.3 to 0.7 from client to client, always the same."""
    value = TRUTH if client == LIAR else 0.3 + 0.05 * client
    return value, value


@lru_cache(maxsize=CLIENTS * LONG)
def measured(client: int, server_round: int, shape: int | tuple[int, int]) -> np.ndarray:
    """A Fisher diagonal, a gradient or a representation."""
    return np.random.default_rng([client, server_round, 1]).random(shape)


def answering(lie: Lie) -> Answer:
    """Nine honest clients and a liar."""

    def answer(
        strategy: FairStrategy, model: Arrays, client: int, message: RecordDict
    ) -> RecordDict:
        server_round = _round(message)
        said, even = lie if client == LIAR else Lie(), server_round % 2 == 0
        update = honest_update(client, server_round) if said.honest else against(said.length)
        content = _content(client, model["w"] + update, said.examples)
        for name in learnt(strategy):
            if name in strategy.ARRAY_MEASUREMENTS:
                # One array per parameter; a representation is no parameter's.
                key, shape = ("h", 8) if name in strategy.SINGLE_ARRAYS else ("w", SHAPE)
                vector = measured(client, server_round, shape) * said.factors[even]
                content[name] = record_of({key: vector.astype(np.float32)})
            else:
                content["metrics"][name] = said.numbers.get(name, truth(client))[even]
        return content

    return answer


def play(strategy: FairStrategy, answer: Answer, rounds: int) -> tuple[np.ndarray, float]:
    """The final model, and the largest weight that the tenth client got."""
    strategy.enroll({k: k for k in range(CLIENTS)}, seed=0)
    model: Arrays = {"w": np.zeros(SHAPE, np.float32)}
    weight = 0.0
    for server_round in range(1, rounds + 1):
        # What a strategy would take from the run config that clients get.
        config = ConfigRecord({"train.lr": 0.05, "num-server-rounds": rounds})
        sent: Any = record_of(model), config, None
        messages = list(strategy.configure_train(server_round, *sent))
        for i, message in enumerate(messages):
            set_message_id(message, f"{server_round}-{i}")
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
    """FedGCR finds the same clusters under most lies, at many times the cost of all else."""
    find, found = clusters.cluster, {}

    def cluster(*args: Any, **options: Any) -> Clusters:
        question = pickle.dumps((args, options))
        if question not in found:
            found[question] = find(*args, **options)
        return found[question]

    clusters.cluster = cluster


class Worst(NamedTuple):
    """Of some lies: the largest weight, how far the model was dragged and goes, per round."""

    weight: float
    dragged: float
    goes: float


def worst(name: str, options: Mapping[str, Any], rounds: int, told: Sequence[Lie]) -> Worst:
    """The worst of these lies; those that end the run are passed over."""

    def outcome(lie: Lie) -> tuple[np.ndarray, float]:
        return play(STRATEGIES[name](min_clients=CLIENTS, **options), answering(lie), rounds)

    honest, _ = outcome(Lie())
    weights, distances, ends = [], [], []
    for lie in told:
        try:
            model, weight = outcome(lie)
        except (RoundFailed, ValueError) as error:
            ends.append(error)
        else:
            weights.append(weight)
            distances.append(float(np.linalg.norm(model - honest)))
    if ends:
        say(f"  {len(ends)} of {len(told)} lies end the run: {ends[0]}")
    goes = float(np.linalg.norm(honest))
    return Worst(max(weights), max(distances) / rounds, goes / rounds)


def row(name: str) -> list[str]:
    """A strategy's row of the first table."""
    told = list(lies(STRATEGIES[name]()))
    results = {bound: worst(name, options, SHORT, told) for bound, options in BOUNDS.items()}
    weights = [f"{results[bound].weight:.2f}" for bound in ("none", "cap")]
    dragged = [_shown(results[bound].dragged) for bound in BOUNDS]
    return [f"`{name}`", *weights, _shown(results["none"].goes), *dragged]


def long_row(name: str) -> list[str]:
    """A strategy's row of the second table."""
    told = list(lies(STRATEGIES[name]()))
    by_word = [lie for lie in told if lie.examples == EXAMPLES[0] and lie.length == LENGTHS[0]]
    by_all = [lie for lie in told if lie.examples == EXAMPLES[1] and lie.length == LENGTHS[1]]
    few, many = (worst(name, {}, rounds, by_word) for rounds in (SHORT, LONG))
    bounded = [worst(name, BOUNDS["both"], rounds, by_all) for rounds in (SHORT, LONG)]
    found = (few.dragged, many.dragged, *(result.dragged for result in bounded))
    return [f"`{name}`", f"{few.weight:.2f}", f"{many.weight:.2f}", *map(_shown, found)]


# --- exchanges -------------------------------------------------------------------------------

STEPS, STEP = 5, 0.1
#: FedDyn's alpha and FedProto's lambda, at their defaults.
ALPHA, LAMBDA = 0.01, 1.0


class Local:
    """A client with the loss ||w - m||^2 / 2: the trainers' equations, without torch."""

    def __init__(self, method: str, client: int) -> None:
        self.method, self.m = method, honest_update(client, 0)
        self.kept = np.zeros(SHAPE)  # c_k of SCAFFOLD, s_k of FedDyn

    def train(self, received: Arrays, shared: Arrays) -> tuple[np.ndarray, Arrays]:
        """The trained model, and what goes back to the exchange."""
        w = w_t = received["w"].astype(np.float64)
        for _ in range(STEPS):
            w = w - STEP * (w - self.m + self._correction(w, w_t, shared))
        if self.method == "scaffold":
            change = (w_t - w) / (STEPS * STEP) - shared.get("w", 0.0)
            self.kept = self.kept + change
            return w, {"w": change.astype(np.float32)}
        self.kept = self.kept + w - w_t
        # The parameters are the features, as of a linear model on a constant.
        return w, {"mean": w.astype(np.float32), "count": np.array([100])}

    def _correction(self, w: np.ndarray, w_t: np.ndarray, shared: Arrays) -> Any:
        """What the method adds to the gradient."""
        if self.method == "scaffold":
            return shared.get("w", 0.0) - self.kept
        if self.method == "feddyn":
            return ALPHA * (self.kept + w - w_t)
        if self.method == "fedproto" and shared:
            return LAMBDA * 2 * (w - shared["mean"]) / w.size  # of a mean of squares
        return 0.0


#: What goes with each method beside the model.
EXCHANGES: dict[str, type[Exchange] | None] = {
    "sgd": None,
    "scaffold": ControlVariates,
    "feddyn": DynamicRegularizer,
    "fedproto": Prototypes,
}


class FalseReturn(NamedTuple):
    """What the tenth client sends instead of its model, or beside it."""

    length: float = 0.0  # 0: the truth


def training(method: str, lie: FalseReturn) -> Answer:
    """Ten clients that train, of which one lies."""
    clients = [Local(method, k) for k in range(CLIENTS)]
    kind = EXCHANGES[method]

    def answer(
        strategy: FairStrategy, model: Arrays, client: int, message: RecordDict
    ) -> RecordDict:
        shared = message.array_records.get(kind.name) if kind else None
        w, returned = clients[client].train(model, decode_record(shared) if shared else {})
        if client == LIAR and lie.length:
            false = against(lie.length).astype(np.float32)
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


def exchange_row(method: str, length: float) -> list[str]:
    """A row of the third table."""
    kind = EXCHANGES[method]
    lie = FalseReturn(length)

    def outcome(lie: FalseReturn, options: Mapping[str, Any]) -> np.ndarray:
        strategy = FedAvg(min_clients=CLIENTS, exchanges=[kind()] if kind else [], **options)
        return play(strategy, training(method, lie), LONG)[0]

    honest = outcome(FalseReturn(), {})
    cells = [_shown(float(np.linalg.norm(honest)))]
    for options in (*BOUNDS.values(), NORM):
        honest = outcome(FalseReturn(), options)
        cells.append(_shown(float(np.linalg.norm(outcome(lie, options) - honest))))
    return [f"`{method}`", _shown(length), *cells]


# --- all of it -------------------------------------------------------------------------------


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    set_task_identity()
    find_clusters_once()
    print(version_facts("numpy", "flwr"))
    for title, make in TABLES.items():
        print(f"\n{title}\n\n{make()}")


def strategies_table() -> str:
    """The first table."""
    header = ["strategy", "weight", "with cap", "goes", "dragged", "cap", "clip", "both"]
    return markdown(header, [row(name) for name in _told(STRATEGIES)])


def memory_table() -> str:
    """The second table."""
    names = [name for name, rule in STRATEGIES.items() if rule.STATE]
    values = ("weight", "dragged", "both")
    header = [f"{value}, {rounds}" for value, rounds in product(values, (SHORT, LONG))]
    return markdown(["strategy", *header], [long_row(name) for name in _told(names)])


def exchanges_table() -> str:
    """The third table."""
    header = ["client", "length", "ends", "dragged", "cap", "clip", "both", "norm"]
    return markdown(header, [exchange_row(*pair) for pair in product(_told(EXCHANGES), LENGTHS)])


TABLES = {
    "Five rounds": strategies_table,
    "Thirty rounds, rules that remember": memory_table,
    "Thirty rounds, lies beside the model": exchanges_table,
}


def _told(names: Iterable[str]) -> Iterator[str]:
    for name in names:
        say(name)
        yield name


def _content(client: int, model: np.ndarray, examples: int) -> RecordDict:
    arrays = record_of({"w": model.astype(np.float32)})
    metrics = MetricRecord({"num-examples": examples, "client-id": client})
    return RecordDict({"arrays": arrays, "metrics": metrics})


def _round(content: RecordDict) -> int:
    return int(content.config_records["config"]["server-round"])  # type: ignore[arg-type]


def _shown(distance: float) -> str:
    return f"{distance:.2f}" if distance < 1000 else f"{distance:.0e}".replace("e+0", "e")


if __name__ == "__main__":
    main()
