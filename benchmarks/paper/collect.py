"""Take over rows of another working copy or machine, and write all tables and figures of docs/results.md.

    python benchmarks/paper/collect.py [FOLDER]

FOLDER has the CSV files of the scripts. A row is new if its run and seed, or whatever names a row of that file, have no
row yet; nothing is replaced.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import COLUMNS, CURVE, DOCUMENT, RESULTS, Row, append, read
from _tables import with_table

NAMES = ("run", "seed", "round", "task", "device", "network", "masking", "rate")
"""Columns that name a row: those of a file of runs, of curves, of seconds or of counts."""


def name_of(row: Row, columns: list[str]) -> tuple[str, ...]:
    """Return what names a row; the device does only where there is no run."""
    chosen = [column for column in NAMES if column in columns and not (column == "device" and "run" in columns)]
    return tuple(row[column] for column in chosen)


def merge(source: Path, target: Path) -> int:
    """Append the new rows of a file, and return their number.

    Args:
        source: CSV file.
        target: CSV file that is extended; created if it does not exist.
    """
    rows, known = read(source), read(target)
    if not rows:
        return 0
    columns = list(rows[0])
    if "run" in columns:
        columns = list(CURVE if "round" in columns else COLUMNS)
    done = {name_of(row, columns) for row in known}
    new = [row for row in rows if name_of(row, columns) not in done]
    append(target, new, columns)
    return len(new)


def main(folder: Path | None) -> None:
    """Merge all files, and write all tables and figures.

    Args:
        folder: Folder of CSV files; None to write the tables and figures only.
    """
    for source in sorted(folder.glob("*.csv") if folder else ()):
        print(f"{source.name}: {merge(source, RESULTS / source.name)} new rows")
    for script in sorted(Path(__file__).parent.glob("[!_]*.py")):
        if script != Path(__file__):
            content = runpy.run_path(str(script))
            if "write" in content:  # claim.py and figures.py, which read the files of several scripts
                content["write"]()
                continue
            table = content["table"](read(RESULTS / f"{script.stem}.csv"))
            DOCUMENT.write_text(with_table(DOCUMENT.read_text(), script.stem, table))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "folder", nargs="?", type=Path, help="folder of CSV files; default: only write the tables and figures"
    )
    main(parser.parse_args().folder)
