"""MLflow: a run in the store and the experiment that MLflow's environment variables name."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from fairflower.config import Scalar, toml_value
from fairflower.trackers.tracker import Tracker, markdown

_STATUS = {"completed": "FINISHED", "stopped": "KILLED", "pruned": "KILLED"}


class MLflow(Tracker):
    """Metrics by round, the config as parameters and ``config.toml``, the final table.

    ``MLFLOW_TRACKING_URI`` says where (by default MLflow's own place, below the working
    directory), ``MLFLOW_EXPERIMENT_NAME`` in which experiment, by default ``fairflower``.
    """

    def __init__(self, folder: Path, config: Mapping[str, Scalar], key: str, after: int) -> None:
        self._client = MlflowClient()
        self._last = 0
        if key:
            self.key = key
            self._client.update_run(key, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fairflower")
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self.key = self._client.create_run(experiment, run_name=folder.name).info.run_id
        params = [Param(name, str(value)) for name, value in config.items()]
        for first in range(0, len(params), 100):  # no more are taken at a time
            self._client.log_batch(self.key, params=params[first : first + 100])
        lines = [f"{name} = {toml_value(value)}" for name, value in config.items()]
        self._client.log_text(self.key, "\n".join(lines) + "\n", "config.toml")

    def round(self, server_round: int, figures: Mapping[str, float]) -> None:  # noqa: D102
        self._last = server_round
        self._log(figures)

    def end(self, status: str, final: Mapping[str, float]) -> None:  # noqa: D102
        self._log({f"final/{name}": value for name, value in final.items()})
        self._client.log_text(self.key, markdown(final) + "\n", "final.md")
        self._client.set_terminated(self.key, _STATUS.get(status, "FAILED"))

    def _log(self, figures: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        named = [(re.sub(r"[^\w\-. /]", "_", name), value) for name, value in figures.items()]
        self._client.log_batch(self.key, [Metric(name, v, now, self._last) for name, v in named])
