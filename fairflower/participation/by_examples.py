"""Participation in proportion to the number of training examples."""

from __future__ import annotations

from collections.abc import Mapping

from fairflower.aggregation.participation import Draw, Participation


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
