"""Lines below the tables (model, machines, versions), and notes on how to read a method's row.

Run folders record the processor and the library versions. Another kind of processor rounds sums
differently, and during training these differences grow to whole points of accuracy. Therefore,
compare only runs from the same kind of machine.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from fairflower.config.run import PROTECTION
from fairflower.config.text import grouped, join_words
from fairflower.data.federation import by_field
from fairflower.numerics.metrics import MIN, STD
from fairflower.report.cells import MARK, capitalized, thousands
from fairflower.report.methods import BASELINES, Comparison
from fairflower.report.reading import Run
from fairflower.server.privacy import together


def tests_line(comparison: Comparison) -> str:
    """State the number of tested examples of each domain; empty if runs differ or it is unknown."""
    all_sizes = {tuple(run.sizes) for _, run in comparison.runs}
    sizes = all_sizes.pop()
    if all_sizes or len(sizes) != len(comparison.domains) or not all(sizes):
        return ""
    worth = (
        f"{domain} {size}{f' ({100 / size:.2g})' * comparison.classes}"
        for domain, size in zip(comparison.domains, sizes, strict=True)
    )
    return (
        f"{comparison.examples.capitalize()} examples by domain"
        f"{' (points per example)' * comparison.classes}: {', '.join(worth)}."
    )


def model_line(comparison: Comparison) -> str:
    """State the size of the model; empty if it differs between methods or is unknown."""
    (size, parameters), *others = set(model_sizes(comparison).values())
    if others or not (size and parameters):
        return ""
    return (
        f"Model: {size} bytes in each direction per client and round ({parameters} trained "
        "parameters)."
    )


def model_sizes(comparison: Comparison) -> dict[str, tuple[str, str]]:
    """Return each method's model size in bytes and number of trained parameters, as text."""
    facts = {method.name: method.runs[0].info for method in comparison.methods}
    return {
        name: (thousands(info.get("model_bytes")), thousands(info.get("num_parameters")))
        for name, info in facts.items()
    }


UNKNOWN = "a processor that was not recorded"


def process_infos(run: Run) -> list[dict[str, dict[str, str]]]:
    """Return machine and versions of the processes that executed a run, without repetitions."""
    records: list[Mapping[str, Any]] = [run.info]
    for resumed in run.info.get("resumed", ()):
        records = [*records, resumed] if resumed.get("after_round") else [resumed]  # started again
    infos = []
    for record in records:
        versions = record.get("versions", {})
        installed = {name: str(v) for name, v in versions.items() if v != "not installed"}
        machine = {"processor": machine_text(record.get("machine", {}))}
        infos.append({"machine": machine, "versions": installed})
    return [info for i, info in enumerate(infos) if info not in infos[:i]]


def machine_text(machine: Mapping[str, Any]) -> str:
    """Describe a ``machine`` entry of ``run.json`` in words.

    >>> machine_text({"processor": "AMD EPYC", "kernels": "AVX2", "instructions": "avx2"})
    'AMD EPYC (kernels AVX2; instruction sets avx2)'
    """
    if not machine.get("processor"):
        return UNKNOWN
    titles = {"kernels": "kernels", "instructions": "instruction sets", "gpu": "GPU"}
    known = "; ".join(
        f"{title} {machine[key]}" for key, title in titles.items() if machine.get(key)
    )
    return f"{machine['processor']}{f' ({known})' if known else ''}"


def machine_line(comparison: Comparison) -> str:
    """Return a line with the processors and versions of all runs; empty if unknown."""
    processors: dict[str, dict[str, None]] = {}  # -> the names of the methods that ran on it
    versions: dict[str, dict[str, None]] = {}
    for method in comparison.methods:
        for info in chain.from_iterable(map(process_infos, method.runs)):
            processors.setdefault(info["machine"]["processor"], {})[method.name] = None
            for package, version in info["versions"].items():
                versions.setdefault(package, {})[version] = None
    if list(processors) == [UNKNOWN] and not versions:
        return ""
    several = len(processors) > 1
    used = [f"{name} ({', '.join(by)})" if several else name for name, by in processors.items()]
    packages = [f"{name} {' and '.join(values)}" for name, values in versions.items()]
    return (
        f"Run on {' and '.join(used)}{'; ' * bool(packages)}{', '.join(packages)}."
        f"{' Results are reproducible only on the same kind of processor.' * several}"
    )


# --- notes ----------------------------------------------------------------------------

