"""Wheels for a site without network, and the systemd unit."""

from __future__ import annotations

import ensurepip
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from command import call
from processes import environment

PIP = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))


def wheel(
    folder: Path, name: str, version: str, tag: str = "py3-none-any", needs: str = ""
) -> Path:
    """A wheel with a module of the package's name, whose extra ``train`` needs another one."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: train\n"
    metadata += f"Requires-Dist: {needs} ; extra == 'train'\n" if needs else ""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", "")
        file.writestr(f"{info}/METADATA", metadata)
        file.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        file.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for the package index, for pip, which this environment may lack."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"PYTHONPATH": PIP, "PIP_NO_INDEX": 1, "PIP_FIND_LINKS": folder}.items():
        monkeypatch.setenv(name, str(value))
    return folder


def pip(*arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    outside = {k: v for k, v in environment(home).items() if k != "PIP_FIND_LINKS"}
    return subprocess.run(command, env=outside, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_site_without_network_installs_from_the_wheelhouse_by_hash(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fairflower.cli.terminal.console.width", 300)
    wheel(index, "tiny_dep", "2.1")
    tagged = "cp312-cp312-manylinux_2_28_aarch64"
    wheel(index, "tiny_dep", "2.2", tagged)
    own = wheel(tmp_path, "fairflower", "0.1.0", needs="tiny-dep>=2")
    there = tmp_path / "wheels"
    said = call("deploy", "wheelhouse", there, "--source", own)
    assert said.startswith("2 wheels, 0.0 MB.")
    lines = (there / "requirements.txt").read_text().splitlines()
    digests = [
        hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(there.glob("*.whl"))
    ]
    assert lines == [
        f"fairflower[train]==0.1.0 --hash=sha256:{digests[0]}",
        f"tiny_dep==2.1 --hash=sha256:{digests[1]}",
    ]
    install = said.splitlines()[-1].replace("wheels", str(there)).split()[1:]
    assert pip(*install, "--target", tmp_path / "site", home=tmp_path).returncode == 0
    assert (tmp_path / "site" / "tiny_dep.py").exists()
    with zipfile.ZipFile(there / "tiny_dep-2.1-py3-none-any.whl", "a") as file:
        file.writestr("more.py", "")  # on its way to the site
    assert (
        "DO NOT MATCH THE HASHES" in pip(*install, "--target", tmp_path / "b", home=tmp_path).stderr
    )

    other = tmp_path / "other"
    named = ("--platform", "manylinux_2_28_aarch64", "--python", "3.12")
    call("deploy", "wheelhouse", other, "--source", own, *named)
    assert {path.name for path in other.glob("tiny*")} == {f"tiny_dep-2.2-{tagged}.whl"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "settings", "words"),
    [
        ((), {}, 'pip download failed: there is no wheel of tiny-dep>=2; extra == "train"'),
        ((), {"PYTHONPATH": ""}, "has no pip. Run: uv pip install pip"),
        (
            (),
            {"PIP_NO_INDEX": "0", "PIP_INDEX_URL": "http://127.0.0.1:9/", "PIP_RETRIES": "1"},
            "no package index can be reached",
        ),
        (("--platform", "win_amd64"), {}, "--platform win_amd64: it is not of this machine's"),
        (("--source", "no.whl"), {}, "no.whl"),
    ],
    ids=["wheel", "pip", "network", "system", "source"],
)
def test_what_a_wheelhouse_lacks_is_named(
    options: tuple[str, ...],
    settings: dict[str, str],
    words: str,
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "PYTHONPATH" in settings and not pip("--version", home=tmp_path).returncode:
        monkeypatch.setenv("PYTHONPATH", "")
        if not pip("--version", home=tmp_path).returncode:
            pytest.skip("this environment has pip")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    own = wheel(tmp_path, "fairflower", "0.1.0", needs="tiny-dep>=2")
    said = call("deploy", "wheelhouse", tmp_path / "w", "--source", own, *options, expect=2)
    assert words in " ".join(said.split())


def test_a_wheelhouse_is_a_new_folder(tmp_path: Path) -> None:
    (tmp_path / "old.whl").touch()
    assert "is not empty" in call("deploy", "wheelhouse", tmp_path, expect=2)


def test_the_unit_runs_a_command_as_a_user_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "site 100%.toml"
    file.touch()
    site = call("deploy", "unit", "--memory", "8G", "fairflower", "deploy", "site", file)
    assert f"/fairflower deploy site '{str(file).replace('%', '%%')}'" in site
    assert {"User=fairflower", "MemoryMax=8G", "Restart=always"} <= {*site.splitlines()}
    options = ("--host", "0.0.0.0", "--database", "superlink.db")
    link = call(
        "deploy", "unit", "--user", "fl", "--writable", tmp_path, "--", "flower-superlink", *options
    )
    assert "/flower-superlink --host 0.0.0.0 --database superlink.db" in link
    assert f"ReadWritePaths={tmp_path}" in link
    for text, words in (("site", "'site': no such command"), ("flwr", "--memory 9 GB: expected")):
        memory = "8G" if text == "site" else "9 GB"
        assert words in call("deploy", "unit", "--memory", memory, text, expect=2)
    if verify := shutil.which("systemd-analyze"):
        for name, unit in {"site": site, "superlink": link}.items():
            path = tmp_path / f"fairflower-{name}.service"
            path.write_text(unit)
            done = subprocess.run(
                [verify, "verify", path], capture_output=True, text=True, check=False
            )
            assert (done.returncode, done.stderr) == (0, "")
