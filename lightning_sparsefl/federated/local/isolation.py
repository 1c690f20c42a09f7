"""Isolation of a client's state from the next client on the same rank and from the clients on other ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized
from torchmetrics import Metric, MetricCollection

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.federated.local.metric_attributes import MetricAttributes
from lightning_sparsefl.federated.local.tensor_contents import NUMBERS, TensorContents
from lightning_sparsefl.sparse.containers import HOLDERS, ContainerStates, fill, has_content, values_in

_OF_USERS = {
    "_automatic_optimization",
    "_example_input_array",
    "_strict_loading",
    "allow_zero_length_dataloader_with_multiple_devices",
    "prepare_data_per_node",
}
"""Attributes that every module of Lightning has, and that a user sets, some of them by a property."""
OF_LIGHTNING = frozenset(vars(LightningModule())) - _OF_USERS
"""Attributes of modules that torch and Lightning set."""


def _never_distributed() -> bool:
    """Return False: a metric must not be reduced over ranks, since they train other clients."""
    return False


def isolate_metrics(module: nn.Module) -> None:
    """Reset the torchmetrics of a module and disable their synchronization between ranks.

    In an initialized process group, ``Metric.compute`` reduces over the ranks, which here train other clients; it
    would mix their values, and deadlock where ranks call it a different number of times.

    Args:
        module: Module to change in place.

    Raises:
        InvalidOption: If the module has a ``SyncBatchNorm``, which mixes the clients' batches.
    """
    for child in _with_held(module):
        if isinstance(child, nn.SyncBatchNorm):
            name = next((name for name, each in module.named_modules() if each is child), "in a list or a dict")
            raise InvalidOption(
                f"The model has a SyncBatchNorm, {name!r}, which would mix the batches of several clients; "
                "expected an ordinary BatchNorm (option `model`)."
            )
        if isinstance(child, Metric):
            child.distributed_available_fn = _never_distributed
            child.reset()


def _with_held(module: nn.Module) -> list[nn.Module]:
    """Return all modules of a module, also those in lists, tuples and dicts of attributes, which are not registered."""
    waiting = list(module.modules())
    found = set(map(id, waiting))
    for child in waiting:  # which grows
        attributes = vars(child)
        for key in () if _is_of_torch(child) else attributes.keys() - OF_LIGHTNING:
            value = attributes[key]
            if not issubclass(type(value), HOLDERS) or not 0 < len(value) < _FEW:
                continue
            for each in values_in(value) or ():
                if isinstance(each, nn.Module) and id(each) not in found:
                    found |= set(map(id, each.modules()))
                    waiting += each.modules()
    return waiting


@contextmanager
def restore_trainer_refs(module: LightningModule, callbacks: Sequence[Callback]) -> Iterator[None]:
    """Detach a module and its callbacks from the trainer when the context ends, and restore :class:`ModuleState`.

    Args:
        module: Module that is attached to a trainer within the context.
        callbacks: Callbacks that get the module's `log` within the context.
    """
    trainer, name, before = module._trainer, module._current_fx_name, ModuleState(module)
    try:
        yield
    finally:
        module.trainer = trainer
        module._current_fx_name, module._metric_attributes = name, None
        for callback in callbacks:
            for method in ("log", "log_dict"):
                vars(callback).pop(method, None)
        before.restore()


class Settings:
    """What a step may set on objects that it is given: names of attributes, with their numbers, strings and flags.

    Args:
        objects: The objects by name.

    Example:
        >>> settings = Settings({"optimizer": torch.optim.SGD([torch.zeros(1)])})
        >>> settings.changed()
        >>> settings.objects["optimizer"].seen = 1
        >>> settings.changed()
        'optimizer.seen'
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        self.objects = dict(objects)
        self._before = self._found()

    @classmethod
    def of_trainer(cls, trainer: Any, **others: object) -> Settings:
        """Return the settings of a trainer, of its strategy and its state, and of other objects.

        Args:
            trainer: The trainer.
            others: Other objects by name.
        """
        name = "self.trainer"
        own = {name: trainer, f"{name}.strategy": trainer.strategy, f"{name}.state": trainer.state}
        return cls({**own, **others})

    def changed(self) -> str | None:
        """Return the name of an attribute that has been set since, or None."""
        now, before = self._found(), self._before
        for name in sorted({*now, *before}):
            if name not in now or name not in before or now[name] != before[name]:
                return name
        return None

    def _found(self) -> dict[str, Any]:
        return {
            f"{name}.{key}": value if type(value) in _PLAIN else None
            for name, each in self.objects.items()
            for key, value in vars(each).items()
            if key not in _OF_STEPS
        }


