"""Declaring a method's arguments and their allowed values in its constructor, and `conform`.

`conform` checks values that others wrote, in JSON or TOML, against the same annotations.

>>> class Method(Configurable):
...     '''Base of methods.'''
>>> class Mine(Method):
...     def __init__(
...         self,
...         *,
...         tau: Annotated[float | None, Range(0, 1)] = 0.3,
...         variant: Literal["paper", "released"] = "paper",
...     ) -> None:
...         self.tau, self.variant = tau, variant
>>> Mine.arguments()
{'tau': 0.3, 'variant': 'paper'}
>>> Mine(tau=1.5)
Traceback (most recent call last):
    ...
fairflower.errors.ConfigError: tau = 1.5: expected a number in [0, 1], or None.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, SimpleNamespace, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NotRequired,
    Required,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from fairflower.errors import ConfigError, is_text, quoted


@dataclass(frozen=True)
class Range:
    """Allowed numbers: from ``low`` to ``high``, above ``above``, and finite unless high is inf."""

    low: float = -math.inf
    high: float | None = None
    above: float = -math.inf

    def __contains__(self, value: Any) -> bool:
        high = math.inf if self.high is None else self.high
        return bool(self.low <= value <= high and value > self.above)

    def __str__(self) -> str:
        if self.above > -math.inf:
            bounded = self.high not in (None, math.inf)
            over = f"in ({self.above}, {self.high}]" if bounded else f"above {self.above}"
            return f"a number {over}"
        if self.high not in (None, math.inf):
            return f"a number in [{self.low}, {self.high}]"
        return f"a number >= {self.low}" if self.low > -math.inf else "a finite number"


#: Range of finite floats; integers may be larger.
_FINITE = Range(-sys.float_info.max, sys.float_info.max)


@dataclass(frozen=True)
class Search:
    """Interval that `fairflower tune` searches; ``log`` selects a logarithmic scale.

    Needed for a `Range` without a lowest or highest number: ``Annotated[float, Range(0),
    Search(0.01, 10, log=True)]``. A closed range is searched as a whole.
    """

    low: float
    high: float
    log: bool = False

    def at(self, place: float, whole: bool = False) -> float:
        """Return the number at position ``place`` (0 to 1) in the interval, to three digits.

        >>> Search(0.01, 10, log=True).at(1 / 3), Search(1, 3).at(0.9, whole=True)
        (0.1, 3)
        """
        if whole:
            return min(int(self.low + place * (self.high - self.low + 1)), int(self.high))
        if self.log:
            value = self.low * (self.high / self.low) ** place
        else:
            value = self.low + place * (self.high - self.low)
        return min(max(float(f"{value:.3g}"), self.low), self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}{', log scale' if self.log else ''}"


#: Note on a setting of a run that affects how and where a run is executed, but not its result.
EXECUTION = object()


@dataclass(frozen=True)
class ArgumentSpec:
    """An argument of a constructor, or a setting of a run: its default and its allowed values."""

    default: Any
    number: bool = False  # whether numbers are allowed
    whole: bool = False  # whether only whole numbers are allowed
    range: Range | None = None  # allowed numbers; None allows all
    search: Search | None = None  # interval that `fairflower tune` searches
    words: tuple[str, ...] = ()  # allowed words
    text: bool = False  # whether any string is allowed
    truth: bool = False  # whether True and False are allowed
    optional: bool = False  # whether None is allowed
    help: str = ""  # of a setting of a run
    execution: bool = False  # whether a setting does not affect a run's result

    @classmethod
    def of(cls, default: Any, hint: Any) -> ArgumentSpec:
        """Parse an annotation of numbers, words, bool and None; other types are not checked."""
        hint, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        number = int in members or float in members
        range_ = next((note for note in notes if isinstance(note, Range)), None)
        search = next((note for note in notes if isinstance(note, Search)), None)
        if search is None and number and range_ is not None and range_.high is not None:
            closed = math.isfinite(range_.low) and math.isfinite(range_.high)
            search = Search(range_.low, range_.high) if closed else None
        words = [word for m in members if get_origin(m) is Literal for word in get_args(m)]
        return cls(
            default,
            number=number,
            whole=int in members and float not in members,
            range=range_,
            search=search,
            words=tuple(words),
            text=str in members,
            truth=bool in members,
            optional=NoneType in members,
            help=next((note for note in notes if isinstance(note, str)), ""),
            execution=EXECUTION in notes,
        )

    @property
    def bounded(self) -> bool:
        """Whether the annotation limits the values, by a range, a list of words or ``bool``."""
        return self.range is not None or bool(self.words) or self.truth

    def at(self, place: float) -> float:
        """Return the number at position ``place`` (0 to 1) in the interval `search`."""
        assert self.search is not None
        return self.search.at(place, self.whole)

    def check(self, key: str, value: Any) -> None:
        """Raise ``ConfigError`` if a value is not allowed; the error lists the allowed values."""
        if (allowed := self._allowed_instead(value)) is not None:
            none = ", or None" if self.optional else ""
            raise ConfigError(f"{key} = {quoted(value)}: expected {allowed}{none}.")

    def _allowed_instead(self, value: Any) -> str | None:
        """Describe the allowed values; return None if the value is allowed."""
        kinds = self.number or self.words or self.text or self.truth
        if not kinds or (value is None and self.optional):
            return None
        if isinstance(value, bool) and self.truth:
            return None
        words = " or ".join((*self.words, *["true", "false"] * self.truth))
        if isinstance(value, str) and (self.text or value in self.words):
            return None
        if not self.number:
            return words or "text"
        numbers = str(self.range or "a number")
        if self.whole:
            numbers = numbers.replace("a number", "a whole number")
        if isinstance(value, bool) or not isinstance(value, Real):
            return " or ".join(filter(None, (numbers, words)))
        if (self.range is not None and value not in self.range) or (
            self.whole and not isinstance(value, Integral)
        ):
            return numbers
        open_ended = self.range is not None and self.range.high is None
        return "a finite number" if open_ended and value not in _FINITE else None


#: Class attributes that must be tuples; a common mistake is a single value without its comma.
_TUPLES = (
    *("STATE", "exchanges", "measurements", "reported_metrics", "used_next_round"),
    *("needs", "reads", "learns"),  # earlier names of the last three
)


class Configurable:
    """A class whose constructor checks its keyword arguments against their annotations.

    ``STATE``, the names of the attributes that are kept from round to round, includes those of the
    base classes.

    A direct subclass is a base class of methods. All methods share the arguments of its
    constructor, which therefore do not count as a method's arguments.
    """

    #: Argument -> attribute of a run's task that is its default (`fairflower.tasks.Task`).
    task_defaults: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in _TUPLES:
            if isinstance(value := vars(cls).get(name), (str, type)):
                what = getattr(value, "__name__", repr(value))
                raise TypeError(f"{cls.__name__}.{name} = {what}: write a tuple, ({what},).")
        if kept := [name for kind in (*cls.__bases__, cls) for name in getattr(kind, "STATE", ())]:
            setattr(cls, "STATE", tuple(dict.fromkeys(kept)))  # noqa: B010
        if "__init__" in vars(cls) and Configurable not in cls.__bases__:
            setattr(cls, "__init__", _checked(vars(cls)["__init__"]))  # noqa: B010

    @classmethod
    def argument_specs(cls) -> Mapping[str, ArgumentSpec]:
        """Return the method's arguments with their allowed values."""
        return constructor_specs(cls)

    @classmethod
    def arguments(cls) -> dict[str, Any]:
        """Return the method's arguments (the paper's hyper-parameters) with their defaults."""
        return {name: argument.default for name, argument in cls.argument_specs().items()}

    @classmethod
    def made_with(cls, arguments: Mapping[str, Any]) -> Self:
        """Return an instance; arguments that the constructor does not have are ignored."""
        specs = constructor_specs(cls)
        return cls(**{name: value for name, value in arguments.items() if name in specs})


