"""Compilation and registration of the device, which torch then knows as ``simulated``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils import cpp_extension

NAME = "simulated"


def register(folder: Path) -> torch.device:
    """Compile the device, unless the folder has its library, load it, and return it.

    Args:
        folder: Folder for the library.
    """
    source = str(Path(__file__).with_name("device.cpp"))
    folder.mkdir(exist_ok=True)
    cpp_extension.load(
        f"{NAME}_device", [source], build_directory=str(folder), extra_cflags=["-O1"], is_python_module=False
    )
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Functions(f"torch.{NAME}"))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device(NAME, 0)


class _Functions(ModuleType):
    """What torch and Lightning call for a device, as `torch.cuda` is for CUDA."""

    @staticmethod
    def is_available() -> bool:
        return True

    is_initialized = is_available

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def set_device(device: Any) -> None: ...

    synchronize = manual_seed = manual_seed_all = set_device

    @staticmethod
    def device(device: Any) -> Any:
        return nullcontext()

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None: ...

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]
