"""Uniform participation, the default of every strategy."""

from fairflower.aggregation.participation import Uniform

__all__ = ["Uniform"]
