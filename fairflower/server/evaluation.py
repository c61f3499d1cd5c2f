"""Tests of the global model by the server; group fairness from the server's or clients' tests."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Message, MetricRecord
from numpy.typing import NDArray

from fairflower.config import RunConfig
from fairflower.data import Federation, Split
from fairflower.engines.inline import gpu_memory_error
from fairflower.errors import ConfigError, MetricError, escaped, failure_text, logger
from fairflower.files import Arrays
from fairflower.models import copy_arrays, exchanged_arrays, set_arrays, trainable
from fairflower.numerics import group_fairness as fairness
from fairflower.numerics import metrics
from fairflower.numerics.threads import cpus
from fairflower.registry.user_metrics import FAILED_METRICS, compute_metrics, metric_names
from fairflower.server.folder import RunFolder
from fairflower.server.history import ADAPTED, ALL, LEVELS, OVERALL, WORST_CLIENT
from fairflower.server.registration import ClientRegistry
from fairflower.tasks import Targets
from fairflower.training.batches import Examples, batch_slices, examples_of
from fairflower.training.build import build_model
from fairflower.training.device import choose_device, float64_on, out_of_memory
from fairflower.training.modes import layers_with_statistics, target_statistics


class Tested(NamedTuple):
    """Results of a test; a held-out domain comes last."""

    scores: dict[str, dict[str, float]]  # domain -> metric -> value
    failed: dict[str, dict[str, str]]  # domain -> user-defined metric that failed -> reason
    counts: dict[int, fairness.Counts]  # client -> counts of people, with ``data.groups``
    held_out_counts: fairness.Counts | None = None  # counts of people in the held-out domain


#: The task's sums over a batch, targets, predictions, and outputs, [B, 0] if not needed.
_Batch = tuple[dict[str, Any], Targets, Targets, NDArray[np.float64]]


def _joined(batches: Iterable[_Batch]) -> _Batch:
    """Return batches as one, with means over examples, floats or arrays [K], instead of sums."""
    sums, *parts = zip(*batches, strict=True)
    targets, predictions, outputs = map(np.concatenate, parts)
    means = {name: sum(batch[name] for batch in sums) / len(targets) for name in sums[0]}
    return means, targets, predictions, outputs


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise ``GpuMemoryError``, which says what to change, if the GPU's memory is too small."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = out_of_memory(str(error))
        raise gpu_memory_error(reason, "The server's test", "evaluate.batch-size") from error


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
    def buffers(self) -> list[str]:
        """Names of the exchanged arrays that are not trained: statistics and frozen parameters."""
        trained = trainable(self.model)
        return [name for name in exchanged_arrays(self.model) if name not in trained]

    def arrays(self) -> Arrays:
        """Return the model's exchanged arrays by name; initial values before the first test."""
        return copy_arrays(self.model)

    @_memory_errors()
    def __call__(
        self,
        arrays: Mapping[str, NDArray[np.generic]],
        split: str = "test",
        domains: Sequence[str] | None = None,
    ) -> Tested:
        """Test a model on the ``"test"`` or ``"validation"`` examples of every domain, or of some.

        A held-out domain has only test examples, and is always tested on them.

        The scores of each domain are those of the task (for classes ``accuracy`` and
        ``balanced_accuracy``, 0 to 1), ``loss``, the user-defined metrics and, with
        ``evaluate.auc``, ``auc`` (one-vs-one). With ``evaluate.adabn`` a held-out domain also has
        the primary score with BatchNorm statistics of this domain, ``adabn_accuracy``. Raises
        ``GpuMemoryError`` if the GPU's memory is too small.
        """
        task, held_out = self.federation.learns, self.federation.held_out
        domains = domains or self.federation.domains
        pending = self._begun(
            arrays, (*domains, *([held_out] if held_out and split == "test" else ())), split
        )
        results: dict[str, dict[str, float]] = {}
        failed: dict[str, dict[str, str]] = {}
        people: dict[str, list[fairness.Counts]] = {}
        for domain, futures in pending.items():
            means, targets, predictions, outputs = _joined(future.result() for future in futures)
            scores = task.score(means) | task.whole(targets, predictions, outputs)
            results[domain] = {"loss": float(means["loss"]), **defined(scores)}
            if self.auc:
                probabilities = torch.from_numpy(outputs).softmax(1).numpy()
                results[domain]["auc"] = metrics.auc_ovo(targets, probabilities)
            answers = task.for_users(torch.from_numpy(outputs)) if self.metrics else outputs
            of_user, failed[domain] = compute_metrics(self.metrics, np.asarray(answers), targets)
            results[domain] |= of_user
            if self.federation.groups:
                people[domain] = self._counted(domain, split, targets, predictions)
        if self.adabn and (unseen := results.get(held_out)):
            adapted = self._pool.submit(self._test_adapted, self._chunks(held_out, split))
            unseen[ADAPTED + task.primary.name] = adapted.result()
        held_out_counts = next(iter(people.pop(held_out, [])), None)
        clients = (k for domain in people for k in self.federation.clients_of(domain))
        counts = dict(zip(clients, chain(*people.values()), strict=True))
        return Tested(results, failed, counts, held_out_counts)

    @_memory_errors()
    def predictions(
        self, arrays: Mapping[str, NDArray[np.generic]], domain: str
    ) -> tuple[Targets, Targets]:
        """Return the targets of a domain's test examples, and a model's predictions."""
        (futures,) = self._begun(arrays, [domain], "test").values()
        return _joined(future.result() for future in futures)[1:3]

    def _begun(
        self, arrays: Mapping[str, NDArray[np.generic]], domains: Sequence[str], split: str
    ) -> dict[str, list[Future[_Batch]]]:
        """Begin to test a model on domains; return the tests of their batches."""
        set_arrays(self.model, arrays, "The server")
        self.model.eval()
        return {
            domain: [self._pool.submit(self._test, chunk) for chunk in self._chunks(domain, split)]
            for domain in domains
        }

    def _counted(
        self, domain: str, split: str, labels: NDArray[np.int64], guesses: NDArray[np.int64]
    ) -> list[fairness.Counts]:
        """Count the people of each client in a domain; the clients' examples are concatenated."""
        groups = self._groups(domain, split)
        ends = np.cumsum([len(of_client) for of_client in groups])[:-1]
        parts = zip(np.split(labels, ends), np.split(guesses, ends), groups, strict=True)
        names = self.federation.group_names
        return [fairness.counts_by_group(y, p, g, len(names)) for y, p, g in parts]

    def _chunks(self, domain: str, split: str) -> list[Examples]:
        """Return a domain's examples from a split in batches, which are normalized when tested."""
        if (domain, split) not in self._tests:
            data, size = self.federation, self.batch_size
            x, y = data.test(domain, split)
            rows = batch_slices(len(y), size, self.model.takes_single)
            pieces = [Split(x[part], y[part]) for part in rows]
            self._tests[domain, split] = [
                examples_of(piece, data.mean, data.std, device=self.device, model=self.model)
                for piece in pieces
            ]
        return self._tests[domain, split]

    def _test_adapted(self, chunks: list[Examples]) -> float:
        """Return the primary score on a domain's examples, using their BatchNorm statistics."""
        task = self.federation.learns
        batches = (x for images in chunks for x, _ in images.eval_batches(self.batch_size))
        with target_statistics(self.model, batches):
            means, *whole = _joined([self._test(images) for images in chunks])
        scores, name = task.score(means), task.primary.name
        return scores[name] if name in scores else task.whole(*whole)[name]

    def _test(self, images: Examples) -> _Batch:
        """Return the task's sums, and targets, predictions and outputs, [B, 0] if not needed."""
        task = self.federation.learns
        with torch.inference_mode():
            ((x, y),) = images.eval_batches(self.batch_size)
            try:
                output = self.model(x)
                sums = task.sums(output, y)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"model.name = {self.name!r}: the server's test of a batch of shape "
                    f"{tuple(x.shape)} failed with {failure_text(error)}. Correct the network."
                ) from error
            wanted = self.auc or self.metrics or task.keeps == "outputs"
            outputs = (output if wanted else output[:, :0]).to(float64_on(output.device))
            numbers = {name: value.to(float64_on(value.device)) for name, value in sums.items()}
            return (
                {name: value.numpy(force=True) for name, value in numbers.items()},
                y.numpy(force=True),
                task.predict(output).numpy(force=True),
                outputs.numpy(force=True),
            )


