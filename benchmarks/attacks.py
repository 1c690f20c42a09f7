"""What attackers among the clients do to a model, by the way in which updates are merged.

20 clients share the digits and all of them train in every round, 15 rounds of one epoch; the model is a perceptron with
two hidden layers. The last clients attack:

- flip: sends what it received minus 5 times its change;
- large: sends 1e12 for each weight;
- backdoor: trains with a mark of two pixels on each image and the label 0, and sends 5 times its change.

`accuracy` is that of the last global model on all test images. `backdoor` is the share of those with another label than
0 that it calls 0 once they have the mark. A run that breaks down, since no honest client can train any more, has
neither.

    python benchmarks/attacks.py --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import logging
import platform
import tempfile
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from lightning_sparsefl.algorithms import FedAvg
from lightning_sparsefl.data import IID, Dirichlet, FederatedDigits
from lightning_sparsefl.errors import ClientFailed
from lightning_sparsefl.federated import CoverageMedian, FederatedTrainer, Federation, TrimmedMean
from lightning_sparsefl.models import MLP
from lightning_sparsefl.types import Message, Update

CLIENTS = 20
MERGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "mean, clip_update 1": {"clip_update": 1.0},
    "CoverageMedian": {"reducer": CoverageMedian()},
    "TrimmedMean(0.3)": {"reducer": TrimmedMean(fraction=0.3)},
}
PARTITIONS = {"iid": IID(), "dirichlet": Dirichlet(alpha=0.3, min_examples=8)}
CASES: dict[str, tuple[str, str, int]] = {
    "iid": ("iid", "none", 0),
    "iid, flip 6": ("iid", "flip", 6),
    "iid, large 6": ("iid", "large", 6),
    "iid, backdoor 4": ("iid", "backdoor", 4),
    "iid, backdoor 6": ("iid", "backdoor", 6),
    "dirichlet": ("dirichlet", "none", 0),
    "dirichlet, flip 4": ("dirichlet", "flip", 4),
    "dirichlet, backdoor 4": ("dirichlet", "backdoor", 4),
}
"""Partition, attack and number of attackers, by name."""
FACTORS = {"flip": -5.0, "backdoor": 5.0}
LARGE = 1e12


def mark(images: Tensor) -> Tensor:
    """Return images with two bright pixels in the upper corners."""
    images = images.clone()
    images[..., 0, 0] = images[..., 0, -1] = 3.0
    return images


class Poison(Callback):
    """Marks every training image, and labels it 0."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Change the batch in place."""
        batch[0].copy_(mark(batch[0]))
        batch[1].zero_()


class Victim(MLP):
    """Is also tested on marked images."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log the metrics of the base, and the share of other digits that the mark turns into 0."""
        super().test_step(batch, batch_idx)
        images, labels = batch
        others = mark(images[labels != 0])
        if len(others):
            self.log("test_backdoor", (self(others).argmax(1) == 0).float().mean(), batch_size=len(others))


@dataclass(frozen=True, kw_only=True)
class Attacked(FedAvg):
    """FedAvg, whose last clients attack."""

    attack: str
    attackers: int

    def callbacks(self, message: Message, client: Any) -> list[Callback]:
        """Poison the data of a backdoor's clients."""
        return [Poison()] if self.attack == "backdoor" and self._attacks(client) else []

    def train(self, message: Message, client: Any) -> Update:
        """Train, then change the update."""
        update = super().train(message, client)
        if not self._attacks(client):
            return update
        if self.attack == "large":
            weights = {name: torch.full_like(value, LARGE) for name, value in update.weights.items()}
        else:
            factor, old = FACTORS[self.attack], message.weights
            weights = {name: old[name] + factor * (value - old[name]) for name, value in update.weights.items()}
        return replace(update, weights=weights)

    def _attacks(self, client: Any) -> bool:
        return bool(client.id >= CLIENTS - self.attackers)


def run(case: str, merge: str, rounds: int, seed: int) -> dict[str, float | None]:
    """Return the scores of one run.

    Args:
        case: Key of `CASES`.
        merge: Key of `MERGES`.
        rounds: Number of rounds.
        seed: Random seed of data, model and run.
    """
    partition, attack, attackers = CASES[case]
    data = FederatedDigits(
        num_clients=CLIENTS, partition=PARTITIONS[partition], batch_size=16, eval_split="test", seed=seed
    )
    options = {"clients_per_round": CLIENTS, "on_client_error": "skip", "min_clients": CLIENTS // 2, **MERGES[merge]}
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = FederatedTrainer(
            algorithm=Attacked(attack=attack, attackers=attackers),
            federation=Federation(eval_clients=1, checkpoint_every_n_rounds=rounds, local_engine="fast", **options),
            accelerator="cpu",
            devices=1,
            max_rounds=rounds,
            check_val_every_n_round=rounds,
            default_root_dir=folder,
            logger=False,
            enable_progress_bar=False,
            seed=seed,
        )
        try:
            scores = trainer.fit(Victim(sample_shape=(1, 8, 8), hidden=(24, 16), momentum=0.9, lr=0.05), data)
        except ClientFailed:
            return {"accuracy": None, "backdoor": None}
    return {"accuracy": scores["global/test_acc"], "backdoor": scores["global/test_backdoor"]}


def main() -> None:
    """Measure, print JSON, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="cases to run")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of a run")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each cell")
    parser.add_argument("--out", type=Path, help="file for the JSON; runs that it holds are kept")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    result: dict[str, Any] = {"machine": platform.machine(), "torch": torch.__version__, "rounds": arguments.rounds}
    result["runs"] = runs = []
    if arguments.out is not None and arguments.out.exists():
        runs += json.loads(arguments.out.read_text())["runs"]
    done = {(row["case"], row["merge"], row["seed"]) for row in runs}
    for case, merge, seed in itertools.product(arguments.cases, MERGES, range(arguments.seeds)):
        if (case, merge, seed) not in done:
            runs.append({"case": case, "merge": merge, "seed": seed, **run(case, merge, arguments.rounds, seed)})
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
