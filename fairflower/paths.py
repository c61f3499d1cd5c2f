"""Folders and files that fairflower reads and writes."""

import errno
import os
import re
import shlex
import stat
from contextlib import suppress
from datetime import datetime
from os import PathLike
from pathlib import Path

from fairflower.errors import ConfigError, quoted

#: Names of the files in a run folder, except its checkpoints.
RUN_FILES = frozenset(
    ("run.json", "config.toml", "history.csv", "diagnostics.jsonl", "log.txt", "model.safetensors")
)

#: Trials in the folder of a study. The folder `trials` in ~/.fairflower has trial deployments,
#: which have other names.
TRIALS = "trials/*-trial*"


def home() -> Path:
    """Return ``$FAIRFLOWER_HOME``, by default ``~/.fairflower``.

    Raises ``ConfigError`` if the user has no home folder.
    """
    chosen = Path(os.environ.get("FAIRFLOWER_HOME") or "~/.fairflower")
    try:
        return chosen.expanduser().absolute()
    except RuntimeError as error:  # no HOME, and a user without an entry, as in many containers
        raise ConfigError(
            f"{chosen}: this user has no home folder. Set the environment variable FAIRFLOWER_HOME "
            "to the whole path of a folder for runs, data and clients' states."
        ) from error


def file_name(text: str) -> str:
    """Replace characters that are not allowed in file names.

    >>> file_name("moon:mu=1+my_package.rules:MinLoss")
    'moon-mu=1+my_package.rules-MinLoss'
    """
    return re.sub(r"[^\w.+=-]", "-", text)


def path_of(name: str, value: str | PathLike[str]) -> Path:
    """Return an argument as a path; raise ``ConfigError`` if it cannot be a path."""
    if isinstance(value, str | PathLike):
        with suppress(UnicodeEncodeError):
            if b"\0" not in os.fsencode(value):
                return Path(value)
    raise ConfigError(f"{name} = {quoted(value)}: expected a path.")


def client_states() -> Path:
    """Return the folder that keeps clients' states between rounds, ``<run id>/<client id>/``."""
    return home() / "state"


def new_folder(kind: str, chosen: str | PathLike[str] | None = None) -> Path:
    """Return the chosen folder, or a folder below ``kind`` named after the time and process id."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    folder = home() / kind / name if chosen is None else path_of("output_dir", chosen)
    return folder.expanduser().absolute()


def run_folders(*paths: Path) -> list[Path]:
    """Return the paths that are run folders or files, and all run folders below the others.

    Each is returned once, though ``grid`` and ``grid/runs/*`` give it twice. Raises ``ConfigError``
    if there is no run folder below a path, or a path is a study or contains one: trials are no test
    runs.
    """
    folders: dict[Path, None] = {}
    for path in paths:
        if studies := sorted({trial.parents[1] for trial in path.rglob(TRIALS)}):
            found = f"{path} {'is a study' if path in studies else 'contains studies'}"
            raise ConfigError(
                f"{found}. For a report that includes the trials, repeat the study's "
                "`fairflower tune` command with the same --output-dir; completed runs are kept. "
                "For the test runs only, including those of earlier choices, name instead: "
                f"{shlex.join(str(study / 'runs') for study in studies)}"
            )
        single = (path / "run.json").exists() or not path.is_dir()
        matches = [path] if single else sorted(facts.parent for facts in path.rglob("run.json"))
        if not matches:
            raise ConfigError(
                f"{path} is not a run folder and contains no run folders: there is no run.json in "
                "it."
            )
        folders |= dict.fromkeys(matches)
    return list(folders)


def read_text(path: Path, encoding: str = "utf-8", newline: str | None = None) -> str:
    """Return the text of a file; raise ``OSError`` as `check_regular` does.

    ``newline`` is that of `open`: with "", line endings stay as they are.
    """
    check_regular(path)
    with path.open(encoding=encoding, newline=newline) as file:
        return file.read()


def check_output(path: Path) -> None:
    """Raise ``ConfigError`` if output must not replace a path.

    Such paths are the files of a run folder, and anything that is not a regular file or a folder,
    such as a pipe.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise ConfigError(f"{path} is not a regular file. Choose another name.")
    if (path.parent / "run.json").exists() and path.name in RUN_FILES:
        raise ConfigError(
            f"{path} belongs to a run folder and must not be overwritten. Choose another name."
        )


def check_output_file(path: Path, suffix: str = "", option: str = "--out") -> None:
    """Raise ``ConfigError`` if a file cannot be written, must not be, or has another suffix."""
    check_output(path)
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder. Name a file.")
    if suffix and path.suffix != suffix:
        raise ConfigError(f"{option} {path}: expected a file name that ends in {suffix}.")


def check_regular(path: Path) -> None:
    """Raise ``OSError`` if a path is no regular file: reading a pipe or a device may never end."""
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "This is not a regular file", str(path))
