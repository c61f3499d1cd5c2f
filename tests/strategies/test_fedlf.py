"""FedLF: each layer against a general solver, merged layers, and absent clients."""

from __future__ import annotations

import numpy as np
import pytest
from reference_solvers import min_norm_point

from fairflower.strategies import FedLF
from fairflower.testing.rounds import Rounds

MODEL = {
    "one.weight": np.zeros((2, 3)),
    "one.bias": np.zeros(2),
    "two.weight": np.zeros(9),
    "two.running_mean": np.zeros(2),
}
LAYERS = (("one.weight", "one.bias"), ("two.weight",))
LOSSES = np.array([0.2, 1.0, 3.0])


def moves(seed: int, clients: int = 3) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    return [
        {name: (1 + k) * random.normal(size=array.shape) for name, array in MODEL.items()}
        for k in range(clients)
    ]


def play(rounds: Rounds, updates, losses) -> dict[str, np.ndarray]:
    before = rounds.model
    after = rounds.step(updates, metrics={k: {"received_loss": float(losses[k])} for k in updates})
    return {name: after[name] - before[name] for name in before}


def start(model=MODEL, clients: int = 3, **arguments) -> Rounds:
    return Rounds(FedLF(min_clients=1, **arguments), model, range(clients))


def flat(update, names) -> np.ndarray:
    return np.concatenate([np.asarray(update[name]).ravel() for name in names])


def direction(present, names, F, released=False, absent=()) -> np.ndarray:
    """Return a layer's direction as in the paper or its code, from the updates themselves."""
    g = np.array([flat(update, names) for update in present])
    old = np.array([flat(update, names) for update in absent]).reshape(len(absent), g.shape[1])
    F_norm, ones = np.linalg.norm(F), np.ones(len(F))
    h = (F @ ones * F / F_norm - ones * F_norm) / np.linalg.norm(ones) / F_norm**2  # Eq. 5
    if not released:
        return min_norm_point(np.vstack([g, old, h @ g]))
    norms = np.linalg.norm(g, axis=1, keepdims=True)
    mean, g = norms.mean(), g / norms
    fair = h @ g
    old /= np.linalg.norm(old, axis=1, keepdims=True)
    return mean * min_norm_point(np.vstack([g, old, fair / np.linalg.norm(fair)]))


@pytest.mark.parametrize("variant", ["paper", "released"])
@pytest.mark.parametrize("seed", range(3))
def test_each_layer_moves_along_the_shortest_vector_of_its_hull(variant, seed):
    updates = moves(seed)
    actual = play(start(variant=variant), dict(enumerate(updates)), LOSSES)
    d = [direction(updates, names, LOSSES, variant == "released") for names in LAYERS]
    whole, names = np.concatenate(d), [name for layer in LAYERS for name in layer]
    mean = np.mean([flat(update, names) for update in updates], axis=0)
    expected = whole * np.linalg.norm(mean) / np.linalg.norm(whole)
    np.testing.assert_allclose(flat(actual, names), expected, rtol=5e-3, atol=5e-3)
    for layer in LAYERS:
        assert all(flat(update, layer) @ flat(actual, layer) > 0 for update in updates)
    short = [{name: a / 1000 for name, a in update.items()} for update in updates]
    shorter = play(start(variant=variant), dict(enumerate(short)), LOSSES)
    np.testing.assert_allclose(1000 * flat(shorter, names), flat(actual, names), rtol=1e-6)


def test_arrays_with_numbers_as_names_count_as_layers():
    """As in an app that sends lists of arrays, without names."""
    updates = [{"0": a["0.weight"], "1": a["1.weight"]} for a in map(dotted, range(2))]
    named = play(
        start({n: np.zeros(3) for n in ("0.weight", "1.weight")}, 2),
        {k: dotted(k) for k in range(2)},
        [1.0, 3.0],
    )
    numbered = play(
        start({n: np.zeros(3) for n in ("0", "1")}, 2), dict(enumerate(updates)), [1.0, 3.0]
    )
    for name, array in numbered.items():
        np.testing.assert_array_equal(array, named[f"{name}.weight"])


