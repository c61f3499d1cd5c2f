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

from fairflower.config.identity import (
    COMPARED_TABLES,
    data_key,
    method_key,
    tested_split,
    tuned_keys,
)
from fairflower.config.methods import (
    AdapterSpec,
    ClientConfig,
    DataSpec,
    ModelSpec,
    ParticipationSpec,
    StrategyConfig,
    TrackerSpec,
)
from fairflower.config.run import (
    RunConfig,
    check_key,
    check_tuned,
    check_values,
    default_values,
    execution_keys,
    is_setting,
    key_help,
    methods_of,
)
from fairflower.config.settings import DataConfig, ModelConfig, TrainConfig
from fairflower.config.text import (
    Scalar,
    argument_to_key,
    counted,
    flatten_tables,
    is_argument,
    key_to_argument,
    names_in,
    parse_assignment,
    parse_assignments,
    read_tables,
    read_toml,
    shown,
    toml_tables,
    toml_value,
    unknown,
)

__all__ = [
    "COMPARED_TABLES",
    "AdapterSpec",
    "ClientConfig",
    "DataConfig",
    "DataSpec",
    "ModelConfig",
    "ModelSpec",
    "ParticipationSpec",
    "RunConfig",
    "Scalar",
    "StrategyConfig",
    "TrackerSpec",
    "TrainConfig",
    "argument_to_key",
    "check_key",
    "check_tuned",
    "check_values",
    "counted",
    "data_key",
    "default_values",
    "execution_keys",
    "flatten_tables",
    "is_argument",
    "is_setting",
    "key_help",
    "key_to_argument",
    "method_key",
    "methods_of",
    "names_in",
    "parse_assignment",
    "parse_assignments",
    "read_tables",
    "read_toml",
    "shown",
    "tested_split",
    "toml_tables",
    "toml_value",
    "tuned_keys",
    "unknown",
]
