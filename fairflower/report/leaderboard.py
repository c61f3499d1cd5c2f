"""Tables and conclusions of a leaderboard with one federation per benchmark.

For each benchmark, a CSV file contains the protocol, the trials from which values were chosen, and
the tests of the chosen values and of the paper's values with several seeds. All numbers of the
document are computed from this file. Methods are compared with uniform weights, paired by seed.
p-values are corrected by Holm's method over all methods of a benchmark.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fairflower.errors import RunFolderError
from fairflower.numerics.metrics import AVG, MIN, Summary
from fairflower.report.methods import MeanStd
from fairflower.report.statistics import (
    Difference,
    Ranks,
    detectable_text,
    eta_squared,
    holm_correction,
    paired_t_test,
    ranks,
)
from fairflower.report.tables.cells import Cell, Group, Row, Table, judged_cell
from fairflower.report.text import DASH, format_number, format_p_value, join_words
from fairflower.report.tuning import METRICS
from fairflower.server.contents import read_text

#: Columns of the file. ``kind`` is protocol (its ``settings`` are common to all methods), trial, or
#: the kind of test: a test of the chosen values, of the paper's values, or of both if they are
#: equal. ``number`` is the number of the trial or the seed for the test. ``domains`` has the names,
#: quoted as for a shell, and ``figures`` one number for each domain.
COLUMNS = (
    *("benchmark", "metric", "method", "kind", "number", "settings"),
    *("domains", "figures", "outcome", "reason", "processor"),
)
PROTOCOL, TRIAL, *TESTS = "protocol", "trial", "chosen", "paper's", "both"
CHOSEN, PAPERS, BOTH = TESTS

#: The method with which all others are compared.
REFERENCE = "uniform"

#: The summaries over domains that are compared between methods.
WORST, AVERAGE = MIN.phrase, AVG.phrase
_FIGURES: dict[str, Summary] = {WORST: MIN, AVERAGE: AVG}

#: Factors that differ between trials, in the order of the table.
_FACTORS = ("aggregation", "local training", "learning rate", "local epochs")


@dataclass(frozen=True)
class Board:
    """The contents of a leaderboard's file: one row per trial and test, with `COLUMNS`."""

    rows: pd.DataFrame

    @cached_property
    def benchmarks(self) -> list[str]:
        """Names of the benchmarks that have tests, in the order of the file."""
        return list(dict.fromkeys(self.rows["benchmark"][self.rows["kind"].isin(TESTS)]))

    def protocol(self, benchmark: str) -> str:
        """Return the common settings of a benchmark as ``key=value``; empty if unknown."""
        return " ".join(self._of(benchmark, [PROTOCOL])["settings"])

    def trials(self, benchmark: str) -> pd.DataFrame:
        """Return the rows with the trials of a benchmark."""
        return self._of(benchmark, [TRIAL])

    def tests(self, benchmark: str) -> pd.DataFrame:
        """Return the rows with the tests of a benchmark."""
        return self._of(benchmark, TESTS)

    def _of(self, benchmark: str, kinds: Sequence[str]) -> pd.DataFrame:
        return self.rows[(self.rows["benchmark"] == benchmark) & self.rows["kind"].isin(kinds)]

    def domains(self, benchmark: str) -> list[str]:
        """Return the names of a benchmark's domains, in the order of ``figures``."""
        return shlex.split(self.tests(benchmark)["domains"].iloc[0])

    def chosen(self, benchmark: str) -> dict[str, str]:
        """Return the settings that were chosen on a benchmark, as text for each method."""
        tests = self.tests(benchmark)
        rows = tests[tests["kind"] != PAPERS].drop_duplicates("method")
        return dict(zip(rows["method"], rows["settings"], strict=True))

    def figures(self, benchmark: str, figure: str, values: str = CHOSEN) -> pd.DataFrame:
        """Return a summary in percent, with one row per method and one column per seed."""
        return self._figures(benchmark, values, _FIGURES[figure])

    def _figures(
        self, benchmark: str, values: str, of: Callable[[Sequence[float]], float]
    ) -> pd.DataFrame:
        tests = self.tests(benchmark)
        rows = tests[(tests["outcome"] == "completed") & tests["kind"].isin([values, BOTH])]
        completed = rows.assign(figure=[100 * of(_numbers(text)) for text in rows["figures"]])
        return completed.pivot(index="method", columns="number", values="figure")

    def over_benchmarks(self, figure: str) -> pd.DataFrame:
        """Return means over seeds, [methods, benchmarks]; NaN if a method was not tested."""
        return pd.DataFrame({b: self.figures(b, figure).mean(axis=1) for b in self.benchmarks})

    def against_reference(self, benchmark: str, figure: str) -> dict[str, Difference]:
        """Return every method's difference from uniform weights, with Holm's p-values."""
        figures = self.figures(benchmark, figure)
        if REFERENCE not in figures.index:
            return {}
        return holm_correction(_by_method(figures.drop(index=REFERENCE) - figures.loc[REFERENCE]))

    def by_tuning(self, benchmark: str) -> dict[str, Difference]:
        """Return the gain from tuning in the worst domain; 0 if the paper's values were chosen."""
        tuned, papers = (self.figures(benchmark, WORST, v) for v in (CHOSEN, PAPERS))
        return _by_method(tuned - papers)

    @cached_property
    def ranks(self) -> Ranks | None:
        """Ranks by the worst domain over benchmarks; None for fewer than three benchmarks."""
        table = self.over_benchmarks(WORST).dropna()
        return ranks(table) if min(table.shape) >= 3 else None

    def variance(self, benchmark: str) -> dict[str, float]:
        """Return each factor's share of the variance of the worst domain over trials.

        Pruned trials are included with their accuracy at pruning. Otherwise, the worst
        learning rates would be missing, and learning rates would seem to matter less.
        """
        trials = self.trials(benchmark)
        trials = trials[trials["figures"] != ""]
        clients, rules = zip(*map(_parts, trials["method"]), strict=True)
        lr = np.log([_setting(text, "train.lr") for text in trials["settings"]])
        epochs = [f"{_setting(text, 'train.local-epochs'):g}" for text in trials["settings"]]
        factors = {
            "aggregation": pd.Series(rules, dtype=str),
            "local training": pd.Series(clients, dtype=str),
            "learning rate": pd.DataFrame({"log": lr, "square": lr**2}),
            "local epochs": pd.Series(epochs, dtype=str),
        }
        return eta_squared(
            trials["figures"].map(_worst).tolist(),
            {name: of for name, of in factors.items() if len(of.drop_duplicates()) > 1},
        )


