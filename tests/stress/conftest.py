"""The scripts of this folder are run, not imported: only `test_*.py` is collected."""

from pathlib import Path

collect_ignore = [path.name for path in Path(__file__).parent.glob("*.py") if not path.name.startswith("test_")]
