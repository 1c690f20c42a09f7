"""The configuration that a command uses if it is given only a checkpoint of a run."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.cli import SaveConfigCallback

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.storage.resume import NEWEST

CONFIG = "config.yaml"
"""Name of the file in a run folder."""
_GROUPS = ("--algorithm", "--model", "--data")


class SavedConfig(SaveConfigCallback):
    """Callback that writes `config.yaml`, also from a spawned process, to which a parser cannot be sent."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes with the text of the configuration in place of the parser."""
        return {**vars(self), "parser": _Text(self.parser.dump(self.config, skip_none=False)), "config": None}


@dataclass
class _Text:
    """Stand-in for the parser of a configuration whose text is known."""

    text: str

    def dump(self, config: Any, **options: Any) -> str:
        """Return the text; the arguments are those of the parser."""
        return self.text

    def save(self, config: Any, path: str, **options: Any) -> None:
        """Write the text; the arguments are those of the parser."""
        Path(path).write_text(self.text, encoding="utf-8")


def with_run_config(args: Sequence[str], subcommands: Collection[str]) -> list[str]:
    """Insert the configuration of the run that `--ckpt_path` belongs to after the subcommand.

    Nothing is inserted if the arguments have a configuration, or give the algorithm, the model and the data. The option
    itself is moved to the end, since a later configuration, as that of a run, has a `ckpt_path` of its own.

    Args:
        args: Arguments of the command line.
        subcommands: Names of the subcommands.

    Returns:
        The arguments to parse. Options of the command line come later and take precedence.

    Raises:
        InvalidOption: If there is nothing at the checkpoint's path.
    """
    args = list(args)
    position = next((index for index, arg in enumerate(args) if arg in subcommands), None)
    if position is None:
        return args
    args, ckpt_path = _moved_to_end("--ckpt_path", args), _path_of_checkpoint(args)
    if ckpt_path is None:
        return args
    path = Path(ckpt_path)
    if not path.exists():
        raise InvalidOption(
            f"`ckpt_path` is {ckpt_path!r}, which does not exist; expected a run folder or a checkpoint."
        )
    config = None if _has_config(args, args[position]) else config_of(path)
    if config is None:
        return args
    rank_zero_info(f"Configuration of the run: {config}")
    return [*args[: position + 1], f"--config={config}", *args[position + 1 :]]


def config_of(checkpoint: Path) -> Path | None:
    """Return the configuration of a run, or None if it is missing.

    Args:
        checkpoint: Checkpoint in a run folder or in its `checkpoints`, or the run folder itself.
    """
    folders = [checkpoint] if checkpoint.is_dir() else [checkpoint.parent, checkpoint.parent.parent]
    return next((folder / CONFIG for folder in folders if (folder / CONFIG).is_file()), None)


def checkpoint_without_config(args: Sequence[str], subcommand: str) -> str | None:
    """Return the path in `--ckpt_path` if no configuration is given, and none belongs to the path; else None.

    Args:
        args: Arguments of the command line.
        subcommand: Name of the subcommand.
    """
    ckpt_path = _path_of_checkpoint(args)
    if ckpt_path is None or _has_config(args, subcommand) or config_of(Path(ckpt_path)) is not None:
        return None
    return ckpt_path


def _path_of_checkpoint(args: Sequence[str]) -> str | None:
    """Return the value of `--ckpt_path` if it is a path."""
    value = _value_of("--ckpt_path", args)
    if value == "":
        raise InvalidOption("`ckpt_path` is ''; expected a run folder, a checkpoint, `last`, `auto` or null.")
    return None if value in (None, "null", *NEWEST) else os.path.expanduser(value)


def _has_config(args: Sequence[str], subcommand: str) -> bool:
    names = {arg.partition("=")[0] for arg in args}
    variables = ("SPARSEFL_CONFIG", f"SPARSEFL_{subcommand.upper()}__CONFIG")
    return bool(names & {"-c", "--config"} or names >= set(_GROUPS) or any(name in os.environ for name in variables))


def _moved_to_end(option: str, args: Sequence[str]) -> list[str]:
    """Return the arguments with an option and its value at the end."""
    others: list[str] = []
    moved: list[str] = []
    following = iter(args)
    for arg in following:
        name, equals, _ = arg.partition("=")
        if name != option:
            others.append(arg)
        else:
            moved += [arg] if equals else [arg, *itertools.islice(following, 1)]
    return [*others, *moved]


def _value_of(option: str, args: Sequence[str]) -> str | None:
    """Return the last value of an option, or None."""
    value = None
    for arg, following in itertools.zip_longest(args, args[1:]):
        name, equals, rest = arg.partition("=")
        if name == option:
            value = rest if equals else following
    return value
