"""Callbacks that act in a stack as they do alone, each on the rows of its own client."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn, cast

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from lightning_sparsefl.callbacks.masking import MaskingCallback
from lightning_sparsefl.callbacks.stacking.base import Leaves, StackedCallback, StackedPass
from lightning_sparsefl.callbacks.stacking.hidden_metrics import hidden
from lightning_sparsefl.callbacks.step_guard import prepare_step

NOT_CALLED = ("on_before_backward", "on_before_zero_grad")
"""Hooks of a fit that have no place in a stack."""
_OF_ALL = ("callback_metrics", "logged_metrics", "progress_bar_metrics", "lr_scheduler_configs")
"""Attributes of a trainer that each client has for itself, or that change all clients."""


def _refuse(clause: str) -> NoReturn:
    raise RuntimeError(f"a callback {clause}")


def _refusal_of_metric(name: str) -> Callable[..., NoReturn]:
    """Return a function that refuses to use a metric object."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        _refuse(f"uses the metric object `self.{name}`, whose states are in the stack")

    return refuse


class _Options(dict[str, Any]):
    """Options of an optimizer's group, which all clients share."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("changes options of the optimizer, which all clients share")

    __setitem__ = __delitem__ = update = setdefault = pop = _refuse


class RowOptimizer:
    """One client's part of the optimizer of a stack, for callbacks: its groups and its state, which are views.

    A callback may change the state in place, and may surround :meth:`step`, which is called after the stack's step.

    Args:
        parameters: Parameters of the client by name.
        place: Place of the client in the stack.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], place: int) -> None:
        self.parameters, self.place = parameters, place
        self.of: Any = None
        self.names: dict[int, str] = {}

    def follow(self, optimizer: Optimizer, names: dict[int, str]) -> None:
        """Set the optimizer of the stack.

        Args:
            optimizer: The optimizer.
            names: Names of its leaves, by the identity of the leaf.
        """
        self.of, self.names = optimizer, names

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The options of each group, which cannot be changed, with the parameters of the client."""
        return [
            _Options(group, params=list(map(self._own, self._known(group["params"])))) for group in self.of.param_groups
        ]

    def _known(self, leaves: Iterable[Tensor]) -> list[Tensor]:
        """Return the leaves that are the module's."""
        return [leaf for leaf in leaves if id(leaf) in self.names]

    def _own(self, leaf: Tensor) -> nn.Parameter:
        return self.parameters[self.names[id(leaf)]]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """What the optimizer remembers of the client's parameters."""
        return {
            self._own(leaf): {
                key: value[self.place] if isinstance(value, Tensor) and value.shape == leaf.shape else value
                for key, value in self.of.state[leaf].items()
            }
            for leaf in self._known(self.of.state)
        }

    def step(self) -> None:
        """Do nothing: the step of the stack is done."""


