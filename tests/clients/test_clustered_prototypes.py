"""FPL and FedPLVM with their clusters of prototypes, against loops and FINCH's adjacency matrix."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_trainers import trainer

from fairflower.exchanges import ClusterPrototypes
from fairflower.numerics.clustering import first_neighbor_means
from fairflower.strategies import Uniform
from fairflower.testing.federations import CLASSES, data
from fairflower.testing.rounds import Rounds

# --- FINCH -----------------------------------------------------------------------------------


def cosine(a, b) -> float:
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def first_neighbors(h: np.ndarray) -> list[int]:
    """The partition of FINCH's Eq. 1: i and j are linked if one is the other's first neighbor, or
    both have the same."""
    n = len(h)
    first = [
        max((j for j in range(n) if j != i), key=lambda j: cosine(h[i], h[j])) for i in range(n)
    ]
    linked = [
        [j == first[i] or first[j] == i or first[i] == first[j] for j in range(n)] for i in range(n)
    ]
    labels = [-1] * n
    for start in range(n):
        stack = [start] if labels[start] < 0 else []
        label = max(labels) + 1
        while stack:
            i = stack.pop()
            labels[i] = label
            stack += [j for j in range(n) if linked[i][j] and labels[j] < 0]
    return labels


def finch(h: np.ndarray) -> list[int]:
    partitions = [first_neighbors(h)]
    while max(partitions[-1]):
        last = np.array(partitions[-1])
        means = np.array([h[last == t].mean(0) for t in range(last.max() + 1)])
        joined = first_neighbors(means)
        partitions.append([joined[t] for t in last])
    return partitions[max(len(partitions) - 2, 0)]


@given(st.integers(2, 16), st.integers(0, 10_000))
def test_means_are_those_of_finchs_clusters(n, seed):
    h = np.random.default_rng(seed).normal(size=(n, 3))
    labels = np.array(finch(h))
    means = [h[labels == t].mean(0) for t in range(labels.max() + 1)]
    found, sizes = first_neighbor_means(h)
    assert sorted(sizes.tolist()) == sorted(np.bincount(labels).tolist())
    assert found.shape == (len(means), 3)
    np.testing.assert_allclose(np.sort(found, axis=0), np.sort(means, axis=0))


@pytest.mark.parametrize(
    ("h", "clusters"),
    [([[1.0, 2.0]], 1), ([[1.0, 0.0], [0.0, 1.0]], 1), ([[0.0, 0.0]] * 3 + [[1.0, 0.0]], 1)],
)
def test_single_vectors_pairs_and_zero_vectors(h, clusters):
    means, sizes = first_neighbor_means(np.array(h))
    assert sizes.tolist() == [len(h)]
    np.testing.assert_allclose(means, [np.mean(h, axis=0)] * clusters)


# --- the exchange ----------------------------------------------------------------------------

MODEL = {"head.weight": np.zeros((3, 2), np.float32), "head.bias": np.zeros(3, np.float32)}
NOTHING = {name: np.zeros_like(array) for name, array in MODEL.items()}


def many(mean, label, count=None) -> dict[str, np.ndarray]:
    count = np.ones(len(label), np.int64) if count is None else np.array(count)
    return {"mean": np.array(mean, np.float32), "label": np.array(label), "count": count}


def returned(mean, label, count) -> dict[str, dict[str, np.ndarray]]:
    return {"clusters": many(mean, label, count)}


def test_the_server_sends_plain_means_of_clusters_and_keeps_absent_classes():
    exchange = ClusterPrototypes()
    rounds = Rounds(Uniform(min_clients=1, exchanges=[exchange]), MODEL, range(4))
    measured = {
        0: returned([[1, 0], [3, 3]], [0, 2], [5, 1]),
        1: returned([[3, 0.1]], [0], [1]),
        2: returned([[0, 1]], [0], [90]),
        3: returned([[0.1, 1]], [0], [1]),
    }
    rounds.step(dict.fromkeys(range(4), NOTHING), measured=measured)
    sent = exchange.broadcast(2)
    np.testing.assert_allclose(sent["mean"], [[2, 0.05], [0.05, 1], [3, 3]])
    np.testing.assert_array_equal(sent["label"], [0, 0, 2])
    again = ClusterPrototypes()
    Uniform(exchanges=[again]).load_state_dict(rounds.strategy.state_dict())
    np.testing.assert_array_equal(again.broadcast(2)["mean"], sent["mean"])
    rounds.step({1: NOTHING}, measured={1: returned([[7, 7], [1, 2]], [0, 1], [1, 1])})
    sent = exchange.broadcast(3)
    order = np.argsort(sent["label"])
    np.testing.assert_array_equal(sent["mean"][order], [[7, 7], [1, 2], [3, 3]])


# --- losses ----------------------------------------------------------------------------------

PROTOTYPES = np.random.default_rng(3).normal(size=(5, 6)).astype(np.float32)
LABEL = np.array([0, 0, 2, 3, 3])  # class 1 has no prototype


def case(name: str, **arguments):
    """A client in round 2, with features and cross entropies of a batch."""
    client = trainer(name, **arguments)
    client.shared[client.exchanges[0].name] = {"mean": PROTOTYPES, "label": LABEL}
    client.begin(2)
    x, y = next(client.train_examples.eval_batches(8))
    assert set(y.tolist()) == set(range(CLASSES))
    model = copy.deepcopy(client.model)
    z = model.features(x).detach()
    entropy = torch.nn.functional.cross_entropy(model.head(z), y).item()
    return client, x, y, z.numpy().astype(np.float64), entropy


def contrast(likeness: list[float], label: int) -> float:
    own = sum(math.exp(s) for s, c in zip(likeness, LABEL, strict=True) if c == label)
    return -math.log(own / sum(map(math.exp, likeness)))


@pytest.mark.parametrize(("variant", "scale"), [("released", 6), ("paper", 1)])
def test_fpls_loss_matches_a_loop(variant, scale):
    client, x, y, z, expected = case("fpl", tau=0.3, variant=variant)
    for features, label in zip(z, y.tolist(), strict=True):
        if label in LABEL:
            likeness = [cosine(features, p) / 0.3 for p in PROTOTYPES]
            away = features - PROTOTYPES[label == LABEL].mean(0)
            expected += (contrast(likeness, label) + away @ away / scale) / len(y)
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["fpl", "fedplvm"])
def test_a_batch_without_known_classes_has_finite_gradients(name):
    client, x, y, _, _ = case(name)
    x, y = (torch.cat([a[y == 1]] * 2) for a in (x, y))
    client.loss(x, y).backward()
    assert all(p.grad.isfinite().all() for p in client.model.parameters())


def test_fpl_returns_the_mean_features_of_fedproto():
    client, plain = (trainer(name, data=data(classes=3)) for name in ("fpl", "fedproto"))
    client.train(1)
    plain.train(1)  # no prototypes yet: the same model
    returned = client.returns["clusters"]
    np.testing.assert_array_equal(returned["label"], [0, 1, 2])
    for name, array in plain.returns["prototypes"].items():
        np.testing.assert_array_equal(returned[name], array[:3])


def test_fedplvms_loss_matches_a_loop():
    client, x, y, z, expected = case("fedplvm", lambda_=3.0, alpha=0.5, tau=0.4)
    for features, label in zip(z, y.tolist(), strict=True):
        if label in LABEL:
            likeness = [max(cosine(features, p), 1e-4) ** 0.5 / 0.4 for p in PROTOTYPES]
            away = 1 - cosine(features, PROTOTYPES[label == LABEL].mean(0))
            expected += 3 * (contrast(likeness, label) + 2 * away**2) / len(y)
    assert client.loss(x, y).item() == pytest.approx(expected, rel=1e-5)


def test_fedplvm_returns_the_clusters_of_its_features():
    client = trainer("fedplvm", data=data(train=40, classes=3))
    client.train(1)
    returned = client.returns["clusters"]
    model, split = client.model.eval(), client.data.train
    x = torch.tensor((split.x / 255 - 0.5) / 0.5, dtype=torch.float32)
    with torch.no_grad():
        z = model.features(x).double().numpy()
    assert set(returned["label"].tolist()) == {0, 1, 2}
    for c in range(3):
        own = z[split.y == c]
        labels = np.array(finch(own))
        means = [own[labels == t].mean(0) for t in range(labels.max() + 1)]
        mine = returned["label"] == c
        assert returned["count"][mine].sum() == len(own)
        np.testing.assert_allclose(
            np.sort(returned["mean"][mine], 0), np.sort(means, 0), rtol=1e-4, atol=1e-6
        )


def test_the_server_clusters_all_clients_clusters():
    exchange = ClusterPrototypes()
    rounds = Rounds(Uniform(min_clients=1, exchanges=[exchange]), MODEL, range(2))
    measured = {
        0: {"clusters": many([[1, 0], [0, 1], [3, 3]], [0, 0, 2], [5, 1, 9])},
        1: {"clusters": many([[3, 0.1], [0.1, 1]], [0, 0])},
    }
    rounds.step(dict.fromkeys(range(2), NOTHING), measured=measured)
    sent = exchange.broadcast(2)
    np.testing.assert_allclose(sent["mean"], [[2, 0.05], [0.05, 1], [3, 3]])
    np.testing.assert_array_equal(sent["label"], [0, 0, 2])


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"mean": np.ones((1, 2)), "count": np.ones(1, int)}, "expected 'mean' [P, d]"),
        (many([[1, 2, 3]], [0]), "(3, 2)"),
        (many([[1, 2]], [3]), "classes 'label'"),
        (many([[1, 2]], [-1]), "classes 'label'"),
        (many([[1, 2]], [0.5]), "classes 'label'"),
        (many([[np.nan, 2]], [0]), "finite"),
        (many([[1, 2]], [0], [-1]), "non-negative"),
        (many([[1, 2]], [0], [101]), "above num-examples"),
    ],
)
def test_invalid_clusters_drop_the_client_with_the_reason(arrays, reason):
    strategy = Uniform(min_clients=1, exchanges=[ClusterPrototypes()])
    rounds = Rounds(strategy, MODEL, range(2))
    measured = {0: {"clusters": many([[1, 2]], [2])}, 1: {"clusters": arrays}}
    rounds.step(dict.fromkeys(range(2), NOTHING), measured=measured)
    assert strategy.client_ids == (0,)
    assert reason in strategy.dropped[1]
