"""TensorBoard tracker, which writes event files to ``tensorboard`` in the run folder."""

from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fairflower.config.text import Scalar, toml_value
from fairflower.trackers import Tracker, metrics_markdown


class TensorBoard(Tracker):
    """Logs metrics of every round, and the config and final metrics as text and hyper-parameters.

    ``tensorboard --logdir ~/.fairflower/runs`` shows all runs.
    """

    def __init__(self, folder: Path, config: Mapping[str, Scalar], key: str, after: int) -> None:
        self.key = "tensorboard"
        self._config = config
        self._last = max(after, 0)
        # Hide earlier records of rounds that a resumed run repeats.
        purge = after + 1 if key else None
        self._writer = SummaryWriter(str(folder / self.key), purge_step=purge)
        if not key:
            lines = [f"    {name} = {toml_value(value)}" for name, value in config.items()]
            self._writer.add_text("config", "\n".join(lines), 0)

    def round(self, server_round: int, metrics: Mapping[str, float]) -> None:  # noqa: D102
        self._last = server_round
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, server_round)
        self._writer.flush()

    def end(self, status: str, final: Mapping[str, float]) -> None:  # noqa: D102
        self._writer.add_text(
            "final", f"{status}\n\n{metrics_markdown(final, self.score)}", self._last
        )
        named = {f"final/{name}": value for name, value in final.items()}
        for summary in hparams(dict(self._config), named):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        for name, value in named.items():
            self._writer.add_scalar(name, value, self._last)
        self._writer.close()
