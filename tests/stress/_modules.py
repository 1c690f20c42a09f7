"""Modules of random parts, for the comparison of local engines."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

CLASSES = 4
EPS = 1e-3
"""What adaptive optimizers add to the root of squared gradients: some weights have gradients by rounding alone, such as
a bias before a batch norm, and steps that are divided by their size would be as large as others."""

ACTIVATIONS = {"tanh": nn.Tanh, "gelu": nn.GELU, "softplus": nn.Softplus, "silu": nn.SiLU, "elu": nn.ELU}
"""Smooth ones, since rounding decides on which side of a corner a number is."""
NORMS: dict[str, Callable[[int], nn.Module]] = {
    "none": lambda width: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "batch, static": lambda width: nn.BatchNorm2d(width, track_running_stats=False),
    "group": lambda width: nn.GroupNorm(2, width),
    "instance": lambda width: nn.InstanceNorm2d(width, affine=True),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD, momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3),
    "SGD, Nesterov": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.5, nesterov=True),
    "SGD, damped": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.1),
    "Adam": lambda groups: torch.optim.Adam(groups, lr=1e-2, eps=EPS),
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=EPS, amsgrad=True),
    "NAdam": lambda groups: torch.optim.NAdam(groups, lr=1e-2, eps=EPS),
    "RAdam": lambda groups: torch.optim.RAdam(groups, lr=1e-2, eps=EPS),
    "Adamax": lambda groups: torch.optim.Adamax(groups, lr=1e-2, eps=EPS),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2, initial_accumulator_value=0.1, eps=EPS),
    "Adadelta": lambda groups: torch.optim.Adadelta(groups, eps=EPS),
    "RMSprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True, eps=EPS),
}
SCHEDULES: dict[str, Callable[[Any, Any], Any]] = {
    "none": lambda optimizer, module: None,
    "step": lambda optimizer, module: lr_scheduler.StepLR(optimizer, 1, gamma=0.7),
    "batch": lambda optimizer, module: {
        "scheduler": lr_scheduler.CosineAnnealingLR(optimizer, 7),
        "interval": "step",
        "frequency": 2,
    },
    "fit": lambda optimizer, module: {
        "scheduler": lr_scheduler.LinearLR(
            optimizer, total_iters=max(1, int(module.trainer.estimated_stepping_batches))
        ),
        "interval": "step",
    },
    "plateau": lambda optimizer, module: {
        "scheduler": lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
        "monitor": "train_loss_epoch",
    },
}


def _weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, weight=torch.linspace(0.5, 2.0, CLASSES, dtype=logits.dtype))


def _one_hot(labels: Tensor, like: Tensor) -> Tensor:
    return F.one_hot(labels, CLASSES).to(like.dtype)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross-entropy": F.cross_entropy,
    "smoothed": lambda logits, labels: F.cross_entropy(logits, labels, label_smoothing=0.1),
    "weighted": _weighted,
    "summed": lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / 8,
    "log-likelihood": lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels),
    "squares": lambda logits, labels: F.mse_loss(logits, _one_hot(labels, logits)),
    "binary": lambda logits, labels: F.binary_cross_entropy_with_logits(logits, _one_hot(labels, logits)),
}


NETWORKS = (
    *("linear", "linear", "convolutions", "convolutions", "residual", "tied", "weight norm", "spectral norm"),
    *("transposed", "recurrent", "attention", "words", "words"),
)


@dataclass(frozen=True)
class Draws:
    """The parts of a module of a case."""

    network: str
    norm: str
    activation: str
    loss: str
    optimizer: str
    schedule: str
    groups: str
    logged: str
    metric: bool
    penalty: bool
    hooks: tuple[str, ...]
    state: tuple[str, ...]

    @classmethod
    def of(cls, rng: random.Random, plain: bool) -> Draws:
        """Draw the parts; without hooks and state of the user's own if the module is plain."""
        few = [0] if plain else [0, 0, 1, 2]
        return cls(
            network=rng.choice(NETWORKS),
            norm=rng.choice(list(NORMS)),
            activation=rng.choice(list(ACTIVATIONS)),
            loss=rng.choice(list(LOSSES)),
            optimizer=rng.choice(list(OPTIMIZERS)),
            schedule=rng.choice(["none", "none", "step", "batch", "fit", *SCHEDULES]),
            groups=rng.choice(["one", "one", "decay", "rates", "frozen"]),
            logged=rng.choice(["epoch", "both", "step", "extremes"]),
            metric=rng.random() < 0.1,
            penalty=rng.random() < 0.2,
            hooks=tuple(sorted(rng.sample(sorted(HOOKS), rng.choice(few)))),
            state=tuple(sorted(rng.sample(sorted(STATES), rng.choice(few)))),
        )


