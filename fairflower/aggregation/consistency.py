"""Consistency of the signs of updates over rounds, for the report."""

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Cohort

#: Bins of ``SignConsistency``, of equal width from 1/2 to 1.
BINS = 10


class SignConsistency:
    """Histograms of the sign consistency of updates (FedHEAL, Fig. 2).

    The consistency of a parameter on a client is the share of rounds in which its update had the
    more frequent sign: 1 if the sign never changed, 1/2 if both signs were equally frequent. Zeros
    count as increases, as in FedHEAL's Eq. 5. The rounds are divided into windows of ``window``
    rounds (FedHEAL: 10 and 100).
    """

    STATE: ClassVar[tuple[str, ...]] = ("seen", "rises")

    def __init__(self, window: int) -> None:
        self.window = window
        self.seen: dict[int, int] = {}
        self.rises: dict[int, dict[int, NDArray[Any]]] = {}  # client -> block -> counts

    def __call__(self, cohort: Cohort) -> dict[str, NDArray[np.float64]]:
        """Add a round; after a window's last round return ``consistency_histogram``, (K, BINS).

        Row k contains the share of client k's parameters in each bin, or NaN if the client took
        part in fewer than two rounds of the window.
        """
        if (cohort.server_round - 1) % self.window == 0:
            self.seen, self.rises = {}, {}
        kind = np.min_scalar_type(self.window)
        for k, client in enumerate(cohort.client_ids):
            rising = [block.update(k) >= 0 for block in cohort.blocks(cohort.parameters)]
            counts = self.rises.setdefault(client, {})
            for i, up in enumerate(rising):
                counts[i] = counts.get(i, np.zeros(up.size, kind)) + up
            self.seen[client] = self.seen.get(client, 0) + 1
        if cohort.server_round % self.window:
            return {}
        rows = np.full((len(cohort), BINS), np.nan)
        for k, client in enumerate(cohort.client_ids):
            if (n := self.seen[client]) > 1:
                blocks = self.rises[client].values()
                tally = sum(np.bincount(count, minlength=n + 1) for count in blocks)
                rows[k] = histogram(np.arange(n + 1) / n, np.asarray(tally, np.float64))
        return {"consistency_histogram": rows}


def histogram(rising: NDArray[np.float64], tally: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the share of parameters in each bin, [BINS].

    ``tally`` is the number of parameters for each value of ``rising``, the share of increases.
    """
    consistency = np.maximum(rising, 1 - rising)
    # 1e-9 keeps 0.6 = 1 - 0.4 in the bin that begins at 0.6.
    place = np.minimum(((consistency - 0.5) * 2 * BINS + 1e-9).astype(int), BINS - 1)
    return np.asarray(np.bincount(place, tally, minlength=BINS) / tally.sum())
