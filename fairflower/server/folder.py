"""The run folder: config, status, metrics, diagnostics and model of a run."""

from __future__ import annotations

import csv
import errno
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray
from safetensors.numpy import save

from fairflower.config import RunConfig
from fairflower.config.text import toml_tables
from fairflower.errors import ConfigError, logger
from fairflower.files import Arrays, cell_of, replacing, sync
from fairflower.machine import SOLVERS, machine, versions
from fairflower.paths import check_regular, file_name, home
from fairflower.server import contents
from fairflower.server.checkpoint import Checkpoint, earlier_facts
from fairflower.server.history import History
from fairflower.server.privacy import check_counted

#: File of Flower's and fairflower's log messages, and of the error that ended the run.
LOG = "log.txt"

LOCK = ".lock"  # file in a folder that is locked while a process uses the folder

#: Seconds to wait for a lock, because another process may hold it briefly to check it.
_LOCK_TIMEOUT = 0.2

#: System errors of file systems that do not support locks.
_WITHOUT_LOCKS = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK}


def runs_home(config: RunConfig) -> Path:
    """Return the absolute path of the folder that contains the run folders of ``config``."""
    return Path(config.output_dir).expanduser().absolute() if config.output_dir else home() / "runs"


class FolderInUse(ConfigError):
    """Another process has locked a folder; the message has its path."""


