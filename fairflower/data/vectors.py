"""Data sets of other examples than images: features of a table, and token ids of texts.

They go through the same door: prepared once, divided by the same ``data.*`` settings. What is
about images means nothing for them and is refused (``data.image-size``,
``data.corrupted-clients``) or does nothing (``data.augment``).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from fairflower.data.data_set import DataSet
from fairflower.data.federation import Floats, Ints
from fairflower.errors import DataError


class FeatureSet(DataSet):
    """A benchmark whose examples are rows of D numbers: define `features`.

    Features are standardised by the ``mean`` and ``std`` that the class declares, D numbers
    each: constants that everybody has before the run, from a code book or published with the
    data. Nothing is estimated from clients' data, which none of them sees of the others. With
    none declared, the default, features are used as they are.
    """

    kind = "features"
    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()
    #: What the features are called, for ``fairflower data show``; empty: by their numbers.
    feature_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        """These rows' features, float32 [len(rows), D] and finite."""

    def examples(self, domain: str, split: str, rows: Ints) -> Floats:
        found: Any = np.asarray(self.features(domain, split, rows))
        if found.dtype != np.float32 or found.ndim != 2:
            said = f"{found.dtype} {list(found.shape)}"
            raise _wrong(self, domain, split, said, "float32 [N, D]")
        if not np.isfinite(found).all():
            said, expected = "numbers that are not finite", "missing ones to be filled in"
            raise _wrong(self, domain, split, said, expected)
        return found  # type: ignore[no-any-return]


class TokenSet(DataSet):
    """A benchmark whose examples are texts of L token ids: define `tokens` and ``vocabulary``.

    Ids are 0 to ``vocabulary - 1``. Texts that are shorter than L end in zeros: 0 is no token.
    """

    kind = "tokens"
    #: How many ids there are, 0 included: everybody has it before the run, as it shapes the model.
    vocabulary: ClassVar[int] = 0

    @abstractmethod
    def tokens(self, domain: str, split: str, rows: Ints) -> Ints:
        """These rows' token ids, whole numbers [len(rows), L]."""

    def examples(self, domain: str, split: str, rows: Ints) -> Ints:
        if self.vocabulary < 1:
            raise DataError(
                f"{type(self).__name__}.vocabulary is missing. Set it to the number of token ids, "
                "which are 0 to below it."
            )
        found: Any = np.asarray(self.tokens(domain, split, rows))
        if found.dtype.kind not in "iu" or found.ndim != 2:
            said = f"{found.dtype} {list(found.shape)}"
            raise _wrong(self, domain, split, said, "whole numbers [N, L]")
        if found.size and not 0 <= found.min() <= found.max() < self.vocabulary:
            said = f"{found.min()} to {found.max()}"
            raise _wrong(self, domain, split, said, f"0 to vocabulary - 1 = {self.vocabulary - 1}")
        return found.astype(np.int64)  # type: ignore[no-any-return]


def _wrong(data_set: DataSet, domain: str, split: str, found: str, expected: str) -> DataError:
    where = f"{type(data_set).__name__}: {domain}: {split}: {data_set.kind}"
    return DataError(f"{where}: found {found}; expected {expected}.")
