"""A summary: small files about many runs, from which reports can be created.

    write_summary(runs, Path("experiments/x.csv"))
    print(markdown_tables(read_summary(Path("experiments/x.csv"))))

With a summary, the tables and verdicts of a document can be checked and recomputed without the run
folders. ``x.csv`` has the values of the last tested rounds, one in a row, and ``x.runs.json`` the
settings and facts of each run.
"""

import csv
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np

from fairflower.config import RunConfig
from fairflower.config.run import COMPARED_TABLES, check_values, execution_keys
from fairflower.config.text import grouped, shown
from fairflower.errors import ConfigError, RunFolderError
from fairflower.files import cell_of
from fairflower.paths import check_output_file
from fairflower.report.notes import data_digest, process_infos, run_notes
from fairflower.report.reading import IDS, Run, read_run, run_of
from fairflower.report.tables import participation
from fairflower.server.contents import (
    HISTORY_COLUMNS,
    Record,
    Value,
    checked_facts,
    held_to,
    parse_json,
    parse_values,
    read_text,
)
from fairflower.server.history import WINDOW

_COLUMNS = ["run", *HISTORY_COLUMNS]

#: Number of significant digits of values. The tables show four.
_DIGITS = 8

#: Facts that a summary takes from ``run.json``.
_FACTS = (
    *("label", "started", "rounds", "num_parameters", "model_bytes", "classes", "domains"),
    *("test_sizes", "validation_sizes", "held_out", "digest", "division", "redraw", "metrics"),
    *("groups", "privacy", "task", "scores", "labels", "best", "local_arrays", "local_part"),
)

#: Settings that a summary leaves out; reports need ``tuned``.
_UNRECORDED = execution_keys() - {"tuned"}


class _Settings(TypedDict):
    config: dict[str, Any]


class _Summary(TypedDict):
    """Contents of ``x.runs.json``."""

    usual: _Settings
    runs: dict[str, _Settings]


class _Facts(_Settings):
    """A run in ``x.runs.json``, beside facts of ``run.json``."""

    clients: list[str]  # their domains
    remarks: list[str]
    participation: list[float]
    diagnostics: NotRequired[list[Record]]


def write_summary(runs: Sequence[Run], path: str | Path) -> None:
    """Write the values of the last five tested rounds of all runs, and facts about the runs.

    ``path``, a CSV file, has the columns ``run`` (the folder's name) and those of ``history.csv``:
    ``round``, ``level``, ``name`` (of a domain or client), ``metric`` and ``value``. Beside it,
    ``<name>.runs.json`` has for each run the settings that differ from their defaults, facts of
    ``run.json``, and what reports take from all rounds: ``remarks``, clusters in ``diagnostics``,
    and ``participation``, the mean fraction of rounds in which a client of each domain was merged
    (empty if all are 1). Facts that most runs share are in ``usual``. Raises ``ConfigError`` if the
    file name does not end in ``.csv``, or a file belongs to a run folder.
    """
    path = Path(path)
    check_output_file(path, ".csv", "summary")
    check_output_file(_facts_file(path), ".json", "summary")
    count: Counter[str] = Counter()
    facts, configs, text = {}, {}, StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for run in runs:
        count[run.path.name] += 1
        number = count[run.path.name]
        name = f"{run.path.name} ({number})" if number > 1 else run.path.name
        for row in _last_values(run):
            writer.writerow(map(cell_of, (name, *row[:-1], f"{row.value:.{_DIGITS}g}")))
        facts[name], configs[name] = _facts(run), _settings(run)
    usual, settings = _usual([*facts.values()]), _usual([*configs.values()])
    own = {
        name: _apart(facts[name], usual) | {"config": _apart(configs[name], settings)}
        for name in facts
    }
    lines = (f"{json.dumps(name)}: {json.dumps(of)}" for name, of in own.items())
    of_all = ",\n".join(lines)
    path.write_text(text.getvalue(), encoding="utf-8")
    _facts_file(path).write_text(
        f'{{"usual": {json.dumps(usual | {"config": settings})},\n"runs": {{\n{of_all}\n}}}}\n',
        encoding="utf-8",
    )


