"""The client's part of differential privacy: a clipped update, and clipped numbers with noise.

The derivation is in docs/differential-privacy.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fairflower.config.privacy import PrivacyConfig, number_range
from fairflower.files import Arrays
from fairflower.numerics.noise import gaussian, noise_source
from fairflower.training.measurements import requested
from fairflower.training.trainer import round_of


def privacy_of(config: Mapping[str, Any]) -> PrivacyConfig | None:
    """Return the privacy settings in a server's message; None without differential privacy."""
    settings = PrivacyConfig.from_flat(config)
    return settings if settings.on else None


def clipped_update(sent: Arrays, received: Arrays, clip: float) -> Arrays:
    """Return the model with its update clipped to norm ``clip``.

    If the update is not finite, the received model is returned. Integer arrays are returned as
    received.
    """
    names = [name for name, array in received.items() if array.dtype.kind == "f"]
    updates = {name: sent[name].astype(np.float64) - received[name] for name in names}
    norm = math.sqrt(sum(float(np.square(update).sum()) for update in updates.values()))
    if not math.isfinite(norm):
        return dict(received)
    factor = min(1.0, clip / norm) if norm else 1.0
    return dict(received) | {
        name: (received[name] + factor * update).astype(received[name].dtype)
        for name, update in updates.items()
    }


def noised_numbers(
    numbers: Mapping[str, float], config: Mapping[str, Any], privacy: PrivacyConfig, client_id: int
) -> dict[str, float]:
    """Return the numbers that the server requests, clipped to their ranges, with noise.

    A number that is missing or not finite counts as the upper end of its range. Noised numbers are
    clipped again, so that the server accepts them.
    """
    noised = {}
    for name in requested(config):
        low, high = number_range(name, privacy.loss_range)
        value = float(numbers.get(name, math.nan))
        value = min(max(value, low), high) if math.isfinite(value) else high
        purpose = (int(config.get("seed", 0)), client_id, round_of(config), name)
        draw = float(gaussian(1, noise_source(privacy.noise_seed, *purpose))[0])
        value += privacy.number_noise_multiplier * (high - low) * draw
        noised[name] = min(max(value, low), high)
    return noised


def protected(
    metrics: Mapping[str, float], config: Mapping[str, Any], privacy: PrivacyConfig, client_id: int
) -> dict[str, float]:
    """Return the metrics that may leave the client: its id and noised numbers.

    The round of its state would reveal in which rounds its training diverged.
    """
    return {"client-id": client_id, **noised_numbers(metrics, config, privacy, client_id)}
