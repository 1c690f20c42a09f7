"""Processes: one Fabric rank per device, or several, each with clients of its own."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.distributed import _distributed_is_initialized, _init_dist_connection
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_sparsefl.errors import InvalidOption, RankFailed, WorldSizeMismatch
from lightning_sparsefl.federated.distributed.launcher import WatchedLauncher
from lightning_sparsefl.federated.distributed.signals import Interrupted

T = TypeVar("T")


_START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork"}
"""Ways to start processes, by the suffix of the strategy's name."""


class ClientParallelStrategy(DDPStrategy):
    """DDP's processes, devices, launchers and collectives; but a module belongs to its rank alone.

    Args:
        shared: The device of each rank of a node, where several ranks have the same one; None = one device each.
        kwargs: Of `DDPStrategy`.
    """

    def __init__(self, shared: list[torch.device] | None = None, **kwargs: Any) -> None:
        super().__init__(parallel_devices=shared, **kwargs)
        self._backward_sync_control = None
        self._shares_devices = shared is not None

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Nothing to wrap: clients do not share gradients."""
        return module

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = WatchedLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None, so that Fabric does not shard a client's data over ranks."""
        return

    def _setup_distributed(self) -> None:
        """On a shared device gloo, and no group bound to the device: NCCL refuses two ranks on one."""
        if not self._shares_devices:
            super()._setup_distributed()
            return
        self._set_world_ranks()
        self._process_group_backend = "gloo"
        assert self.cluster_environment is not None
        _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Make the strategy known by name, with each way of starting processes."""
        for suffix, method in _START_METHODS.items():
            name = f"client_parallel{suffix}"
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="clients in parallel", start_method=method)


ClientParallelStrategy.register_strategies(STRATEGY_REGISTRY)


def launched_world_size() -> int | None:
    """Processes that torchrun or SLURM started; None without a launcher."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    in_slurm_step = "SLURM_NTASKS" in os.environ and os.environ.get("SLURM_JOB_NAME") not in (
        "bash",
        "interactive",
    )
    return int(os.environ["SLURM_NTASKS"]) if in_slurm_step else None


def _launched_local_size() -> int | None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["LOCAL_WORLD_SIZE"])
    size = launched_world_size()
    return None if size is None else size // int(os.environ.get("SLURM_NNODES", "1"))


