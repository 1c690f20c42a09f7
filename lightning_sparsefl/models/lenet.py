"""LeNet-5 in two variants: Caffe's (FedSpa on EMNIST Letters, 439,096 parameters) and LeCun's (FedDIP, 61,706)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

from torch import nn

from lightning_sparsefl.errors import require
from lightning_sparsefl.models.task import Classifier, SampleShape, check_sizes


class LeNet5(Classifier):
    """LeNet-5: two 5x5 convolutions with max-pooling, then linear layers.

    The variant ``caffe`` has 20 and 50 unpadded channels and two linear layers (Huang et al., "Achieving Personalized
    Federated Learning with Sparse Local Models", section 5); ``1998`` has 6 and 16 channels, padding in the
    first convolution, and three linear layers, as in LeCun et al. (1998) but with ReLU (Long et al., "FedDIP",
    section VI).

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 16 pixels.
        variant: Variant of the network, ``caffe`` or ``1998``.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.

    Raises:
        InvalidOption: If an option is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 26,
        sample_shape: tuple[int, int, int] = (1, 28, 28),
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
        variant: Literal["caffe", "1998"] = "caffe",
    ) -> None:
        check_sizes("LeNet5", num_classes, sample_shape, min_side=16)
        require(variant in _VARIANTS, "model.variant", variant, "'caffe' or '1998'")
        super().__init__(
            _VARIANTS[variant](num_classes, sample_shape),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _caffe(num_classes: int, sample_shape: SampleShape) -> nn.Sequential:
    channels, height, width = sample_shape
    pixels = _side_after(height - 4) * _side_after(width - 4)
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


def _published(num_classes: int, sample_shape: SampleShape) -> nn.Sequential:
    channels, height, width = sample_shape
    pixels = _side_after(height) * _side_after(width)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=2),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * pixels, 120),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, num_classes),
        )
    )


def _side_after(side: int) -> int:
    """Compute the side after both poolings from the side after the first convolution."""
    return (side // 2 - 4) // 2


_VARIANTS = {"caffe": _caffe, "1998": _published}
