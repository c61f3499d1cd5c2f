"""The command as a person types it."""

from __future__ import annotations

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fairflower import cli, names
from fairflower.cli import app
from fairflower.config import ConfigError
from fairflower.plan import Plan, Variant, parse_seeds, parse_variants
from fairflower.progress import RunProgress
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
    # The runner swaps stdout for every call; rich looks it up when it prints.
    monkeypatch.setattr(cli, "console", Console(width=160))


def call(*args: str, expect: int = 0) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == expect, result.output + str(result.exception)
    return result.output


def test_run_prints_folder_progress_table_and_what_to_do_next(tmp_path):
    output = call("run", *QUICK, f"--output-dir={tmp_path}", "--strategy=fedheal:tau=0.4")
    (folder,) = tmp_path.iterdir()
    assert output.count(str(folder)) >= 2
    assert "round   1/1" in output
    assert "AVG" in output
    assert "fairflower report" in output
    facts = json.loads((folder / "run.json").read_text())
    assert facts["label"] == "fedheal:tau=0.4"
    assert "tau = 0.4" in (folder / "config.toml").read_text()


def test_a_runs_own_config_runs_it_again(tmp_path):
    call("run", *QUICK, f"--output-dir={tmp_path}", "--strategy=uniform", "--seed=5")
    (first,) = tmp_path.iterdir()
    call("run", "--config", str(first / "config.toml"), "--set=run-name=again")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (
        first / "model.safetensors"
    ).read_bytes()


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


def test_compare_goes_on_after_a_failed_run_and_says_so(tmp_path):
    output = call(
        "compare", *QUICK, "--strategies=fedavg", "--seeds=0", f"--output-dir={tmp_path}",
        "--lr=1e30", "--set=train.local-epochs=3", expect=1,
    )  # fmt: skip
    assert output.count("failed:") == 2  # FedAvg and Uniform
    assert "Lower train.lr" in output


def test_list_shows_everything_that_has_a_name():
    output = call("list")
    for name in [*STRATEGIES, *names.CLIENTS, *names.MODELS, *names.DATA_SETS]:
        assert re.search(rf"\W{re.escape(name)}\W", output), name
    assert "tau=0.3" in output
    settings = call("list", "settings")
    assert "data.clients-per-domain" in settings
    assert "Seed of the partition" in settings


def test_data_show_draws_a_contact_sheet(tmp_path):
    png = tmp_path / "sheet.png"
    output = call("data", "show", "uci-digits", "--out", str(png))
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "printed" in output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["run", "--strategy=fedhael"], 2, "Did you mean 'fedheal'"),
        (["run", "--set=train.learning-rate=1"], 2, "Did you mean 'train.lr'"),
        (["run", "--set=seed"], 2, "Expected key=value"),
        (["run", "--config=no-such.toml"], 2, "no-such.toml"),
        (["run", "--data=digits", "--data-dir=/no/such/folder"], 1, "/no/such/folder"),
        (["run", "--strategy=fedheal:tau=2"], 2, "expected a number in"),
        (["compare", "--seeds=a"], 2, "different numbers"),
        (["compare", "--strategies=fedavg,fedavg"], 2, "named twice"),
        (["compare", "--set=train.rl=1"], 2, "Did you mean 'train.lr'"),
        (["report", "/no/such/run"], 1, "/no/such/run"),
        (["list", "strategy"], 2, "Did you mean 'strategies'"),
        (["data", "show", "digts"], 2, "Did you mean 'digits'"),
    ],
)
def test_errors_say_what_to_change_and_show_no_traceback(args, code, message):
    output = call(*args, expect=code)
    assert message in output
    assert "Traceback" not in output


# --- plans and progress --------------------------------------------------------------------


def test_shared_arguments_go_to_the_strategies_that_take_them():
    plan = Plan.grid({"strategy.tau": 0.4}, parse_variants("fedavg,fedheal,fedheal:tau=0.1"), [0])
    assert [(label, run.strategy.args) for label, run in plan.runs] == [
        ("fedavg", {}),
        ("fedheal", {"tau": 0.4}),
        ("fedheal:tau=0.1", {"tau": 0.1}),
        ("uniform", {}),
    ]


def test_seeds_and_variants_round_trip():
    assert parse_seeds("2-4") == [2, 3, 4]
    variant = Variant("fedheal", {"tau": None, "variant": "released"})
    assert parse_variants(variant.label) == [variant]
    for text in ("", "1,1", "x", "3-1"):
        with pytest.raises(ConfigError):
            parse_seeds(text)


def shown(terminal: bool) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    progress = RunProgress(console, "fedheal", 2)
    progress.start(Path("/tmp/run"))
    for server_round, worst in enumerate((0.1, 0.3, 0.6)):
        progress.round(server_round, {"mnist": 0.9, "svhn": worst})
    progress.stop()
    return out.getvalue()


def test_without_a_terminal_every_round_is_a_line():
    lines = [line for line in shown(False).splitlines() if line.startswith("round")]
    assert len(lines) == 3
    assert "mnist  90.0  svhn  60.0" in lines[-1]
    assert "worst  60.0" in lines[-1]
    assert "avg  75.0" in lines[-1]


def test_on_a_terminal_the_last_round_remains():
    text = shown(True)
    assert "\x1b[" in text
    assert "mnist  90.0  svhn  60.0" in text.splitlines()[-1]
