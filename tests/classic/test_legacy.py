"""Any strategy behind classic Flower's interface, and trainers as its clients."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import toy_trainers
from classic_server import OK, manager, result
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.server import ServerAppComponents, ServerConfig
from flwr.serverapp import ServerApp
from hypothesis import given
from hypothesis import strategies as st
from parametrize import every_strategy, mark_others_nightly
from sgd_clients import linear, random_client_data, sgd_trainer
from torch import nn

from fairflower.arrays import record_of
from fairflower.classic.client import NumPyTrainer
from fairflower.classic.packing import pack, split, unpack
from fairflower.classic.strategy import LegacyStrategy
from fairflower.clients import Trainer, make_client_app
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, RoundFailed
from fairflower.exchanges import ControlVariates
from fairflower.flower_compat import proxy_node_id
from fairflower.registry import CLIENTS
from fairflower.strategies import STRATEGIES, FairStrategy, FedAvg, FedEquilibria
from fairflower.testing.rounds import MODEL, Rounds, updates


class ClassicRounds:
    """Run `Rounds` as a classic server does."""

    def __init__(self, strategy: FairStrategy, clients: int, named: bool = True) -> None:
        initial = MODEL if named else ndarrays_to_parameters(list(MODEL.values()))
        sent = {"train.lr": 0.05, "train.momentum": 0.0, "num-server-rounds": 4}
        self.legacy = LegacyStrategy(strategy, initial, on_fit_config_fn=lambda _: dict(sent))
        self.manager = manager(clients)
        parameters = self.legacy.initialize_parameters(self.manager)
        assert parameters is not None
        self.parameters = parameters
        self.round = 0

    @property
    def model(self) -> dict[str, np.ndarray]:
        return dict(zip(MODEL, parameters_to_ndarrays(self.parameters), strict=True))

    def ask(self) -> dict[int, Any]:
        self.round += 1
        asked = self.legacy.configure_fit(self.round, self.parameters, self.manager)
        return {proxy.node_id - 1000: (proxy, ins) for proxy, ins in asked}

    def finish(self, results: list[Any], failures: list[Any] | None = None) -> dict[str, Any]:
        merged, metrics = self.legacy.aggregate_fit(self.round, results, failures or [])
        assert merged is not None
        self.parameters = merged
        return metrics


@pytest.mark.few(20)
@pytest.mark.parametrize("named", [True, False])
@every_strategy
def test_a_classic_server_computes_identical_results(name: str, named: bool) -> None:
    """With arrays by name, and by position with the buffers given."""
    clients = 4
    buffers = None if named else ["1", "2"]
    one = Rounds(STRATEGIES[name](min_clients=1), MODEL, range(clients))
    one.config["num-server-rounds"] = 4
    options: dict[str, Any] = {"min_clients": 1, "buffers": buffers}
    two = ClassicRounds(
        STRATEGIES[name](**options, min_train_nodes=clients, min_available_nodes=clients),
        clients,
        named,
    )
    random = np.random.default_rng(11)
    for present in ([0, 1, 2, 3], [3, 1], [0, 2, 3], [2]):
        moves = updates(random, present)
        examples = {k: 10 * k + 3 for k in present}
        asked = two.ask()
        results = []
        for k in present:
            proxy, ins = asked[k]
            assert ins.config["server-round"] == two.round
            assert ins.config.get("measure", "") == ",".join(two.legacy.strategy.measurements)
            arrays = {n: (a + moves[k][n]).astype(a.dtype) for n, a in two.model.items()}
            # `Rounds.step` makes up measurements for the round that begins.
            one.round += 1
            made_up = one.make_up(k)
            one.round -= 1
            vectors = {n: v for n, v in made_up.items() if isinstance(v, dict)}
            scalars = {n: v for n, v in made_up.items() if n not in vectors}
            scalars |= {"client-id": k, "train_loss": 1.0}
            results.append((proxy, result(arrays, examples[k], scalars, vectors)))
        one.step(moves, examples)
        two.finish(results)
        assert all(one.model[key].tobytes() == two.model[key].tobytes() for key in MODEL)
        ours = two.legacy.strategy
        assert ours.client_ids == one.strategy.client_ids
        for key, value in one.strategy.diagnostics.items():
            assert np.array_equal(value, ours.diagnostics[key], equal_nan=True), key
        one_state, two_state = one.strategy.state_dict(), ours.state_dict()
        assert len(one_state) == len(two_state)
        for a, b in zip(one_state.values(), two_state.values(), strict=True):
            assert np.array_equal(a, b, equal_nan=True)


def test_metrics_are_averaged_by_samples() -> None:
    rounds = ClassicRounds(FedAvg(), 2)
    asked = rounds.ask()
    results = [
        (asked[k][0], result(MODEL, n, {"train_loss": loss, "word": "w", "on": True}, {}))
        for k, n, loss in ((0, 1, 4.0), (1, 3, 8.0))
    ]
    assert rounds.finish(results) == {"train_loss": 7.0, "on": 1.0}


# --- a whole app -----------------------------------------------------------------------------


class Grid(InlineGrid):
    run = SimpleNamespace(run_id=1)  # type: ignore[assignment]


def client(context: Context) -> Trainer:
    k = int(context.node_config["partition-id"])
    return sgd_trainer(linear(), data=random_client_data(train=12 + 5 * k, seed=k), client_id=k)


def classic_app(client: Callable[[Context], Trainer]) -> ClientApp:
    return ClientApp(client_fn=lambda context: NumPyTrainer(client(context), context).to_client())


@pytest.mark.parametrize("name", ["fedheal", "fedequilibria", "fedfv"])
def test_a_classic_app_trains_the_same_model_as_a_message_app(name: str) -> None:
    start = client(Context(1, 1, {"partition-id": 0}, RecordDict(), {})).send()
    nodes: dict[str, Any] = {"min_train_nodes": 3, "min_available_nodes": 3}
    nodes |= {"min_evaluate_nodes": 3}
    modern = STRATEGIES[name](**nodes)
    app = make_client_app(lambda context, config: client(context))
    expected = modern.start(InlineGrid(app, 3), record_of(start), num_rounds=2)

    legacy = LegacyStrategy(STRATEGIES[name](**nodes), start)
    components = ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=2))
    server = ServerApp(server_fn=lambda context: components)
    seen: dict[int, list[np.ndarray]] = {}
    legacy.evaluate_fn = lambda r, arrays, config: seen.update({r: arrays})
    classic = classic_app(client)
    server(Grid(classic, 3), Context(1, 1, {}, RecordDict(), {}))

    assert list(seen) == [0, 1, 2]
    for actual, array in zip(seen[2], expected.arrays.values(), strict=True):
        assert actual.tobytes() == array.numpy().tobytes()
    for key, value in modern.diagnostics.items():
        assert np.array_equal(value, legacy.strategy.diagnostics[key])


# Clients that share, return or keep arrays, or test more than the global model.
NOT_PLAIN = [name for name in CLIENTS if name not in ("fedavg", "sam", "fedsam", "gsam", "fedprox")]


@pytest.mark.few(5)
@pytest.mark.slow
# FedCE's clients also keep their model for measurements: beside other state, or alone.
@pytest.mark.parametrize(
    ("name", "rule"),
    mark_others_nightly(
        itertools.product(CLIENTS, ["fedheal", "fedce"]),
        {*((name, "fedheal") for name in NOT_PLAIN), ("sgd", "fedce"), ("scaffold", "fedce")},
    ),
)
def test_a_classic_app_matches_a_message_app_for_every_client(name: str, rule: str) -> None:
    """Includes arrays of exchanges and the state of clients."""
    nodes = {f"min_{kind}_nodes": 3 for kind in ("train", "evaluate", "available")}

    def strategy() -> FairStrategy:
        return STRATEGIES[rule](**nodes, exchanges=toy_trainers.exchanges(name))

    def client(context: Context) -> Trainer:
        return toy_trainers.trainer(name, int(context.node_config["partition-id"]))

    start = toy_trainers.trainer(name).send()
    modern = strategy()
    app = make_client_app(lambda context, config: client(context))
    expected = modern.start(InlineGrid(app, 3), record_of(start), num_rounds=3)

    # Only the message API sends the number of rounds by itself, which FedProc's schedule needs.
    legacy = LegacyStrategy(strategy(), start, on_fit_config_fn=lambda _: {"num-server-rounds": 3})
    components = ServerAppComponents(strategy=legacy, config=ServerConfig(num_rounds=3))
    seen: dict[int, list[np.ndarray]] = {}
    legacy.evaluate_fn = lambda r, arrays, config: seen.update({r: arrays})
    classic = classic_app(client)
    server = ServerApp(server_fn=lambda context: components)
    server(Grid(classic, 3, raise_errors=True), Context(1, 1, {}, RecordDict(), {}))

    for actual, array in zip(seen[3], expected.arrays.values(), strict=True):
        assert actual.tobytes() == array.numpy().tobytes()
    assert toy_trainers.models_equal(modern.state_dict(), legacy.strategy.state_dict())
    assert not legacy.strategy.dropped


def test_without_initial_parameters_flower_asks_a_client() -> None:
    legacy = LegacyStrategy(FedAvg())
    assert legacy.initialize_parameters(manager(1)) is None


def test_evaluation_averages_the_metrics_that_all_clients_report() -> None:
    legacy = LegacyStrategy(FedAvg(), MODEL)
    parameters = legacy.initialize_parameters(manager(2))
    assert parameters is not None
    asked = legacy.configure_evaluate(1, parameters, manager(2))
    assert [ins.config["server-round"] for _, ins in asked] == [1, 1]
    answers = {
        1000: EvaluateRes(OK, 4.0, 1, {"accuracy": 0.5, "client-id": 0, "mine": 1.0}),
        1001: EvaluateRes(OK, 8.0, 3, {"accuracy": 0.9, "client-id": 1}),
    }
    results = [(proxy, answers[proxy.node_id]) for proxy, _ in asked]
    loss, metrics = legacy.aggregate_evaluate(1, results, [])
    assert loss == pytest.approx(7)
    assert metrics == {"accuracy": pytest.approx(0.8)}
    assert legacy.aggregate_evaluate(1, [], [ValueError("all failed")]) == (None, {})
    assert legacy.evaluate(1, parameters) is None


# --- errors -------------------------------------------------------------------------


def test_failures_are_assigned_to_the_named_or_remaining_client() -> None:
    rounds = ClassicRounds(FedAvg(min_clients=1), 3)
    asked = rounds.ask()
    bad = FitRes(Status(Code.FIT_NOT_IMPLEMENTED, "cannot fit"), Parameters([], ""), 0, {})
    rounds.finish(
        [(asked[0][0], result(MODEL, 5, {"client-id": 0}, {}))],
        [(asked[1][0], bad), ValueError("Message contains an Error. Message: out of memory")],
    )
    assert rounds.legacy.strategy.dropped == {1001: "cannot fit", 1002: "out of memory"}


def fit_result(tensors: int, measured: Any) -> FitRes:
    arrays = [*MODEL.values(), *[np.ones((3, 4), np.float32)] * 4]
    return FitRes(OK, ndarrays_to_parameters(arrays[:tensors]), 5, {"measured": measured})


@pytest.mark.parametrize(
    ("named", "tensors", "measured", "reason"),
    [
        (True, 3, "{}", "no ArrayRecord 'fisher'"),
        (True, 4, "{}", "names 0 arrays, but 1 follow"),
        (True, 4, '{"fisher": ["conv.weight", "x"]}', "names 2 arrays, but 1 follow"),
        (True, 4, "fisher:1", "Expecting value"),
        (True, 4, '{"fisher": 1}', "expected lists of array names"),
        (True, 4, '{"fisher": ["x"]}', r"missing \['conv.weight'\], unexpected \['x'\]"),
        (True, 2, "{}", r"missing \['bn.num_batches_tracked'\]"),
        # Which arrays are buffers is not given.
        (
            *(False, 4, '{"fisher": ["conv.weight"]}'),
            r"has 1 arrays, but the model seems to have 2.*a dict of initial parameters",
        ),
    ],
)
def test_wrongly_packed_results_fail_with_the_reason(
    named: bool, tensors: int, measured: str, reason: str
) -> None:
    rounds = ClassicRounds(FedEquilibria(), 2, named)
    asked = rounds.ask()
    results = [(proxy, fit_result(tensors, measured)) for proxy, _ in asked.values()]
    with pytest.raises(RoundFailed, match=reason):
        rounds.finish(results)


def test_arrays_without_a_name_are_not_dropped_in_silence() -> None:
    """A subclass that asks clients itself does not tell which model they received."""
    rounds = ClassicRounds(FedAvg(), 2)
    (proxy, _), *_ = rounds.ask().values()
    rounds.round += 1
    with pytest.raises(RoundFailed, match="it has 4 arrays, but the initial model 3"):
        rounds.finish([(proxy, fit_result(4, "{}"))])


@pytest.mark.parametrize("initial", [None, ndarrays_to_parameters(list(MODEL.values()))])
def test_exchanges_require_arrays_by_name(initial: Parameters | None) -> None:
    with pytest.raises(
        ValueError, match=r"Exchanges \(ControlVariates\).*a dict of initial parameters"
    ):
        LegacyStrategy(FedAvg(exchanges=[ControlVariates()]), initial)


def test_results_without_the_arrays_of_an_exchange_fail() -> None:
    rounds = ClassicRounds(FedAvg(exchanges=[ControlVariates()]), 2)
    results = [(proxy, result(MODEL, 5, {}, {})) for proxy, _ in rounds.ask().values()]
    with pytest.raises(
        RoundFailed, match="no ArrayRecord 'control', which the exchange ControlVariates"
    ):
        rounds.finish(results)


def test_clients_of_start_server_get_node_ids_and_the_process_a_run_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Flower's own runtimes set them; test_start.py tests this in real processes."""
    identity = pytest.importorskip("flwr.supercore.task_identity").TaskIdentity
    for name in ("_run_id", "_task_id", "_node_id"):
        monkeypatch.setattr(identity, name, None)
    present = manager(3)
    for proxy in present.all().values():
        del proxy.node_id
    legacy = LegacyStrategy(FedAvg(min_available_nodes=3), MODEL)
    parameters = legacy.initialize_parameters(present)
    assert parameters is not None
    for server_round in (1, 2):
        asked = legacy.configure_fit(server_round, parameters, present)
        results = [(proxy, result(MODEL, 5, {}, {})) for proxy, _ in asked]
        legacy.aggregate_fit(server_round, results[1:], [])
        assert len(set(legacy.strategy.client_ids)) == 2
        assert legacy.strategy.dropped.keys() == {asked[0][0].node_id}


