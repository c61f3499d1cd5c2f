"""Flower's own privacy wrappers and mods with strategies: they work or are refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from classic_server import manager, result
from flwr.app import ConfigRecord, Context
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod
from flwr.common import parameters_to_ndarrays
from flwr.server import strategy as classic
from flwr.serverapp import strategy as flower
from parametrize import mark_others_nightly
from sgd_clients import batch_normed, linear, random_client_data, sgd_trainer

from fairflower.arrays import record_of
from fairflower.classic.strategy import LegacyStrategy
from fairflower.clients import make_client_app
from fairflower.engines.inline import InlineGrid
from fairflower.errors import RoundFailed
from fairflower.exchanges import ControlVariates
from fairflower.flower_compat import privacy_wrapper
from fairflower.strategies import STRATEGIES, FairStrategy, FedAvg, FedEquilibria, FedHEAL, Uniform

CLIENTS = 3
ALL: dict[str, Any] = {
    "min_train_nodes": CLIENTS,
    "min_evaluate_nodes": CLIENTS,
    "min_available_nodes": CLIENTS,
}
NEEDS_LR = {"qffl": {"lr": 0.05}, "dq-ffl": {"lr": 0.05}}
LARGE_NORM = 1e6

#: Name -> wrapper that clips at a norm and adds no noise, and the clients' mods.
WRAPPERS: dict[str, Any] = {
    "server, fixed": (
        lambda s, norm: flower.DifferentialPrivacyServerSideFixedClipping(s, 0, norm, CLIENTS),
        [],
    ),
    "server, adaptive": (
        lambda s, norm: flower.DifferentialPrivacyServerSideAdaptiveClipping(s, 0, CLIENTS, norm),
        [],
    ),
    "clients, fixed": (
        lambda s, norm: flower.DifferentialPrivacyClientSideFixedClipping(s, 0, norm, CLIENTS),
        [fixedclipping_mod],
    ),
    "clients, adaptive": (
        lambda s, norm: flower.DifferentialPrivacyClientSideAdaptiveClipping(s, 0, CLIENTS, norm),
        [adaptiveclipping_mod],
    ),
}
every_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS)


def make(name: str) -> FairStrategy:
    return STRATEGIES[name](**ALL, **NEEDS_LR.get(name, {}))


def sends_a_model_and_numbers(name: str) -> bool:
    return name != "alone" and not make(name)._array_measurements


def train(strategy: Any, mods: Any = (), net: Any = linear, rounds: int = 1) -> Mapping[str, Any]:

    def client(context: Context, config: Any) -> Any:
        k = int(context.node_config["partition-id"])
        return sgd_trainer(net(), data=random_client_data(train=10 + 4 * k, seed=k), client_id=k)

    app = make_client_app(client, mods=mods)
    start = record_of(sgd_trainer(net()).send())
    config = ConfigRecord({"num-server-rounds": rounds})  # a wrapper does not say it
    outcome = strategy.start(InlineGrid(app, CLIENTS), start, rounds, train_config=config)
    return {name: array.numpy() for name, array in outcome.arrays.items()}


@functools.cache
def plain_model(name: str) -> Mapping[str, Any]:
    return train(make(name), rounds=2)


# Wrappers do not depend on the strategy, so with --slow ten of these pairs run: every strategy in
# one wrapper, and every wrapper around a mean, a strategy that merges by coordinates and a strategy
# that asks for a metric. With --nightly all pairs run.
@pytest.mark.few(10)
@pytest.mark.parametrize(
    ("name", "wrapper"),
    mark_others_nightly(
        itertools.product(filter(sends_a_model_and_numbers, STRATEGIES), WRAPPERS),
        {
            *((name, "server, fixed") for name in STRATEGIES),
            *itertools.product(("fedavg", "fedheal", "fedfv"), WRAPPERS),
        },
    ),
)
def test_a_large_clipping_norm_does_not_change_the_model(name: str, wrapper: str) -> None:
    wrap, mods = WRAPPERS[wrapper]
    expected = plain_model(name)
    actual = train(wrap(make(name), LARGE_NORM), mods, rounds=2)
    for key, array in expected.items():
        # The wrappers subtract and add models again.
        np.testing.assert_allclose(actual[key], array, atol=1e-5)
        assert actual[key].dtype == array.dtype


def distance(arrays: Mapping[str, Any]) -> float:
    start = sgd_trainer(linear()).send()
    return float(np.sqrt(sum(np.square(arrays[name] - start[name]).sum() for name in start)))


@every_wrapper
@pytest.mark.parametrize("strategy", [FedAvg, Uniform])
def test_the_clipping_norm_bounds_the_update_of_a_mean(strategy: Any, wrapper: str) -> None:
    wrap, mods = WRAPPERS[wrapper]
    free = distance(train(strategy(**ALL)))
    bound = free / 10
    assert 0 < distance(train(wrap(strategy(**ALL), bound), mods)) <= bound * 1.0001


def test_noise_is_added_to_the_merged_model() -> None:
    def noisy(multiplier: float) -> Any:
        return flower.DifferentialPrivacyServerSideFixedClipping(
            FedHEAL(**ALL), multiplier, LARGE_NORM, CLIENTS
        )

    quiet = train(noisy(0))
    moved = train(noisy(0.3 / LARGE_NORM * CLIENTS))
    noise = np.concatenate([(moved[name] - quiet[name]).ravel() for name in quiet])
    assert noise.std() == pytest.approx(0.3, rel=0.2)


def test_fedheal_runs_with_flowers_local_dp_mod() -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1e-6, epsilon=1.0, delta=1e-5)
    assert distance(train(FedHEAL(**ALL), [mod])) <= 1.1


# --- refusals --------------------------------------------------------------------------------


def refused() -> dict[str, tuple[FairStrategy, Any, str]]:
    return {
        "fisher": (FedEquilibria(**ALL), linear, "clients of FedEquilibria also send fisher"),
        "gradient": (FedEquilibria(space="gradient", **ALL), linear, "also send gradient"),
        "exchange": (
            FedAvg(exchanges=[ControlVariates()], **ALL),
            linear,
            "clients of FedAvg also send control",
        ),
        "BatchNorm": (FedHEAL(**ALL), batch_normed, "1.num_batches_tracked like a parameter"),
    }


@every_wrapper
@pytest.mark.parametrize("what", refused())
def test_strategies_incompatible_with_clipping_are_refused_before_training(
    what: str, wrapper: str
) -> None:
    strategy, net, reason = refused()[what]
    wrap, mods = WRAPPERS[wrapper]
    with pytest.raises(ValueError, match=rf"DifferentialPrivacy\w+Clipping .*{reason}"):
        train(wrap(strategy, 1.0), mods, net)


def test_strategies_that_are_refused_in_a_wrapper_run_without_it() -> None:
    assert privacy_wrapper() == ""
    for strategy, net, _ in refused().values():
        if not strategy.exchanges:
            train(strategy, net=net)


def test_the_local_dp_mod_with_measured_arrays_fails_the_run() -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=1.0, delta=1e-5)
    with pytest.raises(RoundFailed, match="0 of 3"):
        train(FedEquilibria(**ALL), [mod])


# --- classic wrappers ------------------------------------------------------------------------


def classic_round(wrap: Any, strategy: FairStrategy) -> list[np.ndarray]:
    """One round in which client k adds k + 1 to every parameter."""
    model = {"w": np.zeros(16, np.float32)}
    clients = manager(CLIENTS)
    wrapped = wrap(LegacyStrategy(strategy, model))
    parameters = wrapped.initialize_parameters(clients)
    answers = []
    for proxy, ins in wrapped.configure_fit(1, parameters, clients):
        k = proxy.node_id - 1000
        assert ins.parameters is parameters
        returned = {"w": model["w"] + np.float32(k + 1)}
        answers.append((proxy, result(returned, 5, {"client-id": k}, {})))
    merged, _ = wrapped.aggregate_fit(1, answers, [])
    return parameters_to_ndarrays(merged)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: classic.DifferentialPrivacyServerSideFixedClipping(s, 0, 2.0, CLIENTS),
        lambda s: classic.DifferentialPrivacyServerSideAdaptiveClipping(s, 0, CLIENTS, 2.0),
    ],
)
def test_classic_wrappers_clip_around_a_legacy_strategy(wrap: Any) -> None:
    (plain,) = classic_round(lambda s: s, Uniform(**ALL))
    np.testing.assert_allclose(plain, 2)  # norms 4, 8 and 12
    (clipped,) = classic_round(wrap, Uniform(**ALL))
    np.testing.assert_allclose(clipped, 0.5, rtol=1e-6)
    with pytest.raises(ValueError, match=r"DifferentialPrivacy\w+ .*fisher"):
        classic_round(wrap, FedEquilibria(**ALL))
