"""What changes outputs while a narrow network trains: in a Trainer, and gone afterwards."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks.width import LabelMask, OutputScaler, votes_on_own_classes
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.types import Message


class Data(L.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(8, 2), torch.arange(8) % 2), batch_size=4)

    def client_label_counts(self, client):
        torch.rand(1)  # as a loader that is shuffled does
        return torch.tensor([4, 4, 0])


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(2, 4), nn.Linear(4, 3)
        self.hidden, self.logits = [], []

    def forward(self, x):
        hidden = self.first(x)
        self.hidden.append((hidden / F.linear(x, self.first.weight, self.first.bias)).detach())
        self.logits.append(self.head(hidden.relu()))
        return self.logits[-1]

    def training_step(self, batch):
        if batch[0][0, 0] > 9:
            raise RuntimeError("an interruption")
        return F.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module, data, *callbacks):
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=list(callbacks), enable_model_summary=False, **quiet)
    trainer.fit(module, data)


def test_outputs_are_divided_in_training_only():
    module = Net()
    fit(module, Data(), OutputScaler(["first"], 0.25))
    torch.testing.assert_close(torch.stack(module.hidden).cpu(), torch.full((2, 4, 4), 4.0))
    module.hidden.clear()
    module.train()(torch.randn(4, 2))
    torch.testing.assert_close(module.hidden[0], torch.ones(4, 4))


def test_logits_of_foreign_classes_are_zero_and_their_rows_stay():
    module, callback = Net(), LabelMask(["head.weight", "head.bias"], 5)
    before = module.head.weight.detach().clone()
    fit(module, Data(), callback)
    assert callback.classes.tolist() == [True, True, False]
    assert not any(logits[:, 2].any() for logits in module.logits)
    assert torch.equal(module.head.weight[2], before[2])
    assert not torch.equal(module.head.weight[0], before[0])
    assert not module.head._forward_hooks


def test_only_the_rows_of_own_classes_vote():
    module, callback = Net(), LabelMask(["head.weight", "head.bias"], 0)
    message = Message(weights=dict(module.state_dict()))
    assert votes_on_own_classes(message, [OutputScaler(["first"], 0.5)]) is None
    callback.find(Data(), module)
    votes = votes_on_own_classes(message, [callback])
    assert votes.keys() == {"head.weight", "head.bias"}
    assert votes["head.bias"].tolist() == votes["head.weight"].all(1).tolist() == [True, True, False]


def test_counting_labels_leaves_the_random_state():
    head = nn.Linear(4, 3)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    LabelMask(["head.weight", "head.bias"], 0)._own(Data(), head)
    assert torch.equal(torch.rand(1), expected)


def test_a_failed_fit_leaves_no_hook():
    class Broken(Data):
        def train_dataloader(self):
            return DataLoader(TensorDataset(torch.full((4, 2), 10.0), torch.zeros(4).long()), batch_size=4)

    module = Net()
    with pytest.raises(RuntimeError, match="an interruption"):
        fit(module, Broken(), OutputScaler(["first"], 0.5))
    assert not module.first._forward_hooks


def test_labels_that_nobody_knows_are_asked_for():
    with pytest.raises(InvalidOption, match="`Linear` has no `client_label_counts`"):
        LabelMask(["head.weight", "head.bias"], 0)._own(nn.Linear(1, 1), nn.Linear(4, 3))


def test_a_head_with_too_few_outputs_is_refused():
    with pytest.raises(InvalidOption, match="`head` puts out 2 logits, expected 3 classes"):
        LabelMask(["head.weight", "head.bias"], 0)._own(Data(), nn.Linear(4, 2))


def test_a_head_that_is_an_embedding_is_refused():
    with pytest.raises(InvalidOption, match="needs the layer that outputs the logits, but `head` is an embedding"):
        LabelMask(["head.weight"], 0)._own(Data(), nn.Embedding(4, 2))


def test_a_parametrized_head_is_found():
    head = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, bias=False))
    names = [name for name, _ in nn.ModuleDict({"head": head}).named_parameters()]
    assert LabelMask(names, 0).layers == ("head",)


class Beside(nn.Module):
    """Weights beside a layer, whose output is not that of the weights."""

    def __init__(self):
        super().__init__()
        self.weight, self.last = nn.Parameter(torch.randn(4, 6)), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(torch.relu(x @ self.weight))


@pytest.mark.parametrize(
    ("module", "name", "told"),
    [(Beside(), "", "`Beside` has weights"), (nn.Sequential(Beside()), "0", "`0` has weights")],
)
def test_outputs_of_a_module_with_other_layers_are_not_scaled(module, name, told):
    scaler = OutputScaler([name], 0.5)
    with pytest.raises(InvalidOption, match=f"`algorithm.scaler` scales the outputs of layers, but {told}"):
        scaler.register(module)


def test_outputs_of_parametrized_layers_are_scaled():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2, bias=False))
    net, x = nn.Sequential(module), torch.randn(1, 3)
    before = net(x)
    OutputScaler(["0"], 0.5).register(net)
    torch.testing.assert_close(net(x), 2 * before)
