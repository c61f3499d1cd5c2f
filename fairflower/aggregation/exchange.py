"""Base class of exchanges: state that server and clients share in addition to the model."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fairflower.aggregation.cohort import Arrays, Cohort
from fairflower.aggregation.earlier_names import EarlierNames
from fairflower.aggregation.records import check_arrays
from fairflower.arguments import Configurable


class Exchange(EarlierNames, Configurable):
    """Base class for the shared state of a training method, such as control variates."""

    #: Name of the ArrayRecord in train messages and, if ``returned``, in replies.
    name: ClassVar[str]
    #: Whether clients return arrays.
    returned: ClassVar[bool] = True
    #: What each mean that a client returns is over: "class", "batch" or "client"; "" without means.
    #: A site refuses means of fewer examples than its smallest group.
    mean_of: ClassVar[str] = ""
    #: Remedy in errors about settings that rule out the exchange; "" means: choose another client.
    remedy: ClassVar[str] = ""
    #: Measurements that clients return for the exchange, as in ``FairStrategy.measurements``.
    measurements: tuple[str, ...] = ()
    #: The run's seed, for random draws; see ``FairStrategy.enroll``.
    seed: int = 0
    _seed: int = 0
    #: Values that explain the last round, as in ``FairStrategy.diagnostics``.
    diagnostics: Mapping[str, NDArray[np.float64] | float] = MappingProxyType({})
    #: Attributes kept from round to round, as in ``FairStrategy.STATE``.
    STATE: ClassVar[tuple[str, ...]] = ()

    def prepare(self, local: Arrays) -> None:
        """Store the initial values of the network's arrays that are not in the global model.

        The server calls this before the first round. By default nothing is stored.
        """

    def broadcast(self, server_round: int) -> Arrays:
        """Return the arrays for this round's train messages; an empty dict adds no record."""
        return {}

    def arrays_for(self, client_id: int) -> Arrays:
        """Return arrays that replace those of `broadcast` in this client's train and test messages.

        An empty dict, the default, replaces nothing.
        """
        return {}

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        """Return values for the config of this client's train message."""
        return {}

    def check(self, arrays: Arrays, trained: Arrays, num_examples: float = math.inf) -> Arrays:
        """Return a client's arrays if they are valid, else raise ``InvalidReply``.

        By default a client returns an array for each of the model's ``trained`` arrays.
        """
        return check_arrays(arrays, trained)

    def shape_of(self, arrays: Arrays) -> tuple[int, ...]:
        """Return sizes that must be the same for all clients and do not follow from the model.

        Clients whose sizes differ from the most frequent ones are dropped.
        """
        return ()

    def bound(self, returned: Sequence[Arrays], median: float) -> Sequence[Arrays]:
        """Return the clients' arrays, scaled to at most ``median`` times their median norm.

        Called if ``clip_update_median`` is set. By default the arrays are unchanged.
        """
        return returned

    def collect(self, cohort: Cohort) -> None:
        """Merge the clients' arrays, ``cohort.measured[self.name]``."""

    def correct(self, cohort: Cohort, merged: Arrays) -> Arrays:
        """Return the merged model, corrected if the method requires it, after ``collect``."""
        return merged
