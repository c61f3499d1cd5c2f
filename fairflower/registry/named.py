"""Finding strategies, clients, models and data sets by name, wherever they were written.

Beside the built-in ones, `fairflower.registry`, there are those of other packages: named by an
entry point, or by place, ``module:Class``.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import re
import sys
from collections import Counter, UserDict
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fairflower.arguments import argument_specs
from fairflower.errors import ConfigError


class Registry(UserDict[str, Any]):
    """Classes and functions by name, imported when asked for.

    Those that are built in, from ``"module:attribute"`` below ``package``, are what it iterates
    over. It also has what packages offer as entry points of the group ``package``, and any
    other name that is a place itself: these have to be of the class at ``base``, or functions
    where ``makers`` may be named.
    """

    def __init__(
        self, package: str, places: Mapping[str, str], kind: str, base: str, makers: bool = False
    ) -> None:
        super().__init__(places)
        self.package = package
        #: What one of them is called in messages.
        self.kind = kind
        self._base = base
        self._makers = makers

    def __contains__(self, name: object) -> bool:
        known = name in self.data or any(o.name == name for o in _entry_points(self.package))
        return known or bool(re.fullmatch(r"[\w.]+:[\w.]+", str(name)))

    def __getitem__(self, name: str) -> Any:
        """What is named so; ``ConfigError`` if it is not there, cannot be imported, or is no such.

        A name that two packages offer is refused; a built-in one is always the built-in one.
        """
        if name in self.data:
            return _attribute(f"{self.package}.{self.data[name]}")
        claims = [
            offer for offer in _entry_points(self.package) if name in (offer.name, offer.value)
        ]
        if len({offer.value for offer in claims}) > 1:
            listed = " and ".join(f"{offer.value} ({distribution_of(offer)})" for offer in claims)
            raise ConfigError(
                f"Two packages offer a {self.kind} {name!r}: {listed}. Name it by its place "
                f"instead, as in {claims[0].value}, or uninstall one of them."
            )
        return self._checked(name, claims[0] if claims else EntryPoint(name, name, self.package))

    def names(self) -> list[str]:
        """What can be named: the built-in ones and those that installed packages offer."""
        return [*self.data, *self.offers()]

    def offers(self) -> dict[str, EntryPoint]:
        """What installed packages offer by name; by place where the name is not theirs alone."""
        found = _entry_points(self.package)
        taken = Counter([*self.data, *(offer.name for offer in found)])
        return {o.name if taken[o.name] == 1 else o.value: o for o in found}

    def _checked(self, name: str, offer: EntryPoint) -> Any:
        """Import what somebody else has written; ``ConfigError`` names it, and what to do."""
        module, _, attribute = offer.value.partition(":")
        start = f"The {self.kind} {name!r}" + (
            f" of {distribution_of(offer)}" if offer.dist else ""
        )
        mend = f"Mend or reinstall {offer.dist.name}" if offer.dist else f"Mend {module}"
        try:
            there: Any = importlib.import_module(module)
        except (Exception, SystemExit) as error:
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
                f"{error.name}."
            )
            if absent and not offer.dist:
                where = "where the server runs" if self.kind == "strategy" else "on every machine"
                mend = f"Install its package {where}, or start from the folder that has it"
            raise ConfigError(
                f"{start} cannot be imported: {type(error).__name__}: {error}. {mend}."
            ) from error
        base = _attribute(self._base)
        try:
            found = functools.reduce(getattr, attribute.split("."), there)
        except AttributeError:
            fit = [n for n, value in vars(there).items() if _is_kind(value, base)]
            own = difflib.get_close_matches(attribute, fit, n=1, cutoff=0.5) or fit
            hint = f" Did you mean {' or '.join(own)}?" if own else f" {mend}."
            raise ConfigError(f"{start}: {module} has no {attribute!r}.{hint}") from None
        if not _is_kind(found, base) and not (self._makers and inspect.isroutine(found)):
            raise ConfigError(
                f"{start} is no {self.kind}: expected a subclass of {self._base.replace(':', '.')}"
                f"{', or a function that makes one' if self._makers else ''}, got {found!r}."
            )
        try:
            argument_specs(found)
        except Exception as error:
            raise ConfigError(
                f"{start}: the annotations of its arguments cannot be read ({error}). They have "
                "to be names of its module, outside of `if TYPE_CHECKING`."
            ) from error
        return found


def add_cwd_to_path() -> None:
    """Let modules in the working directory be found, after all others: they shadow no library."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def distribution_of(offer: EntryPoint) -> str:
    """The package that an entry point is of, with its version."""
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist else ""


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return _found(group, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _found(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Read what the packages on ``path``, which is `sys.path`, offer in a group: it takes 10 ms."""
    return tuple(sorted(entry_points(group=group), key=lambda offer: (offer.name, offer.value)))


def _attribute(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _is_kind(thing: Any, base: type) -> bool:
    return isinstance(thing, type) and issubclass(thing, base) and thing is not base


class MethodRegistry(Registry):
    """Methods, whose docstrings and constructors say what they are."""

    def arguments(self) -> dict[str, list[str]]:
        """The built-in methods' own arguments, each with the names of those that take it."""
        owners: dict[str, list[str]] = {}
        for name, method in self.items():
            for argument in method.argument_specs():
                owners.setdefault(argument, []).append(name)
        return owners


class DescribedRegistry(Registry):
    """Things that a list shows without importing them: place and line by name."""

    def __init__(self, package: str, entries: Mapping[str, tuple[str, str]], **of: Any) -> None:
        super().__init__(package, {name: place for name, (place, _) in entries.items()}, **of)
        self.lines = {name: line for name, (_, line) in entries.items()}
