"""Compare solvers for the min-norm QP: accuracy and time over kinds of Gram matrices.

    python benchmarks/qp.py [--repeats 5]

A cell, for a solver, a kind and a number of clients K, has the median time of a solution and the
largest Frank-Wolfe gap: 0 at the optimum, relative to the squared norm of the best simple mixture.
With a small gap, the weights are close to the optimum; `fairflower.numerics.min_norm` accepts a gap
below 1e-6, and otherwise tries the next solver. "-" means that the solver failed.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from fairflower.numerics import min_norm as qp

KINDS = ("random", "positive", "rank 3", "near-duplicate", "badly scaled")


def gram_matrix(kind: str, size: int, seed: int) -> NDArray[np.float64]:
    """Return a random Gram matrix of a kind."""
    random = np.random.default_rng([seed, size])
    rows = random.standard_normal((size, 3 if kind == "rank 3" else 50))
    if kind in ("positive", "rank 3"):
        rows = np.abs(rows)
    if kind == "near-duplicate":
        rows = rows[:1] + 1e-6 * rows
    if kind == "badly scaled":  # Gram entries from 1e-12 to 1e6
        rows *= 10.0 ** random.uniform(-6, 3, (size, 1))
    return np.asarray(rows @ rows.T)


def measure(solver: str, kind: str, size: int, repeats: int) -> str:
    """Return a cell: median time and largest gap."""
    low, high = np.zeros(size), np.ones(size)
    seconds, gaps = [], []
    for seed in range(repeats + 1):  # the first repetition compiles the problem
        gram = gram_matrix(kind, size, seed)
        start = qp._initial_weights(gram.diagonal(), low, high)
        scaled = gram / np.einsum("mi,ij,mj->m", start, gram, start).min()
        with threadpool_limits(1, user_api="blas"):
            begin = time.perf_counter()
            weights = qp._solve(scaled, low, high, solver)
            end = time.perf_counter()
        if seed:
            seconds.append(end - begin)
        if weights is None:
            return "-"
        gaps.append(qp._residual(scaled, weights, low, high))
    return f"{1e3 * np.median(seconds):.1f} ms, {max(gaps):.0e}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="problems per cell")
    repeats = parser.parse_args().repeats
    print("| kind | K | " + " | ".join(qp.SOLVERS) + " |")
    print("|---|---:|" + "---:|" * len(qp.SOLVERS))
    for kind in KINDS:
        for size in (2, 20, 100, 200):
            cells = [measure(solver, kind, size, repeats) for solver in qp.SOLVERS]
            print(f"| {kind} | {size} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
