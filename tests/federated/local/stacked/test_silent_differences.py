"""Code of users that a stack could train otherwise without a word: recorded questions, caught errors, stale values."""

from __future__ import annotations

import argparse
import dataclasses

import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F
from torchmetrics import Metric, SumMetric
from torchmetrics.classification import BinaryJaccardIndex, MulticlassAccuracy

from lightning_sparsefl import FedAvg, FederatedTrainer, Federation
from lightning_sparsefl.errors import ClientFailed
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Data, Plain, check, fit, said_alone


class AsksForAnUpdate(Plain):
    """Takes another branch in the first batch of each epoch, in which its metric object has no value yet."""

    def __init__(self):
        super().__init__()
        self.total = SumMetric(nan_strategy="disable").set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.total.update_called:
            self.log("so_far", self.total.compute())
            loss = loss / (1 + self.total.compute())
        self.total.update(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.total.reset()


class SlopesChange(Plain):
    """Adds a backward hook between two epochs."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.handle = self.net[1].register_full_backward_hook(lambda layer, given, grads: (2 * given[0],))

    def on_train_end(self):
        self.net[1]._backward_hooks.clear()


class LogsInTwoPlaces(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("value", loss, on_step=False, on_epoch=True)
        return loss

    def on_train_epoch_end(self):
        if self.current_epoch == 0:
            self.log("value", self.net[0].bias.sum())


class ResetsAtTheEnd(Plain):
    def __init__(self):
        super().__init__()
        self.total = SumMetric().set_dtype(torch.float64)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.total.update(loss.detach())
        self.log("total", self.total, on_step=False, on_epoch=True)
        return loss

    def on_train_end(self):
        self.total.reset()


class ChangesTheTypeOfALog(Plain):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss.float() if batch_idx == 0 else loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize(
    ("kind", "epochs"),
    [(AsksForAnUpdate, 4), (SlopesChange, 2), (LogsInTwoPlaces, 3), (ResetsAtTheEnd, 2), (ChangesTheTypeOfALog, 2)],
)
def test_a_stack_answers_and_logs_as_each_client_alone(kind, epochs, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [40] * 4)  # so that steps are recorded
    sizes, _ = check(kind, tmp_path, max_epochs=epochs)
    assert sizes == ([] if kind is SlopesChange else [4, 4])


class KeepsWhatWasBefore(Plain):
    """Compares a batch with the one before, from the second epoch on."""

    before = None

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        if self.current_epoch > 0:
            if self.before is not None:
                loss = loss + 0.1 * F.mse_loss(outputs.mean(0), self.before)
            self.before = outputs.mean(0).detach()
        return loss

    def on_train_epoch_end(self):
        self.before = None


@pytest.mark.parametrize("sizes", [[5, 5, 3, 3], [16, 12, 9, 6], [20] * 4])
def test_a_part_of_a_stack_does_not_read_what_another_one_kept(sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(KeepsWhatWasBefore, tmp_path)
    assert stacks == [4, 4]
    assert not said_alone(said)


class TriesAgain(Plain):
    """Adds to a matrix that cannot be factorized, as some clients' can."""

    def training_step(self, batch, batch_idx):
        outputs = self(batch[0])
        rows = outputs[:3] - outputs.mean(0)
        matrix = rows @ rows.T - 0.02 * torch.eye(len(rows), dtype=rows.dtype)
        try:
            factor = torch.linalg.cholesky(matrix)
        except RuntimeError:
            factor = torch.linalg.cholesky(matrix + torch.eye(len(rows), dtype=rows.dtype))
        return F.cross_entropy(outputs, batch[1]) + 0.01 * factor.diagonal().log().sum()


class FallsBack(Plain):
    """Catches what torch says of a function without a form for several clients."""

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.current_epoch > 0:
            try:
                loss = loss * len(torch.unique(batch[1]))
            except Exception:
                loss = loss * 4
        return loss


@pytest.mark.parametrize("kind", [TriesAgain, FallsBack])
def test_an_error_that_the_step_catches_is_no_answer_for_all(kind, tmp_path):
    sizes, said = check(kind, tmp_path)
    assert sizes == []
    assert said_alone(said)


class Share(Metric):
    """A metric that catches its own error."""

    def __init__(self):
        super().__init__()
        self.add_state("right", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("number", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, logits, labels):
        self.right += (logits.argmax(1) == labels).sum()
        self.number += len(labels)

    def compute(self):
        try:
            return torch.tensor(self.right.item() / self.number.item())
        except Exception:
            return torch.tensor(-1.0)


class Shares(Plain):
    def __init__(self):
        super().__init__()
        self.share, self.test_share = Share(), Share()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.share.update(logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def on_train_epoch_end(self):
        self.log("share", self.share.compute())
        self.share.reset()

    def test_step(self, batch, batch_idx):
        self.test_share.update(self(batch[0]), batch[1])

    def on_test_epoch_end(self):
        self.log("test_share", self.test_share.compute())
        self.test_share.reset()


def test_a_metric_that_catches_its_error_has_the_value_of_each_client(tmp_path):
    sizes, said = check(Shares, tmp_path)
    assert sizes == [4, 4]
    assert not said_alone(said)


class Squeezes(Plain):
    """Loses the dimension of the samples in a batch of one."""

    of = None

    def __init__(self):
        super().__init__()
        self.measure = MulticlassAccuracy(4) if self.of is None else BinaryJaccardIndex()

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        given = logits.squeeze() if self.of is None else logits[:, :2].squeeze()[..., 0]
        self.measure.update(given.detach(), batch[1].clamp(max=1))
        return F.cross_entropy(logits, batch[1])


@pytest.mark.parametrize("engine", ["fast", "stacked"])
@pytest.mark.parametrize("of", [None, 2], ids=["classes", "two classes"])
@pytest.mark.filterwarnings("ignore:.*train one after another:UserWarning")
def test_predictions_that_do_not_fit_are_the_clients_error(of, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", [6, 6, 11, 11])
    trainer = FederatedTrainer(
        algorithm=FedAvg(), federation=Federation(clients_per_round=4, local_engine=engine), max_rounds=1, logger=False,
        accelerator="cpu", devices=1, enable_progress_bar=False, quiet=True, default_root_dir=str(tmp_path),
    )  # fmt: skip
    with pytest.raises(ClientFailed, match="shape"):
        trainer.fit(type("Squeezes", (Squeezes,), {"of": of})(), Data((8,)))


@dataclasses.dataclass(slots=True)
class Meter:
    total: float = 0.0
    number: int = 0


class Hidden:
    __slots__ = ("__number",)

    def __init__(self):
        self.__number = 0

    def next(self):
        self.__number += 1
        return self.__number


class CountsInHiddenSlots(Plain):
    def __init__(self):
        super().__init__()
        self.counter = Hidden()

    def training_step(self, batch, batch_idx):
        return self.loss(batch) / self.counter.next() ** 0.25


class CountsInSlots(Plain):
    def __init__(self):
        super().__init__()
        self.meter = Meter()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.meter.total = self.meter.total + loss.detach()
        self.meter.number += 1
        return loss / self.meter.number**0.25


class CountsInArguments(Plain):
    """Reads a number, so that the trial ends with the count that it has made."""

    def __init__(self):
        super().__init__()
        self.arguments = argparse.Namespace(steps=0)

    def training_step(self, batch, batch_idx):
        self.arguments.steps += 1
        loss = self.loss(batch)
        return loss * (1 + 0.1 * loss.item()) / self.arguments.steps**0.1


class Follower(Callback):
    def __init__(self):
        self.steps = 0


class CountsInACallback(Plain):
    def __init__(self):
        super().__init__()
        self.follower = Follower()

    def training_step(self, batch, batch_idx):
        self.follower.steps += 1
        return self.loss(batch) / self.follower.steps**0.1


class Average(dict):
    """A mean of weights with the number of its updates."""

    updates = 0


class CountsInADict(Plain):
    def __init__(self):
        super().__init__()
        self.average = Average()

    def training_step(self, batch, batch_idx):
        self.average.updates += 1
        return self.loss(batch) / self.average.updates**0.1


class Confusion:
    """Counts, made anew after each evaluation, in which gradients and versions of tensors do not exist."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.counts = torch.zeros(4, dtype=torch.float64)


class CountsInAnEvaluation(Plain):
    def __init__(self):
        super().__init__()
        self.confusion = Confusion()

    def test_step(self, batch, batch_idx):
        self.confusion.counts += F.one_hot(batch[1], 4).sum(0)
        self.log("test_loss", self.loss(batch))

    def on_test_epoch_end(self):
        self.log("counts", self.confusion.counts.sum())
        self.confusion.reset()


def test_counts_of_an_evaluation_are_not_those_of_its_trial(tmp_path):
    _, said = check(CountsInAnEvaluation, tmp_path)
    assert any("evaluated one after another" in text for text in said)


STEPS = [CountsInSlots, CountsInHiddenSlots, CountsInArguments, CountsInACallback, CountsInADict]


@pytest.mark.parametrize("kind", STEPS)
def test_counts_in_objects_are_not_those_of_a_trial(kind, tmp_path):
    """They stay for the next client, whatever has trained before."""
    sizes, said = check(kind, tmp_path)
    assert sizes == []
    assert said_alone(said)


class DrawsForALog(Plain):
    """Draws random numbers that nothing but a rare value shows."""

    def noisy(self, batch):
        outputs = self(batch[0] + 1e-6 * torch.randn_like(batch[0]))
        return (outputs.argmax(1) == batch[1]).double().mean()

    def training_step(self, batch, batch_idx):
        self.log("noisy", self.noisy(batch))
        return self.loss(batch)

    def test_step(self, batch, batch_idx):
        self.log("test_noisy", self.noisy(batch))


def test_random_numbers_that_do_not_show_are_drawn_for_each_client_but_in_an_evaluation(tmp_path):
    _, _, sizes, said = fit(DrawsForALog(), "stacked", tmp_path)
    assert sizes
    assert any("DrawsForALog.test_step` draws random numbers of torch" in text for text in said)
