"""Every strategy and client runs on every task, resumes to the bit, or refuses by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parametrize import STRATEGY_PER_NEEDS, mark_others_nightly
from resuming import config, resume, session, stopped
from safetensors.numpy import load_file

from fairflower.config.methods import DataSpec, output_dims
from fairflower.errors import ConfigError, DataError
from fairflower.registry import CLIENTS, STRATEGIES
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.tasks import task_of

ROWS = {"data.name": "made_up:MadeUp"}
#: Task -> settings of its data and of a tiny network.
TASKS = {
    "regression": ROWS,
    "regression:loss=poisson": ROWS,
    "multilabel": ROWS,
    "survival:cuts=1;2;3": ROWS,
    "segmentation": {"data.name": "made_up:Images", "model.name": "unet:width=4:norm=batch"},
    "next-token": {"data.name": "made_up:Tokens", "model.name": "gpt:width=8:layers=1:heads=2"},
}

#: Pairs by day of the tasks whose other pairs are nightly.
DAY = [
    *(("survival:cuts=1;2;3", name) for name in ("afl", "fedequilibria", "fedper")),
    *(("segmentation", name) for name in ("fedce", "fedlf", "scaffold", "silobn")),
    *(("next-token", name) for name in ("fedfv", "fedga", "ditto")),
]

SETTINGS = {"train.lr": 0.01, "data.examples-per-client": 0}


def check(folder: Path, task: str, refused: bool, **changes: Any) -> None:
    """Run, stop and resume; or expect a refusal before training."""
    changes = SETTINGS | TASKS[task] | changes | {"data.task": task}
    if refused:
        with pytest.raises(ConfigError, match=r"class|not 0 to 1|trains|accepts|head"):
            session(config(folder, **changes)).run()
        return
    whole = session(config(folder / "whole", **changes)).run()
    resumed = resume(stopped(config(folder / "stopped", **changes), 2))
    expected = load_file(whole / "model.safetensors")
    actual = load_file(resumed / "model.safetensors")
    assert all(np.isfinite(a).all() for a in actual.values())
    assert {name: a.tobytes() for name, a in actual.items()} == {
        name: a.tobytes() for name, a in expected.items()
    }


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"evaluate.auc": True}, "evaluate.auc is the one-vs-one AUC of classes"),
        ({"train.logit-adjustment": True}, "train.logit-adjustment is defined for classes"),
        ({"data.dirichlet-alpha": 1.0}, "data.dirichlet-alpha = 1 divides classes"),
        ({"data.task": "regression:loss=cubic"}, "loss = 'cubic'"),
    ],
)
def test_settings_for_classes_are_refused(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=words):
        session(config(tmp_path, **SETTINGS | ROWS | settings)).run()


@pytest.mark.parametrize(
    ("task", "name"),
    mark_others_nightly(
        [(task, name) for task in TASKS for name in STRATEGIES],
        [("regression", name) for name in STRATEGIES]
        + [("multilabel", name) for name in STRATEGY_PER_NEEDS]
        + [(task, name) for task, name in DAY if name in STRATEGIES],
    ),
)
def test_strategies(tmp_path: Path, task: str, name: str) -> None:
    needs = {MEASUREMENTS[need].needs for need in STRATEGIES[name]().measurements} - {""}
    lacking = any(not getattr(task_of(task), need) for need in needs)
    check(tmp_path, task, lacking, **{"strategy.name": name})


@pytest.mark.parametrize(
    ("task", "name"),
    mark_others_nightly(
        [(task, name) for task in TASKS for name in CLIENTS],
        [("regression", name) for name in CLIENTS]
        + [(task, name) for task, name in DAY if name in CLIENTS],
    ),
)
def test_clients(tmp_path: Path, task: str, name: str) -> None:
    client, kind = CLIENTS[name], DataSpec.read(TASKS[task]["data.name"]).kind
    refused = client.needed == "classes" or kind not in (client.kinds or (kind,))
    refused |= client.needed == "head" and output_dims(task_of(task), kind) > 1
    check(tmp_path, task, refused, **{"client.name": name, "evaluate.by": "both"})
