"""Error messages of the parser, shortened to one line."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning.pytorch import LightningDataModule, LightningModule

import lightning_sparsefl.algorithms
import lightning_sparsefl.callbacks
import lightning_sparsefl.data
import lightning_sparsefl.federated
import lightning_sparsefl.models
from lightning_sparsefl.data import Partition
from lightning_sparsefl.federated import FederatedAlgorithm, Reducer

_KINDS: dict[str, type] = {
    "algorithm": FederatedAlgorithm,
    "model": LightningModule,
    "data": LightningDataModule,
    "partition": Partition,
    "reducer": Reducer,
}
"""Option groups whose class is chosen by name."""
_PARSER_DETAILS = re.compile(
    r"Does not validate|Subtypes:|Errors:|Expected a <class 'NoneType'>|Given value|Expected a path but"
)


def short_message(message: str) -> str:
    r"""Shorten an error message of jsonargparse to one line without the types that the parser tried.

    Args:
        message: Error message of jsonargparse, of several lines.

    Example:
        >>> short_message("Parser key 'lr':\n  Does not validate\n  Errors:\n    - Expected a <class 'float'>")
        "Parser key 'lr': Expected a <class 'float'>."
    """
    missing = re.search(r"the following arguments are required: (.+)", message)
    if missing:
        return _missing(missing[1].split(", "))
    lines = [line.strip().removeprefix("- ") for line in message.splitlines()]
    parts = list(dict.fromkeys(line for line in lines if line and not _PARSER_DETAILS.match(line)))
    text = " ".join(part if part.endswith((":", ".")) else f"{part};" for part in parts).rstrip(";")
    unknown = re.search(r"Expected a dot import path string: (\S+)", text)
    key = re.search(r"NestedArg\(key='(\w+)'", message) or re.search(r'Parser key "(?:\w+\.)*(\w+)"', message)
    if unknown and key and key[1] in _KINDS:
        known = ", ".join(_class_names(_KINDS[key[1]]))
        text = f"`{key[1]}` is {unknown[1]!r}, which is not a known class; expected an import path or one of {known}"
    return text if text.endswith(".") else f"{text}."


def _missing(keys: Sequence[str]) -> str:
    """Return the message for required options that are not given."""
    names = ", ".join(f"`{key.partition('.')[2] or key}`" for key in keys)
    return (
        f"No value for {names}; expected options, a file in `--config`, or in `--ckpt_path` a run folder with a "
        "config.yaml."
    )


def _class_names(kind: type) -> list[str]:
    """Return the names of the classes of this package that can be chosen for an option group."""
    packages = (
        lightning_sparsefl.algorithms,
        lightning_sparsefl.data,
        lightning_sparsefl.models,
        lightning_sparsefl.federated,
    )
    classes = {name: getattr(package, name) for package in packages for name in package.__all__}
    return sorted(n for n, c in classes.items() if isinstance(c, type) and issubclass(c, kind) and c is not kind)
