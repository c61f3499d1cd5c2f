"""Centralized evaluation: the server tests the global model on all domains."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from fairflower.config import RunConfig
from fairflower.data import Federation, Split
from fairflower.errors import ConfigError, GpuMemoryError, failure_text
from fairflower.files import Arrays
from fairflower.models import copy_arrays, exchanged_arrays, set_arrays, trainable
from fairflower.numerics import metrics
from fairflower.numerics.group_fairness import Counts, counts_by_group
from fairflower.numerics.threads import cpus
from fairflower.registry.user_metrics import compute_metrics
from fairflower.server.history import ADAPTED
from fairflower.training.batches import Examples, eval_slices, examples_of
from fairflower.training.build import build_model
from fairflower.training.device import choose_device, float64_on, out_of_memory
from fairflower.training.modes import layers_with_statistics, target_statistics


class Tested(NamedTuple):
    """Results of a test; a held-out domain comes last."""

    #: Domain -> metric -> value.
    scores: dict[str, dict[str, float]]
    #: Domain -> user-defined metric that failed -> reason.
    failed: dict[str, dict[str, str]]
    #: Client -> counts of people, with ``data.groups``.
    counts: dict[int, Counts]
    #: Counts of people in the held-out domain.
    held_out_counts: Counts | None = None


class CentralizedEvaluator:
    """Builds the initial model, and tests global models on each domain.

    Test examples are loaded on first use and stay on the device (images as uint8). On a CPU, a
    single thread tests each batch, so results do not depend on the number of cores.
    """

    def __init__(self, config: RunConfig, federation: Federation) -> None:
        self.federation = federation
        self.batch_size = config.evaluate.batch_size
        self.auc = config.evaluate.auc or federation.auc
        self.metrics = config.evaluate.metrics
        self.device = choose_device(config.train.device)
        self.model = build_model(config.model, config.client, federation, config.seed)
        self.model.to(self.device)
        self.name = config.model.name
        #: Whether the held-out domain is also tested with BatchNorm statistics of its own.
        self.adabn = config.evaluate.adabn and bool(layers_with_statistics(self.model))
        self.threads = cpus() if self.device.type == "cpu" else 1
        self._tests: dict[tuple[str, str], list[Examples]] = {}
        self._groups = cache(federation.test_groups)
        self._pool = ThreadPoolExecutor(
            self.threads, initializer=torch.set_num_threads, initargs=(1,)
        )

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters of the model."""
        return sum(p.numel() for p in trainable(self.model).values())

    @property
    def buffers(self) -> list[str]:
        """Names of the exchanged arrays that are not trained: statistics and frozen parameters."""
        trained = trainable(self.model)
        return [name for name in exchanged_arrays(self.model) if name not in trained]

    def arrays(self) -> Arrays:
        """Return the model's exchanged arrays by name; initial values before the first test."""
        return copy_arrays(self.model)

    def __call__(self, arrays: Mapping[str, NDArray[np.generic]], split: str = "test") -> Tested:
        """Test a model on every domain's ``"test"`` or ``"validation"`` examples.

        A held-out domain has only test examples.

        The scores of each domain are ``accuracy`` and ``balanced_accuracy`` (0 to 1), ``loss``
        (mean cross entropy), the user-defined metrics and, with ``evaluate.auc``, ``auc``
        (one-vs-one). With ``evaluate.adabn`` a held-out domain also has ``adabn_accuracy``, the
        accuracy with BatchNorm statistics of this domain. Raises ``GpuMemoryError`` if the GPU's
        memory is too small.
        """
        try:
            return self._tested(arrays, split)
        except torch.OutOfMemoryError as error:
            raise GpuMemoryError(
                f"The server's test ran out of GPU memory ({out_of_memory(str(error))}). Resume "
                "the run with fewer parallel clients (--workers, or a larger client-gpus) or "
                "fewer parallel runs (--jobs), or start a new run with a smaller "
                "evaluate.batch-size."
            ) from error

    def _tested(self, arrays: Mapping[str, NDArray[np.generic]], split: str) -> Tested:
        set_arrays(self.model, arrays, "The server")
        self.model.eval()
        pending = {
            domain: [
                self._pool.submit(self._test, images) for images in self._chunks(domain, split)
            ]
            for domain in self._domains(split)
        }
        results: dict[str, dict[str, float]] = {}
        failed: dict[str, dict[str, str]] = {}
        people: dict[str, list[Counts]] = {}
        for domain, futures in pending.items():
            losses, *chunks = zip(*(future.result() for future in futures), strict=True)
            labels, predicted, logits = map(np.concatenate, chunks)
            results[domain] = {
                "accuracy": float((labels == predicted).mean()),
                "balanced_accuracy": metrics.balanced_accuracy(labels, predicted),
                "loss": sum(losses) / len(labels),
            }
            if self.auc:
                probabilities = torch.from_numpy(logits).softmax(1).numpy()
                results[domain]["auc"] = metrics.auc_ovo(labels, probabilities)
            of_user, failed[domain] = compute_metrics(self.metrics, logits, labels)
            results[domain] |= of_user
            if self.federation.groups:
                people[domain] = self._counted(domain, split, labels, predicted)
        held_out = self.federation.held_out
        if self.adabn and (unseen := results.get(held_out)):
            chunks = self._chunks(held_out, split)
            unseen[ADAPTED] = self._pool.submit(self._test_adapted, chunks).result()
        held_out_counts = next(iter(people.pop(held_out, [])), None)
        clients = (k for domain in people for k in self.federation.clients_of(domain))
        counts = dict(zip(clients, chain(*people.values()), strict=True))
        return Tested(results, failed, counts, held_out_counts)

    def _counted(
        self, domain: str, split: str, labels: NDArray[np.int64], predicted: NDArray[np.int64]
    ) -> list[Counts]:
        """Count the people of each client in a domain; the clients' examples are concatenated."""
        groups = self._groups(domain, split)
        ends = np.cumsum([len(of_client) for of_client in groups])[:-1]
        parts = zip(np.split(labels, ends), np.split(predicted, ends), groups, strict=True)
        names = self.federation.group_names
        return [counts_by_group(y, p, g, len(names)) for y, p, g in parts]

    def _domains(self, split: str) -> tuple[str, ...]:
        """Return the domains that have examples in a split."""
        held_out = self.federation.held_out if split == "test" else ""
        return (*self.federation.domains, *filter(None, [held_out]))

    def _chunks(self, domain: str, split: str) -> list[Examples]:
        """Return a domain's examples from a split in batches, which are normalized when tested."""
        if (domain, split) not in self._tests:
            data, size = self.federation, self.batch_size
            x, y = data.test(domain, split)
            rows = eval_slices(len(y), size, self.model.takes_single)
            pieces = [Split(x[part], y[part]) for part in rows]
            self._tests[domain, split] = [
                examples_of(piece, data.mean, data.std, device=self.device, model=self.model)
                for piece in pieces
            ]
        return self._tests[domain, split]

    def _test_adapted(self, chunks: list[Examples]) -> float:
        """Return the accuracy on a domain's examples, using their BatchNorm statistics."""
        batches = (x for images in chunks for x, _ in images.eval_batches(self.batch_size))
        with target_statistics(self.model, batches):
            pairs = [self._test(images)[1:3] for images in chunks]
        labels, predicted = map(np.concatenate, zip(*pairs, strict=True))
        return float((labels == predicted).mean())

    def _test(
        self, images: Examples
    ) -> tuple[float, NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]:
        """Return the summed loss, labels [B], predictions [B] and logits [B, classes or 0]."""
        with torch.inference_mode():
            ((x, y),) = images.eval_batches(self.batch_size)
            try:
                logits = self.model(x)
                loss = F.cross_entropy(logits, y, reduction="sum")
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"model.name = {self.name!r}: the server's test of a batch of shape "
                    f"{tuple(x.shape)} failed with {failure_text(error)}. Correct the network."
                ) from error
            wanted = logits if self.auc or self.metrics else logits[:, :0]
            results = (y, logits.argmax(1), wanted.to(float64_on(wanted.device)))
            return loss.item(), *(values.numpy(force=True) for values in results)  # type: ignore[return-value]
