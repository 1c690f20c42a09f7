"""Methods accept a matrix without elements, such as the table of categories of data that have none."""

from __future__ import annotations

import pytest
from torch import nn

from helpers.algorithms import ALGORITHMS, NARROW
from helpers.device import DEVICE
from helpers.networks import module_for
from lightning_sparsefl.testing.small_federation import SmallFederation

QUICK = ("FLASH", "FedPM", "FedSpa", "LotteryFL", "PruneFL")
METHODS = [
    pytest.param(
        kind(**NARROW.get(kind, {})), id=kind.__name__, marks=() if kind.__name__ in QUICK else pytest.mark.slow
    )
    for kind in ALGORITHMS
]


@pytest.mark.parametrize("algorithm", METHODS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_matrix_without_elements_is_left_alone(algorithm, tmp_path):
    class WithATable(module_for(algorithm)):
        def __init__(self):
            super().__init__()
            self._modules = {"table": nn.Embedding(0, 4), **self._modules}

    trainer = SmallFederation(tmp_path, lambda _: WithATable(), DEVICE.type)(algorithm)
    assert trainer.run_folder.joinpath("summary.json").exists()