def check_place(folder: Path) -> None:
    """Create a folder if it is missing; raise ``OSError`` if it is not writable."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


#: Maximum number of values of a diagnostic that is stored. The cosines between 100 clients are so
#: many; those between 1,000 clients would be 20 MB of text per round.
MAX_DIAGNOSTIC = 10_000


#: Entries of ``run.json`` while a run goes on.
_RUNNING = {"status": "running", "error": None, "finished": None, "seconds": None}


class RunFolder:
    """Writes a run's folder after every round, so that a killed run keeps its rounds.

    The files are ``config.toml`` (all settings, for ``--config``), ``run.json`` (status, versions,
    machine, clients), ``history.csv`` (columns round, level, name, metric and value),
    ``diagnostics.jsonl`` (an object for each round, and for each test with dropped replies),
    ``model.safetensors`` (the final model), ``best.safetensors`` (the model of the best round, with
    ``checkpoint.best``), `LOG`, and ``checkpoints`` (`fairflower.server.checkpoint`). A process
    locks the folder from `create` or `reopen` until `finish`.
    """

    def __init__(
        self, path: Path, lock: FileLock, facts: Mapping[str, Any], seconds: float = 0.0
    ) -> None:
        self.path = path
        self._lock = lock
        self._facts = dict(facts)
        self.metrics = History(facts.get("domains", ()), contents.scores_of(facts)[0])
        #: The best round so far by ``checkpoint.best``, 0 if there is none, and its model.
        self.best_round, self.best = 0, Arrays()
        self._begin = time.monotonic() - seconds

    @classmethod
    def create(cls, config: RunConfig, facts: Mapping[str, Any]) -> RunFolder:
        """Create the folder of a new run, at the path given by its config.

        ``facts`` are additional entries for ``run.json`` (domains, clients, number of parameters).
        """
        method = file_name(facts.get("label", config.label)).replace("=", "")
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{method}-{file_name(config.data.name)}"
        path, lock = _new_folder(runs_home(config), config.run_name or f"{name}-seed{config.seed}")
        program = Path(sys.argv[0]).name
        begun = {
            "name": path.name,
            "path": str(path),
            "label": config.label,
            "started": _now(),
            **_RUNNING,
            "rounds": 0,
            # Without Flower's secret token.
            "command": program if "--token" in sys.argv else shlex.join([program, *sys.argv[1:]]),
            "config": config.concise(),
            **_here(config),
            **facts,
        }
        folder = cls(path, lock, begun)
        (path / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        folder._write_facts()
        folder._rewind({})
        return folder

    @classmethod
    def reopen(
        cls,
        path: Path,
        config: RunConfig,
        facts: Mapping[str, Any],
        lock: FileLock,
        saved: Checkpoint | None = None,
    ) -> RunFolder:
        """Open an existing run folder, and restore it to its state at a checkpoint.

        ``lock`` is held since before the checkpoint was read; without one, the run starts from the
        beginning. ``config`` replaces that of the folder. Raises ``ConfigError`` if ``path`` is not
        a run folder, or if an entry of its ``run.json`` differs from ``facts``.
        """
        server_round, sizes = (saved.server_round, saved.sizes) if saved else (0, {})
        for file in filter(Path.exists, (path / name for name in (*contents.GROWING, LOG))):
            check_regular(file)  # opening a named pipe would wait for its writer
        earlier = earlier_facts(path)
        _compare(path, earlier, facts)
        if config.privacy.on:
            check_counted(config, path, earlier)
        if contents.original_of(path, earlier):  # from now on a run with state of its own
            earlier.pop("run_id", None)
        before, parts = earlier.get("parts", {}), facts.get("parts", {})
        changed = [k for k, digest in parts.items() if before.get(k, digest) != digest]
        for key in changed:  # of files of the user: corrected code may go on
            text = "The file of %s has changed since %s began; its earlier rounds used the other."
            logger.warning(text, key, path)
        kept = _facts_after(server_round, earlier) | ({"parts": parts} if changed else {})
        folder = cls(path, lock, {**facts, **kept}, saved.seconds if saved else 0.0)
        folder._rewind(sizes)
        folder.metrics.read(path / "history.csv")
        _replace(path / "config.toml", config.to_toml().encode())
        folder._facts |= {**_RUNNING, "rounds": server_round, "path": str(path)}
        folder._facts |= {"config": config.concise()} | (
            {} if sizes else {"label": facts.get("label", config.label)}
        )
        session = {"after_round": server_round, "at": _now(), **_here(config)}
        session |= {"changed": changed} if changed else {}
        folder._facts.setdefault("resumed", []).append(session)
        folder._write_facts()
        return folder

    @property
    def run_id(self) -> str:
        """Unique id of the run; clients store their state under this id."""
        return str(self._facts["run_id"])

    @property
    def status(self) -> str:
        """Status of the run: running, or what `finish` wrote."""
        return str(self._facts["status"])

    @property
    def seconds(self) -> float:
        """Wall time of the run so far in seconds, over all sessions."""
        return round(time.monotonic() - self._begin, 3)

    def sizes(self) -> dict[str, int]:
        """Flush the growing files to disk, and return their sizes in bytes."""
        paths = [self.path / name for name in contents.GROWING if (self.path / name).exists()]
        for path in paths:
            sync(path)
        return {path.name: path.stat().st_size for path in paths}

    def kept_facts(self) -> dict[str, Any]:
        """Return the entries of ``run.json`` that a resumed run does not find out again."""
        again = ["clients", "config", *(() if "sites" in self._facts else ("nodes",))]
        return {name: value for name, value in self._facts.items() if name not in again}

    def fact(self, name: str) -> Any:
        """Return an entry of ``run.json``, or None if it is missing."""
        return self._facts.get(name)

    def note(self, name: str, value: Any) -> None:
        """Set an entry of ``run.json``; write the file only if the value has changed."""
        if self._facts.get(name) != value:
            self._facts[name] = value
            self._write_facts()

    def admit(self, facts: Mapping[str, Any], server_round: int) -> None:
        """Write the entries of ``run.json`` about clients and data after a site has joined."""
        sizes, others = ("test_sizes", "validation_sizes"), ("labels", "nodes", "sites")
        changed = ("clients", "domains", "sources", *sizes, *others)
        self._facts |= {name: facts[name] for name in changed if name in facts}
        joined = self._facts.get("joined", {})
        self._facts["joined"] = {**joined, str(len(facts["clients"]) - 1): server_round}
        self.metrics.domains = tuple(facts["domains"])
        self.__dict__.pop("_clients", None)
        self._write_facts()

    def append_metrics(
        self, server_round: int, level: str, name: str, values: Mapping[str, float]
    ) -> None:
        """Append metrics of a domain, of a client or, with the name "", of the whole run."""
        self.metrics.add(server_round, level, name, values)
        with self._open("history.csv") as file:
            writer = csv.writer(file)
            for metric, value in values.items():
                cells = server_round, level, name, metric, repr(float(value))
                writer.writerow(map(cell_of, cells))

    def append_diagnostics(
        self,
        server_round: int,
        client_ids: Iterable[int],
        values: Mapping[str, NDArray[np.float64] | float],
        dropped: Mapping[int, str],
    ) -> None:
        """Append the diagnostics of a round, except those of more than `MAX_DIAGNOSTIC` numbers.

        Raises ``ValueError`` if a diagnostic has the name of one of the record's own fields.
        """
        own = contents.Record.__annotations__.keys()
        if taken := sorted(own & values.keys()):
            raise ValueError(
                f"the diagnostic {taken[0]!r} has the name of a field of every record "
                f"({', '.join(sorted(own))}). Rename it"
            )
        line: dict[str, Any] = {"round": server_round, "client_ids": list(client_ids)}
        arrays = {name: np.asarray(value) for name, value in values.items()}
        line |= {name: a.tolist() for name, a in arrays.items() if a.size <= MAX_DIAGNOSTIC}
        if dropped:
            line["dropped"] = dict(dropped)
        self._add_diagnostics(line)
        self._facts["rounds"] = server_round
        self._write_facts()

    def append_dropped_in_test(self, server_round: int, dropped: Mapping[int, str]) -> None:
        """Append the clients whose test replies were dropped, with the reasons."""
        if dropped:
            self._add_diagnostics({"round": server_round, "dropped_in_test": dict(dropped)})

    def write_model(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Replace the file of the global model atomically."""
        _replace(self.path / contents.MODEL, save(_dense(arrays)))

    def write_best(
        self, server_round: int, arrays: Mapping[str, NDArray[Any]], config: RunConfig
    ) -> None:
        """Replace the file of the best round's model atomically, and note the round.

        Of clients that train alone, which have no common model, only the round is noted. A run may
        be killed in between, so the file's metadata have the round, too.
        """
        alone = config.reference == "alone"
        self.best_round, self.best = server_round, {} if alone else dict(arrays)
        if not alone:
            _replace(self.path / contents.BEST, save(_dense(arrays), {"round": str(server_round)}))
        self.note("best", {"round": server_round, "by": config.best})

    def write_models(self, saved: Checkpoint | None, config: RunConfig) -> None:
        """Replace the models by those of a checkpoint; they may be of a later round."""
        (self.path / contents.BEST).unlink(missing_ok=True)
        if saved:
            self.write_model(saved.model)
        if saved and saved.best_round:
            self.write_best(saved.best_round, saved.best or saved.model, config)

    def finish(self, status: str, error: str | None = None) -> None:
        """Write the final status (completed, stopped or failed), and unlock the folder."""
        ended = {"finished": _now(), "seconds": self.seconds}
        self._facts |= {"status": status, "error": error, **ended}
        try:
            written = [self.path / name for name in contents.DIGESTED]
            self._facts["files"] = {f.name: contents.file_digest(f) for f in written if f.exists()}
            self._write_facts()
        finally:
            self._lock.release()

    def _rewind(self, sizes: Mapping[str, int]) -> None:
        for name in contents.GROWING:
            if (path := self.path / name).exists():
                os.truncate(path, sizes.get(name, 0))
        if not sizes:
            with self._open("history.csv") as file:
                csv.writer(file).writerow(contents.HISTORY_COLUMNS)

    def _add_diagnostics(self, line: Mapping[str, Any]) -> None:
        with self._open("diagnostics.jsonl") as file:
            file.write(json.dumps(line) + "\n")

    def _open(self, name: str) -> Any:
        return (self.path / name).open("a", newline="", encoding="utf-8")

    @cached_property
    def _clients(self) -> str:
        """The text of ``clients`` in ``run.json``, which is long and does not change."""
        lines = ",\n    ".join(map(json.dumps, self._facts.get("clients", ())))
        return f"[\n    {lines}\n  ]"

    def _write_facts(self) -> None:
        facts = {name: value if name != "clients" else [] for name, value in self._facts.items()}
        text = json.dumps(facts, indent=2) + "\n"
        text = text.replace('\n  "clients": []', f'\n  "clients": {self._clients}')
        _replace(self.path / "run.json", text.encode())


