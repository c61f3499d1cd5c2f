"""Data sets divided among clients.

`prepare` divides a data set once and stores the result on disk, and a `Federation` reads it. To add
a data set, subclass `DataSet` (images), `FeatureSet` or `TokenSet` and register the class in
`fairflower.registry` or in a package of your own.
"""

from fairflower.data.cache import prepare, with_absolute_dir
from fairflower.data.data_set import DataSet, FeatureSet, TokenSet
from fairflower.data.federation import Augment, ClientInfo, Federation, Split
from fairflower.data.files import data_folder, every_fifth
from fairflower.data.texts import TextSet
from fairflower.errors import DataError

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
    "data_folder",
    "every_fifth",
    "prepare",
    "with_absolute_dir",
]
