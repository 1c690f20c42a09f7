"""MobileNet for small images, the network that PerFedMask trains on CIFAR-100 (3,309,476 parameters)."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.task import Classifier, check_sizes

_STEM = 32
_WIDTHS = (64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024)
"""Output channels of each block; a block that doubles them has stride 2, except for the first."""
_GROUPS = 32


class MobileNet(Classifier):
    """MobileNet (Howard et al., 2017) for small images: a stem of stride 1 and 13 depthwise separable blocks.

    The variant of Setayesh et al., "PerFedMask: Personalized Federated Learning with Optimized Masking Vectors",
    section 6: bias-free convolutions, and batch norm without running statistics.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 17 pixels.
        norm: Norm after each convolution.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.

    Raises:
        InvalidOption: If an option is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 100,
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        norm: Norm = "batch_static",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("MobileNet", num_classes, sample_shape, min_side=17)
        net = _mobilenet(num_classes, sample_shape[0], norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


def _mobilenet(num_classes: int, channels: int, norm: Norm) -> nn.Sequential:
    widths = (_STEM, *_WIDTHS)
    strides = [2 if out > before >= 64 else 1 for before, out in zip(widths, _WIDTHS, strict=False)]
    blocks = [_block(*block, norm) for block in zip(widths, _WIDTHS, strides, strict=False)]
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, _STEM, 3, padding=1, bias=False),
            norm1=norm2d(norm, _STEM, _GROUPS),
            relu1=nn.ReLU(),
            blocks=nn.Sequential(*blocks),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(_WIDTHS[-1], num_classes),
        )
    )


def _block(channels: int, out: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            depthwise=nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels, bias=False),
            norm1=norm2d(norm, channels, _GROUPS),
            relu1=nn.ReLU(),
            pointwise=nn.Conv2d(channels, out, 1, bias=False),
            norm2=norm2d(norm, out, _GROUPS),
            relu2=nn.ReLU(),
        )
    )
