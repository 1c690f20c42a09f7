"""ResNet-18, the network that FedSpa (group norm) and FedDIP (batch norm) train on CIFAR-100.

It has 11,220,132 parameters with 100 classes.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.task import Classifier, check_sizes

_GROUPS = 32


class ResNet18(Classifier):
    """ResNet-18 (He et al., 2016) for small images, with a 3x3 stem of stride 1 and no max-pooling.

    The variant of Huang et al., "Achieving Personalized Federated Learning with Sparse Local Models",
    section 5, and of Long et al., "FedDIP", section VI: bias-free convolutions, 1x1 convolutions as shortcuts where the
    shape changes.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 8 pixels.
        norm: Norm after each convolution; group norm has 32 groups.
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
        norm: Norm = "group",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("ResNet18", num_classes, sample_shape, min_side=8)
        super().__init__(
            _resnet18(num_classes, sample_shape[0], norm),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _resnet18(num_classes: int, channels: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 3, padding=1, bias=False),
            norm1=_norm(norm, 64),
            relu1=nn.ReLU(),
            stage1=_stage(64, 64, 1, norm),
            stage2=_stage(64, 128, 2, norm),
            stage3=_stage(128, 256, 2, norm),
            stage4=_stage(256, 512, 2, norm),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, num_classes),
        )
    )


def _norm(norm: Norm, channels: int) -> nn.Module:
    return norm2d(norm, channels, _GROUPS)


def _stage(channels: int, out: int, stride: int, norm: Norm) -> nn.Sequential:
    return nn.Sequential(_Block(channels, out, stride, norm), _Block(out, out, 1, norm))


class _Block(nn.Module):
    """Residual block: two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, out: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(channels, out, 1, stride=stride, bias=False),
                    norm=_norm(norm, out),
                )
            )
        self.relu2 = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu1(self.norm1(self.conv1(inputs)))
        outputs: Tensor = self.relu2(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))
        return outputs
