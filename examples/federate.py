"""Train the classifier of plain.py in a federation of ten clients with different digits."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_sparsefl import FedAvg, FederatedTrainer
from lightning_sparsefl.data import Dirichlet, FederatedDataset


class Digits(L.LightningDataModule):
    def setup(self, stage=None):
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
        whole = TensorDataset(images, torch.tensor(digits.target))
        self.train, self.test = random_split(whole, [0.8, 0.2], torch.Generator().manual_seed(0))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=256)


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.body = torch.nn.Linear(16 * 4 * 4, 64)
        self.head = torch.nn.Linear(64, 10)
        self.test_acc = MulticlassAccuracy(10, average="micro")

    def forward(self, images):
        features = F.max_pool2d(F.relu(self.conv(images)), 2).flatten(1)
        return self.head(F.relu(self.body(features)))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.test_acc(self(batch[0]), batch[1])
        self.log("test_acc", self.test_acc)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)]


L.seed_everything(0)
digits = Digits()
digits.setup()
data = FederatedDataset(digits.train, digits.test, num_clients=10, partition=Dirichlet(0.3), batch_size=16)
trainer = FederatedTrainer(algorithm=FedAvg(), max_rounds=10, max_epochs=3, accelerator="cpu", devices=1, logger=False)
module = Net()
scores = trainer.fit(module, data)
print(f"test accuracy {scores['global/test_acc']:.3f}, of the worst client {scores['personal/test_acc_worst10']:.3f}")
