"""Tables and figures of runs: while they go on, and in reports over many of them.

::

    report = Report(load_runs(["runs"]))
    report.write("report")

The figures need matplotlib, which is slow to import, so it is only imported when one is drawn.
"""

from lightning_sparsefl.report.bins import bin_edges
from lightning_sparsefl.report.output import is_silent, print_line, silenced
from lightning_sparsefl.report.reading.groups import Group, group_runs
from lightning_sparsefl.report.reading.runs import Run, load_runs
from lightning_sparsefl.report.run_report import Report
from lightning_sparsefl.report.tables import print_table, quantity, score, summary_rows

__all__ = [
    "Group",
    "Report",
    "Run",
    "bin_edges",
    "group_runs",
    "is_silent",
    "load_runs",
    "print_line",
    "print_table",
    "quantity",
    "score",
    "silenced",
    "summary_rows",
]
