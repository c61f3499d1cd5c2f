"""Participation policies: which clients train in a round, and which are available.

A policy is a subclass of `Participation` with a method ``choose``. It works with every strategy,
and checkpoints include its state. The setting ``participation.policy`` is the name of a policy,
optionally with arguments (``power-of-choice:d=10``), or a class in another package
(``my_package.module:Class``).
"""

from fairflower.aggregation.participation import Draw, Participation, Uniform
from fairflower.participation.policies import ByExamples, PowerOfChoice, RoundRobin

__all__ = ["ByExamples", "Draw", "Participation", "PowerOfChoice", "RoundRobin", "Uniform"]
