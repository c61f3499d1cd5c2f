"""The global model on every domain's test set, at the server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from fairflower import models
from fairflower.clients import Images, choose_device
from fairflower.config import RunConfig
from fairflower.data import Augment, Federation, Split

Arrays = dict[str, NDArray[np.generic]]


class Evaluator:
    """Builds the initial model and tests a global model domain by domain.

    Test images are loaded on first use and stay on the device as uint8. On a
    CPU, batches are spread over threads of one core each, so a result does not
    depend on the number of cores.

    Parameters
    ----------
    config : RunConfig
        Gives the model, the seed of its initial weights, and the device.
    federation : Federation
        Gives the test sets.
    """

    def __init__(self, config: RunConfig, federation: Federation) -> None:
        self.federation = federation
        self.batch_size = config.evaluate.batch_size
        self.device = choose_device(config.train.device)
        self.model = models.build(
            config.model.name,
            federation.num_classes,
            federation.shape,
            config.seed,
            config.model.weights,
        ).to(self.device)
        self.threads = (os.cpu_count() or 1) if self.device.type == "cpu" else 1
        self._tests: dict[str, list[Images]] = {}
        self._pool = ThreadPoolExecutor(
            self.threads, initializer=torch.set_num_threads, initargs=(1,)
        )

    @property
    def num_parameters(self) -> int:
        """Trainable parameters of the model."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def buffers(self) -> list[str]:
        """Names of the travelling arrays that are not trained."""
        trained = {name for name, _ in self.model.named_parameters()}
        return [name for name in self.model.travelling() if name not in trained]

    def arrays(self) -> Arrays:
        """The model's travelling arrays by name; before any ``__call__`` the initial ones."""
        return {
            name: tensor.to("cpu", copy=True).numpy()
            for name, tensor in self.model.travelling().items()
        }

    def __call__(self, arrays: Mapping[str, NDArray[np.generic]]) -> dict[str, dict[str, float]]:
        """Domain -> ``accuracy`` (0 to 1) and ``loss`` (mean cross entropy) of ``arrays``."""
        for name, tensor in self.model.travelling().items():
            tensor.copy_(torch.tensor(arrays[name]))
        self.model.eval()
        pending = {
            domain: [self._pool.submit(self._test, images) for images in self._chunks(domain)]
            for domain in self.federation.domains
        }
        results = {}
        for domain, futures in pending.items():
            loss, correct, count = np.sum([future.result() for future in futures], axis=0)
            results[domain] = {"accuracy": correct / count, "loss": loss / count}
        return results

    def _chunks(self, domain: str) -> list[Images]:
        """A domain's test set in pieces of one batch, normalised only when tested."""
        if domain not in self._tests:
            data = self.federation
            x, y = data.test(domain)
            self._tests[domain] = [
                Images(
                    Split(x[i : i + self.batch_size], y[i : i + self.batch_size]),
                    data.mean,
                    data.std,
                    Augment(),
                    self.device,
                    self.model,
                )
                for i in range(0, len(y), self.batch_size)
            ]
        return self._tests[domain]

    def _test(self, images: Images) -> tuple[float, int, int]:
        with torch.inference_mode():
            ((x, y),) = images.eval_batches(self.batch_size)
            logits = self.model(x)
            loss = F.cross_entropy(logits, y, reduction="sum")
            return loss.item(), int((logits.argmax(1) == y).sum()), len(y)
