"""What the file of a strategy imports: its base class, the cohort, and types of arguments."""

from fairflower.aggregation.cohort import Arrays, Block, Cohort
from fairflower.aggregation.options import Options
from fairflower.aggregation.strategy import FairStrategy
from fairflower.arguments import Range, Search
from fairflower.numerics import Matrix, Vector

__all__ = [
    "Arrays",
    "Block",
    "Cohort",
    "FairStrategy",
    "Matrix",
    "Options",
    "Range",
    "Search",
    "Vector",
]
