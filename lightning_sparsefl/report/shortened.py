"""Texts that are shortened to fit into tables and figures."""

from __future__ import annotations


def short(text: str, most: int = 34) -> str:
    """Return a text without its middle if it is long.

    Args:
        text: Text.
        most: Maximum number of characters.

    Example:
        >>> short("FedSpa (search=dst, density=0.05)", most=24)
        'FedSpa (s...ensity=0.05)'
    """
    tail = (most - 3) * 4 // 7
    return text if len(text) <= most else f"{text[: most - 3 - tail]}...{text[-tail:]}"
