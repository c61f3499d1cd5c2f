"""Looking at a prepared benchmark: a contact sheet of images and a table of clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.table import Table

from fairflower.data.federation import Federation, Split

#: Training images of each domain on the contact sheet.
COLUMNS = 12


def contact_sheet(federation: Federation, path: str | Path) -> Path:
    """Write a PNG with a row of training images for each domain, and their labels.

    The images are spread over the domain's clients. The folder of ``path`` is made if it
    is missing; the path is returned.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    domains = federation.domains
    figure = Figure(figsize=(COLUMNS * 0.75 + 0.3, len(domains) * 1.22 + 0.3), dpi=150)
    FigureCanvasAgg(figure)
    rows = figure.subfigures(len(domains), 1, squeeze=False)[:, 0]
    for row, domain, test_size in zip(rows, domains, federation.test_sizes, strict=True):
        clients = federation.clients_of(domain)
        train_size = sum(federation.clients[client].num_examples for client in clients)
        row.suptitle(
            f"$\\bf{{{_escaped(domain)}}}$    {train_size:,} training images, "
            f"{len(clients)} clients    {test_size:,} test images",
            x=0.02,
            y=0.98,
            ha="left",
            va="top",
            fontsize=9,
        )
        sample = _sample(federation, clients)
        axes = row.subplots(1, COLUMNS, gridspec_kw={"wspace": 0.06})
        row.subplots_adjust(left=0.02, right=0.98, bottom=0.02, top=0.68)
        for axis in axes:
            axis.set_axis_off()
        for axis, image, label in zip(axes, sample.x, sample.y, strict=False):
            axis.imshow(
                image.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255, interpolation="nearest"
            )
            axis.set_title(str(label), fontsize=8, pad=2, color="0.35")
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path


def table(federation: Federation) -> Table:
    """Clients, domains and class counts, with each domain's totals and test images."""
    classes = [str(label) for label in range(federation.num_classes)]
    shown = Table(
        title=f"{federation.name}: training images per client and class",
        caption="\n".join(
            f"{domain}: {source}"
            for domain, source in zip(federation.domains, federation.sources, strict=True)
        ),
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("client", justify="right")
    shown.add_column("domain")
    for heading in ("images", *classes, "test"):
        shown.add_column(heading, justify="right")
    for domain, test_size in zip(federation.domains, federation.test_sizes, strict=True):
        clients = [federation.clients[client] for client in federation.clients_of(domain)]
        for client in clients:
            numbers = (client.num_examples, *client.class_counts)
            shown.add_row(str(client.client_id), domain, *map(str, numbers))
        totals = np.sum([client.class_counts for client in clients], axis=0).tolist()
        numbers = (sum(totals), *totals, test_size)
        shown.add_row("all", domain, *map(str, numbers), style="bold", end_section=True)
    return shown


def _sample(federation: Federation, clients: list[int]) -> Split:
    """A few training images of each of these clients, ``COLUMNS`` in all if there are."""
    each = -(-COLUMNS // len(clients))
    parts = [federation.train(client) for client in clients[:COLUMNS]]
    return Split(
        np.concatenate([part.x[:each] for part in parts])[:COLUMNS],
        np.concatenate([part.y[:each] for part in parts])[:COLUMNS],
    )


def _escaped(text: str) -> str:
    """A domain's name for matplotlib's math text, which sets it in bold."""
    return "".join(character if character.isalnum() else f"\\{character}" for character in text)
