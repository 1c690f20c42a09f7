"""The small federation of the checks, and what its runs leave; the fixtures are in tests/conftest.py."""

from __future__ import annotations

import pytest

from helpers.device import DEVICE
from helpers.networks import module_for
from lightning_sparsefl.testing.contents import last_contents
from lightning_sparsefl.testing.small_federation import SmallFederation


@pytest.fixture
def federation(tmp_path):
    """Run a verb of the trainer on a small federation; return the trainer, with the result as `summary`."""
    return SmallFederation(tmp_path, lambda algorithm: module_for(algorithm)(), DEVICE.type)


@pytest.fixture
def last():
    """Read the content of a trainer's last checkpoint, clients' newest records included, in comparable form."""
    return lambda trainer: last_contents(trainer.run_folder)
