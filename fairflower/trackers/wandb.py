"""Weights & Biases tracker; W&B's environment variables set the project."""

import os
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import wandb

from fairflower.config.text import Scalar
from fairflower.errors import ConfigError
from fairflower.trackers import Tracker


class WandB(Tracker):
    """Logs metrics of every round, the config, and the final metrics as a summary and a table.

    ``WANDB_PROJECT`` sets the project (default: ``fairflower``). With ``WANDB_MODE=offline`` all
    data stay in the ``wandb`` folder in the run folder, and ``wandb sync`` can upload them later.
    """

    def __init__(self, folder: Path, config: Mapping[str, Scalar], key: str, after: int) -> None:
        # W&B names a session's folder after the second in which it starts. If this folder exists,
        # wait, because otherwise the metrics of the second session would be lost.
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
            reason = str(error).rstrip(". ")
            raise ConfigError(
                f'track = "wandb": {reason}. To log without a connection, set WANDB_MODE=offline.'
            ) from error
        self.key = self._run.id

    def round(self, server_round: int, metrics: Mapping[str, float]) -> None:  # noqa: D102
        self._run.log(dict(metrics), step=server_round)

    def end(self, status: str, final: Mapping[str, float]) -> None:  # noqa: D102
        rows = [[name.partition("/")[2], self.score.shown(value)] for name, value in final.items()]
        self._run.log({"final": wandb.Table(["", self.score.axis], data=rows)})
        self._run.summary.update({f"final/{name}": value for name, value in final.items()})
        self._run.summary["status"] = status
        self._run.finish(exit_code=int(status == "failed"))
