"""Clusters of clients: separable types are found, and names persist between rounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture
from threadpoolctl import threadpool_info, threadpool_limits

from fairflower.numerics.clustering import Clusters, bic, cluster, principal

#: Clients of each type: FedGCR's federations of Digit-Five, and others.
FEDERATIONS = {
    "DIF 1": (2, 2, 2, 2, 2),
    "DIF 5": (5, 3, 2, 2, 1),
    "DIF 10": (10, 6, 3, 2, 1),
    "three": (8, 3, 1),
    "eight": (3, 3, 3, 3, 2, 2, 2, 2),
}


def representations(counts, distance: float, seed: int = 0, d: int = 768) -> tuple:
    """Return vectors of clients, far from the origin, and the clients' types.

    Centers of types are ``distance`` apart; a client is 1 from its center, in directions of
    its own and in five shared ones.
    """
    random = np.random.default_rng(seed)
    types = np.repeat(np.arange(len(counts)), counts)
    centers = random.normal(size=(len(counts), d)) * distance / np.sqrt(2 * d)
    shared = random.normal(size=(len(types), 5)) @ random.normal(size=(5, d)) / np.sqrt(10 * d)
    own = random.normal(size=(len(types), d)) / np.sqrt(2 * d)
    return 10 + centers[types] + shared + own, types


@pytest.mark.few(5)
@pytest.mark.parametrize("federation", FEDERATIONS)
@pytest.mark.parametrize("known", [True, False])
def test_separable_types_are_found_exactly(federation, known):
    counts = FEDERATIONS[federation]
    for seed in range(3):
        h, types = representations(counts, distance=5, seed=seed)
        clusters = cluster(h, range(len(h)), len(counts) if known else None, seed=seed)
        assert adjusted_rand_score(types, clusters.ids) == 1


@pytest.mark.parametrize("number", [6, 7])
def test_extra_clusters_contain_clients_of_one_type_only(number):
    """Clustering accuracy, as the paper counts it, is 100 % from five clusters on."""
    for federation in ("DIF 1", "DIF 5", "DIF 10"):
        h, types = representations(FEDERATIONS[federation], distance=5)
        ids = cluster(h, range(len(h)), number).ids
        assert len(np.unique(ids)) == number
        assert all(len(np.unique(types[ids == c])) == 1 for c in np.unique(ids))


def test_clients_are_weighted_by_their_number_of_images():
    """Means of n images have errors of 20 / sqrt(n); those of few images must not hide types."""
    random = np.random.default_rng(5)
    sizes = np.tile([3.0, 10.0, 300.0, 400.0, 500.0], 4)
    types = np.repeat(np.arange(4), 5)
    centers = 3 * np.eye(4, 64)
    off = random.normal(size=(20, 2)) * 20 / np.sqrt(sizes)[:, None]
    h = centers[types] + np.pad(off, ((0, 0), (62, 0)))
    many = sizes >= 300
    ids = cluster(h, range(20), 4, sizes=sizes).ids
    assert adjusted_rand_score(types[many], ids[many]) == 1
    alike = cluster(h, range(20), 4).ids
    assert adjusted_rand_score(types[many], alike[many]) < 1


def test_principal_coordinates_with_weights_equal_those_with_copies():
    """A client of three images pulls the axes as three clients of one would."""
    random = np.random.default_rng(6)
    h, sizes = random.normal(size=(7, 12)), np.array([1.0, 3, 1, 2, 1, 1, 2])
    copies = np.repeat(np.arange(7), sizes.astype(int))
    expected = principal(h[copies], 3)[np.unique(copies, return_index=True)[1]]
    np.testing.assert_allclose(principal(h, 3, sizes), expected, atol=1e-9)


def test_one_type_is_one_cluster():
    for seed in range(3):
        h, _ = representations((12,), distance=5, seed=seed)
        h += np.random.default_rng(seed).normal(size=h.shape)  # of no direction
        assert set(cluster(h, range(12)).ids) == {0}


def test_clusters_depend_only_on_the_seed():
    h, _ = representations(FEDERATIONS["DIF 10"], distance=1)
    one = cluster(h, range(len(h)), 5, seed=3)
    np.random.default_rng().normal(size=3)
    np.random.seed(1)
    again = cluster(h, range(len(h)), 5, seed=3)
    assert one.ids.tolist() == again.ids.tolist()
    assert one.bic == again.bic


def test_clusters_do_not_depend_on_scale_and_offset_of_the_vectors():
    h, _ = representations(FEDERATIONS["DIF 5"], distance=2)
    expected = cluster(h, range(len(h)), None)
    for other in (1e-6 * h, 1e6 * h, h - 1000):
        clusters = cluster(other, range(len(h)), None)
        assert clusters.ids.tolist() == expected.ids.tolist()


# --- Gaussian mixture --------------------------------------------------------------------

every_clustering = pytest.mark.parametrize("clustering", ["kmeans", "gmm"])


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("d", "seeds"), [(5, 6), (40, 6), pytest.param(768, 1, marks=pytest.mark.slow)]
)
def test_the_mixture_matches_scikit_learns_defaults(d, seeds):
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        K, T = int(random.integers(6, 23)), int(random.integers(2, 6))
        h = 10 + random.normal(size=(T, d))[random.integers(T, size=K)] * 0.7
        h = h + random.normal(size=(K, d)) / np.sqrt(d)
        expected = GaussianMixture(T, random_state=seed).fit_predict(h)
        ids = cluster(h, range(K), T, clustering="gmm", seed=seed).ids
        assert adjusted_rand_score(expected, ids) == 1
        weighed = cluster(
            h, range(K), T, clustering="gmm", seed=seed, sizes=10.0 ** random.random(K)
        )
        assert weighed.ids.tolist() == ids.tolist()


def test_the_mixture_is_fitted_by_one_thread(monkeypatch):
    """Sums of several threads would depend on their number."""
    threads, fit = [], GaussianMixture.fit_predict

    def spy(mixture, x):
        threads.extend(pool["num_threads"] for pool in threadpool_info())
        return fit(mixture, x)

    monkeypatch.setattr(GaussianMixture, "fit_predict", spy)
    h, _ = representations(FEDERATIONS["DIF 5"], distance=2)
    with threadpool_limits(2):
        cluster(h, range(len(h)), 5, clustering="gmm")
    assert set(threads) == {1}


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e3, 1e6, 1e12])
def test_a_covariance_spoiled_by_rounding_raises_no_error(scale):
    """With long vectors, the 1e-6 on the diagonal is lost by rounding."""
    h, types = representations(FEDERATIONS["DIF 5"], distance=9)
    clusters = cluster(scale * h, range(len(h)), 5, clustering="gmm")
    assert scale < 1 or adjusted_rand_score(types, clusters.ids) == 1


# --- few clients, equal clients -----------------------------------------------------------


@every_clustering
@pytest.mark.parametrize("number", [None, 1, 5])
def test_a_single_client_forms_a_cluster(number, clustering):
    clusters = cluster(np.ones((1, 8)), [17], number, clustering=clustering)
    assert clusters.ids.tolist() == [0]
    assert clusters.members == {17: 0}
    assert clusters.centers[0].tolist() == [1.0] * 8


@every_clustering
@pytest.mark.parametrize("clients", [2, 3])
def test_fewer_clients_than_clusters_form_a_cluster_each(clients, clustering):
    h = np.random.default_rng(0).normal(size=(clients, 768))
    clusters = cluster(h, range(clients), 5, clustering=clustering)
    assert clusters.ids.tolist() == list(range(clients))


@every_clustering
@pytest.mark.parametrize("number", [None, 1, 3])
def test_identical_vectors_form_one_cluster(number, clustering):
    clusters = cluster(np.full((6, 8), 0.1), range(6), number, clustering=clustering)
    assert clusters.ids.tolist() == [0] * 6


@every_clustering
def test_the_number_of_distinct_vectors_limits_the_clusters(recwarn, clustering):
    h = np.repeat(np.random.default_rng(0).normal(size=(3, 8)), (4, 2, 1), axis=0)
    for number in (3, 5, None):
        clusters = cluster(h, range(7), number, clustering=clustering)
        assert clusters.ids.tolist() == [0, 0, 0, 0, 1, 1, 2]
    assert not recwarn.list


@given(
    st.integers(1, 12),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(1, 8)),
    st.integers(0, 9),
    st.sampled_from(["kmeans", "gmm"]),
)
def test_every_client_has_a_cluster_for_any_vectors(clients, different, number, seed, clustering):
    random = np.random.default_rng(seed)
    h = random.normal(size=(different, 5))[random.integers(different, size=clients)]
    ids = [int(i) for i in 3 + random.permutation(20)[:clients]]
    clusters = cluster(h, sorted(ids), number, seed=seed, clustering=clustering)
    assert clusters.members == dict(zip(sorted(ids), clusters.ids.tolist(), strict=True))
    used = np.unique(clusters.ids)
    assert used.tolist() == list(range(len(used)))
    assert len(used) <= (number or clients)
    for c in used:
        np.testing.assert_allclose(clusters.centers[c], h[clusters.ids == c].mean(axis=0))


# --- names over several rounds -------------------------------------------------------------


def rounds(plan, number: int | None = 3) -> list[Clusters]:
    """Cluster rounds of (clients, vectors), one after another."""
    done, members, centers = [], {}, {}
    for clients, h in plan:
        done.append(cluster(h, clients, number, members=members, centers=centers))
        members, centers = done[-1].members, done[-1].centers
    return done


def line(*places: float) -> np.ndarray:
    """Vectors in two dimensions, on a line."""
    return np.array([[x, 0.1 * i] for i, x in enumerate(places)])


def test_cluster_names_persist_under_rotations():
    random = np.random.default_rng(4)
    d = 96
    h, types = representations(FEDERATIONS["DIF 10"], distance=6, d=d)
    plan = []
    for _ in range(6):
        h = h @ np.linalg.qr(random.normal(size=(d, d)))[0]  # all centers move
        plan.append((range(len(h)), h))
    for clusters in rounds(plan, 5):
        assert clusters.ids.tolist() == types.tolist()


def test_first_names_follow_the_order_of_the_clients():
    (clusters,) = rounds([(range(6), line(9, 0, 5, 9, 5, 0))])
    assert clusters.ids.tolist() == [0, 1, 2, 0, 2, 1]


def test_only_a_client_that_changes_its_type_changes_its_cluster():
    first, second = rounds([(range(6), line(0, 0, 5, 5, 9, 9)), (range(6), line(5, 0, 5, 5, 9, 9))])
    assert first.ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert second.ids.tolist() == [1, 0, 1, 1, 2, 2]


def test_a_cluster_without_present_clients_keeps_its_members():
    everybody, some, again = rounds(
        [
            (range(6), line(0, 0, 5, 5, 9, 9)),
            ([0, 1, 4, 5], line(0, 0, 9, 9)),
            (range(6), line(0, 0, 5, 5, 9, 9)),
        ],
        number=None,
    )
    assert everybody.ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert some.ids.tolist() == [0, 0, 2, 2]
    assert some.members[2] == some.members[3] == 1
    np.testing.assert_allclose(some.centers[1], everybody.centers[1])
    assert again.ids.tolist() == everybody.ids.tolist()


def test_new_clients_are_named_by_the_nearest_centers():
    _, clusters = rounds(
        [(range(6), line(0, 0, 5, 5, 9, 9)), (range(10, 16), line(9, 9, 0, 0, 5, 5))]
    )
    assert clusters.ids.tolist() == [2, 2, 0, 0, 1, 1]
    h = line(0, 0, 5, 5, 9, 9)  # also for vectors equal to a center's members
    _, clusters = rounds([(range(6), h), (range(10, 16), h[[4, 5, 0, 1, 2, 3]])])
    assert clusters.ids.tolist() == [2, 2, 0, 0, 1, 1]


@pytest.mark.parametrize(("number", "name"), [(None, 3), (4, 3), (3, 2)])
def test_new_clients_far_from_all_centers_get_a_free_name(number, name):
    plan = [(range(6), line(0, 0, 5, 5, 9, 9)), ([0, 1, 10, 11], line(0, 0, 30, 30))]
    first = cluster(plan[0][1], plan[0][0], 3)
    clusters = cluster(plan[1][1], plan[1][0], number, members=first.members, centers=first.centers)
    new_clients = clusters.ids[2:]
    assert clusters.ids[:2].min() == 0
    assert (new_clients == name).any() if number else (new_clients == name).all()
    assert number is None or clusters.ids.max() < number


def test_a_new_client_gets_a_free_name_with_few_clients_present():
    first = cluster(line(0, 0, 5, 5, 9, 9), range(6), 3)
    clusters = cluster(line(0, 30), [0, 10], 4, members=first.members, centers=first.centers)
    assert clusters.ids.tolist() == [0, 3]


def test_members_decide_names_before_centers():
    """The two clusters swap places."""
    _, clusters = rounds([(range(4), line(0, 0, 9, 9)), (range(4), line(9, 9, 0, 0))], number=2)
    assert clusters.ids.tolist() == [0, 0, 1, 1]


def test_an_additional_cluster_gets_a_new_name():
    (_, clusters) = rounds(
        [(range(4), line(0, 0, 9, 9)), (range(6), line(0, 0, 9, 9, 50, 50))], number=None
    )
    assert clusters.ids.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_cluster_without_members_is_forgotten():
    before = cluster(line(0, 0, 4, 4, 90, 90), range(6), 3)
    for clients, left in ((range(6), 2), (range(4), 2)):  # members are absent ones, too
        h = line(0, 0, 0, 0, 90, 90)[: len(clients)]
        number = len(clients) // 2 - 1
        clusters = cluster(h, clients, number, members=before.members, centers=before.centers)
        assert set(clusters.centers) == set(clusters.members.values())
        assert len(clusters.centers) == left


def test_names_persist_if_vectors_change_their_length():
    h = np.random.default_rng(0).normal(size=(4, 9)) * 0.01 + np.repeat([[0.0], [9.0]], 2, axis=0)
    _, clusters = rounds([(range(4), line(0, 0, 9, 9)), (range(4), h)], number=2)
    assert clusters.ids.tolist() == [0, 0, 1, 1]


# --- BIC and principal coordinates ---------------------------------------------------------


def test_bic_uses_the_pooled_variance():
    """The residuals of a regression on the clusters' indicators, K - T degrees of freedom."""
    h, labels = np.random.default_rng(2).normal(size=(9, 4)), np.array([0, 0, 0, 1, 1, 1, 1, 2, 2])
    indicators = np.eye(3)[labels]
    _, residuals, _, _ = np.linalg.lstsq(indicators, h)
    variance = residuals.sum() / (4 * (9 - 3))
    assert bic(h, labels) == pytest.approx(9 * np.log(4 * variance) + 3 * np.log(9))


