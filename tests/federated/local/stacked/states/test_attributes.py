"""Attributes of a module that steps and hooks change: each client of a stack has values of its own."""

from __future__ import annotations

import collections
from typing import ClassVar

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl import APFL, FedSpa, PerFedAvg, PFedMe
from lightning_sparsefl.callbacks import object_states, trial
from lightning_sparsefl.federated.local import isolation
from lightning_sparsefl.federated.local.stacked import functorch
from lightning_sparsefl.federated.local.stacked.logs import NotStackable
from lightning_sparsefl.federated.local.stacked.states.attributes import AttributeStates
from lightning_sparsefl.sparse import containers
from tests.federated.local.stacked import test_odd_modules as odd
from tests.federated.local.stacked.test_odd_modules import Plain, check, fit, said_alone


class CollectsLosses(Plain):
    """Follows Lightning's recommendation for the outputs of an epoch's steps."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.outputs.append(loss)
        return loss

    def on_train_epoch_end(self):
        losses = torch.stack(self.outputs)
        self.log("mean", losses.mean())
        self.log("number", float(len(self.outputs)))
        self.outputs.clear()


class CollectsInNewLists(CollectsLosses):
    def on_train_epoch_start(self):
        self.outputs = []

    def on_train_epoch_end(self):
        self.log("last", self.outputs[-1])


class CollectsByKey(CollectsLosses):
    def __init__(self):
        super().__init__()
        self.found = collections.defaultdict(list)

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        loss = F.cross_entropy(logits, batch[1])
        self.found["losses"].append({"loss": loss.detach(), "number": batch_idx, "pair": (2 * loss, "kept")})
        self.found["right"].append((logits.argmax(1) == batch[1]).sum())
        return loss

    def on_train_epoch_end(self):
        weights = [each["number"] + 1.0 for each in self.found["losses"]]
        losses = torch.stack([each["loss"] for each in self.found["losses"]])
        self.log("weighted", (losses * torch.tensor(weights)).sum())
        self.log("right", torch.stack(self.found["right"]).sum().double())
        self.found.clear()


class SmoothsItsLoss(Plain):
    """Weighs the loss of a batch by what came before it."""

    def __init__(self):
        super().__init__()
        self.smooth = None

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        before = loss.detach() if self.smooth is None else self.smooth
        self.smooth = 0.9 * before + 0.1 * loss.detach()
        self.log("smooth", self.smooth)
        return loss / (0.5 + self.smooth)


class CountsItsSteps(Plain):
    """Clients with different numbers of steps differ from the second epoch on."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def training_step(self, batch, batch_idx):
        self.seen += len(batch[1])
        return self.loss(batch) / self.seen**0.25


class CountsInADict(CountsItsSteps):
    def __init__(self):
        super().__init__()
        self.counts = collections.Counter(steps=2)

    def training_step(self, batch, batch_idx):
        self.counts["steps"] += 1
        return self.loss(batch) / self.counts["steps"] ** 0.5


class StaysNearItsStart(Plain):
    """Keeps the weights that it began with, for a proximal term."""

    def on_train_start(self):
        self.anchor = {name: weight.detach().clone() for name, weight in self.named_parameters()}
        self.strength = 0.3

    def training_step(self, batch, batch_idx):
        far = sum((weight - self.anchor[name]).square().sum() for name, weight in self.named_parameters())
        return self.loss(batch) + 0.5 * self.strength * far


class KeepsFeatures(Plain):
    """Reads what a forward hook has kept."""

    def __init__(self):
        super().__init__()
        self.features = {}
        self.net[1].register_forward_hook(self.keep)

    def keep(self, layer, given, output):
        self.features["hidden"] = output

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        return loss + 0.1 * self.features.pop("hidden").square().mean()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(8, 8)
        self.weights = None

    def forward(self, inputs):
        self.weights = torch.softmax(self.query(inputs), dim=1)
        return inputs * self.weights


class KeepsAttention(Plain):
    def layers(self):
        return nn.Sequential(Attends(), nn.Linear(8, 4))

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        entropy = -(self.net[0].weights * self.net[0].weights.log()).sum(1).mean()
        self.log("entropy", entropy)
        return loss + 0.1 * entropy


