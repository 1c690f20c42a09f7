"""Training of the first blocks: the exits' losses, what they teach each other, and what is refused."""

from __future__ import annotations

from functools import partial

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from helpers.networks import Classifier, EarlyExits
from lightning_sparsefl import DepthFL, FederatedTrainer, Federation
from lightning_sparsefl.callbacks import exits
from lightning_sparsefl.data import FederatedBlobs
from lightning_sparsefl.errors import InvalidOption

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


class Net(EarlyExits):
    """Without dropout and norms, with a plain optimizer, and with exits that differ."""

    def __init__(self, seed=1):
        torch.manual_seed(seed)
        super().__init__()
        self.net["first"][1], self.net["second"][0] = torch.nn.Identity(), torch.nn.Identity()
        for name in ("one", "two"):
            torch.nn.init.normal_(self.net[name].weight)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def data(batches=1):
    x = torch.randn(6 * batches, 8, generator=torch.Generator().manual_seed(0))
    return x, x[:, :4].argmax(1)


def fit(module, callback, batches=1, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, DataLoader(TensorDataset(*data(batches)), batch_size=6))
    return module


def objective(logits, y, strength):
    """The sum of the losses, and of what each exit learns from the others."""
    total = sum(F.cross_entropy(own, y) for own in logits)
    for i, own in enumerate(logits):
        for j, other in enumerate(logits):
            if i != j:
                target = other.detach().softmax(1) + 1e-7
                kl = F.kl_div(own.log_softmax(1), target, reduction="batchmean")
                total = total + strength / (len(logits) - 1) * kl
    return total


def taught(logits, y, strength):
    """The weighted sum of the losses, and of what the others learn from the last exit."""
    scale = 2 / (len(logits) * (len(logits) + 1))
    total = sum(place * scale * F.cross_entropy(own, y) for place, own in enumerate(logits, start=1))
    for place, own in enumerate(logits[:-1], start=1):
        shares, target = (own / 1.5).log_softmax(1), (logits[-1] / 1.5).softmax(1)
        total = total + strength * place * scale * 1.5**2 * F.kl_div(shares, target, reduction="none").mean()
    return total


OBJECTIVES = {
    "mutual": (objective, exits.EarlyExits),
    "taught": (taught, partial(exits.TaughtExits, temperature=1.5)),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
@pytest.mark.parametrize("strength", [0.0, 0.3])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_descends_the_exits_common_objective(depth, strength, accumulate, kind):
    objective, callback = OBJECTIVES[kind]
    module = Net()
    module.depth = depth
    x, y = data(accumulate)
    parts = zip(x.split(6), y.split(6), strict=True)
    loss = sum(objective(module.logits(own), labels, strength) for own, labels in parts) / accumulate
    names = [name for name, _ in module.named_parameters()]
    slopes = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
    expected = {
        name: value.detach() - (0 if slope is None else 0.1 * slope)
        for (name, value), slope in zip(module.named_parameters(), slopes, strict=True)
    }
    module.depth = 2
    fit(module, callback(depth, strength), accumulate, accumulate_grad_batches=accumulate)
    for name in names:
        assert torch.allclose(module.get_parameter(name), expected[name], atol=1e-6), name
    assert module.depth == 2
    assert not any(layer._forward_hooks for layer in module.modules())


def test_deeper_blocks_are_not_computed():
    module, before = Net(), Net().state_dict()
    fit(module, exits.EarlyExits(1))
    same = {name: torch.equal(value, before[name]) for name, value in module.state_dict().items()}
    assert {name for name, equal in same.items() if equal} == {
        n for n in same if n.startswith(("net.second", "net.two"))
    }


def test_a_failed_fit_leaves_the_module_as_it_was():
    class Fail(L.Callback):
        def on_train_batch_end(self, *_):
            raise RuntimeError("failed")

    module, callback = Net(), exits.EarlyExits(1)
    trainer = L.Trainer(
        max_epochs=1,
        callbacks=[callback, Fail()],
        enable_checkpointing=False,
        logger=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RuntimeError, match="failed"):
        trainer.fit(module, DataLoader(TensorDataset(*data()), batch_size=6))
    assert module.depth == 2
    assert not any(layer._forward_hooks for layer in module.modules())


def test_modules_without_exits_are_refused():
    expected = "trains models with early exits, but `Classifier` has none; expected a module with `exits`"
    with pytest.raises(InvalidOption, match=expected):
        exits.require_exits(Classifier(), "DepthFL")
    module = EarlyExits()
    module.exits = {"net.first": "net.three"}
    with pytest.raises(InvalidOption, match=r"`EarlyExits.exits` names `net.three`, which is not a module"):
        exits.require_exits(module, "DepthFL")


@pytest.mark.parametrize(
    ("exit", "message"),
    [
        ("net.one", r"`EarlyExits.exits` is \{.*\}; expected an exit of its own for each block"),
        (torch.nn.LogSoftmax(-1), "`net.two` of `EarlyExits` ends with LogSoftmax; expected its linear layer"),
        (torch.nn.BatchNorm1d(4), "ends with BatchNorm1d"),
    ],
)
def test_exits_whose_logits_cannot_be_chosen_are_refused(exit, message):
    module = EarlyExits()
    if isinstance(exit, str):
        module.exits["net.second"] = exit
    else:
        module.net["two"] = torch.nn.Sequential(torch.nn.Sequential(module.net["two"], exit))
    with pytest.raises(InvalidOption, match=message):
        exits.require_exits(module, "DepthFL")


def test_a_block_that_ends_without_parameters_is_refused():
    """Nothing would say which tensors come after it."""
    module = EarlyExits()
    module.exits = {"net.first.2": "net.one", "net.second": "net.two"}
    with pytest.raises(InvalidOption, match=r"names `net.first.2` as the last module of a block, but it has no param"):
        exits.require_exits(module, "DepthFL")


class SharedNorm(EarlyExits):
    """Both exits read a norm that is created last."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(16)

    def logits(self, x):
        hidden = self.net["first"](x.flatten(1))
        found = [self.net["one"](self.norm(hidden))]
        return found if self.depth == 1 else [*found, self.net["two"](self.norm(self.net["second"](hidden)))]


@pytest.mark.parametrize("engine", ["trainer", "fast", "stacked"])
def test_a_layer_of_all_networks_that_is_created_last_is_refused(engine, tmp_path):
    federation = Federation(clients_per_round=2, capacities=[0.5, 1.0], local_engine=engine)
    quiet = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "default_root_dir": str(tmp_path)}
    trainer = FederatedTrainer(algorithm=DepthFL(), federation=federation, max_rounds=2, seed=0, **quiet)
    with pytest.raises(InvalidOption, match="`norm` runs in the network of the first block, but belongs to"):
        trainer.fit(SharedNorm(), FederatedBlobs(num_clients=2, num_classes=4, dim=8, val_fraction=0.2))
