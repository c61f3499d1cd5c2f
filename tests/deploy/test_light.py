"""`pip install fairflower`: no torch, no Ray, and the lowest versions of its dependencies."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

import pytest
from processes import ROOT, environment, run

from fairflower.strategies import STRATEGIES

LOWEST = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not LOWEST.endswith(f"{sys.version_info[0]}.{sys.version_info[1]}"),
        reason="the lowest versions of libraries are those of the lowest Python",
    ),
]
FOLDERS = ("tests/strategies", "tests/aggregation", "tests/numerics")
#: Matches files of tests that need more than strategies: clients that train, runs, reports.
TRAINING = re.compile(
    r"^(import torch|from (toy_trainers|fairflower\.(clients|models|training)))", re.M
)
MORE = ["tests/aggregation/test_bounds.py", "tests/aggregation/test_consistency.py"]
MORE += [
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("test_*.py"))
    if TRAINING.search(path.read_text(encoding="utf-8"))
]
RUN_CONFIGS = (
    "tests/strategies/test_fedgcr.py::test_variants_with_a_given_cluster_number_refuse_auto"
)


def install(python: Path, *what: str) -> None:
    folder = python.parents[1]  # outside of the project, whose settings do not apply there
    command = [sys.executable, "-m", "uv", "pip", "install", "--python", python, *what]
    run(command, env=environment(folder), cwd=folder)


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that has fairflower without extras."""
    folder = tmp_path_factory.mktemp("light")
    venv = [sys.executable, "-m", "uv", "venv", "--python", sys.executable, folder / "venv"]
    run(venv, env=environment(folder))
    python = folder / "venv" / "bin" / "python"
    install(python, "--resolution", "lowest-direct", str(ROOT))
    return python


def python(light: Path, code: str, folder: Path) -> str:
    return run([light, "-c", code], env=environment(folder), cwd=folder)


def test_no_library_of_the_sim_extra_is_installed(light: Path, tmp_path: Path) -> None:
    code = """
from fairflower.errors import EXTRAS, installed
print([library for library in EXTRAS["sim"] if installed(library)])
"""
    assert python(light, code, tmp_path) == "[]\n"


def test_every_strategy_works_or_names_the_missing_extra(light: Path, tmp_path: Path) -> None:
    code = """
from fairflower.strategies import STRATEGIES
from fairflower.testing import check_strategy
for name, strategy in STRATEGIES.items():
    try:
        check_strategy(strategy)
    except ImportError as error:
        print("lacks:", name, error)
"""
    output = python(light, code, tmp_path).splitlines()  # warnings, too
    lines = [line.removeprefix("lacks: ") for line in output if line.startswith("lacks: ")]
    assert [line.split()[0] for line in lines] == [n for n, s in STRATEGIES.items() if s.extra]
    assert all('Run: pip install "fairflower[solvers]"' in line for line in lines)


def test_commands_name_the_missing_extra_in_one_line(light: Path, tmp_path: Path) -> None:
    refused = 'needs torch, torchvision, PIL and more. Run: pip install "fairflower[train]"'
    command = [light.parent / "fairflower", "run"]
    (line,) = run(command, env=environment(tmp_path), cwd=tmp_path, expect=1).splitlines()
    assert refused in line
    # The others in one process, because each takes long to start.
    commands = ["compare --seeds=0", "report .", "list"]
    commands += ["run --help", "list strategies", "deploy key site.key"]
    code = f"""
import sys
from fairflower.cli import main
for command in {commands}:
    sys.argv = ["fairflower", *command.split()]
    try:
        main()
    except SystemExit as end:
        print("ended with", end.code)
"""
    output = run([light, "-c", code], env=environment(tmp_path), cwd=tmp_path)
    *first, helped, listed, _, _ = re.split(r"ended with (?:0|1|None)\n", output)
    assert len(first) == 3
    for text in first:
        (line,) = text.splitlines()
        assert refused in line
    assert "--strategy" in helped
    assert "fedheal" in listed
    assert output.count("ended with 1\n") == 3
    assert (tmp_path / "site.key").exists()


def test_the_python_api_names_the_missing_extra(light: Path, tmp_path: Path) -> None:
    code = """
import fairflower as ff
print(ff.__version__)
try:
    ff.run(strategy="fedheal")
except ImportError as error:
    print(error)
"""
    _, line = python(light, code, tmp_path).splitlines()
    assert line.startswith("fairflower.run needs torch")
    assert line.endswith('pip install "fairflower[train]"')


@pytest.mark.nightly
def test_tests_of_strategies_pass_with_the_lowest_versions_of_solvers(
    light: Path, tmp_path: Path
) -> None:
    install(light, "--resolution", "lowest-direct", f"{ROOT}[solvers]")
    install(light, "hypothesis", "pytest", "pytest-rerunfailures")
    command = [light, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += FOLDERS
    command += [f"--ignore={file}" for file in MORE] + [f"--deselect={RUN_CONFIGS}"]
    assert " passed" in run(command, env=environment(tmp_path), cwd=ROOT)
