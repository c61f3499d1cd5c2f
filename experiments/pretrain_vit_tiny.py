"""Pretrain the frozen part of ``model.name = "prompt-vit-tiny"`` on printed characters.

    python experiments/pretrain_vit_tiny.py [--output FILE] [--probe DATA_SET]

All training images are generated here, from the fonts that matplotlib ships and from random
numbers: 10 digits and 24 letters in 15 fonts, with random positions, sizes, angles, slants, widths,
bending and stroke, some between neighbors, in random colors on plain or cloudy paper, blurred and
noisy. No image of any data set is used. Upper and lower case of a letter form one class; O, I and l
are left out, since they predicted_style like 0 and 1.

The network predicts the character. So that its features also describe the style of an image, it
predicts the colors of ink and paper, the roughness of the paper, the noise and the blur as well. It
is tested on six held-out fonts: those of the test images of uci-digits' domain ``printed``. (The
training images of that domain are of fonts used here.)

The weights in the package were trained with ``--threads 1 --probe digit-five`` on an x86-64 virtual
machine (13 minutes of a core; torch 2.15.0). Accuracy: 66 % over the 34 characters in training,
64 % on the held-out fonts, and there 80 % on digits alone. Linear probe with 2000 images each:
MNIST 96.8 %, USPS 95.2, SYN-like 91.3, MNIST-M 79.8, SVHN 84.9, and 90.9 for predicting the domain.

``--probe digits`` prints, for information, the accuracy of a linear classifier on frozen features
of a data set's domains. No choice in this script was based on it.
"""

from __future__ import annotations

import argparse
import base64
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib import get_data_path
from PIL import Image, ImageDraw, ImageFont
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.models.prompt_vit import vit_tiny
from fairflower.published.uci_digits import fonts as uci_fonts

SEED = 1
PICTURES = 400_000
BATCH, LR, WEIGHT_DECAY, WARM_UP = 128, 1.5e-3, 0.05, 400
#: Weight of the style's squared error; the character's cross entropy has weight 1.
STYLE_WEIGHT = 0.5

#: The classes; each is a string of its characters.
CHARACTERS = (*"0123456789", *(c + c.lower() for c in "ABCDEFGHJKMNPQRSTUVWXYZ"), "L")
FONTS = (
    *("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique"),
    *("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSansMono-Oblique"),
    *("DejaVuSansMono-BoldOblique", "STIXGeneral", "STIXGeneralBol", "STIXGeneralItalic"),
    *("STIXGeneralBolIta", "cmr10", "cmb10", "cmti10"),
)

#: Side of a picture, side of a glyph's canvas, and height of the glyph on the canvas, in pixels.
SIDE, CANVAS, HEIGHT = 32, 64, 40

#: Feature of a picture's style -> mean and standard deviation, for standardization.
STYLE = {
    **{f"paper {c}": (0.4, 0.35) for c in ("red", "green", "blue")},
    **{f"ink {c}": (0.6, 0.35) for c in ("red", "green", "blue")},
    "roughness": (0.15, 0.15),
    "noise": (0.03, 0.04),
    "blur": (0.2, 0.3),
}


class Glyphs(NamedTuple):
    """Drawn characters: ink coverage of each pixel, [G, 1, CANVAS, CANVAS], and classes [G]."""

    ink: Tensor
    y: Tensor


class Pictures(NamedTuple):
    """Pictures uint8 [N, 3, SIDE, SIDE], their characters [N], and styles [N, len(STYLE)]."""

    x: Tensor
    y: Tensor
    style: Tensor


# --- pictures --------------------------------------------------------------------------


def training_fonts() -> list[Path]:
    """Return the font files for training; `uci_fonts("test")` returns the held-out fonts."""
    return [Path(get_data_path(), "fonts", "ttf", f"{name}.ttf") for name in FONTS]


