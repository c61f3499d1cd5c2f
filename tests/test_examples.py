"""What is in examples/ works."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples/compare.ipynb"


def outputs(cell: Any, kind: str) -> str:
    """All that a cell shows of one kind, as one text."""
    return "".join(
        output["data"][kind] for output in cell.outputs if kind in output.get("data", {})
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_the_notebook_shows_runs_tables_and_figures(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient").NotebookClient(
        nbformat.read(NOTEBOOK, as_version=4), resources={"metadata": {"path": str(tmp_path)}}
    )
    by_source = {cell.source: cell for cell in client.execute().cells if cell.cell_type == "code"}

    def cell(start: str) -> Any:
        return next(cell for source, cell in by_source.items() if start in source)

    assert "round   4/4" in html.unescape(
        re.sub("<[^>]+>", "", outputs(cell("on_round"), "text/html"))
    )
    page = outputs(cell("ff.compare("), "text/html")
    assert page.count("<tbody>") == 1
    assert "fedprox+fedheal" in page
    assert "(3 seeds)" in page
    assert outputs(cell("results.plot"), "image/png")
    assert "<table" in outputs(cell("results.table"), "text/html")
    assert "fedprox+uniform" in outputs(cell("groupby"), "text/html")
    assert not any(
        output.get("name") == "stderr" for cell in by_source.values() for output in cell.outputs
    )
