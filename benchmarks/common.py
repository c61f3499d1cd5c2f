"""Shared helpers of the benchmarks: option parser, machine facts, tables of times and ratios."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Sequence

from fairflower.machine import machine, versions


def described_parser(text: str) -> argparse.ArgumentParser:
    """Return a parser whose help begins with ``text``, a script's docstring, unformatted."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def machine_facts() -> str:
    """Return one line with the processor, its number of cores, the load and the system."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{machine()['processor']}, {os.cpu_count()} cores{load}; {platform.system()}"


def version_facts(*packages: str) -> str:
    """Return the versions of Python and of these packages, in one line."""
    installed = versions()
    return ", ".join(f"{name} {installed[name]}" for name in ("python", *packages))


def machine_and_versions(*packages: str) -> str:
    """Return `machine_facts` and `version_facts`, one line each."""
    return f"{machine_facts()}\n{version_facts(*packages)}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table, aligned in plain text too: the first column left, others right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    separator = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]

    def line(row: list[str]) -> str:
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return f"| {' | '.join(padded)} |"

    return "\n".join(map(line, [cells[0], separator, *cells[1:]]))


def times_and_ratios(seconds: Sequence[float], reference: Sequence[float]) -> list[str]:
    """Return minimum and median seconds, then the ratios of both to the reference's."""
    minimum, median = min(seconds), statistics.median(seconds)
    return [
        f"{minimum:.4f}",
        f"{median:.4f}",
        f"{minimum / min(reference):.2f}",
        f"{median / statistics.median(reference):.2f}",
    ]


def log_progress(text: str) -> None:
    """Print a progress message to stderr; results go to stdout."""
    print(text, file=sys.stderr, flush=True)
