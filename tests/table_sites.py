"""Sites with tables of their own, in one process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from fairflower.client_app import app
from fairflower.config import DataConfig, RunConfig
from fairflower.data.federation import Federation
from fairflower.data.sites import open_site
from fairflower.engines.inline import InlineGrid
from fairflower.server.session import Session
from fairflower.tables.sites import SiteTable

SETTINGS = {
    "num-server-rounds": 2,
    "train.local-epochs": 1,
    "data.name": "table",
    "data.target": "disease",
    "data.patient": "patient",
    "data.smallest-group": 1,
    "model.name": "mlp",
}


def separate(folder: Path) -> list[dict[str, Any]]:
    """Move each table of a folder to a site's own; return the node configs, in another order."""
    nodes = []
    for path in sorted(folder.glob("*.csv"), reverse=True):
        own = folder.parent / f"site {path.stem}"
        own.mkdir()
        shutil.copy(path, own)
        nodes.append({"domain": path.stem, "data-dir": str(own)})
    return nodes


def grid(nodes: list[dict[str, Any]]) -> InlineGrid:
    inline_grid = InlineGrid(app, len(nodes))
    for context, node in zip(inline_grid.contexts.values(), nodes, strict=True):
        context.node_config = node
    return inline_grid


def run(nodes: InlineGrid, folder: Path, **changes: Any) -> Path:
    config = RunConfig.from_flat(SETTINGS | {"output-dir": str(folder)} | changes)
    return Session(nodes, config, Console(quiet=True)).run()


def site_of(folder: Path, columns: Mapping[str, Any], least: int = 5, **changes: Any) -> Federation:
    """Write a table with the target ``y``, if it has none, and describe it as its site does."""
    folder.mkdir()
    size = len(next(iter(columns.values())))
    table = {"y": ["no", "yes"] * (size // 2), **columns}
    pd.DataFrame(table).to_csv(folder / "t.csv", index=False)
    config = DataConfig(name="table", dir=str(folder), **{"target": "y", **changes})
    site = open_site(config, folder.name)
    return replace(site, encoding=SiteTable.from_json(site.encoding).to_send(least).to_json())


def numbers(n: int, mean: float = 50.0, seed: int = 0) -> list[float]:
    return np.random.default_rng(seed).normal(mean, 9, n).round(2).tolist()
