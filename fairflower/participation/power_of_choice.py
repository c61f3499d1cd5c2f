"""Power-of-Choice: of several candidates, the clients with the largest losses train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from fairflower.aggregation.participation import Draw, Participation
from fairflower.arguments import Range
from fairflower.errors import ConfigError


class PowerOfChoice(Participation):
    """Clients with the largest losses among d candidates (Cho, Wang & Joshi 2022, Section 4).

    d candidates are drawn without replacement, in proportion to their training examples. The m
    of them with the largest losses under the received model train, where m is the number of
    clients in a round (``fraction-train``). Clients with few examples are seldom candidates, so
    the policy is biased and need not be fair. The paper gives the models equal weights:
    ``strategy.name = "uniform"``.

    Parameters
    ----------
    d : int
        Number of candidates, at least m. d = m draws in proportion to the examples; with d = K
        the m largest losses of all clients train. 0, the default, means 2 m (the paper tries
        d = m to 10 m or K).
    loss : {"received", "train"}
        ``"received"`` (pow-d): the candidates first measure the received model's loss on their
        training examples, which takes another message. ``"train"`` (rpow-d): the mean training
        loss of the client's last round, without another message; a client that was never merged
        has an infinite loss.

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
        self,
        *,
        d: Annotated[int, Range(0)] = 0,
        loss: Literal["received", "train"] = "received",
    ) -> None:
        self.d, self.loss = d, loss
        #: Mean training loss of each client's last merged round, by client id.
        self.train_losses: dict[int, float] = {}

    def candidates(self, draw: Draw) -> Sequence[int]:
        """Return the candidates of a round, if they have to be asked."""
        return self._candidates(draw) if self.loss == "received" else ()

    def choose(self, draw: Draw, losses: Mapping[int, float]) -> list[int]:
        """Return the candidates with the largest losses, by id where these are equal.

        Candidates without a loss come last if they were asked, and first otherwise.
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
        """Store the clients' training losses."""
        self.train_losses |= train_losses

    def _candidates(self, draw: Draw) -> list[int]:
        d = self.d or 2 * draw.size
        if d < draw.size:
            raise ConfigError(
                f"power-of-choice: d = {d} candidates are fewer than the {draw.size} clients of a "
                "round. Raise d, or lower fraction-train."
            )
        return draw.weighted(min(d, len(draw.clients)))
