"""The built-in participation policies."""

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from fairflower.aggregation.participation import Draw, Participation
from fairflower.arguments import Range
from fairflower.errors import ConfigError


class PowerOfChoice(Participation):
    """Clients with the largest losses among d candidates (Cho, Wang & Joshi 2022, Section 4).

    d candidates are drawn without replacement, in proportion to their numbers of training examples.
    Then the m candidates with the largest losses train, where ``fraction-train`` determines m, the
    number of clients per round. Clients with few examples are rarely candidates, so the policy is
    biased and not necessarily fair. The paper merges models with equal weights:
    ``strategy.name = "uniform"``.

    Parameters
    ----------
    d : int
        Number of candidates, at least m. With d = m all candidates train. With d = K, the number of
        clients, the selection depends only on the losses. 0, the default, means 2 m (the paper
        tries d = m to 10 m or K).
    loss : {"received", "train"}
        ``"received"`` (the paper's pow-d): the candidates first measure the received model's loss
        on their training examples, which takes an additional message. ``"train"`` (rpow-d): a
        candidate's loss is its mean training loss in its last round, or infinite if the client has
        never been merged; no additional message is sent.

    Examples
    --------
    >>> draw = Draw(1, (0, 1, 2, 3), 2, sizes={0: 10, 1: 10, 2: 10, 3: 10})
    >>> policy = PowerOfChoice(d=4)
    >>> policy.candidates(draw)
    [0, 1, 2, 3]
    >>> policy.choose(draw, {0: 0.1, 1: 2.0, 2: 0.5, 3: 1.0})
    [1, 3]
    """

    paper: ClassVar[str] = "Cho, Wang & Joshi, AISTATS 2022"
    STATE: ClassVar[tuple[str, ...]] = ("train_losses",)

    def __init__(
        self, *, d: Annotated[int, Range(0)] = 0, loss: Literal["received", "train"] = "received"
    ) -> None:
        self.d, self.loss = d, loss
        #: Mean training loss of each client's last merged round, by client id.
        self.train_losses: dict[int, float] = {}

    @property
    def reported_metrics(self) -> tuple[str, ...]:
        return ("train_loss",) if self.loss == "train" else ()

    def candidates(self, draw: Draw) -> Sequence[int]:
        """Return the candidates that have to measure their loss; () with ``loss = "train"``."""
        return self._candidates(draw) if self.loss == "received" else ()

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> list[int]:
        """Return the ids of the candidates with the largest losses, ascending.

        Of candidates with equal losses, those with the lowest ids are selected. A candidate without
        a loss is selected last with ``loss = "received"``, and first with ``loss = "train"``.
        """
        known, absent = losses, -math.inf
        if self.loss == "train":
            known, absent = self.train_losses, math.inf
        elif not losses:
            raise ConfigError(
                "power-of-choice: no candidate was asked for its loss. fairflower's server asks "
                "candidates; in another Flower app, set loss = 'train'."
            )
        order = sorted(self._candidates(draw), key=lambda k: (-known.get(k, absent), k))
        return sorted(order[: draw.size])

    def merged(self, server_round: int, train_losses: Mapping[int, float]) -> None:
        self.train_losses |= train_losses

    def _candidates(self, draw: Draw) -> list[int]:
        d = self.d or 2 * draw.size
        if d < draw.size:
            raise ConfigError(
                f"power-of-choice: d = {d} candidates are fewer than the {draw.size} clients of a "
                "round. Raise d, or lower fraction-train."
            )
        return draw.weighted(min(d, len(draw.clients)))


class ByExamples(Participation):
    """Clients drawn without replacement, in proportion to their numbers of training examples.

    Clients with few examples take part less often, so combine it with equal weights (`Uniform`):
    strategies that weigh by examples, such as `FedAvg`, would count examples twice. If no client's
    number of examples is known, the draw is uniform. If some are known, clients with an unknown
    number are drawn last.

    See Also
    --------
    PowerOfChoice : Draws its candidates in this way.

    Examples
    --------
    >>> draw = Draw(1, (0, 1, 2), 2, sizes={0: 1, 1: 500, 2: 500})
    >>> ByExamples().choose(draw, {})
    [1, 2]
    """

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> list[int]:
        """Return the ids of the drawn clients, ascending."""
        return draw.weighted(draw.size)


class RoundRobin(Participation):
    """Clients in turn: those selected longest ago come first, and ties go to the lowest ids.

    If all clients are always available, all clients are selected equally often, give or take one
    round.

    >>> policy = RoundRobin()
    >>> [policy.choose(Draw(r, (0, 1, 2), 2), {}) for r in (1, 2, 3)]
    [[0, 1], [0, 2], [0, 1]]
    """

    STATE: ClassVar[tuple[str, ...]] = ("last_chosen",)

    def __init__(self) -> None:
        #: Last round in which each client was selected, by client id.
        self.last_chosen: dict[int, int] = {}

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> list[int]:
        """Return the ids of the clients that were selected longest ago, ascending."""
        order = sorted(draw.clients, key=lambda client: (self.last_chosen.get(client, 0), client))
        chosen = order[: draw.size]
        self.last_chosen |= dict.fromkeys(chosen, draw.server_round)
        return sorted(chosen)
