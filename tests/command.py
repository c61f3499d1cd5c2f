"""Calls of the command line in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from typer.main import get_command

from fairflower.cli import app

# Built once: building takes longer than most calls.
COMMAND = get_command(app)


def invoke(*arguments: str | Path, **options: Any) -> Result:
    return CliRunner().invoke(COMMAND, list(map(str, arguments)), **options)


def call(*arguments: str | Path, expect: int = 0) -> str:
    result = invoke(*arguments)
    assert result.exit_code == expect, result.output + str(result.exception)
    return result.output
