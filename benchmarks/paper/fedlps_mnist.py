"""FedLPS (arXiv:2412.07216), Tables I and II, on MNIST: 2 classes a client, 10 of 100 clients a round, 100 rounds.

Seeds 0, 1 and 2 of every method of the two tables. Of FedLPS also with its ablations: the source of the density (the
bandit, the capacity, or .5 for all), capacities that are fixed or drawn anew in every round, and at density .5 the
pattern of kept units. FedLPS and FLST are also run as printed, with mu = lambda = 1 on sums of squares, and FedLPS with
the options that approximate the authors' program, and six methods with five local steps in the place of five epochs.
FedAvg is also run with a tenth of the learning rate, with momentum and with the clients of the authors' program
(`_shards.py`), HeteroFL and FedRolex without the clipping of their cells, Hermes at a lower density, FedRep with the
own layers of the authors' program, and eleven methods with that program's test sets (`_block_tests.py`). All other rows
have the defaults. To be started from the root of the repository.

    python benchmarks/paper/fedlps_mnist.py --data DIR [--only 'fedlps*-seed0']

One command runs all of them, in the order of the seeds. Each finished run is a row of the CSV and is skipped from then
on; a run that was stopped continues from its last checkpoint. To run a row again, delete it and its run folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from _rows import REPOSITORY, Row
from _runs import Run, main
from _tables import markdown, mean, of, percent

SUM = ("--algorithm.reduction", "sum")
DENSE_SECONDS = 3 * 5 * 192 * 968.1e3 / 727e9
"""Of a dense round of a device of capacity 1: 5 epochs of 180 samples, counted as 192 in batches of 32."""
PUBLISHED = (
    *("--config", str(REPOSITORY / "configs/paper/fedlps/as_published_code.yaml")),
    *("--algorithm.time_unit", f"{DENSE_SECONDS:.4e}"),
)
STEPS = ("--trainer.max_epochs", "1", "--trainer.limit_train_batches", "5")
"""Five iterations of local training, as the paper's text says, in the place of five epochs, as its FLOPs say."""
SHARDS = ("--data.partition", "benchmarks.paper._shards.Shards")
"""Clients with two random shards, as in the authors' program, in the place of exactly two classes."""
BLOCKS = ("--data", "benchmarks.paper._block_tests.BlockTestMNIST")
"""Test sets as in the authors' program, with images of classes that a client does not have."""
TWO = ("--algorithm.own", "[net.fc1, net.fc2]")
"""What clients of FedRep keep in the authors' program, in the place of the last linear layer."""
UNCLIPPED = ("--trainer.gradient_clip_val", "null")
"""Gradients as they are, where the authors' program clips those of HeteroFL and FedRolex."""
METHODS = {
    "fedavg": ("FedAvg", "88.15 (1.14)", "2.8", "table1/mnist_fedavg", ()),
    "fedprox": ("FedProx", "87.53 (1.16)", "2.8", "table1/mnist_fedprox", ()),
    "oort": ("Oort", "95.21 (0.42)", "2.8", "table1/mnist_oort", ()),
    "refl": ("REFL", "94.67 (0.33)", "1.3", "table1/mnist_refl", ()),
    "prunefl": ("PruneFL", "90.90 (0.34)", "2.2", "table1/mnist_prunefl", ()),
    "cs": ("CS", "92.44 (1.16)", "1.4", "table1/mnist_cs", ()),
    "efd": ("eFD", "93.31 (0.91)", "1.1", "table1/mnist_efd", ()),
    "fjord": ("FjORD", "92.56 (1.03)", "1.1", "table1/mnist_fjord", ()),
    "heterofl": ("HeteroFL", "90.76 (1.05)", "1.1", "table1/mnist_heterofl", ()),
    "fedrolex": ("FedRolex", "93.73 (1.44)", "1.1", "table1/mnist_fedrolex", ()),
    "fedmp": ("FedMP", "91.63 (0.90)", "1.7", "table1/mnist_fedmp", ()),
    "depthfl": ("DepthFL", "95.44 (0.53)", "2.2", "table1/mnist_depthfl", ()),
    "ditto": ("Ditto", "92.00 (0.30)", "5.6", "table1/mnist_ditto", ()),
    "fedper": ("FedPer", "93.45 (0.07)", "2.8", "table1/mnist_fedper", ()),
    "fedrep": ("FedRep", "91.92 (0.30)", "2.8", "table1/mnist_fedrep", ()),
    "per_fedavg": ("Per-FedAvg", "93.46 (0.33)", "2.8", "table1/mnist_per_fedavg", ()),
    "lotteryfl": ("LotteryFL", "93.37 (1.28)", "1.8", "table1/mnist_lotteryfl", ()),
    "hermes": ("Hermes", "94.05 (0.60)", "1.7", "table1/mnist_hermes", ()),
    "fedspa": ("FedSpa, density .5", "93.94 (0.85)", "1.4", "table1/mnist_fedspa", ()),
    "fedp3": ("FedP3", "92.41 (0.34)", "1.0", "table1/mnist_fedp3", ()),
    "fedlps": ("FedLPS (P-UCBV, Dyn)", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", ()),
    "fedlps-fix": ("FedLPS (P-UCBV, Fix)", "95.72 (0.26)", "0.9", "table2/mnist_pucbv_fix", ()),
    "rcr-dyn": ("RCR, Dyn", "95.99 (0.12)", "1.1", "table2/mnist_rcr_dyn", ()),
    "rcr-fix": ("RCR, Fix", "94.95 (0.20)", "1.1", "table2/mnist_rcr_fix", ()),
    "flst": ("FLST", "94.76 (0.06)", "1.4", "table2/mnist_flst", ()),
    "fedlps-published": ("FedLPS, `as_published_code`", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", PUBLISHED),
    "fedlps-sum": ("FedLPS, `reduction: sum`", "96.77 (0.11)", "0.8", "table1/mnist_fedlps", SUM),
    "flst-sum": ("FLST, `reduction: sum`", "94.76 (0.06)", "1.4", "table2/mnist_flst", SUM),
    **{
        f"flst-{pattern}": (f"FLST, {pattern}", "-", "-", "table2/mnist_flst", ("--algorithm.pattern", pattern))
        for pattern in ("magnitude", "ordered", "random", "rolling")
    },
    "hermes-.3": ("Hermes, density .3", "94.05 (0.60)", "-", "table1/mnist_hermes", ("--algorithm.density", "0.3")),
    "fedrep-two": ("FedRep, last two layers own", "91.92 (0.30)", "-", "table1/mnist_fedrep", TWO),
    "heterofl-unclipped": ("HeteroFL, not clipped", "90.76 (1.05)", "-", "table1/mnist_heterofl", UNCLIPPED),
    "fedrolex-unclipped": ("FedRolex, not clipped", "93.73 (1.44)", "-", "table1/mnist_fedrolex", UNCLIPPED),
    "fedavg-.01": ("FedAvg, learning rate .01", "88.15 (1.14)", "-", "table1/mnist_fedavg", ("--model.lr", "0.01")),
    "fedavg-momentum": ("FedAvg, momentum .5", "88.15 (1.14)", "-", "table1/mnist_fedavg", ("--model.momentum", "0.5")),
    "fedavg-shards": ("FedAvg, random shards", "88.15 (1.14)", "-", "table1/mnist_fedavg", SHARDS),
    "fedavg-steps": ("FedAvg, 5 steps", "88.15 (1.14)", "-", "table1/mnist_fedavg", STEPS),
    "fedspa-steps": ("FedSpa, 5 steps", "93.94 (0.85)", "-", "table1/mnist_fedspa", STEPS),
    "fedper-steps": ("FedPer, 5 steps", "93.45 (0.07)", "-", "table1/mnist_fedper", STEPS),
    "fedlps-steps": ("FedLPS (P-UCBV, Dyn), 5 steps", "96.77 (0.11)", "-", "table1/mnist_fedlps", STEPS),
    "rcr-dyn-steps": ("RCR, Dyn, 5 steps", "95.99 (0.12)", "-", "table2/mnist_rcr_dyn", STEPS),
    "flst-steps": ("FLST, 5 steps", "94.76 (0.06)", "-", "table2/mnist_flst", STEPS),
    "fedper-blocks": ("FedPer, test sets as there", "93.45 (0.07)", "-", "table1/mnist_fedper", BLOCKS),
    "fedrep-blocks": ("FedRep, test sets as there", "91.92 (0.30)", "-", "table1/mnist_fedrep", BLOCKS),
    "ditto-blocks": ("Ditto, test sets as there", "92.00 (0.30)", "-", "table1/mnist_ditto", BLOCKS),
    "fedspa-blocks": ("FedSpa, test sets as there", "93.94 (0.85)", "-", "table1/mnist_fedspa", BLOCKS),
    "per_fedavg-blocks": ("Per-FedAvg, test sets as there", "93.46 (0.33)", "-", "table1/mnist_per_fedavg", BLOCKS),
    "fedp3-blocks": ("FedP3, test sets as there", "92.41 (0.34)", "-", "table1/mnist_fedp3", BLOCKS),
    "fedavg-blocks": ("FedAvg, test sets as there", "88.15 (1.14)", "-", "table1/mnist_fedavg", BLOCKS),
    "lotteryfl-blocks": ("LotteryFL, test sets as there", "93.37 (1.28)", "-", "table1/mnist_lotteryfl", BLOCKS),
    "hermes-blocks": ("Hermes, test sets as there", "94.05 (0.60)", "-", "table1/mnist_hermes", BLOCKS),
    "flst-blocks": ("FLST, test sets as there", "94.76 (0.06)", "-", "table2/mnist_flst", BLOCKS),
    "fedlps-blocks": ("FedLPS (P-UCBV, Dyn), test sets as there", "96.77 (0.11)", "-", "table1/mnist_fedlps", BLOCKS),
}
"""Label, the paper's accuracy and its deviation in percent, its TFLOP, cell, further options."""
FINE_TUNED = "per_fedavg"
"""Method whose published accuracy is that after fine-tuning."""
ONE_BY_ONE = ("fjord", "per_fedavg", "fedlps", "rcr", "flst", "fedrolex")
"""Methods whose clients do not train as a stack, and FedRolex, of which an unclipped stacked run diverged
(docs/results.md)."""
FEW = ("--trainer.check_val_every_n_round", "20", "--federation.checkpoint_every_n_rounds", "10")
RUNS = [
    Run(
        method,
        f"paper/fedlps/{cell}.yaml",
        seed,
        (*FEW, *options),
        metric="personal/test_acc",
        engine="fast" if method.startswith(ONE_BY_ONE) else "stacked",
    )
    for seed in range(3)
    for method, (*_, cell, options) in METHODS.items()
]


def table(rows: Sequence[Row]) -> str:
    """Return the table: accuracy and FLOPs beside the paper's, bytes, and the devices' simulated time."""
    lines = []
    for method, (label, paper, flops, _, _) in METHODS.items():
        own = of(rows, method)
        counts = [mean(own, column, scale) for column, scale in _COUNTS]
        personal = percent(own, "after" if method.startswith(FINE_TUNED) else "final")
        lines.append((label, len(own), paper, personal, percent(own, "common"), flops, *counts))
    counted = ("TFLOP as there", "TFLOP of what is left", "MB up", "simulated s")
    head = ("method", "seeds", "paper, %", "personal, %", "global, %", "paper, TFLOP")
    return markdown((*head, *counted), lines)


_COUNTS = (("flops_paper", 1e12), ("flops_train", 1e12), ("bytes_up", 1e6), ("simulated", 1.0))

if __name__ == "__main__":
    main(RUNS, "fedlps_mnist", table)
