"""Participation policies follow their papers; invalid choices and settings are refused."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from apps import app_with_handlers
from flwr.app import ConfigRecord, Context, Message
from replies import valid_reply
from resuming import config, outcome, resume, session, stopped
from runs import history

from fairflower.aggregation.participation import checked_candidates, checked_choice
from fairflower.arrays import record_of
from fairflower.client_app import app as client_app
from fairflower.errors import ConfigError, RoundFailed, StrategyError
from fairflower.participation import ByExamples, Draw, Participation, PowerOfChoice, Uniform
from fairflower.participation.availability import absolute_trace, read_availability, trace_digest
from fairflower.plans.plan import Plan
from fairflower.report import read_run
from fairflower.server.contents import read_facts
from fairflower.strategies import FedAvg
from fairflower.testing.rounds import MODEL, Rounds, reply


class TooFew(Participation):
    def choose(self, draw: Draw, losses: Any) -> list[int]:
        return list(draw.clients[: draw.size - 1])


class Stranger(Participation):
    def choose(self, draw: Draw, losses: Any) -> list[int]:
        return [99, *draw.clients[1 : draw.size]]


def trained(folder: Path) -> dict[int, list[int]]:
    """The clients that trained, by round."""
    rounds: dict[int, list[int]] = {}
    for row in history(folder):
        if row["level"] == "client" and row["metric"] == "train_loss":
            rounds.setdefault(int(row["round"]), []).append(int(row["name"]))
    return rounds


def test_power_of_choice_has_the_probabilities_of_its_algorithm() -> None:
    """Enumerated: two candidates are drawn in turn by size; the one with the larger loss trains."""
    sizes, losses = {0: 100, 1: 200, 2: 300, 3: 400}, {0: 2.0, 1: 1.5, 2: 0.5, 3: 1.0}
    shares = {k: n / 1000 for k, n in sizes.items()}
    expected = dict.fromkeys(sizes, 0.0)
    for first, p in shares.items():
        for second, q in shares.items():
            if second != first:
                expected[max((first, second), key=losses.__getitem__)] += p * q / (1 - p)
    assert list(expected.values()) == pytest.approx([0.234524, 0.394048, 0, 0.371429], abs=1e-6)
    policy = PowerOfChoice(d=2)
    rounds = 5_000
    chosen = Counter()
    for r in range(rounds):
        draw = Draw(r, (0, 1, 2, 3), 1, seed=5, sizes=sizes)
        asked = policy.candidates(draw)
        chosen.update(policy.choose(draw, {k: losses[k] for k in asked}))
    for client, p in expected.items():
        assert chosen[client] / rounds == pytest.approx(p, abs=4 * (0.25 / rounds) ** 0.5)


def test_clients_are_drawn_in_proportion_to_their_examples() -> None:
    counts = Counter()
    for r in range(8000):
        counts.update(ByExamples().choose(Draw(r, (3, 5, 8), 1, sizes={3: 1, 5: 2, 8: 5}), {}))
    assert [counts[k] / 8000 for k in (3, 5, 8)] == pytest.approx([1 / 8, 1 / 4, 5 / 8], abs=0.03)
    unknown = Draw(1, (0, 1, 2), 2)
    assert len(ByExamples().choose(unknown, {})) == 2


def test_power_of_choice_has_twice_as_many_candidates_as_clients_by_default() -> None:
    sizes = dict.fromkeys(range(9), 5)
    assert len(PowerOfChoice().candidates(Draw(1, tuple(range(9)), 3, sizes=sizes))) == 6
    assert len(PowerOfChoice().candidates(Draw(1, (0, 1, 2), 2, sizes=sizes))) == 3


def test_power_of_choice_by_training_loss_prefers_clients_that_never_trained() -> None:
    policy = PowerOfChoice(d=4, loss="train")
    draw = Draw(1, (0, 1, 2, 3), 2, sizes=dict.fromkeys(range(4), 10))
    assert policy.candidates(draw) == ()
    policy.merged(1, {0: 0.5, 1: 2.0, 2: 1.0})
    assert policy.choose(draw, {}) == [1, 3]


def test_a_candidate_without_a_loss_is_chosen_last() -> None:
    draw = Draw(1, (0, 1, 2, 3), 2, sizes=dict.fromkeys(range(4), 10))
    assert PowerOfChoice(d=4).choose(draw, {1: 0.1, 3: 0.2}) == [1, 3]
    assert PowerOfChoice(d=4).choose(draw, {1: 0.1}) == [0, 1]


def test_clients_of_unknown_size_are_drawn_only_if_too_few_sizes_are_known() -> None:
    draws = [Draw(r, (0, 1, 2, 3), 2, sizes={1: 5, 2: 10, 3: 15}) for r in range(200)]
    assert {k for draw in draws for k in draw.weighted(2)} == {1, 2, 3}
    one = [Draw(r, (0, 1, 2, 3), 3, sizes={3: 5}).weighted(3) for r in range(20)]
    assert one == [[0, 1, 3]] * 20


def test_every_client_is_looked_up_once() -> None:
    """A search through all clients for each of them would take minutes for 100,000 clients."""

    class Id(int):
        compared = 0
        __hash__ = int.__hash__

        def __eq__(self, other: object) -> bool:
            Id.compared += 1
            return int(self) == other

    clients = tuple(map(Id, range(300)))
    sizes = {client: int(client) + 1 for client in clients[:150]}
    draw = Draw(1, clients, 300, sizes=sizes)
    assert checked_candidates(PowerOfChoice(d=300), draw) == list(range(300))
    assert checked_choice(ByExamples(), draw, {}) == list(range(300))
    assert Id.compared < 10 * len(clients)


@pytest.mark.parametrize("answers", [3, 1])
def test_a_candidate_that_fails_is_named_and_not_chosen(
    tmp_path: Path, answers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def test(message: Message, context: Context) -> Message:
        client = message.content["config"]["client-id"]
        if message.content["config"]["split"] == "train" and client >= answers:
            raise ValueError("the disk is gone")
        return client_app(message, context)

    settings = {"participation.policy": "power-of-choice:d=4", "fraction-train": 0.5}
    new_session = session(config(tmp_path, **settings), app_with_handlers(evaluate=test))
    if answers == 1:  # fewer than half of four
        with pytest.raises(
            RoundFailed, match=r"(?s)1 of 4 clients.*clients 1, 2, 3: the disk is gone"
        ):
            new_session.run()
        return
    folder = new_session.run()
    assert "client 3" in caplog.text
    assert "the disk is gone" in caplog.text
    assert all(3 not in clients for clients in trained(folder).values())


def test_more_clients_than_candidates_is_an_error() -> None:
    with pytest.raises(ConfigError, match="d = 2 candidates are fewer than the 3 clients"):
        PowerOfChoice(d=2).candidates(Draw(1, (0, 1, 2, 3), 3))


def test_power_of_choice_without_losses_names_the_setting() -> None:
    with pytest.raises(ConfigError, match="set loss = 'train'"):
        PowerOfChoice().choose(Draw(1, (0, 1), 1), {})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "policy",
    [
        "round-robin",  # those kept by day have a state
        "uniform",
        "by-examples",
        "power-of-choice:d=4:loss=train",
        "power-of-choice:d=3",
    ],
)
def test_a_run_with_any_policy_is_resumed_bit_for_bit(tmp_path: Path, policy: str) -> None:
    settings = {"participation.policy": policy, "fraction-train": 0.5, "num-server-rounds": 4}
    settings["participation.availability"] = "markov:leave=0.2:back=0.7"
    whole = session(config(tmp_path / "whole", **settings)).run()
    for server_round in (2, 3):
        folder = stopped(config(tmp_path / f"cut-{server_round}", **settings), server_round)
        assert outcome(resume(folder)) == outcome(whole)


@pytest.mark.parametrize(
    ("availability", "empty"), [("trace.csv", 3), ("markov:leave=0.9:back=0.05", 1)]
)
def test_a_round_without_clients_is_known_before_the_run(
    tmp_path: Path, availability: str, empty: int
) -> None:
    if availability == "trace.csv":
        availability = str(tmp_path / availability)
        Path(availability).write_text("round,client\n1,0\n2,1\n4,2\n")
    settings = {"participation.availability": availability, "num-server-rounds": 4}
    with pytest.raises(ConfigError, match=f"no client is available in round {empty}. Change it"):
        session(config(tmp_path / "runs", **settings)).run()
    assert not list(tmp_path.glob("runs/*"))


def test_power_of_choice_trains_the_clients_with_the_largest_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All clients are candidates; losses are those of the received model."""
    asked: list[dict[int, float]] = []
    choose = PowerOfChoice.choose

    def watched(self: PowerOfChoice, draw: Draw, losses: Any) -> list[int]:
        asked.append(dict(losses))
        return choose(self, draw, losses)

    monkeypatch.setattr(PowerOfChoice, "choose", watched)
    settings = {"participation.policy": "power-of-choice:d=4", "fraction-train": 0.5}
    folder = session(config(tmp_path, **settings)).run()
    assert len(asked) == 3
    for r, losses in enumerate(asked, start=1):
        assert len(losses) == 4
        assert trained(folder)[r] == sorted(sorted(losses, key=losses.__getitem__)[-2:])


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (TooFew(), "TooFew selected 1 clients in round 1; expected 2"),
        (Stranger(), "Stranger selected client 99 in round 1"),
    ],
)
def test_invalid_choices_of_a_policy_are_refused_by_its_name(
    policy: Participation, message: str
) -> None:
    draw = Draw(1, (0, 1, 2, 3), 2)
    with pytest.raises(ConfigError, match=message):
        checked_choice(policy, draw, {})