class Residual(nn.Module):
    """A block whose input is added to its output.

    Args:
        block: The block.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """Add the input to the block's output."""
        return x + self.block(x)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        """Apply both layers."""
        return self.second(torch.tanh(self.first(x)))


class Rows(nn.Module):
    """A layer over the eight rows of a picture, whose results are averaged.

    Args:
        layer: Layer of sequences, the batch first; of its results the first counts, as of a recurrent layer.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to the rows of the first channel."""
        found = self.layer(x[:, 0])
        return (found[0] if isinstance(found, tuple) else found).mean(1)


class Words(nn.Module):
    """An embedding of the signs of each row, as words of 4 letters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Average the embeddings of the words."""
        letters = (x.flatten(1).view(len(x), 16, 4) > 0).long()
        return self.embedding((letters * torch.tensor([1, 2, 4, 8])).sum(-1)).mean(1)


SEQUENCES: dict[str, Callable[[], nn.Module]] = {
    "recurrent": lambda: Rows(nn.LSTM(8, 16, batch_first=True)),
    "attention": lambda: nn.Sequential(
        Rows(nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), nn.Linear(8, 16)))
    ),
    "words": Words,
}
"""First layers of other networks, which return 16 numbers."""


def network(draws: Draws) -> nn.Sequential:
    """Create the network of a module, for pictures of 8 x 8."""
    act, norm = ACTIVATIONS[draws.activation], NORMS[draws.norm]
    bias = draws.norm == "none"  # else its gradient is 0 but for rounding, which a division by a small rate makes large
    if draws.network in SEQUENCES:
        return nn.Sequential(SEQUENCES[draws.network](), nn.LayerNorm(16), nn.Linear(16, 16), act(), nn.Linear(16, 4))
    if draws.network in ("linear", "tied"):
        norms = {"batch": nn.BatchNorm1d(16), "group": nn.GroupNorm(4, 16), "instance": nn.LayerNorm(16)}
        hidden = [Tied(), act()] if draws.network == "tied" else [nn.Linear(16, 12), act(), nn.Linear(12, 16)]
        middle = norms.get(draws.norm, nn.Identity())
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16, bias=bias), middle, act(), *hidden, nn.Linear(16, CLASSES))
    first = nn.Conv2d(4, 8, 3, padding=1, bias=False)
    if draws.network == "weight norm":
        first = parametrizations.weight_norm(first)
    elif draws.network == "spectral norm":
        first = parametrizations.spectral_norm(first)
    elif draws.network == "transposed":
        first = nn.ConvTranspose2d(4, 8, 3, padding=1, bias=False)
    block: nn.Module = nn.Sequential(first, norm(8), act(), nn.Conv2d(8, 4, 3, padding=1, groups=2))
    if draws.network == "residual":
        block = Residual(block)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=bias),
        norm(4),
        act(),
        nn.AvgPool2d(2),
        block,
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, CLASSES),
    )


