"""Figures of test examples that runs have stored: masks on images, and true against predicted."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from fairflower.config.text import counted
from fairflower.errors import RunFolderError, logger
from fairflower.files import Arrays
from fairflower.report.figures import canvas
from fairflower.report.figures.canvas import FigureDraft, LineStyles
from fairflower.report.methods import Comparison
from fairflower.report.reading import Run
from fairflower.server.examples import Facts, read_examples

#: Color of a class in a mask; class 0 and unknown pixels (255) come first and last.
_PALETTE = ["#d8dee4", *(canvas.DOMAIN_COLORS * 43)[:254], canvas.INK]


def sketches(comparison: Comparison, styles: LineStyles) -> Iterator[FigureDraft]:
    """Yield a figure for each method whose first run has stored examples of its last model."""
    runs = {method.name: method.runs[0] for method in comparison.methods}
    for number, (name, run) in enumerate(runs.items(), start=1):
        try:
            found = None if run.summarized else read_examples(run.path, run.last_round)
        except RunFolderError as error:
            logger.warning("Examples are left out: %s", error)
            continue
        if found:
            draw = _masks if "image" in found[0] else _points
            sheet, title, caption, alt = draw(run, *found, styles[name].color)
            which = f"Round {run.last_round}, federation {run.federation}, seed {run.seed}. "
            place = f"examples-{number}-{canvas.slug(name)}"
            yield FigureDraft(place, sheet, f"{name}: {title}", which + caption, alt)


def _masks(run: Run, arrays: Arrays, facts: Facts, color: str) -> tuple[Figure, str, str, str]:
    """Draw a column for each image, with its true and its predicted mask below."""
    names, rows = facts["notes"], ("image", "true", "predicted")
    masks = np.stack([arrays[name] for name in rows[1:]])
    height = 3 * canvas.HALF / 4 * masks.shape[2] / masks.shape[3] + 0.8
    sheet, axes = canvas.panels(3, len(names), canvas.HALF, height)
    look: dict[str, Any] = {"vmin": 0, "vmax": 255, "interpolation": "nearest"}
    for (r, k), panel in np.ndenumerate(axes):
        image = arrays[rows[r]][k]
        colors = ListedColormap(_PALETTE) if r else "gray"
        panel.imshow(image if r else image.transpose(1, 2, 0), cmap=colors, **look)
        title = names[k] if r == 0 else ""
        panel.set(title=title, ylabel=rows[r] if k == 0 else "", xticks=[], yticks=[])
        panel.grid(visible=False)
        panel.spines[:].set_visible(False)
    classes = dict(enumerate(run.info.get("classes", ()))) | {255: "unknown"}
    names_of = {c: classes.get(c, f"class {c}") for c in np.unique(masks).tolist()}
    canvas.legend_of(sheet, {label: Patch(color=_PALETTE[c]) for c, label in names_of.items()})
    title = f"test images of {facts['domains'][0]}, its worst domain"
    caption = f"{len(names)} of its images in the order of their {run.primary.stated}."
    return sheet, title, caption, f"Images, true and predicted masks: {', '.join(names)}."


def _points(run: Run, arrays: Arrays, facts: Facts, color: str) -> tuple[Figure, str, str, str]:
    """Draw a panel for each domain and number, with the diagonal of right predictions."""
    domains, width, names = facts["domains"], arrays["true"].shape[1], run.info.get("classes", [])
    share: dict[str, Any] = dict.fromkeys(("sharex", "sharey"), width == 1)
    sheet, axes = canvas.panel_grid(len(domains) * width, 4, 2.9, 0.2, narrow=2, **share)
    look: dict[str, Any] = {"edgecolors": color, "linewidths": 0.8, "rasterized": True}
    places = np.ndindex(len(domains), width)
    for panel, (d, j) in zip(axes.flat, places, strict=False):
        pairs = np.stack([arrays["true"][:, j], arrays["predicted"][:, j]])
        known = (arrays["domain"] == d) & np.isfinite(pairs).all(axis=0)
        for is_open, face in ((False, color), (True, "none")):
            those = known & (arrays["open"] == is_open)
            panel.scatter(*pairs[:, those], s=14, alpha=0.6, facecolors=face, **look)
        middle = float(pairs[0, known].mean()) if known.any() else 0.0
        panel.axline((middle, middle), slope=1, color=canvas.INK, linestyle="--", linewidth=1)
        name = f" {names[j]}" if len(names) >= width else f" {j + 1}" * (width > 1)
        panel.set(title=domains[d], xlabel=f"true{name}", ylabel=f"predicted{name}")
        panel.label_outer()
    left = len(run.domains) - len(domains)
    fewer = f" Without {counted(left, 'domain')} with better scores." if left else ""
    caption = f"Dashed: right predictions. {''.join(facts['notes'])}{fewer}".strip()
    return sheet, "predicted against true", caption, f"A panel for {', '.join(domains)}."
