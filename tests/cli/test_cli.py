"""The `fairflower` command and its options."""

from __future__ import annotations

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from itertools import chain
from pathlib import Path
from threading import Event

import pytest
import typer
from command import call
from resuming import config as resumable
from resuming import stopped
from rich.console import Console
from run_folders import make_run

import fairflower as ff
from fairflower import cli, registry
from fairflower.cli import app, run
from fairflower.cli.terminal import console, say_where
from fairflower.config import ClientConfig, RunConfig, StrategyConfig
from fairflower.data import prepare
from fairflower.errors import ConfigError, RunFolderError
from fairflower.paths import TRIALS
from fairflower.plans import execution
from fairflower.plans.execution import auto_jobs, locked_folder, setup_summary
from fairflower.plans.plan import Plan, parse_seeds
from fairflower.plans.tuning import TuningProtocol
from fairflower.report import read_run
from fairflower.server.history import History
from fairflower.server.progress import RunProgress, round_line
from fairflower.strategies import STRATEGIES

QUICK = [
    "--engine=inline",
    "--rounds=1",
    "--epochs=1",
    "--set=data.clients-per-domain=1",
    "--set=data.examples-per-client=20",
    "--set=data.test-examples=10",
]


@pytest.fixture(autouse=True)
def _plain(monkeypatch) -> None:
    monkeypatch.setattr(console, "width", 160)


@pytest.mark.slow
def test_run_prints_its_folder_progress_table_and_next_command(tmp_path):
    output = call("run", *QUICK, f"--output-dir={tmp_path}", "--strategy=fedheal:tau=0.4")
    (folder,) = tmp_path.iterdir()
    assert output.count(str(folder)) >= 2
    steps = ("Loading Flower and PyTorch ...", "Preparing uci-digits ...", "Starting the engine")
    training = "training  cnn, lr 0.05, local epochs 1, batch size 64, sgd\n"
    settings = (
        "data      4 clients of 4 domains; images: 80 for training, 40 for tests, 1,220 training "
        "examples unused (data.fraction or data.examples-per-client)\n",
        training,
    )
    places = [output.index(step) for step in (*steps[:2], *settings, steps[2], "round   1/1")]
    assert places == sorted(places)
    assert "AVG" in output
    assert "fairflower report" in output
    facts = json.loads((folder / "run.json").read_text())
    assert facts["label"] == "fedheal:tau=0.4"
    assert "tau = 0.4" in (folder / "config.toml").read_text()


def test_the_setup_summary_shows_settings_that_all_runs_share():
    flat = {"data.clients-per-domain": 1, "fraction-train": 0.5, "data.validation-fraction": 0.1}
    runs = [RunConfig.from_flat(flat | {"train.lr": lr}) for lr in (0.1, 0.2)]
    data, training = setup_summary(Plan(runs), prepare(runs[0].data)).splitlines()
    assert re.search("4 clients of 4 domains; images: [0-9,]+ for training, [0-9]+ for valid", data)
    assert "lr various, local epochs 5" in training
    assert training.endswith("sgd, fraction-train 0.5")
    redrawn = [RunConfig.from_flat({"seed": seed, "data.seed": seed}) for seed in (3, 4)]
    overlap = setup_summary(Plan(redrawn), prepare(redrawn[0].data)).splitlines()[-1]
    assert "federations 3 and 4 share 100 % of their training examples and 100 % of " in overlap
    embedded = RunConfig.from_flat({"data.dir": "/nowhere"})
    summary = setup_summary(Plan([embedded]), prepare(embedded.data))
    assert (
        "4 domains, not read from data.dir, because uci-digits does not use it; images" in summary
    )


