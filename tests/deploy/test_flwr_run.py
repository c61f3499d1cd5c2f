"""The app with Flower's own commands: builds, runs, and refusals."""

from __future__ import annotations

import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import call
from experiment_files import run_configs
from flwr.common.config import flatten_dict, fuse_dicts, get_project_config, parse_config_args
from flwr_run import Flower, superlink
from processes import ROOT, SCRIPTS, belonging_to, environment, run, wait_for

from fairflower.config import RunConfig
from fairflower.errors import ConfigError
from fairflower.paths import read_text
from fairflower.report import read_run
from fairflower.server.contents import read_facts

EXPERIMENTS = run_configs()
#: Run configs of `flwr run` in the documents.
PRINTED = [
    pairs
    for name in ("deployment", "faults", "guide")
    for _, pairs in re.findall(
        r"""--run-config (["'])(.+?)\1""", read_text(ROOT / "docs" / f"{name}.md")
    )
]
FLWR = SCRIPTS / "flwr"

SETTINGS = {
    "num-server-rounds": "2",
    "data.clients-per-domain": "1",
    "train.local-epochs": "1",
    "strategy.name": "'fedheal'",
}
RUN_FOLDER = {
    ".lock",
    "checkpoints",
    "config.toml",
    "diagnostics.jsonl",
    "history.csv",
    "log.txt",
    "model.safetensors",
    "run.json",
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files of the app in a clone of the repository to another folder."""
    folder = tmp_path_factory.mktemp("elsewhere") / "app"
    folder.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    shutil.copytree(
        ROOT / "fairflower", folder / "fairflower", ignore=shutil.ignore_patterns("__pycache__")
    )
    for link in filter(Path.is_symlink, ROOT.iterdir()):
        (folder / link.name).symlink_to(link.readlink())
    return folder


@pytest.fixture(scope="module")
def flower(app: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flower]:
    with superlink(app, tmp_path_factory.mktemp("flower")) as flower:
        yield flower


def inline(settings: dict[str, str]) -> None:
    """The same run in this process; on Ray it is in tests/engines."""
    call("run", "--engine=inline", *(f"--set={key}={value}" for key, value in settings.items()))


def model(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


SALT = {
    "client.name": "'gsam'",
    "train.optimizer": "'adam'",
    "train.logit-adjustment": "true",
    "data.clients-per-domain": "2",
    "data.corrupted-clients": "1",
    "data.dirichlet-alpha": "1.0",
}
METHODS = [
    pytest.param({"strategy.name": "'fedism'", **SALT}, 8, id="fedism"),
    pytest.param(
        {"strategy.name": "'fedequilibria'", "client.name": "'scaffold'"}, 4, id="scaffold"
    ),
]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("method", "nodes"), METHODS)
def test_flwr_run_gives_the_results_of_an_inline_run(
    method: dict[str, str], nodes: int, flower: Flower, tmp_path: Path
):
    settings = SETTINGS | method | {"output-dir": f"'{tmp_path}'"}
    row = flower.run(settings | {"run-name": "'flwr'"}, supernodes=nodes)
    assert row["status"] == "finished:completed", row
    inline(settings | {"run-name": "'inline'"})

    assert {path.name for path in (tmp_path / "flwr").iterdir()} == RUN_FOLDER
    flwr, same = (read_run(tmp_path / name) for name in ("flwr", "inline"))
    for result in (flwr, same):
        assert result.status == "completed"
        assert result.rounds.tolist() == [0, 1, 2]
    assert model(flwr.path) == model(same.path)
    assert flwr.values.tolist() == same.values.tolist()


@pytest.mark.slow
@pytest.mark.nightly
def test_flwr_stop_stops_a_run_which_can_be_resumed(flower: Flower, tmp_path: Path):
    folder = tmp_path / "long"
    endless = {"output-dir": f"'{tmp_path}'", "run-name": "'long'", "num-server-rounds": "10000"}
    before = set(belonging_to(flower.home))
    run_id = flower.start(SETTINGS | endless, supernodes=4)
    wait_for(lambda: (folder / "diagnostics.jsonl").exists(), "the first round")
    flower("stop", run_id)
    wait_for(lambda: set(belonging_to(flower.home)) <= before, "its processes to end")
    assert read_facts(folder)["status"] == "stopped"
    log = flower("log", run_id, "--show") + (folder / "log.txt").read_text()
    assert "Traceback" not in log
    assert not [path for path in folder.rglob("*") if path.suffix == ".tmp"]

    rounds = str(read_facts(folder)["rounds"] + 1)
    row = flower.run({"resume": f"'{folder}'", "num-server-rounds": rounds}, supernodes=4)
    assert row["status"] == "finished:completed", row
    whole = {"output-dir": f"'{tmp_path}'", "run-name": "'whole'", "num-server-rounds": rounds}
    inline(SETTINGS | whole)
    assert model(folder) == model(tmp_path / "whole")
    assert read_run(folder).rounds.tolist() == list(range(int(rounds) + 1))


@pytest.mark.slow
@pytest.mark.nightly
def test_too_few_supernodes_are_refused_with_the_correct_command(flower: Flower, tmp_path: Path):
    row = flower.run(SETTINGS | {"output-dir": f"'{tmp_path}'"}, supernodes=2)
    assert row["status"] == "finished:failed"
    remedy = 'flwr run . --federation-config "num-supernodes=4 client-resources-num-cpus=1"'
    assert remedy in row["status-details"]
    log = flower("log", row["run-id"], "--show")
    assert remedy in log
    assert not list(tmp_path.iterdir()), "a run that never began left a run folder"
    # The traceback shows that the code of the bundle ran, and not the installed code.
    assert str(flower.home / "flwr" / "apps") in log
    assert str(ROOT / "fairflower") not in log


@pytest.fixture(scope="module")
def bundle(app: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the app with `flwr build`; return the bundle."""
    folder = tmp_path_factory.mktemp("built")
    copy = shutil.copytree(app, folder / "app", symlinks=True)
    run([FLWR, "build"], env=environment(folder), cwd=copy)
    (bundle,) = copy.glob("*.fab")
    return bundle


@pytest.mark.slow
def test_the_bundle_is_complete_and_small(app: Path, bundle: Path):
    assert bundle.stat().st_size < 10 * 2**20
    project = tomllib.loads(zipfile.ZipFile(bundle).read("pyproject.toml").decode())
    # The default groups, which Flower installs for every run, have all that a run needs.
    assert project["tool"]["uv"]["default-groups"] == ["sim"]
    assert project["dependency-groups"]["sim"] == ["fairflower[sim]"]
    bundled = set(zipfile.ZipFile(bundle).namelist())
    files = {path for path in (app / "fairflower").rglob("*") if path.is_file()}
    # Flower does not bundle templates, styles and scripts, which no run needs.
    other = (".j2", ".css", ".js", ".mplstyle", ".service")
    files = {path for path in files if path.suffix not in other}
    ours = {path.relative_to(app) for path in files if "__pycache__" not in path.parts}
    assert bundled >= {path.as_posix() for path in ours}


@pytest.mark.slow
def test_the_built_app_gives_the_model_of_an_inline_run(
    bundle: Path, flower: Flower, tmp_path: Path
):
    zipfile.ZipFile(bundle).extractall(tmp_path / "app")
    settings = SETTINGS | {"output-dir": f"'{tmp_path}'"}
    built = flower.of(tmp_path / "app")
    row = built.run(settings | {"run-name": "'built'"}, supernodes=4)
    assert row["status"] == "finished:completed", row
    inline(settings | {"run-name": "'inline'"})
    assert model(tmp_path / "built") == model(tmp_path / "inline")


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.name)
def test_flower_accepts_every_experiment(path: Path):
    declared = flatten_dict(get_project_config(ROOT)["tool"]["flwr"]["app"]["config"])
    settings = parse_config_args([str(path)])
    assert settings
    RunConfig.from_flat(fuse_dicts(declared, settings))