def _by_method(differences: pd.DataFrame) -> dict[str, Difference]:
    """Return the mean difference of each method (row). Methods without a value are left out."""
    rows = ((str(name), row.dropna().tolist()) for name, row in differences.iterrows())
    return {name: paired_t_test(values) for name, values in rows if values}


def read_board(path: Path) -> Board:
    """Read a leaderboard file. Raises `RunFolderError` if it is missing or of another kind."""
    try:
        rows = pd.read_csv(path, keep_default_na=False, dtype={"figures": str})
    except (OSError, ValueError) as error:
        raise RunFolderError(f"Cannot read {path}: {error}.") from error
    if missing := set(COLUMNS) - set(rows.columns):
        raise RunFolderError(
            f"{path} is not a leaderboard file: it lacks {join_words(sorted(missing))}."
        )
    return Board(rows)


def is_board(path: Path) -> bool:
    """Return whether a CSV file is a leaderboard. Raises `RunFolderError` if it cannot be read."""
    return read_text(path).startswith(f"{COLUMNS[0]},")


# --- tables ----------------------------------------------------------------------------------


def board_tables(board: Board) -> list[Table]:
    """Return the tables: an overview of all benchmarks, each benchmark, and the variance."""
    whole = [_overview(board, figure) for figure in _FIGURES]
    single = [_benchmark(board, name) for name in board.benchmarks]
    return [*whole, *single, _variance(board)]


