"""Reports in the terminal, in Markdown, in LaTeX and as an HTML page."""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as RichGroup
from rich.table import Table as RichTable
from rich.text import Text

from fairflower.config.methods import DEFAULT
from fairflower.config.run import execution_keys, is_setting
from fairflower.config.text import grouped, is_argument, shown, toml_tables
from fairflower.data import ClientInfo
from fairflower.files import replacing
from fairflower.report.analysis import Analysis, analyze
from fairflower.report.cells import Cell, Group, Table, thousands
from fairflower.report.methods import Comparison, differing
from fairflower.report.reading import Run
from fairflower.report.summary import read_summary, write_summary
from fairflower.report.tuning import tuning_tables
from fairflower.server.contents import read_text

#: Width to which names of methods and columns are wrapped if a terminal is too narrow for them.
_NAME = 16

#: The sentence of a caption that explains bold type.
_BOLD = re.compile(r" ?Bold: [^.]*\.")

#: The word of a verdict, at the beginning of its conclusion or after another one.
_JUDGED = re.compile(
    r"(?:^|(?<=[,;] ))(no verdict|(less )?fair(er)?|mixed|equivalent|undecided|better|worse)\b"
)

# --- a terminal -----------------------------------------------------------------------


def terminal_table(runs: Sequence[Run] | Analysis) -> RenderableType:
    """Return all tables and the verdicts.

    Runs that differ only in the seed share a row. The first table has means over the last five
    tested rounds, the next has the last round, and another the trials of tuned methods. Without
    runs, there are only the trials. Raises `RunFolderError` if there are neither runs nor
    trials.
    """
    analysis = analyze(runs)
    if analysis.table:
        return RichGroup(*map(TerminalTable, analysis.named_tables))
    parts: list[RenderableType] = []
    if analysis.tuned and not analysis.runs:
        return RichGroup(*map(TerminalTable, tuning_tables(analysis.tuned)))
    for chapter in analysis.chapters:
        parts += map(TerminalTable, chapter.all_tables)
        for title, said in chapter.verdicts.items():
            parts += [Text(title, style="bold")] if title else []
            parts += [Text(f"• {verdict.on_screen}") for verdict in said]
        parts += [Text(f"! {note}", style="yellow") for note in chapter.notes]
        parts += [Text(chapter.explained, style="dim"), Text()]
    return RichGroup(*parts, *map(TerminalTable, analysis.held_out_tables))


@dataclass(frozen=True)
class TerminalTable:
    """A table in as many parts as a terminal needs to show all columns whole.

    Rich crops a column that does not fit, and a cropped number reads as another number.
    """

    table: Table

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        table = self.table.on_screen
        yield Text(table.title, style="bold")
        rows = [row for group in table.groups for row in group.rows]
        columns = [
            _rich_column(title, [row.cells[place] for row in rows])
            for place, title in enumerate(table.columns)
        ]
        widths = [1 + max(console.measure(text).maximum for text in texts) for texts in columns]
        names = max((len(text) for row in rows for text in (row.name, row.remark)), default=0)
        names = max(1, min(names, _NAME, options.max_width - max(widths, default=0)))
        part: list[list[Text]] = []
        room = options.max_width - names
        for column, width in zip(columns, widths, strict=True):
            if part and width > room:
                yield from (_rich_table(table.groups, part), Text())
                part, room = [], options.max_width - names
            part.append(column)
            room -= width
        yield _rich_table(table.groups, part)
        for line in (table.caption, *table.footers):
            # A pipe or a file gets plain text, and no explanation of bold type.
            if text := line if console.color_system else _BOLD.sub("", line):
                yield Text(text, "dim")
        yield Text()


