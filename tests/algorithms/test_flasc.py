from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from helpers.networks import Adapted, Classifier
from lightning_sparsefl import FLASC
from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.sparse.masks import kept, same
from lightning_sparsefl.sparse.uses import TensorUses
from lightning_sparsefl.types import CostFacts, LayerFlops, Merged, Message

WEIGHTS = {
    "a.weight": torch.ones(2, 3),
    "a.lora_A.weight": torch.tensor([[0.1, -0.9, 0.3], [0.8, 0.2, -0.7]]),
    "a.lora_B.weight": torch.zeros(2, 2),
    "b.weight": torch.full((4, 2), 0.5),
    "b.bias": torch.zeros(4),
    "norm.mean": torch.ones(3),
}
TRAINED = ["a.lora_A.weight", "a.lora_B.weight", "b.weight", "b.bias"]


def start(method, fleet):
    return method.init(WEIGHTS, fleet(buffers=["norm.mean"]))


def test_the_server_sends_the_largest_weights_of_all_adapters_and_what_is_whole(fleet, view):
    method = FLASC(down_density=0.35)
    server = start(method, fleet)
    message = method.download(server, view())
    assert list(message.weights) == [*TRAINED, "norm.mean"]
    assert list(message.masks) == TRAINED[:2]
    assert kept(message.masks) == 3  # floor(.35 * 10)
    sent = message.weights["a.lora_A.weight"]
    torch.testing.assert_close(sent, torch.tensor([[0.0, -0.9, 0.0], [0.8, 0.0, -0.7]]))
    assert {name: bool(mask.any()) for name, mask in message.trainable.items()} == {"a.weight": False}
    assert same(method.may_vote(message), message.trainable)


@pytest.mark.parametrize(
    ("options", "pool", "trained"),
    [
        ({"adapters": ("*lora*", "head"), "whole": ()}, [*TRAINED[:2], "b.weight", "b.bias"], TRAINED),
        ({"frozen": ("*lora_A*",)}, ["a.lora_B.weight"], TRAINED[1:]),
        ({"frozen": ("b.bias",)}, TRAINED[:2], TRAINED[:3]),
        ({"whole": ()}, TRAINED[:2], TRAINED[:2]),
    ],
    ids=str,
)
def test_patterns_say_what_is_chosen_from_and_what_is_frozen(options, pool, trained, fleet, view):
    method = FLASC(**options)
    message = method.download(start(method, fleet), view())
    assert list(message.masks) == pool
    assert sorted(message.trainable) == sorted(set(WEIGHTS) - set(trained) - {"norm.mean"})


def test_a_client_trains_densely_and_sends_its_largest_changes(client):
    masks = {"lora": torch.tensor([True, False, False, False])}
    frozen = {"base": torch.zeros(2, dtype=torch.bool)}
    message = Message(
        weights={"lora": torch.tensor([1.0, 0, 0, 0]), "head": torch.ones(2)}, masks=masks, trainable=frozen
    )
    trained = {"base": torch.ones(2), "lora": torch.tensor([1.5, -2.0, 0.1, 0.0]), "head": torch.zeros(2)}
    someone, script = client(trained)
    update = FLASC(up_density=0.5).train(message, someone)
    assert script.fits[0][1] == {}  # without masks
    assert script.fits[0][2] is frozen
    torch.testing.assert_close(update.weights["lora"], torch.tensor([0.5, -2.0, 0.1, 0.0]))
    after = FLASC().trained(message, update)
    assert all(torch.equal(after[name], trained[name]) for name in message.weights)
    assert update.weights["head"].tolist() == [-1.0, -1.0]
    assert list(update.weights) == ["lora", "head"]
    assert update.votes["lora"].tolist() == [True, True, False, False]
    assert list(update.votes) == ["lora"]
    assert (update.kind, update.weight) == ("difference", 1)


