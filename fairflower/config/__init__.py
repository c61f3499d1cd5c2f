"""The run config: all keys with their defaults and allowed values.

A run config is a flat mapping of dotted kebab-case keys to scalars (``"data.clients-per-domain":
5``), as in TOML tables, Flower's run config and Flower's ``ConfigRecord``. ``RunConfig`` is a typed
and validated version of this mapping. A method's constructor declares the method's arguments
(`fairflower.arguments`).

>>> config = RunConfig.from_flat({"strategy.name": "fedheal", "seed": 3})
>>> config.seed, config.data.clients_per_domain
(3, 5)
>>> RunConfig.from_flat({"sed": 1})
Traceback (most recent call last):
    ...
fairflower.errors.ConfigError: Unknown run config key 'sed'. Did you mean 'seed'?
"""

from fairflower.config.methods import ClientConfig, StrategyConfig
from fairflower.config.run import RunConfig
from fairflower.config.settings import DataConfig, ModelConfig, TrainConfig

__all__ = [
    "ClientConfig",
    "DataConfig",
    "ModelConfig",
    "RunConfig",
    "StrategyConfig",
    "TrainConfig",
]
