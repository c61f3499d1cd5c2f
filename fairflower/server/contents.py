"""Expected types in a run folder's files; the files are checked when they are read.

A run folder may be damaged or come from other people. Reading it raises only `RunFolderError`,
which names the file, the field and the expected content.
"""

import csv
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Required, TypedDict

from fairflower import paths
from fairflower.arguments import Count, Range, conform
from fairflower.config import RunConfig
from fairflower.config.run import changed_settings, check_values, execution_keys
from fairflower.config.text import read_toml
from fairflower.errors import ConfigError, Diverged, RunFolderError, quoted
from fairflower.files import text_of
from fairflower.numerics.scores import ACCURACY, AUC, BALANCED_ACCURACY, Score

HISTORY_COLUMNS = ["round", "level", "name", "metric", "value"]

GROWING = ("history.csv", "diagnostics.jsonl")  # files to which a run appends

STATISTICS = "statistics.json"  # of a run that only describes its sites' data
MODEL, BEST = "model.safetensors", "best.safetensors"  # models of the last and of the best round

DIGESTED = (*GROWING, MODEL, BEST)  # files whose digests ``run.json`` has when a run has ended


class ChangedFile(RunFolderError):
    """A file of a run folder is not as the run has written it."""


Seconds = Annotated[float, Range(0, 1e12)]
Digits = Annotated[str, re.compile(r"\d{1,9}", re.ASCII)]


class Client(TypedDict):
    """A client in ``run.json``; see `fairflower.data.ClientInfo`."""

    client_id: Count
    domain: str
    num_examples: Count
    class_counts: list[Count]


class ScoreFacts(TypedDict, total=False):
    """A score in ``run.json``; see `fairflower.numerics.scores.Score`. Infinity is left out."""

    name: Required[str]
    better: Required[Literal[-1, 0, 1]]
    unit: str
    low: float
    high: float
    margin: float
    digits: Count
    title: str
    phrase: str


class Label(TypedDict):
    """A label or class in ``run.json``: its scores, and test examples by domain and kind."""

    name: str
    scores: list[ScoreFacts]
    counts: dict[str, dict[str, Count]]


class RegisteredKey(TypedDict):
    """The name under which a site is registered, and the fingerprint of its public key."""

    name: str
    fingerprint: str


class Sites(TypedDict):
    """Description of a federation of sites, which is needed to resume its run."""

    federation: dict[str, Any]
    numbered: bool
    keys: NotRequired[dict[Digits, RegisteredKey]]  # by client, if sites are registered by name


class Best(TypedDict):
    """The best round so far, whose model is ``best.safetensors``, and the criterion for it."""

    round: Count
    by: str


class Privacy(TypedDict):
    """Differential privacy so far; see `fairflower.server.privacy`."""

    epsilon: float
    delta: float
    rounds: Count
    numbers: Count
    noise_multiplier: float
    number_noise_multiplier: float
    clip: float
    noise: str


class Part(TypedDict, total=False):
    """Entries of ``run.json`` about a session of a run, from a start to a stop."""

    versions: dict[str, str | None]
    machine: dict[str, str | float | None]
    after_round: Count
    at: str
    #: Settings whose files, such as a user's strategy, were others before this session.
    changed: list[str]


class Info(Part, total=False):
    """Contents of ``run.json``."""

    name: str
    path: str  # the run folder's path when it was last written
    label: Required[str]
    #: Only a summary says "killed".
    status: Required[Literal["running", "completed", "stopped", "failed", "killed"]]
    error: Required[str | None]
    started: str
    finished: str | None
    seconds: Seconds | None
    rounds: Required[Count]
    command: str
    # The run id names a folder that is deleted after the run.
    run_id: Annotated[str, re.compile("[0-9a-f]{32}")]
    num_parameters: Count | None
    model_bytes: Count | None
    #: What is learnt, and its scores with the primary score first; absent for classification.
    task: str
    scores: list[ScoreFacts]
    labels: list[Label]
    num_classes: Count
    classes: list[str]
    shape: list[Count]
    domains: Required[list[str]]
    sources: list[str]
    test_sizes: list[Count]
    validation_sizes: list[Count]
    held_out: str
    local_arrays: list[str]
    local_part: str
    held_out_size: Count
    images: str
    digest: str
    division: str  # `Federation.division` and `Federation.redraw`
    redraw: dict[str, float]
    data_warnings: list[str]
    frozen: str  # digest of frozen weights that are not exchanged
    availability: str  # digest of the file in `participation.availability`
    #: Digests of the user's own files (`fairflower.server.checkpoint`), by run config key.
    parts: dict[str, str]
    config: dict[str, Any]  # the settings, without the defaults of methods' arguments
    files: dict[str, str]  # digests of the files of a run that has ended (`file_digest`)
    clients: Required[list[Client]]
    nodes: dict[Digits, int]
    sites: Sites
    joined: dict[Digits, Count]  # client -> the first round of a site that joined later
    withdrawn: dict[Digits, Count]  # client -> the round in which its site has withdrawn
    resumed: list[Part]
    tracked: dict[str, str]
    #: Round from which on a session logged nothing more -> why its tracker failed.
    untracked: dict[Digits, str]
    ended_early: str | None
    diverged: float | None
    best: Best
    client_state: bool
    metrics: dict[str, int]  # user-defined metrics: 1 if higher is better, -1 if lower is better
    skipped_metrics: dict[str, str]
    groups: dict[str, list[str]]  # sensitive attribute -> names of the groups of people
    #: Where a metric of group fairness is undefined -> the metrics, with reasons.
    undefined_metrics: dict[str, str]
    #: Parameters of secure aggregation, and the reasons for rounds without a sum.
    secure_aggregation: dict[str, int]
    privacy: Privacy
    halted_rounds: dict[Digits, str]


