"""Federate records of your own: each site is a client, and tests on its own patients.

The patients are those of scikit-learn's breast cancer data; the sites are made up, by the size of the tumour.
"""

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch.nn import functional as F
from torch.utils.data import Dataset

from lightning_sparsefl import FedBN, FederatedTrainer, Federation
from lightning_sparsefl.data import ByGroup, FederatedDataset


class Patients(Dataset):
    """Items are mappings, as in a data set of Hugging Face."""

    def __init__(self):
        cancer = load_breast_cancer()
        self.features = torch.tensor((cancer.data - cancer.data.mean(0)) / cancer.data.std(0), dtype=torch.float32)
        self.benign = torch.tensor(cancer.target)
        self.site = [f"site {int(rank) * 6 // len(self.benign)}" for rank in self.features[:, 0].argsort().argsort()]

    def __len__(self):
        return len(self.benign)

    def __getitem__(self, index):
        return {"features": self.features[index], "benign": self.benign[index], "site": self.site[index]}


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 16), torch.nn.ReLU())
        self.head = torch.nn.Linear(16, 2)

    def forward(self, features):
        return self.head(self.net(features))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch["features"]), batch["benign"])

    def test_step(self, batch, batch_idx):
        self.log("test_acc", (self(batch["features"]).argmax(1) == batch["benign"]).float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


L.seed_everything(0)
data = FederatedDataset(Patients(), partition=ByGroup("site"), test_fraction=0.25, batch_size=16, drop_last=True)
everyone = Federation(clients_per_round=data.num_clients)
trainer = FederatedTrainer(
    algorithm=FedBN(), federation=everyone, max_rounds=10, accelerator="cpu", devices=1, logger=False
)
scores = trainer.fit(Net(), data)
print(f"{data.num_clients} sites, test accuracy of their models {scores['personal/test_acc']:.3f}")
