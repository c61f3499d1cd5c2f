"""The ServerApp that ``flwr run`` starts."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from rich.console import Console

from fairflower.config import RunConfig
from fairflower.session import Session

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run what the run config says."""
    config = RunConfig.from_flat(context.run_config)
    Session(grid, config, Console(width=200, force_terminal=False)).run()
