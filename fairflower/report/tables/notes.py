"""What is said beside the figures: what a model costs to send, the machines, and notes.

The processors and library versions are those that run folders tell. On another kind of processor
the same sums are rounded otherwise, and training makes points of accuracy of that: a comparison
is of runs from one kind of machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairflower.report.methods import Comparison
from fairflower.report.reading import Run
from fairflower.report.tables.cells import Cell, Group, Row, Table, group_comparable, remark
from fairflower.report.text import DASH, MARK, join_words, listed_rounds, thousands, untested


def tests_line(comparison: Comparison) -> str:
    """How many images each domain is tested on; empty where runs differ in it, or nobody knows."""
    found = {tuple(run.info.get("test_sizes") or ()) for _, run in comparison.runs}
    sizes = found.pop()
    if found or len(sizes) != len(comparison.domains) or not all(sizes):
        return ""
    worth = (
        f"{domain} {size} (one is {100 / size:.2g})"
        for domain, size in zip(comparison.domains, sizes, strict=True)
    )
    return f"Test examples, and what one is worth in points: {', '.join(worth)}."


def model_line(comparison: Comparison) -> str:
    """What a model costs to send; empty where methods differ in it, or nobody knows."""
    sizes = set(_sizes(comparison).values())
    if len(sizes) != 1 or not all(found := sizes.pop()):
        return ""
    size, parameters = found
    return (
        f"Model: {size} bytes to and from each client in a round ({parameters} trained parameters)."
    )


def model_table(comparison: Comparison) -> Table:
    """The same by method, where not all have the same."""
    sizes = _sizes(comparison)
    methods = comparison.methods if len(set(sizes.values())) > 1 else ()
    return Table(
        title="Model",
        caption="Bytes: of the model, to and from each client in a round.",
        columns=["bytes", "trained parameters"],
        groups=[
            Group(
                heading,
                [
                    Row(name, remark(method), [Cell(size or DASH) for size in sizes[name]])
                    for name, method in members.items()
                ],
            )
            for heading, members in group_comparable(comparison, methods)
        ],
    )


def _sizes(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """Method -> bytes of its model, and how many of its parameters are trained."""
    facts = {method.name: method.runs[0].info for method in comparison.methods}
    return {
        name: (thousands(info.get("model_bytes")), thousands(info.get("num_parameters")))
        for name, info in facts.items()
    }


#: Names without repetitions, in order.
_Named = dict[str, dict[str, None]]

UNKNOWN = "a processor that was not recorded"


class ProcessInfo(NamedTuple):
    """One of the processes, one after the other, that made a run."""

    processor: str
    versions: Mapping[str, str]


def process_infos(run: Run) -> list[ProcessInfo]:
    """The sessions that a run's rounds come from, in order, without repetitions."""
    found = [
        ProcessInfo(machine_text(part.get("machine")), _versions(part))
        for part in process_records(run)
    ]
    return [session for i, session in enumerate(found) if session not in found[:i]]


def process_records(run: Run) -> list[Mapping[str, Any]]:
    """What ``run.json`` says of each process that a run's rounds come from, in order."""
    found: list[Mapping[str, Any]] = [run.info]
    for resumed in run.info.get("resumed") or ():
        found = [*found, resumed] if resumed.get("after_round") else [resumed]  # begun anew
    return found


def machine_text(machine: Any) -> str:
    """A ``machine`` of ``run.json`` in words.

    >>> machine_text({"processor": "AMD EPYC", "kernels": "AVX2", "instructions": "avx2"})
    'AMD EPYC (kernels AVX2; instruction sets avx2)'
    """
    facts = machine if isinstance(machine, Mapping) else {}
    if not facts.get("processor"):
        return UNKNOWN
    titles = {"kernels": "kernels", "instructions": "instruction sets", "gpu": "GPU"}
    details = "; ".join(f"{title} {facts[key]}" for key, title in titles.items() if facts.get(key))
    return f"{facts['processor']} ({details})" if details else str(facts["processor"])


def machine_line(comparison: Comparison) -> str:
    """The processors and versions of all runs on one line; empty where nothing is known."""
    processors, versions = _used(comparison)
    if list(processors) == [UNKNOWN] and not versions:
        return ""
    packages = ", ".join(f"{name} {' and '.join(values)}" for name, values in versions.items())
    return f"Made on {' and '.join(processors)}{'; ' if packages else ''}{packages}."


def machine_notes(comparison: Comparison) -> list[str]:
    """Warnings where runs come from several kinds of processor, or versions of a package."""
    processors, versions = _used(comparison)
    notes = []
    if len(processors) > 1:
        owners = [f"{name} ({', '.join(methods)})" for name, methods in processors.items()]
        notes.append(
            f"The runs come from several kinds of processor: {'; '.join(owners)}. The same "
            "config and seed give the same bits on one kind alone, and other figures elsewhere."
        )
    return notes + [
        f"The runs used several versions of {package}: {', '.join(found)}."
        for package, found in sorted(versions.items())
        if len(found) > 1
    ]


def _used(comparison: Comparison) -> tuple[_Named, _Named]:
    """Processors with the methods that used them, and packages with their versions."""
    processors: _Named = {}
    versions: _Named = {}
    for method in comparison.methods:
        for session in chain.from_iterable(map(process_infos, method.runs)):
            processors.setdefault(session.processor, {})[method.name] = None
            for package, version in session.versions.items():
                versions.setdefault(package, {})[version] = None
    return processors, versions


