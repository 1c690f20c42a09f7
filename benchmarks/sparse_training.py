"""Accuracy of a small network on real images, by callback and density.

Each run is an ordinary `lightning.pytorch.Trainer` with one callback. Network, data, batches, steps and one-cycle
learning rate are the same. Each run is a row of a CSV file; runs that are in the file are skipped, so the script can be
stopped and restarted. `--root`, or the variable SPARSEFL_DATA, is the folder with the data in torchvision's layout.

    python benchmarks/sparse_training.py --root data
    python benchmarks/sparse_training.py --page docs/sparse_training.md   # only writes the tables
"""

from __future__ import annotations

import argparse
import csv
import itertools
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelPruning
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_sparsefl.callbacks import (
    DynamicMask,
    DynamicPruningWithFeedback,
    GradualPruning,
    LotteryRewind,
    StaticMask,
)
from lightning_sparsefl.cost import count_layers
from lightning_sparsefl.data import FederatedCIFAR10, FederatedFashionMNIST
from lightning_sparsefl.sparse.density import floor_count
from lightning_sparsefl.sparse.schedule import gradual

RESULTS = Path(__file__).parent / "results" / "sparse_training.csv"
DENSITIES = (0.5, 0.2, 0.1, 0.05)
BATCH, PEAK_RATE = 128, 0.1
LAYERS = "!head*"
"""Layers to mask: all methods leave the head dense, and densities are those of the convolutions."""
START, END, EVERY = 0.0, 0.75, 25
"""Start and end of pruning as fractions of the training, and the number of steps between two updates of the mask."""
MARKS = ("<!-- tables: made by benchmarks/sparse_training.py --page -->", "<!-- end of tables -->")
COLUMNS = (
    *("dataset", "method", "density", "density_reached", "seed", "epochs", "steps", "test_accuracy", "seconds"),
    *("train_flops", "torch", "lightning"),
)


class Problem(NamedTuple):
    """Data set, with its number of epochs and its seeds."""

    source: Any
    epochs: int
    seeds: tuple[int, ...]


PROBLEMS = {
    "fashion-mnist": Problem(FederatedFashionMNIST, 3, (0, 1, 2)),
    "cifar-10": Problem(FederatedCIFAR10, 4, (0,)),
}