class AddsInPlace(Plain):
    """Adds up in place, in a tensor that a list has too."""

    def on_train_epoch_start(self):
        self.total = torch.zeros(())
        self.both = [self.total]

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.total += loss.detach()
        return loss + 0.1 * self.both[0] * self.net[0].weight.norm()

    def on_train_epoch_end(self):
        self.log("total", self.both[0])


class SharesAList(CollectsLosses):
    """Reads a list by another of its names."""

    def __init__(self):
        super().__init__()
        self.again = self.outputs

    def on_train_epoch_end(self):
        self.log("sum", torch.stack(self.again).sum())
        self.again.clear()


class KeepsTheNewest(Plain):
    def on_train_start(self):
        self.newest = collections.deque(maxlen=2)
        self.classes = set()

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.newest.append(loss.detach())
        self.classes.add(batch_idx % 3)
        return loss * len(self.classes) + sum(self.newest) * self.net[2].weight.norm()


class SharesAnInnerList(CollectsLosses):
    """Reads a list within a dict, and by a closure, by another name."""

    def __init__(self):
        super().__init__()
        self.found = {"losses": [], "pair": ([],)}
        self.again, self.count = self.found["losses"], self.found["pair"][0].__len__

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.found["losses"].append(loss.detach())
        self.found["pair"][0].append(batch_idx)
        return loss * (1 + self.count() + sum(self.again))

    def on_train_epoch_end(self):
        self.log("sum", torch.stack(self.again).sum())


class KeepsTheOrder(Plain):
    """Has one ordered dictionary that it changes, and one that stays as it is."""

    def __init__(self):
        super().__init__()
        self.factors = collections.OrderedDict(first=0.5, second=1.5)
        self.counts = collections.OrderedDict(steps=1)

    def training_step(self, batch, batch_idx):
        self.counts["steps"] += 1
        self.counts.setdefault("more", 0)
        return self.loss(batch) * sum(self.factors.values()) / sum(self.counts.values()) ** 0.5


class KeepsInASequential(Plain):
    """Keeps a list in a module of torch."""

    def __init__(self):
        super().__init__()
        self.net.seen = []

    def training_step(self, batch, batch_idx):
        self.net.seen.append(1)
        return self.loss(batch) / len(self.net.seen)