def test_the_setting_that_determines_the_number_of_clients_is_named():
    flat = {"data.imbalance-factor": 3}
    runs = [RunConfig.from_flat(flat)]
    assert (
        "7 clients of 4 domains, set by data.imbalance-factor instead of "
        "data.clients-per-domain; images"
    ) in setup_summary(Plan(runs), prepare(runs[0].data))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.weights=no.pth", "no.pth': file not found"),
        ("train.device=foo", "train.device = 'foo': expected auto, cpu"),
        ("participation.availability=markov:leave=2:back=0.5", "probabilities from 0 to 1"),
        ("min-clients=100", "min-clients = 100: only 4 clients are selected per round"),
    ],
)
def test_invalid_settings_are_reported_before_anything_starts(setting, message, tmp_path):
    options = [f"--output-dir={tmp_path}", "--model=resnet18", f"--set={setting}"]
    output = call("run", *QUICK, *options, expect=2)
    assert message in output
    assert "Starting" not in output
    assert setting.startswith("min-clients") or "Preparing" not in output


def test_the_config_of_a_run_reproduces_its_model(tmp_path):
    call("run", *QUICK, f"--output-dir={tmp_path}", "--strategy=uniform", "--seed=5")
    (first,) = tmp_path.iterdir()
    call("run", "--config", str(first / "config.toml"), "--set=run-name=again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        first / "model.safetensors"
    ).read_bytes()


def test_run_resumes_a_stopped_run_in_its_folder(tmp_path):
    folder = stopped(resumable(tmp_path, **{"strategy.name": "uniform"}), 2)
    output = call("run", "--resume", str(folder), "--workers=1", "--rounds=2")
    assert output.count(str(folder)) >= 2
    assert "round   2/2" in output
    assert "round   1/2" not in output
    assert json.loads((folder / "run.json").read_text())["status"] == "completed"
    for args, message in (
        ([], "is complete: all of its 2 rounds"),
        (["--strategy=fedavg"], "--strategy: a resumed run keeps its settings"),
        (["--seed=3"], "seed = 3 was given"),
        (["--output-dir=/x"], "output-dir = '/x' was given"),
    ):
        assert message in call("run", "--resume", str(folder), *args, expect=2)
    assert "not a run folder" in call("run", f"--resume={tmp_path}", expect=2)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_compare_adds_uniform_and_writes_one_report(tmp_path):
    output = call(
        "compare", *QUICK, "--strategies=fedavg,fedheal:beta=none", "--seeds=0-1",
        f"--output-dir={tmp_path}",
    )  # fmt: skip
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == sorted(
        f"{method}-seed{seed}"
        for method in ("fedavg", "fedheal-beta=none", "uniform")
        for seed in (0, 1)
    )
    assert (tmp_path / "report/index.html").exists()
    assert "uniform, seed 1 (6 of 6)" in output
    again = call("report", str(tmp_path / "runs"), "--out", str(tmp_path / "second"))
    assert "fedheal:beta=none" in again
    assert (tmp_path / "second/index.html").exists()


@pytest.mark.usefixtures("undrawn")
def test_compare_continues_after_a_failed_run_and_reports_it(tmp_path):
    output = call(
        "compare", *QUICK, "--strategies=fedavg", "--seeds=0", f"--output-dir={tmp_path}",
        "--lr=1e30", "--set=train.local-epochs=3", expect=1,
    )  # fmt: skip
    assert output.count("failed:") == 2  # FedAvg and Uniform
    assert "Lower train.lr" in output


def test_errors_of_failed_runs_are_not_parsed_as_markup(monkeypatch):
    message = "[/data] is gone. Run: pip install fairflower[mlflow]"

    class Failing:
        folder = None

        def __init__(self, *args, **options):
            pass

        def run(self):
            raise RunFolderError(message)

    monkeypatch.setattr("fairflower.server.session.Session", Failing)
    output = StringIO()
    rule = StrategyConfig("fairfed", {"metric": "[loss]"})
    plan = Plan([RunConfig(seed=seed, strategy=rule) for seed in range(2)])
    with pytest.raises(RunFolderError):
        execution.execute_in_turn(plan.runs, None, Console(file=output, width=160), Event(), [])
    assert output.getvalue().count(f"of 2) failed: {message}") == 2
    assert output.getvalue().count("fairfed:metric=[loss], seed") == 2


