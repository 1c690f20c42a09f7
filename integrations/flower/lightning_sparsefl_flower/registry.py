"""Which node's key has which clients."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.storage.atomic_files import write_text_atomically


class Registry:
    """File that binds the numbers of clients to the keys of nodes.

    Args:
        path: JSON file with the name of a key for each client.
        binds: Whether a client that is not in the file is bound to the key that first claims it, or refused.

    Raises:
        InvalidOption: If the file is missing where nothing may be bound, or is not one of clients and keys.
    """

    def __init__(self, path: Path, binds: bool) -> None:
        self.path, self.binds = path, binds
        if not path.is_file() and not binds:
            raise InvalidOption(f"There is no {path}; expected a JSON file with the key of each client (`registry`).")
        self._keys = _read(path) if path.is_file() else {}

    def claim(self, client: int, key: str) -> bool:
        """Return whether a client belongs to a key; bind it if it belongs to none yet.

        Args:
            client: Number of the client.
            key: Name of the node's key, from :func:`name_of`.
        """
        if client not in self._keys and self.binds:
            self._keys[client] = key
            self.path.parent.mkdir(parents=True, exist_ok=True)
            content = {str(number): self._keys[number] for number in sorted(self._keys)}
            write_text_atomically(self.path, json.dumps(content, indent=1) + "\n")
        return self._keys.get(client) == key


def name_of(public_key: bytes) -> str:
    """Return the name of a key: the SHA-256 of its bytes as the SuperLink knows them.

    Args:
        public_key: Public key of a SuperNode.
    """
    return hashlib.sha256(public_key).hexdigest()


def _read(path: Path) -> dict[int, str]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        fits = all(client.isdecimal() and type(key) is str for client, key in content.items())
    except (OSError, ValueError, AttributeError) as error:
        raise InvalidOption(f"{path} cannot be read ({error}); expected a JSON object (`registry`).") from error
    if not fits:
        raise InvalidOption(f"{path} has other entries than clients and keys; expected numbers and texts (`registry`).")
    return {int(client): key for client, key in content.items()}
