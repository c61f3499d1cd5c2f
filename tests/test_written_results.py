"""experiments/*.md match their summaries, and no verdict is written by hand."""

from __future__ import annotations

import importlib
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import mean
from unittest import mock

import numpy as np
import pytest
from experiment_files import LEADERBOARD

from experiments import tasks
from experiments.leaderboard.analysis import Findings, primary, secondary
from experiments.leaderboard.benchmarks import ranks
from experiments.leaderboard.design import Benchmark, Design
from experiments.leaderboard.document import text as text_of
from experiments.leaderboard.ledger import Ledger
from experiments.leaderboard.sentences import changes_over_all
from experiments.leaderboard.stages import Stages
from experiments.leaderboard.tables import summary as counted
from fairflower.config import DataConfig
from fairflower.data import prepare
from fairflower.numerics.metrics import MIN, STD0, WORST_HALF, Summary
from fairflower.plans.plan import parse_seeds
from fairflower.report.analysis import Chapter, analyze
from fairflower.report.cells import format_number
from fairflower.report.contrasts import PLAIN_TITLE, Contrast, Measure, Metric, signed
from fairflower.report.pages import GENERATED, generated_markdown
from fairflower.report.reading import Run
from fairflower.report.summary import read_summary
from fairflower.statistics import Difference, MeanStd, holm, judged_as_family
from fairflower.statistics import differences as paired_differences

#: Summaries of which documents tell intervals.
SUMMARIES = (
    *("heart-disease", "fisher-readings-office", "fisher-readings-digits"),
    *("gsam-uci-digits", "gsam-digits", "references-heart-disease"),
    "references-uci-digits",
)

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
#: Tests below check the first; protocol and attacks report no runs; ``benchmarks/`` writes the last
#: two.
WITHOUT_SUMMARY = {
    EXPERIMENTS / f"{name}.md"
    for name in (
        *("README", "results", "what-holds", "protocol", "secure-aggregation"),
        *("error-rates", "liars"),
    )
}
#: The long tables of a page are in a file of the same name.
TABLES = sorted((EXPERIMENTS / "tables").glob("*.md"))
DOCUMENTS = [*sorted(set(EXPERIMENTS.glob("*.md")) - WITHOUT_SUMMARY), *TABLES]

OLD = (
    "Measured before version 0.1.0 on another machine (x86-64, its processor was not recorded); "
    "not regenerated. Today three seeds give no verdict; the verdicts below follow the earlier "
    "rule, which they state."
)

#: Files whose run folders are gone. One that is measured again leaves the list.
MEASURED_BEFORE = {
    "fedequilibria-digits-cpu.md",
    "fedequilibria-office-cpu.md",
    "fedgcr-digit-five-cpu.md",
    "fedheal-digits-cpu.md",
}


def parts(text: str) -> Iterator[tuple[str, str]]:
    """Yield the summary and the text of every generated part."""
    for part in GENERATED.finditer(text):
        yield part["summary"], part["text"]


#: Beginnings of lines that a program wrote: tables, captions, verdicts and legend.
WRITTEN = (
    "|",
    "- ",
    "Test accuracy of",
    "Percentage points,",
    "Differences are paired",
    "In %. ACC",
)


def by_hand(path: Path) -> str:
    """Return the text that was written by hand."""
    lines = GENERATED.sub("", path.read_text(encoding="utf-8")).splitlines()
    written = WRITTEN if path.name in MEASURED_BEFORE else ()
    return "\n".join(line for line in lines if not line.startswith(written))


@cache
def findings_in(source: Path) -> Findings:
    return Findings(Stages(Design.read(LEADERBOARD), Ledger(source)))


read_once = cache(read_summary)


@pytest.fixture(autouse=True)
def _summaries_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairflower.report.pages.read_summary", read_once)
    monkeypatch.setattr(tasks, "read_summary", read_once)


def summary_of(name: str) -> list[Run]:
    return read_once(EXPERIMENTS / f"{name}.csv")


@cache
def chapter_of(name: str) -> Chapter:
    (chapter,) = analyze(summary_of(name)).chapters
    return chapter


def written(source: Path) -> str:
    """Return the text made from a summary or, as a leaderboard's ``--report``, from rows."""
    if source.name == "federations.csv":
        return text_of(findings_in(source))
    if source.name.startswith("tasks-"):
        return tasks.text(source)
    if source.name.startswith("privacy-"):
        with mock.patch.object(sys, "path", [str(EXPERIMENTS), *sys.path]):
            privacy_price = importlib.import_module("privacy_price")
        with mock.patch.object(privacy_price, "read_summary", read_once):
            return str(privacy_price.text(source))
    return generated_markdown(source)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tables_and_verdicts_match_the_summary(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    written_parts = dict(parts(text))
    for summary, part in written_parts.items():
        source = path.parent / summary
        assert part == written(source), f"run fairflower report {summary} --into {path.name}"
    if path.name in MEASURED_BEFORE:
        assert OLD in " ".join(text.split())
    elif EXPERIMENTS / "tables" / path.name in TABLES and path not in TABLES:
        assert f"(tables/{path.name}" in text
    else:
        assert written_parts, f"{path.name} has no part that is generated from a summary"
        assert "not regenerated" not in text


def test_every_summary_is_in_a_document_and_every_old_document_exists() -> None:
    used = {
        (path.parent / summary).resolve()
        for path in DOCUMENTS
        for summary, _ in parts(path.read_text(encoding="utf-8"))
    }
    assert used == {path.resolve() for path in EXPERIMENTS.glob("*.csv")}
    assert {path.name for path in DOCUMENTS} >= MEASURED_BEFORE


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_no_verdict_is_written_by_hand(path: Path) -> None:
    prose = by_hand(path)
    assert not re.search(r"\*\*Verdict|▲|▼|beyond the noise|points|[+\N{MINUS SIGN}]\d", prose)


def index() -> dict[str, str]:
    """Return page -> answer, from the table of the experiments' index."""
    text = (EXPERIMENTS / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| .+? \| (.+?) \| \[(.+?)\]\(\2\) \| .+? \| .+? \|$", text, re.MULTILINE)
    return {page: answer for answer, page in rows}


def test_every_page_of_experiments_is_in_the_index_and_begins_with_its_answer() -> None:
    pages = {path.name for path in EXPERIMENTS.glob("*.md")}
    assert index().keys() == pages - {"README.md", "protocol.md", "results.md"}
    for page, answer in index().items():
        _, first, *_ = (EXPERIMENTS / page).read_text(encoding="utf-8").split("\n\n")
        assert " ".join(first.split()).lower() == f"in short: {answer}".lower(), page


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("heart-disease-cpu", "heart-disease"),
        ("fisher-readings-digits", "fisher-readings-digits"),
        ("fisher-readings-office", "fisher-readings-office"),
    ],
)
def test_the_verdicts_counted_in_the_index_are_those_of_the_runs(page: str, name: str) -> None:
    words = ("fairer", "less fair", "equivalent", "undecided")
    clauses = [
        clause
        for verdict in chapter_of(name).verdicts[""]
        for clause in re.sub(r" \([^)]*\)", "", verdict.conclusion).split(", ")
    ]
    found = Counter(
        word
        for clause in clauses
        for word in words
        if re.match(rf"{word} \w+ (\w+ and )?Uniform$", clause)
    )
    counts = ", ".join(f"{found[word]} {word}" for word in words)
    assert f"Against uniform weights: {counts}." in index()[f"{page}.md"]


