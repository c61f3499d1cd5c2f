from typing import Annotated

from fairflower.arguments import Range, Search
from fairflower.strategies import FairStrategy


class LossPower(FairStrategy):
    """Weigh clients by a power of the received model's loss on their data."""

    measurements = ("received_loss",)

    def __init__(
        self, *, power: Annotated[float, Range(0), Search(0.1, 10, log=True)] = 1.0, **options
    ):
        super().__init__(**options)
        self.power = power

    def weigh(self, cohort):
        loss = cohort.metrics["received_loss"]
        weights = cohort.num_examples * (loss / loss.max()) ** self.power
        return weights / weights.sum()