def _rich_table(groups: Sequence[Group], columns: Sequence[Sequence[Text]]) -> RichTable:
    rich = RichTable(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    rich.add_column("", overflow="fold")
    for heading, *_ in columns:
        rich.add_column(heading, justify="right", no_wrap=True)
    lines = zip(*(cells for _, *cells in columns), strict=True)
    for group in groups:
        if group.heading:
            rich.add_row(Text(group.heading, style="italic"))
        for row in group.rows:
            name = Text.assemble(row.name, ("\n" + row.remark, "dim"))
            rich.add_row(name, *next(lines))
    return rich


def _rich_column(title: str, cells: Sequence[Cell]) -> list[Text]:
    """Return a column's heading, broken where it is wider than the cells, and the cells."""
    texts = [_rich_cell(cell) for cell in cells]
    joined = title.replace("ddof ", "ddof\N{NO-BREAK SPACE}")
    longest = max(map(len, joined.split(" ")))
    content = (len(line) for text in texts for line in text.plain.split("\n"))
    lines = wrap(joined, max(min(longest, _NAME), *content), break_on_hyphens=False)
    return [Text("\n".join(lines).replace("\N{NO-BREAK SPACE}", " ")), *texts]


def _rich_cell(cell: Cell) -> Text:
    spread = cell.spread.replace("± ", "±").replace(" ", "\n")
    return Text.assemble((cell.text, "bold" if cell.tone else ""), ("\n" + spread, "dim"))


# --- Markdown -------------------------------------------------------------------------


def markdown_tables(runs: Sequence[Run] | Analysis) -> str:
    """Return the content of `terminal_table` (tables, captions and verdicts) as Markdown."""
    analysis = analyze(runs)
    if analysis.table:
        return "\n\n".join(markdown_of(analysis.named_tables)) + "\n"
    parts = [*markdown_of(analysis.held_out_tables)]
    for chapter in analysis.chapters:
        parts += markdown_of(chapter.all_tables)
        for title, said in chapter.verdicts.items():
            parts += [f"**{_escaped(title)}**" if title else "", listed(map(str, said))]
        parts += [listed(f"Note: {note}" for note in chapter.notes), _escaped(chapter.legend)]
    return "\n\n".join(filter(None, parts)) + "\n"


#: The block of a document that `replace_generated_block` writes: the path of a summary, and text.
GENERATED = re.compile(
    r"<!-- generated from (?P<summary>[^\n]+) -->\r?\n(?P<text>.*?)<!-- end -->(\r?\n)?", re.DOTALL
)


def replace_generated_block(document: Path, summary: Path, text: str) -> None:
    """Replace the block of a Markdown file that was generated from a summary.

    The block is between ``<!-- generated from SUMMARY -->`` (the path relative to the document's
    folder) and ``<!-- end -->``. If the document lacks this block, it is appended. The rest of the
    document and its line endings stay as they are, and it is replaced atomically. Raises
    `RunFolderError` if the document exists but cannot be read.
    """
    before = read_text(document, newline="") if document.exists() else ""
    ending = "\r\n" if "\r\n" in before else "\n"
    name = Path(os.path.relpath(summary.absolute(), document.absolute().parent)).as_posix()
    part = f"<!-- generated from {name} -->\n{text}<!-- end -->\n".replace("\n", ending)
    blocks = [block for block in GENERATED.finditer(before) if block["summary"] == name]
    if blocks:
        whole = before[: blocks[0].start()] + part + before[blocks[0].end() :]
    else:
        whole = f"{before.rstrip()}{2 * ending}{part}".lstrip()
    with replacing(document.resolve()) as temporary:  # a link stays a link
        temporary.write_text(whole, encoding="utf-8", newline="")
        if document.exists():
            shutil.copymode(document, temporary)


def generated_markdown(summary: Path) -> str:
    """Return the tables and verdicts of a summary as Markdown."""
    return f"\n{markdown_tables(read_summary(summary))}\n"


def markdown_of(tables: Iterable[Table]) -> Iterator[str]:
    """Return the Markdown of each table, and of its caption and footers."""
    for table in tables:
        yield from (_markdown_table(table), *map(_escaped, (table.caption, *table.footers)))


def _markdown_table(table: Table) -> str:
    lines = [
        f"**{_escaped(table.title)}**",
        "",
        f"| {_escaped(table.heading)} | " + " | ".join(map(_escaped, table.columns)) + " |",
        "|---|" + "---:|" * len(table.columns),
    ]
    for group in table.groups:
        if group.heading:
            lines.append(f"| *{_escaped(group.heading)}* |" + " |" * len(table.columns))
        for row in group.rows:
            name = _escaped(f"{row.name} ({row.remark})" if row.remark else row.name)
            lines.append(f"| {name} | " + " | ".join(map(_markdown_cell, row.cells)) + " |")
    return "\n".join(lines)


def _markdown_cell(cell: Cell) -> str:
    text = f"**{cell.text}**" if cell.tone else cell.text
    return f"{text} {cell.spread.replace('± ', '±')}".strip()


def listed(sentences: Iterable[str]) -> str:
    """Return sentences as a list in Markdown."""
    return "\n".join(f"- {_escaped(sentence)}" for sentence in sentences)


def _escaped(text: str) -> str:
    """Return text as one line of Markdown; errors in notes may have several lines and marks."""
    # Only a tag begins with < and one of these characters; "p < 0.001" stays as it is.
    return re.sub(r"[\\`*|]|<(?=[A-Za-z/!?])", r"\\\g<0>", " ".join(text.split()))


# --- LaTeX ----------------------------------------------------------------------------

#: Character -> LaTeX, for special characters and for characters missing from pdfLaTeX's fonts.
_CHARACTERS = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "\N{PLUS-MINUS SIGN}": r"$\pm$",
    "\N{MINUS SIGN}": "$-$",
    "\N{EN DASH}": "--",
    "\N{DAGGER}": r"$^\dagger$",
    "\N{GREEK SMALL LETTER SIGMA}": r"$\sigma$",
    "\N{GREATER-THAN OR EQUAL TO}": r"$\geq$",
    "\N{BLACK UP-POINTING TRIANGLE}": r"$\bigtriangleup$",
    "\N{BLACK DOWN-POINTING TRIANGLE}": r"$\bigtriangledown$",
}


