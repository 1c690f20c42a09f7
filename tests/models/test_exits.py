"""Networks with early exits: their shapes and sizes, what a depth leaves out, and how they are trained and scored."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparsefl.errors import InvalidOption
from lightning_sparsefl.models import (
    VGG11,
    VGG13,
    VGG16,
    ExitLanguageLSTM,
    ExitMNISTNet,
    ExitResNet18,
    ExitVGG11,
    ExitVGG13,
    ExitVGG16,
    LanguageLSTM,
    MNISTNet,
    ResNet18,
)
from lightning_sparsefl.sparse.exits import blocks_of, exit_heads, mutual_slopes

pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]

IMAGES = {
    ExitMNISTNet: (1, 28, 28),
    ExitResNet18: (3, 32, 32),
    ExitVGG11: (3, 32, 32),
    ExitVGG13: (3, 32, 32),
    ExitVGG16: (3, 64, 64),
}
BLOCKS = {ExitMNISTNet: 3, ExitResNet18: 4, ExitVGG11: 4, ExitVGG13: 4, ExitVGG16: 4, ExitLanguageLSTM: 2}
PLAIN = {
    ExitMNISTNet: MNISTNet(),
    ExitResNet18: ResNet18(),
    ExitVGG11: VGG11(),
    ExitVGG13: VGG13(100),
    ExitVGG16: VGG16(200, (3, 64, 64)),
    ExitLanguageLSTM: LanguageLSTM(tied=False),
}
ADDED = {
    ExitMNISTNet: 4_820,
    ExitResNet18: 1_063_212,
    ExitVGG11: 1_182_750,
    ExitVGG13: 1_321_260,
    ExitVGG16: 1_475_160,
    ExitLanguageLSTM: 2_570_000,
}
"""Parameters of the exits before the last one."""


def size(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.__name__)
def test_a_network_is_the_plain_one_and_its_exits(kind):
    module = kind()
    assert size(module) == size(PLAIN[kind]) + ADDED[kind]
    assert len(module.exits) == module.depth == BLOCKS[kind]
    blocks = blocks_of([name for name, _ in module.named_parameters()], module.exits)
    assert set(blocks.values()) == set(range(BLOCKS[kind]))
    heads = exit_heads(dict(module.named_parameters()), module.exits)
    assert list(heads.values()) == sorted(2 * list(range(BLOCKS[kind])))  # weights and biases


@pytest.mark.parametrize("kind", IMAGES, ids=lambda kind: kind.__name__)
def test_a_depth_leaves_out_what_comes_later(kind):
    module, x = kind(num_classes=7), torch.randn(3, *IMAGES[kind])
    whole = module(x)
    for depth in range(1, module.depth + 1):
        module.depth = depth
        logits = module(x)
        assert [tuple(own.shape) for own in logits] == [(3, 7)] * depth
        assert all(torch.equal(own, other) for own, other in zip(logits, whole, strict=False))
        module.zero_grad()
        sum(own.sum() for own in logits).backward()
        trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
        blocks = blocks_of([name for name, _ in module.named_parameters()], module.exits)
        assert trained == {name for name, block in blocks.items() if block < depth}


def test_a_language_model_predicts_at_every_position():
    module = ExitLanguageLSTM(num_classes=11, embedding=4, hidden=5)
    assert [tuple(own.shape) for own in module(torch.zeros(2, 9, dtype=torch.int64))] == [(2, 11, 9)] * 2


def test_the_mean_of_losses_trains_and_the_mean_of_logits_is_scored():
    torch.manual_seed(0)
    module, x, y = ExitMNISTNet(lr=0.1), torch.randn(5, 1, 28, 28), torch.tensor([0, 1, 2, 3, 4])
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "accelerator": "cpu"}
    trainer = L.Trainer(max_epochs=1, enable_checkpointing=False, **quiet)
    loader = DataLoader(TensorDataset(x, y), batch_size=5)
    with torch.no_grad():
        logits = module(x)
    before = module.net.exits[0].fc.bias.detach().clone()
    (scores,) = trainer.validate(module, loader, verbose=False)
    mean = torch.stack(logits).mean(0)
    assert scores["val_loss"] == pytest.approx(float(F.cross_entropy(mean, y)), abs=1e-5)
    assert scores["val_acc"] == pytest.approx(float((mean.argmax(1) == y).float().mean()))
    trainer.fit(module, loader)
    loss = sum(float(F.cross_entropy(own, y)) for own in logits) / 3
    assert float(trainer.callback_metrics["train_loss"]) == pytest.approx(loss, abs=1e-5)
    slope = (logits[0].softmax(1) - F.one_hot(y, 10)).mean(0) / 3
    assert torch.allclose(module.net.exits[0].fc.bias, before - 0.1 * slope, atol=1e-6)


def test_a_small_sample_is_refused():
    with pytest.raises(InvalidOption, match="sides of at least 16 pixels for `ExitResNet18`"):
        ExitResNet18(sample_shape=(3, 8, 8))


def test_layers_between_exits_belong_to_the_next_block():
    names = ["stem.w", "a.w", "between.w", "b.w", "after.w", "one.0.w", "two.w"]
    assert list(blocks_of(names, {"a": "one", "b": "two"}).values()) == [0, 0, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("shape", [(5, 4), (2, 3, 4)])
def test_slopes_are_those_of_the_divergences(shape):
    torch.manual_seed(0)
    logits = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    rows = logits[0][..., 0].numel()
    for i, slope in enumerate(mutual_slopes(logits)):
        targets = [other.detach().softmax(-1) + 1e-7 for j, other in enumerate(logits) if j != i]
        total = sum((p * (p.log() - logits[i].log_softmax(-1))).sum() for p in targets) / rows / 2
        assert torch.allclose(slope, torch.autograd.grad(total, logits[i])[0], atol=1e-12)
    (alone,) = mutual_slopes(logits[:1])
    assert not alone.any()
