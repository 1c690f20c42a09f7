"""What a client demands before it adds its update to a sum; every node reads it from its own configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_sparsefl.errors import InvalidOption, check_types, is_whole, require


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Threshold and least coverage of secure sums.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    threshold: float = 2 / 3
    """Fraction of a sum's clients; more than it must reach the end, and restore a mask together. In [0.5, 1)."""
    min_clients: int = 3
    """Least number of clients in a sum, >= 2."""
    min_coverage: int = 2
    """Least number of clients that vote on a coordinate; others keep the server's values. From 1 to `min_clients`."""

    def __post_init__(self) -> None:
        check_types(self, "secure_sum.")
        require(0.5 <= self.threshold < 1, "secure_sum.threshold", self.threshold, "a number in [0.5, 1)")
        require(is_whole(self.min_clients, 2), "secure_sum.min_clients", self.min_clients, "a whole number >= 2")
        fits = is_whole(self.min_coverage, 1) and self.min_coverage <= self.min_clients
        expected = f"a whole number from 1 to `secure_sum.min_clients`, {self.min_clients}"
        require(fits, "secure_sum.min_coverage", self.min_coverage, expected)

    @classmethod
    def read(cls, text: str) -> Policy:
        """Read a policy from the command line.

        Args:
            text: Threshold, least clients and least coverage, separated by commas.

        Raises:
            InvalidOption: If it is something else, or out of range.

        Example:
            >>> Policy.read("0.5,3,1")
            Policy(threshold=0.5, min_clients=3, min_coverage=1)
        """
        parts = text.split(",")
        try:
            threshold, min_clients, min_coverage = float(parts[0]), *map(int, parts[1:])
        except ValueError:
            expected = "a threshold, a least number of clients and a least coverage, such as 0.67,3,2"
            raise InvalidOption(f"`secure-sum` is {text[:80]!r}; expected {expected}.") from None
        return cls(threshold=threshold, min_clients=min_clients, min_coverage=min_coverage)

    def needed(self, clients: int) -> int:
        """Return how many of a sum's clients must reach its end, which may be more than there are.

        Args:
            clients: Number of clients that advertised keys.

        Example:
            >>> [Policy().needed(clients) for clients in (2, 3, 4, 100)]
            [3, 3, 3, 67]
        """
        return max(math.floor(self.threshold * clients + 1e-9) + 1, self.min_clients)
