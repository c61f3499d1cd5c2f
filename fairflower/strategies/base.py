"""What the file of a strategy imports: its base class, the cohort, and types of arguments."""

from fairflower.aggregation.cohort import Arrays as Arrays
from fairflower.aggregation.cohort import Block as Block
from fairflower.aggregation.cohort import Cohort as Cohort
from fairflower.aggregation.hooks import Options as Options
from fairflower.aggregation.strategy import FairStrategy as FairStrategy
from fairflower.arguments import Range as Range
from fairflower.arguments import Search as Search
from fairflower.numerics import Matrix as Matrix
from fairflower.numerics import Vector as Vector
