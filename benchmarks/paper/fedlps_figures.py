"""FedLPS (arXiv:2412.07216), Figures 6 to 9, on MNIST: classes that clients lack, levels of capacity, patterns.

Figures 7 and 8 are about CIFAR-10 with VGG11; here the levels are those of the figures and the network that of MNIST.
The methods of Figure 9 are compared at four densities, and two options of the learned pattern at one of them. One seed,
100 rounds.

    python benchmarks/paper/fedlps_figures.py --data DIR [--only 'lacks*']
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import Row
from _runs import Run, main
from _tables import markdown, mean, of, percent

LEVELS = {"low": "[1.0, 0.5]", "median": "[1.0, 0.5, 0.25]", "high": "[1.0, 0.5, 0.25, 0.125, 0.0625]"}
CELLS = {
    **{
        f"lacks{lacks}-{method}": (f"figure6/mnist_lacks{lacks}_{method}", ())
        for lacks in (2, 4, 6)
        for method in ("fedlps", "fedspa")
    },
    **{
        f"{pattern}-{density}": (f"figure9/mnist_{pattern}_density{density}", ())
        for density in (0.2, 0.4, 0.6, 0.8)
        for pattern in ("learned", "magnitude", "ordered", "random")
    },
    "learned-0.4-by-round": ("figure9/mnist_learned_density0.4", ("--algorithm.refresh", "round")),
    "learned-0.4-untied": ("figure9/mnist_learned_density0.4", ("--algorithm.score_strength", "0")),
    **{
        f"{name}-{method}": (cell, ("--algorithm.levels" if method == "fedlps" else "--federation.capacities", levels))
        for name, levels in LEVELS.items()
        for method, cell in (("fedlps", "table1/mnist_fedlps"), ("heterofl", "table1/mnist_heterofl"))
    },
}
"""Cell and further options."""
NO_CAPACITIES = ("--federation.capacities", "null")
"""FedLPS draws capacities from its own levels in every round."""
RUNS = [
    Run(
        name,
        f"paper/fedlps/{cell}.yaml",
        options=(
            *("--trainer.check_val_every_n_round", "20", "--federation.checkpoint_every_n_rounds", "10"),
            *((*options, *NO_CAPACITIES) if "--algorithm.levels" in options else options),
        ),
        metric="personal/test_acc",
        engine="stacked" if name.endswith(("fedspa", "heterofl")) else "fast",
    )
    for name, (cell, options) in CELLS.items()
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracy, FLOPs and the devices' simulated time of each point of the figures."""
    columns = (("flops_train", 1e12), ("bytes_up", 1e6), ("simulated", 1.0))
    lines = []
    for name in CELLS:
        own = of(rows, name)
        lines.append((f"`{name}`", percent(own), *(mean(own, column, scale) for column, scale in columns)))
    return markdown(("point", "personal, %", "TFLOP of what is left", "MB up", "simulated s"), lines)


if __name__ == "__main__":
    main(RUNS, "fedlps_figures", table)
