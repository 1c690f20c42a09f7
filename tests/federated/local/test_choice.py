"""Which clients `local_engine: auto` trains several at once."""

from __future__ import annotations

import warnings

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from helpers.networks import Classifier
from lightning_sparsefl import FedAvg, FederatedTrainer, Federation, FedPer
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.federated.local import choice
from lightning_sparsefl.federated.local.fast import steps
from lightning_sparsefl.federated.local.stacked.worker import StackedWorker


class Reading(Classifier):
    """Classifier whose training step reads a number and leaves what it has read in a list."""

    def __init__(self):
        super().__init__()
        self.read, self.note = [], str

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.read.append(loss.item())
        self.note(len(self.read))
        return loss


class NoLoss(Classifier):
    """Classifier whose training step forgets to return the loss."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)


class Normed(Classifier):
    """Classifier with a norm that has no rule."""

    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, affine=True)

    def forward(self, x):
        return self.norm(super().forward(x).unflatten(1, (2, 2))).flatten(1)


class Large(Classifier):
    """Classifier of which two do not fit into the memory of a stack."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(1700, 1700)


class Middling(Classifier):
    """Classifier of which two fit into the memory of a stack, and three do not."""

    def __init__(self):
        super().__init__()
        self.more = nn.Linear(1500, 1500)


class Wide(Classifier):
    """Classifier with few weights, of whose activations those of two clients fit into the memory of a stack."""

    def __init__(self):
        super().__init__()
        self.pad = nn.ConstantPad1d((0, 900_000), 1.0)

    def forward(self, x):
        return super().forward(x) + self.pad(x).mean()


class OwnTrain(FedAvg):
    """Method of a user, which may keep values of one client in its attributes."""

    def train(self, message, client):
        return super().train(message, client)


class OwnFinetune(FedAvg):
    """Method of a user whose clients' own models are trained by its rule."""

    def finetune(self, message, client):
        return super().finetune(message, client)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Train a round; return the sizes of its stacks, and its weights and scores."""
    sizes, before = [], StackedWorker._fit_group
    monkeypatch.setattr(
        StackedWorker, "_fit_group", lambda self, group: (sizes.append(len(group)), before(self, group))
    )

    def run(engine="auto", module=Classifier, algorithm=FedAvg, per_round=6, **federation):
        sizes.clear()
        choice._messages.clear()
        blobs = {"num_train": 240, "num_test": 60, "num_clients": 6, "num_classes": 4, "dim": 8}
        data = FederatedBlobs(**blobs, batch_size=8, eval_split="test")
        trainer = FederatedTrainer(
            algorithm=algorithm(),
            federation=Federation(clients_per_round=per_round, local_engine=engine, **federation),
            accelerator="cpu",
            max_rounds=1,
            logger=False,
            enable_progress_bar=False,
            default_root_dir=str(tmp_path / engine),
            seed=0,
        )
        torch.manual_seed(0)
        net = module()
        trainer.fit(net, data)
        return list(sizes), {name: value.clone() for name, value in net.state_dict().items()}

    return run


def equal(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_auto_stacks_a_small_network(fit, caplog):
    sizes, weights = fit()
    assert "Several clients train at once (`federation.local_engine: auto`)" in caplog.text
    assert sizes == [3, 3]
    assert equal(weights, fit("stacked")[1])
    sizes, alone = fit("fast")
    assert sizes == []
    assert not equal(weights, alone)  # dropout draws other numbers


class WeightNormed(Classifier):
    def __init__(self):
        super().__init__()
        self.net[0] = nn.utils.parametrizations.weight_norm(self.net[0])


class LogsSlopes(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self.net, norm_type=2))


class ReadsSlopes(Classifier):
    def on_before_optimizer_step(self, optimizer):
        self.log("slope", float(self.net[0].weight.grad.norm()))


ALONE = {
    "a hook for each client": {"module": ReadsSlopes},
    "few clients": {"per_round": 2},
    "stacks of one": {"stack_size": 1},
    "a clock of each client": {"client_timeout": 100.0},
    "instance norm": {"module": Normed},
    "a function in a loop": {"module": WeightNormed},
    "a large network": {"module": Large},
    "a step that cannot be stacked": {"module": Reading},
    "a method of the user": {"algorithm": OwnTrain},
    "fine-tuning of the user": {"algorithm": OwnFinetune},
}


@pytest.mark.filterwarnings("error::UserWarning:lightning_sparsefl")
@pytest.mark.parametrize("case", ALONE)
def test_auto_trains_one_client_after_another_without_a_warning(case, fit, caplog):
    sizes, weights = fit(**ALONE[case])
    assert sizes == []
    assert "one after another" not in caplog.text
    assert "at once" not in caplog.text
    assert equal(weights, fit("fast", **ALONE[case])[1])


@pytest.mark.parametrize("engine", ["auto", "fast", "stacked"])
def test_steps_without_a_loss_are_told_with_each_engine(engine, fit):
    steps._warnings.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fit(engine, module=NoLoss)
    assert sum("`training_step` returned `None`" in str(each.message) for each in said) == 1


def test_a_size_of_the_user_holds(fit):
    assert fit(stack_size=6)[0] == [6]


def test_a_module_that_logs_norms_of_gradients_is_stacked(fit):
    assert fit(module=LogsSlopes)[0] == [3, 3]


def test_methods_of_this_package_are_stacked(fit):
    assert fit(algorithm=FedPer)[0] == [3, 3]


@pytest.mark.parametrize("engine", ["auto", "fast"])
def test_neither_a_trial_nor_a_client_leaves_anything_in_the_lists_of_a_module(engine, fit):
    seen, longest = [], []

    def module():
        net = Reading()
        net.read, net.note = seen, longest.append
        return net

    fit(engine, module=module)
    assert seen == []
    assert max(longest) == 5


@pytest.mark.parametrize("module", [Middling, Wide])
def test_two_clients_are_a_stack_where_no_more_fit(module, fit):
    assert fit(module=module)[0] == [2, 2, 2]
