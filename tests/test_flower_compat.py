"""Parts of Flower that are not public: one module imports them, and only their users need them."""

from __future__ import annotations

import ast
import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.clientapp import ClientApp
from flwr.serverapp import strategy as flower
from processes import environment
from processes import run as run_command

import fairflower
from fairflower.engines.inline import InlineGrid
from fairflower.flower_compat import (
    MAIN_CONFIGS_RECORD,
    MAIN_PARAMS_RECORD,
    RECORD_KEY_CONFIGS,
    is_deployed,
    privacy_wrapper,
    unchanged_import_path,
)

#: Flower's public modules; `flwr.simulation` is deprecated and may be missing.
PUBLIC = {
    "flwr",
    "flwr.app",
    "flwr.clientapp",
    "flwr.clientapp.mod",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
}
ROOT = Path(fairflower.__file__).parent


def imports(tree: ast.AST) -> Iterator[str]:
    """Yield the names of imported modules of Flower, and of what is imported from `flwr`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            yield node.module
            # A submodule may be imported like a name.
            yield from (
                f"{node.module}.{name}"
                for name in names
                if name.islower() and node.module == "flwr"
            )
            if node.module in PUBLIC - {"flwr"}:
                exported = importlib.import_module(node.module).__all__
                yield from (f"{node.module}.{name}" for name in names if name not in exported)


def test_only_one_module_imports_what_is_not_public() -> None:
    allowed = PUBLIC | {f"{name}.strategy" for name in ("flwr.serverapp",)}
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in ROOT.rglob("*.py")
        for name in imports(ast.parse(path.read_text(encoding="utf-8")))
        if name.split(".")[0] == "flwr" and name not in allowed
    }
    late = {("engines/launch.py", "flwr.simulation"), ("training/app.py", "flwr.clientapp.typing")}
    assert {place for place, _ in found - late} == {"flower_compat.py"}


#: Makes our imports of Flower's private modules fail. Flower's own modules still import them.
HIDE = """
import builtins, importlib, sys
import flwr.app, flwr.clientapp, flwr.serverapp.strategy

def hidden(name, caller):
    private = [f"flwr.{part}" for part in
        ("server", "common", "client", "compat", "supercore", "superlink")]
    parts = [part for part in private if part.startswith("HIDDEN")]
    return caller.startswith("fairflower") and f"{name}.".startswith(tuple(f"{p}." for p in parts))

whole, whole_module = builtins.__import__, importlib.import_module

def import_(name, globals=None, *rest, **options):
    if hidden(name, (globals or {}).get("__name__") or ""):
        raise ImportError(f"{name} is hidden")
    return whole(name, globals, *rest, **options)

def import_module(name, package=None):
    if hidden(name, sys._getframe(1).f_globals["__name__"]):
        raise ImportError(f"{name} is hidden")
    return whole_module(name, package)

