"""A client's examples on the training device, in normalized batches.

Images stay uint8 until their batch is used, and masks always. Then images are cropped, flipped and
normalized exactly as with torchvision's ``RandomCrop``, ``RandomHorizontalFlip``, ``ToTensor`` and
``Normalize``, but without a Python call per image. Features are normalized once. Token ids are
unchanged.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.data import Augment, Split
from fairflower.models import Classifier, cache_first_stage
from fairflower.tasks import CLASSIFICATION, Task, task_of

#: Id of an array of examples -> a model, and the output of its frozen first stage for each
#: example.
FirstStages = dict[int, tuple[Classifier, Tensor]]

#: Number of examples per pass through a frozen first stage.
_FIRST_STAGE_BATCH = 128


@dataclass(frozen=True)
class ClientData:
    """A client's examples, with their normalization and augmentation."""

    train: Split
    test: Split
    #: Mean and standard deviation per channel (of images in [0, 1]) or per feature; empty for
    #: token ids.
    mean: tuple[float, ...]
    std: tuple[float, ...]
    #: Number of classes or, for other tasks, of the network's outputs.
    num_classes: int
    augment: Augment = field(default_factory=Augment)
    #: Examples held out of training, for the choice of hyper-parameters.
    validation: Split | None = None
    #: Each example's group of people, int64 [N], by split; empty without ``data.groups``.
    groups: Mapping[str, NDArray[np.int64]] = field(default_factory=dict)
    num_groups: int = 0
    #: What is learnt.
    task: Task = field(default_factory=partial(task_of, CLASSIFICATION))
    #: Outputs of frozen first stages for these examples, cached for later rounds.
    first_stages: FirstStages = field(default_factory=dict, repr=False, compare=False)

    @property
    def kind(self) -> str:
        """Kind of the examples: ``"images"``, ``"features"`` or ``"tokens"``."""
        x = self.train.x
        return "images" if x.ndim == 4 else "features" if x.dtype.kind == "f" else "tokens"

    def tested_on(self, split: Literal["validation", "train"]) -> Self:
        """Return the same data with the examples of another split as test examples.

        Raises ``ValueError`` if there are no validation examples.
        """
        examples: Split | None = getattr(self, split)
        if examples is None:
            raise ValueError(
                "There are no examples for validation: data.validation-fraction and "
                "data.validation-examples are 0. Set one of them."
            )
        groups = {**self.groups, "test": self.groups[split]} if self.groups else {}
        return replace(self, test=examples, groups=groups)