def draw(files: list[Path]) -> Glyphs:
    """Draw every character of every class in every font, scaled to a common height or width."""
    ink, y = [], []
    for file in files:
        font = ImageFont.truetype(str(file), 96)
        for label, spellings in enumerate(CHARACTERS):
            for spelling in spellings:
                left, top, right, bottom = map(int, font.getbbox(spelling))
                glyph = Image.new("L", (right - left, bottom - top))
                ImageDraw.Draw(glyph).text((-left, -top), spelling, fill=255, font=font)
                scale = min(HEIGHT / glyph.height, (CANVAS - 8) / glyph.width)
                size = [max(1, round(length * scale)) for length in glyph.size]
                canvas = Image.new("L", (CANVAS, CANVAS))
                corner = ((CANVAS - size[0]) // 2, (CANVAS - size[1]) // 2)
                canvas.paste(glyph.resize((size[0], size[1]), Image.Resampling.LANCZOS), corner)
                ink.append(np.asarray(canvas, np.float32) / 255)
                y.append(label)
    return Glyphs(torch.tensor(np.stack(ink))[:, None], torch.tensor(y))


class Renderer:
    """Generator of random pictures of glyphs, determined by the seed and the sizes of batches."""

    def __init__(self, glyphs: Glyphs, seed: int) -> None:
        self.glyphs = glyphs
        self.random = torch.Generator().manual_seed(seed)
        self.count = torch.bincount(glyphs.y, minlength=len(CHARACTERS))
        self.order = torch.argsort(glyphs.y, stable=True)
        self.first = self.count.cumsum(0) - self.count

    def __call__(self, n: int) -> Pictures:
        """Return the next n pictures, of uniformly sampled characters and fonts."""
        y = torch.randint(len(CHARACTERS), (n,), generator=self.random)
        font = (self.uniform(n, 0, 1) * self.count[y]).long()
        ink = self.ink(self.order[self.first[y] + font])
        paper, stroke = self.colors(n)
        roughness = self.sometimes(n, 0.65) * self.uniform(n, 0.05, 0.4)
        texture = self.sometimes(n, 0.3) * self.uniform(n, 0.05, 0.3)
        background = (_image(paper) + _image(roughness) * self.clouds(n)).clamp(0, 1)
        color = (_image(stroke) + _image(texture) * self.clouds(n)).clamp(0, 1)
        x = torch.where(
            _image(self.sometimes(n, 0.15)) > 0,
            (background - ink * color).abs(),
            torch.lerp(background, color, ink),
        )
        blur = torch.zeros(n)
        for k, cells in enumerate((16, 11)):  # a sixth of the pictures each
            rows = slice(k * (n // 6), (k + 1) * (n // 6))
            x[rows] = _enlarged(F.interpolate(x[rows], size=cells, mode="area"), SIDE)
            blur[rows] = 1 - cells / SIDE
        noise = self.sometimes(n, 0.5) * self.uniform(n, 0, 0.12)
        x = x + _image(noise) * torch.randn(x.shape, generator=self.random)
        style = torch.cat([paper, stroke, torch.stack([roughness, noise, blur], 1)], 1)
        mean, std = torch.tensor(list(STYLE.values())).T
        return Pictures((255 * x.clamp(0, 1)).round().byte(), y, (style - mean) / std)

    def ink(self, chosen: Tensor) -> Tensor:
        """Return the ink coverage of randomly transformed glyphs, [N, 1, SIDE, SIDE]."""
        n = len(chosen)
        zoom = HEIGHT / CANVAS * SIDE / self.uniform(n, 14, 29)
        aspect = torch.exp(self.uniform(n, -0.25, 0.25))
        angle, slant = torch.deg2rad(self.uniform(n, -25, 25)), self.uniform(n, -0.35, 0.35)
        cos, sin = torch.cos(angle), torch.sin(angle)
        across = torch.stack([cos, slant * cos - sin], 1) * (zoom * aspect)[:, None]
        down = torch.stack([sin, slant * sin + cos], 1) * (zoom / aspect)[:, None]
        shift = self.uniform((n, 2, 1), -0.18, 0.18)
        matrix = torch.cat([torch.stack([across, down], 1), shift], 2)
        # Rendered at twice the size and halved at the end, for smooth edges.
        grid = F.affine_grid(matrix, [n, 1, 2 * SIDE, 2 * SIDE], align_corners=False)
        bend = torch.randn(n, 2, 4, 4, generator=self.random) * _image(self.uniform(n, 0, 0.12))
        grid = grid + _enlarged(bend, 2 * SIDE).permute(0, 2, 3, 1)
        ink = F.grid_sample(self.glyphs.ink[chosen], grid, align_corners=False)
        for side in (-1, 1):  # neighbors, as in a number of several digits
            rows = torch.nonzero(self.sometimes(n, 0.2)).flatten()
            others = torch.randint(len(self.glyphs.y), (len(rows),), generator=self.random)
            beside = grid[rows]
            beside[..., 0] -= side * self.uniform(len(rows), 0.85, 1.2)[:, None, None]
            other = F.grid_sample(self.glyphs.ink[others], beside, align_corners=False)
            ink[rows] = torch.maximum(ink[rows], other)
        thick = _image(self.uniform(n, -0.6, 1))
        fat, thin = F.max_pool2d(ink, 3, 1, 1), -F.max_pool2d(-ink, 3, 1, 1)
        ink = torch.lerp(ink, torch.where(thick > 0, fat, thin), thick.abs())
        return F.avg_pool2d(ink, 2)

    def colors(self, n: int) -> tuple[Tensor, Tensor]:
        """Return colors of paper and ink, [N, 3]; their brightness differs by 0.25 or so."""
        paper, ink = self.uniform((2, n, 3), 0, 1)
        gray = self.sometimes(n, 0.4)[:, None] > 0
        paper = torch.where(gray, paper.mean(1, keepdim=True), paper)
        ink = torch.where(gray, ink.mean(1, keepdim=True), ink)
        black = self.sometimes(n, 0.2)[:, None] > 0
        paper, ink = torch.where(black, 0.0, paper), torch.where(black, 1.0, ink)
        apart = ink.mean(1, keepdim=True) - paper.mean(1, keepdim=True)
        push = torch.where(apart >= 0, 0.5, -0.5) * (0.25 - apart.abs()).clamp(min=0)
        return (paper - push).clamp(0, 1), (ink + push).clamp(0, 1)

    def clouds(self, n: int) -> Tensor:
        """Return textures, [N, 3, SIDE, SIDE] in ±1, of random scale, sharpness and color."""
        total = torch.zeros(n, 3, SIDE, SIDE)
        for cells in (2, 4, 8, 16):
            noise = torch.randn(n, 3, cells, cells, generator=self.random)
            total += _enlarged(noise, SIDE) * _image(self.uniform(n, 0, 1)) ** 2
        gray = _image(self.sometimes(n, 0.5)) > 0
        total = torch.where(gray, total.mean(1, keepdim=True), total)
        return torch.tanh(total * _image(self.uniform(n, 0.5, 6)))

    def uniform(self, shape: int | tuple[int, ...], low: float, high: float) -> Tensor:
        """Return uniform random numbers from ``low`` to ``high``."""
        return low + (high - low) * torch.rand(shape, generator=self.random)

    def sometimes(self, n: int, probability: float) -> Tensor:
        """Return n random numbers: 1 with the given probability, else 0."""
        return (torch.rand(n, generator=self.random) < probability).float()


def _image(x: Tensor) -> Tensor:
    """Reshape to [N, channels, 1, 1]."""
    return x.reshape(len(x), -1, 1, 1)


def _enlarged(x: Tensor, side: int) -> Tensor:
    return F.interpolate(x, size=side, mode="bilinear", align_corners=False)


# --- training --------------------------------------------------------------------------


def train(pictures: int) -> nn.Module:
    """Train a transformer on a number of pictures, each used once, and return it without head."""
    torch.manual_seed(SEED)
    vit = vit_tiny(len(CHARACTERS) + len(STYLE))
    render = Renderer(draw(training_fonts()), SEED)
    matrices = [p for p in vit.parameters() if p.ndim > 1]
    others = [p for p in vit.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others}],
        lr=LR,
        weight_decay=0,
        fused=True,
    )
    steps = pictures // BATCH
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LR, total_steps=steps, pct_start=min(0.3, WARM_UP / steps), cycle_momentum=False
    )
    start, losses, right = time.time(), [], []
    for step in range(1, steps + 1):
        x, y, style = render(BATCH)
        character, predicted_style = vit(normalize(x)).split([len(CHARACTERS), len(STYLE)], 1)
        loss = F.cross_entropy(character, y) + STYLE_WEIGHT * F.mse_loss(predicted_style, style)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vit.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        right.append((character.argmax(1) == y).float().mean().item())
        if step % 250 == 0 or step == steps:
            print(
                f"{step * BATCH:7d} pictures, {time.time() - start:4.0f} s "
                f"({time.process_time():4.0f} s of CPUs): "
                f"loss {np.mean(losses[-250:]):.3f}, accuracy {np.mean(right[-250:]):.3f}",
                flush=True,
            )
    vit.heads = nn.Identity()
    return vit.eval()


