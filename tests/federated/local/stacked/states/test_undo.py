"""A stack that fails after some steps leaves no trace: its clients end where they end without the failure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from helpers.networks import module_for
from lightning_sparsefl import FederatedTrainer, Federation, FedLPS, FedNova, FedPM, SpaFL
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.distributed.stacks import compose_evaluations
from lightning_sparsefl.federated.local.stacked import worker
from lightning_sparsefl.federated.local.stacked.fitting.optimizers import StackedOptimizer
from lightning_sparsefl.federated.local.stacked.states.undo import CallbackStates
from lightning_sparsefl.federated.rounds import cohort

ALGORITHMS = [FedNova(), SpaFL(), FedPM(), FedLPS(refresh="round")]


def weights(folder, algorithm, **federation):
    """Return the global weights after a round of four clients."""
    worker._messages.clear()
    torch.manual_seed(0)
    module = module_for(algorithm)()
    data = FederatedBlobs(
        num_train=128,
        num_test=16,
        num_clients=4,
        num_classes=4,
        dim=8,
        batch_size=8,
        eval_split="test",
        drop_last=True,
    )
    trainer = FederatedTrainer(
        algorithm=algorithm,
        federation=Federation(clients_per_round=4, **federation),
        accelerator="cpu",
        max_rounds=1,
        max_epochs=2,
        logger=False,
        enable_progress_bar=False,
        quiet=True,
        default_root_dir=str(folder),
        seed=0,
    )
    trainer.fit(module, data)
    return module.state_dict()


@pytest.fixture
def failing(monkeypatch):
    """Lets the third step of a stack of four raise an error; returns a list with the number of its steps."""
    steps, before = [], StackedOptimizer.step

    def make(error):
        def step(self, low, high, *args):
            steps.extend([None] * (self.size == 4))
            if self.size == 4 and len(steps) == 3:
                raise error
            return before(self, low, high, *args)

        monkeypatch.setattr(StackedOptimizer, "step", step)
        return steps

    return make


def equal(ours, theirs):
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda algorithm: type(algorithm).__name__)
def test_clients_of_a_stack_that_failed_train_as_alone(algorithm, tmp_path, failing):
    alone = weights(tmp_path / "alone", algorithm, local_engine="fast")
    steps = failing(RuntimeError("in the third step"))
    with pytest.warns(UserWarning, match="4 clients train one after another"):
        ours = weights(tmp_path / "failed", algorithm, local_engine="stacked", stack_size=4)
    assert len(steps) == 3
    equal(ours, alone)


def test_halves_of_a_stack_are_stacks_of_that_size(tmp_path, failing, monkeypatch):
    with monkeypatch.context() as patch:  # the halves have neighbours
        patch.setattr(cohort, "compose_stacks", lambda loads, size, alike: compose_evaluations(loads, size))
        halves = weights(tmp_path / "halves", FedNova(), local_engine="stacked", stack_size=2)
    steps = failing(torch.OutOfMemoryError("CUDA out of memory."))
    with pytest.warns(UserWarning, match="is halved"):
        ours = weights(tmp_path / "failed", FedNova(), local_engine="stacked", stack_size=4)
    assert len(steps) == 3
    equal(ours, halves)


def test_restored_objects_are_those_that_were_there():
    tensor, inner, random = torch.zeros(2), {"list": [1], "pair": (torch.ones(1), {2})}, torch.Generator()
    callback = Callback()
    callback.tensor, callback.inner, callback.random, callback.number = tensor, inner, random, 1
    inner["itself"] = inner
    draw = random.get_state()
    states = CallbackStates([callback, callback])
    tensor += 1
    inner["pair"][0].mul_(3)
    inner["pair"][1].add(4)
    inner["list"].append(2)
    del inner["itself"]
    torch.rand(3, generator=random)
    callback.tensor, callback.number, callback.more = torch.ones(1), 2, "more"
    states.restore()
    assert callback.tensor is tensor
    assert callback.inner is inner is inner["itself"]
    assert tensor.tolist() == [0, 0]
    assert inner["pair"] == (torch.ones(1), {2})
    assert inner["list"] == [1]
    assert callback.number == 1
    assert not hasattr(callback, "more")
    assert torch.equal(random.get_state(), draw)


def test_masks_that_repeat_an_entry_are_restored():
    """Such as those of PerFedMask, into which nothing can be written."""
    mask, array = torch.ones(1, dtype=torch.bool).expand(3), np.broadcast_to(np.ones(1), (3,))
    callback = Callback()
    callback.mask, callback.array, callback.number = mask, array, 1
    states = CallbackStates([callback])
    callback.mask, callback.number = torch.zeros(3), 2
    states.restore()
    assert callback.mask is mask
    assert callback.array is array
    assert callback.number == 1
