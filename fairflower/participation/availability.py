"""Availability: which clients can be selected in a round."""

import csv
import hashlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import numpy as np

from fairflower.config import RunConfig
from fairflower.config.text import parse_assignments
from fairflower.errors import ConfigError, logger, quoted
from fairflower.paths import read_text
from fairflower.seeds import derive_seed

#: Round, ids of all clients -> ids of the available clients.
Availability = Callable[[int, Collection[int]], list[int]]


def read_availability(text: str, seed: int) -> Availability:
    """Return the availability that the setting ``participation.availability`` describes.

    The setting is ``"always"``; or ``"markov:leave=0.1:back=0.5"``, a Markov chain for each client,
    drawn from ``seed``: before the next round, an available client leaves with probability
    ``leave``, and an absent client comes back with probability ``back``; or the path of a CSV file
    with the columns ``round`` and ``client``, which has a row for each client that is available in
    a round. After the last round in the file, its rounds are repeated. Raises ``ConfigError`` if
    the text is none of these, or the file cannot be read.
    """
    if path := _trace_file(text):
        return _trace(path)
    if text == "always":
        return lambda server_round, clients: sorted(clients)
    return _markov(text, seed)


def check_availabilities(configs: Iterable[RunConfig]) -> None:
    """Raise ``ConfigError`` if the availability of a run is invalid, or its file cannot be read."""
    for text in {config.participation.availability for config in configs}:
        read_availability(text, 0)  # valid or not for all seeds alike


def absolute_trace(text: str) -> str:
    """Return the setting ``participation.availability`` with an absolute path if it names a file.

    >>> absolute_trace("always"), absolute_trace("/data/trace.csv")
    ('always', '/data/trace.csv')
    """
    path = _trace_file(text)
    return str(path.absolute()) if path else text


def trace_digest(text: str) -> str:
    """Return the digest of the file that ``participation.availability`` names; empty if none."""
    path = _trace_file(text)
    return _trace(path).digest if path and path.is_file() else ""


def check_same_trace(run: Path, earlier: str | None, text: str) -> None:
    """Raise ``ConfigError`` if a run used a different file for ``participation.availability``.

    ``earlier`` is the digest in the run's ``run.json``, or None if there is none.
    """
    if earlier and (now := trace_digest(text)) and now != earlier:
        raise ConfigError(
            f"{text} (participation.availability) has changed since {run} was created. Restore the "
            "file, or choose another folder."
        )


def _trace_file(text: str) -> Path | None:
    """Return the file that ``participation.availability`` names, or None if it names none."""
    named = text == "always" or text.partition(":")[0] == "markov"
    return None if named else Path(text).expanduser()


def _markov(text: str, seed: int) -> Availability:
    expected = (
        f"participation.availability = {quoted(text)}: expected markov:leave=P:back=Q with "
        "probabilities from 0 to 1, and back above 0."
    )
    try:
        args = parse_assignments(text.split(":")[1:])
    except ConfigError as error:
        raise ConfigError(f"{expected} {error}") from error
    values = {name: args.pop(name, None) for name in ("leave", "back")}
    fits = all(
        isinstance(v, int | float) and not isinstance(v, bool) and 0 <= v <= 1
        for v in values.values()
    )
    if args or not fits or not values["back"]:
        raise ConfigError(expected)
    leave, back = (float(values[name]) for name in ("leave", "back"))
    chains: dict[int, list[bool]] = {}

    def available(client: int, server_round: int) -> bool:
        # A draw per client and round: results do not depend on the order of calls for clients.
        chain = chains.setdefault(client, [])
        while len(chain) <= server_round:
            drawn = derive_seed(seed, client, len(chain), "availability")
            draw = np.random.default_rng(drawn).random()
            if not chain:
                chain.append(bool(draw < back / (back + leave)))
            else:
                chain.append(bool(draw >= leave if chain[-1] else draw < back))
        return chain[server_round]

    return lambda server_round, clients: [k for k in sorted(clients) if available(k, server_round)]


@dataclass(frozen=True)
class Trace:
    """Availability read from a file; after the file's last round, its rounds are repeated."""

    clients: dict[int, set[int]]

    def __call__(self, server_round: int, clients: Collection[int]) -> list[int]:
        """Return those of the given clients that are available in a round."""
        there = self.clients.get((server_round - 1) % max(self.clients) + 1, set())
        return sorted(there.intersection(clients))

    @property
    def digest(self) -> str:
        """Digest of the file's contents; a resumed run must have the same digest."""
        told = sorted((number, sorted(there)) for number, there in self.clients.items())
        return hashlib.sha256(repr(told).encode()).hexdigest()[:16]

    def warn_about_unknown_clients(self, num_clients: int) -> None:
        """Warn if the file names clients that the federation does not have."""
        named: set[int] = set().union(*self.clients.values())
        if unknown_clients := sorted(named - {*range(num_clients)}):
            logger.warning(
                "participation.availability names client %d, but the federation has only "
                "clients 0 to %d. Rows for other clients have no effect.",
                unknown_clients[0],
                num_clients - 1,
            )


def _trace(path: Path) -> Trace:
    where = f"participation.availability = {quoted(str(path))}"
    expected = (
        "Expected always, markov:leave=P:back=Q, or a CSV file with whole numbers in the columns "
        "round and client."
    )
    try:
        rows = csv.DictReader(StringIO(read_text(path, "utf-8-sig")), strict=True)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text in UTF-8"
        raise ConfigError(f"{where}: {reason}. {expected}") from error
    present: dict[int, set[int]] = {}
    try:
        for row in rows:
            present.setdefault(int(row["round"]), set()).add(int(row["client"]))
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ConfigError(f"{where}, line {rows.line_num}: {expected}") from error
    if not present or min(present) < 1 or min(map(min, present.values())) < 0:
        raise ConfigError(f"{where}: expected at least one row, rounds from 1 and clients from 0.")
    return Trace(present)
