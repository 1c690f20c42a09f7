from __future__ import annotations

import warnings
from itertools import pairwise

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_sparsefl.cost import count_layers, forward_flops, narrow_biases, training_flops
from lightning_sparsefl.types import LayerFlops


def facts(module, sample):
    return {layer.weight: (layer.macs, layer.bias) for layer in count_layers(module, sample)}


def test_convolutions_by_hand():
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8, bias=False),
        nn.BatchNorm2d(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    assert facts(net, torch.zeros(1, 3, 10, 10)) == {
        "0.weight": (8 * 3 * 9 * 100, 8 * 100),
        "4.weight": (8 * 9 * 9, 0),
        "8.weight": (40, 5),
    }


@pytest.mark.parametrize("padding", ["same", "valid"])
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (lambda padding: nn.Conv2d(4, 8, 3, padding=padding), (6, 6)),
        (lambda padding: nn.Conv2d(4, 8, 3, groups=2, dilation=2, padding=padding), (9, 7)),
        (lambda padding: nn.Conv1d(4, 2, 5, padding=padding, bias=False), (11,)),
        (lambda padding: nn.Conv3d(4, 2, 3, padding=padding), (4, 5, 6)),
    ],
    ids=["2d", "grouped and dilated", "1d", "3d"],
)
def test_a_padding_that_is_a_word_counts_as_its_number(layer, size, padding):
    named = layer(padding)
    numbers = tuple(d * (k - 1) // 2 for d, k in zip(named.dilation, named.kernel_size, strict=True))
    plain = layer(numbers if padding == "same" else 0)
    counted = facts(plain, torch.zeros(1, 4, *size))
    assert facts(named, torch.zeros(1, 4, *size)) == counted
    assert counted["weight"][0] > 0


def test_a_transposed_and_a_one_dimensional_convolution():
    up = nn.ConvTranspose2d(4, 6, 2, stride=2)
    assert facts(up, torch.zeros(1, 4, 5, 5)) == {"weight": (4 * 6 * 4 * 25, 6 * 100)}
    assert facts(nn.Conv1d(2, 3, 5), torch.zeros(1, 2, 14)) == {"weight": (3 * 2 * 5 * 10, 30)}


def test_a_linear_layer_on_a_sequence():
    assert facts(nn.Linear(4, 7), torch.zeros(1, 9, 4)) == {"weight": (9 * 28, 9 * 7)}


@pytest.mark.parametrize(("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)])
def test_recurrent_layers_count_every_time_step(kind, gates):
    net = kind(5, 6, num_layers=2, bidirectional=True, batch_first=True)
    counted = facts(net, torch.zeros(1, 9, 5))
    assert counted["weight_ih_l0"] == (gates * 6 * 5 * 9, gates * 6 * 9)
    assert counted["weight_hh_l0_reverse"] == (gates * 6 * 6 * 9, gates * 6 * 9)
    assert counted["weight_ih_l1"] == (gates * 6 * 12 * 9, gates * 6 * 9)
    assert len(counted) == 8


def test_other_forms_of_recurrence():
    projected = facts(nn.LSTM(5, 6, proj_size=2, bias=False), torch.zeros(9, 1, 5))
    assert projected == {"weight_ih_l0": (24 * 5 * 9, 0), "weight_hh_l0": (24 * 2 * 9, 0), "weight_hr_l0": (12 * 9, 0)}
    assert facts(nn.LSTMCell(5, 6), torch.zeros(1, 5)) == {"weight_ih": (120, 24), "weight_hh": (144, 24)}

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(5, 6, batch_first=True)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([7]), batch_first=True)
            return self.rnn(packed)[1]

    assert facts(Packed(), torch.zeros(1, 9, 5))["rnn.weight_ih_l0"] == (18 * 5 * 7, 18 * 7)


def test_a_language_model_with_tied_weights():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Embedding(50, 8)
            self.rnn = nn.LSTM(8, 8, batch_first=True)
            self.decoder = nn.Linear(8, 50)
            self.decoder.weight = self.encoder.weight

        def forward(self, tokens):
            return self.decoder(self.rnn(self.encoder(tokens))[0])

    counted = facts(Tied(), torch.zeros(1, 6, dtype=torch.long))
    assert counted["encoder.weight"] == (6 * 8 + 6 * 8 * 50, 6 * 50)
    assert counted["rnn.weight_ih_l0"] == (6 * 32 * 8, 6 * 32)
    assert "decoder.weight" not in counted


def test_a_layer_called_twice_counts_twice_and_its_other_name_does_not():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.alias = self.fc

        def forward(self, x):
            return self.alias(self.fc(x).relu())

    assert facts(Twice(), torch.zeros(1, 4)) == {"fc.weight": (32, 8)}


def test_layers_come_in_the_order_of_the_forward_pass():
    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 2)
            self.first = nn.Linear(4, 3)

        def forward(self, x):
            return self.last(self.first(x))

    assert list(facts(Backwards(), torch.zeros(1, 4))) == ["first.weight", "last.weight"]


def test_work_of_a_module_itself():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(4, 6))
            self.scale = nn.Parameter(torch.ones(6))
            self.fc = nn.Linear(6, 2)

        def forward(self, x):
            return self.fc(x @ self.a * self.scale)

    assert facts(Own(), torch.zeros(1, 4)) == {"fc.weight": (12, 2), "a": (24, 0)}


