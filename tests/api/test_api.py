"""The Python API: run, compare and read."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from command import call
from parametrize import mark_others_nightly
from rich.console import Console
from run_folders import constant, edit, make_run, rising

import fairflower as ff
from fairflower.api.runs import method, methods, name_of, settings_from_options, settings_of
from fairflower.clients.moon import MOON
from fairflower.config import StrategyConfig
from fairflower.errors import ConfigError, RunFolderError
from fairflower.models.pretrained import lora
from fairflower.models.resnet import resnet10
from fairflower.models.small import CNN
from fairflower.participation import RoundRobin
from fairflower.published.uci_digits import UCIDigits
from fairflower.report import read_run
from fairflower.server import progress
from fairflower.strategies import FedHEAL
from fairflower.trackers import Tracker

SMALL = {
    "engine": "inline",
    "data": {"clients_per_domain": 1, "examples-per-client": 20, "test-examples": 20},
    "train.local-epochs": 1,
}


# --- arguments --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fedheal:tau=0.4:beta=none", ("fedheal", {"tau": 0.4, "beta": None})),
        (FedHEAL, ("fedheal", {})),
        ({"name": FedHEAL, "tau": np.float64(0.4)}, ("fedheal", {"tau": 0.4})),
        ({"name": "fedheal:tau=0.4", "beta": None}, ("fedheal", {"tau": 0.4, "beta": None})),
        ({"name": "fedgcr", "num-clusters": 3}, ("fedgcr", {"num_clusters": 3})),
        (StrategyConfig("term"), ("term", {})),
    ],
)
def test_a_method_is_a_name_a_class_or_a_dict(given: Any, expected: tuple[str, Any]) -> None:
    parsed = method(StrategyConfig, given)
    assert (parsed.name, parsed.args) == expected
    assert methods(StrategyConfig, given) == methods(StrategyConfig, [given]) == [parsed]


def test_classes_are_named_so_that_any_process_can_import_them(monkeypatch) -> None:
    assert name_of("client.name", MOON) == "moon"
    assert name_of("model.name", CNN) == "cnn"
    assert name_of("strategy.name", Mine) == f"{__name__}:Mine"
    assert settings_from_options({"model": CNN, "rounds": 3}) == {
        "model.name": "cnn",
        "num-server-rounds": 3,
    }
    monkeypatch.setattr(Mine, "__module__", "__main__")
    with pytest.raises(ConfigError, match="Mine is defined in a notebook, a script or a function"):
        method(StrategyConfig, Mine)


def test_settings_accept_classes_and_functions() -> None:
    given = {
        "participation.policy": RoundRobin,
        "track": MyTracker,
        "evaluate": {"metrics": [errors, "elsewhere:f1"]},
        "model": {"name": resnet10, "adapter": lora},
        "data.name": UCIDigits,
    }
    assert settings_of(given) == {
        "participation.policy": "round-robin",
        "track": f"{__name__}:MyTracker",
        "evaluate.metrics": f"{__name__}:errors,elsewhere:f1",
        "model.name": "resnet10",
        "model.adapter": "lora",
        "data.name": "uci-digits",
    }


@pytest.mark.parametrize("key", ["evaluate.metrics", "participation.policy"])
def test_a_lambda_is_refused_as_a_setting(key) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .*<lambda> is defined in .* Move the function"):
        settings_of({key: lambda logits, labels: 0})


def test_a_user_defined_tracker_and_metric_see_every_round(tmp_path) -> None:
    MyTracker.seen.clear()
    result = ff.run(
        {**SMALL, "track": MyTracker, "evaluate.metrics": errors},
        rounds=2,
        output_dir=tmp_path,
        progress=False,
    )
    first, *rounds, last = MyTracker.seen
    assert first == (result.path, "", -1)
    assert [number for number, _ in rounds] == [0, 1, 2]
    for _, metrics in rounds:
        assert metrics["errors/plain"] == pytest.approx(1 - metrics["accuracy/plain"])
    assert last == "completed"
    ff.run(resume=result.path, rounds=3, progress=False)
    assert MyTracker.seen[-3][1:] == ("my-key", 2)


def errors(logits, labels):
    """Return the share of wrong predictions, a metric."""
    return (logits.argmax(axis=1) != labels).mean()


class MyTracker(Tracker):
    """A user's tracker."""

    seen: ClassVar[list[Any]] = []

    def __init__(self, folder, config, key, after) -> None:
        assert config["data.name"] == "uci-digits"
        self.key = "my-key"
        self.seen.append((folder, key, after))

    def round(self, server_round, metrics) -> None:
        self.seen.append((server_round, metrics))

    def end(self, status, final) -> None:
        self.seen.append(status)


