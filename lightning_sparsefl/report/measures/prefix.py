"""SI prefixes of units."""

from __future__ import annotations

import math
import re

_PREFIXES = {-2: "u", -1: "m", 0: "", 1: "k", 2: "M", 3: "G", 4: "T", 5: "P", 6: "E", 7: "Z"}


def scaled_unit(largest: float, unit: str) -> tuple[float, str]:
    """Return the factor and the name of a unit in which a number has one to three digits before the point.

    Bytes and FLOPs have no prefixes below 1.

    Args:
        largest: Number, or the largest of several, in the unit.
        unit: Unit without a prefix.

    Example:
        >>> scaled_unit(7.4e8, "B"), scaled_unit(0.02, "s"), scaled_unit(0.0, "B")
        ((1000000.0, 'MB'), (0.001, 'ms'), (1.0, 'B'))
    """
    if not (math.isfinite(largest) and largest):
        return 1.0, unit
    least = -2 if unit == "s" else 0
    power = math.floor(math.log10(abs(largest) * 1.00005) / 3)  # 999.95 is shown as 1000
    power = min(max(power, least), max(_PREFIXES))
    return 1000.0**power, _PREFIXES[power] + unit


def amount(text: str, unit: str) -> float:
    """Return the number that a text states, with or without an SI prefix and the unit; NaN if it states none.

    Args:
        text: Text, such as ``1.5 MB``, ``170k`` or ``2e6``.
        unit: Unit without a prefix, which may end with an `s` in the text.

    Example:
        >>> amount("170kB", "B"), amount("1.5 M", "B"), amount("2e6", "B"), amount("2 GFLOPs", "FLOP")
        (170000.0, 1500000.0, 2000000.0, 2000000000.0)
        >>> amount("2 GFLOP", "B"), amount("2 mB", "B")
        (nan, nan)
    """
    powers = {prefix: power for power, prefix in _PREFIXES.items() if power >= 0} | {"K": 1}
    number = r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE]([+-]?[0-9]{1,4}))?"
    match = re.fullmatch(rf"{number}\s*([{''.join(powers)}]?)(?:{unit}s?)?", text.strip())
    if match is None:
        return math.nan
    return float(f"{match[1]}e{int(match[2] or 0) + 3 * powers[match[3]]}")  # rounded once, as a product is not
