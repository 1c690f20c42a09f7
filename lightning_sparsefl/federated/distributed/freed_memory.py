"""Memory of tensors that glibc would return to the system, and keeps for the next step.

A step on a CPU allocates the activations of all layers, and frees them at its end. By default glibc returns such blocks
to the system, which hands them out again page by page, filled with zeros. On small convolutional networks this takes up
to 30 % of a round (benchmarks/engine_changes.md).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Parameters of ``mallopt`` in glibc's malloc.h."""
_DURING = {_TRIM_THRESHOLD: -1, _MMAP_THRESHOLD: 2**30}
"""The heap does not shrink, and blocks of up to 1 GiB are part of it."""
_AFTER = {_TRIM_THRESHOLD: 2**26, _MMAP_THRESHOLD: 2**25}
"""Largest values that glibc chooses by itself, and that every version accepts; it has stopped adapting them."""
_OF_THE_USER = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables with which a user sets these parameters."""


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[None]:
    """Keep freed memory in this process within the context, and return it to the system afterwards.

    Has no effect without glibc, and where an environment variable sets what its ``malloc`` returns.

    Args:
        device: Device that trains; the memory of others than the CPU is not glibc's.
    """
    libc = _glibc()
    if libc is None or device.type != "cpu" or any(name in os.environ for name in _OF_THE_USER):
        yield
        return
    _set(libc, _DURING)
    try:
        yield
    finally:
        _set(libc, _AFTER)
        libc.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library of this process if it is glibc, else None."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def _set(libc: Any, values: Mapping[int, int]) -> None:
    for parameter, value in values.items():
        if not libc.mallopt(parameter, value):  # older versions refuse a threshold for blocks of more than 32 MiB
            libc.mallopt(parameter, _AFTER[parameter])
