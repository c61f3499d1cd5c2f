"""Reports as an HTML page, in the terminal and in Markdown."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from run_folders import (
    ALL,
    MINUS,
    Page,
    constant,
    edit,
    give_clients,
    make_run,
    page_of,
    printed_tables,
    rising,
    runs_with,
)

from fairflower.config import RunConfig
from fairflower.config.run import execution_keys
from fairflower.config.text import flatten_tables
from fairflower.errors import ConfigError
from fairflower.report import (
    read_run,
    read_summary,
    terminal_table,
    write_report,
    write_summary,
)
from fairflower.report.cells import DASH
from fairflower.report.contrasts import contrasts_of
from fairflower.report.figures.comparison import draw, plot
from fairflower.report.methods import group_runs
from fairflower.report.pages import latex, markdown_tables

HOSTILE = '<script>alert("$x_1$")</script>'


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with all parts, whose names contain HTML and formulas."""
    root = tmp_path_factory.mktemp("hostile")
    records = [
        {"round": r, "client_ids": [0, 1, 2, 3], "weights": [0.1, 0.2, 0.3, 0.4], "kept": 0.5,
         "distance": [1.0, 2.0, 3.0, r], "cosine <i>": np.eye(4).tolist()}
        for r in range(1, 10)
    ]  # fmt: skip
    accuracies = [{"a&b": 0.5 + 0.01 * r, "<i>c": 0.7 + 0.01 * r} for r in range(10)]
    tests = {r: [0.5, 0.6, 0.7, 0.8] for r in range(10)}
    folders = [
        make_run(root / f"{label}{seed}", accuracies, label=name, strategy=label, seed=seed,
                 diagnostics=records, clients=tests, status="failed", error=HOSTILE,
                 command=HOSTILE, machine={HOSTILE: HOSTILE})
        for label, name in [("uniform", "uniform"), ("fedheal", HOSTILE)]
        for seed in range(2)
    ]  # fmt: skip
    write_report([read_run(folder) for folder in folders], root / "out")
    return root / "out"


