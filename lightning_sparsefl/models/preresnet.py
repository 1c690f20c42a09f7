"""Pre-activation ResNet-18, the network that PerFedMask trains on CIFAR-10 (11,172,170 parameters)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.task import Classifier, check_sizes

_GROUPS = 32


class PreResNet18(Classifier):
    """Pre-activation ResNet-18 for small images, with a 3x3 stem and no max-pooling.

    He et al., "Identity Mappings in Deep Residual Networks" (2016).

    The variant of HeteroFL (Diao et al., 2021) and of Setayesh et al., "PerFedMask: Personalized Federated Learning
    with Optimized Masking Vectors", section 6: bias-free convolutions, 1x1 convolutions as shortcuts where the shape
    changes, applied to the normalised input, a norm after the last block, and batch norm without running statistics.
    The bias of the last layer is initialised to 0.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 9 pixels.
        norm: Norm before each convolution but the first, and after the last.
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
        norm: Norm = "batch_static",
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("PreResNet18", num_classes, sample_shape, min_side=9)
        net = _preresnet18(num_classes, sample_shape[0], norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


def _preresnet18(num_classes: int, channels: int, norm: Norm) -> nn.Sequential:
    net = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 3, padding=1, bias=False),
            stage1=_stage(64, 64, 1, norm),
            stage2=_stage(64, 128, 2, norm),
            stage3=_stage(128, 256, 2, norm),
            stage4=_stage(256, 512, 2, norm),
            norm=norm2d(norm, 512, _GROUPS),
            relu=nn.ReLU(),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
        )
    )
    head = nn.Linear(512, num_classes)
    nn.init.zeros_(head.bias)
    net.add_module("fc", head)
    return net


def _stage(channels: int, out: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(_Block(channels, out, stride, norm), _Block(out, out, 1, norm))


class _Block(nn.Module):
    """Residual block: norm, ReLU and a 3x3 convolution, twice, and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.norm1 = norm2d(norm, channels, _GROUPS)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = norm2d(norm, out, _GROUPS)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride=stride, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        normed = self.relu1(self.norm1(inputs))
        hidden: Tensor = self.conv2(self.relu2(self.norm2(self.conv1(normed))))
        return hidden + (inputs if self.shortcut is None else self.shortcut(normed))
