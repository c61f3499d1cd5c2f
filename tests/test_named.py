"""Strategies, clients, models and data sets of other packages, by entry point and by module."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from apps import app_with_handlers
from command import call, invoke
from flwr.app import Context, Message
from flwr.common.config import flatten_dict, fuse_dicts, get_project_config, parse_config_args
from resuming import config as resumable
from resuming import resume, session, stopped
from rich.console import Console
from runs import history

from fairflower.cli.terminal import console
from fairflower.client_app import app as client_app
from fairflower.config import ClientConfig, RunConfig, StrategyConfig
from fairflower.config.run import method_key
from fairflower.config.text import flatten_tables
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError, UserError
from fairflower.plans.plan import Plan
from fairflower.registry import ADAPTERS, MODELS, STRATEGIES
from fairflower.report import read_run
from fairflower.report.methods import group_runs, sweeps
from fairflower.report.notes import run_notes
from fairflower.server.contents import read_facts
from fairflower.server.session import Session

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "my-method"
PARTS = {
    "strategy.name": "loss-power",
    "client.name": "smooth",
    "model.name": "shallow",
    "data.name": "stripes",
}
QUICK = {
    "engine": "inline",
    "num-server-rounds": 1,
    "data.clients-per-domain": 1,
    "data.examples-per-client": 20,
    "data.test-examples": 10,
    "train.local-epochs": 1,
}
OPTIONS = [f"--set={key}={value}" for key, value in QUICK.items()]


class Packages:
    """Fake installed packages for the duration of a test."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._patch = monkeypatch
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))

    def install(self, name: str, entry_points: dict[str, dict[str, str]], **modules: str) -> None:
        """Install a package with entry points, and modules with the given source."""
        info = self.folder / f"{name.replace('-', '_')}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        groups = (
            f"[{group}]\n" + "".join(f"{n} = {place}\n" for n, place in offers.items())
            for group, offers in entry_points.items()
        )
        (info / "entry_points.txt").write_text("\n".join(groups))
        for module, source in modules.items():
            (self.folder / f"{module}.py").write_text(source)
        # A new path entry, because entry points are cached by path.
        self._patch.syspath_prepend(str(self.folder / name))
        importlib.invalidate_caches()


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    before = set(sys.modules)
    yield Packages(tmp_path / "site-packages", monkeypatch)
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "other", "broken", "raising", "my_method"):
            del sys.modules[name]