class Mine(FedHEAL):
    """A user's strategy."""

    def __init__(self, *, power: float = 1.0, **options) -> None:
        super().__init__(**options)


def test_settings_have_arguments_of_the_method_that_another_argument_names(tmp_path) -> None:
    given = {**SMALL, "strategy": {"power": 2.0}, "client": {"name": "ditto", "lambda_": 0.5}}
    assert settings_of(given)["client.lambda"] == 0.5
    few = {"rounds": 1, "output_dir": tmp_path, "progress": False}
    with pytest.raises(ConfigError, match="Unknown argument of fedheal 'power'"):
        ff.run(given, **few)
    assert ff.run(given, strategy=Mine, **few).config["strategy.power"] == 2.0
    results = ff.compare(given, strategies=[Mine], seeds=[0], jobs=1, **few)
    labels = [f"ditto:lambda=0.5+{name}" for name in ("uniform", f"{__name__}:Mine:power=2.0")]
    assert list(results.table.index) == labels


def test_nested_flat_and_toml_settings_are_equivalent(tmp_path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("seed = 2\n[data]\nclients-per-domain = 3\n[strategy]\nbeta = 'none'\n")
    nested = {
        "seed": np.int64(2), "data": {"clients_per_domain": 3}, "strategy": {"beta": None}
    }  # fmt: skip
    flat = {"seed": 2, "data.clients-per-domain": 3, "strategy.beta": "none"}
    assert settings_of(nested) == settings_of(flat) == settings_of(file) == flat
    assert type(settings_of(nested)["seed"]) is int
    assert settings_of(None) == {}
    unset = {"data": {"dir": None}, "output-dir": None, "strategy.beta": None}
    unset |= {"bound.clip-update-norm": None, "strategy.name": None}
    assert settings_of(unset) == {"strategy.beta": "none"}
    with pytest.raises(ConfigError, match=r"Did you mean 'data\.dir'"):
        settings_of({"data.dri": None})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategy": FedHEAL()}, "Instances are not accepted"),
        ({"strategy": "fedavg,fedheal"}, "expected a single method"),
        ({"strategy": "fedhael"}, "Did you mean 'fedheal'"),
        ({"strategy": {"tau": 0.4}}, "a dict with name and arguments"),
        ({"client": 3}, "client = 3: expected a name"),
        ({"strategy": {"name": "fedheal", "tau": 2}}, "strategy.tau = 2"),
        ({"round": 3}, "Unknown argument 'round'. Did you mean 'rounds'"),
        ({"settings": {"train": {"rl": 1}}}, "Did you mean 'train.lr'"),
        ({"settings": "no-such.toml"}, "no-such.toml"),
        ({"settings": {"resume": "x"}}, "in Python, the argument resume"),
        ({"rounds": "3"}, "num-server-rounds = '3': expected a whole number"),
        ({"engine": str}, "engine = <class 'str'>: expected a name, a number or a word"),
        ({"resume": "x", "strategy": "fedavg"}, "strategy: a resumed run keeps"),
        ({"resume": "/no/such/run"}, "not a run folder"),
        ({"resume": 5}, "resume = 5: expected a path"),
        ({"output_dir": 5}, "output-dir = 5: expected text"),
        ({"on_round": 5}, "on_round = 5: expected a function"),
        ({"strategy": {"name": "fedheal", 1: 2}}, "a dict with name and arguments"),
        ({"strategy": {"name": "fedheal", "tau": np.ones(2)}}, r"strategy.tau = \[1.0, 1.0\]"),
        ({"lr": np.ones(2)}, r"train.lr = \[1.0, 1.0\]: expected a number"),
        ({"settings": {"client-gpus": np.ones(2)}}, r"client-gpus = \[1.0, 1.0\]: expected"),
    ],
)
def test_invalid_arguments_of_run_are_refused_before_a_folder_is_written(
    arguments, message, tmp_path
) -> None:
    with pytest.raises(ConfigError, match=message):
        ff.run(**{"output_dir": tmp_path, **arguments})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seeds": [1, 1]}, "expected distinct numbers"),
        ({"seeds": []}, "expected distinct numbers"),
        ({"seeds": 0}, "seeds = 0: expected distinct numbers"),
        ({"seeds": "0-99999999"}, "at most 1000"),
        ({"strategies": []}, "Name at least one"),
        (
            {"jobs": 2, "engine": "ray"},
            "^engine = 'ray': 2 parallel runs .jobs. use the inline engine",
        ),
        ({"seeds": [1], "federations": [2]}, "^federations and seeds cannot be combined"),
        ({"seeds": "2-1"}, "^seeds = '2-1': expected distinct numbers >= 0"),
        ({"seed": 1}, "seed: .*: use federations or seeds"),
        ({"settings": {"data": {"seed": 7}}}, "data.seed: .*: federations sets it; use seeds"),
        ({"seeds": "a"}, "distinct numbers"),
        (
            {"settings": {"seed": 7}},
            "seed: a comparison does not accept this .*: use federations",
        ),
        ({"settings": {"run-name": "x"}}, "run-name: a comparison does not accept this setting"),
        (
            {"settings": {"output-dir": "x"}},
            "output-dir: .*: use --output-dir .in Python, output_dir",
        ),
        ({"settings": {"resume": "x"}}, "resume: a comparison does not accept this setting"),
        ({"jobs": 0}, "jobs = 0"),
        ({"jobs": 2, "ray_address": "auto"}, "ray-address = 'auto': 2 parallel runs"),
        ({"strategies": ["fedavg", "fedavg"]}, "given twice"),
        ({"client": "moon"}, "Unknown argument 'client'"),
        ({"strategies": 5}, "strategy = 5: expected a name"),
        ({"clients": len}, "client = <built-in function len>: expected a name"),
        ({"seeds": [1.5]}, r"seeds = \[1.5\]: expected distinct numbers"),
        ({"seeds": [float("inf")]}, "expected distinct numbers"),
        ({"jobs": "two"}, "jobs = 'two': expected auto or a whole number"),
        ({"output_dir": b"x"}, "output_dir = b'x': expected a path"),
        ({"output_dir": "a\0"}, "output_dir = 'a.x00': expected a path"),
        ({"leave_one_domain_out": "no"}, "leave_one_domain_out = 'no': expected True or False"),
    ],
)
def test_invalid_arguments_of_compare_are_refused(arguments, message, tmp_path) -> None:
    with pytest.raises(ConfigError, match=message):
        ff.compare(**{"output_dir": tmp_path, **arguments})