def test_products_of_a_module_with_two_matrices_are_whole_numbers():
    """16 + 15 multiply-accumulates, in the ratio of 4 to 15 weights."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(5, 3))

        def forward(self, x, y):
            return x @ self.a, y @ self.b

    found = facts(Own(), (torch.zeros(4, 2), torch.zeros(1, 5)))
    assert found == {"a": (6, 0), "b": (25, 0)}


def test_a_bias_beside_two_matrices_is_added_once():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(5, 6))
            self.bias = nn.Parameter(torch.zeros(5))

        def forward(self, x):
            return x @ self.a.T @ self.b.T + self.bias

    assert facts(Own(), torch.zeros(1, 4)) == {"a": (24, 5), "b": (30, 0)}


def test_values_may_be_wider_than_queries():
    class Attention(nn.Module):
        def forward(self, query, key, value):
            return nn.functional.scaled_dot_product_attention(query, key, value)

    sample = (torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 5, 7))
    assert facts(Attention(), sample) == {"": (2 * 3 * 5 * (4 + 7), 0)}


def test_products_without_a_weight_have_no_name():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(8, 24, bias=False)

        def forward(self, x):
            query, key, value = self.qkv(x).chunk(3, -1)
            plain = (query @ key.transpose(-1, -2)).softmax(-1) @ value
            return plain + nn.functional.scaled_dot_product_attention(query, key, value)

    layers = count_layers(Attention(), torch.zeros(1, 5, 8))
    assert layers == (
        LayerFlops(weight="qkv.weight", macs=5 * 8 * 24, bias=0),
        LayerFlops(weight="", macs=2 * 2 * 5 * 5 * 8, bias=0),
    )


class Product(nn.Module):
    """Products of a module's own parameters and its input."""

    def __init__(self, product, *shapes):
        super().__init__()
        self.product = product
        self.own = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, x):
        return self.product(x, *self.own)