class Findings:
    """Writes metrics of group fairness, and names what tests did not define or could not compute.

    A metric of group fairness is undefined if, for example, nobody in a group has a positive label.
    It is then not written. A user-defined metric that fails ends the run, or is left out, as
    ``evaluate.metric-errors`` says. Reasons are logged once, and stored in ``run.json``.
    """

    def __init__(self, folder: RunFolder, config: RunConfig, registry: ClientRegistry) -> None:
        self.folder, self.evaluate, self.registry = folder, config.evaluate, registry
        if self.federation.groups:
            groups, positive = self.federation.groups, self.federation.class_names[1]
            logger.info("data.groups = %r: the positive class is %s.", groups, positive)
        #: Entry of ``run.json`` -> where -> reason.
        self._reasons: dict[str, dict[str, str]] = {
            name: dict(folder.fact(name) or {}) for name in ("undefined_metrics", "skipped_metrics")
        }

    @property
    def federation(self) -> Federation:
        """The clients, which may become more from round to round."""
        return self.registry.federation

    def _name_of(self, client: int) -> str:
        known = f"client {client} of {self.federation.clients[client].domain}"
        keys = self.registry.keys
        return keys[client].name if client in keys else known

    def record_groups(
        self, server_round: int, split: str, counts: Mapping[int, fairness.Counts]
    ) -> dict[str, dict[str, float]]:
        """Write the metrics over all clients and per client; return the metrics per domain.

        ``counts`` are counts of the clients' test examples by client id, each of shape (groups, 6).
        """
        if not counts:
            return {}
        split_note = "" if split == "test" else f" ({split})"
        each: dict[int, dict[str, float]] = {}
        by_domain: dict[str, list[fairness.Counts]] = {}
        for client, of_client in sorted(counts.items()):
            by_domain.setdefault(self.federation.clients[client].domain, []).append(of_client)
            values = self.of_groups(of_client, f"{self._name_of(client)}{split_note}")
            self.folder.append_metrics(server_round, LEVELS[split][1], str(client), values)
            each[client] = values
        whole = self.of_groups(np.sum(list(counts.values()), axis=0), f"all clients{split_note}")
        found = {m: [v.get(m.name, math.nan) for v in each.values()] for m in fairness.METRICS}
        worst = {metric.name: metric.worst(values) for metric, values in found.items()}
        self.folder.append_metrics(server_round, OVERALL[split], ALL, whole)
        self.folder.append_metrics(server_round, OVERALL[split], WORST_CLIENT, defined(worst))
        return {
            domain: self.of_groups(np.sum(parts, axis=0), f"domain {domain}{split_note}")
            for domain, parts in by_domain.items()
        }

    def of_groups(self, counts: fairness.Counts, where: str) -> dict[str, float]:
        """Compute metrics from counts; return them by name, and log undefined metrics."""
        names, positive = self.federation.group_names, self.federation.class_names[1]
        wrong = fairness.undefined(counts, names, positive)
        self._undefined(where, [f"{names} ({reason})" for reason, names in wrong.items()])
        return defined({metric.name: metric(counts) for metric in fairness.METRICS})

    def lacking(self, where: str, values: Mapping[str, float]) -> None:
        """Log and record which scores of the task the examples of a test do not define."""
        reasons = self.federation.learns.undefined.items()
        if math.isfinite(values["loss"]):
            self._undefined(where, [f"{n} ({reason})" for n, reason in reasons if n not in values])

    def _undefined(self, where: str, lacks: list[str]) -> None:
        if lacks and where not in self._reasons["undefined_metrics"]:
            logger.warning("Undefined for %s: %s.", where, text := "; ".join(lacks))
            self._reasons["undefined_metrics"][where] = text

    def failed(self, server_round: int, where: str, wrong: Mapping[str, str]) -> None:
        """Raise ``MetricError`` for metrics that failed, or log each and its reason once."""
        for metric, reason in wrong.items():
            text = f"evaluate.metrics: {metric} failed on {where} in round {server_round}: {reason}"
            if self.evaluate.metric_errors == "stop":
                raise MetricError(
                    f"{text}. Correct the function, or set evaluate.metric-errors = skip."
                )
            if (key := f"{metric} on {where}") not in self._reasons["skipped_metrics"]:
                logger.warning("%s. The run continues without this metric.", text)
                self._reasons["skipped_metrics"][key] = f"round {server_round}: {reason}"

    def failed_at_clients(
        self, server_round: int, answers: Mapping[int, MetricRecord], replies: Iterable[Message]
    ) -> None:
        """Report metrics that a client did not compute, with the reasons in its reply."""
        reasons_at: dict[int, Any] = {
            reply.metadata.src_node_id: reply.content.config_records.get(FAILED_METRICS) or {}
            for reply in replies
            if reply.has_content()
        }
        default = "the client sent no value; its SuperNode may run an older version of fairflower"
        for client, answer in sorted(answers.items()):
            lacking = [n for n in metric_names(self.evaluate.metrics) if n not in answer]
            reasons = reasons_at.get(self.registry.nodes[client], {})
            wrong = {n: escaped(str(reasons.get(n, default))[:300]) for n in lacking}
            self.failed(server_round, self._name_of(client), wrong)

    def note(self) -> None:
        """Record all reasons in ``run.json``: once a test, and not once a client."""
        for name, reasons in self._reasons.items():
            if reasons:
                self.folder.note(name, dict(reasons))


def counts_in(answers: Mapping[int, MetricRecord]) -> dict[int, fairness.Counts]:
    """Return the counts in clients' test metrics by client, each of shape (groups, 6)."""
    sent = {k: a[fairness.GROUP_COUNTS] for k, a in answers.items() if fairness.GROUP_COUNTS in a}
    return {k: np.reshape(counts, (-1, len(fairness.COUNTS))) for k, counts in sent.items()}


def defined(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values that are finite."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
