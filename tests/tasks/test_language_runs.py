"""Whole runs on languages: strategies, tests by clients, and a stopped run that is resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from parametrize import mark_others_nightly
from resuming import config, outcome, resume, session, stopped
from runs import history

from fairflower.errors import ConfigError

LANGUAGES = {
    "data.name": "languages",
    "data.domains": "german,greek,hebrew,japanese",
    "model.name": "gpt:width=16:heads=2:layers=1",
    "train.lr": 0.3,
    "train.batch-size": 4,
}


def scores(folder: Path, server_round: int, level: str = "domain") -> dict[str, dict[str, float]]:
    """Return the metrics of each domain in a round."""
    found: dict[str, dict[str, float]] = {}
    for row in history(folder):
        if (row["round"], row["level"]) == (str(server_round), level):
            found.setdefault(row["name"], {})[row["metric"]] = float(row["value"])
    return found


@pytest.mark.parametrize(
    "strategy",
    mark_others_nightly(
        [(s,) for s in ("fedavg", "qffl", "afl", "fedheal", "fedequilibria")],
        [("qffl",), ("fedheal",)],
    ),
)
def test_strategies_learn_languages(strategy: str, tmp_path: Path) -> None:
    folder = session(config(tmp_path, **LANGUAGES, **{"strategy.name": strategy})).run()
    first, last = scores(folder, 0), scores(folder, 3)
    assert list(first) == LANGUAGES["data.domains"].split(",")
    for domain, values in last.items():
        assert first[domain]["nll"] == pytest.approx(math.log(257), rel=0.05)
        assert values["nll"] < 0.96 * first[domain]["nll"]
        assert values["perplexity"] == pytest.approx(math.exp(values["nll"]))
        assert 0 <= values["token_accuracy"] <= 1
        assert values["loss"] == pytest.approx(values["nll"], rel=0.05)  # equal without padding


def test_clients_test_as_the_server_does(tmp_path: Path) -> None:
    both = session(config(tmp_path, **LANGUAGES)).run()
    clients = session(config(tmp_path, **LANGUAGES, **{"evaluate.by": "clients"})).run()
    ours, theirs = scores(both, 3), scores(clients, 3)
    for domain, values in ours.items():
        for name in ("nll", "perplexity", "token_accuracy", "loss"):
            assert theirs[domain][name] == pytest.approx(values[name], rel=1e-5)


def test_a_stopped_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**LANGUAGES, "strategy.name": "fedheal"}
    whole = session(config(tmp_path / "whole", **settings)).run()
    part = stopped(config(tmp_path / "part", **settings), 2)
    resume(part)
    assert outcome(part) == outcome(whole)


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"model.name": "embedding-bag"}, "embedding-bag.*needs a vector at each place"),
        ({"client.name": "moon"}, "MOON needs features of an example and a linear head"),
        ({"client.name": "fedproto"}, "FedProto needs one class per example as target"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(
    flat: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        session(config(tmp_path, **LANGUAGES | flat)).run()
