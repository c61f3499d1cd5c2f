"""Synthetic run folders, and the reports of run folders."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from unittest import mock

from rich.console import Console

from fairflower.report import Run, analyze, read_run, terminal_table, write_report

Accuracies = Sequence[Mapping[str, float]]
MINUS = "\N{MINUS SIGN}"


def make_run(
    folder: Path,
    accuracies: Accuracies,
    *,
    label: str = "fedheal",
    strategy: str | None = None,
    seed: int = 0,
    rounds: Sequence[int] | None = None,
    clients: Mapping[int, Sequence[float]] | None = None,
    personal: Accuracies = (),
    diagnostics: Sequence[Mapping[str, Any]] = (),
    config: str = "",
    score: str = "accuracy",
    **info: Any,
) -> Path:
    """Write a run folder as plain text; ``accuracies`` has one mapping per evaluated round.

    They are values of another primary ``score`` if ``info`` has its ``scores``.
    """
    folder.mkdir(parents=True)
    named = dict.fromkeys(domain for values in accuracies for domain in values)
    domains = info.get("domains", list(named))
    rounds = range(len(accuracies)) if rounds is None else rounds
    lines = ["round,level,name,metric,value"]
    for r, values in enumerate(personal, start=1):
        lines += [f"{r},domain,{d},personal_{score},{value!r}" for d, value in values.items()]
    for r, values in zip(rounds, accuracies, strict=True):
        for domain, value in values.items():
            lines += [f"{r},domain,{domain},loss,1.5", f"{r},domain,{domain},{score},{value!r}"]
        for k, value in enumerate((clients or {}).get(r, [])):
            lines.append(f"{r},client,{k},{score},{value!r}")
        lines.append(f"{r},run,,seconds,2.5")
    (folder / "history.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "diagnostics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in diagnostics), encoding="utf-8"
    )
    (folder / "config.toml").write_text(
        f'seed = {seed}\nnum-server-rounds = {rounds[-1]}\nrun-name = "{folder.name}"\n'
        f'engine = "ray"\n[data]\nname = "digits"\n[strategy]\nname = "{strategy or label}"\n'
        f"[train]\nlr = 0.01\n{config}",
        encoding="utf-8",
    )
    facts = {
        "name": folder.name,
        "label": label,
        "status": "completed",
        "error": None,
        "started": f"2026-01-01T00:00:0{seed}+00:00",
        "finished": "2026-01-01T01:00:00+00:00",
        "seconds": 3600.0,
        "command": "fairflower run",
        "versions": {"flwr": "1.41.0"},
        "machine": {"cpus": 2},
        "num_parameters": 25130,
        "model_bytes": 100520,
        "rounds": rounds[-1],
        "domains": domains,
        "clients": [
            {"client_id": k, "domain": domain, "num_examples": 10 + k, "class_counts": [4, 6 + k]}
            for k, domain in enumerate(domain for domain in domains for _ in range(2))
        ],
        **info,
    }
    (folder / "run.json").write_text(json.dumps(facts), encoding="utf-8")
    return folder


def constant(rounds: int = 7, /, **values: float) -> Accuracies:
    return [values] * rounds


def rising(start: float, b: float = 0.9, rounds: int = 7) -> Accuracies:
    """Return accuracies where domain a gains one point a round and domain b is constant."""
    return [{"a": start + 0.01 * r, "b": b} for r in range(rounds)]


def printed_tables(*folders: Path, width: int = 200) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(terminal_table([read_run(folder) for folder in folders]))
    return re.sub(r"[ \n]+", " ", capture.get())


class Page(HTMLParser):
    """Parser of a page: rows of tables by caption, and all tags, which must be balanced."""

    void = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.stack: list[str] = []
        self.caption = ""
        self.rows: list[list[str]] = []
        self.text = text
        self.feed(text)
        assert not self.stack

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.void:
            self.stack.append(tag)
        if tag == "table":
            self.caption, self.rows = "", []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag
        if tag == "table":
            self.tables[self.caption] = self.rows

    def handle_data(self, data: str) -> None:
        if "caption" in self.stack:
            self.caption += data
        elif "td" in self.stack or "th" in self.stack:
            self.rows[-1][-1] += f" {data}" if self.rows[-1][-1] else data

    def attributes(self, name: str) -> list[str]:
        return [str(attrs[name]) for _, attrs in self.tags if name in attrs]

    def table(self, start: str) -> dict[str, dict[str, str]]:
        """Return method -> column -> text, of the table whose caption starts with ``start``."""
        (rows,) = (rows for caption, rows in self.tables.items() if caption.startswith(start))
        return {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[1:]}


class Tables:
    """All tables of runs, with verdicts and notes, before they are rendered."""

    def __init__(self, runs: Sequence[Run]) -> None:
        chapters = analyze(runs).chapters
        self.all = [table for chapter in chapters for table in chapter.all_tables]
        sentences = [str(v) for c in chapters for said in c.verdicts.values() for v in said]
        notes = [note for c in chapters for note in c.notes]
        lines = [line for t in self.all for line in (t.title, t.caption, *t.footers)]
        lines += [group.heading for t in self.all for group in t.groups]
        self.text = "\n".join([*lines, *sentences, *notes])

    def table(self, start: str) -> dict[str, dict[str, str]]:
        """Return method -> column -> text, of the only table whose title starts with ``start``."""
        (table,) = (table for table in self.all if table.title.startswith(start))
        columns = ["method", *table.columns]
        rows = [row for group in table.groups for row in group.rows]
        texts = [
            [f"{row.name} {row.remark}".strip()]
            + [f"{cell.text} {cell.spread}".strip() for cell in row.cells]
            for row in rows
        ]
        return {row[0]: dict(zip(columns, row, strict=True)) for row in texts}


def tables_of(*folders: Path) -> Tables:
    """Return the tables of run folders."""
    return Tables([read_run(folder) for folder in folders])


def page_of(out: Path, *folders: Path) -> Page:
    """Write a report without figures, which take most of the time, and return the parsed page."""
    with mock.patch("fairflower.report.figures.comparison.draw", return_value=[]):
        page = write_report([read_run(folder) for folder in folders], out)
    return Page(page.read_text(encoding="utf-8"))


def edit(name: str, old: str, new: str) -> Any:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


def with_scores(folder: Path, **scores: Sequence[Mapping[str, float]]) -> Path:
    """Add scores per domain and round to a run folder, and corrupted clients to its config."""
    lines = [
        f"{r},domain,{domain},{score},{value!r}\n"
        for score, rounds in scores.items()
        for r, values in enumerate(rounds)
        for domain, value in values.items()
    ]
    with (folder / "history.csv").open("a") as history:
        history.writelines(lines)
    edit("config.toml", "[data]", "[data]\ncorrupted-clients = 1")(folder)
    return folder


def give_clients(folder: Path, **counts: int) -> Path:
    info = json.loads((folder / "run.json").read_text())
    names = [domain for domain, count in counts.items() for _ in range(count)]
    info["clients"] = [
        {"client_id": k, "domain": domain, "num_examples": 5, "class_counts": [5]}
        for k, domain in enumerate(names)
    ]
    (folder / "run.json").write_text(json.dumps(info))
    return folder


def without_tests(values: Accuracies, /, **rounds: Iterable[int]) -> Accuracies:
    """Return accuracies without those of some domains in some rounds."""
    return [
        {d: value for d, value in accuracies.items() if r not in rounds.get(d, ())}
        for r, accuracies in enumerate(values)
    ]


#: Domain a rises by a point a round, from 0.50 to 0.56; b is the best domain, c the worst.
ALL = [{"a": 0.5 + 0.01 * r, "b": 0.9, "c": 0.4} for r in range(7)]


def clustered(
    folder: Path, clusters: Sequence[Sequence[int | None]], *, mapped: bool = True, **options: Any
) -> Path:
    """Write a run of four clients, two of a and two of b; None: the client does not participate."""
    records = []
    for r, row in enumerate(clusters, start=1):
        there = [k for k, c in enumerate(row) if c is not None]
        record = {
            "round": r,
            "client_ids": there[::-1],
            "cluster": [float(row[k] or 0) for k in there[::-1]],
            "num_clusters": 0.0,
        }
        places = {"map_x": [float(k) for k in there[::-1]], "map_y": [r + 0.5] * len(there)}
        records.append(record | (places if mapped else {}))
    options.setdefault("label", "fedgcr")
    return make_run(folder, rising(0.5, rounds=len(clusters) + 1), diagnostics=records, **options)


def runs_with(tmp_path: Path, label: str, values: Sequence[float], **options: Any) -> list[Path]:
    """Write a run per value of domain a; domain b is always 0.9."""
    return [
        make_run(tmp_path / f"{label}-{s}", constant(a=a, b=0.9), label=label, seed=s, **options)
        for s, a in enumerate(values)
    ]


def trained_by(client: str, strategy: str, a: float, folder: Path) -> Path:
    label = strategy if client == "sgd" else f"{client}+{strategy}"
    config = f'[client]\nname = "{client}"\n'
    return make_run(
        folder / label, constant(a=a, b=0.9), label=label, strategy=strategy, config=config
    )
