"""Round robin: clients take turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fairflower.aggregation.participation import Draw, Participation


class RoundRobin(Participation):
    """Clients in turn: those selected longest ago come first, and ties go to the lowest ids.

    If all clients are always available, all clients are selected equally often, give or take one
    round.

    Examples
    --------
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
