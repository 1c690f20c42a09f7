"""Recorded steps whose operations are done one by one, and captured ones."""

import pytest
import torch

from helpers.captures import capture_on_cpu
from helpers.device import DEVICE
from lightning_sparsefl.federated.local.stacked import worker
from lightning_sparsefl.federated.local.stacked.recording.captured import graphs_of


@pytest.fixture(params=[False, True], ids=["one by one", "captured"])
def captures(request, monkeypatch):
    """Whether recorded steps are captured: as graphs on a CUDA device, else as :func:`capture_on_cpu` does it."""
    capture = graphs_of(DEVICE) or capture_on_cpu
    monkeypatch.setattr(worker, "graphs_of", lambda device: capture if request.param else None)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    return request.param
