"""Kill processes of a job under torchrun, which goes on with those that are left, and compare its results.

    python tests/stress/elastic.py --out result.json

Each case starts agents of torchrun here, each as a machine of its own, kills a process as soon as two rounds are
committed, waits until the job has ended by itself, and compares it with one process that keeps its records in memory.
Linux only. Nothing is timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # for `helpers`, the folder of the tests
sys.path.insert(0, str(Path(__file__).parent))  # as when it is run as a script
from ranks import CLUSTER, free_port, left_by

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "configs" / "quickstart.yaml"
STORES = ["ram", "disk"]
PATIENCE = 900
"""Seconds after which a job that has not ended has failed."""


@dataclass(frozen=True)
class Case:
    """Agents of a job, and what is killed."""

    ranks: tuple[int, ...]
    """Number of ranks of each agent."""
    nodes: str
    """Number of agents that torchrun needs, as a range."""
    victim: str
    """``worker``: a rank of the last agent; ``agent``: the last agent with all its ranks."""


CASES = {
    "a rank of one machine": Case((2,), "1", "worker"),
    "a rank of two machines": Case((1, 1), "1:2", "worker"),
    "one of two machines": Case((1, 1), "1:2", "agent"),
    "one of two machines with different numbers of ranks": Case((1, 2), "1:2", "agent"),
}


def children(process: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def committed(folder: Path) -> int:
    """Return the number of committed rounds of the runs in a folder."""
    tables = list(folder.glob("**/metrics.csv"))
    return max((len(table.read_text().splitlines()) - 1 for table in tables), default=0)


def fit(rounds: int, *more: str) -> list[str]:
    """Return the arguments of `sparsefl fit`."""
    return ["--config", str(CONFIG), "--trainer.max_rounds", str(rounds), "--trainer.max_epochs", "1", *more]


def result(folder: Path) -> dict[str, str]:
    """Return a fingerprint of each result of the only run in a folder; more than one run is an error."""
    (run,) = folder.glob("**/version_*")
    return left_by(run, json.loads((run / "summary.json").read_text()))


def alone(rounds: int, folder: Path) -> dict[str, str]:
    """Run one process that is never stopped."""
    line = [sys.executable, "-m", "lightning_sparsefl", "fit", *fit(rounds, "--trainer.default_root_dir", str(folder))]
    subprocess.run(line, check=True, capture_output=True)
    return result(folder)


def killed(case: Case, rounds: int, store: str, folder: Path) -> dict[str, str]:
    """Start the agents, kill a process after two rounds, wait for the others, and return the results."""
    port = free_port()
    common = {"NODES": case.nodes, "RESTARTS": "3", "RUNS": str(folder), "HEAD": f"localhost:{port}"}
    common |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with ExitStack() as stack:
        agents, logs = [], []
        for number, ranks in enumerate(case.ranks):
            logs.append(folder / f"agent{number}.log")
            log = stack.enter_context(logs[-1].open("w"))
            environment = {**os.environ, **common, "RANKS": str(ranks)}
            line = [str(CLUSTER / "torchrun.sh"), *fit(rounds, "--federation.store", store)]
            agents.append(subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT))
            _wait(lambda: _listens(port), agents, logs)  # so that the first agent, which is not killed, has the store
        try:
            _wait(lambda: committed(folder) >= 2, agents, logs)
            victim, workers = agents[-1], children(agents[-1].pid)
            if case.victim == "agent":
                os.kill(victim.pid, signal.SIGKILL)
                agents.remove(victim)
            for worker in workers if case.victim == "agent" else workers[-1:]:
                os.kill(worker, signal.SIGKILL)
            before = committed(folder)
            _wait(lambda: all(agent.poll() == 0 for agent in agents), agents, logs)
        finally:
            for agent in agents:
                agent.terminate()
    assert before < rounds, "the run had ended before the kill"
    return result(folder)


def _listens(port: int) -> bool:
    """Return whether a process listens on a port of this machine."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def _wait(reached: Any, agents: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path]) -> None:
    """Wait for a condition; exit with the logs if an agent fails, or after too long a time."""
    until = time.monotonic() + PATIENCE
    while not reached():
        if any(agent.poll() for agent in agents) or time.monotonic() > until:
            sys.exit("\n".join(f"{log}:\n{log.read_text()[-4000:]}" for log in logs))
        time.sleep(0.05)


def compare(names: Sequence[str], rounds: int, stores: Sequence[str]) -> dict[str, Any]:
    """Run the cases and compare each with one process; return the report."""
    with tempfile.TemporaryDirectory() as folder:
        one = alone(rounds, Path(folder))
    cases = []
    for store, name in itertools.product(stores, names):
        with tempfile.TemporaryDirectory() as folder:
            found: Mapping[str, str] = killed(CASES[name], rounds, store, Path(folder))
        differences = [part for part, mark in found.items() if mark != one[part]]
        cases.append({"killed": name, "store": store, "differences": differences})
    different = sum(len(case["differences"]) for case in cases)
    return {"rounds": rounds, "compared": list(one), "differences": different, "cases": cases}


def main() -> None:
    """Compare, print JSON, and write it to `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="what is killed")
    parser.add_argument(
        "--stores", nargs="+", choices=["ram", "disk"], default=["ram", "disk"], help="stores of records"
    )
    parser.add_argument("--rounds", type=int, default=8, help="number of rounds")
    parser.add_argument("--out", type=Path, help="file for the JSON")
    arguments = parser.parse_args()
    report = {"python": platform.python_version(), "torch": torch.__version__}
    report |= compare(arguments.cases, arguments.rounds, arguments.stores)
    text = json.dumps(report, indent=2) + "\n"
    if arguments.out is not None:
        arguments.out.write_text(text)
    print(text, end="")
    sys.exit(1 if report["differences"] else 0)


if __name__ == "__main__":
    main()
