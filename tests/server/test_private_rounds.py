"""Differential privacy: what clients send, the accountant, max-epsilon, and refused settings."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from command import call
from flwr.app import Context, Message, MessageType
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from resuming import config, resume, session, stopped

import fairflower as ff
from fairflower.aggregation.cohort import Cohort
from fairflower.aggregation.noise import MARGIN, NoisySum
from fairflower.client_app import app as client_app
from fairflower.config import RunConfig
from fairflower.config.privacy import PrivacyConfig, is_proven
from fairflower.errors import ConfigError, RoundFailed, RunInterrupted
from fairflower.numerics.noise import gaussian, noise_source
from fairflower.registry import REFERENCES, STRATEGIES
from fairflower.report import read_run
from fairflower.report.notes import run_notes
from fairflower.server.checkpoint import resumed_config
from fairflower.server.contents import read_facts
from fairflower.server.privacy import check_reachable, epsilon
from fairflower.strategies import FairStrategy
from fairflower.testing import make_cohort
from fairflower.training.app import clipped_update, noised_numbers

PRIVATE = {
    "privacy.noise-multiplier": 1.0,
    "privacy.number-noise-multiplier": 2.0,
    "privacy.clip": 0.3,
    "bound.max-client-weight": 0.4,
}
SMALL = {
    "data.clients-per-domain": 1,
    "train.local-epochs": 1,
    "engine": "inline",
    "num-server-rounds": 3,
}


@pytest.fixture
def accountant() -> None:
    pytest.importorskip("dp_accounting")


# --- supported strategies and settings --------------------------------------------------------


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_have_a_privacy_proof_or_are_refused(name: str) -> None:
    settings = {**PRIVATE, "strategy.name": name}
    if name == "qffl":
        settings["strategy.rule"] = "weights"
    if not is_proven(STRATEGIES[name]):
        reason = "Choose one of fedavg, uniform" if name not in REFERENCES else "sends no updates"
        with pytest.raises(ConfigError, match=reason):
            RunConfig.from_flat(settings)
        return
    strategy = RunConfig.from_flat(settings).strategy.make()
    assert name == "qffl" or type(strategy).merge is FairStrategy.merge
    assert not strategy._array_measurements
    assert not strategy.reported_metrics  # train_loss, for example, has no noise


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy.name": "qffl"}, "strategy.rule = 'weights'"),
        ({"strategy.name": "fedheal"}, "not known to be a mean whose weights"),
        ({"client.name": "scaffold"}, "without an exchange"),
        ({"evaluate.by": "clients"}, "evaluate.by = 'clients'"),
        ({"participation.policy": "power-of-choice:d=4"}, "participation.policy"),
        ({"stop.patience": 3}, "stop.patience"),
        ({"data.validation-fraction": 0.1}, "data.validation-fraction"),
        ({"bound.clip-update-median": 1.0}, "the median depends on every client"),
        ({"bound.clip-update-norm": 1.0}, "privacy.clip replaces it"),
        ({"observe.window": 10}, "observe.window"),
        ({"secure-aggregation": True}, "secure-aggregation"),
        ({"privacy.number-noise-multiplier": 0.0}, "would be sent without noise"),
        ({"privacy.noise-multiplier": 0.0, "privacy.max-epsilon": 3.0}, "epsilon is infinite"),
        ({"privacy.delta": 0.0}, r"expected a number in \(0, 0.1\]"),
        ({"privacy.noise-multiplier": 1e300}, r"expected a number in \[0, 1000000000"),
        ({"privacy.number-noise-multiplier": 1e300}, "expected a number in"),
        ({"privacy.clip": 1e300}, "too large for single precision"),
        (
            {"strategy.name": "fairfed", "strategy.metric": "equal_opportunity_difference"},
            "counts of people",
        ),
    ],
)
def test_settings_without_a_privacy_proof_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_flat({**PRIVATE, "strategy.name": "term", **settings})


class Mine(FairStrategy):
    """A mean whose weights depend on numbers, of a user's own."""

    needs = ("received_loss",)

    def weigh(self, cohort: Cohort) -> NDArray[np.float64]:
        losses = np.maximum(cohort.metrics["received_loss"], 1e-3)
        return losses / losses.sum()


class MinePrivate(Mine):
    private = True


class MineDerived(MinePrivate):
    """Inherits the declaration, which does not count."""


class MineWithArrays(MinePrivate):
    needs = ("fisher",)
    private = True


