"""Plot the loss around the final model of runs (FedISM's Fig. 7).

    python -m experiments.landscape RUN ...

The loss is computed along two random directions, on training and test examples of every domain.
"""

from __future__ import annotations

import copy
import csv
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import numpy as np
import torch
import typer
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.contour import ContourSet
from matplotlib.ticker import MaxNLocator
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.api.final_model import load_run_model
from fairflower.cli.options import NUMBER, DataDir, Device, RunFolders
from fairflower.cli.terminal import console, friendly_errors, say_where
from fairflower.data import Federation, Split
from fairflower.errors import ConfigError
from fairflower.files import cell_of
from fairflower.models import trainable
from fairflower.numerics import Vector
from fairflower.numerics.threads import cpus
from fairflower.paths import run_folders
from fairflower.report import Run, read_run
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, PageFigure
from fairflower.seeds import derive_seed
from fairflower.server.progress import counting_bar
from fairflower.training.batches import Examples, examples_of
from fairflower.training.device import float64_on

SPLITS = ("train", "test")

#: Largest number of points along a side of the grid; each point needs one pass over the images.
LARGEST_GRID = 501


@dataclass(frozen=True)
class Surface:
    """Mean cross entropy around a model on a domain's images, without augmentation.

    ``loss`` has the shape [G, G]; ``loss[i, j]`` is the loss at ``y = steps[i]``, ``x = steps[j]``.
    """

    domain: str
    split: str  # "train" or "test"
    num_images: int
    loss: Vector

    @property
    def center(self) -> float:
        """Loss of the model itself."""
        middle = len(self.loss) // 2
        return float(self.loss[middle, middle])


