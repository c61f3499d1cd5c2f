"""Differences of methods over several benchmarks.

There are two questions. For *these* benchmarks, `pooled` returns the mean of a method's
differences, with an error due only to federations. For benchmarks *like* these, `mixed` fits a
mixed model in which differences vary at random between benchmarks, with an error due to this
variance. With four benchmarks, the second interval is wide.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fairflower.statistics.differences import (
    Difference,
    MeanStd,
    difference_of,
    dunnett,
    judged_as_family,
)

if TYPE_CHECKING:
    import pandas as pd


def pooled(gains: Sequence[Difference]) -> Difference:
    """Return the mean of a method's differences on several benchmarks.

    The degrees of freedom are Satterthwaite's. ``std`` is the standard deviation over benchmarks,
    ``n`` is the smallest number of pairs of any benchmark, and the margin is that of the first
    benchmark. For several methods, pass the results to `judged_as_family`.

    Raises
    ------
    ValueError
        If there is no difference, or a difference has no error.
    """
    if not gains or any(math.isnan(gain.error) for gain in gains):
        raise ValueError(
            "Pooled differences need at least one benchmark, and a standard error on"
            " each benchmark."
        )
    count = len(gains)
    mean = sum(gain.mean for gain in gains) / count
    std = math.sqrt(sum((gain.mean - mean) ** 2 for gain in gains) / max(1, count - 1))
    squares = [gain.error**2 for gain in gains]
    error = math.sqrt(sum(squares)) / count
    parts = sum(s**2 / gain.df for s, gain in zip(squares, gains, strict=True) if s)
    df = sum(squares) ** 2 / parts if parts else math.inf
    estimate = MeanStd(mean, std, min(gain.n for gain in gains))
    return difference_of(estimate, error, df, gains[0].margin)


def mixed(table: pd.DataFrame, reference: str, margin: float = math.nan) -> dict[str, Difference]:
    """Return differences from a method over benchmarks like these, with Dunnett's intervals.

    The mixed model is value = method (fixed) + benchmark + federation within benchmark + method x
    benchmark + residual (all random). Only federations with a run of every method are used, so the
    effects of federations cancel. It is therefore enough to fit the means by method and benchmark,
    with a random benchmark, by REML (statsmodels), which gives the same estimates and errors. The
    residual of this smaller model contains method x benchmark and the mean residual over
    federations, on (benchmarks - 1) (methods - 1) degrees of freedom. The p-values are those of
    single tests against Student's t distribution with these degrees of freedom (statsmodels uses a
    normal distribution), corrected by Holm's method.

    Parameters
    ----------
    table : DataFrame
        One row per run, with the columns ``benchmark``, ``federation``, ``method`` and ``value``.
    reference : str
        The method with which all others are compared.
    margin : float
        Margin within which methods count as equivalent.

    Returns
    -------
    dict
        Method -> `Difference`. ``n`` is the number of benchmarks, and ``std`` is over benchmarks.

    Raises
    ------
    ValueError
        If the table lacks the reference, another method, or a second benchmark that all methods
        share.
    """
    from statsmodels.regression.mixed_linear_model import MixedLM  # late: takes a second

    means = _means(table)
    others = [str(name) for name in means.columns if name != reference]
    if reference not in means.columns or not others or len(means) < 2:
        raise ValueError(
            f"A mixed model needs {reference}, another method and two benchmarks with federations "
            "that all methods share."
        )
    long = means[[reference, *others]].melt(ignore_index=False, var_name="method").reset_index()
    design = (long["method"].to_numpy()[:, None] == [reference, *others]).astype(float)
    design[:, 0] = 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a variance at its bound of 0 is a valid result
        fit = MixedLM(long["value"].to_numpy(), design, long["benchmark"].to_numpy()).fit(reml=True)
    df = (len(means) - 1) * len(others)
    judged = {}
    for place, name in enumerate(others, 1):
        gains = means[name] - means[reference]
        estimate = MeanStd(float(fit.params[place]), float(gains.std(ddof=1)), len(means))
        judged[name] = difference_of(estimate, float(fit.bse[place]), df, margin)
    bound = dunnett(len(others), df)
    return {
        name: replace(
            difference,
            low=difference.mean - bound * difference.error,
            high=difference.mean + bound * difference.error,
        )
        for name, difference in judged_as_family(judged).items()
    }


def _means(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean values [benchmarks, methods] over the federations that all methods share."""
    wide = table.pivot_table(index=["benchmark", "federation"], columns="method", values="value")
    return wide.dropna().groupby(level="benchmark").mean()
