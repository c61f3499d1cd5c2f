"""Components named in a run config, with their arguments: strategy, client, data set, model."""

import inspect
import re
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, TypeVar

from fairflower.arguments import argument_specs
from fairflower.config.text import (
    Scalar,
    argument_to_key,
    key_to_argument,
    names_in,
    parse_assignments,
    shown,
    split_spec,
    unknown,
)
from fairflower.errors import ConfigError, UserError, is_text, naming_failures, quoted
from fairflower.registry import (
    ADAPTERS,
    CLASSIFICATION,
    CLIENTS,
    DATA_SETS,
    KINDS,
    MODEL_OF,
    MODELS,
    OWN_FILES,
    PARTICIPATION,
    STRATEGIES,
    TASKS,
    TRACKERS,
)
from fairflower.registry.named import Registry

#: Argument value that restores the method's default.
DEFAULT = "default"


@dataclass(frozen=True)
class Spec:
    """Name of a component of a run, with the arguments that are set."""

    name: str = ""
    args: Mapping[str, Scalar | None] = field(default_factory=dict, hash=False)

    #: Run config key of the component's name, and the registry of names.
    KEY: ClassVar[str]
    REGISTRY: ClassVar[Registry]
    REMEDY = "Correct its arguments or its code."

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a component's name and arguments from a run config or command line.

        >>> StrategyConfig.read("my_package.rules:MinLoss:power=0.3")
        StrategyConfig(name='my_package.rules:MinLoss', args={'power': 0.3})
        """
        name, *rest = split_spec(text)
        if rest and "=" not in rest[0] and name not in cls.REGISTRY:
            name = f"{name}:{rest.pop(0)}"
        args: dict[str, Scalar | None] = {
            key_to_argument(key): None if str(value).lower() == "none" else value
            for key, value in parse_assignments(rest, f"{cls.KEY} = {quoted(text)}").items()
        }
        return cls(name.strip(), args)

    @property
    def factory(self) -> Any:
        """The class or function; raises ``ConfigError`` if it is unknown or not importable."""
        if self.name not in self.REGISTRY:
            form = " Write a class that is not in this list as my_package.module:Class."
            hint = form if re.search("[.:/]", self.name) else ""
            raise ConfigError(unknown(self.REGISTRY.kind, self.name, self.REGISTRY.names()) + hint)
        return self.REGISTRY.load(self.name)

    def make(self, *given: Any, **options: Any) -> Any:
        """Call the factory with ``given``, ``options`` and the spec's arguments; return its result.

        Raises ``UserError`` for an exception in a user's class or function, with its location.
        """
        factory = self.factory
        with self.naming_failures():
            return factory(*given, **options, **self.args)

    def naming_failures(self) -> AbstractContextManager[None]:
        """Return a context manager that turns exceptions in a user's code into ``UserError``."""
        if self.name in self.REGISTRY.data:
            return nullcontext()
        subject = f"{self.KEY} = {self.name!r}: it"
        return naming_failures(UserError, subject, self.factory.__module__, self.REMEDY)

    def check(self) -> None:
        """Raise ``ConfigError`` if an argument is unknown or its value is not allowed."""
        if self.name in self.REGISTRY.data and not self.args:
            return  # nothing to import
        specs = argument_specs(self.factory)
        for arg, value in self.args.items():
            if arg not in specs:
                raise self._unknown(arg, specs)
            specs[arg].check(self._key(arg), value)

    def _key(self, arg: str) -> str:
        return f"{self.KEY} = {self.name!r}: {argument_to_key(arg)}"

    def _unknown(self, arg: str, valid: Collection[str]) -> ConfigError:
        if valid:
            keys = map(argument_to_key, valid)
            return ConfigError(unknown(f"argument of {self.name}", argument_to_key(arg), keys))
        return ConfigError(
            f"{self._key(arg)}: {self.name} has no arguments, that is, its constructor has no "
            "keyword-only parameters. Remove the argument."
        )


class DataSpec(Spec):
    """The data set that ``data.name`` selects."""

    KEY = "data.name"
    REGISTRY = DATA_SETS

    @property
    def kind(self) -> str:
        """Kind of the data set's examples, from `fairflower.registry.KINDS`."""
        return getattr(self.factory, "kind", "images")

    @property
    def own(self) -> bool:
        """Whether these are a user's data, in which a domain is a site: files or a class."""
        return self.name in OWN_FILES or self.name not in self.REGISTRY.data

    def task(self, wanted: str) -> "TaskSpec | None":
        """Return what is learnt: ``data.task`` or, if it is empty, the data set's own task.

        None if only the data set itself knows, because its task may depend on its arguments.
        """
        own = getattr(self.factory, "task", CLASSIFICATION)
        text = wanted or (own if isinstance(own, str) and own != CLASSIFICATION else "")
        return TaskSpec.read(text) if text else None


