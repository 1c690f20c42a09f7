"""Files that are whole or not there, and that hold plain types only."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from lightning_sparsefl.errors import CheckpointMismatch


def write_atomically(path: Path, content: Any) -> None:
    """Write with ``torch.save`` so that a crash leaves the old file or the new one, never half of it.

    Args:
        path: The file; its folder is made if needed.
        content: Plain types and tensors.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_plain(path: Path) -> Any:
    """Read a file of plain types and tensors on the CPU; nothing in it is executed.

    Raises:
        CheckpointMismatch: If it is missing, torn, or holds anything but plain types.
    """
    if not path.is_file():
        raise CheckpointMismatch(f"There is no checkpoint at {path}; expected a file (option `ckpt_path`).")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointMismatch(
            f"{path} is torn or not a checkpoint of plain types ({type(error).__name__}); choose another `ckpt_path`."
        ) from error
