"""Components that a run config names, with arguments: two methods, a data set, a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fairflower.arguments import argument_specs
from fairflower.config.text import (
    Scalar,
    argument_to_key,
    key_to_argument,
    parse_assignments,
    split_spec,
    unknown,
)
from fairflower.errors import (
    ConfigError,
    UserError,
    is_text,
    naming_failures,
    quoted,
)
from fairflower.registry import (
    ADAPTERS,
    CLIENTS,
    DATA_SETS,
    MODEL_OF,
    MODELS,
    PARTICIPATION,
    PRETRAINED,
    STRATEGIES,
)
from fairflower.registry.named import (
    DescribedRegistry,
    FamilyRegistry,
    MethodRegistry,
    Registry,
    add_cwd_to_path,
)

#: Value of an argument that restores the method's default.
DEFAULT = "default"


@dataclass(frozen=True)
class ComponentSpec:
    """Name of a component of a run, with the arguments that differ from its defaults."""

    name: str = ""
    args: Mapping[str, Scalar | None] = field(default_factory=dict, hash=False)

    #: Table of the run config and key that names it there, and registry of the names.
    TABLE: ClassVar[str]
    KEY: ClassVar[str] = "name"
    REGISTRY: ClassVar[Registry]

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the component that a run config or command line names.

        >>> StrategyConfig.read("my_package.rules:MinLoss:power=0.3")
        StrategyConfig(name='my_package.rules:MinLoss', args={'power': 0.3})
        """
        name, *rest = split_spec(text)
        if rest and "=" not in rest[0] and name not in cls.REGISTRY:
            name = f"{name}:{rest.pop(0)}"
        args: dict[str, Scalar | None] = {
            key_to_argument(key): None if str(value).lower() == "none" else value
            for key, value in parse_assignments(rest).items()
        }
        return cls(name.strip(), args)

    @property
    def factory(self) -> Any:
        """Class or function of this name; ``ConfigError`` if unknown or not importable."""
        if self.name not in self.REGISTRY:
            form = " Give a class outside this list as my_package.module:Class."
            hint = form if "." in self.name else ""
            raise ConfigError(unknown(self.REGISTRY.kind, self.name, self.REGISTRY.names()) + hint)
        if ":" in self.name:
            add_cwd_to_path()
        return self.REGISTRY[self.name]

    def make(self, *given: Any, **options: Any) -> Any:
        """Return the result of the factory for ``given``, ``options`` and the spec's arguments.

        ``UserError`` with the place of an exception in a user's class or function.
        """
        factory = self.factory
        with self.naming_failures():
            return factory(*given, **options, **self.args)

    def naming_failures(self) -> AbstractContextManager[None]:
        """Raise ``UserError`` for an exception in a user's class or function."""
        if self.name in self.REGISTRY.data:
            return nullcontext()
        subject = f"{self.TABLE}.{self.KEY} = {self.name!r}: it"
        module, remedy = self.factory.__module__, "Correct its arguments or its code."
        return naming_failures(UserError, subject, module, remedy)

    def check(self) -> None:
        """Raise ``ConfigError`` for an unknown argument, or a value that is not allowed."""
        if self.name in self.REGISTRY.data and not self.args:
            return  # nothing to import
        specs = argument_specs(self.factory)
        for arg, value in self.args.items():
            if arg not in specs:
                raise self._unknown(arg, specs)
            specs[arg].check(self._key(arg), value)

    def _key(self, arg: str) -> str:
        return f"{self.TABLE}.{self.KEY} = {self.name!r}: {argument_to_key(arg)}"

    def _unknown(self, arg: str, valid: Collection[str]) -> ConfigError:
        if valid:
            return ConfigError(unknown(f"argument of {self.name}", arg, valid))
        return ConfigError(
            f"{self._key(arg)}: {self.name} has no arguments (keyword-only parameters of "
            "its constructor). Remove it."
        )


class DataSpec(ComponentSpec):
    """Data set of ``data.name``."""

    TABLE: ClassVar[str] = "data"
    REGISTRY: ClassVar[DescribedRegistry] = DATA_SETS

    @property
    def kind(self) -> str:
        """Kind of the data set's examples, from `fairflower.registry.KINDS`."""
        return getattr(self.factory, "kind", "images")


class ModelSpec(ComponentSpec):
    """Network of ``model.name``."""

    TABLE: ClassVar[str] = "model"
    REGISTRY: ClassVar[FamilyRegistry] = MODELS

    @property
    def family(self) -> str:
        """Library of the network, such as ``timm``; empty for a built-in model."""
        return self.REGISTRY.family(self.name)

    @property
    def pretrained(self) -> bool:
        """Whether the network has the setting ``model.weights``."""
        return self.name in PRETRAINED or bool(self.family)

    def check_kind(self, kind: str) -> None:
        """Raise ``ConfigError``, with a suitable model, if the model does not accept a kind."""
        built_in = self.name in self.REGISTRY.data
        if self.family:
            kinds = self.REGISTRY.kinds[self.family]
        elif built_in and self.name not in MODEL_OF.values():
            kinds = ("images",)  # nothing to import
        else:
            kinds = getattr(self.factory, "kinds", ("images",))
        if kind not in kinds:
            known = built_in or self.family
            hint = "" if known else f", or set {self.name}.kinds = ({kind!r},) if that is wrong"
            raise ConfigError(
                f"model.name = {self.name!r}: it takes {' or '.join(kinds)}, and the data are "
                f"{kind}. Set it to {MODEL_OF[kind]} (--model {MODEL_OF[kind]}){hint}."
            )


