"""VGG networks for small images: 3x3 convolutions, max-pooling and one linear layer.

VGG-11 with group norm is the network that FedSpa trains on CIFAR-10 (9,231,114 parameters). With batch norm without
running statistics, FedLPS trains VGG-11 on CIFAR-10, VGG-13 on CIFAR-100 and VGG-16 on Tiny-ImageNet.
"""

from __future__ import annotations

from torch import nn

from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.task import Classifier, SampleShape, check_sizes

_A = (64, None, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)
_B = (64, 64, None, 128, 128, None, 256, 256, None, 512, 512, None, 512, 512, None)
_D = (64, 64, None, 128, 128, None, 256, 256, 256, None, 512, 512, 512, None, 512, 512, 512, None)
"""Output channels of each convolution, and None for max-pooling; the letters are those of the paper."""
_GROUPS = 32


class VGG11(Classifier):
    """VGG-11 (configuration A of Simonyan and Zisserman, 2015) with norms and one linear layer.

    The variant of Huang et al., "Achieving Personalized Federated Learning with Sparse Local Models",
    section 5, with group norm of 32 groups. Convolutions are initialised from He's normal distribution (fan out), the
    linear layer from a normal distribution with standard deviation 0.01.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 32 pixels.
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
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        norm: Norm = "group",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("VGG11", num_classes, sample_shape, min_side=32)
        net = _vgg(_A, num_classes, sample_shape, norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


class VGG13(Classifier):
    """VGG-13 (configuration B), otherwise like :class:`VGG11`.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 32 pixels.
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
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        norm: Norm = "group",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("VGG13", num_classes, sample_shape, min_side=32)
        net = _vgg(_B, num_classes, sample_shape, norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


class VGG16(Classifier):
    """VGG-16 (configuration D), otherwise like :class:`VGG11`.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 32 pixels.
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
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        norm: Norm = "group",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("VGG16", num_classes, sample_shape, min_side=32)
        net = _vgg(_D, num_classes, sample_shape, norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


def _vgg(widths: tuple[int | None, ...], num_classes: int, sample_shape: SampleShape, norm: Norm) -> nn.Sequential:
    channels, height, width = sample_shape
    features = nn.Sequential()
    convs = 0
    for out in widths:
        if out is None:
            features.add_module(f"pool{convs}", nn.MaxPool2d(2))
            continue
        convs += 1
        features.add_module(f"conv{convs}", nn.Conv2d(channels, out, 3, padding=1))
        features.add_module(f"norm{convs}", norm2d(norm, out, _GROUPS))
        features.add_module(f"relu{convs}", nn.ReLU())
        channels = out
    features.add_module("flatten", nn.Flatten())
    features.add_module("fc", nn.Linear(channels * (height // 32) * (width // 32), num_classes))
    features.apply(_init)
    return features


def _init(layer: nn.Module) -> None:
    if isinstance(layer, nn.Conv2d):
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif isinstance(layer, nn.Linear):
        nn.init.normal_(layer.weight, std=0.01)
    else:
        return
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
