import pytest
import torch
from torch import nn

from lightning_sparsefl.errors import IncompatibleMasks, InvalidOption
from lightning_sparsefl.federated.exchange.flat import FlatModule


def network():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_weights_are_parameters_then_float_buffers():
    module = network()
    layout = FlatModule(module).layout
    assert layout.names[-2:] == ("1.running_mean", "1.running_var")
    assert layout.buffers == {"1.running_mean", "1.running_var"}  # the counter is an integer: not a weight
    assert layout.size == sum(parameter.numel() for parameter in module.parameters()) + 8


def test_parameters_of_whole_numbers_are_no_weights():
    module = network()
    module.codes = nn.Parameter(torch.tensor([2**24 + 1, 3]), requires_grad=False)
    flat = FlatModule(module)
    assert "codes" not in flat.layout.names
    flat.load({name: tensor + 1 for name, tensor in flat.read().items()})
    assert module.codes.tolist() == [2**24 + 1, 3]


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [
        (torch.eye(3).to_sparse(), "sparse_coo"),
        (torch.eye(3).long().to_sparse(), "sparse_coo"),
        (torch.eye(3).to(torch.float8_e4m3fn), "float8_e4m3fn"),
    ],
    ids=["sparse", "sparse integers", "float8"],
)
def test_tensors_that_no_vector_holds_are_refused(tensor, kind):
    module = network()
    module.register_buffer("graph", tensor)
    with pytest.raises(InvalidOption, match=rf"`graph` of the model is {kind}; expected a dense one, of 16 bits"):
        FlatModule(module)
    module = network()
    module.register_buffer("graph", tensor, persistent=False)
    assert "graph" not in FlatModule(module).layout.names


def test_a_swap_changes_what_the_module_computes_and_reading_copies():
    module = network().eval()
    flat = FlatModule(module)
    first = flat.read()
    x = torch.randn(5, 3)
    before = module(x)
    flat.load({name: tensor + 1 for name, tensor in first.items()})
    assert not torch.equal(module(x), before)
    flat.load(first)
    assert torch.equal(module(x), before)
    with torch.no_grad():
        module[0].weight.zero_()
    assert first["0.weight"].abs().sum() > 0


def test_training_in_place_is_seen_by_the_vector():
    module = network()
    flat = FlatModule(module)
    before = flat.vector.clone()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    module(torch.randn(8, 3)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(flat.vector, before)
    assert torch.equal(flat.read()["1.running_mean"], module[1].running_mean)


def test_data_that_training_assigned_anew_is_followed():
    module = network()
    flat = FlatModule(module)
    module[0].weight.data = torch.full((4, 3), 7.0)
    module[1].running_mean = torch.full((4,), 5.0)
    read = flat.read()
    assert read["0.weight"].eq(7).all()
    assert read["1.running_mean"].eq(5).all()
    flat.load({name: tensor * 0 for name, tensor in read.items()})
    assert module[0].weight.eq(0).all()
    assert module[1].running_mean.eq(0).all()


def test_trees_of_another_dtype_are_refused_but_may_be_loaded():
    flat = FlatModule(network())
    doubled = {name: tensor.double() for name, tensor in flat.read().items()}
    words = r"^A tree holds '0\.weight' as torch\.float64; expected torch\.float32\.$"
    with pytest.raises(IncompatibleMasks, match=words):
        flat.layout.check(doubled, "A tree")
    flat.layout.check({name: tensor > 0 for name, tensor in doubled.items()}, "A mask", torch.bool)
    flat.load(doubled)
    assert flat.read()["0.weight"].dtype == torch.float32


@pytest.mark.parametrize("mixed", [False, True])
def test_a_shape_that_training_changed_is_refused_once(mixed):
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double()) if mixed else network()
    flat = FlatModule(module)
    before = flat.read()
    module[0].weight.data = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"changed the shape of '0.weight' from \(4, 3\) to \(2, 3\)"):
        flat.read()
    assert flat.read().keys() == before.keys()
    module[0].weight.data = torch.zeros(2, 3)
    flat.load(before)
    assert torch.equal(module[0].weight, before["0.weight"])
    assert torch.equal(flat.read()["0.weight"], before["0.weight"])


def test_a_vector_of_two_half_precisions_holds_the_values_of_both():
    module = nn.Sequential(nn.Linear(1, 1, dtype=torch.float16), nn.Linear(1, 1, dtype=torch.bfloat16))
    with torch.no_grad():
        module[0].weight.fill_(1 + 2**-10)  # which bfloat16 rounds
        module[1].weight.fill_(2.0**100)  # which is infinite in float16
    read = FlatModule(module).read()
    assert (float(read["0.weight"]), float(read["1.weight"])) == (1 + 2**-10, 2.0**100)
    assert (read["0.weight"].dtype, read["1.weight"].dtype) == (torch.float16, torch.bfloat16)


def test_mixed_precision_parameters_keep_their_dtypes():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    flat = FlatModule(module)
    read = flat.read()
    assert read["0.weight"].dtype == torch.float32
    assert read["1.weight"].dtype == torch.float64
    flat.load({name: tensor + 1 for name, tensor in read.items()})
    torch.testing.assert_close(module[1].weight, read["1.weight"] + 1)


def test_a_module_without_trainable_parameters_is_refused():
    with pytest.raises(InvalidOption, match="`Flatten` has no trainable parameter"):
        FlatModule(nn.Flatten())


def test_renamed_parameters_are_refused():
    module = network()
    flat = FlatModule(module)
    weight = module[0].weight
    del module[0].weight
    module[0].weight_orig = weight
    with pytest.raises(InvalidOption, match=r"renamed '0\.weight'"):
        flat.read()
