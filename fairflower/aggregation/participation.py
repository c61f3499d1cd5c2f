"""Which clients take part in a round: the base class of policies, and the uniform policy."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.earlier_names import EarlierNames
from fairflower.arguments import Configurable
from fairflower.errors import ConfigError, StrategyError, naming_failures


@dataclass(frozen=True)
class Draw:
    """A round's draw: the available clients, and the number of clients to select."""

    server_round: int
    #: Ids of the available clients, ascending.
    clients: tuple[int, ...]
    #: Number of clients to select, at most ``len(clients)``.
    size: int
    #: The run's seed.
    seed: int = 0
    #: Number of training examples by client id, where known.
    sizes: Mapping[int, int] = field(default_factory=dict)

    @property
    def rng(self) -> np.random.Generator:
        """A new random generator, seeded with the run's seed and the round."""
        return np.random.default_rng([self.seed, self.server_round])

    def weighted(self, size: int) -> list[int]:
        """Draw ``size`` clients without replacement, in proportion to their numbers of examples.

        If fewer than ``self.size`` of these numbers are known, other clients follow by id.
        """
        counts = np.array([self.sizes.get(client, 0) for client in self.clients], np.float64)
        if not counts.sum() > 0:  # none is known: uniformly
            counts = np.ones(len(counts))
        shares = counts / counts.sum()
        most = min(size, int(np.count_nonzero(shares)))
        drawn = self.rng.choice(len(self.clients), most, replace=False, p=shares)
        chosen = [self.clients[i] for i in drawn]
        left = set(self.clients).difference(chosen)
        others = [client for client in self.clients if client in left]
        return sorted([*chosen, *others[: max(0, self.size - len(chosen))]])


class Participation(EarlierNames, Configurable):
    """Base class of participation policies, which select the clients of every round.

    Attributes that a policy needs from round to round are named in ``STATE``; checkpoints include
    them.
    """

    #: Attributes kept from round to round, as in ``FairStrategy.STATE``.
    STATE: ClassVar[tuple[str, ...]] = ()

    def candidates(self, draw: Draw) -> Sequence[int]:
        """Return the ids of the clients whose losses `choose` needs; default: none.

        Before training, a separate message asks these candidates for their losses on the received
        model.
        """
        return ()

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> Sequence[int]:
        """Return the ids of ``draw.size`` available clients.

        ``losses`` contains the losses of the candidates that answered, by client id.
        """
        raise NotImplementedError(f"{type(self).__name__}: define the method choose.")

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        """The metrics of train replies that `merged` needs; replies without them are dropped."""
        return ()

    def merged(self, server_round: int, train_losses: Mapping[int, float]) -> None:
        """Store the mean training losses of a round's merged clients, by client id, if needed."""


class Uniform(Participation):
    """Clients drawn uniformly at random, without replacement (McMahan et al. 2017, Algorithm 1).

    >>> policy = Uniform()
    >>> [policy.choose(Draw(r, (0, 1, 2, 3), 2), {}) for r in (1, 2)]
    [[1, 3], [0, 2]]
    """

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> list[int]:
        """Return the ids of the drawn clients, ascending."""
        chosen = draw.rng.choice(len(draw.clients), draw.size, replace=False)
        return [draw.clients[i] for i in sorted(chosen)]


def checked_candidates(policy: Participation, draw: Draw) -> list[int]:
    """Return a policy's candidates; raise ``ConfigError`` if one is not available.

    Raises ``StrategyError`` with the policy's name if the policy fails.
    """
    return _selected(policy, draw, policy.candidates, draw)


def checked_choice(policy: Participation, draw: Draw, losses: Mapping[int, float]) -> list[int]:
    """Return a policy's selected clients, ascending; errors are as for `checked_candidates`."""
    chosen = set(_selected(policy, draw, policy.choose, draw, losses))
    if len(chosen) != draw.size:
        raise ConfigError(
            f"The participation policy {type(policy).__name__} selected {len(chosen)} clients in "
            f"round {draw.server_round}; expected {draw.size}. Return draw.size different clients."
        )
    return sorted(chosen)


def _selected(
    policy: Participation, draw: Draw, select: Callable[..., Sequence[int]], *arguments: Any
) -> list[int]:
    with _naming(policy, draw.server_round):
        chosen = list(select(*arguments))
        strangers = set(chosen).difference(draw.clients)  # an id may not be hashable
    if strangers:
        client = next(client for client in chosen if client in strangers)
        raise ConfigError(
            f"The participation policy {type(policy).__name__} selected client {client!r} in "
            f"round {draw.server_round}, but this client does not exist or is not available. "
            "Select from draw.clients."
        )
    return chosen


def note_merged(policy: Participation, cohort: Cohort) -> None:
    """Tell a policy the training losses of merged clients; raise ``StrategyError`` if it fails."""
    losses = cohort.metrics.get("train_loss", np.empty(0)).tolist()
    by_client = dict(zip(cohort.client_ids, losses, strict=False))
    with _naming(policy, cohort.server_round):
        policy.merged(cohort.server_round, by_client)


def _naming(policy: Participation, server_round: int) -> AbstractContextManager[None]:
    """Convert an exception in a policy's code to ``StrategyError`` with the policy's name."""
    kind = type(policy)
    subject = f"Round {server_round}: the participation policy {kind.__name__}"
    return naming_failures(StrategyError, subject, kind.__module__)
