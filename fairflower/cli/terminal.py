"""What commands show: lines, tables, bars, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairflower.errors import USER_ERRORS, ConfigError, error_text, require

# Warnings and errors of a run appear between its progress lines, so on one stream.
console = Console()


@contextmanager
def friendly_errors(extra: str = "sim") -> Iterator[None]:
    """Say what is wrong instead of showing where it was noticed; that ``extra`` is missing, too."""
    try:
        if extra:
            require(extra, "This command")
        yield
    except USER_ERRORS as error:
        text = escape(printable(error))
        console.print(f"[bold red]Error:[/] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def printable(error: BaseException) -> str:
    """Return an error's text, with escapes for what no terminal can show of a file's name."""
    return error_text(error).encode("utf-8", "backslashreplace").decode()


def say_where(what: str, path: Path) -> None:
    """Print on one line, to be copied, where something was written."""
    console.print(f"{what}: {path.absolute()}", soft_wrap=True, highlight=False, markup=False)


def text_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """A table of texts."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made