def argument_specs(factory: Callable[..., Any]) -> Mapping[str, ArgumentSpec]:
    """Return keyword-only arguments of a class or function, except those shared by all methods."""
    if not isinstance(factory, type):
        return _keyword_specs(getattr(factory, "func", factory))  # func: of a partial
    if issubclass(factory, Configurable):
        return factory.argument_specs()
    return constructor_specs(factory)


def shared_arguments(base: type) -> frozenset[str]:
    """Return the names of the arguments that every method accepts, from the base class."""
    keywords = get_type_hints(base.__init__, include_extras=True).get("options")  # type: ignore[misc]
    listed = [] if keywords is None else get_args(keywords)[0].__annotations__
    return frozenset((*listed, *_keyword_specs(base.__init__)))  # type: ignore[misc]


def _constructor_specs(kind: type) -> dict[str, ArgumentSpec]:
    specs: dict[str, ArgumentSpec] = {}
    for base in kind.__mro__:
        if Configurable in base.__bases__:
            break
        if init := vars(base).get("__init__"):
            specs = specs | {n: s for n, s in _keyword_specs(init).items() if n not in specs}
            parameters = inspect.signature(init).parameters.values()
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return specs


#: Returns the keyword-only arguments of a constructor and of the base constructors that it calls.
constructor_specs: Callable[[type], Mapping[str, ArgumentSpec]] = cache(_constructor_specs)


