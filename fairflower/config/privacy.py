"""Settings of differential privacy, and the runs for which it is proven.

The derivation is in docs/differential-privacy.md.
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

if TYPE_CHECKING:
    from fairflower.config.run import RunConfig

#: Strategies whose weights are computed from numbers of the clients alone, and whose model is the
#: mean by these weights. For the others nothing is proven.
PROVEN = (
    *("fedavg", "uniform", "fedism", "afl", "qffl", "fairfed", "fedga", "term", "pa3fed"),
    *("superquantile", "propfair", "aaggff", "eagle"),
)

#: Policies that choose clients without looking at their losses.
POLICIES = ("uniform", "by-examples", "round-robin")


@dataclass(frozen=True)
class PrivacyConfig:
    """Differential privacy of the clients."""

    noise_multiplier: float = setting(
        0.0,
        "Noise of the model: standard deviation as a multiple of privacy.clip times "
        "bound.max-client-weight. 0 disables differential privacy.",
    )
    clip: float = setting(
        1.0,
        "Cap on an update's norm under differential privacy; larger updates are scaled down.",
        above=0,
    )
    number_noise_multiplier: float = setting(
        0.0,
        "Noise added to each number that a client sends for the strategy: standard deviation as a "
        "multiple of the number's range. 0 is allowed only if the strategy needs no numbers.",
    )
    loss_range: float = setting(
        5.0,
        "Upper end of the range to which losses and sharpness are clipped under differential "
        "privacy; the lower end is 0. Accuracies have the range 0 to 1.",
        above=0,
    )
    delta: float = setting(
        1e-5, "Delta of the guarantee, below 1 / number of clients.", above=0, max=0.1
    )
    max_epsilon: float = setting(
        0.0, "The run ends before its epsilon would pass this. 0 means no limit."
    )
    noise_seed: int = setting(
        0,
        "Seed of the noise, for experiments: who knows it can remove the noise. 0 takes the "
        "operating system's random numbers.",
    )

    @property
    def on(self) -> bool:
        """Whether the run is differentially private."""
        return self.noise_multiplier > 0

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> PrivacyConfig:
        """Return the settings among run config keys, such as a message's."""
        values = {}
        for field in dataclasses.fields(cls):
            key = f"privacy.{argument_to_key(field.name)}"
            if key in flat:
                values[field.name] = checked(key, flat[key], field)
        return cls(**values)


def number_range(name: str, loss_range: float) -> tuple[float, float]:
    """Return the range to which a client's number is clipped.

    >>> number_range("received_accuracy", 5.0), number_range("received_loss", 5.0)
    ((0.0, 1.0), (0.0, 5.0))
    """
    return (0.0, 1.0) if name.endswith("accuracy") else (0.0, loss_range)


def check_privacy(config: RunConfig, measurements: Sequence[str], exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` for a run with differential privacy for which no proof is known."""
    privacy = config.privacy
    if not privacy.on:
        if privacy.max_epsilon:
            raise ConfigError(
                f"privacy.max-epsilon = {privacy.max_epsilon}: without noise epsilon is infinite. "
                "Set privacy.noise-multiplier, or max-epsilon = 0."
            )
        return
    _check_strategy(config)
    if measurements and not privacy.number_noise_multiplier:
        raise ConfigError(
            f"privacy.number-noise-multiplier = 0: {config.strategy.name} needs "
            f"{', '.join(measurements)} of every client, which would leave it without noise. Set "
            "it, for example to 2, or choose strategy.name = 'uniform'."
        )
    _check_what_else_leaves(config, exchanges)


def _check_strategy(config: RunConfig) -> None:
    name = config.strategy.name
    if name not in PROVEN:
        raise _refused(
            f"strategy.name = {name!r}: its model is not a mean whose weights come from a few "
            f"noised numbers, or this is not known. Choose one of {', '.join(PROVEN)}"
        )
    if name == "qffl" and config.strategy.args.get("rule", "qfedavg") != "weights":
        raise _refused(
            "strategy.name = 'qffl': its step depends on the norms of individual updates. Set "
            "strategy.rule = 'weights'"
        )


def _check_what_else_leaves(config: RunConfig, exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` for a setting by which something leaves a client without noise."""
    if exchanges:
        raise _refused(
            f"client.name = {config.client.name!r} sends or collects {exchanges[0].name!r} beside "
            "the model, without noise. Choose a client without an exchange, for example sgd"
        )
    policy = ParticipationSpec.read(config.participation.policy).name
    if policy not in POLICIES:
        raise _refused(
            f"participation.policy = {policy!r} may look at the clients' losses. Choose "
            f"{', '.join(POLICIES)}"
        )
    stops_by_clients = config.stop.patience and not config.data.validation_examples
    for key, value, used, remedy in (
        ("evaluate.by", config.evaluate.by, config.evaluate.by != "server", "'server'"),
        ("stop.patience", config.stop.patience, stops_by_clients, "0, or validation-examples"),
        (
            "data.validation-fraction",
            config.data.validation_fraction,
            config.data.validation_fraction,
            "0, or validation-examples, which no client holds",
        ),
        (
            "bound.clip-update-norm",
            config.bound.clip_update_norm,
            config.bound.clip_update_norm,
            "0: privacy.clip takes its place",
        ),
        (
            "bound.clip-update-median",
            config.bound.clip_update_median,
            config.bound.clip_update_median,
            "0: the median depends on every client",
        ),
        ("observe.window", config.observe.window, config.observe.window, "0"),
    ):
        if used:
            raise _refused(
                f"{key} = {value!r} uses what clients have without noise. Set it to {remedy}"
            )
    if config.secure_aggregation:
        raise _refused(
            "secure-aggregation = true: noise on masked sums is not implemented. Set it to false"
        )


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"privacy.noise-multiplier above 0: {reason}, or set privacy.noise-multiplier = 0."
    )
