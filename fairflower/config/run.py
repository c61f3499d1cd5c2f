"""`RunConfig`: validation of flat run config keys, and conversion back."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from fairflower.arguments import EXECUTION, ArgumentSpec, Range
from fairflower.config.methods import (
    DEFAULT,
    AdapterSpec,
    ClientConfig,
    DataSpec,
    MethodSpec,
    ModelSpec,
    ParticipationSpec,
    Spec,
    StrategyConfig,
    TaskSpec,
    TrackerSpec,
)
from fairflower.config.privacy import PrivacyConfig, check_privacy
from fairflower.config.secure import check_secure
from fairflower.config.settings import (
    MAX_INT,
    OF_TABLES,
    BoundConfig,
    CheckpointConfig,
    Count,
    DataConfig,
    Engine,
    EvaluateConfig,
    MeasureConfig,
    ModelConfig,
    ObserveConfig,
    ParticipationConfig,
    PositiveCount,
    ServerConfig,
    StopConfig,
    TrainConfig,
    checked,
    setting_specs,
)
from fairflower.config.text import (
    METHOD_TABLES,
    Scalar,
    argument_to_key,
    is_argument,
    names_in,
    shown,
    toml_tables,
    unknown,
)
from fairflower.errors import ConfigError, is_text, quoted
from fairflower.registry import DATA_SETS, MODEL_OF, MODELS, PLAIN_CLIENTS, REFERENCES
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.registry.user_metrics import load_metrics

#: Tables in which the methods of a comparison may differ; their value `default` means missing.
COMPARED_TABLES = (*METHOD_TABLES, "bound.", "server.")

#: Settings that protect clients' updates. References send none, so they train without these.
PROTECTION = ("secure-aggregation", "privacy.")


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, typed and validated."""

    seed: Annotated[Count, "Random seed for the model, client selection and local training."] = 0
    num_server_rounds: Annotated[Count, "Number of training rounds."] = 30
    fraction_train: Annotated[
        float, Range(above=0, high=1), "Fraction of the clients that train in each round."
    ] = 1.0
    min_clients: Annotated[
        Count,
        "Minimum number of valid replies per round. 0 means half of the selected clients, and "
        "both of two sites.",
    ] = 0
    sites: Annotated[
        int | str,
        Range(0),
        "Comma-separated names of the sites that take part, or their minimum number. 0 means "
        "the connected sites, at least two.",
    ] = 0
    late_sites: Annotated[str, "Comma-separated names of sites that may connect later."] = ""
    statistics: Annotated[
        bool,
        "Whether the run ends when all sites have described their data.",
    ] = False
    secure_aggregation: Annotated[
        bool,
        "Whether clients mask their models (Flower's SecAgg+), so that the server learns only a "
        "weighted sum.",
    ] = False
    tuned: Annotated[
        str,
        EXECUTION,
        "Comma-separated settings that were chosen for each method on validation examples, such "
        "as train.lr,client.mu. Reports compare methods that differ in these.",
    ] = ""
    round_timeout: Annotated[
        float,
        Range(above=0),
        EXECUTION,
        "Time limit for the replies of a round, in seconds; none with the inline engine.",
    ] = 3600.0
    output_dir: Annotated[
        str, EXECUTION, "Parent folder of run folders. Empty means $FAIRFLOWER_HOME/runs."
    ] = ""
    run_name: Annotated[
        str, EXECUTION, "Name of the run folder. Empty means time, method, data set and seed."
    ] = ""
    resume: Annotated[str, EXECUTION, "Run folder to resume. Empty starts a new run."] = ""
    engine: Annotated[
        Engine,
        EXECUTION,
        "Simulation engine: ray, flower (Flower's, on Ray), inline (in this process), or auto "
        "(ray if it saves time, else inline).",
    ] = "auto"
    ray_address: Annotated[
        str,
        EXECUTION,
        "Address of a Ray cluster: auto, host:port or ray://host:port. Empty means this machine.",
    ] = ""
    workers: Annotated[
        Count,
        EXECUTION,
        "Number of parallel clients on Ray. 0 means as many as fit.",
    ] = 0
    client_cpus: Annotated[PositiveCount, "Number of CPUs and torch threads per client."] = 1
    client_gpus: Annotated[
        float | Literal["auto"],
        Range(0),
        EXECUTION,
        "GPU fraction per client on Ray. auto measures how many clients fit on this machine, "
        "and means 0 on a Ray cluster. 0 means no GPU.",
    ] = "auto"
    gpu_memory_errors: Annotated[
        Literal["retry", "stop"],
        EXECUTION,
        "What to do if a client runs out of GPU memory. retry: try once more, with half as many "
        "in parallel; stop: end the run.",
    ] = "retry"
    track: Annotated[
        str,
        EXECUTION,
        "Experiment tracker: none, tensorboard, mlflow, wandb, or module:Class.",
    ] = "none"
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    bound: BoundConfig = field(default_factory=BoundConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    participation: ParticipationConfig = field(default_factory=ParticipationConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    strategy: StrategyConfig = field(default_factory=StrategyConfig)

    @property
    def label(self) -> str:
        """The method's name in tables and figures, such as ``fedheal`` or ``fedprox+fedheal``."""
        client, strategy = self.client.label, self.strategy.label
        return strategy if client in PLAIN_CLIENTS else f"{client}+{strategy}"

    @property
    def gpus_of_client(self) -> float:
        """``client-gpus`` as a number: 0 for "auto", which is replaced where it is measured."""
        return 0.0 if isinstance(self.client_gpus, str) else self.client_gpus

    @property
    def reference(self) -> str:
        """The strategy's name if the run is a reference, ``alone`` or ``pooled``; else empty."""
        return self.strategy.name if self.strategy.name in REFERENCES else ""

    @property
    def parts(self) -> list[Spec]:
        """The parts that the config names, with their arguments."""
        adapter, tracker = self.model.adapter, self.track
        return [
            self.strategy,
            self.client,
            DataSpec.read(self.data.name),
            *([TaskSpec.read(task)] if (task := self.data.task) else []),
            ModelSpec.read(self.model.name),
            ParticipationSpec.read(self.participation.policy),
            *([AdapterSpec.read(adapter)] if adapter else []),
            *([TrackerSpec.read(tracker)] if tracker != "none" else []),
        ]

    @property
    def site_names(self) -> list[str]:
        """Names of the sites that take part from the first round; empty if the run names none."""
        return names_in(self.sites) if isinstance(self.sites, str) else []

    @property
    def listed_sites(self) -> list[str]:
        """Names of all sites that get messages; empty if all connected sites do."""
        return [*self.site_names, *names_in(self.late_sites)]

    @property
    def fewest_sites(self) -> int:
        """Smallest number of sites that train: one alone only if min-clients is 1."""
        alone = self.min_clients == 1 or self.evaluate.model or self.reference == "alone"
        return 1 if alone else 2

    def evaluates(self, split: str) -> bool:
        """Return whether models are tested on a split, ``"test"`` or ``"validation"``."""
        return self.evaluate.test if split == "test" else self.data.validated

    @property
    def best(self) -> str:
        """Criterion for the best round, whose common model is kept; empty for no best round."""
        best = self.checkpoint.best
        if best == "auto":
            best = "average" if self.stop.patience and self.data.validated else "none"
        return "" if best == "none" else best

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any]) -> RunConfig:
        """Validate a flat mapping and return its config; missing keys get their defaults.

        Raises
        ------
        ConfigError
            If a key, strategy, client, data set or model is unknown, a value has the wrong type or
            is out of range, or settings conflict.
        """
        for method in methods_of(flat):
            method.factory  # noqa: B018  # an unknown name is reported before its arguments
        check_keys(flat)
        config = _build({key: _converted(key, value) for key, value in flat.items()})
        _check(config)
        load_metrics(config.evaluate.metrics)
        task = DataSpec.read(config.data.name).task(config.data.task)
        if task is None or flat.get("privacy.loss-range"):
            return config
        return replace(config, privacy=replace(config.privacy, loss_range=task.make().loss_range))

    @classmethod
    def from_message(cls, flat: Mapping[str, Any]) -> RunConfig:
        """Read the run config in a server's message, on a client.

        The types and ranges of settings are checked; keys that are not settings are ignored. The
        strategy stays a name: only the server imports it, in `from_flat`.
        """
        settings = {k: checked(k, flat[k], spec) for k, spec in schema().items() if k in flat}
        methods = {k: v for k, v in flat.items() if k.startswith(METHOD_TABLES)}
        return _build(settings | methods)

    def to_flat(self) -> dict[str, Scalar]:
        """Return every key with its value, in the format of Flower's run config and messages."""
        return dict.fromkeys(key_help(), DEFAULT) | self.concise()

    def concise(self) -> dict[str, Scalar]:
        """Return the keys with their values, without arguments that the config does not set."""
        settings = {key: _reader(key)(self) for key in schema()}
        return settings | self.client.to_flat() | self.strategy.to_flat()

    def to_toml(self, parent: str = "") -> str:
        """Return the config as TOML tables, which ``--config`` and ``flwr run`` read.

        ``parent`` is the name of a table that contains them.
        """
        return toml_tables(self.to_flat(), parent)


