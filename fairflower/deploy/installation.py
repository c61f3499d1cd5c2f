"""Installing and starting a site: wheels for a machine without network, and a systemd service."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fairflower.deploy.local import script
from fairflower.errors import ConfigError, quoted

#: File of the names, versions and hashes of all wheels in a wheelhouse.
REQUIREMENTS = "requirements.txt"

#: First part of a platform's tag -> ``sys.platform``; other platforms are Linux.
_SYSTEMS = {"win": "win32", "win32": "win32", "macosx": "darwin"}


def make_wheelhouse(
    folder: Path, source: Path, extras: str = "train", platform: str = "", python: str = ""
) -> list[Path]:
    """Download the wheels of fairflower and of all that it needs; return their paths.

    ``folder`` gets the wheels and `REQUIREMENTS`. ``source`` is a clone of fairflower or its wheel,
    and ``extras`` are comma-separated. ``platform`` is a tag such as ``manylinux_2_28_x86_64``, of
    this operating system, and ``python`` a version; by default both are this Python's. Raises
    ``ConfigError`` if the platform is another system's, the folder is not empty, or pip is missing
    or fails, for example because a package has no wheel for the platform.
    """
    system = _SYSTEMS.get(platform.partition("_")[0], "linux")
    if platform and system != sys.platform:
        raise ConfigError(
            f"--platform {platform}: it is not of this machine's operating system, for which pip "
            "reads the packages' conditions. Make the wheelhouse on a machine like the site's."
        )
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty. Choose another folder.")
    chosen = {"--platform": platform, "--python-version": python}
    target = [part for option, value in chosen.items() if value for part in (option, value)]
    with tempfile.TemporaryDirectory() as temporary:
        if source.is_dir():
            _pip("wheel", "--no-deps", "--wheel-dir", temporary, str(source.absolute()))
            (source,) = Path(temporary).glob("*.whl")
        wanted = f"{source}[{extras}]" if extras else str(source)
        _pip("download", "--dest", str(folder), "--only-binary", ":all:", *target, wanted)
    wheels = sorted(folder.glob("*.whl"))
    lines = []
    for wheel in wheels:
        name, version, *_ = wheel.name.split("-")
        own = f"[{extras}]" if extras and wheel.name == source.name else ""
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lines.append(f"{name}{own}=={version} --hash=sha256:{digest}\n")
    (folder / REQUIREMENTS).write_text("".join(lines), encoding="utf-8")
    return wheels


def _pip(*arguments: str) -> None:
    """Run a command of pip; raise ``ConfigError`` with the reason if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return
    said = f"{done.stdout}\n{done.stderr}"
    lacking = re.findall(r"No matching distribution found for (.+)", said)
    if "No module named pip" in said:
        reason = f"{sys.executable} has no pip. Run: uv pip install pip (or python -m ensurepip)"
    elif re.search(r"Retrying|connection|NewConnectionError|name resolution", said, re.I):
        reason = "no package index can be reached, which pip's settings name"
    elif lacking:
        reason = f"there is no wheel of {lacking[0]} for this platform and Python"
    else:
        reason = "\n".join(said.split("\n")[-10:]).strip()
    raise ConfigError(f"pip {arguments[0]} failed: {reason}")


def service(command: Sequence[str], user: str, memory: str, writable: Sequence[Path] = ()) -> str:
    """Return a systemd unit that runs a command of fairflower's or Flower's.

    Files in the command that exist get their absolute paths. ``memory`` is a size or a share, as
    systemd reads it, and ``writable`` are folders to which the command writes, beside its own.
    Raises ``ConfigError`` if the command or the memory is invalid.
    """
    program, *arguments = command
    path = program if "/" in program else script(program)
    if not shutil.which(path):
        raise ConfigError(
            f"{quoted(program)}: no such command beside {sys.executable}. Give, for example, "
            "fairflower deploy site site.toml, or -- flower-superlink --host 0.0.0.0."
        )
    if not re.fullmatch(r"\d+[KMGT]?|\d+%", memory):
        raise ConfigError(f"--memory {memory}: expected a size such as 8G, or a share such as 80%.")
    there = [str(Path(a).absolute()) if Path(a).is_file() else a for a in arguments]
    run, folders = [Path(path).absolute(), *there], [folder.absolute() for folder in writable]
    line, about, writes = (
        shlex.join(map(str, words)).replace("%", "%%").replace("$", "$$")
        for words in (run, command, folders)
    )
    template = Path(__file__).with_name("unit.service").read_text(encoding="utf-8")
    return template.format(
        description=about,
        command=line,
        scripts=Path(path).absolute().parent,
        user=user,
        memory=memory,
        writable=writes,
    )
