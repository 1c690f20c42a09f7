"""Tables and figures of a run.

The figures need matplotlib, which is slow to import, so `lightning_sparsefl.report.pictures` is only imported on use.
"""

from lightning_sparsefl.report.bins import bin_edges
from lightning_sparsefl.report.output import is_silent, print_line, silenced
from lightning_sparsefl.report.tables import print_table, quantity, score, summary_rows

__all__ = ["bin_edges", "is_silent", "print_line", "print_table", "quantity", "score", "silenced", "summary_rows"]