class TaskSpec(Spec):
    """What a network learns, which ``data.task`` or the data set selects."""

    KEY = "data.task"
    REGISTRY = TASKS


def output_dims(task: Any, kind: str) -> int:
    """Return how many dimensions a network's output has for an example of a kind, for a task."""
    ndim = next(n for n, name in KINDS.items() if name == kind)
    return len(task.output_shape(2, (2,) * ndim))


class ModelSpec(Spec):
    """The network that ``model.name`` selects."""

    KEY = "model.name"
    REGISTRY = MODELS
    REMEDY = "Correct its arguments or its code; it is made with (num_classes, shape)."

    @property
    def known(self) -> bool:
        """Whether the network is built in or of a library, such as ``timm``, and not a user's."""
        return self.name in self.REGISTRY.data or bool(self.REGISTRY.family(self.name))

    def takes(self, name: str) -> bool:
        """Return whether the network has a parameter that is no argument of ``model.name``."""
        try:
            found = inspect.signature(self.factory).parameters.get(name)
        except ValueError:  # the function is not written in Python
            return False
        return found is not None and found.kind is not found.KEYWORD_ONLY

    def check_fit(self, kind: str, task: Any = None, trained: bool = False) -> None:
        """Raise ``ConfigError`` if the model does not fit the kind of examples, or the task.

        ``task`` is a `fairflower.tasks.Task`, or None if it is not known yet. A user's network is
        tried instead (`fairflower.models.build`). A ``trained`` model is only tested.
        """
        kinds = getattr(self.factory, "kinds", ("images",))
        default = task.models.get(kind, MODEL_OF[kind]) if task else MODEL_OF[kind]
        remedy = f"Set it to {default} (--model {default})"
        if trained:
            remedy = "Choose data that fit evaluate.model, and the network that it was trained as"
        if kind not in kinds:
            hint = (
                "" if self.known else f", or set {self.name}.kinds = ({kind!r},) if that is wrong"
            )
            raise ConfigError(
                f"model.name = {self.name!r}: this model accepts {' or '.join(kinds)}, but the "
                f"data are {kind}. {remedy}{hint}."
            )
        dims = getattr(self.factory, "output_dims", (1,))
        if task and self.known and (needed := output_dims(task, kind)) not in dims:
            outputs = " or ".join(OUTPUTS[n] for n in dims)
            raise ConfigError(
                f"model.name = {self.name!r}: its output for an example is {outputs}, but the task "
                f"of the data needs {OUTPUTS[needed]}. {remedy}."
            )


class AdapterSpec(Spec):
    """The adapter that ``model.adapter`` selects."""

    KEY = "model.adapter"
    REGISTRY = ADAPTERS


class ParticipationSpec(Spec):
    """The participation policy that ``participation.policy`` selects."""

    KEY = "participation.policy"
    REGISTRY = PARTICIPATION


class TrackerSpec(Spec):
    """The experiment tracker that ``track`` selects."""

    KEY = "track"
    REGISTRY = TRACKERS


#: Words for the output of a network, by its number of dimensions.
OUTPUTS = {1: "a vector", 2: "a vector at each place", 3: "a vector at each pixel"}


