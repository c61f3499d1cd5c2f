"""Local training: closed forms, reproducibility, exchanged arrays, and both of Flower's APIs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common import EvaluateIns, FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from hypothesis import given
from hypothesis import strategies as st
from sgd_clients import (
    SETTINGS,
    Arrays,
    NumPySoftmaxRegression,
    batch_normed,
    linear,
    one_round,
    random_client_data,
    random_images,
    sgd_trainer,
)
from torch import Tensor
from toy_trainers import models_equal

from fairflower import models
from fairflower.arrays import record_of
from fairflower.classic.client import NumPyTrainer
from fairflower.clients import (
    SGD,
    ClientData,
    Trainer,
    choose_device,
    limit_threads,
    make_client_app,
)
from fairflower.config import ClientConfig, TrainConfig
from fairflower.errors import ConfigError
from fairflower.seeds import derive_seed
from fairflower.training.build import build_trainer

try:
    from flwr.compat.common import recorddict_compat as compat
except ImportError:  # older Flower
    from flwr.common import recorddict_compat as compat

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


# --- closed forms ---------------------------------------------------------------------


def stacked(arrays: Arrays) -> np.ndarray:
    return np.asarray(np.c_[arrays["1.weight"], arrays["1.bias"]], np.float64)


def test_two_full_batch_steps_match_sgd_with_momentum_and_weight_decay() -> None:
    plain = ClientData(random_images(20, 0), random_images(5, 1), (0.5,) * 3, (0.5,) * 3, 4)
    settings = TrainConfig(local_epochs=2, batch_size=32, lr=0.02, momentum=0.9, weight_decay=0.1)
    client = sgd_trainer(linear(), data=plain, settings=settings)
    arrays = client.send()
    regression = NumPySoftmaxRegression(plain.train)
    w = stacked(arrays)
    for server_round in (1, 2):  # the momentum buffer is new in round 2
        losses, buffer = [], np.zeros_like(w)
        for _ in range(2):
            losses.append(regression.loss(w))
            w, buffer = regression.step(w, buffer, settings)
        arrays, train_loss = one_round(client, arrays, server_round)
        np.testing.assert_allclose(stacked(arrays), w, rtol=1e-4, atol=1e-6)
        assert train_loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_train_loss_is_the_mean_over_images_not_over_batches() -> None:
    """With lr 0 every batch sees the same model, so the mean is the whole set's loss."""
    plain = ClientData(random_images(21, 0), random_images(5, 1), (0.5,) * 3, (0.5,) * 3, 4)
    settings = TrainConfig(local_epochs=3, batch_size=8, lr=0.0)
    client = sgd_trainer(linear(), data=plain, settings=settings)
    arrays = client.send()
    sent, train_loss = one_round(client, arrays)
    assert train_loss == pytest.approx(
        NumPySoftmaxRegression(plain.train).loss(stacked(arrays)), rel=1e-6
    )
    assert models_equal(sent, arrays)


def test_evaluation_is_the_mean_over_the_test_images() -> None:
    client = sgd_trainer(linear())
    client.eval_batch_size = 4
    regression, w = NumPySoftmaxRegression(client.data.test), stacked(client.send())
    assert client.test() == {
        "eval_loss": pytest.approx(regression.loss(w), rel=1e-6),
        "accuracy": pytest.approx(regression.accuracy(w)),
    }


def test_evaluation_uses_running_statistics_and_changes_nothing() -> None:
    client = sgd_trainer()
    before, state = client.send(), torch.get_rng_state()
    client.model.train()
    first = client.test()
    assert client.test() == first
    assert models_equal(client.send(), before)
    assert torch.equal(torch.get_rng_state(), state)


