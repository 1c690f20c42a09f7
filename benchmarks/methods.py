"""Every exported method for ten rounds on MNIST: a check that each one learns on real data, not a comparison.

20 clients with 4 classes each and 300 samples, of which a tenth is for validation; 10 clients a round, 3 local epochs,
batches of 20, the network of FedLPS (21,840 parameters), SGD with a learning rate of 0.1. Methods whose clients differ
in capacity have a third of the clients at 1/4, 1/2 and 1. Options that differ from the defaults are in the row, and
they were not tuned: ten rounds favour methods that change little of FedAvg. A row that is in the CSV is skipped.

    python benchmarks/methods.py --root data [--only 'Fed*']
    python benchmarks/methods.py --table     # no training: the rows as Markdown
"""

from __future__ import annotations

import argparse
import fnmatch
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from sparse_training import appended, rows

from lightning_sparsefl import FederatedTrainer, Federation, algorithms
from lightning_sparsefl.data import FederatedMNIST, Pathological
from lightning_sparsefl.models import ExitMNISTNet, MNISTNet, SmallCNN

RESULTS = Path(__file__).parent / "results" / "methods.csv"
COLUMNS = ("method", "options", "model", "global_acc", "personal_acc", "mb_up", "mb_down", "tflop", "seconds")
CAPACITIES = [0.25, 0.5, 1.0]
OPTIONS: dict[str, dict[str, Any]] = {
    "FLASC": {"adapters": ("net.fc*",), "server_lr": 0.01},  # the linear layers stand for adapters
    "FedRolex": {"scaler": False},  # without norms after it, the scaler makes the loss overflow
    "HeteroFL": {"scaler": False},
    "PFedMe": {"lam": 5.0},  # times the learning rate below 1
    "ScaleFL": {"widths": (0.5, 0.75, 1.0), "scaler": False},  # for three exits
    "PruneFL": {"first_epochs": 2},  # of at most 20 times 50 epochs of the first client
}
"""Options of methods whose defaults are for other lengths of training, or for networks of another kind."""


class AdamNet(MNISTNet):
    """The network with Adam, for methods that train scores."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Create Adam with the learning rate of the paper of FedPM."""
        return torch.optim.Adam(self.parameters(), lr=0.1)


MODELS: dict[str, Callable[[], L.LightningModule]] = {
    "DepthFL": lambda: ExitMNISTNet(lr=0.1),
    "FedBN": lambda: SmallCNN(sample_shape=(1, 28, 28), norm="batch", lr=0.1),
    "FedPM": AdamNet,
    "ScaleFL": lambda: ExitMNISTNet(lr=0.1),
    "SCAFFOLD": lambda: MNISTNet(lr=0.03),  # at .1 its control variates diverge on so few samples
}
"""Networks of methods that need exits, norms, another optimizer or rate; all others train `MNISTNet` at 0.1."""


def measure(name: str, root: str, rounds: int, samples: int) -> dict[str, Any]:
    """Train one method, and return its row."""
    L.seed_everything(0, verbose=False)
    options = OPTIONS.get(name, {})
    method = getattr(algorithms, name)(**options)
    module = MODELS.get(name, lambda: MNISTNet(lr=0.1))()
    data = FederatedMNIST(
        root=root,
        num_clients=20,
        partition=Pathological(classes_per_client=4),
        examples_per_client=samples,
        val_fraction=0.1,
        batch_size=20,
        eval_split="test",
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            algorithm=method,
            federation=Federation(
                clients_per_round=10,
                capacities=CAPACITIES if method.at_full_capacity else None,
                local_engine="fast",
            ),
            max_rounds=rounds,
            max_epochs=3,
            check_val_every_n_round=rounds,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            default_root_dir=folder,
            seed=0,
        )
        started = time.perf_counter()
        summary = trainer.fit(module, data)
        elapsed = time.perf_counter() - started
    common = summary.get("global/test_acc")  # None for methods that train no global model
    return {
        "method": name,
        "options": ", ".join(f"{key}={value}" for key, value in options.items()),
        "model": type(module).__name__,
        "global_acc": "" if common is None else f"{common:.4f}",
        "personal_acc": f"{summary['personal/test_acc']:.4f}",
        "mb_up": f"{summary['comm/uplink_bytes_total'] / 1e6:.3f}",
        "mb_down": f"{summary['comm/downlink_bytes_total'] / 1e6:.3f}",
        "tflop": f"{summary['flops/train_total'] / 1e12:.4f}",
        "seconds": f"{elapsed:.1f}",
    }


def table(found: list[dict[str, str]]) -> str:
    """Return the rows as a Markdown table, in the order of the methods' names."""
    head = ("method", "options", "network", "global", "personal", "MB up", "MB down", "TFLOP", "seconds")
    ordered = sorted(found, key=lambda row: row["method"].lower())
    body = [(f"`{row['method']}`", *(row[column] for column in COLUMNS[1:])) for row in ordered]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *body))


def main() -> None:
    """Run the methods that have no row yet, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data", help="folder with the data sets in torchvision's layout")
    parser.add_argument("--only", default="*", help="pattern of the names of methods")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=300, help="examples of each client")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true", help="print the rows as a Markdown table and do nothing else")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(rows(arguments.out)))
        return
    done = {row["method"] for row in rows(arguments.out)}
    missing = [name for name in algorithms.__all__ if name not in done and fnmatch.fnmatch(name, arguments.only)]
    run = partial(measure, root=arguments.root, rounds=arguments.rounds, samples=arguments.samples)
    for row in appended(arguments.out, COLUMNS, missing, run):
        print(row, flush=True)


if __name__ == "__main__":
    main()