def _adopted_devices(local: int, workers_per_device: int) -> int:
    """Devices of this node, where the launcher started so many processes on it."""
    if local % workers_per_device:
        raise InvalidOption(
            f"`federation.workers_per_device` is {workers_per_device}, but the launcher started {local} process(es) on "
            "this node; expected a multiple of it, so that each device gets as many."
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
    """A Fabric whose ranks train clients side by side.

    Args:
        accelerator: As in Lightning's `Trainer`.
        devices: As there; ``auto`` adopts what the launcher started.
        num_nodes: Machines.
        strategy: ``auto``, or a name starting with ``client_parallel``.
        precision: As in Lightning's `Trainer`.
        timeout: Seconds that a rank waits for the others.
        workers_per_device: Ranks on each device.

    Raises:
        InvalidOption: If the strategy shards a model instead of clients, or the launcher's processes cannot be spread
            evenly over devices.
        WorldSizeMismatch: If the launcher started another number of processes.
    """
    if strategy not in ("auto", *(f"client_parallel{suffix}" for suffix in _START_METHODS)):
        raise InvalidOption(
            f"`trainer.strategy` is {strategy!r}; expected 'auto', 'client_parallel', 'client_parallel_fork' or "
            "'client_parallel_spawn', since each rank trains clients of its own."
        )
    local = _launched_local_size()
    if devices == "auto" and local is not None:
        devices = _adopted_devices(local, workers_per_device)
    probe = _fabric(accelerator=accelerator, devices=devices)
    found = probe.strategy.parallel_devices if isinstance(probe.strategy, DDPStrategy) else None
    places = (found or [probe.device]) * workers_per_device
    count = len(places)
    chosen: Any = "auto"
    if count * num_nodes > 1:
        if strategy == "auto":
            strategy = "client_parallel_fork" if hasattr(sys, "ps1") else "client_parallel"
        chosen = ClientParallelStrategy(
            shared=places if workers_per_device > 1 else None,
            start_method=_START_METHODS[strategy.removeprefix("client_parallel")],
            timeout=timedelta(seconds=timeout),
        )
    fabric = _fabric(
        accelerator=accelerator, devices=devices, num_nodes=num_nodes, strategy=chosen, precision=precision
    )
    _check_world_size(fabric.world_size if local is None else count * num_nodes)
    return fabric


def _fabric(**options: Any) -> Fabric:
    """A Fabric; what it refuses becomes an error of ours, since the options are the user's."""
    try:
        return Fabric(**options)
    except (MisconfigurationException, ValueError, TypeError, RuntimeError, ImportError) as error:
        asked = ", ".join(f"{name}={value!r}" for name, value in options.items() if name != "strategy")
        raise InvalidOption(f"Lightning Fabric refuses `trainer` with {asked}: {error}") from error


def _check_world_size(configured: int) -> None:
    launched = launched_world_size()
    if launched is not None and launched != configured:
        raise WorldSizeMismatch(
            f"The launcher started {launched} processes, but `trainer.devices` and `trainer.num_nodes` ask for "
            f"{configured}; make them equal, or leave `trainer.devices: auto` and set `trainer.num_nodes` to the nodes."
        )


class Ranks:
    """The few collectives that the engine uses.

    Args:
        fabric: Launched.
    """

    _made = 0

    def __init__(self, fabric: Fabric) -> None:
        Ranks._made += 1  # every process makes them in the same order, so that a second fit has queues of its own
        self._queues = f"sparsefl/{Ranks._made}"
        self.fabric = fabric
        self.rank, self.size = fabric.global_rank, fabric.world_size
        self._tickets: dict[str, int] = {}
        self.waited = 0.0
        """Seconds that this rank waited for the others in the newest :meth:`share`."""

    @property
    def first(self) -> bool:
        """Whether this rank writes files and talks to the user."""
        return self.rank == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            with self._in_touch():
                dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._in_touch():
            dist.all_gather_object(values, value)
        return values

    def share(self, work: Callable[[], T]) -> list[T]:
        """Every rank's result, on every rank; a failure on one is raised on all, instead of leaving them waiting.

        Args:
            work: This rank's part; what it returns travels between processes.

        Raises:
            RankFailed: If another rank's part failed; where it failed, its own error is raised.
            Interrupted: On all ranks, if a signal asks any of them to stop.
        """
        if self.size == 1:
            return [work()]
        mine: tuple[T | None, BaseException | None]
        try:
            mine = (work(), None)
        except (Exception, Interrupted) as error:
            mine = (None, error)
        done = time.perf_counter()
        shared = self.gather((mine[0], _told(mine[1])))
        self.waited = time.perf_counter() - done
        if isinstance(mine[1], Exception):
            raise mine[1]
        for rank, (_, failure) in enumerate(shared):
            if isinstance(failure, str):
                raise RankFailed(f"Rank {rank} failed: {failure}")
        for _, signal in shared:
            if signal is not None:
                raise Interrupted(signal)
        return [value for value, _ in shared]

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with the first rank's."""
        if self.size > 1:  # as bytes, since not every backend knows every dtype
            flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
            with self._in_touch():
                dist.broadcast(flat, 0)
            tensor.data.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def next_ticket(self, name: str) -> int:
        """The next number of a queue, counted from 0 over all ranks."""
        if self.size > 1 and _distributed_is_initialized():
            with self._in_touch():
                return int(dist.distributed_c10d._get_default_store().add(f"{self._queues}/{name}", 1)) - 1
        self._tickets[name] = self._tickets.get(name, -1) + 1
        return self._tickets[name]

    def barrier(self) -> None:
        """Wait for all ranks."""
        with self._in_touch():
            self.fabric.barrier()

    @contextmanager
    def _in_touch(self) -> Iterator[None]:
        """Say what it means if another process is lost; torch has no one type for that."""
        try:
            yield
        except RuntimeError as error:
            said = re.split(r"\n|\. ", re.sub(r"^\[.*?\] ", "", str(error).strip()))[0].rstrip(".")
            limit = getattr(self.fabric.strategy, "_timeout", None) or timedelta()
            raise RankFailed(
                f"Rank {self.rank} lost another one ({said}), which died or took longer than `trainer.timeout` = "
                f"{limit.total_seconds():g} seconds; go on from the last committed round with `ckpt_path: last`."
            ) from error


def _told(error: BaseException | None) -> str | int | None:
    """What the other ranks are told of a failure, or of a signal."""
    if error is None:
        return None
    return error.number if isinstance(error, Interrupted) else f"{type(error).__name__}: {error}"


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    """Set the intra-op threads of this process: they are part of the result, so every rank has the same number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
