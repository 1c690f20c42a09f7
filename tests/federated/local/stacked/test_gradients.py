"""Gradients of several clients at once are those of one after another."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.data import Dirichlet, FederatedBlobs
from lightning_sparsefl.federated.local.stacked import gradients
from lightning_sparsefl.federated.local.stacked.recording.recorder import PassRecorder


class Differentiating(FedAvg):
    """Method whose clients compute two gradients, at the initial weights and at their own."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def train(self, message, client):
        own = {name: weight * (1 + 0.1 * client.id) for name, weight in message.weights.items()}
        self.found[client.id] = [client.gradient({}), client.gradient(own)]
        return super().train(message, client)


class WithNorm(Classifier):
    """Classifier with dropout and a norm, which act otherwise in evaluation mode, and a weight without gradients."""

    def __init__(self):
        super().__init__()
        self.net.insert(2, nn.BatchNorm1d(16))
        self.net.insert(3, nn.Dropout(0.5))
        self.net[0].bias.requires_grad_(False)


class ReadsInEvaluation(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.training else loss * float(loss.detach())


class OtherInEvaluation(Classifier):
    """Classifier whose loss has a random part, which a stack draws once, but only in evaluation mode."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if self.training else loss + torch.rand(()) * self(batch[0]).square().sum()


def run(folder, module, engine, precision="64-true"):
    algorithm = Differentiating()
    torch.manual_seed(0)
    trainer = FederatedTrainer(
        algorithm=algorithm,
        federation=Federation(clients_per_round=4, local_engine=engine, stack_size=4),
        accelerator="cpu",
        max_rounds=1,
        precision=precision,
        logger=False,
        enable_progress_bar=False,
        default_root_dir=str(folder / engine),
        seed=0,
    )
    data = FederatedBlobs(
        num_train=300,
        num_test=60,
        num_clients=6,
        num_classes=4,
        dim=8,
        batch_size=8,
        partition=Dirichlet(alpha=1.0, min_examples=12),
        drop_last=True,
        eval_split="test",
    )
    trainer.fit(module(), data)
    return algorithm.found


@pytest.fixture
def sizes():
    """Sizes of the stacks whose gradients were computed."""
    found, before = [], gradients.differentiate_stack

    def noted(engine, module, requests, changed):
        before(engine, module, requests, changed)
        found.append(len(requests))

    with mock.patch.object(gradients, "differentiate_stack", noted):
        yield found


def agree(ours, theirs):
    assert ours.keys() == theirs.keys()
    for key, pair in theirs.items():
        for own, other in zip(ours[key], pair, strict=True):
            assert list(own) == list(other)
            for name, slope in other.items():
                torch.testing.assert_close(own[name], slope, rtol=1e-12, atol=1e-12)
                assert own[name].stride() == slope.stride()


@pytest.mark.parametrize("module", [Classifier, WithNorm])
def test_gradients_are_those_of_one_after_another(module, tmp_path, sizes):
    theirs = run(tmp_path, module, "fast")
    assert sizes == []
    agree(run(tmp_path, module, "stacked"), theirs)
    assert sizes == [2, 4, 4]  # the trial, and two gradients


@pytest.mark.parametrize(
    ("module", "clause"),
    [(ReadsInEvaluation, "reads a number out of a tensor"), (OtherInEvaluation, "changes `net.0.weight` otherwise")],
)
def test_a_step_that_differs_in_evaluation_mode_is_differentiated_alone(module, clause, tmp_path, sizes):
    message = rf"gradients are computed one after another, since `{module.__name__}.training_step` in evaluation mode "
    with pytest.warns(UserWarning, match=message + clause):
        ours = run(tmp_path, module, "stacked")
    agree(ours, run(tmp_path, module, "fast"))
    assert set(sizes) <= {2}  # of the trial


@pytest.mark.parametrize(
    ("error", "cleared", "clause"),
    [
        (RuntimeError("mine"), 0, r"`Classifier.training_step` fails for several clients at once \(RuntimeError: mine"),
        (MemoryError(), 2, "those of 4 do not fit into the memory; lower `federation.stack_size`"),
    ],
    ids=["error", "memory"],
)
def test_a_stack_that_fails_is_differentiated_alone(error, cleared, clause, tmp_path, monkeypatch):
    """Out of memory, it also drops recorded steps (of fits and of evaluations), whose graphs hold memory."""
    calls, before, clear = [], gradients.differentiate_stack, mock.Mock()
    monkeypatch.setattr(PassRecorder, "clear", clear)

    def failing(engine, module, requests, changed):
        before(engine, module, requests, changed)
        calls.append(len(requests))
        if len(calls) > 1:
            raise error

    theirs = run(tmp_path, Classifier, "fast")
    warns = pytest.warns(UserWarning, match=f"gradients are computed one after another, since {clause}")
    with mock.patch.object(gradients, "differentiate_stack", failing), warns:
        ours = run(tmp_path, Classifier, "stacked")
    agree(ours, theirs)
    assert calls == [2, 4, 4]
    assert clear.call_count == 2 * cleared  # both gradients failed
