"""The audit log of a site: a JSON line for every message, with what left the site."""

import json
import logging
import math
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message

from fairflower.arrays import arrays_of
from fairflower.config import RunConfig
from fairflower.config.methods import DEFAULT
from fairflower.config.run import execution_keys, is_setting
from fairflower.errors import quoted
from fairflower.flower_compat import RECORD_KEY_CONFIGS, Key

#: Bytes of a file of the log, and how many older files (``audit.jsonl.1``, ...) are kept.
MOST_BYTES, OLDER_FILES = 10_000_000, 20


class AuditLog(RotatingFileHandler):
    """A file to which a line is added for each message, before its reply leaves the site.

    Only the site's user can read the file, and no failure to write is hidden.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, "a", MOST_BYTES, OLDER_FILES, encoding="utf-8")

    def write(self, message: Message, reply: Message | str, refused: bool) -> None:
        """Add a line; raise ``OSError`` if it cannot be written."""
        self.handle(logging.makeLogRecord({"msg": json.dumps(entry(message, reply, refused))}))

    def _open(self) -> Any:
        stream = super()._open()
        Path(self.baseFilename).chmod(0o600)
        return stream

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802
        """Remove a part of a line from the file, and raise the exception."""
        if self.stream:  # else its buffer would be written before a later line
            with suppress(OSError):
                self.stream.close()
            self.stream = None
            with suppress(OSError), open(self.baseFilename, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        raise  # logging calls this function where it handles the exception


def entry(message: Message, reply: Message | str, refused: bool) -> dict[str, Any]:
    """Return what the audit log says of a message and its reply, or of the reason for none.

    ``settings`` are those that differ from their defaults and affect the result: no path and no
    name of a run. ``sent`` has the names of the numbers that left, but not their values, and of
    each array its shape and Euclidean norm, which is null if it is not finite.
    """
    records = message.content.config_records
    config: Any = records.get("config", ConfigRecord())
    stage = _short(records.get(RECORD_KEY_CONFIGS, ConfigRecord()).get(Key.STAGE))
    usual = RunConfig().concise()  # other forms import every method, and PyTorch
    changed = {
        _short(key): _short(value)
        for key, value in config.items()
        if key not in execution_keys() and value != usual.get(key, DEFAULT)
    }
    settings = {key: value for key, value in changed.items() if is_setting(key)}
    beside = {k: v for k, v in changed.items() if k not in {*settings, "server-round", "measure"}}
    hidden = max(0, len(settings) - _MOST) + max(0, len(beside) - _MOST)
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": str(message.metadata.run_id),
        "round": _short(config.get("server-round")),
        "kind": message.metadata.message_type + (f" ({stage})" if stage else ""),
        "settings": dict([*settings.items()][:_MOST]),
        "beside": dict([*beside.items()][:_MOST]),
        "measure": _short(config.get("measure", "")),
        "outcome": "refused" if refused else "failed" if isinstance(reply, str) else "answered",
        "reason": reply[:2000] if isinstance(reply, str) else "",
        "sent": {} if isinstance(reply, str) else _sent(reply),
    } | ({"left-out": hidden} if hidden else {})


#: Most settings in a line: a server may send any number of keys. ``left-out`` counts the others.
_MOST = 100


def _short(value: Any) -> Any:
    """Return a server's value as JSON can have it, shortened if it is long."""
    exact = value is None or isinstance(value, bool | int | str)
    finite = isinstance(value, float) and math.isfinite(value)
    return value if (exact or finite) and len(repr(value)) <= 120 else quoted(value)


def _sent(reply: Message) -> dict[str, Any]:
    content = reply.content
    arrays = {
        name: {key: _described(array) for key, array in arrays_of(record).items()}
        for name, record in content.array_records.items()
    }
    numbers = {name: sorted(record) for name, record in content.metric_records.items()}
    numbers |= {name: sorted(record) for name, record in content.config_records.items()}
    return {"num-arrays": sum(map(len, arrays.values())), "arrays": arrays, "values": numbers}


def _described(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    norm = float(np.linalg.norm(array.astype(np.float64)))
    return {"shape": list(array.shape), "norm": norm if math.isfinite(norm) else None}
