"""A class for each pixel of an image."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar

import numpy as np

from fairflower.arguments import Range
from fairflower.numerics.scores import DICE, IOU, by_label
from fairflower.tasks import Means, Targets, Task, Tensor

#: Value of pixels whose class is unknown: losses and scores ignore them.
UNKNOWN = 255


class Segmentation(Task):
    """A class for each pixel: targets are masks, uint8 [N, H, W]; 255 is an unknown pixel.

    Class 0 is the background; the network returns logits [B, classes, H, W]. Masks stay uint8,
    because int64 would take eight times the memory. With probabilities p_c of class c in the
    known pixels of an example, g_c = 1 where its mask is c and else 0, and sums over these pixels,
    the loss of the example is ::

        mean of -log p_mask + 1 - mean over c > 0 of (2 sum p_c g_c + s) / (sum p_c + sum g_c + s)

    the cross entropy plus the soft Dice loss (Milletari, Navab, Ahmadi, 3DV 2016) without squares,
    with smoothing and without background, as in nnU-Net (Isensee et al., Nature Methods 2021).
    Unlike nnU-Net's, the loss is at least 0, as 1 is added. A class that an example neither has nor
    predicts costs nothing, and an example without a known pixel has the loss 0.

    Scores are computed from all known pixels of a domain together. With the numbers TP, FP and FN
    of a class, its Dice score is ``2 TP / (2 TP + FP + FN)`` and its intersection over union (IoU)
    ``TP / (TP + FP + FN)``. The primary score is the mean Dice score over the classes from 1;
    ``dice_1``, ``iou_1``, ``dice_2``, ... are those of each class. A class that a domain neither
    has nor predicts is undefined and left out of means; so is a mean without any class.

    Parameters
    ----------
    smooth
        The s above, in pixels. Default 1, that of nnU-Net's class of this loss.
    """

    scores = label_scores = DICE, IOU
    first_label = 1
    draws = "masks"
    dtype = np.uint8
    pixelwise = True
    models: ClassVar = {"images": "unet"}
    undefined: ClassVar = dict.fromkeys(
        ("dice", "iou"), "its examples neither have nor get a class from 1"
    )

    def __init__(self, *, smooth: Annotated[float, Range(above=0)] = 1.0) -> None:
        self.smooth = smooth

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        if values.ndim != 3 or values.dtype.kind not in "biu":
            found = f"found {values.dtype} {list(values.shape)}"
            raise ValueError(f"{found}; expected masks of whole numbers [N, H, W]")
        most = (num_outputs or UNKNOWN) - 1
        wrong = (values != UNKNOWN) & ((values < 0) | (values > most))
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            found = f"found {values[place]} in the mask of example {place[0]}"
            raise ValueError(f"{found}; expected classes 0 to {most}, or {UNKNOWN} for unknown")
        return values.astype(np.uint8, copy=False)

    def num_outputs(self, targets: Targets) -> int:
        return max(2, 1 + int(targets.max(initial=0, where=targets != UNKNOWN)))

    def output_shape(self, num_outputs: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (num_outputs, *shape[1:])

    def pointless(self, targets: Targets) -> str:
        held = np.setdiff1d(targets, UNKNOWN)
        return "" if len(held) > 1 else f"no other class than {held.tolist()} in all training masks"

    def made_up(self, n: int, num_outputs: int, shape: tuple[int, ...]) -> Targets:
        count = n * math.prod(shape[1:])
        return (np.arange(count) % num_outputs).astype(np.uint8).reshape(n, *shape[1:])

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        if output.ndim != 4 or output.shape[1] < 2 or output[:, 0].shape != y.shape:
            raise ValueError(
                f"The network returns an output of shape {tuple(output.shape)} for masks of shape "
                f"{tuple(y.shape)}: expected logits [B, classes, H, W] with at least two classes."
            )
        known, held = y != UNKNOWN, _by_class(y, output.shape[1])
        pixels = known.flatten(1).sum(1).clamp(min=1)
        log_p = output.log_softmax(1)
        # A product, because a GPU sums the gradient of `nll_loss` in random order.
        entropy = -(log_p * held).flatten(1).sum(1) / pixels
        p, g = ((v[:, 1:] * known[:, None]).flatten(2) for v in (log_p.exp(), held))
        overlap, total = (p * g).sum(2), p.sum(2) + g.sum(2)
        dice = (2 * overlap + self.smooth) / (total + self.smooth)
        return entropy + 1 - dice.mean(1)

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(1).byte()

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        guess = output.argmax(1).where(y != UNKNOWN, UNKNOWN)
        found, held = (_by_class(masks, output.shape[1]) for masks in (guess, y))
        pixels = {"intersection": found & held, "predicted": found, "true": held}
        return super().sums(output, y) | {k: of.sum((0, 2, 3)) for k, of in pixels.items()}

    def score(self, means: Means) -> dict[str, float]:
        names = "intersection", "predicted", "true"
        hits, guessed, held = (np.asarray(means[name])[1:] for name in names)
        with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: undefined
            dice, iou = 2 * hits / (guessed + held), hits / (guessed + held - hits)
        return by_label({"dice": dice, "iou": iou}, first=1)

    def count_label(self, y: Targets, k: int) -> dict[str, int]:
        return {"images": int((y == k).any(axis=(1, 2)).sum())}

    def of_example(self, y: Targets, prediction: Targets) -> float:
        """Return the mean Dice score of an example over the classes from 1 in either mask."""
        guess = np.where(y == UNKNOWN, UNKNOWN, prediction)
        pairs = [(y == c, guess == c) for c in np.setdiff1d((y, guess), (0, UNKNOWN))]
        dice = [2 * (true & got).sum() / (true.sum() + got.sum()) for true, got in pairs]
        return float(np.mean(dice)) if dice else math.nan

    def guess(self, num_outputs: int) -> float | None:
        """Return the cross entropy of equal probabilities, plus 1, the largest Dice loss."""
        return math.log(num_outputs) + 1


def _by_class(masks: Tensor, classes: int) -> Tensor:
    """Return whether pixels of masks [B, H, W] have each class, bool [B, classes, H, W]."""
    import torch

    return masks[:, None] == torch.arange(classes, device=masks.device).view(-1, 1, 1)
