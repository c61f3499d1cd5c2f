"""A summary: a small CSV file with one row per run, from which reports can be created.

    write_summary(runs, Path("experiments/x.csv"))
    print(markdown_tables(read_summary(Path("experiments/x.csv"))))

With a summary, the tables and verdicts of a document can be checked and recomputed without the run
folders.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairflower.config import RunConfig
from fairflower.config.run import COMPARED_TABLES, execution_keys
from fairflower.config.text import parse_assignment, shown
from fairflower.data import ClientInfo
from fairflower.errors import RunFolderError
from fairflower.files import cell_of, text_of
from fairflower.numerics.group_fairness import METRICS
from fairflower.paths import check_output_file, read_text
from fairflower.registry.user_metrics import metric_names
from fairflower.report.clusters import IDS
from fairflower.report.measures import rated
from fairflower.report.reading import SCORES, AccuracyHistory, Run, read_run
from fairflower.report.tables.accuracy import participation
from fairflower.report.tables.notes import (
    data_digest,
    draw_cells,
    draw_facts,
    process_infos,
    run_notes,
)
from fairflower.report.text import UNDEFINED
from fairflower.server.history import WINDOW

#: Number of significant digits of fractions. The tables show four.
_DIGITS = 8

#: First and last columns. The config and the metrics of a run are between them.
_FIRST = ("method", "run", "seed", "status", "started", "done")
_LAST = ("parameters", "bytes", "data", "processor", "versions", "remarks")

#: Column that lists the user's metrics for which lower values are better.
_LOWER = "lower is better"

#: Column of the clients' accuracies.
_BY_CLIENT = "accuracy by client"

#: Column of the accuracies of the clients' personal models.
_PERSONAL_BY_CLIENT = "personal by client"

#: Column of the numbers of test examples, with which verdicts tell a lucky spread from a real one.
_TESTED = "test examples by domain"

#: Column of the digest of all examples, by which runs on other data are told apart.
_EXAMPLES, _POSITIVE = "examples", "positive class"

#: Separators: between the sessions of a resumed run, and between remarks or domains.
_AND, _NEXT = " + ", " | "


def write_summary(runs: Sequence[Run], path: str | Path) -> None:
    """Write a row for each run, in the order of the runs.

    Fractions and rounds are separated by spaces, and a cell without a value is empty. Columns:

    - ``method`` (label), ``run`` (folder's name), ``seed``, ``status``, ``started``, ``done``
      (rounds), and the run config keys that differ from their defaults in some run.
    - ``rounds``: the last five tested rounds. ``<domain> accuracy`` in these rounds, and also
      ``balanced_accuracy`` and ``auc`` if the tables show them. The user's metrics in these rounds;
      ``lower is better`` lists the metrics to minimize.
    - ``<metric> global``, ``<metric> worst client`` and ``<metric> <domain>`` for each metric of
      group fairness. An undefined value is written as the word undefined.
    - ``<domain> personal_accuracy`` in the ``personal rounds``, and ``personal by client``, the
      mean of each client over these rounds. ``held-out``: the accuracy on the ``held-out domain``
      in the ``held-out rounds``, and ``held-out AdaBN``, if it was tested.
    - ``domains`` in the run's order, and in this order ``clients``, their numbers of clients, and
      ``test examples by domain``. ``participation``: the mean fraction of rounds in which a
      client of each domain was merged, unless all are 1. ``accuracy by client``: means over the
      rounds, if clients tested. ``cluster``: for each round, the clients' clusters, separated by
      dots.
    - ``remarks``; ``parameters`` and ``bytes`` of the model; ``data``: a digest of the partition;
      ``examples``: one of the examples; ``division``, ``redraw``, ``processor``, ``versions``.

    Raises
    ------
    ConfigError
        If the file name does not end in ``.csv``, or the file belongs to a run folder.
    """
    path = Path(path)
    check_output_file(path, ".csv", "summary")
    rows = [_row_of_run(run) for run in runs]
    settings = _settings(runs)
    for row, run in zip(rows, runs, strict=True):
        row |= {key: shown(run.config[key]) for key in settings if _is_set(run.config, key)}
    figures = dict.fromkeys(column for row in rows for column in row)
    columns = [*_FIRST, *settings]
    columns += [*(name for name in figures if name not in {*columns, *_LAST}), *_LAST]
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for cells in (columns, *([row.get(column, "") for column in columns] for row in rows)):
        writer.writerow(map(cell_of, cells))
    path.write_text(text.getvalue(), encoding="utf-8")


def read_summary(path: str | Path) -> list[Run]:
    """Read a file written by `write_summary`. Its runs have only their last tested rounds.

    Raises
    ------
    RunFolderError
        If the file is missing, is not a summary, or has a row that cannot be read.
    """
    path = Path(path).expanduser()
    try:
        lines = csv.reader(StringIO(read_text(path, "utf-8-sig")), strict=True)
        header, *cells = [[*map(text_of, line)] for line in lines if line] or [[]]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RunFolderError(f"Cannot read {path}: {error}.") from error
    missing = {*_FIRST, *_LAST, "rounds", "domains", "clients"} - set(header)
    if missing:
        raise RunFolderError(
            f"{path} is not a summary of runs: it has no column {sorted(missing)[0]!r}. "
            "Create one with `fairflower report RUNS --summary FILE`."
        )
    runs = []
    for number, line in enumerate(cells, start=2):
        try:
            if len(line) != len(header):
                raise ValueError("the number of cells differs from the number of columns")
            runs.append(_run_of_row(dict(zip(header, line, strict=True))))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise RunFolderError(f"{path}, row {number} cannot be read: {error!r}.") from error
    if not runs:
        raise RunFolderError(f"{path} has no runs.")
    return runs


def read_runs(path: str | Path) -> list[Run]:
    """Return the runs in a summary (a ``.csv`` file), or the run in a run folder."""
    path = Path(path).expanduser()
    if path.suffix != ".csv" and path.is_file():
        raise RunFolderError(f"{path} is a file, not a run folder or a summary (.csv).")
    return read_summary(path) if path.suffix == ".csv" else [read_run(path)]


# --- a row -----------------------------------------------------------------------------------


def _row_of_run(run: Run) -> dict[str, Any]:
    last = np.isin(run.rounds, run.final_rounds())
    # Clients are ordered by domain, so the number per domain shows the domain of each client.
    order = sorted(range(len(run.clients)), key=lambda k: run.domains.index(run.clients[k].domain))
    counts = [sum(client.domain == domain for client in run.clients) for domain in run.domains]
    row: dict[str, Any] = {
        "method": run.label,
        "run": run.path.name,
        "seed": run.seed,
        "status": run.status,
        "started": run.info.get("started", ""),
        "done": run.info.get("rounds", run.last_round),
        "rounds": _listed(run.rounds[last]),
        **_score_cells(run, last),
        **_group_cells(run),
        **_personal_cells(run, order),
        **_held_out_cells(run),
        "domains": _NEXT.join(run.domains),
        "clients": _listed(counts),
        _TESTED: _listed(run.sizes),
        _EXAMPLES: run.info.get("digest"),
    }
    row |= draw_cells(run)
    if shares := participation(run):
        row["participation"] = _fractions(shares)
    if np.isfinite(tested := run.by_client.final()[order]).any():
        row[_BY_CLIENT] = _fractions(tested)
    row |= _cluster_cells(run, last, order)
    made = process_infos(run)
    return row | {
        "parameters": run.info.get("num_parameters"),
        "bytes": run.info.get("model_bytes"),
        "data": data_digest(run),
        "processor": _AND.join(session.processor for session in made),
        "versions": _AND.join(
            ", ".join(f"{name} {version}" for name, version in session.versions.items())
            for session in made
        ),
        "remarks": _NEXT.join(run_notes(run)),
    }


def _score_cells(run: Run, last: NDArray[np.bool_]) -> dict[str, str]:
    """Return the cells for accuracies, other scores and the user's metrics in the last rounds."""
    scores = [score for score in SCORES if score in run.scores] if rated(run) else []
    cells = _by_domain(run.domains, "accuracy", run.accuracy[last])
    for score in (*scores, *run.user_metrics):
        cells |= _by_domain(run.domains, score, run.scores[score][last])
    if lower := [metric for metric, better in run.user_metrics.items() if better < 0]:
        cells[_LOWER] = " ".join(lower)
    return cells


def _personal_cells(run: Run, order: list[int]) -> dict[str, str]:
    """Return the cells for personal models; no cells if they were not tested."""
    cells = {}
    if run.personal.rounds.size:
        late = slice(-WINDOW, None)
        cells["personal rounds"] = _listed(run.personal.rounds[late])
        cells |= _by_domain(run.domains, "personal_accuracy", run.personal.accuracy[late])
    if np.isfinite(by_client := run.personal_by_client.final()).any():
        cells[_PERSONAL_BY_CLIENT] = _fractions(by_client[order])
    return cells


def _held_out_cells(run: Run) -> dict[str, str]:
    """Return the cells for the domain that is held out; no cells if there is none."""
    if not run.held_out.rounds.size:
        return {}
    late = slice(-WINDOW, None)
    cells = {
        "held-out domain": run.held_out_domain,
        "held-out rounds": _listed(run.held_out.rounds[late]),
        "held-out": _fractions(run.held_out.accuracy[late, 0]),
    }
    if run.adapted.rounds.size:
        cells["held-out AdaBN"] = _fractions(run.adapted.accuracy[late, 0])
    return cells


def _cluster_cells(run: Run, last: NDArray[np.bool_], order: list[int]) -> dict[str, str]:
    """Return the cell for the clients' clusters; no cell if the strategy recorded none."""
    found = run.clusters
    if found is None:
        return {}
    by_round = dict(zip(found.rounds.tolist(), found.ids[:, order], strict=True))
    return {"cluster": " ".join(_ids(by_round.get(r)) for r in run.rounds[last].tolist())}


def _run_of_row(row: Mapping[str, str]) -> Run:
    of_user = metric_names(row.get("evaluate.metrics") or "")
    lower = (row.get(_LOWER) or "").split()
    table = {
        metric: {
            column.removesuffix(f" {metric}"): text
            for column, text in row.items()
            if column.endswith(f" {metric}") and text
        }
        for metric in ("accuracy", "personal_accuracy", *SCORES, *of_user)
    }
    rounds = _numbers(row, "rounds", np.int64)
    if not rounds.size or rounds[0] < 0 or (np.diff(rounds) <= 0).any():
        raise ValueError(f"rounds = {row['rounds']!r}: expected ascending rounds")
    counts = [int(count) for count in row["clients"].split()]
    domains = tuple(row["domains"].split(_NEXT))
    owners = [d for d, count in zip(domains, counts, strict=True) for _ in range(count)]
    accuracy = _matrix(table["accuracy"], domains, rounds)
    if ((accuracy < 0) | (accuracy > 1)).any():
        raise ValueError("expected accuracies from 0 to 1")
    known = RunConfig().concise()
    settings = [
        parse_assignment(f"{key}={text}")
        for key, text in row.items()
        if text and (key in known or key.startswith(COMPARED_TABLES))
    ]
    personal_rounds = _numbers(row, "personal rounds", np.int64)
    held_out_rounds = _numbers(row, "held-out rounds", np.int64)
    held_out, adapted = (_numbers(row, column) for column in ("held-out", "held-out AdaBN"))
    return Run(
        path=Path(row["run"]),
        label=row["method"],
        status=row["status"],
        domains=domains,
        clients=tuple(ClientInfo(k, domain, 0, ()) for k, domain in enumerate(owners)),
        config={key: value for key, value in known.items() if key not in _UNRECORDED}
        | dict(settings)
        | {"seed": int(row["seed"])},
        rounds=rounds,
        accuracy=accuracy,
        by_client=_client_accuracies(row, _BY_CLIENT, rounds, len(owners)),
        personal=AccuracyHistory(
            rounds=personal_rounds,
            accuracy=_matrix(table["personal_accuracy"], domains, personal_rounds),
        ),
        personal_by_client=_client_accuracies(
            row, _PERSONAL_BY_CLIENT, personal_rounds, len(owners)
        ),
        held_out=AccuracyHistory(
            rounds=held_out_rounds, accuracy=held_out.reshape(len(held_out_rounds), 1)
        ),
        adapted=AccuracyHistory(
            rounds=held_out_rounds[: len(adapted)], accuracy=adapted.reshape(len(adapted), 1)
        ),
        held_out_domain=row.get("held-out domain") or "",
        scores={s: _matrix(table[s], domains, rounds) for s in (*SCORES, *of_user) if table[s]},
        user_metrics={m: -1 if m in lower else 1 for m in of_user if table[m]},
        group_metrics=_group_metrics(row, domains, rounds),
        diagnostics=tuple(_clusters(row.get("cluster") or "", rounds)),
        info=_info(row),
    )


#: Last words of the columns that contain a metric of group fairness over all clients.
_OVER_CLIENTS = ("global", "worst client")


def _places(domains: Sequence[str]) -> list[str]:
    """Return all places of a group fairness metric; a domain may share its name with another."""
    return [*_OVER_CLIENTS, *(f"domain {d}" if d in _OVER_CLIENTS else d for d in domains)]


def _group_cells(run: Run) -> dict[str, str]:
    """Return the cells for group fairness, with a column for each metric and place."""
    last = np.isin(run.rounds, run.final_rounds())
    classes = run.info.get("classes") if run.group_metrics else None
    return ({_POSITIVE: classes[1]} if classes else {}) | {
        f"{name} {place}": _fractions(values).replace("nan", UNDEFINED)
        for name, tests in run.group_metrics.items()
        for place, values in zip(_places(run.domains), tests.accuracy[last].T, strict=True)
    }


def _group_metrics(
    row: Mapping[str, str], domains: Sequence[str], rounds: NDArray[np.int64]
) -> dict[str, AccuracyHistory]:
    """Read the cells of `_group_cells`; empty if there are no groups of people."""
    return {
        m.name: AccuracyHistory(
            rounds=rounds,
            accuracy=_matrix(
                {c: (row.get(c) or "").replace(UNDEFINED, "nan") for c in columns}, columns, rounds
            ),
        )
        for m in METRICS
        for columns in [[f"{m.name} {place}" for place in _places(domains)]]
        if row.get(columns[0])
    }


def _info(row: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts about a run as in ``run.json``, and its ``remarks``."""
    made = []
    processors, versions = row["processor"].split(_AND), row["versions"].split(_AND)
    for processor, listed in zip(processors, versions, strict=True):
        packages = [part.rpartition(" ") for part in listed.split(", ") if part]
        version_of = {name: version for name, _, version in packages}
        made.append({"machine": {"processor": processor}, "versions": version_of, "after_round": 1})
    return {
        **made[0],
        "resumed": made[1:],
        "status": row["status"],
        "started": row["started"],
        "rounds": int(row["done"]),
        "num_parameters": int(row["parameters"]) if row["parameters"] else None,
        "model_bytes": int(row["bytes"]) if row["bytes"] else None,
        "sources": [row["data"]],
        "digest": row.get(_EXAMPLES) or "",
        "classes": ["", row[_POSITIVE]] if row.get(_POSITIVE) else [],
        **draw_facts(row),
        **dict.fromkeys(("test_sizes", "validation_sizes"), _numbers(row, _TESTED, int).tolist()),
        "remarks": [text for text in row["remarks"].split(_NEXT) if text],
        "participation": [float(share) for share in (row.get("participation") or "").split()],
    }


# --- cells -----------------------------------------------------------------------------------

#: Settings that a summary leaves out; reports need ``tuned``.
_UNRECORDED = execution_keys() - {"tuned"}


def _settings(runs: Iterable[Run]) -> list[str]:
    """Return the config keys that differ from their defaults in some run, in config order."""
    known = RunConfig().concise()
    places = {key: place for place, key in enumerate(known)}
    changed = {
        key
        for run in runs
        for key in run.config
        if _is_set(run.config, key) and shown(run.config[key]) != shown(known.get(key))
    }

    def place(key: str) -> tuple[int, bool]:
        """Return the sort position of a key. The arguments of a method follow its name."""
        return places.get(key, places.get(f"{key.partition('.')[0]}.name", -1)), key not in places

    keys = dict.fromkeys(key for run in runs for key in run.config if key in changed)
    left_out = {"seed", *_UNRECORDED}
    return sorted((key for key in keys if place(key)[0] >= 0 and key not in left_out), key=place)


def _is_set(config: Mapping[str, Any], key: str) -> bool:
    """Return whether the config sets a key to a value that is not the method's default."""
    return key in config and not (key.startswith(COMPARED_TABLES) and config[key] == "default")


def _by_domain(domains: Sequence[str], metric: str, values: NDArray[np.float64]) -> dict[str, str]:
    return {
        f"{d} {metric}": _fractions(column) for d, column in zip(domains, values.T, strict=True)
    }


def _fractions(values: Iterable[float]) -> str:
    return " ".join(f"{value:.{_DIGITS}g}" for value in values)


def _numbers(row: Mapping[str, str], column: str, dtype: type = np.float64) -> NDArray[Any]:
    """Read the numbers in a cell; none if the column is missing."""
    return np.array((row.get(column) or "").split(), dtype=dtype)


def _listed(values: Iterable[int]) -> str:
    return " ".join(str(int(value)) for value in values)


def _client_accuracies(
    row: Mapping[str, str], column: str, rounds: NDArray[np.int64], num_clients: int
) -> AccuracyHistory:
    """Read the clients' mean accuracies as if they were from the last of ``rounds``."""
    values = _numbers(row, column)
    accuracy = values.reshape(min(1, values.size), num_clients)
    return AccuracyHistory(rounds=rounds[-1:][: len(accuracy)], accuracy=accuracy)


def _matrix(
    cells: Mapping[str, str], columns: Sequence[str], rows: NDArray[Any]
) -> NDArray[np.float64]:
    """Return values [rows, columns], with NaN in a column without a cell."""
    values = np.full((len(rows), len(columns)), np.nan)
    for c, column in enumerate(columns):
        if column in cells:
            cell = np.array(cells[column].split(), dtype=np.float64)
            if len(cell) != len(rows):  # a single number would be taken for all rows
                raise ValueError(f"{column}: expected {len(rows)} numbers, got {len(cell)}")
            values[:, c] = cell
    return values


def _ids(row: NDArray[np.float64] | None) -> str:
    """Format the clients' clusters in a round as text; ``-`` for a round without clusters."""
    if row is None:
        return "-"
    return ".".join("" if np.isnan(value) else str(int(value)) for value in row)


def _clusters(cell: str, rounds: NDArray[np.int64]) -> Iterable[dict[str, Any]]:
    """Yield the record of clusters for each round, as in the strategy's diagnostics."""
    for text, r in zip(cell.split(), rounds.tolist(), strict=bool(cell)):
        clusters = {
            k: int(value) for k, value in enumerate(text.split(".")) if value not in ("", "-")
        }
        if clusters:
            yield {"round": r, "client_ids": list(clusters), IDS: list(clusters.values())}
