"""Arrays that the server keeps for each client equal arrays that stay with the clients."""

from __future__ import annotations

import re
import shutil

import numpy as np
import pytest
import resuming
from toy_trainers import models_equal, run_toy_rounds

from fairflower.arrays import arrays_of
from fairflower.clients.fedbn import FedBN
from fairflower.clients.fedper import FedPer
from fairflower.clients.fedrep import FedRep
from fairflower.clients.lgfedavg import LGFedAvg
from fairflower.clients.silobn import SiloBN
from fairflower.config import RunConfig
from fairflower.errors import ConfigError
from fairflower.exchanges import PersonalArrays
from fairflower.paths import client_states
from fairflower.report import analyze, read_run
from fairflower.server.contents import read_facts
from fairflower.strategies import FedAvg, FedEquilibria
from fairflower.testing import check_trainer
from fairflower.testing.rounds import MODEL, Rounds, reply
from fairflower.testing.trainers import TrainerCase

every = pytest.mark.parametrize("kind", [FedBN, SiloBN, FedPer, FedRep, LGFedAvg])


@pytest.mark.few(2)
@every
def test_keep_server_gives_the_models_and_arrays_of_keep_client(kind):
    """Clients are absent in some rounds; with ``server`` they have no state."""
    models, kept = {}, {}
    for keep in ("client", "server"):
        case = TrainerCase(kind, arguments={"keep": keep})
        rule = case.strategy(FedEquilibria, fraction_train=0.6)
        models[keep], grid = run_toy_rounds(rule, case.trainer, 5, 3)
        assert not rule.dropped
        kept[keep] = {
            context.node_config["partition-id"]: arrays_of(context.state["fairflower/local"])
            for context in grid.contexts.values()
            if "fairflower/local" in context.state
        }
        if keep == "server":
            assert not kept[keep]
            kept[keep] = rule.exchanges[0].arrays
    assert models_equal(*models.values())
    assert kept["client"].keys() == kept["server"].keys()
    assert all(models_equal(kept["server"][k], own) for k, own in kept["client"].items())


@pytest.mark.few(2)
@pytest.mark.slow
@every
def test_keep_server_passes_check_trainer(kind):
    check_trainer(kind, keep="server")


SETTINGS = {"client.name": "fedbn", "evaluate.by": "both", "strategy.name": "fedheal"}
SETTINGS |= {"model.name": "cnn:norm=batch"}
KEPT = SETTINGS | {"client.keep": "server"}


def rows(folder) -> list[list[str]]:
    return resuming.outcome(folder)["history"]


@pytest.mark.slow
def test_a_run_with_keep_server_equals_one_with_keep_client(tmp_path):
    local = resuming.session(resuming.config(tmp_path / "local", **SETTINGS)).run()
    kept = resuming.session(resuming.config(tmp_path / "kept", **KEPT)).run()
    assert resuming.outcome(kept)["model"] == resuming.outcome(local)["model"]
    # Only clients with state report state-round.
    assert rows(kept) == [row for row in rows(local) if row[3] != "state-round"]
    assert "client_state" not in read_facts(kept)
    (chapter,) = analyze([read_run(kept)]).chapters
    assert any("the server keeps it for them" in note for note in chapter.notes)
    resuming.resume(
        kept, **{"num-server-rounds": 4}
    )  # possible because no client had deleted state
    longer = resuming.config(tmp_path / "long", **KEPT, **{"num-server-rounds": 4})
    assert (
        resuming.outcome(kept)["model"]
        == (resuming.outcome(resuming.session(longer).run())["model"])
    )


@pytest.mark.slow
def test_clients_that_lost_their_state_get_their_arrays_from_the_server(tmp_path):
    """Arrays that stay with the clients are lost, and the run gives other results."""
    ends = {}
    for name, settings in (("local", SETTINGS), ("kept", KEPT)):
        whole = resuming.session(resuming.config(tmp_path / "whole", **settings)).run()
        folder = resuming.stopped(resuming.config(tmp_path / "stopped", **settings), 3)
        shutil.rmtree(client_states(), ignore_errors=True)
        resuming.resume(folder)
        ends[name] = resuming.outcome(folder), resuming.outcome(whole)
        lost = "lost its state from round" in (folder / "log.txt").read_text()
        assert lost == (name == "local")
    assert ends["kept"][0] == ends["kept"][1]
    assert ends["local"][0]["history"] != ends["local"][1]["history"]