def test_output_paths_are_not_parsed_as_markup(tmp_path, capsys):
    say_where("report", tmp_path / "runs[old]" / "index.html")
    assert f"report: {tmp_path}/runs[old]/index.html" in capsys.readouterr().out


def test_list_shows_every_registered_name():
    output = call("list")
    parts = (registry.ADAPTERS, registry.PARTICIPATION, registry.TRACKERS)
    methods = (STRATEGIES, registry.CLIENTS, registry.MODELS, registry.DATA_SETS)
    for name in chain(*methods, *parts):
        assert re.search(rf"\W{re.escape(name)}\W", output), name
    assert "tau=0.3 (0 to 1)" in output  # other numbers are refused
    assert "t=0.1 (tuned over 0.01 to 10, log scale)" in output
    assert "rule=qfedavg (or weights)" in output
    settings = call("list", "settings")
    assert "data.clients-per-domain" in settings
    assert "seed for the partition" in settings


def test_data_show_draws_a_contact_sheet(tmp_path):
    png = tmp_path / "sheet.png"
    refused = call("data", "show", "uci-digits", "--set=data.name=randhie", expect=2)
    assert "--set data.name=randhie: the command names uci-digits" in refused
    output = call("data", "show", "uci-digits", "--out", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "printed" in output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["run", *QUICK, "--set=min-clients=9"], 2, "min-clients = 9"),
        (["compare", "--seeds=0", "--federations=0-4"], 2, "cannot be combined"),
        (["compare", "--federations=0-x"], 2, "federations = '0-x': expected distinct numbers"),
        (["compare", "--set=data.seed=3"], 2, "data.seed: a comparison does not accept"),
    ],
)
def test_errors_say_what_to_change_and_show_no_traceback(args, code, message):
    """More errors are tested in ``invalid_inputs.py``."""
    output = call(*args, expect=code)
    assert message in output
    assert "Traceback" not in output


def test_a_comparison_is_with_the_strategy_that_a_setting_names(tmp_path):
    named = ["compare", "--plan", f"--output-dir={tmp_path}", "--set=strategy.name=term"]
    assert "strategy  fedavg, term, uniform" in call(*named)


# --- arguments from a config ------------------------------------------------------------------

OWN = """
[strategy]
name = "fedequilibria"
t = 0.8

[client]
name = "moon"
mu = 2.0
"""


@pytest.fixture
def own(tmp_path) -> str:
    """A config of FedEquilibria (by default t = 0.7) and MOON (mu = 5, tau = 0.5)."""
    (tmp_path / "own.toml").write_text(OWN)
    return f"--config={tmp_path / 'own.toml'}"


@pytest.fixture
def planned(monkeypatch) -> list[tuple[str, StrategyConfig, ClientConfig]]:
    """Label, strategy and client of the runs that a command plans, without running them."""
    runs: list[tuple[str, StrategyConfig, ClientConfig]] = []

    def execute(plan: Plan, *_: object, **__: object) -> None:
        runs.extend((config.label, config.strategy, config.client) for config in plan.runs)
        raise typer.Exit

    for module in (run, execution):
        monkeypatch.setattr(module, "execute", execute)
    return runs


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ([], ["fedavg", "fedequilibria:t=0.8", "uniform"]),
        (["fedavg,fedequilibria"], ["fedavg", "fedequilibria:t=0.8", "uniform"]),
        (["uniform,fedequilibria:scale=none"], ["uniform", "fedequilibria:t=0.8:scale=none"]),
        (
            ["uniform,fedequilibria:t=0.3,fedequilibria:scale=none:t=0.3"],
            ["uniform", "fedequilibria:t=0.3", "fedequilibria:t=0.3:scale=none"],
        ),
        (["uniform,fedequilibria:t=default"], ["uniform", "fedequilibria"]),
        (["uniform,fedequilibria:t=0.7"], ["uniform", "fedequilibria"]),
        (["uniform,term,fedheal"], ["uniform", "term", "fedheal"]),
        (
            ["uniform,term,fedequilibria,fedequilibria:t=0.1", "--set=strategy.t=0.5"],
            ["uniform", "term:t=0.5", "fedequilibria:t=0.5", "fedequilibria:t=0.1"],
        ),
    ],
)
def test_a_strategy_takes_its_arguments_from_the_config(given, labels, own, planned):
    if given:
        given = [f"--strategies={given[0]}", *given[1:]]
    call("compare", own, "--clients=sgd", "--seeds=0", *given)
    assert [label for label, _, _ in planned] == labels
    # The label has every argument that is not at its default.
    for label, strategy, _ in planned:
        (named,) = StrategyConfig.parse(label)
        assert {**strategy.defaults(), **strategy.args} == {**named.defaults(), **named.args}


