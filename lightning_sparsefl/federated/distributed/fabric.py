"""Construction of a run's Fabric from the options of the trainer and the environment of a launcher."""

from __future__ import annotations

import os
import re
import sys
from datetime import timedelta
from typing import Any

from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_sparsefl.errors import InvalidOption, WorldSizeMismatch, whole_number_from_environment
from lightning_sparsefl.federated.distributed.strategy import START_METHODS, ClientParallelStrategy


def launched_world_size() -> int | None:
    """Return the number of processes that torchrun or SLURM started, or None without a launcher."""
    if _under_torchrun():
        return _of_torchrun("WORLD_SIZE")
    in_slurm_step = "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    )
    return whole_number_from_environment("SLURM_NTASKS", remedy=_SLURM) if in_slurm_step else None


def _launched_local_size() -> int | None:
    if _under_torchrun():
        return _of_torchrun("LOCAL_WORLD_SIZE")
    size = launched_world_size()
    if size is None:
        return None
    nodes = whole_number_from_environment("SLURM_NNODES", 1, remedy=_SLURM)
    return size // max(nodes, 1)


_SLURM = "start with `srun`, or unset the variables that start with SLURM_"
_TORCHRUN = "start with `torchrun`, or unset TORCHELASTIC_RUN_ID"


def _under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def _of_torchrun(name: str) -> int:
    return whole_number_from_environment(name, remedy=_TORCHRUN)


def _adopted_devices(local: int, workers_per_device: int) -> int:
    """Return the number of devices to use on this node, given the processes that the launcher started there."""
    if local % workers_per_device:
        raise InvalidOption(
            f"`federation.workers_per_device` is {workers_per_device}, but the launcher started {local} process(es) on "
            "this node; expected a multiple of it, so that each device gets the same number."
        )
    return local // workers_per_device


def build_fabric(
    *,
    accelerator: str,
    devices: int | str | list[int],
    num_nodes: int,
    strategy: str,
    precision: Any,
    timeout: float,
    workers_per_device: int = 1,
) -> Fabric:
    """Return a Fabric whose ranks train clients in parallel.

    Args:
        accelerator: Accelerator, one of the values of Lightning's `Trainer`.
        devices: Devices, one of the values of Lightning's `Trainer`; ``auto`` under a launcher derives their number
            from its processes.
        num_nodes: Number of machines; ignored under torchrun, whose machines may come and go.
        strategy: Strategy: ``auto``, or a name starting with ``client_parallel``.
        precision: Precision, one of the values of Lightning's `Trainer`.
        timeout: Time that a rank waits for the others, in seconds.
        workers_per_device: Number of ranks on each device.

    Raises:
        InvalidOption: If the strategy is another one, the accelerator is MPS, or the launcher's processes cannot be
            distributed evenly over devices.
        WorldSizeMismatch: If the launcher started a different number of processes.
    """
    if strategy not in ("auto", *(f"client_parallel{suffix}" for suffix in START_METHODS)):
        raise InvalidOption(
            f"`trainer.strategy` is {strategy!r}; expected 'auto', 'client_parallel', 'client_parallel_fork' or "
            "'client_parallel_spawn', since each rank trains its own clients."
        )
    local = _launched_local_size()
    if _under_torchrun():
        num_nodes = 1  # its machines may come and go, and differ in size: only its number of processes counts
    if devices == "auto" and local is not None:
        devices = _adopted_devices(local, workers_per_device)
    if isinstance(devices, int) and devices < 1 and devices != -1:
        raise InvalidOption(f"`trainer.devices` is {devices}; expected a whole number >= 1, -1 or 'auto'.")
    probe = _fabric(accelerator=accelerator, devices=devices)
    if probe.device.type == "mps":
        accelerator, probe = _cpu_instead(accelerator, devices)
    found = probe.strategy.parallel_devices if isinstance(probe.strategy, DDPStrategy) else None
    places = (found or [probe.device]) * workers_per_device
    count = len(places)
    chosen: Any = "auto"
    if (launched_world_size() or count * num_nodes) > 1:
        if strategy == "auto":
            strategy = "client_parallel_fork" if hasattr(sys, "ps1") and local is None else "client_parallel"
        if local is not None and strategy != "client_parallel":
            raise InvalidOption(
                f"`trainer.strategy` is {strategy!r}, but a launcher has started the processes of this run already; "
                "expected 'auto' or 'client_parallel', which use them."
            )
        chosen = ClientParallelStrategy(
            shared=places if workers_per_device > 1 else None,
            start_method=START_METHODS[strategy.removeprefix("client_parallel")],
            timeout=timedelta(seconds=timeout),
        )
    fabric = _fabric(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=chosen, precision=precision
    )
    if _under_torchrun():
        _check_launched(_launched_local_size(), count, "on this machine")
    else:
        _check_launched(launched_world_size(), fabric.world_size if local is None else count * num_nodes)
    _check_started(count * num_nodes, strategy)
    return fabric


def _cpu_instead(accelerator: str, devices: int | str | list[int]) -> tuple[str, Fabric]:
    """Return the accelerator of the CPU and its Fabric instead of those of an Apple GPU, unless a user asked for it."""
    if accelerator != "auto":
        raise InvalidOption(
            f"`trainer.accelerator` is {accelerator!r}, which is MPS here; expected 'cpu', since masks and sums are "
            "computed in float64, which MPS does not have."
        )
    rank_zero_info("`trainer.accelerator: auto` is the CPU here: MPS has no float64, in which sums are computed.")
    return "cpu", _fabric(accelerator="cpu", devices=devices)


def _fabric(**options: Any) -> Fabric:
    """Return a Fabric; convert its errors to `InvalidOption`, since the options are those of the user."""
    try:
        return Fabric(**options)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as error:
        allowed = re.search(r"Allowed precision values: \((.*)\)", str(error))
        if allowed is not None:
            raise InvalidOption(
                f"`trainer.precision` is {options['precision']!r}; expected one of {allowed[1]}."
            ) from error
        asked = ", ".join(f"{name}={value!r}" for name, value in options.items() if name != "strategy")
        raise InvalidOption(f"Lightning Fabric does not accept `trainer` with {asked}: {error}") from error


def _check_started(configured: int, strategy: str) -> None:
    """Raise if this process was started for a run with another number of processes.

    Without a launcher, rank 0 starts the script once more for each other rank, which comes to all runs of the script.

    Raises:
        WorldSizeMismatch: If this run has another number of processes. Rank 0 may do a run of one process alone.
    """
    size, rank = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_RANK", "")
    if launched_world_size() is not None:
        return
    if not (size.isdecimal() and rank.isdecimal()):
        return
    again = strategy in ("auto", "client_parallel")  # how such a process was started
    if (int(size) == configured and again) or (configured == 1 and int(rank) == 0):
        return
    raise WorldSizeMismatch(
        f"This process is rank {rank} of {size} that one run of the script has started, and each of them runs the "
        f"whole script; but this run asks for {configured} (`trainer.devices` and `trainer.num_nodes`), with "
        f"`trainer.strategy: {strategy}`. Make these equal in all runs of a script; with `client_parallel_fork` in all "
        "of them the script runs once, and their numbers may differ."
    )


def _check_launched(launched: int | None, configured: int, where: str = "") -> None:
    if launched is not None and launched != configured:
        raise WorldSizeMismatch(
            f"The launcher started {launched} processes{where and f' {where}'}, but `trainer.devices` and "
            f"`trainer.num_nodes` give {configured}; make them equal, or use `trainer.devices: auto` and the number of "
            "nodes as `trainer.num_nodes`."
        )