def _overview(board: Board, figure: str) -> Table:
    """Return a table with one row per method, best first, and one column per benchmark."""
    means = {b: board.figures(b, figure) for b in board.benchmarks}
    signs = {b: board.against_reference(b, figure) for b in board.benchmarks}
    over = board.over_benchmarks(figure)
    whole = over.dropna().rank(ascending=False).mean(axis=1)
    order = [
        *whole.sort_values(kind="stable").index,
        *over.rank(ascending=False).drop(whole.index).mean(axis=1).sort_values(kind="stable").index,
    ]
    rows = []
    for name in order:
        cells = [
            _mean(means[b].loc[name].dropna().tolist(), signs[b].get(str(name)), f"{b}-{name}")
            if name in means[b].index
            else Cell(DASH)
            for b in board.benchmarks
        ]
        rank = format_number(float(whole.get(name, math.nan)), 1)
        rows.append(Row(str(name), "", [*cells, Cell(rank)]))
    return Table(
        f"Tuned: {figure}, by benchmark",
        "In %; ±: standard deviation over seeds (ddof 1). ▲ better, ▼ worse than uniform weights: "
        "paired t test, p < 0.05 (Holm). Rank: mean over benchmarks.",
        [*board.benchmarks, "rank"],
        [Group("", rows)],
    )


def _mean(values: Sequence[float], difference: Difference | None, link: str = "") -> Cell:
    return judged_cell(MeanStd.of(values), difference.sign if difference else 0, link=link)


def _benchmark(board: Board, benchmark: str) -> Table:
    tests, trials = board.tests(benchmark), board.trials(benchmark)
    metric = METRICS[tests["metric"].iloc[0]]
    worst, average = (board.figures(benchmark, figure) for figure in _FIGURES)
    against = {figure: board.against_reference(benchmark, figure) for figure in _FIGURES}
    gains = board.by_tuning(benchmark)
    settings = board.chosen(benchmark)
    counts = trials[trials["outcome"] != "completed"]["method"].value_counts()
    rows = []
    for name in worst.mean(axis=1).sort_values(ascending=False, kind="stable").index:
        difference = against[WORST].get(name)
        cells = [
            _mean(worst.loc[name].dropna().tolist(), difference),
            _mean(average.loc[name].dropna().tolist(), against[AVERAGE].get(name)),
            _difference(difference),
            Cell(format_p_value(difference.p) if difference else DASH),
            _difference(gains.get(name)),
            Cell(str(counts.get(name, 0))),
        ]
        rows.append(Row(name, settings[name], cells, anchor=f"{benchmark}-{name}"))
    seeds = tests["number"].nunique()
    processors = join_words(sorted(set(tests["processor"])))
    return Table(
        f"{benchmark}, {metric}",
        "In %. Differences in points, [uncorrected 95 % interval]; p: worst domain against uniform "
        "weights (Holm). By tuning: chosen minus paper's values. Left out: trials pruned or lost.",
        [WORST, AVERAGE, f"against {REFERENCE}", "p", "by tuning", "left out"],
        [Group("", rows)],
        [
            f"{seeds} seeds, domains {join_words(board.domains(benchmark))}. Run on {processors}. "
            f"Settings: {board.protocol(benchmark) or 'unknown'}.",
            *_lost(tests),
            *_untested(trials, set(tests["method"])),
        ],
    )


def _lost(tests: pd.DataFrame) -> Iterator[str]:
    for _, test in tests[tests["outcome"] != "completed"].iterrows():
        yield (
            f"{test['method']} with {test['kind']} values, seed {test['number']}, failed and is "
            f"not in the means: {test['reason']}"
        )


def _untested(trials: pd.DataFrame, tested: set[str]) -> Iterator[str]:
    for name in dict.fromkeys(trials["method"]):
        if name not in tested:
            yield f"{name}: all trials failed, so it was not tested."


def _difference(difference: Difference | None) -> Cell:
    if difference is None:
        return Cell(DASH)
    return Cell(
        format_number(difference.mean, signed=True),
        f"[{format_number(difference.low)}, {format_number(difference.high)}]"
        if difference.n > 1
        else "",
    )


def _variance(board: Board) -> Table:
    shares = {b: board.variance(b) for b in board.benchmarks}
    names = [*(n for n in _FACTORS if any(n in parts for parts in shares.values())), "rest"]
    rows = [
        Row(b, "", [Cell(format_number(100 * parts[n], 1) if n in parts else DASH) for n in names])
        for b, parts in shares.items()
    ]
    return Table(
        "Where the variance over trials comes from",
        "In % of the variance of the worst domain on validation images (type II sums of squares). "
        "Rest: methods' arguments, variance shared by several factors, and noise. See "
        "docs/report.md.",
        names,
        [Group("", rows)],
    )


# --- sentences -------------------------------------------------------------------------------


