"""Plugin of pytest: runs of one process on the CPU take place on the second device.

The environment variable `SECOND_DEVICE` names the folder for its library.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.accelerators import MPSAccelerator as FabricMPS
from lightning.pytorch.accelerators import MPSAccelerator

from helpers.second_device.device import NAME, register
from lightning_sparsefl.federated.local.fast import trainer as fast


class _OnlyDevice:
    """Accelerator for the device; Lightning finds the root device only of its own accelerators, hence of subclasses."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return [0]

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(NAME, 0)]

    def setup_device(self, device: torch.device) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    def teardown(self) -> None: ...


class ForFabric(_OnlyDevice, FabricMPS):
    """Accelerator of Fabric."""


class ForTrainer(_OnlyDevice, MPSAccelerator):
    """Accelerator of the Trainer."""


def _moved(cls: type, accelerator: type) -> Any:
    """Return the `__init__` of a class of Lightning, which replaces the CPU of one process."""
    init = cls.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def moved(self: Any, *args: Any, **options: Any) -> None:
        single = options.get("devices", "auto") in (1, "auto") and options.get("strategy", "auto") == "auto"
        if options.get("accelerator", "auto") == NAME or (
            single and options.get("accelerator", "auto") in ("cpu", "auto")
        ):
            options.update(accelerator=accelerator(), devices=1)
        init(self, *args, **options)

    return moved


def pytest_configure() -> None:
    """Register the device, and use it in place of the CPU."""
    register(Path(os.environ["SECOND_DEVICE"]))
    mock.patch.object(pl.Trainer, "__init__", _moved(pl.Trainer, ForTrainer)).start()
    mock.patch.object(Fabric, "__init__", _moved(Fabric, ForFabric)).start()
    mock.patch.dict(fast._ACCELERATORS, {NAME: ForTrainer}).start()
