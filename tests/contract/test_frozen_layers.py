"""Methods that prune single weights leave alone what the module freezes, such as a teacher or a pretrained part."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from helpers.algorithms import ALGORITHMS, NARROW
from helpers.device import DEVICE
from helpers.networks import module_for
from lightning_sparsefl.testing.small_federation import SmallFederation

OF_UNITS = frozenset(
    ("FD", "FedLPS", "FedMP", "FedP3", "FedRolex", "FjORD", "Hermes", "HeteroFL", "PruneTrain", "SplitMix")
)
"""Methods that cut units or layers, those of a frozen part like others."""
QUICK = ("SNIP", "FedDIP", "FedSpa", "FedPM", "PerFedMask")
WEIGHTS = [
    pytest.param(
        kind(**NARROW.get(kind, {})), id=kind.__name__, marks=() if kind.__name__ in QUICK else pytest.mark.slow
    )
    for kind in ALGORITHMS
    if kind.__name__ not in OF_UNITS
]


def values(module):
    return [value.clone() for value in module.state_dict().values()]


def taught(kind, seen):
    """A class of modules with a frozen teacher before the network, which notes what it is at first and in training."""

    class Taught(kind):
        def __init__(self):
            super().__init__()
            teacher = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)).requires_grad_(False)
            self._modules = {"teacher": teacher, **self._modules}
            seen.append(values(teacher))

        def training_step(self, batch, batch_idx):
            seen.append(values(self.teacher))
            target = self.teacher(batch[0].flatten(1)).softmax(1)
            return super().training_step(batch, batch_idx) + 0.1 * F.cross_entropy(self(batch[0]), target)

    return Taught


@pytest.mark.parametrize("algorithm", WEIGHTS)
def test_a_frozen_teacher_stays_as_it_is(algorithm, tmp_path):
    seen = []
    kind = taught(module_for(algorithm), seen)
    run = SmallFederation(tmp_path, lambda _: kind(), DEVICE.type)
    trainer = run(algorithm, federation={"local_engine": "fast"})
    state = torch.load(trainer.run_folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    seen.append([value.to(DEVICE) for name, value in state.items() if name.startswith("teacher.")])
    assert len(seen) > 10
    assert [len(now) for now in seen] == [4] * len(seen)
    assert all(torch.equal(now.cpu(), first.cpu()) for each in seen for now, first in zip(each, seen[0], strict=True))