def conclusions(board: Board) -> list[str]:
    """Return the conclusions, as sentences computed from the numbers."""
    return [*_better(board), *_moved(board), *_ranked(board), *_decided(board)]


def _better(board: Board) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for benchmark in board.benchmarks:
        gains = board.against_reference(benchmark, WORST)
        if all(math.isnan(difference.p) for difference in gains.values()):
            continue  # a single seed gives no p-value
        better = [name for name, difference in gains.items() if difference.sign > 0]
        worse = [name for name, difference in gains.items() if difference.sign < 0]
        counts.update(better)
        yield (
            f"{benchmark}: better than uniform weights in the worst domain, after Holm's "
            f"correction over {len(gains)} methods: {join_words(better) or 'none'}; worse: "
            f"{join_words(worse) or 'none'}."
        )
        yield f"{benchmark}: {detectable_text(gains)}"
    many = [f"{name} ({count})" for name, count in counts.items() if count > 2]
    if len(board.benchmarks) > 2:
        yield (
            f"Better than uniform weights on more than two of {len(board.benchmarks)} benchmarks: "
            f"{join_words(many) or 'none'}."
        )


def _moved(board: Board) -> Iterator[str]:
    for benchmark in board.benchmarks:
        gains = board.by_tuning(benchmark)
        tuned, papers = (board.figures(benchmark, WORST, v).mean(axis=1) for v in (CHOSEN, PAPERS))
        if len(papers) < 3:
            continue
        there = papers.index.intersection(tuned.index)
        tau = papers[there].corr(tuned[there], method="kendall")
        means = {name: difference.mean for name, difference in gains.items()}
        low, high = min(means, key=means.__getitem__), max(means, key=means.__getitem__)
        mean = sum(means.values()) / len(means)
        tests = board.tests(benchmark)
        kept = tests[tests["kind"] == BOTH]["method"].nunique()
        yield (
            f"{benchmark}: tuning changes the worst domain by {format_number(mean, signed=True)} "
            f"points on average, from {format_number(means[low], signed=True)} ({low}) to "
            f"{format_number(means[high], signed=True)} ({high}). {kept} of {len(means)} methods "
            "keep the paper's values. Kendall's tau between the rankings with the paper's and "
            f"with the chosen values is {format_number(float(tau))}. Best with the paper's values:"
            f" {papers.idxmax()}; best after tuning: {tuned.idxmax()}."
        )


def _ranked(board: Board) -> Iterator[str]:
    ranking = board.ranks
    if ranking is None:
        return
    apart = [n for n, rank in ranking.mean.items() if rank - ranking.lowest > ranking.critical]
    better = (
        f"it is better than that of {join_words(apart)}"
        if apart
        else "no method is better than another"
    )
    yield (
        f"Over {len(board.benchmarks)} benchmarks, Friedman's test gives p = {ranking.p:.3g}. The "
        f"lowest mean rank, {format_number(ranking.lowest, 1)}, is that of "
        f"{join_words(ranking.best)}; by Nemenyi's critical difference, "
        f"{format_number(ranking.critical, 1)}, {better}."
    )


def _decided(board: Board) -> Iterator[str]:
    for benchmark in board.benchmarks:
        shares = board.variance(benchmark)
        if not shares:
            continue  # all trials have the same accuracy
        told = join_words(
            [f"{name} {format_number(100 * share, 1)} %" for name, share in shares.items()]
        )
        trials = board.trials(benchmark)
        count, pruned = len(trials), int((trials["outcome"] == "pruned").sum())
        over = f"{count} trials ({pruned} of them pruned)"
        yield f"{benchmark}: shares of the variance over {over}: {told}."


# --- cells of the CSV files ------------------------------------------------------------------


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split()]


def _worst(text: str) -> float:
    return MIN(_numbers(text))


def _setting(text: str, key: str) -> float:
    """Return the value of a key in text such as ``train.lr=0.1 strategy.q=2``; NaN if missing."""
    return float(dict(part.split("=") for part in text.split()).get(key, math.nan))


def _parts(method: str) -> tuple[str, str]:
    """Return the client and the strategy in a name such as ``feddyn+fedheal`` or ``fedmgda+``."""
    client, plus, rule = method.partition("+")
    return (client, rule) if plus and rule and rule[0] != ":" else ("", method)
