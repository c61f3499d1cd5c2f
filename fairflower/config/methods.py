"""What a run config names: two methods, a data set and a model, with arguments of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from fairflower.arguments import argument_specs
from fairflower.config.text import (
    Scalar,
    argument_to_key,
    key_to_argument,
    parse_assignments,
    unknown,
)
from fairflower.errors import ConfigError, is_text, quoted
from fairflower.registry import CLIENTS, DATA_SETS, MODEL_OF, MODELS, STRATEGIES
from fairflower.registry.named import DescribedRegistry, MethodRegistry, Registry, add_cwd_to_path

#: The value of an argument that is left to the method.
DEFAULT = "default"


@dataclass(frozen=True)
class ComponentSpec:
    """A part of a run by name, with those of its own arguments that are not left to it."""

    name: str = ""
    args: Mapping[str, Scalar | None] = field(default_factory=dict, hash=False)

    #: The table of the run config that it stands in, and what it can name.
    TABLE: ClassVar[str]
    REGISTRY: ClassVar[Registry]

    @classmethod
    def read(cls, text: str) -> Self:
        """Read one as it is named in a run config or on a command line.

        >>> StrategyConfig.read("my_package.rules:MinLoss:power=0.3")
        StrategyConfig(name='my_package.rules:MinLoss', args={'power': 0.3})
        """
        name, *rest = text.split(":")
        if rest and "=" not in rest[0] and name not in cls.REGISTRY:
            name = f"{name}:{rest.pop(0)}"
        args: dict[str, Scalar | None] = {
            key_to_argument(key): None if str(value).lower() == "none" else value
            for key, value in parse_assignments(rest).items()
        }
        return cls(name.strip(), args)

    @property
    def factory(self) -> Any:
        """What is named, a class or a function; ``ConfigError`` if it is not to be had."""
        if self.name not in self.REGISTRY:
            own = " One that is not in this list is named as my_package.module:Class."
            hint = own if "." in self.name else ""
            raise ConfigError(unknown(self.REGISTRY.kind, self.name, self.REGISTRY.names()) + hint)
        if ":" in self.name:
            add_cwd_to_path()
        return self.REGISTRY[self.name]

    def check(self) -> None:
        """Raise ``ConfigError`` for another one's argument, or a value that is not allowed."""
        if self.name in self.REGISTRY.data and not self.args:
            return  # nothing to import
        own = argument_specs(self.factory)
        for arg, value in self.args.items():
            if arg not in own:
                raise self._unknown(arg, own)
            own[arg].check(self._key(arg), value)

    def _key(self, arg: str) -> str:
        return f"{self.TABLE}.name = {self.name!r}: {argument_to_key(arg)}"

    def _unknown(self, arg: str, own: Collection[str]) -> ConfigError:
        if own:
            return ConfigError(unknown(f"argument of {self.name}", arg, own))
        return ConfigError(
            f"{self._key(arg)}: {self.name} has no arguments of its own: they would be keyword-"
            "only ones of its constructor. Remove it."
        )


class DataSpec(ComponentSpec):
    """Which data set: what ``data.name`` says."""

    TABLE: ClassVar[str] = "data"
    REGISTRY: ClassVar[DescribedRegistry] = DATA_SETS

    @property
    def kind(self) -> str:
        """What its examples are, of `fairflower.registry.KINDS`."""
        return getattr(self.factory, "kind", "images")


class ModelSpec(ComponentSpec):
    """Which network: what ``model.name`` says."""

    TABLE: ClassVar[str] = "model"
    REGISTRY: ClassVar[DescribedRegistry] = MODELS

    def check_kind(self, kind: str) -> None:
        """Raise ``ConfigError`` if it does not take such examples, with a model that does."""
        built_in = self.name in self.REGISTRY.data
        if built_in and self.name not in MODEL_OF.values():
            kinds: tuple[str, ...] = ("images",)  # nothing to import
        else:
            kinds = getattr(self.factory, "kinds", ("images",))
        if kind not in kinds:
            own = "" if built_in else f", or give {self.name} kinds = ({kind!r},) if it takes them"
            raise ConfigError(
                f"model.name = {self.name!r}: it takes {' or '.join(kinds)}, and the data are "
                f"{kind}. Set it to {MODEL_OF[kind]} (--model {MODEL_OF[kind]}){own}."
            )


