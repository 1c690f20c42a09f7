"""Run folders into tables and pictures.

The pictures need matplotlib, which is slow to import: `lightning_sparsefl.report.pictures` is imported on use.
"""

from lightning_sparsefl.report.bins import bin_edges
from lightning_sparsefl.report.tables import print_table, quantity, score, summary_rows

__all__ = ["bin_edges", "print_table", "quantity", "score", "summary_rows"]
