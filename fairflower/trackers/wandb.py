"""Weights & Biases: a run in the project that W&B's environment variables name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import wandb

from fairflower.config import Scalar
from fairflower.errors import ConfigError
from fairflower.trackers.tracker import Tracker


class WandB(Tracker):
    """Figures by round, the config, and the final ones as summary and table.

    ``WANDB_PROJECT`` says in which project, by default ``fairflower``; with ``WANDB_MODE=offline``
    all stays in the run folder's ``wandb``, for ``wandb sync``.
    """

    def __init__(self, folder: Path, config: Mapping[str, Scalar], key: str, after: int) -> None:
        # A session's folder is named by the second in which it begins: of two in one, the second
        # would lose its figures.
        while any((folder / "wandb").glob(f"*-{datetime.now():%Y%m%d_%H%M%S}-{key}")):
            time.sleep(0.05)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "fairflower"),
                name=folder.name,
                id=key or None,
                resume="allow" if key else None,
                config=dict(config),
                dir=str(folder),
                reinit="create_new",
                settings=wandb.Settings(silent=True),
            )
        except wandb.Error as error:
            told = str(error).rstrip(". ")
            raise ConfigError(f'track = "wandb": {told}. Or set WANDB_MODE=offline.') from error
        self.key = self._run.id

    def round(self, server_round: int, figures: Mapping[str, float]) -> None:  # noqa: D102
        self._run.log(dict(figures), step=server_round)

    def end(self, status: str, final: Mapping[str, float]) -> None:  # noqa: D102
        rows = [[name.partition("/")[2], 100 * value] for name, value in final.items()]
        self._run.log({"final": wandb.Table(["", "accuracy, %"], data=rows)})
        self._run.summary.update({f"final/{name}": value for name, value in final.items()})
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))