#: Beginning of notes on group fairness or scores, which depend only on the data, not on the method.
_UNDEFINED = "undefined for"


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield facts that readers should know before they compare rows of the tables."""
    methods = comparison.methods
    for key, values in comparison.differing.items():
        unmasked = key.startswith(PROTECTION) and any(m.reference for m in methods)
        yield (
            f"The runs differ in {key}: {_values(values)}. "
            f"Only methods with the same settings are compared{', and references' * unmasked}."
        )
    tuned = [
        f"{key} {_values({m.name: dict(m.identity)[key] for m in methods if key in m.tuned})}"
        for key in dict.fromkeys(key for method in methods for key in method.tuned)
    ]
    if tuned:
        yield f"Tuned for each method, and no difference in settings: {'; '.join(tuned)}."
    reached = {m.name: str(m.runs[0].reach) for m in methods}
    if len(set(reached.values())) > 1:
        yield (
            f"The runs reached different rounds: {_values(reached)}. "
            "Only methods that reached the same round are compared."
        )
    best = {m.name: [r.info["best"]["round"] for r in m.runs if "best" in r.info] for m in methods}
    if any(best.values()):
        rounds = {name: join_words([*map(str, found)]) for name, found in best.items() if found}
        yield f"Best rounds on validation examples (checkpoint.best): {_values(rounds)}."
    reference = any(m.strategy == "uniform" or m.reference or m.only_tested for m in methods)
    if len(comparison.runs) > 1 and not reference:
        yield (
            "Uniform weights are not among the runs. They alone often explain much of "
            "a published gain over FedAvg."
        )
    if len(methods) > 1:
        yield from _score_notes(comparison)
    yield from dict.fromkeys(
        text for _, run in comparison.runs for text in run.info.get("data_warnings", ())
    )
    yield from (*_draw_notes(comparison), *_run_notes(comparison), *_unshared(comparison))
    spent = [run.info["privacy"] for _, run in comparison.runs if run.info.get("privacy")]
    if note := together((p["epsilon"], p["delta"]) for p in spent):
        yield note
    digests = grouped(
        ((method.settings("data."), run.federation), data_digest(run))
        for method in methods
        for run in method.runs
    )
    if any(len(set(of_settings)) > 1 for of_settings in digests.values()):
        yield (
            "Runs with the same data settings had different data or clients. Means over them may "
            "not be comparable."
        )


def _score_notes(comparison: Comparison) -> Iterator[str]:
    """Yield how verdicts differ from those on accuracy with the usual margins of equivalence."""
    score = comparison.score
    margins = {run.config["evaluate.margin"] for run in comparison.kept_runs}
    for margin in sorted(margins - {0}):
        yield (
            f"Margin of equivalence, declared before the runs (evaluate.margin): {margin:g} "
            f"{score.points or score.title} in the worst domain, half of it for STD."
        )
    if comparison.classes:
        return
    yield (
        f"An example is worth no fixed amount of {score.title}, so tests set no lower limit to the "
        "spread of differences, as they do for accuracy."
    )
    if not score.margin and 0 in margins:
        yield (
            f"Margins of equivalence, of the average {score.title} of the method compared with: "
            f"{MIN.margin:g} % in the worst domain, {STD.margin:g} % for STD."
        )


#: What federations are that have the same division; the argument are their numbers.
SAME = (
    "Federations {} are the same division of the data: their runs are seeds on one federation, and "
    "verdicts hold for these data only. For other draws, set data.redraw (to rows or, for example, "
    "patient) or data.clients-per-domain."
)


def _draw_notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on federations that are the same division, and on examples that they share."""
    recorded = [run for run in comparison.kept_runs if run.info.get("division")]
    for numbers in grouped((run.division, run.federation) for run in recorded).values():
        if len(set(numbers)) > 1:
            yield SAME.format(join_words([str(number) for number in sorted(set(numbers))]))
    facts = (m.runs[0].info.get("redraw") for m in comparison.methods if m.divisions > 1)
    for redraw in [known for known in facts if known][:1]:
        ratio = redraw.get("tests per training example")
        if {"train", "test"} <= redraw.keys():  # a server does not know which examples sites draw
            shares = (
                f"Two federations share on average {100 * redraw['train']:.0f} % of their training "
                f"examples and {100 * redraw['test']:.0f} % of their test examples. "
            )
        else:
            shares = ""
        yield shares + (
            "Test examples are drawn anew, so variances use Nadeau and Bengio's factor, "
            f"1/n + {ratio:.2g} instead of 1/n."
            if ratio
            else "Intervals do not cover what other examples would change."
        )


def _run_notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on single runs, the runs that are left out, and undefined group fairness."""
    undefined: dict[str, set[Any]] = {}  # note -> federations
    for method in comparison.methods:
        seeds: dict[str, list[int]] = {}
        for run in method.runs:
            for note in run_notes(run):
                if note.startswith(_UNDEFINED):
                    undefined.setdefault(note, set()).add(run.federation)
                else:
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
    federations = {run.federation for run in comparison.kept_runs}
    for note, found in undefined.items():
        numbers = join_words(sorted(map(str, found)))
        where = f"Federation{'s' if len(found) > 1 else ''} {numbers}: "
        what = "group fairness is" if comparison.classes else "scores are"
        yield capitalized(f"{'' if found == federations else where}{what} {note}")


def _unshared(comparison: Comparison) -> list[str]:
    """Name the federations or seeds for which only a method or only its baseline has a run."""
    seeds = {method.name: {run.seed for run in method.runs} for method in comparison.methods}
    wanted: dict[str, set[int]] = {name: set() for name in seeds}
    for method in comparison.methods:
        for baseline in (comparison.baseline(method, name) for name in BASELINES):
            if baseline:
                wanted[method.name] |= seeds[baseline.name]
                wanted[baseline.name] |= seeds[method.name]
    unit = max(comparison.methods, key=lambda m: len(m.runs)).unit.split(" ")[0]
    return [
        f"{name} has no finished run for {unit}{'s' if len(missing) > 1 else ''} "
        f"{join_words([str(seed) for seed in sorted(missing)])}, so its differences use "
        f"only the other {len(there & wanted[name])}."
        for name, there in seeds.items()
        if (missing := wanted[name] - there)
    ]


def data_digest(run: Run) -> str:
    """Return a digest of a run's data and of their partition among clients."""
    sources = [Path(source).name for source in run.info.get("sources", ())]
    if run.summarized:  # a summary has the digest in their place
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


