"""The documentation site: its pages are complete, and all links are valid."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mkdocs", reason="the site needs the extra 'docs'")

import docstrings
import pages
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.utils.yaml import yaml_load

from fairflower.arguments import ArgumentSpec, Range
from fairflower.paths import read_text
from fairflower.registry import CLIENTS, STRATEGIES

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def site_pages() -> dict[str, str]:
    return pages.generated_pages()


@pytest.mark.parametrize(
    ("room", "name"),
    [("strategies", name) for name in STRATEGIES] + [("clients", name) for name in CLIENTS],
)
def test_every_method_has_a_page_with_its_paper_and_arguments(
    room: str, name: str, site_pages: dict[str, str]
) -> None:
    methods = {"strategies": STRATEGIES, "clients": CLIENTS}[room]
    method = methods[name]
    (text,) = [
        text
        for path, text in site_pages.items()
        if path.startswith(f"methods/{room}/") and f"{method.__module__}.{method.__name__}`" in text
    ]
    option = {"strategies": "--strategy", "clients": "--client"}[room]
    assert f"`{option} {name}`" in text
    assert f"*{method.paper}*" in text
    assert len(re.findall(r"^:   \*.+?\.\* \S", text, re.MULTILINE)) == len(method.arguments())


def test_a_method_page_shows_formula_arguments_and_experiments(site_pages: dict[str, str]) -> None:
    text = site_pages["methods/strategies/term.md"]
    assert "\n    1/t log( 1/N sum_k n_k exp(t F_k) )\n" in text
    assert "`strategy.t = 0.1`\n:   *A finite number.* Tilt; negative values favor small" in text
    assert "](../../experiments/fedgcr-digit-five-cpu.md)" in text
    assert "experiments/precision.md" not in text


@pytest.mark.parametrize("uri", ["experiments/tables/gsam.md", "experiments/gsam.md"])
def test_the_search_leaves_out_long_tables(uri: str) -> None:
    page: Any = SimpleNamespace(file=SimpleNamespace(src_uri=uri), meta={})
    pages.on_page_content("", page)
    assert bool(page.meta.get("search")) == ("/tables/" in uri)


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        (ArgumentSpec(1.0, number=True, range=Range(0, 1), optional=True),
         "A number in [0, 1] or `none`"),
        (ArgumentSpec(1, number=True, whole=True, range=Range(1)), "A whole number >= 1"),
        (ArgumentSpec("a", words=("a", "b")), "`a` or `b`"),
        (ArgumentSpec("a", text=True), "Any word"),
    ],
)  # fmt: skip
def test_allowed_values_of_an_argument_are_described_in_words(
    argument: ArgumentSpec, text: str
) -> None:
    assert pages.allowed_values(argument) == text


def test_a_pattern_in_the_nav_expands_to_pages_not_named_elsewhere() -> None:
    nav = [{"Guide": ["b.md", "*.md", "x/*.md"]}, "c.md"]
    actual = pages.expand_nav(nav, ["a.md", "b.md", "c.md", "x/d.md"], set(pages.nav_paths(nav)))
    assert actual == [{"Guide": ["b.md", "a.md", "x/d.md"]}, "c.md"]


def test_tables_of_methods_link_to_pages_and_code_blocks_lose_file_names() -> None:
    page = "<!-- table: all_clients -->\n| `fedavg` | x |\n<!-- end -->\n```python mine.py\n```"
    text = "\n| [`fedavg`](../methods/clients/sgd.md) | x |\n\n```python\n```"
    assert pages.on_page_markdown(page) == text


def test_docstrings_become_markdown_except_their_code() -> None:
    docstring = "Let <a, b> be ``<c>``::\n\n    <d, e>::\n\nA sum::\n\n    f"
    markdown = "Let &lt;a, b> be ``<c>``:\n\n    <d, e>::\n\nA sum:\n\n    f"
    assert docstrings.as_markdown(docstring) == markdown


def test_examples_and_see_also_of_a_docstring_become_code_and_a_list() -> None:
    docstring = "See Also\n--------\nA : B\n    of b.\n\nExamples\n--------\n>>> 1\n1\n\nText"
    markdown = (
        "See Also\n--------\n- `A`: B\n    of b.\n\n"
        "Examples\n--------\n```pycon\n>>> 1\n1\n```\n\nText"
    )
    assert docstrings.as_markdown(docstring) == markdown


@pytest.mark.nightly
@pytest.mark.slow
def test_the_site_is_built_without_warnings_or_leftover_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process, which has imported what it documents, and without an index for the search.
    plugins = [p for p in yaml_load(read_text(ROOT / "mkdocs.yml"))["plugins"] if p != "search"]
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    monkeypatch.chdir(ROOT)
    build(load_config("mkdocs.yml", strict=True, site_dir=str(tmp_path), plugins=plugins))
    for path in tmp_path.rglob("*.html"):
        text = re.sub(r"<(pre|code|script)\b.*?</\1>", "", path.read_text(), flags=re.DOTALL)
        for left in ("```", "\n|", "\n- ", "::\n", "<!-- table"):
            assert left not in text, (path.relative_to(tmp_path), left)
    assert "<table>" in (tmp_path / "docs/use-one-strategy/index.html").read_text()
    api = (tmp_path / "api/fairflower/index.html").read_text()
    assert 'id="fairflower.api.runs.compare"' in api