_SITES = "data.dir, or exactly the same sites"
_MODEL = ("model", "model.name, its class or client.name")

#: Entry of run.json -> what a difference means on resuming, and the setting it comes from.
_SOURCES = {
    **dict.fromkeys(("num_parameters", "model_bytes", "local_arrays", "local_part"), _MODEL),
    "metrics": ("metrics", "evaluate.metrics"),
    **dict.fromkeys(("digest", "images"), ("examples", _SITES)),
    "frozen": ("frozen weights", "model.weights or model.name"),
    "availability": ("availabilities", "participation.availability"),
}


def _compare(path: Path, earlier: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if data or model have changed since a run began."""
    for name, value in json.loads(json.dumps(facts)).items():
        if name not in ("run_id", "sources", "parts") and earlier.get(name, value) != value:
            what, where = _SOURCES.get(name, (name, _SITES))
            raise ConfigError(
                f"The run in {path} cannot be resumed, because its {what} changed since it began. "
                f"Restore {where}, or start a new run."
            )


def _facts_after(server_round: int, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``run.json`` without what was noted of later rounds and of the end."""
    by_round = {
        name: {r: why for r, why in facts.get(name, {}).items() if 0 < server_round >= int(r)}
        for name in ("halted_rounds", "untracked")
    }
    later = ("ended_early", "diverged", "best", "files", *by_round)
    kept = {name: value for name, value in facts.items() if name not in later}
    return kept | {name: reasons for name, reasons in by_round.items() if reasons}


def _here(config: RunConfig) -> dict[str, Any]:
    """Return this session's versions and machine, on which exact results depend."""
    solvers = SOLVERS if config.strategy.factory.extra else ()
    return {"versions": versions(*solvers), "machine": machine(config.train.device)}


def lock_folder(path: Path, name: str = LOCK) -> FileLock:
    """Lock a folder with a file in it, until this process ends or releases the lock.

    Returns the lock. Raises ``FolderInUse`` if another process has locked the folder, and
    ``ConfigError`` if the file cannot be written.
    """
    lock = FileLock(path / name, thread_local=False)
    try:
        os.scandir(path).close()  # fails without a folder, which a FileLock would create
        lock.acquire(timeout=_LOCK_TIMEOUT)
    except Timeout:
        raise FolderInUse(
            f"Another process is using {path}. Wait until it ends, or choose another folder."
        ) from None
    except NotImplementedError:
        pass  # filelock found a file system without locks
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise ConfigError(f"{path} cannot be opened: {error.strerror}.") from error
    return lock


def rewrite_config(path: Path, changed: Mapping[str, Any]) -> None:
    """Replace settings in the ``config.toml`` of a run folder that no process uses."""
    _replace(path / "config.toml", toml_tables(contents.read_config(path) | dict(changed)).encode())


def is_locked(path: Path) -> bool:
    """Return whether a process on this machine has locked a folder; True without lock support."""
    if not (path / LOCK).exists():
        return False
    try:
        with FileLock(path / LOCK, timeout=_LOCK_TIMEOUT, thread_local=False):
            return False
    except (NotImplementedError, OSError):  # a Timeout is an OSError
        return True


def _new_folder(parent: Path, name: str) -> tuple[Path, FileLock]:
    """Create and lock a new folder; a number is added to the name if the folder is in use.

    A folder that has nothing but an open lock is used: its run was killed before it wrote anything.
    """
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        path = parent / f"{name}{suffix}"
        with suppress(FileExistsError, FolderInUse):
            path.mkdir(parents=True, exist_ok=True)
            if {LOCK}.issuperset(os.listdir(path)):
                return path, lock_folder(path)
    raise FileExistsError(
        f"{parent / name} and 998 numbered folders with this name already exist. Choose another "
        "name."
    )


def _dense(arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {name: np.asarray(array, order="C") for name, array in arrays.items()}


def _replace(path: Path, data: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
