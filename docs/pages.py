"""mkdocs hooks that add the repository's Markdown files, and pages generated from the code.

Pages keep their paths in the repository, so that links work on GitHub and on the site.
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
from mkdocs.structure.pages import Page

from fairflower.arguments import ArgumentSpec, argument_specs
from fairflower.config.text import argument_to_key
from fairflower.registry import CLIENTS
from fairflower.strategies import STRATEGIES

SOURCES = (
    "*.md",
    "docs/*.md",
    "docs/*.css",
    "benchmarks/*.md",
    "examples/**/*.*",
    "tests/README.md",
    "experiments/*.md",
    "experiments/leaderboard/*.md",
    "experiments/tables/*.md",
    "experiments/*.toml",
    "experiments/*.csv",
    "experiments/*.py",
    "experiments/figures/*.png",
    "fairflower/deploy/policy.toml",
)

#: Beginnings of paths of pages that the site's search leaves out.
UNSEARCHED = ("experiments/tables/", "experiments/federations.md")

#: Modules of the public Python API, with the titles of their pages.
API = {
    "fairflower": "Runs and comparisons",
    "fairflower.strategies": "Strategies",
    "fairflower.clients": "Clients",
    "fairflower.exchanges": "Exchanges",
    "fairflower.classic.strategy": "Classic Flower, the server",
    "fairflower.classic.client": "Classic Flower, the client",
    "fairflower.data": "Data",
    "fairflower.models": "Models",
    "fairflower.participation": "Participation",
    "fairflower.arguments": "Arguments",
    "fairflower.testing": "Testing",
    "fairflower.trackers": "Trackers",
    "fairflower.errors": "Errors",
}

REGISTRIES = {"strategies": STRATEGIES, "clients": CLIENTS}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's files and the generated pages to the theme's files."""
    kept = [file for file in files if not (tables.ROOT / "docs" / file.src_uri).exists()]
    for pattern in SOURCES:
        for path in sorted(tables.ROOT.glob(pattern)):
            uri = path.relative_to(tables.ROOT).as_posix()
            if path.is_file() and "__pycache__" not in uri:
                kept.append(File.generated(config, uri, abs_src_path=str(path)))
    for uri, text in generated_pages().items():
        kept.append(File.generated(config, uri, content=text))
    pages = [file.src_uri for file in kept if file.is_documentation_page()]
    config.nav = expand_nav(config.nav, pages, set(nav_paths(config.nav)))
    return Files(kept)


def on_page_content(_html: str, page: Page, **_: Any) -> None:
    """Leave long generated tables out of the search, which would find them before the guide."""
    if page.file.src_uri.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Remove markup for GitHub, and link the methods in tables to their pages."""
    markdown = re.sub(r"^(```\w+) \S+$", r"\1", markdown, flags=re.MULTILINE)
    lists = r"(<!-- table: all_(strategies|clients) -->\n)(.*?)(?=<!-- end -->)"
    markdown = re.sub(lists, lambda m: link_methods(m[2], m[3]), markdown, flags=re.DOTALL)
    return re.sub(r"^<!--.*?-->$", "", markdown, flags=re.MULTILINE)


def link_methods(kind: str, table: str) -> str:
    """Return a table of methods in which every name links to its page."""
    names = {
        name: aliases[0] for aliases in by_class(REGISTRIES[kind]).values() for name in aliases
    }

    def link(row: re.Match[str]) -> str:
        return f"| [{row[0][2:]}](../{method_path(kind, names[row[1]])})"

    return "\n" + re.sub(r"^\| `([^`]+)`", link, table, flags=re.MULTILINE)


def nav_paths(nav: Any) -> Iterator[str]:
    """Yield the paths and patterns of a nav."""
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from nav_paths(part)


def expand_nav(nav: Any, pages: list[str], taken: set[str]) -> Any:
    """Replace each pattern of a nav by its pages, without pages that the nav names elsewhere."""
    if isinstance(nav, dict):
        return {title: expand_nav(part, pages, taken) for title, part in nav.items()}
    if not isinstance(nav, list):
        return nav
    parts: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            depth = part.count("/")
            matching = (page for page in pages if fnmatch(page, part) and page.count("/") == depth)
            parts += [page for page in matching if page not in taken]
        else:
            parts.append(expand_nav(part, pages, taken))
    return parts


def generated_pages() -> dict[str, str]:
    """Return the pages that are generated from the code, by path."""
    pages = {}
    for kind, methods in REGISTRIES.items():
        for method, names in by_class(methods).items():
            pages[method_path(kind, names[0])] = method_page(kind, names, method)
    for module, title in API.items():
        pages[f"api/{module}.md"] = api_page(module, title)
    return pages


def method_path(kind: str, name: str) -> str:
    """Return the path of a method's page."""
    return f"methods/{kind}/{name.replace('+', '-plus')}.md"


