"""FedSpa (arXiv:2201.11380), Table 5: seconds of the mask search beside those of local training, of one client.

Clients train for five epochs at density .5, as in the cells of Table 1, and then search for their next mask; the times
are means over `--clients` clients of round 0, after one client that warms up. Data are random images of the cell's
shape and number (1,248 a client of EMNIST-Letters, 500 of CIFAR), since time does not depend on what they show; so no
data set is needed. The device is the GPU if there is one. Each search is repeated as one that sorts all scores of each
layer, once to drop and once to grow, in the place of selecting the largest ones; the script stops if its masks differ.

    python benchmarks/paper/fedspa_search.py [--tasks emnist_letters]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import lightning as L
import torch

sys.path.insert(0, str(Path(__file__).parent))
from _rows import DOCUMENT, RESULTS, Row, append, commit, machine, read
from _tables import markdown, with_table

from lightning_sparsefl import FederatedTrainer, Federation
from lightning_sparsefl.algorithms import FedSpa
from lightning_sparsefl.data import FederatedDataModule
from lightning_sparsefl.federated.client import Client
from lightning_sparsefl.models import VGG11, LeNet5, ResNet18
from lightning_sparsefl.sparse.density import ceil_count
from lightning_sparsefl.sparse.masks import same
from lightning_sparsefl.sparse.schedule import cosine
from lightning_sparsefl.types import Masks, Message, Update, Weights

NAME = "fedspa_search"
PARTS = ("train", "search", "sorted")
"""What is timed: local training, the search, and the same search by sorting."""
COLUMNS = (
    "task",
    "clients",
    *(f"{name}{kind}" for name in PARTS for kind in ("", "_std")),
    "device",
    "torch",
    "commit",
)
TASKS = {
    "emnist_letters": ("EMNIST-L, LeNet5", LeNet5, (1, 28, 28), 26, 1248),
    "cifar10": ("CIFAR-10, VGG11", VGG11, (3, 32, 32), 10, 500),
    "cifar100": ("CIFAR-100, ResNet18", ResNet18, (3, 32, 32), 100, 500),
}
"""Label, network, shape of a sample, number of classes, samples of a client."""
PAPER = {
    ("emnist_letters", "cpu"): ("1.03 (0.04)", "0.09 (0.00)", "8.92"),
    ("cifar10", "cpu"): ("11.40 (0.25)", "2.19 (0.11)", "19.19"),
    ("cifar100", "cpu"): ("28.61 (0.38)", "3.70 (0.28)", "12.93"),
    ("emnist_letters", "gpu"): ("0.39 (0.01)", "0.02 (0.00)", "5.66"),
    ("cifar10", "gpu"): ("1.56 (0.03)", "0.22 (0.01)", "14.30"),
    ("cifar100", "gpu"): ("2.71 (0.01)", "0.33 (0.01)", "12.06"),
}
"""Seconds of training and of the search, with standard deviations, and their ratio in percent."""
_seconds: list[dict[str, float]] = []
"""Seconds of the parts of each client so far."""


class RandomImages(FederatedDataModule):
    """Random images, as many for each client as its cell has."""

    def __init__(self, task: str, clients: int) -> None:
        _, _, self.sample_shape, self.num_classes, samples = TASKS[task]
        self.num_train, self.num_test = samples * clients, 10 * clients
        super().__init__(num_clients=clients, batch_size=128, eval_split="test")

    def load(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw the images."""
        images = torch.randn(self.num_train, *self.sample_shape)
        labels = torch.arange(len(images)) % self.num_classes
        return images, labels, images[: self.num_test], labels[: self.num_test]


class TimedFedSpa(FedSpa):
    """FedSpa, which notes the seconds of its parts."""

    def train(self, message: Message, client: Client) -> Update:
        """Train and search, and note the time; in the last round, which has no search, do nothing."""
        if client.round == client.max_rounds - 1:
            still = {name: torch.zeros_like(value) for name, value in message.weights.items()}
            return Update(weights=still, kind="difference")
        _seconds.append({})
        begin = clock()
        update = super().train(message, client)
        _seconds[-1]["train"] = clock() - begin - _seconds[-1].pop("searches")
        return update

    def _search(self, trained: Weights, masks: Masks, client: Client) -> Masks:
        noted = NotedGradient(client)
        begin = clock()
        found = super()._search(trained, masks, noted)  # type: ignore[arg-type]
        middle = clock()
        again = by_sorting(trained, noted.slopes, masks, cosine(self.exchange, client.round, client.max_rounds))
        _seconds[-1] |= {"search": middle - begin, "sorted": noted.seconds + clock() - middle}
        _seconds[-1]["searches"] = clock() - begin
        if not same(found, again):
            raise SystemExit("The two searches found different masks.")
        return found


