"""Promises of a partition, checked with the labels of a small data set."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_sparsefl.data import ByGroup, Partition
from lightning_sparsefl.testing.promises import promise, require, require_frozen_value

_UNKNOWN = 3
"""Exit code of a process that cannot import the class of a partition."""
_SPLIT = f"""
import json, pickle, sys
try:
    partition, data = pickle.load(sys.stdin.buffer)
except (ImportError, AttributeError):
    sys.exit({_UNKNOWN})
print(json.dumps(data.split(partition)))
"""


@dataclass(frozen=True)
class Labels:
    """Data that a partition is checked with."""

    labels: Tensor
    """Class of each example, or the group of each for a partition by groups, int64 of shape (examples,)."""
    num_clients: int
    """Number of clients."""

    def split(self, partition: Partition, seed: int = 1) -> list[list[int]]:
        """Return the examples of each client."""
        return [indices.tolist() for indices in partition.split(self.labels.clone(), self.num_clients, seed)]


@promise
def is_a_frozen_value(partition: Partition, data: Labels) -> None:
    """Check that a partition is a frozen dataclass of options, which can be pickled.

    Every rank computes the partition, and a checkpoint names its options.
    """
    require_frozen_value(partition)


@promise
def gives_examples_to_one_client(partition: Partition, data: Labels) -> None:
    """Check that every client gets examples, and that no example is given to two clients."""
    data.split(partition)


@promise
def depends_on_the_seed_alone(partition: Partition, data: Labels) -> None:
    """Check that a partition of the same labels and seed is the same again, and in another process.

    What a partition draws comes from `rng`, and not from the global generators of torch, NumPy or Python, from ``hash``
    of a text, which differs between processes, or from their numbers. A class that another process cannot import, such
    as one of a notebook, is split in this one only.
    """
    first = data.split(partition)
    _ = torch.rand(7), np.random.rand(7), random.random()
    require(data.split(copy.deepcopy(partition)) == first, "a second split with the same seed has other parts")
    elsewhere = _split_in_another_process(partition, data)
    require(elsewhere in (None, first), "a split with the same seed has other parts in another process")


def _split_in_another_process(partition: Partition, data: Labels) -> list[list[int]] | None:
    """Return the examples of each client by another interpreter; None if it cannot import the class."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    done = subprocess.run(
        [sys.executable, "-c", _SPLIT],
        input=pickle.dumps((partition, data)),
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"},
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        require(done.returncode == _UNKNOWN, f"another process cannot split: {said[-1] if said else 'it ended'}")
        return None
    parts: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return parts


@promise
def leaves_the_global_generators_alone(partition: Partition, data: Labels) -> None:
    """Check that a partition does not move the global generators, by which a module is initialized."""
    before = _generators()
    data.split(partition)
    for name, state in _generators().items():
        require(state == before[name], f"the state of {name}'s generator is another one after a split")


def _generators() -> dict[str, Any]:
    """Return the states of the global generators."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "NumPy": pickle.dumps(np.random.get_state()),
        "Python": random.getstate(),
    }


@promise
def leaves_labels_unchanged(partition: Partition, data: Labels) -> None:
    """Check that a partition does not write into the labels, which are those of the data set."""
    labels = data.labels.clone()
    partition.split(labels, data.num_clients, 1)
    require(torch.equal(labels, data.labels), "the labels are other ones after a split")


@promise
def needs_labels_only_if_it_says_so(partition: Partition, data: Labels) -> None:
    """Check that a partition with `needs_labels = False` is the same for other labels.

    It also splits data that has none. One that depends on labels keeps `needs_labels = True`, the default.
    """
    by_group = isinstance(partition, ByGroup)  # which is given groups in place of labels
    if not partition.needs_labels and not by_group:
        others = Labels(torch.zeros_like(data.labels), data.num_clients)
        require(others.split(partition) == data.split(partition), "the parts are other ones with other labels")