def dotted(seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {name: random.normal(size=3) for name in ("0.weight", "1.weight")}


def test_batchnorm_statistics_are_averaged_equally():
    updates = moves(1)
    actual = play(start(), dict(enumerate(updates)), LOSSES)["two.running_mean"]
    mean = np.mean([update["two.running_mean"] for update in updates], axis=0)
    np.testing.assert_allclose(actual, mean, rtol=1e-6)


@pytest.mark.parametrize(
    ("sizes", "blocks"),
    [
        ({"a.bias": 1, "b.weight": 6, "c.bias": 1}, [slice(0, 8)]),
        # A last layer is merged with the previous one.
        ({"a.weight": 6, "b.weight": 6, "c.bias": 1}, [slice(0, 6), slice(6, 13)]),
    ],
)
def test_a_layer_without_a_direction_is_merged_with_its_neighbor(sizes, blocks):
    narrow = {name: np.zeros(size) for name, size in sizes.items()}
    random, equal = np.random.default_rng(5), np.ones(2)
    updates = [{n: random.normal(size=a.shape) for n, a in narrow.items()} for _ in range(2)]
    for n in (name for name in narrow if name.endswith("bias")):
        updates[0][n], updates[1][n] = np.array([0.5]), np.array([-0.4])
    actual = play(start(narrow, 2), dict(enumerate(updates)), equal)
    g = np.array([flat(update, narrow) for update in updates])
    d = np.concatenate([min_norm_point(g[:, block]) for block in blocks])
    expected = d * np.linalg.norm(g.mean(axis=0)) / np.linalg.norm(d)
    np.testing.assert_allclose(flat(actual, narrow), expected, rtol=1e-3, atol=1e-4)


def test_equal_updates_with_unequal_losses_give_no_step():
    same = dict.fromkeys(range(3), moves(2)[0])
    actual = play(start(), same, LOSSES)
    assert all(not actual[name].any() for layer in LAYERS for name in layer)
    actual = play(start(), same, np.ones(3))
    np.testing.assert_allclose(actual["one.weight"], same[0]["one.weight"], rtol=1e-4)


@pytest.mark.parametrize(("variant", "ages"), [("paper", (1, 2)), ("released", (2,))])
def test_absent_clients_count_for_a_limited_number_of_rounds(variant, ages):
    """With two of four clients per round, updates of one or two rounds ago count.

    The authors' code counts the clients known before a round: in round 2 only two, so none count.
    """
    updates, F = moves(4, 4), np.array([0.3, 2.0, 1.0, 1.0])
    rounds, released = start(clients=4, variant=variant), variant == "released"
    play(rounds, {k: updates[k] for k in (2, 3)}, F)
    for age in (1, 2, 3):
        actual = play(rounds, {k: updates[k] for k in (0, 1)}, F)
        absent = updates[2:] if age in ages else ()
        d = [direction(updates[:2], names, F[:2], released, absent) for names in LAYERS]
        one, two = (np.linalg.norm(flat(actual, names)) for names in LAYERS)
        for part, names, norm in zip(d, LAYERS, (one, two), strict=True):
            expected = part * norm / np.linalg.norm(part)
            np.testing.assert_allclose(flat(actual, names), expected, rtol=5e-3, atol=5e-3)


def test_a_zero_update_does_not_affect_other_clients():
    updates = moves(6)
    updates[1] = {name: np.zeros_like(array) for name, array in MODEL.items()}
    actual = play(start(), dict(enumerate(updates)), np.ones(3))
    for layer in LAYERS:
        d = min_norm_point(np.array([flat(updates[k], layer) for k in (0, 2)]))
        cosine = d @ flat(actual, layer) / np.linalg.norm(d) / np.linalg.norm(flat(actual, layer))
        assert cosine == pytest.approx(1, abs=1e-4)


def test_a_model_without_parameters_has_its_statistics_averaged():
    rounds = start({"running_mean": np.zeros(2)})
    updates = {k: {"running_mean": np.array([k, 1.0])} for k in range(3)}
    actual = play(rounds, updates, LOSSES)
    np.testing.assert_allclose(actual["running_mean"], [1, 1])