_PLAIN = (bool, float, int, str)
_OF_STEPS = {"_need_device_dtype_check_for_fused", "_opt_called"}
"""Attributes of an optimizer that its steps set."""
_messages = WarningCache()
_FEW = 1000
"""Number of items from which on a container is not searched for metrics."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Tables of a module's hooks."""
_NO_HOOKS: dict[int, Any] = {}
_HELD = (*HOLDERS, *NUMBERS)


class ModuleState:
    """Snapshot of a module's state beside parameters and buffers, to undo the changes of a client before the next one.

    It covers `requires_grad` and hooks of parameters, training modes, forward and backward hooks of submodules,
    attributes of the user's modules with the contents of lists, dicts, sets and deques and the numbers of tensors and
    arrays, public attributes of other modules, those of metrics that are not states, buffers that were registered or
    filled, and the number of modules in a ``ModuleList`` or ``ModuleDict``. Modules in lists, dicts and tuples, which
    torch does not register, are covered with their parameters, buffers and submodules. Changes inside other objects are
    not undone; a container of ten thousand items whose length has changed, and a tensor of 2^24 numbers that was
    written, are reported once.

    Args:
        module: Module, which must otherwise have the same submodules at :meth:`restore`.
    """

    def __init__(self, module: nn.Module) -> None:
        self._before: list[tuple[str, nn.Module, dict[str, Any]]] = []
        self._parameters: list[tuple[nn.Parameter, bool, dict[int, Any]]] = []
        self._hooks: list[tuple[dict[int, Any], dict[int, Any]]] = []
        self._containers = ContainerStates()
        self._module = module
        self._seen = {id(child) for child in module.modules()}
        self._contents = TensorContents(module)
        self._sizes: list[tuple[str, str, Sized, int]] = []
        self._buffers: list[tuple[nn.Module, dict[str, Any]]] = []
        self._members: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._held: list[tuple[nn.Module, type, dict[str, property], int | None]] = []
        """Modules in containers, with class and properties, which parametrizations change, and the length of a
        parameter list."""
        self._metrics: list[MetricAttributes] = []
        self._collections: list[tuple[MetricCollection, dict[int, list[str]]]] = []
        self._visit(type(module).__name__, module)

    def _visit(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):  # whose attributes cannot be assigned or added in Python
            self._parameters += [(value, value.requires_grad, _NO_HOOKS) for value in module.parameters()]
            return
        self._buffers.append((module, module._buffers.copy()))
        if isinstance(module, Metric):  # `isolate_metrics` resets its states
            self._metrics.append(MetricAttributes(module, self._module))
        else:
            self._visit_attributes(name, module)
        if isinstance(module, MetricCollection):  # which groups its metrics by what the first batch makes of them
            self._collections.append((module, copy.deepcopy(module._groups)))
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            self._members.append((module._modules, module._modules.copy()))
        for key, child in module._modules.items():
            if child is not None:
                self._visit(f"{name}.{key}", child)

    def _visit_attributes(self, name: str, module: nn.Module) -> None:
        attributes = vars(module)
        self._before.append((name, module, attributes.copy()))
        for value in module._parameters.values():
            if value is not None:
                hooks = value._backward_hooks
                self._parameters.append((value, value.requires_grad, hooks.copy() if hooks else _NO_HOOKS))
        self._hooks += [(hooks, hooks.copy() if hooks else _NO_HOOKS) for hooks in map(attributes.__getitem__, HOOKS)]
        if isinstance(module, MetricCollection):
            return
        for key, value in attributes.items():
            if not issubclass(type(value), _HELD) or key in OF_LIGHTNING or not is_restored(module, key):
                continue
            values = self._containers.add(value, f"{name}.{key}")
            if values is None:
                self._sizes.append((name, key, value, len(value)))
            else:
                self._contents.add(values, f"{name}.{key}")
                self._visit_held(values, f"{name}.{key}")

    def _visit_held(self, values: Iterable[Any], name: str) -> None:
        """Visit the modules in containers, of which torch knows nothing, but for those that a first call changes."""
        for value in values:
            if not isinstance(value, nn.Module) or id(value) in self._seen:
                continue
            if not any(map(is_lazy, chain(value.parameters(), value.buffers()))):
                own = [child for child in value.modules() if id(child) not in self._seen]
                self._held += [(child, *_class_of(child), vars(child).get("_size")) for child in own]
                self._members += [(table, table.copy()) for child in own for table in _tables_of(child)]
                self._seen |= set(map(id, own))
                self._contents.add_module(value, name)
                self._visit(name, value)

    def restore(self) -> None:
        """Restore the snapshot."""
        self._restore_flags_and_hooks()
        self._report_sizes()
        self._restore_numbers()
        tell_contents(self._containers.restore())
        for module, buffers in self._buffers:
            _restore_buffers(module, buffers)
        self._restore_members()
        for metric in self._metrics:
            for left in metric.restore():
                _tell_kept(left)
        for _, module, before in self._before:
            if not has_content(vars(module), before):
                _restore_attributes(module, before)
        for collection, groups in self._collections:
            _restore_groups(collection, groups)

    def _restore_flags_and_hooks(self) -> None:
        for parameter, flag, known in self._parameters:
            if parameter.requires_grad is not flag:
                parameter.requires_grad_(flag)
            hooks = parameter._backward_hooks
            if hooks is not None and (hooks or known):
                _restore_hooks(hooks, known)
        for hooks, known in self._hooks:
            if hooks or known:
                _restore_hooks(hooks, known)

    def _restore_members(self) -> None:
        for module, kind, properties, size in self._held:
            if type(module) is not kind:
                module.__class__ = kind
            for name in properties.keys() - vars(kind).keys():
                setattr(kind, name, properties[name])
            if size is not None:
                vars(module)["_size"] = size
        for now, before in self._members:
            if not has_content(now, before):
                fill(now, before)

    def _restore_numbers(self) -> None:
        restored, left = self._contents.restore()
        for name in restored:
            _messages.info(
                f"A client's work has written into the numbers of `{name}`, which are restored for the next client; to "
                "have them merged, make it a floating-point buffer (`register_buffer`)."
            )
        for name in left:
            _tell_kept(name)

    def _report_sizes(self) -> None:
        for name, key, value, size in self._sizes:
            if len(value) != size:
                _tell_kept(f"{name}.{key}")