@pytest.mark.parametrize(
    ("product", "shapes", "size", "macs"),
    [
        (lambda x, v: x @ v, [(6,)], (5, 6), 5 * 6),
        (lambda x, v: x @ v, [(6,)], (2, 5, 6), 2 * 5 * 6),
        (lambda x, v: v @ x, [(5,)], (5, 6), 5 * 6),
        (lambda x, v: x[0] @ v, [(6,)], (5, 6), 6),
        (lambda x, v: x.mv(v), [(6,)], (5, 6), 5 * 6),
        (lambda x, v: x[0].dot(v), [(6,)], (5, 6), 6),
        (lambda x, w: x @ w, [(3, 6, 4)], (5, 6), 3 * 5 * 6 * 4),
        (lambda x, v: x.inner(v), [(6,)], (5, 6), 5 * 6),
        (lambda x, w: x.inner(w), [(4, 6)], (5, 6), 5 * 6 * 4),
        (lambda x, w: torch.tensordot(x, w, 1), [(6, 4)], (5, 6), 5 * 6 * 4),
        (lambda x, w: torch.tensordot(x, w, 2), [(5, 6, 4)], (2, 5, 6), 2 * 5 * 6 * 4),
        (lambda x, w: torch.tensordot(x, w, ([0], [1])), [(3, 5)], (5, 6), 5 * 6 * 3),
        (lambda x, b, v: torch.addmv(b, x, v), [(5,), (6,)], (5, 6), 5 * 6),
        (lambda x, b, w: torch.addbmm(b, x, w), [(5, 4), (2, 6, 4)], (2, 5, 6), 2 * 5 * 6 * 4),
    ],
)
def test_products_of_any_shapes(product, shapes, size, macs):
    assert sum(found for found, _ in facts(Product(product, *shapes), torch.zeros(size)).values()) == macs


def test_a_flag_named_bias_is_no_bias():
    layer = Product(lambda x, w: x @ w, (6, 4))
    layer.bias = False
    assert [each.bias for each in count_layers(layer, torch.zeros(1, 6))] == [0]


def test_a_transformer_layer_is_counted_in_evaluation_mode_too():
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    counted = facts(net, torch.zeros(1, 5, 8))
    assert counted["linear1.weight"] == (5 * 8 * 16, 5 * 16)
    assert counted["self_attn.in_proj_weight"] == (5 * 3 * 64, 5 * 24)
    assert counted["self_attn.out_proj.weight"] == (5 * 64, 5 * 8)
    assert counted[""] == (2 * 5 * 5 * 8, 0)


class Attention(nn.Module):
    """Attention of 3 queries to 5 keys, with or without the average weights and a mask."""

    def __init__(self, mask=None, need_weights=True, **options):
        super().__init__()
        self.layer = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.mask, self.need_weights = mask, need_weights

    def forward(self, x):
        keys = x if self.layer.kdim == 8 else x[..., :6]
        return self.layer(x[:, :3], value=keys, key=keys, attn_mask=self.mask, need_weights=self.need_weights)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("mask", [None, torch.zeros(3, 5)], ids=["all", "masked"])
def test_attention_is_counted_by_projection(mask, need_weights):
    assert facts(Attention(mask, need_weights), torch.zeros(1, 5, 8)) == {
        "layer.in_proj_weight": (64 * (3 + 5 + 5), 8 * (3 + 5 + 5)),
        "": (2 * 3 * 5 * 8, 0),
        "layer.out_proj.weight": (64 * 3, 8 * 3),
    }


def test_attention_to_keys_of_another_size_has_three_projections():
    assert facts(Attention(kdim=6, vdim=6, bias=False, add_bias_kv=True), torch.zeros(1, 5, 8)) == {
        "layer.q_proj_weight": (64 * 3, 0),
        "layer.k_proj_weight": (48 * 5, 0),
        "layer.v_proj_weight": (48 * 5, 0),
        "": (2 * 3 * 6 * 8, 0),  # of five keys and the one that `add_bias_kv` adds
        "layer.out_proj.weight": (64 * 3, 0),
    }