class Drawn(L.LightningModule):
    """A module of drawn parts.

    Args:
        draws: The parts.
    """

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws
        self.net = network(draws)
        self.calls, self.seen, self.scale, self.warm = 0, [], 1.0, 0.0
        if draws.metric:
            self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=CLASSES)
        if "buffer" in draws.state:
            self.register_buffer("level", torch.zeros(()))
        if "on_before_zero_grad" in draws.hooks:
            self.register_buffer("slow", torch.zeros(()))
        if draws.groups == "frozen":
            next(layer for layer in self.net if isinstance(layer, nn.Linear | nn.Conv2d)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the logits."""
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Compute and log the loss of a batch, with what the drawn parts add to it."""
        logits = self(batch[0])
        loss = LOSSES[self.draws.loss](logits, batch[1])
        if self.draws.penalty:
            loss = loss + 1e-3 * sum(p.square().sum() for p in self.parameters())
        for name in self.draws.state:
            loss = STATES[name](self, loss, batch_idx)
        self._log(loss, logits, batch)
        return {"loss": loss, "logits": logits.detach()} if self.draws.penalty else loss

    def _log(self, loss: Tensor, logits: Tensor, batch: Any) -> None:
        right, size = (logits.argmax(1) == batch[1]).double().mean(), len(batch[1])
        if self.draws.metric:
            self.accuracy(logits, batch[1])
            self.log("train_metric", self.accuracy, on_step=False, on_epoch=True)
        self.log("train_acc", right, on_step=False, on_epoch=True)
        if self.draws.logged == "extremes":
            self.log_dict({"least": loss, "size": float(size)}, on_step=False, on_epoch=True, reduce_fx="min")
            self.log("sum", loss.detach() * size, on_step=False, on_epoch=True, reduce_fx="sum")
        if self.draws.logged == "step" and self.draws.schedule != "plateau":
            self.log("train_loss", loss)
        else:
            self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=size)

    def _scores(self, batch: Any, split: str) -> None:
        logits = self(batch[0])
        self.log(f"{split}_loss", LOSSES[self.draws.loss](logits, batch[1]))
        self.log(f"{split}_acc", (logits.argmax(1) == batch[1]).double().mean())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._scores(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Log loss and accuracy."""
        self._scores(batch, "test")

    def configure_optimizers(self) -> Any:
        """Create the drawn optimizer and schedule."""
        optimizer = OPTIMIZERS[self.draws.optimizer](self._groups())
        schedule = SCHEDULES[self.draws.schedule](optimizer, self)
        return optimizer if schedule is None else {"optimizer": optimizer, "lr_scheduler": schedule}

    def _groups(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        matrices, others = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
        if self.draws.groups == "decay":
            return [{"params": matrices, "weight_decay": 1e-2}, {"params": others, "weight_decay": 0.0}]
        if self.draws.groups == "rates":
            return [{"params": matrices}, {"params": others, "lr": 1e-3}]
        return trained


def _count(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.calls += 1
    return loss * (1.0 + 0.01 * module.calls)


def _append(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.seen.append(loss.detach())
    return loss + 0.1 * module.seen[0]


def _move(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.scale = 0.9 * module.scale + 0.1 * loss.detach()
    return loss * module.scale


def _buffer(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    module.level.mul_(0.9).add_(0.1 * loss.detach())
    return loss / (1.0 + module.level)


def _index(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    return loss * (2.0 if batch_idx == 0 else 1.0)


def _epoch(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    return loss * (1.0 + module.current_epoch) + 0.01 * module.global_step


def _rate(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    return loss * (1.0 + module.optimizers().param_groups[0]["lr"])


def _total(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    return loss * (1.0 + batch_idx / max(1, module.trainer.num_training_batches))


def _warmth(module: Any, loss: Tensor, batch_idx: int) -> Tensor:
    return loss * (1.0 + 10 * module.warm)


STATES: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "count": _count,
    "list": _append,
    "attribute": _move,
    "buffer": _buffer,
    "batch_idx": _index,
    "epoch": _epoch,
    "rate": _rate,
    "total": _total,
    "warm": _warmth,
}
"""What a training step reads or keeps beside its weights, and changes its loss by."""


def _double_gradient(module: Any) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(1.5)


def _limit(module: Any, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)


def _begin(module: Any) -> None:
    module.scale = 0.5


def _warm(module: Any, batch: Any, batch_idx: int) -> None:
    for group in module.optimizers().param_groups:
        group["lr"] *= 0.98


def _follow(module: Any, optimizer: Any) -> None:
    """Move a mean after the weights, and log it."""
    weight = next(module.parameters()).detach()
    module.slow.mul_(0.9).add_(0.1 * weight.square().mean())
    module.log("slow", module.slow, on_step=True, on_epoch=True)


def _clear(module: Any, epoch: int, batch_idx: int, optimizer: Any) -> None:
    module.calls += 1
    optimizer.zero_grad(set_to_none=True)


def _log_epoch(module: Any) -> None:
    module.log("calls", float(module.calls))


def _shift(module: Any, batch: Any, dataloader_idx: int) -> Any:
    return batch[0] * 0.5, batch[1]


def _step(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
    """Warm the learning rate up, and log it."""
    group = optimizer.param_groups[-1]
    if batch_idx % 2:  # of the step itself, else of the next one
        group["lr"] = 0.01 * min(1.0, (self.trainer.global_step + 1) / 5)
    self.warm = float(group["lr"])
    optimizer.step(closure=optimizer_closure)
    if epoch == 1:
        group["lr"] = 0.02
    self.log("rate", group["lr"], on_step=False, on_epoch=True)


HOOKS: dict[str, Callable[..., Any]] = {
    "on_after_backward": _double_gradient,
    "on_before_optimizer_step": _limit,
    "on_before_zero_grad": _follow,
    "optimizer_zero_grad": _clear,
    "on_train_start": _begin,
    "on_train_batch_start": _warm,
    "on_train_epoch_end": _log_epoch,
    "on_after_batch_transfer": _shift,
    "optimizer_step": _step,
}
"""Hooks of a module."""


def module_of(draws: Draws) -> L.LightningModule:
    """Create a module, of a class that overrides the drawn hooks."""
    torch.manual_seed(1)
    kind = type("Drawn", (Drawn,), {name: HOOKS[name] for name in draws.hooks})
    made: L.LightningModule = kind(draws)
    return made
