"""MLflow tracker; MLflow's environment variables set the store and the experiment."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock
from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from fairflower.config.text import Scalar, toml_value
from fairflower.paths import home
from fairflower.trackers import Tracker, metrics_markdown

_STATUS = {"completed": "FINISHED", "stopped": "KILLED"}


@contextmanager
def _lock() -> Iterator[None]:
    """Wait until no other run on this machine begins: creating a store twice at once fails."""
    lock = FileLock(home() / "mlflow.lock")
    with suppress(NotImplementedError, OSError):  # a file system without locks
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


class MLflow(Tracker):
    """Logs metrics of every round, the config as parameters and ``config.toml``, and a final table.

    ``MLFLOW_TRACKING_URI`` sets the store (default: MLflow's default in the working directory), and
    ``MLFLOW_EXPERIMENT_NAME`` sets the experiment (default: ``fairflower``).
    """

    def __init__(self, folder: Path, config: Mapping[str, Scalar], key: str, after: int) -> None:
        self._last = max(after, 0)
        with _lock():
            self._client = MlflowClient()  # it creates or updates the tables of a database
            self.key = key or self._new_run(folder.name)
        if key:
            self._client.update_run(key, status="RUNNING")
            return
        params = [Param(name, str(value)) for name, value in config.items()]
        self._client.log_batch(self.key, params=params)
        lines = [f"{name} = {toml_value(value)}" for name, value in config.items()]
        self._client.log_text(self.key, "\n".join(lines) + "\n", "config.toml")

    def round(self, server_round: int, metrics: Mapping[str, float]) -> None:  # noqa: D102
        self._last = server_round
        self._log(metrics)

    def end(self, status: str, final: Mapping[str, float]) -> None:  # noqa: D102
        self._log({f"final/{name}": value for name, value in final.items()})
        self._client.log_text(self.key, metrics_markdown(final, self.score) + "\n", "final.md")
        self._client.set_terminated(self.key, _STATUS.get(status, "FAILED"))

    def _new_run(self, run_name: str) -> str:
        """Create a run, and its experiment if that is missing; return the run's id."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "fairflower")
        try:
            experiment = self._client.create_experiment(name)
        except MlflowException:
            known = self._client.get_experiment_by_name(name)
            if known is None:
                raise
            experiment = known.experiment_id
        return str(self._client.create_run(experiment, run_name=run_name).info.run_id)

    def _log(self, metrics: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        named = [(re.sub(r"[^\w\-. /]", "_", name), value) for name, value in metrics.items()]
        self._client.log_batch(self.key, [Metric(name, v, now, self._last) for name, v in named])
