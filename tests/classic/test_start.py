"""`LegacyStrategy` under Flower's oldest calls, `start_server` and `start_simulation`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from processes import environment, run

from fairflower.deploy.local import free_port

pytestmark = pytest.mark.slow

PROGRAM = """
import json, socket, sys, threading, time
import flwr, numpy as np
from fairflower.classic.strategy import LegacyStrategy
from fairflower.strategies import AFL

class Client(flwr.client.NumPyClient):
    def __init__(self, k):
        self.k = k

    def fit(self, parameters, config):
        loss = {"received_loss": float(self.k), "client-id": self.k}
        return [parameters[0] + np.float32(self.k)], 10, loss

    def evaluate(self, parameters, config):
        return float(parameters[0][0]), 10, {}

def join(k, port):  # no client waits for its server
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except OSError:
            time.sleep(0.1)
    flwr.client.start_client(server_address=f"127.0.0.1:{port}", client=Client(k).to_client())

all_three = {f"min_{which}_nodes": 3 for which in ("train", "evaluate", "available")}
strategy = LegacyStrategy(AFL(lr=0.1, **all_three), {"w": np.zeros(4, np.float32)})
config = flwr.server.ServerConfig(num_rounds=2)
if sys.argv[1] == "server":
    port = int(sys.argv[2])
    for k in range(3):
        threading.Thread(target=join, args=(k, port), daemon=True).start()
    address = f"127.0.0.1:{port}"
    history = flwr.server.start_server(server_address=address, config=config, strategy=strategy)
else:
    history = flwr.simulation.start_simulation(
        client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client(),
        num_clients=3, config=config, strategy=strategy, client_resources={"num_cpus": 1},
        ray_init_args={"num_cpus": 1, "include_dashboard": False})
found = {"losses": history.losses_distributed, "clients": strategy.strategy.client_ids,
         "weights": strategy.strategy.diagnostics["weights"].tolist()}
json.dump(found, open("found.json", "w"))
"""


@pytest.mark.parametrize("call", ["server", pytest.param("simulation", marks=pytest.mark.nightly)])
def test_afl_runs_under_start_server_and_start_simulation(call: str, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(PROGRAM)
    command = [sys.executable, "app.py", call, str(free_port())]
    run(command, env=environment(tmp_path), cwd=tmp_path)
    facts = json.loads((tmp_path / "found.json").read_text())
    assert facts["clients"] == [0, 1, 2]
    # Client k moves by k, which is also its loss. AFL's first weights are equal; then each moves by
    # lr times how much its loss is above the mean.
    assert facts["weights"] == pytest.approx([1 / 3 - 0.1, 1 / 3, 1 / 3 + 0.1])
    assert facts["losses"] == [[1, pytest.approx(1)], [2, pytest.approx(2.2)]]
