"""Participation in proportion to the number of training examples."""

from __future__ import annotations

from collections.abc import Mapping

from fairflower.aggregation.participation import Draw, Participation


class ByExamples(Participation):
    """Clients drawn without replacement, in proportion to their training examples.

    Clients with few examples take part less often. Clients without a known number of examples
    are drawn uniformly if no number is known, and otherwise only after all others.

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
        """Return a draw in proportion to the examples."""
        return draw.weighted(draw.size)
