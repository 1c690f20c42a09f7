"""Gaussian noise and uniform draws from the key stream of a cipher with a secret key of 256 bits.

The generators of torch and NumPy are unsuitable for differential privacy: on the CPU, torch's uses 32 bits of its seed,
which can be searched in minutes, and neither is cryptographic. Here the random bits are those of AES-256 in counter
mode. The key of each stream is the HMAC-SHA-256, under the secret key, of the identifiers of its use; for noise, also
of the values that it is added to.
"""

from __future__ import annotations

import hmac
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from scipy.special import ndtri
from torch import Tensor

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.wire import dense

_DIGITS = 64
"""Number of hexadecimal digits of a key file."""
_MAKE = "`openssl rand -hex 32` creates one"


def read_key(path: str | None) -> bytes:
    """Read the 32 bytes of a key file.

    Args:
        path: File with 64 hexadecimal digits, the option `federation.privacy.key_file`.

    Raises:
        InvalidOption: If the option is not set, or the file is missing or has any other content. The message never
            repeats the content of the file.
    """
    if path is None:
        raise InvalidOption(
            "`federation.privacy.key_file` is not set; expected a file with 64 hexadecimal digits, the secret key of "
            f"the noise ({_MAKE}). Store it outside of configurations, run folders and published models."
        )
    file = Path(path).expanduser()
    try:
        digits = file.read_text(encoding="ascii").strip()
        shared = os.name == "posix" and bool(file.stat().st_mode & 0o077)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(
            f"`federation.privacy.key_file` is {path}, which cannot be read ({type(error).__name__}); expected a file "
            f"with {_DIGITS} hexadecimal digits ({_MAKE})."
        ) from None
    if re.fullmatch(f"[0-9a-fA-F]{{{_DIGITS}}}", digits) is None:
        raise InvalidOption(
            f"`federation.privacy.key_file` is {path}, which contains {len(digits)} characters; expected {_DIGITS} "
            f"hexadecimal digits ({_MAKE})."
        )
    if shared:
        rank_zero_warn(f"Other users can read the key of the noise; run `chmod 600 {path}`.")
    return bytes.fromhex(digits)


def derive_key(secret: bytes, context: tuple[int | str, ...], content: Tensor | None = None) -> bytes:
    """Return the key of one stream: the 32 bytes of the HMAC-SHA-256 of the context and the values.

    Since the key of noise depends on the values, two different sums never get the same noise, even if a run is
    repeated with the same secret and context; otherwise the difference of the results would be free of noise (the idea
    of deterministic authenticated encryption, Rogaway and Shrimpton, EUROCRYPT 2006).

    Args:
        secret: Secret key of the run.
        context: Identifiers of the use: its purpose, the run and the round.
        content: Values that noise will be added to, float64. Default: none, for a stream that is not noise.
    """
    label = repr(context).encode()
    code = hmac.new(secret, len(label).to_bytes(8, "little") + label, "sha256")
    if content is not None:
        code.update(dense.flat(content.detach().cpu()).view(torch.uint8).numpy().data)
    return code.digest()


class KeyStream:
    """Stream of random bits that depends only on the key.

    Args:
        key: Key of 32 bytes, used for this stream only.
    """

    def __init__(self, key: bytes) -> None:
        self._encryptor = _cipher(key).encryptor()

    def words(self, count: int) -> Any:
        """Return the next numbers of 64 bits as a NumPy array.

        Args:
            count: Number of values to draw.
        """
        return np.frombuffer(self._encryptor.update(bytes(8 * count)), dtype="<u8")

    def below(self, limit: int) -> int:
        """Return a uniformly distributed number from 0 to `limit` - 1.

        Args:
            limit: Number of possible values, below 2**63.

        Example:
            >>> KeyStream(bytes(32)).below(1)
            0
        """
        highest = 2**64 - 2**64 % limit  # numbers from here on would make the small remainders more likely
        while (word := int(self.words(1)[0])) >= highest:
            pass
        return word % limit


class NormalStream(KeyStream):
    """Stream of standard normal numbers that depends only on the key.

    Each number uses 64 bits of the key stream: one for the sign, 63 for the probability of its tail.

    Args:
        key: Key of 32 bytes, used for this stream only.

    Example:
        >>> one, two = NormalStream(bytes(32)), NormalStream(bytes(32))
        >>> bool((torch.cat([one.draw(3), one.draw(2)]) == two.draw(5)).all())
        True
    """

    def draw(self, count: int) -> Tensor:
        """Return the next numbers, float64 of shape (count,) on the CPU.

        Args:
            count: Number of values to draw.
        """
        words = self.words(count)
        # (k + 1/2) / 2**64 for k below 2**63: precise near 0, so that the tails reach 9 standard deviations
        tail = ((words >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-64
        sign = 1.0 - 2.0 * (words & np.uint64(1)).astype(np.float64)
        return torch.from_numpy(np.asarray(ndtri(tail) * sign))


def require_cipher() -> None:
    """Raise :class:`InvalidOption` if the package `cryptography` is not installed."""
    _cipher(bytes(32))


def _cipher(key: bytes) -> Any:
    try:
        from cryptography.hazmat.primitives.ciphers import (
            Cipher,
            algorithms,
            modes,
        )  # imported here, since it is optional
    except ImportError as error:
        raise InvalidOption(
            "`federation.privacy` draws its noise with the package `cryptography`, which is not installed; "
            "`pip install 'lightning-sparsefl[privacy]'`, or set `federation.privacy: null`."
        ) from error
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16)))  # each key is used for one stream, starting at block 0