def test_attention_of_a_class_that_takes_other_arguments_is_counted_as_a_whole():
    class Selfish(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    counted = facts(Selfish(8, 2, batch_first=True), torch.zeros(1, 5, 8))
    assert counted["in_proj_weight"][0] == 5 * 4 * 64 + 2 * 5 * 5 * 8


class Windows(nn.Module):
    """Attention with a table of its own, and the weights of layers that it does not call, as in Swin transformers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 2))
        self.qkv, self.proj, self.local = nn.Linear(4, 12), nn.Linear(4, 4, bias=False), nn.Conv1d(4, 4, 3, groups=2)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        scores = (q @ k.transpose(-2, -1) + self.table[:3, 0]).softmax(-1)
        mixed = F.linear(input=scores @ v, weight=self.proj.weight)
        return F.conv1d(mixed.transpose(-2, -1), self.local.weight, bias=self.local.bias, groups=2)


def test_weights_of_layers_that_are_not_called_have_their_own_operations():
    found = count_layers(nn.Sequential(nn.Linear(4, 4), Windows()), torch.zeros(1, 3, 4))
    assert {layer.weight: (layer.macs, layer.bias) for layer in found} == {
        "0.weight": (3 * 16, 12),
        "1.qkv.weight": (3 * 48, 36),
        "1.proj.weight": (3 * 16, 0),
        "1.local.weight": (4 * 2 * 3, 4),
        "": (2 * 3 * 3 * 4, 0),
    }


class Translator(nn.Module):
    """Has a table of its own that only others call, which share its weight, as in T5 and BART."""

    def __init__(self):
        super().__init__()
        self.shared, self.encoder, self.head = nn.Embedding(7, 4), nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.encoder.weight = self.head.weight = self.shared.weight

    def forward(self, x):
        return self.head(self.encoder(x))


def test_a_weight_that_a_called_layer_shares_with_one_that_is_not_is_counted_once():
    found = count_layers(Translator(), torch.zeros(1, 3, dtype=torch.long))
    assert {layer.weight: layer.macs for layer in found} == {"shared.weight": 3 * 4 * 7 + 3 * 4}


class Mixed(nn.Module):
    """Two matrices in a list, of which one is passed to a function as it is."""

    def __init__(self):
        super().__init__()
        self.kernels = nn.ParameterList([torch.zeros(4, 4), torch.zeros(4, 4)])

    def forward(self, x):
        return F.linear(x, self.kernels[0]) @ self.kernels[1].T


def test_matrices_in_a_list_share_the_work_also_where_a_function_gets_one():
    found = count_layers(Mixed(), torch.zeros(1, 4))
    assert {layer.weight: layer.macs for layer in found} == {"kernels.0": 16, "kernels.1": 16}


def test_a_bilinear_layer_has_a_product_for_each_weight():
    class Form(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Bilinear(4, 5, 3)

        def forward(self, x, y):
            return self.layer(x, y)

    assert facts(Form(), (torch.zeros(1, 2, 4), torch.zeros(1, 2, 5))) == {"layer.weight": (2 * 60, 2 * 3)}


def test_parametrized_weights_keep_their_name():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    net = nn.utils.parametrize.register_parametrization(nn.Linear(4, 4), "weight", Double())
    assert facts(net, torch.zeros(1, 4)) == {"parametrizations.weight.original": (16, 4)}


def test_several_arguments_and_outputs_that_are_no_tensors():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x, y):
            return {"logits": self.fc(x + y), "note": None, "more": (x, "word")}

    assert facts(Odd(), (torch.zeros(1, 4), torch.zeros(1, 4))) == {"fc.weight": (8, 2)}


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2)

    def forward(self, **batch):
        return self.fc(batch["x"]).sum() if batch["mode"] == "sum" else self.fc(batch["x"])


def test_a_mapping_is_passed_by_keywords_where_forward_takes_nothing_else():
    assert facts(ByKeyword(), ({"x": torch.zeros(1, 4), "mode": "sum"},)) == {"fc.weight": (8, 2)}


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2))
        self.net[0].weight.requires_grad_(False)

    def forward(self, x):
        y = self.net(x)
        return y * 2 if y.sum() > 0 else y


def test_a_lightning_module_is_left_as_it_was_and_nothing_is_said(capfd, caplog):
    lit = Lit()
    lit.net[1].eval()
    before = {name: value.clone() for name, value in lit.state_dict().items()}
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert facts(lit, torch.randn(1, 4, generator=torch.Generator().manual_seed(0))) == {
            "net.0.weight": (12, 3),
            "net.3.weight": (6, 2),
        }
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in (lit, lit.net, lit.net[0], lit.net[1], lit.net[2])] == [True, True, True, False, True]
    assert all(torch.equal(value, before[name]) for name, value in lit.state_dict().items())
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in lit.modules())
    assert all(parameter.grad is None for parameter in lit.parameters())
    assert capfd.readouterr() == ("", "")
    assert caplog.records == []


def test_randomness_that_evaluation_mode_does_not_stop_is_not_consumed():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    state = torch.get_rng_state()
    assert count_layers(Noisy(), torch.zeros(1, 2)) == ()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_failing_forward_restores_the_module_too():
    lit = Lit()
    fused = torch.backends.mha.get_fastpath_enabled()
    with pytest.raises(RuntimeError):
        count_layers(lit, torch.zeros(1, 5))
    assert lit.training
    assert not any(layer._forward_hooks for layer in lit.modules())
    assert torch.backends.mha.get_fastpath_enabled() == fused


LAYERS = [
    LayerFlops(weight="a", macs=100, bias=10),
    LayerFlops(weight="b", macs=40, bias=4),
    LayerFlops(weight="c", macs=7, bias=1),
]
HALF, FROZEN = torch.tensor([True, False]), torch.tensor([False, False])


class Untraceable(nn.Module):
    """Runs, but not where it is traced."""

    def forward(self, x):
        if torch.jit.is_tracing():
            raise RuntimeError("not traced")
        return x


def test_a_module_that_cannot_be_traced_keeps_no_hooks():
    module = nn.Sequential(nn.Linear(2, 2), Untraceable())
    with pytest.raises(RuntimeError, match="not traced"):
        count_layers(module, torch.zeros(1, 2))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())


def test_forward_scales_products_and_not_biases():
    assert forward_flops(LAYERS) == 2 * 147 + 15
    assert forward_flops(LAYERS, {"a": HALF, "b": FROZEN, "elsewhere": FROZEN}) == 110 + 4 + 15


def test_fully_trainable_is_three_forward_passes():
    assert training_flops(LAYERS) == 3 * forward_flops(LAYERS)
    masks = {"a": HALF, "b": HALF}
    assert training_flops(LAYERS, masks, samples=7) == 7 * 3 * forward_flops(LAYERS, masks)
    assert training_flops(LAYERS, masks, dict(masks)) == 3 * forward_flops(LAYERS, masks)


def test_backward_stops_below_the_earliest_trainable_layer():
    a, b, c = 210, 84, 15
    assert training_flops(LAYERS, trainable={"a": FROZEN}) == a + b + c + 2 * (b + c)
    assert training_flops(LAYERS, trainable={"a": FROZEN, "b": FROZEN}) == a + b + c + 2 * c
    assert training_flops(LAYERS, trainable={"b": FROZEN, "c": FROZEN}) == a + b + c + (a + b + c) + a
    assert training_flops(LAYERS, trainable=dict.fromkeys("abc", FROZEN)) == a + b + c


def test_a_partly_trainable_layer_pays_for_that_part_of_its_kept_weights():
    a, b, c = 210, 84, 15
    assert training_flops(LAYERS, trainable={"a": HALF}) == 2 * (a + b + c) + a / 2 + b + c
    masks, trainable = {"a": HALF}, {"a": ~HALF}
    assert training_flops(LAYERS, masks, trainable) == 110 + b + c + 2 * (b + c)


def test_products_without_a_weight_are_passed_back_through_only_above_what_trains():
    layers = [LAYERS[0], LayerFlops(weight="", macs=5, bias=0), LAYERS[1]]
    assert training_flops(layers) == 3 * forward_flops(layers)
    assert training_flops(layers, trainable={"a": FROZEN}) == 210 + 10 + 84 * 3
    first = layers[1:]
    assert training_flops(first) == 3 * forward_flops(first)
    assert training_flops(first, trainable={"b": FROZEN}) == forward_flops(first)


def test_no_layers_no_work():
    assert forward_flops([]) == training_flops([]) == 0


def test_a_lookup_of_a_matrix_is_counted_as_an_embedding_layer():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = nn.Linear(3, 7)

        def forward(self, tokens):
            return self.decoder(nn.functional.embedding(tokens, self.decoder.weight))

    tokens = torch.zeros(1, 4, dtype=torch.int64)
    assert facts(Tied(), tokens) == {"decoder.weight": (4 * 3 * 7, 4 * 7), "": (4 * 3, 0)}
    assert facts(nn.Sequential(nn.Embedding(7, 3)), tokens) == {"0.weight": (4 * 3, 0)}


def test_biases_of_narrow_recurrent_layers_are_those_of_a_cut_one():
    net = nn.Sequential(nn.LSTM(3, 4, batch_first=True))
    masks = {f"0.bias_{kind}_l0": torch.arange(16) % 4 < 2 for kind in ("ih", "hh")}
    layers = narrow_biases(count_layers(net, torch.zeros(1, 5, 3)), masks)
    cut = count_layers(nn.Sequential(nn.LSTM(3, 2, batch_first=True)), torch.zeros(1, 5, 3))
    assert [layer.bias for layer in layers] == [layer.bias for layer in cut] == [5 * 8, 5 * 8]


def test_biases_of_layers_that_stay_whole_are_counted_in_full():
    layers = [LayerFlops(weight="a.weight", macs=9, bias=6), LayerFlops(weight="b.weight", macs=9, bias=4)]
    narrow = narrow_biases(layers, {"a.bias": torch.tensor([True, False, True])})
    assert [layer.bias for layer in narrow] == [4, 4]


def test_a_chain_of_matrices_is_counted_in_its_best_order():
    class Chain(nn.Module):
        def __init__(self, *sides):
            super().__init__()
            self.factors = nn.ParameterList([torch.ones(*pair) for pair in pairwise(sides)])

        def forward(self, x):
            return torch.linalg.multi_dot([x, *self.factors])

    def macs(module, sample):
        return sum(layer.macs for layer in count_layers(module, sample))

    assert macs(Chain(4, 50, 6), torch.zeros(2, 4)) == 2 * 4 * 50 + 2 * 50 * 6
    assert macs(Chain(2, 50, 3), torch.zeros(100, 2)) == 2 * 50 * 3 + 100 * 2 * 3
    assert macs(Chain(4, 5, 6), torch.zeros(4)) == 4 * 5 + 5 * 6


def test_a_bias_is_counted_for_the_first_output_alone():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3))

        def forward(self, x):
            return nn.functional.linear(x, self.weight, self.bias), x.expand(1000, 4)

    assert facts(Layer(), torch.zeros(1, 4)) == {"weight": (12, 3)}


class Listed(nn.Module):
    """Products with matrices in a list, in a dict in a list, and of its own."""

    def __init__(self):
        super().__init__()
        self.each = nn.ParameterList([torch.randn(4, 6), nn.ParameterDict({"b": torch.randn(6, 2)})])
        self.own = nn.Parameter(torch.randn(2, 5))
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, x):
        return self.head(torch.relu(torch.relu(x @ self.each[0]) @ self.each[1]["b"]) @ self.own)


def test_matrices_in_lists_and_dicts_of_parameters_have_their_names_and_masks():
    layers = count_layers(Listed(), torch.randn(1, 4))
    macs = {"own": 10, "each.0": 24, "each.1.b": 12, "head.weight": 15}
    assert {layer.weight: layer.macs for layer in layers} == macs
    half = {"each.0": torch.arange(24).reshape(4, 6) % 2 == 0}
    assert forward_flops(layers, half) == forward_flops(layers) - 24
    assert training_flops(layers) == 3 * forward_flops(layers)


def test_products_without_a_weight_alone_train_both_factors():
    layers = [LayerFlops(weight="", macs=7, bias=0), LayerFlops(weight="", macs=3, bias=0)]
    assert training_flops(layers) == 3 * forward_flops(layers) == 60
