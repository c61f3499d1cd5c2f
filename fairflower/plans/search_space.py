"""Search space of tuning: which arguments of a method are tuned, and over which ranges."""

from __future__ import annotations

from typing import NamedTuple

from fairflower.arguments import Search
from fairflower.config import RunConfig
from fairflower.config.text import argument_to_key


class TunableArgument(NamedTuple):
    """An argument to tune: its range, the paper's value, and whether it is an integer."""

    search: Search
    default: float
    whole: bool


def search_space(config: RunConfig, training: bool = False) -> dict[str, TunableArgument]:
    """Return the arguments to tune of a config's strategy and client, by run config key.

    These are all arguments that have a numeric default and a search range and that the config does
    not set. With ``training``, they include the learning rate, from a fifth to five times the
    config's value, and the number of local epochs, from 1 to twice the config's value.
    """
    arguments = {
        f"{choice.TABLE}.{argument_to_key(name)}": TunableArgument(
            spec.search, spec.default, spec.whole
        )
        for choice in (config.strategy, config.client)
        for name, spec in choice.factory.argument_specs().items()
        if spec.search and isinstance(spec.default, (int, float)) and name not in choice.args
    }
    lr, epochs = config.train.lr, config.train.local_epochs
    if training and lr > 0:
        arguments["train.lr"] = TunableArgument(Search(lr / 5, 5 * lr, log=True), lr, False)
    if training and epochs > 0:
        arguments["train.local-epochs"] = TunableArgument(Search(1, 2 * epochs), epochs, True)
    return arguments
