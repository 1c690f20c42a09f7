"""Random seeds derived from keys that name their use.

A key never contains the rank or the order of execution, so a run is reproducible on any number of ranks. Only the
identifier of a run is not derived: no two runs have the same one.
"""

from __future__ import annotations

import hashlib
import random
import secrets
from functools import cache

import numpy as np
import torch

from lightning_sparsefl.errors import whole_number_from_environment


def derive_seed(*key: int | str) -> int:
    """Derive a 63-bit seed from a key.

    Args:
        key: Seed of the run, followed by what names the use, such as round, client and purpose.

    Example:
        >>> derive_seed(42, 3, 7, "fit") == derive_seed(42, 3, 7, "fit") != derive_seed(42, 3, 8, "fit")
        True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def derive_key(*key: int | str) -> str:
    """Derive a 128-bit key, as 32 hexadecimal digits, that is a function of its arguments alone.

    Args:
        key: Random seed of the run, then what names the use.

    Example:
        >>> len(derive_key(42, "client", 7)), derive_key(42, "client", 7) == derive_key(42, "client", 8)
        (32, False)
    """
    return hashlib.blake2b(repr(key).encode(), digest_size=16).hexdigest()


def seed_from_environment() -> int:
    """Return the seed that ``seed_everything`` left in the environment variable ``PL_GLOBAL_SEED``, else 0.

    Raises:
        InvalidOption: If the variable is not a whole number.
    """
    return whole_number_from_environment("PL_GLOBAL_SEED", 0, remedy="unset it, or set `seed_everything`")


def random_identifier() -> str:
    """Draw 128 bits from the operating system, as 32 hexadecimal digits.

    Example:
        >>> len(random_identifier()), random_identifier() == random_identifier()
        (32, False)
    """
    return secrets.token_hex(16)


def generator(*key: int | str) -> torch.Generator:
    """Create a CPU generator that is seeded with :func:`derive_seed`.

    Args:
        key: Key of the seed.

    Example:
        >>> int(torch.randint(100, (1,), generator=generator(0, "doc"))) in range(100)
        True
    """
    return torch.Generator().manual_seed(derive_seed(*key))


def seed_all(*key: int | str) -> None:
    """Seed the global generators of torch (all devices), NumPy and Python with :func:`derive_seed`.

    Args:
        key: Key of the seed.

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
    """Return whether there is a device besides the CPU.

    Without one, seeding the CPU generator alone is faster: for each kind of device that is not initialised yet,
    `torch.manual_seed` stores a deferred call with a stack trace.
    """
    own = hasattr(torch, torch._C._get_privateuse1_backend_name())
    return own or torch.backends.mps.is_available() or torch.cuda.device_count() + torch.xpu.device_count() > 0