@pytest.mark.parametrize(
    ("given", "labels"),
    [
        ([], ["moon:mu=2.0"]),
        (["--clients=moon"], ["moon:mu=2.0"]),
        (["--clients=moon,sgd,ditto"], ["moon:mu=2.0", "sgd", "ditto"]),
        (["--clients=moon,moon:tau=0.1"], ["moon:mu=2.0", "moon:mu=2.0:tau=0.1"]),
        (["--clients=moon:tau=0.1:mu=default"], ["moon:tau=0.1"]),
        (
            ["--clients=moon,fedprox,moon:mu=4.0,sgd", "--set=client.mu=3.0"],
            ["moon:mu=3.0", "fedprox:mu=3.0", "moon:mu=4.0", "sgd"],
        ),
        (["--set=client.mu=3.0"], ["moon:mu=3.0"]),
    ],
)
def test_a_client_takes_its_arguments_from_the_config(given, labels, own, planned):
    call("compare", own, "--strategies=uniform", "--seeds=0", *given)
    assert [client.label for _, _, client in planned] == labels


@pytest.mark.parametrize(
    ("given", "label"),
    [
        ([], "moon:mu=2.0+fedequilibria:t=0.8"),
        (["--strategy=fedequilibria"], "moon:mu=2.0+fedequilibria:t=0.8"),
        (["--strategy=fedequilibria:scale=none"], "moon:mu=2.0+fedequilibria:t=0.8:scale=none"),
        (["--strategy=fedequilibria:t=0.3", "--client=moon"], "moon:mu=2.0+fedequilibria:t=0.3"),
        (["--strategy=term", "--client=moon:tau=0.1"], "moon:mu=2.0:tau=0.1+term"),
        (
            ["--strategy=fedequilibria", "--set=strategy.t=0.5", "--client=sgd"],
            "fedequilibria:t=0.5",
        ),
        (["--strategy=term", "--set=strategy.t=0.5", "--client=sgd"], "term:t=0.5"),
    ],
)
def test_a_single_run_takes_its_arguments_from_the_config(given, label, own, planned):
    output = call("run", own, *given, "--output-dir=/out", "--seed=3", "--rounds=7")
    assert [label for label, _, _ in planned] == [label]
    client, _, strategy = label.rpartition("+")
    assert output.strip() == (
        f"1 run on uci-digits, rounds 7, strategy {strategy}, client {client or 'sgd'}, seed 3, "
        "to /out"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["compare", "--strategies=fedequilibria,fedequilibria:t=0.8"], "given twice"),
        (["compare", "--strategies=fedheal:tau=0:beta=1,fedheal:beta=1:tau=0"], "given twice"),
        (["compare", "--clients=moon,moon:mu=2.0"], "given twice"),
        (["compare", "--clients=sgd", "--set=client.mu=1"], "client.mu is not an argument of"),
        (["compare", "--clients=sgd", "--set=client.name=moon"], "--clients both name a client"),
        (["run", "--client=sgd", "--set=client.name=moon"], "--client both name a client"),
        (["run", "--strategy=fedavg", "--set=strategy.name=term"], "both name a strategy"),
        (["run", "--client=sgd,moon"], "--client: expected a single method"),
        (["run", "--set=strategy.name=fedavg"], "strategy.t is an argument of fedequilibria, term"),
    ],
)
def test_options_that_contradict_each_other_or_the_config_are_refused(given, message, own, planned):
    assert message in call(*given, own, expect=2)
    assert not planned


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_compare_prints_its_plan_and_runs_it(own, tmp_path):
    folder = tmp_path / "out"
    strategies = "fedequilibria,fedequilibria:scale=none"
    where = [own, *QUICK, "--clients=sgd", "--seeds=4", f"--output-dir={folder}"]
    output = call("compare", *where, f"--strategies={strategies}")
    plan, progress, _ = output.partition("seed 4 (1 of 3)")
    assert progress
    assert plan.splitlines()[:7] == [
        "3 runs on uci-digits",
        "  rounds    1",
        "  strategy  fedequilibria:t=0.8, fedequilibria:t=0.8:scale=none, uniform",
        "  client    sgd",
        "  seed      4",
        f"  to        {folder / 'runs'}",
        "Arguments of methods that are not shown are at their defaults.",
    ]
    configs = {read_run(path).label: read_run(path).config for path in (folder / "runs").iterdir()}
    t = {
        label: (config["strategy.t"], config["strategy.scale"]) for label, config in configs.items()
    }
    assert t == {
        "fedequilibria:t=0.8": (0.8, "default"),
        "fedequilibria:t=0.8:scale=none": (0.8, "none"),
        "uniform": ("default", "default"),
    }
    # An argument that is set to its default gives the same method.
    again = call("compare", *where, "--strategies=fedequilibria", "--set=strategy.scale=unit")
    assert "2 of 2 runs are already completed" in again


