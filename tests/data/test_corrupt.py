"""Corruptions against their formulas, by brute force and by statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import correlate
from scipy.stats import norm

from fairflower.data.images import (
    BLUR,
    CORRUPTIONS,
    NOISE,
    blur,
    corrupt,
    corruption_text,
    noise,
)

RNG = np.random.default_rng(0)
KINDS = sorted(CORRUPTIONS)


def pictures(count: int, side: int = 16) -> np.ndarray:
    return RNG.integers(0, 256, (count, 3, side, side), np.uint8)


def corrupted(images: np.ndarray, rows: np.ndarray, **changes: object) -> np.ndarray:
    about = {"kind": "noise", "severity": 3, "seed": 0, "domain": "a", "split": "train", **changes}
    return corrupt(images, rows, **about)  # type: ignore[arg-type]


# --- independence of clients -------------------------------------------------------------


@given(st.sampled_from(KINDS), st.permutations(range(8)), st.integers(1, 8))
def test_the_corruption_of_an_image_does_not_depend_on_the_other_images(
    kind: str, order: list[int], held: int
) -> None:
    images, rows = pictures(8), np.arange(100, 108)
    everything = corrupted(images, rows, kind=kind)
    part = np.array(order[:held])
    np.testing.assert_array_equal(corrupted(images[part], rows[part], kind=kind), everything[part])


@pytest.mark.parametrize("kind", KINDS)
def test_seed_domain_split_and_row_each_change_the_corruption(kind: str) -> None:
    image, rows = pictures(1, 64).repeat(8, axis=0), np.arange(8)
    first = corrupted(image, rows, kind=kind)
    np.testing.assert_array_equal(corrupted(image, rows, kind=kind), first)
    for change in ({"seed": 1}, {"domain": "b"}, {"split": "test"}):
        assert (corrupted(image, rows, kind=kind, **change) != first).any()
    np.testing.assert_array_equal(corrupted(image, rows + 1, kind=kind)[:-1], first[1:])
    assert (first[1:] != first[:-1]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_corruption_does_not_change_the_original_images(kind: str) -> None:
    images = pictures(3)
    before = images.copy()
    assert corrupted(images, np.arange(3), kind=kind).shape == images.shape
    np.testing.assert_array_equal(images, before)


# --- noise ------------------------------------------------------------------------------


@pytest.mark.parametrize("severity", range(1, 6))
def test_noise_has_the_published_strength_and_is_clipped(severity: int) -> None:
    """On mid-gray: the quantiles of N(128 / 255, c), truncated to whole numbers."""
    assert NOISE == (0.08, 0.12, 0.18, 0.26, 0.38)
    grey = np.full((3, 256, 256), 128, np.uint8)
    values = noise(grey, severity, np.random.default_rng(1)).ravel()
    law = norm(128 / 255, (0.08, 0.12, 0.18, 0.26, 0.38)[severity - 1])
    # Below v after truncation means below v / 255 before; four standard errors.
    for v in (1, 50, 100, 128, 150, 200, 255):
        chance = law.cdf(v / 255)
        error = 4 * math.sqrt(chance * (1 - chance) / values.size)
        assert (values < v).mean() == pytest.approx(chance, abs=error + 1e-6)


def test_noise_is_drawn_separately_for_every_channel() -> None:
    red, green, blue = noise(np.full((3, 64, 64), 128, np.uint8), 1, np.random.default_rng(0))
    assert abs(np.corrcoef([red.ravel(), green.ravel(), blue.ravel()])[0, 1:]).max() < 0.1


# --- motion blur ------------------------------------------------------------------------


@pytest.mark.parametrize("side", [28, 64, 100])
@pytest.mark.parametrize("severity", [1, 3, 5])
def test_blur_matches_a_convolution_with_a_motion_kernel(side: int, severity: int) -> None:
    image = pictures(1, side)[0]
    for seed in range(4):
        ours = blur(image, severity, np.random.default_rng(seed))
        angle = math.radians(np.random.default_rng(seed).uniform(-45, 45))
        radius, sigma = BLUR[32 if side == 28 else 64][severity - 1]
        # The kernel as an image: a Gaussian from the center to the right.
        kernel = np.zeros((4 * radius + 1, 4 * radius + 1))
        for i in range(2 * radius + 1):
            down, right = (math.ceil(i * f(angle) - 0.5) for f in (math.sin, math.cos))
            kernel[2 * radius + down, 2 * radius + right] += math.exp(-((i / sigma) ** 2) / 2)
        kernel /= kernel.sum()
        theirs = [correlate(channel.astype(float), kernel, mode="nearest") for channel in image]
        assert abs(ours - np.array(theirs)).max() <= 0.5 + 1e-3


def test_blur_does_not_change_a_uniform_image() -> None:
    plain = np.full((3, 40, 40), 201, np.uint8)
    np.testing.assert_array_equal(blur(plain, 5, np.random.default_rng(0)), plain)


def test_blur_depends_on_the_size_of_the_image() -> None:
    streaks = {
        side: corruption_text("blur", 3, side) for side in (16, 28, 32, 64, 96, 128, 224, 600)
    }
    small, middle, large = "radius 6, sigma 2", "radius 10, sigma 2", "radius 15, sigma 8"
    for side, streak in streaks.items():
        expected = small if side <= 32 else middle if side <= 96 else large
        assert streak == f"motion blur, {expected}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", [28, 64, 224])
def test_a_higher_severity_changes_pixels_more(kind: str, side: int) -> None:
    images = pictures(4, side)
    smooth = np.stack([blur(image, 1, np.random.default_rng(0)) for image in images])
    changes = [
        abs(corrupted(smooth, np.arange(4), kind=kind, severity=s) - smooth.astype(float)).mean()
        for s in range(1, 6)
    ]
    assert changes == sorted(changes)
    assert changes[0] > 1
