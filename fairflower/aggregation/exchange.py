"""What an exchange is: shared state that travels beside the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.bounds import clip_updates
from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.records import check_arrays
from fairflower.arguments import Configurable


class Exchange(Configurable):
    """One kind of shared state; a subclass is one method's."""

    #: Of the ArrayRecord in train messages and, if ``returned``, in their replies.
    name: ClassVar[str]
    #: Whether clients send something back.
    returned: ClassVar[bool] = True
    #: What clients have to measure for it, as in ``FairStrategy.needs``.
    needs: tuple[str, ...] = ()
    #: The run's seed, for exchanges that draw; see ``FairStrategy.enroll``.
    seed: int = 0
    #: What it found in the last round, as in ``FairStrategy.diagnostics``.
    diagnostics: Mapping[str, NDArray[np.float64] | float] = MappingProxyType({})
    #: Attributes that are carried from round to round, as in ``FairStrategy.STATE``.
    STATE: ClassVar[tuple[str, ...]] = ()

    def broadcast(self, server_round: int) -> Arrays:
        """What this round's train messages carry; empty for no record at all."""
        return {}

    def tell(self, client_id: int) -> Mapping[str, float | str]:
        """What one client alone is to know; see ``FairStrategy.tell``."""
        return {}

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        """One client's return, or ``InvalidReply`` saying what is wrong with it.

        By default one array for each of the model's ``trained`` arrays.
        """
        return check_arrays(arrays, trained)

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        """What of the shapes the model does not fix, but clients have to agree in.

        Clients with another one than most are left out, so that none can decide alone.
        """
        return ()

    def bound(self, returned: Sequence[Arrays], median: float) -> Sequence[Arrays]:
        """The cohort's returns, none longer than ``median`` times their median length.

        Called where updates are bounded so (``clip_update_median``). By default they are
        left as they are.
        """
        return returned

    def collect(self, cohort: Cohort) -> None:
        """Merge what the cohort returned (``cohort.measured[self.name]``)."""

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        """Change the merged model; called after ``collect``."""
        return merged


def clip_cohort(
    cohort: Cohort, exchanges: Sequence[Exchange], norm: float | None, median: float | None
) -> tuple[Cohort, NDArray[np.float64] | None]:
    """Clip a cohort's updates and, by the median, what it returned to exchanges.

    Returns what updates were multiplied by, too; None without any bound.
    """
    if norm is None and median is None:
        return cohort, None
    cohort, factors = clip_updates(cohort, norm, median)
    if median is None:
        return cohort, factors
    bounded = {
        e.name: tuple(e.bound(cohort.measured[e.name], median)) for e in exchanges if e.returned
    }
    return replace(cohort, measured={**cohort.measured, **bounded}), factors
