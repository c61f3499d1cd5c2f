"""The run config: every key, its default and what it allows.

This is the only place that knows the keys. A run config is a flat mapping of
dotted kebab-case keys to scalars (``"data.clients-per-domain": 5``), which is
what TOML tables, Flower's run config and Flower's ``ConfigRecord`` all carry;
``RunConfig`` is the same thing typed and checked. What a method's own arguments
allow is declared at its constructor (`fairflower.arguments`).

>>> config = RunConfig.from_flat({"strategy.name": "fedheal", "seed": 3})
>>> config.seed, config.data.clients_per_domain
(3, 5)
>>> RunConfig.from_flat({"sed": 1})
Traceback (most recent call last):
    ...
fairflower.errors.ConfigError: Unknown run config key 'sed'. Did you mean 'seed'?
"""

from fairflower.config.methods import ClientConfig, DataChoice, ModelChoice, StrategyConfig
from fairflower.config.run import (
    METHOD_TABLES,
    RunConfig,
    check_key,
    describe,
    execution,
    identity,
    keys,
    methods_of,
)
from fairflower.config.settings import DataConfig, ModelConfig, TrainConfig
from fairflower.config.text import (
    Scalar,
    argument,
    flatten,
    kebab,
    parse_assignment,
    parse_assignments,
    read_toml,
    shown,
    toml_value,
    unknown,
)

__all__ = [
    "METHOD_TABLES",
    "ClientConfig",
    "DataChoice",
    "DataConfig",
    "ModelChoice",
    "ModelConfig",
    "RunConfig",
    "Scalar",
    "StrategyConfig",
    "TrainConfig",
    "argument",
    "check_key",
    "describe",
    "execution",
    "flatten",
    "identity",
    "kebab",
    "keys",
    "methods_of",
    "parse_assignment",
    "parse_assignments",
    "read_toml",
    "shown",
    "toml_value",
    "unknown",
]