class RowTrainer:
    """One client's view of the trainer of a stack; what is not the client's own is the trainer's.

    Args:
        trainer: Trainer of the stack.
        total: Number of optimizer steps of the client's fit.
        batches: Number of batches of each of its epochs.
    """

    def __init__(self, trainer: Any, total: int, batches: int) -> None:
        self._trainer = trainer
        self.estimated_stepping_batches = total
        self.num_training_batches = batches
        self.global_step = 0
        self.callbacks: list[Callback] = []
        self.optimizers: list[RowOptimizer] = []
        self.lightning_module: Any = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the trainer of the stack."""
        if name in _OF_ALL:
            _refuse(f"asks for `trainer.{name}`")
        return getattr(self._trainer, name)


class _Row:
    """One client: its callback, and its views of module, trainer and optimizer.

    What a callback does to them reaches the stack only where it writes into tensors; :meth:`call` refuses the rest.
    """

    def __init__(self, callback: Callback, module: LightningModule, trainer: Any, total: int) -> None:
        self.callback, self._module, self._of, self._total = callback, module, trainer, total
        self.companions: Sequence[Callback] = [callback]
        self.batches = total
        """Number of batches of an epoch; replaced in :meth:`StackedRows.join`."""
        self.viewed = False

    def view(self, leaves: Leaves, place: int) -> None:
        """Make a module whose tensors are the client's rows, without copying any."""
        tensors: dict[str, Tensor] = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        memo: dict[int, Any] = {id(self._of): self._of}
        for name, tensor in tensors.items():
            row = leaves[name].detach()[place] if name in leaves else tensor
            wanted = tensor.requires_grad and (name not in leaves or leaves[name].requires_grad)
            memo[id(tensor)] = nn.Parameter(row, wanted) if isinstance(tensor, nn.Parameter) else row
        for child in self._module.modules():  # what other callbacks have added belongs to all clients
            memo |= {id(hooks): OrderedDict() for hooks in (child._forward_hooks, child._forward_pre_hooks)}
            if "forward" in vars(child):
                memo[id(child.forward)] = child.forward
        self.module = copy.deepcopy(self._module, memo)
        for name, child in self.module.named_modules():
            if isinstance(child, Metric):
                vars(child).update(hidden(child, _refusal_of_metric(name)))
        self.parameters = dict(self.module.named_parameters())
        self.optimizer = RowOptimizer(self.parameters, place)
        self.trainer = RowTrainer(self._of, self._total, self.batches)
        self.trainer.lightning_module, self.trainer.optimizers = self.module, [self.optimizer]
        self.trainer.callbacks = list(self.companions)
        state = vars(self.module)
        state["_trainer"], state["optimizers"] = self.trainer, lambda use_pl_optimizer=True: self.optimizer
        state["log"] = state["log_dict"] = lambda *args, **options: _refuse("logs values")
        self._state, self.viewed = self._read(), True

    def follow_own(self) -> None:
        """Let the optimizer show that of the module's own tensors, until the optimizer of the stack is made."""
        own = {id(parameter): name for name, parameter in self._module.named_parameters()}
        self.optimizer.follow(self._of.optimizers[0], own)

    def hook(self, name: str) -> Callable[..., None]:
        """Return a hook of the callback."""
        found: Callable[..., None] = getattr(self.callback, name)
        return found

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of the callback.

        Raises:
            RuntimeError: If it has changed anything besides the numbers of tensors.
        """
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        self.hook(hook)(self.trainer, self.module, *args)
        if any(parameter.grad is not grads[name] for name, parameter in self.parameters.items()):
            _refuse("replaces a gradient (`grad`) instead of writing into it")
        if "should_stop" in vars(self.trainer):
            _refuse("sets `trainer.should_stop`")
        if not all(map(_is_same, self._read(), self._state)):
            _refuse("changes attributes of the module, its layers or their hooks, or replaces a tensor")

    def call_with(self, hook: str, batch: Any, number: int, *first: Any) -> None:
        """Call a hook of the callback that sees a batch.

        Args:
            hook: Name of the hook.
            batch: The client's batch, whose tensors are views.
            number: Number of the batch in the epoch.
            first: Arguments before the batch.

        Raises:
            RuntimeError: If it has replaced an entry of the batch, which the stack has again with other containers.
        """
        entries = tree_leaves(batch)
        self.call(hook, *first, batch, number)
        now = tree_leaves(batch)
        if len(now) != len(entries) or any(one is not other for one, other in zip(now, entries, strict=True)):
            _refuse("replaces an entry of the batch instead of writing into it")

    def _read(self) -> list[dict[Any, Any]]:
        """Return what is not to change: attributes, tables, and where the tensors lie."""
        tables = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks")
        found = [
            dict(table)
            for child in self.module.modules()
            for table in (vars(child), *(vars(child)[name] for name in tables))
        ]
        places = {name: (p.data_ptr(), p.requires_grad) for name, p in self.parameters.items()}
        return [*found, dict(enumerate(value for place in places.values() for value in place))]

    def show(self, leaves: Leaves, place: int) -> None:
        """Let the parameters have the gradients of the client's rows."""
        for name, parameter in self.parameters.items():
            grad = leaves[name].grad
            parameter.grad = None if grad is None else grad[place]


