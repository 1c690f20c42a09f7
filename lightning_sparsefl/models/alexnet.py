"""Two variants of AlexNet, for small and for large images.

`AlexNet` is the network that FedDIP trains on CIFAR-10 (23,272,266 parameters), and `AlexNet256` the network that
PerFedMask trains on DomainNet (57,063,498 parameters).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lightning_sparsefl.errors import require
from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.task import Classifier, check_sizes

_PIXELS = 2
"""Height and width after the adaptive pooling."""
_WIDTH = 4096


class AlexNet(Classifier):
    """AlexNet (Krizhevsky et al., 2012) with 3x3 convolutions, dropout before the wide linear layers, and no norms.

    The variant of Long et al., "FedDIP: Federated Learning with Extreme Dynamic Pruning and Incremental
    Regularization", section VI.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 15 pixels.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.
        dropout: Dropout probability of the inputs of the two wide linear layers.

    Raises:
        InvalidOption: If an option is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 10,
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
        dropout: float = 0.5,
    ) -> None:
        check_sizes("AlexNet", num_classes, sample_shape, min_side=15)
        require(0 <= dropout <= 1, "model.dropout", dropout, "a number in [0, 1]")
        super().__init__(
            _alexnet(num_classes, sample_shape[0], dropout),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _alexnet(num_classes: int, channels: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 3, stride=2, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 192, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            relu5=nn.ReLU(),
            pool5=nn.MaxPool2d(2),
            pool=nn.AdaptiveAvgPool2d(_PIXELS),
            flatten=nn.Flatten(),
            dropout1=nn.Dropout(dropout),
            fc1=nn.Linear(256 * _PIXELS**2, _WIDTH),
            relu6=nn.ReLU(),
            dropout2=nn.Dropout(dropout),
            fc2=nn.Linear(_WIDTH, _WIDTH),
            relu7=nn.ReLU(),
            fc3=nn.Linear(_WIDTH, num_classes),
        )
    )


class AlexNet256(Classifier):
    """AlexNet (Krizhevsky et al., 2012) for images of about 256x256 pixels, with a norm after each layer but the last.

    The variant of Setayesh et al., "PerFedMask: Personalized Federated Learning with Optimized Masking Vectors",
    appendix I: kernels of 11, 5 and 3, biases, batch norm without running statistics, two wide linear layers, no
    dropout.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 63 pixels.
        norm: Norm after each convolution, and after each linear layer but the last.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.

    Raises:
        InvalidOption: If an option is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 10,
        sample_shape: tuple[int, int, int] = (3, 256, 256),
        norm: Norm = "batch_static",
        lr: float = 0.01,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("AlexNet256", num_classes, sample_shape, min_side=63)
        net = _alexnet256(num_classes, sample_shape[0], norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


_CONVS = ((64, 11, 4, 2), (192, 5, 1, 2), (384, 3, 1, 1), (256, 3, 1, 1), (256, 3, 1, 1))
"""Output channels, kernel size, stride and padding of each convolution."""
_POOLED = (1, 2, 5)
"""Convolutions that are followed by max-pooling, numbered from 1."""
_GROUPS = 32
_SIDE = 6


def _alexnet256(num_classes: int, channels: int, norm: Norm) -> nn.Sequential:
    net = nn.Sequential()
    for number, (out, kernel, stride, padding) in enumerate(_CONVS, start=1):
        net.add_module(f"conv{number}", nn.Conv2d(channels, out, kernel, stride=stride, padding=padding))
        net.add_module(f"norm{number}", norm2d(norm, out, _GROUPS))
        net.add_module(f"relu{number}", nn.ReLU())
        if number in _POOLED:
            net.add_module(f"pool{number}", nn.MaxPool2d(3, stride=2))
        channels = out
    net.add_module("pool", nn.AdaptiveAvgPool2d(_SIDE))
    net.add_module("flatten", nn.Flatten())
    for number, width in enumerate((channels * _SIDE**2, _WIDTH), start=1):
        net.add_module(f"fc{number}", nn.Linear(width, _WIDTH))
        net.add_module(f"norm{len(_CONVS) + number}", _vector_norm(norm))
        net.add_module(f"relu{len(_CONVS) + number}", nn.ReLU())
    net.add_module("fc3", nn.Linear(_WIDTH, num_classes))
    return net


def _vector_norm(norm: Norm) -> nn.Module:
    if norm == "group":
        return nn.GroupNorm(_GROUPS, _WIDTH)
    return _BatchNorm1d(_WIDTH, track_running_stats=norm == "batch")


class _BatchNorm1d(nn.BatchNorm1d):
    """Batch norm that maps a batch of one sample to the bias, since the sample equals the mean of the batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        uses_batch = self.training or self.running_mean is None
        return (
            super().forward(inputs) if len(inputs) > 1 or not uses_batch else 0 * inputs + self.bias
        )  # keeps the gradient defined
