"""Networks for small images and for text, and the task module that trains them."""

from lightning_sparsefl.models.alexnet import AlexNet, AlexNet256
from lightning_sparsefl.models.cnn import MNISTNet, SmallCNN
from lightning_sparsefl.models.exits import (
    ExitClassifier,
    ExitLanguageLSTM,
    ExitMNISTNet,
    ExitNet,
    ExitResNet18,
    ExitVGG11,
    ExitVGG13,
    ExitVGG16,
)
from lightning_sparsefl.models.lenet import LeNet5
from lightning_sparsefl.models.lstm import LanguageLSTM
from lightning_sparsefl.models.mlp import MLP
from lightning_sparsefl.models.mobilenet import MobileNet
from lightning_sparsefl.models.preresnet import PreResNet18
from lightning_sparsefl.models.resnet import ResNet18
from lightning_sparsefl.models.task import Classifier
from lightning_sparsefl.models.vgg import VGG11, VGG13, VGG16

__all__ = [
    "MLP",
    "VGG11",
    "VGG13",
    "VGG16",
    "AlexNet",
    "AlexNet256",
    "Classifier",
    "ExitClassifier",
    "ExitLanguageLSTM",
    "ExitMNISTNet",
    "ExitNet",
    "ExitResNet18",
    "ExitVGG11",
    "ExitVGG13",
    "ExitVGG16",
    "LanguageLSTM",
    "LeNet5",
    "MNISTNet",
    "MobileNet",
    "PreResNet18",
    "ResNet18",
    "SmallCNN",
]