@cache
def _keyword_specs(init: Callable[..., None]) -> dict[str, ArgumentSpec]:
    keywords = [p for p in inspect.signature(init).parameters.values() if p.kind is p.KEYWORD_ONLY]
    raw = SimpleNamespace(__annotations__={p.name: p.annotation for p in keywords})
    names = getattr(inspect.unwrap(init), "__globals__", {})
    hints = get_type_hints(raw, names, include_extras=True)
    specs = {p.name: ArgumentSpec.of(p.default, hints[p.name]) for p in keywords}
    if any("none" in spec.words and not spec.optional for spec in specs.values()):
        raise ConfigError("Literal['none']: in a run config none is None. Allow None, too.")
    return specs


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap a constructor so that it checks its keyword arguments."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        for name, argument in _keyword_specs(init).items():
            if name in given:
                argument.check(name, given[name])
        init(self, *args, **given)

    return checked


#: Integer that is at most 2**53; doubles represent all of these exactly.
Count = Annotated[int, Range(0, 2**53)]
#: Finite number.
Finite = Annotated[float, Range(-sys.float_info.max, sys.float_info.max)]
#: Name of a domain, class or group, as a run folder can store it.
Name = Annotated[str, re.compile(r"[^\r]+")]

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
_WORDS |= {list: "a list", dict: "an object", NoneType: "null"}


def conform(value: Any, hint: Any, name: str = "") -> None:
    """Check a value from JSON against a type; raise ``ValueError`` naming the invalid part.

    A type is a plain type, ``Annotated[float, Range(0, 1)]``, ``Annotated[str, re.compile(...)]``,
    a ``Literal``, a list, tuple, dict or union of types, a ``TypedDict``, which may have
    more fields in the value, or a dataclass.

    >>> conform([3, -1], list[Count], "sizes")
    Traceback (most recent call last):
        ...
    ValueError: sizes[1] = -1: expected a number in [0, 9007199254740992].
    """
    if type(hint) is type and hint in _PLAIN:  # most values
        _expect(_PLAIN[hint](value), _WORDS[hint], name, value)
        return
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Required, NotRequired):
        conform(value, args[0], name)
    elif origin is Annotated:
        conform(value, args[0], name)
        for note in args[1:]:
            pattern = isinstance(note, re.Pattern)
            if not (note.fullmatch(value) if pattern else value in note):
                words = f"text that matches {note.pattern}" if pattern else str(note)
                _expect(False, words, name, value)
    elif origin in (Union, UnionType):
        _one_of(value, args, name)
    elif origin is Literal:
        words = f"one of {', '.join(map(str, args))}"
        kinds = {type(arg) for arg in args}
        _expect(type(value) in kinds and value in args, words, name, value)
    elif origin in (list, tuple):
        _expect(isinstance(value, origin), _WORDS[list], name, value)
        for place, item in enumerate(value):
            conform(item, args[0], f"{name}[{place}]")
    elif origin is dict:
        _expect(isinstance(value, dict), _WORDS[dict], name, value)
        for key, item in value.items():
            conform(key, args[0], f"a key of {name}")
            conform(item, args[1], f"{name}.{quoted(key)[1:-1]}")
    elif is_typeddict(hint) or is_dataclass(hint):
        _conform_fields(value, hint, name)
    elif hint is not Any:
        _expect(isinstance(value, hint), f"a {hint.__name__}", name, value)


def _conform_fields(value: Any, hint: Any, name: str) -> None:
    if is_dataclass(hint):
        _expect(isinstance(value, hint), _WORDS[dict], name, value)  # type: ignore[arg-type]
        value = vars(value)
    _expect(isinstance(value, dict), _WORDS[dict], name, value)
    for field, kind in _fields_of(hint).items():
        origin = get_origin(kind)
        if field in value:
            conform(value[field], kind, f"{name}.{field}" if name else field)
        elif origin is Required or (hint.__total__ and origin is not NotRequired):
            raise ValueError(f"{name or 'it'} has no {field!r}.")


@cache
def _fields_of(hint: Any) -> dict[str, Any]:
    return get_type_hints(hint, include_extras=True)


def _one_of(value: Any, hints: tuple[Any, ...], name: str) -> None:
    """Check a value against a union of plain types and at most one other type."""
    others = [hint for hint in hints if hint not in _PLAIN]
    if not any(_PLAIN[hint](value) for hint in hints if hint in _PLAIN):
        words = " or ".join(_WORDS[hint] for hint in hints if hint in _WORDS)
        _expect(bool(others), words, name, value)
        conform(value, others[0], name)


_PLAIN: Mapping[Any, Callable[[Any], bool]] = {
    int: lambda value: type(value) is int and abs(value) < 2**64,
    float: lambda value: isinstance(value, float) or (type(value) is int and value in _FINITE),
    str: lambda value: isinstance(value, str) and is_text(value),
    bool: lambda value: isinstance(value, bool),
    NoneType: lambda value: value is None,
}


def _expect(holds: object, words: str, name: str, value: Any) -> None:
    if not holds:
        raise ValueError(f"{f'{name} = ' if name else ''}{quoted(value)}: expected {words}.")
