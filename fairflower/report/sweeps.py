"""Methods that differ in one number alone: a hyper-parameter's sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from fairflower import metrics
from fairflower.config import argument
from fairflower.report import canvas
from fairflower.report.canvas import Look, Sketch, legend, panels
from fairflower.report.clusters import clusters, final
from fairflower.report.methods import WINDOW, Comparison, Method, identity

Vector = NDArray[np.float64]

#: Fewer values make no curve.
_FEWEST = 3


class Sweep(NamedTuple):
    """Methods in ascending order of the run config key's value.

    ``others`` have a value of it that is no number, as in ``num_clusters=auto``: value ->
    method.
    """

    key: str
    values: Vector
    methods: tuple[Method, ...]
    others: Mapping[str, Method]


def sweeps(comparison: Comparison) -> list[Sweep]:
    """Every method argument of which there are three values or more, all else equal.

    A method that was not tested on every domain throughout is compared with none, and left out.
    """
    keys = {
        key
        for method in comparison.methods
        for key, _ in identity(method.config)
        if key.startswith(("strategy.", "client.")) and not key.endswith(".name")
    }
    found = []
    for key in sorted(keys):
        groups: dict[Any, dict[Any, Method]] = {}
        for method in comparison.methods:
            value = _value(method, key)
            rest = frozenset(item for item in identity(method.config) if item[0] != key)
            if value is not None and method.whole(WINDOW):
                groups.setdefault((rest, method.comparable), {}).setdefault(value, method)
        for members in groups.values():
            values = sorted(value for value in members if isinstance(value, float))
            if len(values) >= _FEWEST:
                others = {value: m for value, m in members.items() if isinstance(value, str)}
                methods = tuple(members[value] for value in values)
                found.append(Sweep(key, np.array(values), methods, others))
    return found


def sketches(comparison: Comparison, looks: Mapping[str, Look]) -> Iterator[Sketch]:
    """A figure for each sweep: average, worst domain and spread over the values."""
    for number, sweep in enumerate(sweeps(comparison), start=1):
        leaf = sweep.key.partition(".")[2]
        figures = [*_FIGURES, *(_CLUSTERS for _ in range(_clustered(sweep)))]
        sheet, axes = panels(1, len(figures), canvas.FULL, 3.4)
        for panel, (label, figure) in zip(axes[0], figures, strict=True):
            _draw(panel, sweep, figure)
            for i, (value, method) in enumerate(sweep.others.items()):
                look = Look(canvas.INK, canvas.DASHES[1 + i % (len(canvas.DASHES) - 1)], "")
                _level(panel, method, figure, look, f"{leaf} = {value}")
            for name in ("fedavg", "uniform"):
                baseline = comparison.baseline(sweep.methods[0], name)
                if baseline is not None and baseline.whole(WINDOW):
                    dash = "--" if name == "fedavg" else (0, (1.5, 2.5))
                    look = looks[baseline.name]._replace(dash=dash)
                    _level(panel, baseline, figure, look, baseline.name)
            if np.all(sweep.values % 1 == 0):
                panel.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
            panel.set_xlabel(leaf)
            panel.set_ylabel(label)
        legend(sheet, axes[0, 0])
        seeds = any(len(method.runs) > 1 for method in sweep.methods)
        name = sweep.methods[0].strategy
        best = max(sweep.methods, key=lambda method: method.over_seeds(_worst).mean)
        yield Sketch(
            f"sweep-{sweep.key.replace('.', '-')}{f'-{number}' if number > 1 else ''}",
            sheet,
            f"{name}: {sweep.key} from {sweep.values[0]:g} to {sweep.values[-1]:g}",
            f"{comparison.span(WINDOW).capitalize()}"
            f"{'; bars: ± sample standard deviation over seeds' if seeds else ''}.",
            f"Average, worst domain and spread of {name} for {len(sweep.values)} values of "
            f"{sweep.key}; the worst domain is best for {best.name}.",
        )


def _value(method: Method, key: str) -> float | str | None:
    """The method's value of an argument, also if it was left to the method; a number if it is one.

    None where the method has no such argument.
    """
    from fairflower.names import CLIENTS
    from fairflower.strategies import STRATEGIES

    table, _, leaf = key.partition(".")
    value: Any = dict(identity(method.config)).get(key)
    if value is None and table == "strategy" and method.strategy in STRATEGIES:
        value = STRATEGIES[method.strategy].arguments().get(argument(leaf))
    if value is None and table == "client":
        client = CLIENTS.get(str(method.config.get("client.name")))
        value = client.defaults().get(argument(leaf)) if client else None
    try:
        number = float(value)
    except (TypeError, ValueError):
        return value if isinstance(value, str) else None
    return number if math.isfinite(number) else None


def _clustered(sweep: Sweep) -> bool:
    """Whether all of its methods found clusters of clients."""
    return all(
        clusters(run) for method in (*sweep.methods, *sweep.others.values()) for run in method.runs
    )


def _worst(run: Any) -> float:
    return 100 * metrics.worst(run.final(WINDOW))


_FIGURES: tuple[tuple[str, Callable[[Any], float]], ...] = (
    ("AVG over domains, %", lambda run: 100 * metrics.mean(run.final(WINDOW))),
    ("MIN over domains, %", _worst),
    ("STD over domains (ddof 1), %", lambda run: 100 * metrics.std(run.final(WINDOW), ddof=1)),
)
_CLUSTERS = ("clustering accuracy, %", lambda run: 100 * final(run, "accuracy", WINDOW))


def _draw(panel: Axes, sweep: Sweep, figure: Callable[[Any], float]) -> None:
    estimates = [method.over_seeds(figure) for method in sweep.methods]
    panel.errorbar(
        sweep.values,
        [e.mean for e in estimates],
        yerr=[0 if math.isnan(e.std) else e.std for e in estimates],
        color=canvas.INK,
        marker="o",
        markersize=4,
        capsize=2.5,
        elinewidth=0.9,
        label=sweep.methods[0].strategy,
    )


def _level(
    panel: Axes, method: Method, figure: Callable[[Any], float], look: Look, label: str
) -> None:
    level = method.over_seeds(figure).mean
    panel.axhline(level, color=look.colour, linestyle=look.dash, linewidth=1.4, label=label)
