"""The whole run config: from flat keys and back, checked."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from fairflower.config.methods import (
    DEFAULT,
    ClientConfig,
    DataSpec,
    MethodSpec,
    ModelSpec,
    StrategyConfig,
)
from fairflower.config.settings import (
    MOST,
    BoundConfig,
    CheckpointConfig,
    DataConfig,
    EvaluateConfig,
    MeasureConfig,
    ModelConfig,
    ObserveConfig,
    StopConfig,
    TrainConfig,
    checked,
    setting,
)
from fairflower.config.text import Scalar, argument_to_key, shown, toml_value, unknown
from fairflower.errors import ConfigError, is_text, quoted
from fairflower.registry import MEASUREMENTS, MODEL_OF, PLAIN_CLIENTS, PRETRAINED, TRACKERS


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes."""

    seed: int = setting(0, "Seed of the model, the sampling and the clients.")
    num_server_rounds: int = setting(30, "Rounds of training.")
    fraction_train: float = setting(1.0, "Share of the clients asked in a round.", above=0, max=1)
    min_clients: int = setting(0, "Fewest valid replies a round may have; 0: half of those asked.")
    sites: int = setting(
        0, "Fewest sites with data of their own to begin with; 0: take those that are connected."
    )
    round_timeout: float = setting(
        3600.0, "Seconds to wait for a round's replies.", above=0, execution=True
    )
    output_dir: str = setting(
        "", "Where run folders go; empty: $FAIRFLOWER_HOME/runs.", execution=True
    )
    run_name: str = setting(
        "", "Name of the run folder; empty: time, method, data and seed.", execution=True
    )
    resume: str = setting("", "Run folder to go on with, by its own settings.", execution=True)
    engine: str = setting(
        "ray",
        "`fairflower run` only. ray: ours on Ray; flower: Flower's on Ray; inline: one process.",
        choices=("ray", "flower", "inline"),
        execution=True,
    )
    ray_address: str = setting(
        "",
        "Ray cluster that clients run on: auto, host:port or ray://host:port; empty: this machine.",
        execution=True,
    )
    workers: int = setting(0, "Clients at a time, on Ray; 0: as many as fit.", execution=True)
    client_cpus: int = setting(1, "CPUs, and torch threads, per client.", min=1)
    client_gpus: float = setting(0.0, "Share of a GPU per client, on Ray.", execution=True)
    track: str = setting(
        "none",
        "Where figures are logged beside the run folder: none, tensorboard, mlflow or wandb.",
        choices=("none", *TRACKERS),
        execution=True,
    )
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    bound: BoundConfig = field(default_factory=BoundConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    @property
    def label(self) -> str:
        """How tables and figures call the method: ``fedheal``, or ``fedprox+fedheal``."""
        client, strategy = self.client.label, self.strategy.label
        return strategy if client in PLAIN_CLIENTS else f"{client}+{strategy}"

    def evaluates(self, split: str) -> bool:
        """Whether models are tested on ``"test"`` images, or on those for ``"validation"``."""
        return self.evaluate.test if split == "test" else self.data.validated

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> RunConfig:
        """Check a flat mapping and fill what it leaves out with the defaults.

        ``ConfigError`` on an unknown key, a value of the wrong type or out of range, or an unknown
        name of a strategy, client, data set or model.
        """
        methods = methods_of(flat)
        for method in methods:
            method.factory  # noqa: B018  # a name that does not exist comes before its arguments
        config = _build({key: _checked(key, value, methods) for key, value in flat.items()})
        _check(config)
        return config

    @classmethod
    def from_message(cls, flat: Mapping[str, Any]) -> RunConfig:
        """Read the run config in a server's message, at a client.

        The types and ranges of settings are checked; keys that are no settings are ignored. The
        strategy stays a name: only the server imports it, in `from_flat`.
        """
        settings = {k: checked(k, flat[k], spec) for k, spec in _schema().items() if k in flat}
        methods = {k: v for k, v in flat.items() if k.startswith(_METHOD_KEYS)}
        return _build(settings | methods)

    def to_flat(self) -> dict[str, Scalar]:
        """Every key with its value, as Flower's run config and messages carry it."""
        own = self.concise()
        return {key: own.get(key, DEFAULT) for key in key_help()} | own

    def concise(self) -> dict[str, Scalar]:
        """The keys with their values, but for those that are left to the methods."""
        own = {key: attrgetter(key.replace("-", "_"))(self) for key in _schema()}
        return own | self.client.to_flat() | self.strategy.to_flat()

    def to_toml(self, parent: str = "") -> str:
        """The config as TOML tables that ``--config`` and ``flwr run`` read back.

        With a ``parent``, as its sub-tables.
        """
        tables: dict[str, list[str]] = {"": []}
        for key, value in self.to_flat().items():
            table, _, leaf = key.rpartition(".")
            tables.setdefault(table, []).append(f"{leaf} = {toml_value(value)}")
        parts = []
        for table, lines in tables.items():
            name = ".".join(filter(None, (parent, table)))
            parts.append("\n".join([f"[{name}]", *lines] if name else lines))
        return "\n\n".join(parts) + "\n"


@cache
def keys() -> MappingProxyType[str, Scalar]:
    """Every key of the run config with its default (``[tool.flwr.app.config]``)."""
    return MappingProxyType(RunConfig().to_flat())


def methods_of(flat: Mapping[str, Any]) -> list[MethodSpec]:
    """The methods that run config keys name."""
    return [kind.of(flat) for kind in _METHODS]


def check_key(key: str, methods: Iterable[MethodSpec] = ()) -> None:
    """Raise ``ConfigError`` with the nearest valid key if there is no such key.

    There are those of every built-in method's arguments, and those of the ``methods``: in a
    method's table these alone are named as valid.
    """
    if key in (*_schema(), *_NAMES) or key in keys():
        return
    named = [method for method in methods if key.startswith(f"{method.TABLE}.")]
    own = {f"{m.TABLE}.{argument_to_key(arg)}" for m in named for arg in m.factory.arguments()}
    if key in own:
        return
    valid = own | {f"{m.TABLE}.name" for m in named} or keys()
    words = unknown("run config key", key, valid, key_help())
    if named and not own:
        words += f" There are no arguments of {', '.join(m.name for m in named)}."
    raise ConfigError(words)


def is_setting(key: str) -> bool:
    """Return whether a key of a message is a run config key, or an argument of a method."""
    return key in _schema() or key.startswith(_METHOD_KEYS)


def key_help() -> dict[str, str]:
    """The meaning of every key, for help texts."""
    texts = {key: spec.metadata["help"] for key, spec in _schema().items()}
    for kind in _METHODS:
        texts[f"{kind.TABLE}.name"] = kind.HELP
        for arg, owners in kind.REGISTRY.arguments().items():
            texts[f"{kind.TABLE}.{argument_to_key(arg)}"] = f"Argument of {', '.join(owners)}."
    return texts


@cache
def execution() -> frozenset[str]:
    """The keys that say where and how a run is executed, which moves no bit of its result."""
    return frozenset(key for key, spec in _schema().items() if spec.metadata["execution"])


def method_key(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """What makes runs the same method: everything but the seed and the execution.

    An argument that is left to the method, or given as its default, is as one not listed.
    """
    left = {"seed", *execution()}
    for choice in methods_of(config):
        defaults = choice.defaults() if choice.args else {}
        given = choice.args.items()
        left |= {
            f"{choice.TABLE}.{argument_to_key(a)}"
            for a, v in given
            if v == defaults.get(a, DEFAULT)
        }
    return frozenset(
        (key, shown(value))
        for key, value in config.items()
        if key not in left and not (key.startswith(METHOD_TABLES) and value == DEFAULT)
    )


_METHODS: tuple[type[MethodSpec], ...] = (ClientConfig, StrategyConfig)
_NAMES = ("client.name", "strategy.name")
_METHOD_KEYS = ("client.", "strategy.")

#: What makes a method: in them, `default` is the same as nothing.
METHOD_TABLES = ("strategy.", "client.", "bound.")


@cache
def _schema() -> dict[str, dataclasses.Field[Any]]:
    """Dotted key -> dataclass field, without the methods and their own arguments."""
    schema: dict[str, dataclasses.Field[Any]] = {}
    for top in dataclasses.fields(RunConfig):
        if "help" in top.metadata:
            schema[argument_to_key(top.name)] = top
        elif top.name not in ("client", "strategy"):
            for leaf in dataclasses.fields(top.default_factory):  # type: ignore[arg-type]
                schema[f"{top.name}.{argument_to_key(leaf.name)}"] = leaf
    return schema


def _checked(key: str, value: Any, methods: Iterable[MethodSpec]) -> Any:
    """The value as the key's type, or one clear error."""
    check_key(key, methods)
    if key in _NAMES:
        return value
    if key.startswith(_METHOD_KEYS):
        fits = is_text(value) if isinstance(value, str) else isinstance(value, bool | int | float)
        if fits and not (isinstance(value, int) and abs(value) > MOST):
            return None if str(value).lower() == "none" else value
        raise ConfigError(
            f"{key} = {quoted(value)}: expected a number, a word, 'none' or 'default'."
        )
    return checked(key, value, _schema()[key])


def _build(flat: Mapping[str, Any]) -> RunConfig:
    """Nested dataclasses from checked dotted keys."""
    tables: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        table, _, leaf = key.rpartition(".")
        tables[table][leaf.replace("-", "_")] = value
    if "model.name" not in flat:
        data = tables["data"].get("name", DataConfig.name)
        tables["model"]["name"] = MODEL_OF[DataSpec.read(data).kind]
    made = tables.pop("", {}) | {method.TABLE: method for method in methods_of(flat)}
    factories: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    made |= {table: factories[table](**tables[table]) for table in tables if table not in made}
    return RunConfig(**made)


def _check(config: RunConfig) -> None:
    """Refuse names that nobody registered, and settings that do not go together."""
    if config.ray_address and config.engine != "ray":
        raise ConfigError(
            f"ray-address = {config.ray_address!r}: engine = {config.engine!r} runs on this "
            "machine alone. Choose engine = 'ray', or leave ray-address out."
        )
    for choice in (
        config.strategy,
        config.client,
        DataSpec.read(config.data.name),
        ModelSpec.read(config.model.name),
    ):
        choice.check()
    if config.model.weights and config.model.name not in PRETRAINED:
        raise ConfigError(
            f"model.weights = {quoted(config.model.weights)}: {config.model.name} takes no "
            f"pretrained weights. Remove it, or choose {', '.join(sorted(PRETRAINED))}."
        )
    client = config.client.factory
    _check_kind(config, DataSpec.read(config.data.name).kind)
    client.check_model(config.model.name)
    client.check_steps(config.train)
    try:
        rule = config.strategy.factory(**config.strategy.args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"strategy.{error}") from error
    for name in rule.measurements:
        if name not in MEASUREMENTS:
            raise ConfigError(
                f"{config.strategy.name}: {unknown('measurement', name, MEASUREMENTS)}"
            )
    try:
        client.make_exchanges(config.client.args)
    except ValueError as error:
        raise ConfigError(f"client.{error}") from error
    try:
        rule.read_config(config.concise())
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not (config.evaluate.test or config.data.validated):
        raise ConfigError(
            "evaluate.test = false: there are no validation examples to test on instead. Set "
            "data.validation-fraction or data.validation-examples, or remove it."
        )
    if config.data.validation_fraction and config.data.validation_examples:
        raise ConfigError(
            "data.validation-fraction and data.validation-examples are both set; set one of them "
            "to 0."
        )
    if config.data.fraction and config.data.examples_per_client:
        raise ConfigError(
            "data.fraction and data.examples-per-client are both set; set one of them to 0."
        )


def _check_kind(config: RunConfig, kind: str) -> None:
    """Refuse a model, a method or settings that are not for the data's kind of examples."""
    ModelSpec.read(config.model.name).check_kind(kind)
    config.client.factory.check_kind(kind)
    data = config.data
    for key, value in (
        ("image-size", data.image_size),
        ("corrupted-clients", data.corrupted_clients),
    ):
        if value and kind != "images":
            raise ConfigError(
                f"data.{key} = {value}: it is for images, and data.name = {data.name!r} has "
                f"{kind}. Remove it."
            )
