"""Exchanges that store what clients return, or what is merged, and send it back."""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort, clip_factors
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.records import InvalidReply, NotFinite, check_arrays, is_real, norm
from fairflower.errors import require
from fairflower.numerics.clustering import first_neighbor_means


class ControlVariates(Exchange):
    """SCAFFOLD's c: the mean of all clients' control variates c_k (Karimireddy et al., ICML 2020).

    Clients return the changes c_k+ - c_k. The server adds them to c, independently of the weights
    of the models: c <- c + (1/N) sum_{k in cohort} (c_k+ - c_k), where N is the number of all
    clients (the paper's Eq. 5). The server's step size is 1.

    As in the paper, c is a plain mean. Once the control variates have converged, every client
    follows the mean gradient, so a run converges to the optimum of the clients' mean loss, whatever
    weights the strategy gives. (FedDyn's authors weigh c in their code of SCAFFOLD.) Clients keep
    whole changes, even if bounds clip what the server adds to c; then c is no longer the mean, and
    a run does not converge to this optimum.
    """

    name = "control"
    STATE = ("c",)

    def __init__(self) -> None:
        self.c: Arrays = {}

    def broadcast(self, server_round: int) -> Arrays:
        return self.c

    def bound(self, returned: Sequence[Arrays], median: float) -> Sequence[Arrays]:
        factors = clip_factors(np.array([norm(r) for r in returned]), median=median)
        return [
            {name: np.asarray(f * array, array.dtype) for name, array in changes.items()}
            for f, changes in zip(factors, returned, strict=True)
        ]

    def collect(self, cohort: Cohort) -> None:
        for name in cohort.parameters:
            change = np.zeros(cohort.received[name].shape, np.float64)
            for returned in cohort.measured[self.name]:
                change += returned[name]
            c = self.c.get(name, 0) + change / cohort.population
            self.c[name] = np.asarray(c, cohort.received[name].dtype)


class DynamicRegularizer(Exchange):
    """FedDyn's h, which corrects every merged model (Acar et al., ICLR 2021, Algorithm 1)::

        h <- h - alpha (1/N) sum_{k in cohort} (theta_k - theta)
        theta <- mean_{k in cohort} theta_k - h / alpha

    N is the number of all clients. The server stores H = -h / alpha, a sum of model updates, so
    only clients need alpha. No arrays are sent or returned.

    Here the strategy's merged model replaces the mean, in the model and in H: with K of N clients,
    H <- H + (K/N) (merged - theta). With ``uniform`` this is Algorithm 1. With other fixed weights
    w, the method converges to a point where sum_k w_k grad L_k = 0 (exactly so only if all
    clients take part); so does the authors' code, whose weights are the numbers of examples. The
    printed equations would converge to the optimum of the mean loss with any strategy. Buffers are
    not corrected. Clients keep the sums of their whole updates, even if bounds clip what is merged;
    then H differs from the clients' sums, and a run does not converge to this point.
    """

    name = "regularizer"
    returned = False
    STATE = ("H",)

    def __init__(self) -> None:
        self.H: Arrays = {}

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        share = np.float32(len(cohort) / cohort.population)
        corrected = dict(merged)
        for name in cohort.parameters:
            step = share * (merged[name] - cohort.received[name])
            self.H[name] = self.H[name] + step if name in self.H else step
            corrected[name] = (merged[name] + self.H[name]).astype(merged[name].dtype)
        return corrected


class ClientArrays(Exchange):
    """Base class of exchanges that keep the newest arrays of every client.

    The server keeps them from the client's last cohort, and does not merge them.
    """

    STATE: ClassVar[tuple[str, ...]] = ("arrays",)

    def __init__(self) -> None:
        self.arrays: dict[int, Arrays] = {}  # client -> its arrays

    def joined(self, join: Callable[[list[NDArray[Any]]], NDArray[Any]]) -> Arrays:
        """Return all clients' arrays, joined in the order of client ids; empty without clients."""
        kept = [self.arrays[client] for client in sorted(self.arrays)]
        return {name: join([arrays[name] for arrays in kept]) for name in kept[0]} if kept else {}

    def collect(self, cohort: Cohort) -> None:
        for client, arrays in zip(cohort.client_ids, cohort.measured[self.name], strict=True):
            self.arrays[client] = {name: np.array(array) for name, array in arrays.items()}


