"""What a user is told and can mend, as opposed to defects of fairflower. Imports none of it."""

import errno
import logging
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

#: A child of Flower's logger: shown and streamed wherever Flower's own lines are.
logger = logging.getLogger("flwr").getChild("fairflower")


class UserError(Exception):
    """Something that the user can mend; the message names it and the remedy."""


class ConfigError(UserError, ValueError):
    """A run config that cannot be run; the message names the key and the remedy."""


class DataError(UserError, ValueError):
    """Data that cannot be used; the message names the place and the remedy."""


class NotInstalled(UserError, ImportError):
    """A library that an extra brings and that is not there; the message says what to install."""


class RoundFailed(UserError, RuntimeError):
    """Too few usable replies to go on; the message names who is missing and why."""


class Diverged(RoundFailed):
    """Training that has left the numbers: a loss, an update or the model is NaN or infinite."""


class StrategyError(UserError, RuntimeError):
    """A strategy that raised something in its own code; the message says what, and where."""


class EngineError(UserError, RuntimeError):
    """What clients run on cannot go on; the message says why, and the remedy."""


class RunFolderError(UserError, ValueError):
    """A run folder that cannot be read; the message says why."""


class WriteError(UserError, RuntimeError):
    """A run that could not be written; the message names the place, why, and how to go on."""


class TrialError(UserError, RuntimeError):
    """A trial deployment that cannot go on; the message says which process ended and why."""


class RunInterrupted(Exception):
    """The run was asked to stop."""


class StopRun(Exception):
    """What a callback raises to end its run after the round that it was told of."""


class Pruned(Exception):
    """What a callback raises to end its run for good, as clearly behind; says behind what."""


#: What is imported of each extra of pyproject.toml.
EXTRAS = {
    "solvers": ("cvxpy", "scipy", "sklearn"),
    "sim": (
        *("torch", "torchvision", "ray", "flwr_datasets", "datasets", "PIL", "pandas"),
        *("cvxpy", "scipy", "sklearn", "optuna", "statsmodels", "matplotlib", "jinja2"),
    ),
    "export": ("onnx", "onnxscript"),
}


def quoted(value: object, most: int = 120) -> str:
    """A value as an error shows it: its ``repr``, shortened if that is long or cannot be made.

    >>> quoted(0.1), quoted("x" * 200, most=9), quoted(16**5000)
    ('0.1', "'xxx...xx'", 'a whole number of 20001 bits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # more digits, or lists in lists, than Python writes
        if isinstance(value, int):
            return f"a whole number of {value.bit_length()} bits"
        return f"a {type(value).__name__} in which others lie too deep"
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[: half + 1]}...{text[-half:]}"


def is_text(value: str) -> bool:
    """Whether UTF-8 can write it, and it has no null byte: files and messages hold no other."""
    return "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


def require(extra: str, what: str) -> None:
    """Raise ``NotInstalled`` if a library is missing without which there is no ``what``."""
    missing = [library for library in EXTRAS[extra] if not installed(library)]
    if missing:
        names = ", ".join(missing[:3]) + (" and more" if missing[3:] else "")
        raise NotInstalled(f'{what} needs {names}. Run: pip install "fairflower[{extra}]"')


def installed(library: str) -> bool:
    """Whether a library can be imported; without importing it."""
    found = find_spec(library)
    # Without an origin it is a folder of that name in the working directory.
    return found is not None and found.origin is not None


#: OSError: a folder that cannot be written, a full disk; its text names the path.
USER_ERRORS = (UserError, OSError)


_PATH = "Check this path."
_RIGHTS = "Change who may, or choose another place (--output-dir, --out or FAIRFLOWER_HOME)."
_ROOM = "Free some space, or choose another place (--output-dir, --out or FAIRFLOWER_HOME)."
_REMEDIES = {
    errno.EEXIST: "Nothing is written over: choose another name, or move it away.",
    errno.ENOENT: _PATH,
    errno.ENOTDIR: _PATH,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
}


def error_text(error: BaseException) -> str:
    """An error in words; of the system's the path, the reason and the remedy, if one is known."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{place}{error.strerror}. {remedy}".rstrip()


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that resolves old names, old to new, with a warning."""

    def resolve(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        text = f"{module}.{name} is now called {names[name]}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], names[name])

    return resolve


def renamed_attribute(old: str, new: str) -> Any:
    """Return a property that resolves an attribute's old name, with a warning."""

    def resolve(instance: Any) -> Any:
        text = f"{type(instance).__name__}.{old} is now called {new}."
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return getattr(instance, new)

    return property(resolve)


__getattr__ = renamed(
    __name__, RuleError="StrategyError", RunError="RunFolderError", Stopped="RunInterrupted"
)