def normalize(x: Tensor) -> Tensor:
    """Normalize with mean and standard deviation 0.5, as data sets of digits do."""
    return x.float() / 127.5 - 1


# --- evaluation of the frozen features -------------------------------------------------


def score(vit: nn.Module, train: Pictures, test: Pictures) -> str:
    """Return the accuracy of a logistic regression on frozen features."""
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500))
    model.fit(features(vit, train.x), train.y)
    return f"{100 * model.score(features(vit, test.x), test.y):.1f} %"


def features(vit: nn.Module, x: Tensor) -> np.ndarray:
    """Return the class tokens, [N, d]."""
    with torch.inference_mode():
        return np.concatenate([vit(normalize(part)).numpy() for part in x.split(256)])


def digits_only(pictures: Pictures) -> Pictures:
    """Return the pictures of digits."""
    rows = pictures.y < 10
    return Pictures(*(values[rows] for values in pictures))


def probe(vit: nn.Module, name: str, at_most: int = 2000) -> None:
    """Print the accuracies on the domains of a data set, and of predicting the domain."""
    data = prepare(DataConfig(name, clients_per_domain=1, examples_per_client=at_most))
    parts: list[list[Pictures]] = [[], []]
    for number, domain in enumerate(data.domains):
        (client,) = data.clients_of(domain)
        splits = (data.train(client), data.test(domain))
        for part, split in zip(parts, splits, strict=True):
            x, y = torch.tensor(split.x[:at_most]), torch.tensor(split.y[:at_most])
            part.append(Pictures(x, y, torch.full((len(y),), number)))
        print(f"{name}, {domain}:", score(vit, parts[0][-1], parts[1][-1]))
    everything = [
        Pictures(torch.cat([p.x for p in part]), torch.cat([p.style for p in part]), part[0].y)
        for part in parts
    ]
    print(f"{name}, which domain:", score(vit, *everything))


