"""Reports on run folders: tables, verdicts and figures, in the terminal or on an HTML page.

    runs = [read_run(folder) for folder in folders]
    console.print(terminal_table(runs))
    page = write_report(runs, Path("report"))  # report/index.html, report/figures/*

``reading`` reads run folders, and ``summary`` reads and writes a small file about many runs.
``methods`` groups runs that differ only in the seed into methods, and finds grids and sweeps among
them. ``contrasts`` compares methods, and gives verdicts in words. ``tables`` and ``notes`` contain
the numbers and what to know of them, ``cells`` what a table is, and ``figures`` the plots.
``pages`` arranges all of them for the terminal, Markdown, LaTeX and the HTML page.
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
