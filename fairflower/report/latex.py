"""Tables in LaTeX for papers. They use the booktabs package.

In each column, the best value among comparable methods is bold, and the second best is underlined.
The standard deviation over federations or seeds is in small print.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fairflower.report.analysis import Analysis, analyze
from fairflower.report.reading import Run
from fairflower.report.tables.cells import Cell, Table

_HEAD = "% In the preamble: \\usepackage{booktabs}\n"

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
    """Return all tables of the runs in LaTeX. Raises `RunFolderError` if there are no runs."""
    analysis = analyze(runs)
    chapters, tables = analysis.chapters, analysis.named_tables
    notes = [_comment(f"Note: {note}") + "\n" for chapter in chapters for note in chapter.notes]
    written = (_table(table, i) for i, table in enumerate(tables, start=1))
    return "\n".join([_HEAD, *written, *notes])


def escaped(text: str) -> str:
    r"""Return text with LaTeX's special characters escaped.

    >>> print(escaped("fedmgda+ & fed_x: 5 %"))
    fedmgda+ \& fed\_x: 5 \%
    """
    return "".join(_CHARACTERS.get(character, character) for character in text)


def _table(table: Table, number: int) -> str:
    width = len(table.columns)
    rows = []
    for place, group in enumerate(table.groups):
        rows += [r"\midrule"] * (place > 0)
        if group.heading:
            rows.append(
                rf"\multicolumn{{{width + 1}}}{{l}}{{\emph{{{escaped(group.heading)}}}}} \\"
            )
        rows += [
            " & ".join([escaped(row.name), *(_cell(cell) for cell in row.cells)]) + r" \\"
            for row in group.rows
        ]
    caption = " ".join(filter(None, (f"{table.title}.", table.caption)))
    caption += " Underlined: second best." * any(
        cell.second for group in table.groups for row in group.rows for cell in row.cells
    )
    label = re.sub(r"[^a-z]+", "-", table.title.split(",")[0].lower()).strip("-")
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{escaped(caption)}}}",
        rf"\label{{tab:{label}-{number}}}",
        rf"\begin{{tabular}}{{l{'r' * width}}}",
        r"\toprule",
        " & ".join(["Method", *map(escaped, table.columns)]) + r" \\",
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
        *(
            _comment(f"{row.name}: {row.remark}")
            for group in table.groups
            for row in group.rows
            if row.remark
        ),
        *map(_comment, table.footers),
    ]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    line = " ".join(text.split())
    return "% " + "".join(c if c.isascii() else _CHARACTERS.get(c, "?") for c in line)


def _cell(cell: Cell) -> str:
    text = escaped(cell.text)
    if cell.tone:
        text = rf"\textbf{{{text}}}"
    elif cell.second:
        text = rf"\underline{{{text}}}"
    if not cell.spread:
        return text
    return rf"{text} {{\scriptsize {escaped(cell.spread).replace('$ ', '$')}}}"
