"""Calls of the command line in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click import Command
from click.testing import CliRunner, Result
from typer.main import get_command

from experiments import landscape, sharpness
from experiments.leaderboard.__main__ import app as leaderboard
from fairflower.cli import app

# Built once: building takes longer than most calls.
COMMAND, BOARD = get_command(app), get_command(leaderboard)
LANDSCAPE, SHARPNESS = get_command(landscape.app), get_command(sharpness.app)


def invoke(*arguments: str | Path, command: Command = COMMAND, **options: Any) -> Result:
    return CliRunner().invoke(command, list(map(str, arguments)), **options)


def call(
    *arguments: str | Path, command: Command = COMMAND, expect: int = 0, **options: Any
) -> str:
    result = invoke(*arguments, command=command, **options)
    assert result.exit_code == expect, result.output + str(result.exception)
    return result.output