class StackedRows(StackedCallback):
    """Counterpart of callbacks that are called for each client with its own views.

    Args:
        callbacks: One callback for each client.
        module: Module of the user.
        totals: Number of optimizer steps of each client's fit.
    """

    in_order = ("places",)
    views_module = True

    def __init__(self, callbacks: Sequence[Callback], module: Any, totals: Sequence[int]) -> None:
        pairs = zip(callbacks, totals, strict=True)
        self.places = [_Row(callback, module, module.trainer, total) for callback, total in pairs]
        self._in_part = False
        self._begun: list[bool] = []
        self._ended = False
        self._names: dict[int, str] = {}

    @property
    def makes_masks(self) -> bool:
        """Whether the callbacks mask; see :class:`StackedCallback`."""
        return isinstance(self.places[0].callback, MaskingCallback)

    @property
    def writes_between(self) -> bool:
        """Whether the callbacks act at the start or the end of a batch; see :class:`StackedCallback`."""
        hooks = ("on_train_batch_start", "on_train_batch_end")
        return any(is_overridden(hook, self.places[0].callback, Callback) for hook in hooks)

    def rows(self, low: int, high: int) -> StackedRows:
        """Return the part for some clients; see :class:`StackedCallback`."""
        part = cast(StackedRows, super().rows(low, high))
        part._in_part = True
        return part

    def join(self, companions: Sequence[Sequence[Callback]], batches: Sequence[int]) -> None:
        """Let each client's trainer have all of its callbacks, and its number of batches."""
        for row, each, count in zip(self.places, companions, batches, strict=True):
            row.companions, row.batches = each, count

    def start(self, leaves: Leaves) -> None:
        """Make the views, and begin the fit of each client."""
        self._names = {id(leaf): name for name, leaf in leaves.items()}
        for place, row in enumerate(self.places):
            row.view(leaves, place)
            row.call("setup", "fit")
            row.follow_own()
            row.call("on_fit_start")

    def prepare(self, optimizer: Optimizer, clips: bool, chain: Sequence[StackedCallback]) -> None:
        """Let each client's optimizer show that of the stack."""
        for row in self.places:
            row.optimizer.follow(optimizer, self._names)

    def start_epoch(self) -> None:
        """Begin an epoch of each client, and the training with the first one."""
        for row in self.places:
            if not self._begun:
                row.call("on_train_start")
            row.call("on_train_epoch_start")
        self._begun.append(True)

    def before_batch(self, batch: StackedPass) -> None:
        """Call the hook before a batch."""
        for place, row in self._called("on_train_batch_start"):
            row.call_with("on_train_batch_start", _of_one(batch.batch, place), batch.number)

    def after_backward(self, batch: StackedPass) -> None:
        """Call the hook after the backward pass."""
        for place, row in self._called("on_after_backward"):
            row.show(batch.leaves, place)
            row.call("on_after_backward")

    def before_step(self, leaves: Leaves, steps: Sequence[int]) -> None:
        """Call the hook before the optimizer's step."""
        self._note_writes()
        for place, row in enumerate(self.places):
            row.show(leaves, place)
        for _, row in self._called("on_before_optimizer_step"):
            row.call("on_before_optimizer_step", row.optimizer)

    def before_update(self, leaves: Leaves) -> None:
        """Call what precedes the step, which acts on gradients that callbacks behind this one have changed."""
        for place, row in enumerate(self.places):
            if "step" in vars(row.optimizer):  # which a callback has surrounded
                row.show(leaves, place)
                prepare_step(row.optimizer)

    def after_step(self, leaves: Leaves) -> None:
        """Call what follows the step."""
        for row in self.places:
            row.optimizer.step()
            row.trainer.global_step += 1

    def without_step(self, leaves: Leaves) -> None:
        """Show the gradients that wait for the next batch."""
        for place, row in enumerate(self.places):
            row.show(leaves, place)

    def after_batch(self, batch: StackedPass) -> None:
        """Call the hook after a batch."""
        self._note_writes()
        losses = batch.losses.detach()
        for place, row in self._called("on_train_batch_end"):
            outputs = {"loss": losses[place]}
            row.call_with("on_train_batch_end", _of_one(batch.batch, place), batch.number, outputs)

    def _note_writes(self) -> None:
        """Show in version counters that weights may have been written: leaves of a part share none with the views."""
        if self._in_part:
            for row in self.places:
                for parameter in row.parameters.values():
                    increment_version(parameter)

    def _called(self, hook: str) -> Iterator[tuple[int, _Row]]:
        """Yield the places and rows of the clients, if the callbacks have a hook."""
        if self.places and is_overridden(hook, self.places[0].callback, Callback):
            yield from enumerate(self.places)

    def end_epoch(self) -> None:
        """End an epoch of each client."""
        for row in self.places:
            row.call("on_train_epoch_end")

    def finish(self, callbacks: Sequence[Any]) -> None:
        """End the fit of each client."""
        for row in self.places:
            row.call("on_train_end")
            row.call("on_fit_end")
            row.call("teardown", "fit")
        self._ended = True

    def release(self) -> None:
        """Let the callbacks release their views, if the fit failed."""
        for row in () if self._ended else self.places:
            if row.viewed:
                row.hook("teardown")(row.trainer, row.module, "fit")


def _is_same(now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Return whether two dictionaries have the same objects, or equal numbers."""
    return now.keys() == before.keys() and all(
        value is before[key] or (isinstance(value, int) and value == before[key]) for key, value in now.items()
    )


def _of_one(batch: Any, place: int) -> Any:
    return apply_to_collection(batch, Tensor, lambda tensor: tensor[place])