class LeavesItsLosses(CollectsLosses):
    """Leaves what it has collected, which is undone before the next client."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * len(self.outputs)

    def on_train_epoch_end(self):
        pass


class WritesInPlace(Plain):
    """Smooths its outputs in place, in a tensor of its own and in one within a list."""

    def on_train_start(self):
        self.sums, self.kept = torch.zeros(4), [torch.zeros(())]

    def training_step(self, batch, batch_idx):
        logits = self(batch[0])
        self.sums += logits.detach().mean(0)
        self.kept[0].mul_(0.5).add_(self.sums.norm())
        self.log("kept", self.kept[0])
        return F.cross_entropy(logits + 0.1 * self.sums, batch[1]) * (1 + 0.1 * self.kept[0])


class MovesItems(Plain):
    """Has one tensor in several places, and takes items from both ends of lists that go on."""

    def on_train_start(self):
        self.losses, self.window, self.best = [], collections.deque(maxlen=3), None

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.losses.append(loss.detach())
        self.window.append(self.losses[-1])
        self.best = self.losses[0]
        if len(self.losses) % 4 == 0:
            del self.losses[0]
            self.losses.insert(1, self.best)
        self.losses[-1].mul_(1.5)
        self.log("best", self.best)
        return loss * (1 + 0.01 * torch.stack(self.losses).mean() + 0.02 * sum(self.window) + 0.01 * self.best)


class BeginsLater(CollectsLosses):
    """Changes an attribute for the first time in the second epoch."""

    def training_step(self, batch, batch_idx):
        if self.current_epoch == 1:
            return super().training_step(batch, batch_idx)
        return self.loss(batch)

    def on_train_epoch_end(self):
        if self.outputs:
            super().on_train_epoch_end()


class RemovesAnAttribute(Plain):
    def __init__(self):
        super().__init__()
        self.factor = 3.0

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if hasattr(self, "factor"):
            loss = loss * self.factor
            del self.factor
        return loss


class CollectsScores(Plain):
    """Computes the scores of an evaluation at its end."""

    def __init__(self):
        super().__init__()
        self.scores, self.seen = [], 0

    def test_step(self, batch, batch_idx):
        self.scores.append((self(batch[0]).argmax(1) == batch[1]).double())
        self.seen += len(batch[1])

    def on_test_epoch_end(self):
        self.log("test_acc", torch.cat(self.scores).mean())
        self.log("test_number", float(self.seen))
        self.scores.clear()


QUICK = [CollectsLosses, CollectsByKey, SmoothsItsLoss, CountsItsSteps, StaysNearItsStart, KeepsFeatures, AddsInPlace]
QUICK += [BeginsLater, CollectsScores, SharesAnInnerList, KeepsTheOrder, MovesItems]
SLOW = [CollectsInNewLists, CountsInADict, KeepsAttention, SharesAList, KeepsTheNewest, RemovesAnAttribute]
SLOW += [LeavesItsLosses, KeepsInASequential]


@pytest.mark.parametrize("kind", [*QUICK, *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_each_client_has_values_of_its_own(kind, tmp_path):
    sizes, said = check(kind, tmp_path)
    assert sizes == [4, 4]
    assert not said_alone(said)


OTHERS = [SmoothsItsLoss, CollectsLosses, MovesItems]
PASSES = [PFedMe(lam=2.0), PerFedAvg(), FedSpa(), APFL()]


@pytest.mark.slow_after_first("algorithm")
@pytest.mark.parametrize("kind", [WritesInPlace, *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)])
@pytest.mark.parametrize("algorithm", PASSES, ids=lambda each: type(each).__name__)
def test_further_passes_leave_no_values(kind, algorithm, tmp_path):
    sizes, said = check(kind, tmp_path, algorithm=algorithm)
    assert sizes == [4, 4]
    assert not said_alone(said)


class Meter:
    def __init__(self):
        self.total = 0.0


class KeepsAnObject(Plain):
    def training_step(self, batch, batch_idx):
        self.meter = Meter()
        return self.loss(batch)


class WritesIntoATensor(Plain):
    def __init__(self):
        super().__init__()
        self.steps = torch.zeros(())

    def training_step(self, batch, batch_idx):
        self.steps += 1
        return self.loss(batch)


class KeepsItsWeights(Plain):
    """Keeps the weights themselves, which a copy for other clients would not follow."""

    kept = None

    def training_step(self, batch, batch_idx):
        if self.kept is None:
            self.kept = list(self.net.parameters())
        return self.loss(batch) + 0.01 * sum(weight.square().sum() for weight in self.kept)


class CountsInALargeList(Plain):
    def __init__(self):
        super().__init__()
        self.table = [0] * 10_000

    def training_step(self, batch, batch_idx):
        self.table[3] += 1
        return self.loss(batch) / self.table[3]


class SchedulesByItsSteps(CountsItsSteps):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1 / (1 + self.seen))
        return [optimizer], [{"scheduler": rates, "interval": "step"}]


class Scaled(torch.autograd.Function):
    """Multiplies gradients by what its owner keeps."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs, owner):
        return inputs.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.owner = inputs[1]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.owner.scale, None


class ScalesItsSlopes(Plain):
    scale = 1.0

    def training_step(self, batch, batch_idx):
        self.scale = self.scale + 1.0
        return F.cross_entropy(Scaled.apply(self(batch[0]), self), batch[1])


class Noted(Scaled):
    """Tells its owner of each backward pass."""

    @staticmethod
    def backward(ctx, grad):
        ctx.owner.seen = True
        return grad, None


class SetsItInItsSlopes(Plain):
    """Has a flag that the backward pass sets, and that is read in the next step."""

    def __init__(self):
        super().__init__()
        self.seen = False

    def training_step(self, batch, batch_idx):
        scale, self.seen = 0.5 if self.seen else 1.0, False
        return F.cross_entropy(Noted.apply(self(batch[0]), self), batch[1]) * scale


