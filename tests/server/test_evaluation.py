"""The server's evaluation of the global model, compared with scikit-learn."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runs import config, run
from sklearn.metrics import balanced_accuracy_score, log_loss, roc_auc_score

from fairflower.config import RunConfig
from fairflower.data import prepare
from fairflower.errors import GpuMemoryError
from fairflower.server.evaluation import CentralizedEvaluator


@pytest.fixture
def evaluator(tmp_path: Path) -> Any:
    """An evaluator of two domains, the second without classes 3 and 4."""
    rng = np.random.default_rng(0)
    for domain, classes in (("a", 5), ("b", 3)):
        x = rng.integers(0, 256, (90, 8, 8), np.uint8)
        y = rng.choice(classes, 90, p=[0.8, *[0.2 / (classes - 1)] * (classes - 1)])
        y[:classes] = np.arange(classes)
        np.savez(tmp_path / f"{domain}.npz", x_train=x, y_train=y, x_test=x, y_test=y)

    def make(**flat: Any) -> CentralizedEvaluator:
        data = {"data.name": "npz", "data.dir": str(tmp_path), "data.clients-per-domain": 3}
        config = RunConfig.from_flat({**data, "evaluate.batch-size": 40, **flat})
        return CentralizedEvaluator(config, prepare(config.data))

    return make


def test_metrics_equal_those_of_scikit_learn(evaluator: Any) -> None:
    server_evaluator = evaluator(**{"evaluate.auc": True})
    results = server_evaluator(server_evaluator.arrays()).scores
    for domain, values in results.items():
        x, y = server_evaluator.federation.test(domain)
        with torch.inference_mode():
            logits = server_evaluator.model(
                torch.tensor((x / 255 - 0.5) / 0.5, dtype=torch.float32)
            )
        p = logits.double().softmax(1).numpy()
        predicted = p.argmax(axis=1)
        assert values["accuracy"] == pytest.approx((predicted == y).mean())
        assert values["loss"] == pytest.approx(log_loss(y, p, labels=range(5)), rel=1e-4)
        with warnings.catch_warnings(action="ignore"):  # classes without a test image
            balanced = balanced_accuracy_score(y, predicted)
        assert values["balanced_accuracy"] == pytest.approx(balanced)
        expected = roc_auc_score(y, p, multi_class="ovo", labels=range(5))
        assert values["auc"] == pytest.approx(expected, abs=1e-3)


def test_the_batch_size_does_not_change_the_metrics(evaluator: Any) -> None:
    one, other = evaluator(), evaluator(**{"evaluate.batch-size": 7})
    first, second = one(one.arrays()).scores, other(one.arrays()).scores
    for domain in first:
        assert first[domain] == pytest.approx(second[domain])


def test_auc_is_computed_only_if_enabled(evaluator: Any) -> None:
    server_evaluator = evaluator()
    assert set(server_evaluator(server_evaluator.arrays()).scores["a"]) == {
        "accuracy",
        "balanced_accuracy",
        "loss",
    }


def test_the_auc_of_a_model_with_nan_is_nan(evaluator: Any) -> None:
    server_evaluator = evaluator(**{"evaluate.auc": True})
    broken = {
        name: np.full_like(array, np.nan) for name, array in server_evaluator.arrays().items()
    }
    values = server_evaluator(broken).scores["a"]
    assert np.isnan(values["auc"])
    assert 0 <= values["balanced_accuracy"] <= 1


def test_running_out_of_gpu_memory_in_the_servers_test_advises_a_smaller_batch(
    evaluator: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(CentralizedEvaluator, "_test", full)
    message = r"server's test ran out of GPU memory \(CUDA out .* 2.00 GiB\).*evaluate.batch-size"
    with pytest.raises(GpuMemoryError, match=message):
        run(config(tmp_path))
    server_evaluator = evaluator()
    with pytest.raises(GpuMemoryError, match=message):
        server_evaluator.predictions(server_evaluator.arrays(), "a")


def test_frozen_parameters_are_treated_as_buffers(evaluator: Any, tmp_path: Path) -> None:
    """Strategies therefore neither expect measurements of them nor count them."""
    server_evaluator = evaluator()
    first = next(iter(server_evaluator.arrays()))
    assert first not in server_evaluator.buffers
    server_evaluator.model.get_parameter(first).requires_grad_(False)
    assert first in server_evaluator.buffers