def test_zero_local_epochs_return_the_received_model_and_its_loss() -> None:
    client = sgd_trainer(linear(), settings=TrainConfig(local_epochs=0))
    arrays = client.send()
    sent, train_loss = one_round(client, arrays)
    assert models_equal(sent, arrays)
    assert train_loss == pytest.approx(
        NumPySoftmaxRegression(client.data.train).loss(stacked(arrays)), rel=1e-6
    )


# --- what the result depends on --------------------------------------------------------


def test_a_round_does_not_depend_on_earlier_calls() -> None:
    start = sgd_trainer().send()
    expected, loss = one_round(sgd_trainer(), start)
    client = sgd_trainer()
    client.receive(start)
    client.test()
    one_round(client, start, server_round=2)
    torch.manual_seed(99)
    arrays, again = one_round(client, start)
    assert models_equal(arrays, expected)
    assert again == loss
    assert not models_equal(expected, start)


@pytest.mark.parametrize(
    ("changes", "server_round"),
    [({"client_id": 4}, 1), ({"seed": 1}, 1), ({}, 2)],
    ids=["client", "seed", "round"],
)
def test_seed_client_and_round_each_change_the_draws(
    changes: dict[str, Any], server_round: int
) -> None:
    start = sgd_trainer().send()
    expected, _ = one_round(sgd_trainer(), start)
    other, _ = one_round(sgd_trainer(**changes), start, server_round)
    assert not models_equal(other, expected)


def test_clients_that_share_a_model_do_not_depend_on_their_order() -> None:
    model = batch_normed()
    start = sgd_trainer(model).send()

    def results(order: list[int]) -> dict[int, Arrays]:
        clients = {
            i: sgd_trainer(model, client_id=i, data=random_client_data(seed=i)) for i in order
        }
        return {i: one_round(client, start)[0] for i, client in clients.items()}

    forwards, backwards = results([0, 1, 2]), results([2, 1, 0])
    assert all(models_equal(forwards[i], backwards[i]) for i in forwards)


def test_training_leaves_torchs_generator_and_cudnn_flags_unchanged() -> None:
    cudnn = torch.backends.cudnn
    client = sgd_trainer()
    generator, switches = torch.get_rng_state(), (cudnn.deterministic, cudnn.benchmark)
    client.train(1)
    assert torch.equal(torch.get_rng_state(), generator)
    assert (cudnn.deterministic, cudnn.benchmark) == switches


def test_derived_seeds_are_pinned() -> None:
    """Other values would silently change every published run."""
    assert derive_seed(0, 3, 1, "batches") == 2714121694677843132
    assert derive_seed(0, 3, 1, "batches") == derive_seed(np.int64(0), 3, 1, "batches")  # type: ignore[arg-type]


@given(st.lists(st.lists(st.integers(0, 20) | st.text(max_size=2)), unique_by=tuple))
def test_derived_seeds_are_63_bits_and_differ(parts: list[list[int | str]]) -> None:
    seeds = [derive_seed(*each) for each in parts]
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len(set(seeds)) == len(parts)


# --- batch norm ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet10", "resnet18"])
@pytest.mark.parametrize(("images", "steps"), [(5, 1), (9, 2), (1, 0)])
def test_batches_of_one_image_do_not_break_batch_norm(name: str, images: int, steps: int) -> None:
    """With batch size 4, image 5 joins the first batch and image 9 the second.

    A client's only image is normalized by the received statistics, which do not change.
    """
    client = sgd_trainer(
        models.build(name, 4, (3, 8, 8), seed=0),
        data=random_client_data(train=images),
        settings=TrainConfig(local_epochs=1, batch_size=4, lr=0.01),
    )
    start = client.send()
    arrays, loss = one_round(client, start)
    assert math.isfinite(loss)
    assert all(np.isfinite(array).all() for array in arrays.values())
    assert not np.array_equal(arrays["head.weight"], start["head.weight"])
    buffers = [key for key in arrays if "running" in key or "num_batches" in key]
    assert len(buffers) > 30
    for key in buffers:
        if key.endswith("num_batches_tracked"):
            assert arrays[key] == steps
        else:
            assert np.array_equal(arrays[key], start[key]) == (steps == 0)


