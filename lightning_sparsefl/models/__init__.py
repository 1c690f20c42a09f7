"""Networks with group norm, and the task module that trains them."""

from lightning_sparsefl.models.cnn import SmallCNN
from lightning_sparsefl.models.lenet import LeNet5
from lightning_sparsefl.models.mlp import MLP
from lightning_sparsefl.models.resnet import ResNet18
from lightning_sparsefl.models.task import Classifier
from lightning_sparsefl.models.vgg import VGG11

__all__ = ["MLP", "VGG11", "Classifier", "LeNet5", "ResNet18", "SmallCNN"]