class Examples(ABC):
    """A split on a device, in batches; `examples_of` chooses the subclass for its kind.

    ``split`` contains examples and targets. If ``model`` has a frozen first stage
    (`Classifier.two_stages`), its output is computed once for every example and attached to
    batches; images are then not augmented, because augmentation would change the output. Outputs
    are cached in ``first_stages``, which objects with the same split can share, or else in this
    object.
    """

    def __init__(
        self,
        split: Split,
        device: str | torch.device = "cpu",
        model: nn.Module | None = None,
        first_stages: FirstStages | None = None,
    ) -> None:
        x, y = split
        if len(y) != len(x) or y.dtype not in (np.int64, np.float32, np.uint8):
            expected = f"{len(x)} targets as int64, float32 or, for masks, uint8"
            raise ValueError(f"Expected {expected}, got {y.dtype} {list(y.shape)}.")
        self.device = torch.device(device)
        self.model = model if isinstance(model, Classifier) and model.two_stages else None
        self._single = getattr(model, "takes_single", True)
        self.first_stages = {} if first_stages is None else first_stages
        #: The key of the first stage's outputs; otherwise the array is not kept a second time.
        self._key = x if self.model else None
        self._y = torch.tensor(y, device=device)

    def __len__(self) -> int:
        return len(self._y)

    def epoch_batches(
        self, batch_size: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of all examples in random order; images are augmented.

        A batch is x (float32 [B, C, H, W] in channels-last memory order, float32 [B, features] or
        int64 [B, length]) and y, targets [B, ...]. A last batch of a single example is joined to
        the batch before it, because batch norm cannot normalize a single example. All random
        numbers come from ``generator``, on the CPU, so that they are the same on every device.
        """
        order = torch.randperm(len(self), generator=generator)
        batches = batch_slices(len(self), batch_size, single=False)
        for x, y, index in self._drawn(order, batches, generator):
            yield self._with_first_stage(x, index), y

    def eval_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches of all examples in order, without augmentation."""
        for rows in batch_slices(len(self), batch_size, self._single):
            yield self._with_first_stage(self._originals(rows), rows), self._y[rows]

    @abstractmethod
    def _originals(self, rows: slice | Tensor) -> Tensor:
        """Return the examples of these rows, normalized and not augmented."""

    def _drawn(
        self, order: Tensor, batches: list[slice], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield these parts of an order of the rows: examples, targets and indices of the rows."""
        order = order.to(self.device)
        for index in map(order.__getitem__, batches):
            yield self._originals(index), self._y[index], index

    def _with_first_stage(self, x: Tensor, rows: Tensor | slice) -> Tensor:
        """Attach the cached output of the model's frozen first stage to a batch."""
        if self.model is None:
            return x
        key = id(self._key)
        model, outputs = self.first_stages.get(key, (None, x))
        if model is not self.model or outputs.device != x.device:
            size = _FIRST_STAGE_BATCH
            parts = [slice(i, i + size) for i in range(0, len(self), size)]
            # Inference tensors could not be used for training later.
            with torch.inference_mode(False), torch.no_grad():
                outputs = torch.cat(
                    [self.model.first_stage(self._originals(part)) for part in parts]
                )
            self.first_stages[key] = (self.model, outputs)
        return cache_first_stage(x, outputs[rows])


class Images(Examples):
    """Images, uint8 [N, C, H, W].

    ``mean`` and ``std`` are those of each channel, of images in [0, 1]. ``augment`` is applied only
    by ``epoch_batches``; crops are cut from the image padded with black, as torchvision pads a PIL
    image before normalization. Masks, uint8 [N, H, W], are cropped and flipped as their images
    are, and padded with 255, unknown. For the other parameters see `Examples`. Raises
    ``ValueError`` if an array has the wrong type or shape.
    """

    def __init__(
        self,
        split: Split,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        augment: Augment | None = None,
        **options: Any,
    ) -> None:
        x = split.x
        if x.dtype != np.uint8 or x.ndim != 4:
            raise ValueError(f"Expected images as uint8 [N, C, H, W], got {x.dtype} {x.shape}.")
        super().__init__(split, **options)
        _check_scale(x.shape[1], "channels", mean, std)
        self.augment = Augment() if self.model or augment is None else augment
        _, _, height, width = x.shape
        pad = self.augment.crop_padding
        images = torch.tensor(x, device=self.device)
        # A view: crops[n, :, top, left] is image n cut at this corner, [C, H, W].
        self._crops = _crops(images, pad, 0)
        #: As crops, with one channel; None if targets are no masks.
        masks = split.y.dtype == np.uint8
        if masks and split.y.shape[1:] != (height, width):
            size = f"[N, {height}, {width}]"
            raise ValueError(f"Expected masks {size}, as images, got {list(split.y.shape)}.")
        self._masks = _crops(self._y[:, None], pad, 255) if masks else None
        self._mean = torch.tensor(mean, device=self.device).view(1, -1, 1, 1)
        self._std = torch.tensor(std, device=self.device).view(1, -1, 1, 1)

    def _drawn(
        self, order: Tensor, batches: list[slice], generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        n = len(order)
        top, left = torch.randint(2 * self.augment.crop_padding + 1, (2, n), generator=generator)
        flip = torch.rand(n, generator=generator) < 0.5
        draws = [draw.to(self.device) for draw in (order, top, left, flip)]
        for rows in batches:
            index, i, j, flipped = (draw[rows] for draw in draws)
            x, y = self._crops[index, :, i, j], self._y[index]
            masks = None if self._masks is None else self._masks[index, :, i, j]
            if self.augment.horizontal_flip:
                x = _flipped(x, flipped)
                masks = None if masks is None else _flipped(masks, flipped)
            yield self._normalize(x), y if masks is None else masks[:, 0], index

    def _originals(self, rows: slice | Tensor) -> Tensor:
        center = self.augment.crop_padding
        return self._normalize(self._crops[rows, :, center, center])

    def _normalize(self, x: Tensor) -> Tensor:
        """Scale images to [0, 1] and normalize them, with the arithmetic of torchvision."""
        x = x.to(torch.float32).div_(255).sub_(self._mean).div_(self._std)
        # Convolutions on a CPU are up to twice as fast in this layout.
        return x.contiguous(memory_format=torch.channels_last)


def _crops(images: Tensor, pad: int, value: int) -> Tensor:
    """Return all crops of padded images, [N, C, top, left, H, W], as a view."""
    height, width = images.shape[2:]
    if pad:  # F.pad would copy them
        images = F.pad(images, (pad, pad, pad, pad), value=value)
    return images.unfold(2, height, 1).unfold(3, width, 1)


def _flipped(images: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(3), images)


class Vectors(Examples):
    """Features, float32 [N, D], normalized by ``mean`` and ``std`` [D]; or token ids, int64 [N, L].

    Neither is augmented. For the other parameters see `Examples`. Raises ``ValueError`` if an array
    has the wrong type or shape.
    """

    def __init__(
        self, split: Split, mean: tuple[float, ...], std: tuple[float, ...], **options: Any
    ) -> None:
        x = split.x
        if x.ndim != 2 or x.dtype not in (np.float32, np.int64):
            raise ValueError(
                "Expected features as float32 [N, D], token ids as int64 [N, L] or images as "
                f"uint8 [N, C, H, W], got {x.dtype} {x.shape}."
            )
        super().__init__(split, **options)
        self._x = torch.tensor(x, device=self.device)
        if x.dtype == np.float32:
            _check_scale(x.shape[1], "features", mean, std)
            self._x.sub_(self._x.new_tensor(mean)).div_(self._x.new_tensor(std))

    def _originals(self, rows: slice | Tensor) -> Tensor:
        return self._x[rows].clone()  # a model may change it in place


def examples_of(
    split: Split,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augment: Augment | None = None,
    **options: Any,
) -> Examples:
    """Return `Images` or `Vectors`, depending on the split's shape; see there for parameters."""
    if split.x.ndim == 4:
        return Images(split, mean, std, augment, **options)
    return Vectors(split, mean, std, **options)


def batch_slices(n: int, batch_size: int, single: bool) -> list[slice]:
    """Return the rows of n examples in batches; a last one is joined to others if not ``single``.

    >>> [rows.stop for rows in batch_slices(5, 2, single=True)]
    [2, 4, 5]
    >>> [rows.stop for rows in batch_slices(5, 2, single=False)]
    [2, 5]
    """
    starts = range(0, n, batch_size)
    if not single and n % batch_size == 1:
        starts = starts[:-1] or starts
    return [slice(i, j) for i, j in zip(starts, (*starts[1:], n), strict=False)]


def _check_scale(count: int, what: str, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    if not len(mean) == len(std) == count:
        raise ValueError(
            f"Expected a mean and a std for each of {count} {what}, got {mean} and {std}."
        )
