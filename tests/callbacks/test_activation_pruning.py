from __future__ import annotations

import copy
import pickle

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.callbacks import ActivationPruning, activation_pruning
from lightning_sparsefl.callbacks.activation_pruning import largest, pruning_forward
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.prune import keep_largest


@pytest.mark.parametrize("density", [0, 1.1])
def test_a_density_outside_its_range_is_refused(density):
    with pytest.raises(InvalidOption, match=rf"`ActivationPruning\(density={density}\)`: expected a number in"):
        ActivationPruning(density)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_of_a_layer_computes_with_its_own_weights(copied):
    layer, x = nn.Linear(2, 1), torch.ones(1, 2)
    layer.forward = pruning_forward(layer, 0.5)
    other = copied(layer)
    with torch.no_grad():
        before = other(x).clone()
        layer.weight.add_(1)
        assert torch.equal(other(x), before)
        assert not torch.equal(layer(x), before)


LAYERS = {
    "linear": (nn.Linear(6, 6), torch.randn(6, 6)),
    "linear of sequences": (nn.Linear(4, 3), torch.randn(2, 5, 4)),
    "linear of transposed sequences": (nn.Linear(4, 3), torch.randn(5, 2, 4).transpose(0, 1)),
    "convolution": (nn.Conv2d(2, 3, 3, padding=1), torch.randn(4, 2, 5, 5)),
}


@pytest.mark.parametrize("case", LAYERS)
def test_only_the_gradient_of_weights_is_that_of_the_largest_inputs(case):
    layer, x = LAYERS[case]
    kept = torch.where(keep_largest(x.abs(), round(0.3 * x.numel())), x, 0.0)
    grads = {}
    for name, forward, data in (("plain", layer, x), ("pruned", pruning_forward(layer, 0.3), x), ("of", layer, kept)):
        data = data.clone().requires_grad_()
        layer.zero_grad()
        out = forward(data)
        (out * torch.arange(out.numel()).view_as(out)).sum().backward()
        grads[name] = (out.detach(), data.grad, layer.weight.grad.clone(), layer.bias.grad.clone())
    for ours, plain in zip(grads["pruned"][:2], grads["plain"][:2], strict=True):
        assert torch.equal(ours, plain)
    torch.testing.assert_close(grads["pruned"][3], grads["plain"][3])
    torch.testing.assert_close(grads["pruned"][2], grads["of"][2])
    assert not torch.allclose(grads["pruned"][2], grads["plain"][2])


def test_one_input_at_least_is_kept_and_none_is_needed():
    layer = nn.Linear(2, 1, bias=False)
    pruning_forward(layer, 0.1)(torch.tensor([[1.0, 3.0]])).backward()
    assert layer.weight.grad.tolist() == [[0.0, 3.0]]
    pruning_forward(layer, 0.1)(torch.empty(0, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[0.0, 3.0]]


class Named(nn.Linear):
    """A user's layer whose input has a name of its own."""

    def forward(self, features, scale=1.0):
        return super().forward(features) * scale


def test_inputs_may_be_given_by_name():
    for kind, options in ((nn.Linear, {"input": torch.tensor([[1.0, 3.0]])}), (Named, {"scale": 2.0})):
        layer = kind(2, 1, bias=False)
        options = {"features": torch.tensor([[1.0, 3.0]]), **options} if kind is Named else options
        pruning_forward(layer, 0.5)(**options).backward()
        assert layer.weight.grad.tolist() == [[0.0, 3.0 * options.get("scale", 1.0)]]


def test_less_is_saved(monkeypatch):
    saved, hooks = [], activation_pruning.saved_tensors_hooks

    def spy(compress, decompress):
        return hooks(lambda tensor: saved.append(compress(tensor)) or saved[-1], decompress)

    monkeypatch.setattr(activation_pruning, "saved_tensors_hooks", spy)
    layer, x = nn.Linear(64, 4), torch.randn(32, 64, requires_grad=True)
    pruning_forward(layer, 0.25)(x).sum().backward()
    ((packed, values, shape),) = (each for each in saved if isinstance(each, tuple))
    assert (values.numel(), packed.numel(), shape) == (x.numel() // 4, x.numel() // 8, x.shape)
    assert any(isinstance(each, torch.Tensor) and each.numel() == layer.weight.numel() for each in saved)


def test_evaluation_saves_nothing_less():
    layer, x = nn.Linear(3, 2).eval(), torch.randn(4, 3)
    pruning_forward(layer, 0.1)(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, 3))


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(folder, *callbacks, **options):
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    quiet["enable_model_summary"] = False
    module = Net()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    trainer = L.Trainer(max_epochs=2, default_root_dir=folder, callbacks=list(callbacks), **quiet, **options)
    trainer.fit(module, DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=4))
    return module


def test_a_density_of_1_changes_nothing_and_layers_are_restored(tmp_path):
    plain, dense, sparse = fit(tmp_path), fit(tmp_path, ActivationPruning(1.0)), fit(tmp_path, ActivationPruning(0.2))
    for name, value in plain.state_dict().items():
        assert torch.equal(value, dense.state_dict()[name])
    assert any(not torch.equal(value, sparse.state_dict()[name]) for name, value in plain.state_dict().items())
    assert not any("forward" in vars(layer) for layer in sparse.modules())
    copy.deepcopy(sparse)


def test_inputs_are_found_under_autocast(tmp_path):
    plain = fit(tmp_path, precision="bf16-mixed")
    pruned = fit(tmp_path, ActivationPruning(0.2), precision="bf16-mixed")
    assert any(not torch.equal(value, pruned.state_dict()[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(nn.Linear(16, 4), (4, 16)), (nn.Linear(4, 4), (4, 4)), (nn.Conv2d(4, 4, 3, padding=1), (4, 4, 3, 3))],
)
def test_inputs_of_the_shape_of_the_weight_are_found_under_autocast(layer, shape):
    inputs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        pruning_forward(layer, 0.25)(inputs).float().sum().backward()
    found, layer.weight.grad = layer.weight.grad, None
    cast = inputs.detach().bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        layer(cast * largest(cast, 0.25)).float().sum().backward()
    assert torch.equal(found, layer.weight.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # of torch.compile
@pytest.mark.filterwarnings("ignore:Guards may run slower:RuntimeWarning")  # torch on Python 3.13.0
def test_a_compiled_network_trains_alike(net, fit):
    plain, compiled = net(), net()
    compiled.net = torch.compile(compiled.net, backend="eager")
    for module in (plain, compiled):
        fit(module, [ActivationPruning(0.3)])
    for one, other in zip(plain.parameters(), compiled.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("size", "dilation", "left"), [(2, 1, []), (4, (2, 1), []), (3, 1, [0]), (2, 2, [0])])
def test_convolutions_that_pad_one_side_more_are_left_out(size, dilation, left):
    layer = nn.Conv2d(2, 3, size, padding="same", dilation=dilation)
    assert activation_pruning.pruned_layers(nn.Sequential(layer)) == [layer for _ in left]