# --- files whose run folders are gone: their sentences follow from their own tables --------------


FAIRNESS = Measure(
    "",
    (
        Metric("worst domain", title="MIN", of=lambda run: 0.0),
        Metric("STD", -1, of=lambda run: 0.0),
        Metric("average", title="AVG", of=lambda run: 0.0, judged=False),
    ),
    (),
)


def parse_difference(cell: str, better: int, n: int) -> Difference:
    """``**−16.42 ▼** ±1.14`` or ``+0.83``: marks tell whether it counts."""
    plain = cell.replace("*", "").replace("\N{MINUS SIGN}", "-")
    mark = {"▲": better, "▼": -better}.get("".join(re.findall("[▲▼]", plain)), 0)
    mean, *std = re.sub("[▲▼ ]", "", plain).split("±")
    one = MeanStd(float(mean), float(std[0]) if std else math.nan, n)
    assert not mark or mark * one.mean > 0
    return Difference(one.mean, one.std, n, math.nan, math.nan, 1.0 - abs(mark))


def sign(one: Difference) -> int:
    """Return the sign of a difference that counted by the earlier criterion, from three seeds."""
    return int(math.copysign(1, one.mean)) if one.p < 0.05 and one.n >= 3 else 0


def judgment(one: Contrast) -> tuple[str, str]:
    """Return the judgment in its earlier wording, and its preposition."""
    if one.n < 3:
        return "too few seeds to tell (3 needed)", "against"
    pairs = list(zip(one.measure.metrics, one.differences, strict=True))
    judged = [(f.name, f.better * sign(d)) for f, d in pairs if f.judged]
    better, worse = (", ".join(n for n, side in judged if side == s) for s in (1, -1))
    if better and worse:
        return f"mixed ({better} better; {worse} worse)", "compared with"
    if better or worse:
        return f"{one.measure.words[not better]} ({better or worse})", "than"
    return "not distinguishable", "from"


def worth(contrasts: Mapping[str, Contrast]) -> str:
    methods: dict[tuple[str, str], list[str]] = {}
    for name, one in contrasts.items():
        methods.setdefault(judgment(one), []).append(name)
    return ", ".join(
        f"{what} {word} {(' or ' if what.startswith('not') else ' and ').join(names)}"
        for (what, word), names in methods.items()
    )


def tables(text: str, title: str) -> Iterator[list[list[str]]]:
    """Yield the cells of the tables under lines that begin with the title, header first."""
    for match in re.finditer(rf"^\*\*{title}[^\n]*\n\n((?:^\|.*\n)+)", text, re.MULTILINE):
        lines = match[1].splitlines()
        yield [[c.strip() for c in line.split("|")[1:-1]] for line in (lines[0], *lines[2:])]


def differences(text: str) -> dict[str, dict[str, Contrast]]:
    """Return method -> baseline -> contrast from the table of differences, if there is one."""
    contrasts: dict[str, dict[str, Contrast]] = {}
    for header, *rows in tables(text, "Difference from the baselines"):
        baselines = [title.rpartition(" ")[2] for title in header[1::3]]
        for name, *cells in rows:
            label, n = re.fullmatch(r"(\S+) \((\d+) paired\)", name).groups()  # type: ignore[union-attr]
            triples = zip(baselines, (cells[i : i + 3] for i in range(0, len(cells), 3)))  # noqa: B905
            contrasts[label] = {
                baseline: Contrast(
                    FAIRNESS,
                    tuple(
                        parse_difference(c, b, int(n))
                        for c, b in zip(triple, (1, -1, 1), strict=True)
                    ),
                )
                for baseline, triple in triples
                if triple[0] != "\N{EN DASH}"
            }
    return contrasts


def sentence(name: str, against: Mapping[str, Contrast]) -> str:
    worst = ", ".join(f"{signed(c.differences[0])} points against {b}" for b, c in against.items())
    spread = " and ".join(signed(c.differences[1]) for c in against.values())
    lower = " and ".join(f"{b}'s" for b, c in against.items() if sign(c["AVG"].difference) < 0)
    (n,) = {c.n for c in against.values()}
    return (
        f"- {name}: worst domain {worst}, STD {spread} ({n} seed{'s' * (n > 1)}): "
        f"{worth(against)}{f', with an average below {lower}' if lower else ''}."
    )


