"""Kill runs at random times, resume them until they end, and compare the results with those of an uninterrupted run.

For each exported method, with the client records in memory and on disk (`federation.store`), a small federation on
the digits runs once without interruption. Then processes of the same run are killed with SIGKILL, alternately at a
time drawn uniformly from the duration of the uninterrupted run and as soon as a partly written file exists. The next
process resumes with ``ckpt_path: last``. A run that ends is compared, and a new one is started, until the number of
kills is reached. The checkpoint, the client records, the tables without times, the final table, the steps and values
in TensorBoard and the file names are compared.

    python tests/stress/kill_resume.py --out result.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _federations import Run, algorithm, environment, leaves, start, wait

from lightning_sparsefl import algorithms

ROUNDS = 6


def main() -> None:
    """Test the chosen methods one after another, and write the report."""
    arguments = parsed()
    torch.set_num_threads(1)
    report: dict[str, Any] = {"environment": environment(), "rounds": ROUNDS, "differences": 0, "algorithms": {}}
    for name, store in itertools.product(arguments.algorithms, arguments.stores):
        with tempfile.TemporaryDirectory() as folder:
            rng = random.Random(f"{arguments.seed} {name} {store}")
            found = killed(a_run(name, store), arguments.kills, rng, Path(folder))
        report["algorithms"].setdefault(name, {})[store] = found
        report["differences"] += found["differences"]
        print(name, store, json.dumps(found), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(report, indent=2) + "\n")
    if report["differences"]:
        raise SystemExit(f"{report['differences']} parts of resumed runs differ from the straight run's.")


def parsed() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", default=algorithms.__all__, choices=algorithms.__all__)
    parser.add_argument("--stores", nargs="+", default=["ram", "disk"], choices=["ram", "disk"])
    parser.add_argument("--kills", type=int, default=20, help="number of kills for each method and store")
    parser.add_argument("--seed", type=int, default=0, help="random seed of the times")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def a_run(name: str, store: str) -> Run:
    """Create the run of a method, with selection of the best round, fine-tuning, and a commit every second round."""
    federation = {"select": "global/val_acc", "finetune_epochs": 1, "checkpoint_every_n_rounds": 2, "store": store}
    return Run(algorithm(name), ROUNDS, federation=federation)


def killed(run: Run, kills: int, rng: random.Random, root: Path) -> dict[str, Any]:
    """Kill processes of a run, and compare the runs that end.

    Args:
        run: Run to kill.
        kills: Number of kills.
        rng: Generator of the times.
        root: Parent folder of the run folders.
    """
    straight, duration = root / "straight", time.monotonic()
    if wait(start(lambda: run.fit(straight), root / "straight.log")):
        raise SystemExit((root / "straight.log").read_text())
    duration = time.monotonic() - duration
    expected = leaves(run.folder(straight))
    counts = {"kills": 0, "inside_a_write": 0, "before_the_first_commit": 0, "while_fine_tuning": 0}
    runs, differing, number = 0, [], 0
    while counts["kills"] < kills or number > 0:
        folder = root / f"killed-{runs}"
        done = attempt(run, folder, None if counts["kills"] >= kills else rng, duration, number, counts, root)
        number += 1
        if done:
            found = leaves(run.folder(folder))
            differing += [f"run {runs}: {name}" for name in expected if found[name] != expected[name]]
            shutil.rmtree(folder)
            runs, number = runs + 1, 0
    return {
        **counts,
        "runs": runs,
        "differences": len(differing),
        "differing": differing,
    }


def attempt(
    run: Run, folder: Path, rng: random.Random | None, duration: float, number: int, counts: dict[str, int], root: Path
) -> bool:
    """Start or resume a run and kill it; return whether it ended before."""
    process = start(lambda: run.fit(folder), root / "killed.log")
    if rng is not None:
        ended = wait_for_a_write(process, folder, rng) if counts["kills"] % 2 else sleep(process, rng, duration)
        if not ended:
            os.kill(process, signal.SIGKILL)
    code = wait(process)
    if code == -signal.SIGKILL:
        note(run, folder, counts)
        return False
    if code:
        raise SystemExit(f"Attempt {number} failed:\n{(root / 'killed.log').read_text()[-4000:]}")
    return True


def sleep(process: int, rng: random.Random, duration: float) -> bool:
    """Wait for a random time; return whether the process has ended."""
    time.sleep(rng.uniform(0, duration))
    return ended(process)


def wait_for_a_write(process: int, folder: Path, rng: random.Random) -> bool:
    """Wait for the first, second or third partly written file; return whether the process has ended."""
    seen: set[tuple[str, int]] = set()
    few = rng.randint(1, 3)
    while not ended(process):
        for path in half_written(folder):
            try:
                seen.add((path.name, path.stat().st_ino))
            except FileNotFoundError:
                continue
            if len(seen) >= few:
                return False
        time.sleep(0.0005)
    return True


def half_written(folder: Path) -> list[Path]:
    """Return files that only exist during a write: temporary files and SQLite's journal."""
    return [path for name in (".*.tmp", "*-journal") for path in folder.glob(f"*/version_*/checkpoints/**/{name}")]


def ended(process: int) -> bool:
    """Return whether a process has ended, without collecting its exit code."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def note(run: Run, folder: Path, counts: dict[str, int]) -> None:
    """Count a kill by the state in which it left the run."""
    counts["kills"] += 1
    left = run.folder(folder)
    counts["inside_a_write"] += bool(half_written(folder))
    counts["before_the_first_commit"] += not (left / "checkpoints" / "last.ckpt").exists()
    table = left / "metrics.csv"
    rounds = len(table.read_text().splitlines()) - 1 if table.exists() else 0
    counts["while_fine_tuning"] += rounds == run.rounds


if __name__ == "__main__":
    main()