def test_batch_size_1_is_allowed() -> None:
    client = sgd_trainer(
        data=random_client_data(train=3), settings=TrainConfig(local_epochs=1, batch_size=1)
    )
    arrays, loss = one_round(client, client.send())
    assert math.isfinite(loss)
    assert arrays["1.num_batches_tracked"] == 0
    assert all(module.training for module in client.model.modules())


# --- exchanged arrays ---- ------------------------------------------------------------------


def test_arrays_keep_names_order_shapes_and_types() -> None:
    client = sgd_trainer()
    arrays, _ = one_round(client, client.send())
    state = client.model.state_dict()
    assert list(arrays) == list(state)
    for name, tensor in state.items():
        assert arrays[name].shape == tuple(tensor.shape)
        assert arrays[name].flags.c_contiguous
        assert arrays[name].dtype == (np.int64 if name.endswith("tracked") else np.float32)
    assert arrays["1.num_batches_tracked"].shape == ()
    assert arrays["1.num_batches_tracked"] == 6  # 20 images in 3 batches, twice


def test_sent_arrays_are_copies() -> None:
    client = sgd_trainer()
    first = client.send()
    kept = {name: array.copy() for name, array in first.items()}
    client.train(1)
    assert models_equal(first, kept)
    first["0.weight"][:] = 0
    assert client.model.state_dict()["0.weight"].abs().sum() > 0


def test_received_arrays_are_not_modified() -> None:
    client = sgd_trainer()
    arrays = client.send()
    kept = {name: array.copy() for name, array in arrays.items()}
    for array in arrays.values():
        array.flags.writeable = False
    strided = arrays | {"4.weight": np.asfortranarray(arrays["4.weight"])}
    sent, _ = one_round(client, strided)
    assert models_equal(arrays, kept)
    assert models_equal(sent, one_round(client, kept)[0])


def test_arrays_are_matched_by_name_in_any_order() -> None:
    client = sgd_trainer()
    arrays = {name: array + 1 for name, array in client.send().items()}
    client.receive({name: arrays[name] for name in reversed(arrays)})
    assert models_equal(client.send(), arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"0.weight": np.zeros((4, 3, 3), np.float32)}, r"'0.weight'.*\(4, 3, 3, 3\).*\(4, 3, 3\)"),
        (
            {"1.num_batches_tracked": np.float64(1)},
            r"'1.num_batches_tracked'.*int64.*float64.*Flower's FedAvg",
        ),
        ({"extra": np.zeros(1)}, r"9 arrays.*got 10.*Unknown: extra"),
    ],
)
def test_wrong_arrays_are_refused_and_leave_the_model_unchanged(
    change: Arrays, message: str
) -> None:
    client = sgd_trainer()
    before = client.send()
    wrong = {name: np.asarray(array + 1) for name, array in before.items()} | change
    with pytest.raises(ValueError, match=f"Client 3.*{message}"):
        client.receive(wrong)
    assert models_equal(client.send(), before)


def test_missing_arrays_are_named() -> None:
    client = sgd_trainer()
    arrays = client.send()
    del arrays["1.weight"]
    with pytest.raises(ValueError, match=r"Missing: 1\.weight\. Unknown: none"):
        client.receive(arrays)


# --- errors -----------------------------------------------------------------


def test_a_diverging_loss_names_client_round_and_remedy() -> None:
    client = sgd_trainer(linear(), settings=TrainConfig(local_epochs=2, batch_size=4, lr=1e38))
    with pytest.raises(FloatingPointError, match=r"Client 3.*round 7.*Lower train\.lr"):
        client.train(7)


def test_fit_requires_server_round_in_the_config(context: Context) -> None:
    client = NumPyTrainer(sgd_trainer(), context)
    with pytest.raises(ValueError, match=r"server-round.*on_fit_config_fn"):
        client.fit(client.get_parameters({}), {})