def what_counts(text: str) -> list[str]:
    """Return a sentence on each of FedGCR's tables."""
    lines = []
    for dif in (1, 5, 10):
        ((header, *rows),) = tables(text, f"DIF {dif}:")
        words = []
        for column, more in (("σ type vs FedAvg", -1), ("worst vs FedAvg", 1)):  # noqa: RUF001
            at = header.index(column)
            signs = {
                row[0]: sign(parse_difference(row[at], more, 3)) for row in rows if "±" in row[at]
            }
            for way, word in ((1, "higher"), (-1, "lower")):
                names = ", ".join(name for name, marked in signs.items() if marked == way)
                if names:
                    words.append(f"{column.partition(' vs')[0]} is {word} with {names}")
        lines.append(f"- DIF {dif}, against FedAvg: {'; '.join(words)}; nothing else counts.")
    return lines


ALONE = ("",)
TABLE_2 = (ALONE, ("fedavg", "uniform", "afl", "qffl", "fedheal"), "{}")
FEDBN = ("fedbn+fedavg", "silobn+fedavg", "fedbn+uniform", "silobn+uniform")
POLICIES = ("uniform", "by-examples", "power-of-choice")
FEDISM = ("fedavg", "fedism", "gsam+fedavg", "gsam+fedism")
GR, GC = "fedgcr:num-clusters=5", "fedgc:num-clusters=5+"

#: Page of three seeds -> what its tables are about, and of which rows the answer tells.
#: HAM10000's other tables have other shares of noisy clients.
SEEN = {
    "fedheal-table2-digits-cpu": TABLE_2,
    "fedheal-table2-office-cpu": TABLE_2,
    "local-norms-cpu": (("Digits, personal models", "Office-Caltech"), FEDBN, "{}"),
    "power-of-choice-cpu": (ALONE, POLICIES, "uniform (participation.policy={})"),
    "lora-texts-cpu": (ALONE, ("fedavg", "uniform", "fedheal", "fedism"), "{}"),
    "randhie-cpu": (("by health", "by place"), ("fedavg", "uniform", "afl", "fedheal"), "{}"),
    "precision": (("`cnn`", "`resnet10`"), ("float32", "bf16"), "fedavg (train.precision={})"),
    "fedism-ham10000": (ALONE, FEDISM, "{}"),
    "fedgcr-table5-cpu": (ALONE, ("fedavg", GR, f"{GC}fedavg", GC + GR), "{}"),
}


def means(page: str) -> Iterator[dict[str, dict[str, str]]]:
    """Yield row -> column -> mean of the page's tables of accuracy in the last tested rounds."""
    path = EXPERIMENTS / "tables" / f"{page}.md"
    text = (path if path in TABLES else EXPERIMENTS / f"{page}.md").read_text(encoding="utf-8")
    kind = "of personal models" if page == "local-norms-cpu" else "per domain"
    for header, *rows in tables(text, f"Accuracy {kind}, mean"):
        yield {
            row[0].removesuffix(" (3 seeds)"): {
                column: cell.replace("*", "").partition(" ")[0]
                for column, cell in zip(header, row, strict=True)
            }
            for row in rows
        }


def brief(row: Mapping[str, str], columns: tuple[str, str]) -> str:
    return " / ".join(f"{float(row[column]):.1f}" for column in columns)


@pytest.mark.parametrize("page", SEEN)
def test_the_answer_of_three_seeds_is_that_of_the_tables(page: str) -> None:
    titles, rows, label = SEEN[page]
    parts = []
    for title, table in zip(titles, means(page), strict=False):
        cells = (f"{row} {brief(table[label.format(row)], ('MIN', 'STD ddof 1'))}" for row in rows)
        parts.append(f"{title}: {', '.join(cells)}".removeprefix(": "))
    assert len(parts) == len(titles)
    answer = f"Three seeds, no verdict. Seen (MIN / STD): {'; '.join(parts)}."
    assert index()[f"{page}.md"] == answer


@pytest.mark.parametrize("page", ["fedheal-table2-digits-cpu", "fedheal-table2-office-cpu"])
def test_our_numbers_beside_the_papers_table_2_are_those_of_the_tables(page: str) -> None:
    (ours,) = means(page)
    text = (EXPERIMENTS / f"{page}.md").read_text(encoding="utf-8")
    ((_, *rows),) = tables(text, "AVG / STD")
    assert [row[0] for row in rows] == [
        *("sgd", "fedprox", "scaffold", "moon", "feddyn", "fedproc", "fedproto")
    ]
    for client, _, fedavg, _, fedheal in rows:
        for strategy, written in (("fedavg", fedavg), ("fedheal", fedheal)):
            name = f"{client}+{strategy}".removeprefix("sgd+")
            assert written == brief(ours[name], ("AVG", "STD ddof 1"))


@pytest.mark.parametrize("name", sorted(MEASURED_BEFORE))
def test_the_sentences_of_an_old_document_match_its_tables(name: str) -> None:
    text = GENERATED.sub("", (EXPERIMENTS / name).read_text(encoding="utf-8"))
    rows = differences(text)
    if "fedgcr" in name:
        expected = what_counts(text)
    else:
        expected = [sentence(method, against) for method, against in rows.items()]
    assert expected
    actual = [line for line in text.splitlines() if line.startswith("- ")]
    assert actual == expected


@pytest.fixture(scope="module")
def findings() -> Findings:
    return findings_in(EXPERIMENTS / "federations.csv")


@pytest.fixture(scope="module")
def summary() -> str:
    """Return the text of the page that sums up all results."""
    return words_of("docs/results.md")


def words_of(name: str) -> str:
    return " ".join((EXPERIMENTS.parent / name).read_text(encoding="utf-8").split())


def number(value: float) -> str:
    return format_number(value, 1)


def bounds(one: Difference) -> str:
    return f"[{number(one.low)}, {number(one.high)}]"


def interval(one: Difference, sign: int = 1, unit: str = " points") -> str:
    low, high = sorted((sign * one.low, sign * one.high))
    return f"{number(sign * one.mean)}{unit} [{number(low)}, {number(high)}]"


