"""How far one lying client of ten can drag the model, strategy by strategy.

    python benchmarks/liar.py              # a minute or so

Nine honest clients move by updates of length 1 that have a direction in common, cosine
1/2 between each two. The tenth sends the opposite of that direction, and lies: about
its number of examples, about whatever the strategy learns from its clients (losses,
accuracies and sharpness as 0, 1 or a million; Fisher diagonals, gradients and the like a
million times too small or too large), and about the length of its update (a million instead of
1). All combinations are tried for five rounds each, and the worst is shown.

How to read it. `weight` is the largest weight that the liar gets, where 0.1 would be
its share. `goes` is how far the model goes per round if all ten are honest, in lengths of
an honest update, and `dragged` how far the liar drags it from there: the distance between
the final models over the rounds. One that has its share and no more drags by about 0.17.
The bounds are `max_client_weight=0.2` ("cap") and `clip_update_median=1` ("clip").
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from common import markdown, say, version_facts
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from fairflower.flower import identify, set_message_id
from fairflower.strategies import STRATEGIES, FairStrategy
from fairflower.strategies.cohort import Arrays, decode_record, encode_record

CLIENTS, ROUNDS, SIZE = 10, 5, 400
LIAR = CLIENTS - 1
CAP = {"max_client_weight": 0.2}
CLIP = {"clip_update_median": 1.0}
BOUNDS: dict[str, dict[str, float]] = {"none": {}, "cap": CAP, "clip": CLIP, "both": CAP | CLIP}

NUMBERS = (0.0, 0.5, 1.0, 1e6)
EXAMPLES = (100, 2**53)
FACTORS = (1e-6, 1.0, 1e6)
LENGTHS = (1.0, 1e6)
#: What a strategy would take from the run config that clients get.
CONFIG = {"train.lr": 0.05, "num-server-rounds": ROUNDS}


class Lie(NamedTuple):
    """What the tenth client says; by default the truth."""

    honest: bool = True
    examples: int = 100
    numbers: Mapping[str, float] = MappingProxyType({})  # instead of 0.5
    factor: float = 1.0  # for every vector that is measured
    length: float = 1.0


def learnt(strategy: FairStrategy) -> tuple[str, ...]:
    """What it asks its clients for, and what it reads of what they say unasked."""
    return (*strategy.needs, *strategy.reads)


def lies(strategy: FairStrategy) -> Iterator[Lie]:
    """All that may pay, of this strategy, without what it does not look at, or refuses."""
    scalars = [name for name in learnt(strategy) if name not in strategy.VECTORS]
    choices = [[n for n in NUMBERS if n <= 1 or not s.endswith("accuracy")] for s in scalars]
    factors = FACTORS if len(scalars) < len(learnt(strategy)) else (1.0,)
    for examples, factor, length, *numbers in product(EXAMPLES, factors, LENGTHS, *choices):
        yield Lie(False, examples, dict(zip(scalars, numbers, strict=True)), factor, length)


def update(client: int, server_round: int, lie: Lie) -> np.ndarray:
    """Cosine 1/2 with those of others: the common direction, and as much of its own."""
    common, own = np.zeros(SIZE), np.random.default_rng([client, server_round]).normal(size=SIZE)
    common[0], own[0] = 1.0, 0.0
    if client == LIAR and not lie.honest:
        return -common * lie.length
    return (common + own / np.linalg.norm(own)) / np.sqrt(2)


def reply(message: Message, strategy: FairStrategy, model: Arrays, lie: Lie) -> Message:
    """A client's answer."""
    client, server_round = message.metadata.dst_node_id, _round(message)
    said = lie if client == LIAR else Lie()
    moved = (model["w"] + update(client, server_round, lie)).astype(np.float32)
    metrics: dict[str, Any] = {"num-examples": said.examples, "client-id": client}
    content = RecordDict({"arrays": encode_record({"w": moved})})
    for name in learnt(strategy):
        if name in strategy.VECTORS:
            drawn = np.random.default_rng([client, server_round, 1]).random(SIZE) * said.factor
            # One array per parameter; a representation is no parameter's.
            key = "h" if name.endswith("representation") else "w"
            content[name] = encode_record({key: drawn.astype(np.float32)})
        else:
            metrics[name] = said.numbers.get(name, 0.5)
    content["metrics"] = MetricRecord(metrics)
    return Message(content, reply_to=message)


def run(name: str, options: Mapping[str, Any], lie: Lie) -> tuple[np.ndarray, float]:
    """The final model, and the largest weight that the tenth client got."""
    strategy = STRATEGIES[name](min_clients=CLIENTS, **options)
    strategy.enroll({k: k for k in range(CLIENTS)}, seed=0)
    model: Arrays = {"w": np.zeros(SIZE, np.float32)}
    weight = 0.0
    for server_round in range(1, ROUNDS + 1):
        config, grid = ConfigRecord(dict(CONFIG)), None
        sent = encode_record(model)
        messages = list(strategy.configure_train(server_round, sent, config, grid))  # type: ignore[arg-type]
        for i, message in enumerate(messages):
            set_message_id(message, f"{server_round}-{i}")
        replies = [reply(message, strategy, model, lie) for message in messages]
        merged, _ = strategy.aggregate_train(server_round, replies)
        assert merged is not None
        model = decode_record(merged)
        weight = max(weight, float(np.asarray(strategy.diagnostics["weights"])[LIAR]))
    return model["w"].astype(np.float64), weight


def worst(name: str, options: Mapping[str, Any]) -> tuple[float, float, float]:
    """A liar's largest weight, how far it drags the model per round, how far that goes alone."""
    honest, _ = run(name, options, Lie())
    found = [run(name, options, lie) for lie in lies(STRATEGIES[name]())]
    return (
        max(weight for _, weight in found),
        max(float(np.linalg.norm(model - honest)) / ROUNDS for model, _ in found),
        float(np.linalg.norm(honest)) / ROUNDS,
    )


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    identify()
    rows = []
    for name in STRATEGIES:
        say(name)
        results = {bound: worst(name, options) for bound, options in BOUNDS.items()}
        weights = [f"{results[bound][0]:.2f}" for bound in ("none", "cap")]
        moved = [_shown(results[bound][1]) for bound in BOUNDS]
        rows.append([f"`{name}`", *weights, _shown(results["none"][2]), *moved])
    print(version_facts("numpy", "flwr"), end="\n\n")
    header = ["strategy", "weight", "with cap", "goes", "dragged", "cap", "clip", "both"]
    print(markdown(header, rows))


def _round(message: Message) -> int:
    return int(message.content.config_records["config"]["server-round"])  # type: ignore[arg-type]


def _shown(distance: float) -> str:
    return f"{distance:.2f}" if distance < 1000 else f"{distance:.0e}".replace("e+0", "e")


if __name__ == "__main__":
    main()
