"""Metrics for callbacks, early stopping, and learning-rate schedules."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import resuming
import torch
from apps import app_with_handlers
from hypothesis import given
from hypothesis import strategies as st
from resuming import outcome, resume, session
from run_folders import printed_tables
from runs import config, history, run

from fairflower.client_app import app as client_app
from fairflower.config import RunConfig, TrainConfig
from fairflower.config.run import method_key
from fairflower.errors import ConfigError, RunInterrupted, StopRun, StrategyError
from fairflower.report import read_run, read_summary, reading, write_summary
from fairflower.report.methods import group_runs
from fairflower.server.checkpoint import resumed_config
from fairflower.server.contents import read_facts
from fairflower.server.folder import lock_folder
from fairflower.server.history import History, early_stop_round
from fairflower.server.rounds import RoundLoop
from fairflower.strategies import FedHEAL

# --- metrics ----------------------------------------------------------------------------------


def test_callbacks_get_the_metrics_of_the_history(tmp_path) -> None:
    received = {}
    folder = run(config(tmp_path), on_round=lambda r, metrics: received.update({r: metrics}))
    rows = [row for row in history(folder) if row["round"] == "2"]

    def values(level: str, metric: str) -> dict[str, float]:
        chosen = (row for row in rows if (row["level"], row["metric"]) == (level, metric))
        return {row["name"]: float(row["value"]) for row in chosen}

    accuracies = values("domain", "accuracy")
    assert list(received) == [1, 2]
    for domain, accuracy in accuracies.items():
        assert received[2][f"accuracy/{domain}"] == accuracy
    assert received[2]["accuracy/MIN"] == min(accuracies.values())
    assert received[2]["accuracy/AVG"] == pytest.approx(np.mean(list(accuracies.values())))
    assert received[2]["accuracy/STD"] == pytest.approx(np.std(list(accuracies.values()), ddof=1))
    sizes, losses = values("client", "num-examples"), values("client", "train_loss")
    mean = np.average(list(losses.values()), weights=[sizes[name] for name in losses])
    assert received[2]["train_loss"] == pytest.approx(mean)
    assert received[2]["seconds"] == values("run", "seconds")[""]

    again = History(list(accuracies))
    again.read(folder / "history.csv")
    assert again.of(2) == received[2]
    final = again.final()
    for d, domain in enumerate(read_run(folder).domains):
        assert final[f"accuracy/{domain}"] == pytest.approx(read_run(folder).final()[d])


def test_metrics_over_domains_need_an_accuracy_of_every_domain() -> None:
    history = History(["a", "b"])
    history.add(1, "domain", "a", {"accuracy": 0.5})
    assert history.of(1) == {"accuracy/a": 0.5}
    history.add(1, "domain", "b", {"accuracy": math.nan})
    assert "accuracy/AVG" not in history.of(1)
    assert history.final() == {"accuracy/a": 0.5}


def test_final_metrics_are_on_validation_examples_if_nothing_was_tested() -> None:
    history = History(["a", "b"])
    assert history.final() == {}
    for server_round in range(8):
        history.add(server_round, "validation", "a", {"accuracy": 0.1 * server_round})
        history.add(server_round, "validation", "b", {"accuracy": 0.2})
    final = history.final()
    assert final["validation_accuracy/a"] == pytest.approx(0.5)
    assert final["validation_accuracy/MIN"] == pytest.approx(0.2)
    assert history.last_test() == (7, pytest.approx({"a": 0.7, "b": 0.2}))
    history.add(8, "domain", "a", {"accuracy": 0.9})
    assert history.final() == {"accuracy/a": 0.9}
    assert history.last_test() == (8, pytest.approx({"a": 0.9, "b": math.nan}, nan_ok=True))


WITH_VALIDATION = {"data.validation-fraction": 0.25, "data.examples-per-client": 30}


def test_callbacks_get_validation_metrics_beside_test_metrics(tmp_path) -> None:
    received = {}
    changes = {**WITH_VALIDATION, "num-server-rounds": 1}
    config = resuming.config(tmp_path, **changes)
    folder = session(config, on_round=lambda r, metrics: received.update(metrics)).run()
    for level, prefix in (("domain", ""), ("validation", "validation_")):
        rows = [row for row in history(folder) if (row["round"], row["level"]) == ("1", level)]
        assert len(rows) >= 8, "accuracy and loss of four domains"
        for row in rows:
            assert received[f"{prefix}{row['metric']}/{row['name']}"] == float(row["value"])
        accuracies = [float(row["value"]) for row in rows if row["metric"] == "accuracy"]
        assert received[f"{prefix}accuracy/MIN"] == min(accuracies)
        assert received[f"{prefix}accuracy/AVG"] == pytest.approx(np.mean(accuracies))


# --- callbacks --------------------------------------------------------------------------------


def raises(server_round: int, metrics: object) -> None:
    if server_round == 2:
        raise StopRun


@pytest.mark.few(2)
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("on_round", [lambda r, metrics: r == 2, raises])
def test_a_run_stopped_by_a_callback_resumes_to_the_result_of_an_uninterrupted_run(
    tmp_path, on_round, every
) -> None:
    checkpoints = {"checkpoint.every": every}
    whole = session(resuming.config(tmp_path / "whole", **checkpoints)).run()
    begun = session(resuming.config(tmp_path / "begun", **checkpoints), on_round=on_round)
    folder = begun.run()
    assert read_run(folder).progress == "stopped after round 2 of 3"
    trained = []
    app = app_with_handlers(
        train=lambda message, context: (
            trained.append(message.content["config"]["server-round"])
            or client_app(message, context)
        )
    )
    assert outcome(resume(folder, app)) == outcome(whole)
    assert set(trained) == {3}


def test_a_callback_that_returns_1_does_not_stop_the_run(tmp_path) -> None:
    assert read_run(run(config(tmp_path), on_round=lambda r, metrics: 1)).status == "completed"


def test_resuming_repeats_an_interrupted_callback(tmp_path) -> None:
    """A run interrupted in a callback that stops it is stopped after the same round."""

    def interrupts(server_round: int, metrics: object) -> None:
        if server_round == 2:
            raise RunInterrupted

    whole = session(resuming.config(tmp_path / "whole"), on_round=raises).run()
    begun = session(resuming.config(tmp_path / "begun"), on_round=interrupts)
    with pytest.raises(RunInterrupted):
        begun.run()
    again = session(resumed_config(begun.folder.path, {}), on_round=raises).run()
    assert read_run(again).progress == "stopped after round 2 of 3"
    assert outcome(again) == outcome(whole)


def test_an_exception_in_a_callback_fails_the_run(tmp_path) -> None:
    new_session = session(
        resuming.config(tmp_path), on_round=lambda r, metrics: metrics["accuracy/mars"]
    )
    with pytest.raises(KeyError, match="mars"):
        new_session.run()
    assert json.loads((new_session.folder.path / "run.json").read_text())["status"] == "failed"


# --- early stopping ---------------------------------------------------------------------------


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12), st.integers(1, 4), st.floats(0, 0.3))
def test_settled_returns_the_best_round_after_patience_rounds_without_improvement(
    losses, patience, delta
) -> None:
    best = 0
    for i, loss in enumerate(losses):
        if i == 0 or loss < losses[best] - delta:
            best = i
    expected = best + 1 if len(losses) - 1 - best >= patience else 0
    assert early_stop_round(dict(enumerate(losses, 1)), patience, delta) == expected


@pytest.mark.parametrize("lost", [math.inf, math.nan])
def test_a_nan_or_infinite_loss_is_no_improvement(lost) -> None:
    history = History(["a", "b"])
    for server_round, loss in ((1, 2.0), (2, 1.0), (3, lost), (4, lost)):
        history.add(server_round, "validation", "a", {"loss": loss})
        history.add(server_round, "validation", "b", {"loss": 1.0})
    assert early_stop_round(history.validation_losses, patience=2) == 2


#: No loss decreases by 9, so these runs stop after round 3.
STOPS_EARLY = {"num-server-rounds": 4, "stop.patience": 2, "stop.min-delta": 9.0}


@pytest.mark.parametrize("server_round", [2, 3])
def test_early_stopping_ends_resumed_and_uninterrupted_runs_after_the_same_round(
    tmp_path, server_round
) -> None:
    changes = STOPS_EARLY | {"evaluate.every": 4, "checkpoint.every": 2}
    whole = session(resuming.config(tmp_path / "whole", **changes)).run()
    run = read_run(whole)
    assert run.progress == "completed after round 3 of 4"  # rounds 2 and 3 are no improvement
    assert run.rounds.tolist() == [0, 3]  # the last round is tested, as always
    begun = resuming.stopped(resuming.config(tmp_path / "begun", **changes), server_round)
    assert outcome(resume(begun)) == outcome(whole)
    short = resuming.config(tmp_path / "short", **(changes | {"num-server-rounds": 3}))
    model = (session(short).run() / "model.safetensors").read_bytes()
    assert model == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("by", "ends", "kind"), [("server", 4, "validation"), ("clients", 3, "training")]
)
def test_early_stopping_uses_the_validation_loss_if_the_server_evaluates(
    tmp_path, by, ends, kind
) -> None:
    """The server evaluates rounds 2, 4, ...: round 4 is two rounds after the first loss."""
    changes = STOPS_EARLY | {"num-server-rounds": 6, "evaluate.every": 2, "evaluate.by": by}
    changes |= WITH_VALIDATION
    whole = session(resuming.config(tmp_path / "whole", **changes)).run()
    assert f"completed after round {ends} of 6: the {kind} loss has not improved" in printed_tables(
        whole
    )
    begun = resuming.stopped(resuming.config(tmp_path / "begun", **changes), 3)
    assert outcome(resume(begun)) == outcome(whole)


def test_resuming_a_run_killed_after_early_stopping_trains_no_further_rounds(tmp_path) -> None:
    folder = session(resuming.config(tmp_path, **STOPS_EARLY)).run()
    before = outcome(folder)
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))
    assert read_run(folder).progress.startswith("killed after round")
    lock = lock_folder(folder)
    assert read_run(folder).progress.startswith("running after round")
    lock.release()
    assert outcome(resume(folder)) == before


def test_a_run_killed_in_its_last_test_does_not_end_early_if_the_repeated_loss_improves(
    tmp_path, monkeypatch
) -> None:
    def killed(self, server_round, arrays):
        if server_round:
            raise KeyboardInterrupt
        return evaluate(self, server_round, arrays)

    def improves(message, context):
        reply = client_app(message, context)
        reply.content["metrics"]["train_loss"] = -20.0
        return reply

    evaluate = RoundLoop._evaluate
    begun = session(resuming.config(tmp_path, **(STOPS_EARLY | {"evaluate.every": 4})))
    with monkeypatch.context() as patch:
        patch.setattr(RoundLoop, "_evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            begun.run()
    folder = begun.folder.path
    assert "has not improved since round 1" in read_facts(folder)["ended_early"]
    resume(folder, app_with_handlers(train=improves))
    run = read_run(folder)
    assert (run.progress, "ended_early" in run.info) == ("completed after round 4 of 4", False)
    assert resumed_config(folder, {"num-server-rounds": 5}).num_server_rounds == 5


@pytest.mark.parametrize("halted", [["2", "3"], ["3"]])
def test_resuming_forgets_what_was_noted_of_the_end_and_of_later_rounds(tmp_path, halted) -> None:
    folder = resuming.stopped(resuming.config(tmp_path), 3)
    reasons = dict.fromkeys(halted, "too few clients")
    noted = {"ended_early": "no improvement", "diverged": 9.0}
    noted |= {"halted_rounds": reasons, "untracked": reasons}
    (folder / "run.json").write_text(json.dumps(read_facts(folder) | noted))
    resuming.stopped(resumed_config(folder, {}), 3)
    facts = read_facts(folder)
    assert not {"ended_early", "diverged"} & facts.keys()
    for name in ("halted_rounds", "untracked"):
        assert list(facts.get(name, {})) == halted[:-1]


def test_a_run_that_ends_while_it_is_read_is_not_reported_as_killed(tmp_path, monkeypatch) -> None:
    folder = session(resuming.config(tmp_path, **STOPS_EARLY)).run()
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(facts | {"status": "running"}))

    def ends(path) -> bool:
        (path / "run.json").write_text(json.dumps(facts))
        return False

    monkeypatch.setattr(reading, "is_locked", ends)
    assert read_run(folder).status == "completed"


def test_a_run_that_stopped_early_is_completed_and_cannot_be_resumed(tmp_path) -> None:
    folder = session(resuming.config(tmp_path, **STOPS_EARLY)).run()
    with pytest.raises(
        ConfigError, match="ended after round 3: the training loss has not improved since"
    ):
        resume(folder, **{"num-server-rounds": 9})
    assert (
        "completed after round 3 of 4: the training loss has not improved since"
        in printed_tables(folder)
    )


@pytest.mark.slow
def test_runs_that_stopped_early_are_compared_with_runs_of_the_same_settings(tmp_path) -> None:
    """Runs of other seeds and methods may end after different rounds."""
    folders = []
    for strategy in ("uniform", "fedheal"):
        for seed in range(3):
            changes = STOPS_EARLY | {"seed": seed, "strategy.name": strategy}
            changes["stop.patience"] = 2 if seed else 9
            folders.append(session(resuming.config(tmp_path, **changes)).run())
            for name, old in (("config.toml", "patience = 9"), ("run.json", 'patience": 9')):
                text = (folders[-1] / name).read_text()
                (folders[-1] / name).write_text(text.replace(old, old.replace("9", "2")))
    runs = [read_run(folder) for folder in folders]
    assert {run.last_round for run in runs} == {3, 4}
    write_summary(runs, tmp_path / "summary.csv")
    for known in (runs, read_summary(tmp_path / "summary.csv")):
        (comparison,) = group_runs(known)
        assert [len(method.runs) for method in comparison.methods] == [3, 3]
        first, second = comparison.methods
        assert first.comparable == second.comparable
        assert comparison.span() == "mean of the last tested rounds (at most 5)"


# --- learning rates ---------------------------------------------------------------------------

#: torch's schedule of the same name, for R rounds from a learning rate of 0.2.
SCHEDULES = {
    "cosine": lambda o, R: torch.optim.lr_scheduler.CosineAnnealingLR(o, R, eta_min=0.02),
    "linear": lambda o, R: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, R),
    "step": lambda o, R: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
    "constant": lambda o, R: torch.optim.lr_scheduler.ConstantLR(o, 1.0, R),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_schedules_equal_those_of_torch(name) -> None:
    settings = TrainConfig(
        lr=0.2, lr_schedule=name, lr_final=0.1, lr_factor=0.5, lr_every=3, momentum=0.0
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    schedule = SCHEDULES[name](optimizer, 8)
    for server_round in range(1, 9):
        expected = optimizer.param_groups[0]["lr"]
        assert settings.lr_in(server_round, 8) == pytest.approx(expected)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("warmup", [1, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_warmup_equals_torchs_linear_warmup_followed_by_the_schedule(name, warmup) -> None:
    settings = TrainConfig(
        lr=0.2,
        lr_schedule=name,
        lr_final=0.1,
        lr_factor=0.5,
        lr_every=3,
        lr_warmup=warmup,
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    rise = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / (warmup + 1), 1.0, warmup)
    parts = [rise, SCHEDULES[name](optimizer, 12 - warmup)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, [warmup])
    for server_round in range(1, 13):
        expected = optimizer.param_groups[0]["lr"]
        assert settings.lr_in(server_round, 12) == pytest.approx(expected)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_run_no_longer_than_its_warmup_has_rising_learning_rates(name) -> None:
    settings = TrainConfig(lr=0.4, lr_schedule=name, lr_warmup=3)
    assert [settings.lr_in(r, 2) for r in (1, 2)] == pytest.approx([0.1, 0.2])
    assert [settings.lr_in(r, 3) for r in (1, 2, 3)] == pytest.approx([0.1, 0.2, 0.3])
    assert settings.lr_in(4, 4) == 0.4


def test_clients_and_strategies_get_the_learning_rate_of_the_round(tmp_path, monkeypatch) -> None:
    """SCAFFOLD and q-FFL compute with it, also in a resumed run."""
    from fairflower.clients.scaffold import SCAFFOLD
    from fairflower.strategies import QFFL

    trained, merged = [], []
    end, merge = SCAFFOLD.end, QFFL.merge
    monkeypatch.setattr(
        SCAFFOLD, "end", lambda self, r: trained.append((r, self.settings.lr)) or end(self, r)
    )
    monkeypatch.setattr(
        QFFL, "merge", lambda self, cohort: merged.append(1 / self.L) or merge(self, cohort)
    )
    changes = {"client.name": "scaffold", "strategy.name": "qffl", "train.momentum": 0.0}
    changes |= {"train.lr": 0.3, "train.lr-schedule": "linear", "train.lr-warmup": 1}
    whole = session(resuming.config(tmp_path / "whole", **changes)).run()
    expected = [pytest.approx(lr) for lr in (0.15, 0.3, 0.15)]
    assert [dict(trained)[r] for r in (1, 2, 3)] == expected
    assert merged == expected
    begun = resuming.stopped(resuming.config(tmp_path / "begun", **changes), 2)
    assert outcome(resume(begun)) == outcome(whole)


def test_early_stopping_and_schedule_settings_change_the_method_key() -> None:
    plain = method_key(RunConfig().to_flat())
    for key, value in (
        ("train.lr-schedule", "cosine"),
        ("train.lr-final", 0.5),
        ("train.lr-warmup", 3),
        ("stop.patience", 3),
        ("stop.min-delta", 0.1),
    ):
        assert method_key(RunConfig.from_flat({key: value}).to_flat()) != plain
    assert method_key(RunConfig.from_flat({"track": "mlflow"}).to_flat()) == plain


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.lr-schedule", "cosin", "expected constant or linear or cosine or step"),
        ("train.lr-every", 0, "a whole number >= 1"),
        ("train.lr-warmup", -1, "a whole number >= 0"),
        ("train.lr-factor", 0.0, r"a number in \(0, 1\]"),
        ("stop.patience", -1, "a whole number >= 0"),
    ],
)
def test_invalid_schedule_and_stopping_settings_name_the_allowed_values(
    key, value, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat({key: value})


@pytest.mark.parametrize("by", ["server", "clients"])
def test_divergence_is_recorded_whether_the_server_or_clients_evaluate(tmp_path, by) -> None:
    folder = run(config(tmp_path, **{"evaluate.by": by, "train.lr": 20.0}))
    rows = [r for r in history(folder) if (r["round"], r["metric"]) == ("2", "loss")]
    losses = {level: [float(r["value"]) for r in rows if r["level"] == level] for level in
              ("domain", "client")}  # fmt: skip
    assert len(losses["domain"]) == 4
    assert read_run(folder).info["diverged"] == max(losses["domain"])
    if by == "clients":  # one client per domain
        assert losses["domain"] == losses["client"]


@pytest.mark.parametrize("name", ["round", "client_ids", "dropped", "dropped_in_test"])
def test_a_diagnostic_with_the_name_of_a_field_is_refused(tmp_path, name, monkeypatch) -> None:
    """Otherwise the run would complete, and its folder could never be read."""
    new_session = session(resuming.config(tmp_path))
    merge = FedHEAL.merge

    def noting(self, cohort):
        self.diagnostics[name] = 1.5
        return merge(self, cohort)

    monkeypatch.setattr(FedHEAL, "merge", noting)
    with pytest.raises(StrategyError, match=f"diagnostic '{name}' has the name of a field"):
        new_session.run()


def test_a_session_does_not_restart_a_run_that_another_process_completed(
    tmp_path, monkeypatch
) -> None:
    config = resuming.config(tmp_path)
    folder = resuming.stopped(config, 1)
    late = session(resumed_config(folder, {}))
    resume(folder)  # another process, in the meantime
    before = outcome(folder)
    with pytest.raises(ConfigError, match="is complete"):
        late.run()
    assert outcome(folder) == before
