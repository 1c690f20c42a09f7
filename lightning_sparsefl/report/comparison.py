"""Table of a module's costs before and after a change, such as the removal of units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_sparsefl.cost import ModelCosts, measure
from lightning_sparsefl.report.tables import print_table, quantity


@dataclass(frozen=True)
class Comparison:
    """Costs of two modules; ``str`` gives a table, and :meth:`print` prints one."""

    before: ModelCosts
    """Costs of the first module."""
    after: ModelCosts
    """Costs of the second."""

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return the table: a name, both values and the second as a share of the first.

        Example:
            >>> before, after = ModelCosts(1000, 4000.0, 2e-3), ModelCosts(250, 1000.0, 1e-3)
            >>> Comparison(before, after).rows()[-1]
            ('latency', '2 ms', '1 ms', '50.0 %')
        """
        one, two = self.before, self.after
        return [
            ("parameters", f"{one.parameters:,}", f"{two.parameters:,}", _share(two.parameters, one.parameters)),
            ("forward FLOPs", quantity(one.flops, "FLOP"), quantity(two.flops, "FLOP"), _share(two.flops, one.flops)),
            ("latency", _duration(one.seconds), _duration(two.seconds), _share(two.seconds, one.seconds)),
        ]

    def __str__(self) -> str:
        """Return the table as text."""
        rows = [("", "before", "after", "share"), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        return "\n".join(
            f"{row[0]:<{widths[0]}}" + "".join(f"  {cell:>{widths[i]}}" for i, cell in enumerate(row[1:], start=1))
            for row in rows
        )

    def print(self, title: str = "Costs of one forward pass") -> None:
        """Print the table.

        Args:
            title: Title of the table.
        """
        print_table(title, ("", "before", "after", "share"), self.rows())


def compare_costs(before: nn.Module, after: nn.Module, *example_inputs: Any, seconds: float = 0.5) -> Comparison:
    """Measure two modules on the same inputs.

    Args:
        before: First module, such as the one before :func:`lightning_sparsefl.sparse.shrink`.
        after: Second module.
        example_inputs: Arguments of both, on their device.
        seconds: Time to measure each for.

    Raises:
        InvalidOption: If `seconds` is not positive.
    """
    one, two = (measure(module, *example_inputs, seconds=seconds) for module in (before, after))
    return Comparison(one, two)


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}".replace("%", " %") if whole else ""


def _duration(seconds: float) -> str:
    """Return a duration in milliseconds, or microseconds below one.

    Example:
        >>> _duration(0.01234), _duration(1.5e-5)
        ('12.34 ms', '15 us')
    """
    return f"{seconds * 1e3:.4g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.4g} us"