# --- runs -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_in_python_equals_the_commands(tmp_path) -> None:
    """The same settings give the same bits from Python and from the command line."""
    calls = []
    run = ff.run(
        SMALL, strategy="fedheal:tau=0.4", rounds=2, seed=3, output_dir=tmp_path / "a",
        on_round=lambda number, metrics: calls.append((number, metrics["accuracy/MIN"])),
        progress=False,
    )  # fmt: skip
    call(
        "run", "--engine=inline", "--strategy=fedheal:tau=0.4", "--rounds=2", "--seed=3",
        f"--output-dir={tmp_path / 'b'}", "--epochs=1", "--set=data.clients-per-domain=1",
        "--set=data.examples-per-client=20", "--set=data.test-examples=20",
    )  # fmt: skip
    (other,) = ff.read(tmp_path / "b")
    assert run.model.keys() == other.model.keys()
    assert all((run.model[name] == other.model[name]).all() for name in run.model)
    assert (run.label, run.seed, run.status) == ("fedheal:tau=0.4", 3, "completed")
    assert run.config["train.local-epochs"] == 1
    assert run.accuracy == other.accuracy
    worst = read_run(run.path).values.min(axis=1)
    assert calls == [(1, worst[1]), (2, worst[2])]
    assert run.history.query("metric == 'accuracy' and round == 2")["value"].min() == worst[2]


def test_a_run_shows_its_progress_unless_disabled(tmp_path, capsys) -> None:
    ff.run(SMALL, rounds=1, output_dir=tmp_path, progress=False)
    assert not capsys.readouterr().out
    ff.run(SMALL, rounds=1, output_dir=tmp_path)
    assert "round   1/1" in capsys.readouterr().out


def test_a_run_that_a_callback_stopped_is_resumed(tmp_path) -> None:
    def on_round(number: int, metrics: dict[str, float]) -> np.bool:
        return np.array(metrics["train_loss"]) > 0

    run = ff.run(SMALL, rounds=3, output_dir=tmp_path, on_round=on_round, progress=False)
    assert (run.status, run.run.last_round) == ("stopped", 1)
    again = ff.run(resume=run.path, progress=False)
    assert (again.status, again.run.last_round, again.path) == ("completed", 3, run.path)


