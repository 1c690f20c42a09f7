"""Atomic writing of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_sparsefl.files import replacing


def write_atomically(path: Path, content: Any) -> None:
    """Write with ``torch.save`` so that a crash leaves either the old file or the complete new one.

    Args:
        path: File to write; its folder is created if needed.
        content: Content of plain types and tensors.
    """
    with replacing(path) as file:
        torch.save(content, file)


def write_bytes_atomically(path: Path, data: bytes, keep: Path | None = None) -> None:
    """Write bytes as :func:`write_atomically` writes a content.

    Args:
        path: File to write; its folder is created if needed.
        data: Content of the file.
        keep: New path, in the same folder, for the file that is replaced. Default: it is deleted.
    """
    with replacing(path, keep=keep) as file:
        file.write(data)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text as :func:`write_atomically` writes a content.

    Args:
        path: File to write; its folder is created if needed.
        text: Content of the file, written as UTF-8.
    """
    with replacing(path) as file:
        file.write(text.encode())
