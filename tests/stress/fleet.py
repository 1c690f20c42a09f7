"""Memory, disk, time and traffic between ranks of a FedSpa run on a small MLP, by clients, cohort and ranks.

For each number of clients, each cohort and each number of ranks, a new run trains one round and ends. Then every client
is given a record, as if it had taken part in an earlier round: a copy of a trained record, inserted into its shard of
`federation.store: disk`. The run is resumed for some rounds, the last of which evaluates clients and the global model.
All parts run in processes of their own, for separate peaks of memory. Client data is generated on access, with 10 to 20
training samples per client, one batch. The same is done with the records in memory, where that is possible.

At last, the memory of all ranks is measured with a data set of `--data` MiB, as a copy in each rank and as files that
all ranks map (`data.memory_map`).

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
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import lightning
import torch
import torch.distributed as dist
from fuzz import accept_rows

from lightning_sparsefl.algorithms import FedSpa
from lightning_sparsefl.data import FederatedBlobs, FederatedBlobsOnDemand
from lightning_sparsefl.federated import FederatedTrainer, Federation
from lightning_sparsefl.federated.rounds.coordinator import Coordinator
from lightning_sparsefl.federated.storage.record_database import row_digest
from lightning_sparsefl.federated.storage.shards import shards_of
from lightning_sparsefl.models import MLP

SEED = 0
MIB = 2**20


class Meter:
    """What one rank received from the others, and the time and the memory of its phases.

    Received are the tensor of an all-reduce (however it is sent), the other ranks' gathered values with their padding,
    and the bytes of a message. The phases are written to a file of each rank, since a forked process returns nothing.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, time.perf_counter()
        self.received, self.calls = 0, 0
        self.rounds: list[tuple[float, float, int, int]] = []
        self.evaluations: list[tuple[float, int]] = []

    def install(self) -> None:
        """Count in the collectives that the engine uses, and in the phases of a round."""
        self._count("all_reduce", lambda tensor: tensor.nbytes)
        self._count("irecv", lambda tensor, src: tensor.nbytes)
        self._count("broadcast", lambda tensor, src: tensor.nbytes * (dist.get_rank() != src))
        self._count("all_gather", lambda parts, part: sum(each.nbytes for each in parts) - part.nbytes)
        measured = Coordinator.round, Coordinator.evaluate
        meter = self

        def a_round(self: Coordinator, *arguments: Any) -> Any:
            meter.rounds.append((time.perf_counter(), time.process_time(), meter.received, meter.calls))
            result = measured[0](self, *arguments)
            meter.write()
            return result

        def an_evaluation(self: Coordinator, *arguments: Any) -> Any:
            before, bytes_before = time.perf_counter(), meter.received
            result = measured[1](self, *arguments)
            meter.evaluations.append((time.perf_counter() - before, meter.received - bytes_before))
            meter.write()
            return result

        Coordinator.round, Coordinator.evaluate = a_round, an_evaluation  # type: ignore[method-assign]

    def _count(self, name: str, size: Callable[..., int]) -> None:
        function = getattr(dist, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.received += size(*arguments, **options)
            self.calls += 1
            return result

        setattr(dist, name, counted)

    def write(self) -> None:
        """Write what was measured so far."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform == "linux" else MIB)
        wall, cpu, received, calls = zip(*self.rounds, strict=True)
        found = {
            "setup_s": round(wall[0] - self.started, 3),
            "round_s": _median(wall),
            "round_cpu_s": _median(cpu),
            "round_received_mib": round(_median(received) / MIB, 3),
            "round_collectives": _median(calls),
            "evaluation_s": round(max((seconds for seconds, _ in self.evaluations), default=0.0), 3),
            "evaluation_received_mib": round(max((b for _, b in self.evaluations), default=0) / MIB, 3),
            "peak_rss_mib": round(peak, 1),
            "pss_mib": round(proportional_set_mib(), 1),
        }
        (self.folder / f"rank-{rank}.json").write_text(json.dumps(found))


def _median(moments: Any) -> float:
    """Return the median of the differences: of all rounds but the last, with their commits."""
    steps = [after - before for before, after in pairwise(moments)]
    return round(statistics.median(steps), 4) if steps else 0.0


def proportional_set_mib() -> float:
    """Return the memory of this process, where a page that several processes share counts for each in part."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.is_file() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def train(trainer: FederatedTrainer, module: Any, data: Any, meter: Meter, ckpt_path: str | None = None) -> None:
    """Run a federation in all its ranks, and print the largest of their measurements as JSON."""
    meter.install()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.fit(module, data, ckpt_path)
    found = [json.loads(path.read_text()) for path in sorted(meter.folder.glob("rank-*.json"))]
    most = {name: max(each[name] for each in found) for name in found[0]}
    print(json.dumps({**most, "pss_mib": round(sum(each["pss_mib"] for each in found), 1)}))


def share(folder: Path, mib: int, mapped: bool, ranks: int) -> None:
    """Train and score all clients of a data set in memory once, with a copy for each rank or one for all."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    trainer = FederatedTrainer(
        accelerator="cpu",
        devices=ranks,
        strategy="client_parallel_fork" if ranks > 1 else "auto",
        max_rounds=1,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        algorithm=FedSpa(density=0.5),
        federation=Federation(clients_per_round=8, pictures_every_n_rounds=0),
        seed=SEED,
    )
    dim = 4096
    examples = mib * MIB // (4 * dim)
    data = FederatedBlobs(
        num_clients=8,
        dim=dim,
        num_train=examples * 3 // 4,
        num_test=examples // 4,
        batch_size=256,
        eval_split="test",
        memory_map=str(folder / "data") if mapped else None,
    )
    meter = Meter(folder)
    train(trainer, MLP(num_classes=4, hidden=(8,), sample_shape=(1, 1, dim)), data, meter)


def network() -> MLP:
    """Return the network of the fleet, small enough for a million records on disk."""
    return MLP(num_classes=10, hidden=(8,), lr=0.05)


def run(folder: Path, clients: int, cohort: int, rounds: int, store: Literal["ram", "disk"], ranks: int) -> None:
    """Run one part up to a number of rounds, and print its measurements as JSON; a part that is there is resumed."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    go_on = any(folder.glob("*/*/checkpoints/last.ckpt"))
    with tempfile.TemporaryDirectory() as place:
        meter = Meter(Path(place))
        trainer = FederatedTrainer(
            accelerator="cpu",
            devices=ranks,
            strategy="client_parallel_fork" if ranks > 1 else "auto",
            max_rounds=rounds,
            check_val_every_n_round=rounds,
            default_root_dir=str(folder),
            logger=False,
            enable_progress_bar=False,
            algorithm=FedSpa(density=0.5),
            federation=Federation(
                clients_per_round=cohort, eval_clients=min(cohort, 20), pictures_every_n_rounds=0, store=store
            ),
            seed=SEED,
        )
        data = FederatedBlobsOnDemand(
            num_clients=clients, batch_size=20, fewest=10, most=20, num_pooled=2000, eval_split="test", seed=SEED
        )
        train(trainer, network(), data, meter, "last" if go_on else None)


def fill(shards: dict[int, Path], clients: int) -> int:
    """Copy a trained record to every client, and return the size of the record in bytes."""
    rows = (row for path in shards.values() for row in _rows(path, "SELECT round, content FROM records LIMIT 1"))
    version, content = next(rows)
    for shard, path in shards.items():
        known = {client for (client,) in _rows(path, "SELECT client FROM records")}
        new = (client for client in range(shard, clients, len(shards)) if client not in known)
        copies = ((client, version - 1, row_digest(client, version - 1, content), content) for client in new)
        with contextlib.closing(sqlite3.connect(path)) as database, database:
            database.executemany("INSERT INTO records VALUES (?, ?, ?, ?)", copies)
    accept_rows(shards[0].parents[1] / "last.ckpt")
    return len(content)


def _rows(path: Path, query: str) -> list[Any]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def measure(clients: int, cohort: int, rounds: int, store: Literal["ram", "disk"], ranks: list[int]) -> list[Any]:
    """Measure runs with a number of clients and a cohort, one for each number of ranks."""
    rows = []
    for count in ranks:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            part(folder, clients, cohort, 1, "disk", count)
            records = next(folder.glob("*/*/checkpoints/clients"))
            size = fill(shards_of("server", records), clients)
            found = part(folder, clients, cohort, 1 + rounds, store, count)
            files = [path for path in records.parents[1].rglob("*") if path.is_file()]
            own = [path for path in files if store == "disk" or path.suffix != ".sqlite"]
            shown = {
                "store": store,
                "clients": clients,
                "cohort": cohort,
                "ranks": count,
                "record_bytes": size,
                "run_folder_mib": round(sum(path.stat().st_size for path in own) / MIB, 2),
                "last_ckpt_mib": round((records.parent / "last.ckpt").stat().st_size / MIB, 2),
            }
        rows.append({**shown, **found})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def measure_data(mib: int, ranks: list[int]) -> list[Any]:
    """Measure the memory of all ranks together, with a copy of the data for each and with one for all."""
    rows = []
    for count in ranks:
        for mapped in (False, True):
            with tempfile.TemporaryDirectory() as place:
                found = part(place, mib, mapped, count)
            shown = {name: found[name] for name in ("pss_mib", "peak_rss_mib")}
            rows.append({"data_mib": mib, "ranks": count, "memory_map": mapped, **shown})
    return rows


def part(*arguments: Any) -> dict[str, float]:
    """Run one part in a process of its own."""
    command = [sys.executable, __file__, "--part", json.dumps([str(argument) for argument in arguments])]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(result.stdout.splitlines()[-1]))