def test_a_comparison_keeps_completed_runs(tmp_path, monkeypatch) -> None:
    def compare(strategies: Any) -> ff.Results:
        return ff.compare(
            SMALL, strategies=strategies, clients=[MOON], seeds=[0, 5], rounds=1,
            output_dir=tmp_path, progress=False, jobs=1,
        )  # fmt: skip

    first = compare(FedHEAL)
    assert {(run.label, run.seed) for run in first} == {
        (f"moon+{strategy}", seed) for strategy in ("uniform", "fedheal") for seed in (0, 5)
    }
    begun = [run.run.info["started"] for run in first]
    second = compare(["fedheal", "fedavg"])
    assert len(second) == 6
    assert set(begun) <= {run.run.info["started"] for run in second}
    assert list(second.table.index) == ["moon+fedavg", "moon+uniform", "moon+fedheal"]
    assert {run.label for run in compare(FedHEAL)} == {run.label for run in second}


def blocks(name: str) -> list[str]:
    """Return the Python of a document that calls fairflower, without its modules for files."""
    text = (Path(__file__).parents[2] / name).read_text()
    return [
        code for code in re.findall(r"```python\n(.+?)```", text, re.S) if "app.main" not in code
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    mark_others_nightly([("README.md", 1), ("docs/python.md", 5)], [("README.md", 1)]),
)
def test_the_python_of_the_documents_works(name, count, tmp_path, monkeypatch) -> None:
    """In order, as in a notebook, with few examples, rounds and federations."""
    run, compare, read = ff.run, ff.compare, ff.read
    size = {"data.examples-per-client": 20, "data.test-examples": 20}
    few = {"rounds": 1, "epochs": 1, "engine": "inline", "progress": False}

    def small_run(settings=None, **given):
        given |= {**few, "output_dir": tmp_path / "runs"}
        return run({**settings_of(settings), **size}, **given)

    def small_compare(settings=None, **given):
        given |= {**few, "output_dir": tmp_path / "grid", "federations": [0, 1], "jobs": 1}
        smaller = {
            **settings_of(settings),
            **size,
            "data.clients-per-domain": 1,
            "fraction-train": 1.0,
        }
        return compare(smaller, **given)

    monkeypatch.setattr(ff, "run", small_run)
    monkeypatch.setattr(ff, "compare", small_compare)
    monkeypatch.setattr(ff, "read", lambda *paths: read(tmp_path / "runs/*"))
    monkeypatch.chdir(Path(__file__).parents[2])  # they name a config by its relative path
    found = blocks(name)
    assert len(found) == count
    names: dict[str, Any] = {"ff": ff}
    for code in found:
        exec(code, names)
    assert isinstance(names["run"], ff.Result)
    assert isinstance(names["results"], ff.Results)


SCRIPT = """
import fairflower as ff

small = {"data": {"clients-per-domain": 1, "examples-per-client": 20, "test-examples": 20}}
print("begins")
results = ff.compare(small, strategies="uniform", seeds=range(2), rounds=1, epochs=1, jobs=2)
print(len(results))
"""