#: Returns a function that reads a setting from a config.
_reader = cache(lambda key: attrgetter(key.replace("-", "_")))


@cache
def default_values() -> MappingProxyType[str, Scalar]:
    """Return every key of the run config with its default (``[tool.flwr.app.config]``).

    These are the declared ones: a default that depends on another setting is not resolved.
    """
    declared = {key: spec.default for key, spec in schema().items()}
    return MappingProxyType(RunConfig().to_flat() | declared)


def methods_of(flat: Mapping[str, Any]) -> list[MethodSpec]:
    """Return the client and the strategy named in a run config."""
    return [kind.of(flat) for kind in _METHODS]


def check_keys(keys: Iterable[str]) -> None:
    """Raise ``ConfigError`` for an unknown key; the error suggests the most similar valid key.

    Arguments of methods are not checked here, but by the methods (`Spec.check`).
    """
    for key in keys:
        if not (key in schema() or key in _NAMES or is_argument(key)):
            raise ConfigError(unknown("run config key", key, default_values(), key_help()))


def check_methods(flat: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a method that ``flat`` names lacks an argument that it sets."""
    for kind in _METHODS:
        if kind.KEY in flat:
            kind.of(flat).check()


def refuse_keys(keys: Container[str], otherwise: Mapping[str, str], what: str) -> None:
    """Raise ``ConfigError`` if ``keys`` has a key of ``otherwise``, which says what to do instead.

    ``what`` does not accept these keys, such as "a comparison".
    """
    for key, instead in otherwise.items():
        if key in keys:
            raise ConfigError(f"{key}: {what} does not accept this setting: {instead}.")


def is_setting(key: str) -> bool:
    """Return whether a key of a message is a setting or an argument of a method."""
    return key in schema() or key.startswith(METHOD_TABLES)


@cache
def key_help() -> Mapping[str, str]:
    """Return the help text of every key."""
    texts = {key: spec.help for key, spec in schema().items()}
    for kind in _METHODS:
        texts[kind.KEY] = kind.HELP
        for arg, owners in kind.REGISTRY.arguments().items():
            texts[f"{kind.TABLE}.{argument_to_key(arg)}"] = f"Argument of {', '.join(owners)}."
    return MappingProxyType(texts)


@cache
def execution_keys() -> frozenset[str]:
    """Return the keys that affect how a run is executed, but not its result."""
    return frozenset(key for key, spec in schema().items() if spec.execution)


_METHODS: tuple[type[MethodSpec], ...] = (ClientConfig, StrategyConfig)
_NAMES = tuple(kind.KEY for kind in _METHODS)


@cache
def schema() -> dict[str, ArgumentSpec]:
    """Return all settings by key, without methods and their arguments."""
    specs = dict(setting_specs(RunConfig))
    for table in dataclasses.fields(RunConfig):
        if table.default is dataclasses.MISSING and table.name not in ("client", "strategy"):
            settings = setting_specs(table.default_factory)  # type: ignore[arg-type]
            specs |= {f"{table.name}.{key}": spec for key, spec in settings.items()}
    return specs


def check_values(flat: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` if a value is invalid for its setting.

    Unlike `RunConfig.from_flat`, this function accepts unknown keys and imports no classes named in
    the config, so it is safe for configs from other people.
    """
    methods_of(flat)
    for key, value in flat.items():
        _converted(key, value)


def _converted(key: str, value: Any) -> Any:
    """Convert a value to its key's type; raise ``ConfigError`` if it is not allowed."""
    if key in _NAMES:
        return value
    if key not in schema():
        fits = is_text(value) if isinstance(value, str) else isinstance(value, bool | int | float)
        if fits and not (isinstance(value, int) and abs(value) > MAX_INT):
            return None if str(value).lower() == "none" else value
        raise ConfigError(
            f"{key} = {quoted(value)}: expected a number, a word, 'none' or 'default'."
        )
    return checked(key, value, schema()[key])


def _build(flat: Mapping[str, Any]) -> RunConfig:
    """Return the config for dotted keys that have been checked."""
    tables: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        table, _, leaf = key.rpartition(".")
        tables[table][leaf.replace("-", "_")] = value
    data = DataSpec.read(tables["data"].get("name", DataConfig.name))
    if "model.name" not in flat:
        task = data.task(tables["data"].get("task", ""))
        models: Mapping[str, str] = task.factory.models if task else {}
        tables["model"]["name"] = models.get(data.kind, MODEL_OF[data.kind])
    made = tables.pop("", {}) | {method.TABLE: method for method in methods_of(flat)}
    factories: dict[str, Any] = {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}
    made |= {table: factories[table](**tables[table]) for table in tables if table not in made}
    return RunConfig(**made)


def _check(config: RunConfig) -> None:
    """Raise ``ConfigError`` if a name is not registered or settings conflict."""
    for part in config.parts:
        part.check()
    _check_model(config.model)
    data = DataSpec.read(config.data.name)
    spec = data.task(config.data.task)
    kind, task = data.kind, spec.make() if spec else None
    ModelSpec.read(config.model.name).check_fit(kind, task, trained=bool(config.evaluate.model))
    for conflict, message in _conflicts(config, kind):
        if conflict:
            raise ConfigError(message)
    client = config.client.factory
    with config.client.naming_failures():
        client.check_kind(kind)
        if task:
            client.check_task(task, kind, config.train)
        client.check_model(config.model.name)
        client.check_steps(config.train)
        try:
            exchanges = client.make_exchanges(config.client.args)
        except ValueError as error:
            raise ConfigError(f"client.{error}") from error
    try:
        strategy = config.strategy.make()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"strategy.{error}") from error
    with config.strategy.naming_failures():
        for name in strategy._measurements:
            if name not in MEASUREMENTS:
                words = unknown("measurement", name, MEASUREMENTS)
                raise ConfigError(f"{config.strategy.name}: {words}")
            MEASUREMENTS[name]  # one of another package is imported
    if strange := [thing for thing in exchanges if not hasattr(thing, "broadcast")]:
        raise ConfigError(
            f"client.name = {config.client.name!r}: make_exchanges returned {quoted(strange[0])}, "
            "not a fairflower.aggregation.exchange.Exchange. Correct the client's code."
        )
    _check_reference(config, exchanges)
    check_privacy(config, strategy, exchanges)
    with config.strategy.naming_failures():
        try:
            strategy.read_config(config.concise())
        except ValueError as error:
            raise ConfigError(str(error)) from error
    if config.secure_aggregation:
        check_secure(config, strategy, exchanges)


