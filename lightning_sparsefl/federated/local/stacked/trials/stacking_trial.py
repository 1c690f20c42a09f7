"""Trial that finds before a run whether a module's clients can be stacked, and says why not.

Two clients with different weights take a step of plain gradient descent, alone and stacked. Their weights, which then
differ from the first ones by the gradients, and their buffers must agree, in the run's precision and, if the module can
be trained in it, more exactly in double precision. What has no meaning for several clients at once, such as reading a
number out of a tensor, raises in the stacked step.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn

from lightning_sparsefl.callbacks.stacking import accumulates, stacking_key
from lightning_sparsefl.data.examples import reads_here
from lightning_sparsefl.data.federated import TRANSFERS
from lightning_sparsefl.federated.exchange.failures import in_brief
from lightning_sparsefl.federated.local.engines import FastEngine
from lightning_sparsefl.federated.local.fast.steps import warnings_forgotten
from lightning_sparsefl.federated.local.fast.support import NEVER_CALLED, SCORING_HOOKS, STEPS, overridden
from lightning_sparsefl.federated.local.fast.trainer import FastTrainer
from lightning_sparsefl.federated.local.isolation import restore_trainer_refs
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.fitting.asked_loop import AskedLoop
from lightning_sparsefl.federated.local.stacked.fitting.hooks import STACKED_HOOKS
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import options_of
from lightning_sparsefl.federated.local.stacked.fitting.stack_trainer import require_elementwise
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.reading.reader import name_of_data
from lightning_sparsefl.federated.local.stacked.reasons import reason_of
from lightning_sparsefl.federated.local.stacked.states.findings import Findings
from lightning_sparsefl.federated.local.stacked.states.undo import ModuleStates, attributes_kept, differing_value
from lightning_sparsefl.federated.local.stacked.trials.draws import DrawsNumbers
from lightning_sparsefl.federated.local.stacked.trials.step_trial import (
    ALONE,
    EXACT,
    ROUNDED,
    StepTrial,
    in_double,
    moved_weights,
)
from lightning_sparsefl.federated.local.worker import ClientWorker

_DOUBLE = "64-true"
_PRECISIONS = ("32-true", _DOUBLE)


def reason_of_hooks(module: LightningModule, hooks: Collection[str]) -> str | None:
    """Return why a module with further hooks cannot be stacked, as a clause; None without any.

    Args:
        module: Module of the user.
        hooks: Names of the hooks, which act on one client.
    """
    if not hooks:
        return None
    return f"`{type(module).__name__}` overrides `{min(hooks)}`, which is written for one client"


def _reason_of_contents(module: LightningModule) -> str | None:
    """Return why a module cannot be stacked that holds what it holds, as a clause, or None."""
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm) and child.momentum is None:
            return f"`{name}` averages over all batches (`momentum=None`)"
        if isinstance(child, torch.jit.ScriptModule):
            return f"`{name}` is a traced or scripted module"
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"the parameter `{name}` has a hook for its gradient"
    iterators = ModuleStates(module).iterators
    if iterators:
        return f"`{type(module).__name__}` keeps an iterator in `{iterators[0]}`, which all clients share"
    return None


class StackingTrial:
    """Finds out whether a worker's clients can be stacked.

    Args:
        worker: Worker whose engine, module and data are tried; its module is left as it was.

    Attributes:
        reason: Why clients cannot be stacked, as a clause; None if they can.
        planned: Whether a step or the learning rates depend on the numbers of batches, so that only clients with equal
            ones are a stack.
        activations: Numbers that the module's layers return for one batch.
        samples: Number of samples in that batch.
        findings: Findings of the trial about the module's steps and hooks.
        loops: Whether the step calls a function that ``torch.vmap`` does for one client after another.
    """

    def __init__(self, worker: ClientWorker) -> None:
        self._worker, self._module, self._data = worker, worker.module, worker.data
        self.planned, self.activations, self.samples, self.loops = False, 0, 1, False
        self.findings = Findings()
        self.reason = self._reason_of_settings() or self._reason_of_module() or self._reason_of_step()
        self.findings.settled = True

    def _reason_of_settings(self) -> str | None:
        missing, engine, work = functorch.missing_name(), self._worker.engine, self._worker.work
        if missing is not None:
            return f"torch {torch.__version__} has no `torch._C._functorch.{missing}`"
        if not isinstance(engine, FastEngine):
            return "they need a real Trainer"
        options, precision, parts = engine.options, engine.precision, engine.options.accumulate_grad_batches
        for callback in work.client_callbacks:
            if stacking_key(callback) is None:
                return f"`trainer.client_callbacks` has a {type(callback).__name__}"
            if parts != 1 and not accumulates(callback):
                name = type(callback).__name__
                return f"`trainer.client_callbacks` has a {name}, and `trainer.accumulate_grad_batches` is {parts}"
        if work.validate:
            return "`trainer.validate_locally` is set"
        if options.limit_train_batches == 0:
            return "`trainer.limit_train_batches` is 0"
        if precision not in _PRECISIONS:
            return f"`trainer.precision` is {precision!r}, not one of {list(_PRECISIONS)}"
        return None

    def _reason_of_module(self) -> str | None:
        module, name = self._module, type(self._module).__name__
        if not module.automatic_optimization:
            return f"`{name}` optimizes manually"
        known = (STEPS, NEVER_CALLED, STACKED_HOOKS, TRANSFERS, *SCORING_HOOKS.values())
        reason = reason_of_hooks(module, overridden(module).difference(*known))
        if reason is not None:
            return reason
        own = {"log", "log_dict"} & vars(module).keys()
        if own or type(module).log is not LightningModule.log or type(module).log_dict is not LightningModule.log_dict:
            return f"`{name}` overrides `log`"
        reason = _reason_of_contents(module)
        if reason is not None:
            return reason
        loader = self._data.client_train_dataloader(0)
        if not reads_here(loader):
            return (
                f"client 0's loader reads a `{name_of_data(loader)}` with workers, pinned memory, or a sampler, a "
                "generator or a class of its own, and not as a plain DataLoader does"
            )
        data: Any = self._data
        if isinstance(data, LightningDataModule) and any(is_overridden(hook, data) for hook in TRANSFERS):
            return "the data module overrides a hook of the batch transfer"
        return None

    def _reason_of_step(self) -> str | None:
        """Train two clients on a batch each, alone and stacked; return why the results differ, or None."""
        random, worker = torch.get_rng_state(), self._worker
        try:
            with attributes_kept(self._module):
                with warnings_forgotten(), warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    try:
                        clause = self._clause()
                    except DrawsNumbers:
                        self.findings.draws = True
                        clause = self._clause()
                self.loops = any(functorch.LOOPS in str(warning.message) for warning in caught)
                if clause is None:
                    self._try_optimizers()
                    self._try_own_step()
        except Exception as error:
            clause = reason_of(error)
        finally:
            worker.load(worker.initial)
            torch.set_rng_state(random)
            self._module.zero_grad()
        return None if clause is None else f"`{type(self._module).__name__}.training_step` {clause}"

    def _clause(self) -> str | None:
        """Return what differs between the results, as a clause, or None.

        Double precision tells rounding from small errors, and the run's own precision shows errors of its kernels.
        """
        trial = StepTrial(self._worker, self.findings)
        try:
            alone = trial.alone()
        except Exception as error:
            raise NotStackable(f"cannot be tried with another optimizer than its own ({in_brief(error)})") from error
        stacked = trial.stacked()
        self.planned, self.activations, self.samples = trial.planned, trial.activations, trial.samples
        if cast(FastEngine, self._worker.engine).precision == _DOUBLE:
            return trial.clause(stacked, alone, EXACT)
        clause = trial.clause(stacked, alone, ROUNDED)
        if clause is not None:
            return clause
        exact, found = self._clause_in_double()
        return exact if found else trial.clause(stacked, alone, ALONE)

    def _clause_in_double(self) -> tuple[str | None, bool]:
        """Return what differs in double precision, and whether a client alone trains in it, as without `.float()`."""
        worker, engine, found = self._worker, cast(FastEngine, self._worker.engine), False
        try:
            with in_double(self._module):
                double = FastEngine(engine.fabric, engine.options, _DOUBLE)
                other = ClientWorker(worker.module, worker.data, double, worker.work, worker.device)
                trial = StepTrial(other, self.findings)
                alone, found = trial.alone(), True
                return trial.clause(trial.stacked(), alone, EXACT), True
        except Exception:
            if found:
                raise
            return None, False

    def _state_of_parameters(self) -> list[tuple[bool, int]]:
        """Return for each parameter whether it is trained, and a number that changes when it is written."""
        return [(parameter.requires_grad, parameter._version) for parameter in self._module.parameters()]

    def _trainer(self) -> FastTrainer:
        engine = cast(FastEngine, self._worker.engine)
        options = replace(engine.options, max_epochs=1, limit_train_batches=1)
        return FastTrainer(options, engine.fabric, self._module, (), (), self._data)

    def _try_optimizers(self) -> None:
        """Make the module's own optimizers with two sets of weights; raise if they cannot be stacked."""
        worker, made, kept = self._worker, [], []
        for weights in (worker.initial, moved_weights(worker.initial, worker.buffers)):
            worker.load(weights)
            optimizers, values = self._optimizers()
            made.append(optimizers)
            kept.append(values)
        if any(one is other for one, other in zip(*made, strict=False)):
            raise NotStackable("is preceded by `configure_optimizers`, which returns the optimizer of a client before")
        options = [[options_of(optimizer) for optimizer in optimizers] for optimizers in made]
        if options[0] != options[1]:
            raise NotStackable("is preceded by `configure_optimizers`, which sets options by the values of weights")
        name = differing_value(*kept)
        if name is not None:
            raise NotStackable(f"is preceded by `configure_optimizers`, which keeps a client's own value in `{name}`")

    def _try_own_step(self) -> None:
        """Step once by the module's own `optimizer_step`, if it has one; raise if that cannot be stacked."""
        if "optimizer_step" in overridden(self._module):
            StepTrial(self._worker, self.findings).step_as_configured()
            self.planned = True  # it may set rates by the number of steps

    def _optimizers(self) -> tuple[list[torch.optim.Optimizer], list[tuple[str, Any]]]:
        """Return the module's own optimizers, and what it keeps beside its weights once it has made them."""
        trainer, before = self._trainer(), self._state_of_parameters()
        trainer.fit_loop = loop = AskedLoop(trainer, None, None, 1, -1)
        loop.max_batches, loop.for_all = 1, True  # a scheduler asks for its first rate when it is made
        with restore_trainer_refs(self._module, ()), trainer.running():
            trainer.strategy.setup_optimizers(trainer)  # type: ignore[arg-type]
            require_elementwise(trainer)
            if self._state_of_parameters() != before:
                for parameter, (required, _) in zip(self._module.parameters(), before, strict=True):
                    parameter.requires_grad_(required)
                raise NotStackable("is preceded by `configure_optimizers`, which freezes, unfreezes or sets weights")
            # a hook after a client's last batch sees the rates of the next epoch
            rates = [config.interval for config in trainer.lr_scheduler_configs]
            by_step = "step" in rates or (rates and "on_train_batch_end" in trainer.hooks.overridden)
            self.planned = bool(self.planned or by_step or loop.asked)
            return list(trainer.optimizers), ModuleStates(self._module).values()
