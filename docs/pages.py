"""For mkdocs: which files of the repository are pages, and those that are made of the code.

Sources keep their paths in the repository, so a link that works on GitHub works on the site.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from textwrap import indent
from typing import Any

import tables
from docstrings import as_markdown
from griffe import Docstring, DocstringSection, DocstringSectionKind
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from fairflower import config as run_config
from fairflower.arguments import ArgumentSpec, argument_specs
from fairflower.registry import CLIENTS
from fairflower.strategies import STRATEGIES

SOURCES = (
    "*.md",
    "docs/*.md",
    "docs/*.css",
    "benchmarks/*.md",
    "examples/**/*.*",
    "experiments/*.md",
    "experiments/*.toml",
    "experiments/*.csv",
    "experiments/figures/*.png",
)

#: Modules whose public names are the Python API, with what they are.
API = {
    "fairflower": "Runs and comparisons",
    "fairflower.strategies": "Strategies",
    "fairflower.clients": "Clients",
    "fairflower.exchanges": "Exchanges",
    "fairflower.classic.strategy": "Classic Flower, the server",
    "fairflower.classic.client": "Classic Flower, the client",
    "fairflower.data": "Data",
    "fairflower.models": "Models",
    "fairflower.arguments": "Arguments",
    "fairflower.testing": "Testing",
    "fairflower.trackers": "Trackers",
    "fairflower.errors": "Errors",
}

ROOMS = {"strategies": STRATEGIES, "clients": CLIENTS}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The theme's files, the repository's, and what is made of the code."""
    kept = [file for file in files if not (tables.ROOT / "docs" / file.src_uri).exists()]
    for pattern in SOURCES:
        for path in sorted(tables.ROOT.glob(pattern)):
            uri = path.relative_to(tables.ROOT).as_posix()
            if path.is_file() and "__pycache__" not in uri:
                kept.append(File.generated(config, uri, abs_src_path=str(path)))
    for uri, text in made().items():
        kept.append(File.generated(config, uri, content=text))
    pages = [file.src_uri for file in kept if file.is_documentation_page()]
    config.nav = expanded(config.nav, pages, set(named(config.nav)))
    return Files(kept)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """What GitHub reads and Python-Markdown does not, and links from the tables of methods."""
    markdown = re.sub(r"^(```\w+) \S+$", r"\1", markdown, flags=re.MULTILINE)
    lists = r"(<!-- table: all_(\w+) -->\n)(.*?)(?=<!-- end -->)"
    markdown = re.sub(lists, lambda m: linked(m[2], m[3]), markdown, flags=re.DOTALL)
    return re.sub(r"^<!--.*?-->$", "", markdown, flags=re.MULTILINE)


def linked(room: str, table: str) -> str:
    """A table of methods whose names lead to their pages."""
    names = {name: mine[0] for mine in by_class(ROOMS[room]).values() for name in mine}

    def link(row: re.Match[str]) -> str:
        return f"| [{row[0][2:]}](../{place(room, names[row[1]])})"

    return "\n" + re.sub(r"^\| `([^`]+)`", link, table, flags=re.MULTILINE)


