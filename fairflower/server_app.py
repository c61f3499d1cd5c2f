"""The ServerApp that ``flwr run`` starts."""

import logging
import threading
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fairflower.config import RunConfig
from fairflower.config.run import check_tuned, default_values
from fairflower.flower_compat import OneSentence, stopping_with_flower
from fairflower.server.checkpoint import evaluation_config, resumed_config
from fairflower.server.session import Session

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Start the run that the run config describes, or continue the run in the folder ``resume``."""
    logging.getLogger("flwr").addFilter(OneSentence())
    config = RunConfig.from_flat(context.run_config)
    check_tuned([config])
    # Flower sends all keys. The user has given those that differ from pyproject.toml.
    flat, sent = config.to_flat(), {**default_values(), **context.run_config}
    given = {k: v for k, v in flat.items() if sent.get(k, v) != default_values().get(k)}
    if config.resume:
        del given["resume"]
        config = resumed_config(Path(config.resume), given)
    elif config.evaluate.model:
        config = evaluation_config(config.evaluate.model, given)
    console, stop = Console(width=200, force_terminal=False), threading.Event()
    with stopping_with_flower(stop):
        Session(grid, config, console, stop=stop).run()
