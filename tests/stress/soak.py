"""Run all exported methods in turn for hours, with random kills, resumes and injected faults, and count differences.

A turn is a small federation on the digits in which some clients raise an exception or return NaN, depending on seed,
round and client; `federation.on_client_error: skip` merges the rounds without them. One process, which lives as long
as the script, runs each turn without interruption and records its memory after every round. Other processes run the
same turn, are killed with SIGKILL at random times and resumed until it ends. Then the results of the two runs are
compared.

    python tests/stress/soak.py --hours 2 --out result.json

If the script is stopped and started again with the same report, it continues after the last complete turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _federations import Run, algorithm, environment, leaves, start, wait, without_finetuning
from lightning.pytorch import Callback

from lightning_sparsefl import algorithms
from lightning_sparsefl.federated.storage.run_folder import Table

ROUNDS, FAULTY = 6, 0.1
"""Number of rounds of a turn, and fraction of the local fits that fail."""
WARM = 2 * len(algorithms.__all__) * ROUNDS
"""Number of first rounds, which fill caches, that are excluded from the slope of the memory."""
COUNTS = ("turns", "rounds", "faults", "kills", "resumes", "differences")


class Faults(Callback):
    """Callback that makes some local fits fail, half of them by an exception and half by NaN."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Draw whether the fit fails, from the seed of the run, the round and the client."""
        self.drawn = random.Random(torch.initial_seed()).random()
        if self.drawn < FAULTY / 2:
            raise RuntimeError("injected")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Set a weight to NaN."""
        if FAULTY / 2 <= self.drawn < FAULTY:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] = float("nan")


class Memory(Callback):
    """Callback that records the resident memory after every round."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Append the resident memory in bytes."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        with self.path.open("a") as file:
            file.write(f"{pages * os.sysconf('SC_PAGE_SIZE')}\n")


def main() -> None:
    """Run turns until the time is over, and write the report after each turn."""
    arguments = parsed()
    torch.set_num_threads(1)
    before = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    report: dict[str, Any] = {"environment": environment(), "seed": arguments.seed, **dict.fromkeys(COUNTS, 0)}
    report |= {"differing": [], "seconds": 0.0, "algorithms": {}, "memory": [], **before}
    with tempfile.TemporaryDirectory() as folder, long_living(arguments.seed, Path(folder)) as straight:
        earlier, report["memory"] = report["memory"], []
        while report["seconds"] < 3600 * arguments.hours:
            started = time.monotonic()
            take_a_turn(report, straight, Path(folder))
            report["seconds"] += time.monotonic() - started
            report["memory"] = [*earlier, slope(Path(folder) / "memory.txt")]
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.with_suffix(".tmp").write_text(json.dumps(report, indent=2) + "\n")
            arguments.out.with_suffix(".tmp").replace(arguments.out)
            print({name: report[name] for name in COUNTS}, flush=True)
    if report["differences"]:
        raise SystemExit(f"{report['differences']} parts of resumed runs differ from the straight run's.")


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=2.0, help="total hours of all calls with one report")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the turns")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "soak.json")
    return parser.parse_args()


def the_run(seed: int, turn: int, *callbacks: Callback) -> Run:
    """Create the run of a turn, with random options and faults."""
    rng = random.Random(f"{seed} {turn} options")
    federation = {
        "on_client_error": "skip",
        "checkpoint_every_n_rounds": rng.choice([1, 1, 2, 3]),
        "wire": rng.choice(["count", "encode"]),
        "buffers": rng.choice(["average", "local", "server"]),
        "store": rng.choice(["ram", "disk"]),
    }
    method = without_finetuning(algorithm(algorithms.__all__[turn % len(algorithms.__all__)]))
    return Run(method, ROUNDS, 1000 * seed + turn, federation, [Faults()], callbacks)