@pytest.mark.slow
def test_the_classic_strategy_needs_no_torch() -> None:
    code = "import fairflower.classic.strategy, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- packing ---------------------------------------------------------------------------------


names = st.lists(st.text(max_size=3), unique=True, max_size=3)


@given(st.dictionaries(st.text(max_size=3), names, max_size=3))
def test_packed_arrays_are_unpacked_unchanged(kinds: dict[str, list[str]]) -> None:
    counter = iter(range(100))
    measured = {k: {n: np.full(2, next(counter)) for n in part} for k, part in kinds.items()}
    parameters, note = pack([np.zeros(1)], measured)
    unpacked = unpack(note.get("measured", "{}"), parameters[1:])
    assert unpacked.keys() == measured.keys()
    for kind, arrays in measured.items():
        assert list(unpacked[kind]) == list(arrays)
        assert all(unpacked[kind][n] is array for n, array in arrays.items())


@given(st.dictionaries(st.text(max_size=3), names, max_size=3), st.integers(0, 3))
def test_shared_arrays_are_split_from_the_model(
    kinds: dict[str, list[str]], model_size: int
) -> None:
    model = [np.full(2, -1 - i) for i in range(model_size)]
    counter = iter(range(100))
    sent = {k: {n: np.full(2, next(counter)) for n in part} for k, part in kinds.items()}
    parameters, _ = pack(model, sent)
    arrays, shared = split(parameters, {"shared": json.dumps(kinds)})
    assert all(a is b for a, b in zip(arrays, model, strict=True))
    assert {k: list(arrays) for k, arrays in shared.items()} == kinds
    assert all(shared[k][n] is array for k, arrays in sent.items() for n, array in arrays.items())


