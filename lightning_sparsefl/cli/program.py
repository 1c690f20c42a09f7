"""The program with a LightningCLI, for the commands that need a model and data."""

from __future__ import annotations

from importlib.metadata import entry_points

from jsonargparse import set_parsing_settings
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_sparsefl.__about__ import __version__
from lightning_sparsefl.cli.command_line import SparseFLCLI
from lightning_sparsefl.cli.parser import SparseFLParser
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated import FederatedTrainer


def run() -> SparseFLCLI:
    """Parse and run the command line.

    Raises:
        InvalidOption: If an option is not valid, or Lightning refuses a combination of options.
    """
    set_parsing_settings(
        docstring_parse_attribute_docstrings=True
    )  # the docstrings of dataclass fields become help texts
    for plugin in entry_points(group="lightning_sparsefl.plugins"):
        plugin.load()
    try:
        return SparseFLCLI(
            trainer_class=FederatedTrainer,  # type: ignore[arg-type]
            parser_class=SparseFLParser,
            save_config_kwargs={"overwrite": True},
            parser_kwargs={
                "prog": "sparsefl",
                "description": "Train, evaluate, export and compare sparse and personalised federated learning.",
                "version": __version__,
                "default_env": True,
                "env_prefix": "SPARSEFL",
            },
        )
    except MisconfigurationException as error:
        raise InvalidOption(str(error)) from error
