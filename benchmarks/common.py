"""What benchmarks share: a parser of options, the machine, and tables of times and ratios."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence

from fairflower.machine import machine, versions


def described_parser(text: str) -> argparse.ArgumentParser:
    """A parser whose help begins with a script's docstring as it is written."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine_facts() -> str:
    """One line on the machine as far as it decides the figures, and how busy it is."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{machine()['processor']}, {os.cpu_count()} cores{load}; {platform.system()}"


def version_facts(*packages: str) -> str:
    """Versions of Python and of these packages, on one line."""
    found = versions()
    return ", ".join(f"{name} {found[name]}" for name in ("python", *packages))


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table whose columns are aligned in plain text too, the first one to the left."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: list[str]) -> str:
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, [cells[0], rule, *cells[1:]]))


def times_and_ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[str]:
    """Min and median seconds, then both over those of the reference."""
    low, middle = min(seconds), statistics.median(seconds)
    return [
        f"{low:.4f}",
        f"{middle:.4f}",
        f"{low / min(reference):.2f}",
        f"{middle / statistics.median(reference):.2f}",
    ]


def say(text: str) -> None:
    """Tell what is going on, apart from the results."""
    print(text, file=sys.stderr, flush=True)
