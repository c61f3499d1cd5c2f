"""User-defined metrics for tests: functions of logits [N, C] and labels [N]."""

from __future__ import annotations

import numpy as np
from scipy.special import softmax
from sklearn.metrics import f1_score, roc_auc_score


def macro_f1(logits, labels):
    return f1_score(labels, logits.argmax(axis=1), average="macro", zero_division=0)


def auc(logits, labels):  # fairflower has a metric of this name
    return 0.5


def roc(logits, labels):
    classes = np.arange(logits.shape[1])
    return roc_auc_score(labels, softmax(logits, axis=1), multi_class="ovo", labels=classes)


def confidence_gap(logits, labels):
    """Calibration error with a single bin."""
    p = softmax(logits, axis=1)
    return abs(p.max(axis=1).mean() - (logits.argmax(axis=1) == labels).mean())


confidence_gap.better = -1


def raises(logits, labels):
    raise KeyError("no threshold")


def nan(logits, labels):
    return float("nan")


def infinite(logits, labels):
    return np.float32("inf")


def per_class(logits, labels):
    return logits.mean(axis=0)


def text(logits, labels):
    return "0.5"


def masked(logits, labels):
    return np.ma.masked_array([1.0], mask=[True]).mean()


def changes_its_input(logits, labels):
    logits[:] = 0
    labels[:] = 0
    return 1.0


def sideways(logits, labels):
    return 0.0


sideways.better = "more"


def numpys(logits, labels):
    return 0.5


numpys.better = np.int64(-1)


def both_ways(logits, labels):
    return 0.5


both_ways.better = np.array([1, -1])


class Failing:
    def __call__(self, logits, labels):
        return 0.5

    @property
    def better(self):
        raise KeyError("better")


failing = Failing()


def demographic_parity_difference(logits, labels):
    return 0.5


def adabn_accuracy(logits, labels):
    return 0.5


def auc_0(logits, labels):
    return 0.5


class Metric:
    pass
