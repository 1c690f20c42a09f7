"""LeNet-5 as in Caffe, the network that FedSpa trains on EMNIST-Letters (439,096 parameters)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from lightning_sparsefl.models.task import Classifier, SampleShape, check_sizes


class LeNet5(Classifier):
    """Two unpadded 5x5 convolutions with max-pooling, then two linear layers.

    Huang et al., "Achieving Personalized Federated Learning with Sparse Local Models", section 5.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height, width; sides of 16 or more.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: L2 penalty.

    Raises:
        InvalidOption: If a number is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 26,
        sample_shape: tuple[int, int, int] = (1, 28, 28),
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("LeNet5", num_classes, sample_shape, min_side=16)
        super().__init__(
            _lenet5(num_classes, sample_shape),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _lenet5(num_classes: int, sample_shape: SampleShape) -> nn.Sequential:
    channels, height, width = sample_shape
    pixels = _side_after(height) * _side_after(width)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 20, 5),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(20, 50, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(50 * pixels, 500),
            relu3=nn.ReLU(),
            fc2=nn.Linear(500, num_classes),
        )
    )


def _side_after(side: int) -> int:
    return ((side - 4) // 2 - 4) // 2
