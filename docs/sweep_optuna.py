"""Search for the density and the learning rate that trade the score of clients against bytes, with Optuna.

    pip install optuna && python docs/sweep_optuna.py --trials 20

Each trial is a run in ``runs/sweep/trial_<number>``. Scores are those of validation sets, so that the test sets stay
unseen. The study is kept in ``sweep.db``: the same command goes on with it, with as many trials more.
"""

from __future__ import annotations

import argparse

import lightning as L
import optuna

from lightning_sparsefl import FederatedTrainer, FedSpa
from lightning_sparsefl.data import Dirichlet, FederatedDigits
from lightning_sparsefl.models import MLP


def objective(trial: optuna.Trial, rounds: int) -> tuple[float, float]:
    """Train one federation; return the clients' mean accuracy and the bytes that they sent."""
    density = trial.suggest_float("density", 0.05, 1.0, log=True)
    lr = trial.suggest_float("lr", 0.01, 0.5, log=True)
    L.seed_everything(0)
    trainer = FederatedTrainer(
        algorithm=FedSpa(density=density), max_rounds=rounds, run_dir=f"runs/sweep/trial_{trial.number}", quiet=True
    )
    data = FederatedDigits(num_clients=20, partition=Dirichlet(alpha=0.3), val_fraction=0.2)
    summary = trainer.fit(MLP(num_classes=10, sample_shape=(1, 8, 8), lr=lr), data)
    return summary["personal/val_acc"], summary["comm/uplink_bytes_total"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Sweep density and learning rate.")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    study = optuna.create_study(
        study_name="density and lr",
        storage="sqlite:///sweep.db",
        load_if_exists=True,
        directions=["maximize", "minimize"],
        sampler=optuna.samplers.TPESampler(seed=0),
    )
    study.optimize(lambda trial: objective(trial, options.rounds), n_trials=options.trials)
    for best in sorted(study.best_trials, key=lambda trial: trial.values[1]):
        accuracy, sent = best.values
        print(f"trial {best.number}: accuracy {accuracy:.3f}, {sent / 1e6:.2f} MB up, {best.params}")