builtins.__import__, importlib.import_module = import_, import_module
"""


#: What each part of Flower is needed for: a text that raises our error.
USES = {
    "flwr.server": (
        "from fairflower.classic.strategy import LegacyStrategy as A; A(FedAvg())",
        "has no flwr.server.strategy.Strategy, which is not public and which Flower's classic API",
    ),
    "flwr.client": (
        "from fairflower.classic.client import NumPyTrainer as A; A(None, None)",
        "has no flwr.client.NumPyClient, which is not public and which Flower's classic API needs",
    ),
    "flwr.common": (
        "run({'secure-aggregation': True})",
        "flwr.common.Parameters, which is not public and which Flower's classic API and secure",
    ),
}


#: Runs each text in a process of its own, which has all libraries already.
FORKS = """
import json, os, sys
import matplotlib.backends.backend_agg, sklearn.datasets, torchvision
import flwr.client, flwr.server, flwr.simulation
for hidden, code in json.loads(sys.argv[1]).items():
    print("HIDDEN:", hidden, flush=True)
    if not (child := os.fork()):
        exec(code, {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, hidden
"""


def without(hidden: str, folder: Path) -> str:
    """Return a program that runs without a part of Flower, and then tries what needs it."""
    # The task identity is Flower's own, without which no message can be made.
    return f"""{HIDE.replace("HIDDEN", hidden)}
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id = TaskIdentity.task_id = TaskIdentity.node_id = 1
from fairflower.strategies import FedAvg
import fairflower as ff

def run(settings):
    return ff.run({{"engine": "inline", "output-dir": {str(folder)!r}, "num-server-rounds": 1,
        "data.clients-per-domain": 1, "data.examples-per-client": 20, "data.test-examples": 20,
        "strategy.name": "fedavg"}} | settings)

assert run({{}}).status == "completed"
for use in {[use for part, (use, _) in USES.items() if part.startswith(hidden)]!r}:
    try:
        exec(use)
    except Exception as error:
        print("FAILED", error)
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.posix
def test_only_what_needs_a_private_module_fails_without_it(tmp_path: Path) -> None:
    programs = {hidden: without(hidden, tmp_path / hidden) for hidden in (*USES, "flwr")}
    command = [sys.executable, "-c", FORKS, json.dumps(programs)]
    said = " ".join(run_command(command, env=environment(tmp_path), cwd=tmp_path).split())
    _, *parts = said.split("HIDDEN: ")
    for hidden, failed in zip(programs, parts, strict=True):
        assert failed.startswith(hidden)
        assert failed.count("which is not public") >= failed.count("FAILED") > 0, failed
        for part, (_, words) in USES.items():
            assert hidden == "flwr" or (words in failed) == (part == hidden), failed


def test_the_constants_of_the_protocol_are_flowers() -> None:
    from flwr.common.secure_aggregation import secaggplus_constants
    from flwr.server.workflow import constant

    assert secaggplus_constants.RECORD_KEY_CONFIGS == RECORD_KEY_CONFIGS
    assert constant.MAIN_CONFIGS_RECORD == MAIN_CONFIGS_RECORD
    assert constant.MAIN_PARAMS_RECORD == MAIN_PARAMS_RECORD


# --- recognized by more than a name --------------------------------------------------------------


class OurPrivacy(flower.DifferentialPrivacyServerSideFixedClipping):
    """A user's wrapper, whose name says nothing."""

    def ask(self) -> str:
        return privacy_wrapper()


class DifferentialPrivacyDiary:
    """A user's class with a misleading name."""

    def ask(self) -> str:
        return privacy_wrapper()


def test_a_users_subclass_of_a_privacy_wrapper_is_recognized_and_a_similar_name_is_not() -> None:
    assert OurPrivacy(flower.FedAvg(), 0.0, 1.0, 3).ask() == "OurPrivacy"
    assert DifferentialPrivacyDiary().ask() == ""


class HttpGrid(InlineGrid):
    """Clients in this process, under the name of the grid of a deployment."""


class Logged:
    """A user's wrapper around the grid of a deployment."""

    def __init__(self, grid: object) -> None:
        self.grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def test_deployments_are_recognized_whatever_their_grid_is_called() -> None:
    from flwr.superlink.grid import HttpGrid as Flowers
    from flwr.superlink.grid import InMemoryGrid

    assert not is_deployed(HttpGrid(ClientApp(), 2))
    deployed = object.__new__(Flowers)
    assert is_deployed(deployed)
    assert is_deployed(Logged(object()))  # type: ignore[arg-type]
    assert not is_deployed(object.__new__(InMemoryGrid))


@pytest.mark.parametrize("before", [None, "/mine"])
def test_flowers_additions_to_the_import_path_are_undone(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if before:
        monkeypatch.setenv("PYTHONPATH", before)
    with unchanged_import_path():
        os.environ["PYTHONPATH"] = "/added"  # as Flower's engine on Ray does
    assert os.environ.get("PYTHONPATH") == before
