"""Memory, disk and time of a FedSpa run on LeNet-5 (61,706 parameters) by number of clients.

For each number of clients, a new run trains one round and ends. Then every client is given a record, as if it had taken
part in an earlier round: a copy of a trained record, inserted into the database of `federation.store: disk`. The run is
resumed for some rounds, and evaluates clients in its last round. Both parts run in processes of their own, for separate
peaks of memory. Client data is generated on access, with 20 to 60 training samples per client. The same is done with
the records in memory, for the numbers of clients for which this is possible.

    python tests/stress/fleet.py --out result.json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
from fuzz import accept_rows
from lightning.pytorch import Callback

from lightning_sparsefl.algorithms import FedSpa
from lightning_sparsefl.data import FederatedBlobsOnDemand
from lightning_sparsefl.federated import FederatedTrainer, Federation
from lightning_sparsefl.federated.storage.record_database import row_digest
from lightning_sparsefl.models import LeNet5

SEED = 0


class Clock(Callback):
    """Callback that measures the time before the first round, and of each round with its commit."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.moments: list[tuple[float, float]] = []

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Store the time at which a round starts."""
        self.moments.append((time.perf_counter(), time.process_time()))

    def summary(self) -> dict[str, float]:
        """Return seconds, for rounds as the median over all but the last one, which also evaluates clients."""
        wall, cpu = zip(*self.moments, strict=True)
        return {
            "setup_s": round(wall[0] - self.started, 3),
            "round_s": _median([after - before for before, after in pairwise(wall)]),
            "round_cpu_s": _median([after - before for before, after in pairwise(cpu)]),
        }


def _median(times: list[float]) -> float:
    return round(statistics.median(times), 4) if times else 0.0


def run(folder: Path, clients: int, cohort: int, rounds: int, store: Literal["ram", "disk"], go_on: bool) -> None:
    """Run one part and print its measurements as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    clock = Clock()
    trainer = FederatedTrainer(
        accelerator="cpu",
        devices=1,
        max_rounds=1 + rounds * go_on,
        check_val_every_n_round=1 + rounds,
        default_root_dir=str(folder),
        callbacks=[clock],
        logger=False,
        enable_progress_bar=False,
        algorithm=FedSpa(density=0.5),
        federation=Federation(clients_per_round=cohort, eval_clients=cohort, pictures_every_n_rounds=0, store=store),
        seed=SEED,
    )
    data = FederatedBlobsOnDemand(num_clients=clients, batch_size=20, eval_split="test", seed=SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(LeNet5(num_classes=10, variant="1998", lr=0.05), data, "last" if go_on else None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else 1024**2)
    print(json.dumps({**clock.summary(), "peak_rss_mib": round(peak, 1)}))


def fill(path: Path, clients: int) -> int:
    """Copy a trained record to every client, and return the size of the record in bytes."""
    database = sqlite3.connect(path)
    with database:
        version, content = database.execute("SELECT round, content FROM records LIMIT 1").fetchone()
        known = {client for (client,) in database.execute("SELECT client FROM records")}
        new = (client for client in range(clients) if client not in known)
        rows = ((client, version - 1, row_digest(client, version - 1, content), content) for client in new)
        database.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", rows)
    database.close()
    accept_rows(path.parents[1] / "last.ckpt")
    return len(content)


def measure(clients: int, cohort: int, rounds: int, store: Literal["ram", "disk"], inline: bool) -> dict[str, Any]:
    """Measure a run with a number of clients."""
    part = _inline if inline else _process
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        first = part(folder, clients, cohort, rounds, "disk", False)
        records = next(folder.glob("*/*/checkpoints/clients/server.sqlite"))
        start = time.perf_counter()
        size = fill(records, clients)
        filled = time.perf_counter() - start
        later = part(folder, clients, cohort, rounds, store, True)
        own = [
            path for path in records.parents[2].rglob("*") if path.is_file() and (store == "disk" or path != records)
        ]
        return {
            "store": store,
            "clients": clients,
            "clients_with_a_record": clients,
            "record_bytes": size,
            "run_folder_mib": round(sum(path.stat().st_size for path in own) / 2**20, 2),
            "last_ckpt_mib": round((records.parents[1] / "last.ckpt").stat().st_size / 2**20, 2),
            "filled_in_s": round(filled, 1),
            **{f"new_run_{name}": first[name] for name in ("setup_s", "peak_rss_mib")},
            "resume_s": later.pop("setup_s"),
            **later,
        }


def _inline(*arguments: Any) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run(*arguments)
    return dict(json.loads(printed.getvalue()))


def _process(*arguments: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--part", json.dumps([str(argument) for argument in arguments])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def _growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Compute the cost per additional client from the smallest and the largest run on disk."""
    disk = sorted((row for row in rows if row["store"] == "disk"), key=lambda row: row["clients"])
    more = max(disk[-1]["clients"] - disk[0]["clients"], 1)
    mib = {name: (disk[-1][name] - disk[0][name]) * 2**20 / more for name in ("peak_rss_mib", "run_folder_mib")}
    return {
        "memory_bytes_a_client": round(max(mib["peak_rss_mib"], 0.0), 2),
        "disk_bytes_a_client": round(mib["run_folder_mib"], 1),
        "round_cpu_ratio": round(disk[-1]["round_cpu_s"] / max(disk[0]["round_cpu_s"], 1e-9), 3),
    }


def processor() -> str:
    """Return the name of the processor, if the system provides it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=int,
        default=[10**3, 10**4, 10**5, 10**6],
        help="numbers of clients, with records on disk",
    )
    parser.add_argument(
        "--ram", nargs="*", type=int, default=[10**3, 10**4], help="numbers of clients, with records in memory"
    )
    parser.add_argument("--cohort", type=int, default=20, help="number of clients of a round and of an evaluation")
    parser.add_argument(
        "--rounds", type=int, default=10, help="number of rounds after the first; the last one evaluates"
    )
    parser.add_argument(
        "--inline", action="store_true", help="run in this process; peaks of memory are then those of all runs"
    )
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        folder, clients, cohort, rounds, store, go_on = json.loads(arguments.part)
        run(Path(folder), int(clients), int(cohort), int(rounds), store, go_on == "True")
        return
    shared = {"cohort": arguments.cohort, "rounds": arguments.rounds}
    rows = [measure(clients, store="disk", inline=arguments.inline, **shared) for clients in arguments.sizes]
    rows += [measure(clients, store="ram", inline=arguments.inline, **shared) for clients in arguments.ram]
    result = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "sqlite": sqlite3.sqlite_version,
        "parameters": sum(parameter.numel() for parameter in LeNet5(num_classes=10, variant="1998").parameters()),
        **shared,
        "growth": _growth(rows),
        "rows": rows,
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
