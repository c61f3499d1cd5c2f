"""Every strategy and client runs on every task, resumes to the bit, or refuses by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parametrize import STRATEGY_PER_NEEDS, mark_others_nightly
from resuming import config, resume, session, stopped
from safetensors.numpy import load_file

from fairflower.config import RunConfig
from fairflower.config.methods import DataSpec, output_dims
from fairflower.config.privacy import PrivacyConfig, is_proven
from fairflower.errors import ConfigError, DataError
from fairflower.registry import CLIENTS, REFERENCES, STRATEGIES
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


#: Settings of a run under secure aggregation, and of one with differential privacy, but with so
#: little noise that a model is that of a plain run.
SECURE: dict[str, Any] = {"secure-aggregation": True, "fraction-train": 1.0}
PRIVATE: dict[str, Any] = {
    **{"privacy.noise-multiplier": 1e-9, "privacy.number-noise-multiplier": 1e-9},
    **{"privacy.clip": 1e3, "privacy.noise-seed": 1},
}


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


def lacking(task: str, strategy: str) -> bool:
    """Return whether a strategy needs what a task lacks: classes, or a score from 0 to 1."""
    needs = {MEASUREMENTS[need].needs for need in STRATEGIES[strategy]().measurements} - {""}
    return any(not getattr(task_of(task), need) for need in needs)


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
        # What a strategy measures depends on the task; how it merges does not.
        [("regression", name) for name in (*STRATEGY_PER_NEEDS, *REFERENCES)]
        + [("multilabel", name) for name in STRATEGY_PER_NEEDS[::3]]
        + [(task, name) for task, name in DAY if name in STRATEGIES],
    ),
)
def test_strategies(tmp_path: Path, task: str, name: str) -> None:
    check(tmp_path, task, lacking(task, name), **{"strategy.name": name})


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


@pytest.mark.parametrize(
    ("task", "name"),
    mark_others_nightly(
        [(t, name) for t in TASKS for name in STRATEGIES if STRATEGIES[name]().sums_suffice],
        [("segmentation", "afl"), ("survival:cuts=1;2;3", "fednova")],
    ),
)
def test_secure_aggregation_gives_the_model_of_plain_rounds(
    tmp_path: Path, task: str, name: str
) -> None:
    compare(tmp_path, task, name, {"fraction-train": 1.0}, SECURE)


@pytest.mark.parametrize(
    ("task", "name"),
    mark_others_nightly(
        [(task, name) for task in TASKS for name in STRATEGIES if is_proven(STRATEGIES[name])],
        [("next-token", "afl"), ("survival:cuts=1;2;3", "term")],
    ),
)
def test_differential_privacy_almost_without_noise_gives_the_model_of_plain_rounds(
    tmp_path: Path, task: str, name: str
) -> None:
    pytest.importorskip("dp_accounting")
    compare(tmp_path, task, name, {}, PRIVATE)


def compare(
    folder: Path, task: str, name: str, settings: dict[str, Any], protected: dict[str, Any]
) -> None:
    """Check that a run with protected messages has the model of a plain run."""
    model = TASKS[task].get("model.name", "mlp").removesuffix(":norm=batch")
    changes = SETTINGS | TASKS[task] | settings | {"data.task": task, "strategy.name": name}
    changes |= {"model.name": model, "num-server-rounds": 2}
    needed = {"qffl": {"strategy.rule": "weights"}, "superquantile": {"strategy.theta": 0.9}}
    changes |= needed.get(name, {})
    if lacking(task, name):
        with pytest.raises(ConfigError, match="not 0 to 1"):
            session(config(folder, **changes | protected)).run()
        return
    plain, other = (
        load_file(session(config(folder / key, **changes | more)).run() / "model.safetensors")
        for key, more in (("plain", {}), ("protected", protected))
    )
    for array, expected in plain.items():
        np.testing.assert_allclose(other[array], expected, rtol=1e-3, atol=1e-4, err_msg=array)


def test_the_loss_range_is_the_tasks_unless_it_is_set(tmp_path: Path) -> None:
    def sent(**changes: Any) -> Any:
        return config(tmp_path, **changes).to_flat()["privacy.loss-range"]

    assert sent() == RunConfig().to_flat()["privacy.loss-range"] == 5.0
    assert sent(**{"data.name": "languages"}) == 12.0
    assert sent(**{"data.name": "lung"}) == pytest.approx(20 * np.log(2))  # ten intervals
    assert sent(**{"data.name": "lung", "privacy.loss-range": 3.0}) == 3.0
    assert PrivacyConfig.from_flat(config(tmp_path, **{"data.name": "languages"}).to_flat()) == (
        PrivacyConfig(loss_range=12.0)
    )


@pytest.mark.parametrize(("task", "outputs"), [*zip(TASKS, (3, 3, 3, 3, 3, 30_000), strict=True)])
def test_guessing_costs_less_than_the_loss_range(task: str, outputs: int) -> None:
    assert (task_of(task).guess(outputs) or 0) < task_of(task).loss_range


@pytest.mark.parametrize(("given", "expected"), [({}, 12.0), ({"M": 7.0}, 7.0)])
def test_propfair_has_the_tasks_largest_loss_unless_it_is_set(
    tmp_path: Path, given: dict[str, float], expected: float
) -> None:
    found = []
    changes = {"data.task": "next-token", **SETTINGS, **TASKS["next-token"]}
    for table in ("strategy", "client"):
        args = {f"{table}.{name}": value for name, value in given.items()}
        run_config = config(tmp_path, **changes, **{f"{table}.name": "propfair"}, **args)
        method = getattr(run_config, table).for_task(task_of("next-token"))
        found.append(method.args["M"])
    assert found == [expected, expected]
