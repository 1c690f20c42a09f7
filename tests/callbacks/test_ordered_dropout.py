"""Ordered dropout: a step on a rate is a step of the narrow network, and the draws are fair."""

from __future__ import annotations

import copy
import pickle
from collections import Counter

import lightning as L
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import OrderedDropout
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.submodel import cut, widen
from lightning_sparsefl.sparse.units import find_groups
from lightning_sparsefl.sparse.width import prefix_units

pytestmark = pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")


class Residual(nn.Module):
    def __init__(self, width, groups):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(groups, width)

    def forward(self, x):
        return x + F.softplus(self.norm(self.conv(x)))


NETS = {
    "linear": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 5), nn.ReLU(), nn.Linear(5, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)
    ),
    "group norm": lambda: nn.Sequential(
        nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3)
    ),
    "residual": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 3), Residual(6, 3), nn.Conv2d(6, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(5, 3)
    ),
    "depthwise": lambda: nn.Sequential(
        nn.Conv2d(2, 6, 1), nn.ReLU(), nn.Conv2d(6, 6, 3, groups=6), nn.Flatten(), nn.Linear(24, 3)
    ),
}


class Module(L.LightningModule):
    def __init__(self, net, manual=False):
        super().__init__()
        self.net, self.automatic_optimization, self.losses = net, not manual, []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return F.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"].detach()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def batch(seed=0):
    x = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(seed))
    return x, x.mean((1, 2, 3)).gt(0).long()


def fit(module, *callbacks, batches=1, batch_size=4, **options):
    x, y = (torch.cat(parts) for parts in zip(*(batch(seed) for seed in range(batches)), strict=True))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=1, callbacks=list(callbacks), enable_checkpointing=False, **quiet, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=batch_size))
    return module


def made(name):
    """A module, its groups of units, and a copy of its weights."""
    torch.manual_seed(0)
    module = Module(NETS[name]())
    for norm in module.modules():  # so that a dropped unit's norm is not zero by itself
        if isinstance(norm, nn.BatchNorm2d | nn.GroupNorm):
            nn.init.normal_(norm.bias)
    return module, find_groups(module, torch.zeros(1, 2, 4, 4)), weights_of(module, copied=True)


def weights_of(module, copied=False):
    return {name: value.detach().clone() if copied else value for name, value in module.named_parameters()}


@pytest.mark.parametrize("rate", [0.3, 0.5])
@pytest.mark.parametrize("name", NETS)
def test_a_step_is_that_of_the_narrow_network(name, rate):
    wide, groups, before = made(name)
    kept = prefix_units(groups, rate)
    narrow = cut(wide, groups, kept)
    fit(narrow, L.Callback())
    fit(wide, OrderedDropout([rate]))
    assert wide.losses == pytest.approx(narrow.losses, abs=1e-6)
    expected = widen(weights_of(narrow), groups, kept, before)
    for key, value in wide.named_parameters():
        assert torch.allclose(value, expected[key], atol=1e-6), key
    assert max(float((value.detach() - before[key]).abs().max()) for key, value in wide.named_parameters()) > 1e-3


@pytest.mark.parametrize("name", ["linear", "batch norm", "residual", "depthwise"])
def test_a_cut_module_trains_as_the_whole_one_under_its_largest_rate(name):
    """The groups are those of the full module, and so are the numbers that rates refer to."""
    wide, groups, before = made(name)
    kept = prefix_units(groups, 0.7)
    narrow = cut(wide, groups, kept)
    for module in (narrow, wide):
        fit(module, OrderedDropout([0.4, 0.7], seed=1, groups=groups), batches=6)
    expected = widen(weights_of(narrow), groups, kept, before)
    for key, value in wide.named_parameters():
        assert torch.allclose(value, expected[key], atol=1e-5), key
    assert wide.losses == pytest.approx(narrow.losses, abs=1e-5)


def test_of_the_rates_each_is_drawn_equally_often():
    callback = OrderedDropout([0.25, 0.5, 1.0], seed=3)
    counts = Counter(callback.draw(number) for number in range(3000))
    assert set(counts) == {0.25, 0.5, 1.0}
    assert all(abs(count - 1000) < 4 * (3000 * 2 / 9) ** 0.5 for count in counts.values())
    assert [callback.draw(number) for number in range(20)] != [
        OrderedDropout([0.25, 0.5, 1.0]).draw(n) for n in range(20)
    ]


