"""What a node says of itself before the first round, and what of it must agree with the server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_sparsefl.federated.exchange.encoding import is_text

_MOST_BYTES = 2**26
_MOST_SHOWN = 80


class WrongHello(ValueError):
    """A node's hello cannot be accepted; the message is a clause."""


@dataclass(frozen=True)
class Hello:
    """Clients and facts of a node."""

    sizes: Mapping[int, int]
    """Number of training samples of each client of the node."""
    facts: Mapping[str, str]
    """Versions, digests and options by name, which must be the server's."""

    def encode(self) -> bytes:
        """Return the hello as JSON."""
        return json.dumps({"sizes": dict(self.sizes), "facts": dict(self.facts)}).encode()

    @classmethod
    def decode(cls, payload: bytes, num_clients: int, most_examples: int) -> Hello:
        """Read a hello.

        Args:
            payload: Bytes from :meth:`encode`.
            num_clients: Number of clients of the federation.
            most_examples: Largest number of training samples that a client may state.

        Raises:
            WrongHello: If a number is out of bounds, or the bytes are no hello.
        """
        try:
            content = json.loads(payload) if len(payload) <= _MOST_BYTES else None
        except (ValueError, RecursionError):
            content = None
        if content is None or not _is_hello(content):
            raise WrongHello("its hello is not one; expected sizes and facts")
        known = set(map(str, range(num_clients)))
        for client, size in content["sizes"].items():
            if client not in known:
                raise WrongHello(f"it claims the client {client[:20]!r}; expected a number below {num_clients}")
            if not 0 <= size <= most_examples:
                raise WrongHello(
                    f"its client {client} states {size} training samples; expected at most {most_examples} "
                    "(`max-examples`)"
                )
        return cls({int(client): size for client, size in content["sizes"].items()}, content["facts"])

    def require_facts(self, expected: Mapping[str, str]) -> None:
        """Compare the facts with the server's.

        Args:
            expected: Facts of the server.

        Raises:
            WrongHello: If one differs; the message names it.
        """
        for name in [*expected, *(name for name in self.facts if name not in expected)]:
            got, wanted = self.facts.get(name, "nothing"), expected.get(name, "nothing")
            if got != wanted:
                raise WrongHello(f"its {name[:_MOST_SHOWN]} is {_short(got)}, and the server's is {_short(wanted)}")


def agreement(facts: Mapping[str, str]) -> bytes:
    """Return a digest of facts, which each request repeats: a node may have been restarted with others.

    Args:
        facts: Facts by name.

    Example:
        >>> agreement({"torch": "2.6", "a": "1"}) == agreement({"a": "1", "torch": "2.6"})
        True
    """
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).digest()


def _short(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")


def _is_hello(content: Any) -> bool:
    if not isinstance(content, dict) or set(content) != {"sizes", "facts"}:
        return False
    sizes, facts = content["sizes"], content["facts"]
    if not isinstance(sizes, dict) or not isinstance(facts, dict):
        return False
    texts = all(map(is_text, facts)) and all(type(text) is str for text in facts.values())
    return texts and all(type(size) is int for size in sizes.values())
