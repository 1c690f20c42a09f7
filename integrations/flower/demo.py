"""From simulation to deployment on one machine: the same YAML by `sparsefl fit` and by Flower, and what is equal.

Starts a SuperLink, three SuperNodes and their daemons on localhost, with TLS and node authentication; ends them all.

    python demo.py FedSpa
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from lightning_sparsefl_flower.comparison import compare
from lightning_sparsefl_flower.localhost import Localhost

CONFIGS = Path(__file__).resolve().parent / "configs"
METHODS = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
HOMES = ((0, 3), (1, 4), (2, 5))
"""Clients of each node."""


def main() -> int:
    """Run the demonstration.

    Returns:
        Exit code: 1 if the two runs differ, or one of them fails.
    """
    asked = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that all processes end
    if asked.keep is not None:
        asked.keep.mkdir(parents=True)
        return demonstrate(asked.method, asked.keep.resolve(), asked.timeout, asked.secure_sum)
    with tempfile.TemporaryDirectory(prefix="sfl-") as folder:
        return demonstrate(asked.method, Path(folder), asked.timeout, asked.secure_sum)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Compare a simulation with a deployment of the same configuration.")
    parser.add_argument("method", nargs="?", default="FedAvg", choices=METHODS, help="Method to run (default: FedAvg).")
    parser.add_argument("--keep", type=Path, help="New folder to keep keys, logs and run folders in.")
    parser.add_argument("--timeout", type=float, default=600.0, help="Seconds to wait for the nodes in each phase.")
    parser.add_argument("--secure-sum", default="", metavar="T,N,C", help="Sum updates under masks, such as 0.67,3,2.")
    return parser


def demonstrate(method: str, folder: Path, timeout: float, secure_sum: str = "") -> int:
    """Run both, and compare.

    Args:
        method: Name of the method.
        folder: Empty folder.
        timeout: Seconds to wait for the nodes in each phase.
        secure_sum: Policy of secure sums; empty = updates are sent one by one.
    """
    config = CONFIGS / f"{method}.yaml"
    print(f"{method}: sparsefl fit ...", flush=True)
    simulated = simulate(config, folder)
    print(f"{method}: Flower, with {len(HOMES)} nodes ...", flush=True)
    with Localhost(folder, config, HOMES, secure_sum) as deployment:
        run = deployment.run(timeout=timeout, holdout=True)
        said = deployment.log("run")
    if not run["status"].endswith("completed"):
        print(said[-4000:], f"\nThe deployment failed: {run['status']}, {run.get('status-details')}", sep="")
        return 1
    return report(compare(simulated, only_run(folder / "deployed"), same_bytes=not secure_sum))


def simulate(config: Path, folder: Path) -> Path:
    """Run `sparsefl fit`; return the run folder."""
    command = [sys.executable, "-m", "lightning_sparsefl.cli", "fit", "--config", str(config)]
    root = folder / "simulated"
    with (folder / "simulated.log").open("wb") as log:
        subprocess.run([*command, "--trainer.default_root_dir", str(root)], stdout=log, stderr=log, check=True)
    return only_run(root)


def only_run(root: Path) -> Path:
    """Return the run folder of a root with one."""
    (found,) = root.glob("*/version_*")
    return found


def report(differences: dict[str, str]) -> int:
    """Print what is equal, as a table; return the exit code."""
    width = max(map(len, differences))
    print(f"\n{'simulation against deployment':{width}}")
    for part, where in differences.items():
        print(f"  {part:{width}}  {'equal' if not where else f'DIFFERENT: {where}'}")
    return int(any(differences.values()))


if __name__ == "__main__":
    sys.exit(main())