def test_one_rate_serves_all_batches_of_a_step():
    seen = []

    class Watch(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            seen.append(callback.state_dict()["rate"])

    callback = OrderedDropout([0.2, 0.4, 0.6, 0.8, 1.0], seed=4)
    x, y = (torch.cat(parts) for parts in zip(*(batch(seed) for seed in range(12)), strict=True))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(
        max_epochs=1, callbacks=[callback, Watch()], accumulate_grad_batches=3, enable_checkpointing=False, **quiet
    )
    trainer.fit(made("linear")[0], DataLoader(TensorDataset(x, y), batch_size=4))
    assert seen == [callback.draw(step) for step in range(4) for _ in range(3)]


def test_a_resume_between_the_batches_of_a_step_keeps_its_rate():
    callback, state = OrderedDropout([0.25, 0.5, 1.0]), {"drawn": 3, "rate": 0.5, "stepped": False}
    callback.load_state_dict(state)
    assert callback.state_dict() == state


def test_the_largest_network_teaches_the_drawn_one():
    """The gradient is that of CE at rate 1 plus the soft cross-entropy of the narrow network."""
    module, groups, before = made("linear")
    kept, (x, y) = prefix_units(groups, 0.5), batch()
    small = cut(module, groups, kept)
    logits = module(x)
    F.cross_entropy(logits, y).backward()
    soft = -(logits.detach().softmax(1) * small(x).log_softmax(1)).sum(1).mean()
    slopes = dict(zip(dict(small.named_parameters()), torch.autograd.grad(soft, list(small.parameters())), strict=True))
    zeros = {key: torch.zeros_like(value) for key, value in before.items()}
    taught = widen(slopes, groups, kept, zeros)
    expected = {key: before[key] - 0.1 * (value.grad + taught[key]) for key, value in module.named_parameters()}
    module.zero_grad()

    class Narrow(OrderedDropout):
        def draw(self, number):
            return 0.5

    fit(module, Narrow([0.5, 1.0], distill=True))
    for key, value in module.named_parameters():
        assert torch.allclose(value, expected[key], atol=1e-6), key


def test_a_head_that_the_step_does_not_call_is_named():
    module = made("linear")[0]
    module.projection = nn.Linear(2, 2)  # of `predict_step`
    with pytest.raises(InvalidOption, match=r"finds no logits, since .* does not call `projection`"):
        fit(module, OrderedDropout([0.5, 1.0], distill=True))


def test_two_processes_step_as_one_does_on_the_batch_of_both(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "NODE_RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    one, two = (made("linear")[0] for _ in range(2))
    callback = OrderedDropout([0.4, 1.0], distill=True)
    assert callback.draw(0) == 0.4  # at 1.0 there is nothing to teach
    fit(one, callback, devices=1)
    fit(two, callback, batch_size=2, devices=2, strategy="ddp_fork")
    for key, value in one.named_parameters():
        assert torch.allclose(value, two.get_parameter(key), atol=1e-6), key


def test_all_units_are_there_in_evaluation_and_after_the_fit():
    module = fit(made("linear")[0], OrderedDropout([0.2]))
    x, _ = batch()
    assert torch.equal(module.train()(x), module.eval()(x))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in module.modules())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
@pytest.mark.parametrize("distill", [False, True])
def test_module_and_callback_can_be_copied_within_a_fit(distill, copied):
    class Copies(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            self.module, self.callback = copied(pl_module), copied(callback)

    module, callback, copies = Module(NETS["linear"]()), OrderedDropout([0.5, 0.75], distill=distill), Copies()
    fit(module, callback, copies, batches=2)
    x, _ = batch()
    assert torch.equal(copies.module.eval()(x), module.eval()(x))
    assert torch.equal(copies.module.train()(x), module(x)) == (copied is not copy.deepcopy)
    assert copies.callback.state_dict() == callback.state_dict()
    again = [fit(made("linear")[0], each, batches=2).state_dict() for each in (callback, copies.callback)]
    assert all(torch.equal(value, again[1][name]) for name, value in again[0].items())


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(
        InvalidOption, match=r"`OrderedDropout\(rates=\[\]\)`: expected one or more numbers in \(0, 1\]"
    ):
        OrderedDropout([])
    with pytest.raises(InvalidOption, match=r"`OrderedDropout\(rates=\[0.5, 1.5\]\)`: expected one or more numbers"):
        OrderedDropout([0.5, 1.5])
    with pytest.raises(InvalidOption, match="finds no units in `Module`"):
        fit(Module(nn.Sequential(nn.Flatten(), nn.Linear(32, 3))), OrderedDropout())
    with pytest.raises(InvalidOption, match=r"`OrderedDropout\(distill=True\)` does not support `Module`"):
        fit(Module(NETS["linear"](), manual=True), OrderedDropout(distill=True))
    with pytest.raises(
        InvalidOption, match=r"units of `Module` cannot be found in its training step, since it optimizes"
    ):
        fit(Module(NETS["linear"](), manual=True), OrderedDropout())


def test_a_refused_module_keeps_its_forward_pass():
    module = made("linear")[0]
    module.net = torch.compile(module.net, backend="eager")
    with pytest.raises(InvalidOption, match="compiled"):
        fit(module, OrderedDropout([0.5, 1.0]))
    assert "forward" not in vars(module)


def test_accumulated_batches_teach_as_much_as_one():
    x, y = batch()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    modules = []
    for count in (1, 2):
        module = made("linear")[0]
        loader = DataLoader(TensorDataset(x.repeat(count, 1, 1, 1), y.repeat(count)), batch_size=4)
        dropout = OrderedDropout([0.5, 1.0], distill=True)
        trainer = L.Trainer(
            max_epochs=1, callbacks=[dropout], accumulate_grad_batches=count, enable_checkpointing=False, **quiet
        )
        trainer.fit(module, loader)
        modules.append(module)
    for one, two in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=1e-6)


class Named(nn.Module):
    """Passes the input of a layer by its name."""

    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(32, 9), nn.Linear(9, 3)

    def forward(self, x):
        return self.out(input=torch.tanh(self.hidden(input=x.flatten(1))))


def test_arguments_by_name_are_gated_too(monkeypatch):
    monkeypatch.setitem(NETS, "named", Named)
    wide, groups, _ = made("named")
    narrow = cut(wide, groups, prefix_units(groups, 0.5))
    fit(narrow, L.Callback())
    fit(wide, OrderedDropout([0.5]))
    assert wide.losses == pytest.approx(narrow.losses, abs=1e-6)


class Block(nn.Module):
    """Has the weights of two products itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Parameter(torch.randn(9, 32)), nn.Parameter(torch.randn(32, 9))
        self.out = nn.Linear(32, 3)

    def forward(self, x):
        x = x.flatten(1)
        return self.out(x + F.linear(torch.tanh(F.linear(x, self.inner)), self.outer))


def test_units_between_weights_that_are_no_layers_are_refused():
    words = r"cannot drop units that `net`, a `Block`, has or reads with a weight of its own; expected linear"
    with pytest.raises(InvalidOption, match=words):
        fit(Module(Block()), OrderedDropout([0.5]))
