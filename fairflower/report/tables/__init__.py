"""The tables of a report, as data for every output format."""

from dataclasses import replace

from fairflower.report.contrasts import Contrasts
from fairflower.report.methods import Comparison
from fairflower.report.tables import accuracy, differences, groups, participation
from fairflower.report.tables.cells import Table
from fairflower.report.tables.notes import machine_line, model_line, model_table, tests_line
from fairflower.report.text import GUIDE
from fairflower.server.history import WINDOW


def accuracy_tables(comparison: Comparison, contrasts: Contrasts) -> list[Table]:
    """Return tables of accuracy (last five tested rounds, last round) and of differences."""
    windows = [WINDOW]
    if any(m.runs[0].final_rounds() != m.runs[0].final_rounds(1) for m in comparison.methods):
        windows.append(1)
    first, *others = (accuracy.accuracy_table(comparison, window) for window in windows)
    further = (
        accuracy.quality_table(comparison),
        *accuracy.user_tables(comparison),
        *groups.group_tables(comparison),
        accuracy.types_table(comparison),
        *(accuracy.clusters_table(comparison, window) for window in windows),
        accuracy.personal_table(comparison),
        accuracy.personal_spread_table(comparison),
        accuracy.product_table(comparison),
        participation.participation_table(comparison),
        *differences.difference_tables(comparison, contrasts),
        model_table(comparison),
    )
    lines = (tests_line(comparison), model_line(comparison), machine_line(comparison), GUIDE)
    return [
        replace(first, footers=[line for line in lines if line]),
        *others,
        *(table for table in further if table.groups),
    ]


def fairness_tables(comparison: Comparison) -> list[Table]:
    """Return tables of all fairness metrics over domains and, if clients tested, over clients."""
    tables = (accuracy.fairness_table(comparison, level) for level in ("domains", "clients"))
    return [table for table in tables if table.groups]