class Net(L.LightningModule):
    """Network of three 3x3 convolutions of stride 2 with batch norm, global average pooling and one linear layer."""

    def __init__(self, channels: int, steps: int, width: int = 16) -> None:
        super().__init__()
        self.steps = steps
        sizes = (channels, width, 2 * width, 4 * width)
        blocks = [
            nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(sizes)
        ]
        self.body = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(sizes[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits."""
        return self.head(self.body(images))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the mean cross-entropy of a batch."""
        return cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Do nothing; Lightning's `ModelPruning` prunes at the end of a validation, so there must be one."""

    def test_step(self, batch: tuple[Tensor, Tensor]) -> None:
        """Log the accuracy."""
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Any:
        """Create SGD with a one-cycle learning rate."""
        optimizer = torch.optim.SGD(self.parameters(), PEAK_RATE, momentum=0.9, nesterov=True, weight_decay=5e-4)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, self.steps, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Batches:
    """Mini-batches from tensors in memory, in an order that depends on the seed and the epoch."""

    def __init__(self, images: Tensor, labels: Tensor, seed: int | None, size: int = BATCH) -> None:
        self.images, self.labels, self.size = images, labels, size
        self.rng = None if seed is None else torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        return -(-len(self.images) // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        count = len(self.images)
        order = torch.arange(count) if self.rng is None else torch.randperm(count, generator=self.rng)
        for chosen in order.split(self.size):
            yield self.images[chosen], self.labels[chosen]


class Meter(Callback):
    """Callback that counts the operations on non-zero weights: one forward and two backward passes, by density.

    Args:
        looks: Steps that need the gradients of all weights.
    """

    def __init__(self, looks: range) -> None:
        self.looks, self.flops = looks, 0.0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Count the FLOPs of the dense layers."""
        self.layers = count_layers(pl_module, next(iter(trainer.train_dataloader))[0][:1])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Add the FLOPs of a batch."""
        kept = {name: int(weight.count_nonzero()) / weight.numel() for name, weight in effective(pl_module).items()}
        for layer in self.layers:
            density = kept[layer.weight]
            passes = 2 * density + (1.0 if trainer.global_step in self.looks else density)
            self.flops += len(batch[1]) * (2 * layer.macs * passes + 3 * layer.bias)


def effective(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of the forward pass, including those that `ModelPruning` has renamed."""
    return {
        f"{name}.weight": (
            part.weight_orig * part.weight_mask if hasattr(part, "weight_mask") else part.weight
        ).detach()
        for name, part in module.named_modules()
        if isinstance(part, nn.Conv2d | nn.Linear)
    }


class Plan(NamedTuple):
    """Callbacks and options that a method adds to a run."""

    callbacks: list[Callback]
    trainer: Mapping[str, Any] = MappingProxyType({})
    cycle: int | None = None
    """Number of steps of one learning rate schedule; None for the whole training."""
    looks: range = range(0)
    """Steps that need the gradients of weights outside of the mask."""


Method = Callable[[Net, float, int, int], Plan]


def static(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan a fixed random ERK mask."""
    return Plan([StaticMask(density=density, seed=seed, layers=LAYERS, rescale=False)])


def moving(growth: str) -> Method:
    """Plan a dynamic mask that starts as a random ERK mask: RigL or SET."""

    def plan(net: Net, density: float, seed: int, steps: int) -> Plan:
        options = {"growth": growth, "every_n_steps": EVERY, "seed": seed, "layers": LAYERS, "rescale": False}
        callback = DynamicMask(density, **options)
        looks = range(EVERY, round(callback.stop * steps), EVERY) if growth == "gradient" else range(0)
        return Plan([callback], looks=looks)

    return plan


def gradually(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan global magnitude pruning with the cubic schedule."""
    window = {"start": START, "end": END, "every_n_steps": EVERY}
    return Plan([GradualPruning(density=density, **window, scope="global", layers=LAYERS)])


def feedback(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan pruning with feedback (DPF) with the same schedule."""
    window = {"start": START, "end": END, "every_n_steps": EVERY}
    callback = DynamicPruningWithFeedback(density=density, **window, layers=LAYERS)
    return Plan([callback], looks=range(steps))


def model_pruning(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan Lightning's `ModelPruning` with the same cubic schedule.

    `ModelPruning` prunes at the end of an epoch or of a validation, so a validation of one batch is run every few
    steps. It passes the epoch and not the step, so `amount` counts its calls. The amount is a number of weights instead
    of a fraction, so that rounding errors do not accumulate. The lottery ticket option, which is the default, would
    reset the weights to their initial values each time, and the default parameters include biases and norms.
    """
    matrices = [(part, "weight") for part in net.modules() if isinstance(part, nn.Conv2d)]
    total, calls = sum(part.weight.numel() for part, _ in matrices), itertools.count(1)

    def left(call: int) -> int:
        return floor_count(gradual(1.0, density, call * EVERY, round(START * steps), round(END * steps)), total)

    def amount(epoch: int) -> int:
        call = next(calls)
        return left(call - 1) - left(call)

    callback = ModelPruning(
        "l1_unstructured",
        parameters_to_prune=matrices,
        amount=amount,
        use_lottery_ticket_hypothesis=False,
        prune_on_train_epoch_end=False,
    )
    every = {"val_check_interval": EVERY, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    return Plan([callback], {**every, "num_sanity_val_steps": 0})


def lottery(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan three cycles of a lottery ticket in the number of steps of the other methods."""
    callback = LotteryRewind(density=density, cycles=3, rewind=0.2, layers=LAYERS)
    return Plan([callback], cycle=callback.cycle_steps(steps))


def long_lottery(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan three cycles that each have the length of the other trainings, as in the papers: 2.6 times the steps."""
    total = round((3 - 2 * 0.2) * steps)
    return lottery(net, density, seed, total)._replace(trainer={"max_epochs": -1, "max_steps": total})


def dense(net: Net, density: float, seed: int, steps: int) -> Plan:
    """Plan dense training without a callback."""
    return Plan([])


METHODS: dict[str, Method] = {
    "dense": dense,
    "rigl": moving("gradient"),
    "set": moving("random"),
    "static_erk": static,
    "gradual": gradually,
    "dpf": feedback,
    "model_pruning": model_pruning,
    "lth": lottery,
    "lth_long": long_lottery,
}


class Run(NamedTuple):
    """Key of a run; its fields are columns of a row."""

    dataset: str
    method: str
    density: float
    seed: int


def runs(seeds: int | None = None) -> list[Run]:
    """Return all runs, with one seed and low densities first, so that a part of them is useful."""
    every = []
    for density, (name, problem) in itertools.product((0.05, 0.1, 1.0, 0.2, 0.5), PROBLEMS.items()):
        for method, seed in itertools.product(METHODS, problem.seeds[:seeds]):
            if (method == "dense") == (density == 1):
                every.append(Run(name, method, density, seed))
    return sorted(every, key=lambda run: (run.method == "lth_long", run.seed, 0.1 < run.density < 1))


def load(name: str, root: str, limit: int | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load training images and labels, test images and labels; images are normalised by channel."""
    source = PROBLEMS[name].source
    images, labels, test_images, test_labels = (part[:limit] for part in source(root=root).load())
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (source.mean, source.std))
    scaled = [part.float().div_(255).sub_(mean).div_(std) for part in (images, test_images)]
    return scaled[0], labels, scaled[1], test_labels


def measure(run: Run, data: tuple[Tensor, Tensor, Tensor, Tensor], epochs: int) -> dict[str, Any]:
    """Train once, and evaluate the final weights on the whole test set."""
    images, labels, test_images, test_labels = data
    L.seed_everything(run.seed, verbose=False)
    train, test = Batches(images, labels, run.seed), Batches(test_images, test_labels, None, 500)
    steps = epochs * len(train)
    net = Net(images.shape[1], steps)
    plan = METHODS[run.method](net, run.density, run.seed, steps)
    net.steps, meter = plan.cycle or steps, Meter(plan.looks)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=[*plan.callbacks, meter],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"max_epochs": epochs, **plan.trainer},
    )
    start = time.perf_counter()
    trainer.fit(net, train, test)
    seconds = time.perf_counter() - start
    accuracy = trainer.test(net, test, verbose=False)[0]["accuracy"]
    weights = {name: weight for name, weight in effective(net).items() if not name.startswith("head")}
    kept = sum(int(weight.count_nonzero()) for weight in weights.values())
    return {
        **run._asdict(),
        "density_reached": f"{kept / sum(weight.numel() for weight in weights.values()):.5f}",
        "epochs": epochs,
        "steps": trainer.global_step,
        "test_accuracy": f"{accuracy:.4f}",
        "seconds": f"{seconds:.1f}",
        "train_flops": f"{meter.flops:.4g}",
        "torch": torch.__version__,
        "lightning": L.__version__,
    }


def rows(path: Path) -> list[dict[str, str]]:
    """Read the rows of a CSV file; empty if the file does not exist."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.is_file() else []


def appended(
    path: Path, columns: Sequence[str], missing: Iterable[Any], measure: Callable[[Any], dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Measure runs, append the row of each to a CSV file as soon as it ends, and yield the row.

    Args:
        path: CSV file; it gets a header if it is empty.
        columns: Columns of the file.
        missing: Runs that are not in the file.
        measure: Function that performs a run and returns its row.
    """
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not path.stat().st_size:
            writer.writeheader()
        for run in missing:
            row = measure(run)
            writer.writerow(row)
            file.flush()
            yield row


def sweep(path: Path, chosen: list[Run], root: str, epochs: int | None, limit: int | None) -> None:
    """Train the runs that are not in the file, and write the row of each as soon as it ends."""
    done = {Run(r["dataset"], r["method"], float(r["density"]), int(r["seed"])) for r in rows(path)}
    missing, data = [run for run in chosen if run not in done], {}
    path.parent.mkdir(parents=True, exist_ok=True)

    def measured(run: Run) -> dict[str, Any]:
        if run.dataset not in data:
            data[run.dataset] = load(run.dataset, root, limit)
        return measure(run, data[run.dataset], epochs or PROBLEMS[run.dataset].epochs)

    for number, (run, row) in enumerate(zip(missing, appended(path, COLUMNS, missing, measured), strict=True), 1):
        print(f"{number}/{len(missing)} {tuple(run)}: {row['test_accuracy']} in {row['seconds']} s", flush=True)


def table(found: list[dict[str, str]], dataset: str, cell: Callable[[list[dict[str, str]]], str]) -> str:
    """Create a Markdown table of methods by densities.

    Args:
        found: Rows of the CSV file.
        dataset: Name of the data set.
        cell: Function that formats the rows that differ only in their seed.
    """
    lines = [f"| method | {' | '.join(str(density) for density in DENSITIES)} |", "|---" * (1 + len(DENSITIES)) + "|"]
    for method in METHODS:
        mine = [row for row in found if (row["dataset"], row["method"]) == (dataset, method)]
        cells = [[row for row in mine if float(row["density"]) in (density, 1.0)] for density in DENSITIES]
        if method == "dense":
            cells = cells[:1] + [[] for _ in DENSITIES[1:]]
        if mine:
            lines.append(f"| {method} | {' | '.join(cell(each) if each else '' for each in cells)} |")
    return "\n".join(lines)


def accuracy(of: list[dict[str, str]]) -> str:
    """Format mean and standard deviation in percent."""
    values = [100 * float(row["test_accuracy"]) for row in of]
    spread = f" ({statistics.stdev(values):.2f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread}"


def work(of: list[dict[str, str]]) -> str:
    """Format the mean number of operations in units of 1e9."""
    return f"{statistics.mean(float(row['train_flops']) for row in of) / 1e9:.0f}"


def tables(found: list[dict[str, str]]) -> str:
    """Create the part of the page that is generated from the rows."""
    parts = []
    for dataset in dict.fromkeys(row["dataset"] for row in found):
        mine = [row for row in found if row["dataset"] == dataset]
        planned = [run for run in runs() if run.dataset == dataset]
        seeds, epochs = (", ".join(sorted({row[key] for row in mine})) for key in ("seed", "epochs"))
        parts += [f"### {dataset}: {len(mine)} of {len(planned)} runs, {epochs} epochs, seeds {seeds}"]
        parts += ["Test accuracy in percent, by density; in brackets the standard deviation over seeds."]
        parts += [table(mine, dataset, accuracy)]
        parts += ["Operations of the training, in 1e9, if zeros cost nothing.", table(mine, dataset, work)]
    return "\n\n".join(parts)


def write_page(page: Path, found: list[dict[str, str]]) -> None:
    """Replace the tables between the marks of a page."""
    before, _, rest = page.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    page.write_text(f"{before}{MARKS[0]}\n\n{tables(found)}\n\n{MARKS[1]}{after}")


def main() -> None:
    """Train the missing runs, or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("SPARSEFL_DATA", "data"), help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=RESULTS, help="CSV file; runs in it are skipped")
    parser.add_argument("--datasets", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--densities", nargs="+", type=float, default=[1.0, *DENSITIES], help="1.0 is dense")
    parser.add_argument("--seeds", type=int, help="number of seeds, from the first")
    parser.add_argument("--epochs", type=int, help="number of epochs; default: that of the data set")
    parser.add_argument("--limit", type=int, help="number of images of each part; default: all")
    parser.add_argument("--page", type=Path, help="page to write the tables of the CSV file to, without training")
    arguments = parser.parse_args()
    if arguments.page is not None:
        write_page(arguments.page, rows(arguments.out))
        return
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*(does not have many workers|LeafSpec|never moves).*")
    chosen = [
        run
        for run in runs(arguments.seeds)
        if run.dataset in arguments.datasets and run.method in arguments.methods and run.density in arguments.densities
    ]
    sweep(arguments.out, chosen, arguments.root, arguments.epochs, arguments.limit)


if __name__ == "__main__":
    main()