@contextmanager
def long_living(seed: int, root: Path) -> Iterator[Any]:
    """Start a process that runs turns without interruption, one after another.

    Yields:
        Function that runs a turn, and returns False if the run has failed.
    """
    (orders, order), (answers, answer) = os.pipe(), os.pipe()
    process = start(lambda: obey(seed, orders, answer, root), root / "straight.log")

    def run(turn: int) -> bool:
        os.write(order, f"{turn}\n".encode())
        reply = os.read(answers, 1)
        if not reply:
            raise SystemExit((root / "straight.log").read_text()[-4000:])
        return reply == b"1"

    os.close(answer)
    try:
        yield run
    finally:
        os.kill(process, signal.SIGKILL)
        wait(process)


def obey(seed: int, orders: int, answer: int, root: Path) -> None:
    """Run the turns whose numbers are read from a pipe, in the long-living process."""
    for line in os.fdopen(orders):
        good = b"1"
        try:
            the_run(seed, int(line), Memory(root / "memory.txt")).fit(root / "straight")
        except Exception:
            print(f"turn {line.strip()}: {traceback.format_exc()}", flush=True)
            good = b"0"
        os.write(answer, good)


def take_a_turn(report: dict[str, Any], straight: Any, root: Path) -> None:
    """Run a turn with and without kills, and compare the results."""
    turn = report["turns"]
    rng, name = random.Random(f"{report['seed']} {turn} kills"), algorithms.__all__[turn % len(algorithms.__all__)]
    started = time.monotonic()
    whole = straight(turn)
    duration = time.monotonic() - started
    kills = kill_and_resume(report["seed"], turn, rng, duration, whole, root)
    if not (root / "straight").exists():
        print(f"turn {turn}, {name}: a fault before the first round has ended both runs", flush=True)
        report["turns"] += 1
        return
    run, differing = the_run(report["seed"], turn), []
    if whole:
        expected, found = leaves(run.folder(root / "straight")), leaves(run.folder(root / "killed"))
        differing = [f"turn {turn}, {name}: {part}" for part in expected if expected[part] != found[part]]
    rows = Table(run.folder(root / "straight") / "clients.csv").read()
    news = {
        "turns": 1,
        "rounds": len({row["round"] for row in rows}),
        "faults": sum(bool(row["failure"]) for row in rows),
        "kills": kills,
        "resumes": kills,
        "differences": len(differing),
    }
    counts = report["algorithms"].setdefault(name, dict.fromkeys(news, 0))
    for key, number in news.items():
        report[key] += number
        counts[key] += number
    report["differing"] += differing
    for part in ("straight", "killed"):
        shutil.rmtree(root / part)


def kill_and_resume(seed: int, turn: int, rng: random.Random, duration: float, whole: bool, root: Path) -> int:
    """Run a turn in processes that are killed at random times; return the number of kills."""
    planned, kills = rng.randint(1, 4), 0
    while True:
        process = start(lambda: the_run(seed, turn).fit(root / "killed"), root / "killed.log")
        if kills < planned:
            time.sleep(rng.uniform(0, 1.5 * duration))
            os.kill(process, signal.SIGKILL)
        code = wait(process)
        if code != -signal.SIGKILL:
            break
        kills += 1
    if (code == 0) != whole:
        logs = "\n".join(f"{name}:\n{(root / name).read_text()[-4000:]}" for name in ("straight.log", "killed.log"))
        ended = "ended" if whole else "did not end"
        raise SystemExit(f"Turn {turn} left with {code}, and the straight run {ended}.\n{logs}")
    return kills


def slope(path: Path) -> dict[str, float]:
    """Compute the growth of the memory of the long-living process per round, by least squares.

    Args:
        path: File with one line per round, the resident memory in bytes.
    """
    sizes = [int(line) for line in path.read_text().splitlines()]
    late = torch.tensor(sizes[WARM:], dtype=torch.float64)
    rounds = torch.arange(len(late), dtype=torch.float64)
    spread = rounds - rounds.mean()
    steep = float(spread @ (late - late.mean()) / (spread @ spread)) if len(late) > 1 else 0.0
    return {"rounds": len(sizes), "first_bytes": sizes[0], "last_bytes": sizes[-1], "bytes_per_round": steep}


if __name__ == "__main__":
    main()
