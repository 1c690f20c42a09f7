"""The files of configs/cluster in imitations of their environments.

The scripts for torchrun and SLURM: test_cli.py and contract/test_ranks.py.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from helpers.command_line import QUICKSTART, ROOT, SHORT, run_folder

CLUSTER = ROOT / "configs" / "cluster"
RAY = """
import multiprocessing, os

def ScalingConfig(num_workers, use_gpu):
    assert not use_gpu
    return num_workers

FailureConfig = RunConfig = dict

def worker(work, config, rank, size, port):
    import torch.distributed as dist
    own = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": 1, "NODE_RANK": rank}
    os.environ |= {name: str(value) for name, value in {**own, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items()}
    dist.init_process_group("gloo")  # Ray has connected the workers when it calls the function
    work(config)

class TorchConfig:
    def __init__(self, backend):
        assert backend == "gloo"

class TorchTrainer:
    def __init__(self, work, train_loop_config, torch_config, scaling_config, run_config):
        assert run_config["failure_config"]["max_failures"] == 3
        start = multiprocessing.get_context("fork").Process
        port = int(os.environ["TEST_PORT"])
        self.workers = [start(target=worker, args=(work, train_loop_config, rank, scaling_config, port))
                        for rank in range(scaling_config)]
    def fit(self):
        for process in self.workers:
            process.start()
        for process in self.workers:
            process.join()
            assert process.exitcode == 0
"""
"""What the recipe uses of Ray Train: each worker as on a machine of its own."""


@pytest.fixture
def port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def ended(running):
    """Wait for processes; return what they printed, and fail if one of them did."""
    printed = [process.communicate(timeout=240)[0] for process in running]
    assert not any(process.returncode for process in running), "\n".join(printed)
    return printed


def started(command, folder, **environment):
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    there = {"cwd": folder, "env": {**os.environ, **path, **environment}, "text": True}
    return subprocess.Popen(command, **there, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def same_weights(ours, sparsefl, tmp_path):
    assert sparsefl("fit", "--config", QUICKSTART, *SHORT)[0] == 0
    runs = (ours, run_folder(tmp_path))
    mine, alone = (torch.load(run / "checkpoints/last.ckpt", weights_only=True)["state_dict"] for run in runs)
    return all(torch.equal(mine[name], value) for name, value in alone.items())


@pytest.mark.slow
def test_the_pods_of_a_pytorch_job_train_together(port, sparsefl, tmp_path):
    job = yaml.safe_load((CLUSTER / "kubernetes.yaml").read_text())["spec"]
    (pod,) = job["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    elastic = job["elasticPolicy"]
    # what Kubeflow's operator derives from the policy, with two pods at least so that they need not wait for more
    operator = {"PET_NNODES": f"2:{elastic['maxReplicas']}", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ID": "job"}
    operator |= {"PET_MAX_RESTARTS": str(elastic["maxRestarts"]), "PET_RDZV_BACKEND": elastic["rdzvBackend"]}
    operator |= {"PET_RDZV_ENDPOINT": f"localhost:{port}", "PET_RDZV_CONF": "last_call_timeout=1"}
    places = {"/configs/fit.yaml": QUICKSTART, "/runs/sparsefl": str(tmp_path / "job")}
    command = [places.get(word, word) for word in (*pod["command"], *pod["args"])] + SHORT
    own = {variable["name"]: variable["value"] for variable in pod["env"]}
    printed = ended([started(command, tmp_path, **operator, **own) for _ in range(2)])
    assert any("2 rank(s)" in text for text in printed)
    assert same_weights(tmp_path / "job/FedSpa/version_0", sparsefl, tmp_path)


@pytest.mark.slow
def test_the_workers_of_ray_train_together_and_a_finished_run_is_not_repeated(port, sparsefl, tmp_path):
    package = tmp_path / "path" / "ray" / "train"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(RAY)
    (package / "torch.py").write_text("from ray.train import TorchConfig, TorchTrainer\n")
    recipe = [sys.executable, str(CLUSTER / "ray_train.py"), "--workers", "2", "--runs", str(tmp_path / "job")]
    inherited = os.environ.get("PYTHONPATH")
    search = {"PYTHONPATH": os.pathsep.join(filter(None, [str(package.parents[1]), inherited])), "TEST_PORT": port}
    for _ in range(2):
        (printed,) = ended([started([*recipe, "--config", QUICKSTART, *SHORT], tmp_path, **search)])
        assert "2 rank(s)" in printed
    assert [run.name for run in (tmp_path / "job/FedSpa").iterdir()] == ["version_0"]
    assert same_weights(tmp_path / "job/FedSpa/version_0", sparsefl, tmp_path)
