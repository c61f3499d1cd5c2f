"""Run folders in, an honest comparison out: tables, figures and one HTML page.

    runs = [read_run(folder) for folder in folders]
    console.print(terminal_table(runs))
    page = write_report(runs, Path("report"))  # report/index.html, report/figures/*

``reading`` opens a run folder, and ``summary`` one small file of many runs; ``methods``
groups runs by everything but the seed, and methods into products and sweeps;
``verdicts`` compares methods by ``measures``, and says what that is worth.
``tables`` hold the numbers and notes; ``pages`` puts all of it in order, which a
terminal, Markdown and one HTML page draw alike; ``figures`` stand on the HTML page.
``landscape`` looks at a run's final model itself.
"""

from fairflower.errors import RunFolderError
from fairflower.report.analysis import Analysis, analyze
from fairflower.report.pages import terminal_table, write_report
from fairflower.report.reading import Run, find_readable_runs, read_run
from fairflower.report.summary import read_runs, read_summary, write_summary

__all__ = [
    "Analysis",
    "Run",
    "RunFolderError",
    "analyze",
    "find_readable_runs",
    "read_run",
    "read_runs",
    "read_summary",
    "terminal_table",
    "write_report",
    "write_summary",
]
