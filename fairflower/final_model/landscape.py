"""Loss landscape of a trained model, and its sharpness for each client (FedISM).

The landscape shows the loss along two random directions (FedISM's Fig. 7). Sharpness is measured as
in FedISM's Table 7, for a model trained with any method.
"""

from __future__ import annotations

import copy
import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fairflower.clients.local_arrays import LocalArraysTrainer
from fairflower.config import RunConfig
from fairflower.data import Federation, Split, prepare
from fairflower.errors import ConfigError, RunFolderError
from fairflower.files import cell_of
from fairflower.models import set_arrays, trainable
from fairflower.numerics import Vector
from fairflower.numerics.threads import cpus
from fairflower.report import Run
from fairflower.report.reading import model_file
from fairflower.seeds import derive_seed
from fairflower.server.checkpoint import check_same_examples, run_config
from fairflower.training.batches import Examples, examples_of
from fairflower.training.build import build_model
from fairflower.training.device import choose_device, float64_on
from fairflower.training.gradients import sharpness

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
    ``data_dir`` is the data folder if it differs from the folder used in training. ``advance`` is
    called after every point, from any thread.

    Raises
    ------
    ConfigError
        If grid, span, images or device are invalid; the message names the option of the command.
    RunFolderError
        If the run has no model, or its model does not fit the config.
    DataError
        If the run's data are not on this machine.
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


def load_run_model(
    run: Run, data_dir: str, device: str
) -> tuple[RunConfig, Federation, nn.Module, torch.device]:
    """Return a run's config, data, final model and device; see `landscape` and `load_model`.

    Raises ``ConfigError`` if the data are not those of the run.
    """
    place = {"data.dir": data_dir} if data_dir else {}
    config = run_config(run.path, {**run.config, **place})
    chosen = choose_device(device, option="--device")
    federation = prepare(config.data)
    check_same_examples(run.path, run.info, federation)
    return config, federation, load_model(run, config, federation).to(chosen), chosen


def load_model(run: Run, config: RunConfig, federation: Federation) -> nn.Module:
    """Load a run's final model, in eval mode.

    Raises `RunFolderError` if the run has no model or the model does not match the config.
    """
    path = model_file(run)
    # As the clients build it: arrays that stay with them have their initial values.
    keeps = issubclass(config.client.factory, LocalArraysTrainer) and run.info.get("local_arrays")
    spec, seed = (config.model, config.seed) if keeps else (config.model.to_receive(), 0)
    model = build_model(spec, config.client, federation, seed=seed)
    try:
        set_arrays(model, load_file(path), config.model.name)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"{path} does not contain a {config.model.name} for these data: {error}"
        ) from error
    return model.eval()


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


@dataclass(frozen=True)
class ClientSharpness:
    """Sharpness of a run's final model for each client."""

    label: str
    seed: int
    values: Mapping[str, Vector]  # domain -> sharpness for each of its clients, shape [k]

    @property
    def over_clients(self) -> tuple[float, float]:
        """Mean and standard deviation (ddof 0) over all clients."""
        every = np.concatenate(list(self.values.values()))
        return float(every.mean()), float(every.std())


def client_sharpness(
    run: Run,
    *,
    rho: float | None = None,
    data_dir: str = "",
    device: str = "auto",
    advance: Callable[[], object] = lambda: None,
) -> ClientSharpness:
    """Measure the final model's sharpness on each client's training images, without augmentation.

    ``run``, ``data_dir``, ``device`` and errors are as in `landscape`. ``rho`` is the perturbation
    radius (`fairflower.clients.sharpness`); the default is the run's ``measure.rho``. ``advance``
    is called after every client.
    """
    if rho is not None and not 0 <= rho < float("inf"):
        raise ConfigError(f"--rho {rho}: expected a finite number >= 0.")
    config, federation, model, chosen = load_run_model(run, data_dir, device)
    radius = config.measure.rho if rho is None else rho
    values: dict[str, list[float]] = {domain: [] for domain in federation.domains}
    for client in federation.clients:
        split = federation.train(client.client_id)
        images = examples_of(split, federation.mean, federation.std, device=chosen)
        values[client.domain].append(sharpness(model, images, rho=radius))
        advance()
    by_domain = {domain: np.array(list_) for domain, list_ in values.items()}
    return ClientSharpness(run.label, int(run.seed), by_domain)


def write_csv(measured: Iterable[ClientSharpness], path: Path) -> None:
    """Write a CSV file: method, seed, domain, place (client's index in its domain), sharpness."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["method", "seed", "domain", "place", "sharpness"])
        for sharpness in measured:
            for domain, values in sharpness.values.items():
                for place, value in enumerate(values.tolist()):
                    cells = sharpness.label, sharpness.seed, domain, place, value
                    writer.writerow(map(cell_of, cells))