def test_a_client_without_images_raises_an_error() -> None:
    client = sgd_trainer(data=random_client_data(train=0, test=0))
    with pytest.raises(ValueError, match="Client 3 has no training images"):
        client.train(1)
    with pytest.raises(ValueError, match="Client 3 has no test images"):
        client.test()


def test_an_unknown_client_is_named_with_its_nearest_match() -> None:
    with pytest.raises(ConfigError, match=r"Unknown client 'sdg'.*'sgd'"):
        build_trainer(
            ClientConfig("sdg"), linear(), random_client_data(), SETTINGS, client_id=0, seed=0
        )


# --- Flower ----------------------------------------------------------------------------


def test_the_message_api_equals_fit_and_evaluate_exactly(context: Context) -> None:
    start = sgd_trainer().send()
    seen = []

    def trainer_fn(context: Context, config: ConfigRecord) -> Trainer:
        seen.append((context.node_config["partition-id"], dict(config)))
        return sgd_trainer()

    app = make_client_app(trainer_fn)
    config = ConfigRecord({"server-round": 5, "seed": 0})
    content = RecordDict({"arrays": record_of(start), "config": config})

    classic = NumPyTrainer(sgd_trainer(), context)
    parameters, num_examples, metrics = classic.fit(list(start.values()), config)
    reply = app(Message(content, 1, "train"), context).content
    sent = {name: array.numpy() for name, array in reply.array_records["arrays"].items()}
    assert models_equal(sent, dict(zip(start, parameters, strict=True)))
    assert dict(reply.metric_records["metrics"]) == metrics | {"num-examples": num_examples}
    assert metrics.keys() == {"train_loss", "client-id"}

    loss, num_examples, metrics = classic.evaluate(list(start.values()), config)
    reply = app(Message(content, 1, "evaluate"), context).content
    assert dict(reply.metric_records["metrics"]) == {
        "eval_loss": loss,
        "num-examples": num_examples,
        **metrics,
    }
    assert not reply.array_records
    assert seen == [(3, {"server-round": 5, "seed": 0})] * 2


def test_a_trainer_works_as_a_classic_client(context: Context) -> None:
    app = ClientApp(client_fn=lambda context: NumPyTrainer(sgd_trainer(), context).to_client())
    client = NumPyTrainer(sgd_trainer(), context)
    start = client.get_parameters({})
    expected, num_examples, metrics = client.fit(start, {"server-round": 2})
    wire = ndarrays_to_parameters(start)

    content = compat.fitins_to_recorddict(FitIns(wire, {"server-round": 2}), keep_input=True)
    reply = app(Message(content, 1, "train"), context).content
    result = compat.recorddict_to_fitres(reply, keep_input=True)
    received = parameters_to_ndarrays(result.parameters)
    assert all(np.array_equal(a, b) for a, b in zip(received, expected, strict=True))
    assert (result.num_examples, result.metrics) == (num_examples, metrics)

    content = compat.evaluateins_to_recorddict(EvaluateIns(wire, {}), keep_input=True)
    reply = app(Message(content, 1, "evaluate"), context).content
    answer = compat.recorddict_to_evaluateres(reply)
    assert (answer.loss, answer.num_examples, answer.metrics) == client.evaluate(start, {})
    with pytest.raises(
        ValueError, match=r"Client 3: expected 9 arrays, as in the model, but got 8"
    ):
        client.fit(start[:-1], {"server-round": 2})


def test_a_message_without_arrays_raises_an_error(context: Context) -> None:
    app = make_client_app(lambda context, config: sgd_trainer())
    content = RecordDict({"weights": record_of(sgd_trainer().send())})
    with pytest.raises(ValueError, match=r"train message has no ArrayRecord 'arrays'.*weights"):
        app(Message(content, 1, "train"), context)