class SetByASchedule(Plain):
    """Has attributes that functions of the scheduler set, which the training step reads."""

    def __init__(self):
        super().__init__()
        self.scale, self.ready = 1.0, False

    def training_step(self, batch, batch_idx):
        self.log("ready", float(self.ready), on_step=False, on_epoch=True)
        return self.loss(batch) * self.scale

    def rate(self, step):
        self.scale = 1 / (1 + step)
        return self.scale

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()
        self.ready = True

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate)
        return [optimizer], [{"scheduler": scheduler, "interval": self.interval}]

    interval = "epoch"


class SetInEachStep(SetByASchedule):
    interval = "step"


@pytest.mark.parametrize("sizes", [[20] * 4, [17, 19, 20, 18]], ids=["even", "last"])
@pytest.mark.parametrize("kind", [SetByASchedule, SetInEachStep])
def test_what_a_scheduler_sets_an_attribute_to_is_that_of_all_clients(kind, sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(odd, "SIZES", sizes)
    stacks, said = check(kind, tmp_path)
    assert stacks == [4, 4]
    assert not said_alone(said)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SetsItInItsSlopes, "has a backward pass that sets attributes, of which each client needs its own"),
        (KeepsItsWeights, "keeps a weight itself, or two views of one tensor, in `self.kept`"),
        (CountsInALargeList, "changes `self.table`, which all clients share"),
        (SchedulesByItsSteps, "is followed by a scheduler that reads `self.seen`, of which each client has its own"),
        (ScalesItsSlopes, "has a backward pass that reads `self.scale`, of which each client has its own"),
        (KeepsAnObject, "keeps a `Meter` in `self.meter`, which all clients share"),
        (WritesIntoATensor, "writes into the tensor `self.steps`, which all clients share"),
    ],
)
def test_what_is_no_value_of_a_client_is_not_stacked(kind, words, tmp_path):
    sizes, said = check(kind, tmp_path, max_epochs=1)
    assert sizes == []
    assert any(words in each for each in said)


class Looks(Callback):
    """A callback of a user that acts on each client of a stack."""

    stackable = True

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.mul_(1 - 0.01 * pl_module.seen)


def test_callbacks_that_see_one_client_prevent_values_of_each(tmp_path):
    sizes, said = check(CountsItsSteps, tmp_path, client_callbacks=[Looks()])
    assert sizes == []
    assert any("changes the number `self.seen`" in each for each in said)


@pytest.mark.parametrize("kind", [LeavesItsLosses, CollectsScores, CollectsLosses])
def test_what_clients_leave_in_containers_is_said_as_without_stacks(kind, tmp_path, monkeypatch):
    said = {"fast": set(), "stacked": set()}
    for engine, texts in said.items():
        monkeypatch.setattr(isolation._messages, "info", texts.add)
        fit(kind(), engine, tmp_path / engine)
    assert said["fast"] == said["stacked"]
    assert len(said["fast"]) == (kind is LeavesItsLosses)


class CountsInItsClass(Plain):
    """Keeps a number and a list that all objects of the class share."""

    steps = 0
    seen: ClassVar[list[int]] = []

    def training_step(self, batch, batch_idx):
        type(self).steps += 1
        self.seen.append(batch_idx)
        return self.loss(batch)


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_attributes_of_a_class_change_as_without_stacks(engine, tmp_path, monkeypatch):
    counts = {}
    for name in ("fast", engine):
        monkeypatch.setattr(CountsInItsClass, "steps", 0)
        monkeypatch.setattr(CountsInItsClass, "seen", [])
        *_, sizes, said = fit(CountsInItsClass(), name, tmp_path / name)
        counts[name] = (CountsInItsClass.steps, CountsInItsClass.seen)
        assert sizes == []
    assert counts[engine] == counts["fast"]
    assert counts["fast"][0] == len(counts["fast"][1]) > 0
    words = "sets the attribute `steps` of the class `CountsInItsClass`, which all clients share"
    assert any(words in text for text in said_alone(said)) == (engine == "stacked"), said


