"""Data sets divided among clients.

`prepare` divides a data set once and stores the result on disk; a `Federation` reads it. A new data
set is a `DataSet` of images, a `FeatureSet` or a `TokenSet`, registered in `fairflower.registry` or
by another package.
"""

from fairflower.data.cache import prepare, with_absolute_dir
from fairflower.data.data_set import DataSet
from fairflower.data.federation import Augment, ClientInfo, Federation, Split
from fairflower.data.texts import TextSet
from fairflower.data.vectors import FeatureSet, TokenSet
from fairflower.errors import DataError, renamed

__all__ = [
    "Augment",
    "ClientInfo",
    "DataError",
    "DataSet",
    "FeatureSet",
    "Federation",
    "Split",
    "TextSet",
    "TokenSet",
    "prepare",
    "with_absolute_dir",
]

__getattr__ = renamed(__name__, resolve="with_absolute_dir")
