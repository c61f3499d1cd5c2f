"""Registries of strategies, clients, models and data sets by name.

A name is built in (`fairflower.registry`), an entry point of another package, or ``module:Class``.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
from collections import Counter, UserDict
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fairflower.arguments import argument_specs, shared_arguments
from fairflower.errors import STOPS, ConfigError

#: ``module:Class``.
_PLACE = re.compile(r"[\w.]+:[\w.]+")


class Registry(UserDict[str, Any]):
    """Classes and functions by name, imported on first use. Iteration yields the built-in names.

    Parameters
    ----------
    package : str
        Package of the built-in entries.
    entries : mapping
        Built-in name -> ``"module:attribute"`` in ``package`` or, if it begins with "fairflower.",
        in another one, or ``"module:attribute - line"``
        with a description, so that listing the entries imports nothing. A name ``FAMILY:NAME``
        stands for every network of a library: ``FAMILY:x`` is the entry's function with the first
        argument ``"x"``.
    kind : str
        Word for an entry in messages, for example "strategy".
    base : str, default=""
        ``module:Class`` of the base class of all entries; empty for functions.
    makers : bool, default=False
        Whether functions that return an instance are allowed as entries.
    server_only : bool, default=False
        Whether only the server imports entries; clients do not need their packages.
    group : str, default=""
        Entry point group for other packages; empty for the name of ``package``.
    """

    def __init__(
        self,
        package: str,
        entries: Mapping[str, str],
        kind: str,
        base: str = "",
        makers: bool = False,
        server_only: bool = False,
        group: str = "",
    ) -> None:
        parts = {name: entry.partition(" - ") for name, entry in entries.items()}
        super().__init__({n: place for n, (place, _, _) in parts.items() if ":" not in n})
        self.families = {n.partition(":")[0]: e[0] for n, e in parts.items() if ":" in n}
        self.lines = {name: line for name, (_, _, line) in parts.items() if line}
        self.package = package
        self.group = group or package
        self.kind = kind
        self._base = base
        self._makers = makers
        self._server_only = server_only

    def __contains__(self, name: object) -> bool:
        known = name in self.data or any(o.name == name for o in _entry_points(self.group))
        return known or bool(_PLACE.fullmatch(str(name)) or self.family(str(name)))

    def __getitem__(self, name: str) -> Any:
        """Return the registered object.

        Raises ``ConfigError`` if it is missing, cannot be imported or has the wrong type, or if two
        packages have an entry point with this name. A built-in name always means the built-in
        entry.
        """
        if name in self.data:
            return resolve_name(self.place(name))
        if family := self.family(name):
            function = resolve_name(f"{self.package}.{self.families[family]}")
            member = functools.partial(function, name.partition(":")[2])
            named = {"__module__": function.__module__, "__name__": name}
            member.__dict__.update(vars(function) | named)
            return member
        claims = [offer for offer in _entry_points(self.group) if name in (offer.name, offer.value)]
        if len({offer.value for offer in claims}) > 1:
            listed = " and ".join(f"{offer.value} ({distribution_of(offer)})" for offer in claims)
            raise ConfigError(
                f"Two packages offer a {self.kind} named {name!r}: {listed}. Write "
                f"{claims[0].value} instead, or uninstall one of the packages."
            )
        return self._checked(name, claims[0] if claims else EntryPoint(name, name, self.group))

    def load(self, name: str) -> Any:
        """Return the registered object, which may also be in the working directory."""
        if ":" in name:
            add_cwd_to_path()
        return self[name]

    def family(self, name: str) -> str:
        """Return the family of a name, or an empty string."""
        family, _, member = name.partition(":")
        return family if member and family in self.families else ""

    def place(self, name: str) -> str:
        """Return the ``module:attribute`` of a built-in entry, without importing it."""
        place: str = self.data[name]
        return place if place.startswith("fairflower.") else f"{self.package}.{place}"

    def own_file(self, name: str) -> Path | None:
        """Return the file of the module in ``module:Class``; this imports only its package.

        The result is None for built-in entries, for those of installed packages, and without file.
        """
        offered = any(name in (o.name, o.value) for o in _entry_points(self.group))
        built_in = name in self.data or self.family(name)
        if built_in or offered or not _PLACE.fullmatch(name):
            return None
        add_cwd_to_path()
        try:
            found = importlib.util.find_spec(name.partition(":")[0])
        except Exception:  # of a notebook, or of a package that cannot be imported
            return None
        if not (found and found.has_location and found.origin):
            return None
        file = Path(found.origin)
        installed = any(map(file.is_relative_to, map(sysconfig.get_path, ("purelib", "platlib"))))
        return None if installed else file

    def names(self) -> list[str]:
        """Return built-in names, entry points of installed packages, and families."""
        return [*self.data, *self.offers(), *(f"{family}:NAME" for family in self.families)]

    def offers(self) -> dict[str, EntryPoint]:
        """Return other packages' entry points by name, or by ``module:Class`` if names collide."""
        offers = _entry_points(self.group)
        counts = Counter([*self.data, *(offer.name for offer in offers)])
        return {o.name if counts[o.name] == 1 else o.value: o for o in offers}

    def _checked(self, name: str, offer: EntryPoint) -> Any:
        """Import an entry of another package; raise ``ConfigError`` with a remedy if this fails."""
        module, _, attribute = offer.value.partition(":")
        start = f"The {self.kind} {name!r}{f' of {distribution_of(offer)}' if offer.dist else ''}"
        remedy = f"Repair or reinstall {offer.dist.name}" if offer.dist else f"Repair {module}"
        try:
            imported: Any = importlib.import_module(module)
        except STOPS:
            raise
        except BaseException as error:
            absent = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(
                f"{error.name}."
            )
            if absent and not offer.dist:
                where = "where the server runs" if self._server_only else "on every machine"
                remedy = (
                    f"Install its package {where}, or start the command in the folder that "
                    "contains it"
                )
            raise ConfigError(
                f"{start} cannot be imported: {type(error).__name__}: {error}. {remedy}."
            ) from error
        try:
            entry = functools.reduce(getattr, attribute.split("."), imported)
        except AttributeError:
            fit = [n for n, value in vars(imported).items() if self._fits(value)]
            near = difflib.get_close_matches(attribute, fit, n=1, cutoff=0.5) or fit
            file = getattr(imported, "__file__", None)
            hint = f"Did you mean {' or '.join(near)}?" if near else f"{remedy} ({file})."
            raise ConfigError(f"{start}: {module} has no {attribute!r}. {hint}") from None
        self._check_entry(start, entry)
        return entry

    def _fits(self, thing: Any) -> bool:
        """Return whether an attribute of a module may be meant by a misspelled name."""
        if not self._base:
            return callable(thing) and not isinstance(thing, type)
        base = resolve_name(self._base)
        return isinstance(thing, type) and issubclass(thing, base) and thing is not base

    def _check_entry(self, start: str, entry: Any) -> None:
        if not self._fits(entry) and not (self._makers and inspect.isroutine(entry)):
            wanted = f"a subclass of {self._base.replace(':', '.')}" if self._base else "a function"
            maker = ", or a function that returns an instance" if self._makers else ""
            raise ConfigError(f"{start}: expected {wanted}{maker}, got {entry!r}.")
        if not self._base:
            return
        try:
            arguments = {*argument_specs(entry)}
        except ConfigError as error:
            raise ConfigError(f"{start}: {error}") from error
        except Exception as error:
            raise ConfigError(
                f"{start}: the annotations of its arguments cannot be read ({error}). In its "
                "module, import the names in these annotations outside `if TYPE_CHECKING`."
            ) from error
        if self.lines:  # no method: its arguments are not settings beside those of its base
            return
        if taken := sorted({"name", *shared_arguments(resolve_name(self._base))} & arguments):
            raise ConfigError(
                f"{start}: its constructor has the argument {taken[0]!r}, which every {self.kind} "
                "has already. Rename the argument."
            )

    def arguments(self) -> dict[str, list[str]]:
        """Return every argument of the built-in methods, with the methods that have it."""
        owners: dict[str, list[str]] = {}
        for name, method in self.items():
            for argument in method.argument_specs():
                owners.setdefault(argument, []).append(name)
        return owners


def add_cwd_to_path() -> None:
    """Append the working directory to ``sys.path``, so that it does not shadow any library."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def distribution_of(offer: EntryPoint) -> str:
    """Return the name and version of the package that has an entry point."""
    return f"{offer.dist.name} {offer.dist.version}" if offer.dist else ""


def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    return _cached_entry_points(group, tuple(sys.path))


@functools.lru_cache(maxsize=16)
def _cached_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of a group; cached for each ``sys.path``, because it takes 10 ms."""
    return tuple(sorted(entry_points(group=group), key=lambda offer: (offer.name, offer.value)))
