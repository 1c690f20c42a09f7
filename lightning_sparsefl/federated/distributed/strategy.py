"""The Fabric strategy for training clients in parallel."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.strategies import STRATEGY_REGISTRY, DDPStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.distributed import _init_dist_connection
from torch import nn

from lightning_sparsefl.federated.distributed.launcher import WatchedLauncher

START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork"}
"""Start methods of processes by suffix of the strategy's name."""


class ClientParallelStrategy(DDPStrategy):
    """DDP strategy without its gradient synchronization: each rank trains its own clients with its own module.

    Args:
        shared: Device of each rank of a node, where several ranks share one; None = one device per rank.
        **kwargs: Arguments of `DDPStrategy`.
    """

    def __init__(self, shared: list[torch.device] | None = None, **kwargs: Any) -> None:
        super().__init__(parallel_devices=shared, **kwargs)
        self._backward_sync_control = None
        self._shares_devices = shared is not None

    def setup_module(self, module: nn.Module) -> nn.Module:  # type: ignore[override]
        """Return the module without a DDP wrapper, since clients do not share gradients."""
        return module

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        if self._start_method == "popen":
            assert self.cluster_environment is not None
            self._launcher = WatchedLauncher(self.cluster_environment, self.num_processes, self.num_nodes)

    @property
    def distributed_sampler_kwargs(self) -> None:  # type: ignore[override]
        """None, which prevents Fabric from sharding a client's data over ranks."""
        return

    def _setup_distributed(self) -> None:
        """Initialize the process group; with shared devices by Gloo, since NCCL does not allow two ranks on one."""
        if not self._shares_devices:
            super()._setup_distributed()
            return
        self._set_world_ranks()
        self._process_group_backend = "gloo"
        assert self.cluster_environment is not None
        _init_dist_connection(self.cluster_environment, "gloo", timeout=self._timeout)

    @classmethod
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register the strategy under one name for each start method."""
        for suffix, method in START_METHODS.items():
            name = f"client_parallel{suffix}"
            if name not in strategy_registry:
                strategy_registry.register(name, cls, description="clients in parallel", start_method=method)


ClientParallelStrategy.register_strategies(STRATEGY_REGISTRY)