def test_bic_uses_the_weights_of_clients():
    """Weighted least squares: rows times the root of their weight."""
    random = np.random.default_rng(3)
    h, labels = random.normal(size=(6, 4)), np.array([0, 0, 0, 1, 1, 1])
    weights = np.array([1.0, 4.0, 9.0, 16.0, 1.0, 25.0])
    rows = np.sqrt(weights / weights.mean())[:, None]
    residuals = np.linalg.lstsq(rows * np.eye(2)[labels], rows * h)[1]
    expected = 6 * np.log(residuals.sum() / 4) + 2 * np.log(6)
    assert bic(h, labels, weights) == pytest.approx(expected)
    assert bic(h, labels, np.full(6, 7.0)) == pytest.approx(bic(h, labels))


def test_a_type_with_few_images_is_found():
    """Its clients weigh less, but are far from all others."""
    sizes = np.repeat([1000.0, 500.0, 30.0], (10, 6, 2))
    for seed in range(3):
        h, types = representations((10, 6, 2), distance=5, seed=seed)
        random = np.random.default_rng(seed)
        h = h + random.normal(size=h.shape) * np.sqrt(100 / (768 * sizes))[:, None]
        assert adjusted_rand_score(types, cluster(h, range(18), 3, sizes=sizes).ids) == 1


def test_bic_is_infinite_if_every_client_is_a_cluster():
    h = np.random.default_rng(2).normal(size=(4, 3))
    assert bic(h, np.arange(4)) == np.inf
    assert np.isfinite(bic(np.ones((4, 3)), np.zeros(4, int)))


def test_principal_coordinates_keep_distances_and_the_order_of_variances():
    h = np.random.default_rng(3).normal(size=(6, 40))
    x = principal(h, 5)
    between = lambda v: np.linalg.norm(v[:, None] - v[None], axis=2)  # noqa: E731
    np.testing.assert_allclose(between(x), between(h), rtol=1e-9, atol=1e-9)
    assert (np.diff(x.var(axis=0)) <= 0).all()
    np.testing.assert_allclose(principal(h, 2), x[:, :2])
    np.testing.assert_allclose(principal(-h, 5), -x, atol=1e-9)


def test_missing_axes_are_zero():
    assert principal(np.ones((1, 3)), 2).tolist() == [[0, 0]]
    assert principal(np.array([[1.0], [3.0]]), 2)[:, 1].tolist() == [0, 0]