# --- plans and progress --------------------------------------------------------------------


def test_shared_arguments_go_to_the_strategies_that_accept_them():
    strategies = StrategyConfig.parse("fedavg,fedheal,fedheal:tau=0.1")
    plan = Plan.grid({}, strategies, [0], {"strategy.tau": 0.4})
    assert [(run.label, run.strategy.args) for run in plan.runs] == [
        ("fedavg", {}),
        ("fedheal:tau=0.4", {"tau": 0.4}),
        ("fedheal:tau=0.1", {"tau": 0.1}),
        ("uniform", {}),
    ]


def test_seeds_and_strategy_labels_are_parsed():
    assert parse_seeds("2-4") == [2, 3, 4]
    strategy = StrategyConfig("fedheal", {"tau": None, "variant": "released"})
    assert StrategyConfig.parse(strategy.label) == [strategy]
    for text in ("", "1,1", "x", "3-1"):
        with pytest.raises(ConfigError):
            parse_seeds(text)


def test_a_label_shows_only_arguments_that_differ_from_defaults():
    assert StrategyConfig("fedheal", {"tau": 0.3, "beta": 0.1}).label == "fedheal:beta=0.1"


def test_the_set_option_overrides_the_strategy_option(tmp_path):
    call("run", *QUICK, "--strategy=fedheal:tau=0.1", "--set=strategy.tau=0.9",
         "--set=run-name=x", f"--output-dir={tmp_path}")  # fmt: skip
    assert json.loads((tmp_path / "x/run.json").read_text())["label"] == "fedheal:tau=0.9"


