"""Subclasses of `LegacyStrategy` that choose clients themselves, on Flower's classic simulation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import FitIns, ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server import strategy as flower
from flwr.server.workflow import DefaultWorkflow
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from fairflower.classic.strategy import LegacyStrategy
from fairflower.errors import RoundFailed
from fairflower.strategies import FedAvg, FedHEAL

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

START = {"w": np.zeros(2, np.float32)}
CLIENTS = 4


class Client(NumPyClient):
    """Adds its number + 1 in float32; fails without a text if the config says so."""

    def __init__(self, k: int) -> None:
        self.k = k

    def fit(self, parameters: Any, config: Any) -> Any:
        if self.k < config.get("failing", 0):
            raise ValueError
        w = parameters[0].astype(np.float32) if parameters else np.zeros(2, np.float32)
        return [w + np.float32(self.k + 1)], 10 * (self.k + 1), {}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(parameters[0][0]) + self.k, 10 * (self.k + 1), {}


def failing(number: int) -> Any:
    return lambda server_round: {"failing": number}


def theirs(**options: Any) -> flower.FedAvg:
    start = options.pop("start", list(START.values()))
    nodes = {f"min_{which}_clients": CLIENTS for which in ("fit", "evaluate", "available")}
    return flower.FedAvg(initial_parameters=ndarrays_to_parameters(start), **nodes, **options)


def ours(rule: Any = FedAvg, kind: Any = LegacyStrategy, **options: Any) -> LegacyStrategy:
    start = options.pop("start", START)
    start = ndarrays_to_parameters(start) if isinstance(start, list) else start
    nodes = {f"min_{which}_nodes": CLIENTS for which in ("train", "evaluate", "available")}
    strategy: LegacyStrategy = kind(rule(**nodes), start, **options)
    return strategy


def choosing(base: Any) -> Any:
    class Chooses(base):
        """Trains the two clients with the smallest node ids, as people write it."""

        def configure_fit(self, server_round, parameters, client_manager):
            size, least = self.num_fit_clients(client_manager.num_available())
            clients = client_manager.sample(num_clients=size, min_num_clients=least)
            clients = sorted(clients, key=lambda proxy: proxy.node_id)[:2]
            return [(client, FitIns(parameters, {})) for client in clients]

    return Chooses


def chooses(**options: Any) -> Any:
    nodes = {f"min_{which}_clients": CLIENTS for which in ("fit", "evaluate", "available")}
    initial = ndarrays_to_parameters(list(START.values()))
    return choosing(flower.FedAvg)(initial_parameters=initial, **nodes)


CASES: dict[str, tuple[Any, Any]] = {
    "own configure_fit": (chooses, lambda: ours(kind=choosing(LegacyStrategy))),
    "float64": (lambda: theirs(start=[np.zeros(2)]), lambda: ours(start={"w": np.zeros(2)})),
    "empty": (lambda: theirs(start=[]), lambda: ours(start=[])),
    "failures are not accepted": (
        lambda: theirs(accept_failures=False, on_fit_config_fn=failing(1)),
        lambda: ours(accept_failures=False, on_fit_config_fn=failing(1)),
    ),
    "failures": (
        lambda: theirs(on_fit_config_fn=failing(2)),
        lambda: ours(on_fit_config_fn=failing(2)),
    ),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Any]:
    """Run two rounds of every case on one simulation: final arrays, losses of tests, history."""
    found: dict[str, Any] = {}
    server = ServerApp()

    def run(grid: Any, context: Context, strategy: Any) -> tuple[Any, Any]:
        last: list[Any] = []
        strategy.evaluate_fn = lambda r, arrays, config: last.append(arrays)
        config = ServerConfig(num_rounds=2)
        everything = LegacyContext(context=context, config=config, strategy=strategy)
        DefaultWorkflow()(grid, everything)
        return last[-1], everything.history.losses_distributed

    @server.main()
    def main(grid: Any, context: Context) -> None:
        for name, pair in CASES.items():
            found[name] = [run(grid, context, make()) for make in pair]
        for rule in (FedAvg, FedHEAL):
            try:
                run(grid, context, ours(rule, on_fit_config_fn=failing(3)))
            except RoundFailed as failed:
                found[rule.__name__] = failed
        try:
            run(grid, context, ours(FedHEAL, start={"w": np.zeros(2)}))
        except Exception as error:
            found["refused"] = error

    client = ClientApp(
        client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client()
    )
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, CLIENTS, backend_config=resources)
    return found


@pytest.mark.parametrize("name", CASES)
def test_a_classic_app_gives_the_same_with_ours_as_with_flowers_fedavg(
    name: str, outcomes: Any
) -> None:
    (wanted, losses), (got, our_losses) = outcomes[name]
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert bool(np.any(got)) == (name != "failures are not accepted")
    assert len(our_losses) == len(losses) == 2
    np.testing.assert_allclose(our_losses, losses, rtol=1e-6)


@pytest.mark.parametrize("rule", ["FedAvg", "FedHEAL"])
def test_failures_without_a_text_are_named_and_the_model_is_kept(rule: str, outcomes: Any) -> None:
    assert isinstance(outcomes[rule], RoundFailed)
    assert "no reply" not in str(outcomes[rule])
    assert "1 of 4 clients" in str(outcomes[rule])
    np.testing.assert_array_equal(outcomes[rule].arrays["w"].numpy(), START["w"])


def test_rules_that_need_the_received_model_name_the_remedy(outcomes: Any) -> None:
    assert "FedHEAL" in str(outcomes["refused"])
    assert "start from a model with the names, shapes and dtypes" in str(outcomes["refused"])
