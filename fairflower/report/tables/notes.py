"""Lines below the tables: the size of the model, the machines and versions, and notes.

Run folders record the processor and the library versions. Another kind of processor rounds sums
differently, and during training these differences grow to whole points of accuracy. Therefore,
compare only runs from the same kind of machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fairflower.data.federation import by_field
from fairflower.report.methods import BASELINES, Comparison
from fairflower.report.reading import Run
from fairflower.report.tables.cells import Cell, Group, Row, Table, group_comparable, remark
from fairflower.report.tables.draws import draw_notes
from fairflower.report.text import DASH, MARK, join_words, listed_rounds, thousands, untested
from fairflower.server.privacy import together

#: Note about methods in which a part of the network stays with the clients.
_LOCAL = (
    "{part} stays with the clients{kept}, so the global model is tested with the initial values of "
    "this part. If clients tested, the table of personal models shows their models."
)


def tests_line(comparison: Comparison) -> str:
    """State the number of tested examples of each domain; empty if runs differ or it is unknown."""
    all_sizes = {tuple(run.sizes) for _, run in comparison.runs}
    sizes = all_sizes.pop()
    if all_sizes or len(sizes) != len(comparison.domains) or not all(sizes):
        return ""
    worth = (
        f"{domain} {size} ({100 / size:.2g})"
        for domain, size in zip(comparison.domains, sizes, strict=True)
    )
    return (
        f"{comparison.examples.capitalize()} examples by domain (points per example): "
        f"{', '.join(worth)}."
    )


def model_line(comparison: Comparison) -> str:
    """State the size of the model; empty if it differs between methods or is unknown."""
    sizes = set(_sizes(comparison).values())
    if len(sizes) != 1 or not all(pair := sizes.pop()):
        return ""
    size, parameters = pair
    return (
        f"Model: {size} bytes in each direction per client and round ({parameters} trained "
        "parameters)."
    )


def model_table(comparison: Comparison) -> Table:
    """Return a table with the size of each method's model; no groups if all sizes are equal."""
    sizes = _sizes(comparison)
    methods = comparison.methods if len(set(sizes.values())) > 1 else ()
    return Table(
        title="Model",
        caption="Size of the model in bytes; it is sent in each direction, per client and round.",
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
    """Return each method's model size in bytes and number of trained parameters, as text."""
    facts = {method.name: method.runs[0].info for method in comparison.methods}
    return {
        name: (thousands(info.get("model_bytes")), thousands(info.get("num_parameters")))
        for name, info in facts.items()
    }


#: Names without repetitions, in order.
_Named = dict[str, dict[str, None]]

UNKNOWN = "a processor that was not recorded"


class ProcessInfo(NamedTuple):
    """Processor and library versions of a process that executed a run or a part of it."""

    processor: str
    versions: Mapping[str, str]


def process_infos(run: Run) -> list[ProcessInfo]:
    """Return the processes that executed a run's rounds, in order, without repetitions."""
    infos = [
        ProcessInfo(machine_text(part.get("machine")), _versions(part))
        for part in process_records(run)
    ]
    return [info for i, info in enumerate(infos) if info not in infos[:i]]


def process_records(run: Run) -> list[Mapping[str, Any]]:
    """Return the records in ``run.json`` of the processes that executed a run's rounds."""
    records: list[Mapping[str, Any]] = [run.info]
    for resumed in run.info.get("resumed") or ():
        records = [*records, resumed] if resumed.get("after_round") else [resumed]  # started again
    return records


def machine_text(machine: Any) -> str:
    """Describe a ``machine`` entry of ``run.json`` in words.

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
    """Return a line with the processors and versions of all runs; empty if unknown."""
    processors, versions = _used(comparison)
    if list(processors) == [UNKNOWN] and not versions:
        return ""
    packages = ", ".join(f"{name} {' and '.join(values)}" for name, values in versions.items())
    return f"Run on {' and '.join(processors)}{'; ' if packages else ''}{packages}."


def machine_notes(comparison: Comparison) -> list[str]:
    """Return warnings if runs used several kinds of processor, or several versions of a package."""
    processors, versions = _used(comparison)
    notes = []
    if len(processors) > 1:
        owners = [f"{name} ({', '.join(methods)})" for name, methods in processors.items()]
        notes.append(
            f"The runs used several kinds of processor: {'; '.join(owners)}. Results are "
            "reproducible only on the same kind of processor."
        )
    return notes + [
        f"The runs used several versions of {package}: {', '.join(used)}."
        for package, used in sorted(versions.items())
        if len(used) > 1
    ]


def _used(comparison: Comparison) -> tuple[_Named, _Named]:
    """Return the methods that ran on each processor, and the versions of each package."""
    processors: _Named = {}
    versions: _Named = {}
    for method in comparison.methods:
        for session in chain.from_iterable(map(process_infos, method.runs)):
            processors.setdefault(session.processor, {})[method.name] = None
            for package, version in session.versions.items():
                versions.setdefault(package, {})[version] = None
    return processors, versions


def _versions(part: Mapping[str, Any]) -> dict[str, str]:
    versions = dict(part.get("versions") or {})
    return {name: str(version) for name, version in versions.items() if version != "not installed"}


def notes(comparison: Comparison) -> list[str]:
    """Return facts that readers should know before they compare rows of the tables."""
    lines = [
        f"The runs differ in {key}: {_values(values)}. "
        "Only methods with the same settings are compared."
        for key, values in comparison.differing.items()
    ]
    tuned = [
        f"{key} {_values(values)}"
        for key in dict.fromkeys(key for method in comparison.methods for key in method.tuned)
        for values in [
            {m.name: dict(m.identity)[key] for m in comparison.methods if key in m.tuned}
        ]
    ]
    if tuned:
        lines.append(f"Tuned for each method, and no difference in settings: {'; '.join(tuned)}.")
    if len({m.runs[0].reach for m in comparison.methods}) > 1:
        reached = {m.name: str(m.runs[0].reach) for m in comparison.methods}
        lines.append(
            f"The runs reached different rounds: {_values(reached)}. "
            "Only methods that reached the same round are compared."
        )
    if all(method.strategy != "uniform" for method in comparison.methods):
        lines.append(
            "Uniform weights are not among the runs. They alone often explain much of "
            "a published gain over FedAvg."
        )
    lines += [*draw_notes(comparison), *_run_notes(comparison)]
    lines += [*_undefined(comparison), *_unshared(comparison)]
    runs = [r for m in comparison.methods for r in (*m.runs, *(run for run, _ in m.left_out))]
    spent = [run.info["privacy"] for run in runs if run.info.get("privacy")]
    lines += filter(None, [together((p["epsilon"], p["delta"]) for p in spent)])
    if comparison.examples != "test":
        lines.append(
            "With evaluate.test = false, accuracies are measured on validation examples that are "
            "kept out of training, not on test examples."
        )
    if any(m.config.get("evaluate.by") == "clients" for m in comparison.methods):
        lines.append(
            "With evaluate.by = clients, a domain's accuracy is the mean of its clients' "
            f"accuracies on their own {comparison.examples} data, weighted by "
            f"{comparison.examples} examples."
        )
    by_data: dict[object, set[str]] = {}
    for method in comparison.methods:
        for run in method.runs:
            there = by_data.setdefault((method.settings("data."), run.federation), set())
            there.add(data_digest(run))
    if any(len(partitions) > 1 for partitions in by_data.values()):
        lines.append(
            "Runs with the same data settings had different data or clients. Means over them may "
            "not be comparable."
        )
    return [*lines, *machine_notes(comparison)]


def _run_notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on single runs, and the runs that are left out."""
    for method in comparison.methods:
        seeds: dict[str, list[int]] = {}
        for run in method.runs:
            for note in run_notes(run):
                if not note.startswith(_UNDEFINED):
                    seeds.setdefault(note, []).append(run.seed)
        for note, those in seeds.items():
            of_all = 1 < len(those) == len(method.runs)
            runs = [""] if of_all else [f", seed {seed}" for seed in those]
            yield from (f"{method.name}{run}: {note}" for run in runs)
        for run, reason in method.left_out:
            yield (
                f"{method.name}, seed {run.seed} ({run.progress}), is left out of tables and "
                f"figures: {reason} ({run.path})."
            )


#: Beginning of notes on group fairness, which depend only on the data and not on the method.
_UNDEFINED = "undefined for"


def _undefined(comparison: Comparison) -> list[str]:
    """State once per federation which metrics of group fairness are undefined, and why."""
    federations = {run.federation for run in comparison.kept_runs}
    there: dict[str, set[Any]] = {}
    for run in comparison.kept_runs:
        for note in run_notes(run):
            if note.startswith(_UNDEFINED):
                there.setdefault(note, set()).add(run.federation)
    return [
        f"Group fairness is {note}"
        if found == federations
        else f"Federation{'s' if len(found) > 1 else ''} {join_words(sorted(map(str, found)))}: "
        f"group fairness is {note}"
        for note, found in there.items()
    ]


def _unshared(comparison: Comparison) -> list[str]:
    """Name the federations or seeds for which a method has no run, but its baseline has one.

    Likewise those for which a baseline has no run.
    """
    seeds = {method.name: {run.seed for run in method.runs} for method in comparison.methods}
    wanted: dict[str, set[int]] = {name: set() for name in seeds}
    for method in comparison.methods:
        for baseline in (comparison.baseline(method, name) for name in BASELINES):
            if baseline:
                wanted[method.name] |= seeds[baseline.name]
                wanted[baseline.name] |= seeds[method.name]
    unit = comparison.methods[0].unit.split(" ")[0]
    return [
        f"{name} has no finished run for {unit}{'s' if len(missing) > 1 else ''} "
        f"{join_words([str(seed) for seed in sorted(missing)])}, so its differences use "
        f"only the other {len(there & wanted[name])}."
        for name, there in seeds.items()
        if (missing := wanted[name] - there)
    ]


def data_digest(run: Run) -> str:
    """Return a digest of a run's data and of their partition among clients."""
    sources = [Path(str(source)).name for source in run.info.get("sources") or ()]
    if "remarks" in run.info:  # read from a summary, which has the digest in their place
        return sources[0]
    text = json.dumps([run.clients, sources], default=by_field)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def privacy_note(privacy: Mapping[str, Any]) -> str:
    """Describe the privacy loss of a run in words, from ``run.json``."""
    text = (
        f"differentially private for each client: epsilon {privacy['epsilon']:.3g} at delta "
        f"{privacy['delta']:g} (noise multiplier {privacy['noise_multiplier']:g}, clip "
        f"{privacy['clip']:g}"
    )
    if privacy["numbers"]:
        text += f", noise multiplier for numbers {privacy['number_noise_multiplier']:g}"
    if privacy["noise"] != "secret":
        text += "; the noise has a seed, so this holds only against those who do not know the seed"
    return f"{text})."


def _local_note(run: Run) -> str:
    """Return the note on a run in which a part of the network stays with the clients."""
    at_server = run.config.get("client.keep") == "server"
    return _LOCAL.format(
        part=run.info.get("local_part") or "normalization",
        kept=" (the server keeps it for them)" if at_server else "",
    )


def _dropped(replies: Sequence[Any], kind: str = "") -> str:
    return f"{len(replies)} {kind}{'reply was' if len(replies) == 1 else 'replies were'} dropped"


def run_notes(run: Run) -> list[str]:
    """Return notes on a run's progress, its tracker, dropped replies and missing tests."""
    if "remarks" in run.info:
        return list(run.info["remarks"])
    return [
        *_progress_notes(run),
        *_training_notes(run),
        *_tracking_notes(run),
        *_metric_notes(run),
        *_dropped_notes(run),
        *_untested_notes(run),
    ]


def _progress_notes(run: Run) -> Iterator[str]:
    if run.status != "completed":
        error = f" ({run.info['error']})" if run.info.get("error") else ""
        yield f"{run.progress}{error}."
    elif run.info.get("ended_early"):
        yield f"{run.progress}: {run.info['ended_early']}."


def _training_notes(run: Run) -> Iterator[str]:
    """Yield notes on privacy, divergence, local arrays, changed code and halted rounds."""
    for part in run.info.get("resumed") or ():
        if part.get("changed") and part.get("after_round"):
            keys = join_words(part["changed"])
            yield f"from round {part['after_round'] + 1} on with another file of {keys}."
    if privacy := run.info.get("privacy"):
        yield privacy_note(privacy)
    if loss := run.info.get("diverged"):
        lower = "train.lr, or the noise (privacy.clip)" if privacy else "train.lr"
        yield f"training diverged: the last model's loss is {loss:.3g}. Lower {lower}."
    if run.info.get("local_arrays"):
        yield _local_note(run)
    for number, reason in run.info.get("halted_rounds", {}).items():
        yield f"round {number} did not change the model: {reason}."


def _tracking_notes(run: Run) -> Iterator[str]:
    for number, reason in run.info.get("untracked", {}).items():
        yield f"track = {run.config.get('track')} logged no more from round {number} on: {reason}"


def _metric_notes(run: Run) -> Iterator[str]:
    """Yield notes on metrics that failed or are undefined."""
    for where, reason in run.info.get("skipped_metrics", {}).items():
        yield f"the metric {where} was left out ({reason})."
    places: dict[str, list[str]] = {}
    for where, reason in run.info.get("undefined_metrics", {}).items():
        places.setdefault(reason, []).append(where)
    for reason, names in places.items():
        yield f"{_UNDEFINED} {join_words(names)}: {reason}."


def _dropped_notes(run: Run) -> Iterator[str]:
    """Yield notes on dropped replies from training and from tests."""
    dropped = [client for record in run.diagnostics for client in record.get("dropped", ())]
    if dropped:
        yield f"{_dropped(dropped)}, from {_clients(dropped)}."
    silent = [
        answer
        for record in run.diagnostics
        for answer in dict(record.get("dropped_in_test", {})).items()
    ]
    if silent:
        clients, reasons = zip(*silent, strict=True)
        why = f" ({reasons[0]})" if len(set(reasons)) == 1 else ""
        yield (
            f"{_dropped(silent, 'test ')}, from {_clients(clients)}{why}. A "
            "domain's accuracy then covers only its other clients, if any."
        )


def _untested_notes(run: Run) -> Iterator[str]:
    """Yield notes on domains without a test in some of the last rounds."""
    lacks = untested(run.domains, run.rounds, run.accuracy)
    if lacks:
        last = np.isin(run.rounds, run.final_rounds())
        tested = np.isfinite(run.accuracy)
        means = [
            f" The mean of {domain} covers only {listed_rounds(run.rounds, last & there)}."
            for domain, there in zip(run.domains, tested.T, strict=True)
            if (last & there).any() and (last & ~there).any()
        ]
        compared = (
            ""
            if run.fully_tested()
            else f" Numbers marked {MARK} do not cover all domains in the same rounds, so they are"
            " not compared with other runs."
        )
        yield f"{lacks}.{''.join(means)}{compared}"
    personal = untested(run.domains, run.personal.rounds, run.personal.accuracy)
    if personal and personal != lacks:
        yield f"personal models: {personal}."


def _clients(dropped: Sequence[str]) -> str:
    names = sorted(set(dropped), key=lambda client: (len(client), client))
    return f"client{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _values(values: Mapping[str, str]) -> str:
    """List values with up to four of their methods: ``0.1 (fedavg, uniform), 0.01 (fedheal)``."""
    owners: dict[str, list[str]] = {}
    for name, value in values.items():
        owners.setdefault(value, []).append(name)
    for names in owners.values():
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} more"]
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())