@pytest.mark.slow
def test_silobn_without_running_statistics_equals_sgd(tmp_path):
    chosen = {"model.name": "cnn", "strategy.name": "uniform"}  # without running statistics
    folders = [
        resuming.session(resuming.config(tmp_path / name, **chosen, **{"client.name": name})).run()
        for name in ("silobn:keep=server", "sgd")
    ]
    assert resuming.outcome(folders[0])["model"] == resuming.outcome(folders[1])["model"]


# --- checks of returned arrays --------------------------------------------------------------

OWN = {"norm.weight": np.ones(3, np.float32), "norm.num_batches_tracked": np.array(1, np.int64)}
BAD = {
    "NaN": ({**OWN, "norm.weight": np.full(3, np.nan, np.float32)}, "'norm.weight' holds NaN"),
    "shape": ({**OWN, "norm.weight": np.ones(2, np.float32)}, r"'norm.weight' has shape \(2,\)"),
    "dtype": ({**OWN, "norm.weight": np.ones(3)}, "'norm.weight' has dtype float64"),
    "missing": ({"norm.weight": OWN["norm.weight"]}, r"missing \['norm.num_batches_tracked'\]"),
    "unknown": ({**OWN, "x": np.ones(1)}, r"unexpected \['x'\]"),
    "long": ({**OWN, "norm.weight": np.full(3, 3e38, np.float32)}, "has norm"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_client_with_bad_arrays_is_dropped_and_keeps_its_last_good_ones(what):
    bad, reason = BAD[what]
    exchange = PersonalArrays()
    exchange.prepare(OWN)
    rounds = Rounds(FedAvg(exchanges=[exchange]), MODEL, range(3))
    for number, liar in enumerate((OWN, bad), start=1):
        asked = rounds.ask()
        sent = [m.content.array_records.get("personal") for m in asked]
        assert all(record is None for record in sent) == (number == 1)
        metrics = {"num-examples": 3, "train_loss": 0.5}
        rounds.finish(
            reply(
                message,
                MODEL,
                {**metrics, "client-id": k},
                {"personal": liar if k == 1 else {n: a * (k + number) for n, a in OWN.items()}},
            )
            for k, message in enumerate(asked)
        )
    (got,) = rounds.strategy.dropped.values()
    assert re.search(f"its 'personal'.*{reason}", got)
    again = [arrays_of(m.content.array_records["personal"]) for m in rounds.ask()]
    assert models_equal(again[1], OWN)
    assert models_equal(again[2], {name: array * 4 for name, array in OWN.items()})
    restored = Rounds(FedAvg(exchanges=[PersonalArrays()]), MODEL, range(3))
    restored.strategy.load_state_dict(rounds.strategy.state_dict())
    sent = [arrays_of(m.content.array_records["personal"]) for m in restored.ask()]
    assert all(map(models_equal, sent, again))


def test_a_client_that_sends_no_personal_arrays_is_dropped():
    rounds = Rounds(FedAvg(exchanges=[PersonalArrays()]), MODEL, range(3))
    metrics = {"num-examples": 3, "train_loss": 0.5}
    rounds.finish(
        reply(m, MODEL, {**metrics, "client-id": k}, {"personal": OWN} if k else {})
        for k, m in enumerate(rounds.ask())
    )
    assert "no ArrayRecord 'personal'" in rounds.strategy.dropped[0]


# --- settings that exclude it ----------------------------------------------------------------


@pytest.mark.parametrize(
    "setting", [{"secure-aggregation": True}, {"privacy.noise-multiplier": 1.0}]
)
@pytest.mark.parametrize("client", ["fedbn", "silobn", "fedper", "fedrep", "lg-fedavg"])
def test_secure_aggregation_and_noise_refuse_keep_server(setting, client):
    chosen = {"strategy.name": "uniform", "client.name": client, **setting}
    RunConfig.from_flat(chosen)
    with pytest.raises(ConfigError, match=f"'{client}' .*'personal' .*Set client.keep = 'client'"):
        RunConfig.from_flat(chosen | {"client.keep": "server"})