class Record(TypedDict, total=False):
    """A line of ``diagnostics.jsonl``; fields added by a strategy may contain anything."""

    round: Required[Count]
    client_ids: list[Count]
    dropped: dict[Digits, str]
    dropped_in_test: dict[Digits, str]


class Value(NamedTuple):
    """A line of ``history.csv``."""

    round: int
    level: str
    name: str
    metric: str
    value: float


def read_facts(path: Path) -> dict[str, Any]:
    """Read ``run.json`` in a run folder."""
    file = path / "run.json"
    try:
        text = paths.read_text(file, "utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise RunFolderError(
            f"{path} is not a run folder, because its run.json cannot be read: {reason}."
        ) from error
    return checked_facts(parse_json(text, str(file)), file)


def checked_facts(info: Any, file: Path) -> dict[str, Any]:
    """Return what ``file`` says about a run; raise `RunFolderError` unless it is an `Info`."""
    if isinstance(info, dict):
        info.pop("remarks", None)  # only summaries have it
        for name in ("command", "error", "path"):  # may contain names of files in any encoding
            if isinstance(info.get(name), str):
                info[name] = info[name].encode(errors="replace").decode().replace("\0", "?")
    held_to(info, Info, str(file))
    domains = info["domains"]
    unknown_clients = [client for client in info["clients"] if client["domain"] not in domains]
    if unknown_clients:
        number = unknown_clients[0]["client_id"]
        raise RunFolderError(
            f"{file}: the domain of client {number} is not in the list of domains."
        )
    if not domains or len(set(domains)) < len(domains):
        raise RunFolderError(f"{file}: domains = {quoted(domains)}: expected distinct names.")
    if "sites" in info and "nodes" not in info:
        raise RunFolderError(f"{file}: it has 'sites' and no 'nodes'.")
    return info  # type: ignore[no-any-return]


def scores_of(facts: Mapping[str, Any]) -> tuple[Score, ...]:
    """Return the scores of a run's task, the primary score first; an AUC of classes is optional."""
    infinite = {"low": -math.inf, "high": math.inf}
    fields = ScoreFacts.__annotations__
    known = ({k: v for k, v in s.items() if k in fields} for s in facts.get("scores", ()))
    scores = (Score(**(infinite | score)) for score in known)
    return tuple(scores) or (ACCURACY, BALANCED_ACCURACY, AUC)


def divergence(facts: Mapping[str, Any]) -> str | None:
    """Return the error of a run that failed because training diverged; None for other runs."""
    text, prefix = " ".join(str(facts.get("error") or "").split()), f"{Diverged.__name__}: "
    return text.removeprefix(prefix) if text.startswith(prefix) else None


def original_of(path: Path, facts: Mapping[str, Any]) -> Path | None:
    """Return the run folder of which ``path`` is a copy; None if it is the original, or moved.

    ``facts`` are those of ``path``. Both folders have the same run id, and so the same state of
    clients.
    """
    original = Path(facts.get("path", path))
    with suppress(OSError, RunFolderError):
        if not original.samefile(path):
            same = read_facts(original).get("run_id") == facts.get("run_id")
            return original if same else None
    return None


def check_same_files(
    path: Path, facts: Mapping[str, Any], settings: Mapping[str, Any], last_round: int
) -> None:
    """Raise ``ChangedFile`` unless a run folder's files are as the run has written them.

    ``last_round`` is the last complete round in the history.
    """
    completed = facts["status"] == "completed"
    may_change = execution_keys() | (set() if completed else {"num-server-rounds"})
    if changed := changed_settings(facts.get("config", settings), settings, may_change):
        file = path / "config.toml"
        raise ChangedFile(f"{file} has been changed since the run began: {changed}. Undo that.")
    # A round is counted after its training, and complete after its tests.
    lost = facts["rounds"] > max(last_round + (not completed), 0)
    check_same_file(path / "history.csv", facts, f"ends after round {last_round}" if lost else "")
    check_same_file(path / "diagnostics.jsonl", facts)


