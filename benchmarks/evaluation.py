"""Evaluations of one hundred clients one after another and as stacks, as multiples of a round of ten clients.

The runs of a cell take turns, each in a process of its own and on one thread; in every cycle the order moves on by one.
A ratio is the median over the rounds of a run, and then over the cycles, of the CPU time of the evaluation after a
round divided by that of the round. The evaluation includes that of the global model.

    python benchmarks/evaluation.py --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from engines import apart
from federated_round import RATES, SEED, Pictures, processor

from lightning_sparsefl.algorithms import FedAvg, FedPer, Local
from lightning_sparsefl.federated import FederatedAlgorithm, FederatedTrainer, Federation
from lightning_sparsefl.federated.evaluation.scorer import Scorer
from lightning_sparsefl.federated.local.node import Node
from lightning_sparsefl.federated.local.stacked.scoring import evaluator
from lightning_sparsefl.federated.local.stacked.scoring.evaluation import StackedEvaluation
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.rounds.server import Server
from lightning_sparsefl.models import MLP, LeNet5
from lightning_sparsefl.models.task import Classifier

COHORT, SAMPLES = 10, 500
MODELS: dict[str, Callable[[], Classifier]] = {
    "MLP": lambda: MLP(num_classes=10, **RATES),
    "LeNet5": lambda: LeNet5(num_classes=10, **RATES),
}
METHODS: dict[str, Callable[[], FederatedAlgorithm]] = {"FedAvg": FedAvg, "FedPer": FedPer, "Local": Local}
"""Methods whose clients are scored with the same weights, with heads of their own, and with weights of their own."""
ENGINES = ("fast", "stacked")
PARTS: dict[str, tuple[Any, str]] = {
    "steps": (StackedEvaluation, "_batch"),
    "stacks": (evaluator, "evaluate_stack"),
    "loaders": (StackedWorker, "_evaluation"),
    "orders": (Server, "order"),
    "models": (Node, "_take_model"),
    "all": (Scorer, "scores"),
}
"""Functions of a stacked evaluation, whose times include those of the functions that they call."""


@contextlib.contextmanager
def timed(owner: Any, name: str, times: list[float], off: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Collect the CPU seconds of the calls of a function.

    Args:
        owner: Class or module of the function.
        name: Name of the function.
        times: List that the seconds are appended to.
        off: Function that says that a call is not counted.
    """
    before = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        start = time.process_time()
        try:
            return before(*args, **options)
        finally:
            if not off():
                times.append(time.process_time() - start)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, before)


def run(model: str, method: str, engine: str, clients: int, rounds: int) -> dict[str, Any]:
    """Return the times of the rounds and evaluations of a run, without those of the first round."""
    evaluations: list[float] = []
    trainings: list[float] = []
    parts: dict[str, list[float]] = {part: [] for part in PARTS}
    torch.manual_seed(SEED)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(timed(Coordinator, "round", trainings))
        for part, (owner, name) in PARTS.items():
            stack.enter_context(timed(owner, name, parts[part], off=lambda: len(trainings) < 2))
        stack.enter_context(timed(Scorer, "scores", evaluations))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        FederatedTrainer(
            accelerator="cpu",
            devices=1,
            max_rounds=rounds + 1,
            default_root_dir=folder,
            enable_progress_bar=False,
            logger=False,
            algorithm=METHODS[method](),
            federation=Federation(
                clients_per_round=min(COHORT, clients), pictures_every_n_rounds=0, local_engine=engine
            ),  # type: ignore[arg-type]
            seed=SEED,
        ).fit(MODELS[model](), Pictures(clients, SAMPLES))
    pairs = list(zip(evaluations, trainings, strict=True))[1:]
    return {
        "ratio": statistics.median(evaluation / training for evaluation, training in pairs),
        "evaluation_ms": 1000 * statistics.median(evaluation for evaluation, _ in pairs),
        "round_ms": 1000 * statistics.median(training for _, training in pairs),
        "parts_ms": {part: 1000 * sum(times) / rounds for part, times in parts.items()},
    }


def measure(model: str, method: str, clients: int, rounds: int, cycles: int) -> dict[str, Any]:
    """Measure a cell; return its description with medians over the cycles."""
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    for cycle in range(cycles):
        for engine in ENGINES if cycle % 2 else ENGINES[::-1]:
            found[engine].append(apart(run, model, method, engine, clients, rounds))
    row: dict[str, Any] = {"model": model, "method": method, "clients": clients, "rounds": rounds, "cycles": cycles}
    row["load"] = round(os.getloadavg()[0], 1)
    for engine, runs in found.items():
        for key in ("ratio", "evaluation_ms", "round_ms"):
            row[f"{engine}_{key}"] = round(statistics.median(each[key] for each in runs), 3)
    pairs = zip(found["stacked"], found["fast"], strict=True)
    row["of_sequential"] = round(statistics.median(a["evaluation_ms"] / b["evaluation_ms"] for a, b in pairs), 3)
    parts = {part: statistics.median(each["parts_ms"][part] for each in found["stacked"]) for part in PARTS}
    row["parts"] = {part: round(took / parts["all"], 3) for part, took in parts.items()}
    return row


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["MLP"], help="models")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="methods")
    parser.add_argument("--clients", type=int, default=100, help="number of clients that are evaluated")
    parser.add_argument("--rounds", type=int, default=10, help="number of measured rounds of a run")
    parser.add_argument("--cycles", type=int, default=3, help="number of runs of each engine")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    options = parser.parse_args()
    cells = [
        measure(model, method, options.clients, options.rounds, options.cycles)
        for model in options.models
        for method in options.methods
    ]
    result = json.dumps({"processor": processor(), "torch": torch.__version__, "threads": 1, "cells": cells}, indent=2)
    print(result)
    if options.out:
        options.out.write_text(result + "\n")


if __name__ == "__main__":
    main()
