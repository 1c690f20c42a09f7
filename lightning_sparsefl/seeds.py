"""Randomness keyed by what it is for, never by rank or order, so that a run repeats on any number of ranks."""

from __future__ import annotations

import hashlib
import random
from functools import cache

import numpy as np
import torch


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed that is a function of the key alone.

    Args:
        key: The run's seed, then whatever names the use: round, client, purpose.

    Example:
        >>> derive_seed(42, 3, 7, "fit") == derive_seed(42, 3, 7, "fit") != derive_seed(42, 3, 8, "fit")
        True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generator(*key: int | str) -> torch.Generator:
    """A CPU generator seeded with :func:`derive_seed`.

    Example:
        >>> int(torch.randint(100, (1,), generator=generator(0, "doc"))) in range(100)
        True
    """
    return torch.Generator().manual_seed(derive_seed(*key))


def seed_all(*key: int | str) -> None:
    """Seed the global generators of torch (all devices), NumPy and Python with :func:`derive_seed`.

    Example:
        >>> seed_all(0, "doc"); first = torch.rand(1); seed_all(0, "doc"); bool(first == torch.rand(1))
        True
    """
    seed = derive_seed(*key)
    (torch.manual_seed if _accelerated() else torch.default_generator.manual_seed)(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@cache
def _accelerated() -> bool:
    """Whether there is a device besides the CPU; for each that may yet come, torch would note a stack trace."""
    own = hasattr(torch, torch._C._get_privateuse1_backend_name())
    return own or torch.backends.mps.is_available() or torch.cuda.device_count() + torch.xpu.device_count() > 0