def _class_of(module: nn.Module) -> tuple[type, dict[str, property]]:
    """Return the class of a module, and its properties if it is that of one parametrized module."""
    kind = type(module)
    if not is_parametrized(module):
        return kind, {}
    return kind, {name: value for name, value in vars(kind).items() if isinstance(value, property)}


def _tables_of(module: nn.Module) -> list[dict[str, Any]]:
    """Return the dicts of what a module holds, which one of TorchScript does not have."""
    is_of_script = isinstance(module, torch.jit.ScriptModule)
    keys = [module._keys] if isinstance(module, nn.ParameterDict) else []
    return [] if is_of_script else [module._parameters, module._buffers, module._modules, *keys]


def _tell_kept(name: str) -> None:
    _messages.info(
        f"The work of a client has changed `{name}` in place. The next client on the same rank will see the change, so "
        "the result may depend on the number of ranks; clear it in `on_fit_start`."
    )


def tell_contents(names: Iterable[str]) -> None:
    """Tell once for each attribute that what clients leave in its containers is discarded.

    Args:
        names: Names of the attributes.
    """
    for name in names:
        _messages.info(
            f"A client's work has changed the contents of `{name}`, which are restored for the next client; "
            "log what is to stay with `self.log`."
        )


def _restore_hooks(hooks: dict[int, Any], known: dict[int, Any]) -> None:
    if hooks.keys() != known.keys():
        fill(hooks, known)


def _restore_buffers(module: nn.Module, before: Mapping[str, Any]) -> None:
    """Remove the buffers that had no tensor before; the tensors of others are no part of the snapshot."""
    for name in module._buffers.keys() - before.keys():
        delattr(module, name)
    module._buffers.update({name: None for name, tensor in before.items() if tensor is None})


def _restore_groups(collection: MetricCollection, groups: dict[int, list[str]]) -> None:
    """Restore which metrics of a collection share their states; those that share none have lists of their own."""
    collection._groups = groups
    if collection._groups_checked:
        return
    for metric in collection._modules.values():
        lists = [name for name, default in getattr(metric, "_defaults", {}).items() if isinstance(default, list)]
        for name in lists:  # which `reset` empties in place, unlike tensors
            setattr(metric, name, list(getattr(metric, name)))


def _restore_attributes(module: nn.Module, before: Mapping[str, Any]) -> None:
    now = vars(module)
    for key in [key for key in now if key not in before and is_restored(module, key)]:
        del now[key]
    for key, value in before.items():
        if now.get(key, now) is not value and is_restored(module, key):
            now[key] = value


def is_restored(module: nn.Module, key: str) -> bool:
    """Return whether an attribute is restored after a client: not the private ones by which torch and Lightning work.

    Args:
        module: The module.
        key: Name of the attribute.
    """
    return key[0] != "_" or (key not in OF_LIGHTNING and not _is_of_torch(module))


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.")
