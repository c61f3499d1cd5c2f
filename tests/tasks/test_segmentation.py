"""Segmentation: loss and scores against scikit-learn, torchmetrics and loops over pixels."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, jaccard_score
from torch import Tensor

from fairflower.data.images import nearest
from fairflower.errors import ConfigError
from fairflower.tasks import task_of
from fairflower.tasks.segmentation import UNKNOWN

TASK = task_of("segmentation")


def batch(classes: int = 3, n: int = 4, side: int = 6, unknown: float = 0.2) -> tuple[Tensor, Any]:
    rng = np.random.default_rng(0)
    y = rng.integers(classes, size=(n, side, side + 1)).astype(np.uint8)
    y[rng.random(y.shape) < unknown] = UNKNOWN
    output = torch.tensor(rng.normal(0, 2, (n, classes, side, side + 1)), dtype=torch.float32)
    return output, torch.from_numpy(y)


def scores(output: Tensor, y: Tensor, parts: int = 1) -> dict[str, float]:
    """Return scores of sums over ``parts`` batches."""
    sums = [TASK.sums(o, t) for o, t in zip(output.chunk(parts), y.chunk(parts), strict=True)]
    means = {k: sum(part[k].double() for part in sums) / len(y) for k in sums[0]}
    return TASK.score({name: value.tolist() for name, value in means.items()})  # type: ignore[attr-defined]


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("unknown", [0.0, 0.3])
@pytest.mark.parametrize("parts", [1, 2])
def test_scores_equal_scikit_learns_on_known_pixels(
    classes: int, unknown: float, parts: int
) -> None:
    output, y = batch(classes, unknown=unknown)
    guess, known = TASK.predict(output), y != UNKNOWN
    found, each = scores(output, y, parts), range(1, classes)
    dice = f1_score(y[known], guess[known], labels=each, average=None)
    iou = jaccard_score(y[known], guess[known], labels=each, average=None)
    np.testing.assert_allclose([found[f"dice_{c}"] for c in each], dice)
    np.testing.assert_allclose([found[f"iou_{c}"] for c in each], iou)
    np.testing.assert_allclose([found["dice"], found["iou"]], [dice.mean(), iou.mean()])


def test_scores_equal_torchmetrics_without_unknown_pixels() -> None:
    """One tall image, because torchmetrics averages over images, and scores are of a domain."""
    from torchmetrics.functional.segmentation import dice_score, mean_iou  # slow to import

    output, y = batch(4, unknown=0)
    guess = TASK.predict(output)
    options: dict[str, Any] = {"num_classes": 4, "include_background": False}
    tall = guess.flatten().view(1, -1, 7).long(), y.flatten().view(1, -1, 7).long()
    dice = dice_score(*tall, average="macro", input_format="index", **options)
    iou = mean_iou(*tall, input_format="index", **options)
    found = scores(output, y)
    np.testing.assert_allclose([found["dice"], found["iou"]], [dice.item(), iou.item()], rtol=1e-6)


def test_a_class_that_is_neither_there_nor_predicted_is_left_out() -> None:
    output, y = batch(4)
    y[y == 3] = 0
    output[:, 3] = -100
    found = scores(output, y)
    assert math.isnan(found["dice_3"])
    assert found["dice"] == pytest.approx((found["dice_1"] + found["dice_2"]) / 2)
    output[0, 3] = 100  # predicted, but never there
    assert scores(output, y)["dice_3"] == 0


@pytest.mark.parametrize("value", [0, UNKNOWN])
def test_scores_are_undefined_without_any_foreground(value: int) -> None:
    output, y = batch(2)
    output[:, 1] = -100
    found = scores(output, torch.full_like(y, value))
    assert all(math.isnan(value) for value in found.values())


def test_the_loss_is_that_of_a_loop_over_examples_and_classes() -> None:
    output, y = batch()
    y[3] = UNKNOWN
    y[2][y[2] == 2] = 0
    smooth = 0.5
    task: Any = task_of(f"segmentation:smooth={smooth}")
    expected = []
    for o, mask in zip(output.double(), y, strict=True):
        known = mask != UNKNOWN
        p, labels = o.softmax(0)[:, known], mask[known].long()
        if not len(labels):
            expected.append(0.0)
            continue
        entropy = torch.nn.functional.cross_entropy(o[:, known].T, labels).item()
        dice = []
        for c in (1, 2):
            g = (labels == c).double()
            dice.append((2 * (p[c] * g).sum() + smooth) / (p[c].sum() + g.sum() + smooth))
        expected.append(entropy + 1 - sum(dice).item() / 2)  # type: ignore[union-attr]
    np.testing.assert_allclose(task.losses(output, y), expected, atol=2e-6)
    assert task.loss(output, y, "sum").item() == pytest.approx(sum(expected), rel=1e-6)


def test_unknown_pixels_change_neither_loss_nor_gradient() -> None:
    output, y = batch()
    changed = torch.where((y == UNKNOWN)[:, None], output + 3 * torch.randn(output.shape), output)
    gradients = []
    for o in (output.clone(), changed):
        o.requires_grad_()
        TASK.loss(o, y).backward()
        assert o.grad is not None
        gradients.append(o.grad)
        assert (o.grad.movedim(1, -1)[y == UNKNOWN] == 0).all()
    with torch.no_grad():
        torch.testing.assert_close(TASK.losses(output, y), TASK.losses(changed, y))
    known = y != UNKNOWN
    torch.testing.assert_close(*(g.movedim(1, -1)[known] for g in gradients))


def test_the_gradient_is_that_of_finite_differences() -> None:
    output, y = batch(n=2, side=3)
    assert torch.autograd.gradcheck(
        lambda o: TASK.loss(o, y), output.double().requires_grad_(), fast_mode=True
    )


def test_a_perfect_output_costs_nothing_and_guessing_no_more_than_the_guess() -> None:
    _, y = batch(unknown=0)
    one_hot = torch.nn.functional.one_hot(y.long(), 3).movedim(-1, 1).float()
    np.testing.assert_allclose(TASK.losses(100 * one_hot, y), 0, atol=1e-4)
    guess = TASK.guess(3)
    assert guess is not None
    assert TASK.loss(torch.zeros_like(one_hot), y) < guess


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (np.zeros((2, 3), int), r"found int64 \[2, 3\]; expected masks of whole numbers"),
        (np.zeros((2, 3, 3)), r"found float64 \[2, 3, 3\]; expected masks"),
        (np.full((2, 3, 3), 4), "found 4 in the mask of example 0; expected classes 0 to 2, or"),
        (np.full((2, 3, 3), -1), "found -1 in the mask of example 0"),
        (np.full((2, 3, 3), 256), "found 256 in the mask"),
    ],
)
def test_other_targets_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASK.read(values, 3)


def test_masks_are_kept_as_uint8() -> None:
    read = TASK.read(np.array([[[0, 255], [1, 2]]]))
    assert read.dtype == np.uint8
    assert TASK.num_outputs(read) == 3
    assert TASK.num_outputs(np.full((1, 2, 2), UNKNOWN, np.uint8)) == 2


@pytest.mark.parametrize("shape", [(4, 2), (4, 1, 6, 7), (4, 3, 6, 6)])
def test_an_output_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected logits \[B, classes, H, W\]"):
        TASK.loss(torch.zeros(shape), batch()[1])


def test_masks_are_resized_as_pillow_does() -> None:
    from PIL import Image

    _, y = batch(5, side=9)
    for size in ((5, 4), (20, 13), (9, 10)):
        expected = [Image.fromarray(mask).resize(size[::-1], 0) for mask in y.numpy()]
        np.testing.assert_array_equal(nearest(y.numpy(), size), np.stack(expected))


def test_an_argument_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match="smooth"):
        task_of("segmentation:smooth=0")
