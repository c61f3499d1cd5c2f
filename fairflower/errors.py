"""Errors that users can fix, and their messages. Imports no other module of fairflower."""

import errno
import logging
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

#: Child of Flower's logger, so that messages appear wherever Flower's do.
logger = logging.getLogger("flwr").getChild("fairflower")


class UserError(Exception):
    """An error that the user can fix; the message explains the problem and the solution.

    ``public`` is what a site may send of it (`public_text`), without any value, path or column of
    its data; True means the whole message.
    """

    def __init__(self, *args: object, public: str | bool = "") -> None:
        super().__init__(*args)
        self.public = str(self) if public is True else public


class ConfigError(UserError, ValueError):
    """The run config is invalid; the message names the key and explains what to do."""


class DataError(UserError, ValueError):
    """Data are invalid; the message names the path and explains what to do."""


class NotInstalled(UserError, ImportError):
    """A library of an optional extra is missing; the message says what to install."""


class RoundFailed(UserError, RuntimeError):
    """A round had too few valid replies; the message lists the missing clients and the reasons."""

    #: The last model, an ``ArrayRecord``, if a strategy's ``start`` was called.
    arrays: Any = None


class Diverged(RoundFailed):
    """Training diverged: a loss, an update or the model is NaN or infinite."""


class StrategyError(UserError, RuntimeError):
    """A strategy's code raised an exception; the message has its type, text and location."""


class MetricError(UserError, RuntimeError):
    """A user-defined metric failed; the message names the metric, the domain and the reason."""


class EngineError(UserError, RuntimeError):
    """An engine cannot continue; the message says why and what to do."""


class GpuMemoryError(EngineError):
    """A run is out of GPU memory; the message says why and what to do."""


class RunFolderError(UserError, ValueError):
    """A run folder cannot be read; the message says why."""


class WriteError(UserError, RuntimeError):
    """A run folder cannot be written; the message has the path, the reason and a remedy."""


class TrialError(UserError, RuntimeError):
    """A trial deployment cannot continue; the message says which process ended and why."""


class RunInterrupted(Exception):
    """The user or the system has stopped the run."""


class StopRun(Exception):
    """Raised by a callback to end the run after the current round."""


_SOLVERS = ("cvxpy", "scipy", "sklearn")
_TRAIN = ("torch", "torchvision", "PIL", "pandas", *_SOLVERS, "matplotlib", "jinja2")

#: Extra in pyproject.toml -> import names of its libraries.
EXTRAS = {
    "solvers": _SOLVERS,
    "train": _TRAIN,
    "sim": (*_TRAIN, "ray", "flwr_datasets", "datasets"),
    "export": ("onnx", "onnxscript"),
    "timm": ("timm", "peft"),
    "hf": ("transformers", "peft"),
    "smp": ("segmentation_models_pytorch",),
    "dp": ("dp_accounting",),
}


