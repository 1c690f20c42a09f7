"""Help texts of the command line: options without internal classes, and lists of the classes to choose from."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from jsonargparse import DefaultHelpFormatter
from lightning.pytorch import LightningDataModule, LightningModule

import lightning_sparsefl.callbacks
from lightning_sparsefl.cli.classes import own_classes
from lightning_sparsefl.federated import FederatedAlgorithm

TITLES = {
    "trainer": "Trainer",
    "algorithm": "Federated method",
    "federation": "Federation: sampling of clients, local training, aggregation, evaluation and storage",
    "model": "Module that every client trains",
    "data": "Federated data module",
    "optimizer": "Optimizer, instead of that of the module",
    "lr_scheduler": "Scheduler of the learning rate, instead of that of the module",
}
"""Titles of the groups of options."""
KINDS: dict[str, type] = {"algorithm": FederatedAlgorithm, "model": LightningModule, "data": LightningDataModule}
BASES = {
    "Callback",
    "FederatedAlgorithm",
    "LightningDataModule",
    "LightningModule",
    "Logger",
    "Optimizer",
    "LRScheduler",
    "IterDataPipe",
    "DFIterDataPipe",
    "MapDataPipe",
}
"""Names of the base classes of options, which nobody chooses."""
_ROUND_LEVEL = ("EarlyStopping", "ModelCheckpoint", "RichProgressBar", "RoundProgressBar", "TQDMProgressBar")
"""Callbacks that work on rounds; others, such as `LearningRateFinder`, need a trainer with batches."""


_VALUES = {"torch.Tensor", "numpy.ndarray"}
"""Classes of which Python code gives objects, and the command line no class."""
_SHOWN_WHOLE = ("lightning_sparsefl", "torch")
_MOST_SHOWN = 20
"""Number of classes up to which those of another library are listed."""


class HelpFormatter(DefaultHelpFormatter):
    """Help formatter without environment variables, which follow from a rule, and without internal classes."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "one of"
        options = [option for option in action.option_strings if not option.endswith("+")]
        if not options or action.nargs == 0:
            return ", ".join(options) or argparse.HelpFormatter._format_action_invocation(self, action)
        metavar = self._get_default_metavar_for_optional(action)
        return f"{', '.join(options)} {self._format_args(action, metavar)}"

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        return re.sub(
            r", known subclasses: (.+)\)$",
            lambda match: f"{_choices(action, match[1].split(', '))})",
            text,
            flags=re.DOTALL,
        )


def _choices(action: argparse.Action, paths: Sequence[str]) -> str:
    """Return the classes that a user can choose for an option, to be appended, without base classes and internal ones.

    A library with many of them, such as the data sets of torchvision, is named in their place.
    """
    if not _VALUES.isdisjoint(paths):
        return ""
    found: dict[str, list[str]] = {}
    for path in paths:
        package, name = path.partition(".")[0], path.rpartition(".")[2]
        if name not in BASES and _is_public(path):
            found.setdefault(package, []).append(name)
    names: Sequence[str] = [
        name
        for package, own in found.items()
        for name in (own if package in _SHOWN_WHOLE or len(own) <= _MOST_SHOWN else [f"those of {package}"])
    ]
    if action.dest == "trainer.callbacks":
        names = _ROUND_LEVEL
    elif action.dest == "trainer.client_callbacks":
        names = [*lightning_sparsefl.callbacks.__all__, "those of Lightning"]
    return ", one of " + ", ".join(dict.fromkeys(names))


def _is_public(path: str) -> bool:
    package, _, _ = path.partition(".")
    internal = "<" in path or ".datapipes." in path or any(part.startswith("_") for part in path.split("."))
    return not internal and (package != "lightning_sparsefl" or path.count(".") <= 2)


def class_list(args: Sequence[str]) -> str | None:
    """Return the classes of a group if the arguments ask for its help without a name; None otherwise.

    Args:
        args: Arguments of the command line, such as ``fit --algorithm.help``.
    """
    for arg, following in zip_longest(args, args[1:], fillvalue="-"):
        group = arg.removeprefix("--").removesuffix(".help")
        if arg == f"--{group}.help" and group in KINDS and following.startswith("-"):
            classes = own_classes(KINDS[group])
            width = max(len(name) for name in classes)
            rows = [f"  {name:{width}}  {_summary(kind)}" for name, kind in classes.items()]
            more = f"`--{group}.help NAME` lists the options of one; a class of your own is given by its import path."
            return "\n".join([f"{TITLES[group]}, one of:", *rows, more])
    return None


def _summary(kind: Any) -> str:
    return (kind.__doc__ or "").strip().partition("\n")[0]