def latex(runs: Sequence[Run] | Analysis) -> str:
    """Return all tables of the runs in LaTeX, for the booktabs package.

    In each column, the best value among comparable methods is bold, and the second best is
    underlined. The standard deviation over federations or seeds is in small print. Raises
    `RunFolderError` if there are no runs.
    """
    analysis = analyze(runs)
    tables = [
        (
            table,
            re.sub(r"[^a-z]+", "-", table.title.split(",")[0].lower()).strip("-"),
            any(cell.second for group in table.groups for row in group.rows for cell in row.cells),
        )
        for table in analysis.named_tables
    ]
    chapters = [] if analysis.table else analysis.chapters
    notes = [note for chapter in chapters for note in chapter.notes]
    return _templates(tex=True).get_template("tables.tex.j2").render(tables=tables, notes=notes)


def latex_escaped(text: str) -> str:
    r"""Return text with LaTeX's special characters escaped.

    >>> print(latex_escaped("fedmgda+ & fed_x: 5 %"))
    fedmgda+ \& fed\_x: 5 \%
    """
    return "".join(_CHARACTERS.get(character, character) for character in text)


def _comment(text: str) -> str:
    return "".join(c if c.isascii() else _CHARACTERS.get(c, "?") for c in " ".join(text.split()))


# --- HTML -----------------------------------------------------------------------------


