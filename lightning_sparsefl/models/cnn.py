"""Small convolutional networks for 8x8 digits and for MNIST."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from lightning_sparsefl.errors import require
from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.task import Classifier, SampleShape, check_sizes


class SmallCNN(Classifier):
    """Convolutional network of 3x3 convolutions with norms, strided after the first, and one linear layer.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 2 pixels.
        width: Channels of the first convolution, a multiple of 4; they double with each further convolution.
        depth: Number of convolutions.
        norm: Norm after each convolution.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.

    Raises:
        InvalidOption: If an option is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 10,
        sample_shape: tuple[int, int, int] = (1, 8, 8),
        width: int = 16,
        depth: int = 2,
        norm: Norm = "group",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_sizes("SmallCNN", num_classes, sample_shape, min_side=2)
        require(width >= 4 and width % 4 == 0, "model.width", width, "a positive multiple of 4")
        require(depth >= 1, "model.depth", depth, "a whole number >= 1")
        super().__init__(
            _small_cnn(num_classes, sample_shape, width, depth, norm),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _small_cnn(num_classes: int, sample_shape: SampleShape, width: int, depth: int, norm: Norm) -> nn.Sequential:
    channels, rows, columns = sample_shape
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for place in range(1, depth + 1):
        # Strides instead of pooling: with two pools, a last batch of two digits lowered the accuracy from .98 to .26.
        stride = 1 if place == 1 else 2
        layers[f"conv{place}"] = nn.Conv2d(channels, width, 3, stride=stride, padding=1)
        layers[f"norm{place}"] = norm2d(norm, width, 4)
        layers[f"relu{place}"] = nn.ReLU()
        rows, columns = ((side + stride - 1) // stride for side in (rows, columns))
        channels, width = width, 2 * width
    return nn.Sequential(layers | {"flatten": nn.Flatten(), "fc": nn.Linear(channels * rows * columns, num_classes)})


class MNISTNet(Classifier):
    """Convolutional network of two 5x5 convolutions with pooling and two linear layers, without norms.

    This is the network that FedLPS trains on MNIST (21,840 parameters).

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 16 pixels.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.

    Raises:
        InvalidOption: If an option is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 10,
        sample_shape: tuple[int, int, int] = (1, 28, 28),
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        check_sizes("MNISTNet", num_classes, sample_shape, min_side=16)
        super().__init__(
            _mnist_net(num_classes, sample_shape),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _mnist_net(num_classes: int, sample_shape: SampleShape) -> nn.Sequential:
    channels, rows, columns = sample_shape
    pixels = (((rows - 4) // 2 - 4) // 2) * (((columns - 4) // 2 - 4) // 2)
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 10, 5),
            pool1=nn.MaxPool2d(2),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(10, 20, 5),
            pool2=nn.MaxPool2d(2),
            relu2=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(20 * pixels, 50),
            relu3=nn.ReLU(),
            fc2=nn.Linear(50, num_classes),
        )
    )
