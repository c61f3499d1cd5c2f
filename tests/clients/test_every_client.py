"""Checks of every registered client, alone and with every strategy."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from invalid_values import out_of_range
from parametrize import STRATEGY_PER_NEEDS, mark_others_nightly
from toy_trainers import models_equal, prompted, trainer, trainer_case

from fairflower import exchanges
from fairflower.arguments import constructor_specs
from fairflower.clients import SGD
from fairflower.config import RunConfig
from fairflower.config.text import argument_to_key
from fairflower.errors import ConfigError
from fairflower.registry import CLIENTS, REFERENCES
from fairflower.strategies import STRATEGIES
from fairflower.testing import check_trainer
from fairflower.testing.trainers import CHECKS, check_training, check_training_under_strategies

every_client = pytest.mark.parametrize("name", CLIENTS)

# Strategies read replies, exchanges read what clients return for them; they are independent. So
# every client trains with a strategy that measures gradients or one that merges coordinate by
# coordinate, in turn, and one strategy for each set of measurements with a client that has an
# exchange; tests/strategies/test_hostile_replies.py merges every strategy's replies.
STRICT = ("fedequilibria", "fedheal")
MERGING = [name for name in STRATEGIES if name not in REFERENCES]
_, *CARRIERS = {m.exchanges: name for name, m in reversed([*CLIENTS.items()])}.values()
STAND_FOR_ALL = {
    *zip(CLIENTS, itertools.cycle(STRICT), strict=False),
    *zip(itertools.cycle(CARRIERS), STRATEGY_PER_NEEDS, strict=False),
}
every_pair = pytest.mark.parametrize(
    ("name", "strategy"), mark_others_nightly(itertools.product(CLIENTS, MERGING), STAND_FOR_ALL)
)


@every_pair
def test_every_client_trains_reproducibly_under_every_strategy(name, strategy):
    check_training(trainer_case(name), STRATEGIES[strategy])


@every_client
@pytest.mark.parametrize(
    "check",
    # The pairs above are this check.
    [check for check in CHECKS if check is not check_training_under_strategies],
    ids=lambda check: check.__name__,
)
def test_every_client_passes_the_shared_checks(name, check):
    check(trainer_case(name))


class Draws(SGD):
    def adjust_gradients(self):
        self.add_to_gradients(
            [torch.full_like(p, np.random.default_rng().random()) for p in self.trainable]
        )


class Remembers(SGD):
    def begin(self, server_round):
        with torch.no_grad():
            self.model.calls = getattr(self.model, "calls", 0) + 1

    def adjust_gradients(self):
        self.add_to_gradients(self.copy_trainable(), self.model.calls)


class Pushes(SGD):
    def end(self, server_round):
        with torch.no_grad():
            for p in self.trainable:
                p.add_(0.1)


class Stalls(SGD):
    def step(self, optimizer, x, y):
        return torch.tensor(0.0)


class HidesTheLoss(SGD):
    def step(self, optimizer, x, y):
        super().step(optimizer, x, y)
        return torch.tensor(0.0)


class Undeclared(SGD):
    def __init__(self, *args, mu: float = 1.0, **options):
        super().__init__(*args, **options)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Undeclared, "mu has no declared range"),
        (Draws, "a different order of clients gave a different model"),
        (Remembers, "clients that share a worker's network"),
        (Pushes, "changed although train.lr = 0"),
        (Stalls, "two rounds did not change the model"),
        (HidesTheLoss, "raised no FloatingPointError"),
    ],
)
def test_check_trainer_reports_broken_requirements(kind, message):
    with pytest.raises(AssertionError, match=f"^{kind.__name__}.*: .*{message}"):
        check_trainer(kind)


@every_client
def test_every_exchange_is_in_the_exchanges_package(name):
    assert {exchange.__name__ for exchange in CLIENTS[name].exchanges} <= set(vars(exchanges))


@every_client
def test_arguments_out_of_range_are_refused_before_the_run(name):
    kind = CLIENTS[name]
    chosen = {"client.name": name, "model.name": (*kind.models, "cnn")[0]}
    for arg, allowed in kind.argument_specs().items():
        key = f"client.{argument_to_key(arg)}"
        assert allowed.bounded, key
        RunConfig.from_flat(chosen | {key: allowed.default})
        owner = next(o for o in (*kind.exchanges, kind) if arg in constructor_specs(o))
        for bad in out_of_range(allowed):
            with pytest.raises(ConfigError, match=f"^{key} = .*: expected "):
                RunConfig.from_flat(chosen | {key: bad})
            with pytest.raises(ConfigError, match=f"^{arg} = .*: expected "):
                owner.made_with({arg: bad})


def test_an_argument_of_another_client_is_refused():
    with pytest.raises(ConfigError, match=r"Unknown argument of fedprox 'nu'.*Valid: mu"):
        trainer("fedprox", nu=1.0)


def test_client_fedavg_equals_sgd_and_is_omitted_from_labels():
    one = RunConfig.from_flat({"client.name": "fedavg", "strategy.name": "fedheal"})
    assert one.label == "fedheal"
    assert RunConfig.from_flat({"client.name": "moon", "client.mu": 1}).label == "moon:mu=1+fedheal"
    assert models_equal(trainer_case("fedavg").two_rounds()[0], trainer_case("sgd").two_rounds()[0])


def test_all_clients_train_different_models_except_plain_ones():
    """No two clients give the same model after two rounds, except those listed as plain."""
    # Ditto's global model is trained by SGD; SiloBN's local statistics are not used in training.
    plain = ("sgd", "fedavg", "ditto", "silobn")
    trained = {name: trainer_case(name).two_rounds()[0] for name in CLIENTS}
    # The head of FedPer and FedRep is in no message.
    models = {
        name: model.get("head.weight", model.get("layer.weight")).tobytes()
        for name, model in trained.items()
    }
    assert len({models[name] for name in plain}) == 1
    assert len(set(models.values())) == len(models) - len(plain) + 1
    prompted_sgd = replace(trainer_case("sgd"), model=prompted)
    assert models["fedgc"] != prompted_sgd.two_rounds()[0]["head.weight"].tobytes()