def write_report(runs: Sequence[Run] | Analysis, out: str | Path, *, pdf: bool = False) -> Path:
    """Write ``index.html``, ``tables.md``, ``summary.csv`` and PNG and SVG files in ``figures/``.

    The HTML page is self-contained and follows the reader's light or dark setting. The folder
    ``out`` is created if needed, and files of an earlier report are replaced. ``pdf`` also saves
    figures as PDF. Returns the path of the HTML page. Raises `RunFolderError` if there are no runs.
    """
    analysis = analyze(runs)
    chapters = analysis.chapters
    from fairflower.report.figures import comparison as figures  # matplotlib is slow to import

    out = Path(out).expanduser().absolute()
    out.mkdir(parents=True, exist_ok=True)
    drawn = [
        figures.draw(
            chapter.comparison,
            chapter.contrasts,
            out / "figures",
            f"{i}-" if len(chapters) > 1 else "",
            analysis.tuned,
            pdf,
        )
        for i, chapter in enumerate(chapters, start=1)
    ]
    page = out / "index.html"
    _remove_earlier_figures(page, {figure.name for of_chapter in drawn for figure in of_chapter})
    text = page_of(
        "page",
        chapters=chapters,
        held_out=analysis.held_out_tables,
        methods=sum(len(chapter.comparison.methods) for chapter in chapters),
        runs=len(analysis.runs),
        figures=drawn,
        differences=_differences,
        settings=_settings,
        partitions=_partitions,
    )
    page.write_text(text, encoding="utf-8")
    (out / "tables.md").write_text(markdown_tables(analysis), encoding="utf-8")
    write_summary(analysis.runs, out / "summary.csv")
    return page


def _remove_earlier_figures(page: Path, names: Set[str]) -> None:
    """Remove the figures of an earlier report's page, except those with these names."""
    text = page.read_bytes().decode(errors="replace") if page.exists() else ""
    for name in set(re.findall(r'<figure data-name="([a-z0-9-]+)"', text)) - names:
        for kind in ("png", "svg", "pdf"):
            (page.parent / "figures" / f"{name}.{kind}").unlink(missing_ok=True)


def html_table(table: Table) -> str:
    """Return a table with its caption as HTML, without the style of the page."""
    return str(_templates().get_template("parts.html.j2").module.shown(table))  # type: ignore[attr-defined]


def page_of(name: str, **content: Any) -> str:
    """Return the text of the page ``<name>.html.j2`` with this content."""
    return _templates().get_template(f"{name}.html.j2").render(**content)


@cache
def _templates(tex: bool = False) -> Environment:
    """Return the environment of templates for HTML or for LaTeX, which has other delimiters."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=not tex,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        variable_start_string="<<" if tex else "{{",
        variable_end_string=">>" if tex else "}}",
        block_start_string="<%" if tex else "{%",
        block_end_string="%>" if tex else "%}",
    )
    environment.filters |= {"tex": latex_escaped, "comment": _comment, "thousands": thousands}
    environment.filters |= {"pairs": _pairs, "duration": _duration}
    environment.filters["judged"] = lambda html: _JUDGED.sub(r"<strong>\g<0></strong>", str(html))
    return environment


def _differences(comparison: Comparison) -> dict[str, list[str]]:
    """Return the config keys that differ between methods, with each method's value.

    The federation of a method that has several, each drawn with its seed, has the value "seed".
    """
    left_out = {"seed", *execution_keys()}
    return differing(
        [
            {key: shown(value) for key, value in method.config.items() if key not in left_out}
            | ({"data.seed": "seed"} if method.federations else {})
            for method in comparison.methods
        ]
    )


def _settings(run: Run) -> str:
    """Return a run's settings as TOML, without arguments that it left at their defaults."""
    return toml_tables(
        {
            key: value
            for key, value in run.config.items()
            if is_setting(key) and not (is_argument(key) and value == DEFAULT)
        }
    )


def _partitions(comparison: Comparison) -> list[tuple[tuple[ClientInfo, ...], list[str], str]]:
    """Return the tables of clients and, if runs differ, the runs that each table describes."""
    owners = grouped((run.clients, run) for _, run in comparison.runs if not run.summarized)
    tables = []
    for clients, runs in owners.items():
        count = max((len(client.class_counts) for client in clients), default=0)
        classes = runs[0].info.get("classes") or [f"class {c}" for c in range(count)]
        columns = ["client", "domain", "examples", *map(str, classes if count else ())]
        which = ", ".join(f"{run.label} seed {run.seed}" for run in runs)
        tables.append((clients, columns, f": {which}" if len(owners) > 1 else ""))
    return tables


def _pairs(values: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{key} {value}" for key, value in (values or {}).items() if value is not None)


def _duration(seconds: float | None) -> str:
    """Format seconds as hours, minutes and seconds, such as 0:04:09; empty if unknown."""
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))
