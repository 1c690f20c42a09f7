"""Entry point of ``python -m lightning_sparsefl.cli``, the same as ``sparsefl``."""

import sys

from lightning_sparsefl.cli import main

if __name__ == "__main__":
    sys.exit(main())