class Fails(Participation):
    def candidates(self, draw: Draw) -> list[int]:
        raise ValueError("no idea")

    def choose(self, draw: Draw, losses: Any) -> list[int]:
        return list(draw.clients[: draw.size])


class Quits(BaseException):
    """A direct subclass of BaseException, as only a user might write."""


class FailsToChoose(Participation):
    def choose(self, draw: Draw, losses: Any) -> list[int]:
        raise Quits("tired")


class FailsToNote(Uniform):
    def merged(self, server_round: int, train_losses: Any) -> None:
        raise KeyError(server_round)


class AsksAStranger(Uniform):
    def candidates(self, draw: Draw) -> list[int]:
        return [99]


@pytest.mark.parametrize(
    ("policy", "error", "message"),
    [
        (Fails, StrategyError, r"Fails failed with ValueError: no idea \(test_pol.*in candidates"),
        (FailsToChoose, StrategyError, r"FailsToChoose failed with Quits: tired .*in choose"),
        (FailsToNote, StrategyError, r"FailsToNote failed with KeyError: 1 .*in merged"),
        (
            AsksAStranger,
            ConfigError,
            r"AsksAStranger selected client 99 in round 1, but this client",
        ),
    ],
)
def test_a_policy_that_fails_is_named(
    tmp_path: Path, policy: type[Participation], error: type[Exception], message: str
) -> None:
    chosen = {"participation.policy": f"{__name__}:{policy.__name__}"}
    with pytest.raises(error, match=message):
        session(config(tmp_path, **chosen)).run()
    (folder,) = tmp_path.iterdir()
    assert read_facts(folder)["status"] == "failed"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("policy", "poc", "participation policy"),
        ("policy", "power-of-choice:d=-1", "participation.policy = 'power-of-choice': d"),
        ("policy", "round-robin:d=1", "has no arguments"),
        ("availability", "off.csv", r"off.csv': No such file or directory\. Expected always, mark"),
        ("availability", "markov:leave=2:back=0.5", "probabilities from 0 to 1"),
        ("availability", "markov:leave=0.5", "expected markov:leave=P:back=Q"),
        ("availability", "markov:0.1", "expected markov:leave=P:back=Q.*got '0.1'"),
    ],
)
def test_invalid_settings_are_named(tmp_path: Path, key: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        session(config(tmp_path, **{f"participation.{key}": value})).run()


def test_availability_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("round,client\n1,0\n1,2\n2,1\n")
    available = read_availability(str(file), 0)
    assert [available(r, range(3)) for r in (1, 2, 3, 4)] == [[0, 2], [1], [0, 2], [1]]
    folder = session(
        config(tmp_path, **{"participation.availability": str(file), "fraction-train": 1.0})
    ).run()
    assert trained(folder) == {1: [0, 2], 2: [1], 3: [0, 2]}


def test_unavailable_clients_still_test(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("round,client\n1,0\n1,1\n2,2\n3,3\n")
    chosen = {
        "participation.availability": str(file),
        "evaluate.by": "clients",
        "fraction-train": 1.0,
    }
    folder = session(config(tmp_path / "runs", **chosen)).run()
    assert trained(folder) == {1: [0, 1], 2: [2], 3: [3]}
    tested = {
        (row["round"], row["name"])
        for row in history(folder)
        if (row["level"], row["metric"]) == ("client", "accuracy")
    }
    assert tested == {(str(n), str(k)) for n in (1, 2, 3) for k in range(4)}


def test_a_trace_in_the_home_folder_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "trace.csv").write_text("round,client\n1,2\n")
    assert read_availability("~/trace.csv", 0)(1, range(3)) == [2]
    assert trace_digest("~/trace.csv")


def test_a_file_named_like_a_kind_of_availability_is_not_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("always", "markov:leave=0.1:back=0.5"):
        (tmp_path / name).touch()
        assert trace_digest(name) == ""
        assert absolute_trace(name) == name
    assert trace_digest("missing.csv") == ""


def test_a_run_is_not_resumed_with_a_changed_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("round,client\n1,0\n1,1\n2,2\n")
    folder = stopped(config(tmp_path / "run", **{"participation.availability": str(file)}), 2)
    file.write_bytes(b"\xef\xbb\xbfround,client\r\n1,1\r\n1,0\r\n2,3\r\n")
    with pytest.raises(ConfigError, match="its availabilities changed"):
        resume(folder)
    file.write_bytes(
        b"\xef\xbb\xbfround,client\r\n1,1\r\n1,0\r\n2,2\r\n"
    )  # the first content again
    facts = folder / "run.json"
    facts.write_bytes(b"\xef\xbb\xbf" + facts.read_bytes())  # as an editor may save it
    resume(folder)


def test_a_comparison_does_not_keep_runs_with_another_trace(tmp_path: Path) -> None:
    file, other = tmp_path / "trace.csv", tmp_path / "other.csv"
    file.write_text("round,client\n1,0\n1,1\n2,2\n")
    other.write_text("round,client\n1,3\n")
    run_config = config(tmp_path / "run", **{"participation.availability": str(file)})
    run = read_run(session(run_config).run())
    assert not Plan([run_config]).without([run]).runs
    file.write_text("round,client\n1,0\n1,1\n2,3\n")
    with pytest.raises(ConfigError, match=r"trace.csv .*has changed since .*run.* was created"):
        Plan([run_config]).without([run])
    elsewhere = config(tmp_path / "run", **{"participation.availability": str(other)})
    assert Plan([elsewhere]).without([run]).runs == [elsewhere]  # this run keeps its own file
    file.unlink()
    assert not Plan([run_config]).without([run]).runs


def test_unknown_clients_of_a_trace_are_warned_of_and_negative_ids_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("round,client\n1,1\n1,4\n")
    run_config = config(
        tmp_path, **{"participation.availability": str(file), "num-server-rounds": 1}
    )
    session(run_config).run()
    assert "names client 4, but the federation has only clients 0 to 3" in caplog.text
    file.write_text("round,client\n1,1\n1,-1\n")
    with pytest.raises(ConfigError, match="clients from 0"):
        read_availability(str(file), 0)


@pytest.mark.parametrize(
    "text", ["round,node\n1,1\n", "round,client\n1,one\n", "round,client\n1\n"]
)
def test_an_invalid_line_of_a_trace_is_named(tmp_path: Path, text: str) -> None:
    (file := tmp_path / "trace.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"trace.csv', line 2: Expected always, .* whole numbers"):
        read_availability(str(file), 0)


def test_a_strategy_fails_a_round_without_available_clients() -> None:
    rounds = Rounds(FedAvg(availability=lambda number, clients: []), MODEL, range(2))
    with pytest.raises(RoundFailed, match="Round 1: no client is available"):
        rounds.ask()


def test_markov_availability_has_its_stationary_share() -> None:
    available = read_availability("markov:leave=0.1:back=0.3", 3)
    counts = [len(available(r, range(400))) / 400 for r in range(1, 60)]
    assert np.mean(counts) == pytest.approx(0.75, abs=0.02)
    again = read_availability("markov:leave=0.1:back=0.3", 3)
    assert again(40, range(10)) == [k for k in available(40, range(400)) if k < 10]
    stays = [len(set(available(r, range(400))) & set(available(r + 1, range(400)))) for r in (7, 9)]
    there = [len(available(r, range(400))) for r in (7, 9)]
    assert sum(stays) / sum(there) == pytest.approx(0.9, abs=0.04)
    # Seeds are padded with zeros: [3, k, 0] would be the seed of the selection in round k.
    selection = [k for k in range(400) if np.random.default_rng([3, k]).random() < 0.75]
    assert available(0, range(400)) != selection


def test_the_uniform_draw_is_unchanged_from_earlier_versions() -> None:
    clients = tuple(range(20))
    for r in (1, 2, 50):
        chosen = np.random.default_rng([7, r]).choice(20, 8, replace=False)
        assert Uniform().choose(Draw(r, clients, 8, seed=7), {}) == sorted(chosen.tolist())


@pytest.mark.parametrize(
    ("policy", "loss", "reason"),
    [
        (PowerOfChoice(loss="train"), None, "no metric 'train_loss', which PowerOfChoice needs"),
        (PowerOfChoice(loss="train"), math.nan, "train_loss = nan"),
        (Uniform(), None, ""),
        (Uniform(), math.inf, "train_loss = inf"),
    ],
)
def test_a_reply_without_a_loss_is_dropped_if_the_policy_needs_it(
    policy: Participation, loss: float | None, reason: str
) -> None:
    """Otherwise its loss would count as infinite, and its client would always be selected."""
    rounds = Rounds(FedAvg(participation=policy), MODEL, clients=[0, 1, 2])
    asked = rounds.ask()
    given = {} if loss is None else {"train_loss": loss}
    odd = reply(asked[0], MODEL, {"num-examples": 3, "client-id": 0, **given})
    rounds.finish([odd, valid_reply(asked[1], 1), valid_reply(asked[2], 2)])
    assert rounds.strategy.client_ids == ((1, 2) if reason else (0, 1, 2))
    assert reason in rounds.strategy.dropped.get(0, "")


def test_clients_for_tests_are_drawn_independently_of_clients_for_training() -> None:
    strategy = FedAvg(fraction_train=0.2, fraction_evaluate=0.2)
    rounds = Rounds(strategy, MODEL, clients=range(20))
    same = 0
    for r in range(1, 9):
        trains = {message.metadata.dst_node_id for message in rounds.ask()}
        tests = strategy.configure_evaluate(r, record_of(MODEL), ConfigRecord(), None)
        same += trains == {message.metadata.dst_node_id for message in tests}
    assert same < 3
