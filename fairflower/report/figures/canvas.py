"""The style of all figures, and the functions that save them as PNG and SVG.

The colors suit light and dark pages and color-blind readers. Lines also differ in dashes and
markers, and bars of the same color in hatches. Text in inline SVG has the text color of the page.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fairflower.report.methods import Curve

#: Width in inches: of a phone, half of the page, the whole page.
NARROW, HALF, FULL = 4.4, 6.4, 13.0
INK = "#24292f"
GRAY = "#7d8590"

#: Sentence added to a caption if some domains were not tested in some rounds.
DOTTED = (
    "Thin dotted line: some domains were not tested, so the value covers only the tested domains."
)

#: Colors of methods; FedAvg is always gray.
METHOD_COLORS = ("#19a3ff", "#e58a00", "#7a52ff", "#00a866", "#b23819", "#16679c")
DOMAIN_COLORS = ("#14866e", "#6f4dff", "#39aac6", "#6bb200", "#9c4c16", "#e58a00")
DASHES: tuple[Any, ...] = ("-", (0, (4, 1)), (0, (1.5, 1)), (0, (6, 1, 1.5, 1)))
#: One more than colors: the seventh method has the first one's color, but another marker.
MARKERS = "sD^vPX*"
#: Hatches of bars: none for the first six methods, and another for the next six.
HATCHES = ("", "////", "....", "xxxx")


def slug(name: str) -> str:
    """Convert a name to part of a figure's file name and id.

    >>> slug("QP residual"), slug("sex/gender")
    ('qp-residual', 'sex-gender')
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


class LineStyle(NamedTuple):
    """Color, dashes, marker and hatch of a method or a domain."""

    color: str
    dash: Any
    marker: str
    hatch: str = ""


LineStyles = Mapping[str, LineStyle]


class PageFigure(NamedTuple):
    """A figure of the HTML page, as inline SVG; ``name`` is that of its files."""

    name: str
    title: str
    caption: str
    svg: str
    wide: bool
    first: bool


class FigureDraft(NamedTuple):
    """A figure before it is saved; ``alt`` describes it for readers who cannot see it."""

    name: str
    figure: Figure
    title: str
    caption: str
    alt: str
    #: Whether it stands above the tables of a page.
    first: bool = False


