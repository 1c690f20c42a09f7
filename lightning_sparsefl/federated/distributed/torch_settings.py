"""Settings of torch that a rank has while it trains, and that results depend on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Set the number of intra-op threads within the context; results depend on it, so it must be equal on all ranks.

    Args:
        count: Number of threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic_algorithms(wanted: bool | Literal["warn"]) -> Iterator[None]:
    """Use deterministic algorithms of torch only, as a `Trainer` with the same option does.

    Args:
        wanted: Whether to do so; ``"warn"`` = also use operations without a deterministic algorithm,
            with a warning.
    """
    if not wanted:
        yield
        return
    before = torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # stays, since cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True, warn_only=wanted == "warn")
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        torch.backends.cudnn.benchmark = before[1]