class PersonalArrays(ClientArrays):
    """Each client's own arrays, which the server stores and sends back to that client alone.

    Clients return these arrays with the model, and get their newest arrays with the next train or
    test message. A client that has never been in a cohort gets none, and starts with the network's
    initial values.

    Notes
    -----
    The server has to know which client runs on a node, from ``FairStrategy.enroll`` or from a reply
    since the server started.
    """

    name = "personal"
    remedy = "Set client.keep = 'client', so that these arrays do not leave the client"

    def __init__(self) -> None:
        super().__init__()
        self.initial: Arrays | None = None

    def prepare(self, local: Arrays) -> None:
        self.initial = local

    def arrays_for(self, client_id: int) -> Arrays:
        return self.arrays.get(client_id, {})

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        zeros = {name: np.zeros_like(array) for name, array in arrays.items()}
        return check_arrays(arrays, zeros if self.initial is None else self.initial)


class AveragedBatches(ClientArrays):
    """Averages of batches of every client's images and labels (FedMix, Yoon et al., ICLR 2021).

    Clients return ``images`` [M, C, H, W] and ``labels`` [M, classes]. The server sends the latest
    arrays of every client that has been in a cohort, concatenated in the order of client ids.
    """

    name = "averages"
    mean_of = "batch"

    def broadcast(self, server_round: int) -> Arrays:
        return self.joined(np.concatenate)

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        if set(arrays) != {"images", "labels"}:
            raise InvalidReply(f"expected the arrays 'images' and 'labels', got {sorted(arrays)}")
        images, labels = arrays["images"], arrays["labels"]
        if images.ndim != 4 or labels.ndim != 2 or len(images) != len(labels):
            raise InvalidReply(
                f"'images' has shape {images.shape} and 'labels' {labels.shape}, expected "
                "[M, C, H, W] and [M, classes]"
            )
        if len(images) > num_examples:
            raise InvalidReply(
                f"it sent {len(images)} averages, more than its {num_examples:.0f} images"
            )
        shape, kept = self.shape_of(arrays), next(iter(self.arrays.values()), arrays)
        if shape != (known := self.shape_of(kept)):
            raise InvalidReply(f"its averages have shape {shape}, but other clients sent {known}")
        for name, array in arrays.items():
            if array.dtype != np.float32 or not np.isfinite(array).all():
                raise InvalidReply(f"{name!r} holds values that are not finite 32-bit numbers")
        if (labels < 0).any() or not np.allclose(labels.sum(1), 1, atol=1e-4):
            raise InvalidReply("each row of 'labels' must hold non-negative numbers that sum to 1")
        return arrays

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        return (*arrays["images"].shape[1:], *arrays["labels"].shape[1:])


#: Largest count of a class on a client; sums of larger counts would overflow.
MAX_IMAGES = 2**40


class Prototypes(Exchange):
    """Mean feature vector of every class over all clients' images (FedProto, FedProc).

    Clients return the class means of their images, ``mean`` [C, d], and the numbers of images,
    ``count`` [C]. The server averages the means with these counts as weights (FedProto's Eq. 6; its
    released code weights clients equally) and sends ``mean`` and ``count``. A class without images
    in a round keeps its prototype. A class without a prototype has count 0.
    """

    name = "prototypes"
    mean_of = "class"
    STATE: ClassVar[tuple[str, ...]] = ("mean", "count")

    def __init__(self) -> None:
        self.mean: NDArray[np.float32] | None = None
        self.count: NDArray[np.int64] | None = None

    def broadcast(self, server_round: int) -> Arrays:
        if self.mean is None or self.count is None:
            return {}
        return {"mean": self.mean, "count": self.count}

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        if set(arrays) != {"mean", "count"}:
            raise InvalidReply(f"expected the arrays 'mean' and 'count', got {sorted(arrays)}")
        mean, count = arrays["mean"], arrays["count"]
        # The linear head of a network has one row per class and one column per feature.
        known = [a.shape for a in trained.values() if a.ndim == 2]
        shapes = known if self.mean is None else [self.mean.shape]
        if mean.shape not in shapes or count.shape != mean.shape[:1]:
            raise InvalidReply(
                f"'mean' has shape {mean.shape} and 'count' {count.shape}, expected one row per "
                f"class and one column per feature, {' or '.join(map(str, shapes))}"
            )
        with np.errstate(over="ignore"):
            finite = is_real(mean) and np.isfinite(mean.astype(np.float32)).all()
        if not finite:
            wrong = NotFinite if is_real(mean) else InvalidReply
            raise wrong("'mean' holds values that are not finite 32-bit numbers")
        if count.dtype.kind != "i" or (count < 0).any():
            raise InvalidReply("'count' must hold non-negative integers")
        if (count > MAX_IMAGES).any():
            raise InvalidReply(
                f"'count' has {count.max()} images for a class; expected at most 2**40"
            )
        if count.sum() > num_examples:
            raise InvalidReply(f"'count' has {count.sum()} images in total, above num-examples")
        return arrays

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        return arrays["mean"].shape

    def bound(self, returned: Sequence[Arrays], median: float) -> Sequence[Arrays]:
        # The longest prototype of each client, so that each client counts once in the median.
        norms = [
            np.linalg.norm(r["mean"][r["count"] > 0].astype(np.float64), axis=1).max(initial=0)
            for r in returned
        ]
        factors = clip_factors(np.array(norms), median=median)
        return [
            {**r, "mean": np.asarray(f * r["mean"], r["mean"].dtype)}
            for f, r in zip(factors, returned, strict=True)
        ]

    def collect(self, cohort: Cohort) -> None:
        returned = cohort.measured[self.name]
        total = np.zeros(returned[0]["mean"].shape, np.float64)
        count = np.zeros(len(total), np.int64)
        for arrays in returned:
            total += arrays["count"][:, None] * arrays["mean"].astype(np.float64)
            count += arrays["count"]
        if self.mean is None or self.count is None:
            self.mean, self.count = np.zeros(total.shape, np.float32), np.zeros_like(count)
        seen = count > 0
        self.mean, self.count = self.mean.copy(), self.count.copy()
        self.mean[seen] = total[seen] / count[seen, None]
        self.count[seen] = count[seen]