def run_notes(run: Run) -> list[str]:
    """Return notes on a run: failures, privacy, state that stays with clients, missing replies."""
    if run.summarized:
        return list(run.info["remarks"])
    return [*_training_notes(run), *_test_notes(run)]


def _training_notes(run: Run) -> Iterator[str]:
    """Yield notes on errors, resumption, privacy, local arrays, halted rounds and trackers."""
    info = run.info
    if run.status != "completed":
        error = f" ({info['error']})" if info.get("error") else ""
        yield f"{run.progress}{error}."
    elif info.get("ended_early"):
        yield f"{run.progress}: {info['ended_early']}."
    for part in info.get("resumed", ()):
        if part.get("changed") and part.get("after_round"):
            keys = join_words(part["changed"])
            yield f"from round {part['after_round'] + 1} on with another file of {keys}."
    if privacy := info.get("privacy"):
        yield privacy_note(privacy)
    if loss := info.get("diverged"):
        lower = "train.lr, or the noise (privacy.clip)" if privacy else "train.lr"
        yield f"training diverged: the last model's loss is {loss:.3g}. Lower {lower}."
    if info.get("local_arrays"):
        at_server = run.config.get("client.keep") == "server"
        kept = " (the server keeps it for them)" if at_server else ""
        yield (
            f"{info.get('local_part') or 'normalization'} stays with the clients{kept}, so the "
            "global model is tested with the initial values of this part. If clients tested, the "
            "table of personal models shows their models."
        )
    if (run.config.get("strategy.name"), run.config.get("evaluate.by")) == ("alone", "clients"):
        shared = "those of sites that share theirs" if run.cross_tests.size else ""
        kept = "no other site did: no table of other domains"
        yield f"clients tested their own models, and {shared or kept}."
    for number, reason in info.get("halted_rounds", {}).items():
        yield f"round {number} did not change the model: {reason}."
    for number, reason in info.get("untracked", {}).items():  # runs side by side print no warning
        yield f"track = {run.config.get('track')} logged no more from round {number} on: {reason}"


def _test_notes(run: Run) -> Iterator[str]:
    """Yield notes on metrics that failed or are undefined, dropped replies and untested domains."""
    keys = run.info.get("sites", {}).get("keys", {})
    named = {client: key["name"] for client, key in keys.items()}
    for where, reason in run.info.get("skipped_metrics", {}).items():
        yield f"the metric {where} was left out ({reason})."
    undefined = run.info.get("undefined_metrics", {})
    for reason, names in grouped((reason, where) for where, reason in undefined.items()).items():
        yield f"{_UNDEFINED} {join_words(names)}: {reason}."
    affected = f" A domain's {run.primary.title} then covers only its other clients, if any."
    for key, kind, effect in (("dropped", "", ""), ("dropped_in_test", "test ", affected)):
        answers = [pair for record in run.diagnostics for pair in record.get(key, {}).items()]
        if answers:
            numbers = sorted({client for client, _ in answers}, key=int)
            clients = [named.get(client, client) for client in numbers]
            source = "" if named else f"client{'s' if len(clients) > 1 else ''} "
            reasons = {reason for _, reason in answers}
            yield (
                f"{len(answers)} {kind}{'reply was' if len(answers) == 1 else 'replies were'} "
                f"dropped, from {source}{', '.join(clients)}"
                f"{f' ({reasons.pop()})' if len(reasons) == 1 else ''}.{effect}"
            )
    for key, verb in (("joined", "joined"), ("withdrawn", "withdrew")):
        for client, number in run.info.get(key, {}).items():
            yield f"{named.get(client, f'client {client}')} {verb} in round {number}."
    if lacks := run.lacks:
        marked = (
            f" Numbers marked {MARK} do not cover all domains in the same rounds, so they are"
            " not compared with other runs."
        )
        yield f"{lacks}.{'' if run.fully_tested() else marked}"


def _values(values: Mapping[str, str]) -> str:
    """List values with up to four of their methods: ``0.1 (fedavg, uniform), 0.01 (fedheal)``."""
    owners = grouped((value, name) for name, value in values.items())
    for names in owners.values():
        if len(names) > 4:
            names[3:] = [f"{len(names) - 3} more"]
    return ", ".join(f"{value} ({', '.join(names)})" for value, names in owners.items())