@pytest.mark.slow
@pytest.mark.nightly
def test_a_script_with_parallel_runs_needs_no_main_guard(tmp_path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 1
    assert done.stdout.endswith("2\n")


def test_importing_fairflower_imports_no_heavy_library() -> None:
    heavy = {"torch", "flwr", "numpy", "pandas", "matplotlib", "ray", "rich"}
    program = f"import sys, fairflower; fairflower.__version__; print({heavy} & set(sys.modules))"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_public_name_exists() -> None:
    assert all(getattr(ff, name) for name in ff.__all__)
    with pytest.raises(AttributeError, match="no attribute 'runs'"):
        ff.runs  # noqa: B018


# --- reading ----------------------------------------------------------------------------------


@pytest.fixture
def results(tmp_path) -> ff.Results:
    """Three methods, three seeds each; b is the better domain."""
    for seed, (u, h, a) in enumerate([(0.5, 0.6, 0.4), (0.52, 0.61, 0.42), (0.48, 0.62, 0.44)]):
        for label, start in (("uniform", u), ("fedheal", h), ("fedavg", a)):
            accuracies = rising(start)
            make_run(tmp_path / f"runs/{label}-{seed}", accuracies, label=label, seed=seed)
    return ff.read(tmp_path / "runs/*")


def test_a_damaged_model_is_named(results) -> None:
    (results[0].path / "model.safetensors").write_bytes(b"half of a model")
    with pytest.raises(RunFolderError, match=r"model\.safetensors is damaged"):
        _ = results[0].model


def test_a_summary_has_no_model_even_if_a_folder_has_the_runs_name(
    results, tmp_path, monkeypatch
) -> None:
    results.summary(summary := tmp_path / "summary.csv")
    monkeypatch.chdir(results[0].path.parent)
    with pytest.raises(RunFolderError, match="was read from a summary, which has no model"):
        _ = ff.read(summary)[0].model


def test_the_table_has_means_and_deviations_over_seeds(results) -> None:
    """Domain a has start + 0.04 on average over rounds 2 to 6; b has 0.9."""
    table = results.table
    assert list(table.index) == ["fedavg", "uniform", "fedheal"]
    assert table.loc["fedheal", ("a", "mean")] == pytest.approx(61 + 4)
    assert table.loc["fedheal", ("a", "std")] == pytest.approx(1.0)
    assert table.loc["uniform", ("AVG", "mean")] == pytest.approx((54 + 90) / 2)
    assert table.loc["uniform", ("MIN", "mean")] == pytest.approx(54)
    assert table.loc["uniform", ("GAP", "mean")] == pytest.approx(36)
    assert (table["seeds", "n"] == 3).all()


#: The only verdict that three seeds allow.
TOO_FEW = (
    "fedavg, uniform and fedheal: too few pairs for a verdict (5 needed); see the tables for the "
    "differences"
)


def test_differences_are_paired_by_seed(results) -> None:
    table = results.differences.set_index(["method", "against", "metric"])
    worst = table.loc["fedheal", "Uniform", "MIN"]
    assert worst["mean"] == pytest.approx(np.mean([10, 9, 14]))
    assert worst["std"] == pytest.approx(np.std([10, 9, 14], ddof=1))
    assert (worst["seeds"], worst["verdict"]) == (3, ""), "no verdict from three"
    assert worst["low"] < worst["mean"] < worst["high"]
    assert (worst["margin"], worst["least"] > 0) == (2, True)
    assert f"{worst['mean']:.2f} ± {worst['std']:.2f}" == "11.00 ± 2.65"
    assert results.verdicts[0] == f"{TOO_FEW}."


def test_wrong_arguments_of_results_are_named(results, tmp_path) -> None:
    with pytest.raises(ConfigError, match="Unknown figure '5'"):
        results.plot(5)
    for call_of in (results.report, results.summary):
        with pytest.raises(ConfigError, match="= 5: expected a path"):
            call_of(5)
    history = results[0].path / "history.csv"
    before = history.read_bytes()
    with pytest.raises(ConfigError, match=r"history\.csv belongs to a run folder"):
        results.summary(history)
    assert history.read_bytes() == before
    with pytest.raises(ConfigError, match=r"summary x\.txt: expected a file name that ends in"):
        results.summary("x.txt")
    with pytest.raises(TypeError, match="unsupported operand"):
        results + 5
    assert results[9:].history.columns.tolist() == results.history.columns.tolist()


def test_the_history_has_every_metric_of_every_run(results) -> None:
    with (results[0].path / "history.csv").open("a") as file:
        file.write("7,domain,NA,loss,nan\n7,domain,b,acc")  # the last line is being written
    history = results.history
    unknown = history[history["value"].isna()]
    assert unknown[["round", "name"]].to_numpy().tolist() == [[7, "NA"]]
    assert history.columns.tolist()[:5] == ["data", "method", "seed", "run", "round"]
    chosen = history.query("method == 'fedheal' and seed == 2 and metric == 'accuracy'")
    by_round = chosen.pivot_table(index="round", columns="name", values="value")
    assert by_round["a"].tolist() == pytest.approx([0.62 + 0.01 * r for r in range(7)])
    assert (by_round["b"] == 0.9).all()
    assert (history.query("level == 'run'")["name"] == "").all()


def test_results_are_a_sequence_of_runs(results, tmp_path) -> None:
    assert len(results) == 9
    assert [run.label for run in results[:2]] == ["fedavg", "fedavg"]
    assert isinstance(results[0], ff.Result)
    assert repr(results) == "<9 runs of 3 methods on digits>"
    assert len(results[:2] + results[3:4]) == 3
    assert "fedheal: no verdict from 3 " in " ".join(str(results).split())
    results.summary(tmp_path / "x.csv")
    again = ff.read(tmp_path / "x.csv")
    assert again.table.round(6).equals(results.table.round(6))
    assert set(again.history["round"]) == {2, 3, 4, 5, 6}


def test_a_notebook_shows_the_table_and_verdicts(results) -> None:
    page = results._repr_html_()
    assert page.count("<table>") == 1
    assert "<strong>65.00</strong>" in page
    assert f"<li>{TOO_FEW}.</li>" in page


def test_figures_are_drawn_by_name(results) -> None:
    figure = results.plot("worst")
    labels = {line.get_label() for line in figure.axes[0].lines}
    assert {"fedavg", "uniform", "fedheal"} <= labels
    assert figure.axes[0].get_ylabel() == "MIN over domains, %"
    assert figure._repr_png_().startswith(b"\x89PNG")  # the image that a notebook shows
    with pytest.raises(ConfigError, match="Did you mean 'worst'"):
        results.plot("wrst")


def test_runs_on_several_data_sets_are_separate_in_the_table(results, tmp_path) -> None:
    make_run(tmp_path / "other", constant(c=0.5, d=0.25))
    both = results + ff.read(tmp_path / "other")
    assert both.table.index.names == ["data", "method"]
    assert both.table.loc["digits: c, d"].loc["fedheal", ("MIN", "mean")] == 25
    with pytest.raises(ConfigError, match="different sets of domains"):
        both.plot()


def test_frames_name_methods_alike_for_several_sets_of_domains(tmp_path) -> None:
    for held, left in ("a", "b"), ("b", "a"):
        for label in ("fedavg", "uniform"):
            accuracies = constant(**{left: 0.5, "c": 0.9})
            folder = make_run(tmp_path / f"runs/{label}-{held}", accuracies, label=label)
            edit("config.toml", "[data]", f'[data]\nheld-out = "{held}"')(folder)
    results = ff.read(tmp_path / "runs")
    names = set(results.table.index)
    assert {name for _, name in names} == {"fedavg", "uniform"}
    assert set(results.history[["data", "method"]].itertuples(index=False, name=None)) == names
    assert set(results.differences["data"]) == {data for data, _ in names}
    joined = results.history.join(results.table["MIN"], on=["data", "method"])
    assert (joined["mean"] == 50).all()


def test_folders_without_a_readable_run_are_skipped_or_refused(results, tmp_path) -> None:
    (tmp_path / "runs/report").mkdir()
    assert len(ff.read(tmp_path / "runs/*", tmp_path / "runs")) == 9
    (tmp_path / "runs/fedavg-0/history.csv").write_text("nonsense\n")
    with pytest.warns(UserWarning, match=r"Skipped: .*fedavg-0"):
        assert len(ff.read(tmp_path / "runs/*")) == 8
    (tmp_path / "runs/fedavg-0/config.toml").write_text("seed = = 1")
    with pytest.warns(UserWarning, match=r"Skipped: .*fedavg-0.*is not valid TOML"):
        assert len(ff.read(tmp_path / "runs/*")) == 8
    with pytest.raises(RunFolderError, match="There are no readable runs"):
        ff.read(tmp_path / "none*")
    with pytest.raises(ConfigError, match=r"paths = \['a', 'b'\]: expected a path"):
        ff.read(["a", "b"])
    with (
        pytest.warns(UserWarning, match="The run folder .* does not exist"),
        pytest.raises(RunFolderError),
    ):
        ff.read(tmp_path / "none")


# --- notebooks --------------------------------------------------------------------------------


_LINES = ["round   1/3  mnist  50.0", "round   2/3  mnist  62.5"]


def test_a_notebook_shows_the_last_round_in_one_line(monkeypatch, capsys) -> None:
    """This needs no ipywidgets, which rich's own display needs in a notebook."""
    monkeypatch.setattr("IPython.display.display", lambda *_: None)  # of the title
    for quiet in (False, True):
        live = progress.RunProgress(Console(force_jupyter=True, quiet=quiet), "fedheal", 3)
        live.start(Path("folder"))
        live.round(1, {"mnist": 0.5})
        live.round(2, {"mnist": 0.625})
        live.stop()
        _, *lines = capsys.readouterr().out.split("\r")
        assert [line[:24] for line in lines] == ([] if quiet else _LINES)