class AdapterSpec(ComponentSpec):
    """Adapter of ``model.adapter``."""

    TABLE: ClassVar[str] = "model"
    KEY: ClassVar[str] = "adapter"
    REGISTRY: ClassVar[DescribedRegistry] = ADAPTERS


class ParticipationSpec(ComponentSpec):
    """Policy of ``participation.policy``."""

    TABLE: ClassVar[str] = "participation"
    KEY: ClassVar[str] = "policy"
    REGISTRY: ClassVar[DescribedRegistry] = PARTICIPATION


@dataclass(frozen=True)
class MethodSpec(ComponentSpec):
    """Strategy or client, whose arguments are run config keys."""

    HELP: ClassVar[str]
    REGISTRY: ClassVar[MethodRegistry]

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """Return the method that run config keys name, with its arguments.

        Config keys override arguments given in the name.
        """
        table = f"{cls.TABLE}."
        name = flat.get(f"{table}name", cls.name)
        if not isinstance(name, str) or not is_text(name):
            raise ConfigError(f"{table}name = {quoted(name)}: expected the name of a {table[:-1]}.")
        named = cls.read(name)
        args = {
            key_to_argument(key.removeprefix(table)): None if value == "none" else value
            for key, value in flat.items()
            if key.startswith(table) and key != f"{table}name" and value != DEFAULT
        }
        return cls(named.name, {**named.args, **args})

    @classmethod
    def parse(cls, text: str) -> list[Self]:
        """Return the methods of a comma-separated list.

        >>> StrategyConfig.parse("fedavg,fedheal:tau=0.4:beta=none")[1].args
        {'tau': 0.4, 'beta': None}
        """
        choices = [cls.read(part) for part in map(str.strip, text.split(",")) if part]
        if not choices:
            raise ConfigError(f"No {cls.TABLE} was named. Example: {cls.name}")
        return choices

    def defaults(self) -> Mapping[str, Any]:
        """Return the method's arguments with their defaults; empty if it is not installed.

        No file in the working directory is imported, since run folders may come from others.
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
            f"Remove it, or choose another {self.TABLE}.name."
        )

    @property
    def label(self) -> str:
        """Name in tables and figures: the method and its arguments that are not defaults.

        Arguments have the order of the method's constructor, so that equal methods share a label.
        """
        defaults = self.defaults() if self.args else {}
        ordered = {arg: self.args[arg] for arg in defaults if arg in self.args} | dict(self.args)
        shown = [
            f"{argument_to_key(arg)}={'none' if value is None else value}"
            for arg, value in ordered.items()
            if arg not in defaults or value != defaults[arg]
        ]
        return ":".join([self.name, *shown])

    def to_flat(self) -> dict[str, Scalar]:
        """Return the method's run config keys, without arguments at their defaults."""
        args = {
            f"{self.TABLE}.{argument_to_key(a)}": "none" if v is None else v
            for a, v in self.args.items()
        }
        return {f"{self.TABLE}.name": self.name, **args}

    def override(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``flat`` with this method in place of the method that it names.

        If ``flat`` names the same method, those of its arguments are kept that this method does not
        set; the value ``"default"`` restores a default.

        >>> flat = {"strategy.name": "fedheal", "strategy.tau": 0.4, "strategy.beta": 0.1}
        >>> StrategyConfig("fedheal", {"beta": None}).override(flat)
        {'strategy.name': 'fedheal', 'strategy.tau': 0.4, 'strategy.beta': 'none'}
        >>> StrategyConfig("fedavg").override(flat)
        {'strategy.name': 'fedavg'}
        """
        current = self.of(flat)
        others = {k: v for k, v in flat.items() if not k.startswith(f"{self.TABLE}.")}
        return others | (current.to_flat() if current.name == self.name else {}) | self.to_flat()


@dataclass(frozen=True)
class StrategyConfig(MethodSpec):
    """Strategy of a run.

    >>> StrategyConfig("fedheal", {"tau": 0.4, "beta": None}).label
    'fedheal:tau=0.4:beta=none'
    """

    name: str = "fedheal"
    TABLE: ClassVar[str] = "strategy"
    HELP: ClassVar[str] = "Strategy; `fairflower list strategies` shows all, or module:Class."
    REGISTRY: ClassVar[MethodRegistry] = STRATEGIES


@dataclass(frozen=True)
class ClientConfig(MethodSpec):
    """Method of local training of a run.

    >>> ClientConfig("fedprox", {"mu": 0.1}).to_flat()
    {'client.name': 'fedprox', 'client.mu': 0.1}
    """

    name: str = "sgd"
    TABLE: ClassVar[str] = "client"
    HELP: ClassVar[str] = (
        "Method of local training; `fairflower list clients` shows all, or module:Class."
    )
    REGISTRY: ClassVar[MethodRegistry] = CLIENTS
