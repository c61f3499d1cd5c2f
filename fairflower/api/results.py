"""What runs came to: DataFrames, figures, tables."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from fairflower.errors import ConfigError
from fairflower.report import Analysis, Run, analyze, terminal_table, write_report, write_summary
from fairflower.report.pages import html_table

if TYPE_CHECKING:  # both are slow to import
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from fairflower.final_model.exporting import Network

_STYLE = """<style>
.fairflower table {border-collapse: collapse; margin: 0.5em 0}
.fairflower caption {font-weight: bold; text-align: left; padding: 0.3em 0}
.fairflower th, .fairflower td {padding: 0.2em 0.6em; text-align: right; vertical-align: top}
.fairflower th[scope=row] {text-align: left}
.fairflower .small {display: block; opacity: 0.7; font-size: 85%; font-weight: normal}
.fairflower .caption {opacity: 0.7; font-size: 85%; max-width: 60em}
</style>"""


class Results(Sequence["Result"]):
    """Several runs: seeds of one method become a row of tables and a line of figures.

    As a sequence, its runs one by one. In a notebook it is shown as the papers' table with what
    that is worth; ``print`` shows all tables.
    """

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = tuple(runs)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: int | slice) -> Result | Results:
        if isinstance(index, slice):
            return Results(self.runs[index])
        return Result(self.runs[index])

    def __len__(self) -> int:
        return len(self.runs)

    def __add__(self, other: Results) -> Results:
        """The runs of both, to be compared."""
        return Results((*self.runs, *other.runs))

    @cached_property
    def _analysis(self) -> Analysis:
        return analyze(self.runs)

    @cached_property
    def history(self) -> pd.DataFrame:
        """Every figure of every round: `fairflower.report.frames.history_frame`."""
        from fairflower.report.frames import history_frame

        return history_frame(self.runs)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Accuracy per domain, AVG, STD, MIN and GAP of each method, in percent.

        Of the last five tested rounds, with mean and standard deviation over seeds:
        `fairflower.report.frames.table_frame`.
        """
        from fairflower.report.frames import table_frame

        return table_frame(self._analysis)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Differences to FedAvg and uniform weights, paired by seed.

        `fairflower.report.frames.differences_frame` has the columns.
        """
        from fairflower.report.frames import differences_frame

        return differences_frame(self._analysis)

    @property
    def verdicts(self) -> list[str]:
        """What can be said of the methods, a sentence for each."""
        return [
            str(verdict)
            for chapter in self._analysis.chapters
            for section in chapter.sections
            for verdict in section.verdicts
        ]

    def plot(self, figure: str = "average") -> Figure:
        """Draw one of the report's figures.

        ``"average"``, ``"worst"`` and ``"std"`` over rounds, ``"bars"`` and ``"domains"``, and what
        the runs allow beside; ``ConfigError`` for another name lists all.
        """
        from fairflower.report.figures.comparison import plot

        comparisons = [chapter.comparison for chapter in self._analysis.chapters]
        if len(comparisons) > 1:
            names = "; ".join(", ".join(one.domains) for one in comparisons)
            raise ConfigError(f"The runs are of several sets of domains ({names}). Plot one's.")
        return plot(comparisons[0], figure)

    def report(self, out: str | PathLike[str]) -> Path:
        """Write the report into a folder, as ``fairflower report`` does; return its page."""
        return write_report(self._analysis, Path(out))

    def summary(self, path: str | PathLike[str]) -> None:
        """Write all that tables and verdicts need into one small .csv file, which `read` takes."""
        write_summary(self.runs, Path(path))

    def latex(self) -> str:
        """All tables for LaTeX's package booktabs."""
        from fairflower.report.latex import latex

        return latex(self._analysis)

    def __repr__(self) -> str:
        chapters = self._analysis.chapters if self.runs else []
        methods = sum(len(chapter.comparison.methods) for chapter in chapters)
        data = ", ".join(dict.fromkeys(str(run.config.get("data.name")) for run in self.runs))
        return f"<{len(self.runs)} runs of {methods} methods on {data}>"

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=160, record=True)
        console.print(terminal_table(self._analysis))
        return "\n".join(line.rstrip() for line in console.export_text().splitlines())

    def _repr_html_(self) -> str:
        """The papers' table of each set of domains, the verdicts and the notes."""
        parts = [_STYLE]
        for chapter in self._analysis.chapters:
            said = [str(v) for section in chapter.sections[:1] for v in section.verdicts]
            lines = "".join(f"<li>{escape(line)}</li>" for line in (*said, *chapter.notes))
            parts += [html_table(chapter.tables[0]), f"<ul>{lines}</ul>"]
        return f'<div class="fairflower">{"".join(parts)}</div>'


class Result(Results):
    """One run."""

    def __init__(self, run: Run) -> None:
        super().__init__([run])
        self.run = run

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.run.path

    @property
    def label(self) -> str:
        """The method's name in tables: ``fedheal:tau=0.4``."""
        return self.run.label

    @property
    def seed(self) -> int:
        """The run's seed."""
        return int(self.run.seed)

    @property
    def status(self) -> str:
        """``"completed"``, ``"stopped"``, ``"failed"``, ``"running"`` or ``"killed"``."""
        return self.run.status

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole run config by dotted keys."""
        return self.run.config

    @property
    def accuracy(self) -> dict[str, float]:
        """Final accuracy of each domain, a fraction: the mean of the last five tested rounds."""
        return dict(zip(self.run.domains, self.run.final().tolist(), strict=True))

    @property
    def model(self) -> dict[str, NDArray[np.generic]]:
        """The final global model: arrays by name."""
        from safetensors.numpy import load_file

        return load_file(self.path / "model.safetensors")

    def network(self, data_dir: str = "") -> Network:
        """The final global model as a torch module of raw examples, which it normalises itself.

        It takes the run's data, whose ``data_dir`` may be another by now, to know their classes
        and scale: `fairflower.final_model.exporting.Network`.
        """
        from fairflower.final_model.exporting import network

        return network(self.run, data_dir)

    def __repr__(self) -> str:
        return f"<{self.label}, seed {self.seed}: {self.run.progress}, in {self.path}>"
