"""Freed memory that a process keeps while it trains."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from lightning_sparsefl import FedAvg, FederatedTrainer
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.distributed import freed_memory
from lightning_sparsefl.federated.distributed.freed_memory import freed_memory_kept
from lightning_sparsefl.models import MLP

CPU = torch.device("cpu")
STEPS, PAGES = 20, 8192
SCRIPT = f"""
import json, resource, torch
from lightning_sparsefl.federated.distributed.freed_memory import freed_memory_kept

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def steps(number):
    before = faults()
    for _ in range(number):
        layers = [torch.ones({PAGES} * 4096 // 16) for _ in range(4)]
        del layers
    return faults() - before

torch.set_num_threads(1)
found = {{}}
with freed_memory_kept(torch.device("cpu")):
    steps(1)
    found["inside"] = steps({STEPS})
    held = int(open("/proc/self/statm").read().split()[1])
found["returned"] = held - int(open("/proc/self/statm").read().split()[1])
print(json.dumps(found))
"""

glibc = pytest.mark.skipif(freed_memory._glibc() is None, reason="needs glibc")


@pytest.mark.slow
@glibc
def test_freed_memory_is_kept_inside_and_returned_afterwards():
    environment = {name: value for name, value in os.environ.items() if name not in freed_memory._OF_THE_USER}
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, check=True)
    found = json.loads(run.stdout.splitlines()[-1])
    assert found["inside"] < PAGES  # a new process that returns it has about a fault for each page of each step
    assert found["returned"] > PAGES / 2


@pytest.mark.parametrize("name", freed_memory._OF_THE_USER)
def test_settings_of_the_user_are_left_alone(name, monkeypatch):
    monkeypatch.setenv(name, "1000000")
    with mock.patch.object(freed_memory, "_glibc") as glibc, freed_memory_kept(CPU):
        pass
    assert glibc().mallopt.mock_calls == []


@pytest.mark.parametrize(("libc", "device"), [(None, CPU), (mock.Mock(), torch.device("meta"))])
def test_without_glibc_or_a_cpu_nothing_is_set(libc, device):
    with mock.patch.object(freed_memory, "_glibc", return_value=libc), freed_memory_kept(device):
        pass
    assert libc is None or libc.mock_calls == []


def test_an_error_inside_restores_the_settings(monkeypatch):
    libc = mock.Mock()
    for name in freed_memory._OF_THE_USER:
        monkeypatch.delenv(name, raising=False)
    with (
        mock.patch.object(freed_memory, "_glibc", return_value=libc),
        pytest.raises(ZeroDivisionError),
        freed_memory_kept(CPU),
    ):
        raise ZeroDivisionError
    assert libc.mallopt.mock_calls == [mock.call(*pair) for pair in ((-1, -1), (-3, 2**30), (-1, 2**26), (-3, 2**25))]
    libc.malloc_trim.assert_called_once_with(0)


def test_a_version_that_refuses_large_blocks_gets_the_largest_that_it_accepts(monkeypatch):
    accepted = {}

    def mallopt(parameter, value):
        if parameter == -3 and value > 2**25:
            return 0
        accepted[parameter] = value
        return 1

    for name in freed_memory._OF_THE_USER:
        monkeypatch.delenv(name, raising=False)
    with mock.patch.object(freed_memory, "_glibc", return_value=mock.Mock(mallopt=mallopt)), freed_memory_kept(CPU):
        assert accepted == {-1: -1, -3: 2**25}


def test_a_run_keeps_freed_memory_to_its_end(tmp_path, monkeypatch):
    for name in freed_memory._OF_THE_USER:
        monkeypatch.delenv(name, raising=False)
    trainer = FederatedTrainer(
        algorithm=FedAvg(), accelerator="cpu", devices=1, max_rounds=1, default_root_dir=tmp_path, limit_train_batches=1
    )
    with mock.patch.object(freed_memory, "_glibc") as glibc:
        trainer.fit(MLP(num_classes=4, sample_shape=(1, 1, 8)), FederatedBlobs(num_classes=4, dim=8, val_fraction=0.2))
    values = [call.args[1] for call in glibc().mallopt.call_args_list]
    assert values == [*freed_memory._DURING.values(), *freed_memory._AFTER.values()]
