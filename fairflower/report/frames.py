"""Runs as pandas DataFrames: the metrics of every round, the table of methods, and differences."""

from collections.abc import Sequence

import pandas as pd

from fairflower.files import cell_of
from fairflower.report.analysis import Analysis, analyze
from fairflower.report.reading import Run
from fairflower.report.tables import columns, held_out_columns
from fairflower.server.contents import HISTORY_COLUMNS, read_history


def history_frame(runs: Sequence[Run]) -> pd.DataFrame:
    """Return every metric of every round.

    The columns are ``data`` (the data set and its domains) and ``method``, as in `table_frame`,
    ``seed``, ``run`` (the name of the folder) and those of ``history.csv``: ``round``, ``level``
    (domain, client or run), ``name`` (of the domain or client), ``metric`` and ``value``. Runs from
    a summary have only the values of the summary.
    """
    columns = ["data", "method", "seed", "run", *HISTORY_COLUMNS]
    if not runs:
        return pd.DataFrame(columns=columns)
    named = {
        id(run): {"data": chapter.title, "method": method.name}
        for chapter in analyze(runs).chapters
        for method, run in chapter.comparison.runs
    }
    frames = [
        _history(run).assign(**named[id(run)], seed=run.seed, run=run.path.name) for run in runs
    ]
    return pd.concat(frames, ignore_index=True)[columns]


def _history(run: Run) -> pd.DataFrame:
    file = run.path / "history.csv"
    if not run.summarized and file.is_file():
        return pd.DataFrame(read_history(file), columns=HISTORY_COLUMNS)
    rows = [
        (r, level, name, metric, value)
        for (level, metric), found in run.history.values.items()
        for r, by_name in found.items()
        for name, value in by_name.items()
    ]
    return pd.DataFrame(rows, columns=HISTORY_COLUMNS)


def table_frame(runs: Sequence[Run] | Analysis) -> pd.DataFrame:
    """Return the table of methods, in percent: means over the last five tested rounds.

    The columns are pairs: ``(name, "mean")`` and ``(name, "std")`` over runs (ddof 1), and
    ``("seeds", "n")``. A name is a domain, AVG, STD (with ddof 1 and 0), MIN, GAP, or a held-out
    domain. AVG, STD, MIN and GAP do not include held-out domains. The index is the method or, for
    several sets of domains, the data set and the method.
    """
    parts = {}
    for chapter in analyze(runs).chapters:
        comparison = chapter.comparison
        rows = {}
        for method in comparison.methods:
            row: dict[tuple[str, str], float] = {("seeds", "n"): len(method.runs)}
            for column in [*columns(comparison), *held_out_columns(comparison)]:
                estimate = column.estimate(method)
                row |= {(column.title, "mean"): estimate.mean, (column.title, "std"): estimate.std}
            rows[method.name] = row
        part = pd.DataFrame.from_dict(rows, orient="index").astype({("seeds", "n"): int})
        part.columns = pd.MultiIndex.from_tuples(part.columns)
        parts[chapter.title] = part.rename_axis("method")
    return pd.concat(parts, names=["data"]) if len(parts) > 1 else parts.popitem()[1]


def differences_frame(runs: Sequence[Run] | Analysis) -> pd.DataFrame:
    """Return the paired differences from baselines and references, in percentage points.

    The columns are:

    - ``data`` (the data set and its domains) and ``method``, as in `table_frame`, and ``against``,
      the baseline or reference;
    - ``measure``, the name of metrics that are judged together, and ``metric``;
    - ``mean``, ``std`` and ``seeds`` (number of pairs) of the differences;
    - ``low`` and ``high``, the ends of simultaneous 95 % intervals;
    - ``p`` after the correction over all methods and metrics that are compared with the same
      baseline;
    - ``margin``, the margin of equivalence;
    - ``least``, the smallest difference that is detected with 80 % power;
    - ``verdict``: better, worse, equivalent or undecided; empty for fewer than five pairs.
    """
    rows = [
        (
            *(chapter.title, name, baseline, contrast.measure.name, metric.title),
            *(d.mean, d.std, d.n, d.low, d.high, d.p, d.margin, d.detectable),
            one.verdict,
        )
        for chapter in analyze(runs).chapters
        for against in (
            *(of.against_baselines for of in chapter.contrasts),
            *({n: {g.heading: c} for n, c in g.contrasts.items()} for g in chapter.gains),
        )
        for name, contrasts in against.items()
        for baseline, contrast in contrasts.items()
        for one in contrast.by_metric
        for metric, d, _ in [one]
    ]
    names = ["data", "method", "against", "measure", "metric", "mean", "std", "seeds"]
    return pd.DataFrame(rows, columns=[*names, "low", "high", "p", "margin", "least", "verdict"])


def csv_table(runs: Sequence[Run] | Analysis) -> str:
    """Return `table_frame` as CSV, with one column per mean and per standard deviation."""
    frame = table_frame(runs)
    titles = ("seeds" if of == "n" else cell_of(f"{name} {of}") for name, of in frame.columns)
    frame.columns = pd.Index(titles)
    frame.index = frame.index.map(cell_of)
    return str(frame.to_csv(lineterminator="\n"))