def to_text(arrays: Mapping[str, Tensor]) -> str:
    """Encode named tensors as JSON for `fairflower.models.pretrained.decode_json_weights`.

    Weights have half precision: three digits, in 2.5 bytes of text.
    """
    named = {}
    for name, tensor in arrays.items():
        array = tensor.detach().cpu().numpy()
        if array.dtype.kind == "f":
            text = base64.b85encode(array.astype("<f2").tobytes()).decode()
            named[name] = {"shape": list(array.shape), "float16": text}
        else:
            named[name] = {"shape": list(array.shape), "int64": array.ravel().tolist()}
    return json.dumps(named, indent=0) + "\n"


def main() -> None:
    """Train, save the weights, and print accuracies on held-out fonts and on a data set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=int, default=PICTURES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, help="JSON to write the weights to")
    parser.add_argument("--probe", default="", help="data set whose domains are classified")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    vit = train(arguments.pictures)
    if arguments.output:
        arguments.output.write_text(to_text(vit.state_dict()), encoding="ascii")
    seen = Renderer(draw(training_fonts()), SEED + 1)(8000)
    held_out = Renderer(draw(uci_fonts("test")), SEED + 2)(4000)
    print("held-out fonts, 34 characters:", score(vit, seen, held_out))
    print("held-out fonts, digits:", score(vit, digits_only(seen), digits_only(held_out)))
    if arguments.probe:
        probe(vit, arguments.probe)


if __name__ == "__main__":
    main()
