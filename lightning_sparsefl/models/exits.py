"""Networks with early exits, for DepthFL (Kim et al., ICLR 2023).

Each is cut into blocks with an exit after each block. An exit of a network for images is that of the authors' program
(github.com/adap/flower, baselines/depthfl; written anew): a gate of attention on the block's output, separable
convolutions that halve the sides and double the channels up to those of the last block, mean pooling, and a linear
layer; the last exit is the network's own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from lightning_sparsefl.models.cnn import MNISTNet
from lightning_sparsefl.models.lstm import LanguageLSTM, NextTokenScores
from lightning_sparsefl.models.norm import Norm, norm2d
from lightning_sparsefl.models.resnet import ResNet18
from lightning_sparsefl.models.task import Classifier, check_sizes
from lightning_sparsefl.models.vgg import VGG11, VGG13, VGG16

_GROUPS = 16


class ExitNet(nn.Module):
    """Blocks in sequence, each followed by an exit.

    Args:
        blocks: Blocks; each one reads the output of the one before.
        exits: Exits, which return logits with the classes in the last dimension.
    """

    def __init__(self, blocks: Sequence[nn.Module], exits: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.exits = nn.ModuleList(blocks), nn.ModuleList(exits)
        self.depth = len(blocks)
        """Number of blocks that are computed."""

    def forward(self, inputs: Tensor) -> list[Tensor]:
        """Return the logits of the first `depth` exits, classes in dimension 1."""
        found = []
        for block, exit in list(zip(self.blocks, self.exits, strict=True))[: self.depth]:
            inputs = block(inputs)
            logits = exit(inputs)
            found.append(logits.transpose(1, 2) if logits.dim() == 3 else logits)
        return found


class ExitClassifier(Classifier):
    """Classifier of a network with early exits.

    Args:
        net: Blocks and their exits.
        num_classes: Number of classes.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.
    """

    net: ExitNet

    def __init__(
        self, net: ExitNet, *, num_classes: int, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0
    ) -> None:
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self.exits = {f"net.blocks.{place}": f"net.exits.{place}" for place in range(len(net.blocks))}

    @property
    def depth(self) -> int:
        """Number of blocks that are computed."""
        return self.net.depth

    @depth.setter
    def depth(self, depth: int) -> None:
        self.net.depth = depth


class ExitMNISTNet(ExitClassifier):
    """:class:`MNISTNet` with exits after both convolutions and after the first linear layer.

    The first two exits are small: mean pooling to 4x4 pixels, and a linear layer.

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
        layers = list(MNISTNet(num_classes, sample_shape).net)  # type: ignore[call-overload]
        blocks = [nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:6]), nn.Sequential(*layers[6:9])]
        exits = [_pooled(10, num_classes, side=4), _pooled(20, num_classes, side=4), layers[9]]
        super().__init__(
            ExitNet(blocks, exits), num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay
        )


class ExitResNet18(ExitClassifier):
    """:class:`ResNet18` with exits after its four stages.

    Args:
        num_classes: Number of classes.
        sample_shape: Channels, height and width of a sample; sides of at least 16 pixels.
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
        momentum: float = 0.0,
        weight_decay: float = 1e-3,
    ) -> None:
        check_sizes("ExitResNet18", num_classes, sample_shape, min_side=16)
        layers = list(ResNet18(num_classes, sample_shape, norm).net)  # type: ignore[call-overload]
        blocks = [nn.Sequential(*layers[:4]), *layers[4:7]]
        exits = [*(_image_exit(channels, 512, num_classes, norm) for channels in (64, 128, 256)), _tail(layers[7:])]
        super().__init__(
            ExitNet(blocks, exits), num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay
        )


class ExitVGG11(ExitClassifier):
    """:class:`VGG11` with exits after its second, third, fourth and fifth pooling.

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
        norm: Norm = "batch_static",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 1e-3,
    ) -> None:
        net = _vgg(VGG11(num_classes, sample_shape, norm), num_classes, norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


class ExitVGG13(ExitClassifier):
    """:class:`VGG13` with exits after its second, third, fourth and fifth pooling.

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
        num_classes: int = 100,
        sample_shape: tuple[int, int, int] = (3, 32, 32),
        norm: Norm = "batch_static",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 1e-3,
    ) -> None:
        net = _vgg(VGG13(num_classes, sample_shape, norm), num_classes, norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


class ExitVGG16(ExitClassifier):
    """:class:`VGG16` with exits after its second, third, fourth and fifth pooling.

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
        num_classes: int = 200,
        sample_shape: tuple[int, int, int] = (3, 64, 64),
        norm: Norm = "batch_static",
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 1e-3,
    ) -> None:
        net = _vgg(VGG16(num_classes, sample_shape, norm), num_classes, norm)
        super().__init__(net, num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay)