class HasAVocabulary(CollectsLosses):
    def __init__(self):
        super().__init__()
        self.numbers = {f"word {number}": number for number in range(2_000)}
        self.samples = [(torch.zeros(1), number, []) for number in range(1_200)]
        self.late = 0

    def training_step(self, batch, batch_idx):
        if self.global_step == 2:
            self.change()
        return super().training_step(batch, batch_idx)

    def change(self):
        pass


class ChangesAWord(HasAVocabulary):
    def change(self):
        self.numbers["word 7"] = len(self.outputs)


class ChangesASample(HasAVocabulary):
    def change(self):
        self.samples[5][2].append(len(self.outputs))


@pytest.mark.parametrize("kind", [HasAVocabulary, ChangesAWord, ChangesASample])
def test_data_in_memory_is_compared_at_the_end_of_a_fit(kind, tmp_path, monkeypatch):
    for module in (containers, object_states, trial):
        monkeypatch.setattr(module, "LARGE", 1_000)
    sizes, said = check(kind, tmp_path)
    assert (sizes == [4, 4]) == (not said_alone(said)) == (kind is HasAVocabulary)


class WritesIntoABank(Plain):
    """Writes into a tensor or an array that is larger than what is kept of each fit."""

    def __init__(self):
        super().__init__()
        self.bank, self.counts = torch.zeros(2**20), np.zeros(2**20)

    def training_step(self, batch, batch_idx):
        self.bank[:2] += 1
        self.counts[:3] += 1
        self.log("written", self.bank[0] + float(self.counts[0]))
        return self.loss(batch)


def seeded(kind):
    torch.manual_seed(1)
    return kind()


@pytest.mark.parametrize("engine", ["stacked", "auto"])
def test_a_trial_leaves_no_writes(engine, tmp_path):
    (alone, tables, *_), (ours, own_tables, sizes, _) = [
        fit(seeded(WritesIntoABank), name, tmp_path / name) for name in ("fast", engine)
    ]
    assert all(torch.equal(ours[name], tensor) for name, tensor in alone.items())
    assert own_tables == tables
    assert sizes == []


def test_a_list_that_grows_is_not_copied_tensor_by_tensor(monkeypatch):
    """What is wrapped is counted: what a step adds, and not again what was there."""
    module, states = states_of([])
    rows, wrap, wrapped = states.part(0, 3), functorch.wrap, []
    monkeypatch.setattr(functorch, "wrap", lambda *args: (wrapped.append(1), wrap(*args))[1])
    for number in range(20):
        with functorch.vmap_level(3) as level, rows.shown(level):
            assert len(module.value) == number
            module.value.append(wrap(torch.full((3,), float(number)), 0, level))
    assert len(wrapped) == 19
    assert [row.tolist() for row in states.values(0, 3)[1]] == [[number] * 3 for number in range(20)]


@pytest.mark.parametrize("length", [1, 9_999])
def test_what_one_of_several_clients_appends_is_stored(length):
    module, states = states_of([0.5] * length)
    with functorch.vmap_level(3) as level, states.part(0, 3).shown(level):
        module.value.append(1.0)
    with states.part(0, 1).shown(0):
        module.value.append(2.0)
    assert len(module.value) == length
    assert [len(states.values(place, place + 1)[1]) - length for place in range(3)] == [2, 1, 1]


def states_of(value, size=3):
    module = nn.Module()
    module.value = value
    return module, AttributeStates(module, [("", "value")], size)


def test_a_part_changes_its_own_values_alone():
    module, states = states_of([torch.zeros(2)])
    with functorch.vmap_level(2) as level, states.part(0, 2).shown(level):
        module.value.append(torch.ones(2))
    assert len(module.value) == 1
    assert len(states.values(0, 2)[1]) == 2
    assert len(states.values(2, 3)[1]) == 1
    assert len(set(states.phases(0, 3))) == 2
    with pytest.raises(NotStackable, match="other values in attributes"):
        states.values(0, 3)
