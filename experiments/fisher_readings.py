r"""Readings of FedEquilibria's Eq. 1, which does not fully define the Fisher diagonal F_k.

    cd experiments && fairflower compare --config fisher-readings-office.toml --strategies \
      fedavg,fedequilibria:t=0.0,fisher_readings:Reading:reading=printed,...

The results are in fisher-readings-office.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.hooks import Options
from fairflower.models import trainable
from fairflower.numerics.min_norm import cosines, min_norm_weights
from fairflower.strategies import FedEquilibria
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.measurements import COMPUTE
from fairflower.training.trainer import Trainer

Name = Literal["printed", "unit", "sum-one", "summed", "layers", "by-layer", "batches", "drawn"]


def batch_fisher(trainer: Trainer) -> dict[str, Tensor]:
    """Return the mean over batches of the squared gradient of a batch's mean loss."""
    parameters = trainable(trainer.model)
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    count = 0
    with torch.enable_grad():
        for x, y in trainer.train_examples.eval_batches(trainer.settings.batch_size):
            loss = F.cross_entropy(trainer.model(x), y)
            gradients = torch.autograd.grad(loss, list(parameters.values()))
            for name, gradient in zip(parameters, gradients, strict=True):
                total[name] += gradient.square()
            count += 1
    return {name: value / count for name, value in total.items()}


def true_fisher(trainer: Trainer) -> dict[str, Tensor]:
    """Return the Fisher diagonal with labels sampled from the model's predictions."""
    batches = []
    with torch.no_grad():
        for x, _ in trainer.train_examples.eval_batches(trainer.eval_batch_size):
            drawn = torch.multinomial(trainer.model(x).softmax(1), 1).squeeze(1)
            batches.append((x, drawn))
    return fisher_diagonal(trainer.model, batches, memory_mb=trainer.measure_memory_mb)


MEASURE = {"batches": batch_fisher, "drawn": true_fisher}


def measure(trainer: Trainer) -> Mapping[str, Tensor]:
    """Return F_k by the reading in the round's config, or else by the package's measurement."""
    return MEASURE.get(str(trainer.round_config.get("reading")), PACKAGE_FISHER)(trainer)


PACKAGE_FISHER = COMPUTE["fisher"]
COMPUTE["fisher"] = measure


class Reading(FedEquilibria):
    """FedEquilibria with a choice of readings of F_k.

    printed
        Mean of squared per-sample gradients at the trained model, unscaled (scale = "none").
    unit
        Scaled to norm 1 (scale = "unit", fairflower's default).
    sum-one
        Scaled to sum 1.
    summed
        n_k F_k, the sum over the client's examples.
    layers
        Every array scaled to norm 1, then one QP for all arrays.
    by-layer
        One QP for each array; w_moo is the mean of their solutions.
    batches
        Squared gradients of a batch's mean loss instead of each sample's.
    drawn
        Labels sampled from the model's predictions instead of the true labels.
    """

    def __init__(
        self, *, reading: Name = "printed", t: float = 0.7, **options: Unpack[Options]
    ) -> None:
        super().__init__(t=t, **options)
        self.reading = reading

    def client_config(self, client_id: int) -> Mapping[str, float | str]:
        """Send the reading to the client, whose measurement depends on it."""
        return {"reading": self.reading}

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        """Combine the QP's weights with weights by the norm of the update."""
        distance = np.sqrt(cohort.squared_norms())
        w_moo = self.moo(cohort)
        self.diagnostics |= {"w_moo": w_moo}
        return self.t * w_moo + (1 - self.t) * distance / distance.sum()

    def moo(self, cohort: Cohort) -> NDArray[np.float64]:
        """Return the QP's weights for the reading, shape (K,)."""
        if self.reading in ("layers", "by-layer"):
            grams = [cosines(cohort.gram("fisher", [name])) for name in cohort.parameters]
            if self.reading == "layers":
                return min_norm_weights(np.sum(grams, 0)).weights
            return np.mean([min_norm_weights(gram).weights for gram in grams], 0)
        gram = cohort.gram("fisher")
        if self.reading == "unit":
            gram = cosines(gram)
        elif self.reading == "sum-one":
            sums = np.array([sum(a.sum() for a in f.values()) for f in cohort.measured["fisher"]])
            gram = gram / np.outer(sums, sums)
        elif self.reading == "summed":
            n = np.array(cohort.num_examples, float)
            gram = gram * np.outer(n, n)
        return min_norm_weights(gram).weights
