"""Data sets of features (rows of a table) and of token ids (texts).

They are prepared and partitioned with the same ``data.*`` settings as images. Settings for images
raise an error (``data.image-size``, ``data.corrupted-clients``) or have no effect
(``data.augment``).
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from fairflower.data.data_set import DataSet, invalid_values_error
from fairflower.data.federation import Floats, Ints
from fairflower.errors import DataError


class FeatureSet(DataSet):
    """A data set whose examples have D features; a subclass defines `features`.

    Features are standardized by the declared ``mean`` and ``std``, each with D numbers. These must
    be known before the run, for example from a codebook. They are not estimated from clients'
    data, because clients do not share data. By default, features are used unchanged.
    """

    kind = "features"
    mean: ClassVar[tuple[float, ...]] = ()
    std: ClassVar[tuple[float, ...]] = ()
    #: Names of the features, for ``fairflower data show``. If empty, their numbers are shown.
    feature_names: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def features(self, domain: str, split: str, rows: Ints) -> Floats:
        """Return the features of these rows, finite float32 [len(rows), D]."""

    def examples(self, domain: str, split: str, rows: Ints) -> Floats:
        x: Any = np.asarray(self.features(domain, split, rows))
        if x.dtype != np.float32 or x.ndim != 2 or len(x) != len(rows):
            raise invalid_values_error(
                self, domain, split, self.kind, x, f"float32 [{len(rows)}, D]"
            )
        if not np.isfinite(x).all():
            expected = "finite numbers, without missing values"
            raise invalid_values_error(self, domain, split, self.kind, "NaN or infinity", expected)
        return x  # type: ignore[no-any-return]


class TokenSet(DataSet):
    """A data set whose examples have L token ids; a subclass defines `tokens` and ``vocabulary``.

    Ids are 0 to ``vocabulary - 1``. Texts with fewer than L tokens are padded at the end with id 0.
    """

    kind = "tokens"
    #: Number of ids, including 0. It must be known before the run, because the model's shape
    #: depends on it.
    vocabulary: ClassVar[int] = 0

    @abstractmethod
    def tokens(self, domain: str, split: str, rows: Ints) -> Ints:
        """Return the token ids of these rows, whole numbers [len(rows), L]."""

    def examples(self, domain: str, split: str, rows: Ints) -> Ints:
        if self.vocabulary < 1:
            raise DataError(
                f"{type(self).__name__}.vocabulary is missing. Set it to the number of token ids, "
                "including 0."
            )
        x: Any = np.asarray(self.tokens(domain, split, rows))
        if x.dtype.kind not in "iu" or x.ndim != 2 or len(x) != len(rows):
            expected = f"whole numbers [{len(rows)}, L]"
            raise invalid_values_error(self, domain, split, self.kind, x, expected)
        if x.size and not 0 <= x.min() <= x.max() < self.vocabulary:
            ids, most = f"{x.min()} to {x.max()}", self.vocabulary - 1
            raise invalid_values_error(
                self, domain, split, self.kind, ids, f"0 to vocabulary - 1 = {most}"
            )
        return x.astype(np.int64)  # type: ignore[no-any-return]
