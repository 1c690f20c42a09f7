"""Why RigL is not better than SET in a short training: how many weights a dynamic mask tries, and how many it keeps.

The network, data and learning rate are those of `sparse_training.py`, at density 0.05, with several lengths of training
and intervals. A weight is *tried* if the mask has kept it at any time; a grown weight is *kept* if it is still in the
mask after the next update. Runs that are in the CSV file are skipped.

    python benchmarks/moving_masks.py --root data
    python benchmarks/moving_masks.py --page docs/sparse_training.md   # only writes the table
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from sparse_training import LAYERS, PROBLEMS, Batches, Net, appended, load, rows
from torch import Tensor

from lightning_sparsefl.callbacks import DynamicMask

RESULTS = Path(__file__).parent / "results" / "moving_masks.csv"
DENSITY = 0.05
GROWTHS = {"rigl": "gradient", "set": "random"}
SCHEDULES = ((1, 25), (1, 100), (4, 100))
"""Length of the training as a multiple of that in `sparse_training.py`, and number of steps between two updates."""
MARKS = ("<!-- moving masks: made by benchmarks/moving_masks.py --page -->", "<!-- end of moving masks -->")


class Run(NamedTuple):
    """Key of a run; its fields are the first columns of a row."""

    dataset: str
    method: str
    length: int
    every: int
    seed: int


COLUMNS = (*Run._fields, "epochs", "moves", "tried", "kept", "test_accuracy")


class Watch(Callback):
    """Callback that counts the weights that a mask tries and keeps.

    Args:
        moving: Callback that updates the mask.
    """

    def __init__(self, moving: DynamicMask) -> None:
        self.moving, self.moves, self.shares = moving, 0, []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the initial mask, which the other callback has created before."""
        self.held = {name: mask.clone() for name, mask in self.moving.masks.items()}
        self.tried = {name: mask.clone() for name, mask in self.held.items()}
        self.grown: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Update the counts if the mask has changed."""
        now = self.moving.masks
        if all(torch.equal(now[name], mask) for name, mask in self.held.items()):
            return
        self.moves += 1
        if self.grown:
            kept = sum(int((grown & now[name]).sum()) for name, grown in self.grown.items())
            self.shares.append(kept / sum(int(grown.sum()) for grown in self.grown.values()))
        self.grown = {name: mask & ~self.held[name] for name, mask in now.items()}
        self.held = {name: mask.clone() for name, mask in now.items()}
        self.tried = {name: mask | self.tried[name] for name, mask in now.items()}

    def share_tried(self) -> float:
        """Return the fraction of all masked weights that were tried."""
        return sum(int(mask.sum()) for mask in self.tried.values()) / sum(mask.numel() for mask in self.tried.values())


def runs(seeds: int) -> Iterator[Run]:
    """Yield all runs, one seed after another."""
    for seed in range(seeds):
        for dataset in PROBLEMS:
            for length, every in SCHEDULES:
                yield from (Run(dataset, method, length, every, seed) for method in GROWTHS)


def measure(run: Run, data: tuple[Tensor, Tensor, Tensor, Tensor]) -> dict[str, Any]:
    """Train once, and evaluate the final weights on the whole test set."""
    images, labels, test_images, test_labels = data
    L.seed_everything(run.seed, verbose=False)
    train, test = Batches(images, labels, run.seed), Batches(test_images, test_labels, None, 500)
    epochs = run.length * PROBLEMS[run.dataset].epochs
    net = Net(images.shape[1], epochs * len(train))
    moving = DynamicMask(
        density=DENSITY,
        growth=GROWTHS[run.method],
        every_n_steps=run.every,
        seed=run.seed,
        layers=LAYERS,
        rescale=False,
    )
    watch = Watch(moving)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=epochs,
        limit_val_batches=0,
        enable_model_summary=False,
        callbacks=[moving, watch],
        **quiet,
    )
    trainer.fit(net, train, test)
    return {
        **run._asdict(),
        "epochs": epochs,
        "moves": watch.moves,
        "tried": f"{watch.share_tried():.4f}",
        "kept": f"{statistics.mean(watch.shares):.4f}" if watch.shares else "",
        "test_accuracy": f"{trainer.test(net, test, verbose=False)[0]['accuracy']:.4f}",
    }


def sweep(path: Path, seeds: int, root: str) -> None:
    """Train the runs that are not in the file, and write the row of each as soon as it ends."""
    kinds = (str, str, int, int, int)
    done = {Run(*(kind(row[name]) for kind, name in zip(kinds, Run._fields, strict=True))) for row in rows(path)}
    data = {name: load(name, root, None) for name in PROBLEMS}
    missing = [run for run in runs(seeds) if run not in done]
    for row in appended(path, COLUMNS, missing, lambda run: measure(run, data[run.dataset])):
        print(tuple(row.values()), flush=True)


def table(found: list[dict[str, str]]) -> str:
    """Create the table with one line per schedule, RigL beside SET."""
    lines = [
        "| data | epochs | steps between moves | moves | seeds | tried, % | kept, % | test accuracy, % |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for key in dict.fromkeys((row["dataset"], row["epochs"], row["every"]) for row in found):
        mine = [row for row in found if (row["dataset"], row["epochs"], row["every"]) == key]
        methods = [[row for row in mine if row["method"] == method] for method in GROWTHS]
        cells = [" / ".join(spread(rows, column) for rows in methods) for column in ("tried", "kept", "test_accuracy")]
        seeds = " / ".join(str(len(rows)) for rows in methods)
        lines.append(f"| {' | '.join(key)} | {mine[0]['moves']} | {seeds} | {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(found: list[dict[str, str]], column: str) -> str:
    """Format mean and standard deviation in percent; a dash without runs."""
    values = [100 * float(row[column]) for row in found if row[column]]
    deviation = f" ({statistics.stdev(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{deviation}" if values else "-"


def write_page(page: Path, found: list[dict[str, str]]) -> None:
    """Replace the table between the marks of a page."""
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{table(found)}\n\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def main() -> None:
    """Train the missing runs, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("SPARSEFL_DATA", "data"), help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file; runs in it are skipped")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds, from 0")
    parser.add_argument("--page", type=Path, help="page to write the table of the CSV file to, without training")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.page:
        write_page(arguments.page, rows(arguments.out))
    else:
        sweep(arguments.out, arguments.seeds, arguments.root)


if __name__ == "__main__":
    main()
