"""Methods and callbacks work on a device that, like a GPU, takes no tensors of the CPU beside its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lightning_utilities.core.imports import RequirementCache

TESTS = Path(__file__).parent
IN_OTHER_PROCESSES = "several_ranks or several_processes or pipe or fork"
"""Tests that fork, which a process with a device cannot."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(shutil.which, ("g++", "ninja"))), reason="the device is compiled with g++ and ninja"
    ),
    pytest.mark.skipif(not RequirementCache("torch>=2.13"), reason="the device is written for newer headers of torch"),
]

OF_CALLBACKS = (
    "contract/test_callbacks.py",
    "callbacks/test_budget_aware_extrusion.py",
    "callbacks/test_group_penalty.py",
    "callbacks/test_sparsity_monitor.py",
    "callbacks/test_width.py",
)
OF_ENGINES = ("federated/local/test_device_samples.py",)


@pytest.mark.parametrize(
    "files", [("contract/test_algorithms.py",), OF_CALLBACKS, OF_ENGINES], ids=["methods", "callbacks", "engines"]
)
def test_on_a_second_device(files, tmp_path_factory):
    library = tmp_path_factory.getbasetemp().parent / "second_device"  # one for all workers of xdist
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "helpers.second_device.plugin", "-q", "-n", "0"),
            *("-p", "no:cacheprovider", "-k", f"not ({IN_OTHER_PROCESSES})"),
            *(f"tests/{file}" for file in files),
        ],
        cwd=TESTS.parent,
        env={
            **os.environ,
            "SECOND_DEVICE": str(library),
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
        },
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