class ExitLanguageLSTM(ExitClassifier, NextTokenScores):
    """:class:`LanguageLSTM` with a decoder of its own after each of its two LSTM layers.

    Args:
        num_classes: Size of the vocabulary.
        embedding: Size of the embedding and of the second LSTM layer.
        hidden: Size of the first LSTM layer.
        length: Number of tokens in a sequence, used only to count FLOPs.
        lr: Learning rate.
        momentum: Momentum of SGD.
        weight_decay: Weight decay (L2 penalty) of SGD.
        unknown: Token whose prediction never counts as correct, as in :class:`LanguageLSTM`.

    Raises:
        InvalidOption: If an option is out of its range.
    """

    def __init__(
        self,
        num_classes: int = 10_000,
        embedding: int = 200,
        hidden: int = 256,
        length: int = 10,
        lr: float = 0.1,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        unknown: int | None = None,
    ) -> None:
        whole = LanguageLSTM(num_classes, embedding, hidden, length, tied=False)
        layers = dict(whole.net.named_children())
        first = nn.Sequential(layers["embedding"], _States(layers["lstm1"]))
        blocks, exits = [first, _States(layers["lstm2"])], [nn.Linear(hidden, num_classes), layers["decoder"]]
        super().__init__(
            ExitNet(blocks, exits), num_classes=num_classes, lr=lr, momentum=momentum, weight_decay=weight_decay
        )
        self.set_up_scores(num_classes, unknown)
        self.example_input_array = whole.example_input_array


class _States(nn.Module):
    """A recurrent layer without its last states."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        states: Tensor = self.layer(inputs)[0]
        return states


def _vgg(whole: Classifier, num_classes: int, norm: Norm) -> ExitNet:
    """Cut a VGG behind its poolings, the first two stages in one block."""
    blocks: list[list[nn.Module]] = [[]]
    layers = list(whole.net)  # type: ignore[call-overload]
    for layer in layers[:-2]:
        blocks[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            blocks.append([])
    blocks = [[*blocks[0], *blocks[1]], *blocks[2:5]]
    exits = [*(_image_exit(channels, 512, num_classes, norm) for channels in (128, 256, 512)), _tail(layers[-2:])]
    return ExitNet([nn.Sequential(*block) for block in blocks], exits)


def _tail(layers: Sequence[nn.Module]) -> nn.Sequential:
    """Return the last layers of a network as its last exit."""
    return nn.Sequential(*layers)


def _pooled(channels: int, num_classes: int, side: int) -> nn.Sequential:
    """Return mean pooling with a linear layer."""
    linear = nn.Linear(channels * side * side, num_classes)
    return nn.Sequential(OrderedDict(pool=nn.AdaptiveAvgPool2d(side), flatten=nn.Flatten(), fc=linear))


def _image_exit(channels: int, last: int, num_classes: int, norm: Norm) -> nn.Sequential:
    """Return attention, separable convolutions up to `last` channels, mean pooling and a linear layer."""
    layers = OrderedDict[str, nn.Module](attention=_Attention(channels, norm))
    while channels < last:
        layers[f"separable{channels}"] = _separable(channels, 2 * channels, norm)
        channels *= 2
    layers |= _pooled(channels, num_classes, side=1).named_children()
    return nn.Sequential(layers)


def _separable(channels: int, out: int, norm: Norm) -> nn.Sequential:
    """Return two separable convolutions, of which the first one halves the sides."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, stride=2, padding=1, groups=channels, bias=False),
        nn.Conv2d(channels, channels, 1, bias=False),
        norm2d(norm, channels, _GROUPS),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False),
        nn.Conv2d(channels, out, 1, bias=False),
        norm2d(norm, out, _GROUPS),
        nn.ReLU(),
    )


class _Attention(nn.Module):
    """A gate between .5 and 1 on each value of a map, computed at half its sides."""

    def __init__(self, channels: int, norm: Norm) -> None:
        super().__init__()
        self.gate = nn.Sequential(_separable(channels, channels, norm), norm2d(norm, channels, _GROUPS), nn.ReLU())

    def forward(self, inputs: Tensor) -> Tensor:
        gate = F.interpolate(self.gate(inputs), size=inputs.shape[-2:], mode="bilinear", align_corners=False)
        return inputs * gate.sigmoid()
