"""A shrunk module computes what the module with zeros does, and is refused where it could not."""

from __future__ import annotations

import copy
import importlib.util

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl import callbacks, models
from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.sparse import shrink
from lightning_sparsefl.sparse.masks import apply
from lightning_sparsefl.sparse.unit_removal import difference
from lightning_sparsefl.sparse.units import find_groups, keep_units, unit_counts, unit_masks

IMAGE = (3, 32, 32)
NETS = {
    "MLP": lambda: (models.MLP(sample_shape=(1, 8, 8), hidden=(32, 16)), torch.randn(2, 1, 8, 8)),
    "LeNet5": lambda: (models.LeNet5(), torch.randn(2, 1, 28, 28)),
    "LanguageLSTM": lambda: (models.LanguageLSTM(50, embedding=8, hidden=16, tied=False), torch.randint(50, (2, 5))),
    "VGG11": lambda: (models.VGG11(), torch.randn(2, *IMAGE)),
    "VGG11, batch norm": lambda: (models.VGG11(norm="batch"), torch.randn(2, *IMAGE)),
    "ResNet18": lambda: (models.ResNet18(), torch.randn(2, *IMAGE)),
    "ResNet18, batch norm": lambda: (models.ResNet18(norm="batch"), torch.randn(2, *IMAGE)),
    "MobileNet": lambda: (models.MobileNet(), torch.randn(2, *IMAGE)),
}
QUICK = ("MLP", "LeNet5", "LanguageLSTM", "ResNet18")


def pruned(module, inputs, density=0.5):
    """A copy in double precision, half of whose units are zeros, and the inputs."""
    module = module.double().eval()
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    groups, rng = find_groups(module, inputs), torch.Generator().manual_seed(0)
    ranking = {group.name: torch.rand(group.size, generator=rng) for group in groups}
    kept = keep_units(ranking, unit_counts(groups, density))
    for group in groups:  # as many hidden units in each layer of an LSTM
        assert int(kept[group.name].sum()) == unit_counts([group], density)[group.name]
    weights = module.state_dict()
    module.load_state_dict(apply(weights, unit_masks(groups, kept, weights)))
    return module, inputs


def parameters(module):
    return sum(value.numel() for value in module.parameters())


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NETS]
)
def test_outputs_are_those_of_the_module_with_zeros(name):
    torch.manual_seed(0)
    module, inputs = pruned(*NETS[name]())
    before = copy.deepcopy(module.state_dict())
    small = shrink(module, inputs)
    with torch.no_grad():
        torch.testing.assert_close(small(inputs), module(inputs), rtol=0, atol=1e-10)
    assert parameters(small) < 0.6 * parameters(module)
    assert list(small.state_dict()) == list(before)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def small_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(4, 3)


def test_a_module_without_zeros_is_copied():
    module, inputs = small_net()
    small = shrink(module, inputs)
    assert small is not module
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in small.state_dict().items())


def test_units_to_keep_may_be_given():
    module, inputs = small_net()
    keep = {"0": torch.tensor([True, False, True, False, False, True])}
    small = shrink(module, inputs, keep=keep)
    assert small[0].weight.shape == (3, 3)
    assert torch.equal(small[2].weight, module[2].weight[:, keep["0"]])


def test_a_threshold_removes_units_that_are_only_small():
    module, inputs = small_net()
    with torch.no_grad():
        module[0].weight[2:] *= 1e-6
        module[2].weight[:, 2:] *= 1e-6
    assert shrink(module, inputs)[0].out_features == 6
    small = shrink(module, inputs, threshold=1e-4)
    assert small[0].out_features == 2
    torch.testing.assert_close(small(inputs), module(inputs), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning")
def test_it_shrinks_what_a_callback_has_trained_in_a_plain_trainer(tmp_path):
    torch.manual_seed(0)
    module = models.MLP(sample_shape=(1, 8, 8), num_classes=4, hidden=(16,))
    data = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(4, (64,)))
    L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callbacks.LearnedImportance(density=0.5, refresh="round")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    ).fit(module, DataLoader(data, batch_size=64, num_workers=0))
    module.eval()
    small = shrink(module, data.tensors[0][:1])
    assert sorted(value.shape[0] for value in small.parameters() if value.dim() > 1) == [4, 8]
    torch.testing.assert_close(small(data.tensors[0]), module(data.tensors[0]))


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript")), reason="the extra `onnx`"
)
@pytest.mark.filterwarnings("ignore")
def test_a_shrunk_module_is_exported_to_onnx(tmp_path):
    from onnx.reference import ReferenceEvaluator

    module, inputs = pruned(*NETS["MLP"]())
    small, inputs = shrink(module, inputs).float(), inputs.float()
    torch.onnx.export(small, (inputs,), tmp_path / "small.onnx", dynamo=True, verbose=False)
    session = ReferenceEvaluator(str(tmp_path / "small.onnx"))
    (outputs,) = session.run(None, {session.input_names[0]: inputs.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), module.float()(inputs).detach(), rtol=0, atol=1e-5)


class Softmaxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.two(torch.softmax(self.one(inputs), 1))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(3, 4, num_layers=2), nn.Linear(4, 2)

    def forward(self, inputs):
        return self.fc(self.lstm(inputs)[0])


def test_what_cannot_be_shrunk_is_refused_in_a_sentence():
    with pytest.raises(InvalidOption, match=r"^`Softmaxed` has no units that can be removed; expected .*\.$"):
        shrink(Softmaxed(), torch.zeros(1, 3))
    with pytest.raises(InvalidOption, match=r"^`Linear` has no units"):
        shrink(nn.Linear(3, 2), torch.zeros(1, 3))
    net = nn.Sequential(nn.Linear(3, 4), nn.InstanceNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InvalidOption, match=r"can be masked but not cut: .*`ignore=\['\w+'\]`|no units"):
        shrink(net, torch.zeros(1, 4, 3), keep={"0": torch.tensor([True, False, True, True])})
    groups = find_groups(Stacked(), torch.zeros(2, 1, 3))
    keep = {groups[0].name: torch.tensor([True, False, True, True])}
    with pytest.raises(InvalidOption, match=r"would keep \[3, 4\] hidden units in its layers, expected as many in"):
        shrink(Stacked(), torch.zeros(2, 1, 3), keep=keep)


class Scale(nn.Module):
    """A layer with a state that is neither a parameter nor a buffer."""

    def __init__(self):
        super().__init__()
        self.options = {"factor": 2.0}

    def forward(self, x):
        return x * self.options["factor"]

    def get_extra_state(self):
        return self.options

    def set_extra_state(self, state):
        self.options = state


def test_a_layer_with_extra_state_stays_as_it_is():
    net = nn.Sequential(nn.Linear(3, 4), Scale(), nn.Linear(4, 2))
    small = shrink(net, torch.ones(1, 3), keep={"0": torch.tensor([True, False, True, True])})
    assert small[0].out_features == 3
    assert small[1].get_extra_state() == {"factor": 2.0}


@pytest.mark.parametrize("options", [{"threshold": -1.0}, {"threshold": float("nan")}, {"ignore": ["nowhere"]}])
def test_options_are_checked(options):
    module, inputs = small_net()
    with pytest.raises(InvalidOption, match=next(iter(options))):
        shrink(module, inputs, **options)


def test_units_are_checked():
    module, inputs = small_net()
    with pytest.raises(IncompatibleMasks, match="is not a group of units"):
        shrink(module, inputs, keep={"1": torch.ones(6, dtype=torch.bool)})
    with pytest.raises(InvalidOption, match="both say which units stay"):
        shrink(module, inputs, keep={}, threshold=0.1)


class ByWidth(nn.Module):
    """Divides by the root of a width."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.a(x).relu()
        return {"out": self.b(hidden / hidden.shape[-1] ** 0.5)}


class Reshaped(nn.Module):
    """Gives its units a fixed shape."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.a(x).relu()
        return self.b(hidden.view(len(x), 8))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (ByWidth, "the units, `ByWidth` computes something else on the example inputs, since its `forward` depends"),
        (Reshaped, r"Without the units, `Reshaped` fails on the example inputs \(RuntimeError: .*set `ignore`"),
    ],
)
def test_a_forward_pass_that_depends_on_a_width_is_refused(kind, message):
    module, x = kind(), torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    (group,) = find_groups(module, x)
    keep = {group.name: torch.arange(8) < 4}
    with pytest.raises(InvalidOption, match=message):
        shrink(module, x, keep=keep)
    module.load_state_dict(apply(module.state_dict(), unit_masks([group], keep, module.state_dict())))
    with pytest.raises(InvalidOption, match=message):
        shrink(module, x)


def test_a_forward_pass_that_draws_random_numbers_is_not_compared():
    class Noisy(ByWidth):
        def forward(self, x):
            return self.b(nn.functional.dropout(self.a(x).relu(), 0.5, training=True))

    module, x, state = Noisy(), torch.ones(3, 6), torch.get_rng_state()
    (group,) = find_groups(module, x)
    torch.set_rng_state(state)
    small = shrink(module, x, keep={group.name: torch.arange(8) < 4})
    assert small.a.out_features == 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_a_difference_is_noticed_too(dtype):
    module, x = ByWidth().to(dtype), torch.randn(32, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    with pytest.raises(InvalidOption, match="computes something else on the example inputs"):
        shrink(module, x, keep={"a": torch.arange(8) < 4})
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).to(dtype)
    assert shrink(net, x, keep={"0": torch.arange(8) < 4})[0].out_features == 4


@pytest.mark.parametrize(("other", "differs"), [(-1000.1, False), (-1000.2, True)])
def test_outputs_may_differ_by_rounding_of_the_largest(other, differs):
    """By 1000 units in the last place, which are 0.119 for 1000 in float32."""
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for net, weight in zip(nets, (-1000.0, other), strict=True):
        nn.init.constant_(net.weight, weight)
    assert (difference(*nets, {}, (torch.ones(1, 1),)) is not None) == differs
