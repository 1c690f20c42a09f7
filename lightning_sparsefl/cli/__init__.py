"""Command line ``sparsefl``, a LightningCLI for federations, and commands that read run folders.

The names of the LightningCLI are imported on first use, since torch and Lightning are slow to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_sparsefl.cli.entry_point import main

if TYPE_CHECKING:
    from lightning_sparsefl.cli.command_line import SparseFLCLI
    from lightning_sparsefl.cli.messages import short_message
    from lightning_sparsefl.cli.parser import SparseFLParser
    from lightning_sparsefl.cli.program import run

__all__ = ["SparseFLCLI", "SparseFLParser", "main", "run", "short_message"]
_HOMES = {
    "SparseFLCLI": "command_line",
    "SparseFLParser": "parser",
    "run": "program",
    "short_message": "messages",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return list(__all__)
