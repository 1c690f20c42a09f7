"""Run folders that were never trained, with made-up numbers in the layout that runs write."""

from __future__ import annotations

import csv
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CLIENTS = 12
FAILED_ROUND = 1
"""Round in which one client fails."""


@dataclass
class MadeUpRun:
    """What decides the numbers of a run."""

    algorithm: str = "FedSpa"
    seed: int = 0
    rounds: int = 6
    every: int = 2
    quality: float = 0.6
    sparse: bool = True
    timed: bool = True
    flops: bool = True
    common: bool = True

    def __post_init__(self):
        self.chance = random.Random(f"{self.algorithm} {self.seed} {self.quality}")
        self.metrics, self.clients, self.overlaps = [], [], []
        totals = dict.fromkeys(("comm/uplink_bytes_total", "comm/downlink_bytes_total", "flops/train_total"), 0)
        for number in range(self.rounds):
            totals = {name: value + self.chance.randint(900, 1100) for name, value in totals.items()}
            self.make_round(number, totals)

    def make_round(self, number, totals):
        row = {"round": number, **totals, "density/all": 0.5 if self.sparse else 1.0}
        if not self.flops:
            del row["flops/train_total"]
        if self.sparse:
            row |= {
                "density/layer/net.fc1.weight": 0.4 + 0.01 * number + 0.1 * self.seed,
                "density/layer/net.fc2.weight": 0.6,
            }
        if self.timed:
            row["time/simulated"] = 1.0 + self.chance.random()
        scores = []
        if number + 1 == self.rounds or (number + 1) % self.every == 0:
            level = self.quality * (number + 1) / self.rounds
            scores = [min(1.0, level + 0.3 * self.chance.random()) for _ in range(CLIENTS)]
            mean = sum(scores) / CLIENTS
            row |= {"global/val_loss": 1.0 - mean, "global/val_acc": mean - 0.05, "personal/val_acc": mean}
            if not self.common:
                row = {name: value for name, value in row.items() if not name.startswith("global/")}
            row["personal/val_acc_worst10"] = sum(sorted(scores)[:2]) / 2
            self.make_overlaps(number)
        self.metrics.append(row)
        self.make_clients(number, scores)

    def make_clients(self, number, scores):
        drawn = self.chance.sample(range(CLIENTS), 3)
        for client in range(CLIENTS) if scores else sorted(drawn):
            failed = client == drawn[-1] and number == FAILED_ROUND
            line = {"round": number, "client": client, "trained": int(client in drawn and not failed)}
            if client in drawn:
                line |= {"failure": "the loss is nan,\nat step 3" if failed else "", "downlink_bytes": 100}
            if client in drawn and self.timed and not failed:
                line["simulated_seconds"] = self.chance.random()
            self.clients.append({**line, **({"personal/val_acc": scores[client]} if scores else {})})

    def make_overlaps(self, number):
        for first in range(0, 8, 2) if self.sparse else ():
            for other in range(first + 2, 8, 2):
                value = self.chance.random()
                self.overlaps.append({"round": number, "client": first, "other": other, "overlap": value})


def write_run(
    folder: Path, algorithm="FedSpa", seed=0, *, finished=True, options=None, data=None, **made_up: Any
) -> Path:
    """Write a run folder whose numbers follow from its arguments."""
    folder.mkdir(parents=True)
    run = MadeUpRun(algorithm, seed, **made_up)
    data = {"num_clients": CLIENTS, **(data or {})}
    config = {
        "seed_everything": seed,
        "trainer": {"max_rounds": run.rounds, "default_root_dir": f"runs{seed}", "round_lr": None},
        "algorithm": {"class_path": f"lightning_sparsefl.{algorithm}", "init_args": options or {}},
        "federation": {"clients_per_round": 3, "capacities": [0.5, 1.0], "checkpoint_every_n_rounds": seed + 1},
        "model": {"class_path": "lightning_sparsefl.models.MLP", "init_args": {"lr": 0.1}},
        "data": {"class_path": "lightning_sparsefl.data.FederatedBlobs", "init_args": data},
    }
    (folder / "config.yaml").write_text("# a header\n" + yaml.safe_dump(config))
    (folder / ".lock").write_text("")
    for name, rows in (("metrics", run.metrics), ("clients", run.clients), ("overlap", run.overlaps)):
        if rows:
            write_table(folder / f"{name}.csv", rows)
    if finished:
        summary = {"algorithm": algorithm, "rounds": run.rounds, "seed": seed, "finetuned/val_acc": 0.9 + 0.01 * seed}
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as the engine does, with CRLF and empty cells."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), restval="")
        writer.writeheader()
        writer.writerows(rows)


def read_table(path: Path) -> list[dict[str, str]]:
    """Read a table the slow and obvious way."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
