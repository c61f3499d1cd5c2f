"""Data sets with a single domain that is divided at random or by writer."""

from __future__ import annotations

import string
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fairflower.data.federation import Augment, Ints, Pixels
from fairflower.data.hugging_face import HuggingFaceSplits
from fairflower.data.split_files import SplitFiles
from fairflower.errors import DataError, require

if TYPE_CHECKING:
    from datasets import DatasetDict


class CIFAR10(SplitFiles):
    """CIFAR-10 (A. Krizhevsky 2009): ten kinds of objects, 32x32 pixels, a single domain.

    Clients get equal shares or, with ``data.dirichlet-alpha``, the shares of a Dirichlet partition.
    A subclass may define another ``partitioner`` (see `docs/your-own-parts.md`). Training images
    are augmented by random crops with a padding of 4, and flips.
    """

    title = "CIFAR-10"
    domain_names: ClassVar[tuple[str, ...]] = ("cifar10",)
    hub: ClassVar[Mapping[str, tuple[str, str | None]]] = {"cifar10": ("uoft-cs/cifar10", None)}
    classes = (
        *("airplane", "automobile", "bird", "cat", "deer"),
        *("dog", "frog", "horse", "ship", "truck"),
    )
    image_size: ClassVar[int] = 32
    channels: ClassVar[int] = 3
    augment = Augment(crop_padding=4, horizontal_flip=True)
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def adapt(self, data: DatasetDict) -> DatasetDict:
        return _renamed(data, "img", "image")


class FEMNIST(SplitFiles):
    """FEMNIST (S. Caldas et al., LEAF, 2018): 62 digits and letters, 28x28, a single domain.

    Each client is a writer (by flwr-datasets' ``NaturalIdPartitioner``).
    ``data.clients-per-domain`` of about 3,600 writers are drawn with ``data.seed``. Every fifth
    image of a writer, starting with the first, is a test image of this client; ``evaluate.by =
    "clients"`` reports the accuracy of each client. Images are not augmented; mean and standard
    deviation are 0.5.
    """

    title = "FEMNIST"
    domain_names: ClassVar[tuple[str, ...]] = ("femnist",)
    hub: ClassVar[Mapping[str, tuple[str, str | None]]] = {"femnist": ("flwrlabs/femnist", None)}
    hub_splits = ("train",)
    classes = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
    image_size: ClassVar[int] = 28
    channels: ClassVar[int] = 1

    def adapt(self, data: DatasetDict) -> DatasetDict:
        """Divide the single published split into train and test, writer by writer."""
        from datasets import DatasetDict

        data = _renamed(data, "character", "label")
        _, writer = np.unique(self._writers(data, "train"), return_inverse=True)
        order = np.argsort(writer, kind="stable")
        first = np.searchsorted(writer[order], writer[order])
        test = np.empty(len(writer), np.bool_)
        test[order] = (np.arange(len(writer)) - first) % 5 == 0
        rows = {"train": np.flatnonzero(~test), "test": np.flatnonzero(test)}
        return DatasetDict({split: data["train"].select(chosen) for split, chosen in rows.items()})

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        return super().images(domain, split, rows)[..., 0]  # three equal channels

    def partitioner(self) -> Any:
        require("sim", f"data.name = {self.config.name!r}", "flwr_datasets", "datasets")
        from flwr_datasets.partitioner import NaturalIdPartitioner

        return NaturalIdPartitioner(partition_by="writer_id")

    def columns(self, domain: str, split: str) -> Mapping[str, npt.NDArray[Any]]:
        opened = self._open(domain)
        if not isinstance(opened, HuggingFaceSplits):
            raise DataError(
                f"{self.title}: {opened.path} does not name the writers. Use save_to_disk to save "
                f"the Hugging Face data set {self.hub[domain][0]} as {domain} instead."
            )
        return {"writer_id": self._writers(opened.splits, split)}

    def _writers(self, data: DatasetDict, split: str) -> npt.NDArray[Any]:
        if split not in data or "writer_id" not in data[split].column_names:
            raise DataError(
                f"{self.title}: found {data}; expected the split train with the columns image, "
                f"writer_id and character. Save {self.hub['femnist'][0]} from the Hub."
            )
        return np.asarray(data[split]["writer_id"][:])


def _renamed(data: DatasetDict, old: str, new: str) -> DatasetDict:
    """Rename a column, if all splits have it."""
    renames = all(old in split.column_names for split in data.values())
    return data.rename_column(old, new) if renames else data
