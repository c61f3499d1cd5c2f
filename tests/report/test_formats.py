"""Tables as LaTeX, CSV and Markdown."""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from command import call
from run_folders import clustered, constant, make_run, rising, with_scores, without_tests

from fairflower.report import Run, read_run
from fairflower.report.analysis import analyze
from fairflower.report.pages import latex, latex_escaped


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Three methods with three seeds: FedHEAL is best on domain a, uniform weights second."""
    starts = {"fedavg": 0.4, "uniform": 0.5, "fedheal": 0.6}
    return [
        make_run(tmp_path / f"{label}-{seed}", rising(a + seed / 100), label=label, seed=seed)
        for label, a in starts.items()
        for seed in range(3)
    ]


def rows(text: str, title: str) -> dict[str, dict[str, str]]:
    """Method -> column -> cell of the LaTeX table whose caption begins with ``title``."""
    body = text[text.index(rf"\caption{{{title}") :]
    head, _, rest = body[body.index(r"\toprule") + 9 :].partition(r"\midrule")
    names = [cell.strip() for cell in head.replace(r"\\", "").split("&")]
    lines = rest[: rest.index(r"\bottomrule")].strip().splitlines()
    cells = [[cell.strip() for cell in line.removesuffix(r"\\").split(" & ")] for line in lines]
    return {row[0]: dict(zip(names, row, strict=True)) for row in cells}


def test_each_latex_caption_stands_alone(runs: list[Path]) -> None:
    captions = re.findall(r"\\caption{(.*)}\n", latex([read_run(run) for run in runs]))
    common = "Test accuracy in \\%. MIN: worst domain. GAP: best minus worst. $\\pm$: standard "
    common += (
        "deviation over 3 seeds (ddof 1). Bold: best comparable method. Underlined: second best."
    )
    own = "Over domains: AVG mean, STD standard deviation."
    scores = [caption for caption in captions if caption.startswith("Accuracy per domain")]
    assert [caption.partition("). ")[2] for caption in scores] == [f"{common} {own}"] * 2
    (fair,) = [caption for caption in captions if caption.startswith("Fairness over 2 domains")]
    assert "3 seeds (ddof 1)" in fair
    assert fair.endswith(
        "Accuracy in \\% over domains: AVG mean, STD standard deviation, MIN lowest, MAX highest, "
        "GAP highest minus lowest."
    )


def assert_valid_latex(text: str) -> None:
    """Assert that environments and braces are closed and that rows have equal lengths."""
    assert re.findall(r"\\begin{(\w+)}", text) == ["table", "tabular"] * text.count(
        r"\begin{table}"
    )
    assert (
        text.count(r"\end{tabular}") == text.count(r"\end{table}") == text.count(r"\begin{table}")
    )
    bare = re.sub(r"\\[{}]", "", text)
    depth = 0
    for character in bare:
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    for spec, body in re.findall(r"\\begin{tabular}{(lr*)}(.*?)\\end{tabular}", text, re.S):
        for row in re.findall(r"^(?!\\multicolumn)(.*) \\\\$", body, re.M):
            assert len(re.findall(r"(?<!\\)&", row)) == len(spec) - 1
    assert text.isascii()


def read(folders: list[Path]) -> list[Run]:
    return [read_run(folder) for folder in folders]


def test_the_best_value_is_bold_the_second_underlined_and_each_has_its_spread(
    runs: list[Path],
) -> None:
    text = latex(read(runs))
    assert_valid_latex(text)
    table = rows(text, "Accuracy per domain, mean")
    # a: the mean of rounds 2 to 6 is 4 points above the start, and the mean over seeds 1 more.
    assert table["fedheal"]["a"] == r"\textbf{65.00} {\scriptsize $\pm$1.00}"
    assert table["uniform"]["a"] == r"\underline{55.00} {\scriptsize $\pm$1.00}"
    assert table["fedavg"]["a"] == r"45.00 {\scriptsize $\pm$1.00}"
    assert table["fedheal"]["GAP"].startswith(r"\textbf{25.00}")  # smaller is better
    assert all(row["b"].startswith(r"\textbf{90.00}") for row in table.values())
    differences = rows(text, "Difference from the baselines")
    assert differences["uniform"]["MIN vs FedAvg"].startswith("+10.00 {")


def test_no_value_is_underlined_among_only_two_methods(runs: list[Path]) -> None:
    assert r"\underline" not in latex(read(runs[:6]))
    cells = [
        c
        for t in analyze(read(runs)).chapters[0].tables
        for g in t.groups
        for r in g.rows
        for c in r.cells
    ]
    assert any(cell.second for cell in cells)
    assert not any(cell.second and cell.tone for cell in cells)


def test_every_kind_of_table_is_valid_latex(tmp_path: Path) -> None:
    """Grids with headings, clusters, scores, marks, and names with special characters of LaTeX."""
    folders = [
        make_run(
            tmp_path / f"{client}-{strategy}", rising(a), label=f"{client}+{strategy}",
            strategy=strategy, config=f'[client]\nname = "{client}"\n',
        )
        for a, client in ((0.4, "moon"), (0.5, "fedprox"))
        for strategy in ("fedavg", "uniform", "fedmgda+")
    ]  # fmt: skip
    folders.append(clustered(tmp_path / "c", [[0, 0, 1, 1]] * 6))
    folders.append(
        make_run(tmp_path / "d", without_tests(constant(a_1=0.5, **{"b&c": 0.4}), a_1=[5]))
    )
    scored = make_run(tmp_path / "e", constant(x=0.5))
    folders.append(with_scores(scored, balanced_accuracy=constant(x=0.4), auc=constant(x=0.7)))
    text = latex(read(folders))
    assert_valid_latex(text)
    for piece in (r"\multicolumn{", r"a\_1 & b\&c", r"$^\dagger$", "x AUC", "Clusters"):
        assert piece in text


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_pdflatex_compiles_the_tables(runs: list[Path], tmp_path: Path) -> None:
    text = (
        f"\\documentclass{{article}}\\usepackage{{booktabs}}\\begin{{document}}{latex(read(runs))}"
    )
    (tmp_path / "x.tex").write_text(text + "\\end{document}")
    command = ["pdflatex", "-halt-on-error", "x.tex"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


def test_special_characters_of_latex_are_escaped() -> None:
    assert latex_escaped("a_b & 50 % {x} #1 $ ~^\\") == (
        r"a\_b \& 50 \% \{x\} \#1 \$ \textasciitilde{}\textasciicircum{}\textbackslash{}"
    )


def test_csv_has_a_row_for_each_method(runs: list[Path], tmp_path: Path) -> None:
    text = call("report", str(tmp_path), "--format", "csv")
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(text))}
    assert list(rows) == ["fedavg", "uniform", "fedheal"]
    assert float(rows["fedheal"]["a mean"]) == pytest.approx(65)
    assert float(rows["fedheal"]["a std"]) == pytest.approx(1)
    assert float(rows["fedavg"]["MIN mean"]) == pytest.approx(45)
    assert rows["uniform"]["seeds"] == "3"


@pytest.mark.parametrize(
    ("name", "begin"),
    [("latex", "% In the preamble"), ("md", "**Accuracy per domain"), ("csv", "method,seeds,a")],
)
def test_a_format_is_printed_alone_or_written_to_a_file(
    runs: list[Path], tmp_path: Path, name: str, begin: str
) -> None:
    printed = call("report", str(tmp_path), f"--format={name}")
    assert printed.startswith(begin)
    assert not (tmp_path / "report").exists()
    out = tmp_path / "table.txt"
    assert str(out) in call("report", str(tmp_path), f"--format={name}", f"--out={out}")
    assert out.read_text() == printed


def test_an_unknown_format_and_a_format_with_a_summary_are_refused(runs: list[Path]) -> None:
    output = call("report", str(runs[0]), "--format=latx", expect=2)
    assert "'latx' is not one of 'html', 'latex', 'csv', 'md'" in " ".join(
        output.replace("│", "").split()
    )
    output = call("report", str(runs[0]), "--format=csv", "--summary=x.csv", expect=2)
    assert "--format csv cannot be combined with --summary or --into" in " ".join(output.split())
