"""q-FFL against its authors' numbers and Flower's own q-FedAvg."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord
from flwr.common.config import parse_config_args
from flwr.serverapp.strategy import QFedAvg
from hypothesis import given
from hypothesis import strategies as st
from resuming import config as resumable
from resuming import resume, session, stopped
from toy_trainers import data, run_toy_rounds, trainer

from fairflower.aggregation.cohort import Cohort
from fairflower.arrays import arrays_of, record_of
from fairflower.config import RunConfig, StrategyConfig, TrainConfig
from fairflower.config.text import read_toml
from fairflower.errors import ConfigError
from fairflower.report import read_run
from fairflower.strategies import QFFL
from fairflower.testing.rounds import Rounds, reply

W, LOCALS, LOSSES = np.array([0.0, 1.0]), ([0.1, 0.8], [-0.2, 1.1]), (2.0, 0.5)
GOLDEN = {
    0: (-0.05, 0.95),
    0.5: (0.0, 0.92),
    1: (0.02857143, 0.9),
    2: (0.05185185, 0.88518519),
}


def step(rounds: Rounds, updates, losses, examples=None) -> dict[str, np.ndarray]:
    return rounds.step(
        dict(enumerate(updates)),
        examples or {k: 10**k for k in range(len(losses))},
        metrics={k: {"received_loss": loss, "train_loss": 99.0} for k, loss in enumerate(losses)},
    )


@pytest.mark.parametrize("q", GOLDEN)
def test_steps_match_the_authors_numbers(q):
    rounds = Rounds(QFFL(q=q, lr=0.1), {"x": W}, range(2))
    after = step(rounds, [{"x": np.array(local) - W} for local in LOCALS], LOSSES)
    np.testing.assert_allclose(after["x"], GOLDEN[q], atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(("q", "lr"), [(0.1, 0.5), (1, 0.01), (3, 0.1)])
def test_steps_match_flowers_qfedavg_without_batchnorm(q, lr):
    random, clients = np.random.default_rng(3), 3
    model = {"a": random.normal(size=(2, 3)), "b": random.normal(size=4)}
    updates = [
        {name: random.normal(size=array.shape) for name, array in model.items()}
        for _ in range(clients)
    ]
    losses = random.uniform(0.01, 5, clients).tolist()
    rounds = Rounds(QFFL(q=q, lr=lr), model, range(clients))
    actual = step(rounds, updates, losses)

    theirs = QFedAvg(client_learning_rate=lr, q=q)
    theirs.current_arrays = record_of(model)
    asked = rounds.ask()
    replies = [
        reply(
            asked[k],
            {name: model[name] + move for name, move in update.items()},
            {"num-examples": 1, "train_loss": loss},
        )
        for k, (update, loss) in enumerate(zip(updates, losses, strict=True))
    ]
    merged, _ = theirs.aggregate_train(1, replies)
    assert merged is not None
    for name, array in arrays_of(merged).items():
        np.testing.assert_allclose(actual[name], array, rtol=1e-6, atol=1e-8)


def by_formula(x, locals_, losses, q, lr):
    F = np.array(losses) + 1e-10
    deltas = [f**q * (x - local) / lr for f, local in zip(F, locals_, strict=True)]
    h = [
        q * f ** (q - 1) * (((x - local) / lr) ** 2).sum() + f**q / lr
        for f, local in zip(F, locals_, strict=True)
    ]
    return x - sum(deltas) / sum(h)


BATCHNORM = {
    "first.weight": np.array([1.0, 2.0]),
    "bn.weight": np.array([1.0]),
    "bn.running_mean": np.array([0.0]),
    "bn.running_var": np.array([1.0]),
    "bn.num_batches_tracked": np.array(5, np.int64),
    "last.weight": np.array([3.0, 4.0]),
}


def test_batchnorm_statistics_move_by_the_coefficients_of_the_parameters():
    moves = [
        {"first.weight": [0.1, 0.2], "bn.weight": [0.3], "last.weight": [-0.4, 0.5]},
        {"first.weight": [-0.2, 0.0], "bn.weight": [0.1], "last.weight": [0.6, -0.1]},
    ]
    statistics = [
        {"bn.running_mean": [9.0], "bn.running_var": [-0.9], "bn.num_batches_tracked": 7},
        {"bn.running_mean": [-3.0], "bn.running_var": [4.0], "bn.num_batches_tracked": 7},
    ]
    updates = [
        {name: np.array(value) for name, value in (move | rest).items()}
        for move, rest in zip(moves, statistics, strict=True)
    ]
    rounds = Rounds(QFFL(q=2, lr=0.1), BATCHNORM, range(2))
    after = step(rounds, updates, LOSSES)

    parameters = list(moves[0])
    flat = np.concatenate([BATCHNORM[name] for name in parameters])
    locals_ = [flat + np.concatenate([move[name] for name in parameters]) for move in moves]
    expected = by_formula(flat, locals_, LOSSES, 2, 0.1)
    np.testing.assert_allclose(np.concatenate([after[name] for name in parameters]), expected)

    # Apart from the norms, which exclude statistics, the formula is linear in the updates.
    c = np.linalg.lstsq(np.transpose(locals_) - flat[:, None], expected - flat, rcond=None)[0]
    assert 0 < c.sum() < 0.8
    np.testing.assert_allclose(after["bn.running_mean"], c @ [9, -3])
    np.testing.assert_allclose(after["bn.running_var"], 1 + c @ [-0.9, 4])
    assert after["bn.num_batches_tracked"] == 12


@given(st.integers(0, 10_000), st.sampled_from([0.1, 1, 5]), st.sampled_from([1e-3, 1e9]))
def test_batchnorm_variances_stay_between_received_and_returned_values(seed, q, lr):
    """Without tolerance: a variance rounded below 0 would give NaN in the next forward pass."""
    random = np.random.default_rng(seed)
    clients = int(random.integers(1, 6))
    v, *returned = 10 ** random.uniform(-9, 9, (1 + clients, 900)).astype(np.float32)
    model = {"w": np.zeros(2), "bn.running_var": v}
    updates = [{"w": random.normal(size=2), "bn.running_var": var - v} for var in returned]
    ends = np.stack([v, *(v + update["bn.running_var"] for update in updates)])
    after = step(
        Rounds(QFFL(q=q, lr=lr), model, range(clients)), updates, random.exponential(1, clients)
    )
    assert (after["bn.running_var"] >= ends.min(axis=0)).all()
    assert (after["bn.running_var"] <= ends.max(axis=0)).all()


@given(st.integers(0, 10_000), st.floats(0, 5), st.floats(1e-3, 1))
def test_steps_match_the_formula(seed, q, lr):
    random = np.random.default_rng(seed)
    x, updates, losses = random.normal(size=3), random.normal(size=(4, 3)), random.exponential(1, 4)
    after = step(Rounds(QFFL(q=q, lr=lr), {"x": x}, range(4)), [{"x": u} for u in updates], losses)
    np.testing.assert_allclose(after["x"], by_formula(x, x + updates, losses, q, lr), atol=1e-9)


@given(st.integers(0, 10_000), st.floats(0.001, 10))
def test_the_step_stays_in_the_hull_of_received_and_returned_models(seed, q):
    random = np.random.default_rng(seed)
    rounds = Rounds(QFFL(q=q, lr=0.5), {"x": np.zeros(3)}, range(4))
    step(rounds, [{"x": random.normal(size=3)} for _ in range(4)], random.exponential(1, 4))
    coefficients = rounds.strategy.diagnostics["coefficients"]
    assert coefficients.min() >= 0
    assert coefficients.sum() <= 1 + 1e-12


@pytest.mark.parametrize("rule", ["qfedavg", "weights"])
def test_q_0_is_the_plain_mean(rule):
    rounds = Rounds(QFFL(q=0, rule=rule), {"x": np.zeros(2)}, range(3))
    updates = [np.array(v, float) for v in ([1, 2], [3, -4], [5, 0])]
    after = step(rounds, [{"x": u} for u in updates], (0.0, 2.0, 9.0))
    np.testing.assert_allclose(after["x"], np.mean(updates, axis=0))


def test_rule_weights_averages_by_losses_to_the_power_q():
    rounds = Rounds(QFFL(q=2, rule="weights"), {"x": np.zeros(1)}, range(3))
    after = step(rounds, [{"x": np.array([v])} for v in (1.0, 2.0, 3.0)], (0.5, 1.0, 2.0))
    np.testing.assert_allclose(after["x"], (0.25 * 1 + 1 * 2 + 4 * 3) / 5.25)


def test_losses_of_0_and_a_large_q_give_finite_steps():
    for q in (0.5, 1, 300):
        rounds = Rounds(QFFL(q=q, lr=0.1), {"x": np.zeros(1)}, range(2))
        after = step(rounds, [{"x": np.array([1.0])}, {"x": np.array([2.0])}], (0.0, 0.0))
        assert 0 <= after["x"][0] <= 2


@pytest.mark.parametrize("c", [(-0.1, 0.5), (0.6, 0.6), (0.0, 0.0), (np.nan, 0.5)])
def test_coefficients_that_leave_the_hull_require_weights_for_statistics(c):
    model = {"w": np.zeros(2), "bn.running_var": np.ones(1)}
    ends = tuple({"w": np.full(2, k + 1.0), "bn.running_var": np.full(1, k)} for k in range(2))
    cohort = Cohort(1, (0, 1), np.ones(2), model, ends, buffers=frozenset({"bn.running_var"}))
    with pytest.raises(ValueError, match="sum in"):
        cohort.move(np.array(c))
    if np.isfinite(c).all():
        moved = cohort.move(np.array(c), np.array([0.25, 0.75]))
        np.testing.assert_allclose(moved["w"], np.dot(c, (1, 2)))
        np.testing.assert_allclose(moved["bn.running_var"], 0.75)


@pytest.mark.slow
def test_a_model_with_batchnorm_learns_when_its_steps_are_short():
    """Steps are 3 % of the mean update; fully averaged statistics would not fit (1.42 -> 1.51)."""
    plain = TrainConfig(local_epochs=20, batch_size=8, lr=0.05, momentum=0.0)
    losses: list[float] = []

    def observe(cohort):
        losses.append(cohort.metrics["received_loss"].mean())
        return {}

    strategy = QFFL(lr=0.05, observers=[observe])
    run_toy_rounds(
        strategy, lambda k: trainer("sgd", k, settings=plain, data=data(k, train=32)), 4, 5
    )
    assert strategy.diagnostics["coefficients"].sum() < 0.05
    assert (np.diff(losses) < -0.005).all()


@pytest.mark.parametrize("q", [0.5, 1, 2])
def test_momentum_counts_as_a_larger_learning_rate(q):
    """With constant gradients, many steps of lr with momentum m approach steps of lr / (1 - m).

    Of 400 steps, 9 are missing, because momentum builds up in the first ones.
    """
    random = np.random.default_rng(5)
    gradients, losses = random.normal(size=(3, 4)), random.uniform(0.5, 3, 3)

    def walk(gradient, lr, momentum):
        w = torch.zeros(4, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([w], lr=lr, momentum=momentum)
        for _ in range(400):
            w.grad = torch.from_numpy(gradient)
            optimizer.step()
        return {"x": w.detach().numpy()}

    def after(lr, momentum):
        rounds = Rounds(QFFL(q=q), {"x": np.zeros(4)}, range(3))
        rounds.config |= {"train.lr": lr, "train.momentum": momentum, "train.optimizer": "sgd"}
        return step(rounds, [walk(g, lr, momentum) for g in gradients], losses)["x"]

    np.testing.assert_allclose(after(0.001, 0.9), after(0.01, 0.0), rtol=0.025)


def test_l_is_derived_from_the_train_config():
    rounds = Rounds(QFFL(), {"x": W}, range(2))
    updates = [{"x": np.array(local) - W} for local in LOCALS]
    for lr, momentum in ((0.05, 0.0), (0.01, 0.9), (0.02, 0.5)):
        before, rounds.config = rounds.model["x"], {"train.lr": lr, "train.momentum": momentum}
        locals_ = [before + update["x"] for update in updates]
        expected = by_formula(before, locals_, LOSSES, 1, lr / (1 - momentum))
        np.testing.assert_allclose(step(rounds, updates, LOSSES)["x"], expected)


def test_a_given_lr_overrides_the_train_config():
    rounds = Rounds(QFFL(lr=0.1), {"x": W}, range(2))
    rounds.config = {"train.lr": 3.0, "train.momentum": 0.9}
    after = step(rounds, [{"x": np.array(local) - W} for local in LOCALS], LOSSES)
    np.testing.assert_allclose(after["x"], GOLDEN[1], atol=1e-8)


NO_L = [
    ({}, r"train.lr = None.*QFFL\(lr=.*rule='weights'"),
    ({"train.lr": 0.0}, "train.lr = 0.0, "),
    ({"train.lr": 0.1, "train.momentum": 1.0}, "train.lr = 0.1, train.momentum = 1.0 "),
    ({"train.lr": 0.1}, "train.momentum = None in"),
    ({"train.lr": 0.1, "train.optimizer": "adamw"}, "train.optimizer = 'adamw'.*rule = 'weights'"),
    ({"train.lr": 0.1, "train.optimizer": "adam"}, "train.optimizer = 'adam'.*rule = 'weights'"),
]


@pytest.mark.parametrize(("config", "problem"), NO_L)
def test_train_configs_without_an_l_are_refused_before_training(config, problem):
    with pytest.raises(ValueError, match=problem):
        QFFL().configure_train(1, record_of({"x": W}), ConfigRecord(dict(config)), None)
    for needs_none in (QFFL(q=0), QFFL(rule="weights")):
        rounds = Rounds(needs_none, {"x": W}, range(2))
        rounds.config = config
        assert len(rounds.ask()) == 2


@pytest.mark.parametrize(("config", "problem"), [*NO_L[1:3], *NO_L[4:]])
def test_run_configs_without_an_l_are_refused(config, problem):
    with pytest.raises(ConfigError, match=f"^{problem}"):
        RunConfig.from_flat({"strategy.name": "qffl", **config})
    RunConfig.from_flat({"strategy.name": "qffl", "strategy.rule": "weights", **config})
    RunConfig.from_flat({"strategy.name": "fedavg", **config})


def test_adam_is_refused_even_with_a_given_lr():
    with pytest.raises(ConfigError, match=r"^train.optimizer = 'adam'"):
        RunConfig.from_flat(
            {"strategy.name": "qffl", "strategy.lr": 0.1, "train.optimizer": "adam"}
        )


WORST = {"strategy.name": "qffl", "strategy.rule": "weights", "strategy.q": float("inf")}


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((0.5, 2.0, 1.9999999), (0, 1, 0)),
        ((3.0, 2.0, 3.0), (0.5, 0, 0.5)),
        ((0.0, 0.0, 0.0), (1 / 3, 1 / 3, 1 / 3)),
    ],
)
def test_an_infinite_q_gives_all_weight_to_the_largest_loss(losses, expected):
    rounds = Rounds(QFFL(q=np.inf, rule="weights"), {"x": np.zeros(1)}, range(3))
    after = step(rounds, [{"x": np.array([v])} for v in (1.0, 20.0, 300.0)], losses)
    np.testing.assert_array_equal(rounds.strategy.diagnostics["weights"], expected)
    np.testing.assert_allclose(after["x"], np.dot(expected, (1, 20, 300)))


def test_an_infinite_q_is_the_limit_of_a_large_q():
    losses = (0.5, 2.0, 1.9)
    large, infinite = (
        Rounds(QFFL(q=q, rule="weights"), {"x": np.zeros(1)}, range(3)) for q in (1000, np.inf)
    )
    updates = [{"x": np.array([v])} for v in (1.0, 20.0, 300.0)]
    np.testing.assert_allclose(
        step(large, updates, losses)["x"], step(infinite, updates, losses)["x"]
    )


def test_the_weight_cap_holds_for_an_infinite_q():
    strategy = QFFL(q=np.inf, rule="weights", max_client_weight=0.6)
    step(Rounds(strategy, {"x": np.zeros(1)}, range(3)), [{"x": np.ones(1)}] * 3, (1.0, 3.0, 1.0))
    np.testing.assert_allclose(strategy.diagnostics["weights"], (0.2, 0.6, 0.2))


def test_an_infinite_q_survives_all_config_formats(tmp_path):
    config = RunConfig.from_flat(WORST)
    assert config.label == "qffl:q=inf:rule=weights"
    assert StrategyConfig.parse(config.label) == [config.strategy]
    (tmp_path / "run.toml").write_text('[strategy]\nname = "qffl"\nrule = "weights"\nq = inf\n')
    assert RunConfig.from_flat(read_toml(tmp_path / "run.toml")) == config
    (tmp_path / "all.toml").write_text(config.to_toml())
    assert RunConfig.from_flat(read_toml(tmp_path / "all.toml")) == config
    typed = "strategy.name='qffl' strategy.rule='weights' strategy.q=inf"
    assert RunConfig.from_flat(parse_config_args([typed])) == config
    assert RunConfig.from_flat(dict(ConfigRecord(config.to_flat()))) == config


def test_a_stopped_run_with_an_infinite_q_resumes_identically(tmp_path):
    whole = session(resumable(tmp_path / "whole", **WORST)).run()
    folder = resume(stopped(resumable(tmp_path / "stopped", **WORST), 2))
    for name in ("model.safetensors", "diagnostics.jsonl"):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert read_run(folder).label == "qffl:q=inf:rule=weights"


def test_an_infinite_q_requires_rule_weights():
    with pytest.raises(ConfigError, match=r"^strategy.q = inf: .* rule = 'weights'"):
        RunConfig.from_flat({"strategy.name": "qffl", "strategy.q": float("inf")})
