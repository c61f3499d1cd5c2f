"""Running a comparison in its folder, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from fairflower.plans.execution import announce, execute, locked_folder, remaining_plan
from fairflower.plans.plan import Plan


def run_comparison(
    plan: Plan,
    folder: Path,
    console: Console,
    jobs: int | None,
    at_end: Callable[[], object] = lambda: None,
) -> None:
    """Run the remaining runs of a plan; their run folders are in ``folder/runs``.

    Completed runs are kept, and unfinished runs are resumed.

    Parameters
    ----------
    jobs : int or None
        Number of parallel runs; None means `fairflower.plans.jobs.auto_jobs`.
    at_end : callable
        Called when the runs have ended, even after a failure or an interruption, provided that some
        run can be read.

    Raises
    ------
    ConfigError
        If another process uses the folder, or its runs used other data.
    UserError, OSError, KeyboardInterrupt
        As in `fairflower.plans.execution.execute`.
    """
    announce(plan, console)
    with locked_folder(folder):
        left = remaining_plan(plan, folder / "runs", console)
        folders: list[Path] = []
        try:
            execute(left, console, folders, jobs, home=folder)
        finally:
            if folders or len(left.runs) < len(plan.runs):
                at_end()