def _versions(part: Mapping[str, Any]) -> dict[str, str]:
    found = dict(part.get("versions") or {})
    return {name: str(version) for name, version in found.items() if version != "not installed"}


def notes(comparison: Comparison) -> list[str]:
    """What a reader must know before comparing the rows of the table."""
    found = [
        f"The runs differ in {key}: {_values(values)}. "
        "Only methods with equal settings are compared."
        for key, values in comparison.differing.items()
    ]
    if len({m.runs[0].reach for m in comparison.methods}) > 1:
        reached = {m.name: str(m.runs[0].reach) for m in comparison.methods}
        found.append(
            f"The runs reached different rounds: {_values(reached)}. "
            "Only methods at the same round are compared."
        )
    if all(method.strategy != "uniform" for method in comparison.methods):
        found.append(
            "Uniform averaging is not among the runs. Much of the published gain over FedAvg "
            "is already there with uniform weights, so a gain over FedAvg alone says little."
        )
    for method in comparison.methods:
        for run in method.runs:
            found += [f"{method.name}, seed {run.seed}: {note}" for note in run_notes(run)]
        for run, reason in method.left_out:
            found.append(
                f"{method.name}, seed {run.seed}, {run.progress} is left out of tables and "
                f"figures: {reason} ({run.path})."
            )
    found += _unshared(comparison)
    if any(m.config.get("evaluate.test") is False for m in comparison.methods):
        found.append(
            "With evaluate.test = false, accuracies are on examples kept out of training for "
            "validation, not on test examples."
        )
    if any(m.config.get("evaluate.by") == "clients" for m in comparison.methods):
        found.append(
            "With evaluate.by = clients, a domain's accuracy is the mean of its clients' "
            "accuracies on their own test data, weighted by test examples."
        )
    by_data: dict[object, set[str]] = {}
    for method in comparison.methods:
        for run in method.runs:
            there = by_data.setdefault((method.settings("data."), run.federation), set())
            there.add(data_digest(run))
    if any(len(partitions) > 1 for partitions in by_data.values()):
        found.append("Runs with the same data settings had different data or clients.")
    return [*found, *machine_notes(comparison)]


def _unshared(comparison: Comparison) -> list[str]:
    """Name the federations or seeds that a method lacks and others have."""
    seeds = {method.name: {run.seed for run in method.runs} for method in comparison.methods}
    wanted = set().union(*seeds.values())
    unit = comparison.methods[0].unit.split(" ")[0]
    return [
        f"{name} has no finished run of {unit}{'s' if len(wanted - there) > 1 else ''} "
        f"{join_words([str(seed) for seed in sorted(wanted - there)])}: its differences are over "
        f"the {len(there)} that it has."
        for name, there in seeds.items()
        if wanted - there
    ]


def data_digest(run: Run) -> str:
    """Tells other data, or another partition, with the same settings."""
    sources = [Path(str(source)).name for source in run.info.get("sources") or ()]
    if "remarks" in run.info:  # read from a summary, which has the digest in their place
        return sources[0]
    text = json.dumps([[asdict(client) for client in run.clients], sources])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def run_notes(run: Run) -> list[str]:
    """How far a run came, who was left out, and what that means for its figures."""
    if "remarks" in run.info:
        return list(run.info["remarks"])
    found = []
    if run.status != "completed":
        error = f" ({run.info['error']})" if run.info.get("error") else ""
        found.append(f"{run.progress}{error}.")
    elif run.info.get("ended_early"):
        found.append(f"{run.progress}: {run.info['ended_early']}.")
    if loss := run.info.get("diverged"):
        found.append(f"training diverged: the last model's loss is {loss:.3g}. Lower train.lr.")
    dropped = [client for record in run.diagnostics for client in record.get("dropped", ())]
    if dropped:
        found.append(f"{len(dropped)} replies were dropped, of client {_clients(dropped)}.")
    silent = [
        answer
        for record in run.diagnostics
        for answer in dict(record.get("dropped_in_test", {})).items()
    ]
    if silent:
        clients, reasons = zip(*silent, strict=True)
        why = f" ({reasons[0]})" if len(set(reasons)) == 1 else ""
        found.append(
            f"{len(silent)} replies to tests were dropped, of client {_clients(clients)}{why}. A "
            "domain's accuracy is then that of its other clients, if it has any."
        )
    lacks = untested(run.domains, run.rounds, run.accuracy)
    if lacks:
        last = np.isin(run.rounds, run.final_rounds())
        tested = np.isfinite(run.accuracy)
        means = [
            f" The mean of {domain} is over {listed_rounds(run.rounds, last & there)} alone."
            for domain, there in zip(run.domains, tested.T, strict=True)
            if (last & there).any() and (last & ~there).any()
        ]
        compared = (
            ""
            if run.fully_tested()
            else f" Figures marked {MARK} are not of all domains in the same rounds, and so are "
            "compared with no other run."
        )
        found.append(f"{lacks}.{''.join(means)}{compared}")
    personal = untested(run.domains, run.personal.rounds, run.personal.accuracy)
    if personal and personal != lacks:
        found.append(f"personal models: {personal}.")
    return found


def _clients(dropped: Sequence[str]) -> str:
    return ", ".join(sorted(set(dropped), key=lambda client: (len(client), client)))


def _values(values: Mapping[str, str]) -> str:
    """``0.1 (fedavg, uniform), 0.01 (fedheal)``."""
    owners: dict[str, list[str]] = {}
    for name, value in values.items():
        owners.setdefault(value, []).append(name)
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())
