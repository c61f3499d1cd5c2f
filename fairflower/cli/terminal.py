"""Terminal output of the commands: console, tables and errors."""

import codecs
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from fairflower.errors import USER_ERRORS, ConfigError, error_text, require

console = Console()
_errors = Console(stderr=True)

#: ASCII replacements for characters in tables and verdicts that some terminals lack.
_ASCII = str.maketrans(
    {"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-", "\N{GREEK SMALL LETTER SIGMA}": "sigma"}
    | {"±": "+-", "•": "*", "…": "...", "†": "+", "▲": "^", "▼": "v", "≈": "~"}
)

#: Name of the encoding error handler that applies these replacements and escapes all other
#: characters.
PLAIN = "fairflower.plain"


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end].translate(_ASCII)
    return signs.encode("ascii", "backslashreplace").decode("ascii"), error.end


codecs.register_error(PLAIN, _plain)

#: Error message of `pathlib.Path.expanduser`.
NO_HOME = "Could not determine home directory."


@contextmanager
def friendly_errors(extra: str = "train") -> Iterator[None]:
    """Print user errors as a single message without a traceback, and exit with status 1 or 2.

    ``extra`` names the pip extra that the command needs; an empty string means none.
    """
    try:
        if extra:
            require(extra, "This command")
        yield
    except USER_ERRORS as error:
        text = escape(printable(error))
        _errors.print(f"[bold red]Error:[/] {text}", soft_wrap=True, highlight=False)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except RuntimeError as error:
        if str(error) != NO_HOME:
            raise
        _errors.print(
            "[bold red]Error:[/] A path starts with ~, but this user does not exist or has no "
            "home folder. Write the whole path."
        )
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def printable(error: BaseException) -> str:
    """Return an error's text, with escapes for characters that cannot be printed."""
    return error_text(error).encode("utf-8", "backslashreplace").decode()


def say(text: object, markup: bool = False) -> None:
    """Print text without line breaks in a sentence or path, so that it can be copied."""
    console.print(text, soft_wrap=True, highlight=False, markup=markup)


def say_where(what: str, path: Path) -> None:
    """Print the path of an output."""
    say(f"{what}: {path.absolute()}")


def text_table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a rich table with columns of wrapped text."""
    headers = (Column(column, overflow="fold") for column in columns)
    table = Table(*headers, title=title, title_justify="left", caption_justify="left")
    for row in rows:
        table.add_row(*row)
    return table