def outcome(one: Difference) -> str:
    if one.sign:
        return "better" if one.sign > 0 else "worse"
    return "equivalent" if one.equivalent else "undecided"


def signed_number(value: float) -> str:
    return "+" * (value > 0) + number(value)


def test_the_counts_in_the_summary_match_the_leaderboard(findings: Findings, summary: str) -> None:
    for row in counted(findings).groups[0].rows:
        assert f"| {' | '.join([row.name, *(cell.text for cell in row.cells)])} |" in summary
    all_of_them = [one for b in findings.benchmarks for one in findings.judged(b).values()]
    gains = [one for one in all_of_them if one.sign > 0]
    losses = [one for one in all_of_them if one.sign < 0]
    below = [sum(one.high < 2 for one in gains), sum(one.low > -2 for one in losses)]
    together = judged_as_family(
        {(b.name, *key): one for b in findings.benchmarks for key, one in alone(findings, b)}
    )
    left = [sum(one.sign == sign for one in together.values()) for sign in (1, -1)]
    better = [row.cells[0].text for row in counted(findings).groups[0].rows]
    stay = sum(int(count) for text in better for count in re.findall(r"\((\d+)\)", text))
    assert max(one.low for one in gains) < 1
    assert (
        f"{len(gains)} of {len(all_of_them)} comparisons show a gain over uniform weights "
        f"({left[0]} if all {len(together)} are corrected together), {stay} also with its other "
        f"settings, none is shown to be as large as one point, and {below[0]} are shown to be "
        "below two" in summary
    )
    small = f"{below[0]} of the {len(gains)} gains and {below[1]} of the {len(losses)} losses "
    assert f"{small}are shown to be below two points" in summary
    within = sum(one.low > -2 and one.high < 2 for one in all_of_them)
    equivalent = [one for one in all_of_them if one.equivalent and not one.sign]
    inside = sum(one.low > -2 and one.high < 2 for one in equivalent)
    assert (
        f"Of the {len(all_of_them)} intervals {within} lie within two points: {inside} of the "
        f"{len(equivalent)} equivalent ones" in summary
    )
    assert f"and {sum(below)} others, as {small}are" in summary
    assert within == inside + sum(below)
    results = words_of("experiments/results.md")
    assert f"{small}lie within two points" in results
    assert f"as do {within} of all {len(all_of_them)} intervals" in results
    assert f"is {max(one.low for one in gains):.2f} points (SCAFFOLD on Digits)" in results
    assert (
        f"{left[0]} of the {len(gains)} gains and {left[1]} of the {len(losses)} losses would be"
        in results
    )
    gone = {
        (b.name, m): one.sign
        for b in findings.benchmarks
        for m, one in findings.judged(b).items()
        if one.sign != together[b.name, WORST_HALF.title, m].sign
    }
    assert gone == {
        **dict.fromkeys((("randhie-site", m) for m in ("fedism", "scaffold+uniform")), 1),
        **dict.fromkeys(
            (
                ("heart-disease", m)
                for m in ("gsam+fedism", "qffl:rule=weights", "scaffold+uniform")
            ),
            1,
        ),
        **{("digit-five", "afl"): 1, ("uci-digits", "fedavg"): -1},
        ("digit-five", "scaffold+uniform"): -1,
    }


def alone(
    findings: Findings, benchmark: Benchmark, overlap: float | None = None
) -> Iterator[tuple[tuple[str, str], Difference]]:
    """Yield the primary metric's differences from uniform weights before any correction."""
    metrics, overlap = [primary(findings.design)], benchmark.overlap if overlap is None else overlap
    yield from findings._alone(
        findings.accuracies(benchmark), metrics, overlap, findings.design.reference
    ).items()


def test_who_gains_and_who_loses_is_said_of_each_benchmark(
    findings: Findings, summary: str
) -> None:
    changed = {
        b.name: {
            sign: {m for m, one in findings.judged(b).items() if one.sign == sign}
            for sign in (1, -1)
        }
        for b in findings.benchmarks
    }
    assert (len(changed["randhie-site"][1]), len(changed["randhie"][-1])) == (7, 4)
    assert changed["uci-digits"] == {1: {"gsam+fedism"}, -1: {"fedavg"}}
    assert changed["digits"][1] == {"scaffold+uniform", "gsam+fedism"}
    assert changed["digits"][-1] == {"fedavg", "fedheal", "fedgcr", "fedequilibria"}
    assert changed["digit-five"] == {1: {"gsam+fedism", "afl"}, -1: {"scaffold+uniform"}}
    assert not any(changed["office-caltech"].values())
    within = sum(
        one.low > -2 and one.high < 2
        for b in findings.benchmarks
        for one in findings.judged(b).values()
    )
    readme = words_of("README.md")
    assert f"differ little from uniform weights: {within} of 84 intervals lie within two" in readme
    worse = [name for name, signs in changed.items() if "fedavg" in signs[-1]]
    assert len(worse) == 3
    assert "FedAvg is never better than uniform weights, and worse on three benchmarks" in readme
    assert not any("fedavg" in signs[1] for signs in changed.values())


def test_the_page_on_methods_lists_where_each_is_better_or_worse(findings: Findings) -> None:
    page = (EXPERIMENTS.parent / "docs" / "which-method.md").read_text(encoding="utf-8")
    _, _, table = page.partition("<!-- table: first -->")
    rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    judged = {b.name: findings.judged(b) for b in findings.benchmarks}
    assert {row[0].strip("`") for row in rows} == set(judged["digits"])
    for method, *_, better, worse in rows:
        for listed, sign in ((better, 1), (worse, -1)):
            names = [name for name, of in judged.items() if of[method.strip("`")].sign == sign]
            assert listed == (", ".join(names) or "none")


