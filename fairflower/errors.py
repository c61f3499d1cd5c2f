"""Errors that users can fix, and texts for them. Imports no other module of fairflower."""

import errno
import logging
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: A child of Flower's logger: shown and streamed wherever Flower's own lines are.
logger = logging.getLogger("flwr").getChild("fairflower")


class UserError(Exception):
    """An error that the user can fix; the message says what is wrong and what to do."""


class ConfigError(UserError, ValueError):
    """An invalid run config; the message names the key and what to do."""


class DataError(UserError, ValueError):
    """Invalid data; the message names the path and what to do."""


class NotInstalled(UserError, ImportError):
    """A missing library of an extra; the message says what to install."""


class RoundFailed(UserError, RuntimeError):
    """Too few usable replies in a round; the message lists the missing clients and reasons."""


class Diverged(RoundFailed):
    """A loss, an update or the model is NaN or infinite."""


class StrategyError(UserError, RuntimeError):
    """An exception in a strategy's code; the message has its type, text and place."""


class MetricError(UserError, RuntimeError):
    """A user's metric failed; the message has its name, the domain and the reason."""


class EngineError(UserError, RuntimeError):
    """An engine cannot go on; the message says why and what to do."""


class GpuMemoryError(EngineError):
    """A run ran out of GPU memory; the message has the reason and what to do."""


class RunFolderError(UserError, ValueError):
    """A run folder that cannot be read; the message says why."""


class WriteError(UserError, RuntimeError):
    """A run folder cannot be written; the message has the path, the reason and what to do."""


class TrialError(UserError, RuntimeError):
    """A trial deployment that cannot go on; the message says which process ended and why."""


class RunInterrupted(Exception):
    """The run was asked to stop."""


class StopRun(Exception):
    """Raised by a callback to end the run after the current round."""


class Pruned(Exception):
    """Raised by a callback to end a run that is clearly worse than the message's reference."""


_SOLVERS = ("cvxpy", "scipy", "sklearn")
_TRAIN = (
    *("torch", "torchvision", "PIL", "pandas", *_SOLVERS),
    *("statsmodels", "matplotlib", "jinja2"),
)

#: Extra of pyproject.toml -> its libraries, by import name.
EXTRAS = {
    "solvers": _SOLVERS,
    "train": _TRAIN,
    "sim": (*_TRAIN, "ray", "flwr_datasets", "datasets"),
    "export": ("onnx", "onnxscript"),
    "timm": ("timm", "peft"),
    "hf": ("transformers", "peft"),
    "dp": ("dp_accounting",),
}


def quoted(value: object, most: int = 120) -> str:
    """Return the ``repr`` of a value for an error, shortened if it is long.

    >>> quoted(0.1), quoted("x" * 200, most=9), quoted(16**5000)
    ('0.1', "'xxx...xx'", 'a whole number of 20001 bits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deep, for repr
        if isinstance(value, int):
            return f"a whole number of {value.bit_length()} bits"
        return f"a {type(value).__name__} nested too deep"
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[: half + 1]}...{text[-half:]}"


def is_text(value: str) -> bool:
    """Return whether UTF-8 can encode a text, and it has no null byte."""
    return "\0" not in value and not any("\ud800" <= sign <= "\udfff" for sign in value)


def require(extra: str, what: str, *libraries: str) -> None:
    """Raise ``NotInstalled`` if ``what`` needs a library of the extra that is missing.

    ``libraries`` are those that ``what`` needs. Default: all of the extra.
    """
    missing = [library for library in libraries or EXTRAS[extra] if not installed(library)]
    if missing:
        names = ", ".join(missing[:3]) + (" and more" if missing[3:] else "")
        raise NotInstalled(f'{what} needs {names}. Run: pip install "fairflower[{extra}]"')


def installed(library: str) -> bool:
    """Return whether a library can be imported, without importing it."""
    spec = find_spec(library)
    # A folder of that name in the working directory has a spec without origin.
    return spec is not None and spec.origin is not None


#: Errors that users can fix. OSError: an unwritable folder or a full disk; it has the path.
USER_ERRORS = (UserError, OSError)

#: Exceptions that end a process or a generator; they are not failures of a user's code.
STOPS = (KeyboardInterrupt, GeneratorExit)


_PATH = "Check this path."
_RIGHTS = "Change permissions, or choose another place (--output-dir, --out or FAIRFLOWER_HOME)."
_ROOM = "Free some space, or choose another place (--output-dir, --out or FAIRFLOWER_HOME)."
_REMEDIES = {
    errno.EEXIST: "Files are never overwritten: choose another name, or move the file.",
    errno.ENOENT: _PATH,
    errno.ENOTDIR: _PATH,
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EROFS: _RIGHTS,
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
}


def error_text(error: BaseException) -> str:
    """Return an error as text; for a system error its path, reason and, if known, what to do."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{place}{error.strerror}. {remedy}".rstrip()


def failure_text(error: BaseException, module: str = "") -> str:
    """Return an exception's type, text and place: the last line in ``module``, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(module), "__file__", None)
    last = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    try:
        text = str(error)
    except Exception as second:  # str(error) failed, too
        text = f"no text ({type(second).__name__})"
    return (
        f"{type(error).__name__}: {text} ({Path(last.filename).name}, line {last.lineno}, in "
        f"{last.name})"
    )


@contextmanager
def naming_failures(
    raised: type[UserError], subject: str, module: str, remedy: str = "Correct its code."
) -> Iterator[None]:
    """Raise ``raised`` for an exception in a user's code, which is in ``module``.

    The message is ``<subject> failed with <type, text and place>. <remedy>``. Errors that already
    say what to do pass unchanged.
    """
    try:
        yield
    except (*USER_ERRORS, *STOPS, RunInterrupted):
        raise
    except BaseException as error:
        if exits_by_signal(error):
            raise
        raise raised(f"{subject} failed with {failure_text(error, module)}. {remedy}") from error


def exits_by_signal(error: BaseException) -> bool:
    """Return whether Flower's signal handler raised the exception, for example ``SystemExit``."""
    flower = getattr(sys.modules.get("flwr"), "__file__", None)
    if isinstance(error, Exception) or flower is None:
        return False
    last = traceback.extract_tb(error.__traceback__)[-1]
    return Path(flower).parent in Path(last.filename).parents


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
