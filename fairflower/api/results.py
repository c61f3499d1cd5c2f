"""Results of runs as DataFrames, tables, verdicts and figures."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from rich.console import Console

from fairflower.errors import ConfigError, quoted
from fairflower.numerics.scores import ACCURACY
from fairflower.paths import path_of
from fairflower.report import Analysis, Run, analyze, terminal_table, write_report, write_summary
from fairflower.report.pages import html_table

if TYPE_CHECKING:  # both are slow to import
    import numpy as np
    import pandas as pd
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    from fairflower.api.final_model import Network

_STYLE = """<style>
.fairflower table {border-collapse: collapse; margin: 0.5em 0}
.fairflower caption {font-weight: bold; text-align: left; padding: 0.3em 0}
.fairflower th, .fairflower td {padding: 0.2em 0.6em; text-align: right; vertical-align: top}
.fairflower th[scope=row] {text-align: left}
.fairflower .small {display: block; opacity: 0.7; font-size: 85%; font-weight: normal}
.fairflower .caption {opacity: 0.7; font-size: 85%; max-width: 60em}
</style>"""


class Results(Sequence["Result"]):
    """Several runs. All runs of a method share a row in tables and a line in figures.

    This is a sequence of `Result`, which `fairflower.compare` and `fairflower.read` return.
    Notebooks display the table of the primary score and the verdicts; ``print`` shows all tables.
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
        """Return `Results` with the runs of both operands."""
        if not isinstance(other, Results):
            return NotImplemented
        return Results((*self.runs, *other.runs))

    @property
    def best(self) -> Results:
        """The same runs, with their best rounds in tables and verdicts (``checkpoint.best``).

        Raises ``RunFolderError`` if a run has none.
        """
        return Results([run.at_best() for run in self.runs])

    @cached_property
    def _analysis(self) -> Analysis:
        return analyze(self.runs)

    @cached_property
    def history(self) -> pd.DataFrame:
        """All metrics of all rounds. See `fairflower.report.frames.history_frame`."""
        from fairflower.report.frames import history_frame

        return history_frame(self.runs)

    @cached_property
    def table(self) -> pd.DataFrame:
        """Each method's primary score per domain, AVG, STD, worst and GAP; accuracy in percent.

        Each value is the mean over the last five tested rounds; the table has its mean and standard
        deviation over runs. See `fairflower.report.frames.table_frame`.
        """
        from fairflower.report.frames import table_frame

        return table_frame(self._analysis)

    @cached_property
    def differences(self) -> pd.DataFrame:
        """Differences from FedAvg and from uniform weights, paired by seed.

        `fairflower.report.frames.differences_frame` describes the columns.
        """
        from fairflower.report.frames import differences_frame

        return differences_frame(self._analysis)

    @property
    def verdicts(self) -> list[str]:
        """Sentences about each method: its difference from a baseline and the verdict."""
        return [
            str(verdict)
            for chapter in self._analysis.chapters
            for said in chapter.verdicts.values()
            for verdict in said
        ]

    def plot(self, figure: str = "average") -> Figure:
        """Draw a figure from the report.

        ``figure`` is ``"average"``, ``"worst"`` or ``"std"`` (over rounds), ``"differences"`` (of
        five pairs or more), ``"bars"``, ``"domains"``, or another name for these runs. Raises
        ``ConfigError`` if the name is unknown (the error lists all names), or if runs have
        different sets of domains or primary scores.
        """
        from fairflower.report.figures.comparison import plot

        first, *others = self._analysis.chapters
        if others:
            titles = "; ".join(chapter.title for chapter in (first, *others))
            raise ConfigError(
                f"The runs have different sets of domains or primary scores ({titles}). Select "
                "runs of one kind to plot them."
            )
        return plot(first.comparison, str(figure))

    def report(self, out: str | PathLike[str]) -> Path:
        """Write the report of ``fairflower report`` to a folder; return the HTML page's path."""
        return write_report(self._analysis, path_of("out", out))

    def summary(self, path: str | PathLike[str]) -> None:
        """Write the data for tables and verdicts to a .csv file, which `read` can open.

        The settings and facts are in a ``.runs.json`` file of the same name, which belongs to it.
        """
        write_summary(self.runs, path_of("path", path))

    def latex(self) -> str:
        """Return all tables as LaTeX for the booktabs package."""
        from fairflower.report.pages import latex

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
        """Return the primary score's table, verdicts and notes of each set of domains as HTML."""
        parts = [_STYLE]
        for chapter in self._analysis.chapters:
            said = [str(verdict) for verdict in chapter.verdicts.get("", ())]
            lines = "".join(f"<li>{escape(line)}</li>" for line in (*said, *chapter.notes))
            parts += [html_table(chapter.tables[0]), f"<ul>{lines}</ul>"]
        return f'<div class="fairflower">{"".join(parts)}</div>'


