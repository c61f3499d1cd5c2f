"""The analysis of runs: comparisons with their contrasts, tables, verdicts and notes.

    analysis = analyze(runs)
    console.print(terminal_table(analysis))
    write_report(analysis, Path("report"))

The same object is shown in the terminal and as Markdown, HTML, LaTeX, CSV and data frames. Each
part is computed when it is first used, and then cached.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fairflower.config.text import unknown
from fairflower.errors import ConfigError, RunFolderError
from fairflower.report.cells import Table, glossary
from fairflower.report.contrasts import (
    UNDECIDED,
    ContrastGroup,
    Contrasts,
    Verdict,
    contrasts_of,
    verdicts,
)
from fairflower.report.gains import gain_tables, gain_verdicts, gains
from fairflower.report.methods import Comparison, group_runs
from fairflower.report.notes import notes
from fairflower.report.reading import Run
from fairflower.report.tables import fairness_tables, held_out_tables, score_tables
from fairflower.report.tuning import Tuned, tuning_tables


@dataclass(frozen=True)
class Chapter:
    """The analysis of a comparison."""

    comparison: Comparison
    tuned: tuple[Tuned, ...] = ()

    @property
    def title(self) -> str:
        """The data set and its domains; of another score than accuracy also the score."""
        configs = [method.config for method in self.comparison.methods]
        names = dict.fromkeys(str(config.get("data.name", "data")) for config in configs)
        held_out = self.comparison.held_out
        without = f" ({', '.join(held_out)} held out)" if held_out else ""
        score = f" ({self.comparison.score.stated})" * (not self.comparison.classes)
        return f"{', '.join(names)}: {', '.join(self.comparison.domains)}{without}{score}"

    @cached_property
    def contrasts(self) -> list[Contrasts]:
        """The contrasts between the methods, by measure."""
        return contrasts_of(self.comparison)

    @cached_property
    def gains(self) -> list[ContrastGroup]:
        """The gains against training alone and against pooled data, where they were run."""
        return gains(self.comparison)

    @cached_property
    def tables(self) -> list[Table]:
        """Tables of scores, differences and tuning."""
        tables = score_tables(self.comparison, self.contrasts)
        of_gains = gain_tables(self.comparison, self.gains)
        return [*tables, *of_gains, *tuning_tables(self.tuned)]

    @cached_property
    def fairness_tables(self) -> list[Table]:
        """All fairness metrics over domains and, if clients tested the model, over clients."""
        return fairness_tables(self.comparison)

    @property
    def all_tables(self) -> list[Table]:
        """All tables, in the order of every output format; the first has the common caption."""
        captions: set[str] = set()
        tables = []
        for table in self.tables:
            tables.append(replace(table, caption="") if table.caption in captions else table)
            captions.add(table.caption)
        return [*tables, *self.fairness_tables]

    @cached_property
    def verdicts(self) -> Mapping[str, Sequence[Verdict]]:
        """The verdicts, by title."""
        return verdicts(self.comparison, self.contrasts) | gain_verdicts(self.gains)

    @cached_property
    def notes(self) -> list[str]:
        """Facts that readers should know before they compare rows of the tables."""
        return [*notes(self.comparison)]

    @property
    def legend(self) -> str:
        """The meaning of the words in verdicts; empty if no methods were compared."""
        kinds = self.contrasts
        if not any(any(c.against_baselines.values()) or any(c.further.values()) for c in kinds):
            return ""
        better = "higher" if self.comparison.score.better > 0 else "lower value of the"
        return (
            f"Fairer: {better} worst domain or lower STD, neither worse; t tests, p < 0.05 "
            "(corrected). Mixed: one better, one worse. Equivalent: within the margins. Undecided: "
            "none of these."
        )

    @property
    def explained(self) -> str:
        """What a screen has in place of the legend: metrics, and the words that occur."""
        said = " ".join(v.conclusion for of_title in self.verdicts.values() for v in of_title)
        said = said.replace("less fair", "fairer")
        kept = [
            words
            for words in re.split(r"(?<=\.) ", self.legend)
            if words.partition(":")[0].lower() in said or UNDECIDED in said  # which needs all
        ]
        return " ".join(filter(None, (glossary(self.comparison), *kept)))


@dataclass(frozen=True)
class Analysis:
    """The analysis of ``runs``, and of the trials with which their methods were ``tuned``.

    With ``table``, text formats have only the tables whose titles contain it (in any case).
    """

    runs: tuple[Run, ...]
    tuned: tuple[Tuned, ...] = ()
    table: str = ""

    @cached_property
    def chapters(self) -> list[Chapter]:
        """A chapter for each set of domains and primary score; `RunFolderError` without runs."""
        if not self.runs:
            raise RunFolderError("No runs to report on. Name at least one run folder.")
        return [Chapter(comparison, self.tuned) for comparison in group_runs(self.runs)]

    @cached_property
    def held_out_tables(self) -> list[Table]:
        """The table of held-out domains over all chapters; empty for fewer than two domains."""
        return [*held_out_tables(chapter.comparison for chapter in self.chapters)]

    @property
    def named_tables(self) -> list[Table]:
        """The tables that `table` names, each with its caption; ``ConfigError`` if none."""
        tables = [t for c in self.chapters for t in (*c.tables, *c.fairness_tables)]
        tables += self.held_out_tables
        if named := [t for t in tables if self.table.lower() in t.title.lower()]:
            return named
        raise ConfigError(unknown("table", self.table, [table.title for table in tables]))


def analyze(runs: Sequence[Run] | Analysis, tuned: Sequence[Tuned] = ()) -> Analysis:
    """Return the analysis of runs. An `Analysis` is returned unchanged."""
    return runs if isinstance(runs, Analysis) else Analysis(tuple(runs), tuple(tuned))
