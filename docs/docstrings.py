"""A mkdocstrings extension that converts docstrings to Markdown."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

#: A doctest example, up to the next empty line.
EXAMPLE = re.compile(r"^( *)>>> .*\n?(?:\1\S.*\n?)*", re.MULTILINE)
#: The lines of a "See Also" section.
SEE_ALSO = re.compile(r"(?<=^See Also\n--------\n)(?:.+\n?)+", re.MULTILINE)
#: Inline code, which is kept, or a ``<`` that Markdown would parse as a tag: ``<F_i, F_j>``.
CODE_OR_TAG = re.compile(r"(`+).+?\1|<(?=[A-Za-z/])")


def as_markdown(docstring: str) -> str:
    """Convert a docstring to Markdown.

    ``text::`` before a block becomes ``text:``, ``<x, y>`` is escaped, doctests become code blocks,
    and the lines of a "See Also" section become a list.
    """
    docstring = SEE_ALSO.sub(
        lambda lines: re.sub(r"^(\S+) : ", r"- `\1`: ", lines[0], flags=re.MULTILINE), docstring
    )
    docstring = EXAMPLE.sub(
        lambda code: f"{code[1]}```pycon\n{code[0].rstrip()}\n{code[1]}```\n", docstring
    )
    lines, outside = [], None
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if outside is not None and line.strip() and indent <= outside:
            outside = None
        if outside is None:
            line = CODE_OR_TAG.sub(
                lambda match: match[0].replace("<", "&lt;", 0 if match[1] else 1), line
            )
            if line.endswith("::"):
                line, outside = line[:-1], indent
        lines.append(line)
    return "\n".join(lines)


class Docstrings(Extension):
    """A griffe extension that converts every docstring by `as_markdown`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Convert the docstring of an object."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
