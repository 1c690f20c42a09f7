"""Where it helps to rescale first weights to the fan-in that a random mask keeps (`rescale` of `StaticMask`).

Two networks, by density and with and without `rescale`: an MLP without norms on scikit-learn's digits, all of whose
matrices are masked (14 epochs of 23 steps), and the network of `sparse_training.py`, which has batch norm, on
Fashion-MNIST in one epoch. A run whose row is in the CSV is skipped.

    python benchmarks/first_weights.py --root data
    python benchmarks/first_weights.py --page docs/sparse_training.md   # no training: the table from the rows
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from sklearn.datasets import load_digits
from sparse_training import LAYERS, Batches, appended, load, rows
from sparse_training import Net as Convolutions
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsefl.callbacks import DynamicMask, StaticMask

RESULTS = Path(__file__).parent / "results" / "first_weights.csv"
METHODS = {
    "static": lambda **options: StaticMask(**options),
    "set": lambda **options: DynamicMask(growth="random", every_n_steps=25, **options),
    "rigl": lambda **options: DynamicMask(growth="gradient", every_n_steps=25, **options),
}
DENSITIES = {"digits": (0.5, 0.1, 0.05), "fashion-mnist": (0.5, 0.05)}
EPOCHS = {"digits": 14, "fashion-mnist": 1}
MARKS = ("<!-- first weights: made by benchmarks/first_weights.py --page -->", "<!-- end of first weights -->")


class Run(NamedTuple):
    """One row; the fields are its first columns."""

    dataset: str
    method: str
    density: float
    rescale: int
    seed: int


COLUMNS = (*Run._fields, "epochs", "test_accuracy")


class Perceptron(L.LightningModule):
    """64-100-50-10 with ReLU, SGD with momentum, and a learning rate that falls by a cosine."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        return cross_entropy(self.net(batch[0]), batch[1])

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        """Return the optimizer and its schedule."""
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,437 training and 360 test samples of scikit-learn's digits, with their labels."""
    found = load_digits()
    images, labels = torch.tensor(found.data).float().div_(16), torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return images[order[:1437]], labels[order[:1437]], images[order[1437:]], labels[order[1437:]]


def measure(run: Run, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Train once, and score the last weights on the whole test set."""
    images, labels, test_images, test_labels = data
    L.seed_everything(run.seed, verbose=False)
    size = 64 if run.dataset == "digits" else 128
    train, test = Batches(images, labels, run.seed, size), Batches(test_images, test_labels, None, 500)
    steps = EPOCHS[run.dataset] * len(train)
    net = Perceptron(steps) if run.dataset == "digits" else Convolutions(images.shape[1], steps)
    layers = None if run.dataset == "digits" else LAYERS
    callback = METHODS[run.method](density=run.density, seed=run.seed, rescale=bool(run.rescale), layers=layers)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS[run.dataset],
        limit_val_batches=0,
        enable_model_summary=False,
        callbacks=[callback],
        **quiet,
    )
    trainer.fit(net, train)
    accuracy = trainer.test(net, test, verbose=False)[0]["accuracy"]
    return {**run._asdict(), "epochs": EPOCHS[run.dataset], "test_accuracy": f"{accuracy:.4f}"}


def runs(seeds: int, datasets: list[str]) -> list[Run]:
    """Return every run."""
    every = itertools.product(datasets, range(seeds), METHODS, (0, 1))
    return [Run(d, m, density, rescale, seed) for d, seed, m, rescale in every for density in DENSITIES[d]]


def sweep(path: Path, seeds: int, datasets: list[str], root: str) -> None:
    """Train what has no row yet, and write its row at once."""
    kinds = (str, str, float, int, int)
    done = {Run(*(kind(row[name]) for kind, name in zip(kinds, Run._fields, strict=True))) for row in rows(path)}
    data = {name: digits() if name == "digits" else load(name, root, None) for name in datasets}
    missing = [run for run in runs(seeds, datasets) if run not in done]
    for row in appended(path, COLUMNS, missing, lambda run: measure(run, data[run.dataset])):
        print(tuple(row.values()), flush=True)


def table(found: list[dict[str, str]]) -> str:
    """Return one line a method and density, without and with `rescale`."""
    lines = [
        "| data | epochs | density | method | seeds | without `rescale`, % | with `rescale`, % |",
        "|---|--:|--:|---|--:|--:|--:|",
    ]
    for key in dict.fromkeys((row["dataset"], row["epochs"], row["density"], row["method"]) for row in sorted_(found)):
        mine = [row for row in found if (row["dataset"], row["epochs"], row["density"], row["method"]) == key]
        cells = [[100 * float(row["test_accuracy"]) for row in mine if row["rescale"] == flag] for flag in "01"]
        seeds = " / ".join(str(count) for count in dict.fromkeys(map(len, cells)))
        means = " | ".join(f"{statistics.mean(cell):.2f}" if cell else "-" for cell in cells)
        lines.append(f"| {' | '.join(key)} | {seeds} | {means} |")
    return "\n".join(lines)


def sorted_(found: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return rows by data set, and by density from the largest."""
    return sorted(found, key=lambda row: (row["dataset"], -float(row["density"])))


def write_page(page: Path, found: list[dict[str, str]]) -> None:
    """Put a new table between the marks of the page, and leave its words."""
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{table(found)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def main() -> None:
    """Train what is missing, or make the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("SPARSEFL_DATA", "data"), help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the CSV; a run whose row is in it is skipped")
    parser.add_argument("--seeds", type=int, default=3, help="how many, from 0")
    parser.add_argument("--datasets", nargs="+", choices=list(DENSITIES), default=list(DENSITIES))
    parser.add_argument("--page", type=Path, help="train nothing, and put the table of the CSV into this page")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.page:
        write_page(arguments.page, rows(arguments.out))
    else:
        sweep(arguments.out, arguments.seeds, arguments.datasets, arguments.root)


if __name__ == "__main__":
    main()
