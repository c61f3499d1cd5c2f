"""`LegacyStrategy` under Flower's ``SecAggPlusWorkflow``; with --nightly on Flower's engine."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from flwr.app import Context
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import FitIns
from flwr.server import LegacyContext, ServerConfig
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

from fairflower.classic.strategy import LegacyStrategy
from fairflower.config import RunConfig
from fairflower.engines.inline import InlineGrid
from fairflower.engines.launch import simulate
from fairflower.errors import error_text
from fairflower.exchanges import ControlVariates
from fairflower.strategies import FairStrategy, FedAvg, FedHEAL, Uniform

pytestmark = pytest.mark.slow

START = {
    "w": np.array([0.5, -0.25], np.float32),
    "norm.running_mean": np.zeros(2, np.float32),
    "norm.num_batches_tracked": np.array(1, np.int64),
    "counts": np.array([1, 2], np.int32),
}
SCALAR = {"w": START["w"], "scale": np.array(1, np.float32)}
TYPES = [[a.dtype for a in start.values()] for start in (START, SCALAR)]
EXAMPLES = [10, 20, 40]
ALL = {f"min_{which}_nodes": 3 for which in ("train", "evaluate", "available")}


class Client(NumPyClient):
    """Adds its number + 1 to floats, and 2 to integers."""

    def __init__(self, k: int) -> None:
        self.k = k

    def fit(self, parameters: Any, config: Any) -> Any:
        assert [a.dtype for a in parameters] in TYPES
        steps = [self.k + 1 if a.dtype.kind == "f" else 2 for a in parameters]
        moved = [np.asarray(a + step, a.dtype) for a, step in zip(parameters, steps, strict=True)]
        return moved, EXAMPLES[self.k], {"train_loss": float(self.k)}

    def evaluate(self, parameters: Any, config: Any) -> Any:
        return float(parameters[0][0]), EXAMPLES[self.k], {}


class OwnClients(LegacyStrategy):
    def configure_fit(self, server_round, parameters, client_manager):
        return [(client, FitIns(parameters, {})) for client in client_manager.sample(3, 3)]


STRATEGIES: dict[str, Callable[[], FairStrategy]] = {
    "fedavg": lambda: FedAvg(**ALL),
    "max_client_weight": lambda: FedAvg(max_client_weight=0.4, **ALL),
    "clip_update_norm": lambda: FedAvg(clip_update_norm=0.5, **ALL),
    "clip_update_median": lambda: FedAvg(clip_update_median=2.0, **ALL),
    "observers": lambda: FedAvg(observers=[lambda cohort: {}], **ALL),
    "exchanges": lambda: FedAvg(exchanges=[ControlVariates()], **ALL),
    "FedHEAL": lambda: FedHEAL(**ALL),
    "Uniform": lambda: Uniform(**ALL),
    "'scale'": lambda: FedAvg(**ALL),
    "super().configure_fit": lambda: FedAvg(**ALL),
}

OPTIONS = [name for name in STRATEGIES if name.isidentifier() and name != "fedavg"]


@pytest.fixture(scope="module")
def outcomes(pytestconfig: pytest.Config) -> dict[str, Any]:
    """Run two secure rounds of every strategy in one simulation.

    An outcome is the final arrays and the losses of tests, or the text of an error.
    """
    found: dict[str, Any] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Context) -> None:
        for name, make in STRATEGIES.items():
            kind = OwnClients if "configure" in name else LegacyStrategy
            legacy = kind(make(), SCALAR if name == "'scale'" else START)
            config = ServerConfig(num_rounds=2)
            everything = LegacyContext(context=context, config=config, strategy=legacy)
            workflow = SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2)
            last: list[Any] = []
            legacy.evaluate_fn = lambda r, arrays, config, last=last: last.append(arrays)
            try:
                DefaultWorkflow(fit_workflow=workflow)(grid, everything)
                found[name] = last[-1], everything.history.losses_distributed
            except ValueError as error:
                found[name] = error_text(error)

    client = ClientApp(
        client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client(),
        mods=[secaggplus_mod],
    )
    engine = "flower" if pytestconfig.getoption("nightly") else "inline"
    with mock.patch.object(InlineGrid, "run", SimpleNamespace(run_id=1)):  # as Flower's grids have
        simulate(server, client, 3, RunConfig(engine=engine))
    return found


def test_masked_rounds_average_by_examples_and_keep_every_type(outcomes: Any) -> None:
    arrays, losses = outcomes["fedavg"]
    assert [a.dtype for a in arrays] == [a.dtype for a in START.values()]
    mean = float(np.average([1, 2, 3], weights=EXAMPLES))
    np.testing.assert_allclose(arrays[0], START["w"] + 2 * mean, atol=1e-3)
    np.testing.assert_allclose(arrays[1], 2 * mean, atol=1e-3)
    assert arrays[2] == 1  # Flower's workflow returns a wrong number for it
    np.testing.assert_array_equal(arrays[3], [5, 6])
    assert losses == [
        (1, pytest.approx(0.5 + mean, abs=1e-3)),
        (2, pytest.approx(0.5 + 2 * mean, abs=1e-3)),
    ]


@pytest.mark.parametrize("name", [name for name in STRATEGIES if name != "fedavg"])
def test_what_a_masked_mean_does_not_allow_is_refused_by_name(name: str, outcomes: Any) -> None:
    assert isinstance(outcomes[name], str)
    assert name in outcomes[name]
    if name in OPTIONS:
        assert "would have no effect" in outcomes[name]