def test_subclasses_change_the_training_loop_through_hooks() -> None:
    class Halved(SGD):
        """Train on half the loss, which equals SGD with half the learning rate."""

        count = 0

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return super().loss(x, y) / 2

        def step(self, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
            self.count += 1
            return super().step(optimizer, x, y)

    settings = TrainConfig(local_epochs=2, batch_size=8, lr=0.1, weight_decay=0.0)
    half = TrainConfig(local_epochs=2, batch_size=8, lr=0.05, weight_decay=0.0)
    start = sgd_trainer().send()
    varied = Halved(batch_normed(), random_client_data(), settings, client_id=3, seed=0)
    arrays, loss = one_round(varied, start)
    expected, expected_loss = one_round(sgd_trainer(settings=half), start)
    assert varied.count == 6
    assert loss == pytest.approx(expected_loss / 2, rel=1e-5)
    for name in expected:
        np.testing.assert_allclose(arrays[name], expected[name], rtol=1e-4, atol=1e-6)


# --- devices ---------------------------------------------------------------------------


def pretend_ray(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float] | None) -> None:
    """A Ray actor with these resources, or (None) the driver process."""
    worker = SimpleNamespace(
        get_actor_id=lambda: None if resources is None else "a1",
        get_assigned_resources=lambda: resources,
    )
    ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda: worker)
    monkeypatch.setitem(sys.modules, "ray", ray)


def pretend_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "resources", "expected"),
    [
        (0, None, "cpu"),
        (1, None, "cuda"),
        (1, {"CPU": 1.0}, "cpu"),
        (1, {"CPU": 1.0, "GPU": 0.0}, "cpu"),
        (1, {"CPU": 1.0, "GPU": 0.25}, "cuda"),
        (0, {"CPU": 1.0, "GPU": 0.5}, "cpu"),
    ],
)
def test_device_auto_uses_a_gpu_only_if_granted(
    gpus: int, resources: dict[str, float] | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, gpus)
    pretend_ray(monkeypatch, resources)
    assert choose_device("auto") == torch.device(expected)


def test_a_missing_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 1)
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("cuda:0") == torch.device("cuda:0")
    with pytest.raises(ConfigError, match=r"'cuda:1'.*sees 1 CUDA"):
        choose_device("cuda:1")
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(ConfigError, match=r"'cuda'.*sees 0 CUDA.*'auto'"):
        choose_device("cuda")
    with pytest.raises(ConfigError, match=r"'gpu': expected auto, cpu, cuda, cuda:N or mps"):
        choose_device("gpu")


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
def test_threads_match_the_granted_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert limit_threads() == torch.get_num_threads() == 1
    assert limit_threads(2) == torch.get_num_threads() == 2
    pretend_ray(monkeypatch, {"CPU": 3.0})
    assert limit_threads(2) == torch.get_num_threads() == 3
    pretend_ray(monkeypatch, {"CPU": 0.5})
    assert limit_threads(2) == 1


@NEEDS_CUDA
def test_gpu_training_matches_the_cpu_and_is_reproducible() -> None:
    start = sgd_trainer().send()
    linear_start = sgd_trainer(linear()).send()
    on_cpu, cpu_loss = one_round(sgd_trainer(linear()), linear_start)
    on_gpu, gpu_loss = one_round(sgd_trainer(linear(), device="cuda"), linear_start)
    assert gpu_loss == pytest.approx(cpu_loss, rel=1e-4)
    for name in on_cpu:
        np.testing.assert_allclose(on_gpu[name], on_cpu[name], rtol=1e-2, atol=1e-4)
    first, _ = one_round(sgd_trainer(device="cuda"), start)
    state = torch.cuda.get_rng_state()
    again, _ = one_round(sgd_trainer(device="cuda"), start)
    assert models_equal(first, again)
    assert torch.equal(torch.cuda.get_rng_state(), state)
