"""Settings for differential privacy, and checks that a proof covers a run.

The proof is in docs/differential-privacy.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from fairflower.arguments import Range
from fairflower.config.methods import ParticipationSpec
from fairflower.config.settings import Amount, Count, checked, setting_specs
from fairflower.config.text import key_to_argument
from fairflower.errors import ConfigError
from fairflower.registry import STRATEGIES
from fairflower.registry.measurements import LARGEST, MEASUREMENTS

#: Policies that select clients independently of their losses.
POLICIES = ("uniform", "by-examples", "round-robin")

#: Loss range of tasks, unless they have another.
LOSS_RANGE = 5.0

#: Largest standard deviation of the model's noise, far below the largest number in float32.
_LARGEST_NOISE = 1e30


@dataclass(frozen=True)
class PrivacyConfig:
    """Client-level differential privacy."""

    noise_multiplier: Annotated[
        float,
        Range(0, 1e9),
        "Standard deviation of the model's noise, as a multiple of privacy.clip times "
        "bound.max-client-weight. 0 disables differential privacy.",
    ] = 0.0
    clip: Annotated[
        float,
        Range(above=0),
        "Cap on the norm of an update under differential privacy.",
    ] = 1.0
    number_noise_multiplier: Annotated[
        float,
        Range(0, 1e9),
        "Standard deviation of the noise of each number that a client sends, as a multiple of "
        "the number's range. 0 is allowed only without numbers.",
    ] = 0.0
    loss_range: Annotated[
        float,
        Range(0, 1e9),
        "Largest loss and sharpness under differential privacy; larger values are clipped. 0 "
        "means 12 for next-token, twice the loss of guessing for survival, and 5 for other "
        "tasks.",
    ] = 0.0
    delta: Annotated[
        float,
        Range(above=0, high=0.1),
        "Delta of the privacy guarantee; must be below 1 / number of clients.",
    ] = 1e-5
    max_epsilon: Annotated[
        Amount, "Privacy budget: the run ends before epsilon exceeds this limit. 0 means no limit."
    ] = 0.0
    noise_seed: Annotated[
        Count,
        "Random seed for the noise, for experiments only: who knows the seed can remove the "
        "noise. 0 means random numbers from the operating system.",
    ] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_range", self.loss_range or LOSS_RANGE)

    @property
    def on(self) -> bool:
        """Whether the run is differentially private."""
        return self.noise_multiplier > 0

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> PrivacyConfig:
        """Read the privacy settings from run config keys, for example those of a message."""
        values = {k: checked(k, flat[k], spec) for k, spec in _SPECS.items() if k in flat}
        return cls(**{key_to_argument(key.partition(".")[2]): v for key, v in values.items()})


#: Settings by run config key.
_SPECS = {f"privacy.{key}": spec for key, spec in setting_specs(PrivacyConfig).items()}


def number_range(name: str, loss_range: float) -> tuple[float, float]:
    """Return the range to which a number sent by a client is clipped.

    >>> number_range("received_accuracy", 5.0), number_range("received_loss", 5.0)
    ((0, 1), (0.0, 5.0))
    """
    measured = MEASUREMENTS[name]
    if measured.count or not -LARGEST < measured.low <= measured.high < LARGEST:
        return 0.0, loss_range
    return measured.low, measured.high


def is_proven(strategy: type) -> bool:
    """Return whether the proof covers a strategy: it has ``private = True`` itself.

    A base class's declaration does not count, because a subclass may merge in another way.
    """
    return bool(vars(strategy).get("private", False))


def check_privacy(config: Any, strategy: Any, exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a run uses differential privacy and no proof covers its settings.

    ``config`` is its ``RunConfig``, ``strategy`` an instance of its strategy, and ``exchanges`` are
    those of its clients.
    """
    privacy: PrivacyConfig = config.privacy
    if not privacy.on:
        if privacy.max_epsilon:
            raise ConfigError(
                f"privacy.max-epsilon = {privacy.max_epsilon}: without noise, epsilon is infinite. "
                "Set privacy.noise-multiplier, or max-epsilon = 0."
            )
        return
    name, measurements, flat = config.strategy.name, strategy._measurements, config.concise()
    if not is_proven(type(strategy)):
        proven = ", ".join(n for n, kind in STRATEGIES.items() if is_proven(kind))
        if name not in STRATEGIES.data:
            proven += (
                f", or set {type(strategy).__name__}.private = True if its model is such a mean"
            )
        raise _refused(
            f"strategy.name = {name!r}: no proof covers this strategy, because its model is not "
            f"known to be a mean whose weights depend only on noisy numbers. Choose one of {proven}"
        )
    if measurements and not privacy.number_noise_multiplier:
        raise ConfigError(
            f"privacy.number-noise-multiplier = 0: {name} needs "
            f"{', '.join(measurements)} from every client, and these numbers would be sent "
            "without noise. Set privacy.number-noise-multiplier, for example to 2, or choose "
            "strategy.name = 'uniform'."
        )
    if "received_group_counts" in measurements and "strategy.metric" in flat:
        raise _refused(
            f"strategy.metric = {flat['strategy.metric']!r} needs counts of people, which "
            "are sent without noise. Set strategy.metric = 'received_score'"
        )
    if noiseless := (*strategy._array_measurements, *strategy.reported_metrics):
        raise _refused(
            f"strategy.name = {name!r} needs {noiseless[0]!r} from every client, which is sent "
            "without noise. Choose another strategy"
        )
    if not privacy.noise_multiplier * privacy.clip <= _LARGEST_NOISE:
        raise ConfigError(
            f"privacy.noise-multiplier = {privacy.noise_multiplier:g} times privacy.clip = "
            f"{privacy.clip:g} is above {_LARGEST_NOISE:g}, too large for single precision. Lower "
            "one of them."
        )
    _check_what_else_leaves(flat, exchanges)


def _check_what_else_leaves(flat: Mapping[str, Any], exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if a setting makes clients send other values without noise."""
    if exchanges:
        remedy = exchanges[0].remedy or "Choose a client without an exchange, for example sgd"
        raise _refused(
            f"client.name = {flat['client.name']!r} exchanges {exchanges[0].name!r} in addition "
            f"to the model, without noise. {remedy}"
        )
    policy = ParticipationSpec.read(flat["participation.policy"]).name
    if policy not in POLICIES:
        raise _refused(
            f"participation.policy = {policy!r} may depend on the clients' losses. Choose one of "
            f"{', '.join(POLICIES)}"
        )
    allowed: dict[str, Any] = {"evaluate.by": "server"}
    if flat["data.validation-examples"]:
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
    if flat["secure-aggregation"]:
        raise _refused(
            "secure-aggregation = true: noise on masked sums is not implemented. Set it to false"
        )


def _refused(reason: str) -> ConfigError:
    return ConfigError(
        f"privacy.noise-multiplier above 0: {reason}, or set privacy.noise-multiplier = 0."
    )