def test_help_imports_no_slow_library():
    """Slow imports would delay every command."""
    program = (
        "import sys; from fairflower.cli import app; app(['--help'], standalone_mode=False); "
        "print(sys.modules.keys() & {'flwr', 'matplotlib', 'pandas', 'ray', 'scipy', 'torch'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.endswith("set()\n"), done.stdout + done.stderr


def test_the_version_option_prints_the_version():
    assert call("--version").startswith("fairflower ")


def shown(terminal: bool) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    progress = RunProgress(console, "fedheal", 2)
    progress.start(Path("/tmp/run"))
    for server_round, worst in enumerate((0.1, 0.3, 0.6)):
        progress.round(server_round, {"mnist": 0.9, "svhn[old]": worst})
    progress.stop()
    return out.getvalue()


def test_without_a_terminal_every_round_is_a_line():
    lines = [line for line in shown(False).splitlines() if line.startswith("round")]
    assert len(lines) == 3
    assert "mnist  90.0  svhn[old]  60.0" in lines[-1]
    assert "MIN  60.0" in lines[-1]
    assert "AVG  75.0" in lines[-1]
    assert lines[-1].endswith(f"STD ddof 1  {100 * statistics.stdev([0.9, 0.6]):.1f}")


def test_the_screen_and_callbacks_report_the_same_metrics_over_domains():
    accuracies = {"mnist": 0.93, "svhn": 0.57, "usps": 0.88}
    history = History(list(accuracies))
    for domain, accuracy in accuracies.items():
        history.add(1, "domain", domain, {"accuracy": accuracy})
    metrics = history.of(1)
    line = round_line(1, 2, accuracies)
    for heading in ("AVG", "MIN", "STD ddof 1"):
        value = metrics[f"accuracy/{heading.split()[0]}"]
        assert f"{heading} {100 * value:5.1f}" in line
    assert metrics["accuracy/STD"] == pytest.approx(statistics.stdev(accuracies.values()))


def test_on_a_terminal_the_last_round_remains():
    text = shown(True)
    assert "\x1b[" in text
    assert "mnist  90.0  svhn[old]  60.0" in text.splitlines()[-1]
    assert text.count("svhn[old]") > 1


def test_a_metric_that_a_round_lacks_is_shown_as_a_dash():
    out = StringIO()
    progress = RunProgress(Console(file=out, force_terminal=True, width=200), "fedheal", 4)
    progress.start(Path("/tmp/run"))
    private = {"epsilon": 1.5}
    for server_round, metrics in enumerate(({}, private, {}, private)):
        progress.round(server_round, {"mnist": 0.9, "svhn": 0.5}, metrics)
    progress._live.refresh()
    rows = [line.split() for line in out.getvalue().splitlines() if line.startswith("    ")]
    assert [row[-1] for row in rows[-4:]] == ["–", "1.5", "–", "1.5"]  # noqa: RUF001
    progress.stop()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_comparison_is_resumed_where_it_stopped(tmp_path):
    where = ["--seeds=0", f"--output-dir={tmp_path}", *QUICK]
    call("compare", "--strategies=fedavg", *where)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/run.json")}
    assert len(kept) == 2
    both = ["compare", "--strategies=fedavg,fedheal", *where]
    assert "2 of 3 runs are already completed" in call(*both)
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert (tmp_path / "runs" / "fedheal-seed0" / "run.json").exists()
    killed = tmp_path / "runs" / "fedavg-seed0" / "run.json"
    killed.write_text(killed.read_text().replace('"completed"', '"running"'))
    output = call(*both)
    assert "2 of 3 runs are already completed" in output
    assert "1 of 3 runs will be resumed" in output
    assert not (tmp_path / "runs" / "fedavg-seed0-2").exists()
    assert json.loads(killed.read_text())["status"] == "completed"
    assert "3 of 3 runs are already completed" in call(*both)
    assert "already" not in call(*both, "--set=train.lr=0.01")


def test_an_output_folder_is_locked_and_holds_either_a_comparison_or_a_study(tmp_path):
    def error_of(command: str) -> str:
        return " ".join(call(command, "--seeds=1", f"--output-dir={tmp_path}", expect=2).split())

    for command in ("compare", "tune"):
        with locked_folder(tmp_path):
            assert f"Another process is using {tmp_path}." in error_of(command)
    (tmp_path / "runs").mkdir()
    assert f"{tmp_path} is the folder of a comparison" in error_of("tune")
    (tmp_path / "trials" / "20261128-101500-42").mkdir(parents=True)
    assert not any(tmp_path.glob(TRIALS)), "a trial deployment is no trial"
    (tmp_path / "trials" / "fedavg-trial0").mkdir()
    assert f"{tmp_path} is the folder of a study." in error_of("compare")
    with pytest.raises(ConfigError, match="is the folder of a study"):
        ff.compare(output_dir=tmp_path, progress=False)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_parallel_runs_give_the_same_models_and_failed_runs_are_named(tmp_path):
    valid, failing = "fedprox:mu=0.5", "fedprox:mu=1e+30"
    what = ["--strategies=fedavg", "--seeds=0,1", *QUICK, "--set=train.local-epochs=3"]
    call("compare", *what, f"--clients={valid}", f"--output-dir={tmp_path / '1'}")
    both = f"--clients={valid},{failing}"
    output = call("compare", *what, both, "--jobs=2", f"--output-dir={tmp_path / '2'}", expect=1)
    models = {p.parent.name: p.read_bytes() for p in tmp_path.glob("1/runs/*/model.safetensors")}
    assert len(models) == 4
    assert "fedprox-mu=0.5+fedavg-seed1" in models
    for name, model in models.items():
        assert (tmp_path / "2" / "runs" / name / "model.safetensors").read_bytes() == model
    assert output.count("failed:") == 4
    assert f"{failing}+fedavg, seed 0 failed:" in output
    assert f"{valid}+fedavg, seed 0 failed:" not in output
    assert "Lower train.lr" in output


@pytest.mark.parametrize(
    ("settings", "runs", "jobs"),
    [
        ({}, 4, 4),
        ({}, 5, 4),
        ({}, 3, 1),  # each run's clients fill the cores better
        ({"client-cpus": 2}, 3, 2),
        ({"client-cpus": 8}, 3, 1),
        ({"client-gpus": 0.5}, 5, 1),
    ],
)
def test_auto_jobs_runs_as_many_at_a_time_as_fit_the_cores(settings, runs, jobs, monkeypatch):
    monkeypatch.setattr("fairflower.plans.execution.cpus", lambda: 4)
    plan = Plan.grid(
        {"train.device": "cpu", **settings}, StrategyConfig.parse("uniform"), [*range(runs)]
    )
    assert len(plan.runs) == runs
    assert auto_jobs(plan) == jobs


@pytest.mark.parametrize(
    ("given", "jobs"),
    [
        ([], 2),
        (["--jobs=auto"], 2),
        (["--jobs=3"], 3),
        (["--workers=1"], 1),
        (["--engine=ray"], 1),
        (["--ray-address=auto"], 1),
    ],
)
def test_engine_options_run_one_job_at_a_time_by_default(given, jobs, tmp_path, monkeypatch):
    monkeypatch.setattr("fairflower.plans.execution.cpus", lambda: 2)
    asked = []
    monkeypatch.setattr(
        execution,
        "execute",
        lambda plan, console, jobs, home: asked.append(jobs or auto_jobs(plan)),
    )
    call("compare", "--seeds=0", *given, "--set=train.device=cpu", f"--output-dir={tmp_path}")
    assert asked == [jobs]


@pytest.mark.slow
@pytest.mark.nightly
def test_ctrl_c_stops_parallel_runs_and_starts_no_others(tmp_path):
    options = [f"--output-dir={tmp_path}", "--jobs=2", *QUICK, "--rounds=2000", "--seeds=0-4"]
    command = [sys.executable, "-m", "fairflower.cli", "compare", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    rounds = "runs/*/diagnostics.jsonl"
    while len(list(tmp_path.glob(rounds))) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    states = [json.loads(path.read_text())["status"] for path in tmp_path.glob("runs/*/run.json")]
    assert states == ["stopped", "stopped"]


def test_a_name_that_the_terminal_cannot_encode_is_escaped(monkeypatch):
    written = BytesIO()
    stream = TextIOWrapper(written, "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(cli, "app", lambda: say_where("report", Path("/caf\xe9/\udcff")))
    cli.main()
    stream.flush()
    assert written.getvalue() == b"report: /caf\\xe9/\\udcff\n"


def test_symbols_that_the_terminal_cannot_encode_are_written_in_ascii(monkeypatch):
    written = BytesIO()
    stream = TextIOWrapper(written, "cp1252")  # an encoding of Windows
    monkeypatch.setattr(sys, "stdout", stream)
    text = "\N{GREEK SMALL LETTER SIGMA} type \N{MINUS SIGN}2.41 \xb1 0.48 ▼, 1 ▲, 0 ≈"
    monkeypatch.setattr(cli, "app", lambda: print(text, file=stream))
    cli.main()
    stream.flush()
    assert written.getvalue().split() == b"sigma type -2.41 \xb1 0.48 v, 1 ^, 0 ~".split()


def test_compare_with_plan_prints_the_plan_and_runs_nothing(tmp_path):
    output = " ".join(call("compare", "--plan", f"--output-dir={tmp_path / 'new'}").split())
    assert "30 runs on uci-digits" in output
    assert "Smallest detectable difference: 1." in output
    assert not (tmp_path / "new").exists()
    (tmp_path / "runs").mkdir()  # as a comparison that was stopped early leaves it
    assert "Smallest detectable" in call("compare", "--plan", f"--output-dir={tmp_path}")
    message = " ".join(call("compare", f"--pilot={tmp_path}", expect=2).split())
    assert "Add --plan" in message


def test_a_plan_with_a_pilot_reports_differences_in_points(tmp_path):
    for label, shift in (("uniform", 0.0), ("fedavg", 0.02)):
        for seed in range(3):
            values = [{"a": 0.5 + shift * seed, "b": 0.9}] * 3
            make_run(tmp_path / f"{label}-{seed}", values, label=label, seed=seed)
    output = " ".join(call("compare", "--plan", f"--pilot={tmp_path}").split())
    assert re.search(r"(MIN|worst domain)\D* 2\.00 ", output), "paired differences of 0, 2 and 4"
    assert "(within 2)" in output


def test_a_study_whose_data_cannot_be_prepared_prints_only_the_error(tmp_path):
    output = call(
        "tune", "--strategies=uniform", f"--output-dir={tmp_path}",
        "--set=data.validation-fraction=1", expect=1,
    )  # fmt: skip
    assert "unfinished" not in output
    assert "Error: " in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (["--budget=3"], {"budget": 3}),
        (["--seeds=4,5"], {"seeds": [4, 5]}),
        (["--federations=1-2"], {"seeds": [1, 2], "federations": True}),
        (["--select=average"], {"select": "average"}),
        (["--metric=balanced_accuracy"], {"metric": "balanced_accuracy"}),
        (["--tune-training"], {"training": True}),
        (["--defaults"], {"defaults": True}),
    ],
)
def test_the_options_of_tune_set_its_protocol(options, changed, tmp_path, monkeypatch):
    class Announced(Exception):
        pass

    calls = []

    def studies(folder, runs, protocol):
        calls.append((runs, protocol))
        raise Announced

    monkeypatch.setattr("fairflower.plans.tuning.TuningStudies", studies)
    with pytest.raises(Announced):
        app(["tune", f"--output-dir={tmp_path / 'study'}", *options], standalone_mode=False)
    ((runs, protocol),) = calls
    assert protocol == replace(TuningProtocol(12, [1, 2, 3], "worst-then-average"), **changed)
    assert {run.data.validation_fraction for run in runs} == {0.2}