@dataclass(frozen=True)
class MethodSpec(ComponentSpec):
    """A method, whose arguments are run config keys."""

    HELP: ClassVar[str]
    REGISTRY: ClassVar[MethodRegistry]

    @classmethod
    def of(cls, flat: Mapping[str, Any]) -> Self:
        """The method that run config keys name, with the arguments that they do not leave to it.

        Those that come with its name, which is all that ``flwr run`` can be told of a method
        that fairflower does not have, give way to keys.
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
        """Read several as they are listed on a command line.

        >>> StrategyConfig.parse("fedavg,fedheal:tau=0.4:beta=none")[1].args
        {'tau': 0.4, 'beta': None}
        """
        choices = [cls.read(part) for part in map(str.strip, text.split(",")) if part]
        if not choices:
            raise ConfigError(f"No {cls.TABLE} was named. Example: {cls.name}")
        return choices

    def defaults(self) -> Mapping[str, Any]:
        """The method's own arguments with their defaults; none of one that is not here.

        A run folder may be anybody's: to read it, no file in the working directory is run.
        """
        try:
            return self.REGISTRY[self.name].arguments()  # type: ignore[no-any-return]
        except ConfigError:
            return {}

    def _key(self, arg: str) -> str:
        return f"{self.TABLE}.{argument_to_key(arg)}"

    def _unknown(self, arg: str, own: Collection[str]) -> ConfigError:
        owners = self.REGISTRY.arguments().get(arg)
        if owners is None:
            return super()._unknown(arg, own)
        return ConfigError(
            f"{self._key(arg)} is an argument of {', '.join(owners)}, not of {self.name}. "
            f"Remove it, or choose another {self.TABLE}.name."
        )

    @property
    def label(self) -> str:
        """How tables and figures call it: the name and what differs from its defaults.

        In the method's own order, so that one method has one label.
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
        """Its run config keys, without the arguments that are left to it."""
        args = {
            f"{self.TABLE}.{argument_to_key(a)}": "none" if v is None else v
            for a, v in self.args.items()
        }
        return {f"{self.TABLE}.name": self.name, **args}

    def override(self, flat: Mapping[str, Any]) -> dict[str, Any]:
        """``flat``, run config keys, with this method in place of the one it names.

        Where that is the same method, its arguments stay that are not given here;
        ``"default"`` gives one back to the method.

        >>> flat = {"strategy.name": "fedheal", "strategy.tau": 0.4, "strategy.beta": 0.1}
        >>> StrategyConfig("fedheal", {"beta": None}).override(flat)
        {'strategy.name': 'fedheal', 'strategy.tau': 0.4, 'strategy.beta': 'none'}
        >>> StrategyConfig("fedavg").override(flat)
        {'strategy.name': 'fedavg'}
        """
        given = self.of(flat)
        others = {k: v for k, v in flat.items() if not k.startswith(f"{self.TABLE}.")}
        return others | (given.to_flat() if given.name == self.name else {}) | self.to_flat()


@dataclass(frozen=True)
class StrategyConfig(MethodSpec):
    """Which aggregation rule.

    >>> StrategyConfig("fedheal", {"tau": 0.4, "beta": None}).label
    'fedheal:tau=0.4:beta=none'
    """

    name: str = "fedheal"
    TABLE: ClassVar[str] = "strategy"
    HELP: ClassVar[str] = (
        "Aggregation rule; `fairflower list strategies` shows all, or module:Class."
    )
    REGISTRY: ClassVar[MethodRegistry] = STRATEGIES


@dataclass(frozen=True)
class ClientConfig(MethodSpec):
    """How a client trains.

    >>> ClientConfig("fedprox", {"mu": 0.1}).to_flat()
    {'client.name': 'fedprox', 'client.mu': 0.1}
    """

    name: str = "sgd"
    TABLE: ClassVar[str] = "client"
    HELP: ClassVar[str] = "Local training; `fairflower list clients` shows all, or module:Class."
    REGISTRY: ClassVar[MethodRegistry] = CLIENTS
