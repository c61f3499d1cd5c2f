"""Checks of a run's settings for secure aggregation, and the keys that it uses in messages."""

from typing import Any

from fairflower.errors import ConfigError
from fairflower.registry.measurements import MEASUREMENTS

#: Run config key. In its node config, a site can set it to require secure aggregation.
KEY = "secure-aggregation"

#: Keys of a node config: the file with the names and public keys of the consortium's sites, and the
#: site's private key; see `fairflower.secure.consortium`.
CONSORTIUM, SIGNING_KEY = "consortium", "signing-key"

#: Key of the client's weight in the config of a message that requests a masked model.
WEIGHT_KEY = "secure.weight"

#: Record with the names of the trained arrays, inside a client.
TRAINED = "secure.trained"

_OTHER_CLIENT = "Choose a client without an exchange, for example sgd, fedprox or moon"


def check_secure(config: Any, strategy: Any, exchanges: list[Any]) -> None:
    """Raise ``ConfigError`` if a run does not support secure aggregation.

    ``config`` is its ``RunConfig``, ``strategy`` an instance of its strategy, and ``exchanges`` are
    those of its clients.
    """
    name = config.strategy.name
    if not strategy.sums_suffice:
        reason, nearest = strategy.single_updates
        raise _refused(
            f"strategy.name = {name!r} {reason}, but the server gets only a weighted sum of the "
            f"updates. Choose {nearest!r}, the most similar strategy that works"
        )
    early = {
        n: MEASUREMENTS[n] for n in strategy._measurements if n not in strategy.used_next_round
    }
    if late := [name for name, m in early.items() if m.model == "trained" and not m.planned]:
        raise _refused(
            f"strategy.name = {name!r} computes weights from {late[0]!r}, which is measured "
            "after training, but clients must know their weights before training. Choose a "
            "measurement of the received model"
        )
    if arrays := strategy._array_measurements:
        raise _refused(
            f"strategy.name = {name!r} needs the array {arrays[0]!r} from each client, and this "
            "array is not masked. Choose a strategy that computes weights from numbers"
        )
    if exchanges:
        raise _refused(
            f"client.name = {config.client.name!r} exchanges {exchanges[0].name!r} in addition to "
            f"the model, and this exchange is not masked. {exchanges[0].remedy or _OTHER_CLIENT}"
        )
    if reason := config.client.factory.secure_aggregation_problem:
        raise _refused(f"client.name = {config.client.name!r}: {reason}. {_OTHER_CLIENT}")
    bound = config.bound
    for key, value in (
        ("bound.clip-update-norm", bound.clip_update_norm),
        ("bound.clip-update-median", bound.clip_update_median),
        ("observe.window", config.observe.window),
    ):
        if value:
            raise _refused(f"{key} = {value} uses individual updates. Set it to 0")


def check_secure_cohort(asked: int, smallest: int) -> None:
    """Raise ``ConfigError`` if a round has too few clients for secure aggregation."""
    if asked < smallest:
        raise _refused(
            f"the number of clients selected per round is {asked}, but secure aggregation needs "
            f"at least {smallest}. Increase fraction-train, or add clients"
        )


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"{KEY} = true: {reason}, or set {KEY} = false.")