def check_same_file(file: Path, facts: Mapping[str, Any], problem: str = "") -> None:
    """Raise ``ChangedFile`` if there is a problem, or a file has changed since its run ended."""
    digest = facts.get("files", {}).get(file.name)
    if problem or (digest and not (file.exists() and file_digest(file) == digest)):
        remedy = "repeat" if facts["status"] == "completed" else "resume"
        raise ChangedFile(
            f"{file} {problem or 'has been changed since the run ended'}; "
            f"the run has made {facts['rounds']} rounds. Restore the file, or {remedy} the run."
        )


def file_digest(file: Path, size: int = -1) -> str:
    """Return the digest of a file's first bytes; a text's does not depend on its line ends."""
    paths.check_regular(file)
    with file.open("rb") as reader:
        content = reader.read(size)
    text = content.replace(b"\r\n", b"\n") if file.name in GROWING else content
    return hashlib.sha256(text).hexdigest()


def read_config(path: Path) -> dict[str, Any]:
    """Read all settings of a run, by run config key."""
    file = path / "config.toml"
    try:
        settings = read_toml(file)
        check_values(settings)
    except ConfigError as error:
        named = "" if str(file) in str(error) else f"{file}: "
        raise RunFolderError(f"{named}{error}") from error
    if "strategy.name" not in settings:
        raise RunFolderError(
            f"{file} has no strategy.name, so the file is empty or incomplete. Restore the file, "
            "or omit this run."
        )
    # The file may have been edited, and lines with defaults removed.
    return RunConfig().concise() | settings


def read_history(path: Path) -> list[Value]:
    """Read the lines of a ``history.csv``; an incomplete last line is ignored."""
    return [value for _, value in parse_values(whole_lines(path), path)]


def parse_values(
    lines: Iterable[str], path: Path, *first: str
) -> Iterator[tuple[tuple[str, ...], Value]]:
    """Yield the rows of a table with the columns ``first`` and then those of ``history.csv``."""
    reader = csv.reader(lines, strict=True)
    try:
        header, expected = next(reader, []), [*first, *HISTORY_COLUMNS]
        if header != expected:
            found, wanted = quoted(",".join(header)), ",".join(expected)
            raise RunFolderError(f"{path} has the columns {found}; expected {wanted!r}.")
        for row in reader:
            complete = len(row) == len(expected)
            *before, number, level, name, metric, text = map(text_of, row if complete else expected)
            if not (complete and _ROUND.fullmatch(number) and _NUMBER.fullmatch(text)):
                raise RunFolderError(f"{path}, line {reader.line_num}: cannot read {quoted(row)}.")
            yield tuple(before), Value(int(number), level, name, metric, float(text))
    except csv.Error as error:
        raise RunFolderError(f"{path}, line {reader.line_num}: {error}.") from error


_ROUND = re.compile(r"\d{1,15}", re.ASCII)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf", re.ASCII | re.IGNORECASE)


def read_diagnostics(path: Path) -> tuple[dict[str, Any], ...]:
    """Read the records of all rounds: of training and, if replies were dropped, of tests."""
    if not path.exists():
        return ()
    records: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(whole_lines(path), start=1):
        place = f"{path}, line {number}"
        record = parse_json(line, place)
        held_to(record, Record, place)
        records[record["round"]] = records.get(record["round"], {}) | record
    return tuple(records.values())


def read_text(path: Path, newline: str | None = None) -> str:
    """Read a text file, as `fairflower.paths` does; raise `RunFolderError` if this fails."""
    try:
        return paths.read_text(path, newline=newline)
    except (OSError, UnicodeDecodeError) as error:
        raise RunFolderError(f"Cannot read {path}: {error}.") from error


def whole_lines(path: Path) -> list[str]:
    """Read the lines of a file; an incomplete last line is ignored."""
    # Not splitlines, which also splits at characters such as U+2028, which names may contain.
    return [f"{line}\n" for line in read_text(path).split("\n")[:-1]]


def parse_json(text: str, place: str) -> Any:
    """Return what a text in JSON means; raise `RunFolderError`, naming the place, if it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunFolderError(f"{place} is not valid JSON: {error}.") from error


def held_to(value: Any, hint: Any, place: str) -> None:
    """Check a value as `conform` does; raise `RunFolderError`, naming the place."""
    try:
        conform(value, hint)
    except ValueError as error:
        raise RunFolderError(f"{place}: {error}") from error
