"""Every strategy and client runs on every task, resumes to the bit, or refuses by name."""

from pathlib import Path
from typing import Any

import pytest
from parametrize import STRATEGY_PER_NEEDS, mark_others_nightly
from resuming import config, resume, session, stopped
from safetensors.numpy import load_file

from fairflower.errors import ConfigError, DataError
from fairflower.registry import CLIENTS, STRATEGIES
from fairflower.registry.measurements import MEASUREMENTS
from fairflower.tasks import task_of

#: Tasks whose examples are rows of a table.
TASKS = ("regression", "regression:loss=poisson", "multilabel")

SETTINGS = {"data.name": "made_up:MadeUp", "train.lr": 0.01, "data.examples-per-client": 0}


def check(folder: Path, task: str, refused: bool, **changes: Any) -> None:
    """Run, stop and resume; or expect a refusal before training."""
    changes = SETTINGS | changes | {"data.task": task}
    if refused:
        with pytest.raises(ConfigError, match=r"class|not 0 to 1|trains|accepts images"):
            session(config(folder, **changes)).run()
        return
    whole = session(config(folder / "whole", **changes)).run()
    resumed = resume(stopped(config(folder / "stopped", **changes), 2))
    expected = load_file(whole / "model.safetensors")
    actual = load_file(resumed / "model.safetensors")
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
        session(config(tmp_path, **SETTINGS | settings)).run()


@pytest.mark.parametrize(
    ("task", "name"),
    mark_others_nightly(
        [(task, name) for task in TASKS for name in STRATEGIES],
        [("regression", name) for name in STRATEGIES]
        + [("multilabel", name) for name in STRATEGY_PER_NEEDS],
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
        [("regression", name) for name in CLIENTS],
    ),
)
def test_clients(tmp_path: Path, task: str, name: str) -> None:
    only_images = "features" not in (CLIENTS[name].kinds or ("features",))
    changes: dict[str, Any] = {"client.name": name, "evaluate.by": "both"}
    check(tmp_path, task, CLIENTS[name].needed == "classes" or only_images, **changes)
