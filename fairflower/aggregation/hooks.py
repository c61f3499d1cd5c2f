"""What a strategy's author writes: how to merge a cohort, and what that needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.exchange import Exchange
from fairflower.aggregation.records import is_buffer
from fairflower.numerics.clustering import Clusters

Diagnostic = NDArray[np.float64] | float


class StrategyHooks:
    """What `FairStrategy`'s subclasses define: ``weigh`` or ``merge``, all the rest as needed."""

    #: Where the rule comes from, for ``fairflower list`` and the report.
    paper: ClassVar[str] = ""

    #: The extra of fairflower that the rule computes with, ``"solvers"``, or none.
    extra: ClassVar[str] = ""

    #: What clients have to measure besides their model: names of scalars in the
    #: reply's metrics or of ArrayRecords. A subclass (or its constructor) sets it;
    #: the train message's config asks for it under ``measure``.
    needs: tuple[str, ...] = ()
    #: Those of ``needs`` that are one array ``h``, of the same length for every client.
    REPRESENTATIONS: ClassVar[tuple[str, ...]] = ("representation", "received_representation")
    #: Those of ``needs`` that are arrays: the others have one per parameter.
    VECTORS: ClassVar[tuple[str, ...]] = ("fisher", "gradient", *REPRESENTATIONS)
    #: Those of ``needs`` and ``reads`` that must not be negative, such as means of squares.
    NON_NEGATIVE: ClassVar[tuple[str, ...]] = ("fisher", "steps")
    #: Those of them that count something, and so are at most 2**53.
    COUNTS: ClassVar[tuple[str, ...]] = ("steps",)
    #: Metrics that the rule reads and clients report unasked.
    reads: tuple[str, ...] = ()

    #: Attributes that the rule carries from round to round: numbers, None, arrays, and
    #: dicts of them with text or whole numbers (client ids) as keys.
    STATE: ClassVar[tuple[str, ...]] = ()
    #: Says that the merged model may lie outside the hull of the received and the returned ones.
    extrapolates: ClassVar[bool] = False
    #: Says that clients that return the same model get it back as the next one.
    keeps_agreement: ClassVar[bool] = True

    #: Arguments that, where they are None, the config that goes to the clients gives:
    #: attribute -> keys, of which `read_config` takes one. Fairflower's own app sends its
    #: whole run config.
    FROM_CONFIG: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    #: Those of them that are taken from there; None before the first config.
    _taken: tuple[str, ...] | None = None

    #: What the last merge decided: numbers, arrays of shape (K,) per client (``weights`` is
    #: always there; ``clipped``, what updates were multiplied by, where they are bounded), or
    #: (K, K) per pair of clients.
    diagnostics: dict[str, Diagnostic]
    #: Those of the last cohort, if the rule finds any.
    clusters: Clusters | None
    #: Of whatever the rule draws.
    seed: int
    #: What travels beside the model.
    exchanges: tuple[Exchange, ...]
    #: The arrays that are not trained, where their names and dtypes do not tell.
    buffers: frozenset[str] | None
    weighted_by_key: str
    arrayrecord_key: str

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        """The clients' weights, shape (K,), in their order: non-negative, summing to 1."""
        raise NotImplementedError(f"{type(self).__name__} has neither weigh nor merge. Define one.")

    def merge(self, cohort: Cohort) -> Arrays:
        """The next global model. By default the mean weighted by ``weigh``."""
        weights = np.asarray(self.weigh(cohort))
        self.diagnostics["weights"] = weights
        return cohort.average(weights)

    def read_config(self, config: Mapping[str, Any]) -> None:
        """Take what the rule has to know of the config that goes to the clients.

        Called before every round, which may have another learning rate than the one before; with
        fairflower's own run config also when that is checked. ``ValueError`` if the rule means
        nothing for clients that train so.
        """
        if self._taken is None:
            self._taken = tuple(a for a in self.FROM_CONFIG if getattr(self, a) is None)
        for attribute in self._taken:
            (key,) = self.FROM_CONFIG[attribute]
            setattr(self, attribute, config.get(key, getattr(self, attribute)))

    def tell(self, client_id: int) -> Mapping[str, float | str]:
        """What this client alone is to know: goes into the config of its train message."""
        return {}

    @property
    def measurements(self) -> tuple[str, ...]:
        """What clients have to measure, for the rule or for an exchange, each once."""
        others = (name for exchange in self.exchanges for name in exchange.needs)
        return tuple(dict.fromkeys((*self.needs, *others)))

    def buffers_of(self, model: Arrays) -> frozenset[str]:
        """Names of the model's arrays that are not trained."""
        if self.buffers is not None:
            return self.buffers
        return frozenset(name for name, array in model.items() if is_buffer(name, array))