def test_the_sweeps_in_the_documents_match_the_leaderboard(
    findings: Findings, summary: str
) -> None:
    results = words_of("experiments/results.md")
    swept = {sweep.name: findings.swept(sweep) for sweep in findings.stages.sweeps}
    tables = swept.pop("uci-digits")
    images = {(name, *key): one for name, judged in swept.items() for key, one in judged.items()}
    for differences, federations in ((tables, 16), (images, 8)):
        assert {one.n for one in differences.values()} == {federations}
        assert not any(one.low > 2 for one in differences.values())
        excluded = sum(one.high <= 2 for one in differences.values())
        phrase = f"for {excluded} of the {len(differences)} differences"
        assert phrase in summary
        assert phrase in results

    excluded_at = Counter(place for (place, _), one in tables.items() if one.high <= 2)
    assert excluded_at["data.clients-per-domain=4"] == 5
    assert not excluded_at["data.clients-per-domain=1"] + excluded_at["train.local-epochs=8"]
    largest_at = max(tables, key=lambda key: tables[key].high)
    assert largest_at == ("train.local-epochs=8", "qffl:rule=weights")
    assert f"could be as large as {number(tables[largest_at].high)} points" in summary
    assert f"local epochs, {interval(tables[largest_at])})" in results
    ((key, fedavg),) = ((key, one) for key, one in tables.items() if one.sign)
    assert key == ("data.clients-per-domain=4", "fedavg")
    assert f"is worse, by {interval(fedavg, -1)}" in results

    outcomes = Counter((method, outcome(one)) for (*_, method), one in images.items())
    for method, conclusion in (
        *(("fedavg", "worse"), ("fedheal", "worse")),
        *(("afl", "equivalent"), ("qffl:rule=weights", "equivalent")),
    ):
        assert outcomes[method, conclusion] == 9
    assert outcomes["fedequilibria", "worse"] == 0
    unjudged: dict[tuple[str, str, str], Difference] = {}
    for sweep in findings.stages.sweeps:
        if sweep.name != "uci-digits":
            unjudged |= {
                (sweep.name, *key): one for key, one in findings.swept_alone(sweep).items()
            }
    as_one = judged_as_family(unjudged)
    assert as_one.keys() == images.keys()
    excluded = sum(one.high <= 2 for one in as_one.values())
    assert f"for {excluded} if corrected over all {len(as_one)}" in summary
    assert f"for {excluded} if they are corrected as one" in results
    families = [len(of) for name, of in swept.items()]
    assert f"three families of tests ({', '.join(map(str, families[:-1]))} and" in results
    largest_at = max(images, key=lambda key: images[key].high)
    assert largest_at == ("digits", "data.dirichlet-alpha=0.1", "fedequilibria")
    largest = images[largest_at]
    assert f"could gain {number(largest.high)} points, {interval(largest)}" in results
    lowest_at = min(images, key=lambda key: images[key].mean)
    assert lowest_at == ("digits-hard-first", "data.imbalance-factor=3", "fedavg")
    assert f"FedAvg by up to {interval(images[lowest_at], -1)}" in results


def test_the_results_in_the_summary_match_the_leaderboard(findings: Findings, summary: str) -> None:
    named = {benchmark.name: benchmark for benchmark in findings.benchmarks}
    health, site, digits, hospitals, images, five = (
        findings.judged(named[name])
        for name in (
            *("randhie", "randhie-site", "uci-digits", "heart-disease", "digits"),
            "digit-five",
        )
    )
    both = [*health.values(), *site.values()]
    assert all(max(-one.low, one.high) < 2 for one in both)
    loss, gain = (
        math.ceil(10 * max(ends)) / 10
        for ends in zip(*((-one.low, one.high) for one in both), strict=True)
    )
    assert f"a loss of more than {number(loss)} or a gain of more than {number(gain)} po" in summary
    by_place = findings.judged_secondary(named["randhie-site"])
    worst = interval(by_place["worst domain", "afl"])
    average = interval(by_place["average", "afl"], -1, "")
    results = words_of("experiments/results.md")
    assert f"AFL gains {worst}, and its average loses {average}" in results
    fedavg = {name: outcome(findings.judged(b)["fedavg"]) for name, b in named.items()}
    assert "better" not in fedavg.values()
    worse = {name for name, conclusion in fedavg.items() if conclusion == "worse"}
    assert worse == {"randhie", "uci-digits", "digits"}
    others = {
        name: [family["fedavg"].sign for family in findings.other_references(b).values()]
        for name, b in named.items()
    }
    assert sorted(others["digit-five"]) == [0, 1]
    assert {*others["heart-disease"]} == {-1}
    assert {*others["uci-digits"]} == {0}
    assert not any(1 in signs for name, signs in others.items() if name != "digit-five")
    assert f"end: {interval(digits['fedheal'])} on the UCI digits" in summary
    gsam = [interval(judged["gsam+fedism"], unit="") for judged in (images, five)]
    assert (
        f"gains {interval(digits['gsam+fedism'])} on the UCI digits, {gsam[0]} on Digits and "
        f"{gsam[1]} on Digit-Five" in summary
    )
    gain = interval(images["scaffold+uniform"], unit="")
    loss = interval(five["scaffold+uniform"], -1, unit="")
    assert f"uniform weights gains {gain} on Digits and loses {loss} on Digit-Five" in summary
    for name in ("digits", "digit-five"):
        average = mean(map(mean, findings.accuracies(named[name])["fedavg"].values()))
        assert f"FedAvg averages {number(average)} % over the domains" in results
    assert [outcome(one) for one in hospitals.values()].count("better") == 7