@pytest.fixture
def example(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example, as if it were installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    packages.install(project["name"], project["entry-points"])
    monkeypatch.syspath_prepend(str(EXAMPLE))


MINE = """
from typing import Annotated, Literal
import numpy as np
import torch
from fairflower.arguments import Range
from fairflower.strategies import FairStrategy, FedAvg, measurement
import fairflower.strategies

class Mine(FedAvg):
    "Average as I do."
    paper = "I"
    def __init__(self, *, power: Annotated[float, Range(0)] = 1.0,
                 mode: Literal["fast", "slow"] = "fast", **options):
        super().__init__(**options)

class Unreadable(FedAvg):
    def __init__(self, *, power: "Nowhere" = 1.0, **options):
        super().__init__(**options)

class Takes(FedAvg):
    def __init__(self, *, min_clients: int = 3, **options):
        super().__init__(**options)

class Named(FedAvg):
    def __init__(self, *, name: str = "I", **options):
        super().__init__(**options)

class Words(FedAvg):
    def __init__(self, *, mode: Literal["none", "all"] = "all", **options):
        super().__init__(**options)

class Misspells(FedAvg):
    measurements = ("received_los",)

@measurement(low=0, high=1)
def median(trainer):
    return trainer.evaluate(trainer.train_examples)["accuracy"] / 2

@measurement("trained", shape="vector")
def sizes(trainer):
    return torch.ones(3) * len(trainer.data.train.y)

def shape(trainer):
    return 0.0

class Median(FairStrategy):
    measurements = ("mine:median", "mine:sizes")
    def weigh(self, cohort):
        self.diagnostics["sizes"] = np.array([a["h"][0] for a in cohort.measured["mine:sizes"]])
        return np.exp(cohort.metrics["mine:median"]) / np.exp(cohort.metrics["mine:median"]).sum()

class ByEntryPoint(Median):
    measurements = ("half", "mine:sizes")
    def weigh(self, cohort):
        cohort.metrics["mine:median"] = cohort.metrics["half"]
        return super().weigh(cohort)

class Undeclared(FedAvg):
    measurements = ("mine:shape",)

def helper(): ...
"""


@pytest.fixture
def mine(packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Packages:
    """A module ``mine`` in the working directory, and nothing installed."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    return packages


# --- parts that are found -------------------------------------------------------------------------


def test_clients_train_without_the_strategys_package(
    mine: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a learning-rate schedule, the run config changes and is parsed every round."""
    settings = QUICK | {"num-server-rounds": 3, "train.lr-schedule": "linear"}
    named = {"strategy.name": "mine:Mine", "strategy.power": 2.0, "output-dir": str(tmp_path)}
    config = RunConfig.from_flat(settings | named)
    strategy = config.strategy.factory
    begin, instances = strategy.__init__, []
    monkeypatch.setattr(
        strategy, "__init__", wraps(begin)(lambda *a, **k: (instances.append(1), begin(*a, **k))[1])
    )

    def train(message: Message, context: Context) -> Message:
        with monkeypatch.context() as site:
            site.setitem(sys.modules, "mine", None)
            with pytest.raises(ConfigError, match="Install its package where the server runs"):
                RunConfig.from_flat(config.to_flat())
            return client_app(message, context)

    grid = InlineGrid(app_with_handlers(train=train), 4, raise_errors=True)
    folder = Session(grid, config, Console(quiet=True)).run()
    assert read_facts(folder)["status"] == "completed"
    assert len(instances) == 1  # the server's


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize("name", ["loss-power", "my_method.strategy:LossPower"])
def test_a_strategy_of_a_package_is_configured_like_a_built_in_one(name: str) -> None:
    run_config = RunConfig.from_flat({"strategy.name": name, "strategy.power": 2.5})
    assert run_config.strategy.factory.__name__ == "LossPower"
    assert run_config.label == f"{name}:power=2.5"
    assert RunConfig.from_flat(run_config.to_flat()) == run_config
    assert RunConfig.from_flat(flatten_tables(tomllib.loads(run_config.to_toml()))) == run_config
    assert StrategyConfig.parse(f"fedavg,{name}:power=2.5")[1] == run_config.strategy
    # `flwr run` accepts only declared keys, so arguments come with the name.
    assert RunConfig.from_flat({"strategy.name": f"{name}:power=2.5"}) == run_config
    both = {"strategy.name": f"{name}:power=2.5", "strategy.power": 3.0}
    assert RunConfig.from_flat(both).label == f"{name}:power=3.0"
    # An argument equal to its default does not change the method.
    given = RunConfig.from_flat({"strategy.name": name, "strategy.power": 1.0})
    assert given.label == name
    assert method_key(given.to_flat()) == method_key({"strategy.name": name} | {
        key: value for key, value in given.to_flat().items() if "strategy" not in key
    })  # fmt: skip


def test_a_module_in_the_working_directory_is_found(mine: Packages) -> None:
    config = RunConfig.from_flat({"strategy.name": "mine:Mine:mode=slow"})
    assert config.strategy.factory().argument_specs().keys() == {"power", "mode"}


@pytest.mark.parametrize("strategy", ["mine:Median", "mine:ByEntryPoint"])
def test_a_strategy_runs_with_measurements_of_its_own(
    strategy: str, mine: Packages, tmp_path: Path
) -> None:
    mine.install("half", {"fairflower.measurements": {"half": "mine:median"}})
    output = call("run", f"--set=strategy.name={strategy}", *OPTIONS, "--output-dir=runs")
    (folder,) = (tmp_path / "runs").iterdir()
    last = json.loads((folder / "diagnostics.jsonl").read_text().splitlines()[-1])
    assert last["sizes"] == [20.0] * len(last["weights"]), output
    measured = {
        float(row["value"])
        for row in history(folder)
        if row["metric"] in ("mine:median", "half") and row["level"] == "client"
    }
    assert measured
    assert max(measured) <= 0.5


def test_a_file_in_the_working_directory_shadows_no_library(mine: Packages) -> None:
    Path("json.py").write_text("raise ImportError")
    Path("numpy.py").write_text("raise ImportError")
    assert RunConfig.from_flat({"strategy.name": "mine:Mine"}).label == "mine:Mine"
    assert sys.path[-1] == str(Path.cwd())


def test_completed_runs_are_not_kept_with_changed_code_and_resumed_ones_warn(
    mine: Packages, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path("measured.py").write_text("def spread(logits, labels): return 0.0\n")
    home = tmp_path / "runs"
    settings = {"strategy.name": "mine:Mine", "evaluate.metrics": "measured:spread"}
    completed = read_run(session(resumable(home, **settings)).run())
    assert completed.info["parts"].keys() == settings.keys()
    halted = stopped(resumable(home, **settings, seed=1), 2)
    plan = Plan([resumable(home, **settings)])
    assert not plan.without([completed]).runs
    Path("mine.py").write_text(f"{MINE}\n# changed")
    with pytest.raises(ConfigError, match=r"mine:Mine \(strategy.name\) has changed since .*runs"):
        plan.without([completed])
    again = Plan([resumable(home, **settings, seed=1)])
    assert len(again.without([read_run(halted)]).runs) == 1, "a corrected run may go on"
    corrected = read_run(resume(halted))
    assert corrected.status == "completed"
    assert "The file of strategy.name has changed since" in caplog.text
    assert "from round 2 on with another file of strategy.name." in run_notes(corrected)
    assert not Plan([resumable(home, **settings, seed=1)]).without([corrected]).runs
    Path("mine.py").write_text(MINE)
    Path("measured.py").write_text("def spread(logits, labels): return 1.0\n")
    with pytest.raises(ConfigError, match=r"measured:spread \(evaluate.metrics\) has changed"):
        plan.without([completed])


def test_only_a_users_own_files_have_digests(mine: Packages) -> None:
    mine.install("x", {"fairflower.strategies": {"theirs": "other:Mine"}}, other=MINE)
    for name in ("fedheal", "theirs", "other:Mine", "nowhere:Mine", "scipy.stats:norm"):
        assert STRATEGIES.own_file(name) is None
    assert STRATEGIES.own_file("mine:Mine") == Path.cwd() / "mine.py"
    assert MODELS.own_file("timm:resnet10t") is None


def test_reading_a_method_of_a_run_runs_no_local_module(mine: Packages) -> None:
    Path("mine.py").write_text("raise SystemExit('was run')")
    assert dict(StrategyConfig("mine:Mine", {"power": 2}).defaults()) == {}
    flat = {"strategy.name": "mine:Mine", "strategy.power": 2}
    assert ("strategy.power", "2") in method_key(flat)


@pytest.mark.parametrize("failure", ["KeyError('k')", "SystemExit(3)", "OverflowError('big')"])
@pytest.mark.parametrize(
    "key", ["strategy.name", "client.name", "model.name", "data.name"], ids=lambda key: key[:-5]
)
def test_an_error_in_a_users_class_names_its_line(
    key: str, failure: str, mine: Packages, tmp_path: Path
) -> None:
    bases = {"strategy": "FedAvg", "client": "Trainer", "model": "CNN", "data": "UCIDigits"}
    Path("raising.py").write_text(
        "from fairflower.clients import Trainer\n"
        "from fairflower.published.uci_digits import UCIDigits\n"
        "from fairflower.models.small import CNN\nfrom fairflower.strategies import FedAvg\n"
        f"class Mine({bases[key[:-5]]}):\n"
        f"    def __init__(self, *given, **options):\n        raise {failure}\n"
    )
    importlib.invalidate_caches()
    options = [*OPTIONS, f"--set={key}=raising:Mine", f"--output-dir={tmp_path / 'runs'}"]
    result = invoke("run", *options)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    written = " ".join(result.output.split())
    assert failure.partition("(")[0] in written, written
    assert "raising.py, line 7, in __init__" in written


@pytest.mark.parametrize(
    ("key", "broken", "message"),
    [
        ("strategy.name", "needs = 7", "TypeError"),
        ("strategy.name", "def read_config(self, config): raise KeyError", "KeyError"),
        ("client.name", "check_model = classmethod(lambda cls, name: {}['k'])", "KeyError"),
        ("client.name", "make_exchanges = classmethod(lambda cls, args: {}['k'])", "KeyError"),
        (
            *("client.name", "make_exchanges = classmethod(lambda cls, args: [3])"),
            "make_exchanges returned 3, not a fairflower",
        ),
    ],
)
def test_a_users_class_that_fails_checks_is_named(
    key: str, broken: str, message: str, mine: Packages
) -> None:
    Path("raising.py").write_text(
        "from fairflower.clients import Trainer\nfrom fairflower.strategies import FedAvg\n"
        f"class Mine({'FedAvg' if key == 'strategy.name' else 'Trainer'}):\n    {broken}\n"
    )
    importlib.invalidate_caches()
    failed = "it failed with " * message.endswith("Error")
    with pytest.raises(UserError, match=f"{key} = 'raising:Mine': {failed}{message}"):
        RunConfig.from_flat({key: "raising:Mine"})


def test_shared_arguments_reach_a_module_in_the_working_directory(mine: Packages) -> None:
    from fairflower.plans.plan import Plan

    plan = Plan.grid({}, StrategyConfig.parse("mine:Mine"), [0], {"strategy.power": 2})
    assert [run.label for run in plan.runs] == ["mine:Mine:power=2", "uniform"]


def test_overrides_keep_the_arguments_of_the_same_method() -> None:
    flat = {"strategy.name": "fedheal:tau=0.4:beta=0.1"}
    assert StrategyConfig("fedheal", {"beta": "default"}).override(flat) == {
        "strategy.name": "fedheal",
        "strategy.tau": 0.4,
        "strategy.beta": "default",
    }


@pytest.mark.usefixtures("example")
def test_all_four_parts_can_be_run_listed_reported_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 200)
    named = ["--client=smooth:smoothing=0.2", "--model=shallow:hidden=8", "--data=stripes"]
    where = f"--output-dir={tmp_path / 'runs'}"
    for power in (1, 2, 3):
        given = [f"--strategy=loss-power:power={power}", f"--set=run-name=power-{power}"]
        assert "loss-power" in call("run", *named, *given, *OPTIONS, where)
    runs = [read_run(path) for path in sorted((tmp_path / "runs").iterdir())]
    label = "smooth:smoothing=0.2+loss-power"
    assert [run.label for run in runs] == [label, f"{label}:power=2", f"{label}:power=3"]
    facts = json.loads((runs[0].path / "run.json").read_text())
    assert facts["num_parameters"] == 12 * 12 * 8 + 8 + 8 * 3 + 3
    assert runs[0].domains == ("across", "along")
    (comparison,) = group_runs(runs)
    assert [sweep.key for sweep in sweeps(comparison)] == ["strategy.power"]

    resumed = ["--resume", str(runs[1].path), "--rounds=2"]
    assert "power = 5 was given" in call("run", *resumed, "--set=strategy.power=5", expect=2)
    assert "round   2/2" in call("run", *resumed)
    assert "power = 2" in (runs[1].path / "config.toml").read_text()

    listed = call("list")
    for words in ("loss-power", "smooth", "shallow", "stripes", "my-method 1.2", "power=1.0",
                  "hidden=32", "Stripes of three widths"):  # fmt: skip
        assert words in listed


@pytest.mark.usefixtures("example")
def test_flower_accepts_arguments_that_come_with_a_name() -> None:
    own = flatten_dict(get_project_config(EXAMPLE)["tool"]["flwr"]["app"]["config"])
    ours = flatten_dict(get_project_config(ROOT)["tool"]["flwr"]["app"]["config"])
    page = (ROOT / "docs" / "your-own-parts.md").read_text()
    (printed,) = re.findall(r'flwr run \. --run-config "(.+)"', page)
    given = parse_config_args([printed])
    for declared in (own, ours):
        config = RunConfig.from_flat(fuse_dicts(declared, given))
        assert config.label == "smooth:smoothing=0.2+loss-power:power=2.0"
    with pytest.raises(ValueError, match=r"strategy\.power"):  # hence arguments come with the name
        fuse_dicts(ours, parse_config_args(["strategy.power=3.0"]))


@pytest.mark.usefixtures("example")
def test_a_plan_passes_arguments_and_names_run_folders(tmp_path: Path) -> None:
    from fairflower.plans.plan import Plan

    strategies = StrategyConfig.parse("fedheal,my_method.strategy:LossPower,uniform")
    clients = ClientConfig.parse("sgd,my_method.training:Smooth:smoothing=0.5")
    plan = Plan.grid(QUICK, strategies, [0], {"strategy.power": 2}, clients)
    assert [run.label for run in plan.runs[:4]] == [
        "fedheal",
        "my_method.strategy:LossPower:power=2",
        "uniform",
        "my_method.training:Smooth:smoothing=0.5+fedheal",
    ]
    assert plan.runs[1].run_name == "my_method.strategy-LossPower-power=2-seed0"


@pytest.mark.usefixtures("example")
def test_a_run_can_be_read_without_its_package(tmp_path: Path, packages: Packages) -> None:
    names = [f"--set={key}={value}" for key, value in PARTS.items()]
    call("run", *names, *OPTIONS, f"--output-dir={tmp_path / 'runs'}", "--set=strategy.power=2")
    (folder,) = (tmp_path / "runs").iterdir()
    with pytest.MonkeyPatch.context() as patch:
        gone = (str(packages.folder), str(EXAMPLE))
        patch.setattr(sys, "path", [p for p in sys.path if not p.startswith(gone)])
        (comparison,) = group_runs([read_run(folder)])
        assert comparison.methods[0].name == "smooth+loss-power:power=2"
        output = call("run", "--resume", str(folder), "--rounds=2", expect=2)
        assert "Unknown client 'smooth'" in output


# --- parts that are refused -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine:Mone", r"mine has no 'Mone'\. Did you mean Mine\?"),
        ("mine:Mine:powr=1", r"Unknown argument of mine:Mine 'powr'\. Did you mean 'power'"),
        ("mine:Mine:power=-1", r"strategy\.power = -1: expected a number >= 0"),
        ("mine:Mine:mode=fats", r"strategy\.mode = 'fats': expected fast or slow"),
        ("mine:helper", r"'mine:helper': expected a subclass of fairflower"),
        ("mine:Misspells", r"Misspells: Unknown measurement 'received_los'\. Did you mean"),
        ("mine:Undeclared", r"'mine:shape' is not declared as a measurement\. Decorate it"),
        ("mine:fairflower", "expected a subclass"),
        ("json:loads", "expected a subclass"),
        ("mine:Unreadable", r"annotations.*cannot be read.*Nowhere"),
        ("mine:Takes", "has the argument 'min_clients', which every strategy has already"),
        ("mine:Named", "has the argument 'name', which every strategy has already"),
        ("mine:Words", r"Literal\['none'\]: in a run config none is None"),
        ("nine:Mine", r"No module named 'nine'\. Install its package where the server runs"),
        ("mine.rules:Mine", r"'mine' is not a package"),
        ("mine.Mine", r"Unknown strategy 'mine\.Mine'.*as my_package\.module:Class"),
        ("fedheal:tau", r"name = 'fedheal:tau': expected key=value, got 'tau'"),
    ],
)
def test_an_unusable_strategy_is_refused_with_the_reason(
    name: str, message: str, mine: Packages
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat({"strategy.name": name})


def test_a_misspelled_argument_suggests_the_strategys_own(mine: Packages) -> None:
    (strategy,) = StrategyConfig.parse("mine:Mine:powr=1")
    with pytest.raises(ConfigError, match=r"Did you mean 'power'\?") as raised:
        RunConfig.from_flat(strategy.override({}))
    assert "strategy.tau" not in str(raised.value)


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("strategy.name", "los-power", "Did you mean 'loss-power'"),
        ("client.name", "my_method.strategy:LossPower", r": expected .*fairflower.clients.Tr"),
        (
            "model.name",
            "my_method.training:Smooth",
            ": expected .*or a function that returns an instance",
        ),
        ("data.name", "my_method.training:Shallow", ": expected a subclass of fairflower.data"),
        (
            "model.name",
            "shallow:hiden=3",
            "Unknown argument of shallow 'hiden'. Did you mean 'hidden'",
        ),
        (
            "model.name",
            "shallow:hidden=0",
            "model.name = 'shallow': hidden = 0: expected a whole number >= 1",
        ),
        ("model.name", "cnn:hidden=3", "Unknown argument of cnn 'hidden'. Valid: norm."),
        ("data.name", "stripes:noise=3", "noise: stripes has no arguments"),
        ("client.name", "smoothe", "Did you mean 'smooth'"),
    ],
)
def test_parts_of_a_wrong_kind_or_with_wrong_arguments_are_refused(
    key: str, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat({key: name})


def test_a_function_that_returns_no_model_is_refused(mine: Packages) -> None:
    from fairflower.models import build

    Path("other.py").write_text("def make(classes, shape): return 3")
    with pytest.raises(ConfigError, match="'other:make': expected a network"):
        build("other:make", 3, (1, 8, 8), seed=0)


def test_adapters_of_packages_have_a_group_of_their_own(mine: Packages) -> None:
    """A package's model is no adapter, though both kinds are built in the same package."""
    mine.install("one", {"fairflower.models": {"shallow": "mine:Mine"}})
    mine.install("two", {"fairflower.adapters": {"shift": "mine:Mine"}})
    assert ADAPTERS.names() == ["lora", "shift"]
    assert "shallow" in MODELS
    assert "shift" not in MODELS
    with pytest.raises(ConfigError, match="Unknown adapter 'shallow'"):
        RunConfig.from_flat({"model.name": "timm:resnet10t", "model.adapter": "shallow"})


def test_a_name_of_two_packages_is_refused_and_the_module_path_works(mine: Packages) -> None:
    for package, place in (("one", "mine:Mine"), ("two", "other:Other")):
        mine.install(package, {"fairflower.strategies": {"best": place}})
    Path("other.py").write_text(MINE.replace("Mine", "Other"))
    with pytest.raises(ConfigError) as refused:
        RunConfig.from_flat({"strategy.name": "best"})
    words = "'best': mine:Mine (one 1.2) and other:Other (two 1.2). Write mine:Mine instead"
    assert words in str(refused.value)
    assert RunConfig.from_flat({"strategy.name": "other:Other"}).label == "other:Other"
    listed = call("list", "strategies")
    assert "mine:Mine" in listed
    assert "other:Other" in listed


def test_built_in_names_take_precedence_over_packages(mine: Packages) -> None:
    mine.install("one", {"fairflower.strategies": {"fedavg": "mine:Mine"}})
    config = RunConfig.from_flat({"strategy.name": "fedavg"})
    assert config.strategy.factory.__module__ == "fairflower.strategies.fedavg"
    assert "mine:Mine" in call("list", "strategies")


EXTRAS = """
from fairflower.participation import Participation
from fairflower.trackers import Tracker

def share_of_errors(logits, labels):
    return (logits.argmax(axis=1) != labels).mean()

class Rounds(Tracker):
    def __init__(self, folder, config, key, after):
        self.key, self._path = "", folder / "rounds.txt"

    def round(self, server_round, metrics):
        with self._path.open("a") as file:
            file.write(f"{server_round}\\n")

    def end(self, status, final): ...

class LastClients(Participation):
    def choose(self, draw, losses):
        return list(draw.clients[-draw.size:])
"""


def test_metrics_trackers_and_policies_of_a_package_are_found(
    mine: Packages, tmp_path: Path
) -> None:
    offers = {
        "fairflower.metrics": {"wrong-share": "other:share_of_errors"},
        "fairflower.trackers": {"rounds": "other:Rounds"},
        "fairflower.participation": {"last-clients": "other:LastClients"},
    }
    mine.install("one", offers, other=EXTRAS)
    named = {
        "evaluate.metrics": "wrong-share",
        "track": "rounds",
        "participation.policy": "last-clients",
        "fraction-train": 0.5,
    }
    call("run", *OPTIONS, *(f"--set={key}={value}" for key, value in named.items()),
         f"--output-dir={tmp_path / 'runs'}")  # fmt: skip
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "rounds.txt").read_text().split() == ["0", "1"]
    rows = history(folder)
    trained = [
        row["name"] for row in rows if row["metric"] == "train_loss" and row["level"] == "client"
    ]
    assert trained == ["2", "3"]
    assert sum(row["metric"] == "wrong-share" for row in rows) == 2 * 4  # rounds, domains


def test_a_broken_package_fails_only_if_it_is_named(
    mine: Packages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "width", 250)
    offers = {"mended": "mine:Mine", "worse": "broken:Rule", "gone": "lost.rules:Rule",
              "moved": "mine:Mines"}  # fmt: skip
    mine.install(
        "one", {"fairflower.strategies": offers}, broken="import no_such_library", mine=MINE
    )
    assert RunConfig.from_flat({"strategy.name": "mended"}).label == "mended"
    assert RunConfig.from_flat({"strategy.name": "fedheal"}).label == "fedheal"
    for name, message in (
        (
            "worse",
            "'worse' of one 1.2 cannot be imported: .*'no_such_library'. Repair or reinstall",
        ),
        ("gone", "'gone' of one 1.2 cannot be imported: .*'lost'. Repair or reinstall one"),
        ("moved", "'moved' of one 1.2: mine has no 'Mines'. Did you mean Mine"),
    ):
        with pytest.raises(ConfigError, match=message):
            RunConfig.from_flat({"strategy.name": name})
    listed = call("list", "strategies")
    assert "Average as I do" in listed
    assert "no_such_library" in listed