def _check_reference(config: RunConfig, exchanges: Sequence[Any]) -> None:
    """Raise ``ConfigError`` if the clients of a reference share or keep a part of the model."""
    name, client = config.reference, config.client
    local = getattr(client.factory, "local_part", "")  # of `LocalArraysTrainer`
    if name and (exchanges or local):
        what = f"exchanges {exchanges[0].name!r}" if exchanges else f"keeps {local}"
        raise ConfigError(
            f"client.name = {client.name!r} {what}, which has no meaning with strategy.name = "
            f"{name!r}, where nothing is merged. Set client.name = 'sgd'."
        )


def _check_model(model: ModelConfig) -> None:
    """Raise ``ConfigError`` if a model does not support the configured weights or adapter."""
    chosen = ModelSpec.read(model.name)
    if model.weights and not chosen.takes("weights"):
        others = ", ".join(sorted(name for name in MODELS if ModelSpec(name).takes("weights")))
        raise ConfigError(
            f"model.weights = {quoted(model.weights)}: {model.name} does not support pretrained "
            f"weights. Remove it, or choose {others}."
        )
    if model.adapter and not getattr(chosen.factory, "adaptable", False):
        raise ConfigError(
            f"model.adapter = {quoted(model.adapter)}: {model.name} does not support adapters. "
            "Remove it, or choose a pretrained network (timm:NAME or hf:NAME)."
        )


