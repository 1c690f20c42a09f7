"""Entry point of the command line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

from jsonargparse import set_parsing_settings
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli.command_line import SparseFLCLI
from lightning_sparsefl.cli.parser import EXIT_USAGE, QUIET, SparseFLParser
from lightning_sparsefl.errors import ClientFailed, SparseFLError
from lightning_sparsefl.federated import FederatedTrainer
from lightning_sparsefl.report import silenced

_EXIT_INTERRUPTED = 130
_PARENT = os.getppid()


def run() -> SparseFLCLI:
    """Parse and run the command line."""
    set_parsing_settings(
        docstring_parse_attribute_docstrings=True
    )  # the docstrings of dataclass fields become help texts
    for plugin in entry_points(group="lightning_sparsefl.plugins"):
        plugin.load()
    return SparseFLCLI(
        trainer_class=FederatedTrainer,  # type: ignore[arg-type]
        parser_class=SparseFLParser,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={
            "prog": "sparsefl",
            "description": "Train, evaluate, profile and export sparse and personalised federated learning.",
            "version": __version__,
            "default_env": True,
            "env_prefix": "SPARSEFL",
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script.

    Args:
        argv: Arguments; None for those of the command line.

    Returns:
        Exit code: 0, 2 after an error message, or 130 after an interrupt.
    """
    if argv is not None:
        sys.argv = [sys.argv[0], *argv]
    sys.path.append(str(Path.cwd()))  # for `--model my_models.Net` with a file of the user; it replaces no package
    try:
        with silenced(QUIET in sys.argv[1:]):
            run()
    except ClientFailed as error:
        if error.__cause__ is not None:  # the code of the user failed, so show where
            traceback.print_exception(error.__cause__)
        return _report(error)
    except (SparseFLError, MisconfigurationException) as error:
        return _report(error)
    except OSError as error:  # such as a folder without write permission, a full disk, or a download without network
        return _report(error)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _report(error: Exception) -> int:
    orphan = os.getppid() != _PARENT  # rank 0, which reports errors, has ended
    if orphan or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"sparsefl: error: {error}", file=sys.stderr)
    return EXIT_USAGE