def line_styles(
    names: Sequence[str], colors: Sequence[str], gray: str | None = None
) -> dict[str, LineStyle]:
    """Return a line style for each name. The line of the name ``gray`` is gray."""
    others = [name for name in names if name != gray]
    styles = {
        name: LineStyle(
            colors[i % len(colors)],
            DASHES[i % len(DASHES)],
            MARKERS[i % len(MARKERS)],
            HATCHES[i // len(colors) % len(HATCHES)],
        )
        for i, name in enumerate(others)
    }
    return styles if gray is None else {**styles, gray: LineStyle(GRAY, "-", "o")}


def shades(color: str, count: int) -> list[tuple[float, float, float]]:
    """Return ``count`` shades of a color, from dark to light. A single one is the color itself."""
    places = np.linspace(-0.45, 0.5, count) if count > 1 else [0.0]
    mixed = [(1 - abs(t)) * np.array(to_rgb(color)) + max(t, 0) for t in places]
    return [(r, g, b) for r, g, b in np.array(mixed).tolist()]


class _Sheet(Figure):
    """A figure that notebooks can display without pyplot."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=110, facecolor="white")
        return buffer.getvalue()


def panels(
    rows: int, columns: int, width: float, height: float, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """Return a figure of ``width`` x ``height`` inches, and its axes [rows, columns]."""
    figure = _Sheet(figsize=(width, height))
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def panel_grid(
    count: int, columns: int, height: float, extra: float, *, narrow: int = 1, **options: Any
) -> tuple[Figure, NDArray[Any]]:
    """Return a figure with ``count`` panels, at most ``columns`` per row.

    Each row is ``height`` inches high, and ``extra`` inches are reserved for the legend. A figure
    with up to ``narrow`` columns takes half the width of the page, and other figures take the whole
    width.
    """
    columns = min(columns, count)
    rows = -(-count // columns)
    width = HALF if columns <= narrow else FULL
    figure, axes = panels(rows, columns, width, height * rows + extra, **options)
    for panel in axes.flat[count:]:
        panel.set_visible(False)
    return figure, axes


def curve_panels(
    by_panel: Mapping[str, Mapping[str, Curve]], styles: LineStyles, label: str, narrow: int = 1
) -> Figure:
    """Return a figure with a panel for each title, which has a curve for each name."""
    figure, axes = panel_grid(len(by_panel), 4, 2.7, 0.4, narrow=narrow, sharex=True, sharey=True)
    for panel, (title, curves) in zip(axes.flat, by_panel.items(), strict=False):
        for name, found in curves.items():
            curve(panel, found, styles[name], name)
        panel.set_title(title)
    for panel in axes[:, 0]:
        panel.set_ylabel(label)
    legend(figure, *axes.flat)
    return figure


def band(
    axes: Axes,
    rounds: NDArray[np.int64],
    mean: NDArray[np.float64],
    spread: NDArray[np.float64],
    style: LineStyle,
    **options: Any,
) -> None:
    """Draw a band that shows the spread around a line over rounds."""
    options = {"color": style.color, "alpha": 0.18, "linewidth": 0, **options}
    axes.fill_between(rounds, mean - spread, mean + spread, **options)


def line(
    axes: Axes,
    rounds: NDArray[np.int64],
    values: NDArray[np.float64],
    style: LineStyle,
    whole: NDArray[np.bool_] | None = None,
    **options: Any,
) -> None:
    """Draw a line over rounds, dotted where not ``whole``, with markers if it has few points."""
    options = {"color": style.color, "linestyle": style.dash, **options}
    if len(rounds) < 3:
        options |= {"marker": style.marker, "markersize": 4.5}
    if whole is not None and not whole.all():
        there, beside = np.isfinite(values), np.pad(whole, 1)
        axes.plot(rounds[there], values[there], color=style.color, linestyle=":", linewidth=1)
        alone = whole & ~beside[:-2] & ~beside[2:]
        axes.plot(rounds[alone], values[alone], ".", color=style.color, markersize=5)
        values = np.where(whole, values, np.nan)
    axes.plot(rounds, values, **options)
    axes.set_xlabel("round")
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def curve(axes: Axes, curve: Curve, style: LineStyle, label: str = "") -> None:
    """Draw the line and the band of a curve."""
    line(axes, curve.rounds, curve.mean, style, curve.whole, label=label or None)
    if curve.spread.any():
        band(axes, curve.rounds, curve.mean, curve.spread, style, where=curve.whole)


def common_curve(series: Sequence[tuple[NDArray[np.int64], NDArray[np.float64]]]) -> Curve:
    """Return the curve of runs' (rounds, values), over the rounds in which all have a number."""
    rounds = reduce(np.intersect1d, [own for own, _ in series])
    values = np.array([value[np.isin(own, rounds)] for own, value in series])
    there = np.isfinite(values).all(axis=0)
    return Curve.of(rounds[there], values[:, there])


def legend(figure: Figure, *axes: Axes) -> None:
    """Draw a legend below all panels if it has at least two entries."""
    shown: dict[str, Any] = {}
    for panel in axes:
        shown |= {
            label: mark for mark, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
    if len(shown) > 1:
        rows = legend_of(figure, shown)
        # The figure has room for two rows. More rows would shrink the panels.
        figure.set_figheight(figure.get_figheight() + 0.21 * max(0, rows - 2))


def legend_of(
    figure: Figure, marks: Mapping[str, Any], place: Any = "outside lower center", room: float = 0.6
) -> int:
    """Draw a legend of marks by label, and return its number of rows.

    ``room`` is the width in inches of a mark and its gaps.
    """
    widest = 0.075 * max(map(len, marks)) + room
    columns = max(1, min(len(marks), int(figure.get_figwidth() / widest)))
    figure.legend([*marks.values()], [*marks], loc=place, ncols=columns)
    return -(-len(marks) // columns)


def styled() -> AbstractContextManager[None]:
    """Return a context with fairflower's style that ignores the user's matplotlibrc."""
    style = Path(__file__).with_name("fairflower.mplstyle")
    return matplotlib.style.context(["default", style])


def save(
    sketches: Iterable[FigureDraft], folder: Path, prefix: str, pdf: bool = False
) -> list[PageFigure]:
    """Draw figures in fairflower's style, save them, and return them for the HTML page.

    The files are ``folder/<prefix><name>.png``, ``.svg`` and, with ``pdf``, ``.pdf``, with a white
    background.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        return [_saved(sketch, folder, prefix, pdf) for sketch in sketches]


def _saved(sketch: FigureDraft, folder: Path, prefix: str, pdf: bool) -> PageFigure:
    name = f"{prefix}{sketch.name}"
    sketch.figure.savefig(folder / f"{name}.png", dpi=160, facecolor="white")
    sketch.figure.set_layout_engine("none")  # keep the layout: computing it takes half the time
    buffer = io.StringIO()
    untold = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    sketch.figure.savefig(buffer, format="svg", metadata=untold)
    text = buffer.getvalue()
    paper = '<rect width="100%" height="100%" fill="#ffffff"/>'
    printable = re.sub(r"(<svg\b[^>]*>)", rf"\1{paper}", text, count=1)
    (folder / f"{name}.svg").write_text(printable, encoding="utf-8")
    printed = folder / f"{name}.pdf"
    printed.unlink(missing_ok=True)
    if pdf:
        sketch.figure.savefig(printed, metadata={"CreationDate": None})
    wide = sketch.figure.get_figwidth() > HALF
    inline = _inline(text, name, sketch.alt)
    return PageFigure(name, sketch.title, sketch.caption, inline, wide, sketch.first)


def _inline(svg: str, name: str, alt: str) -> str:
    """Adapt SVG to the page: unique ids, the page's color and font, and a label."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>\s*", "", svg, flags=re.DOTALL)
    wanted = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in wanted else "", svg)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)  # so the page's font applies
    svg = svg.replace("xlink:href", "href").replace(INK, "currentColor")
    view = re.search(r'viewBox="[^"]*"', svg)
    root = f'<svg {view.group() if view else ""} role="img" aria-label="{escape(alt)}">'
    return re.sub(r"<svg\b[^>]*>", lambda _: root, svg, count=1)
