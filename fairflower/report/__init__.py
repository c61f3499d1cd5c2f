"""Run folders in, an honest comparison out: tables, figures and one HTML page.

    runs = [read_run(folder) for folder in folders]
    console.print(terminal_table(runs))
    page = write_report(runs, Path("report"))  # report/index.html, report/figures/*

``reading`` opens a run folder, ``methods`` groups runs by everything but the seed,
``verdicts`` says what the differences are worth, ``tables`` holds the numbers,
``terminal``, ``figures`` and ``html`` draw them.
"""

from fairflower.report.html import write_report
from fairflower.report.reading import Run, RunError, read_run
from fairflower.report.terminal import terminal_table

__all__ = ["Run", "RunError", "read_run", "terminal_table", "write_report"]