def test_the_documents_have_run_configs():
    assert len(PRINTED) >= 7


@pytest.mark.parametrize("pairs", PRINTED)
def test_flower_accepts_every_run_config_of_the_documents(pairs: str):
    declared = flatten_dict(get_project_config(ROOT)["tool"]["flwr"]["app"]["config"])
    RunConfig.from_flat(fuse_dicts(declared, parse_config_args([pairs])))


def test_arguments_of_a_strategy_are_refused_with_another_strategy():
    declared = flatten_dict(get_project_config(ROOT)["tool"]["flwr"]["app"]["config"])
    pacs = str(ROOT / "experiments/fedequilibria-pacs.toml")
    for given, label in (
        ([pacs], "fedequilibria:t=0.8:scale=none"),
        (["strategy.name='fedequilibria'"], "fedequilibria"),  # no argument of another config
        (["strategy.name='fedequilibria' strategy.t=0.3"], "fedequilibria:t=0.3"),
    ):
        assert RunConfig.from_flat(fuse_dicts(declared, parse_config_args(given))).label == label
    for given in (["strategy.name='uniform' strategy.t=0.3"], ["strategy.t=0.3"]):
        with pytest.raises(
            ConfigError, match=r"strategy\.t is an argument of fedequilibria, term, "
        ):
            RunConfig.from_flat(fuse_dicts(declared, parse_config_args(given)))
    with pytest.raises(ValueError, match="TOML"):  # Flower takes a file or pairs, not both
        parse_config_args([pacs, "strategy.name='uniform'"])


@pytest.mark.slow
def test_flower_refuses_an_experiment_with_an_unknown_key(tmp_path: Path):
    path = tmp_path / "wrong.toml"
    path.write_text("[train]\nlearning-rate = 0.1\n")
    declared = flatten_dict(get_project_config(ROOT)["tool"]["flwr"]["app"]["config"])
    with pytest.raises(ValueError, match="learning-rate"):
        fuse_dicts(declared, parse_config_args([str(path)]))
