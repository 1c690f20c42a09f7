"""Multi-layer perceptron."""

from __future__ import annotations

from math import prod

from torch import nn

from lightning_sparsefl.errors import require
from lightning_sparsefl.models.task import Classifier, SampleShape, check_sizes


class MLP(Classifier):
    """Multi-layer perceptron with ReLU on flattened samples.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample.
        hidden: Width of each hidden layer; empty for logistic regression.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    def __init__(
        self,
        num_classes: int = 10,
        sample_shape: tuple[int, int, int] = (1, 28, 28),
        hidden: tuple[int, ...] = (64,),
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_sizes("MLP", num_classes, sample_shape, min_side=1)
        require(all(width >= 1 for width in hidden), "model.hidden", tuple(hidden), "widths of at least 1")
        super().__init__(
            _mlp(num_classes, sample_shape, hidden),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _mlp(num_classes: int, sample_shape: SampleShape, hidden: tuple[int, ...]) -> nn.Sequential:
    net = nn.Sequential()
    net.add_module("flatten", nn.Flatten())
    inputs = prod(sample_shape)
    for number, width in enumerate(hidden, start=1):
        net.add_module(f"fc{number}", nn.Linear(inputs, width))
        net.add_module(f"relu{number}", nn.ReLU())
        inputs = width
    net.add_module(f"fc{len(hidden) + 1}", nn.Linear(inputs, num_classes))
    return net