def quoted(value: object) -> str:
    """Return the ``repr`` of a value for an error message, at most 120 characters of it.

    >>> quoted(0.1), len(quoted("x" * 200)), quoted(16**5000)
    ('0.1', 120, 'a whole number with 20001 bits')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deep, for repr
        if isinstance(value, int):
            return f"a whole number with {value.bit_length()} bits"
        return f"a {type(value).__name__} nested too deeply"
    return text if len(text) <= 120 else f"{text[:59]}...{text[-58:]}"


def shorten_error(reason: str) -> str:
    """Return the message of an error reply, printable and without the traceback around it.

    >>> shorten_error("<class 'X'>:<'... Exception ClientAppException occurred. Message: boom'>")
    'boom'
    >>> shorten_error("<class 'fairflower.errors.DataError'>:<'no images'>")
    'DataError: no images'
    """
    if "ActorDiedError" in reason or "actor is dead" in reason:
        return "its Ray worker died (killed, or out of memory); run again with fewer workers"
    text = " ".join(reason.rpartition("Message: ")[2].split()).removesuffix("'>")
    text = re.sub(r"^<class '(?:[\w.<>]+\.)?(\w+)'>:<'", r"\1: ", text)
    return escaped(text if len(text) <= 300 else "... " + text[-300:])


def escaped(text: str) -> str:
    r"""Return a client's text with escaped control characters, which could forge log lines.

    >>> escaped("no disk\n\x1b[2J")
    'no disk\\n\\x1b[2J'
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def is_text(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8 and has no null byte."""
    return not re.search("[\0\ud800-\udfff]", value)


def require(extra: str, what: str, *libraries: str) -> None:
    """Raise ``NotInstalled`` if a library is missing; the error names the ``extra`` to install.

    ``libraries`` lists the libraries that ``what`` needs. Default: all libraries of the extra.
    """
    missing = [library for library in libraries or EXTRAS[extra] if not installed(library)]
    if missing:
        names = ", ".join(missing[:3]) + (" and more" if missing[3:] else "")
        raise NotInstalled(f'{what} needs {names}. Run: pip install "fairflower[{extra}]"')


def installed(library: str) -> bool:
    """Return whether a library can be imported, without importing it."""
    spec = find_spec(library)
    # A folder with this name in the working directory has a spec without an origin.
    return spec is not None and spec.origin is not None


#: Errors that users can fix, including OSError for an unwritable folder or a full disk.
USER_ERRORS = (UserError, OSError)

#: Exceptions that end a process or a generator, and are not failures of a user's code.
STOPS = (KeyboardInterrupt, GeneratorExit)


_ELSEWHERE = "or choose another folder (--output-dir, --out or FAIRFLOWER_HOME)."
_REMEDIES = {
    errno.EEXIST: "Existing files are not overwritten. Choose another name, or move the file.",
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "Check this path."),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS), f"Change the permissions, {_ELSEWHERE}"
    ),
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), f"Free some disk space, {_ELSEWHERE}"),
}


def error_text(error: BaseException) -> str:
    """Return an error's text; for a system error, its path, reason and, if known, a remedy."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    place = f"{error.filename}: " if error.filename else ""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{place}{error.strerror}. {remedy}".rstrip()


def failure_text(error: BaseException, module: str = "") -> str:
    """Return an exception's type, text and location: the last line in ``module`` if possible.

    Otherwise the location is the last line that belongs neither to fairflower nor to a library.
    """
    try:
        text = str(error)
    except Exception as second:  # str(error) failed, too
        text = f"no text ({type(second).__name__})"
    return f"{type(error).__name__}: {text} ({_place(error, module)})"


def public_text(error: BaseException) -> str:
    """Return what a site may send of an error: the kind of fault, without anything of its data.

    That is its public part, else the type and location of a ``DataError`` or of the first cause.
    What client_app.py and `fairflower.secure` refuse is public: settings, and a server's messages.
    """
    public = ""
    for _ in range(100):  # causes may form a ring, and need not have been raised
        public = (error.public or "") if isinstance(error, UserError) else ""
        if public or isinstance(error, DataError) or not error.__cause__:
            break
        error = error.__cause__
    if isinstance(error, FloatingPointError):
        return "training diverged, with NaN or infinite values"
    if not (frames := traceback.extract_tb(error.__traceback__)):
        return public or type(error).__name__
    place = Path(frames[-1].filename)
    refusals = {Path(__file__).parent / name for name in ("secure", "client_app.py")}
    if isinstance(error, NotInstalled) or refusals & {place, place.parent}:
        return str(error)
    return public or f"{type(error).__name__} ({_place(error)})"


def _place(error: BaseException, module: str = "") -> str:
    """Return the location of an exception, as `failure_text` does."""
    frames = traceback.extract_tb(error.__traceback__)
    file = getattr(sys.modules.get(module), "__file__", None)
    of_module = [frame for frame in frames if frame.filename == file]
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others = (str(Path(__file__).parent), "<", *libraries)  # "<": code without a file
    own = [frame for frame in frames if not frame.filename.startswith(others)]
    last = (of_module or own or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}, in {last.name}"


@contextmanager
def naming_failures(
    raised: type[UserError], subject: str, module: str, remedy: str = "Correct its code."
) -> Iterator[None]:
    """Turn an exception in a user's code, which is in ``module``, into a ``raised`` exception.

    The message is ``<subject> failed with <type, text and place>. <remedy>``. Errors that already
    explain what to do are unchanged.
    """
    try:
        yield
    except (*USER_ERRORS, *STOPS, RunInterrupted):
        raise
    except BaseException as error:
        flower = getattr(sys.modules.get("flwr"), "__file__", None)
        if flower and not isinstance(error, Exception):  # SystemExit of Flower's signal handler?
            last = traceback.extract_tb(error.__traceback__)[-1]
            if Path(flower).parent in Path(last.filename).parents:
                raise
        raise raised(f"{subject} failed with {failure_text(error, module)}. {remedy}") from error