def _conflicts(config: RunConfig, kind: str) -> list[tuple[object, str]]:
    """Return whether settings conflict, and messages; ``kind`` is that of the data's examples."""
    data, evaluate = config.data, config.evaluate
    only_images = f"applies to images only, but data.name = {data.name!r} has {kind}. Remove it."
    no_table = data.name in DATA_SETS.data.keys() - {"table"}
    names, given = config.listed_sites, f"sites = {quoted(config.sites)}"
    twice = next((name for name in names if names.count(name) > 1), "")
    number, few = isinstance(config.sites, int), len(config.site_names) < config.fewest_sites
    return [
        (
            config.ray_address and config.engine not in ("auto", "ray"),
            f"ray-address = {config.ray_address!r}: engine = {config.engine!r} runs only on this "
            "machine. Set engine = 'ray', or remove ray-address.",
        ),
        (
            config.reference and (config.secure_aggregation or config.privacy.on),
            f"strategy.name = {config.reference!r}: a reference sends no updates that masks or "
            "noise would protect. Remove secure-aggregation and the privacy settings, or name it "
            "in --references of a comparison, in which it trains without them.",
        ),
        (
            data.image_size and kind != "images",
            f"data.image-size = {data.image_size}: this setting {only_images}",
        ),
        (
            data.corrupted_clients and kind != "images",
            f"data.corrupted-clients = {data.corrupted_clients}: this setting {only_images}",
        ),
        (
            not (evaluate.test or data.validated),
            "evaluate.test = false: the run has no validation examples to test on instead. Set "
            "data.validation-fraction or data.validation-examples, or remove evaluate.test.",
        ),
        (
            config.best and not data.validated,
            f"checkpoint.best = {config.checkpoint.best!r}: the best round is chosen on validation "
            "examples, and the run has none. Set data.validation-fraction or "
            "data.validation-examples, or checkpoint.best = 'none'.",
        ),
        (
            data.held_out and evaluate.by == "clients",
            f"data.held-out = {quoted(data.held_out)}: no client has this domain, so the server "
            "must test on it. Set evaluate.by to server or both, or remove data.held-out.",
        ),
        (
            evaluate.auc and evaluate.by == "clients",
            "evaluate.auc = true: clients compute no AUC. Set evaluate.by to both.",
        ),
        (
            evaluate.adabn and not data.held_out,
            "evaluate.adabn = true: AdaBN needs a held-out domain, and data.held-out is empty. Set "
            "data.held-out, or remove evaluate.adabn.",
        ),
        (
            data.validation_fraction and data.validation_examples,
            "data.validation-fraction and data.validation-examples are both set. Set one to 0.",
        ),
        (
            config.server.optimizer == "none" and config.server != ServerConfig(),
            "server.lr, server.momentum, server.tau or server.beta-2 is set, but server.optimizer "
            "= 'none' takes no step. Set server.optimizer, or remove the setting.",
        ),
        (
            data.fraction and data.examples_per_client,
            "data.fraction and data.examples-per-client are both set. Set one to 0.",
        ),
        (
            number and names,
            f"late-sites = {quoted(config.late_sites)} needs the other sites' names in sites.",
        ),
        (twice, f"{given}, late-sites = {quoted(config.late_sites)}: {twice!r} is given twice."),
        (
            not number and few,
            f"{given}: expected the names of at least {config.fewest_sites} sites, "
            "or their number. A site trains alone only with min-clients = 1.",
        ),
        (
            names and config.evaluate.by != "clients",
            f"{given}: only sites have names, and their "
            "runs have evaluate.by = 'clients'. Set it, or remove the names.",
        ),
        (
            names and config.min_clients > len(names),
            f"min-clients = {config.min_clients}: "
            f"{given} has only {len(names)} sites. Decrease min-clients.",
        ),
        *(
            (
                no_table and getattr(data, key),
                f"data.{argument_to_key(key)}: this setting applies to tables only, and data.name "
                f"= {data.name!r}. Remove it, or set data.name = 'table'.",
            )
            for key in OF_TABLES
        ),
    ]