def test_the_conclusions_over_benchmarks_match_the_leaderboard(
    findings: Findings, summary: str
) -> None:
    results = words_of("experiments/results.md")
    assert (len(findings.benchmarks), len(findings.sources)) == (7, 5)
    judged = findings.judged_over_benchmarks
    by_conclusion = {
        word: {method for method, one in judged.items() if outcome(one) == word}
        for word in ("better", "worse", "equivalent", "undecided")
    }
    assert not by_conclusion["better"] | by_conclusion["worse"]
    assert by_conclusion["equivalent"] == {"fedgcr", "afl", "fedga"}
    stay = {m for m in judged if not changes_over_all(findings, m)}
    assert stay == {"fedavg", "fedheal", "gsam+fedism", "scaffold+uniform"}
    ordered = sorted(judged, key=lambda method: judged[method].mean)
    assert (ordered[0], ordered[-1]) == ("fedavg", "gsam+fedism")
    assert max(judged, key=lambda method: judged[method].detectable) == "scaffold+uniform"
    highest = max(judged, key=lambda method: judged[method].high)
    assert highest == "scaffold+uniform"
    assert f"limit of an interval is {number(judged[highest].high)} points (SCAFFOLD)" in summary
    ranked = ranks({"uniform": [0.0] * 5, **findings.over_sources()})
    mine, count = ranked.mean["uniform"], len(ranked.mean)
    assert ranked.critical > max(mine - 1, count - mine)
    assert f"differ (Friedman, p = {format_number(ranked.p, 3)}); with five data sets" in results
    low = judged["fedavg"]
    largest, lowest = interval(judged["gsam+fedism"]), f"{signed_number(low.mean)} {bounds(low)}"
    assert f"the largest, {largest}, and FedAvg the smallest, {lowest}" in summary
    by_model = findings.over_by_mixed_model
    assert not any(one.sign for one in by_model.values())
    more = {method for method, one in by_model.items() if one.equivalent}
    assert more - by_conclusion["equivalent"] == {"fedequilibria", "aaggff", "qffl:rule=weights"}
    assert more > by_conclusion["equivalent"]
    width = by_model["fedavg"].high - by_model["fedavg"].mean
    assert f"intervals of ±{width:.2f} points" in results


def test_the_table_in_what_holds_matches_the_leaderboard(findings: Findings) -> None:
    methods = ("fedheal", "fedequilibria", "gsam+fedism", "fedism", "fedgcr")
    rows = []
    for benchmark in findings.benchmarks:
        judged = findings.judged(benchmark)
        cells = [f"{outcome(judged[m])} {signed_number(judged[m].mean)}" for m in methods]
        rows.append(f"| {' | '.join([benchmark.name, *cells])} |")
    text = (EXPERIMENTS / "what-holds.md").read_text(encoding="utf-8")
    header, *table = [line for line in text.splitlines() if line.startswith("| ")]
    assert table[: len(rows)] == rows
    rows = [header]
    for benchmark in findings.benchmarks:
        pairs = (findings.against(benchmark, method, "fedavg") for method in methods)
        cells = [f"{signed_number(one.mean)} {bounds(one)}" for one in pairs if one]
        rows.append(f"| {' | '.join([benchmark.name, *cells])} |")
    assert table[len(findings.benchmarks) :] == rows


def test_the_gains_over_fedavg_in_what_holds_match_the_leaderboard(findings: Findings) -> None:
    page = (EXPERIMENTS / "what-holds.md").read_text(encoding="utf-8")
    text, named = " ".join(page.split()), {b.name: b for b in findings.benchmarks}

    def gain(benchmark: str, method: str) -> str:
        one = findings.against(named[benchmark], method, "fedavg")
        assert one
        assert one.sign > 0
        return number(one.mean)

    hospitals, digits, health = (
        gain(name, "fedequilibria") for name in ("heart-disease", "digits", "randhie")
    )
    assert (
        f"at the hospitals ({hospitals} points), on Digits ({digits}) and, little, by self-rated "
        f"health ({health})" in text
    )
    uci, digits = (gain(name, "fedgcr") for name in ("uci-digits", "digits"))
    assert f"gain {uci} points over FedAvg in the worst half on the UCI digits and {digits}" in text


def readings_of_eq_1(data: str, baseline: str) -> dict[str, Contrast]:
    """Return each reading's differences from a baseline."""
    chapter = chapter_of(f"fisher-readings-{data}")
    found = {}
    for method, by_baseline in chapter.contrasts[0].against_baselines.items():
        if "Reading" in method:
            reading = re.search("reading=([a-z-]+)", method)
            found[reading[1] if reading else "printed"] = by_baseline[baseline]
    return found


