"""What every test gets."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from helpers.deployment import Deployment, configuration

os.environ["JSONARGPARSE_DEPRECATION_WARNINGS"] = "off"
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
logging.getLogger("lightning.pytorch").propagate = True


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with mock.patch.dict(os.environ):
        yield
    torch.set_num_threads(before)


@pytest.fixture
def deploy(tmp_path: Path) -> Callable[..., Deployment]:
    """Make a deployment of a method."""

    def make(algorithm: str = "FedAvg", init_args: dict[str, Any] | None = None, **changed: Any) -> Deployment:
        method = {"class_path": algorithm, "init_args": init_args or {}}
        return Deployment(configuration(tmp_path / "run.yaml", method, **changed), tmp_path)

    return make