def check_tuned(configs: Sequence[RunConfig]) -> None:
    """Raise ``ConfigError`` if ``tuned`` names neither training settings nor methods' arguments.

    These are arguments of built-in methods and of the methods of ``configs``.
    """
    methods = [method for config in configs for method in (config.client, config.strategy)]
    for tuned in {config.tuned for config in configs if config.tuned}:
        own = (f"{m.TABLE}.{argument_to_key(a)}" for m in methods for a in m.factory.arguments())
        keys = dict.fromkeys([*key_help(), *own])
        tables = "train.", "server.", *METHOD_TABLES
        valid = [key for key in keys if key.startswith(tables) and key not in _NAMES]
        for key in names_in(tuned):
            if key not in valid:
                raise ConfigError(f"tuned = {quoted(tuned)}: {unknown('setting', key, valid)}")


def tested_split(config: Mapping[str, Any]) -> str:
    """Return the examples on which a run is judged: ``test`` or, without tests, ``validation``."""
    return "test" if config.get("evaluate.test", True) else "validation"


def method_key(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the settings that identify a run's method: all but seed and execution settings.

    Arguments that equal the method's defaults are left out. Of a model that is tested without
    training, which has another path in each run, there is only the file's name.
    """
    config = {**config, "evaluate.model": Path(str(config.get("evaluate.model", ""))).name}
    left = {"seed", *execution_keys()}
    for choice in methods_of(config):
        defaults = choice.defaults() if choice.args else {}
        unset = [a for a, value in choice.args.items() if value == defaults.get(a, DEFAULT)]
        left |= {f"{choice.TABLE}.{argument_to_key(a)}" for a in unset}
    return frozenset(
        (key, shown(value))
        for key, value in config.items()
        if key not in left and not (key.startswith(COMPARED_TABLES) and value == DEFAULT)
    )


def data_key(config: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the settings that determine the clients' data: ``data.*`` but execution settings."""
    keys = [key for key in config if key.startswith("data.") and key not in execution_keys()]
    return frozenset((key, shown(config[key])) for key in keys)


def tuned_keys(config: Mapping[str, Any]) -> list[str]:
    """Return the settings and arguments that were tuned for a run's method (``tuned``)."""
    return names_in(str(config.get("tuned", "")))


def changed_settings(
    begun: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> str:
    """Return in words which settings differ, or ""; a setting that is missing has its default."""
    begun, now = ({**RunConfig().concise(), **settings} for settings in (begun, now))
    return "; ".join(
        f"{key} was {quoted(begun.get(key, DEFAULT))} and is {quoted(now.get(key, DEFAULT))}"
        for key in dict.fromkeys([*begun, *now])
        if key not in may_change and now.get(key, DEFAULT) != begun.get(key, DEFAULT)
    )