def named(nav: Any) -> Iterator[str]:
    """The paths of a nav, patterns too."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from named(part)


def expanded(nav: Any, pages: list[str], taken: set[str]) -> Any:
    """A nav whose patterns are pages: those that are not named elsewhere."""
    if isinstance(nav, dict):
        return {title: expanded(part, pages, taken) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    parts: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            depth = part.count("/")
            fit = (page for page in pages if fnmatch(page, part) and page.count("/") == depth)
            parts += [page for page in fit if page not in taken]
        else:
            parts.append(expanded(part, pages, taken))
    return parts


def made() -> dict[str, str]:
    """The pages that are made of the code, by path."""
    pages = {}
    for room, methods in ROOMS.items():
        for method, names in by_class(methods).items():
            pages[place(room, names[0])] = method_page(room, names, method)
    for module, title in API.items():
        pages[f"api/{module}.md"] = api_page(module, title)
    return pages


def place(room: str, name: str) -> str:
    """Where the page of a method is."""
    return f"methods/{room}/{name.replace('+', '-plus')}.md"


def by_class(methods: Any) -> dict[Any, list[str]]:
    """The classes with the names that each of them has."""
    names: dict[Any, list[str]] = {}
    for name, method in methods.items():
        names.setdefault(method, []).append(name)
    return names


def method_page(room: str, names: list[str], method: Any) -> str:
    """A method: its docstring, its arguments and what they allow, and where it was measured."""
    table = {"strategies": "strategy", "clients": "client"}[room]
    meanings = {}
    for kind in getattr(method, "exchanges", ()):  # some arguments are its exchange's
        for section in sections(kind):
            meanings |= described(section)
    before, after = [], []
    for section in sections(method):
        if section.kind is DocstringSectionKind.parameters:
            meanings |= described(section)
        elif section.kind is DocstringSectionKind.text:
            before.append(section.value)
        elif section.kind is DocstringSectionKind.raises:
            raised = (f"`{one.annotation}`: {one.description}" for one in section.value)
            after += ["## Raises", *raised]
        elif section.kind is DocstringSectionKind.examples:
            after += ["## Examples", *(text for _, text in section.value)]
        else:
            after += [f"## {section.title}", section.value.contents]
    parts = [f"# {names[0]}", f"*{method.paper}*", *before]
    choice = " or ".join(f"`--{table} {name}`" for name in names)
    parts.append(f"{choice}; in Python `{method.__module__}.{method.__name__}`.")
    own = argument_specs(method)
    parts += ["## Arguments"] if own else []
    for name, argument in own.items():
        head = f"`{table}.{run_config.argument_to_key(name)} = {shown(argument.default)}`"
        text = f"*{takes(argument)}.* {meanings.get(name, '')}"
        parts.append(f"{head}\n:   {indent(text, ' ' * 4).strip()}")
    parts += after
    if pages := list(measured(names, method)):
        parts += ["## Measured", "\n".join(pages)]
    return "\n\n".join(parts)


def sections(thing: type) -> list[DocstringSection]:
    """The sections of a class's docstring."""
    docstring = Docstring(as_markdown(inspect.cleandoc(thing.__doc__ or "")))
    return docstring.parse("numpy", warnings=False)


def described(section: DocstringSection) -> dict[str, str]:
    """What a section says of arguments, if it is of them."""
    of_arguments = section.kind is DocstringSectionKind.parameters
    return {one.name: one.description for one in section.value} if of_arguments else {}


def takes(own: ArgumentSpec) -> str:
    """What an argument allows, in words."""
    number = str(own.range or "a number")
    parts = [number.replace("a ", "a whole ", 1) if own.whole else number] if own.number else []
    parts += [f"`{word}`" for word in own.words]
    parts += ["any word"] if own.text else []
    parts += ["`none`"] if own.optional else []
    text = " or ".join(dict.fromkeys(parts))
    return text[0].upper() + text[1:]


def shown(value: Any) -> str:
    """A value as run configs and the command line have it."""
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def measured(names: list[str], method: type) -> Iterator[str]:
    """Links to experiments, and what is known of liars, with rows of a method by either name."""
    words = "|".join(re.escape(name) for name in [*names, method.__name__])
    row = re.compile(rf"^\|[^|\n]*(?<![\w-])({words})(?![\w-])", re.MULTILINE)
    for path in (*sorted(tables.ROOT.glob("experiments/*.md")), tables.ROOT / "docs" / "faults.md"):
        text = path.read_text(encoding="utf-8")
        if path.name != "README.md" and row.search(text):
            title = text.partition("\n")[0].removeprefix("# ")
            yield f"- [{title}](../../{path.relative_to(tables.ROOT).as_posix()})"


def api_page(module: str, title: str) -> str:
    """The public names of a module, where mkdocstrings finds them."""
    room = importlib.import_module(module)
    own = [name for name, thing in vars(room).items() if getattr(thing, "__module__", "") == module]
    public = getattr(room, "__all__", [name for name in own if not name.startswith("_")])
    things = [getattr(room, name) for name in public]
    places = [
        f"::: {thing.__module__}.{thing.__qualname__}"
        for thing in things
        if (inspect.isclass(thing) or inspect.isfunction(thing))
        and (thing.__module__ == module or thing.__module__ not in API)
    ]
    about = as_markdown(inspect.cleandoc(room.__doc__ or ""))
    return "\n\n".join([f"# {title}", f"`{module}`", about, *places])