def read_summary(path: str | Path) -> list[Run]:
    """Read the files written by `write_summary`. The runs have only their last tested rounds.

    Raises `RunFolderError` if a file is missing, is not of a summary or has an invalid value.
    """
    path = Path(path).expanduser()
    text = read_text(path).removeprefix("\ufeff")  # of a spreadsheet
    if text.partition("\n")[0].split(",") != _COLUMNS:
        raise RunFolderError(
            f"{path} is not a summary of runs, or an earlier version wrote it: its columns are not "
            f"{','.join(_COLUMNS)}. Create one with `fairflower report RUNS --summary FILE`."
        )
    lines = enumerate(parse_values(StringIO(text), path, "run"), start=2)
    rows = grouped((name, (line, row)) for line, ((name,), row) in lines)
    file = _facts_file(path)
    facts = parse_json(read_text(file).removeprefix("\ufeff"), str(file))
    held_to(facts, _Summary, str(file))
    if unknown := rows.keys() - facts["runs"].keys():
        raise RunFolderError(f"{path} has the run {min(unknown)}, which is not in {file.name}.")
    if not facts["runs"]:
        raise RunFolderError(f"{path} has no runs.")
    known = {key: v for key, v in RunConfig().concise().items() if key not in _UNRECORDED}
    runs = []
    for name, own in facts["runs"].items():
        place, info = f"{file}, {name}", facts["usual"] | own
        config = facts["usual"]["config"] | own["config"]
        info |= {"config": config, "error": None}
        held_to(info, _Facts, place)
        info["clients"] = [
            {"client_id": k, "domain": domain, "num_examples": 0, "class_counts": []}
            for k, domain in enumerate(info["clients"])
        ]
        try:
            check_values(config)
        except ConfigError as error:
            raise RunFolderError(f"{place}: {error}") from error
        info |= checked_facts(dict(info), Path(place))
        diagnostics = info.pop("diagnostics", [])
        run = run_of(
            Path(Path(name).name), info, known | config, rows.get(name, []), diagnostics, path
        )
        if not run.rounds.size:
            raise RunFolderError(f"{path} has no tested round of {name}.")
        runs.append(run)
    return runs


def read_runs(path: str | Path) -> list[Run]:
    """Return the runs in a summary (a ``.csv`` file), or the run in a run folder."""
    path = Path(path).expanduser()
    if path.suffix != ".csv" and path.is_file():
        raise RunFolderError(f"{path} is a file, not a run folder or a summary (.csv).")
    return read_summary(path) if path.suffix == ".csv" else [read_run(path)]


def _facts_file(path: Path) -> Path:
    return path.with_suffix(".runs.json")


def _last_values(run: Run) -> Iterator[Value]:
    """Yield the values of the last tested rounds and, if it is known, of the best round before.

    Those of round 0 are yielded only if there are no others.
    """
    best = run.info.get("best", {}).get("round")
    for (level, metric), found in run.history.values.items():
        tested = sorted(r for r, of in found.items() if np.isfinite([*of.values()]).any())
        trained = [r for r in tested if r] or tested
        for r in [*(r for r in trained[:-WINDOW] if r == best), *trained[-WINDOW:]]:
            for name, value in found[r].items():
                if np.isfinite(value):
                    yield Value(r, level, name, metric, value)


def _facts(run: Run) -> dict[str, Any]:
    """Return the facts about a run but its settings."""
    first, *resumed = process_infos(run)
    facts = {
        **{key: run.info[key] for key in _FACTS if key in run.info},
        "status": run.status,
        **first,
        "resumed": [{**part, "after_round": 1} for part in resumed],
        "sources": [data_digest(run)],
        "clients": [client.domain for client in run.clients],
        "remarks": run_notes(run),
        "participation": participation(run),
    }
    if (found := run.clusters) is not None:
        there = np.isin(found.rounds, run.final_rounds())
        rows = [(np.isfinite(ids), ids) for ids in found.ids[there]]
        facts["diagnostics"] = [
            {
                "round": r,
                "client_ids": np.flatnonzero(took).tolist(),
                IDS: ids[took].astype(int).tolist(),
            }
            for r, (took, ids) in zip(found.rounds[there].tolist(), rows, strict=True)
        ]
    return facts


def _settings(run: Run) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    known = RunConfig().concise()
    return {
        key: value
        for key, value in run.config.items()
        if key not in _UNRECORDED
        and (key in known or f"{key.partition('.')[0]}.name" in known)
        and not (key.startswith(COMPARED_TABLES) and value == "default")
        and shown(value) != shown(known.get(key))
    }


def _usual(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the most frequent value of each fact that all runs have."""
    return {
        key: json.loads(Counter(json.dumps(of[key]) for of in facts).most_common(1)[0][0])
        for key in (facts[0] if facts else ())
        if all(key in of for of in facts)
    }


def _apart(facts: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in facts.items() if key not in usual or value != usual[key]}