class NotedGradient:
    """A client whose gradient is kept, with the seconds that it took.

    Args:
        client: The client.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.round, self.max_rounds = client, client.round, client.max_rounds

    def gradient(self, weights: Weights) -> Weights:
        """See :meth:`Client.gradient`."""
        begin = clock()
        self.slopes = self.client.gradient(weights)
        self.seconds = clock() - begin
        return self.slopes


def by_sorting(trained: Weights, slopes: Weights, masks: Masks, rate: float) -> Masks:
    """Exchange weights as the search does, by sorting all weights and all gradients of each layer.

    Args:
        trained: Weights after local training.
        slopes: Gradients of the loss.
        masks: Masks of the client.
        rate: Fraction of the kept weights to exchange.
    """
    found = {}
    for name, mask in masks.items():
        kept = mask.flatten().clone()
        dropped = ceil_count(rate, int(kept.sum()))
        kept[trained[name].flatten().abs().masked_fill(~kept, torch.inf).sort().indices[:dropped]] = False
        kept[slopes[name].flatten().abs().masked_fill(kept, -1).sort(descending=True).indices[:dropped]] = True
        found[name] = kept.view_as(mask)
    return found


def clock() -> float:
    """Return the CPU seconds of this process, on which other processes have no influence; on a GPU, wall seconds."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def measure(task: str, clients: int) -> dict[str, object]:
    """Return the row of a task.

    Args:
        task: Key of `TASKS`.
        clients: Number of clients that are measured.
    """
    L.seed_everything(0, verbose=False)
    _seconds.clear()
    with tempfile.TemporaryDirectory() as folder:
        trainer = FederatedTrainer(
            algorithm=TimedFedSpa(density=0.5, mask_pool="all"),
            federation=Federation(clients_per_round=clients + 1, eval_clients=1, local_engine="fast"),
            max_rounds=2,
            max_epochs=5,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
        )
        trainer.fit(TASKS[task][1](num_classes=TASKS[task][3]), RandomImages(task, clients + 1))
    row: dict[str, object] = {"task": task, "clients": clients, **machine(), "commit": commit()}
    for name in PARTS:
        values = [seconds[name] for seconds in _seconds[1:]]
        row |= {name: round(statistics.fmean(values), 3), f"{name}_std": round(statistics.stdev(values), 3)}
    return row


def table(rows: Sequence[Row]) -> str:
    """Return the table: seconds beside the paper's, whose processor and GPU are a Xeon E5-2620 and a 1080Ti."""
    return markdown(
        (
            *("task", "device", "paper: train, s", "search, s", "%"),
            *("ours: train, s", "search, s", "%", "search by sorting, s", "%"),
        ),
        _lines(rows),
    )


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    for (task, kind), paper in PAPER.items():
        own = [row for row in rows if row["task"] == task and ("NVIDIA" in row["device"]) == (kind == "gpu")]
        cells = ["-"] * 5
        if own:
            (row,) = own
            train, search, by_sorting = (f"{float(row[n]):.2f} ({float(row[f'{n}_std']):.2f})" for n in PARTS)
            shares = [f"{100 * float(row[name]) / float(row['train']):.2f}" for name in PARTS[1:]]
            cells = [train, search, shares[0], by_sorting, shares[1]]
        yield (TASKS[task][0], kind.upper(), *paper, *cells)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), help="rows to measure")
    parser.add_argument("--clients", type=int, default=3, help="clients of each row, at least 2")
    parser.add_argument("--commit", default=None, help="commit of the code; default: that of git")
    parser.add_argument("--out", type=Path, default=RESULTS / f"{NAME}.csv", help="CSV file")
    parser.add_argument("--table", action="store_true", help="only write the table to docs/results.md")
    options = parser.parse_args()
    if options.table:
        DOCUMENT.write_text(with_table(DOCUMENT.read_text(), NAME, table(read(options.out))))
        return
    for task in options.tasks:
        if not any((row["task"], row["device"]) == (task, machine()["device"]) for row in read(options.out)):
            row = measure(task, options.clients)
            append(options.out, [row | ({"commit": options.commit} if options.commit else {})], COLUMNS)


if __name__ == "__main__":
    main()
