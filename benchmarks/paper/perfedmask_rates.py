"""PerFedMask (Setayesh et al., ICLR 2023), Figure 3: trained parameters and FLOPs against the masking rate.

All clients have the same budget of 1 - rate of the body. The reductions are those of ``sparsefl profile`` against rate
0, of a client-round with batches of 50, as means over the clients: PreResNet18 on CIFAR-10 and MobileNet on CIFAR-100,
with the plan that the method optimizes, and with layers in their order. No training and no data.

    python benchmarks/paper/perfedmask_rates.py
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import DOCUMENT, REPOSITORY, RESULTS, Row, append, commit, read
from _tables import markdown, with_table

from lightning_sparsefl.cli import main as sparsefl

NAME = "perfedmask_rates"
COLUMNS = ("network", "masking", "rate", "parameters", "flops", "commit")
"""`rate`: fraction of the body beyond the budget; `parameters`: trained by a client on average; `flops`: of its
round."""
NETWORKS = {"PreResNet18": "cifar10_c1_perfedmask", "MobileNet": "cifar100_c1_perfedmask"}
MASKINGS = ("optimized", "sequential")
RATES = [tenth / 10 for tenth in range(10)]


def measure(network: str, masking: str, rate: float) -> tuple[float, float]:
    """Return the parameters that a client trains, and the FLOPs of its round, as means over the clients.

    Args:
        network: Key of `NETWORKS`.
        masking: Way of choosing the trained layers.
        rate: Masking rate in [0, 1).
    """
    config = REPOSITORY / "configs/paper/perfedmask/table1" / f"{NETWORKS[network]}.yaml"
    options = ("--algorithm.masking", masking, "--federation.capacities", f"[{1 - rate:.1f}]")
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        if sparsefl(["profile", "--config", str(config), "--json", *options]):
            raise SystemExit(f"The profile of {network} at a masking rate of {rate} failed.")
    costs = json.loads(shown.getvalue())["client_round"]
    return costs["paper"]["uplink_bytes"] / 4, costs["analytic"]["flops"]


def missing(rows: Sequence[Row]) -> Iterator[tuple[str, str, float]]:
    """Return the points of the figure that have no row."""
    done = {(row["network"], row["masking"], row["rate"]) for row in rows}
    for network in NETWORKS:
        for masking in MASKINGS:
            yield from ((network, masking, rate) for rate in RATES if (network, masking, str(rate)) not in done)


def table(rows: Sequence[Row]) -> str:
    """Return the table: reductions in percent of the values at rate 0."""
    kinds = [(network, masking) for network in NETWORKS for masking in MASKINGS]
    found = {(row["network"], row["masking"], row["rate"]): row for row in rows}
    lines = []
    for rate in map(str, RATES[1:]):
        cells = []
        for kind in kinds:
            full, row = found.get((*kind, "0.0")), found.get((*kind, rate))
            cells += [_reduction(full, row, column) for column in ("parameters", "flops")]
        lines.append((rate, *cells))
    head = [f"{network}, {masking}: {column}" for network, masking in kinds for column in ("parameters", "FLOPs")]
    return markdown(("masking rate", *head), lines)


def _reduction(full: Row | None, row: Row | None, column: str) -> str:
    return f"{100 - 100 * float(row[column]) / float(full[column]):.1f}" if full and row else "-"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / f"{NAME}.csv", help="CSV file")
    parser.add_argument("--table", action="store_true", help="only write the table to docs/results.md")
    options = parser.parse_args()
    if options.table:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), NAME, table(read(options.out))))
        return
    for network, masking, rate in missing(read(options.out)):
        parameters, flops = measure(network, masking, rate)
        values = (network, masking, rate, round(parameters), round(flops), commit())
        append(options.out, [dict(zip(COLUMNS, values, strict=True))], COLUMNS)


if __name__ == "__main__":
    main()
