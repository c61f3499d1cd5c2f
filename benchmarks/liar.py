"""How far one lying client of ten can drag the model, strategy by strategy.

    python benchmarks/liar.py              # a minute or so

Nine honest clients move by updates of length 1 that have a direction in common, cosine
1/2 between each two. The tenth sends the opposite of that direction, and lies: about
its number of examples, about the length of its update (a million instead of 1), and about
whatever the strategy learns from its clients. Losses and sharpness are 0, a million or minus
a million instead of 1/2, accuracies 0 or 1, Fisher diagonals, gradients and the like a million
times too small or too large; in every round the same, or in every second round the
opposite. All combinations are tried, and the worst is shown.

Three tables.

1. Five rounds. `weight` is the largest weight that the liar gets, where 0.1 would be its
   share. `goes` is how far the model goes per round if all ten are honest, in lengths of an
   honest update, and `dragged` how far the liar drags it from there: the distance between
   the final models over the rounds. One that has its share and no more drags by about 0.17.
   The bounds are `max_client_weight=0.2` ("cap") and `clip_update_median=1` ("clip").
2. What thirty rounds add under rules that remember: by what it says of itself alone, with
   an honest number of examples and an update of length 1; and by everything, within both bounds.
3. Lies beside the model. Here honest clients train: each has the loss ||w - m||^2 / 2, with
   its own m at distance 1 from where the model starts, and after thirty rounds the model is where
   their losses balance. The liar sends an honest model and a false return to the exchange;
   with FedDyn, which returns nothing, and with plain SGD, a false model. `ends` is how far
   from the start all-honest training ends, and `dragged` how far from there the liar's does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from common import markdown, say, version_facts
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fairflower.flower import identify, set_message_id
from fairflower.strategies import STRATEGIES, FairStrategy, FedAvg, RoundFailed
from fairflower.strategies.cohort import Arrays, decode_record, encode_record
from fairflower.strategies.exchanges import ControlVariates, DynamicRegulariser, Exchange, Prototypes

CLIENTS, SIZE = 10, 400
LIAR = CLIENTS - 1
SHORT, LONG = 5, 30
CAP = {"max_client_weight": 0.2}
CLIP = {"clip_update_median": 1.0}
BOUNDS: dict[str, dict[str, float]] = {"none": {}, "cap": CAP, "clip": CLIP, "both": CAP | CLIP}

TRUTH = 0.5
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
    numbers: Mapping[str, tuple[float, float]] = MappingProxyType({})  # instead of TRUTH
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
    scalars = [name for name in learnt(strategy) if name not in strategy.VECTORS]
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
    common, own = np.zeros(SIZE), np.random.default_rng([client, server_round]).normal(size=SIZE)
    common[0], own[0] = 1.0, 0.0
    return (common + own / np.linalg.norm(own)) / np.sqrt(2)


def against(length: float) -> np.ndarray:
    """The opposite of what the honest updates have in common."""
    vector = np.zeros(SIZE)
    vector[0] = -length
    return vector


@lru_cache(maxsize=CLIENTS * LONG)
def measured(client: int, server_round: int, size: int) -> np.ndarray:
    """A Fisher diagonal, a gradient or a representation."""
    return np.random.default_rng([client, server_round, 1]).random(size)


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
            if name in strategy.VECTORS:
                # One array per parameter; a representation is no parameter's.
                key, size = ("h", 8) if name.endswith("representation") else ("w", SIZE)
                vector = measured(client, server_round, size) * said.factors[even]
                content[name] = encode_record({key: vector.astype(np.float32)})
            else:
                content["metrics"][name] = said.numbers.get(name, (TRUTH, TRUTH))[even]
        return content

    return answer


def play(strategy: FairStrategy, answer: Answer, rounds: int) -> tuple[np.ndarray, float]:
    """The final model, and the largest weight that the tenth client got."""
    strategy.enroll({k: k for k in range(CLIENTS)}, seed=0)
    model: Arrays = {"w": np.zeros((1, SIZE), np.float32)}
    weight = 0.0
    for server_round in range(1, rounds + 1):
        # What a strategy would take from the run config that clients get.
        config = ConfigRecord({"train.lr": 0.05, "num-server-rounds": rounds})
        sent: Any = encode_record(model), config, None
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
    return model["w"][0].astype(np.float64), weight


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
    weights, distances, ended = [], [], 0
    for lie in told:
        try:
            model, weight = outcome(lie)
        except (RoundFailed, ValueError) as error:
            ended += 1
            reason = error
            continue
        weights.append(weight)
        distances.append(float(np.linalg.norm(model - honest)))
    if ended:
        say(f"{name}: {ended} of {len(told)} lies end the run: {reason}")
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
    """A client with the loss ||w - m||^2 / 2: the trainers' equations in a line each."""

    def __init__(self, method: str, client: int) -> None:
        self.method, self.m = method, honest_update(client, 0)
        self.kept = np.zeros(SIZE)  # c_k of SCAFFOLD, s_k of FedDyn

    def train(self, w_t: np.ndarray, shared: Arrays) -> tuple[np.ndarray, Arrays]:
        """The trained model, and what goes back to the exchange."""
        correction: Callable[[np.ndarray], Any] = lambda _: 0.0  # noqa: E731
        c = shared["w"][0].astype(float) if self.method == "scaffold" and shared else 0.0
        if self.method == "scaffold":
            correction = lambda _: c - self.kept  # noqa: E731
        elif self.method == "feddyn":
            correction = lambda w: ALPHA * (self.kept + w - w_t)  # noqa: E731
        elif self.method == "fedproto" and shared:
            correction = lambda w: LAMBDA * (w - shared["mean"][0])  # noqa: E731
        w = w_t.astype(np.float64)
        for _ in range(STEPS):
            w = w - STEP * (w - self.m + correction(w))
        if self.method == "scaffold":
            change = (w_t - w) / (STEPS * STEP) - c
            self.kept = self.kept + change
            return w, {"w": _row(change)}
        if self.method == "feddyn":
            self.kept = self.kept + w - w_t
        # Its features are its parameters: a linear model on a constant.
        return w, {"mean": _row(w), "count": np.array([100])}