class ClusterPrototypes(Prototypes):
    """Means of clusters of all clients' means of features of each class (FPL, FedPLVM).

    Clients return means of a class's features, ``mean`` [P, d], the numbers of images behind them,
    ``count`` [P], and their classes, ``label`` [P]. The server clusters the means of a class with
    FINCH, and sends the clusters' plain means, ``mean`` [P, d], and their classes, ``label`` [P]. A
    class without images in a round keeps its clusters; FPL's released code drops it.
    """

    name = "clusters"
    STATE = ("clusters",)

    def __init__(self) -> None:
        require("solvers", "Clustering")
        super().__init__()
        self.clusters: dict[int, NDArray[np.float32]] = {}  # class -> [its clusters, d]

    def broadcast(self, server_round: int) -> Arrays:
        if not self.clusters:
            return {}
        label = np.array([c for c, means in self.clusters.items() for _ in means])
        return {"mean": np.concatenate([*self.clusters.values()]), "label": label}

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        heads = [array.shape for array in trained.values() if array.ndim == 2]
        shapes = {name: array.shape for name, array in arrays.items()}
        rows = shapes.get("count", ())
        wide = [c for c, d in heads if shapes == {"mean": (*rows, d), "count": rows, "label": rows}]
        label = arrays.get("label", np.zeros(0))
        if not (wide and label.dtype.kind == "i" and np.isin(label, range(max(wide))).all()):
            raise InvalidReply(
                f"it has arrays of shapes {shapes}, expected 'mean' [P, d], 'count' [P] and "
                f"classes 'label' [P], with [classes, d] = {' or '.join(map(str, heads))}"
            )
        dense = {name: arrays[name] for name in ("mean", "count")}
        super().check(dense, {"mean": dense["mean"]}, num_examples)
        return arrays

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        return arrays["mean"].shape[1:]

    def collect(self, cohort: Cohort) -> None:
        returned = cohort.measured[self.name]
        mean = np.concatenate([arrays["mean"] for arrays in returned]).astype(np.float64)
        label = np.concatenate([arrays["label"] for arrays in returned])
        for c in np.unique(label).tolist():
            self.clusters[c] = first_neighbor_means(mean[label == c])[0].astype(np.float32)


class ImageStatistics(ClientArrays):
    """Mean and standard deviation of each channel of every client's images (FedRDN).

    Clients return ``statistics`` [2, channels], of images in [0, 1]. The server sends those of all
    clients that have been in a cohort, [clients, 2, channels].
    """

    name = "statistics"
    mean_of = "client"

    def broadcast(self, server_round: int) -> Arrays:
        return self.joined(np.stack)

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        pair = arrays.get(self.name, np.zeros(0))
        shapes = {a[self.name].shape for a in self.arrays.values()} or {(2, pair.size // 2)}
        fits = [*arrays] == [self.name] and pair.shape in shapes and pair.dtype == np.float32
        if not (fits and ((pair >= 0) & (pair <= 1)).all() and pair[1].all()):
            raise InvalidReply(f"expected 'statistics', float32 {min(shapes)} in [0, 1], stds > 0")
        return arrays

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        return arrays[self.name].shape
