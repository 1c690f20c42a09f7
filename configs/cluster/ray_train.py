"""Start a federation on a Ray cluster with Ray Train (`pip install "ray[train]"`).

    python configs/cluster/ray_train.py --workers 4 --runs /shared/runs/first --config FILE [options of `fit`]

Each worker is a rank. The folder of `--runs` must be on a disk that all machines share. It belongs to this job, which
goes on from its last committed round when workers are lost (`--failures`), or when the command is started again. Paths
in the options must be absolute, since Ray runs workers in folders of its own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_sparsefl.cli import main


def work(config: dict[str, Any]) -> None:
    """Run one rank in a worker, whose environment has the variables of torchrun but the one that identifies it.

    Args:
        config: The arguments of `sparsefl`, as `arguments`.
    """
    os.environ["TORCHELASTIC_RUN_ID"] = "ray"
    sys.argv[0] = "sparsefl"
    code = main(config["arguments"])
    if code:
        raise RuntimeError(f"sparsefl ended with exit code {code}.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1, help="number of ranks (default: 1)")
    parser.add_argument("--gpu", action="store_true", help="give each rank a GPU")
    parser.add_argument("--runs", type=Path, required=True, help="folder of this job's run")
    parser.add_argument("--failures", type=int, default=3, help="times that the workers are started again (default: 3)")
    known, options = parser.parse_known_args()
    there = ["--ckpt_path", "auto", "--trainer.default_root_dir", str(known.runs.resolve())]
    TorchTrainer(
        work,
        train_loop_config={"arguments": ["fit", *there, *options, "--trainer.devices", "auto"]},
        torch_config=TorchConfig(backend="nccl" if known.gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=known.workers, use_gpu=known.gpu),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=known.failures), storage_path=str(known.runs.resolve() / "ray")
        ),
    ).fit()