@pytest.mark.slow
def test_the_page_loads_no_other_files(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    page = Page(text)
    for link in page.attributes("href") + page.attributes("src"):
        assert link.startswith(("#", "data:image/png;base64,"))
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base"}
    assert not re.search(r"https?:|@import|url\((?!#)", text)


@pytest.mark.slow
def test_text_is_escaped(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    assert "<script" not in text
    assert "<i>" not in text
    assert text.count("&lt;script&gt;alert(") > 10
    # The label is also in the figures, where its dollar signs do not start a formula.
    assert re.search(r"<text[^>]*>&lt;script&gt;alert\(\"?(&quot;)?\$x_1\$", text)


@pytest.mark.slow
def test_ids_are_unique_and_links_to_them_resolve(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    page = Page(text)
    ids = page.attributes("id")
    assert len(ids) == len(set(ids))
    targets = re.findall(r"url\(#([^)]+)\)", text)
    targets += [href[1:] for href in page.attributes("href") if href.startswith("#")]
    assert targets
    assert set(targets) <= set(ids)


@pytest.mark.slow
def test_the_page_is_accessible_and_has_a_dark_mode(hostile: Path) -> None:
    text = (hostile / "index.html").read_text("utf-8")
    page = Page(text)
    assert ("html", {"lang": "en"}) in page.tags
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    figures = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(figures) == 10
    assert all(attrs["role"] == "img" and attrs["aria-label"] for attrs in figures)
    assert 'style="fill: currentColor' in text.replace("text-anchor: middle; ", "")
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert all(attrs.get("scope") for tag, attrs in page.tags if tag == "th")


@pytest.mark.slow
def test_figures_are_written_as_valid_png_and_svg_files(hostile: Path) -> None:
    files = {path.name for path in (hostile / "figures").iterdir()}
    names = {"average", "worst", "std", "bars", "clients", "domains",
             "client-weights", "client-distance", "pairs-cosine-i", "round-kept"}  # fmt: skip
    assert files == {f"{name}.{kind}" for name in names for kind in ("png", "svg")}
    for path in (hostile / "figures").iterdir():
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("drawn_once")
def test_a_report_removes_the_figures_of_an_earlier_one_and_no_other_files(tmp_path: Path) -> None:
    first, second = (
        make_run(tmp_path / label, accuracies, label=label)
        for label, accuracies in (("a", rising(0.5)), ("b", constant(x=0.5)))
    )
    write_report([read_run(first), read_run(second)], tmp_path / "out")
    figures = tmp_path / "out" / "figures"
    (figures / "mine.png").write_bytes(b"mine")
    assert (figures / "2-average.svg").exists()
    write_report([read_run(first)], tmp_path / "out")
    drawn = {path.stem for path in figures.iterdir()}
    write_report([read_run(first)], tmp_path / "other")
    assert drawn == {path.stem for path in (tmp_path / "other" / "figures").iterdir()} | {"mine"}


@pytest.mark.slow
def test_same_runs_give_the_same_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "r", rising(0.5, rounds=3))
    pages = [write_report([read_run(folder)], tmp_path / name) for name in ("1", "2")]
    assert pages[0].read_bytes() == pages[1].read_bytes()
    for path in (tmp_path / "1" / "figures").iterdir():
        assert path.read_bytes() == (tmp_path / "2" / "figures" / path.name).read_bytes()


@pytest.mark.usefixtures("drawn_once")
def test_figure_titles_name_means_over_rounds(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "r", rising(0.5, rounds=4)))
    (comparison,) = group_runs([run])
    drawn = draw(comparison, contrasts_of(comparison), tmp_path / "figures")
    titles = [figure.title for figure in drawn]
    assert "Accuracy per domain, mean of all 3 tested rounds (1 to 3)" in titles
    assert not any("Final" in title for title in titles)


def test_clients_that_only_some_runs_have_are_drawn_once(tmp_path: Path) -> None:
    """The second run lacks client 1 of domain a; other clients have means over both runs."""
    folders = [
        give_clients(make_run(tmp_path / f"r{seed}", rising(0.5), seed=seed,
                              clients=dict.fromkeys(range(7), values)), **counts)
        for seed, values, counts in (
            (0, [0.1, 0.2, 0.8], {"a": 2, "b": 1}), (1, [0.3, 0.6], {"a": 1, "b": 1}),
        )
    ]  # fmt: skip
    info = json.loads((folders[1] / "run.json").read_text())
    info["clients"][1]["client_id"] = 2
    (folders[1] / "run.json").write_text(json.dumps(info))
    edit("history.csv", ",client,1,", ",client,2,")(folders[1])
    (comparison,) = group_runs(map(read_run, folders))
    (points,) = plot(comparison, "clients").axes[0].collections
    assert sorted(points.get_offsets()[:, 1].tolist()) == pytest.approx([20, 20, 70])


def test_differences_are_drawn_from_uniform_weights_with_their_intervals(tmp_path: Path) -> None:
    finals = {"fedavg": [0.50, 0.55], "uniform": [0.60, 0.61], "fedheal": [0.70, 0.75]}
    finals = {name: [first, *[last] * 4] for name, (first, last) in finals.items()}
    folders = [
        make_run(tmp_path / f"{name}-{seed}", rising(final), strategy=name, label=name, seed=seed)
        for name, of_seeds in finals.items()
        for seed, final in enumerate(of_seeds)
    ]
    (comparison,) = group_runs(map(read_run, folders))
    worst, _, average = plot(comparison, "differences").axes
    assert [label.get_text() for label in worst.get_yticklabels()] == ["fedavg", "fedheal"]
    by_name = {m.name: [run.final() for run in m.runs] for m in comparison.methods}
    for panel, summary in ((worst, min), (average, np.mean)):
        drawn = [float(container[0].get_xdata()[0]) for container in panel.containers]
        value = {name: np.mean([summary(v) for v in of]) for name, of in by_name.items()}
        expected = [100 * (value[name] - value["uniform"]) for name in ("fedavg", "fedheal")]
        assert drawn == pytest.approx(expected)
    assert "(right is better)" in worst.get_xlabel()
    assert not average.patches, "no margin of what is not judged"
    few = [folder for folder in folders if not folder.name.endswith("-4")]
    for those in (folders[:2], few):  # no baseline; too few pairs for a verdict
        (alone,) = group_runs(map(read_run, those))
        with pytest.raises(ConfigError, match="differences"):
            plot(alone, "differences")


@pytest.mark.usefixtures("undrawn")
def test_only_the_word_of_a_verdict_is_bold_and_metrics_are_defined_once(tmp_path: Path) -> None:
    folders = [
        *runs_with(tmp_path, "uniform", [0.50, 0.51, 0.49, 0.52, 0.50]),
        *runs_with(tmp_path, "fedheal", [0.70, 0.72, 0.69, 0.73, 0.70]),
    ]
    text = html.unescape(write_report(list(map(read_run, folders)), tmp_path / "out").read_text())
    (data,) = re.findall(r"<h2.*?>(.*)</h2>", text)
    assert data == "Data: digits; its 2 domains: a, b"
    listed = re.search(r'<ul class="verdicts">(.*?)</ul>', text, re.DOTALL)
    assert listed
    assert re.findall("<strong>(.*?)</strong>", listed[1]) == ["fairer"]
    assert "fedheal: <strong>fairer</strong> (worst domain, STD) than Uniform." in listed[1]
    assert text.count("so it can be lower than every domain's mean") == 1
    assert "Mixed: " not in text.partition('<details id="how-to-read">')[0]


def test_more_methods_than_colors_are_told_apart(tmp_path: Path) -> None:
    """In bars by hatches, and in points by markers."""
    tests = dict.fromkeys(range(7), [0.5] * 4)
    folders = [
        make_run(tmp_path / f"{k}", rising(0.5), label=f"method{k}", clients=tests)
        for k in range(8)
    ]
    (comparison,) = group_runs(map(read_run, folders))
    bars = plot(comparison, "bars").axes[0].patches
    by_method = {(bar.get_facecolor(), bar.get_hatch()) for bar in bars}
    assert len(by_method) == len(folders)
    points = plot(comparison, "clients").axes[0].collections
    shapes = {(*dots.get_facecolor()[0], dots.get_paths()[0].vertices.tobytes()) for dots in points}
    assert len(shapes) == len(folders)


@pytest.mark.slow
def test_a_run_of_one_round_has_one_accuracy_table(tmp_path: Path) -> None:
    record = {"round": 1, "client_ids": [0], "weights": [1.0], "cosine": [[1.0]], "kept": 0.5}
    folder = make_run(tmp_path / "r", rising(0.5, rounds=2), diagnostics=[record])
    page = Page(write_report([read_run(folder)], tmp_path / "out").read_text("utf-8"))
    assert list(page.table("Accuracy per domain, round 1")) == ["fedheal federation 0"]
    assert not [caption for caption in page.tables if caption.startswith("Accuracy per domain, la")]


def test_terminal_tables_fit_eighty_columns(tmp_path: Path) -> None:
    values = {"mnist": 0.95, "usps": 0.88, "svhn": 0.8, "synlike": 0.64}
    folders = [
        make_run(tmp_path / f"{label}{seed}", constant(**values), label=label, seed=seed)
        for label in ("fedavg", "uniform", "fedequilibria")
        for seed in range(3)
    ]
    console = Console(width=80, color_system=None)
    with console.capture() as capture:
        console.print(terminal_table([read_run(folder) for folder in folders]))
    assert "fedequilibria 95.00 88.00 80.00   64.00 81.75  13.33 64.00 31.00" in capture.get()


@pytest.mark.parametrize("width", [34, 60, 80])
def test_narrow_terminals_show_every_number_beside_its_method(tmp_path: Path, width: int) -> None:
    values = {
        d: 0.5 + i / 70 for i, d in enumerate(["mnist", "usps", "svhn", "syn like", "b", "c"])
    }
    folders = [
        make_run(tmp_path / f"{label}{i}", constant(**values, d=0.9 + i / 100), label=label, seed=i)
        for label in ("fedavg", "uniform", "an-unusual-method-name")
        for i in range(2)
    ]
    wide, narrow = (_printed(folders, columns) for columns in (400, width))
    assert max(map(len, narrow.splitlines())) <= width
    number = rf"(?<![\w.])[{MINUS}+±\[]*\d+\.\d\d(?!\d)"
    assert Counter(re.findall(number, narrow)) == Counter(re.findall(number, wide))
    values_of = [
        re.findall(rf"^{name} .*[\d▲{DASH}]$", narrow, re.MULTILINE)
        for name in ("fedavg", "uniform")
    ]
    tables = len(re.findall(r"^fedavg ", wide, re.MULTILINE))
    assert len(values_of[0]) == len(values_of[1]) > tables  # in every part of a table
    assert "an-unusual-metho" in narrow if width > 34 else "an-" in narrow


@pytest.mark.parametrize(("colors", "bold"), [(None, False), ("standard", True)])
def test_bold_type_is_explained_where_there_is_some(
    tmp_path: Path, colors: Any, bold: bool
) -> None:
    folders = [make_run(tmp_path / label, ALL, label=label) for label in ("fedavg", "fedheal")]
    console = Console(width=400, color_system=colors, force_terminal=bold)
    with console.capture() as capture:
        console.print(terminal_table([read_run(folder) for folder in folders]))
    assert ("\x1b[1m" in capture.get()) == bold
    assert ("Bold: " in capture.get()) == bold
    assert "Test accuracy in %" in capture.get()


def _printed(folders: list[Path], width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(terminal_table([read_run(folder) for folder in folders]))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


@pytest.mark.slow
def test_importing_reports_imports_neither_matplotlib_nor_torch() -> None:
    code = "import sys, fairflower.report; print({'matplotlib', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.usefixtures("undrawn")
def test_markdown_tables_are_well_formed_and_escape_pipes(tmp_path: Path) -> None:
    folders = [
        make_run(
            tmp_path / f"{label[:2]}-{seed}",
            constant(a=0.5, b=0.75 + seed / 10),
            label=label,
            seed=seed,
        )
        for label in ("my|rule", "uniform")
        for seed in (0, 1)
    ]
    write_report([read_run(folder) for folder in folders], tmp_path / "report")
    text = (tmp_path / "report/tables.md").read_text()
    (first, *_) = text.split("\n\n**")
    header, ruler, *rows = [line for line in first.splitlines() if line.startswith("|")]
    assert header.startswith("| method | a | b | AVG |")
    assert {row.replace("\\|", "").count("|") for row in (header, ruler, *rows)} == {
        header.count("|")
    }
    assert rows[1].startswith("| my\\|rule (2 seeds) |")
    assert "| 50.00 ±0.00 | 80.00 ±7.07 |" in rows[1].replace("**", "")


def test_an_error_in_a_note_is_one_line_of_markdown(tmp_path: Path) -> None:
    error = "expected <class 'dict'>, got\n  * a list\n\n# `x` < 3"
    folder = make_run(tmp_path / "r", constant(a=0.5, b=0.9), status="failed", error=error)
    text = markdown_tables([read_run(folder)])
    shown = r"(expected \<class 'dict'>, got \* a list # \`x\` < 3)."
    assert any(line.startswith("- Note: ") and line.endswith(shown) for line in text.splitlines())


def test_every_format_has_the_tables_of_fairness_metrics(tmp_path: Path) -> None:
    clients = {r: [0.1, 0.3, 0.5, 0.9] for r in range(4)}
    folder = make_run(tmp_path / "r", rising(0.5, rounds=4), clients=clients)
    texts = (
        printed_tables(folder, width=400),
        markdown_tables([read_run(folder)]),
        latex([read_run(folder)]),
        page_of(tmp_path / "out", folder).text,
    )
    for text in texts:
        assert "Fairness over 2 domains, mean of all 3 tested rounds (1 to 3)" in text
        assert "Fairness over 4 clients, mean of all 3 tested rounds (1 to 3)" in text
        assert "0.6983" in text  # Jain's index of the clients: 1.8 ** 2 / (4 * 1.16)


def test_bounds_of_an_interval_are_separated_in_markdown(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{label}{i}", constant(a=0.5, b=b ** (i + 1)), label=label, seed=i)
        for label, b in (("fedavg", 0.6), ("uniform", 0.7))
        for i in range(3)
    ]
    text = markdown_tables([read_run(folder) for folder in folders])
    assert re.search(rf" \[[{MINUS}\d.]+, [\d.]+\]; [\d.]+ \|", text)


def test_the_page_shows_class_names_and_test_set_sizes(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"classes": ["backpack", "bike"], "test_sizes": [200, 30]}
    runs = [
        make_run(tmp_path / label, constant(1, a=0.5, b=0.6), label=label, **facts)
        for label in ("fedavg", "uniform")
    ]
    text = page_of(tmp_path / "out", *runs).text
    assert "backpack" in text
    assert "class 0" not in text
    line = "Test examples by domain (points per example): a 200 (0.5), b 30 (3.3)."
    assert line in text
    other = make_run(tmp_path / "other", constant(1, a=0.5, b=0.6), label="term", test_sizes=[2, 3])
    assert "points per example" not in page_of(tmp_path / "out", *runs, other).text
    none = make_run(tmp_path / "none", constant(1, a=0.5, b=0.6), test_sizes=[200, 0])
    assert "points per example" not in printed_tables(none), "of a domain without test examples"


def test_the_size_of_the_model_is_a_line_under_the_first_accuracy_table(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / label, ALL, label=label) for label in ("fedavg", "fedheal")]
    line = (
        "Model: 100,520 bytes in each direction per client and round (25,130 trained parameters)."
    )
    text = markdown_tables([read_run(folder) for folder in folders])
    first, second, *_ = text.split("**Accuracy per domain, last round")
    assert f"\n\n{line}\n\n" in first
    assert line not in second
    assert line in printed_tables(*folders)
    assert line in page_of(tmp_path / "out", *folders).text


def test_only_judged_differences_are_tinted_and_the_best_of_a_column_is_bold(
    tmp_path: Path,
) -> None:
    folders = [
        make_run(tmp_path / f"{label}{i}", constant(a=a, b=0.9), label=label, seed=i)
        for label, values in (
            ("fedavg", (0.5, 0.51, 0.52, 0.53, 0.54)),
            ("uniform", (0.7, 0.72, 0.72, 0.74, 0.74)),
        )
        for i, a in enumerate(values)
    ]
    text = page_of(tmp_path / "out", *folders).text
    assert "<td><strong>72.40</strong>" in text
    tinted = re.findall(r'<td class="(\w+)"><strong>([^<]*)', text)
    assert ("better", "+20.40 ▲") in tinted
    assert all(number[-1] in "▲▼" for _, number in tinted)


def test_the_resolved_config_is_toml_of_what_the_run_recorded(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / "a<b",
        ALL,
        config='[client]\nname = "fedprox"\nmu = 0.25\nrho = "default"\n',
    )
    write_summary([read_run(folder)], tmp_path / "x.csv")

    def settings(text: str) -> dict[str, Any]:
        (shown,) = re.findall(r"<pre>(.*?)</pre>", text, re.DOTALL)
        return flatten_tables(tomllib.loads(html.unescape(shown)))

    recorded = settings(page_of(tmp_path / "out", folder).text)
    given = {
        "run-name": "a<b",
        "num-server-rounds": 6,
        "engine": "ray",
        "data.name": "digits",
        "strategy.name": "fedheal",
        "client.name": "fedprox",
        "client.mu": 0.25,
        "train.lr": 0.01,
    }
    assert recorded == RunConfig().concise() | given
    with mock.patch("fairflower.report.figures.comparison.draw", return_value=[]):
        page = write_report(read_summary(tmp_path / "x.csv"), tmp_path / "out")
    unrecorded = execution_keys() - {"tuned"}
    assert settings(page.read_text("utf-8")) == {
        key: value for key, value in recorded.items() if key not in unrecorded
    }


def test_models_of_different_sizes_are_a_table_by_method(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "f", ALL, label="fedavg", model_bytes=4_000, num_parameters=1_000),
        make_run(tmp_path / "h", ALL),
        make_run(tmp_path / "u", ALL, label="uniform", model_bytes=None),
    ]
    page = page_of(tmp_path / "out", *folders)
    rows = [list(row.values()) for row in page.table("Model").values()]
    assert rows == [
        ["fedavg federation 0", "4,000", "1,000"],
        ["uniform federation 0", DASH, "25,130"],
        ["fedheal federation 0", "100,520", "25,130"],
    ]
    assert "Model:" not in printed_tables(*folders)
    assert "Model" not in printed_tables(folders[2]), "an old run has no model size"
