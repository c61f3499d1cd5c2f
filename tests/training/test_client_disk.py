"""Client state on disk: saving, loading and deleting."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import toy_trainers
from flwr.app import Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from fairflower.clients import Trainer
from fairflower.paths import client_states
from fairflower.training.client_state import load_state, rounds_to_keep, save_state

pytestmark = pytest.mark.usefixtures("own_home")

RUN = "0123456789abcdef" * 2


def context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def message(server_round: int, run_id: str = RUN, **more: Any) -> dict[str, Any]:
    return {"run-id": run_id, "server-round": server_round, **more}


def trainer_with_state(value: float) -> Trainer:
    trainer = toy_trainers.trainer("sgd", client=3)
    trainer.state = {"control": {"a/b": np.full(2, value), "n": np.array(7)}, "other": {}}
    return trainer


def loaded(config: dict[str, Any], where: Context | None = None, **options: Any) -> Any:
    trainer = toy_trainers.trainer("sgd", client=3)
    kept = load_state(trainer, where or context(), config, **options)
    return kept, trainer.state.get("control", {}).get("a/b", np.zeros(1))[0]


def test_state_is_loaded_from_disk_without_its_context() -> None:
    alive = context()
    save_state(trainer_with_state(5.0), alive, message(4))
    assert loaded(message(5), alive, before=5) == loaded(message(5), before=5) == (4, 5.0)
    assert loaded(message(5, "f" * 32), before=5) == (0, 0)
    other = toy_trainers.trainer("sgd", client=2)
    assert load_state(other, context(), message(5)) == 0
    assert not other.state


def test_loading_without_saved_state_clears_the_trainer() -> None:
    trainer = trainer_with_state(5.0)
    assert load_state(trainer, context(), message(1)) == 0
    assert not trainer.state


def test_a_repeated_round_loads_the_state_before_it() -> None:
    alive = context()
    for server_round in (1, 2, 3):
        checkpoints = {"checkpoint-rounds": [server_round - 2, server_round - 1]}
        save_state(trainer_with_state(server_round), alive, message(server_round, **checkpoints))
    for where in (alive, context()):
        assert loaded(message(3), where, before=3) == (2, 2.0)
        assert loaded(message(2), where, before=2) == (1, 1.0)
    assert loaded(message(1), before=1) == (0, 0)


def test_a_trainer_without_state_writes_no_file() -> None:
    save_state(toy_trainers.trainer("sgd", client=3), context(), message(1))
    assert not client_states().exists()


@pytest.mark.parametrize("run_id", ["", "../../elsewhere", "/tmp/x", "0" * 31, "g" * 32])
def test_an_invalid_run_id_creates_no_folder(run_id: str, tmp_path: Path) -> None:
    alive = context()
    save_state(trainer_with_state(1.0), alive, message(1, run_id))
    assert not list(tmp_path.iterdir())
    assert loaded(message(2, run_id), alive, before=2) == (1, 1.0)
    assert loaded(message(2, run_id), before=2) == (0, 0)


def test_a_strategy_that_is_started_again_keeps_its_clients_states() -> None:
    """Other apps send no run id, and Flower numbers the rounds of each start from 1."""
    alive = context()
    save_state(trainer_with_state(3.0), alive, message(3, ""))
    assert loaded(message(1, "", **{"merged-round": 3}), alive, before=1) == (3, 3.0)
    assert loaded(message(1, "", **{"merged-round": 2}), alive, before=1) == (0, 0)
    assert loaded(message(1, ""), alive, before=1) == (0, 0), "of another strategy"


def test_damaged_state_files_are_skipped() -> None:
    for server_round in (1, 2):
        save_state(trainer_with_state(server_round), context(), message(server_round))
    newest = max(client_states().rglob("round-*.safetensors"))
    newest.write_bytes(newest.read_bytes()[:-1])
    assert loaded(message(3), before=3) == (1, 1.0)


def test_state_of_other_runs_is_deleted_after_30_days() -> None:
    old, recent = "a" * 32, "b" * 32
    for run_id in (old, recent):
        save_state(trainer_with_state(1.0), context(), message(1, run_id))
    for run_id, days in ((old, 31), (recent, 29)):
        then = time.time() - days * 24 * 3600
        for path in (client_states() / run_id, client_states() / run_id / "3"):
            os.utime(path, (then, then))
    save_state(trainer_with_state(1.0), context(), message(1))
    assert sorted(path.name for path in client_states().iterdir()) == sorted([recent, RUN])


@given(
    took_part=st.dictionaries(st.integers(1, 30), st.booleans(), min_size=1),
    saved=st.sets(st.integers(0, 30)),
    keep=st.integers(1, 4),
)
def test_the_kept_rounds_are_those_that_checkpoints_need(
    took_part: dict[int, bool], saved: set[int], keep: int
) -> None:
    """``took_part`` maps each round to whether the client's update was merged.

    Checkpoints are saved in the rounds ``saved``; the newest ``keep`` remain.
    """
    kept: set[int] = set()
    merged: list[int] = []
    for now in sorted(took_part):
        checkpoints = sorted(c for c in saved if c < now)[-keep:]
        kept = rounds_to_keep(kept | {now}, now, checkpoints, merged=max(merged, default=0))
        for checkpoint in [*checkpoints, now - 1]:  # now - 1: before the next round begins
            before = [r for r in merged if r <= checkpoint]
            assert max([r for r in kept if r <= checkpoint], default=0) == max(before, default=0)
        assert now in kept
        assert len(kept) <= keep + 2
        if took_part[now]:
            merged.append(now)


def test_state_of_a_round_that_was_not_merged_is_not_used() -> None:
    alive = context()
    for server_round, merged in ((1, 0), (2, 1), (3, 1)):
        asked = message(server_round, **{"merged-round": merged})
        assert loaded(asked, alive, before=server_round) == (merged, float(merged))
        save_state(trainer_with_state(server_round), alive, asked)
    asked = message(4, **{"merged-round": 3})
    assert loaded(asked, alive, before=4) == loaded(asked, before=4) == (3, 3.0)
    assert loaded(message(4, "", **{"merged-round": 1}), alive, before=4) == (0, 0)


def test_a_late_round_does_not_replace_the_state_of_a_later_one() -> None:
    """Round 2 timed out and ended after round 3, which was merged."""
    alive = context()
    for server_round, merged in ((1, 0), (3, 1), (2, 1)):
        save_state(
            trainer_with_state(server_round),
            alive,
            message(server_round, **{"merged-round": merged}),
        )
    asked = message(4, **{"merged-round": 3})
    for where in (alive, context()):
        assert loaded(asked, where, before=4) == (3, 3.0)
    again = message(3, **{"merged-round": 1})  # repeated after a stop
    assert loaded(again, alive, before=3) == (1, 1.0)


def test_without_a_copy_on_disk_the_state_in_the_context_is_used() -> None:
    alive = context()
    save_state(trainer_with_state(3.0), alive, message(3, ""))
    assert loaded(message(4, "", **{"merged-round": 2}), alive, before=4) == (3, 3.0)