class MineWithTrainLoss(MinePrivate):
    reads = ("train_loss",)
    private = True


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        (Mine, "not known to be a mean .* or set Mine.private = True if its model is such a mean"),
        (MineDerived, "or set MineDerived.private = True"),
        (MineWithArrays, "needs 'fisher' from every client, which is sent without noise"),
        (MineWithTrainLoss, "needs 'train_loss' from every client"),
    ],
)
def test_a_users_strategy_that_is_not_private_is_refused(
    strategy: type[FairStrategy], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        RunConfig.from_flat({**PRIVATE, "strategy.name": f"{__name__}:{strategy.__name__}"})


def test_a_users_strategy_that_declares_it_is_private(accountant: None, tmp_path: Path) -> None:
    settings = {**SMALL, **PRIVATE, "strategy.name": f"{__name__}:MinePrivate"}
    facts = read_facts(session(config(tmp_path, **settings)).run())
    assert facts["privacy"]["rounds"] == 3


# --- at the client ----------------------------------------------------------------------------


def test_updates_are_clipped_and_updates_with_nan_count_as_zero() -> None:
    received = {"a": np.ones(2, np.float32), "b": np.zeros(1, np.float32), "n": np.array(3)}
    sent = {"a": np.array([4.0, 1.0], np.float32), "b": np.array([4.0], np.float32)}
    clipped = clipped_update(sent | {"n": np.array(9)}, received, clip=1.0)
    assert clipped["a"].tolist() == pytest.approx([1.6, 1.0])
    assert clipped["b"].tolist() == pytest.approx([0.8])
    assert clipped["n"] == 3
    short = clipped_update(sent | {"n": np.array(9)}, received, clip=50.0)
    assert short["a"].tolist() == [4.0, 1.0]
    lost = clipped_update(sent | {"b": np.array([np.nan])}, received, clip=1.0)
    assert lost["a"].tolist() == [1.0, 1.0]


def test_private_clients_do_not_say_from_which_round_their_state_is(tmp_path: Path) -> None:
    """It is older after a round whose training diverged, which depends on examples."""
    replies: list[Message] = []

    def clients(message: Message, context: Context) -> Message:
        reply = client_app(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            replies.append(reply)
        return reply

    settings = PRIVATE | SMALL | {"strategy.name": "term", "client.name": "ditto"}
    folder = session(config(tmp_path, **settings), cast(ClientApp, clients)).run()
    assert len(replies) == 3 * 3  # three of four clients in each round
    for reply in replies:
        assert set(reply.content) == {"arrays", "metrics"}
        assert set(reply.content["metrics"]) == {"num-examples", "client-id", "received_loss"}
    assert "state-round" not in (folder / "history.csv").read_text()
    with pytest.raises(ConfigError, match=r"\(ditto\) was deleted"):
        resume(folder, **{"num-server-rounds": 9})


def test_clients_send_only_requested_numbers_with_noise() -> None:
    privacy = PrivacyConfig(noise_multiplier=1, number_noise_multiplier=0.5, noise_seed=1)
    config = {"measure": "received_loss,received_accuracy", "server-round": 1}
    metrics = {"train_loss": 1.0, "received_loss": 2.0, "received_accuracy": 0.5, "state-round": 4}
    sent = noised_numbers(metrics, config, privacy, client_id=7)
    assert sent.keys() == {"received_loss", "received_accuracy"}
    assert sent["received_loss"] != 2.0
    draws = [
        noised_numbers(metrics, config | {"server-round": r}, privacy, 7) for r in range(1, 400)
    ]
    losses = np.array([draw["received_loss"] for draw in draws])
    inside = losses[(losses > 0) & (losses < 5)]
    assert losses.min() >= 0
    assert losses.max() <= 5
    assert 200 < len(inside) < 300
    assert inside.std() == pytest.approx(1.3, abs=0.2)  # 0.5 * 5, truncated at both ends
    # Numbers above the range and NaN count as its maximum, before noise is added.
    narrow = PrivacyConfig(noise_multiplier=1.0, loss_range=1.0)
    assert noised_numbers({"received_loss": 1.5}, config, narrow, 7)["received_loss"] == 1.0
    top = noised_numbers({"received_loss": np.nan}, config, privacy, 7)
    assert top == noised_numbers({"received_loss": 1e9}, config, privacy, 7)


def test_noise_is_gaussian_and_reproducible_only_with_a_seed() -> None:
    values = gaussian(100_001, noise_source(3, "a test"))
    assert values.shape == (100_001,)
    assert (values.mean(), values.std()) == pytest.approx((0, 1), abs=0.02)
    assert np.mean(np.abs(values) > 1.959964) == pytest.approx(0.05, abs=0.004)
    assert np.array_equal(gaussian(5, noise_source(3, "x")), gaussian(5, noise_source(3, "x")))
    assert not np.array_equal(gaussian(5, noise_source(0, "x")), gaussian(5, noise_source(0, "x")))


# --- at the server ----------------------------------------------------------------------------


def test_the_noise_of_the_sum_is_scaled_to_clip_times_the_largest_weight() -> None:
    noise = NoisySum(multiplier=2.0, clip=0.5, max_weight=0.1, noise_seed=1)
    cohort = make_cohort(updates=np.full((20, 4000), 0.5 / np.sqrt(4000)))
    merged = noise.correct(cohort, {"w": np.zeros(4000)})
    assert noise.std == 2.0 * 0.5 * 0.1 * (1 + MARGIN)
    assert merged["w"].std() == pytest.approx(noise.std, rel=0.05)
    with pytest.raises(RoundFailed, match=r"exceeds privacy\.clip"):
        noise.correct(make_cohort(updates=np.ones((2, 4))), {"w": np.zeros(4)})


def test_epsilon_equals_reference_values(accountant: None) -> None:
    one = PrivacyConfig(noise_multiplier=1.0, number_noise_multiplier=1.0)
    assert epsilon(one, 0, 0) == 0
    assert epsilon(one, 0, 1) == pytest.approx(4.728507, abs=1e-6)
    assert epsilon(one, 0, 100) == pytest.approx(96.116308, abs=1e-5)
    assert epsilon(PrivacyConfig(noise_multiplier=5.0), 0, 100) == pytest.approx(10.7255, abs=1e-4)
    # A number with the same multiplier costs as much as a sum.
    assert epsilon(one, 1, 1) == pytest.approx(epsilon(one, 0, 2))
    assert epsilon(one, 2, 5) == pytest.approx(epsilon(one, 0, 15))


def test_a_max_epsilon_below_one_round_is_refused_with_the_noise_that_suffices(
    accountant: None,
) -> None:
    privacy = PrivacyConfig(noise_multiplier=1.0, max_epsilon=1.0)
    with pytest.raises(ConfigError, match=r"the first round alone has epsilon 4\.73") as caught:
        check_reachable(privacy, 0, clients=20, rounds=10)
    text = str(caught.value)
    one, all_rounds = (float(part.split()[0]) for part in text.split("by ")[1:3])
    assert epsilon(PrivacyConfig(noise_multiplier=one), 0, 1) <= 1.0
    assert 0.8 <= epsilon(PrivacyConfig(noise_multiplier=all_rounds), 0, 10) <= 1.0
    with pytest.raises(ConfigError, match=r"below 1/200000"):
        check_reachable(PrivacyConfig(noise_multiplier=1.0), 0, clients=200_000, rounds=1)


@pytest.mark.slow
def test_a_private_run_reports_epsilon_and_stores_no_training_loss_or_clipping(
    tmp_path: Path, accountant: None, capsys: pytest.CaptureFixture[str]
) -> None:
    limit = {"privacy.max-epsilon": 11.0}
    result = ff.run({**SMALL, **PRIVATE, **limit}, strategy="term", output_dir=tmp_path)
    facts = json.loads((result.path / "run.json").read_text())
    privacy = PrivacyConfig(noise_multiplier=1.0, number_noise_multiplier=2.0)
    assert (facts["status"], facts["rounds"]) == ("completed", 3)
    assert facts["privacy"]["rounds"] == 3
    assert facts["privacy"]["epsilon"] == pytest.approx(epsilon(privacy, 1, 3))
    assert f"epsilon {epsilon(privacy, 1, 1):.3g}" in capsys.readouterr().out
    history = (result.path / "history.csv").read_text()
    assert ",epsilon," in history
    assert ",received_loss," in history
    assert "train_loss" not in history
    assert "clipped" not in (result.path / "diagnostics.jsonl").read_text()
    (note,) = [note for note in run_notes(read_run(result.path)) if "epsilon" in note]
    assert note.startswith("differentially private for each client: epsilon 10.3 at delta 1e-05")


@pytest.mark.slow
def test_a_run_ends_before_max_epsilon_and_an_interrupted_round_counts(
    tmp_path: Path, accountant: None
) -> None:
    limit = {"privacy.max-epsilon": 9.5, "num-server-rounds": 5}
    result = ff.run(
        {**SMALL, **PRIVATE, **limit}, strategy="uniform", output_dir=tmp_path, progress=False
    )
    facts = json.loads((result.path / "run.json").read_text())
    assert facts["status"] == "completed"
    assert "above privacy.max-epsilon = 9.5" in facts["ended_early"]
    assert facts["privacy"]["epsilon"] <= 9.5
    assert facts["rounds"] == facts["privacy"]["rounds"] < 5
    with pytest.raises(ConfigError, match=r"larger privacy\.max-epsilon, or with"):
        resumed_config(result.path, {"num-server-rounds": 6})
    # A run stopped in the last round that max-epsilon allows: the round counts and is not repeated.
    last = facts["rounds"]
    settings = {**SMALL, **PRIVATE, **limit, "fraction-train": 1.0, "strategy.name": "uniform"}
    folder = stopped(config(tmp_path, **settings, **{"evaluate.every": 5}), last)
    assert resumed_config(folder, {}).privacy.on
    resume(folder)
    after = json.loads((folder / "run.json").read_text())
    assert (after["status"], after["rounds"]) == ("completed", last - 1)
    assert "above privacy.max-epsilon = 9.5" in after["ended_early"]
    assert after["privacy"] == facts["privacy"]
    assert list(read_run(folder).rounds) == [0, last - 1], "the final model is tested"


def test_a_round_counts_only_if_the_run_is_not_stopped_before_it(
    tmp_path: Path, accountant: None
) -> None:
    stop = threading.Event()
    settings = {**SMALL, **PRIVATE, "fraction-train": 1.0, "strategy.name": "uniform"}
    begun = session(config(tmp_path, **settings), stop=stop, on_round=lambda *_: stop.set())
    with pytest.raises(RunInterrupted):
        begun.run()
    assert begun.folder is not None
    facts = read_facts(begun.folder.path)
    assert (facts["status"], facts["rounds"], facts["privacy"]["rounds"]) == ("stopped", 1, 1)
    assert read_facts(resume(begun.folder.path))["privacy"]["rounds"] == 3


UNIFORM = {**SMALL, **PRIVATE, "fraction-train": 1.0, "strategy.name": "uniform"}


def rounds_of(folder: Path) -> int:
    facts = read_facts(folder)["privacy"]
    privacy = PrivacyConfig(noise_multiplier=1.0, number_noise_multiplier=2.0)
    assert facts["epsilon"] == pytest.approx(epsilon(privacy, 0, facts["rounds"]))
    return int(facts["rounds"])


@pytest.mark.parametrize("change", [{}, {"rounds": 1}])
def test_a_run_whose_history_has_more_rounds_than_its_ledger_is_not_resumed(
    tmp_path: Path, accountant: None, change: dict[str, int]
) -> None:
    done = session(config(tmp_path, **UNIFORM | {"num-server-rounds": 2})).run()
    facts = read_facts(done)
    assert rounds_of(done) == 2
    ledger = facts.pop("privacy")
    (done / "run.json").write_text(
        json.dumps(facts | ({"privacy": ledger | change} if change else {}))
    )
    count = change.get("rounds", 0)
    with pytest.raises(ConfigError, match=rf"its run\.json counts only {count} rounds\. Restore"):
        resume(done, **{"num-server-rounds": 4})


def test_plans_and_reports_state_what_private_runs_reveal_together(
    tmp_path: Path, accountant: None
) -> None:
    settings = [f"--set={key}={value}" for key, value in {**SMALL, **PRIVATE}.items()]
    shown = call(
        "compare", "--strategies", "fedavg", "--seeds", "0,1", *settings, "--plan",
        "--output-dir", tmp_path / "planned",
    )  # fmt: skip
    single = epsilon(PrivacyConfig(noise_multiplier=1.0), 0, 3)
    text = f"these 4 together have at most epsilon {4 * single:.3g} at delta 4e-05, the sums"
    assert text in shown
    first = {**UNIFORM, "num-server-rounds": 1}
    runs = [session(config(tmp_path, **first, seed=seed)).run() for seed in (0, 1)]
    one = epsilon(PrivacyConfig(noise_multiplier=1.0), 0, 1)
    text = f"these 2 together have at most epsilon {2 * one:.3g} at delta 2e-05, the sums"
    assert (
        text
        in call("report", *runs, "--format", "md", "--out", tmp_path / "tables.md").replace(
            "\n", " "
        )
        + (tmp_path / "tables.md").read_text()
    )


def test_models_with_batchnorm_are_refused(tmp_path: Path, accountant: None) -> None:
    with pytest.raises(ConfigError, match="without BatchNorm"):
        ff.run(
            {**SMALL, **PRIVATE, "model.name": "cnn:norm=batch"},
            strategy="uniform",
            output_dir=tmp_path,
            progress=False,
        )
