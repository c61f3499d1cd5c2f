"""Data sets with a published split, in a file or a Hugging Face data set per domain."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from fairflower.data.data_set import DataSetOfFiles
from fairflower.data.federation import Ints, Pixels
from fairflower.data.files import NpzFile, stamp
from fairflower.data.hugging_face import HuggingFaceSplits, load_hub, load_saved
from fairflower.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetDict

_REMEDY = (
    "Set data.dir or FAIRFLOWER_DATA to a folder that has, for each domain, <domain>.npz "
    "(x_train, y_train, x_test, y_test) or a Hugging Face data set saved as <domain>"
)


class SplitFiles(DataSetOfFiles[NpzFile | HuggingFaceSplits]):
    """A data set whose domains have train and test images; a subclass names the domains.

    Images are read from one of these sources:

    1. The folder ``data.dir`` (or ``$FAIRFLOWER_DATA`` if ``data.dir`` is empty). It has, for each
       domain, ``<domain>.npz``, or a folder ``<domain>`` that Hugging Face's ``save_to_disk`` wrote
       (train and test, image and label), or the domain's file in ``other_files``.
    2. The Hugging Face Hub, through flwr-datasets, if no folder is set and the domain is in
       ``hub``.
    """

    #: Domain -> its Hugging Face id and configuration, for domains on the Hub.
    hub: ClassVar[Mapping[str, tuple[str, str | None]]] = {}
    #: Splits to download from the Hub; `adapt` converts them to train and test.
    hub_splits: ClassVar[tuple[str, ...]] = ("train", "test")
    #: Domain -> alternative name of its .npz file, and a remark that `source` adds.
    other_files: ClassVar[Mapping[str, tuple[str, str]]] = {}
    image_size: ClassVar[int]

    def labels(self, domain: str, split: str) -> Ints:
        return self._open(domain).labels(split)

    def images(self, domain: str, split: str, rows: Ints) -> Pixels:
        """Return the images of these rows. Only Hugging Face images are resized, to a square."""
        return self._open(domain).images(split, rows)

    def fingerprint(self) -> Any:
        paths = {domain: self._path(domain) for domain in self.domains}
        return [stamp(path) if path else [self.hub[domain]] for domain, path in paths.items()]

    def source(self, domain: str) -> str:
        path = self._path(domain)
        if path is None:
            return f"Hugging Face {self.hub[domain][0]}"
        other, remark = self.other_files.get(domain, (domain, ""))
        return f"{path} ({remark})" if remark and path.stem == other else str(path)

    def adapt(self, data: DatasetDict) -> DatasetDict:
        """Convert a downloaded data set to the splits train and test, with image and label."""
        return data

    def _path(self, domain: str) -> Path | None:
        """Return the file or folder of a domain. None means the Hub."""
        if self.folder is None:
            if domain not in self.hub:
                raise DataError(
                    f"{self.title}: {domain!r} is not on the Hugging Face Hub. {_REMEDY}, or "
                    f"leave it out with data.domains = {','.join(self.hub)!r}."
                )
            return None
        file, folder = self.folder / f"{domain}.npz", self.folder / domain
        other, _ = self.other_files.get(domain, (domain, ""))
        for path in (file, folder, self.folder / f"{other}.npz"):
            if path.exists():
                return path
        raise DataError(f"{self.title}: neither {file} nor {folder} exists. {_REMEDY}.")

    def _read(self, domain: str) -> NpzFile | HuggingFaceSplits:
        path = self._path(domain)
        num_classes = self.num_classes or len(self.classes) or None
        if path and not path.is_dir():
            return NpzFile(path, num_classes)
        data = load_saved(path) if path else load_hub(*self.hub[domain], _REMEDY, self.hub_splits)
        if not isinstance(data, dict):
            raise DataError(
                f"{path}: found a single split; expected a DatasetDict with train and test."
            )
        size = self.config.image_size or self.image_size
        return HuggingFaceSplits(self.adapt(data), self.source(domain), size, num_classes)