class Result(Results):
    """A single run."""

    def __init__(self, run: Run) -> None:
        super().__init__([run])
        self.run = run

    @property
    def path(self) -> Path:
        """Path of the run folder."""
        return self.run.path

    @property
    def label(self) -> str:
        """The method's name in tables, for example ``fedheal:tau=0.4``."""
        return self.run.label

    @property
    def seed(self) -> int:
        """The run's random seed."""
        return int(self.run.seed)

    @property
    def status(self) -> str:
        """``"completed"``, ``"stopped"``, ``"failed"``, ``"running"`` or ``"killed"``."""
        return self.run.status

    @property
    def config(self) -> Mapping[str, Any]:
        """The run config, with dotted keys."""
        return self.run.config

    @property
    def accuracy(self) -> dict[str, float]:
        """Final accuracy per domain, between 0 and 1: the mean over the last five tested rounds.

        Raises ``AttributeError`` if other than classes was learnt; see `score`.
        """
        if self.run.primary != ACCURACY:
            raise AttributeError(
                f"{self.label} has no accuracy: its primary score is {self.run.primary.stated}. "
                "Use score, or scores for all of them."
            )
        return self.score

    @property
    def score(self) -> dict[str, float]:
        """Final primary score per domain: the mean over the last five tested rounds.

        Fractions are between 0 and 1, and other scores in their unit.
        """
        return self._by_domain(self.run.primary.name)

    @property
    def scores(self) -> dict[str, dict[str, float]]:
        """All final scores by name and domain, the primary score first; NaN if undefined."""
        names = [self.run.primary.name, *self.run.scores]
        return {name: self._by_domain(name) for name in names}

    def _by_domain(self, name: str) -> dict[str, float]:
        values = self.run.tests_by(name).final().tolist()
        return dict(zip(self.run.domains, values, strict=True))

    @property
    def model(self) -> dict[str, NDArray[np.generic]]:
        """The arrays of the final global model, by name.

        Raises ``RunFolderError`` if the run did not complete any round, was read from a summary, or
        the file is damaged.
        """
        from fairflower.api.final_model import kept_arrays

        return kept_arrays(self.run)[1]

    def network(
        self, data_dir: str | PathLike[str] = "", *, best: bool = False, round: int | None = None
    ) -> Network:
        """Return the final global model as a torch module that accepts raw examples.

        With ``best``, it is the model of the best round (``checkpoint.best``), and with ``round``
        that of a round whose model was kept (``checkpoint.keep``).
        The module normalizes examples itself. Class names and the scale of the examples come from
        the run's data set, which is read from ``data_dir`` if given. See
        `fairflower.api.final_model.Network`.
        """
        from fairflower.api.final_model import network

        if best and round is not None:
            raise ConfigError(f"best = True and round = {quoted(round)}: choose one of them.")
        return network(self.run, str(data_dir), "best" if best else round)

    def __repr__(self) -> str:
        return f"<{self.label}, seed {self.seed}: {self.run.progress}, in {self.path}>"