def test_a_config_that_names_too_many_arrays_is_refused() -> None:
    with pytest.raises(ValueError, match="'shared' names 3 arrays, but 1 follow"):
        split([np.zeros(1)], {"shared": '{"control": ["a", "b", "c"]}'})
    assert split([np.zeros(1)], {}) == ([np.zeros(1)], {})


def test_tensors_can_be_packed() -> None:
    model = linear()
    fisher = {name: p.detach() for name, p in model.named_parameters()}
    parameters, _ = pack([], {"fisher": fisher})
    assert [array.dtype for array in parameters] == [np.float32] * 2


def test_wrong_arguments_are_named_in_the_error() -> None:
    with pytest.raises(ConfigError, match=r"strategy = <class .*FedAvg'>: expected fairflower's"):
        LegacyStrategy(FedAvg)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"initial_parameters has type list: expected a dict"):
        LegacyStrategy(FedAvg(), list(MODEL.values()))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", [{}, {0: 7, 1: 8, 2: 9}], ids=["nodes", "client-id"])
def test_user_functions_aggregate_the_metrics_of_merged_clients(ids: Any) -> None:
    """Client 1 sends NaN in round 1, so its metrics are not passed."""
    seen: list[Any] = []

    def best(sent: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
        seen.append(sorted(n for n, _ in sent))
        return {"best": max(metrics["skill"] for _, metrics in sent)}

    functions = {"fit_metrics_aggregation_fn": best, "evaluate_metrics_aggregation_fn": best}
    legacy = LegacyStrategy(FedAvg(), MODEL, **functions)
    clients, start = manager(3), legacy.initial_parameters
    assert isinstance(start, Parameters)
    broken = ndarrays_to_parameters([np.full(a.shape, np.nan, np.float32) for a in MODEL.values()])
    results = []
    for proxy, _ in legacy.configure_fit(1, start, clients):
        k = proxy_node_id(proxy) - 1000
        sent = broken if k == 1 else start
        reported = {"client-id": ids[k]} if ids else {}
        results.append((proxy, FitRes(OK, sent, 10 + k, {"skill": float(k), **reported})))
    _, metrics = legacy.aggregate_fit(1, results, [])
    assert (seen.pop(), metrics) == ([10, 12], {"best": 2.0})

    tests = [
        (proxy, EvaluateRes(OK, 0.5, 20 + proxy_node_id(proxy) - 1000, {"skill": 1.0}))
        for proxy, _ in legacy.configure_evaluate(1, start, clients)
    ]
    loss, metrics = legacy.aggregate_evaluate(1, tests, [])
    assert (seen.pop(), metrics) == ([20, 21, 22], {"best": 1.0})
    assert loss == pytest.approx(0.5)


def test_parameters_and_bfloat16_tensors_are_packed_as_float32() -> None:
    tensor = torch.tensor([0.5, 2.0])
    for value in (nn.Parameter(tensor), tensor.bfloat16()):
        parameters, _ = pack([], {"fisher": {"w": value}})
        assert parameters[0].dtype == np.float32
        assert parameters[0].tolist() == [0.5, 2.0]