def test_the_server_takes_a_step_of_adamw(fleet, view):
    """As torch's, with the negative mean change for the gradient, also where nobody voted."""
    method = FLASC(server_lr=0.5, down_density=0.35)
    server = start(method, fleet)
    weight = torch.nn.Parameter(WEIGHTS["a.lora_A.weight"].clone())
    optimizer = torch.optim.AdamW([weight], lr=0.5)
    torch.manual_seed(2)
    moved = False
    for round in range(3):
        masks = method.download(server, view()).masks
        change = torch.randn(2, 3) * (torch.rand(2, 3) < 0.5)
        weight.grad = -change
        optimizer.step()
        mean = {name: torch.zeros_like(value) for name, value in WEIGHTS.items()} | {"a.lora_A.weight": change}
        merged = Merged(weights=mean, covered={"a.lora_A.weight": change != 0}, kind="difference")
        server = replace(method.aggregate(replace(server, round=round), merged), round=round + 1)
        torch.testing.assert_close(server.weights["a.lora_A.weight"], weight.detach())
        assert torch.equal(server.weights["a.weight"], WEIGHTS["a.weight"])
        moved |= not same(masks, method.download(server, view()).masks)
    assert moved  # scores are under the mask of the round before
    assert sorted(server.extra) == ["m", "masks", "trainable", "v"]
    scored = method.download_for(server, view(), "score")
    assert list(scored.weights) == list(WEIGHTS)
    assert same(scored.masks, masks)
    assert not scored.weights["a.lora_A.weight"][~masks["a.lora_A.weight"]].any()


@pytest.mark.parametrize(("up_density", "sent"), [(0.25, 2), (0.28, 2), (0.05, 1)])
def test_costs(fleet, view, up_density, sent):
    layers = tuple(LayerFlops(f"{name}.weight", macs, 0) for name, macs in (("a", 6), ("a.lora_A", 6), ("b", 8)))
    method = FLASC(down_density=0.5, up_density=up_density)
    message = method.download(start(method, fleet), view())
    costs = method.costs(
        CostFacts(
            view=view(),
            message=message,
            layers=layers,
            epochs=1,
            samples=1,
            batch_size=1,
            buffers=frozenset(["norm.mean"]),
        )
    )
    assert costs.bytes_down_paper == 4 * (5 + 8 + 4)
    assert costs.bytes_up_paper == 4 * (sent + 8 + 4)
    assert costs.flops_paper == costs.flops_analytic
    assert 2 * 2 * 20 <= costs.flops_paper < 3 * 2 * 20


def test_the_frozen_part_does_not_travel(federation):
    """Neither its numbers nor a bit for each of them."""
    sizes = []
    for width in (16, 160):
        trainer = federation(FLASC(whole=()), module=Adapted(width), rounds=1, federation={"wire": "encode"})
        sizes.append(trainer.summary["comm/downlink_bytes_total"] / 4)
    more = 144 * (8 + 3 + 4) + 144  # weights of the base and the head that the wider network has
    assert sizes[1] - sizes[0] < 144 * 4 + 144 * 2 * 4 + more / 16  # a quarter of B, and two buffers


def test_fine_tuning_trains_all_adapters_and_leaves_the_rest_frozen(fleet, view, client):
    method = FLASC(down_density=0.35)
    message = method.download_for(start(method, fleet), view(), "finetune")
    someone, script = client(WEIGHTS)
    assert method.finetune_for(message, someone, 3) == WEIGHTS
    ((weights, masks, trainable, _),) = script.fits
    assert (weights, masks, script.epochs) == (message.weights, {}, [3])
    assert {name: bool(mask.any()) for name, mask in trainable.items()} == {"a.weight": False}


def test_what_cannot_be_is_refused(federation):
    for option, value, expected in (
        ("down_density", 0.0, r"a number in \(0, 1\]"),
        ("up_density", 1.5, r"a number in \(0, 1\]"),
        ("server_lr", 0.0, "a number above 0"),
    ):
        with pytest.raises(InvalidOption, match=rf"`algorithm.{option}` is {value}; expected {expected}"):
            FLASC(**{option: value})
    expected = (
        r"`algorithm.adapters` is \('\*lora\*',\), but the module has no such tensors: expected names of adapters"
    )
    with pytest.raises(InvalidOption, match=expected):
        federation(FLASC(), module=Classifier(), rounds=1)


def test_what_the_module_freezes_is_not_sent(fleet):
    uses = TensorUses({name: name for name in WEIGHTS}, frozen=frozenset(["b.weight"]))
    model = SimpleNamespace(uses=uses, norms=frozenset())
    trainable = FLASC().init(WEIGHTS, fleet(buffers=["norm.mean"], model=model)).extra["trainable"]
    assert not set(trainable) & {"a.lora_A.weight", "a.lora_B.weight", "b.bias"}
    assert set(trainable) == {"a.weight", "b.weight"}


def test_a_head_that_does_not_train_is_told_how_to_leave_it_out(federation):
    module = Adapted()
    next(layer for layer in reversed(list(module.modules())) if isinstance(layer, torch.nn.Linear)).requires_grad_(
        False
    )
    message = r"The model's head .* is frozen .* To train adapters alone, set `algorithm.whole` to \[\]"
    with pytest.raises(InvalidOption, match=message):
        federation(FLASC(), module=module, rounds=1)