def processor() -> str:
    """Return the name of the processor, if the system provides it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def main() -> None:
    """Measure, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["1000x10", "1000x100", "1000000x10", "1000000x100", "1000000x1000"],
        metavar="CLIENTSxCOHORT",
        help="numbers of clients and of those of a round, with records on disk",
    )
    parser.add_argument("--ram", nargs="*", default=[], help="the same with records in memory")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4], help="numbers of ranks")
    parser.add_argument(
        "--rounds", type=int, default=2, help="number of rounds of each number of ranks; the last one evaluates"
    )
    parser.add_argument("--data", type=int, default=512, help="size of a data set in memory, in MiB; 0 = none")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part is not None:
        given = json.loads(arguments.part)
        if len(given) == 4:
            share(Path(given[0]), int(given[1]), given[2] == "True", int(given[3]))
        else:
            run(Path(given[0]), int(given[1]), int(given[2]), int(given[3]), given[4], int(given[5]))
        return
    rows = []
    for store, cases in (("disk", arguments.cases), ("ram", arguments.ram)):
        for case in cases:
            clients, cohort = map(int, case.split("x"))
            rows += measure(clients, cohort, arguments.rounds, store, arguments.ranks)
    result = {
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "sqlite": sqlite3.sqlite_version,
        "parameters": sum(parameter.numel() for parameter in network().parameters()),
        "rounds": arguments.rounds,
        "rows": rows,
        "data": measure_data(arguments.data, arguments.ranks) if arguments.data else [],
    }
    text = json.dumps(result, indent=2)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