@dataclass(frozen=True)
class MethodSpec(Spec):
    """A strategy or a client; its arguments are run config keys."""

    TABLE: ClassVar[str]
    HELP: ClassVar[str]

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """Return the method named in a run config, with its arguments.

        Config keys override arguments in the name.
        """
        name = flat.get(cls.KEY, cls.name)
        if not isinstance(name, str) or not is_text(name):
            raise ConfigError(f"{cls.KEY} = {quoted(name)}: expected the name of a {cls.TABLE}.")
        table = f"{cls.TABLE}."
        named = cls.read(name)
        args = {
            key_to_argument(key.removeprefix(table)): None if value == "none" else value
            for key, value in flat.items()
            if key.startswith(table) and key != cls.KEY and value != DEFAULT
        }
        return cls(named.name, {**named.args, **args})

    def for_task(self, task: Any) -> Self:
        """Return the method with the task's defaults of arguments that are not set."""
        of_task = {arg: getattr(task, name) for arg, name in self.factory.task_defaults.items()}
        return replace(self, args={**of_task, **self.args})

    @classmethod
    def parse(cls, text: str) -> list[Self]:
        """Parse a comma-separated list of methods.

        >>> StrategyConfig.parse("fedavg,fedheal:tau=0.4:beta=none")[1].args
        {'tau': 0.4, 'beta': None}
        """
        choices = [cls.read(part) for part in names_in(text)]
        if not choices:
            raise ConfigError(f"No {cls.TABLE} was named. Example: {cls.name}")
        return choices

    def defaults(self) -> Mapping[str, Any]:
        """Return the method's arguments with their defaults, or {} if it is not installed.

        Files in the working directory are not imported, because run folders may come from other
        people.
        """
        try:
            return self.REGISTRY[self.name].arguments()  # type: ignore[no-any-return]
        except ConfigError:
            return {}

    def _key(self, arg: str) -> str:
        return f"{self.TABLE}.{argument_to_key(arg)}"

    def _unknown(self, arg: str, valid: Collection[str]) -> ConfigError:
        owners = self.REGISTRY.arguments().get(arg)
        if owners is None:
            return super()._unknown(arg, valid)
        return ConfigError(
            f"{self._key(arg)} is an argument of {', '.join(owners)}, not of {self.name}. "
            f"Remove it, or choose another {self.KEY}."
        )

    @property
    def label(self) -> str:
        """Name in tables and figures: the method, and the arguments that are not at their defaults.

        Arguments are in the order of the method's constructor, so that equal methods share a label.
        """
        defaults = self.defaults() if self.args else {}
        ordered = {arg: self.args[arg] for arg in defaults if arg in self.args} | dict(self.args)
        changed = [
            f"{argument_to_key(arg)}={'none' if value is None else shown(value)}"
            for arg, value in ordered.items()
            if arg not in defaults or value != defaults[arg]
        ]
        return ":".join([self.name, *changed])

    def to_flat(self) -> dict[str, Scalar]:
        """Return the method as run config keys."""
        args = {self._key(a): "none" if v is None else v for a, v in self.args.items()}
        return {self.KEY: self.name, **args}

    def override(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``flat`` with its method replaced by this method.

        If both are the same method, or ``flat`` names none, arguments in ``flat`` that this method
        does not set are kept; the value ``"default"`` restores a default.

        >>> flat = {"strategy.name": "fedheal", "strategy.tau": 0.4, "strategy.beta": 0.1}
        >>> StrategyConfig("fedheal", {"beta": None}).override(flat)
        {'strategy.name': 'fedheal', 'strategy.tau': 0.4, 'strategy.beta': 'none'}
        >>> StrategyConfig("fedavg").override(flat)
        {'strategy.name': 'fedavg'}
        >>> StrategyConfig("qffl").override({"strategy.q": 5.0})
        {'strategy.name': 'qffl', 'strategy.q': 5.0}
        """
        current = self.of(flat)
        others = {k: v for k, v in flat.items() if not k.startswith(f"{self.TABLE}.")}
        kept = current.name == self.name or self.KEY not in flat
        return others | (current.to_flat() if kept else {}) | self.to_flat()


@dataclass(frozen=True)
class StrategyConfig(MethodSpec):
    """The strategy of a run.

    >>> StrategyConfig("fedheal", {"tau": 0.4, "beta": None}).label
    'fedheal:tau=0.4:beta=none'
    """

    name: str = "fedheal"
    TABLE = "strategy"
    KEY = "strategy.name"
    HELP = "Strategy: a name from `fairflower list strategies`, or module:Class."
    REGISTRY = STRATEGIES
    REMEDY = (
        "Correct its arguments or its code: a constructor accepts **options and calls "
        "super().__init__(**options)."
    )


@dataclass(frozen=True)
class ClientConfig(MethodSpec):
    """The way in which the clients of a run train.

    >>> ClientConfig("fedprox", {"mu": 0.1}).to_flat()
    {'client.name': 'fedprox', 'client.mu': 0.1}
    """

    name: str = "sgd"
    TABLE = "client"
    KEY = "client.name"
    HELP = "How clients train: a name from `fairflower list clients`, or module:Class."
    REGISTRY = CLIENTS
    REMEDY = (
        "Correct its arguments or its code: a constructor accepts *args and **options and calls "
        "super().__init__(*args, **options)."
    )


#: Name of a list in `fairflower list` -> the kind of parts that it lists and a run config names.
PARTS: Mapping[str, type[Spec]] = {
    "strategies": StrategyConfig,
    "clients": ClientConfig,
    "data": DataSpec,
    "tasks": TaskSpec,
    "models": ModelSpec,
    "adapters": AdapterSpec,
    "policies": ParticipationSpec,
    "trackers": TrackerSpec,
}

#: Either kind of method.
Choice = TypeVar("Choice", bound=MethodSpec)
