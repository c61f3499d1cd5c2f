"""Settings for differential privacy, and checks that a proof covers a run.

The proof is in docs/differential-privacy.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fairflower.config.methods import ParticipationSpec
from fairflower.config.settings import checked, setting
from fairflower.config.text import argument_to_key
from fairflower.errors import ConfigError
from fairflower.registry.measurements import LARGEST, MEASUREMENTS

if TYPE_CHECKING:
    from fairflower.config.run import RunConfig

#: Strategies that compute weights only from numbers sent by clients, and whose model is the mean
#: with these weights. There is no proof for other strategies.
PROVEN = (
    *("fedavg", "uniform", "fedism", "afl", "qffl", "fairfed", "fedga", "term", "pa3fed"),
    *("superquantile", "propfair", "aaggff", "eagle"),
)

#: Policies that select clients independently of their losses.
POLICIES = ("uniform", "by-examples", "round-robin")


#: Largest standard deviation of the model's noise, far below the largest number in float32.
_LARGEST_NOISE = 1e30


@dataclass(frozen=True)
class PrivacyConfig:
    """Client-level differential privacy."""

    noise_multiplier: float = setting(
        0.0,
        "Standard deviation of the noise added to the model, as a multiple of privacy.clip "
        "times bound.max-client-weight. 0 disables differential privacy.",
        max=1e9,
    )
    clip: float = setting(
        1.0,
        "Cap on the norm of an update under differential privacy; larger updates are scaled down.",
        above=0,
    )
    number_noise_multiplier: float = setting(
        0.0,
        "Standard deviation of the noise added to each number that a client sends for the "
        "strategy, as a multiple of the number's range. 0 is allowed only if the strategy needs "
        "no numbers.",
        max=1e9,
    )
    loss_range: float = setting(
        5.0,
        "Upper bound to which losses and sharpness are clipped under differential privacy; the "
        "lower bound is 0. Accuracies always range from 0 to 1.",
        above=0,
        max=1e9,
    )
    delta: float = setting(
        1e-5,
        "Delta of the privacy guarantee; must be below 1 / number of clients.",
        above=0,
        max=0.1,
    )
    max_epsilon: float = setting(
        0.0, "Privacy budget: the run ends before epsilon exceeds this limit. 0 means no limit."
    )
    noise_seed: int = setting(
        0,
        "Random seed for the noise, for experiments only: anyone who knows the seed can remove "
        "the noise. 0 means random numbers from the operating system.",
    )

    @property
    def on(self) -> bool:
        """Whether the run is differentially private."""
        return self.noise_multiplier > 0

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> PrivacyConfig:
        """Read the privacy settings from run config keys, for example those of a message."""
        values = {}
        for field in dataclasses.fields(cls):
            key = f"privacy.{argument_to_key(field.name)}"
            if key in flat:
                values[field.name] = checked(key, flat[key], field)
        return cls(**values)


def number_range(name: str, loss_range: float) -> tuple[float, float]:
    """Return the range to which a number sent by a client is clipped.

    >>> number_range("received_accuracy", 5.0), number_range("received_loss", 5.0)
    ((0, 1), (0.0, 5.0))
    """
    measured = MEASUREMENTS[name]
    if measured.count or not -LARGEST < measured.low <= measured.high < LARGEST:
        return 0.0, loss_range
    return measured.low, measured.high


def check_privacy(config: RunConfig, measurements: Sequence[str], exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a run uses differential privacy and no proof covers its settings."""
    privacy = config.privacy
    if not privacy.on:
        if privacy.max_epsilon:
            raise ConfigError(
                f"privacy.max-epsilon = {privacy.max_epsilon}: without noise, epsilon is infinite. "
                "Set privacy.noise-multiplier, or max-epsilon = 0."
            )
        return
    _check_strategy(config)
    if measurements and not privacy.number_noise_multiplier:
        raise ConfigError(
            f"privacy.number-noise-multiplier = 0: {config.strategy.name} needs "
            f"{', '.join(measurements)} from every client, and these numbers would be sent "
            "without noise. Set privacy.number-noise-multiplier, for example to 2, or choose "
            "strategy.name = 'uniform'."
        )
    if "received_group_counts" in measurements:
        raise _refused(
            f"strategy.metric = {config.strategy.args['metric']!r} needs counts of people, which "
            "are sent without noise. Set strategy.metric = 'received_accuracy'"
        )
    if not privacy.noise_multiplier * privacy.clip <= _LARGEST_NOISE:
        raise ConfigError(
            f"privacy.noise-multiplier = {privacy.noise_multiplier:g} times privacy.clip = "
            f"{privacy.clip:g} is above {_LARGEST_NOISE:g}, too large for single precision. Lower "
            "one of them."
        )
    _check_what_else_leaves(config, exchanges)


def _check_strategy(config: RunConfig) -> None:
    name = config.strategy.name
    if name not in PROVEN:
        raise _refused(
            f"strategy.name = {name!r}: no proof covers this strategy, because its model is not "
            "known to be a mean whose weights depend only on noisy numbers. Choose one of "
            f"{', '.join(PROVEN)}"
        )
    if name == "qffl" and config.strategy.args.get("rule", "qfedavg") != "weights":
        raise _refused(
            "strategy.name = 'qffl': its step size depends on the norms of individual updates. "
            "Set strategy.rule = 'weights'"
        )


def _check_what_else_leaves(config: RunConfig, exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a setting makes clients send other values without noise."""
    if exchanges:
        remedy = exchanges[0].remedy or "Choose a client without an exchange, for example sgd"
        raise _refused(
            f"client.name = {config.client.name!r} exchanges {exchanges[0].name!r} in addition "
            f"to the model, without noise. {remedy}"
        )
    policy = ParticipationSpec.read(config.participation.policy).name
    if policy not in POLICIES:
        raise _refused(
            f"participation.policy = {policy!r} may depend on the clients' losses. Choose one of "
            f"{', '.join(POLICIES)}"
        )
    flat = config.to_flat()
    allowed: dict[str, Any] = {"evaluate.by": "server"}
    if config.data.validation_examples:
        allowed["stop.patience"] = flat["stop.patience"]
    for key, remedy in (
        ("evaluate.by", "'server'"),
        ("stop.patience", "0, or use data.validation-examples"),
        ("data.validation-fraction", "0, or use data.validation-examples, which no client has"),
        ("bound.clip-update-norm", "0, because privacy.clip replaces it"),
        ("bound.clip-update-median", "0, because the median depends on every client"),
        ("observe.window", "0"),
    ):
        if flat[key] != allowed.get(key, 0):
            raise _refused(
                f"{key} = {flat[key]!r} uses the clients' values without noise. Set it to {remedy}"
            )
    if config.secure_aggregation:
        raise _refused(
            "secure-aggregation = true: noise on masked sums is not implemented. Set it to false"
        )


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"privacy.noise-multiplier above 0: {reason}, or set privacy.noise-multiplier = 0."
    )
