"""The device of the tests of stacks: a CPU, or the one that SPARSEFL_TEST_DEVICE names, such as ``cuda``."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = torch.device(os.environ.get("SPARSEFL_TEST_DEVICE", "cpu"))
on_several_ranks = pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks have devices of their own, and fork")
