"""Methods that differ in one number alone: a hyper-parameter's sweep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fairflower import metrics
from fairflower.config import argument
from fairflower.report import canvas
from fairflower.report.canvas import Look, Sketch, legend, panels
from fairflower.report.methods import WINDOW, Comparison, Method, identity

Vector = NDArray[np.float64]

#: Fewer values make no curve.
_FEWEST = 3


class Sweep(NamedTuple):
    """Methods in ascending order of the run config key's value."""

    key: str
    values: Vector
    methods: tuple[Method, ...]


def sweeps(comparison: Comparison) -> list[Sweep]:
    """Every method argument of which there are three values or more, all else equal."""
    keys = {
        key
        for method in comparison.methods
        for key, _ in identity(method.config)
        if key.startswith(("strategy.", "client.")) and not key.endswith(".name")
    }
    found = []
    for key in sorted(keys):
        groups: dict[Any, dict[float, Method]] = {}
        for method in comparison.methods:
            value = _value(method, key)
            rest = frozenset(item for item in identity(method.config) if item[0] != key)
            if math.isfinite(value):
                groups.setdefault((rest, method.comparable), {}).setdefault(value, method)
        for members in groups.values():
            if len(members) >= _FEWEST:
                values = sorted(members)
                found.append(Sweep(key, np.array(values), tuple(members[v] for v in values)))
    return found


def sketches(comparison: Comparison, looks: Mapping[str, Look]) -> Iterator[Sketch]:
    """A figure for each sweep: average, worst domain and spread over the values."""
    for number, sweep in enumerate(sweeps(comparison), start=1):
        sheet, axes = panels(1, 3, canvas.FULL, 3.4)
        for panel, (label, figure) in zip(axes[0], _FIGURES, strict=True):
            _draw(panel, sweep, figure)
            for name in ("fedavg", "uniform"):
                baseline = comparison.baseline(sweep.methods[0], name)
                if baseline is not None:
                    _level(panel, baseline, figure, looks[baseline.name])
            panel.set_xlabel(sweep.key.partition(".")[2])
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


def _value(method: Method, key: str) -> float:
    """The method's value of an argument, also if it was left to the method; else NaN."""
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
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _worst(run: Any) -> float:
    return 100 * metrics.worst(run.final(WINDOW))


_FIGURES: tuple[tuple[str, Callable[[Any], float]], ...] = (
    ("AVG over domains, %", lambda run: 100 * metrics.mean(run.final(WINDOW))),
    ("MIN over domains, %", _worst),
    ("STD over domains (ddof 1), %", lambda run: 100 * metrics.std(run.final(WINDOW), ddof=1)),
)


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


def _level(panel: Axes, baseline: Method, figure: Callable[[Any], float], look: Look) -> None:
    level = baseline.over_seeds(figure).mean
    dash = "--" if baseline.strategy == "fedavg" else (0, (1.5, 2.5))
    panel.axhline(level, color=look.colour, linestyle=dash, linewidth=1.4, label=baseline.name)
