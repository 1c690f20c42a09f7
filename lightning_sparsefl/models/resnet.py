"""ResNet-18 with group norm, the network that FedSpa trains on CIFAR-100 (11,220,132 parameters)."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from lightning_sparsefl.models.task import Classifier, check_sizes

_GROUPS = 32


class ResNet18(Classifier):
    """He et al. (2016) for small images: a 3x3 stem of stride 1, no max-pooling, 32-group norm.

    The variant of Huang et al., "Achieving Personalized Federated Learning with Sparse Local Models",
    section 5: bias-free convolutions, 1x1 convolutions as shortcuts where the shape changes.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height, width; sides of 8 or more.
        lr: Learning rate.
        momentum: Momentum.
        weight_decay: L2 penalty.

    Raises:
        InvalidOption: If a number is out of its range, or the samples are too small.
    """

    def __init__(
        self,
        num_classes: int = 100,
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 5e-4,
    ) -> None:
        check_sizes("ResNet18", num_classes, sample_shape, min_side=8)
        super().__init__(
            _resnet18(num_classes, channels=sample_shape[0]),
            num_classes=num_classes,
            lr=lr,
            momentum=momentum,
            weight_decay=weight_decay,
        )


def _resnet18(num_classes: int, channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 3, padding=1, bias=False),
            norm1=nn.GroupNorm(_GROUPS, 64),
            relu1=nn.ReLU(),
            stage1=_stage(64, 64, stride=1),
            stage2=_stage(64, 128, stride=2),
            stage3=_stage(128, 256, stride=2),
            stage4=_stage(256, 512, stride=2),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(512, num_classes),
        )
    )


def _stage(channels: int, out: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_Block(channels, out, stride), _Block(out, out, 1))


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(_GROUPS, out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(_GROUPS, out)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                OrderedDict(
                    conv=nn.Conv2d(channels, out, 1, stride=stride, bias=False),
                    norm=nn.GroupNorm(_GROUPS, out),
                )
            )
        self.relu2 = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.relu1(self.norm1(self.conv1(inputs)))
        outputs: Tensor = self.relu2(self.norm2(self.conv2(hidden)) + self.shortcut(inputs))
        return outputs
