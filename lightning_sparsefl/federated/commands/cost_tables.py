"""Tables of the estimated costs of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_sparsefl.report import print_line, print_table, quantity
from lightning_sparsefl.report.measures.prefix import scaled_unit
from lightning_sparsefl.report.tables import NOT_COUNTED

_NAME_WIDTH = 34
"""Width of names with which the table of layers fits into 80 columns."""
_ROWS = {
    "training FLOPs": ("flops", "FLOP"),
    "bytes down": ("downlink_bytes", "B"),
    "bytes up": ("uplink_bytes", "B"),
    "bytes, both ways": ("bytes", "B"),
    "  of these, masks": ("mask_bytes", "B"),
}
COLUMNS = ("paper", "analytic", "wire")
"""Ways to count a cost."""
_LEGEND = """\
The tensors are those of a client's first message, and forward FLOPs are those
of one sample. A client-round is the work of one client in one round; the last
table is the sum over all of them. Bytes down go to clients, bytes up come back.
  paper     by the formula of the method's paper, or else by the kept weights
  analytic  operations of training with the weights that masks keep
  wire      sizes of encoded messages, without the values that clients log
An empty cell is a cost that its column does not count."""
_ESTIMATE = """\
Masks that depend on gradients are simulated with noise, which changes them more
than training does: their bytes on the wire are upper estimates. Those of masks
that depend on weights are lower ones, since simulated steps keep their order."""


@dataclass(frozen=True)
class Profile:
    """Estimated costs of a run in bytes and FLOPs."""

    content: Mapping[str, Any]
    """Content that `to_json` writes."""

    def to_json(self) -> str:
        """Return the complete profile as JSON."""
        return json.dumps(self.content, indent=2)

    def print(self) -> None:
        """Print the profile as tables."""
        content = self.content
        factor, unit = scaled_unit(min(content.get("forward_flops") or 0.0, 1e6), "FLOPs")  # at most MFLOPs
        print_table(
            f"{content['algorithm']}: {content['parameters']:,} parameters, density {content['density']:.4f}",
            ("tensor", "elements", "density", f"forward {unit}"),
            list(_layer_rows(content, factor)),
        )
        if "final_density" in content:
            print_line(f"The server's masks keep {content['final_density']:.4%} of their layers after the last round.")
        cohorts = f"{content['rounds']:,} rounds, {content['client_rounds']:,} client-rounds"
        for title, costs in (("One client-round, mean", content["client_round"]), (cohorts, content["run"])):
            rows = [(label, *(_cell(costs, column, *what) for column in COLUMNS)) for label, what in _ROWS.items()]
            print_table(title, ("", *COLUMNS), rows)
        if "sampler" in content:
            print_line(f"Cohorts are drawn uniformly here, not by {content['sampler']}.")
        print_line(f"\n{_LEGEND}" + (f"\n{_ESTIMATE}" if content["run"]["wire"]["mask_bytes"] else ""))


def _layer_rows(content: Mapping[str, Any], factor: float) -> Iterator[tuple[str, ...]]:
    def shown(flops: float | None) -> str:
        return NOT_COUNTED if flops is None else f"{flops / factor:,.3f}"

    counted = 0.0
    for name, layer in content["layers"].items():
        counted += layer.get("flops", 0.0)
        yield _short(name), f"{layer['size']:,}", f"{layer['density']:.4f}", shown(layer.get("flops"))
    total = content.get("forward_flops")
    if total is not None and total - counted > 1:
        yield "(products without a weight)", "", "", shown(total - counted)
    density = content["kept"] / content["parameters"]
    yield "total", f"{content['parameters']:,}", f"{density:.4f}", shown(total)


def _short(name: str) -> str:
    """Return a name without its middle if it is long, since names of layers differ at their ends."""
    return name if len(name) <= _NAME_WIDTH else f"{name[:8]}..{name[10 - _NAME_WIDTH :]}"


def _cell(costs: Mapping[str, Mapping[str, float]], column: str, key: str, unit: str) -> str:
    if key in costs[column]:
        return quantity(costs[column][key], unit)
    return NOT_COUNTED if key == "flops" and column != "wire" else ""
