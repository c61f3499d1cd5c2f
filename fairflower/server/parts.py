"""Digests of the user's own files that determine a run's result: modules of parts, and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from fairflower.config import RunConfig
from fairflower.config.methods import AdapterSpec, DataSpec, ModelSpec, ParticipationSpec
from fairflower.errors import ConfigError
from fairflower.registry import METRICS
from fairflower.registry.user_metrics import metric_names


def part_digests(config: RunConfig) -> dict[str, str]:
    """Return the digests of a user's own files, by the run config key that names them.

    Built-in parts, those of installed packages, and files that are missing have no digest.
    """
    specs = (
        config.strategy,
        config.client,
        DataSpec.read(config.data.name),
        ModelSpec.read(config.model.name),
        ParticipationSpec.read(config.participation.policy),
        AdapterSpec.read(config.model.adapter),
    )
    files = {spec.KEY: [spec.REGISTRY.own_file(spec.name)] for spec in specs}
    places = sorted(metric_names(config.evaluate.metrics).values())
    files["evaluate.metrics"] = [METRICS.own_file(place) for place in places]
    if config.model.file:
        files["model.weights"] = [Path(config.model.file).expanduser()]
    digests = {}
    for key, paths in files.items():
        told = [_digest(path) for path in paths if path and path.is_file()]
        if told:
            digests[key] = hashlib.sha256(" ".join(told).encode()).hexdigest()[:16]
    return digests


def check_same_parts(run: Path, earlier: Mapping[str, str], config: RunConfig) -> None:
    """Raise ``ConfigError`` if a file of a part, or of weights, has changed since a run.

    ``earlier`` are the digests in the run's ``run.json``.
    """
    if not earlier:
        return
    now = part_digests(config)
    for key, digest in earlier.items():
        if now.get(key, digest) != digest:
            raise ConfigError(
                f"The file of {config.to_flat()[key]} ({key}) has changed since {run} was "
                "created. Restore the file, or choose another folder."
            )


def _digest(path: Path) -> str:
    stat = path.stat()
    return _digest_of_version(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=64)
def _digest_of_version(path: Path, modified: int, size: int) -> str:
    """Return the digest of a file; cached, because weights are large and runs are many."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
