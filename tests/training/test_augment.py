"""Batches against torchvision's transforms, image by image."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy.stats import chi2
from torchvision.transforms import functional as tv

from fairflower.data import Augment, Split
from fairflower.training.batches import Images, batch_slices

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def split(n: int, channels: int = 3, height: int = 8, width: int = 8, seed: int = 0) -> Split:
    rng = np.random.default_rng(seed)
    x = rng.integers(0, 256, (n, channels, height, width), dtype=np.uint8)
    return Split(x, rng.integers(0, 10, n))


def pil(image: np.ndarray) -> Image.Image:
    return Image.fromarray(image.transpose(1, 2, 0))


def normalized(image: Image.Image) -> np.ndarray:
    """Normalize an image as torchvision does: ToTensor, then Normalize."""
    return np.asarray(tv.normalize(tv.to_tensor(image), MEAN, STD))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("horizontal_flip", [False, True])
@pytest.mark.parametrize(("height", "width"), [(8, 8), (5, 7)])
def test_augmented_images_match_torchvision(height: int, width: int, horizontal_flip: bool) -> None:
    """RandomCrop(size, padding=4), RandomHorizontalFlip, ToTensor, Normalize.

    Each augmented image equals one of the 9 x 9 crops (mirrored or not), and all of them
    are equally frequent.
    """
    image = split(1, 3, height, width).x[0]
    padded = tv.pad(pil(image), [4])
    variants = {}
    for top in range(9):
        for left in range(9):
            crop = tv.crop(padded, top, left, height, width)
            variants[normalized(crop).tobytes()] = (top, left, False)
            if horizontal_flip:
                variants[normalized(tv.hflip(crop)).tobytes()] = (top, left, True)
    assert len(variants) == (162 if horizontal_flip else 81)

    n = 50 * len(variants)
    copies = Split(np.broadcast_to(image, (n, *image.shape)), np.zeros(n, np.int64))
    images = Images(copies, MEAN, STD, Augment(4, horizontal_flip))
    counts = Counter(
        variants[x.numpy().tobytes()]
        for batch, _ in images.epoch_batches(500, generator(0))
        for x in batch
    )
    observed = np.array([counts[variant] for variant in variants.values()])
    statistic = ((observed - 50) ** 2 / 50).sum()
    low, high = chi2.ppf([0.001, 0.999], len(variants) - 1)
    assert low < statistic < high


def test_crops_of_32_pixel_images_match_torchvision() -> None:
    image = split(1, 3, 32, 32).x[0]
    padded = tv.pad(pil(image), [4])
    crops = {
        normalized(tv.crop(padded, top, left, 32, 32)).tobytes()
        for top in range(9)
        for left in range(9)
    }
    copies = Split(np.broadcast_to(image, (100, *image.shape)), np.zeros(100, np.int64))
    images = Images(copies, MEAN, STD, Augment(crop_padding=4))
    seen = {x.numpy().tobytes() for xs, _ in images.epoch_batches(64, generator(1)) for x in xs}
    assert seen <= crops
    assert len(seen) > 40


@pytest.mark.parametrize("padding", [0, 3])
def test_evaluation_batches_are_in_order_and_not_augmented(padding: int) -> None:
    data = split(10, 3, 6, 9)
    images = Images(data, MEAN, STD, Augment(padding, True))
    batches = list(images.eval_batches(4))
    assert [len(y) for _, y in batches] == [4, 4, 2]
    expected = np.stack([normalized(pil(image)) for image in data.x])
    assert np.array_equal(torch.cat([x for x, _ in batches]).numpy(), expected)
    assert np.array_equal(torch.cat([y for _, y in batches]).numpy(), data.y)


def test_an_epoch_contains_each_image_once_with_its_label() -> None:
    data = Split(np.arange(50, dtype=np.uint8).reshape(50, 1, 1, 1), np.arange(50))
    images = Images(data, (0.0,), (1.0,))
    x, y = (torch.cat(parts) for parts in zip(*images.epoch_batches(8, generator(0)), strict=True))
    assert torch.equal((x.flatten() * 255).round().long(), y)
    assert y.tolist() != list(range(50))
    assert sorted(y.tolist()) == list(range(50))


def test_draws_depend_only_on_the_generator() -> None:
    images = Images(split(20), MEAN, STD, Augment(4, True))

    def epochs(seed: int) -> list[torch.Tensor]:
        draws = generator(seed)
        return [torch.cat([x for x, _ in images.epoch_batches(8, draws)]) for _ in range(2)]

    first, second = epochs(0)
    torch.rand(3)
    again = epochs(0)
    assert torch.equal(first, again[0])
    assert torch.equal(second, again[1])
    assert not torch.equal(first, second)
    assert not torch.equal(first, epochs(1)[0])


@given(st.integers(1, 300), st.integers(1, 70))
def test_batches_of_one_image_are_avoided(n: int, batch_size: int) -> None:
    sizes = [s.stop - s.start for s in batch_slices(n, batch_size, single=False)]
    assert sum(sizes) == n
    assert all(size == batch_size for size in sizes[:-1])
    assert max(sizes) <= batch_size + 1
    if n > 1 and batch_size > 1:
        assert min(sizes) > 1


def test_batches_keep_shapes_and_leave_the_source_unchanged() -> None:
    data = split(5, 1, 8, 6)
    source = data.x.copy()
    data.x.flags.writeable = False
    images = Images(data, (0.5,), (0.5,), Augment(2, True))
    for x, y in images.epoch_batches(3, generator(0)):
        assert x.shape[1:] == (1, 8, 6)
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        assert x.min() >= -1
        assert x.max() <= 1
    assert len(images) == 5
    assert np.array_equal(data.x, source)


@pytest.mark.parametrize(
    ("data", "mean", "message"),
    [
        (Split(np.zeros((2, 3, 8, 8), np.float32), np.zeros(2, np.int64)), MEAN, "uint8.*float32"),
        (Split(np.zeros((2, 8, 8), np.uint8), np.zeros(2, np.int64)), MEAN, r"N, C, H, W.*2, 8, 8"),
        (Split(np.zeros((2, 3, 8, 8), np.uint8), np.zeros(3, np.int64)), MEAN, "2 targets"),
        (Split(np.zeros((2, 3, 8, 8), np.uint8), np.zeros(2, np.int32)), MEAN, "int64.*int32"),
        (split(2), (0.5,), "3 channels"),
    ],
)
def test_invalid_arrays_are_refused(data: Split, mean: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Images(data, mean, STD)


@pytest.mark.parametrize(("padding", "flip"), [(0, False), (2, False), (0, True), (3, True)])
def test_masks_move_with_their_images(padding: int, flip: bool) -> None:
    """A mask with the values of a gray image stays equal to it, and padding is unknown, 255."""
    rng = np.random.default_rng(0)
    x = rng.integers(1, 255, (40, 1, 7, 9), dtype=np.uint8)
    images = Images(Split(x, x[:, 0]), (0.0,), (1.0,), Augment(padding, flip))
    for batch, masks in images.epoch_batches(16, generator(0)):
        assert masks.dtype == torch.uint8
        pixels = (255 * batch[:, 0]).round().to(torch.uint8)
        assert torch.equal(pixels, torch.where(masks == 255, 0, masks))
        assert bool((masks == 255).any()) == bool(padding)
    for batch, masks in images.eval_batches(16):
        assert torch.equal((255 * batch[:, 0]).round().to(torch.uint8), masks)


def test_masks_change_no_draw() -> None:
    labeled = split(30, 1, 8, 8)
    masked = Split(labeled.x, np.zeros((30, 8, 8), np.uint8))
    options = (0.5,), (0.5,), Augment(1, True)
    batches = [
        [x for x, _ in Images(data, *options).epoch_batches(8, generator(1))]
        for data in (labeled, masked)
    ]
    assert all(map(torch.equal, *batches))


def test_masks_of_another_size_than_their_images_are_refused() -> None:
    x = split(3, 1, 8, 8).x
    with pytest.raises(ValueError, match=r"masks \[N, 8, 8\], as images, got \[3, 8, 7\]"):
        Images(Split(x, np.zeros((3, 8, 7), np.uint8)), (0.5,), (0.5,))
