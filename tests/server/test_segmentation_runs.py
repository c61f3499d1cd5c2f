"""Whole runs of segmentation: tests by server and clients, BatchNorm, resumed runs, sites."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context
from PIL import Image
from resuming import config as three_rounds
from resuming import outcome, resume, stopped
from rich.console import Console
from runs import config, history, run
from safetensors.numpy import load_file
from sklearn.metrics import f1_score

from fairflower.client_app import app
from fairflower.clients import SGD, ClientData
from fairflower.config import RunConfig, TrainConfig
from fairflower.data import prepare
from fairflower.engines.inline import InlineGrid
from fairflower.errors import ConfigError
from fairflower.models import build, norm_arrays, set_arrays
from fairflower.server.contents import read_facts
from fairflower.server.history import HELD_OUT
from fairflower.server.session import Session
from fairflower.tasks import task_of

TASK = task_of("segmentation")
STROKES = {"data.name": "strokes", "model.name": "unet:width=4", "train.lr": 0.2}


def values(folder: Path, level: str, metric: str, server_round: int = 2) -> dict[str, float]:
    rows = [r for r in history(folder) if (r["level"], r["metric"]) == (level, metric)]
    return {r["name"]: float(r["value"]) for r in rows if int(r["round"]) == server_round}


@pytest.mark.slow
def test_clients_give_the_domain_scores_of_the_server(tmp_path: Path) -> None:
    """Sums add: also with several clients, some of which may lack a class."""
    settings = {"data.clients-per-domain": 3, "data.test-examples": 10, "evaluate.by": "both"}
    folder = run(config(tmp_path, **STROKES, **settings), nodes=12)
    by_clients = run(config(tmp_path, **STROKES, **settings | {"evaluate.by": "clients"}), nodes=12)
    for metric in ("dice", "iou", "loss"):
        server = values(folder, "domain", metric)
        assert len(server) == 4
        assert values(by_clients, "domain", metric) == pytest.approx(server, rel=1e-5)


@pytest.mark.slow
def test_scores_are_those_of_the_final_model(tmp_path: Path) -> None:
    run_config = config(tmp_path, **STROKES)
    folder, federation = run(run_config), prepare(run_config.data)
    model = build("unet:width=4", 2, federation.shape, seed=0, task=TASK).eval()
    set_arrays(model, load_file(folder / "model.safetensors"), "the test")
    for domain, dice in values(folder, "domain", "dice").items():
        x, y = federation.test(domain)
        with torch.no_grad():
            guess = model((torch.from_numpy(x) / 255 - 0.5) / 0.5).argmax(1).numpy()
        assert f1_score(y.ravel(), guess.ravel()) == pytest.approx(dice, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["fedbn", "silobn"])
def test_norm_layers_stay_with_clients(client: str, tmp_path: Path) -> None:
    changes = {"model.name": "unet:width=4:norm=batch", "client.name": client}
    folder = run(config(tmp_path, **STROKES | changes, **{"evaluate.by": "both"}))
    model = build("unet:width=4:norm=batch", 2, (1, 32, 32), seed=0, task=TASK)
    kept = norm_arrays(model, affine=client == "fedbn")
    assert read_facts(folder)["local_arrays"] == kept
    assert len(values(folder, "domain", "personal_dice")) == 4


@pytest.mark.slow
def test_adabn_tests_a_held_out_scanner(tmp_path: Path) -> None:
    changes = {"model.name": "unet:width=4:norm=batch", "data.held-out": "phone"}
    folder = run(config(tmp_path, **STROKES | changes, **{"evaluate.adabn": True}), nodes=3)
    assert set(values(folder, HELD_OUT, "adabn_dice")) == {"phone"}


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    settings = STROKES | {"strategy.name": "fedheal", "client.name": "fedbn"}
    settings["model.name"] = "unet:width=4:norm=batch"
    whole = Session(
        InlineGrid(app, 4), three_rounds(tmp_path / "whole", **settings), Console(quiet=True)
    ).run()
    folder = stopped(three_rounds(tmp_path / "stopped", **settings), server_round=2)
    assert outcome(resume(folder)) == outcome(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy.name": "daa"}, "'daa' needs class_counts, but the task segmentation has no"),
        ({"strategy.name": "fedgcr"}, "'fedgcr' needs received_representation, but the task segm"),
        ({"train.logit-adjustment": True}, "logit-adjustment is defined for classes"),
        ({"evaluate.auc": True}, "evaluate.auc is the one-vs-one AUC of classes"),
        ({"data.dirichlet-alpha": 0.5}, "dirichlet-alpha = 0.5 divides classes"),
    ],
)
def test_settings_for_classes_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=message):
        run(config(tmp_path, **STROKES, **changes))


def test_a_network_with_the_output_of_another_task_is_refused_when_the_data_are_known(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"'unet': its output .* Set it to cnn"):
        run(config(tmp_path, **{"model.name": "unet"}))


@pytest.mark.slow
def test_sites_with_masks_of_their_own_give_the_bits_of_one_folder(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        for i in range(10):
            disc = np.hypot(*np.mgrid[-10:10, -10:10]) < rng.integers(4, 8)
            for name, values_ in (("images", 50 + 100 * disc), ("masks", disc)):
                path = tmp_path / "data" / site / name / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(values_.astype(np.uint8)).save(path)
    settings = {
        **{"data.name": "masks", "data.image-size": 16, "model.name": "unet:width=4"},
        **{"num-server-rounds": 2, "train.local-epochs": 1, "data.clients-per-domain": 1},
        **{"evaluate.by": "clients", "engine": "inline", "data.smallest-group": 1},
    }
    models = []
    for name, node in (
        ("whole", None),
        ("sites", lambda site: {"domain": site, "data-dir": str(tmp_path / "data" / site)}),
    ):
        extra = {} if node else {"data.dir": str(tmp_path / "data")}
        run_config = RunConfig.from_flat(settings | extra | {"output-dir": str(tmp_path / name)})
        grid = InlineGrid(app, 2)
        for context, site in zip(grid.contexts.values(), ("north", "south"), strict=True):
            assert isinstance(context, Context)
            context.node_config |= node(site) if node else {}
        folder = Session(grid, run_config, Console(quiet=True)).run()
        models.append((folder / "model.safetensors").read_bytes())
        assert len(values(folder, "domain", "dice")) == 2
    assert models[0] == models[1]


def test_a_trainer_with_augmentation_is_deterministic() -> None:
    federation = prepare(RunConfig.from_flat(STROKES).data)
    split = federation.train(0)
    sent = []
    for _ in range(2):
        data = ClientData(
            split, split, (0.5,), (0.5,), 2, augment=federation.augment, task=federation.learns
        )
        model = build("unet:width=4", 2, federation.shape, seed=0, task=TASK)
        client = SGD(model, data, TrainConfig(local_epochs=1), client_id=0, seed=0)
        client.train(1)
        sent.append(client.send())
    assert all(np.array_equal(sent[0][name], sent[1][name]) for name in sent[0])