def test_the_readings_of_eq_1_in_what_holds_match_their_summaries() -> None:
    page = (EXPERIMENTS / "what-holds.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    office = readings_of_eq_1("office", "Uniform")
    assert not any(of["MIN"].sign > 0 for of in office.values())
    detectable = [of["MIN"].difference.detectable for of in office.values()]
    assert f"{number(min(detectable))} to {number(max(detectable))} points would" in text
    lower = {name for name, of in office.items() if of["AVG"].sign < 0}
    assert lower == {"printed", "drawn"}

    over_fedavg, digits = (readings_of_eq_1("digits", name) for name in ("FedAvg", "Uniform"))
    hold = {"unit", "layers", "by-layer"}
    for metric, better in (
        ("MIN", hold),
        ("STD", hold - {"by-layer"}),
        ("AVG", hold | {"summed"}),
    ):
        assert {name for name, of in over_fedavg.items() if of[metric].sign > 0} == better
    alike = {name for name in hold if digits[name]["MIN"].difference.equivalent}
    assert alike == {"unit", "by-layer"}
    assert not any(one.sign > 0 for of in digits.values() for one in of.by_metric)
    assert {n for n, of in digits.items() if of["MIN"].sign < 0} == {"printed", "drawn"}
    lower = {name for name, of in digits.items() if of["AVG"].sign < 0}
    assert lower == {"printed", "drawn", "batches"}


def test_the_halves_of_fedism_in_the_documents_match_their_summaries() -> None:
    for data, steps, weights in (("uci-digits", (1, 1), (0, 0)), ("digits", (0, 1), (0, 1))):
        chapter = chapter_of(f"gsam-{data}")
        (group,) = (g for one in chapter.contrasts for g in one.further[PLAIN_TITLE])
        uniform, fedism = group.contrasts.values()
        assert (group.heading, group.other, next(iter(group.contrasts))) == (
            "gsam",
            "sgd",
            "uniform",
        )
        rows = chapter.contrasts[0].against_baselines
        alone, with_gsam = (row["Uniform"] for name, row in rows.items() if "fedism" in name)
        for contrast, sign in zip(
            (uniform, fedism, alone, with_gsam), (*steps, *weights), strict=True
        ):
            both = [one for one in contrast.by_metric if one.metric.judged]
            assert [one.sign for one in both] == [sign, sign]
            assert sign or all(one.difference.equivalent for one in both)


def contrast(summary: str, weights: Mapping[str, int], metric: Summary) -> Difference:
    """Return the mean over federations of a weighted sum of methods, as a test of its own."""
    values: dict[str, dict[int, float]] = {}
    for run in summary_of(summary):
        values.setdefault(run.label, {})[run.config["seed"]] = metric(100 * run.final())
    seeds = values[next(iter(weights))]
    sums = [sum(w * values[method][seed] for method, w in weights.items()) for seed in seeds]
    return paired_differences({"": sums})[""]


def test_how_fedisms_halves_help_each_other_matches_the_summaries() -> None:
    text = " ".join((EXPERIMENTS / "gsam.md").read_text(encoding="utf-8").split())
    for data, fedism in (
        ("uci-digits", "fedism:q=0.386:beta=0.83"),
        ("digits", "fedism:q=5.69:beta=0.138"),
    ):
        weights = {f"gsam+{fedism}": 1, fedism: -1, "gsam+uniform": -1, "uniform": 1}
        one = contrast(f"gsam-{data}", weights, WORST_HALF)
        assert one.sign == 1
        assert f"by {one.mean:.2f} [{one.low:.2f}, {one.high:.2f}] on" in text


def test_fedheals_spread_in_what_holds_matches_the_leaderboard(findings: Findings) -> None:
    page = (EXPERIMENTS / "what-holds.md").read_text(encoding="utf-8")
    std = next(m for m in secondary(findings.design, ()) if m.title == STD0.heading)
    pairs = {b.name: findings.against(b, "fedheal", "fedavg", std) for b in findings.benchmarks}
    tests = {name: one for name, one in pairs.items() if one}
    assert {name: one.sign for name, one in tests.items() if one.sign} == {
        **{"randhie-site": -1, "heart-disease": -1, "digits": -1},
        "digit-five": 1,
    }
    corrected = holm({name: one.p for name, one in tests.items()})
    assert {format_number(corrected[name], 2) for name, one in tests.items() if one.sign} == {
        "0.08"
    }
    assert "corrected for the seven none is left (p = 0.08 for each)" in page


#: The QP at unit norm less the weights by distance alone, in the worst domain of Digits.
AT_UNIT_NORM = {"fisher_readings:Reading:reading=unit": 1, "fedequilibria:t=0.0": -1}

#: A mean with its interval: "1.46 points [0.89, 2.04]".
INTERVAL = re.compile(
    r"([\d.]+)(?: points| of average)? \[(\N{MINUS SIGN}?[\d.]+, \N{MINUS SIGN}?[\d.]+)\]"
)


def first_choices(findings: Findings) -> Iterator[Difference]:
    """Yield the differences of the first settings of methods that were tuned again."""
    ledger = findings.stages.ledger.rows.values()
    for benchmark in findings.benchmarks:
        planned = {run.key for run in findings.stages.confirmation(benchmark)}
        of = [r for r in ledger if (r.stage, r.benchmark) == ("confirmation", benchmark.name)]
        earlier = [row for row in of if row.key not in planned]
        kept = [
            r for r in findings.rows[benchmark.name] if r.method not in {e.method for e in earlier}
        ]
        yield from findings.judged_rows(benchmark, [*kept, *earlier]).values()


def test_documented_intervals_are_among_the_computed_ones(findings: Findings) -> None:
    one = [*first_choices(findings)]
    for benchmark in findings.benchmarks:
        one += [
            *findings.judged(benchmark).values(),
            *findings.judged_secondary(benchmark).values(),
        ]
        one += [
            difference
            for family in findings.other_references(benchmark).values()
            for difference in family.values()
        ]
    for sweep in findings.stages.sweeps:
        one += findings.swept(sweep).values()
    one += findings.judged_over_benchmarks.values()
    office = next(b for b in findings.benchmarks if b.name == "office-caltech")
    uncorrected = judged_as_family(dict(alone(findings, office, overlap=0.0)))
    outcomes = Counter(map(outcome, uncorrected.values()))
    assert outcomes == {"better": 1, "worse": 2, "equivalent": 8, "undecided": 1}
    one += uncorrected.values()
    one.append(contrast("fisher-readings-digits", AT_UNIT_NORM, MIN))
    for benchmark in findings.benchmarks:  # of the methods in experiments/what-holds.md
        std = next(m for m in secondary(findings.design, ()) if m.title == STD0.heading)
        for method in ("fedheal", "fedequilibria", "gsam+fedism", "fedism", "fedgcr"):
            pairs = (findings.against(benchmark, method, "fedavg", of) for of in (None, std))
            one += filter(None, pairs)
    for name in SUMMARIES:
        chapter = chapter_of(name)
        for contrasts in chain.from_iterable(
            (
                *of_measure.against_baselines.values(),
                *(group.contrasts for group in chain(*of_measure.further.values())),
                *(group.contrasts for group in chapter.gains),
            )
            for of_measure in chapter.contrasts
        ):
            one += [d for contrast in contrasts.values() for d in contrast.differences]
    known = {
        tuple(format_number(way * v, digits) for v in (abs(d.mean) * way, *ends))
        for d in one
        for way, ends in ((1, (d.low, d.high)), (-1, (d.high, d.low)))
        for digits in (1, 2)
    }
    pages = ("docs/results", "docs/which-method", "experiments/what-holds", "experiments/results")
    for name in (f"{page}.md" for page in pages):
        for mean_of, ends in INTERVAL.findall(words_of(name)):
            assert (mean_of, *ends.split(", ")) in known, f"{name}: {mean_of} [{ends}]"


def test_who_gains_from_taking_part_follows_from_the_runs() -> None:
    """The domains that are shown to gain (+) or lose (-) against each reference, by method."""
    shown: dict[tuple[str, str, str], str] = {}
    for data in ("uci-digits", "heart-disease"):
        for group in chapter_of(f"references-{data}").gains:
            for method, contrast in group.contrasts.items():
                if contrast.measure.name == "by domain":
                    signs = "".join("-=+"[1 + one.sign] for one in contrast.by_metric)
                    shown[data, group.heading, method] = signs
    # plain, inverted, rotated and printed; Cleveland, Hungary, Switzerland and Long Beach
    assert shown == {
        **{("uci-digits", "alone", m): "+=++" for m in ("fedavg", "uniform", "fedheal")},
        **{("uci-digits", "pooled", m): "=---" for m in ("fedavg", "uniform", "fedheal")},
        ("uci-digits", "alone", "pooled"): "++++",
        **{("heart-disease", "alone", m): "=+-=" for m in ("fedavg", "fedheal")},
        ("heart-disease", "alone", "uniform"): "++-=",
        ("heart-disease", "alone", "pooled"): "-=--",
        **{("heart-disease", "pooled", m): "++=+" for m in ("uniform", "fedheal")},
        ("heart-disease", "pooled", "fedavg"): "++==",
    }


def test_the_hospital_that_scores_higher_alone_is_described_by_its_data() -> None:
    (gain,) = (
        one.difference
        for group in chapter_of("references-heart-disease").gains
        if group.heading == "alone" and "uniform" in group.contrasts
        for one in group.contrasts["uniform"].by_metric
        if one.metric.name == "switzerland"
    )
    federation = prepare(DataConfig("heart-disease", clients_per_domain=1))
    training, test = (federation.test("switzerland", split).y for split in ("train", "test"))
    ill = int((test == 1).sum())
    assert (training == 1).all()
    assert ill == len(test) - 1
    said = f"where all {len(training)} training and {ill} of {len(test)} test patients are ill"
    assert f"({said}) scores {-gain.mean:.0f} points higher alone" in words_of("README.md")
    assert f"{said}, loses {-gain.mean:.2f}" in words_of("docs/results.md")


def test_the_readmes_table_has_five_federations_of_the_digits_with_references() -> None:
    rows = {"fedavg": "FedAvg", "uniform": "uniform weights", "fedheal": "FedHEAL"}
    text = words_of("README.md")
    for method in chapter_of("references-uci-digits").comparison.methods:
        if method.reference:
            continue
        runs = [run for run in method.runs if run.seed < 5]
        assert len(runs) == 5
        finals = 100 * np.array([run.final() for run in runs])
        values = [
            *finals.mean(axis=0),
            *(finals.mean(), finals.min(axis=1).mean(), finals.std(axis=1, ddof=1).mean()),
        ]
        assert f"| {rows[method.name]} | {' | '.join(f'{v:.1f}' for v in values)} |" in text


def test_all_runs_on_other_tasks_are_those_of_their_design() -> None:
    """Each method was tested with the learning rate that was best on validation examples."""
    for task, path in tasks.finished().items():
        rows = [row for row in tasks.trials() if row["task"] == task]
        chosen: dict[str, str] = {}
        for method in tasks.methods():
            merit: dict[str, list[float]] = {}
            for row in rows:
                if row["method"] == str(method):
                    value = float(row["better"]) * float(row["worst half"])
                    merit.setdefault(row["lr"], []).append(value)
            chosen[str(method)] = max(merit, key=lambda lr: mean(merit[lr]))
        runs = summary_of(path.stem)
        found = sorted((run.label, run.seed, f"{run.config['train.lr']:g}") for run in runs)
        federations = parse_seeds(tasks.DESIGN["design"]["federations"])
        assert found == sorted((m, f, lr) for m, lr in chosen.items() for f in federations)
        assert all(run.config["data.seed"] == run.seed for run in runs)


def test_what_is_said_of_other_tasks_follows_from_their_runs() -> None:
    shown: dict[str, set[tuple[str, str]]] = {}
    on_average: dict[str, set[tuple[str, str]]] = {}
    for task, path in tasks.finished().items():
        for method, contrast in tasks.judged(path)[1].items():
            worst, _, average = contrast.by_metric
            shown.setdefault(worst.verdict, set()).add((task, method))
            on_average.setdefault(average.verdict, set()).add((task, method))
    weights = "qffl:rule=weights"
    assert shown["better"] == {
        *(("segmentation", m) for m in ("fedequilibria", weights, "fedga")),
        *(("next-token", m) for m in ("afl", weights, "fedga")),
        ("classification", "fedheal"),
    }
    assert not shown["better"] & on_average["worse"]
    assert {task for task, _ in on_average["better"]} == {"segmentation", "next-token"}
    worse = {task for task, method in shown["worse"] if method == "fedavg"}
    assert worse == {"regression", "survival", "segmentation", "next-token"}
    assert {("segmentation", "fedheal"), ("next-token", "gsam+fedism")} < shown["worse"]


def test_the_sentence_on_other_tasks_in_the_summary_matches(summary: str) -> None:
    assert f"{tasks.sentence()} ([tasks](../experiments/tasks.md))" in summary
    assert index()["tasks.md"].lower() == f"{tasks.sentence()}.".lower()


def test_no_summary_contains_an_absolute_path() -> None:
    for path in EXPERIMENTS.glob("*.csv"):
        absolute = re.findall(r"(?:^|[,:\"])(/\w[^,\"]*)", path.read_text(encoding="utf-8"), re.M)
        assert not absolute, f"{path.name}: {absolute[0]}"
