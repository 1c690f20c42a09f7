"""What every exported sampler and partition promises: the checks that users run on theirs."""

from __future__ import annotations

import pytest
import torch

from lightning_sparsefl import data, federated
from lightning_sparsefl.cost import Devices
from lightning_sparsefl.data import ByGroup, Dirichlet, Pathological, QuantitySkew
from lightning_sparsefl.federated import REFL, Oort, Uniform
from lightning_sparsefl.testing import checks

TIMES = {"devices": Devices()}
SAMPLERS = {
    "Oort": (Oort(), TIMES),
    "Uniform": (Uniform(), {}),
    "Uniform, more than wanted": (Uniform(over_select=1.3), TIMES),
    "REFL": (REFL(), TIMES),
    "REFL, half of the clients": (REFL(target="half"), TIMES),
}
PARTITIONS = {
    "IID": data.IID(),
    "Dirichlet": Dirichlet(alpha=0.3),
    "Pathological": Pathological(classes_per_client=2),
    "QuantitySkew": QuantitySkew(alpha=1.0),
    "ByGroup": ByGroup("writer"),
}


def exported(module, base):
    """Return the names of the classes of a kind that a package exports, without their base class."""
    kinds = {name: getattr(module, name) for name in module.__all__}
    return {n for n, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, base) and kind is not base}


def test_every_exported_class_is_checked():
    assert exported(federated, federated.CohortSampler) == {type(sampler).__name__ for sampler, _ in SAMPLERS.values()}
    assert exported(data, data.Partition) == {type(partition).__name__ for partition in PARTITIONS.values()}


@pytest.mark.slow_after_first
@pytest.mark.parametrize("variant", SAMPLERS)
def test_a_sampler_keeps_its_promises(variant):
    sampler, options = SAMPLERS[variant]
    for _, check in checks(sampler, options):
        check()


@pytest.mark.slow_after_first("variant")
@pytest.mark.parametrize("variant", PARTITIONS)
@pytest.mark.parametrize("num_clients", [1, 10])
def test_a_partition_keeps_its_promises(variant, num_clients):
    labels = torch.arange(600) * 7 % 10
    for _, check in checks(PARTITIONS[variant], labels, num_clients=num_clients):
        check()
