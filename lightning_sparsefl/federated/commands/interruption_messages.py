"""What Ctrl-C or SIGTERM leaves of a command, as a sentence for the user."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path


def kept_by_fit(folder: Path, committed: int, rounds: int, phase: str) -> str:
    """Return what an interrupted run keeps, and how it goes on.

    Args:
        folder: Folder of the run.
        committed: Number of committed rounds.
        rounds: Number of rounds of the run.
        phase: Part of the run that was interrupted, such as ``round 3``.

    Example:
        >>> kept_by_fit(Path("runs/FedSpa/version_0"), 2, 5, "round 3")
        'in round 3: 2 of 5 rounds are committed; `--ckpt_path runs/FedSpa/version_0` goes on from there.'
    """
    option = f"`--ckpt_path {shlex.quote(str(folder))}`"
    if not committed:
        return f"in {phase}: no round is committed; {option} starts the run over in its folder."
    return f"in {phase}: {committed} of {rounds} rounds are committed; {option} goes on from there."


def kept_by_command(verb: str, folder: Path | None) -> str:
    """Return what a command keeps that was interrupted without having changed the run.

    Args:
        verb: Name of the command.
        folder: Folder of the run that it started from, if any.

    Example:
        >>> kept_by_command("fit", None)
        'before the first round: nothing is written; start the run again.'
        >>> kept_by_command("test", Path("runs/FedSpa/version_0"))
        'nothing is written; runs/FedSpa/version_0 is as it was.'
    """
    if verb == "fit":
        option = f"`--ckpt_path {shlex.quote(str(folder))}`"
        again = "start the run again" if folder is None else f"{option} starts from its last commit again"
        return f"before the first round: nothing is written; {again}."
    return "nothing is written" + (f"; {folder} is as it was." if folder is not None else ".")


def kept_by_export(written: Sequence[Path]) -> str:
    """Return which files an interrupted export has written.

    Args:
        written: Paths of the complete files.

    Example:
        >>> kept_by_export([]), kept_by_export([Path("export/global/model.ckpt")])
        ('no file is written.', 'complete files: export/global/model.ckpt; they were not compared.')
    """
    return (
        f"complete files: {', '.join(map(str, written))}; they were not compared." if written else "no file is written."
    )
