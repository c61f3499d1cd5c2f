"""Local steps in bfloat16, with everything else in float32."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from toy_trainers import SETTINGS, exchanges, models_equal, run_toy_rounds, tiny_model, trainer

from fairflower.config.run import default_values, execution_keys, method_key
from fairflower.registry import CLIENTS
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.strategies import Uniform
from fairflower.training.app import evaluate_round, train_round
from fairflower.training.measurements import train_and_measure

BF16 = replace(SETTINGS, precision="bf16", local_epochs=4)

every_client = pytest.mark.parametrize("name", CLIENTS)


def rounds(name, settings, reverse=False):
    rule = Uniform(exchanges=exchanges(name))
    trainers = []

    def make(client):
        small = {"lambda_": 0.1} if name == "fedplvm" else {}  # 100 outweighs the cross entropy
        trainers.append(trainer(name, client, settings=settings, **small))
        return trainers[-1]

    model, _ = run_toy_rounds(rule, make, 2, 2, reverse=reverse)
    return model, trainers


@pytest.mark.few(6)
@pytest.mark.slow
@every_client
def test_every_client_learns_in_bf16_and_sends_and_keeps_float32(name):
    model, trainers = rounds(name, BF16)
    for one in trainers:
        kept = [*one.state.values(), *one.returns.values(), one.send()]
        for arrays in kept:
            for array in arrays.values():
                assert array.dtype in (np.float32, np.int64)
                assert np.isfinite(array).all()
    judge = trainer(name)
    before = judge.evaluate(judge.train_examples)["loss"]
    judge.receive(model)
    judge.state = [one.state for one in trainers if one.client_id == judge.client_id][-1]
    judge.load_local_arrays()  # load arrays that stay with the client
    assert judge.evaluate(judge.train_examples)["loss"] < before
    assert models_equal(model, rounds(name, BF16, reverse=True)[0])
    assert not models_equal(model, rounds(name, replace(BF16, precision="float32"))[0])


def test_bf16_gradients_match_float32_up_to_rounding():
    gradients = []
    for precision in ("bf16", "float32"):
        one = trainer("sgd", settings=replace(BF16, precision=precision))
        one.model.train()
        x, y = next(iter(one.train_examples.eval_batches(8)))
        loss = one.objective(x, y)
        assert loss.dtype == torch.float32
        loss.backward()
        assert all(p.grad.dtype == torch.float32 for p in one.trainable)
        gradients.append(torch.cat([p.grad.flatten() for p in one.trainable]))
    half, full = gradients
    assert 0 < torch.norm(half - full) < 0.03 * torch.norm(full)


# Group counts need data with groups; they are counts of predictions.
@pytest.mark.parametrize("name", [n for n in MEASUREMENTS if n != "received_group_counts"])
def test_measurements_are_computed_in_float32(name):
    measured = []
    for precision in ("float32", "bf16"):
        # Without epochs nothing is trained, and both precisions have the same model.
        one = trainer("sgd", settings=replace(BF16, precision=precision, local_epochs=0))
        metrics, arrays = train_and_measure(one, {"server-round": 1, "measure": name})
        measured.append(
            (metrics, {k: {n: a.tolist() for n, a in v.items()} for k, v in arrays.items()})
        )
        assert all(a.dtype == np.float32 for v in arrays.values() for a in v.values())
    assert measured[0] == measured[1]


def test_clients_test_in_float32():
    tested = [
        trainer("sgd", settings=replace(BF16, precision=p)).test() for p in ("float32", "bf16")
    ]
    assert tested[0] == tested[1]


def test_denormal_numbers_are_flushed_to_0_while_a_client_works():
    def tiny():
        return float(torch.tensor(1e-39) * 1)

    one, seen = trainer("sgd"), []
    one.begin = lambda server_round: seen.append(tiny())
    one.test = lambda: {"tiny": tiny()}
    context = Context(0, 0, {}, RecordDict(), {})
    train_round(one, context, {"server-round": 1})
    assert seen == [0]
    assert evaluate_round(one, context, {"server-round": 1})["tiny"] == 0
    assert tiny() > 0
    torch.set_flush_denormal(True)  # if it was set before, it stays set
    try:
        evaluate_round(one, context, {"server-round": 1})
        assert tiny() == 0
    finally:
        torch.set_flush_denormal(False)


def test_precision_is_part_of_the_method_and_float32_by_default():
    flat = dict(default_values())
    assert flat["train.precision"] == "float32"
    assert method_key(flat) != method_key(flat | {"train.precision": "bf16"})
    assert "train.precision" not in execution_keys()


# --- networks whose parameters have 16 bits ------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "scaffold", "feddyn", "fedbn", "fedper"])
def test_networks_in_bfloat16_measure_and_keep_float32(name):
    model = tiny_model().to(torch.bfloat16)
    model.layer.register_forward_pre_hook(lambda layer, inputs: (inputs[0].bfloat16(),))
    own = trainer(name, model=model)
    _, arrays = train_and_measure(own, {"server-round": 1, "measure": "gradient"})
    kept = [a for of in (*own.state.values(), *own.returns.values()) for a in of.values()]
    assert kept or name == "sgd"
    for array in (*arrays["gradient"].values(), *own.send().values(), *kept):
        assert array.dtype in (np.float32, np.int64)
