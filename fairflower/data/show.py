"""Views of a prepared data set: a table of clients, and sample images or statistics."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.markup import escape
from rich.table import Table

from fairflower.config.text import counted
from fairflower.data.federation import Federation
from fairflower.tasks.segmentation import UNKNOWN

COLUMNS = 12  # number of training images per domain on the contact sheet
LONGEST = 13  # maximum number of letters in a class name above an image


def contact_sheet(federation: Federation, path: str | Path) -> Path:
    """Save a PNG with one row of labeled training images per domain, and return its path.

    Masks are outlined in their images. The images come from all clients of a domain. The folder of
    ``path`` is created if needed.
    """
    from matplotlib.figure import Figure

    # In inches: square cells, with space above each row for its heading and the labels.
    cell, gap, margin, heading = 0.7, 0.05, 0.15, 0.45
    rows, names = len(federation.domains), federation.class_names
    width = 2 * margin + COLUMNS * cell + (COLUMNS - 1) * gap
    height = margin + rows * (cell + heading)
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(rows, COLUMNS, squeeze=False)
    left, bottom, top = margin / width, margin / height, 1 - heading / height
    figure.subplots_adjust(left, bottom, 1 - left, top, gap / cell, heading / cell)
    for row, domain, test_size in zip(grid, federation.domains, federation.test_sizes, strict=True):
        clients = federation.clients_of(domain)
        train_size = sum(federation.clients[client].num_examples for client in clients)
        count = counted(len(clients), "client")
        sizes = f"{count}, {train_size:,} training images, {test_size:,} test images"
        style: dict[str, Any] = {"fontsize": 9, "parse_math": False}
        row[0].text(0, 1.3, domain, transform=row[0].transAxes, weight="bold", **style)
        style |= {"color": "0.35", "ha": "right"}
        row[-1].text(1, 1.3, sizes, transform=row[-1].transAxes, **style)
        each = max(1, COLUMNS // len(clients))  # the first images of each client
        parts = [(x[:each], y[:each]) for x, y in map(federation.train, clients[:COLUMNS])]
        for axis in row:
            axis.set_axis_off()
        for axis, image, label in zip(
            row, *map(np.concatenate, zip(*parts, strict=True)), strict=False
        ):
            picture = np.broadcast_to(image, (3, *image.shape[1:])).transpose(1, 2, 0)
            axis.imshow(picture, interpolation="nearest")
            name = names[label] if federation.learns.classes else _shown(label)
            if label.ndim == 2:
                name = _outlined(axis, label)
            if len(name) > LONGEST:
                name = name[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
            axis.set_title(name, fontsize=7, pad=2, color="0.35", parse_math=False)
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    return path


def _outlined(axis: Any, mask: Any) -> str:
    """Outline each class of a mask from 1; return the share of the image that they cover."""
    classes = [int(c) for c in np.unique(mask) if 0 < c < UNKNOWN]
    for c in classes:
        region = np.pad(mask == c, 1)  # so that outlines are closed at the image's border
        places = (np.arange(-1, size - 1) for size in region.shape[::-1])
        axis.contour(*places, region, levels=[0.5], colors=[f"C{c}"], linewidths=0.8)
    height, width = mask.shape
    axis.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5))
    return f"{np.isin(mask, classes).mean():.0%}"


def _shown(target: Any) -> str:
    """Return an example's target as text; NaN, an unknown label, is a question mark."""
    values = np.atleast_1d(target)
    return " ".join("?" if np.isnan(value) else f"{value:g}" for value in values.ravel()[:LONGEST])


def clients_table(federation: Federation) -> Table:
    """Return a table of class counts per client, with totals and test sizes per domain."""
    named = zip(federation.domains, federation.sources, strict=True)
    sources = [f"{domain}: {source}" for domain, source in named]
    if federation.held_out:
        sources.append(f"{federation.held_out}: held out, {federation.held_out_size} test examples")
    numbered = ", ".join(f"{k} {name}" for k, name in enumerate(federation.classes))
    counts = federation.learns.classes
    classes = [f"{'classes' if counts else 'targets'}: {numbered}"] if numbered else []
    classes += [] if counts else [f"task: {federation.task}"]
    shown = Table(
        title=f"{federation.name}: training examples per client{' and class' * counts}",
        caption=escape("\n".join([*classes, *sources])),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    splits = {"test": federation.test_sizes}
    if federation.validation_sizes:
        splits["validation"] = federation.validation_sizes
    per_class = np.sum([client.class_counts for client in federation.clients], axis=0).tolist()
    width = len(str(max([*per_class, federation.num_classes])))
    per_line = 10 if width < 5 else 5  # in a terminal of 80 columns, which would crop more columns

    def in_lines(numbers: Sequence[int]) -> str:
        padded = [str(number).rjust(width) for number in numbers]
        lines = range(0, len(padded), per_line)
        return "\n".join(" ".join(padded[first : first + per_line]) for first in lines)

    shown.add_column("client", justify="right", no_wrap=True)
    shown.add_column("domain", overflow="fold")
    shown.add_column("train", justify="right", no_wrap=True)
    if counts:
        shown.add_column(in_lines(range(federation.num_classes)), overflow="fold")
    for heading in splits:
        shown.add_column(heading, justify="right", no_wrap=True)
    for domain, *sizes in zip(federation.domains, *splits.values(), strict=True):
        clients = [federation.clients[client] for client in federation.clients_of(domain)]
        for client in clients:
            numbers = str(client.num_examples), *[in_lines(client.class_counts)] * counts
            shown.add_row(str(client.client_id), escape(domain), *numbers)
        totals = np.sum([client.class_counts for client in clients], axis=0).tolist()
        numbers = str(sum(c.num_examples for c in clients)), *[in_lines(totals)] * counts
        shown.add_row(
            *("all", escape(domain), *numbers, *map(str, sizes)),
            style="bold",
            end_section=True,
        )
    return shown


def examples_table(federation: Federation, names: Sequence[str] = ()) -> Table:
    """Return a table with statistics of each domain's training examples (features or token ids).

    For features, each row has the mean and standard deviation of a feature, labeled with its name
    in ``names`` or else with its number. For token ids, the rows are the length of the texts and
    the number of distinct ids.
    """
    title = (
        f"{federation.name}: {federation.kind} of the training examples per domain, "
        "mean ± standard deviation (ddof 0)"
    )
    shown = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("")
    rows = list(names) or [f"feature {k}" for k in range(*federation.shape[:1])]
    if federation.kind == "tokens":
        rows = ["tokens per text", f"distinct tokens, out of {federation.shape[0] - 1:,}"]
    columns = []
    for domain in federation.domains:
        shown.add_column(escape(domain), justify="right")
        x = federation.test(domain, "train").x
        values = x if federation.kind == "features" else np.count_nonzero(x, axis=1)[:, None]
        pairs = zip(values.mean(0, np.float64), values.std(0, np.float64), strict=True)
        columns.append([f"{mean:.3g} ±{std:.3g}" for mean, std in pairs])
        if federation.kind == "tokens":
            columns[-1].append(f"{len(np.unique(x[x > 0])):,}")
    for row, *cells in zip(rows, *columns, strict=True):
        shown.add_row(escape(row), *cells)
    return shown
