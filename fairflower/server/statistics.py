"""Runs that end when the sites have described their data (``statistics``)."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import datetime
from itertools import combinations
from pathlib import Path

from flwr.app import ConfigRecord
from flwr.serverapp import Grid
from rich.console import Console

from fairflower.config import RunConfig
from fairflower.data import Federation
from fairflower.errors import ConfigError
from fairflower.paths import file_name
from fairflower.server.contents import STATISTICS
from fairflower.server.discovery import NodeDiscovery, NodeInfos
from fairflower.server.folder import check_place, runs_home
from fairflower.tables.sites import places_of


def describe_sites(grid: Grid, config: RunConfig, stop: threading.Event, console: Console) -> Path:
    """Write what connected sites say of their data to ``statistics.json`` in a new folder.

    Descriptions are not merged, so they may contradict each other; a site that refuses is listed
    with its reason. Returns the folder, which `fairflower data statistics` shows. Raises
    ``ConfigError`` if too few sites are connected, or nodes are no sites with data of their own.
    """
    infos, refused = _described(grid, config, stop)
    named: dict[str, Federation] = {}
    rows: dict[str, tuple[str, frozenset[str]]] = {}
    order = sorted(infos, key=lambda n: (infos[n].site.domains, infos[n].number or 0, n))  # type: ignore[union-attr]
    sites = [site for n in order if (site := infos[n].site)]
    for place, node, site in zip(places_of(sites), order, sites, strict=True):
        named[place], rows[place] = site, infos[node].rows
    least = config.data.smallest_group
    content = {
        "written": datetime.now().astimezone().isoformat(timespec="seconds"),
        "smallest_group": least,
        "sites": {place: json.loads(site.to_json()) for place, site in named.items()},
        "notes": [*refused, *shared_rows(rows, least)],
    }
    name = config.run_name or f"{datetime.now():%Y%m%d-%H%M%S}-statistics-" + file_name(
        config.data.name
    )
    check_place(folder := runs_home(config) / name)
    (folder / STATISTICS).write_text(json.dumps(content, indent=1), encoding="utf-8")
    command = f"fairflower data statistics {folder}"
    console.print(f"The sites' statistics: {command}", soft_wrap=True, markup=False)
    return folder


def _described(grid: Grid, config: RunConfig, stop: threading.Event) -> tuple[NodeInfos, list[str]]:
    """Return the descriptions of nodes, and why others refuse, when enough have answered."""
    if config.evaluate.by != "clients":
        raise ConfigError(
            "statistics = true asks sites with their own data. Set evaluate.by = 'clients'; for a "
            "folder, use `fairflower data statistics FOLDER`."
        )
    asked = ConfigRecord(dict(config.to_flat()))
    only = config.site_names
    discovery = NodeDiscovery(grid, config.round_timeout, stop, asked, only)
    expected = max(1, len(only) or int(config.sites))
    while discovery.ask() or len(discovery.infos) + len(discovery.problems) < expected:
        notice = f"{len(discovery.infos)} of {expected} sites have answered."
        if not discovery.wait(notice):
            break
    if not discovery.infos or len(discovery.infos) + len(discovery.problems) < expected:
        raise discovery.missing_error(expected)
    if shares := [node for node, info in discovery.infos.items() if info.site is None]:
        raise ConfigError(
            f"statistics = true: node {shares[0]} has a share of a common data set, but no data of "
            "its own (domain in the node config). Use `fairflower data statistics FOLDER`."
        )
    return discovery.infos, [*discovery.problems.values()]


def shared_rows(rows: Mapping[str, tuple[str, frozenset[str]]], least: int) -> list[str]:
    """Return sentences on rows that are at two sites, given the sites' `row_digests`.

    Numbers below ``least`` are not told, and nothing of sites whose digests cannot be compared.
    """
    said, pairs = [], {place: own for place, own in rows.items() if own[0]}
    known = set()
    for a, b in combinations(pairs, 2):
        if pairs[a][0] == pairs[b][0]:
            known |= {a, b}
            count = len(pairs[a][1] & pairs[b][1])
            number = f"{count}" if count >= least else f"fewer than {least}"
            if count:
                said.append(
                    f"{number} rows at {a} are at {b}, too, equal in all columns. This may be "
                    "chance, if columns have few different values."
                )
    if unknown := [place for place in rows if place not in known]:
        said.append(
            f"Whether rows at {', '.join(unknown)} are at other places, too, cannot be known: they "
            "have no digests (row-digests in the node config), another key, or columns of other "
            "names or kinds."
        )
    return said
