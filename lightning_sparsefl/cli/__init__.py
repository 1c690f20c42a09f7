"""Command line ``sparsefl``, a LightningCLI for federations."""

from lightning_sparsefl.cli.command_line import SparseFLCLI
from lightning_sparsefl.cli.entry_point import main, run
from lightning_sparsefl.cli.messages import short_message
from lightning_sparsefl.cli.parser import SparseFLParser

__all__ = ["SparseFLCLI", "SparseFLParser", "main", "run", "short_message"]
