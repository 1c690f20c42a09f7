import pytest
from lightning.fabric import Fabric

from lightning_sparsefl.federated.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def alone():
    """The processes of a run on one rank."""
    return Ranks(Fabric(accelerator="cpu", devices=1))