@dataclass(frozen=True)
class Landscape:
    """Loss surfaces of a model for each domain, on training images and then on test images."""

    label: str  # label of the run's method
    steps: Vector  # [G], from -span to span; the model is at 0, in the middle
    surfaces: tuple[Surface, ...]  # all surfaces use the same two directions

    def write_csv(self, path: Path) -> None:
        """Write a CSV file with the columns domain, split, x, y and loss."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["domain", "split", "x", "y", "loss"])
            for surface in self.surfaces:
                points = product(self.steps.tolist(), repeat=2)
                for (y, x), loss in zip(points, surface.loss.ravel().tolist(), strict=True):
                    writer.writerow([cell_of(surface.domain), surface.split, x, y, loss])


def landscape(
    run: Run,
    *,
    grid: int = 21,
    span: float = 1.0,
    images: int = 500,
    seed: int = 0,
    data_dir: str = "",
    device: str = "auto",
    advance: Callable[[], object] = lambda: None,
) -> Landscape:
    """Compute the loss of ``w + x d + y e`` on a grid of x and y, for a run's final model w.

    d and e are random directions with the filter norms of w (`filter_normalized`). Batch norm uses
    its running statistics. On a CPU a single thread computes each point of the grid, so the result
    does not depend on the number of cores.

    x and y each take ``grid`` values from ``-span`` to ``span``. ``grid`` must be odd, so that the
    model itself is a point of the grid. A step of 1 moves each filter by its norm (Li et al. use a
    span of 1). ``images`` is the number of random images per domain and split; 0 means all.
    ``seed`` determines images and directions, so all runs of the same network get the same draws.
    ``advance`` is called after every point, from any thread. ``data_dir``, ``device`` and errors
    are as in `load_run_model`; invalid options raise ``ConfigError``, too.
    """
    if grid < 3 or grid % 2 == 0:
        raise ConfigError(f"--grid {grid}: expected an odd number >= 3.")
    if grid > LARGEST_GRID:
        raise ConfigError(f"--grid {grid}: expected at most {LARGEST_GRID}.")
    if not 0 < span < float("inf"):
        raise ConfigError(f"--span {span}: expected a finite number above 0.")
    if images < 0:
        raise ConfigError(f"--images {images}: expected a positive number, or 0 for all examples.")
    config, federation, model, chosen = load_run_model(run, data_dir, device)
    sets = [(domain, split) for split in SPLITS for domain in federation.domains]
    data = [_images(federation, *which, images, seed, chosen) for which in sets]
    directions = [filter_normalized(model, derive_seed(seed, axis)) for axis in ("x", "y")]
    steps = np.linspace(-span, span, grid)
    steps[grid // 2] = 0.0
    losses = surfaces(
        model, directions, steps, data, batch_size=config.evaluate.batch_size, advance=advance
    )
    entries = zip(sets, data, losses, strict=True)
    return Landscape(
        run.label, steps, tuple(Surface(*which, len(of), loss) for which, of, loss in entries)
    )


def filter_normalized(model: nn.Module, seed: int) -> list[Tensor]:
    """Draw a random direction whose filters have the same norms as the model's filters.

    For every trainable parameter w, a Gaussian d is drawn, and each filter i is scaled: ``d_i <-
    ||w_i|| / ||d_i|| d_i``. A filter is an output channel of a convolution, or a row of a matrix.
    For one-dimensional parameters (biases, and scales and shifts of norms) d is 0, as in the
    authors' code (Li et al., NeurIPS 2018). Random numbers are always drawn on the CPU. Returns a
    tensor for every trainable parameter, with the parameter's shape and device.
    """
    generator = torch.Generator().manual_seed(seed)
    direction = []
    for w in trainable(model).values():
        if w.dim() <= 1:
            direction.append(torch.zeros_like(w))
            continue
        d = torch.randn(w.shape, generator=generator).to(w)
        of_w, of_d = (torch.linalg.vector_norm(v.flatten(1), dim=1) for v in (w.detach(), d))
        direction.append(d * (of_w / (of_d + 1e-10)).view(-1, *[1] * (w.dim() - 1)))
    return direction


def surfaces(
    model: nn.Module,
    directions: Sequence[Sequence[Tensor]],
    steps: Vector,
    data: Sequence[Examples],
    *,
    batch_size: int = 500,
    advance: Callable[[], object] = lambda: None,
) -> Vector:
    """Return the mean cross entropy of ``w + x d + y e`` for S data sets, shape [S, G, G].

    The axes of the result are data set, y and x. ``model`` has the parameters w; it is unchanged,
    and its mode (train or eval) is kept. The ``directions`` d and e each have a tensor for every
    trainable parameter. ``steps``, shape [G], are the values of x and of y. ``advance`` is called
    after every point, from any thread.
    """
    on_cpu = next(model.parameters()).device.type == "cpu"
    threads = cpus() if on_cpu else 1
    w = trainable(model).values()
    free: SimpleQueue[nn.Module] = SimpleQueue()
    for _ in range(threads):
        free.put(copy.deepcopy(model))

    def losses_at(point: tuple[float, float]) -> list[float]:
        y, x = point
        moved = free.get()
        try:
            with torch.inference_mode():
                moving = trainable(moved).values()
                for p, start, d, e in zip(moving, w, *directions, strict=True):
                    p.copy_(start + x * d + y * e)
                return [_mean_loss(moved, images, batch_size) for images in data]
        finally:
            free.put(moved)
            advance()

    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        # An error or an interrupt cancels the points that have not started.
        grid_losses = list(pool.map(losses_at, product(steps.tolist(), repeat=2)))
    return np.array(grid_losses).T.reshape(len(data), len(steps), len(steps))


def _mean_loss(model: nn.Module, images: Examples, batch_size: int) -> float:
    total = torch.zeros((), dtype=float64_on(images.device), device=images.device)
    for x, y in images.eval_batches(batch_size):
        total += F.cross_entropy(model(x), y, reduction="sum")
    return total.item() / len(images)


def _images(
    federation: Federation, domain: str, split: str, number: int, seed: int, device: torch.device
) -> Examples:
    """Return a domain's examples, from its clients' training data or from its test set."""
    x, y = federation.test(domain, split)
    rows = np.arange(len(y))
    if 0 < number < len(y):
        random = np.random.default_rng(derive_seed(seed, domain, split))
        rows = np.sort(random.choice(len(y), number, replace=False))
    return examples_of(Split(x[rows], y[rows]), federation.mean, federation.std, device=device)


# --- the figure --------------------------------------------------------------------------------

#: Largest and smallest number of contour lines.
_LINES = 18
_FEW = 5
_COLORS = "viridis"


def draw(landscape: Landscape, levels: Vector, folder: Path, prefix: str = "") -> PageFigure:
    """Draw a landscape and save it as ``folder/<prefix>landscape.png`` and ``.svg``.

    The figure has a row for training images, a row for test images and a column for each domain.
    ``levels`` are the losses of the contours in all panels (`levels_of`).
    """
    (drawn,) = canvas.save(_sketch(landscape, levels), folder, prefix)
    return drawn


def levels_of(landscapes: Sequence[Landscape]) -> Vector:
    """Return contour levels for several landscapes: rounded losses in a geometric sequence."""
    every = np.concatenate([s.loss.ravel() for landscape in landscapes for s in landscape.surfaces])
    losses = every[np.isfinite(every) & (every > 0)]
    if not losses.size:
        return np.array([0.0, 1.0])
    low, high = float(losses.min()), float(losses.max())
    ends = _rounded(low, math.floor), _rounded(high, math.ceil)
    levels = np.unique([_rounded(level, round) for level in np.geomspace(*ends, _LINES)])
    if len(levels) < _FEW:  # the losses agree to two digits
        return np.linspace(low * (1 - 1e-6), high * (1 + 1e-6), _FEW)
    return levels


def _rounded(value: float, rule: Callable[[float], int]) -> float:
    """Round a number to two significant digits.

    >>> _rounded(0.03479, round), _rounded(0.03479, math.floor), _rounded(312.4, math.ceil)
    (0.035, 0.034, 320.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{rule(value / unit) * unit:.2g}")


def _sketch(landscape: Landscape, levels: Vector) -> Iterator[FigureDraft]:
    splits = list(dict.fromkeys(surface.split for surface in landscape.surfaces))
    domains = list(dict.fromkeys(surface.domain for surface in landscape.surfaces))
    sheet, axes = canvas.panels(
        len(splits), len(domains), 2.6 * len(domains) + 1.4, 2.55 * len(splits) + 0.8,
        sharex=True, sharey=True,
    )  # fmt: skip
    title = f"Loss around the model trained with {landscape.label}"
    # The figure may be used without its caption.
    sheet.suptitle(title, x=0.01, ha="left", size=10.5)
    norm = BoundaryNorm(levels, 256)
    for surface in landscape.surfaces:
        panel = axes[splits.index(surface.split), domains.index(surface.domain)]
        filled = _panel(panel, landscape.steps, surface, levels, norm)
    for panel in axes[-1]:
        panel.set_xlabel("x")
    for panel in axes[:, 0]:
        panel.set_ylabel("y")
    bar = sheet.colorbar(filled, ax=axes, label="loss", shrink=0.9, pad=0.02)
    bar.outline.set_linewidth(0.6)
    bar.set_ticks(levels.tolist(), labels=[f"{level:.3g}" for level in levels])
    bar.minorticks_off()
    alt_parts = (f"{s.domain}, {s.split}: {s.center:.3g}" for s in landscape.surfaces)
    yield FigureDraft(
        "landscape",
        sheet,
        title,
        "Loss along two random directions whose filters have the same norms as the model's; + "
        "marks the model.",
        f"Contour plots of the loss. Loss of the model itself: {'; '.join(alt_parts)}.",
    )


def _panel(
    panel: Axes, steps: Vector, surface: Surface, levels: Vector, norm: BoundaryNorm
) -> ContourSet:
    loss = np.ma.masked_invalid(np.clip(surface.loss, levels[0], levels[-1]))
    filled = panel.contourf(steps, steps, loss, levels, norm=norm, cmap=_COLORS)
    panel.contour(steps, steps, loss, levels, colors="white", linewidths=0.5, alpha=0.6)
    panel.plot(0, 0, "+", color="white", markersize=8, markeredgewidth=1.4)
    panel.set_title(f"{surface.domain}, {surface.split}: {surface.center:.3g} at +")
    panel.xaxis.set_major_locator(MaxNLocator(4))
    panel.yaxis.set_major_locator(MaxNLocator(4))
    panel.set_aspect("equal")
    panel.grid(visible=False)
    return filled


# --- the command ------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@friendly_errors()
def plot(
    runs: RunFolders,
    grid: Annotated[
        int, typer.Option(help="Number of points along each side of the grid; must be odd.")
    ] = 21,
    span: Annotated[
        float,
        typer.Option(
            help="Largest step along each direction; a step of 1 moves each filter by the "
            "filter's norm.",
            **NUMBER,
        ),
    ] = 1.0,
    images: Annotated[
        int,
        typer.Option(help="Number of training and of test examples per domain. 0 means all."),
    ] = 500,
    seed: Annotated[
        int, typer.Option(help="Random seed for choosing the directions and the examples.")
    ] = 0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Output folder. Default: each run's own folder."),
    ] = None,
    data_dir: DataDir = None,
    device: Device = "auto",
) -> None:
    """Plot the loss around the final model, on training and test examples of every domain.

    Writes landscape.png, landscape.svg and landscape.csv. Figures of several runs use the same
    contour levels.
    """
    if out and out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file. Name a folder.")
    selected = [read_run(folder) for folder in run_folders(*runs)]
    if out and len({run.path.name for run in selected}) < len(selected):
        raise ConfigError(
            f"--out {out}: several runs have the same folder name, so their files would "
            "overwrite each other. Remove --out."
        )
    landscapes, places = [], []
    with counting_bar(console, "points", transient=True) as bar:
        tasks = [bar.add_task(run.path.name, total=grid**2) for run in selected]
        for run, task in zip(selected, tasks, strict=True):
            landscapes.append(
                landscape(
                    run,
                    grid=grid,
                    span=span,
                    images=images,
                    seed=seed,
                    data_dir=data_dir or "",
                    device=device,
                    advance=lambda task=task: bar.advance(task),  # type: ignore[misc]
                )
            )
            folder, prefix = (out, f"{run.path.name}-") if out else (run.path, "")
            folder.mkdir(parents=True, exist_ok=True)
            landscapes[-1].write_csv(folder / f"{prefix}landscape.csv")
            places.append((folder, prefix))
    levels = levels_of(landscapes)
    for run, found, (folder, prefix) in zip(selected, landscapes, places, strict=True):
        draw(found, levels, folder, prefix)
        console.print(_heights(run.path.name, found))
        say_where("landscape", folder / f"{prefix}landscape.png")


def _heights(run: str, landscape: Landscape) -> Table:
    """Return a table of the model's loss and the mean increase in the loss around it."""
    table = Table(title=f"Loss around the model of {escape(run)}", title_justify="left")
    for column in ("domain", "examples", "loss", "mean rise"):
        table.add_column(column, justify="left" if column == "domain" else "right")
    for surface in landscape.surfaces:
        rise = surface.loss.mean() - surface.center
        numbers = (f"{surface.num_images} {surface.split}", f"{surface.center:.4f}", f"{rise:.4f}")
        table.add_row(escape(surface.domain), *numbers)
    return table


if __name__ == "__main__":
    app()