def by_class(methods: Any) -> dict[Any, list[str]]:
    """Return class -> all names registered for the class."""
    names: dict[Any, list[str]] = {}
    for name, method in methods.items():
        names.setdefault(method, []).append(name)
    return names


def method_page(kind: str, names: list[str], method: Any) -> str:
    """Return a method's page: docstring, arguments with allowed values, and measured results."""
    table = {"strategies": "strategy", "clients": "client"}[kind]
    meanings = {}
    for exchange in getattr(method, "exchanges", ()):  # an exchange may document arguments
        for section in sections(exchange):
            meanings |= argument_descriptions(section)
    before, after = [], []
    for section in sections(method):
        if section.kind is DocstringSectionKind.parameters:
            meanings |= argument_descriptions(section)
        elif section.kind is DocstringSectionKind.text:
            before.append(section.value)
        elif section.kind is DocstringSectionKind.examples:
            after += ["## Examples", *(text for _, text in section.value)]
        else:
            after += [f"## {section.title}", section.value.contents]
    parts = [f"# {names[0]}", f"*{method.paper}*", *before]
    choice = " or ".join(f"`--{table} {name}`" for name in names)
    parts.append(f"{choice}; in Python `{method.__module__}.{method.__name__}`.")
    arguments = argument_specs(method)
    parts += ["## Arguments"] if arguments else []
    for name, argument in arguments.items():
        heading = f"`{table}.{argument_to_key(name)} = {as_config_value(argument.default)}`"
        tuned = f" `fairflower tune` tries {argument.search}." if argument.search else ""
        text = f"*{allowed_values(argument)}.* {meanings.get(name, '').strip()}{tuned}"
        parts.append(f"{heading}\n:   {indent(text, ' ' * 4).strip()}")
    parts += after
    if links := list(result_links(names, method)):
        parts += ["## Measured", "\n".join(links)]
    return "\n\n".join(parts)


def sections(cls: type) -> list[DocstringSection]:
    """Parse the sections of a class's docstring."""
    docstring = Docstring(as_markdown(inspect.cleandoc(cls.__doc__ or "")))
    return docstring.parse("numpy", warnings=False)


def argument_descriptions(section: DocstringSection) -> dict[str, str]:
    """Return argument -> description; empty for sections that are not about parameters."""
    of_arguments = section.kind is DocstringSectionKind.parameters
    return {item.name: item.description for item in section.value} if of_arguments else {}


def allowed_values(argument: ArgumentSpec) -> str:
    """Describe the values that an argument allows."""
    number = str(argument.range or "a number")
    parts = (
        [number.replace("a ", "a whole ", 1) if argument.whole else number]
        if argument.number
        else []
    )
    parts += [f"`{word}`" for word in argument.words]
    parts += ["any word"] if argument.text else []
    parts += ["`none`"] if argument.optional else []
    text = " or ".join(dict.fromkeys(parts))
    return text[0].upper() + text[1:]


def as_config_value(value: Any) -> str:
    """Write a value as in run configs and on the command line."""
    return (
        "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def result_links(names: list[str], method: type) -> Iterator[str]:
    """Yield links to documents whose tables have a row of the method, by name or class name."""
    words = "|".join(re.escape(name) for name in [*names, method.__name__])
    row = re.compile(rf"^\|[^|\n]*(?<![\w-])({words})(?![\w-])", re.MULTILINE)
    for path in sorted(tables.ROOT.glob("experiments/*.md")):
        text = path.read_text(encoding="utf-8")
        tables_of = path.parent / "tables" / path.name
        rows = text + (tables_of.read_text(encoding="utf-8") if tables_of.exists() else "")
        if path.name != "README.md" and row.search(rows):
            title = text.partition("\n")[0].removeprefix("# ")
            yield f"- [{title}](../../{path.relative_to(tables.ROOT).as_posix()})"


def api_page(module: str, title: str) -> str:
    """Return a module's page: its docstring, and references that mkdocstrings resolves."""
    imported = importlib.import_module(module)
    defined = [
        name for name, thing in vars(imported).items() if getattr(thing, "__module__", "") == module
    ]
    names = getattr(imported, "__all__", defined or sorted(vars(imported)))  # of a package: all
    public = [name for name in names if not name.startswith("_")]
    members = [getattr(imported, name) for name in public]
    references = [
        f"::: {thing.__module__}.{thing.__qualname__}"
        for thing in members
        if (inspect.isclass(thing) or inspect.isfunction(thing))
        and (thing.__module__ == module or thing.__module__ not in API)
    ]
    about = as_markdown(inspect.cleandoc(imported.__doc__ or ""))
    return "\n\n".join([f"# {title}", f"`{module}`", about, *references])
