"""Choice of the worker by `federation.local_engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import nn

from lightning_sparsefl.federated.algorithm import FederatedAlgorithm
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.lightning_trainer import LightningEngine
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker, memory_of_stacks
from lightning_sparsefl.federated.local.worker import ClientWorker, LocalWork
from lightning_sparsefl.federated.options import Federation

_messages = WarningCache()
_SLOW = nn.modules.instancenorm._InstanceNorm
"""Layers without a rule of their own, which are slow as a stack."""
_FEWEST = 3
"""Smallest cohort that gains; the two clients of a smaller one gain more from two ranks."""
_DEVICES = ("cpu", "cuda")
"""Devices on which stacks were measured."""
_HOOKS = ("train", "finetune")
"""Hooks of a method in which clients wait for each other."""


def choose_worker(
    algorithm: FederatedAlgorithm,
    federation: Federation,
    several: bool,
    module: LightningModule,
    data: Any,
    engine: FastEngine | LightningEngine,
    work: LocalWork,
    device: torch.device,
) -> ClientWorker:
    """Return the worker of a run: with stacks if they are asked for, or if `auto` expects a gain.

    The rule of `auto` depends on the module, the method and the options, and neither on the number of ranks nor on a
    clock, so that a run repeats itself.

    Args:
        algorithm: The federated method.
        federation: Options of the federation.
        several: Whether this process trains several clients of a round.
        module: Module of the user, on its device.
        data: Data module of the clients, already set up.
        engine: Engine of the clients that train alone.
        work: Settings of local training.
        device: Device of the module.
    """
    asked, records = federation.local_engine, federation.record_steps
    if asked == "stacked":
        worker = StackedWorker(module, data, engine, work, device, records=records)
        if federation.client_timeout is not None:
            worker.train_alone("each has a time limit of its own (`federation.client_timeout`)")
        if not worker.can_stack:
            _messages.warn(
                f"Clients train one after another, since {worker.reason}; set `federation.local_engine: auto`."
            )
        return worker
    if asked == "auto" and several and device.type in _DEVICES and _may_gain(module, algorithm, federation, device):
        worker = StackedWorker(module, data, engine, work, device, asked=False, records=records)
        if worker.can_stack and not worker.loops and worker.stack_size(federation.clients_per_round) > 1:
            _messages.info(
                "Several clients train at once (`federation.local_engine: auto`); set `fast` to train them one after "
                "another, with the bits of a Trainer."
            )
            return worker
    return ClientWorker(module, data, engine, work, device)


def _may_gain(
    module: LightningModule, algorithm: FederatedAlgorithm, federation: Federation, device: torch.device
) -> bool:
    """Return whether stacks may be faster, as far as this is known before a trial, and are safe for the method."""
    size = federation.stack_size
    if federation.clients_per_round < _FEWEST or size == 1:
        return False
    if federation.client_timeout is not None or any(isinstance(child, _SLOW) for child in module.modules()):
        return False
    weights = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    two = 2 * 3 * weights  # with gradients and an optimizer's state
    if two > memory_of_stacks(device):  # spares a large network the trial
        return False
    return all(_is_ours(getattr(type(algorithm), hook)) for hook in _HOOKS)


def _is_ours(hook: Callable[..., Any]) -> bool:
    """Return whether a method's hook is this package's, so that it keeps no client's state in the method.

    Stacked clients are in this hook at the same time, which their author may not expect.
    """
    return hook.__module__.startswith("lightning_sparsefl.")
